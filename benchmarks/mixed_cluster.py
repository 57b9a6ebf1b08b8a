"""Compares forecasts of a mixed cluster with DistributedDataParallel on two kinds of CPU workers.

    sudo python benchmarks/mixed_cluster.py [--share 0.2] [--rate 1Gbit] [--repeat 5] [--json OUT]

One worker has a core to itself, the other a core of which it gets a share (a quota of its control group).
Each is in a network namespace of its own, joined by a link of limited rate (``foretrain/measure/links.py``),
and they sum up gradients over gloo. In turn, so that whatever else the machine does falls on all alike: steps
of each kind without synchronising, steps with an even split of the batch, and steps with a split by speed.
What a kind takes alone in a round is all that the forecasts of the round are told, as the clock of a device;
how long both take together, with either split, is forecast.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import multiprocessing
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).parent))
from foretrain.catalog import Catalog
from foretrain.evaluate import Scores
from foretrain.job import Job
from foretrain.measure.links import INTERFACE, Fabric, enter, link_rate
from foretrain.predictors import get

WIDTH, LAYERS = 768, 4
PERIOD_US = 5_000
GROUPS = Path("/sys/fs/cgroup/cpu")
KINDS = ("fast", "slow")


def build(batch: int, **_: Any) -> tuple[nn.Module, tuple[torch.Tensor, ...], Any]:
    """A perceptron, most of whose time are products."""
    layers = [one for _ in range(LAYERS) for one in (nn.Linear(WIDTH, WIDTH), nn.ReLU())]
    return nn.Sequential(*layers), (torch.zeros(batch, WIDTH),), lambda output: output.square().mean()


# What was measured


@contextlib.contextmanager
def quota(share: float) -> Iterator[Path]:
    """A control group (version 1) whose processes get this share of a core."""
    group = GROUPS / f"foretrain_{os.getpid()}"
    group.mkdir()
    try:
        (group / "cpu.cfs_period_us").write_text(str(PERIOD_US))
        (group / "cpu.cfs_quota_us").write_text(str(int(PERIOD_US * share)))
        yield group
    finally:
        group.rmdir()


def work(rank: int, namespace: str, group: Path, how: argparse.Namespace, results: Any) -> None:
    """One worker: in its namespace, on its core, the second with its share."""
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    enter(namespace)
    os.sched_setaffinity(0, {rank})
    if rank:
        (group / "cgroup.procs").write_text(str(os.getpid()))
    os.environ |= {"GLOO_SOCKET_IFNAME": INTERFACE, "MASTER_ADDR": "10.213.0.1", "MASTER_PORT": "29517"}
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=2)
    module, _, loss = build(1)
    model = DistributedDataParallel(module)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)

    def steps(batch: int, *, alone: bool) -> float:
        x = torch.randn(batch, WIDTH)
        times = []
        for _ in range(how.steps + 1):
            if not alone:
                dist.barrier()
            begin = time.perf_counter()
            with model.no_sync() if alone else contextlib.nullcontext():
                loss(model(x)).backward()
            optimizer.step()
            optimizer.zero_grad()
            times.append(time.perf_counter() - begin)
        return statistics.median(times[1:])

    def everyones(seconds: float) -> list[float]:
        both = [torch.zeros(1) for _ in range(2)]
        dist.all_gather(both, torch.tensor([seconds]))
        return [float(one) for one in both]

    found: list[dict[str, Any]] = []
    for _ in range(how.repeat):
        dist.barrier()
        alone = everyones(steps(how.batch, alone=True))
        even = max(everyones(steps(how.batch, alone=False)))
        first = round(2 * how.batch * alone[1] / sum(alone))
        parts = (first, 2 * how.batch - first)
        by_speed = max(everyones(steps(parts[rank], alone=False)))
        found.append({"alone": alone, "even": even, "speed": by_speed, "parts": parts})
    if rank == 0:
        results.put(found)
    dist.destroy_process_group()


def measure(how: argparse.Namespace) -> list[dict[str, Any]]:
    with quota(how.share) as group:
        return of_two_workers(work, group, how)  # type: ignore[no-any-return]


def of_two_workers(work: Callable[..., None], *args: Any) -> Any:
    """What one of two workers, in namespaces of their own, puts into the queue that each is given: ``work``
    takes its rank, the namespace, ``args`` (the last of which has the rate and the timeout) and the queue."""
    how = args[-1]
    context = multiprocessing.get_context("spawn")
    results = context.Queue()
    with Fabric(2, link_rate(how.rate)) as fabric:
        workers = [
            context.Process(target=work, args=(rank, name, *args, results))
            for rank, name in enumerate(fabric.namespaces)
        ]
        for worker in workers:
            worker.start()
        try:
            return results.get(timeout=how.timeout)
        finally:
            for worker in workers:
                worker.join(10)
                if worker.is_alive():
                    worker.kill()
                    worker.join()


# What is forecast


class Forecasts:
    """Of jobs on workers whose speed is set by the clock of their device."""

    def __init__(self, how: argparse.Namespace) -> None:
        self._how, self._predictor = how, get("deletepop")
        self._folder = tempfile.TemporaryDirectory()
        self._clocks: dict[str, float] = {}
        self._asked = 0

    def fit(self, kind: str, alone_s: float) -> None:
        """The clock with which a worker takes as long alone as was measured."""
        low, high = 1e7, 1e11
        for _ in range(24):
            middle = (low * high) ** 0.5
            self._clocks[kind] = middle
            if self.step_s([kind]) > alone_s:
                low = middle
            else:
                high = middle

    def step_s(self, kinds: list[str], balance: str = "even") -> float:
        self._asked += 1
        extra = Path(self._folder.name) / f"devices{self._asked}.toml"
        entries = (ENTRY.format(kind=kind, clock=clock) for kind, clock in self._clocks.items())
        extra.write_text("\n".join(entries))
        link = {"kind": "ethernet", "bandwidth": f"{link_rate(self._how.rate):.0f} B/s"}
        groups = [
            {"device": kind, "nodes": 1, "devices_per_node": 1, "cores_per_device": 1, "inter_node": link}
            for kind in kinds
        ]
        job = Job.read(
            {
                "model": {"source": "python", "name": f"{Path(__file__).name}:build"},
                "training": {"global_batch": self._how.batch * len(kinds), "optimizer": "sgd"},
                "cluster": {"groups": groups} if len(kinds) > 1 else groups[0],
                "plan": {"balance": balance} if len(kinds) > 1 else {},
            },
            catalog=Catalog.load(extra),
            base=Path(__file__).parent,
        )
        return float(self._predictor.predict(job).step_time_s.median)


ENTRY = """
[devices.{kind}]
vendor = "intel"
architecture = "x86-64"
year = 2023
vector_bits = 512
fma_units = 2
clock_hz = {clock}
memory_bytes = "16 GiB"
memory_bytes_per_s = "358 GB/s"
link = "loopback"
source = "fitted to steps of one worker"
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", maxsplit=1)[0])
    parser.add_argument("--share", type=float, default=0.2)
    parser.add_argument("--rate", default="1Gbit")
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--batch", type=int, default=192)
    parser.add_argument("--timeout", type=float, default=200)
    parser.add_argument("--json", type=Path)
    how = parser.parse_args()
    rounds, forecasts = measure(how), Forecasts(how)
    for one in rounds:
        for kind, seconds in zip(KINDS, one["alone"], strict=True):
            forecasts.fit(kind, seconds)
        one["forecast"] = {name: forecasts.step_s(list(KINDS), name) for name in ("even", "speed")}
        print("  ".join(f"{name} {_milliseconds(value)}" for name, value in one.items()))
    for name in ("even", "speed"):
        scores = Scores.of([one[name] for one in rounds], [one["forecast"][name] for one in rounds])
        print(f"{name:6} median error {scores.median_ape:.1%}, bias {scores.bias:+.1%}")
    measured = statistics.median(one["even"] / one["speed"] for one in rounds)
    forecast = statistics.median(one["forecast"]["even"] / one["forecast"]["speed"] for one in rounds)
    print(f"a split by speed is faster by: measured {measured:.2f}, forecast {forecast:.2f}")
    if how.json is not None:
        how.json.write_text(json.dumps(rounds, indent=1))


def _milliseconds(value: Any) -> str:
    if isinstance(value, dict):
        return " ".join(f"{name} {_milliseconds(one)}" for name, one in value.items())
    if isinstance(value, list | tuple):
        return " ".join(map(_milliseconds, value))
    return f"{value * 1e3:.0f} ms" if isinstance(value, float) else str(value)


if __name__ == "__main__":
    main()
