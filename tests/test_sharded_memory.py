"""Memory of a rank: states add up to the bytes per parameter that are known, and schedules hold the
micro-batches that they hold."""

from __future__ import annotations

import dataclasses
import functools
from pathlib import Path
from typing import Any

import pytest

from foretrain.capture import capture_rank
from foretrain.errors import InputError
from foretrain.forecast import RankMemory
from foretrain.graph import OpGraph
from foretrain.graph.opset import is_product
from foretrain.job import Job
from foretrain.plan import Plan
from foretrain.run import Run, read_runs
from foretrain.step import rank_replay
from foretrain.step.block_memory import kept_bytes
from foretrain.step.frameworks import Profile, as_framework_runs_it, profile
from foretrain.step.graph import step_graph
from foretrain.step.partition import blocks, stages
from foretrain.step.passes import not_kept, run_again
from foretrain.step.recomputed_modules import check_modules
from foretrain.step.schedules import in_flight
from foretrain.step.sharded_memory import sharded_memory

LAYERS, WIDTH, VOCABULARY, SEQUENCE, BATCH = 8, 64, 512, 64, 2
TENSOR_BYTES = BATCH * SEQUENCE * WIDTH * 2
LOGITS_BYTES = BATCH * SEQUENCE * VOCABULARY * 4
FP32_GRADIENTS = Profile(keeps_fp32_gradients=True)


def a_job(*, accumulation: int = 1, tied: bool = False, precision: str = "bf16", **plan: Any) -> Job:
    """A small Llama in low precision with fp32 master weights, as many micro-batches per step as asked
    for."""
    degrees = {
        "data": 1,
        "tensor": 1,
        "pipeline": 1,
        **{name: value for name, value in plan.items() if isinstance(value, int)},
    }
    devices = degrees["data"] * degrees["tensor"] * degrees["pipeline"]
    config = {
        "model_type": "llama", "hidden_size": WIDTH, "intermediate_size": 128, "num_hidden_layers": LAYERS,
        "num_attention_heads": 8,
        "num_key_value_heads": 8, "vocab_size": VOCABULARY, "max_position_embeddings": SEQUENCE,
        "tie_word_embeddings": tied,
    }  # fmt: skip
    return Job.read({
        "model": {"source": "transformers", "task": "causal-lm", "config": config},
        "training": {
            "global_batch": BATCH * accumulation * degrees["data"], "sequence": SEQUENCE,
            "precision": precision, "optimizer": "adamw",
            "master_weights": True, "framework": "megatron",
        },
        "cluster": {"device": "a100-sxm-80gb", "nodes": 1, "devices_per_node": devices},
        "plan": {"data": degrees["data"], "micro_batch": BATCH, **plan},
    })  # fmt: skip


@functools.cache
def _captured(tensor: int, tied: bool, precision: str, accumulates: bool) -> OpGraph:
    parallel = {"sequence_parallel": True} if tensor > 1 else {}
    return capture_rank(
        a_job(tensor=tensor, tied=tied, precision=precision, accumulation=1 + accumulates, **parallel)
    )


def memory(job: Job, profile: Profile = FP32_GRADIENTS, *, stalled: bool = False) -> tuple[RankMemory, ...]:
    config = job.workload.model.config
    assert config is not None
    graph = _captured(
        job.plan.tensor, config["tie_word_embeddings"], job.workload.training.precision, job.accumulation > 1
    )
    dealt = stages(job, graph, profile)
    return tuple(sharded_memory(job, graph, stage, len(dealt), profile, stalled=stalled) for stage in dealt)


def states(rank: RankMemory) -> float:
    return sum(rank.by_category[name] for name in ("weights", "gradients", "optimizer_state"))


def parameters(*, tied: bool = False) -> int:
    return sum(weight.elements for weight in _captured(1, tied, "bf16", False).weights)


@pytest.mark.parametrize(
    ("shard", "whole", "shared"), [("none", 18, 0), ("zero1", 6, 12), ("zero2", 2, 16), ("zero3", 0, 18)]
)  # bytes per parameter: weights 2, gradients 4, master weights 4, Adam 8
def test_states_add_up(shard: str, whole: int, shared: int) -> None:
    (rank,) = memory(a_job(data=4, shard=shard))
    assert states(rank) == pytest.approx(parameters() * (whole + shared / 4), rel=1e-3)


def test_more_sharding_needs_less() -> None:
    held = [states(memory(a_job(data=4, shard=shard))[0]) for shard in ("none", "zero1", "zero2", "zero3")]
    assert held == sorted(held, reverse=True)
    assert len(set(held)) == 4


def test_zero3_adds_two_gathered_blocks() -> None:
    (rank,) = memory(a_job(data=4, shard="zero3"))
    (whole,) = memory(a_job(data=4))
    assert 0 < rank.by_category["buffers"] < whole.by_category["weights"]
    assert memory(a_job(shard="zero3"))[0].by_category["buffers"] == 0


def test_both_copies_of_dualpipe_share_the_optimizer_state() -> None:
    plan: dict[str, Any] = {"data": 2, "pipeline": 4, "shard": "zero1", "accumulation": 8}
    once, twice = memory(a_job(**plan)), memory(a_job(**plan, schedule="dualpipe"))
    for name, times in (("optimizer_state", 1), ("weights", 2)):
        single, double = (sum(rank.by_category[name] for rank in ranks) for ranks in (once, twice))
        assert double == pytest.approx(times * single), name


def test_frozen_weights_have_no_states_and_are_gathered_as_they_are() -> None:
    tables = a_job(data=2, shard="zero3").to_dict()
    tables["model"]["config"] |= {"hidden_size": 1024, "intermediate_size": 2048, "num_hidden_layers": 4}
    tables["training"] |= {"framework": "pytorch", "master_weights": False}
    tables["training"]["adapter"] = {"kind": "lora", "rank": 4, "targets": ["q_proj"], "precision": "fp32"}
    job = Job.read(tables)
    graph, habits = step_graph(job), profile(job)
    (stage,) = stages(job, graph, habits)
    rank = sharded_memory(job, graph, stage, 1, habits)
    weights = rank.by_category["weights"]
    layer = stage.blocks[1].weight_bytes
    assert rank.by_category["buffers"] < 2.1 * layer + 2 * stage.blocks[0].weight_bytes * 2
    assert rank.cached_bytes < 1.2 * weights


def test_offload_takes_the_optimizer_state_away() -> None:
    (rank,) = memory(a_job(offload=True))
    assert rank.by_category["optimizer_state"] == 0
    assert memory(a_job())[0].by_category["optimizer_state"] == pytest.approx(12 * parameters(), rel=1e-3)


def test_fp32_weights_go_to_the_host_with_the_optimizer() -> None:
    habits = Profile(casts_shards=True)
    whole, offloaded = (memory(a_job(data=4, shard="zero3", offload=one), habits)[0] for one in (False, True))
    assert whole.by_category["weights"] == pytest.approx(parameters(), rel=0.01)  # 4 bytes on 4 ranks
    assert offloaded.by_category["weights"] == pytest.approx(parameters() / 2, rel=0.01)


def test_fp16_gradients_stay_in_their_precision() -> None:
    (rank,) = memory(a_job(precision="fp16"))
    assert rank.by_category["gradients"] == 2 * parameters()


def test_buckets_of_ddp_copy_the_gradients() -> None:
    copied = 2 * parameters()
    assert memory(a_job(data=2), Profile())[0].by_category["buffers"] == copied
    assert memory(a_job(data=2))[0].by_category["buffers"] == 0
    beside = dataclasses.replace(FP32_GRADIENTS, uses_ddp_beside=True)
    assert memory(a_job(data=2, shard="zero1"), beside)[0].by_category["buffers"] == copied
    assert memory(a_job(), beside)[0].by_category["buffers"] == 0


def test_tied_embeddings_are_at_both_ends_of_a_pipeline() -> None:
    first, last = memory(a_job(tied=True, pipeline=2, accumulation=4))
    assert sum(map(states, (first, last))) == pytest.approx(
        18 * (parameters(tied=True) + VOCABULARY * WIDTH), rel=1e-3
    )
    apart = memory(a_job(pipeline=2, accumulation=4))
    assert sum(map(states, apart)) == pytest.approx(18 * parameters(), rel=1e-3)
    assert sum(map(states, (first, last))) == pytest.approx(sum(map(states, apart)), rel=1e-3)


def test_1f1b_holds_most_on_the_first_stage_and_gpipe_everything() -> None:
    one, all_first = (memory(a_job(pipeline=4, accumulation=16, schedule=name)) for name in ("1f1b", "gpipe"))
    held = [rank.by_category["activations"] for rank in one[:3]]
    assert held == sorted(held, reverse=True)
    assert all_first[1].by_category["activations"] == pytest.approx(
        16 / 3 * one[1].by_category["activations"], rel=1e-6
    )


def test_more_micro_batches_than_stages_change_nothing_in_1f1b() -> None:
    few, many = (memory(a_job(pipeline=4, accumulation=count))[0] for count in (4, 32))
    assert few.by_category["activations"] == many.by_category["activations"]


@pytest.mark.parametrize(
    ("schedule", "stage", "chunks", "micro_batches", "expected"),
    [
        ("1f1b", 0, 1, 2, (2,)),
        ("1f1b", 2, 1, 9, (2,)),
        ("gpipe", 3, 1, 9, (9,)),
        ("interleaved", 0, 2, 8, (7, 4)),
        ("interleaved", 3, 2, 8, (4, 1)),
        ("interleaved", 3, 2, 4, (4, 1)),
    ],
)
def test_in_flight(
    schedule: Any, stage: int, chunks: int, micro_batches: int, expected: tuple[int, ...]
) -> None:
    assert in_flight(Plan(pipeline=4, schedule=schedule), stage, chunks, micro_batches) == expected


def test_full_recomputation_keeps_the_inputs_of_layers() -> None:
    (kept,), (again,) = (memory(a_job(recompute=name)) for name in ("none", "full"))
    saved = kept.by_category["activations"] - again.by_category["activations"]
    assert again.by_category["activations"] >= LAYERS * TENSOR_BYTES
    assert saved > LAYERS * 5 * TENSOR_BYTES
    first = memory(a_job(pipeline=4, accumulation=16, recompute="full"))[1]
    assert first.by_category["activations"] == pytest.approx(3 * 2 * TENSOR_BYTES, rel=0.05)


def test_the_frameworks_own_loss_holds_its_copies_of_the_logits() -> None:
    captured, own = (
        memory(a_job(), dataclasses.replace(FP32_GRADIENTS, loss_copies=copies))[0] for copies in (None, 1.5)
    )
    assert own.by_category["temporaries"] == LOGITS_BYTES / 2
    assert captured.by_category["temporaries"] >= 1.9 * LOGITS_BYTES


def test_reserved_is_more_than_allocated() -> None:
    (rank,) = memory(a_job())
    assert rank.reserved_bytes > rank.allocated_bytes
    assert rank.allocated_bytes == sum(rank.by_category.values())


def test_asynchronous_collectives_hold_what_they_gather() -> None:
    """A layer of tensor and sequence parallelism gathers the inputs of attention and of the feed-forward
    network."""
    quiet, ahead = (
        dataclasses.replace(FP32_GRADIENTS, gathers_on_own_stream=value) for value in (False, True)
    )
    job = a_job(tensor=2, sequence_parallel=True)
    more = memory(job, ahead)[0].cached_bytes - memory(job, quiet)[0].cached_bytes
    assert more == pytest.approx(2 * LAYERS * TENSOR_BYTES)
    assert memory(job, ahead)[0].by_category == memory(job, quiet)[0].by_category


def test_a_stalled_host_is_fewer_passes_ahead() -> None:
    profile = dataclasses.replace(FP32_GRADIENTS, gathers_on_own_stream=True)
    job = a_job(tensor=2, pipeline=4, sequence_parallel=True, accumulation=8)
    ahead, waiting = (memory(job, profile, stalled=stalled)[1].cached_bytes for stalled in (False, True))
    gathered = 2 * LAYERS // 4 * TENSOR_BYTES
    assert ahead - waiting == pytest.approx(2 * gathered)


def test_checks_of_parameters_need_segments_where_no_logits_were() -> None:
    checks = dataclasses.replace(FP32_GRADIENTS, parameter_copies=4)
    plan: dict[str, Any] = {"pipeline": 2, "accumulation": 4}
    more = memory(a_job(**plan), checks)[0].cached_bytes - memory(a_job(**plan))[0].cached_bytes
    assert more == pytest.approx(4 * 2 * VOCABULARY * WIDTH)


def test_weights_that_were_cast_stay_for_all_micro_batches() -> None:
    """In fp8 as Transformer Engine keeps them: a byte of each weight as it lies, and one transposed."""
    held = {}
    for accumulation in (1, 2):
        described = a_job(accumulation=accumulation, pipeline=2).to_dict()
        cluster = {**described["cluster"], "device": "h100-sxm-80gb"}
        job = Job.read(
            {**described, "cluster": cluster, "training": {**described["training"], "precision": "fp8"}}
        )
        graph = step_graph(job)
        dealt = stages(job, graph, profile(job))
        ranks = [sharded_memory(job, graph, stage, len(dealt), FP32_GRADIENTS) for stage in dealt]
        held[accumulation] = [rank.by_category["buffers"] for rank in ranks]
    layer = 4 * WIDTH * WIDTH + 3 * WIDTH * 128
    for before, kept in zip(held[1], held[2], strict=True):
        assert kept - before == pytest.approx(2 * layer * LAYERS / 2, rel=0.01)


def test_a_rank_that_serves_has_its_peak_in_the_forward_pass_and_no_gaps_in_segments_that_expand() -> None:
    described = a_job(pipeline=2).to_dict()
    found, model = {}, described["model"]
    model = {**model, "config": {**model["config"], "use_cache": True}}
    for allocator in ("", "expandable_segments:True"):
        training = {**described["training"], "mode": "infer", "master_weights": False, "allocator": allocator}
        job = Job.read({**described, "model": model, "training": training})
        dealt = stages(job, graph := step_graph(job), profile(job))
        found[allocator] = [sharded_memory(job, graph, stage, len(dealt), FP32_GRADIENTS) for stage in dealt]
    assert {rank.peak.phase for ranks in found.values() for rank in ranks if rank.peak} == {"forward"}
    assert all(rank.by_category["temporaries"] and rank.cached_bytes for rank in found[""])
    assert [rank.cached_bytes for rank in found["expandable_segments:True"]] == [0.0, 0.0]


def test_a_rank_is_replayed_once_for_plans_under_which_it_allocates_the_same(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    habits = Profile(sharding="parameters")
    job = a_job(data=2, shard="zero3")
    (first,) = memory(job, habits)
    monkeypatch.setattr(rank_replay.RankReplay, "_settled", lambda _: pytest.fail("replayed again"))
    assert memory(job, habits) == (first,)


# Measured ranks

RANKS = Path(__file__).parent.parent / "data" / "h200_ranks.jsonl"


@functools.cache
def _measured_ranks() -> dict[str, Run]:
    return {run.provenance["label"]: run for _, run in read_runs(RANKS)}


@pytest.mark.parametrize(
    "label",
    [
        "8b of 8",  # embedding and head sharded by themselves
        "8b of 8 kept",  # parameters stay gathered
        "8b of 8 operators",
        "8b of 8 expandable",
        "8b of 8 bf16 weights",  # a root of embedding and head
        "phi3 of 4",
        "8b pp4 st0",
        "8b pp4 dp8 st0",  # gradients are summed up whole
    ],
)
def test_a_rank_holds_what_one_on_a_gpu_does(label: str) -> None:
    run = _measured_ranks()[label]
    graph, habits = step_graph(run.job), profile(run.job)
    dealt = stages(run.job, graph, profile(run.job))
    rank = sharded_memory(run.job, graph, dealt[0], len(dealt), habits)
    assert rank.allocated_bytes == pytest.approx(run.measured["peak_memory_bytes"], rel=0.01)
    assert rank.reserved_bytes == pytest.approx(run.measured["reserved_memory_bytes"], rel=0.03)


# What a job says beside its degrees


def changed(job: Job, *, training: dict[str, Any] | None = None, **plan: Any) -> Job:
    work = job.workload
    return dataclasses.replace(
        job,
        workload=dataclasses.replace(work, training=dataclasses.replace(work.training, **(training or {}))),
        plan=dataclasses.replace(job.plan, **plan),
    )


def test_gradients_and_moments_in_bf16() -> None:
    (rank,), plain = memory(changed(a_job(), training={"gradient_precision": "bf16"})), memory(a_job())[0]
    assert rank.by_category["gradients"] == plain.by_category["gradients"] / 2
    (rank,) = memory(changed(a_job(), training={"optimizer_state": "bf16"}))
    assert rank.by_category["optimizer_state"] == pytest.approx(8 * parameters(), rel=1e-3)  # 4 + 2 + 2
    work = a_job().workload
    own = dataclasses.replace(
        work, training=dataclasses.replace(work.training, framework="torchtitan", gradient_precision="bf16")
    )
    with pytest.raises(InputError, match="gradient_precision"):
        profile(dataclasses.replace(a_job(), workload=own))


def test_activations_on_the_host_leave_two_layers() -> None:
    (kept,), (away,) = memory(a_job()), memory(changed(a_job(), offload_activations=True))
    layer = next(b for b in blocks(_captured(1, False, "bf16", False)) if b.is_layer).piece.kept_bytes
    saved = kept.by_category["activations"] - away.by_category["activations"]
    assert saved == pytest.approx((LAYERS - 2) * layer, rel=0.02)


@pytest.mark.parametrize(("loss", "most"), [("fused", 1.5), ("chunked", 1.0)])
def test_other_losses_hold_less_of_the_logits(loss: str, most: float) -> None:
    (plain,), (other,) = memory(a_job()), memory(changed(a_job(), training={"loss": loss}))
    assert plain.allocated_bytes - other.allocated_bytes > most * LOGITS_BYTES


def test_torch_recomputes_a_layer_up_to_what_its_backward_pass_asks_for() -> None:
    """Kernels of a Llama on an H200 (h200_fsdp): six of a layer's seven products run again."""
    graph = _captured(1, False, "bf16", False)
    layer = next(block for block in blocks(graph) if block.is_layer)

    def products(framework: str) -> list[str]:
        habits = profile(changed(a_job(), training={"framework": framework}))
        again = run_again(Plan(recompute="full"), habits, graph, layer)
        calls = [graph.ops[i] for i in again.tolist()]
        return [op.layer.rpartition(".")[2] for op in calls if is_product(op.operator.name)]

    whole = products("megatron")
    assert (len(whole), whole[-1]) == (7, "down_proj")
    assert products("torchtitan") == whole
    assert products("pytorch") == products("deepspeed") == whole[:-1]


def test_modules_that_are_computed_again() -> None:
    graph = _captured(1, False, "bf16", False)
    layer = next(block for block in blocks(graph) if block.is_layer)

    def names(*modules: str) -> list[str]:
        plan = Plan(recompute="selective", recompute_modules=modules)
        return [
            graph.ops[i].layer.rpartition(".")[2] for i in not_kept(plan, "attention", graph, layer).tolist()
        ]

    assert set(names("norms")) == {"input_layernorm", "post_attention_layernorm"}
    assert {"gate_proj", "up_proj", "down_proj"} <= set(names("mlp"))
    assert set(names("attention")) == {"self_attn"}
    held = [
        memory(changed(a_job(), recompute="selective", recompute_modules=modules))[0].by_category[
            "activations"
        ]
        for modules in (("attention",), ("norms",), ("norms", "mlp"))
    ]
    assert memory(a_job())[0].by_category["activations"] >= held[0] > held[1] > held[2]
    with pytest.raises(InputError, match="no 'experts'"):
        check_modules(Plan(recompute="selective", recompute_modules=("experts",)), graph)


def test_latent_attention_that_runs_again_keeps_no_queries_keys_and_values() -> None:
    config = {
        "model_type": "deepseek_v3", "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 5,
        "moe_intermediate_size": 64, "n_routed_experts": 8, "num_experts_per_tok": 2, "n_group": 2,
        "topk_group": 1, "first_k_dense_replace": 1, "num_attention_heads": 8, "num_key_value_heads": 8,
        "q_lora_rank": 32, "kv_lora_rank": 16, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 16,
        "vocab_size": VOCABULARY, "max_position_embeddings": SEQUENCE,
    }  # fmt: skip
    sections = a_job().to_dict()
    job = Job.read({**sections, "model": {**sections["model"], "config": config}})
    graph, habits = step_graph(job), profile(job)
    layer = next(block for block in blocks(graph) if block.is_layer)
    plan = Plan(recompute="selective", recompute_modules=("mla_up",))
    saved = layer.piece.kept_bytes - kept_bytes(graph, layer, plan, habits)
    assert saved == BATCH * SEQUENCE * 8 * (24 + 24 + 16) * 2  # heads of queries, keys and values


def test_written_out_attention_that_runs_again_keeps_no_scores() -> None:
    work = a_job().workload
    eager = dataclasses.replace(work, training=dataclasses.replace(work.training, attention="eager"))
    job = dataclasses.replace(a_job(), workload=eager)
    graph = step_graph(job)
    kept, again = (
        sharded_memory(one, graph, stages(one, graph, FP32_GRADIENTS)[0], 1, FP32_GRADIENTS).by_category[
            "activations"
        ]
        for one in (job, changed(job, recompute="selective"))
    )
    scores = BATCH * 8 * SEQUENCE * SEQUENCE * 2
    assert kept - again > LAYERS * scores


def test_a_full_device_holds_no_more_than_it_has() -> None:
    """What collectives ahead of the device hold is returned where it is needed."""
    ahead = dataclasses.replace(FP32_GRADIENTS, gathers_on_own_stream=True)
    job = a_job(tensor=2, sequence_parallel=True)
    free = memory(job, ahead)[0]
    device = dataclasses.replace(
        job.cluster.groups[0].device, memory_bytes=free.allocated_bytes + 4 * TENSOR_BYTES
    )
    group = dataclasses.replace(job.cluster.groups[0], device=device)
    small = dataclasses.replace(job, cluster=dataclasses.replace(job.cluster, groups=(group,)))
    rank = memory(small, ahead)[0]
    assert rank.reserved_bytes <= device.memory_bytes < free.reserved_bytes
    assert rank.needed_bytes <= rank.reserved_bytes


def test_weights_in_fp8_have_no_bf16_copy() -> None:
    described = a_job(accumulation=2).to_dict()
    cluster = {**described["cluster"], "device": "h100-sxm-80gb"}
    job = Job.read(
        {**described, "cluster": cluster, "training": {**described["training"], "precision": "fp8"}}
    )
    graph = step_graph(job)
    both, alone = (
        sharded_memory(one, graph, stages(one, graph, FP32_GRADIENTS)[0], 1, FP32_GRADIENTS)
        for one in (job, changed(job, fp8_gather=True))
    )
    assert both.by_category["weights"] - alone.by_category["weights"] == pytest.approx(
        both.by_category["buffers"], rel=0.05
    )


@pytest.mark.parametrize(("recipe", "kept"), [("current", 1), ("mxfp8", 2)])
def test_blackwell_keeps_no_transposed_weights_of_one_scale(recipe: str, kept: int) -> None:
    described = a_job(accumulation=2).to_dict()
    described["cluster"]["device"] = "b200"
    described["training"] |= {"precision": "fp8", "fp8": recipe}
    job = Job.read(described)
    graph = step_graph(job)
    both, alone = (
        sharded_memory(one, graph, stages(one, graph, FP32_GRADIENTS)[0], 1, FP32_GRADIENTS).by_category
        for one in (job, changed(job, fp8_gather=True))
    )
    layers = (4 * WIDTH * WIDTH + 3 * WIDTH * 128) * LAYERS
    assert both["buffers"] == pytest.approx(kept * layers, rel=0.05)  # with scales
    assert both["weights"] - alone["weights"] == 2 * layers


def test_fp8_layers_keep_their_own_part_of_what_is_gathered() -> None:
    """Transformer Engine gathers the inputs of attention and feed-forward again in the backward pass."""
    described = a_job(tensor=2, sequence_parallel=True, accumulation=2).to_dict()
    cluster = {**described["cluster"], "device": "h100-sxm-80gb"}
    kept = {}
    for precision in ("bf16", "fp8"):
        training = {**described["training"], "precision": precision}
        graph = step_graph(Job.read({**described, "cluster": cluster, "training": training}))
        kept[precision] = next(b for b in blocks(graph) if b.is_layer).piece.kept_bytes
    assert kept["fp8"] < kept["bf16"]


@pytest.mark.parametrize(
    ("attention", "implementation", "merged"),
    [("eager", "eager", False), ("sdpa", "sdpa", False), ("flash", None, True), (None, None, True)],
)
def test_attention_as_a_job_has_it(attention: Any, implementation: str | None, merged: bool) -> None:
    job = changed(a_job(), training={"attention": attention})
    config = as_framework_runs_it(job).workload.model.config or {}
    assert (config.get("attn_implementation"), profile(job).flash_attention) == (implementation, merged)


def test_chunks_of_a_rank_stay_gathered_together() -> None:
    habits = Profile(splits_root=True)
    schedules = ({"schedule": "1f1b"}, {"schedule": "interleaved", "virtual_stages": 2})
    whole, halves = (
        memory(a_job(accumulation=8, data=2, pipeline=2, shard="zero3", **schedule), habits)[0]
        for schedule in schedules
    )
    assert halves.by_category["buffers"] == pytest.approx(whole.by_category["buffers"], rel=0.1)


def test_torchtitan_keeps_fp32_weights_of_fp8_layers() -> None:
    sections = a_job(data=4, shard="zero3").to_dict() | {"cluster": {"device": "h100", "devices_per_node": 4}}
    given = {**sections["training"], "precision": "fp8", "master_weights": False}
    kept = [
        as_framework_runs_it(
            Job.read({**sections, "training": {**given, "framework": framework}})
        ).workload.training
        for framework in ("torchtitan", "pytorch")
    ]
    assert [training.master_weights for training in kept] == [True, False]


@functools.cache
def adapted(adapter: str | None, precision: str) -> RankMemory:
    """A Llama with adapters on four ranks of FSDP2."""
    config = {
        "model_type": "llama", "hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 6,
        "num_attention_heads": 8, "vocab_size": 4096,
    }  # fmt: skip
    training = {"global_batch": 4, "sequence": 64, "precision": precision, "optimizer": "adamw"}
    job = Job.read({
        "model": {"source": "transformers", "task": "causal-lm", "config": config},
        "training": {**training, "adapter": adapter} if adapter else training,
        "cluster": {"device": "h100-sxm-80gb", "devices_per_node": 4},
        "plan": {"shard": "zero3"},
    })  # fmt: skip
    graph, habits = step_graph(job), profile(job)
    (stage,) = stages(job, graph, habits)
    return sharded_memory(job, graph, stage, 1, habits)


def test_frozen_weights_are_gathered_as_they_are_and_have_no_gradients_in_what_is_reserved() -> None:
    whole, lora = adapted(None, "bf16"), adapted("lora:8", "bf16")
    assert lora.by_category["buffers"] < 1.1 * whole.by_category["buffers"]
    assert lora.reserved_bytes < whole.reserved_bytes
    assert lora.reserved_bytes < 1.5 * lora.allocated_bytes


def test_weights_in_4_bits_are_no_wider_in_shards() -> None:
    plain, cast = (adapted("qlora:8", precision).by_category["weights"] for precision in ("bf16", "amp-bf16"))
    assert cast < 1.5 * plain  # embedding and head in fp32, all else in 4 bits
