"""Describes jobs of one model by the columns that regressors over scales see, our own forecast among them."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from foretrain.capture import capture_job
from foretrain.errors import ForetrainError
from foretrain.job import Job
from foretrain.predictors.seen import LINKS, SETTINGS, Seen

Array = npt.NDArray[np.float64]
Indices = npt.NDArray[np.int64]

NUMBERS = ("workers", "nodes", "cores", "work", "traffic", "steps", "links")
"""The columns that are numbers, all above zero; those in which runs may lie inside or outside of what was
measured."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ScaleTable:
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
    links: Array = dataclasses.field(default_factory=lambda: np.zeros(0))
    """Rates of the links between nodes, over the typical one, where runs differ in nothing else of them; 1
    where they do not, and where a run has one node."""
    forecast_s: Array | None = None
    """Our own forecast of the same time."""

    def __post_init__(self) -> None:
        if not len(self.links):
            object.__setattr__(self, "links", np.ones(len(self.workers)))

    def __len__(self) -> int:
        return len(self.workers)

    def take(self, rows: Indices | npt.NDArray[np.bool_]) -> ScaleTable:
        columns: dict[str, Array] = {name: getattr(self, name)[rows] for name in (*NUMBERS, "levels")}
        return ScaleTable(**columns, forecast_s=None if self.forecast_s is None else self.forecast_s[rows])

    def number(self, name: str) -> Array:
        column: Array = getattr(self, name)
        return column

    @property
    def scales(self) -> dict[str, Array]:
        """The numbers, by name, but for the traffic, which goes with the work."""
        return {name: self.number(name) for name in NUMBERS if name != "traffic"}

    @property
    def per_node(self) -> Array:
        return self.workers / self.nodes

    def to_dict(self) -> dict[str, Any]:
        return {
            field.name: None if (column := getattr(self, field.name)) is None else column.tolist()
            for field in dataclasses.fields(self)
        }

    @classmethod
    def from_dict(cls, document: Mapping[str, Any]) -> ScaleTable:
        columns = {
            name: None if values is None else np.array(values, dtype=np.float64)
            for name, values in document.items()
        }
        rows = len(document["workers"])
        columns["levels"] = np.array(document["levels"], dtype=np.float64).reshape(rows, -1)
        return cls(**columns)  # type: ignore[arg-type]


_BETWEEN = "cluster.inter_node"


@dataclass(frozen=True, slots=True, kw_only=True)
class Encoding:
    """Holds what the runs have been seen with, and whether their graphs are known."""

    seen: Seen
    graphs: bool
    typical_link: float | None = None
    """Bytes per second of the typical link between nodes, where runs have several rates of one kind: then the
    rate is a number, and others can be told; None where a link is a setting like any other."""
    link_kind: str | None = None

    @classmethod
    def of(cls, jobs: Sequence[Job], *, graphs: bool) -> Encoding:
        links = [job.cluster.groups[0].inter_node for job in jobs if job.over_network]
        rates, kinds = {link.bandwidth_bytes_per_s for link in links}, {link.kind for link in links}
        if len(rates) < 2 or len(kinds) > 1:
            return cls(seen=Seen.of(jobs), graphs=graphs)
        typical = float(np.exp(np.mean(np.log([link.bandwidth_bytes_per_s for link in links]))))
        return cls(seen=Seen.of(jobs), graphs=graphs, typical_link=typical, link_kind=kinds.pop())

    def unseen_links(self, job: Job) -> list[str]:
        """The links of a job that nothing is known of."""
        is_typical = self.typical_link is not None and job.cluster.groups[0].inter_node.kind == self.link_kind
        return [
            name for name in LINKS if not self.seen.has(job, name) and not (is_typical and name == _BETWEEN)
        ]

    def table(
        self, jobs: Sequence[Job], steps: Sequence[float], forecasts_s: Sequence[float] | None = None
    ) -> ScaleTable:
        """The columns; ``forecasts_s`` are of a step."""
        rows = np.array([[*_numbers(job), *_work(job, self.graphs)] for job in jobs], dtype=np.float64)
        counts = np.array(steps, dtype=np.float64)
        return ScaleTable(
            **dict(zip(("workers", "nodes", "cores", "work", "traffic"), rows.T, strict=True)),
            steps=counts,
            levels=np.array([self._levels(job) for job in jobs], dtype=np.float64).reshape(len(jobs), -1),
            links=np.array([self._link(job) for job in jobs], dtype=np.float64),
            forecast_s=None if forecasts_s is None else np.array(forecasts_s, dtype=np.float64) * counts,
        )

    def _levels(self, job: Job) -> list[float]:
        numbers = () if self.typical_link is None else (_BETWEEN,)
        settings = [(name, known) for name, known in self.seen.settings.items() if name not in numbers]
        return [float(SETTINGS[name](job) == other) for name, known in settings for other in known[1:]]

    def _link(self, job: Job) -> float:
        if self.typical_link is None or not job.over_network:
            return 1.0
        return job.cluster.groups[0].inter_node.bandwidth_bytes_per_s / self.typical_link

    def to_dict(self) -> dict[str, Any]:
        links = {"typical_link": self.typical_link, "link_kind": self.link_kind}
        return {"seen": self.seen.to_dict(), "graphs": self.graphs, **links}

    @classmethod
    def from_dict(cls, document: Mapping[str, Any]) -> Encoding:
        return cls(**{**document, "seen": Seen.from_dict(document["seen"])})


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
