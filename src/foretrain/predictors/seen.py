"""Says what runs have shown, and how far a job is from that."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from foretrain.errors import InputError, UnsupportedJob
from foretrain.estimate import WIDTH_80, Factors
from foretrain.job import Job
from foretrain.predictors.machines import MACHINE_DEVIATION, machine_of
from foretrain.units import format_count

Array = npt.NDArray[np.float64]

_SAME = math.log(1.01)
"""Numbers that are this near, in e-folds, are the same."""
_ELSEWHERE = WIDTH_80 / 2 * MACHINE_DEVIATION
"""What the interval of a machine that no run was made on has more on either side, in e-folds."""

# What describes a job

LINKS = ("cluster.intra_node", "cluster.inter_node")
"""The settings that only a job with something to exchange over the link has."""


def _intra_link(job: Job) -> str | None:
    group = job.cluster.groups[0]
    link = group.intra_node
    return f"{link.kind} {link.bandwidth_bytes_per_s:.3g} B/s" if group.devices_per_node > 1 else None


def _inter_link(job: Job) -> str | None:
    link = job.cluster.groups[0].inter_node
    return f"{link.kind} {link.bandwidth_bytes_per_s:.3g} B/s" if job.over_network else None


def _adapter(job: Job) -> str | None:
    adapter = job.workload.training.adapter
    return None if adapter is None else adapter.words


def _place_of_servers(job: Job) -> str | None:
    own = "the workers' nodes" if job.cluster.servers is None else "nodes of their own"
    return own if job.plan.servers else None


SETTINGS: Mapping[str, Callable[[Job], Any]] = {
    "cluster.device": lambda job: job.cluster.device.name,
    "cluster.intra_node": _intra_link,
    "cluster.inter_node": _inter_link,
    "training.mode": lambda job: job.workload.training.mode,
    "training.precision": lambda job: job.workload.training.precision,
    "training.master_weights": lambda job: job.workload.training.master_weights,
    "training.optimizer": lambda job: job.workload.training.optimizer,
    "training.channels_last": lambda job: job.workload.training.channels_last,
    "training.adapter": _adapter,
    "training.fp8": lambda job: job.workload.training.fp8,
    "training.compile": lambda job: job.workload.training.compile,
    "training.framework": lambda job: job.workload.training.framework,
    "plan.tensor": lambda job: job.plan.tensor,
    "plan.pipeline": lambda job: job.plan.pipeline,
    "plan.context": lambda job: job.plan.context,
    "plan.expert": lambda job: job.plan.expert,
    "plan.shard": lambda job: job.plan.shard,
    "plan.recompute": lambda job: job.plan.recompute,
    "plan.recompute_every": lambda job: job.plan.recompute_every if job.plan.recompute_every > 1 else None,
    "plan.offload": lambda job: job.plan.offload,
    "plan.schedule": lambda job: job.plan.schedule if job.plan.pipeline > 1 else None,
    "plan.sequence_parallel": lambda job: job.plan.sequence_parallel if job.plan.tensor > 1 else None,
    "plan.servers": lambda job: "parameter servers" if job.plan.servers else "all-reduce",
    "plan.asynchronous": lambda job: job.plan.asynchronous if job.plan.servers else None,
    "cluster.servers": _place_of_servers,
}
"""What is no number but may differ between runs of one model; None where it does not matter. A job must have
settings that some run has."""

_OPTIONAL = frozenset({"training.adapter", "training.fp8", "plan.recompute_every"})
"""Settings that most jobs do without: what does not say them has none."""

NUMBERS: Mapping[str, Callable[[Job], float | None]] = {
    "workers": lambda job: job.cluster.world_size,
    "nodes": lambda job: job.cluster.nodes,
    "cores": lambda job: job.cluster.device.cores if job.cluster.device.is_cpu else None,
    "batch of a worker": lambda job: job.workload.training.global_batch / (job.plan.data or 1),
    "micro-batches": lambda job: job.accumulation,
    "parameter servers": lambda job: job.plan.servers or None,
    "nodes of servers": lambda job: job.cluster.servers.nodes if job.cluster.servers else None,
    "samples": lambda job: job.workload.training.samples,
}
"""What may lie between or beyond the values that runs have, all above zero."""

DATA_NUMBERS = frozenset({"samples"})
"""Numbers that a step should not depend on."""


def workload_key(job: Job) -> str:
    """A text that jobs share when they train the same thing in the same way, at whatever batch and scale and
    over whatever links."""
    training = job.workload.training
    inputs = [training.image, training.sequence, training.classes]
    how = {name: setting(job) for name, setting in SETTINGS.items() if name not in LINKS}
    how = {name: value for name, value in how.items() if name not in _OPTIONAL or value is not None}
    return json.dumps([job.workload.model.key, inputs, how], sort_keys=True, default=str)


_OF_DATA = frozenset({"samples", "epochs"})
"""Fields of a training that its step does not depend on."""


def step_of(job: Job) -> str:
    """A text that jobs share when their steps are the same: all but how much data they train on."""
    document = job.to_dict()
    training = {name: value for name, value in document["training"].items() if name not in _OF_DATA}
    return json.dumps({**document, "training": training}, sort_keys=True)


def number_row(job: Job) -> dict[str, float | None]:
    return {name: number(job) for name, number in NUMBERS.items()}


def number_columns(jobs: Sequence[Job]) -> dict[str, Array]:
    """A row for each job; not a number where it does not say."""
    rows = [number_row(job) for job in jobs]
    return {name: np.array([row[name] for row in rows], dtype=np.float64) for name in NUMBERS}


def row_of(columns: Mapping[str, Array], place: int | np.integer[Any]) -> dict[str, float | None]:
    """Take one row of columns."""
    return {name: float(column[place]) for name, column in columns.items()}


# What runs have, and how far a job is from it


@dataclass(frozen=True, slots=True, kw_only=True)
class Away:
    """Says how far one job is from the values of runs, in e-folds by number: in gaps between values, and
    beyond all."""

    gaps: Mapping[str, float]
    beyond: Mapping[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Numbers:
    """The distinct values of each number that runs have."""

    values: Mapping[str, tuple[float, ...]]

    @classmethod
    def of(cls, columns: Mapping[str, Array]) -> Numbers:
        """Gather the values of columns with a row for each run; what a run does not say is not a number."""
        distinct = {name: np.unique(column[np.isfinite(column)]) for name, column in columns.items()}
        return cls(values={name: tuple(column.tolist()) for name, column in distinct.items()})

    def varied(self, name: str) -> bool:
        return len(self.values[name]) > 1

    def away(self, row: Mapping[str, float | None]) -> Away:
        """Say how far a job with these numbers is; where it, or no run, has a number, nothing is told."""
        gaps: dict[str, float] = {}
        beyond: dict[str, float] = {}
        for name, known in self.values.items():
            value = row.get(name)
            if value is None or not math.isfinite(value) or not known:
                continue
            nearest = min(abs(math.log(value / other)) for other in known)
            if nearest > _SAME:
                (gaps if known[0] < value < known[-1] else beyond)[name] = nearest
        return Away(gaps=gaps, beyond=beyond)


def notes_of(numbers: Numbers, away: Away, row: Mapping[str, float | None]) -> list[str]:
    """Say what lies outside of the runs, and where they end; the interval is wider for it."""
    notes = []
    for name in away.beyond:
        known, value = numbers.values[name], row[name]
        assert value is not None
        ends = [format_count(end) for end in dict.fromkeys((known[0], known[-1]))]
        notes.append(f"beyond the runs in {name}: {format_count(value)}, they have {' to '.join(ends)}")
    return notes


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """Holds what the runs that something was learned from have: the values of every setting and number."""

    workload: str
    """What they are runs of, but for the links; empty where several are pooled."""
    settings: Mapping[str, tuple[Any, ...]]
    numbers: Numbers
    machines: tuple[str, ...] = ()
    """Those of CPU workers, where runs tell."""

    @classmethod
    def of(cls, jobs: Sequence[Job], columns: Mapping[str, Array] | None = None) -> Seen:
        """``columns``: other numbers than ``NUMBERS``."""
        workloads = {workload_key(job) for job in jobs}
        return cls(
            workload=workloads.pop() if len(workloads) == 1 else "",
            settings={name: values_of(setting, jobs) for name, setting in SETTINGS.items()},
            numbers=Numbers.of(number_columns(jobs) if columns is None else columns),
            machines=machines_of(jobs),
        )

    def check(self, job: Job, predictor: str, *, but: Collection[str] = ()) -> None:
        """Refuse a job with a setting that no run has."""
        for name in SETTINGS:
            if name not in but and not self.has(job, name):
                raise unseen(name, SETTINGS[name](job), self.settings[name], predictor)

    def has(self, job: Job, name: str) -> bool:
        value = SETTINGS[name](job)
        return value is None or value in self.settings[name]

    def unseen_note(self, job: Job, name: str, how: str) -> str:
        known = ", ".join(map(str, self.settings[name]))
        return f"{name}: {SETTINGS[name](job)}, which no run has ({known}), is {how}"

    def model_notes(self, job: Job) -> list[str]:
        """Say what to know where several workloads were pooled, or one stands for another."""
        if self.workload == workload_key(job):
            return []
        return [f"model: a law of all runs together, whatever they train, for {job.workload.model.label}"]

    def notes(self, away: Away, row: Mapping[str, float | None]) -> list[str]:
        """Say what lies outside of the runs, and where they end."""
        return notes_of(self.numbers, away, row)

    def on_machine(self, job: Job, spread: Factors) -> tuple[Factors, list[str]]:
        """The interval, wider on a machine whose cores no run had, and what to say of it."""
        note = elsewhere(job, self.machines)
        return (spread, []) if note is None else (spread.longer(_ELSEWHERE), [note])

    def to_dict(self) -> dict[str, Any]:
        return {
            "workload": self.workload,
            "settings": {name: list(values) for name, values in self.settings.items()},
            "numbers": {name: list(values) for name, values in self.numbers.values.items()},
            "machines": list(self.machines),
        }

    @classmethod
    def from_dict(cls, document: Mapping[str, Any]) -> Self:
        settings, numbers = (
            {name: tuple(values) for name, values in document[part].items()}
            for part in ("settings", "numbers")
        )
        settings = {**dict.fromkeys(_OPTIONAL, ()), **settings}
        if missing := sorted(set(SETTINGS) - set(settings)):
            raise InputError(f"seen.settings: does not say {', '.join(missing)} of its runs; fit it again")
        return cls(
            workload=document["workload"],
            settings=settings,
            numbers=Numbers(values=numbers),
            machines=tuple(document.get("machines", ())),
        )


def values_of(setting: Callable[[Job], Any], jobs: Sequence[Job]) -> tuple[Any, ...]:
    """The distinct values that jobs have, in the order of their texts."""
    values = {str(value): value for value in map(setting, jobs) if value is not None}
    return tuple(values[text] for text in sorted(values))


def machines_of(jobs: Sequence[Job]) -> tuple[str, ...]:
    """The machines of CPU workers, where jobs tell."""
    return tuple(sorted({machine_of(job) for job in jobs} - {""}))


def elsewhere(job: Job, machines: Sequence[str]) -> str | None:
    """Say what to know of CPU workers on another machine than those of runs, where both are told."""
    machine = machine_of(job)
    if not machine or not machines or machine in machines:
        return None
    return (
        f"cluster.host: {machine}, and runs were made on {'; '.join(machines)}; machines differ by 35% or so"
    )


def unseen(name: str, value: Any, known: Sequence[Any], predictor: str) -> UnsupportedJob:
    """The refusal of a setting that no run has."""
    if not known:
        return UnsupportedJob(
            f"{name}: {value!r}; no run of this model goes over it, and {predictor} cannot tell"
        )
    return UnsupportedJob(f"{name}: {value!r}; the runs of this model have {', '.join(map(repr, known))}")
