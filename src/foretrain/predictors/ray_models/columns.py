"""Describes jobs of one model by the columns that regressors over scales see, our own forecast among them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from foretrain.capture import capture_job
from foretrain.errors import ForetrainError, UnsupportedJob
from foretrain.job import Job

Array = npt.NDArray[np.float64]
Indices = npt.NDArray[np.int64]

NUMBERS = ("workers", "nodes", "cores", "work", "traffic", "steps")
"""The columns that are numbers, all above zero; those in which runs may lie inside or outside of what was
measured."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """One row per run.

    ``work`` is what one worker does in a step: FLOPs of its graph, or samples times their size where no graph
    is known; ``traffic`` the bytes that its operators read and write (1 where not known). ``steps`` is 1 for
    step times, and the steps of an epoch or a whole training for theirs.
    """

    workers: Array
    nodes: Array
    cores: Array
    work: Array
    traffic: Array
    steps: Array
    levels: Array
    """One column per setting beyond the first of each kind: 1 where the run has it."""
    forecast_s: Array | None = None
    """Our own forecast of the same time."""

    def __len__(self) -> int:
        return len(self.workers)

    def take(self, rows: Indices | npt.NDArray[np.bool_]) -> Table:
        columns: dict[str, Array] = {name: getattr(self, name)[rows] for name in (*NUMBERS, "levels")}
        return Table(**columns, forecast_s=None if self.forecast_s is None else self.forecast_s[rows])

    def number(self, name: str) -> Array:
        column: Array = getattr(self, name)
        return column

    @property
    def per_node(self) -> Array:
        return self.workers / self.nodes

    def to_dict(self) -> dict[str, Any]:
        return {
            field.name: None if (column := getattr(self, field.name)) is None else column.tolist()
            for field in dataclasses.fields(self)
        }

    @classmethod
    def from_dict(cls, document: Mapping[str, Any]) -> Table:
        columns = {
            name: None if values is None else np.array(values, dtype=np.float64)
            for name, values in document.items()
        }
        rows = len(document["workers"])
        columns["levels"] = np.array(document["levels"], dtype=np.float64).reshape(rows, -1)
        return cls(**columns)  # type: ignore[arg-type]


SETTINGS: Mapping[str, Callable[[Job], Any]] = {
    "cluster.device": lambda job: job.cluster.device.name,
    "cluster.inter_node": lambda job: _link(job),
    "training.mode": lambda job: job.workload.training.mode,
    "training.precision": lambda job: job.workload.training.precision,
    "training.optimizer": lambda job: job.workload.training.optimizer,
    "training.channels_last": lambda job: job.workload.training.channels_last,
    "training.compile": lambda job: job.workload.training.compile,
    "training.framework": lambda job: job.workload.training.framework,
    "plan.tensor": lambda job: job.plan.tensor,
    "plan.pipeline": lambda job: job.plan.pipeline,
    "plan.context": lambda job: job.plan.context,
    "plan.expert": lambda job: job.plan.expert,
    "plan.shard": lambda job: job.plan.shard,
    "plan.recompute": lambda job: job.plan.recompute,
    "plan.offload": lambda job: job.plan.offload,
    "plan.servers": lambda job: "parameter servers" if job.plan.servers else "all-reduce",
}
"""What is no number but may differ between runs of one model. A job must have settings that some run has."""


def _link(job: Job) -> str | None:
    """What joins the nodes; None on a single node, where it does not matter."""
    link = job.cluster.groups[0].inter_node
    return f"{link.kind} {link.bandwidth_bytes_per_s:.3g}" if job.cluster.nodes > 1 else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Encoding:
    """The settings that runs have, each kind with its values, and whether their graphs are known."""

    settings: Mapping[str, tuple[Any, ...]]
    graphs: bool

    @classmethod
    def of(cls, jobs: Sequence[Job], *, graphs: bool) -> Encoding:
        settings = {}
        for name, setting in SETTINGS.items():
            values = {str(value): value for value in map(setting, jobs) if value is not None}
            settings[name] = tuple(values[text] for text in sorted(values))
        return cls(settings=settings, graphs=graphs)

    def table(
        self, jobs: Sequence[Job], steps: Sequence[float], forecasts_s: Sequence[float] | None = None
    ) -> Table:
        """The columns; ``forecasts_s`` are of a step. A setting that no run has is refused."""
        rows = np.array([[*_numbers(job), *_work(job, self.graphs)] for job in jobs], dtype=np.float64)
        counts = np.array(steps, dtype=np.float64)
        return Table(
            **dict(zip(("workers", "nodes", "cores", "work", "traffic"), rows.T, strict=True)),
            steps=counts,
            levels=np.array([self._levels(job) for job in jobs], dtype=np.float64).reshape(len(jobs), -1),
            forecast_s=None if forecasts_s is None else np.array(forecasts_s, dtype=np.float64) * counts,
        )

    def _levels(self, job: Job) -> list[float]:
        levels = []
        for name, known in self.settings.items():
            value = SETTINGS[name](job)
            if value is not None and known and value not in known:
                raise UnsupportedJob(
                    f"{name}: {value!r}; the runs of this model have {', '.join(map(repr, known))}"
                )
            levels += [float(value == other) for other in known[1:]]
        return levels

    def to_dict(self) -> dict[str, Any]:
        settings = {name: list(values) for name, values in self.settings.items()}
        return {"settings": settings, "graphs": self.graphs}

    @classmethod
    def from_dict(cls, document: Mapping[str, Any]) -> Encoding:
        settings = {name: tuple(values) for name, values in document["settings"].items()}
        return cls(settings=settings, graphs=document["graphs"])


def _numbers(job: Job) -> tuple[float, float, float]:
    device = job.cluster.device
    cores = float(device.cores or 1) if device.is_cpu else 1.0
    return float(job.cluster.world_size), float(job.cluster.nodes), cores


def _work(job: Job, graphs: bool) -> tuple[float, float]:
    if graphs:
        graph = capture_job(job)
        flops, traffic = (max(float(graph.column(name).sum()), 1.0) for name in ("flops", "bytes"))
        return flops * job.accumulation, traffic * job.accumulation
    training = job.workload.training
    shape = training.image_shape
    size = training.sequence or (shape[1] * shape[2] if shape else 1)
    assert job.plan.data is not None
    return training.global_batch / job.plan.data * size, 1.0


def has_graphs(jobs: Sequence[Job]) -> bool:
    """Whether the step of every job can be captured."""
    try:
        for job in jobs:
            capture_job(job)
    except ForetrainError:
        return False
    return True
