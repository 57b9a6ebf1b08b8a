"""Forecasts step times by a log-linear regression on FLOPs, parameters and workers: the honest yardstick."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Self, final

import numpy as np

from foretrain.architectures import family
from foretrain.capture import capture_job
from foretrain.errors import InputError, UnsupportedJob
from foretrain.forecast import Forecast
from foretrain.job import Job, Run
from foretrain.predictors.base import Predictor, take_runs
from foretrain.predictors.blackbox import (
    QUANTITIES,
    Array,
    check_data_parallel,
    forecast_around,
    numbers,
    spread_of,
    step_times,
    usable,
    widened,
)
from foretrain.predictors.conformal import Factors

COLUMNS = ("log FLOPs", "log parameters", "log workers", "parameter servers")
_RIDGE = 1e-3
"""Of columns scaled to 1."""
_FOLDS = 10
_LARGEST_LOG = 20.0
"""Beyond e^20 seconds, or e^-20, no forecast goes."""
_WIDEST = 4.0
"""How many times as wide an interval gets, at most, for what lies beyond everything learned."""


@final
class FlopsPredictor(Predictor):
    """``log time`` linear in ``COLUMNS`` and the products of every two.

    FLOPs are of a worker's step and count in seconds at the device's peak rate, so that devices share one
    law. Beyond the runs that were learned from, times grow as FLOPs do, and the interval with the distance.
    """

    name: ClassVar[str] = "flops"
    quantities: ClassVar[frozenset[str]] = QUANTITIES
    learns: ClassVar[bool] = True

    def __init__(self) -> None:
        self.weights_: Array | None = None
        self.spread_: Factors | None = None
        self.seen_: Array = np.zeros((2, len(COLUMNS)))
        """The least and the most of each column that was learned from."""
        self.devices_: tuple[str, ...] = ()

    def fit(self, runs: Iterable[Run]) -> Self:
        kept_runs, left_out = usable(runs, self.name)
        known, failed = take_runs(kept_runs, lambda run: (run, columns(run.job)))
        self.left_out_ = (*left_out, *failed)
        if not known:
            raise InputError("runs: none has a step time under data parallelism; flops needs at least one")
        rows, times_s = np.array([row for _, row in known]), step_times([run for run, _ in known])
        self.weights_ = _solve(rows, np.log(times_s))
        held_out = _held_out(rows, np.log(times_s), [family(run.job.workload.model) for run, _ in known])
        self.spread_ = spread_of(times_s, np.exp(held_out))
        self.seen_ = np.array([rows.min(axis=0), rows.max(axis=0)])
        self.devices_ = tuple(sorted({run.job.cluster.device.name for run, _ in known}))
        return self

    def predict(self, job: Job) -> Forecast:
        check_data_parallel(job, self.name)
        if self.weights_ is None or self.spread_ is None:
            raise UnsupportedJob("flops: has learned from no runs yet; fit it first")
        row = np.array(columns(job))
        inside = np.clip(row, *self.seen_)
        log_time = float((_terms(inside[None]) @ self.weights_)[0]) + row[0] - inside[0]
        median_s = float(np.exp(np.clip(log_time, -_LARGEST_LOG, _LARGEST_LOG)))
        power, notes = self._judge(job, row - inside)
        return forecast_around(job, self.name, median_s, widened(self.spread_, power), notes)

    def _judge(self, job: Job, beyond: Array) -> tuple[float, list[str]]:
        """How many times as wide the interval is for what was not learned from, and what that is."""
        notes = [
            f"{name.removeprefix('log ')}: {'more' if by > 0 else 'less'} than in any run learned from"
            for name, by in zip(COLUMNS, beyond, strict=True)
            if abs(by) > 1e-9
        ]
        power = 1.0 + float(np.abs(beyond).sum())
        device = job.cluster.device.name
        if device not in self.devices_:
            power *= 2
            notes.append(f"cluster.device: {device} was not learned from, only {', '.join(self.devices_)}")
        power = min(power, _WIDEST)
        return power, [*notes, f"for that, the interval is {power:.1f} times as wide"] if notes else []

    def design_row(self, job: Job) -> Mapping[str, float]:
        check_data_parallel(job, self.name)
        row = _terms(np.array([columns(job)]))[0]
        return {f"term {place}": float(figure) for place, figure in enumerate(row)}

    def without(self, families: frozenset[str] = frozenset(), devices: frozenset[str] = frozenset()) -> Self:
        self.weights_ = self.spread_ = None
        return self

    def _write(self, folder: Path) -> Mapping[str, Any]:
        if self.weights_ is None or self.spread_ is None:
            raise InputError("flops: has learned from no runs yet, so there is nothing to save")
        return {
            "columns": list(COLUMNS),
            "weights": self.weights_.tolist(),
            "factors": list(self.spread_),
            "seen": self.seen_.tolist(),
            "devices": list(self.devices_),
        }

    @classmethod
    def _read(cls, folder: Path, document: Mapping[str, Any]) -> Self:
        if tuple(document["columns"]) != COLUMNS or "seen" not in document:
            raise InputError(f"{folder}: the features are others than this version computes; fit it again")
        predictor = cls()
        predictor.weights_, predictor.spread_ = numbers(document, "weights"), Factors(*document["factors"])
        predictor.seen_, predictor.devices_ = numbers(document, "seen"), tuple(document["devices"])
        return predictor


def columns(job: Job) -> list[float]:
    """As ``COLUMNS`` names them."""
    graph, device = capture_job(job), job.cluster.device
    work = float(graph.column("flops").sum()) * job.accumulation
    precision = job.workload.training.precision.removeprefix("amp-")
    ideal_s = max(work, 1.0) / device.peak_flops(precision)
    figures = (ideal_s, max(graph.parameters, 1), job.cluster.world_size)
    return [*(float(np.log(figure)) for figure in figures), float(bool(job.plan.servers))]


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
    """Each run's logarithm by a regression on the runs of other architecture families."""
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
