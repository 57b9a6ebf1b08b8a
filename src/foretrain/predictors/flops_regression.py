"""Forecasts step times by a log-linear regression on FLOPs, parameters and workers: the honest yardstick."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Self, final

import numpy as np

from foretrain.architectures import family
from foretrain.capture import capture_job
from foretrain.errors import InputError
from foretrain.forecast import Forecast
from foretrain.job import Job
from foretrain.predictors.base import Predictor, nothing_to_learn, take_runs, unfitted
from foretrain.predictors.blackbox import (
    QUANTITIES,
    check_data_parallel,
    forecast_around,
    numbers,
    spread_of,
    step_times,
    usable,
)
from foretrain.predictors.conformal import Factors
from foretrain.predictors.reach import LeftOutAlong, Reach, left_out_along, widened
from foretrain.predictors.seen import NUMBERS, Array, Seen, number_columns, number_row, row_of
from foretrain.run import Run
from foretrain.splits import Part

COLUMNS = ("log FLOPs", "log parameters", "log workers", "parameter servers")
_RIDGE = 1e-3
"""Of columns scaled to 1."""
_FOLDS = 10
_LARGEST_LOG = 20.0
"""Beyond e^20 seconds, or e^-20, no forecast goes."""
_IN_LAW = ("seconds at the peak rate", "parameters", "workers")
"""The numbers that the first columns are the logarithms of."""
_BY_PEAK_RATE = ("cluster.device", "training.precision")
"""The settings that the law tells of by the peak rate alone: others are forecast, with a wide interval."""
_OTHER_PEAK_RATE = math.log(2.0)
"""E-folds that an 80 % interval has more for each such setting: a factor of two, as nothing was measured."""


@final
class FlopsPredictor(Predictor):
    """``log time`` linear in ``COLUMNS`` and the products of every two.

    FLOPs are of a worker's step and count in seconds at the device's peak rate, so that devices share one
    law. Beyond the runs that were learned from, times grow as FLOPs do, and the interval with the distance.
    """

    name: ClassVar[str] = "flops"
    scored_by: ClassVar[tuple[str, ...]] = ("leave-model-out",)
    quantities: ClassVar[frozenset[str]] = QUANTITIES
    learns: ClassVar[bool] = True

    def __init__(self) -> None:
        self.weights_: Array | None = None
        self.spread_: Factors | None = None
        self.seen_: Seen | None = None
        self.reach_ = Reach()

    def fit(self, runs: Iterable[Run]) -> Self:
        kept_runs, left_out = usable(runs, self.name)
        known, failed = take_runs(kept_runs, lambda run: (run, columns(run.job)))
        self.left_out_ = (*left_out, *failed)
        if not known:
            needs = "none has a step time under data parallelism; flops needs at least one"
            raise nothing_to_learn(needs, self.left_out_)
        rows, times_s = np.array([row for _, row in known]), step_times([run for run, _ in known])
        self.weights_ = _solve(rows, np.log(times_s))
        held_out = _held_out(rows, np.log(times_s), [family(run.job.workload.model) for run, _ in known])
        self.spread_ = spread_of(times_s, np.exp(held_out))
        jobs = [run.job for run, _ in known]
        seen = {**_law_columns(rows), **{name: number_columns(jobs)[name] for name in _OTHERS}}
        self.seen_ = Seen.of(jobs, seen)
        self.reach_ = Reach.of(_left_out_along(rows, times_s, seen, self.spread_))
        return self

    def predict(self, job: Job) -> Forecast:
        check_data_parallel(job, self.name)
        if self.weights_ is None or self.spread_ is None or self.seen_ is None:
            raise unfitted(self.name)
        seen = self.seen_
        seen.check(job, self.name, but=_BY_PEAK_RATE)
        rows = np.array([columns(job)])
        row = {**row_of(_law_columns(rows), 0), **{name: number_row(job)[name] for name in _OTHERS}}
        spread, notes = widened(job, seen, row, self.spread_, self.reach_, _IN_LAW)
        for name in _BY_PEAK_RATE:
            if not seen.has(job, name):
                spread = spread.longer(_OTHER_PEAK_RATE)
                notes.append(seen.unseen_note(job, name, "told by its peak rate alone"))
        (median_s,) = _times_s(rows, self.weights_)
        return forecast_around(job, self.name, median_s, spread, notes)

    def design_row(self, job: Job) -> Mapping[str, float]:
        check_data_parallel(job, self.name)
        row = _terms(np.array([columns(job)]))[0]
        return {f"term {place}": float(figure) for place, figure in enumerate(row)}

    def without(self, families: frozenset[str] = frozenset(), devices: frozenset[str] = frozenset()) -> Self:
        self.weights_ = self.spread_ = self.seen_ = None
        self.reach_ = Reach()
        return self

    def _write(self, folder: Path) -> Mapping[str, Any]:
        if self.weights_ is None or self.spread_ is None or self.seen_ is None:
            raise InputError("flops: has learned from no runs yet, so there is nothing to save")
        learned = {"weights": self.weights_.tolist(), "factors": list(self.spread_)}
        reach = {"seen": self.seen_.to_dict(), "reach": self.reach_.to_dict()}
        return {"columns": list(COLUMNS), **learned, **reach}

    @classmethod
    def _read(cls, folder: Path, document: Mapping[str, Any]) -> Self:
        if tuple(document["columns"]) != COLUMNS or "reach" not in document:
            raise InputError(f"{folder}: the features are others than this version computes; fit it again")
        predictor = cls()
        predictor.weights_, predictor.spread_ = numbers(document, "weights"), Factors(*document["factors"])
        predictor.seen_, predictor.reach_ = Seen.from_dict(document["seen"]), Reach(**document["reach"])
        return predictor


def columns(job: Job) -> list[float]:
    """Describe a job by the figures that ``COLUMNS`` names."""
    graph, device = capture_job(job), job.cluster.device
    work = float(graph.column("flops").sum()) * job.accumulation
    precision = job.workload.training.precision.removeprefix("amp-")
    ideal_s = max(work, 1.0) / device.peak_flops(precision)
    figures = (ideal_s, max(graph.parameters, 1), job.cluster.world_size)
    return [*(float(np.log(figure)) for figure in figures), float(bool(job.plan.servers))]


_OTHERS = tuple(name for name in NUMBERS if name not in (*_IN_LAW, "batch of a worker"))
"""Numbers that the law does not see; the batch is in the FLOPs."""


def _law_columns(rows: Array) -> dict[str, Array]:
    """The numbers themselves, by name."""
    return dict(zip(_IN_LAW, np.exp(rows.T[: len(_IN_LAW)]), strict=True))


def _left_out_along(
    rows: Array, times_s: Array, seen: Mapping[str, Array], spread: Factors
) -> list[LeftOutAlong]:
    def forecast(part: Part) -> list[tuple[float, Factors]]:
        known, asked = part
        weights = _solve(rows[known], np.log(times_s[known]))
        return [(forecast_s, spread) for forecast_s in _times_s(rows[asked], weights)]

    return left_out_along(seen, times_s, forecast)


def _times_s(rows: Array, weights: Array) -> list[float]:
    logs = np.clip(_terms(rows) @ weights, -_LARGEST_LOG, _LARGEST_LOG)
    return [float(value) for value in np.exp(logs)]


def _terms(rows: Array) -> Array:
    """A constant, the columns, and the product of every two different ones."""
    count = rows.shape[1]
    products = [rows[:, i] * rows[:, j] for i in range(count) for j in range(i + 1, count)]
    return np.column_stack([np.ones(len(rows)), rows, *products])


def _solve(rows: Array, targets: Array) -> Array:
    """Least squares with a small ridge on all but the constant."""
    terms = _terms(rows)
    scale = np.maximum(np.abs(terms).max(axis=0), 1e-12)
    scaled = terms / scale
    ridge = _RIDGE * np.eye(terms.shape[1])
    ridge[0, 0] = 0.0
    solution: Array = np.linalg.solve(scaled.T @ scaled + ridge, scaled.T @ targets) / scale
    return solution


def _held_out(rows: Array, targets: Array, groups: Sequence[str]) -> Array:
    """Forecast each run's logarithm by a regression on the runs of other architecture families."""
    names = sorted(set(groups))
    folds = np.array([names.index(group) % _FOLDS for group in groups])
    if len(names) < 2:
        folds = np.arange(len(groups)) % max(2, min(len(groups), _FOLDS))
    held_out = targets.copy()
    for fold in np.unique(folds):
        held, known = folds == fold, folds != fold
        if known.any():
            held_out[held] = _terms(rows[held]) @ _solve(rows[known], targets[known])
    return held_out
