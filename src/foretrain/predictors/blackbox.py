"""Gives predictors of step times alone what they share: usable runs by workload, refusals, forecasts around a
median."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from types import ModuleType
from typing import Any

import numpy as np

from foretrain.duration import duration
from foretrain.errors import InputError, UnsupportedJob, missing
from foretrain.forecast import Estimate, Forecast, ModelSize, whole_training
from foretrain.job import Job
from foretrain.predictors.base import take_runs
from foretrain.predictors.conformal import Factors, factors
from foretrain.predictors.seen import LINKS, SETTINGS, Array, Seen, unseen, workload_key
from foretrain.run import Run
from foretrain.step.graph import possible_step_graph, step_graph
from foretrain.step.state import model_size

QUANTITIES = frozenset({"step_time_s", "samples_per_s", "tokens_per_s", "epoch_time_s", "total_time_s"})
UNSURE = Factors(0.4, 0.6, 1.7, 2.5)
"""Intervals where too few runs tell how far forecasts lie."""

_DEGREES = dict.fromkeys(("tensor", "pipeline", "context", "expert"), 1)
_PLAIN = {**_DEGREES, "shard": "none", "recompute": "none", "offload": False}
"""What a plan has beside plain data parallelism when it has nothing beside it."""


def by_workload(
    runs: Iterable[Run], predictor: str, *, pooled: bool
) -> tuple[dict[str, list[Run]], tuple[str, ...]]:
    """The usable runs of each workload (``pooled``: of all as one), and why the others are none.

    Runs over several links between devices, or nodes, are workloads of their own; those that have no use for
    the link belong to each.
    """
    kept_runs, left_out = usable(runs, predictor)
    if not kept_runs:
        needs = f"{predictor} needs some of every workload"
        raise InputError(f"runs: none has a step time under data parallelism; {needs}")
    if pooled:
        return {"all workloads": kept_runs}, left_out
    bases: dict[str, list[tuple[Run, list[Any]]]] = {}
    for run in kept_runs:
        bases.setdefault(workload_key(run.job), []).append((run, _links(run.job)))
    workloads = {}
    for base, own in bases.items():
        columns = zip(*(links for _, links in own), strict=True)
        by_link = [{link for link in column if link is not None} for column in columns]
        only = [next(iter(values)) if len(values) == 1 else None for values in by_link]
        kinds = {tuple(link or one for link, one in zip(links, only, strict=True)) for _, links in own}
        for kind in sorted(kinds, key=str):
            workloads[json.dumps([base, kind])] = [run for run, links in own if _fits(links, kind)]
    return workloads, left_out


def _fits(links: Sequence[Any], known: Sequence[Any]) -> bool:
    """Whether there is no link that is not known."""
    return all(link is None or link == other for link, other in zip(links, known, strict=True))


def workload_of(job: Job, seen: Mapping[str, Seen], predictor: str) -> str:
    """The key of the workload whose runs tell of a job, by what was seen of each; refuses one without."""
    if "all workloads" in seen:
        return "all workloads"
    alike = {key: one for key, one in seen.items() if one.workload == workload_key(job)}
    if not alike:
        model = job.workload.model.label
        raise UnsupportedJob(
            f"model: no run of {model!r} in this setting; {predictor} needs runs of every workload"
        )
    for name in LINKS:
        value, known = SETTINGS[name](job), {text for one in alike.values() for text in one.settings[name]}
        if value is not None and value not in known:
            raise unseen(name, value, sorted(known), predictor)
    fitting = [key for key, one in alike.items() if all(one.has(job, name) for name in LINKS)]
    if not fitting:
        raise UnsupportedJob(f"cluster: no run over both of its links; {predictor} needs some")
    counts = {key: sum(len(alike[key].settings[name]) for name in LINKS) for key in fitting}
    fewest = [key for key, count in counts.items() if count == min(counts.values())]
    if len(fewest) > 1:
        raise UnsupportedJob(
            f"cluster.nodes: {job.cluster.nodes}; all runs of this model go over links, of several kinds"
        )
    return fewest[0]


def usable(runs: Iterable[Run], predictor: str) -> tuple[list[Run], tuple[str, ...]]:
    """The runs with a step time that plain data parallelism took, and why the others are none."""

    def checked(run: Run) -> Run:
        check_data_parallel(run.job, predictor)
        if not 0 < run.measured.get("step_time_s", 0.0) < math.inf:
            raise UnsupportedJob("no step_time_s")
        return run

    return take_runs(runs, checked)


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


def _links(job: Job) -> list[Any]:
    return [SETTINGS[name](job) for name in LINKS]


def of_workload(
    job: Job, names: Sequence[str], figures: Sequence[float], *, pooled: bool
) -> dict[str, float]:
    """Figures that count for one workload alone, under names of its own."""
    key = "all workloads" if pooled else workload_key(job)
    whose = f"{job.workload.model.label} {hashlib.sha256(key.encode()).hexdigest()[:6]}"
    return {f"{whose}: {name}": figure for name, figure in zip(names, figures, strict=True)}


def spread_of(measured_s: Array, held_out_s: Array) -> Factors:
    """Intervals from forecasts of runs that were left out; wide ones where there are few."""
    return factors((measured_s / held_out_s).tolist()) or UNSURE


def forecast_around(
    job: Job, predictor: str, median_s: float, spread: Factors, notes: Sequence[str] = ()
) -> Forecast:
    """The step time with its intervals, and what follows from it."""
    step_time, size = Estimate.around(median_s, spread), size_of(job)
    whole = duration(job, step_time, size)
    return Forecast(
        job=job,
        predictor=predictor,
        quantities=whole_training(job, step_time, size),
        assumptions=(*notes, *(whole.notes if whole else ())),
        duration=whole,
    )


def size_of(job: Job) -> ModelSize | None:
    """Size the job's model, where its total time depends on it: by checkpoints, which cannot do without, and
    by compiling, which can."""
    training = job.workload.training
    if training.total_steps is None:
        return None
    if training.checkpoint_every is not None:
        return model_size(job, step_graph(job))
    graph = possible_step_graph(job) if training.compile else None
    return None if graph is None else model_size(job, graph)


def numbers(document: Mapping[str, Any], name: str) -> Array:
    return np.array(document[name], dtype=np.float64)


def sklearn(part: str, predictor: str) -> ModuleType:
    """A module of scikit-learn, which is loaded only where something is learned."""
    import importlib

    try:
        return importlib.import_module(f"sklearn.{part}")
    except ModuleNotFoundError as error:
        raise missing("sklearn", predictor) from error
