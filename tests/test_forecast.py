"""Forecasts: intervals stay in order through arithmetic, whole trainings follow from steps, and all of it is
JSON."""

from __future__ import annotations

import copy
import json
import math
import pickle
import sys
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import steps
from foretrain.duration import Duration, DurationPart, duration
from foretrain.errors import ForetrainError, InputError
from foretrain.estimate import CERTAIN, Factors
from foretrain.forecast import Estimate, Forecast, RankMemory, whole_training
from foretrain.job import Job
from foretrain.report import figures

POSITIVE = st.floats(1e-9, 1e12)
ESTIMATES = st.lists(POSITIVE, min_size=3, max_size=3).map(
    lambda values: Estimate(*(sorted(values)[i] for i in (1, 0, 2)))
)
WIDE = st.lists(POSITIVE, min_size=5, max_size=5).map(
    lambda values: Estimate(*(sorted(values)[i] for i in (2, 1, 3, 0, 4)))
)
"""With the bounds of the 95 % interval."""
GIB = 2.0**30


def job(**training: Any) -> Job:
    text = {"source": "transformers", "task": "causal-lm", "config": {"model_type": "gpt2"}}
    return Job.read({
        "model": text if "sequence" in training else {"source": "timm", "name": "resnet18"},
        "training": {"global_batch": 10, **training},
        "cluster": {"device": "t4"},
    })  # fmt: skip


def forecast(**changes: Any) -> Forecast:
    return Forecast(
        **{"job": job(), "predictor": "test", "quantities": {"step_time_s": Estimate(2, 1, 3)}, **changes}
    )


# Estimates


@pytest.mark.parametrize("bounds", [(1, 2, 3), (3, 1, 2), (1, 1, float("nan")), (float("nan"), 0, 1)])
def test_bounds_out_of_order_are_refused(bounds: tuple[float, float, float]) -> None:
    with pytest.raises(ValueError, match="low <= median <= high"):
        Estimate(*bounds)


def test_estimates_by_hand() -> None:
    assert Estimate(2, 1, 4) * 3 == Estimate(6, 3, 12)
    assert Estimate(2, 1, 4).inverse() == Estimate(0.5, 0.25, 1)
    assert Estimate(2, 1, 4).inverse(8) == Estimate(4, 2, 8)


@given(ESTIMATES, st.floats(0, 1e6))
def test_scaling_keeps_the_order(estimate: Estimate, factor: float) -> None:
    scaled = estimate * factor
    assert scaled.low <= scaled.median <= scaled.high
    assert scaled.median == estimate.median * factor


@given(WIDE, WIDE)
def test_sums_keep_the_order_and_are_wider_where_both_are_high_together(a: Estimate, b: Estimate) -> None:
    together, apart = a + b, a.beside(b)
    assert together.median == apart.median == a.median + b.median
    assert together.low <= apart.low <= apart.high <= together.high
    wider = max(a.high - a.median, b.high - b.median)
    assert apart.high - apart.median >= wider - 1e-9 * apart.high


@given(ESTIMATES, POSITIVE)
def test_the_inverse_of_the_inverse_is_the_estimate(estimate: Estimate, numerator: float) -> None:
    again = estimate.inverse(numerator).inverse(numerator)
    assert (again.low, again.median, again.high) == pytest.approx(
        (estimate.low, estimate.median, estimate.high)
    )


@pytest.mark.parametrize(
    "bounds", [(2, 1, 3, 1.5, 4), (2, 1, 3, 0.5, 2.5), (2, 1, 3, float("nan"), 4), (2, 1, 3, None, 2)]
)
def test_the_wider_interval_holds_the_narrower(bounds: tuple[float, float, float, float, float]) -> None:
    with pytest.raises(ValueError, match="low_95 <= low <= median <= high <= high_95"):
        Estimate(*bounds)


def test_wide_estimates_by_hand() -> None:
    assert Estimate(2, 1, 4, 0.5, 8) * 3 == Estimate(6, 3, 12, 1.5, 24)
    assert Estimate(2, 1, 4, 0.5, 8).inverse(8) == Estimate(4, 2, 8, 1, 16)
    assert Estimate(2, 1, 4, None, 8).inverse(8) == Estimate(4, 2, 8, 1, None)


@given(WIDE, st.floats(0, 1e6), POSITIVE)
def test_both_intervals_stay_in_order(estimate: Estimate, factor: float, numerator: float) -> None:
    for changed in (estimate * factor, estimate.inverse(numerator)):
        bounds = [changed.low_95, changed.low, changed.median, changed.high, changed.high_95]
        assert bounds == sorted(bounds)  # type: ignore[type-var]
    again = estimate.inverse(numerator).inverse(numerator)
    assert (again.low_95, again.high_95) == pytest.approx((estimate.low_95, estimate.high_95))


def test_limits_cut_bounds_on_either_side() -> None:
    estimate = Estimate(2, 1, 4, 0.5, 8)
    assert estimate.at_most(3) == Estimate(2, 1, 3, 0.5, 3)
    assert estimate.at_most(0.1) == Estimate(0.1, 0.1, 0.1, 0.1, 0.1)
    assert estimate.at_least(3) == Estimate(3, 3, 4, 3, 8)


def test_what_falls_only_far_from_one_swaps_the_bounds_all_the_same() -> None:
    """What is left until ten: of one and of two it is the same where nothing below five counts."""
    left = Estimate(6, 4, 8, 3, 12).mapped(lambda value: max(0.0, 10 - max(value, 5)))
    assert left == Estimate(4, 2, 5, 0, 5)


@given(WIDE, WIDE)
def test_the_product_of_two_is_bound_by_bound(share: Estimate, whole: Estimate) -> None:
    product = share * whole
    assert (product.low, product.median) == (share.low * whole.low, share.median * whole.median)
    assert (share * Estimate(2, 1, 3)).high_95 is None


# Multiples of a median

SPREADS = st.lists(st.floats(0.01, 0.99), min_size=4, max_size=4).map(
    lambda values: Factors(min(values[:2]), max(values[:2]), 1 / max(values[2:]), 1 / min(values[2:]))
)


@given(SPREADS, POSITIVE)
def test_an_estimate_has_the_multiples_it_was_made_of(spread: Factors, median: float) -> None:
    estimate = Estimate.around(median, spread)
    assert Factors.of(estimate) == pytest.approx(spread)
    assert Factors.of(estimate.inverse()) == pytest.approx(spread.inverse())


def test_the_multiples_of_an_estimate_without_the_wider_interval_are_those_of_the_narrower() -> None:
    assert Factors.of(Estimate(2, 1, 4)) == Factors(0.5, 0.5, 2.0, 2.0)


@given(SPREADS, SPREADS)
def test_of_two_spreads_the_product_is_wider_than_either(one: Factors, other: Factors) -> None:
    joined, widest = one.joined(other), one.widest(other)
    for low, high in ((0, 3), (1, 2)):
        assert joined[low] <= widest[low] * (1 + 1e-9)
        assert joined[high] >= widest[high] * (1 - 1e-9)
    assert joined == pytest.approx(other.joined(one))
    assert one.joined(one) == pytest.approx(one.power(2**0.5))
    assert one.joined(CERTAIN) == pytest.approx(one)
    assert one.widest(CERTAIN) == one


def test_spreads_by_hand() -> None:
    spread = Factors(0.25, 0.5, 2.0, 8.0)
    assert spread.inverse() == Factors(0.125, 0.5, 2.0, 4.0)
    assert spread.power(2) == Factors(0.0625, 0.25, 4.0, 64.0)
    assert spread.widest(Factors(0.3, 0.4, 1.5, 9.0)) == Factors(0.25, 0.4, 2.0, 9.0)
    assert spread.longer(math.log(2)) == pytest.approx((0.25 / 2**1.53, 0.25, 4.0, 8.0 * 2**1.53))


# Chances


def test_chances_by_hand() -> None:
    estimate = Estimate(100, 80, 130)
    assert estimate.chance_above(100) == pytest.approx(0.5)
    assert estimate.chance_above(130) == pytest.approx(0.1)
    assert estimate.chance_above(80) == pytest.approx(0.9)
    assert estimate.chance_above(0) == 1
    assert (
        Estimate(5, 5, 5).chance_above(4),
        Estimate(5, 5, 5).chance_above(5),
        Estimate(5, 5, 5).chance_above(6),
    ) == (1, 0, 0)
    assert (Estimate(0, 0, 0).chance_above(1), Estimate(3, 0, 9).chance_above(1)) == (0, 1)


@given(ESTIMATES, POSITIVE, POSITIVE)
def test_a_higher_limit_is_passed_less_often(estimate: Estimate, limit: float, another: float) -> None:
    low, high = sorted((limit, another))
    assert 0 <= estimate.chance_above(high) <= estimate.chance_above(low) <= 1


@given(WIDE, POSITIVE)
def test_the_chance_does_not_depend_on_the_unit(estimate: Estimate, limit: float) -> None:
    assert (estimate * 8.0).chance_above(limit * 8.0) == pytest.approx(estimate.chance_above(limit), abs=1e-6)


def test_the_chance_of_running_out_of_memory() -> None:
    capacity = job().cluster.device.memory_bytes
    need = {
        "reserved_memory_bytes": Estimate(0.8 * capacity, 0.7 * capacity, capacity),
        "peak_memory_bytes": Estimate(GIB, GIB, GIB),
    }
    assert forecast(quantities=need).out_of_memory_chance == pytest.approx(0.1)
    assert forecast().out_of_memory_chance is None


# Whole trainings


def test_a_whole_training_follows_from_its_step() -> None:
    asked, step_time = job(samples=95, epochs=3, sequence=7), Estimate(2, 1, 4)
    whole = duration(asked, step_time)
    assert whole is not None
    assert whole.time_s.median > 60
    assert whole_training(asked, step_time) == {
        "step_time_s": step_time,
        "samples_per_s": Estimate(5, 2.5, 10),
        "tokens_per_s": Estimate(35, 17.5, 70),
        "epoch_time_s": Estimate(20, 10, 40),
        "total_time_s": whole.time_s,
    }


def test_what_a_job_does_not_say_is_not_forecast() -> None:
    assert whole_training(job(), Estimate(2, 1, 4)).keys() == {"step_time_s", "samples_per_s"}
    assert "epoch_time_s" not in whole_training(job(steps=5), Estimate(2, 1, 4))


@given(ESTIMATES, st.integers(1, 10**9), st.integers(1, 10**6))
def test_throughput_times_step_time_is_the_batch(step_time: Estimate, batch: int, samples: int) -> None:
    quantities = whole_training(job(global_batch=batch, samples=samples), step_time)
    assert quantities["samples_per_s"].median * step_time.median == pytest.approx(batch)
    assert quantities["epoch_time_s"].median >= step_time.median


# Forecasts


def test_a_quantity_must_be_known() -> None:
    with pytest.raises(ValueError, match="'speed' is not a quantity"):
        forecast(quantities={"speed": Estimate(1, 1, 1)})


def test_quantities_are_asked_for_by_name() -> None:
    assert forecast()["step_time_s"].median == 2
    with pytest.raises(KeyError):
        forecast()["power_w"]


def test_quantities_are_attributes_too() -> None:
    whole = forecast()
    assert whole.step_time_s is whole["step_time_s"]
    assert (f"{whole.step_time_s:.2f}", float(whole.step_time_s)) == ("2.00", 2.0)
    assert f"{whole.step_time_s}" == "Estimate(median=2, low=1, high=3, low_95=None, high_95=None)"
    assert hasattr(whole, "step_time_s")
    assert not hasattr(whole, "power_w")
    assert "step_time_s" in dir(whole)
    assert ("step_time_s" in whole, "power_w" in whole, list(whole)) == (True, False, ["step_time_s"])


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("step_time", "step_time: not in this forecast; did you mean step_time_s? it has step_time_s"),
        ("memory", "memory: not in this forecast; it has step_time_s"),
        ("fit", "fit: not in this forecast; did you mean fits? it has step_time_s"),
        ("total_time_s", "total_time_s: not in this forecast; give steps, or samples and epochs"),
        ("tokens_per_s", "tokens_per_s: not in this forecast; give sequence"),
        ("power_w", "power_w: not in this forecast; test does not give it"),
    ],
)
def test_a_quantity_that_is_not_there_says_what_is(name: str, message: str) -> None:
    with pytest.raises(KeyError) as by_key:
        forecast()[name]
    with pytest.raises(AttributeError) as by_attribute:
        getattr(forecast(), name)
    assert str(by_key.value) == str(by_attribute.value) == message


def test_forecasts_are_copied_and_pickled() -> None:
    whole = forecast(step=steps.step(["forward"], [1.0], [1.0]))
    for made in (copy.copy(whole), copy.deepcopy(whole), pickle.loads(pickle.dumps(whole))):
        assert made.to_dict() == whole.to_dict()
        assert made.step_time_s == whole.step_time_s
    with pytest.raises(AttributeError, match=r"^anything$"):
        Forecast.__new__(Forecast).anything  # noqa: B018


def test_a_forecast_is_shown_in_one_line_in_full_and_as_a_table() -> None:
    peak = Estimate(GIB, GIB, 2 * GIB)
    whole = forecast(
        quantities={"step_time_s": Estimate(2, 1, 3), "peak_memory_bytes": peak}, assumptions=("<one>",)
    )
    assert (
        repr(whole) == "<Forecast: resnet18, batch 10, on 1 x t4; 2 s per step [1 s to 3 s]; 1 GiB at peak>"
    )
    huge = forecast(quantities={"peak_memory_bytes": peak * 100.0})
    assert repr(huge) == "<Forecast: resnet18, batch 10, on 1 x t4; 100 GiB at peak, does not fit>"
    text, table = str(whole), whole._repr_html_()
    assert text.splitlines()[0] == "resnet18 (timm), training, batch 10, fp32, sgd"
    for words in ("time per step", "1 GiB", "predicted by test"):
        assert words in text
        assert words in table
    assert "&lt;one&gt;" in table
    assert "<script" not in table


def test_a_forecast_is_a_frame_where_pandas_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = forecast(job=job(steps=1800), quantities={"step_time_s": Estimate(2, 1, 3, 0.5, 4),
                     "total_time_s": Estimate(3600, 1800, 5400)})  # fmt: skip
    pytest.importorskip("pandas")
    frame = whole.to_frame()
    assert list(frame.index) == ["step_time_s", "total_time_s", "cost_usd"]
    assert list(frame.loc["step_time_s"]) == [2, 1, 3, 0.5, 4, "s"]
    assert whole.cost is not None
    assert frame.loc["cost_usd", "median"] == whole.cost.median
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(
        ForetrainError, match=r"^to_frame: pandas is not installed; install pandas, or use to_dict$"
    ):
        whole.to_frame()


@pytest.mark.parametrize(
    ("shares", "fits"),
    [
        ({"reserved_memory_bytes": 0.6}, True),
        ({"reserved_memory_bytes": 1.1}, False),
        ({"reserved_memory_bytes": 1.1, "peak_memory_bytes": 0.6}, False),
        ({"peak_memory_bytes": 0.6}, True),
        ({"peak_memory_bytes": 1.0}, True),
        ({"step_time_s": 1.0}, None),
    ],
)
def test_a_job_fits_when_its_peak_is_within_the_capacity(shares: dict[str, float], fits: bool | None) -> None:
    capacity = job().cluster.device.memory_bytes
    estimates = {name: Estimate(*[share * capacity] * 3) for name, share in shares.items()}
    assert forecast(quantities=estimates).fits is fits


def test_a_forecast_is_plain_json() -> None:
    quantities = {"step_time_s": Estimate(2, 1, 3), "power_w": Estimate(70, 60, 80)}
    full = forecast(
        job=job(steps=1800),
        quantities={"total_time_s": Estimate(3600, 1800, 5400), **quantities},
        duration=Duration(
            time_s=Estimate(3600, 1800, 5400),
            parts=(DurationPart(name="steps", time_s=Estimate(3600, 1800, 5400), source="1,800 steps"),),
        ),
        bound="the host",
        assumptions=("one",),
        ranks=(RankMemory(stage=0, by_category={"weights": 3.0}),),
        step=steps.step(["forward"], [1.0], [1.0]),
    )
    data = json.loads(json.dumps(full.to_dict(), allow_nan=False))
    assert data["quantities"]["step_time_s"] == {"median": 2, "low": 1, "high": 3}
    price = job().cluster.price_per_hour
    assert price is not None
    assert data["cost_usd"] == pytest.approx({"median": price, "low": price / 2, "high": 1.5 * price})
    assert data["energy_j"] == {"median": 70 * 3600, "low": 70 * 1800, "high": 70 * 5400}
    assert data["total_time_parts"] == {
        "steps": {"median": 3600, "low": 1800, "high": 5400, "source": "1,800 steps"}
    }
    assert data["breakdown_s"] == {"phase": {"forward": 1}, "operator": {"mm": 1}}
    assert data["memory_by_category_bytes"] == {"weights": 3}
    assert (data["predictor"], data["bound"], data["fits"], data["assumptions"]) == (
        "test",
        "the host",
        None,
        [
            "not given, so taken: precision fp32, optimizer sgd",
            "one",
            "not included: waiting for data, failures, evaluation, checkpoints, storage and data transfer",
        ],
    )
    assert data["price_source"] == job().cluster.price_source != ""
    assert (data["flops"], data["fits_with"]) == (None, None)
    assert Job.read(data["job"]) == full.job


def test_what_a_predictor_did_not_look_at_is_an_error_that_names_it() -> None:
    with pytest.raises(InputError, match="'test' does not look inside the step, so there is no trace"):
        forecast().inside("trace")


def test_a_forecast_without_details_is_json_too() -> None:
    data = json.loads(json.dumps(forecast().to_dict()))
    assert data["cost_usd"] is data["energy_j"] is data["fits"] is None
    assert "breakdown_s" not in data


# Whether it fits


def of_ranks(*, devices: int, need_gib: float, open_gib: float = 0.0) -> Forecast:
    described = {
        "model": {"source": "timm", "name": "resnet18"},
        "training": {"global_batch": 8},
        "cluster": {"device": "h100-sxm-80gb", "devices_per_node": devices, "nodes": 1},
    }
    size = Estimate(need_gib, need_gib * 0.99, need_gib * 1.01) * GIB
    rank = RankMemory(stage=0, by_category={"weights": need_gib * GIB}, open_bytes=open_gib * GIB)
    return forecast(
        job=Job.read(described),
        quantities={"peak_memory_bytes": size, "reserved_memory_bytes": size},
        ranks=(rank,),
    )


def test_one_of_many_devices_has_less_for_torch() -> None:
    capacity = of_ranks(devices=1, need_gib=1).memory_capacity_bytes / GIB
    alone, many = (of_ranks(devices=devices, need_gib=capacity - 1) for devices in (1, 8))
    assert alone.fits is True
    assert many.fits is False
    assert many.usable_memory_bytes == alone.usable_memory_bytes - 1.5 * GIB


def test_what_a_job_leaves_open_may_make_it_fit() -> None:
    closed, saves, hopeless = (of_ranks(devices=8, need_gib=100, open_gib=less) for less in (0, 50, 5))
    assert closed.fits is False
    assert saves.fits is True
    assert saves.out_of_memory_chance == pytest.approx(1 / 3, abs=0.01)
    assert hopeless.fits is False
    verdict, figure = figures.fits(saves) or ("", None)
    assert verdict == "perhaps"
    assert figure is not None
    assert "which the job leaves open, may save 50 GiB" in figure.value
