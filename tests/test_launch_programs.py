"""Programs that are put beside launch files: they train, measure, and hold the forecast against it."""

from __future__ import annotations

import importlib.util
import json
import os
import runpy
import socket
import subprocess
import sys
import types
from pathlib import Path
from typing import Any

import pytest

import foretrain
from commands import PATIENCE_S
from foretrain.capture.sources.zoo import quiet_zoo_import
from foretrain.estimate import Estimate
from foretrain.job import Job
from foretrain.launchers.writing import Expected, write_launch
from foretrain.launchers.writing.programs import benchmark
from foretrain.run import Run
from launch_plans import EXPECTED, planned

pytestmark = pytest.mark.xdist_group(
    "launch_programs"
)  # one after the other: each starts processes of its own
torch = pytest.importorskip("torch", reason="torch is not installed")

NET = """\
import torch
from torch import nn

class Layer(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x):
        return x + self.fc2(torch.relu(self.fc1(x)))

def net(batch, width=16):
    layers = nn.Sequential(*[Layer(width) for _ in range(3)])
    return nn.Sequential(layers, nn.Linear(width, 10)), (torch.randn(batch, width),)
"""
LLAMA = {
    "source": "transformers", "task": "causal-lm",
    "config": {
        "model_type": "llama", "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "intermediate_size": 128, "vocab_size": 256, "max_position_embeddings": 64,
    },
}  # fmt: skip
TWO_CORES = {"device": "cpu", "cores_per_device": 1, "devices_per_node": 2}
ANY_TIME = Expected(step_time_s=Estimate(0.1, 1e-9, 1e9), peak_memory_bytes=Estimate(1e9, 9e8, 1.1e9))
"""A forecast that holds on however busy a machine."""

WITHOUT_LIBRARIES = """\
from importlib.machinery import PathFinder

find = PathFinder.find_spec
PathFinder.find_spec = lambda name, *rest: None if name in ("torchvision", "timm") else find(name, *rest)
"""
"""Hides libraries that transformers and accelerate import where they are there, and that take seconds."""


def job_of(model: dict[str, Any], training: dict[str, Any], plan: dict[str, Any], folder: Path) -> Job:
    tables = {"model": model, "training": {"global_batch": 8, **training}, "cluster": TWO_CORES, "plan": plan}
    return Job.read(tables, base=folder)


def started(folder: Path, *words: str) -> str:
    """What a command prints, run as a user would, with this tree and the environment of these tests."""
    (folder / "sitecustomize.py").write_text(WITHOUT_LIBRARIES)
    tree = Path(foretrain.__file__).parents[1]
    environment = {
        **os.environ,
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": os.pathsep.join([str(folder), str(tree)]),
        "OMP_NUM_THREADS": "1",
        "MASTER_PORT": str(_free_port()),
        "TQDM_DISABLE": "1",
    }
    done = subprocess.run(
        words, env=environment, capture_output=True, text=True, timeout=PATIENCE_S, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def _free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


TRAIN_ALL = """\
import sys
from pathlib import Path

import torch.distributed as dist
import written_train as written
from step_times import recorder_of

dist.init_process_group("gloo")
for folder in sys.argv[3:]:
    job, runs = Path(folder, "job.toml"), Path(folder, "runs.jsonl")
    recorder = recorder_of(runs, job) if Path(folder).name == "llama" else None
    if recorder is not None:
        recorder.begin()
    if dist.get_rank() == 0:
        print(f"== {Path(folder).name}", flush=True)
    written.train(written.Job.load(job), steps=5, print_every=1, recorder=recorder)
    if recorder is not None:
        recorder.end()
dist.destroy_process_group()
"""
"""In the place of train.py: what it does, for several jobs, as processes take seconds to start."""

OWN = {"source": "python", "name": "net.py:net", "args": {"width": 8}}
PLANS: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "ddp": (OWN, {"precision": "amp-bf16", "optimizer": "adamw-fused"}, {"micro_batch": 2}),
    "zero1": (OWN, {"optimizer": "adam"}, {"shard": "zero1", "recompute": "full"}),
    "scaled": (OWN, {"precision": "amp-fp16", "optimizer": "adamw"}, {}),
    "fsdp": (OWN, {"precision": "amp-bf16", "optimizer": "adamw-fused", "checkpoint_every": 2},
             {"shard": "zero3", "micro_batch": 2, "recompute": "operators", "reduce_precision": "fp32"}),
    "kept": (OWN, {"precision": "bf16", "optimizer": "sgd"}, {"shard": "zero3", "reshard": False}),
    "hsdp": (OWN, {"precision": "bf16", "master_weights": True, "optimizer": "adamw"}, {"shard": "zero3", "replicate": 2}),
    "tensor": (OWN, {"optimizer": "sgd"}, {"tensor": 2, "tensor_plan": {"*.fc1": "column", "*.fc2": "row"}}),
    "llama": (LLAMA, {"sequence": 16, "precision": "amp-bf16", "optimizer": "adamw-fused"},
              {"shard": "zero3", "micro_batch": 2, "recompute": "full", "recompute_every": 2}),
    "llama-tensor": (LLAMA, {"sequence": 16, "optimizer": "adamw"}, {"tensor": 2, "shard": "zero3"}),
}  # fmt: skip


def test_torchrun_trains_by_any_plan(tmp_path: Path) -> None:
    pytest.importorskip("transformers", reason="transformers is not installed")
    (tmp_path / "net.py").write_text(NET)
    jobs = {name: job_of(*PLANS[name], tmp_path) for name in PLANS}
    for name, job in jobs.items():
        write_launch(job, tmp_path / name, expected=EXPECTED)
    first = tmp_path / "ddp"
    (first / "train.py").rename(first / "written_train.py")
    (first / "train.py").write_text(TRAIN_ALL)
    printed = started(tmp_path, "bash", str(first / "launch.sh"), *(str(tmp_path / name) for name in PLANS))
    trained = dict(part.split("\n", 1) for part in printed.split("== ")[1:])
    assert list(trained) == list(PLANS)
    for name, lines in trained.items():
        assert len(benchmark.of_program(lines.split("\n"), {}, 2).times_s) == 5
        losses = [float(line.rpartition(" ")[2]) for line in lines.split("\n") if line.startswith("step ")]
        assert losses[-1] < losses[0], name  # the same batch again and again is learned
    assert (tmp_path / "fsdp/checkpoints/step-2/.metadata").is_file()
    ((_, run),) = foretrain.read_runs(tmp_path / "llama/runs.jsonl")
    assert run.job.plan == jobs["llama"].plan
    assert run.measured["samples_per_s"] == pytest.approx(8 / run.measured["step_time_s"])
    assert run.provenance["timed_steps"] == 2  # of five, three to warm up


def test_a_benchmark_of_accelerate_tells_whether_the_forecast_held(tmp_path: Path) -> None:
    pytest.importorskip("transformers", reason="transformers is not installed")
    pytest.importorskip("accelerate", reason="accelerate is not installed")
    training = {"sequence": 16, "precision": "amp-bf16", "optimizer": "adamw-fused"}
    job = job_of(LLAMA, training, {"micro_batch": 2, "recompute": "full"}, tmp_path)
    write_launch(job, tmp_path / "plan", expected=ANY_TIME, target="accelerate")
    printed = started(tmp_path, sys.executable, str(tmp_path / "plan/benchmark.py"), "--steps", "5")
    last = printed.strip().split("\n")[-1]
    assert last.startswith("foretrain: step time held: ")
    assert last.endswith("peak memory was not measured; run in runs.jsonl")
    ((_, run),) = foretrain.read_runs(tmp_path / "plan/runs.jsonl")
    assert run.job.plan == job.plan
    assert run.provenance["framework"].startswith("transformers ")
    told = next(line for line in printed.split("\n") if "train_runtime" in line)
    figures = json.loads(told[told.index("{") : told.rindex("}") + 1].replace("'", '"'))
    trained = float(figures["train_samples_per_second"]) * float(figures["train_runtime"])
    assert trained == pytest.approx(40, rel=0.05)  # two processes, each two micro-batches of two, five times


def test_adapters_are_made_by_peft() -> None:
    quiet_zoo_import()
    pytest.importorskip("peft", reason="peft is not installed")
    from foretrain.launchers.writing.programs.trainer import adapted

    model = torch.nn.Sequential(torch.nn.Linear(8, 8))
    made = adapted(model, {"rank": 2, "targets": ["0"]})
    assert sum(one.numel() for one in made.parameters() if one.requires_grad) == 2 * 2 * 8


# What a benchmark reads in logs

MEGATRON_LOG = """\
 [2026-11-17 10:00:00] iteration        1/      20 | consumed samples: 8 | elapsed time per iteration (ms): 9000.0 | loss: 1
[Rank 0] (after 1 iterations) memory (MB) | allocated: 100.00 | max allocated: 1024.00 | reserved: 1500.00 | max reserved: 2048.00
[Rank 4] (after 1 iterations) memory (MB) | allocated: 100.00 | max allocated: 1536.00 | reserved: 1500.00 | max reserved: 2000.00
""" + "".join(
    f" iteration {number}/ 20 | elapsed time per iteration (ms): {400 + number}.0 | throughput per GPU\n"
    for number in range(2, 8)
)  # fmt: skip
TITAN_LOG = "".join(
    f"[rank0]:\x1b[31mstep: {number:2}  \x1b[32mloss:  8.1  \x1b[38mmemory: 12.50GiB(15.6%)  \x1b[34mtps: 1,024  \x1b[0m\n"
    for number in range(1, 7)
)


def test_logs_of_frameworks_become_runs(tmp_path: Path) -> None:
    for name, log, step_s in (("megatron-dense", MEGATRON_LOG, 0.4055), ("torchtitan-fsdp", TITAN_LOG, None)):
        job, _ = planned(name, tmp_path)
        write_launch(job, tmp_path / name, expected=EXPECTED)
        launch = json.loads((tmp_path / name / "launch.json").read_text())
        tables = benchmark.load_job(tmp_path / name)
        figures = benchmark.READERS[launch["target"]](log.split("\n"), tables, launch["workers"])
        run = Run.read(benchmark.run_of(tables, figures, launch), base=tmp_path / name)
        training = job.workload.training
        expected_s = step_s or training.global_batch * (training.sequence or 0) / (
            1024 * job.cluster.world_size
        )
        assert run.measured["step_time_s"] == pytest.approx(expected_s)
        assert run.job.workload.training.allocator == "expandable_segments:True"
        assert run.measured["reserved_memory_bytes"] == {"megatron-dense": 2 * 2**30}.get(name, 12.5 * 2**30)
        assert run.measured.get("peak_memory_bytes") == {"megatron-dense": 1.5 * 2**30}.get(name)


def test_a_verdict_is_one_line() -> None:
    forecast = {
        "step_time_s": {"median": 0.4, "low": 0.35, "high": 0.45},
        "peak_memory_bytes": {"median": 2.0**30, "low": 0.9 * 2**30, "high": 1.1 * 2**30},
        "reserved_memory_bytes": None,
    }
    held = benchmark.verdict({"step_time_s": 0.42, "peak_memory_bytes": 1.2 * 2**30}, forecast)
    assert held == (
        "step time held: 420 ms, forecast 400 ms (+5.0 %), interval 350 ms to 450 ms; "
        "peak memory did not hold: 1.20 GiB, forecast 1.00 GiB (+20.0 %), interval 0.90 GiB to 1.10 GiB"
    )
    missed = benchmark.verdict({"step_time_s": 1.0}, forecast)
    assert missed.startswith("step time did not hold: 1.000 s, forecast 400 ms (+150.0 %)")


def test_a_benchmark_limits_the_steps_of_each_launcher(tmp_path: Path) -> None:
    runs = tmp_path / "runs.jsonl"
    assert benchmark.limits("megatron", 20, runs)[:2] == ["--train-iters", "20"]
    assert benchmark.limits("torchtitan", 20, runs)[:2] == ["--training.steps", "20"]
    assert benchmark.limits("fsdp2", 20, runs) == ["--steps", "20", "--runs", str(runs)]


def test_a_benchmark_without_foretrain_times_steps_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    job, _ = planned("fsdp2-hsdp", tmp_path)
    write_launch(job, tmp_path / "plan", expected=EXPECTED)
    printed = "".join(f"step {number} of 5: 1.{number}00000 s, loss 2.0\n" for number in range(1, 6))
    lines = [
        *printed.splitlines(keepends=True),
        "peak memory: 61000000000 bytes allocated, 64000000000 bytes reserved\n",
    ]
    (tmp_path / "plan/launch.sh").write_text(f"printf '%s' '{''.join(lines)}'\n")
    monkeypatch.setattr(sys, "argv", ["benchmark.py", "--steps", "5"])
    runpy.run_path(str(tmp_path / "plan/benchmark.py"), run_name="__main__")
    ((_, run),) = foretrain.read_runs(tmp_path / "plan/runs.jsonl")
    assert run.measured["step_time_s"] == pytest.approx(1.45)
    assert run.measured["reserved_memory_bytes"] == 64e9
    assert run.job.plan == job.plan
    last = capsys.readouterr().out.strip().split("\n")[-1]
    assert "step time did not hold: 1.450 s" in last
    assert "peak memory held" in last


# Ray


def test_ray_is_asked_for_the_workers_of_the_plan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A cluster takes three quarters of a minute to start, train and stop; what it is told is checked here."""
    asked: dict[str, Any] = {}

    def noted(name: str) -> Any:
        return lambda *words, **named: asked.setdefault(name, {"words": words, **named})

    modules = {"ray": {"init": noted("init")},
               "ray.train": {name: noted(name) for name in ("FailureConfig", "RunConfig", "ScalingConfig")},
               "ray.train.torch": {"TorchTrainer": noted("TorchTrainer"), "get_device": lambda: "cpu"}}  # fmt: skip
    for name, members in modules.items():
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
        vars(sys.modules[name]).update(members)
    job, _ = planned("fsdp2-hsdp", tmp_path)
    write_launch(job, tmp_path / "plan", expected=EXPECTED)
    spec = importlib.util.spec_from_file_location("ray_train_of_plan", tmp_path / "plan/ray_train.py")
    assert spec is not None
    assert spec.loader is not None
    program = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(program)
    launch = json.loads((tmp_path / "plan/launch.json").read_text())
    program.trainer(launch, 7)
    assert asked["ScalingConfig"]["num_workers"] == 16
    assert asked["ScalingConfig"]["use_gpu"] is True
    assert asked["ScalingConfig"]["resources_per_worker"] == {"GPU": 1}
    assert asked["ScalingConfig"]["accelerator_type"] == "H100"
    assert asked["TorchTrainer"]["train_loop_config"]["steps"] == 7
    trained: dict[str, Any] = {}
    stand_in = types.SimpleNamespace(
        __file__=str(tmp_path / "plan/train.py"),
        Job=types.SimpleNamespace(load=Path.name.fget),  # type: ignore[attr-defined]
        train=lambda job, **options: trained.update(job=job, **options),
    )
    monkeypatch.setitem(sys.modules, "train", stand_in)
    monkeypatch.setattr(os, "environ", dict(os.environ))
    monkeypatch.chdir(tmp_path)
    program.train_worker({**launch, "steps": 7})
    assert trained == {"job": "job.toml", "device": "cpu", "steps": 7}
