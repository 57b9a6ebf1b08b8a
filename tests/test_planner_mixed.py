"""Plans on groups that differ: legal there, within every device's memory, by speed where that is faster."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from commands import fails, ok
from foretrain.errors import InputError
from foretrain.forecast import usable_memory
from foretrain.job import Job
from foretrain.planner.abilities import TARGETS
from foretrain.planner.bounds import Bounds
from foretrain.planner.clusters import Wanted
from foretrain.planner.outcome import Nothing
from foretrain.planner.planning import Effort, prepared, space_on
from foretrain.planner.space import Space
from foretrain.predictors import get
from foretrain.predictors.whitebox import RatingPredictor
from foretrain.step.stage_memory import stage_memory
from planning import LLAMA, mixed, planned

FAST, SLOW = ("h100-sxm-80gb", 4, 1), ("l4", 2, 2)
SMALL = {"tensor": (1, 2), "micro_batch": (4,)}
"""What a search is held to where all plans are looked at."""


@pytest.fixture(scope="module", autouse=True)
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    patch, made = pytest.MonkeyPatch(), tmp_path_factory.mktemp("plans")
    patch.setenv("FORETRAIN_CACHE", str(made / "cache"))
    document = mixed(FAST, SLOW, steps=1000).to_dict()
    (made / "job.json").write_text(json.dumps({**document, "plan": {}}))
    piped = {"pipeline": 2, "micro_batch": 4}
    (made / "pipeline.json").write_text(json.dumps({**document, "plan": piped}))
    (made / "across.json").write_text(json.dumps({**document, "plan": {"tensor": 8}}))
    yield made
    patch.undo()


def _space(job: Job, target: str = "megatron") -> Space:
    made, _ = prepared(job, TARGETS[target])
    return space_on(made.cluster, made, TARGETS[target], SMALL)


def test_the_first_plan_is_the_fastest_of_all_in_either_order() -> None:
    orders = [_space(mixed(FAST, SLOW)), _space(mixed(SLOW, FAST))]
    plans = planned(mixed(FAST, SLOW), allowed=SMALL, effort=Effort(cached=False, exhaustive=True), top=3)
    times = {
        get("roofline").predict(space.job_with(plan))["step_time_s"].median
        for space in orders
        for cut in space.cuts()
        for plan in space.plans(cut)
        if plan.recompute == "none"  # all of them fit
    }
    assert [one.step_time_s.median for one in plans] == pytest.approx(sorted(times)[: len(plans)])


@pytest.mark.parametrize("target", ["megatron", "torchtitan", "fsdp2"])
def test_plans_are_legal_on_the_groups_and_fit(target: str) -> None:
    plans = planned(mixed(FAST, SLOW), target, top=20, allowed={"micro_batch": (2, 4)})
    assert len(plans)
    names = {tuple(group.device.name for group in option.job.cluster.groups) for option in plans}
    assert names <= {("h100-sxm-80gb", "l4"), ("l4", "h100-sxm-80gb")}
    for option in plans:
        again = Job.read(option.job.to_dict())
        assert again.plan == option.plan
        assert (option.out_of_memory or 0.0) <= 0.1
        for rank in option.forecast.ranks:
            if rank.capacity_bytes is not None:
                assert rank.needed_bytes <= usable_memory(option.job, rank.capacity_bytes)


def test_by_speed_comes_first_where_devices_differ_much() -> None:
    first = planned(mixed(FAST, SLOW, global_batch=64), allowed=SMALL)[0]
    assert first.plan.balance == "speed"
    held = planned(mixed(FAST, SLOW, global_batch=64), allowed={**SMALL, "balance": ("even",)})[0]
    assert held.plan.balance == "even"
    assert first.step_time_s.median < held.step_time_s.median


@pytest.mark.parametrize("target", ["megatron", "torchtitan", "fsdp2"])
def test_no_plan_takes_less_than_its_bounds(target: str) -> None:
    predictor, found = get("roofline"), _space(mixed(FAST, SLOW), target)
    assert isinstance(predictor, RatingPredictor)
    cuts, number = found.cuts(), 0
    for cut in cuts:
        families: dict[tuple[object, bool], Bounds] = {}
        for plan in list(found.plans(cut))[::3]:
            family = plan.balance, plan.pipeline > 1
            if family not in families:
                plain = dataclasses.replace(
                    plan, shard="none", replicate=1, reshard=None, recompute="none", schedule="1f1b",
                    virtual_stages=None,
                )  # fmt: skip
                layout = predictor.tuned_layout(found.job_with(plain))
                families[family] = Bounds.of(layout, tuple(found.recomputes()))
            bounds, layout = families[family], predictor.tuned_layout(found.job_with(plan))
            assert bounds.least_s(plan) <= predictor.quick_time_s(layout)
            held = [stage_memory(layout, stage, replays=False).allocated_bytes for stage in layout.stages]
            assert bounds.least_bytes(plan) <= sum(held) / len(held)
            number += 1
    assert number > 2


def test_a_model_that_fits_nowhere_is_said_to_need_more_than_either_device() -> None:
    large = {**LLAMA, "hidden_size": 8192, "intermediate_size": 28672, "num_attention_heads": 64}
    plans = planned(mixed(("l4", 1, 1), ("t4", 1, 1), config=large), allowed={"tensor": (1,)})
    assert not len(plans)
    (nothing,) = plans.by_cluster
    assert isinstance(nothing, Nothing)
    assert "15 GiB or 22 GiB a device" in nothing.why


def test_a_job_with_groups_is_planned_as_it_is() -> None:
    with pytest.raises(InputError, match="devices: the job's cluster has groups of several kinds"):
        planned(mixed(FAST, SLOW), wanted=Wanted(most=8))


# The command line

ROOFLINE = ("--predictor", "roofline")


def test_plans_of_groups_are_shown(folder: Path) -> None:
    words = ("plan", str(folder / "job.json"), *ROOFLINE, "--framework", "megatron")
    held = ("--set", "plan.tensor=1", "--set", "plan.micro_batch=4")
    shown = ok(*words, *held)
    assert "plans for megatron: least time" in shown
    assert "by speed" in shown
    document = json.loads(ok(*words, *held, "--json"))
    first = document["plans"][0]["job"]
    assert {group["device"] for group in first["cluster"]["groups"]} == {"h100-sxm-80gb", "l4"}
    assert first["plan"]["balance"] in ("even", "speed")


def test_a_pipeline_over_groups_is_forecast(folder: Path) -> None:
    shown = " ".join(ok("predict", str(folder / "pipeline.json"), *ROOFLINE).split())
    assert "layers are dealt out by the speed of stages: h100-sxm-80gb takes" in shown
    document = json.loads(ok("predict", str(folder / "pipeline.json"), *ROOFLINE, "--json"))
    assert any("dealt out by the speed" in note for note in document["assumptions"])
    assert len(document["memory_by_stage_bytes"]) == 2
    assert "device" in ok("predict", str(folder / "pipeline.json"), *ROOFLINE, "--resources")


def test_a_team_over_groups_that_differ_is_one_line(folder: Path) -> None:
    line = fails("predict", str(folder / "across.json"), *ROOFLINE)
    assert "plan.tensor: teams of tensor 8 x context 1 ranks would lie on groups that differ" in line
