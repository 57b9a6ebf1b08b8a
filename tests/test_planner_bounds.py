"""Bounds of plans: never above what the engine says, for any plan."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from foretrain.planner.bounds import Bounds
from foretrain.planner.rating import rate_cut
from foretrain.planner.space import Space
from foretrain.predictors import get
from foretrain.predictors.whitebox import RatingPredictor
from foretrain.step.stage_memory import quick_memory
from planning import MIXTRAL, space

EVERY, CUTS = 5, 4
"""Of the plans of a cut, one of so many is looked at; of so many cuts."""


pytestmark = pytest.mark.usefixtures("shared_cache")


def roofline() -> RatingPredictor:
    found = get("roofline")
    assert isinstance(found, RatingPredictor)
    return found


@pytest.mark.parametrize(
    "found",
    [
        space("megatron", devices=16),
        space("megatron", config=MIXTRAL, devices=8),
        space("megatron", devices=8, adapter={"kind": "lora", "rank": 8}),
        space("torchtitan", devices=16),
        space("fsdp2", devices=16),
        space("deepspeed", devices=8),
    ],
    ids=["megatron", "experts", "adapters", "torchtitan", "fsdp2", "deepspeed"],
)
def test_no_plan_takes_less_than_its_bounds(found: Space) -> None:
    predictor, number = roofline(), 0
    cuts = [cut for cut in found.cuts() if cut.micro_batch <= 2]
    for cut in cuts[:: max(1, len(cuts) // CUTS)]:
        plans = list(found.plans(cut))
        if not plans:
            continue
        plain = dataclasses.replace(
            plans[0], shard="none", replicate=1, reshard=None, recompute="none", schedule="1f1b",
            virtual_stages=None,
        )  # fmt: skip
        bounds = Bounds.of(predictor.tuned_layout(found.job_with(plain)), tuple(found.recomputes()))
        for plan in plans[::EVERY]:
            layout = predictor.tuned_layout(found.job_with(plan))
            assert bounds.least_s(plan) <= predictor.quick_time_s(layout)
            assert bounds.least_bytes(plan) <= quick_memory(layout).allocated_bytes
            assert bounds.least_of_all_bytes(offload=False) <= quick_memory(layout).allocated_bytes
            number += 1
    assert number > 2


def test_bounds_rule_out_nothing_that_is_among_the_best() -> None:
    predictor, found = roofline(), space("megatron", devices=16)
    for cut in found.cuts()[::4]:
        rated = rate_cut(predictor, found, cut, most=3, below_s=float("inf"), risk=0.1)
        plans = list(found.plans(cut))
        times = sorted(
            predictor.quick_time_s(predictor.tuned_layout(found.job_with(plan)))
            for plan in plans
            if plan.recompute == "none"  # all of them fit
        )
        assert [rating.time_s for rating in rated.best] == pytest.approx(times[: len(rated.best)])
        assert rated.costed <= rated.considered == len(plans)


def test_the_quick_rating_is_the_forecast() -> None:
    predictor, found = roofline(), space("megatron", devices=16)
    cut = found.cuts()[-1]
    for plan in list(found.plans(cut))[::EVERY]:
        job = found.job_with(plan)
        layout, forecast = predictor.tuned_layout(job), predictor.predict(job)
        assert predictor.quick_time_s(layout) == pytest.approx(forecast["step_time_s"].median)
        assert quick_memory(layout).allocated_bytes == pytest.approx(
            max(rank.allocated_bytes for rank in forecast.ranks)
        )


def test_a_traced_model_needs_no_second_trace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Other numbers of devices are rated with the graphs that are there."""
    monkeypatch.setenv("FORETRAIN_CACHE", str(tmp_path))  # its own: other tests write into the shared one
    predictor = roofline()
    small, large = space("megatron", devices=8), space("megatron", devices=16)
    cut = small.cuts()[0]
    rate_cut(predictor, small, cut, most=3, below_s=float("inf"), risk=0.1)
    count = len(list(tmp_path.rglob("*.zst")))
    rate_cut(predictor, large, cut, most=3, below_s=float("inf"), risk=0.1)
    assert len(list(tmp_path.rglob("*.zst"))) <= count + 1
