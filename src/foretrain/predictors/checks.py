"""Checks that a predictor keeps what the interface promises; every predictor passes, a user's own too."""

from __future__ import annotations

import copy
import dataclasses
import json
import math
import tempfile
from collections.abc import Sequence
from pathlib import Path

from foretrain.architectures import family
from foretrain.cluster import Cluster
from foretrain.errors import UnsupportedJob
from foretrain.forecast import Forecast
from foretrain.job import Job
from foretrain.plan import Plan
from foretrain.predictors.base import FILE, Predictor
from foretrain.quantities import QUANTITIES
from foretrain.run import Run


def check_predictor(predictor: Predictor, job: Job, runs: Sequence[Run] | None = None) -> None:
    """Check everything that the rest of the program relies on.

    The predictor is left as it is. ``runs`` are what a copy of it learns from; without them, made-up runs of
    ``job`` at several batch sizes. Before learning, it may refuse the job with ``UnsupportedJob``; after, it
    must forecast it.
    """
    check_claims(predictor)
    check_refusal(predictor, job)
    fitted = copy.deepcopy(predictor)
    check_fit(fitted, made_up_runs(predictor, job) if runs is None else runs)
    check_forecast(fitted, fitted.predict(job), job)
    check_deterministic(fitted, job)
    check_saved(fitted, job)
    check_refusal(fitted, on_two_devices(job))


def check_claims(predictor: Predictor) -> None:
    """A name, and quantities that exist."""
    name = getattr(predictor, "name", None)
    assert isinstance(name, str), f"{type(predictor).__name__} has no name"
    assert name, f"{type(predictor).__name__} has an empty name"
    claimed = getattr(predictor, "quantities", None)
    assert isinstance(claimed, frozenset), (
        f"{name}: quantities is {type(claimed).__name__}, not a frozenset of names"
    )
    assert claimed, f"{name} claims no quantity"
    strange = sorted(claimed - QUANTITIES.keys())
    assert not strange, f"{name} claims {', '.join(strange)}, which no run can measure"


def check_fit(predictor: Predictor, runs: Sequence[Run]) -> None:
    """``fit`` takes any iterable, even one that can be read only once, and returns the predictor itself."""
    result = predictor.fit(iter(runs))
    assert result is predictor, (
        f"{predictor.name}: fit returned {type(result).__name__}, not the predictor itself"
    )


def check_forecast(predictor: Predictor, forecast: Forecast, job: Job) -> None:
    """The forecast is of this job, by this predictor, in finite numbers in order, and only of what was
    claimed."""
    name = predictor.name
    assert isinstance(forecast, Forecast), (
        f"{name}: predict returned {type(forecast).__name__}, not a Forecast"
    )
    assert forecast.predictor == name, f"{name}: the forecast says it is by {forecast.predictor!r}"
    assert forecast.job == job, f"{name}: the forecast is of another job than the one asked for"
    assert forecast.quantities, f"{name}: the forecast has no quantities"
    strange = sorted(forecast.quantities.keys() - predictor.quantities)
    assert not strange, f"{name} forecasts {', '.join(strange)} without claiming to"
    for quantity, estimate in forecast.quantities.items():
        numbers = (estimate.low, estimate.median, estimate.high)
        assert all(map(math.isfinite, numbers)), (
            f"{name}: {quantity} has a bound that is not finite: {numbers}"
        )
        assert 0 <= numbers[0] <= numbers[1] <= numbers[2], (
            f"{name}: {quantity} is not 0 <= low <= median <= high: {numbers}"
        )
    _as_json(forecast)


def check_deterministic(predictor: Predictor, job: Job) -> None:
    """Check that the same job gets the same numbers."""
    first, second = (predictor.predict(job).quantities for _ in range(2))
    differing = sorted(name for name in first.keys() | second.keys() if first.get(name) != second.get(name))
    assert not differing, f"{predictor.name}: the same job asked twice differs in {', '.join(differing)}"


def check_saved(predictor: Predictor, job: Job) -> None:
    """A predictor that learns comes back from its folder with the same numbers."""
    if not predictor.learns:
        return
    with tempfile.TemporaryDirectory() as folder:
        predictor.save(Path(folder))
        assert (Path(folder) / FILE).is_file(), f"{predictor.name}: save left no {FILE}"
        again = type(predictor).load(Path(folder)).predict(job).quantities
    before = predictor.predict(job).quantities
    differing = sorted(name for name in before.keys() | again.keys() if before.get(name) != again.get(name))
    assert not differing, (
        f"{predictor.name}: after save and load the forecast differs in {', '.join(differing)}"
    )


def check_forgets(predictor: Predictor, job: Job, runs: Sequence[Run] | None = None) -> None:
    """Check that what was learned of a family or a device is gone after ``without``, as if it had never been
    learned, and stays so in a folder.

    ``runs`` are of the family and device of ``job``.
    """
    runs = made_up_runs(predictor, job) if runs is None else runs
    slower = [
        Run(job=run.job, measured={name: 10 * value for name, value in run.measured.items()}) for run in runs
    ]
    families, devices = frozenset({family(job.workload.model)}), frozenset({job.cluster.device.name})
    with tempfile.TemporaryDirectory() as folder:
        taught = copy.deepcopy(predictor).fit(slower)
        if predictor.learns:
            taught.save(Path(folder))
        for forgotten in ({"families": families}, {"devices": devices}):
            never = copy.deepcopy(predictor).without(**forgotten)
            loaded = [type(predictor).load(Path(folder))] if predictor.learns else []
            for one in (copy.deepcopy(taught), *loaded):
                _check_alike(never, one.without(**forgotten), job, f"without its {next(iter(forgotten))}")
            again = copy.deepcopy(never).fit(runs)
            _check_alike(again, one.fit(runs), job, f"without its {next(iter(forgotten))}, and learned anew")
            check_saved(again, job)


def _check_alike(one: Predictor, other: Predictor, job: Job, when: str) -> None:
    first, second = (_answer(each, job) for each in (one, other))
    assert first == second, (
        f"{one.name}: {when}, what was learned before still tells: {first} is not {second}"
    )


def _answer(predictor: Predictor, job: Job) -> object:
    try:
        return {name: estimate.median for name, estimate in predictor.predict(job).quantities.items()}
    except UnsupportedJob as refusal:
        return str(refusal)


def check_refusal(predictor: Predictor, job: Job) -> None:
    """A job is either forecast or refused with ``UnsupportedJob`` and a reason."""
    try:
        forecast = predictor.predict(job)
    except UnsupportedJob as refusal:
        if not str(refusal):
            raise AssertionError(f"{predictor.name} refuses a job without saying why") from refusal
    except Exception as error:
        raised = f"{type(error).__name__} ({error})"
        message = f"{predictor.name}: a job that it cannot do raised {raised}, not UnsupportedJob"
        raise AssertionError(message) from error
    else:
        check_forecast(predictor, forecast, job)


def on_two_devices(job: Job) -> Job:
    """The job with plain data parallelism over two of its first device, and twice its batch."""
    spec = job.cluster.specs[0]
    section = {"device": spec.device, "devices_per_node": 2}
    if spec.cores_per_device is not None:
        section["cores_per_device"] = spec.cores_per_device
    training = job.workload.training
    doubled = dataclasses.replace(training, global_batch=2 * training.global_batch)
    return Job(
        workload=dataclasses.replace(job.workload, training=doubled),
        cluster=Cluster.read(section),
        plan=Plan(),
    )


def made_up_runs(predictor: Predictor, job: Job, count: int = 6) -> list[Run]:
    """Runs of a job at growing batch sizes, in which every claimed quantity grows with the batch."""
    runs = []
    for factor in range(1, count + 1):
        training = dataclasses.replace(
            job.workload.training, global_batch=factor * job.workload.training.global_batch
        )
        larger = dataclasses.replace(job, workload=dataclasses.replace(job.workload, training=training))
        runs.append(Run(job=larger, measured=dict.fromkeys(sorted(predictor.quantities), 0.1 + 0.1 * factor)))
    return runs


def _as_json(forecast: Forecast) -> None:
    try:
        json.dumps(forecast.to_dict(), allow_nan=False)
    except (TypeError, ValueError) as error:
        raise AssertionError(f"{forecast.predictor}: the forecast is not plain JSON ({error})") from error
