"""Ernest: runs of a workload at several scales in; a scaling law of four terms, and with it the step time at other scales, out."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Self, final

import numpy as np

from foretrain.errors import InputError, UnsupportedJob
from foretrain.forecast import Forecast
from foretrain.job import Job, Run
from foretrain.predictors.base import Predictor
from foretrain.predictors.blackbox import (
    QUANTITIES,
    Array,
    check_data_parallel,
    forecast_around,
    spread_of,
    step_times,
    usable,
    workload_key,
)  # fmt: skip
from foretrain.predictors.conformal import Factors

TERMS = ("1", "scale / machines", "log machines", "machines")
_ALL = "all workloads"


@final
class ErnestPredictor(Predictor):
    """``time = a + b scale/machines + c log(machines) + d machines`` with ``a, b, c, d >= 0`` (Venkataraman et al., NSDI 2016).

    The scale is the number of samples per step, so that scale over machines is a worker's batch. Each workload has a law of
    its own, and a workload without runs has none; ``pooled`` puts the runs of all workloads into one law instead, which is
    all that can be said of a new one. Which scales to measure, ``foretrain design`` says (A-optimal, as Ernest chooses).
    """

    name: ClassVar[str] = "ernest"
    quantities: ClassVar[frozenset[str]] = QUANTITIES
    learns: ClassVar[bool] = True

    def __init__(self, *, pooled: bool = False) -> None:
        self.pooled = pooled
        self.laws_: dict[str, tuple[float, ...]] = {}
        self.spread_: Factors | None = None

    def fit(self, runs: Iterable[Run]) -> Self:
        kept, self.left_out_ = usable(runs, self.name)
        if not kept:
            raise InputError(
                "runs: none has a step time under data parallelism; ernest needs some of every workload"
            )
        by_workload: dict[str, list[Run]] = {}
        for run in kept:
            by_workload.setdefault(self._key(run.job), []).append(run)
        self.laws_ = {
            key: law([run.job for run in mine], step_times(mine)) for key, mine in by_workload.items()
        }
        held_out = [
            pair
            for mine in by_workload.values()
            if len(mine) > len(TERMS)
            for pair in _left_out_in_turn(mine)
        ]
        self.spread_ = spread_of(
            np.array([one for one, _ in held_out]), np.array([other for _, other in held_out])
        )
        return self

    def predict(self, job: Job) -> Forecast:
        check_data_parallel(job, self.name)
        if self.spread_ is None:
            raise UnsupportedJob("ernest: has learned from no runs yet; fit it first")
        found = self.laws_.get(self._key(job))
        if found is None:
            raise UnsupportedJob(
                f"model: no run of {job.workload.model.label!r} in this setting; ernest needs runs of every workload"
            )
        return forecast_around(job, self.name, _time_s(job, found), self.spread_)

    def without(self, families: frozenset[str] = frozenset(), devices: frozenset[str] = frozenset()) -> Self:
        self.laws_, self.spread_ = {}, None
        return self

    def _key(self, job: Job) -> str:
        return _ALL if self.pooled else workload_key(job)

    def _write(self, folder: Path) -> Mapping[str, Any]:
        if self.spread_ is None:
            raise InputError("ernest: has learned from no runs yet, so there is nothing to save")
        laws = {key: list(values) for key, values in self.laws_.items()}
        return {"terms": list(TERMS), "pooled": self.pooled, "laws": laws, "factors": list(self.spread_)}

    @classmethod
    def _read(cls, folder: Path, document: Mapping[str, Any]) -> Self:
        made = cls(pooled=document["pooled"])
        made.laws_ = {key: tuple(values) for key, values in document["laws"].items()}
        made.spread_ = Factors(*document["factors"])
        return made


def terms(job: Job) -> list[float]:
    """As ``TERMS`` names them."""
    machines, scale = job.cluster.world_size, job.workload.training.global_batch
    return [1.0, scale / machines, math.log(machines), float(machines)]


def law(jobs: Sequence[Job], times_s: Array) -> tuple[float, ...]:
    """The coefficients that are not negative and fit best (least squares of the relative error)."""
    from scipy.optimize import nnls

    rows = np.array([terms(job) for job in jobs])
    solution, _ = nnls(rows / times_s[:, None], np.ones(len(jobs)))
    return tuple(float(value) for value in solution)


def _time_s(job: Job, coefficients: Sequence[float]) -> float:
    return max(float(np.dot(terms(job), coefficients)), 1e-9)


def _left_out_in_turn(runs: Sequence[Run]) -> list[tuple[float, float]]:
    """Measured and forecast step times, each run forecast by the others (of many, by nine tenths of the others)."""
    times_s, parts = step_times(runs), np.arange(len(runs)) % min(len(runs), 10)
    pairs = []
    for part in np.unique(parts):
        known = law([runs[i].job for i in np.flatnonzero(parts != part).tolist()], times_s[parts != part])
        pairs += [
            (float(times_s[i]), _time_s(runs[i].job, known)) for i in np.flatnonzero(parts == part).tolist()
        ]
    return pairs
