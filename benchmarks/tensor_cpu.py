"""Compares forecasts of tensor parallelism with torch's own on two CPU workers: bytes sent and step times.

    sudo python benchmarks/tensor_cpu.py [--rate 1Gbit] [--repeat 3] [--json OUT]

A small Llama of transformers is cut by torch's ``parallelize_module`` (DTensor) over two processes, each on a
core and in a network namespace of its own, joined by a link of limited rate; they talk over gloo. Bytes are
those that the link's counters saw, TCP's own among them (about 1 %). In turn: the whole model on both workers
at once, each by itself, then the model cut, in inference (logits gathered) and in training (embedding and
logits whole on both). What the whole model takes is all that the forecast is told, as the clock of a device;
times need an idle machine, bytes do not.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from foretrain.capture.sources.zoo import quiet_zoo_import
from foretrain.catalog import Catalog
from foretrain.job import Job
from foretrain.measure.links import INTERFACE, enter, link_rate
from foretrain.predictors import get
from mixed_cluster import ENTRY, of_two_workers

BATCH, SEQUENCE = 2, 128
CONFIG = {
    "model_type": "llama", "hidden_size": 512, "intermediate_size": 1408, "num_hidden_layers": 4,
    "num_attention_heads": 8, "num_key_value_heads": 4, "vocab_size": 4096, "tie_word_embeddings": False,
    "max_position_embeddings": 256,
}  # fmt: skip
WHOLE = {"model.embed_tokens": "replicate", "lm_head": "replicate"}


# What was measured


def model() -> Any:
    quiet_zoo_import()
    import transformers

    settings = {name: value for name, value in CONFIG.items() if name != "model_type"}
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**settings, use_cache=False))


def cut(module: Any, mode: str) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    columns = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.gate_proj", "mlp.up_proj")
    rows = ("self_attn.o_proj", "mlp.down_proj")
    plan: dict[str, Any] = {f"model.layers.*.{name}": ColwiseParallel() for name in columns}
    plan |= {f"model.layers.*.{name}": RowwiseParallel() for name in rows}
    if mode == "infer":
        plan["model.embed_tokens"] = RowwiseParallel(input_layouts=Replicate())
        plan["lm_head"] = ColwiseParallel(output_layouts=Replicate())
    parallelize_module(module, init_device_mesh("cpu", (2,)), plan)


def step_of(module: Any, mode: str) -> Callable[[], None]:
    ids = torch.zeros(BATCH, SEQUENCE, dtype=torch.long)
    if mode == "infer":
        module.eval()

        def infer() -> None:
            with torch.no_grad():
                module(input_ids=ids)

        return infer
    optimizer = torch.optim.SGD(module.parameters(), lr=1e-3, momentum=0.9, foreach=False)

    def train() -> None:
        module(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return train


def work(rank: int, namespace: str, how: argparse.Namespace, results: Any) -> None:
    import torch.distributed as dist

    enter(namespace)
    os.sched_setaffinity(0, {rank})
    os.environ |= {"GLOO_SOCKET_IFNAME": INTERFACE, "MASTER_ADDR": "10.213.0.1", "MASTER_PORT": "29518"}
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=2)
    steps = {}
    for mode in ("infer", "train"):
        whole, part = model(), model()
        cut(part, mode)
        steps[mode] = (step_of(whole, mode), step_of(part, mode))
    found: dict[str, list[list[float]]] = {mode: [] for mode in steps}
    for _ in range(how.repeat):
        for mode, (alone, together) in steps.items():
            alone_s, _ = _timed(alone, how.steps)
            dist.barrier()
            together_s, sent = _timed(together, how.steps)
            both = [torch.zeros(3) for _ in range(2)]
            dist.all_gather(both, torch.tensor([alone_s, together_s, sent]))
            found[mode].append(torch.stack(both).amax(0).tolist())
    if rank == 0:
        results.put(found)
    dist.destroy_process_group()


def _timed(step: Callable[[], None], steps: int) -> tuple[float, float]:
    """The least time of a step, as whatever else the machine does only adds to it, and the bytes that each
    sent."""
    step()
    times, before = [], _sent_bytes()
    for _ in range(steps):
        begin = time.perf_counter()
        step()
        times.append(time.perf_counter() - begin)
    return min(times), (_sent_bytes() - before) / steps


def _sent_bytes() -> int:
    """Of this namespace: /proc shows its links, /sys those of the machine."""
    for line in Path("/proc/self/net/dev").read_text().splitlines():
        name, _, figures = line.partition(":")
        if name.strip() == INTERFACE:
            return int(figures.split()[8])
    raise RuntimeError(f"there is no {INTERFACE} in this namespace")


def measure(how: argparse.Namespace) -> dict[str, list[list[float]]]:
    return of_two_workers(work, how)  # type: ignore[no-any-return]


# What is forecast


def forecast(how: argparse.Namespace, mode: str, clock: float, workers: int, folder: Path) -> Any:
    extra = folder / f"{mode}{workers}at{clock:.0f}.toml"
    extra.write_text(ENTRY.format(kind="worker", clock=clock))
    link = {"kind": "ethernet", "bandwidth": f"{link_rate(how.rate):.0f} B/s"}
    plan = {"tensor": workers} | ({"tensor_plan": WHOLE} if mode == "train" and workers > 1 else {})
    job = Job.read(
        {
            "model": {"source": "transformers", "task": "causal-lm", "config": CONFIG},
            "training": {"mode": mode, "global_batch": BATCH, "sequence": SEQUENCE, "optimizer": "sgd"},
            "cluster": {"device": "worker", "nodes": workers, "devices_per_node": 1, "cores_per_device": 1,
                        "inter_node": link},
            "plan": plan,
        },
        catalog=Catalog.load(extra),
    )  # fmt: skip
    return get("deletepop").step(job)  # type: ignore[attr-defined]


def fitted_clock(how: argparse.Namespace, mode: str, alone_s: float, folder: Path) -> float:
    """The clock with which the whole model takes as long as it did."""
    low, high = 1e7, 1e11
    for _ in range(20):
        middle = (low * high) ** 0.5
        if forecast(how, mode, middle, 1, folder).time_s > alone_s:
            low = middle
        else:
            high = middle
    return float((low * high) ** 0.5)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", maxsplit=1)[0])
    parser.add_argument("--rate", default="1Gbit")
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--timeout", type=float, default=200)
    parser.add_argument("--json", type=Path)
    how = parser.parse_args()
    found = measure(how)
    with tempfile.TemporaryDirectory() as name:
        for mode, rounds in found.items():
            alone_s, together_s = (min(one[i] for one in rounds) for i in range(2))
            sent = statistics.median(one[2] for one in rounds)
            step = forecast(how, mode, fitted_clock(how, mode, alone_s, Path(name)), 2, Path(name))
            sends = sum(step.sent.values())
            print(
                f"{mode}: whole {alone_s * 1e3:.0f} ms; cut in two {together_s * 1e3:.0f} ms, forecast "
                f"{step.time_s * 1e3:.0f} ms ({step.time_s / together_s - 1:+.1%}); a rank sends "
                f"{sent / 1e6:.2f} MB, forecast {sends / 1e6:.2f} MB ({sends / sent - 1:+.1%})"
            )
    if how.json is not None:
        how.json.write_text(json.dumps(found))


if __name__ == "__main__":
    main()
