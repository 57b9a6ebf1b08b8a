"""The planner: what it ranks is what forecasts say, nothing infeasible is among it, and it is the same each
time."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import foretrain
from foretrain.errors import InputError
from foretrain.plan import Plan
from foretrain.planner.abilities import TARGETS
from foretrain.planner.clusters import Wanted
from foretrain.planner.goal import Goal
from foretrain.planner.outcome import Nothing, Option
from foretrain.planner.planning import Effort, make_plans, remedies, space_on
from foretrain.planner.search import search
from foretrain.predictors import get
from foretrain.report.plans import _between_clusters, search_lines
from planning import LLAMA, MIXTRAL, ByTheBook, job, planned, space

pytestmark = pytest.mark.usefixtures("shared_cache")


def test_the_first_plan_is_the_fastest_of_all() -> None:
    made, found = job(devices=8), space("megatron", devices=8)
    plans = planned(made, effort=Effort(cached=False, exhaustive=True), top=3)
    everything = [
        get("roofline").predict(found.job_with(plan)) for cut in found.cuts() for plan in found.plans(cut)
    ]
    fitting = {one.job.plan: one for one in everything if (one.out_of_memory_chance or 0.0) <= 0.1}
    fastest = sorted(
        one["step_time_s"].median
        for plan, one in fitting.items()
        if plan.recompute == "none" or dataclasses.replace(plan, recompute="none") not in fitting
    )
    assert [option.step_time_s.median for option in plans] == pytest.approx(fastest[: len(plans)])
    assert plans.considered == len(everything)
    assert plans.costed < plans.considered


@settings(max_examples=25)
@given(
    target=st.sampled_from(["fsdp2", "accelerate"]),
    devices=st.sampled_from([2, 8]),
    samples=st.integers(1, 400),
    host_s=st.floats(0.001, 1.0),
    room=st.floats(2.0, 500.0),
)
def test_a_search_finds_what_trying_everything_finds(
    target: str, devices: int, samples: int, host_s: float, room: float
) -> None:
    """Whatever the batch: nothing is faster, least of all the plan that predict takes where none is given."""
    predictor = ByTheBook(host_s=host_s, sample_s=0.01, room=room)
    made = job(devices=devices, global_batch=devices * samples)
    found = space_on(made.cluster, made, TARGETS[target], {})
    searched, everything = (
        search(predictor, [found], risk=0.1, exhaustive=exhaustive).clusters[0].best
        for exhaustive in (False, True)
    )
    assert [one.time_s for one in searched[:1]] == [one.time_s for one in everything[:1]]
    plain = predictor.predict(dataclasses.replace(made, plan=Plan(data=devices)))
    if (plain.out_of_memory_chance or 0.0) <= 0.1:
        assert searched[0].time_s <= plain["step_time_s"].median


def test_a_search_starts_at_all_that_usually_does_well() -> None:
    """In one process as in several: the cuts that it begins with are tried one after the other."""
    predictor = ByTheBook(host_s=0.1, sample_s=0.01, room=1e3)
    found = search(predictor, [space("fsdp2", global_batch=960)], risk=0.1)
    (one,) = found.clusters
    assert len(one.cuts) > 16
    assert set(one.first) <= set(one.tried)


@pytest.mark.parametrize(("batch", "micro"), [(1000, 125), (200, 25)])
def test_a_batch_that_is_no_power_of_two_is_planned_without_accumulation(batch: int, micro: int) -> None:
    plans = foretrain.plan(
        "resnet18", device="h100", batch=batch, image=32, counts=[8], predictor="roofline", cached=False
    )
    assert plans.best is not None
    assert plans.best.plan.micro_batch == micro
    steps = [step for step in plans.around if step.axis == "micro_batch"]
    assert steps
    assert all(step.slower is not None for step in steps)


def test_nothing_is_ranked_that_may_not_fit() -> None:
    made = job(
        {**LLAMA, "hidden_size": 4096, "intermediate_size": 11008}, devices=8, device="l4", sequence=2048
    )
    plans = planned(made, top=20, goal=Goal(fits=0.95))
    assert len(plans)
    assert all((option.out_of_memory or 0.0) <= 0.05 for option in plans)
    assert all((one.out_of_memory or 0.0) <= 0.05 for one in plans.by_cluster if isinstance(one, Option))


def test_the_same_search_gives_the_same_plans(shared_cache: Path) -> None:
    made = job(MIXTRAL, devices=8)
    first, second, kept = (planned(made, effort=Effort(cached=cached)) for cached in (False, False, True))
    again = planned(made, effort=Effort(cached=True))
    assert _plans(first) == _plans(second) == _plans(kept) == _plans(again)
    assert first.first_is_best == again.first_is_best
    assert list((shared_cache / "plans").glob("*.json"))


def _plans(plans: foretrain.Plans) -> list[tuple[object, float]]:
    return [(option.plan, option.step_time_s.median) for option in plans]


def test_several_processes_find_the_same() -> None:
    made = job(devices=8)
    one, two = (planned(made, effort=Effort(cached=False, processes=n)) for n in (1, 2))
    assert _plans(one) == _plans(two)


def test_a_search_that_is_cut_short_has_the_best_so_far() -> None:
    heard: list[int] = []
    plans = planned(
        job(MIXTRAL, devices=16),
        effort=Effort(cached=False, seconds=0.0),
        listener=lambda found: heard.append(found.considered),
    )
    assert plans.interrupted or not heard
    assert any("time was up" in note for note in plans.notes) == plans.interrupted


@pytest.mark.parametrize("target", ["megatron", "torchtitan", "fsdp2", "deepspeed", "accelerate"])
def test_plans_are_for_their_framework(target: str) -> None:
    plans = planned(job(devices=8), target)
    assert plans.target == target
    assert plans.best is not None
    trained = plans.best.job.workload.training
    assert trained.framework == {"fsdp2": "pytorch", "accelerate": "pytorch"}.get(target, target)
    assert trained.allocator == "expandable_segments:True"


def test_layers_that_do_not_divide_are_counted_out() -> None:
    plans = planned(
        job({**LLAMA, "num_hidden_layers": 7}, devices=8), allowed={"pipeline": (2,), "tensor": (1,)}
    )
    assert plans.best is not None
    for option in plans:
        assert sum(option.plan.stages or ()) == 7
        unsaid = dataclasses.replace(option.job, plan=dataclasses.replace(option.plan, stages=None))
        assert get("roofline").predict(unsaid)["step_time_s"] == option.step_time_s


# Goals


def test_a_deadline_asks_for_the_cheapest_in_time() -> None:
    made = job(devices=8, steps=10_000)
    plans = planned(made, wanted=Wanted(most=16), goal=Goal(objective="cost"), top=20)
    prices = [option.cost.median for option in plans if option.cost is not None]
    assert prices == sorted(prices)
    slowest = max(option.time_s.median for option in plans)
    hurried = planned(
        made, wanted=Wanted(most=16), goal=Goal(objective="cost", deadline_s=slowest / 4), top=20
    )
    within = [option for option in hurried if not option.misses]
    assert within == list(hurried[: len(within)])
    assert all(option.time_s.chance_above(slowest / 4) <= 0.1 for option in within)
    assert hurried.best in (within[0] if within else None, None)


def test_of_plans_as_fast_the_cheaper_comes_first() -> None:
    """A step that waits for the host takes as long on either device."""
    predictor = ByTheBook(host_s=0.1, sample_s=0.001, room=1e3)
    plans = make_plans(
        job(devices=1, global_batch=1, steps=10), predictor, goal=Goal(),
        wanted=Wanted(kinds=("h100", "a100"), counts=(1,)), target="fsdp2", effort=Effort(cached=False),
    )  # fmt: skip
    first, second = plans[0], plans[1]
    assert first.step_time_s.median == pytest.approx(second.step_time_s.median)
    assert first.job.cluster != second.job.cluster
    assert first.cost is not None
    assert second.cost is not None
    assert first.cost.median < second.cost.median
    reason = _between_clusters(first, second)
    assert " takes as long and costs " in reason
    assert reason.endswith(" more")


def test_a_budget_that_nothing_keeps_leaves_no_best() -> None:
    plans = planned(job(devices=8, steps=1000), goal=Goal(budget=1e-6))
    assert plans.best is None
    assert all(option.misses == ("budget",) for option in plans)


def test_limits_need_a_length() -> None:
    with pytest.raises(InputError, match=r"^deadline: of a whole training; give its steps"):
        planned(job(), goal=Goal(deadline_s=60.0))


@pytest.mark.parametrize(
    ("goal", "message"),
    [
        ({"objective": "money"}, "objective: 'money' is not one of cost, energy, time"),
        ({"deadline_s": -1.0}, "deadline: -1.0 is not a finite number above zero"),
        ({"fits": 1.5}, "fits: 1.5 is not a probability between 0 and 1"),
    ],
)
def test_wrong_goals_are_one_line(goal: dict[str, object], message: str) -> None:
    with pytest.raises(InputError, match=message):
        Goal(**goal)  # type: ignore[arg-type]


def test_the_front_is_beaten_by_nothing() -> None:
    plans = planned(job(devices=8, steps=1000), wanted=Wanted(kinds=("h100", "a100"), most=16), top=20)
    assert plans.front
    times = [option.time_s.median for option in plans.front]
    assert times == sorted(times)
    for option in plans.front:
        for other in plans:
            assert not (
                other.time_s.median < option.time_s.median
                and (other.cost and option.cost and other.cost.median < option.cost.median)
                and (other.energy_j and option.energy_j and other.energy_j.median < option.energy_j.median)
            )


# What does not fit


def test_a_cluster_without_a_plan_says_why() -> None:
    large = {**LLAMA, "hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 48}
    made = job(large, devices=1)
    plans = planned(made, wanted=Wanted(counts=(1, 16)))
    nothing = [one for one in plans.by_cluster if isinstance(one, Nothing)]
    assert [one.cluster.world_size for one in nothing] == [1]
    assert "weights, gradients and optimizer state alone" in nothing[0].why
    assert nothing[0].need is not None
    assert nothing[0].need > 1
    alone = planned(made, wanted=Wanted(counts=(1,)))
    assert alone.best is None
    assert not len(alone)
    lines = list(remedies(get("roofline"), alone))
    assert lines
    for line in lines:
        assert line.endswith("1 x h100-sxm-80gb")
        assert line.count("1 x h100-sxm-80gb") == 1
    elsewhere = [line for line in lines if " instead of " in line]
    assert elsewhere
    assert not any(" on 1 x h100" in line or "devices" in line for line in elsewhere)


@pytest.mark.parametrize(("room", "batch"), [(500.0, 320), (1.0, 96), (0.1, 96)])
def test_the_numbers_of_plans_add_up(room: float, batch: int) -> None:
    predictor = ByTheBook(host_s=0.1, sample_s=0.01, room=room)
    made = job(devices=8, global_batch=batch)
    plans = make_plans(
        made, predictor, goal=Goal(), wanted=Wanted(), target="fsdp2", effort=Effort(cached=False)
    )
    (line,) = search_lines(plans)
    whole, _, parts = line.partition(": ")
    counted = [int(part.split()[0].replace(",", "")) for part in parts.partition(";")[0].split(", ")]
    assert sum(counted) == int(whole.split()[0].replace(",", "")) == plans.considered
    assert plans.costed_too_large <= min(plans.too_large, plans.costed)


def test_plans_that_are_too_large_are_counted_once() -> None:
    large = {**LLAMA, "hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 48}
    plans = planned(job(large, devices=2, global_batch=8), "fsdp2")
    assert not len(plans)
    (line,) = search_lines(plans)
    assert f"{plans.considered:,} plans in " in line
    assert "others" not in line
    assert plans.costed + plans.too_large - plans.costed_too_large + plans.impossible <= plans.considered


def test_the_optimizer_goes_to_the_host_where_nothing_else_fits() -> None:
    deep = {**LLAMA, "hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 24}
    made = job({**deep, "num_attention_heads": 32}, devices=1, global_batch=4)
    plans = planned(made)
    assert plans.best is not None
    assert plans.best.plan.offload


# How sure


def test_chances_are_chances_and_steps_are_around_the_best() -> None:
    plans = planned(job(devices=8))
    assert plans.first_is_best is not None
    assert 0 < plans.first_is_best <= (plans.first_is_nearly_best or 0.0) <= 1
    assert plans.best_time_s is not None
    assert plans.best_time_s.low <= plans.best_time_s.median <= plans[0].step_time_s.high
    axes = {step.axis for step in plans.around}
    assert {"tensor", "pipeline", "micro_batch", "recompute"} <= axes
    better = [s for s in plans.around if s.slower is not None and s.slower < -1e-6]
    assert all((step.out_of_memory or 0.0) > 0.1 or step.axis == "context" for step in better)


# From Python


def test_plan_takes_what_predict_takes() -> None:
    plans = foretrain.plan(
        {"model": {"source": "transformers", "task": "causal-lm", "config": LLAMA}, "training": {
            "global_batch": 32, "sequence": 1024, "precision": "bf16"}, "cluster": {"device": "h100"}},
        max_devices=4, framework="megatron", tensor=[1, 2], predictor="roofline", cached=False,
    )  # fmt: skip
    assert {option.plan.tensor for option in plans} <= {1, 2}
    assert len(plans) == len(list(plans)) == len(plans.to_frame())
    assert "one step from the first plan:" in str(plans)
    assert "80 % interval" in plans._repr_html_()
    assert plans.plot().data
    document = json.loads(json.dumps(plans.to_dict()))
    assert document["plans"][0]["job"]["plan"].get("tensor", 1) in (1, 2)
    assert document["search"]["considered"] == plans.considered
    read = foretrain.Job.read(document["plans"][0]["job"])
    assert read == plans[0].job


def test_plan_refuses_what_it_does_not_know() -> None:
    with pytest.raises(InputError, match=r"^batch_size: unknown; did you mean batch\?"):
        foretrain.plan("resnet18", batch_size=3)
    with pytest.raises(InputError, match="framework: 'keras' is not one of"):
        planned(job(), "keras")


@pytest.mark.parametrize("names", ["h100,a100", "h100, a100", ["h100", "a100"]])
def test_devices_to_choose_from_are_named_as_on_the_command_line(names: str | list[str]) -> None:
    plans = foretrain.plan("resnet18", devices=names, counts=[1], batch=64, image=64, predictor="roofline")
    assert {one.job.cluster.device.name for one in plans} == {"h100-sxm-80gb", "a100-sxm-80gb"}
    assert repr(plans).startswith(f"<Plans: {len(plans)} for fsdp2; the first <Forecast: resnet18, batch 64")
    assert "\n" not in repr(plans)
    with pytest.raises(InputError, match=r"^devices: .* where kinds says which devices to choose from"):
        foretrain.plan("resnet18", devices=names, kinds="t4")


def test_other_models_are_planned_too() -> None:
    plans = foretrain.plan(
        "resnet18", device="h100", batch=64, image=64, max_devices=2, predictor="roofline", cached=False
    )
    assert plans.target == "fsdp2"
    assert {option.plan.tensor for option in plans} == {1}
    assert any("training.precision is not given: amp-bf16" in note for note in plans.notes)
