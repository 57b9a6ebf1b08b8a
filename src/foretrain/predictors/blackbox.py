"""Gives predictors of step times alone what they share: usable runs, refusals, forecasts around a median."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from types import ModuleType
from typing import Any

import numpy as np
import numpy.typing as npt

from foretrain.duration import duration
from foretrain.errors import ForetrainError, InputError, UnsupportedJob
from foretrain.forecast import Estimate, Forecast, ModelSize, whole_training
from foretrain.job import Job, Run
from foretrain.predictors.conformal import Factors, factors
from foretrain.step.graph import known_step_graph, step_graph
from foretrain.step.state import model_size

Array = npt.NDArray[np.float64]

QUANTITIES = frozenset({"step_time_s", "samples_per_s", "tokens_per_s", "epoch_time_s", "total_time_s"})
UNSURE = Factors(0.4, 0.6, 1.7, 2.5)
"""Intervals where too few runs tell how far forecasts lie."""


_DEGREES = dict.fromkeys(("tensor", "pipeline", "context", "expert"), 1)
_PLAIN = {**_DEGREES, "shard": "none", "recompute": "none", "offload": False}
"""What a plan has beside plain data parallelism when it has nothing beside it."""


def by_workload(
    runs: Iterable[Run], predictor: str, *, pooled: bool
) -> tuple[dict[str, list[Run]], tuple[str, ...]]:
    """The usable runs of each workload (``pooled``: of all as one), and why the others are none."""
    kept_runs, left_out = usable(runs, predictor)
    if not kept_runs:
        needs = f"{predictor} needs some of every workload"
        raise InputError(f"runs: none has a step time under data parallelism; {needs}")
    workloads: dict[str, list[Run]] = {}
    for run in kept_runs:
        workloads.setdefault(workload_key(run.job, pooled=pooled), []).append(run)
    return workloads, left_out


def no_runs_of(job: Job, predictor: str) -> UnsupportedJob:
    model = job.workload.model.label
    return UnsupportedJob(
        f"model: no run of {model!r} in this setting; {predictor} needs runs of every workload"
    )


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
    for name, plain in _PLAIN.items():
        if (value := getattr(plan, name)) != plain:
            raise UnsupportedJob(f"plan.{name}: {value!r}; {predictor} forecasts plain data parallelism")
    if len({group.device.name for group in job.cluster.groups}) > 1:
        raise UnsupportedJob(f"cluster.groups: several devices; {predictor} forecasts clusters of one")


def step_times(runs: Sequence[Run]) -> Array:
    return np.array([run.measured["step_time_s"] for run in runs], dtype=np.float64)


def workload_key(job: Job, *, pooled: bool = False) -> str:
    """A text that jobs share when they train the same thing in the same way, at whatever batch and scale."""
    if pooled:
        return "all workloads"
    model, training = job.workload.model, job.workload.training
    what: list[Any] = [model.source, model.name, dict(model.args), model.task, model.config]
    what += [training.mode, training.image, training.sequence, training.classes]
    how: list[Any] = [training.precision, training.optimizer, training.channels_last, training.compile]
    how += [job.cluster.device.name, bool(job.plan.servers)]
    return json.dumps([what, how], sort_keys=True, default=str)


def spread_of(measured_s: Array, held_out_s: Array) -> Factors:
    """Intervals from forecasts of runs that were left out; wide ones where there are few."""
    return factors((measured_s / held_out_s).tolist()) or UNSURE


def forecast_around(
    job: Job, predictor: str, median_s: float, spread: Factors, notes: Sequence[str] = ()
) -> Forecast:
    """The step time with its intervals, and what follows from it."""
    step_time, size = estimate_around(median_s, spread), size_of(job)
    whole = duration(job, step_time, size)
    return Forecast(
        job=job,
        predictor=predictor,
        quantities=whole_training(job, step_time, size),
        assumptions=(*notes, *(whole.notes if whole else ())),
        duration=whole,
    )


def size_of(job: Job) -> ModelSize | None:
    """Of the job's model, where its graph is known; checkpoints cannot do without, so it is traced for
    them."""
    training = job.workload.training
    needed = training.checkpoint_every is not None and training.total_steps is not None
    graph = step_graph(job) if needed else known_step_graph(job)
    return None if graph is None else model_size(job, graph)


def estimate_around(median: float, spread: Factors) -> Estimate:
    return Estimate.around(median, spread)


def widened(spread: Factors, power: float) -> Factors:
    """The interval with its logarithms that many times as long."""
    return Factors(*(factor**power for factor in spread))


def numbers(document: Mapping[str, Any], name: str) -> Array:
    return np.array(document[name], dtype=np.float64)


def sklearn(part: str, predictor: str) -> ModuleType:
    """A module of scikit-learn, which is loaded only where something is learned."""
    import importlib

    try:
        return importlib.import_module(f"sklearn.{part}")
    except ModuleNotFoundError as error:
        raise ForetrainError(f"sklearn is not installed; {predictor} needs foretrain[learn]") from error
