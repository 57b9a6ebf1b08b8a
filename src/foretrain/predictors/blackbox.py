"""What predictors that give nothing but a step time share: runs made fit to learn from, refusals, and the forecast around a median."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from foretrain.errors import UnsupportedJob
from foretrain.forecast import Estimate, Forecast, whole_training
from foretrain.job import Job, Run
from foretrain.predictors.conformal import Factors, factors

Array = npt.NDArray[np.float64]

QUANTITIES = frozenset({"step_time_s", "samples_per_s", "tokens_per_s", "epoch_time_s", "total_time_s"})
UNSURE = Factors(0.4, 0.6, 1.7, 2.5)
"""Intervals where too few runs tell how far forecasts lie."""


def usable(runs: Iterable[Run], predictor: str) -> tuple[list[Run], tuple[str, ...]]:
    """The runs with a step time that plain data parallelism took, and why the others are none."""
    kept, left_out = [], []
    for run in runs:
        try:
            check_data_parallel(run.job, predictor)
            if not 0 < run.measured.get("step_time_s", 0.0) < math.inf:
                raise UnsupportedJob("no step_time_s")
            kept.append(run)
        except UnsupportedJob as error:
            left_out.append(f"{run.job.workload.model.label}: {error}")
    return kept, tuple(left_out)


def check_data_parallel(job: Job, predictor: str) -> None:
    """Refuse all but plain data parallelism over devices of one kind."""
    plan = job.plan
    degrees = {
        name: getattr(plan, name)
        for name in ("tensor", "pipeline", "context", "expert")
        if getattr(plan, name) > 1
    }
    odd = {
        **degrees,
        **{name: value for name in ("shard", "recompute") if (value := getattr(plan, name)) != "none"},
    }
    if plan.offload:
        odd["offload"] = True
    for name, value in odd.items():
        raise UnsupportedJob(f"plan.{name}: {value!r}; {predictor} forecasts plain data parallelism")
    if len({group.device.name for group in job.cluster.groups}) > 1:
        raise UnsupportedJob(f"cluster.groups: several devices; {predictor} forecasts clusters of one")


def step_times(runs: Sequence[Run]) -> Array:
    return np.array([run.measured["step_time_s"] for run in runs], dtype=np.float64)


def workload_key(job: Job) -> str:
    """A text that jobs share when they train the same thing in the same way, whatever the batch and the number of workers."""
    model, training = job.workload.model, job.workload.training
    what = [
        model.source,
        model.name,
        dict(model.args),
        model.task,
        model.config,
        training.mode,
        training.image,
        training.sequence,
        training.classes,
    ]
    how = [
        training.precision,
        training.optimizer,
        training.channels_last,
        training.compile,
        job.cluster.device.name,
        bool(job.plan.servers),
    ]
    return json.dumps([what, how], sort_keys=True, default=str)


def spread_of(measured_s: Array, held_out_s: Array) -> Factors:
    """Intervals from forecasts of runs that were left out; wide ones where there are few."""
    return factors((measured_s / held_out_s).tolist()) or UNSURE


def forecast_around(
    job: Job, predictor: str, median_s: float, spread: Factors, notes: Sequence[str] = ()
) -> Forecast:
    """The step time with its intervals, and what follows from it."""
    quantities = whole_training(job, estimate_around(median_s, spread))
    return Forecast(job=job, predictor=predictor, quantities=quantities, assumptions=tuple(notes))


def estimate_around(median: float, spread: Factors) -> Estimate:
    low_95, low, high, high_95 = (median * factor for factor in spread)
    return Estimate(median, low, high, low_95, high_95)


def widened(spread: Factors, power: float) -> Factors:
    """The interval with its logarithms that many times as long."""
    return Factors(*(factor**power for factor in spread))


def numbers(document: Mapping[str, Any], name: str) -> Array:
    return np.array(document[name], dtype=np.float64)
