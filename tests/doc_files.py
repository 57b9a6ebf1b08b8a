"""Writes small stand-ins for the files that the commands of the documentation name: those that its reader has."""

from __future__ import annotations

import gzip
import json
import re
import shutil
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import zstandard

from doc_commands import ROOT
from made_up import dataset, made_up

MODELS = """
import torch

def make(batch):
    return torch.nn.Sequential(torch.nn.Linear(64, 32), torch.nn.ReLU(), torch.nn.Linear(32, 10)), torch.zeros(batch, 64)
"""
SCRIPT = """
import torch

model = torch.nn.Linear(64, 10)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
data = torch.utils.data.TensorDataset(torch.randn(512, 64), torch.randint(10, (512,)))
loader = torch.utils.data.DataLoader(data, batch_size=32)

def train_step(model, optimizer, x, y):
    loss = torch.nn.functional.cross_entropy(model(x), y)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()

if __name__ == "__main__":
    for x, y in loader:
        train_step(model, optimizer, x, y)
"""
LAUNCH = """
torchrun --nproc_per_node 8 --nnodes 1 pretrain_gpt.py --num-layers 2 --hidden-size 256 --ffn-hidden-size 512 \\
  --num-attention-heads 8 --seq-length 128 --max-position-embeddings 128 --vocab-size 1024 --swiglu \\
  --tensor-model-parallel-size 2 --sequence-parallel --micro-batch-size 1 --global-batch-size 32 --train-iters 100 --bf16
"""
TITAN = """
[model]
name = "llama3"
flavor = "debugmodel"
[training]
local_batch_size = 2
seq_len = 128
steps = 10
[parallelism]
tensor_parallel_degree = 2
"""
TITAN_PLAN = """
from torchtitan.trainer import Trainer

def my_plan():
    return Trainer.Config(parallelism=ParallelismConfig(tensor_parallel_degree=2))
"""
POLICY = """
from foretrain.scheduling import Policy

class Mine(Policy):
    name = "widest-first"

    def decide(self, cluster):
        for job in sorted(cluster.waiting.values(), key=lambda job: -job.gpus):
            if cluster.fits(job):
                cluster.start(job)
"""
DEEPSPEED = '{"train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 4, "bf16": {"enabled": true}, "zero_optimization": {"stage": 3}}'
RULES = """
kill = true
[queue.research]
gpus = 32
shares = 2
"""
SACCT = """JobID|JobName|User|Account|Partition|Submit|Start|End|State|Timelimit|ElapsedRaw|AllocTRES
1|train|ann|research|gpu|2026-01-01T00:00:00|2026-01-01T00:00:10|2026-01-01T02:00:10|COMPLETED|04:00:00|7200|gres/gpu=8
2|train|bob|research|gpu|2026-01-01T00:10:00|2026-01-01T00:10:10|2026-01-01T03:10:10|COMPLETED|05:00:00|10800|gres/gpu=64
3|look|ann|research|debug|2026-01-01T00:20:00|2026-01-01T00:20:10|2026-01-01T00:30:10|COMPLETED|01:00:00|600|gres/gpu=1
4|train|eve|vip|gpu|2026-01-01T00:30:00|2026-01-01T00:40:00|2026-01-01T01:40:00|COMPLETED|02:00:00|3600|gres/gpu=16
"""
TRACE = """name,arrival_s,gpus,duration_s,kind
a,0,2,4000,net
b,60,4,9000,net
c,120,8,500,net
d,180,1,7000,net
"""
STEPS = TRACE.replace("duration_s", "steps")
CLUSTER = '[cluster]\nnode = "dgx-h100"\nnodes = 4\n'
CANDIDATES = "machines,share,cost_s\n" + "".join(
    f"{machines},{share},{60 * share / machines + 5}\n"
    for machines in (1, 2, 4, 8, 16)
    for share in (0.25, 0.5, 1)
)
CAMPAIGN = """
models = ["model.py:make"]
workers = [1, 2]
batch_per_worker = [8, 16, 32, 64]
"""
GPU_JOB = """
[model]
source = "transformers"
task = "causal-lm"
config = { model_type = "llama", hidden_size = 256, intermediate_size = 512, num_hidden_layers = 2, num_attention_heads = 8, vocab_size = 1024, max_position_embeddings = 256 }
[training]
global_batch = 64
sequence = 128
precision = "bf16"
optimizer = "adamw"
steps = 1000
[cluster]
device = "h100"
devices_per_node = 4
[plan]
data = 4
"""
CPU_JOB = """
[model]
source = "torchvision"
name = "resnet18"
[training]
global_batch = 16
image = 32
classes = 10
samples = 128
epochs = 3
[cluster]
device = "cpu"
cores_per_device = 1
"""
ON_CPU = frozenset({"choose.md", "design.md", "measuring.md", "predictddl.md", "ray_models.md", "driple.md"})
"""Pages whose own job and runs are of CPU workers; those of the others are of GPUs."""


def job_of(model: dict[str, Any], batch: int, cluster: dict[str, Any], **training: Any) -> dict[str, Any]:
    return {"model": model, "training": {"global_batch": batch, **training}, "cluster": cluster}


def runs() -> list[dict[str, Any]]:
    """Of GPUs: two models whose time grows with the batch."""
    llama = tomllib.loads(GPU_JOB)
    made = {"source": "python", "name": "model.py:make"}
    jobs = [
        job
        for batch in (64, 128, 256, 512)
        for job in (
            job_of(made, batch, {"device": "h100"}),
            {**llama, "training": {**llama["training"], "global_batch": batch}},
        )
    ]
    return [
        {"job": job, "measured": {"step_time_s": 1e-3 + 2e-5 * job["training"]["global_batch"]}}
        for job in jobs
    ]


def blocks(page: str, language: str) -> list[str]:
    """The code of a page in a language."""
    text = (ROOT / "docs" / page).read_text(encoding="utf-8")
    return re.findall(rf"^```{language}\n(.*?)^```", text, re.MULTILINE | re.DOTALL)


def write_files(folder: Path, page: str) -> None:
    """All that commands may name, into a folder that is empty."""
    job = CPU_JOB if page in ON_CPU else GPU_JOB
    if page == "quickstart.md":
        job = blocks(page, "toml")[0]
    larger = job.replace("global_batch = 16", "global_batch = 32").replace(
        "global_batch = 64", "global_batch = 128"
    )
    texts = {
        "job.toml": job, "JOB.toml": job, "a.toml": job, "b.toml": larger, "plan_a.toml": job,
        "plan_b.toml": larger, "templates/net.toml": GPU_JOB, "jobs/net.toml": GPU_JOB, "model.py": MODELS,
        "train.py": SCRIPT, "run.sh": LAUNCH, "config.toml": TITAN, "plan.py": TITAN_PLAN,
        "ds_config.json": DEEPSPEED, "trace.csv": TRACE, "jobs.csv": STEPS,
        "cluster.toml": CLUSTER, "my.py": POLICY, "jobs.txt": SACCT, "rules.toml": RULES,
        "candidates.csv": CANDIDATES, "campaign.toml": CAMPAIGN, "C": "",
    }  # fmt: skip
    for name, text in texts.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text.lstrip("\n"), encoding="utf-8")
    write_lines(folder / "jobs.jsonl", [run["job"] for run in runs()])
    if page in ON_CPU:
        compressed = (ROOT / "data" / "ray_campaign.jsonl.zst").read_bytes()
        lines = zstandard.ZstdDecompressor().stream_reader(compressed).read().splitlines(keepends=True)
        (folder / "runs.jsonl").write_bytes(b"".join(line for line in lines if b'"resnet18"' in line))
    else:
        write_lines(folder / "runs.jsonl", runs())
    for name in ("RUNS", "RUNS.jsonl", "a.jsonl", "b.jsonl", "more.jsonl", "runs/a.jsonl"):
        (folder / name).parent.mkdir(exist_ok=True)
        shutil.copy(folder / "runs.jsonl", folder / name)
    (folder / "philly.csv.gz").write_bytes(gzip.compress(TRACE.encode()))
    dataset(folder / "ops.parquet", made_up(count=5))
    shutil.copy(ROOT / "data" / "hosts" / "h200_1.json", folder / "host.json")
    (folder / "data").symlink_to(ROOT / "data")
    (folder / "examples").symlink_to(ROOT / "examples")
    if page == "extending.md":
        (folder / "mine.toml").write_text(
            next(block for block in blocks(page, "toml") if "[devices" in block)
        )
        code = blocks(page, "python")
        (folder / "mine.py").write_text(
            "\n".join(block for block in code if "class " in block and "torch" not in block)
        )
        (folder / "model.py").write_text(next(block for block in code if "torch" in block))


def write_lines(path: Path, documents: Sequence[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(document) + "\n" for document in documents), encoding="utf-8")
