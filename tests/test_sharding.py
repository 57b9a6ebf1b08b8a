"""What replicas share under ZeRO 3 and its relatives, and context parallelism: who, what stays, what moves."""

from __future__ import annotations

import functools
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from foretrain.capture import capture_rank
from foretrain.cluster import Cluster
from foretrain.costs.collectives import team
from foretrain.errors import InputError
from foretrain.job import Job
from foretrain.plan import Plan
from foretrain.predictors.deletepop import DeletePopPredictor
from foretrain.step.exchange import shard_traffic, slowdown
from foretrain.step.graph import step_graph
from foretrain.step.passes import backward_pass, host_link_bytes_per_s, optimizer_pass
from foretrain.step.play import Step
from foretrain.step.playback import Work, play_rank
from foretrain.step.sharding import (
    copies,
    copies_in_s,
    copies_out_s,
    hooks_s,
    shards,
    stays_gathered,
    wire_bytes,
)
from foretrain.step.spans import Span

LLAMA = {
    "model_type": "llama", "hidden_size": 512, "intermediate_size": 1024, "num_hidden_layers": 6,
    "num_attention_heads": 8, "num_key_value_heads": 4, "vocab_size": 4096, "tie_word_embeddings": False,
}  # fmt: skip
PREDICTOR = DeletePopPredictor()


def job(*, nodes: int = 2, training: dict[str, Any] | None = None, **plan: Any) -> Job:
    return Job.read({
        "model": {"source": "transformers", "task": "causal-lm", "config": LLAMA},
        "training": {
            "global_batch": 64, "sequence": 1024, "precision": "amp-bf16", "optimizer": "adamw",
            "framework": "torchtitan", **(training or {}),
        },
        "cluster": {"node": "dgx-h100", "nodes": nodes},
        "plan": {"shard": "zero3", "micro_batch": 1, **plan},
    })  # fmt: skip


@functools.lru_cache(maxsize=64)
def _step(key: str) -> Step:
    step = PREDICTOR.predict(Job.read(json.loads(key))).step
    assert step is not None
    return step


def step(**plan: Any) -> Step:
    return _step(json.dumps(job(**plan).to_dict()))


# Who shares


@given(st.sampled_from([1, 2, 4]), st.sampled_from([8, 16, 64]), st.sampled_from([1, 2, 4]))
def test_shards_and_their_copies_make_up_the_replicas(replicate: int, replicas: int, tensor: int) -> None:
    plan, members = Plan(replicate=replicate, shard="zero3"), team(replicas, tensor, 8)
    inner, outer = shards(plan, members), copies(plan, members)
    assert inner.size * outer.size == members.size
    assert outer.size == replicate
    assert inner.per_node * outer.per_node == members.per_node


def test_a_copy_fills_nodes_and_copies_meet_across_them() -> None:
    plan, members = Plan(replicate=4, shard="zero3"), team(32, 1, 8)
    assert (shards(plan, members).per_node, shards(plan, members).nodes) == (8, 1)
    assert (copies(plan, members).nodes, copies(plan, members).sharing) == (4, 8)


def test_copies_sum_up_between_nodes_and_update_more_parameters() -> None:
    whole, copied = step(nodes=2), step(nodes=2, replicate=2)
    assert not shard_traffic(whole.layout, whole.layout.stages[0]).copies_s
    traffic = shard_traffic(copied.layout, copied.layout.stages[0])
    assert len(traffic.copies_s) == len(traffic.gathers_s)
    assert sum(traffic.gathers_s) < sum(shard_traffic(whole.layout, whole.layout.stages[0]).gathers_s)
    update = [optimizer_pass(one.layout, one.layout.stages[0]).span.device_s for one in (whole, copied)]
    assert update[1] > 1.5 * update[0]


def test_copies_of_an_optimizer_that_is_sharded() -> None:
    sent = [
        step(shard="zero1", training={"framework": "megatron", "precision": "bf16"}, **more).sent["replicas"]
        for more in ({}, {"replicate": 2})
    ]
    assert sent[0] < sent[1] < 1.5 * sent[0]


# What stays, and what moves


@pytest.mark.parametrize(
    ("framework", "reshard", "stay"),
    [
        ("pytorch", None, (True, False, True)),
        ("torchtitan", None, (False, False, True)),
        ("torchtitan", False, (True, True, True)),
        ("pytorch", True, (False, False, False)),
        ("pytorch", 8, (True, False, True)),
    ],
)
def test_what_stays_gathered(framework: str, reshard: bool | int | None, stay: tuple[bool, ...]) -> None:
    layout = step(reshard=reshard, training={"framework": framework}).layout
    blocks = layout.stages[0].blocks
    assert tuple(stays_gathered(layout, blocks[i]) for i in (0, 3, -1)) == stay
    again = shard_traffic(layout, layout.stages[0]).again_s
    assert [seconds > 0 for seconds in (again[0], again[3])] == [not stay[0], not stay[1]]


def test_a_root_comes_first_and_goes_last() -> None:
    for framework, together in (("pytorch", True), ("torchtitan", False)):
        layout = step(training={"framework": framework}).layout
        traffic = shard_traffic(layout, layout.stages[0])
        assert (traffic.gathers_s[-1] == 0) is together
        assert (traffic.reduces_s[-1] == 0) is together


def test_parameters_of_neighbours_come_faster_again() -> None:
    layouts = [step(reshard=reshard).layout for reshard in (True, 8)]
    far, near = (shard_traffic(layout, layout.stages[0]) for layout in layouts)
    assert near.again_s[2] < far.again_s[2]
    assert near.gathers_s == far.gathers_s


def test_neighbours_that_kept_parameters_send_them_less_far() -> None:
    whole, near = (step(reshard=reshard).sent["replicas"] for reshard in (True, 2))
    assert near < whole


def test_adding_gradients_up_is_of_those_that_there_are_and_as_wide_as_their_sum() -> None:
    megatron = {"framework": "megatron", "precision": "bf16"}

    def beside_s(**training: Any) -> float:
        found = step(shard="none", training={**megatron, **training})
        return backward_pass(found.layout, found.layout.stages[0].blocks[1]).beside_s

    whole, apart = beside_s(), {"fused_accumulation": False}
    assert beside_s(**apart, gradient_precision="bf16") < beside_s(**apart)
    assert beside_s(adapter={"kind": "lora", "rank": 2, "targets": ["q_proj"]}) < 0.05 * whole


def test_an_update_on_the_host_moves_over_the_devices_own_link() -> None:
    moved = [
        host_link_bytes_per_s(Cluster.read({"device": device}))
        for device in ("v100-sxm-32gb", "a100-sxm-80gb", "h100-sxm-80gb")
    ]
    assert moved == pytest.approx([10e9, 20e9, 40e9], rel=0.02)


def test_gradients_travel_as_the_plan_or_the_framework_says() -> None:
    cases: tuple[tuple[dict[str, Any], float], ...] = (
        ({}, 4.0),
        ({"reduce_precision": "bf16"}, 2.0),
        ({"training": {"framework": "pytorch"}}, 2.0),
        ({"training": {"framework": "pytorch"}, "reduce_precision": "fp32"}, 4.0),
    )
    for plan, size in cases:
        layout = step(**plan).layout
        assert wire_bytes(layout, 1.0, gradients=True) == size
        assert wire_bytes(layout, 1.0, gradients=False) == 2.0


def test_a_pipeline_of_fsdp2_gathers_and_reduces_once() -> None:
    few, many = (step(pipeline=2, training={"global_batch": batch}) for batch in (32, 64))
    assert few.sent["replicas"] == many.sent["replicas"]
    again = step(pipeline=2, reshard=True, training={"global_batch": 64})
    assert again.sent["replicas"] > many.sent["replicas"]
    assert (
        step(training={"global_batch": 64}).sent["replicas"]
        > 1.9 * (step(training={"global_batch": 32}).sent["replicas"])
    )


# What it costs host and device


def test_fsdp2_copies_what_fsdp1_has_in_place() -> None:
    layouts = {name: step(training={"framework": name}).layout for name in ("torchtitan", "fms-fsdp")}
    blocks = {name: layout.stages[0].blocks[2] for name, layout in layouts.items()}
    assert copies_out_s(layouts["torchtitan"], blocks["torchtitan"]) > 0
    assert copies_out_s(layouts["fms-fsdp"], blocks["fms-fsdp"]) == 0
    each, flat = (copies_in_s(layouts[name], blocks[name]) for name in ("torchtitan", "fms-fsdp"))
    assert each > 2 * flat > 0  # twice the bytes, and a cast on the way
    megatron = step(training={"framework": "megatron", "precision": "bf16"}).layout
    assert copies_in_s(megatron, megatron.stages[0].blocks[2]) == 0
    host = [hooks_s(layouts[name], blocks[name], backward=True) for name in ("torchtitan", "fms-fsdp")]
    assert host[0] > host[1] > 0


def test_products_lose_more_beside_collectives_than_copies_do() -> None:
    fast = step().layout
    assert 0.05 < slowdown(fast, fast.stages[0]) < fast.tuning.slowdown


def _work(**more: Any) -> Work:
    block = Span(0.1, 1.0, 1.1)
    four = (1.5,) * 4
    return Work(
        forward=(block,) * 4, backward=(block,) * 4, optimizer=Span(), gathers_s=(0.5,) * 4,
        **{"again_s": (0.5,) * 4, "reduces_s": four, **more},
    )  # fmt: skip


def test_what_does_not_run_beside_computation_shows() -> None:
    beside = play_rank(_work(reduces_s=(0.4,) * 4), 2).time_s
    assert play_rank(_work(reduces_s=(0.4,) * 4, prefetches=False), 2).time_s > beside + 2.0
    assert play_rank(_work(reduces_s=(0.4,) * 4, hands_out_beside=False), 2).time_s > beside + 2.0


def test_gradients_that_wait_for_the_last_micro_batch_move_once() -> None:
    each, once = (play_rank(_work(syncs_last=last), 6).time_s for last in (False, True))
    assert once < each
    assert play_rank(_work(syncs_last=True), 1).time_s == play_rank(_work(), 1).time_s


def test_what_micro_batches_fetch_again_counts_for_each() -> None:
    block = Span(0.001, 0.1, 0.1)
    work = Work(
        forward=(block,) * 2, backward=(block,) * 2, optimizer=Span(0.0, 0.01, 0.01), slowdown=0.5,
        gathers_s=(0.01,) * 2, again_s=(0.01,) * 2, reduces_s=(0.01,) * 2, syncs_last=True,
    )  # fmt: skip
    few, many = (play_rank(work, micro_batches) for micro_batches in (6, 26))
    apart = (many.computing_s - few.computing_s) / 20 - 0.4
    assert apart == pytest.approx(0.5 * 0.01, rel=0.1)  # the first of two shows


def test_copies_of_a_shard_sum_up_on_links_of_their_own() -> None:
    alone = play_rank(_work(reduces_s=(0.4,) * 4), 1).time_s
    beside = play_rank(_work(reduces_s=(0.4,) * 4, copies_s=(0.4,) * 4), 1).time_s
    assert alone < beside < alone + 4 * 0.4


@pytest.mark.parametrize("overlap", [{"gradients": False}, {"parameters": False}])
def test_overlap_can_be_switched_off(overlap: dict[str, bool]) -> None:
    long = {"sequence": 16384, "global_batch": 16}
    assert step(overlap=overlap, training=long).time.exposed_s > 1.5 * step(training=long).time.exposed_s


# Fields


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        ({"replicate": 3}, "plan.replicate: 3 does not divide plan.data = 16"),
        ({"replicate": 2, "shard": "none"}, "plan.replicate: 2 copies of a model that is not sharded"),
        ({"reshard": True, "shard": "zero1"}, "plan.reshard: true is of shard = 'zero3', not 'zero1'"),
        ({"reshard": 1}, "plan.reshard: 1 is not true, false, or 2 or more neighbours"),
        ({"reshard": 6}, "plan.reshard: 6 does not divide the 16 ranks of a copy"),
        ({"context_exchange": "ring"}, "plan.context_exchange: 'ring' needs plan.context of 2 or more"),
        ({"reduce_precision": "fp8"}, "plan.reduce_precision: 'fp8' is not one of"),
    ],
)
def test_what_replicas_cannot_be(plan: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        job(**plan)


# Context parallelism


def _collectives(given: Job) -> dict[tuple[str, str], int]:
    found: dict[tuple[str, str], int] = {}
    for op in capture_rank(given).ops:
        if op.operator.overload == "context" and ".layers.1." in op.layer:
            found[op.phase, op.operator.name] = found.get((op.phase, op.operator.name), 0) + 1
    return found


def test_keys_are_gathered_again_and_not_kept() -> None:
    given = job(context=4)
    assert _collectives(given) == {
        ("forward", "all_gather"): 2,
        ("backward", "all_gather"): 2,
        ("backward", "reduce_scatter"): 2,
    }
    graph = capture_rank(given)
    first = sum(op.phase == "forward" for op in graph.ops)
    gathered = {
        buffer for op in graph.ops[:first] if op.operator.name == "all_gather" for buffer in op.writes
    }
    assert all(graph.buffers[buffer].dies < first for buffer in gathered)


def test_heads_are_dealt_out_for_the_whole_sequence() -> None:
    given = job(context=4, context_exchange="alltoall")
    assert _collectives(given) == {("forward", "all_to_all"): 4, ("backward", "all_to_all"): 4}
    attention = next(
        op.operator for op in capture_rank(given).ops if op.operator.name.endswith("flash_attention")
    )
    assert attention.inputs[0].shape == (1, 2, 1024, 64)
    with pytest.raises(InputError, match="4 key heads do not divide over"):
        capture_rank(job(context=8, context_exchange="alltoall"))


def test_a_ring_hides_what_gathering_shows() -> None:
    megatron = {"framework": "megatron", "precision": "bf16", "sequence": 32768, "global_batch": 4}
    ring, gathered = (
        step(context=4, shard="zero1", context_exchange=by, training=megatron).time.exposed_s
        for by in (None, "allgather")
    )
    assert ring < gathered


def test_frameworks_with_models_of_their_own_compile_no_masks() -> None:
    names = {
        framework: {op.operator.name for op in step_graph(given).ops}
        for framework in ("torchtitan", "pytorch")
        if (given := job(training={"framework": framework, "compile": True}))
    }
    assert "_scaled_dot_product_efficient_attention" in names["pytorch"]
    assert "_scaled_dot_product_flash_attention" in names["torchtitan"]


def test_cut_layers_take_the_host_of_torchtitan_longer_unless_it_compiles() -> None:
    plan = {"tensor": 2, "shard": "none", "nodes": 1}
    eager = step(**plan, training={"precision": "bf16"}).host_issue_s
    assert eager > 1.5 * step(**plan, training={"precision": "bf16", "framework": "pytorch"}).host_issue_s


# Boards of less power


def test_a_lower_limit_of_power_slows_products_down() -> None:
    long = {"sequence": 16384, "global_batch": 16, "precision": "bf16"}
    free, limited = (
        PREDICTOR.predict(Job.read({**tables, "cluster": {**tables["cluster"], "power_limit": watts}})).step
        for tables in [job(training=long).to_dict()]
        for watts in (700.0, 250.0)
    )
    assert free is not None
    assert limited is not None
    assert limited.device_busy_s > 1.1 * free.device_busy_s
    assert free.layout.job.cluster.power_limit == 700.0
    with pytest.raises(InputError, match=r"cluster.power_limit"):
        Job.read({**job().to_dict(), "cluster": {"node": "dgx-h100", "nodes": 2, "power_limit": -1.0}})
