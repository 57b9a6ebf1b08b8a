"""Says how a job stands to runs that were learned from, and leaves runs out so that each way is tried."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, Self, get_args

import numpy as np

from foretrain.architectures import family
from foretrain.job import Job, Run
from foretrain.predictors.seen import (
    DATA_NUMBERS,
    NUMBERS,
    Numbers,
    number_columns,
    number_row,
    step_of,
    workload_key,
)
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Known:
    """What runs have: devices, models, ways of training them, and the numbers of each."""

    devices: frozenset[str]
    models: frozenset[str]
    workloads: Mapping[str, Numbers]

    @classmethod
    def of(cls, jobs: Sequence[Job]) -> Self:
        by_workload: dict[str, list[Job]] = {}
        for job in jobs:
            by_workload.setdefault(workload_key(job), []).append(job)
        return cls(
            devices=frozenset(device_of(job) for job in jobs),
            models=frozenset(job.workload.model.key for job in jobs),
            workloads={key: Numbers.of(number_columns(mine)) for key, mine in by_workload.items()},
        )

    def relation(self, job: Job) -> Relation:
        """How a job stands to the runs; the size of the data counts for nothing, as a step does not know
        it."""
        if device_of(job) not in self.devices:
            return "new device"
        if job.workload.model.key not in self.models:
            return "new model"
        numbers = self.workloads.get(workload_key(job))
        if numbers is None or numbers.away(number_row(job)).beyond.keys() - DATA_NUMBERS:
            return "beyond"
        return "inside"

    def to_dict(self) -> dict[str, object]:
        return {
            "devices": sorted(self.devices),
            "models": sorted(self.models),
            "workloads": {
                key: {name: list(values) for name, values in one.values.items()}
                for key, one in self.workloads.items()
            },
        }

    @classmethod
    def from_dict(cls, document: Mapping[str, object]) -> Self:
        workloads = document["workloads"]
        assert isinstance(workloads, Mapping)
        return cls(
            devices=frozenset(document["devices"]),  # type: ignore[call-overload]
            models=frozenset(document["models"]),  # type: ignore[call-overload]
            workloads={
                key: Numbers(values={name: tuple(some) for name, some in values.items()})
                for key, values in workloads.items()
            },
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
    """Some steps in turn, some families in turn, each device, and the largest third along each number, as far
    as the runs have several; each leaves something to learn from."""
    found = [
        *_in_turn(runs, lambda run: step_of(run.job), folds),
        *_in_turn(runs, lambda run: family(run.job.workload.model), folds),
        *_in_turn(runs, lambda run: device_of(run.job), folds),
    ]
    columns = number_columns([run.job for run in runs])
    for name in _ALONG:
        assert name in NUMBERS
        column = np.nan_to_num(columns[name])
        for train, test in extrapolation(column):
            found.append(Part(train=tuple(train.tolist()), test=tuple(test.tolist())))
    return [part for part in found if part.train and part.test]


def _in_turn(runs: Sequence[Run], label: Callable[[Run], str], folds: int) -> list[Part]:
    """Runs of one label stay together; labels are dealt out, the most frequent first."""
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
