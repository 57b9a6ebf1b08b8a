"""The space of plans: every plan is a job, nothing that a framework lacks is in it, and reasons are kept."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from foretrain.errors import InputError
from foretrain.plan import divisors
from foretrain.planner.abilities import DEGREES, TARGETS, ability_of
from foretrain.planner.clusters import Wanted, clusters_of
from foretrain.planner.facts import Facts
from foretrain.planner.planning import prepared, space_on
from foretrain.planner.space import Cut, neighbours
from planning import LLAMA, MIXTRAL, job, space

COUNTS = st.sampled_from([1, 2, 4, 8, 16, 32, 64])


def made(target: str, config: dict[str, Any], devices: int, batch: int, **allowed: Any) -> Any:
    ability = TARGETS[target]
    base, _ = prepared(job(config, devices=1, global_batch=batch), ability)
    wanted = clusters_of(base, Wanted(counts=(devices,)), _catalog())
    return space_on(wanted[0], base, ability, allowed)


def _catalog() -> Any:
    from foretrain.catalog import Catalog

    return Catalog.load()


@given(
    target=st.sampled_from(sorted(TARGETS)),
    moe=st.booleans(),
    devices=COUNTS,
    batch=st.sampled_from([8, 24, 32, 96, 128]),
)
def test_every_plan_is_a_job_on_all_devices(target: str, moe: bool, devices: int, batch: int) -> None:
    found = made(target, MIXTRAL if moe else LLAMA, devices, batch)
    for cut in found.cuts():
        for plan in found.plans(cut):
            planned = found.job_with(plan)
            degrees = (planned.plan.data or 1, plan.tensor, plan.pipeline, plan.context)
            assert math.prod(degrees) == devices
            assert planned.micro_batch * planned.accumulation * (planned.plan.data or 1) == batch
            assert plan.expert == 1 or 8 % plan.expert == 0


@given(target=st.sampled_from(sorted(TARGETS)), devices=COUNTS)
def test_a_framework_runs_what_it_can(target: str, devices: int) -> None:
    ability, found = TARGETS[target], made(target, MIXTRAL, devices, 32)
    for cut in found.cuts(contexts=True):
        for plan in found.plans(cut):
            assert all(getattr(plan, degree) == 1 for degree in DEGREES if degree not in ability.degrees)
            assert plan.shard in (*ability.shards, "none")
            assert plan.recompute in ability.recomputes
            assert plan.pipeline == 1 or plan.schedule in ability.schedules
            assert not plan.offload


def test_plans_are_all_different() -> None:
    found = made("torchtitan", MIXTRAL, 16, 32)
    plans = [plan for cut in found.cuts() for plan in found.plans(cut)]
    assert len(plans) == len(set(plans)) > 50


def test_an_axis_is_held() -> None:
    found = made("megatron", LLAMA, 16, 32, tensor=(2, 4), recompute=("full",), micro_batch=(1,))
    plans = [plan for cut in found.cuts() for plan in found.plans(cut)]
    assert {plan.tensor for plan in plans} == {2, 4}
    assert {plan.recompute for plan in plans} == {"full"}
    assert {plan.micro_batch for plan in plans} == {1}


def test_what_a_framework_lacks_cannot_be_held() -> None:
    found = made("fsdp2", LLAMA, 16, 32, pipeline=(2,))
    with pytest.raises(InputError, match=r"plan.pipeline: 2: fsdp2 has no pipelines; megatron and"):
        list(found.plans(Cut()))
    with pytest.raises(InputError, match="plan: 'colour' is not an axis of the search"):
        made("fsdp2", LLAMA, 16, 32, colour=(2,))


def test_reasons_are_kept() -> None:
    found = made("megatron", {**LLAMA, "num_attention_heads": 12, "num_key_value_heads": 4}, 16, 24)
    cuts = found.cuts()
    assert {cut.tensor for cut in cuts} == {1, 2, 4}
    assert found.refused["tensor 8 does not divide 12 attention heads"]
    for cut in cuts:
        list(found.plans(cut))
    assert any("does not divide the batch of 24" in reason for reason in found.refused)


def test_short_sequences_are_not_cut_from_the_start() -> None:
    short, long = space(sequence=1024), space(sequence=32768)
    assert {cut.context for cut in short.cuts()} == {1}
    assert {cut.context for cut in short.cuts(contexts=True)} == {1, 2, 4, 8}
    assert {cut.context for cut in long.cuts()} == {1, 2, 4, 8}


def test_experts_need_as_many_devices_as_the_rule_says() -> None:
    found = made("megatron", MIXTRAL, 16, 32)
    for cut in found.cuts():
        for plan in found.plans(cut):
            least = plan.pipeline * max(
                plan.tensor * plan.context, plan.expert * found.job_with(plan).expert_tensor
            )
            assert 16 % least == 0


def test_neighbours_are_mutual() -> None:
    cuts = made("megatron", MIXTRAL, 16, 32).cuts()
    near = neighbours(cuts)
    assert near.keys() == set(cuts)
    assert all(one in near[other] for one, others in near.items() for other in others)
    reached, todo = set(), [cuts[0]]
    while todo:
        here = todo.pop()
        if here not in reached:
            reached.add(here)
            todo += near[here]
    assert reached == set(cuts)


@settings(max_examples=20)
@given(
    target=st.sampled_from(["fsdp2", "torchtitan"]),
    devices=st.sampled_from([1, 4, 8]),
    samples=st.integers(1, 720),
    held=st.sampled_from([{}, {"tensor": (2,)}, {"pipeline": (1,)}]),
)
def test_micro_batches_are_parts_of_what_replicas_have(
    target: str, devices: int, samples: int, held: dict[str, Any]
) -> None:
    if target == "fsdp2" or devices == 1:
        held = {}
    found = made(target, LLAMA, devices, devices * samples, **held)
    near = found.neighbours()
    assert near
    shares = {cut: _shares(found, cut) for cut in near}
    for cut, others in near.items():
        assert any(share % cut.micro_batch == 0 for share in shares[cut])
        for share in shares[cut]:
            own = sorted(
                one.micro_batch
                for one in near
                if dataclasses.replace(one, micro_batch=cut.micro_batch) == cut
                and share % one.micro_batch == 0
            )
            larger = [micro for micro in own if micro > cut.micro_batch][:1]
            assert share % cut.micro_batch or all(
                dataclasses.replace(cut, micro_batch=micro) in others for micro in larger
            )


def _shares(found: Any, cut: Cut) -> set[int]:
    """Samples of a replica, under any pipeline."""
    return {
        found.job.workload.training.global_batch // plan.data
        for plan in found.plans(dataclasses.replace(cut, micro_batch=1))
    }


@settings(max_examples=20)
@given(
    target=st.sampled_from(["fsdp2", "accelerate", "megatron"]),
    devices=st.sampled_from([1, 8, 16]),
    samples=st.integers(1, 5000),
)
def test_the_plan_without_accumulation_is_among_the_first(target: str, devices: int, samples: int) -> None:
    found = made(target, LLAMA, devices, devices * samples)
    assert Cut(micro_batch=samples) in found.first(found.cuts())


def test_replicas_that_do_not_divide_the_batch_are_named() -> None:
    found = made("fsdp2", LLAMA, 3, 64)
    assert not [plan for cut in found.cuts() for plan in found.plans(cut)]
    assert next(iter(found.refused)) == "data 3 does not divide the batch of 64"
    assert not any("micro-batch" in reason for reason in found.refused)
    held = made("fsdp2", LLAMA, 8, 64, micro_batch=(3,))
    assert not held.cuts()
    assert next(iter(held.refused)) == "data 8 x micro-batch 3 does not divide the batch of 64"


def test_what_is_not_searched_is_kept() -> None:
    base = job(devices=16)
    own = dataclasses.replace(base.plan, overlap={"gradients": False}, registered_buffers=True)
    found = space_on(base.cluster, dataclasses.replace(base, plan=own), TARGETS["megatron"], {})
    plans = [plan for cut in found.cuts() for plan in found.plans(cut)]
    assert all(plan.overlap == {"gradients": False} and plan.registered_buffers for plan in plans)


# Facts and clusters


@pytest.mark.parametrize(
    ("config", "facts"),
    [
        (LLAMA, Facts(layers=8, heads=8, sequence=1024)),
        (MIXTRAL, Facts(layers=4, heads=8, experts=8, sequence=1024)),
        ({"model_type": "gpt2"}, Facts(layers=12, heads=12, sequence=1024)),
    ],
)
def test_facts_of_a_model(config: dict[str, Any], facts: Facts) -> None:
    assert Facts.of(job(config).workload) == facts


def test_clusters_are_powers_of_two_up_to_the_most() -> None:
    found = clusters_of(job(devices=1), Wanted(most=40), _catalog())
    assert [cluster.world_size for cluster in found] == [1, 2, 4, 8, 16, 32]
    assert [cluster.nodes for cluster in found] == [1, 1, 1, 1, 2, 4]


def test_clusters_by_device_and_by_node() -> None:
    found = clusters_of(
        job(devices=8), Wanted(kinds=("h100", "b200", "p5.48xlarge", "gb200"), most=16), _catalog()
    )
    kinds = [(cluster.device.name, cluster.nodes, cluster.devices_per_node) for cluster in found]
    assert ("b200", 2, 8) in kinds
    assert ("gb200", 4, 4) in kinds
    assert any(cluster.node is not None and cluster.node.name == "p5.48xlarge" for cluster in found)


def test_without_a_wish_the_cluster_is_the_jobs_own() -> None:
    base = job(devices=16)
    assert clusters_of(base, Wanted(), _catalog()) == [base.cluster]


@pytest.mark.parametrize(
    ("wanted", "message"),
    [
        ({"kinds": ("h1000",)}, "devices: 'h1000' is not one of"),
        ({"most": 0}, "max_devices: 0 is not a whole number of at least 1"),
        ({"counts": (12,)}, "12 devices do not fill nodes of 8"),
    ],
)
def test_wrong_clusters_are_one_line(wanted: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        clusters_of(job(devices=8), Wanted(**wanted), _catalog())


def test_targets_follow_the_framework() -> None:
    assert ability_of(None, "pytorch").target == "fsdp2"
    assert ability_of("pytorch", "megatron").target == "fsdp2"
    with pytest.raises(InputError, match=r"framework: 'megatrom' is not one of .*did you mean megatron"):
        ability_of("megatrom", "pytorch")


@given(number=st.integers(1, 20_000))
def test_divisors_are_all_that_divide(number: int) -> None:
    assert divisors(number) == [n for n in range(1, number + 1) if number % n == 0]


def test_divisors_of_a_number_without_bounds_are_quick_and_divide() -> None:
    number = 3 * 2**62
    assert divisors(number)[:3] == [1, 2, 3]
    assert all(number % n == 0 for n in divisors(number))
