"""Does the work of requests, in a worker process: forecasts, plans, simulations, calibrations."""

from __future__ import annotations

import contextlib
import functools
import itertools
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from foretrain import predictors
from foretrain.checkpoints import config_section
from foretrain.errors import InputError, UnsupportedJob
from foretrain.forecast import Forecast
from foretrain.job import Job
from foretrain.options import DEFAULT_DEVICE
from foretrain.progress import tell
from foretrain.run import read_runs
from foretrain.schema import read
from foretrain.serve.controller import Controller, local_resources, ray_resources
from foretrain.serve.requests import (
    ExplainRequest,
    LearnRequest,
    PlanRequest,
    PredictRequest,
    ScheduleRequest,
    reading,
)
from foretrain.serve.scoring import changes, leaderboard

_TOO_LARGE = (OverflowError, RecursionError, MemoryError)


@contextlib.contextmanager
def _computing() -> Iterator[None]:
    try:
        yield
    except _TOO_LARGE as error:
        raise UnsupportedJob(f"job: its figures are too large ({type(error).__name__})") from error


def predict(task: Mapping[str, Any]) -> dict[str, Any]:
    """A forecast; ``where`` of the predictor is its name or the folder of a saved one."""
    return _forecast(task, read(PredictRequest, task["request"], "")).to_dict()


def record(task: Mapping[str, Any]) -> dict[str, Any]:
    """A forecast with what a page draws of it: parts, timeline, memory, and how its time comes about."""
    from foretrain.web.records import record as shown

    forecast = _forecast(task, read(PredictRequest, task["request"], ""))
    drawn = shown(forecast, _controller(task["where"], task.get("ray")).predictor, fine=True)
    details = {name.partition(".")[2]: drawn.pop(name) for name in list(drawn) if name.startswith("details.")}
    return {**drawn, "job": forecast.job.to_dict(), "details": details}


def explain(task: Mapping[str, Any]) -> dict[str, Any]:
    """Two forecasts, and why they differ."""
    from foretrain.report.explain import explain as compare

    asked = read(ExplainRequest, task["request"], "")
    a, b = (_forecast(task, one) for one in asked.both)
    first, second = asked.names
    return compare(a, b, names=(first, second)).to_dict()


def _forecast(task: Mapping[str, Any], asked: PredictRequest) -> Forecast:
    controller = _controller(task["where"], task.get("ray"))
    with reading("job"):
        job = _job(asked)
    with _computing():
        return controller.ask(job).forecast


@functools.lru_cache(maxsize=16)
def _controller(where: str, ray: str | None) -> Controller:
    return Controller(
        where, resources=local_resources if ray is None else functools.partial(ray_resources, ray)
    )


def _job(asked: PredictRequest) -> Job | Mapping[str, Any]:
    """The job that is meant; tables without a cluster are for the controller to complete."""
    from foretrain.api import job_of

    if asked.config is not None:
        return job_of(config_tables(asked.config, asked.options), asked.options)
    if asked.job is not None and not asked.options and "cluster" not in asked.job:
        return asked.job
    return job_of(asked.model if asked.job is None else asked.job, asked.options)


_USUAL_BATCH = 32


def config_tables(config: Mapping[str, Any], options: Mapping[str, Any]) -> dict[str, Any]:
    """The tables of a job around a Hugging Face config.json, as around the name of a model."""
    model, training = config_section(config, "config")
    somewhere = {"device", "node", "groups"} & set(options)
    cluster = {} if somewhere else {"device": DEFAULT_DEVICE}
    return {"model": model, "training": {"global_batch": _USUAL_BATCH, **training}, "cluster": cluster}


def plan(task: Mapping[str, Any]) -> dict[str, Any]:
    """The best plans of a job."""
    from foretrain.planner import plan as search
    from foretrain.planner.curves import curves
    from foretrain.web.plans import options_of, plan_section

    asked = read(PlanRequest, task["request"], "")
    names = ("kinds", "max_devices", "counts", "deadline", "budget", "objective", "framework", "fits",
             "risk", "top", "seconds", "exhaustive")  # fmt: skip
    question = {name: getattr(asked, name) for name in names}
    for name in asked.options:
        if name in question or name in ("processes", "ray", "cached", "predictor", "catalog", "listener"):
            raise InputError(f"options.{name}: not a field of a job")
    with _computing():
        plans = search(
            _planned(asked),
            predictor=task["where"],
            processes=task["processes"],
            ray=task.get("ray"),
            **question,
            **asked.options,
        )
        shown = plan_section(plans, None, options_of(plans))
        return plans.to_dict() | {"curves": [curve.to_dict() for curve in curves(plans)], "shown": shown}


def _planned(asked: PlanRequest) -> Any:
    if asked.config is not None:
        return config_tables(asked.config, asked.options)
    return asked.model if asked.job is None else asked.job


def schedule(task: Mapping[str, Any]) -> dict[str, Any]:
    """Simulate a trace on a cluster under policies."""
    from foretrain.scheduling.admission import runnable
    from foretrain.scheduling.clusters import read_machines
    from foretrain.scheduling.placement import placement
    from foretrain.scheduling.study import Scenario, run_all
    from foretrain.scheduling.summary import document
    from foretrain.units import parse_seconds

    asked = read(ScheduleRequest, task["request"], "")
    with reading("trace"):
        trace = _trace(asked)
    placement(asked.placement)
    rounds_s = parse_seconds(asked.rounds, "rounds") if asked.rounds else None
    machines = read_machines(asked.cluster, rack=asked.rack)
    cases = itertools.product(asked.policies, asked.errors, range(asked.seeds))
    scenarios = [
        Scenario(
            policy=policy, machines=machines, placement=asked.placement, error=error, rounds_s=rounds_s,
            seed=seed,
        )
        for policy, error, seed in cases
    ]  # fmt: skip
    for scenario in scenarios:
        scenario.check()
    trace = runnable(trace, scenarios[0])
    outcomes = run_all(
        trace,
        scenarios,
        processes=task["processes"],
        ray=task.get("ray"),
        done=lambda count: tell("simulations", count, len(scenarios)),
    )
    return document(trace, outcomes)


def _trace(asked: ScheduleRequest) -> Any:
    from foretrain.scheduling.traces import read_trace
    from foretrain.scheduling.workload import TraceGenerator

    if asked.trace is None:
        trace = TraceGenerator.read(str(asked.generate)).trace()
    else:
        with tempfile.TemporaryDirectory(prefix="foretrain-trace-") as folder:
            file = Path(folder) / "trace"
            file.write_text(asked.trace, encoding="utf-8")
            try:
                trace = read_trace(file, asked.format)
            except InputError as error:
                raise InputError(str(error).replace(str(file), "trace")) from error
    return trace if asked.first is None else trace.first(asked.first)


def learn(task: Mapping[str, Any]) -> dict[str, Any]:
    """Learn a predictor from the runs of a file, and leave it in a folder."""
    from foretrain.predictors.learning import learn_into

    asked = read(LearnRequest, task["request"], "")
    predictor = predictors.get(asked.predictor)
    if not predictor.learns:
        raise InputError(f"predictor: {predictor.name!r} has nothing to learn")
    runs = [run for _, run in read_runs(Path(task["runs"]))]
    if not runs:
        raise InputError("name: there are no runs to learn from that the question takes in")
    predictor.progress = lambda done, total: tell("learning", done, total)
    taken = learn_into(Path(task["folder"]), predictor, runs, tell=tell)
    changed = changes(predictors.get(asked.predictor), predictor, runs)
    return {
        "name": asked.name,
        "predictor": predictor.name,
        "runs": taken,
        "left_out": list(predictor.left_out_[:20]),
        "left_out_count": len(predictor.left_out_),
        "changes": changed,
    }


TASKS: dict[str, Callable[[Mapping[str, Any]], dict[str, Any]]] = {
    "predict": predict,
    "record": record,
    "explain": explain,
    "leaderboard": leaderboard,
    "plan": plan,
    "schedule": schedule,
    "learn": learn,
}
