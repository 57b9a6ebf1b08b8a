"""Describes the tasks of a campaign's workers and sums their reports up to a Run, without torch."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import platform
import statistics
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from foretrain.errors import invalid
from foretrain.job import Job
from foretrain.measure.resources import (
    NETWORK_PEAKS,
    PERIOD_S,
    RESOURCES,
    THRESHOLD,
    Series,
    mean_figures,
    twelve_figures,
)

Sync = Literal["allreduce", "ps"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Protocol:
    """Says how a cell is measured: warm-up steps, then timed steps for about ``seconds``, resources
    sampled."""

    warmup: int = 2
    seconds: float = 2.0
    min_steps: int = 3
    max_steps: int = 2000
    epoch_limit_s: float = 20.0
    """An epoch that is expected to last no longer is timed whole; a longer one is extrapolated from the
    steps."""
    period_s: float = PERIOD_S
    threshold: float = THRESHOLD
    points: int = 120
    """Samples of the series that are kept."""

    def __post_init__(self) -> None:
        for name in ("warmup", "min_steps", "max_steps", "points"):
            if getattr(self, name) < 1:
                raise invalid(name, getattr(self, name), "1 or more")
        for name in ("seconds", "epoch_limit_s"):
            if not 0 <= getattr(self, name) < math.inf:
                raise invalid(name, getattr(self, name), "a time of 0 or more")
        if self.period_s <= 0:
            raise invalid("period", self.period_s, "a time greater than zero")
        if not 0 <= self.threshold < 1:
            raise invalid("threshold", self.threshold, "a share of the maximum, from 0 to less than 1")

    def steps(self, step_time_s: float) -> int:
        """Count the steps of this length to time."""
        return min(self.max_steps, max(self.min_steps, math.ceil(self.seconds / max(step_time_s, 1e-6))))


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerTask:
    """One cell of a campaign, as every process of it gets it."""

    job: Mapping[str, Any]
    base: str
    cores: int
    interface: str = "lo"
    timeout_s: float = 600.0
    protocol: Protocol = dataclasses.field(default_factory=Protocol)

    def read_job(self) -> Job:
        return Job.read(self.job, base=Path(self.base))

    @property
    def workers(self) -> int:
        return int(self.job["plan"]["data"])

    @property
    def servers(self) -> int:
        return int(self.job["plan"].get("servers", 0))

    @property
    def processes(self) -> int:
        """Workers, then the servers of a parameter-server cell."""
        return self.workers + self.servers

    def to_json(self) -> str:
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def from_json(cls, text: str) -> WorkerTask:
        data = json.loads(text)
        return cls(**{**data, "protocol": Protocol(**data["protocol"])})


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """Holds what one process measured; a server has no step times of its own."""

    role: Literal["worker", "server"]
    step_times_s: Sequence[float]
    without_sync_s: Sequence[float]
    epoch_time_s: float | None
    series: Series
    cores: Sequence[int]
    peak_rss_bytes: int
    peak_memory_bytes: int | None
    memory_limit_bytes: float
    parameters: int
    interface: str
    machine: str
    versions: Mapping[str, str]
    startup_time_s: float | None = None
    """From the start of the process until steps run at their usual pace, beyond as many usual ones; None
    where it was forked ready, or had run others before."""


def shards(sizes: Sequence[int], servers: int) -> list[list[int]]:
    """Parameters by index for each server, whole tensors, largest first to the server with the least.

    >>> shards([10, 1, 1, 8], 2)
    [[0], [1, 2, 3]]
    """
    if not 1 <= servers <= max(1, len(sizes)):
        raise invalid("servers", servers, f"from 1 to the {len(sizes)} trainable tensors of the model")
    parts: list[list[int]] = [[] for _ in range(servers)]
    loads = [0] * servers
    for index in sorted(range(len(sizes)), key=lambda i: (-sizes[i], i)):
        least = loads.index(min(loads))
        parts[least].append(index)
        loads[least] += sizes[index]
    return [sorted(part) for part in parts]


def summarize(task: WorkerTask, reports: Sequence[Report]) -> dict[str, Any]:
    """The ``measured`` and ``provenance`` of the run: times of the slowest worker, mean use of resources."""
    workers = [report for report in reports if report.role == "worker"]
    return {"measured": _measured(task, workers), "provenance": _provenance(task, workers, reports)}


def _measured(task: WorkerTask, workers: Sequence[Report]) -> dict[str, float]:
    training = task.read_job().workload.training
    step = max(statistics.median(worker.step_times_s) for worker in workers)
    measured = {"step_time_s": step, "samples_per_s": training.global_batch / step}
    if training.sequence is not None:
        measured["tokens_per_s"] = training.global_batch * training.sequence / step
    if all(worker.without_sync_s for worker in workers):
        alone_s = [statistics.median(worker.without_sync_s) for worker in workers]
        measured["step_time_without_sync_s"] = max(alone_s)
    if (steps := training.steps_per_epoch) is not None:
        timed = [worker.epoch_time_s for worker in workers if worker.epoch_time_s is not None]
        extrapolated = [steps * statistics.fmean(worker.step_times_s) for worker in workers]
        measured["epoch_time_s"] = max(timed or extrapolated)
    starts = [worker.startup_time_s for worker in workers if worker.startup_time_s is not None]
    if len(starts) == len(workers):
        measured["startup_time_s"] = max(starts)
    names = ("device_utilization", "memory_utilization", "network_rx_bytes_per_s", "network_tx_bytes_per_s")
    for quantity, resource in zip(names, RESOURCES, strict=True):
        mean = statistics.fmean(worker.series.mean(resource) for worker in workers)
        measured[quantity] = mean / (_sharers(task, workers) if resource.startswith("network") else 1)
    peaks = [worker.peak_memory_bytes for worker in workers if worker.peak_memory_bytes is not None]
    if peaks:
        measured["peak_memory_bytes"] = max(peaks)
    return measured


def _provenance(task: WorkerTask, workers: Sequence[Report], reports: Sequence[Report]) -> dict[str, Any]:
    times = [time for worker in workers for time in worker.step_times_s]
    job, timed_steps = task.read_job(), len(workers[0].step_times_s)
    about: dict[str, Any] = {
        "source": "foretrain measure campaign",
        "label": job.workload.model.label,
        "sync": "ps" if task.servers else "allreduce",
        "cores_per_worker": task.cores,
        "collectives": "gloo" if job.cluster.device.is_cpu or task.servers else "nccl",
        "host": host(),
        "parameters": workers[0].parameters,
        "steps": timed_steps,
        "step_time_min_s": min(times),
        "step_time_max_s": max(times),
        "peak_rss_bytes": max(worker.peak_rss_bytes for worker in workers),
        "oversubscribed": _oversubscribed(task, reports),
        "machines": len({report.machine for report in reports}),
        **workers[0].versions,
    }
    if (steps := job.workload.training.steps_per_epoch) is not None:
        timed, from_steps = f"timed: {steps} steps", f"extrapolated to {steps} steps from {timed_steps}"
        about["epoch"] = from_steps if workers[0].epoch_time_s is None else timed
    return {**about, "resources": _resources(task, reports)}


def _resources(task: WorkerTask, reports: Sequence[Report]) -> dict[str, Any]:
    """The twelve figures as means over workers, and over servers, and a series of the first of each.

    Peaks of the network are those of one worker; the series, and the servers' figures, are the interface's.
    """
    protocol, interface = task.protocol, reports[0].interface
    everyone = "all processes of the machine, each byte as received and as sent"
    workers = [report for report in reports if report.role == "worker"]
    shared_by = _sharers(task, workers)
    resources = {
        "period_s": protocol.period_s,
        "threshold": protocol.threshold,
        "interface": interface,
        "interface_counts": everyone if interface == "lo" else "what uses this interface",
        "network_shared_by": shared_by,
        "memory_limit_bytes": reports[0].memory_limit_bytes,
    }
    for role, prefix in (("worker", ""), ("server", "server_")):
        series = [report.series for report in reports if report.role == role]
        if series:
            figures = mean_figures([twelve_figures(one, protocol.threshold) for one in series])
            if role == "worker":
                figures |= {name: figures[name] / shared_by for name in NETWORK_PEAKS}
            resources[f"{prefix}figures"] = figures
            resources[f"{prefix}series"] = series[0].downsampled(protocol.points).to_dict()
    return resources


def _sharers(task: WorkerTask, workers: Sequence[Report]) -> int:
    """Workers whose bytes a worker's interface counts together: those of its node, or on loopback all, and
    there each exchange with a server both as the worker's and as the server's."""
    if workers[0].interface != "lo":
        return task.read_job().cluster.devices_per_node
    return len(workers) * (2 if task.servers else 1)


def _oversubscribed(task: WorkerTask, reports: Sequence[Report]) -> bool:
    """Whether two processes share a core of a machine, or one has fewer cores than it should."""
    used = [(report.machine, core) for report in reports for core in report.cores]
    return len(used) != len(set(used)) or any(len(report.cores) < task.cores for report in reports)


_PLAIN: Mapping[str, Mapping[str, Any]] = {
    "training": {
        "compile": False, "master_weights": False, "framework": "pytorch", "loader_rate": None,
        "evaluate_every": None, "checkpoint_every": None,
    },
    "plan": {
        "tensor": 1, "pipeline": 1, "context": 1, "expert": 1, "shard": "none", "recompute": "none",
        "offload": False, "asynchronous": False,
    },
    "cluster": {"servers": None},
}  # fmt: skip
"""What a job has where it has nothing that no measurement carries out."""


def not_carried_out(job: Job, *, done: Collection[str] = (), **more: Mapping[str, Any]) -> str | None:
    """The first option of a job that a measurement does not carry out, so that its run would claim it;
    ``done`` names those that this one does, ``more`` has by section what it does not do either."""
    document = job.to_dict()
    for section, noun in (("plan", job.plan), ("training", job.workload.training), ("cluster", job.cluster)):
        for name, plain in {**_PLAIN[section], **more.get(section, {})}.items():
            if name not in done and getattr(noun, name) != plain:
                return f"{section}.{name}: {document[section][name]!r}"
    return None


def host() -> str:
    """The machine in words: its processor and cores."""
    return f"{processor()}, {os.cpu_count()} cores"


def processor() -> str:
    """The name that the processor gives itself."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()
