"""Forecasts configurations of a workload by a Gaussian process, as CherryPick does (``search`` asks it)."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
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
    numbers,
    of_workload,
    sklearn,
    step_times,
    workload_of,
)
from foretrain.predictors.conformal import Factors
from foretrain.predictors.reach import LeftOutAlong, Reach, left_out_along, quantile_80, widened
from foretrain.predictors.seen import Array, Seen, number_columns, number_row
from foretrain.run import Run
from foretrain.splits import Part

COLUMNS = ("log workers", "log batch per worker", "log nodes", "log cores per device")
_VARIANCE, _LENGTHS, _NOISE = (1e-2, 1e2), (0.2, 20.0), (1e-4, 0.3)
"""Bounds of the kernel's parameters: variance of the logarithm, lengths in e-folds, variance of noise."""
_LEAST_SPREAD = 0.05
"""Standard deviation of the logarithm that a forecast has at least, as two runs of one cell differ."""
_PROCESS = ("rows", "logs", "theta", "within")
_FEWEST_TO_LEAVE_OUT = 5
"""Runs of a workload from which on some are left out, to see how the process does without them."""
_FOLDS, _MOST_WORKLOADS = 4, 40
"""Parts that are left out in turn, of so many workloads at most."""
_NORMAL = (-1.96, -1.2816, 1.2816, 1.96)
"""Standard deviations at 2.5, 10, 90 and 97.5 % of a normal distribution."""


@dataclass(frozen=True, eq=False, kw_only=True)
class Process:
    """A Gaussian process with a Matern 5/2 kernel on the logarithm of a cost."""

    rows: Array
    logs: Array
    theta: Array
    """Logarithms of the kernel's parameters."""
    within: Array
    """One number: the variance of the logarithm among runs of one configuration."""

    @classmethod
    def learn(cls, configurations: Array, values: Array) -> Process:
        """Fit the kernel by the likelihood of the values; those of one configuration count by their mean."""
        rows, index = np.unique(configurations, axis=0, return_inverse=True)
        logs = np.bincount(index, weights=np.log(values)) / np.bincount(index)
        within = ((np.log(values) - logs[index]) ** 2).sum() / max(len(values) - len(rows), 1)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # a parameter that ends at its bound is all right
            model = _regressor().fit(rows, logs - logs.mean())
        return cls(
            rows=rows,
            logs=logs,
            theta=np.array(model.kernel_.theta, dtype=np.float64),
            within=np.array([within]),
        )

    def __call__(self, rows: Array) -> tuple[Array, Array]:
        """Mean and standard deviation of the logarithm at other configurations."""
        kernel = _kernel().clone_with_theta(self.theta)
        model = _regressor(kernel, optimizer=None).fit(self.rows, self.logs - self.logs.mean())
        mean, deviation = model.predict(rows, return_std=True)
        return mean + self.logs.mean(), np.sqrt(deviation**2 + self.within[0])


@final
class CherryPickPredictor(Predictor):
    """The Gaussian process of Bayesian optimisation over configurations (Alipourfard et al., NSDI 2017).

    Like Ernest's, its knowledge is of one workload at a time; ``pooled`` puts the runs of all workloads into
    one process.
    """

    name: ClassVar[str] = "cherrypick"
    scored_by: ClassVar[tuple[str, ...]] = ("random",)
    quantities: ClassVar[frozenset[str]] = QUANTITIES
    learns: ClassVar[bool] = True
    only_known_models: ClassVar[bool] = True

    def __init__(self, *, pooled: bool = False) -> None:
        self.pooled = pooled
        self.processes_: dict[str, Process] = {}
        self.seen_: dict[str, Seen] = {}
        self.scale_ = 1.0
        self.reach_ = Reach()

    def fit(self, runs: Iterable[Run]) -> Self:
        workloads, self.left_out_ = by_workload(runs, self.name, pooled=self.pooled)
        self.processes_ = {
            key: Process.learn(np.array([configuration(run.job) for run in own]), step_times(own))
            for key, own in workloads.items()
        }
        self.seen_ = {key: Seen.of([run.job for run in own]) for key, own in workloads.items()}
        several = [own for own in workloads.values() if len(own) >= _FEWEST_TO_LEAVE_OUT]
        tried_workloads = several[:: -(-len(several) // _MOST_WORKLOADS)] if several else []
        ratios = [ratio for own in tried_workloads for ratio in _left_out_in_turn(own)]
        self.scale_ = max(quantile_80(ratios), 1.0) if ratios else 1.0
        self.reach_ = Reach.of([one for own in tried_workloads for one in _left_out_along(own, self.scale_)])
        return self

    def predict(self, job: Job) -> Forecast:
        check_data_parallel(job, self.name)
        if not self.processes_:
            raise unfitted(self.name)
        key = workload_of(job, self.seen_, self.name)
        seen = self.seen_[key]
        seen.check(job, self.name)
        ((median_s, own_spread),) = _forecasts(self.processes_[key], [job], self.scale_)
        spread, outside = widened(job, seen, number_row(job), own_spread, self.reach_, in_law=())
        return forecast_around(job, self.name, median_s, spread, [*seen.model_notes(job), *outside])

    def design_row(self, job: Job) -> Mapping[str, float]:
        check_data_parallel(job, self.name)
        return of_workload(job, ("1", *COLUMNS), (1.0, *configuration(job)), pooled=self.pooled)

    def without(self, families: frozenset[str] = frozenset(), devices: frozenset[str] = frozenset()) -> Self:
        self.processes_, self.seen_, self.scale_, self.reach_ = {}, {}, 1.0, Reach()
        return self

    def _write(self, folder: Path) -> Mapping[str, Any]:
        if not self.processes_:
            raise InputError("cherrypick: has learned from no runs yet, so there is nothing to save")
        processes = {
            key: {name: getattr(process, name).tolist() for name in _PROCESS}
            for key, process in self.processes_.items()
        }
        seen = {key: one.to_dict() for key, one in self.seen_.items()}
        learned = {"processes": processes, "seen": seen, "scale": self.scale_, "reach": self.reach_.to_dict()}
        return {"columns": list(COLUMNS), "pooled": self.pooled, **learned}

    @classmethod
    def _read(cls, folder: Path, document: Mapping[str, Any]) -> Self:
        if tuple(document["columns"]) != COLUMNS or "reach" not in document:
            raise InputError(f"{folder}: the features are others than this version computes; fit it again")
        predictor = cls(pooled=document["pooled"])
        predictor.processes_ = {
            key: Process(**{name: numbers(values, name) for name in _PROCESS})
            for key, values in document["processes"].items()
        }
        predictor.seen_ = {key: Seen.from_dict(values) for key, values in document["seen"].items()}
        predictor.scale_, predictor.reach_ = document["scale"], Reach(**document["reach"])
        return predictor


def _forecasts(process: Process, jobs: Sequence[Job], scale: float = 1.0) -> list[tuple[float, Factors]]:
    """Median seconds, and the interval that the process itself gives, so many times as long."""
    means, deviations = process(np.array([configuration(job) for job in jobs]))
    spreads = np.maximum(deviations, _LEAST_SPREAD)
    return [
        (float(np.exp(mean)), Factors(*(float(np.exp(z * spread)) for z in _NORMAL)).power(scale))
        for mean, spread in zip(means, spreads, strict=True)
    ]


def _left_out_in_turn(runs: Sequence[Run]) -> list[float]:
    """Forecast runs by a process of the others, and say how far off they are, over the interval of 80 % that
    it gives."""
    jobs, times_s = [run.job for run in runs], step_times(runs)
    rows, folds = np.array([configuration(job) for job in jobs]), np.arange(len(runs)) % _FOLDS
    ratios = []
    for fold in range(_FOLDS):
        known, asked = np.flatnonzero(folds != fold), np.flatnonzero(folds == fold)
        forecasts = _forecasts(Process.learn(rows[known], times_s[known]), [jobs[i] for i in asked])
        ratios += [
            abs(float(np.log(times_s[i] / median_s) / np.log(spread.high)))
            for i, (median_s, spread) in zip(asked, forecasts, strict=True)
        ]
    return ratios


def _left_out_along(runs: Sequence[Run], scale: float) -> list[LeftOutAlong]:
    jobs, times_s = [run.job for run in runs], step_times(runs)
    rows = np.array([configuration(job) for job in jobs])

    def forecast(part: Part) -> list[tuple[float, Factors]]:
        known, asked = part
        return _forecasts(Process.learn(rows[known], times_s[known]), [jobs[i] for i in asked], scale)

    return left_out_along(number_columns(jobs), times_s, forecast)


def configuration(job: Job) -> list[float]:
    """Describe a job by the figures that ``COLUMNS`` names."""
    workers, cluster = job.cluster.world_size, job.cluster
    figures = (workers, job.workload.training.global_batch / workers, cluster.nodes, cluster.device.cores)
    return [float(np.log(figure)) for figure in figures]


def expected_improvement(process: Process, rows: Array, best: float | Array) -> Array:
    """``E[max(best - cost, 0)]`` of a cost whose logarithm is normal; ``best`` may be another in each row."""
    from scipy.stats import norm

    mean, deviation = process(rows)
    deviation = np.maximum(deviation, 1e-9)
    z = (np.log(best) - mean) / deviation
    return np.asarray(
        best * norm.cdf(z) - np.exp(mean + deviation**2 / 2) * norm.cdf(z - deviation), dtype=np.float64
    )


def _kernel() -> Any:
    kernels = sklearn("gaussian_process.kernels", "cherrypick")
    matern = kernels.Matern(np.ones(len(COLUMNS)), _LENGTHS, nu=2.5)
    return kernels.ConstantKernel(1.0, _VARIANCE) * matern + kernels.WhiteKernel(1e-2, _NOISE)


def _regressor(kernel: Any = None, optimizer: str | None = "fmin_l_bfgs_b") -> Any:
    processes = sklearn("gaussian_process", "cherrypick")
    return processes.GaussianProcessRegressor(
        kernel or _kernel(), optimizer=optimizer, alpha=1e-10, random_state=0
    )
