"""Says how a job stands to runs that were learned from, and leaves runs out so that each way is tried."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Self, get_args

import numpy as np

from foretrain.architectures import family
from foretrain.job import Job
from foretrain.predictors.seen import (
    DATA_NUMBERS,
    LINKS,
    NUMBERS,
    SETTINGS,
    Numbers,
    elsewhere,
    machines_of,
    notes_of,
    number_columns,
    number_row,
    step_of,
    values_of,
    workload_key,
)
from foretrain.run import Run
from foretrain.splits import extrapolation

Relation = Literal["inside", "beyond", "new model", "new device"]
RELATIONS: tuple[Relation, ...] = get_args(Relation)
WORDS: Mapping[Relation, str] = {
    "inside": "a model of the runs, at a scale between theirs",
    "beyond": "a model of the runs, in another setting or beyond their scale",
    "new model": "a model that no run has",
    "new device": "a device that no run has",
}
_ALONG = ("workers", "nodes", "cores", "batch of a worker")
"""Numbers of whose values the largest third is left out."""
_NAMED = tuple(name for name in SETTINGS if name not in (*LINKS, "cluster.device"))
"""Settings that are named where no run has them; new devices are a relation of their own, and links go by the
numbers of nodes."""
_FOLLOWING = frozenset({"plan.asynchronous", "cluster.servers", "plan.schedule", "plan.sequence_parallel"})
"""Those that only jobs with servers, a pipeline or tensor parallelism have, which are named where no run has
any."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunTraits:
    """Holds the settings and numbers that runs have."""

    settings: Mapping[str, tuple[Any, ...]]
    numbers: Numbers
    machines: tuple[str, ...] = ()

    @classmethod
    def of(cls, jobs: Sequence[Job]) -> Self:
        columns = {name: row for name, row in number_columns(jobs).items() if name not in DATA_NUMBERS}
        settings = {name: values_of(SETTINGS[name], jobs) for name in _NAMED}
        return cls(settings=settings, numbers=Numbers.of(columns), machines=machines_of(jobs))

    def to_dict(self) -> dict[str, Any]:
        known = {"settings": _listed(self.settings), "numbers": _listed(self.numbers.values)}
        return {**known, "machines": list(self.machines)}

    @classmethod
    def from_dict(cls, document: Mapping[str, Any]) -> Self:
        settings = {**dict.fromkeys(_NAMED, ()), **_tuples(document["settings"])}
        numbers = Numbers(values=_tuples(document["numbers"]))
        return cls(settings=settings, numbers=numbers, machines=tuple(document["machines"]))

    def news(self, job: Job, whose: str) -> dict[str, str]:
        """Name, by setting, what to say of one that they do not have; degrees between theirs are none."""
        notes = {}
        for name, known in self.settings.items():
            value = SETTINGS[name](job)
            follows = name in _FOLLOWING and not known
            if value is not None and not follows and not _among(value, known):
                have = f" ({', '.join(map(str, known))})" if known else ""
                notes[name] = f"{name}: {value}, which no run{whose} has{have}"
        return notes


def _listed(values: Mapping[str, Sequence[Any]]) -> dict[str, list[Any]]:
    return {name: list(own) for name, own in values.items()}


def _tuples(values: Mapping[str, Sequence[Any]]) -> dict[str, tuple[Any, ...]]:
    return {name: tuple(own) for name, own in values.items()}


def _among(value: Any, known: Sequence[Any]) -> bool:
    degrees = [degree for degree in known if isinstance(degree, int) and not isinstance(degree, bool)]
    if degrees and isinstance(value, int) and not isinstance(value, bool):
        return min(degrees) <= value <= max(degrees)
    return value in known


@dataclass(frozen=True, slots=True, kw_only=True)
class Known:
    """Holds what runs have: devices, models, ways of training them, and the numbers of each."""

    devices: frozenset[str]
    models: frozenset[str]
    workloads: Mapping[str, Numbers]
    everyone: RunTraits
    """What all runs have."""
    by_device: Mapping[str, RunTraits]
    by_model: Mapping[str, RunTraits]

    @classmethod
    def of(cls, jobs: Sequence[Job]) -> Self:
        by_workload: dict[str, list[Job]] = {}
        by_device: dict[str, list[Job]] = {}
        by_model: dict[str, list[Job]] = {}
        for job in jobs:
            by_device.setdefault(device_of(job), []).append(job)
            by_workload.setdefault(workload_key(job), []).append(job)
            by_model.setdefault(job.workload.model.key, []).append(job)
        return cls(
            devices=frozenset(device_of(job) for job in jobs),
            models=frozenset(job.workload.model.key for job in jobs),
            workloads={key: Numbers.of(number_columns(own)) for key, own in by_workload.items()},
            everyone=RunTraits.of(jobs),
            by_device={device: RunTraits.of(own) for device, own in by_device.items()},
            by_model={key: RunTraits.of(own) for key, own in by_model.items()},
        )

    def news(self, job: Job) -> list[str]:
        """The settings of a job that no run on its device has, in words: nothing that was learned from runs
        tells of them."""
        return list(self._around(job).news(job, "").values())

    def _around(self, job: Job) -> RunTraits:
        """Say what runs on a job's device have, or all where there are none."""
        return self.by_device.get(device_of(job), self.everyone)

    def notes(self, job: Job) -> list[str]:
        """Say what runs, those of the model where there are some, do not have of a job: settings, and numbers
        beyond theirs."""
        around, row = self._around(job), number_row(job)
        of_model = self.by_model.get(job.workload.model.key, around)
        named = {**of_model.news(job, " of this model"), **around.news(job, "")}
        where = elsewhere(job, self.everyone.machines)
        beyond = notes_of(of_model.numbers, of_model.numbers.away(row), row)
        return [*named.values(), *beyond, *([] if where is None else [where])]

    def relation(self, job: Job) -> Relation:
        """Say how a job stands to the runs; the size of the data counts for nothing, as a step does not know
        it."""
        if device_of(job) not in self.devices:
            return "new device"
        if job.workload.model.key not in self.models:
            return "new model"
        numbers = self.workloads.get(workload_key(job))
        if numbers is None or numbers.away(number_row(job)).beyond.keys() - DATA_NUMBERS:
            return "beyond"
        return "inside"

    def to_dict(self) -> dict[str, Any]:
        return {
            "devices": sorted(self.devices),
            "models": sorted(self.models),
            "workloads": {key: _listed(one.values) for key, one in self.workloads.items()},
            "everyone": self.everyone.to_dict(),
            "by_device": {device: traits.to_dict() for device, traits in self.by_device.items()},
            "by_model": {key: traits.to_dict() for key, traits in self.by_model.items()},
        }

    @classmethod
    def from_dict(cls, document: Mapping[str, Any]) -> Self:
        """Read what ``to_dict`` wrote; what an earlier version wrote does not say which settings runs have:
        then none is named."""
        silent = RunTraits(settings={}, numbers=Numbers(values={}))
        everyone = document.get("everyone")
        by_device, by_model = (document.get(name, {}) for name in ("by_device", "by_model"))
        return cls(
            devices=frozenset(document["devices"]),
            models=frozenset(document["models"]),
            workloads={key: Numbers(values=_tuples(values)) for key, values in document["workloads"].items()},
            everyone=silent if everyone is None else RunTraits.from_dict(everyone),
            by_device={device: RunTraits.from_dict(traits) for device, traits in by_device.items()},
            by_model={key: RunTraits.from_dict(traits) for key, traits in by_model.items()},
        )


def device_of(job: Job) -> str:
    """The devices of a job in one word."""
    return "+".join(sorted({group.device.name for group in job.cluster.groups}))


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """Positions of runs to learn from and to forecast."""

    train: tuple[int, ...]
    test: tuple[int, ...]


def parts(runs: Sequence[Run], folds: int) -> list[Part]:
    """Divide runs into parts: some steps in turn, some families in turn, each device, and the largest third
    along each number, as far as the runs have several; each leaves something to learn from, and none the very
    runs of another, which would count for two."""
    all_parts = [
        *_in_turn(runs, lambda run: step_of(run.job), folds),
        *_in_turn(runs, lambda run: family(run.job.workload.model), folds),
        *_in_turn(runs, lambda run: device_of(run.job), folds),
    ]
    columns = number_columns([run.job for run in runs])
    for name in _ALONG:
        assert name in NUMBERS
        column = np.nan_to_num(columns[name])
        for train, test in extrapolation(column):
            all_parts.append(Part(train=tuple(train.tolist()), test=tuple(test.tolist())))
    return list(dict.fromkeys(part for part in all_parts if part.train and part.test))


def _in_turn(runs: Sequence[Run], label: Callable[[Run], str], folds: int) -> list[Part]:
    """Deal labels out, the most frequent first; runs of one label stay together."""
    by_label: dict[str, list[int]] = {}
    for i, run in enumerate(runs):
        by_label.setdefault(label(run), []).append(i)
    groups = list(by_label.values())
    if len(groups) < 2:
        return []
    random.Random(0).shuffle(groups)
    hands: list[list[int]] = [[] for _ in range(min(folds, len(groups)))]
    for group in sorted(groups, key=len, reverse=True):
        min(hands, key=len).extend(group)
    return [
        Part(train=tuple(i for i in range(len(runs)) if i not in set(hand)), test=tuple(sorted(hand)))
        for hand in hands
    ]
