"""Forecasts step times at other scales by Ernest's law of four terms, fitted to runs of the workload."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Self, final

import numpy as np

from foretrain.errors import InputError
from foretrain.forecast import Forecast
from foretrain.job import Job
from foretrain.predictors.base import Predictor, unfitted
from foretrain.predictors.blackbox import (
    QUANTITIES,
    by_workload,
    check_data_parallel,
    forecast_around,
    of_workload,
    spread_of,
    step_times,
    workload_of,
)
from foretrain.predictors.conformal import Factors
from foretrain.predictors.reach import LeftOutAlong, Reach, left_out_along, widened
from foretrain.predictors.seen import Array, Seen, number_columns, number_row
from foretrain.run import Run
from foretrain.splits import Part

TERMS = ("1", "scale / machines", "log machines", "machines")
_LEAST_S = 1e-9
"""What a law says at least, so that a time stays above zero."""
_FOLDS = 10
_IN_LAW = ("workers", "batch of a worker")
"""The numbers that the terms are of."""


@final
class ErnestPredictor(Predictor):
    """``time = a + b scale/machines + c log(machines) + d machines``, none of ``a, b, c, d`` below zero.

    Venkataraman et al., NSDI 2016. The scale is the number of samples per step, so that scale over machines
    is a worker's batch. Each workload has a law of its own, and a workload without runs has none; ``pooled``
    puts the runs of all workloads into one law instead, which is all that can be said of a new one. Which
    scales to measure, ``foretrain design`` says (A-optimal, as Ernest chooses).
    """

    name: ClassVar[str] = "ernest"
    scored_by: ClassVar[tuple[str, ...]] = ("random", "extrapolate:workers", "extrapolate:samples")
    quantities: ClassVar[frozenset[str]] = QUANTITIES
    learns: ClassVar[bool] = True
    only_known_models: ClassVar[bool] = True

    def __init__(self, *, pooled: bool = False) -> None:
        self.pooled = pooled
        self.laws_: dict[str, tuple[float, ...]] = {}
        self.seen_: dict[str, Seen] = {}
        self.spread_: Factors | None = None
        self.reach_ = Reach()

    def fit(self, runs: Iterable[Run]) -> Self:
        workloads, self.left_out_ = by_workload(runs, self.name, pooled=self.pooled)
        self.laws_ = {key: law([run.job for run in own], step_times(own)) for key, own in workloads.items()}
        self.seen_ = {key: Seen.of([run.job for run in own]) for key, own in workloads.items()}
        several = [own for own in workloads.values() if len(own) > len(TERMS)]
        held_out = np.array([pair for own in several for pair in _left_out_in_turn(own, self.pooled)])
        self.spread_ = spread_of(*held_out.reshape(-1, 2).T)
        self.reach_ = Reach.of([one for own in several for one in _left_out_along(own, self.spread_)])
        return self

    def predict(self, job: Job) -> Forecast:
        check_data_parallel(job, self.name)
        if self.spread_ is None:
            raise unfitted(self.name)
        key = workload_of(job, self.seen_, self.name)
        seen = self.seen_[key]
        seen.check(job, self.name)
        spread, outside = widened(job, seen, number_row(job), self.spread_, self.reach_, _IN_LAW)
        notes = [*seen.model_notes(job), *outside]
        return forecast_around(job, self.name, _time_s(job, self.laws_[key]), spread, notes)

    def design_row(self, job: Job) -> Mapping[str, float]:
        check_data_parallel(job, self.name)
        return of_workload(job, TERMS, terms(job), pooled=self.pooled)

    def without(self, families: frozenset[str] = frozenset(), devices: frozenset[str] = frozenset()) -> Self:
        self.laws_, self.seen_, self.spread_, self.reach_ = {}, {}, None, Reach()
        return self

    def _write(self, folder: Path) -> Mapping[str, Any]:
        if self.spread_ is None:
            raise InputError("ernest: has learned from no runs yet, so there is nothing to save")
        laws = {key: list(values) for key, values in self.laws_.items()}
        seen = {key: one.to_dict() for key, one in self.seen_.items()}
        learned = {"laws": laws, "seen": seen, "factors": list(self.spread_), "reach": self.reach_.to_dict()}
        return {"terms": list(TERMS), "pooled": self.pooled, **learned}

    @classmethod
    def _read(cls, folder: Path, document: Mapping[str, Any]) -> Self:
        if "reach" not in document:
            raise InputError(f"{folder}: does not say how far its runs reach; fit it again")
        predictor = cls(pooled=document["pooled"])
        predictor.laws_ = {key: tuple(values) for key, values in document["laws"].items()}
        predictor.seen_ = {key: Seen.from_dict(values) for key, values in document["seen"].items()}
        predictor.spread_, predictor.reach_ = Factors(*document["factors"]), Reach(**document["reach"])
        return predictor


def terms(job: Job) -> list[float]:
    """Compute the terms that ``TERMS`` names."""
    machines, scale = job.cluster.world_size, job.workload.training.global_batch
    return [1.0, scale / machines, math.log(machines), float(machines)]


def law(jobs: Sequence[Job], times_s: Array) -> tuple[float, ...]:
    """The coefficients that are not negative and fit best (least squares of the relative error)."""
    from scipy.optimize import nnls

    rows = np.array([terms(job) for job in jobs])
    solution, _ = nnls(rows / times_s[:, None], np.ones(len(jobs)))
    return tuple(float(value) for value in solution)


def _time_s(job: Job, coefficients: Sequence[float]) -> float:
    return max(float(np.dot(terms(job), coefficients)), _LEAST_S)


def _left_out_in_turn(runs: Sequence[Run], pooled: bool) -> list[tuple[float, float]]:
    """Measured and forecast step times, each run forecast by the others: of many, by nine tenths of them; of
    several models together, by those of other models."""
    models = sorted({run.job.workload.model.key for run in runs})
    if pooled and len(models) > 1:
        folds = np.array([models.index(run.job.workload.model.key) % _FOLDS for run in runs])
    else:
        folds = np.arange(len(runs)) % min(len(runs), _FOLDS)
    times_s = step_times(runs)
    pairs = []
    for fold in np.unique(folds):
        known, held_out = np.flatnonzero(folds != fold), np.flatnonzero(folds == fold)
        pairs += list(zip(times_s[held_out], _forecasts_s(runs, (known, held_out)), strict=True))
    return pairs


def _left_out_along(runs: Sequence[Run], spread: Factors) -> list[LeftOutAlong]:
    columns = number_columns([run.job for run in runs])
    return left_out_along(
        columns,
        step_times(runs),
        lambda part: [(forecast_s, spread) for forecast_s in _forecasts_s(runs, part)],
    )


def _forecasts_s(runs: Sequence[Run], part: Part) -> list[float]:
    known, asked = part
    coefficients = law([runs[i].job for i in known], step_times([runs[i] for i in known]))
    return [_time_s(runs[i].job, coefficients) for i in asked]
