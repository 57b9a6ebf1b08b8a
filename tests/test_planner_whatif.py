"""What plans tell beside the best one: more devices, many runs, the largest that fits, probes,
suggestions."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from foretrain.errors import InputError
from foretrain.forecast import Estimate, Forecast
from foretrain.job import Job
from foretrain.planner.certainty import OWN, covariance, drawn_s, first_is_best, of_the_best
from foretrain.planner.clusters import Wanted
from foretrain.planner.curves import WORTH_WHILE, Curve, curves, many_runs
from foretrain.planner.goal import Goal
from foretrain.planner.largest import largest
from foretrain.planner.outcome import Option, Plans
from foretrain.planner.probes import probes
from foretrain.planner.suggest import suggestions
from foretrain.predictors import get
from planning import LLAMA, job, planned

pytestmark = pytest.mark.usefixtures("shared_cache")


@pytest.fixture(scope="module")
def plans(shared_cache: Path) -> Plans:
    return planned(job(devices=8, steps=1000), wanted=Wanted(most=16), top=6)


def option(devices: int, seconds: float, width: float = 1.1) -> Option:
    """An option that takes so long, told without a forecast."""
    made = job(devices=devices, steps=100, global_batch=64)
    time = Estimate(seconds, seconds / width, seconds * width)
    quantities = {"step_time_s": time * 0.01, "total_time_s": time, "samples_per_s": time.inverse(1600)}
    return Option(forecast=Forecast(job=made, predictor="made up", quantities=quantities), goal=Goal())


# More devices


@pytest.mark.parametrize(
    ("times", "knee"),
    [((100, 52, 27), 32), ((100, 52, 40), 16), ((100, 99, 98), 8)],
)
def test_the_knee_is_where_more_devices_stop_paying(times: tuple[float, ...], knee: int) -> None:
    points = tuple(option(8 * 2**i, seconds) for i, seconds in enumerate(times))
    found = Curve(kind="h100", points=points).knee
    assert found is not None
    assert found.devices == knee
    assert 0.5 < WORTH_WHILE < 1


def test_curves_are_of_each_kind(plans: Plans) -> None:
    (curve,) = curves(plans)
    counts = [point.devices for point in curve.points]
    assert counts == sorted(counts)
    assert curve.to_dict()["knee"] in counts


# Many runs


def test_many_runs_go_in_waves() -> None:
    made = Plans(
        options=(option(8, 100.0),),
        goal=Goal(),
        target="megatron",
        by_cluster=(option(8, 100.0), option(16, 60.0)),
    )
    found = many_runs(made, runs=30, pool=64)
    by_devices = {one.option.devices: one for one in found}
    assert by_devices[8].at_once == 8
    assert by_devices[8].waves == 4
    assert by_devices[8].time_s.median == pytest.approx(400.0)
    assert by_devices[16].time_s.median == pytest.approx(480.0)
    assert [one.option.devices for one in found] == [8, 16]
    assert many_runs(made, runs=2, pool=64)[0].option.devices == 16


# The largest that fits


def test_the_largest_sequence_fits_and_the_next_does_not() -> None:
    made, most = job(devices=1, device="l4", global_batch=1), 27_000

    def plans_of(asked: Job, held: Mapping[str, Any]) -> Plans:
        sequence = asked.workload.training.sequence or 0
        forecast = dataclasses.replace(option(1, 100.0).forecast, job=asked)
        options = (Option(forecast=forecast, goal=Goal()),) if sequence <= most else ()
        return Plans(options=options, goal=Goal(), target="fsdp2")

    found = largest("sequence", made, plans_of)
    assert found.option is not None
    assert isinstance(found.value, int)
    assert isinstance(found.next_value, int)
    assert found.value <= most < found.next_value <= found.value * 33 // 32 + 1024
    assert found.option.job.workload.training.sequence == found.value
    with pytest.raises(InputError, match="largest: 'width' is not one of"):
        largest("width", made, plans_of)


def test_the_largest_batch_is_of_one_micro_batch() -> None:
    made = job(devices=1, device="l4", global_batch=1)

    def plans_of(asked: Job, held: Mapping[str, Any]) -> Plans:
        return planned(asked, "fsdp2", allowed={"recompute": ("full",), **held}, top=1)

    found = largest("batch", made, plans_of)
    assert found.option is not None
    assert found.option.job.accumulation == 1
    assert found.option.job.workload.training.global_batch == found.value


# How sure


def test_what_plans_have_in_common_does_not_change_their_order(plans: Plans) -> None:
    forecasts = [one.forecast for one in plans]
    predictor = get("deletepop")
    known = [predictor.predict(one.job) for one in forecasts]
    times = drawn_s(predictor, known)
    assert np.array_equal(times, drawn_s(predictor, known))
    together, means = covariance(predictor, known)
    assert np.all(np.linalg.eigvalsh(together) > 0)
    assert means == pytest.approx(np.log([one["step_time_s"].median for one in known]))
    alone = np.sqrt(np.diag(together))
    apart = np.sqrt(together[0, 0] + together[1, 1] - 2 * together[0, 1])
    assert apart < np.hypot(alone[0], alone[1])
    assert apart >= np.sqrt(2) * OWN


def test_a_plan_that_is_far_ahead_is_surely_the_best() -> None:
    random = np.random.default_rng(0)
    close = np.exp(0.05 * random.standard_normal((1000, 2)))
    far = close * np.array([1.0, 2.0])
    assert first_is_best(far, [1.0, 1.0]) > 0.99
    assert 0.4 < first_is_best(close, [1.0, 1.0]) < 0.6
    assert first_is_best(far, [3.0, 1.0]) < 0.01
    best = of_the_best(close)
    assert best.median < 1.0
    assert best.low < best.high


# Probes and suggestions


def test_probes_are_told_with_their_price_and_gain() -> None:
    close = tuple(option(8, seconds) for seconds in (100.0, 100.5, 101.0, 102.0))
    found = probes(get("roofline"), Plans(options=close, goal=Goal(), target="megatron"))
    assert 0 < len(found) <= 3
    assert len({probe.number for probe in found}) == len(found)
    assert all(probe.gain > 0 and probe.time_s > 0 for probe in found)


def test_no_probe_is_worth_while_where_one_plan_is_far_ahead() -> None:
    made = Plans(options=(option(8, 100.0), option(8, 900.0)), goal=Goal(), target="megatron")
    assert probes(get("roofline"), made) == []
    alone = dataclasses.replace(made, options=made.options[:1])
    assert probes(get("roofline"), alone) == []


def test_suggestions_are_faster_and_fit() -> None:
    predictor = get("roofline")
    slow = dataclasses.replace(
        job({**LLAMA, "hidden_size": 2048}, devices=8),
        plan=dataclasses.replace(job(devices=8).plan, micro_batch=1, recompute="full"),
    )
    forecast = predictor.predict(slow)
    found = suggestions(forecast, predictor)
    assert 0 < len(found) <= 3
    gains = [one.faster for one in found]
    assert gains == sorted(gains, reverse=True)
    assert all(one.forecast["step_time_s"].median < forecast["step_time_s"].median for one in found)
    assert any("recompute none" in one.change or "micro_batch" in one.change for one in found)
    assert all(one.to_dict()["fields"] for one in found)
