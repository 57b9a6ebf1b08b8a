"""Forecasts of plans on many devices, from the captured model to the quantities."""

from __future__ import annotations

import cProfile
import dataclasses
import pstats
import re
from typing import Any, get_args

import numpy as np
import pytest

from foretrain.errors import InputError, UnsupportedJob
from foretrain.forecast import Forecast
from foretrain.job import Job
from foretrain.plan import Plan
from foretrain.predictors.deletepop import DeletePopPredictor
from foretrain.predictors.deletepop.calibration import Calibration, Case
from foretrain.predictors.deletepop.rank_calibration import calibrate_parts
from foretrain.predictors.deletepop.residuals import Residuals
from foretrain.predictors.roofline import RooflinePredictor
from foretrain.run import Run
from foretrain.step.assembly import logged
from foretrain.step.dealing import deal, fill, virtual_stages
from foretrain.step.frameworks import Profile, attention_factor, profile
from foretrain.step.partition import blocks, stages
from foretrain.step.play import play
from foretrain.step.teams import Teams
from foretrain.step.tuning import Tuning
from foretrain.workload import Framework

LLAMA = {
    "model_type": "llama", "hidden_size": 512, "intermediate_size": 1024, "num_hidden_layers": 8,
    "num_attention_heads": 8, "num_key_value_heads": 8,
    "vocab_size": 4096,
}  # fmt: skip
PREDICTOR = DeletePopPredictor()
LARGE = {"global_batch": 512}
"""A batch whose micro-batches of 16 keep a device busier than its host."""


def job(cluster: dict[str, Any] | None = None, training: dict[str, Any] | None = None, **plan: Any) -> Job:
    return Job.read({
        "model": {"source": "transformers", "task": "causal-lm", "config": LLAMA},
        "training": {
            "global_batch": 64, "sequence": 1024, "precision": "bf16", "master_weights": True,
            "optimizer": "adamw", "framework": "megatron",
            **(training or {}),
        },
        "cluster": cluster or {"node": "dgx-h100", "nodes": 1},
        "plan": {"micro_batch": 2, **plan},
    })  # fmt: skip


def step_s(given: Job) -> float:
    return PREDICTOR.predict(given)["step_time_s"].median


def peak(forecast: Forecast) -> float:
    return max(rank.allocated_bytes for rank in forecast.ranks)


@pytest.mark.parametrize(
    "plan",
    [
        {},
        {"tensor": 2, "sequence_parallel": True},
        {"pipeline": 2},
        {"tensor": 2, "pipeline": 2, "shard": "zero1"},
        {"pipeline": 4, "schedule": "gpipe"},
        {"pipeline": 2, "schedule": "interleaved"},
        {"context": 2},
        {"shard": "zero2"},
        {"shard": "zero3"},
        {"recompute": "full"},
        {"recompute": "selective"},
        {"recompute": "operators", "recompute_every": 2},
        {"offload": True},
        {"servers": 2},
        {"servers": 2, "asynchronous": True},
        {"pipeline": 2, "shard": "zero3"},
    ],
)
def test_every_kind_of_plan_has_a_forecast(plan: dict[str, Any]) -> None:
    forecast = PREDICTOR.predict(job(**plan))
    assert forecast.step is not None
    assert forecast["step_time_s"].median > 0
    assert forecast["tokens_per_s"].median == pytest.approx(64 * 1024 / forecast["step_time_s"].median)
    assert len(forecast.ranks) == job(**plan).plan.pipeline
    assert forecast["device_utilization"].median <= 1.0
    assert forecast["network_tx_bytes_per_s"].median > 0


def test_a_further_plan_of_many_stages_is_forecast_with_few_calls_of_python() -> None:
    """A stand-in for time: 16 stages, 512 micro-batches, and the graph there already."""
    described = job({"node": "dgx-h100", "nodes": 16}, LARGE, micro_batch=1, pipeline=1).to_dict()
    model = {**described["model"], "config": {**LLAMA, "num_hidden_layers": 64}}

    def planned(**plan: Any) -> Job:
        wanted = {"micro_batch": 1, "pipeline": 16, "shard": "zero1", **plan}
        return Job.read({**described, "model": model, "plan": wanted})

    def calls(given: Job) -> int:
        with cProfile.Profile() as counted:
            PREDICTOR.predict(given)
        return pstats.Stats(counted).total_calls  # type: ignore[attr-defined, no-any-return]

    PREDICTOR.predict(planned())
    interleaved = {"schedule": "interleaved", "virtual_stages": 2}
    modules = {"recompute": "selective", "recompute_modules": ["norms", "mlp"]}
    further: list[dict[str, Any]] = [
        {"recompute": "full"},
        modules,
        interleaved,
        {"schedule": "zbv"},
        {"schedule": "dualpipe"},
    ]
    assert max(calls(planned(**plan)) for plan in further) < 150_000


def test_an_early_megatron_is_known_by_its_version_or_else_by_its_habits() -> None:
    def fused(version: str | None, precision: str) -> bool:
        training = {"precision": precision, "framework_version": version}
        return profile(job(training=training, recompute="full")).flash_attention

    assert [fused(None, precision) for precision in ("fp16", "bf16")] == [False, True]
    assert fused("core_v0.12.0", "fp16")
    assert not fused("3.0.2", "bf16")


def test_deepspeed_sums_up_gradients_beside_the_backward_pass_in_stage_3_alone() -> None:
    def habits(shard: str) -> Profile:
        return profile(job(training={"framework": "deepspeed"}, shard=shard))

    assert [habits(shard).overlaps_reduce for shard in ("none", "zero2", "zero3")] == [False, False, True]
    assert habits("zero2").bucket_bytes == 1e9


@pytest.mark.parametrize("framework", get_args(Framework))
def test_every_framework_has_its_facts(framework: str) -> None:
    made = job(training={"framework": framework}, shard="zero1")
    assert profile(made).host > 0
    assert PREDICTOR.predict(made)["step_time_s"].median > 0


def test_memory_falls_with_sharding_and_recomputation_trades_it_for_time() -> None:
    peaks = [peak(PREDICTOR.predict(job(shard=shard))) for shard in ("none", "zero1", "zero3")]
    assert peaks == sorted(peaks, reverse=True)
    plain, again = PREDICTOR.predict(job()), PREDICTOR.predict(job(recompute="full"))
    assert peak(again) < peak(plain)
    assert again["step_time_s"].median > plain["step_time_s"].median


def test_a_slower_network_is_slower() -> None:
    fast = {
        "device": "h100",
        "devices_per_node": 1,
        "nodes": 8,
        "inter_node": {"kind": "infiniband", "bandwidth": "400 Gb/s"},
    }
    slow = {**fast, "inter_node": {"kind": "infiniband", "bandwidth": "10 Gb/s"}}
    assert step_s(job(slow)) > step_s(job(fast))


def test_collectives_that_run_in_pieces_hide_behind_products_and_registered_buffers_slow_less() -> None:
    long = {"sequence": 8192}
    pieces, whole = (
        step_s(job(None, long, tensor=8, sequence_parallel=True, overlap={"tensor": on}, micro_batch=64))
        for on in (True, False)
    )
    assert pieces < 0.97 * whole
    plain, registered = (
        step_s(job(None, long, shard="zero1", registered_buffers=on, micro_batch=8)) for on in (None, True)
    )
    assert registered < plain


def test_parameters_gathered_beside_the_next_forward_pass_hide_no_longer_than_it_lasts() -> None:
    slow = {"node": "dgx-h100", "nodes": 2, "inter_node": {"kind": "ethernet", "bandwidth": "1 Gb/s"}}
    forecast = PREDICTOR.predict(job(slow, shard="zero2"))
    rate = forecast["network_tx_bytes_per_s"].median
    (group,) = forecast.job.cluster.groups
    assert rate <= group.inter_node.bandwidth_bytes_per_s * group.devices_per_node
    whole = step_s(job(slow, shard="none"))  # gradients in fp32 both ways, not parameters in bf16 one way
    assert step_s(forecast.job) == pytest.approx(0.75 * whole, rel=0.1)


def test_workers_with_fewer_cores_of_one_processor_are_waited_for() -> None:
    def group(cores: int) -> dict[str, Any]:
        return {"device": "cpu", "cores_per_device": cores, "devices_per_node": 1, "nodes": 1}

    def times_s(*cores: int, **plan: Any) -> float:
        return step_s(job({"groups": [group(one) for one in cores]}, **plan))

    assert times_s(4, 4) < times_s(4, 1, balance="speed") < times_s(4, 1) <= 1.01 * times_s(1, 1)


def test_workers_share_the_cores_of_a_machine_that_has_fewer() -> None:
    def forecast(workers: int, host: str, **cluster: Any) -> Forecast:
        section = {"device": "cpu", "cores_per_device": 1, "host": host, **cluster}
        return PREDICTOR.predict(job(section, {"global_batch": workers}, micro_batch=1, data=workers))

    alone, two = (forecast(workers, "Xeon, 2 cores", devices_per_node=workers) for workers in (1, 2))
    four, enough = (forecast(4, f"Xeon, {cores} cores", devices_per_node=4) for cores in (2, 16))
    apart = forecast(4, "Xeon, 2 cores", devices_per_node=1, nodes=4)
    together = forecast(4, "Xeon, 2 cores", devices_per_node=1, nodes=4, machines=1)
    computing = [one["backward_time_s"].median for one in (alone, two, four, enough, apart, together)]
    assert computing[1] == pytest.approx(computing[0], rel=0.05)
    assert computing[2] == pytest.approx(2 * computing[1], rel=0.05)
    assert computing[3] == pytest.approx(computing[1], rel=0.1)
    assert computing[4] == pytest.approx(computing[0])
    assert computing[5] == pytest.approx(computing[2])
    nothing = forecast(4, "box, 0 cores", devices_per_node=4)  # words that tell nothing
    assert nothing["backward_time_s"].median == pytest.approx(computing[3])
    assert four["device_utilization"].median < 0.5 < 0.7 < enough["device_utilization"].median


def test_mixed_devices_wait_for_the_slowest_unless_the_batch_follows_their_speed() -> None:
    groups = [
        {"device": "h100-sxm-80gb", "devices_per_node": 4, "nodes": 1},
        {"device": "a100-sxm-80gb", "devices_per_node": 4, "nodes": 1},
    ]
    mixed, even = {"groups": groups}, {"groups": [groups[1], groups[1]]}
    large: dict[str, Any] = {"training": {"global_batch": 512, "framework": "pytorch"}, "micro_batch": 64}
    together = PREDICTOR.predict(job(mixed, **large))
    assert any("slowest" in note for note in together.assumptions)
    assert together["step_time_s"].median >= 0.9 * step_s(job(even, **large))
    assert step_s(job(mixed, balance="speed", **large)) < together["step_time_s"].median


def test_memory_follows_the_part_of_the_batch_that_a_device_gets() -> None:
    def mixed(device: str) -> dict[str, Any]:
        return {"groups": [{"device": "h100-sxm-80gb"}, {"device": device}]}

    large: dict[str, Any] = {"training": {"global_batch": 128, "framework": "pytorch"}, "micro_batch": 64}
    even, by_speed = (
        PREDICTOR.predict(job(mixed("a100-sxm-80gb"), balance=balance, **large))
        for balance in ("even", "speed")
    )
    more = by_speed.memory_by_category["activations"] / even.memory_by_category["activations"]
    assert more > 1.2
    assert by_speed.memory_by_category["weights"] == even.memory_by_category["weights"]
    (note,) = [note for note in by_speed.assumptions if "in proportion to" in note]
    assert f"h100-sxm-80gb gets {more:.2f} of an even part and peaks at" in note
    assert f"a100-sxm-80gb gets {2 - more:.2f}" in note
    assert by_speed["peak_memory_bytes"].median > 1.1 * even["peak_memory_bytes"].median
    even, by_speed = (PREDICTOR.predict(job(mixed("t4"), balance=b, **large)) for b in ("even", "speed"))
    assert even.memory_capacity_bytes < 16 * 2**30
    assert by_speed["peak_memory_bytes"].median > even.memory_capacity_bytes
    assert by_speed.memory_capacity_bytes > 64 * 2**30
    assert by_speed.fits


@pytest.mark.parametrize(
    ("plan", "words"),
    [
        ({"tensor": 3}, "tensor 3"),
        ({"tensor": 16}, "16"),
        (
            {"pipeline": 8, "data": 1, "tensor": 1, "schedule": "interleaved", "virtual_stages": 2},
            "more than the 8 layers",
        ),
        ({"micro_batch": 3}, "micro_batch"),
        ({"data": 4, "tensor": 4}, "4 x tensor 4"),
        ({"asynchronous": True}, "plan.servers"),
        ({"virtual_stages": 2}, "interleaved"),
        ({"servers": -1}, "-1"),
        ({"servers": 2, "shard": "zero1"}, "leave out plan.shard = 'zero1'"),
    ],
)
def test_impossible_plans_are_refused_in_one_line(plan: dict[str, Any], words: str) -> None:
    with pytest.raises((InputError, UnsupportedJob)) as caught:
        PREDICTOR.predict(job(**plan))
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


def test_more_stages_than_layers_are_refused() -> None:
    with pytest.raises(InputError, match="16 stages are more than the 8 layers"):
        PREDICTOR.predict(job({"node": "dgx-h100", "nodes": 2}, pipeline=16))


def test_blocks_hold_every_parameter_once_and_stages_share_them_out() -> None:
    layout = PREDICTOR.layout(job(pipeline=4))
    everything = blocks(layout.graph)
    assert sum(block.is_layer for block in everything) == 8
    assert sum(len(block.weights) for block in everything) == len(layout.graph.weights)
    parts = stages(job(pipeline=4), layout.graph, layout.profile)
    assert [sum(block.is_layer for block in part.blocks) for part in parts] == [2, 2, 2, 2]
    assert sum(len(part.weights) for part in parts) == len(layout.graph.weights)


def layers_of(given: Job) -> list[list[int]]:
    """Of each stage, the layers of its chunks."""
    layout = PREDICTOR.layout(given)
    return [[sum(block.is_layer for block in chunk) for chunk in stage.chunks] for stage in layout.stages]


def test_stages_have_the_layers_that_the_plan_says() -> None:
    assert layers_of(job(pipeline=4, stages=[0, 3, 4, 1])) == [[0], [3], [4], [1]]
    chunked: dict[str, Any] = {"pipeline": 2, "schedule": "interleaved", "stages": [1, 2, 2, 3]}
    assert layers_of(job(**chunked)) == [[1, 2], [2, 3]]
    even, uneven = (step_s(job(pipeline=4, stages=counts)) for counts in ([2, 2, 2, 2], [1, 1, 1, 5]))
    assert uneven > 1.5 * even


def test_layers_fold_back_where_a_schedule_does() -> None:
    assert layers_of(job(pipeline=2, schedule="zbv", stages=[1, 2, 2, 3])) == [[1, 3], [2, 2]]
    dual: dict[str, Any] = {"pipeline": 2, "schedule": "dualpipe", "stages": [3, 5], "micro_batch": 1}
    assert layers_of(job(**dual)) == [[3, 5], [5, 3]]


def test_embedding_and_loss_count_as_layers_where_that_alone_divides() -> None:
    """Llama 3.1 405B has 126 layers on 8 x 8 chunks."""
    found = deal(Plan(pipeline=8), 126, 64)
    assert found.counts == (1, *[2] * 62, 1)
    assert "embedding and loss count as a layer each (1, 62 x 2, 1)" in found.because
    assert deal(Plan(pipeline=4), 31, 4).counts == (8, 8, 8, 7)
    assert "the loss counts as a layer" in deal(Plan(pipeline=4), 31, 4).because
    assert deal(Plan(pipeline=16), 61, 16).counts == (3, *[4] * 14, 2)
    assert deal(Plan(pipeline=4), 32, 4).because == ""
    assert "training.mtp_layers" in deal(Plan(pipeline=8), 61, 8, further=1).because
    assert deal(Plan(pipeline=10), 8, 10).counts == (0, *[1] * 8, 0)
    assert deal(Plan(pipeline=4), 32, 4, counts_ends=True).counts == (8, 9, 8, 7)


def test_what_was_assumed_of_stages_is_said() -> None:
    given = job(pipeline=2, schedule="interleaved", virtual_stages=5)
    (note,) = [note for note in PREDICTOR.predict(given).assumptions if "plan.stages" in note]
    assert "8 layers do not divide into 10" in note
    assert layers_of(given) == [[0, 1, 1, 1, 1], [1, 1, 1, 1, 0]]


def test_nanotron_fills_stages_by_the_work_of_products_and_leaves_the_last_ones_empty() -> None:
    assert fill([1.0] * 16 + [4.0], 4)[:16] == [0] * 5 + [1] * 5 + [2] * 5 + [3]
    given = job({"node": "dgx-h100", "nodes": 2}, training={"framework": "nanotron"}, pipeline=8, tensor=2)
    assert step_s(given) > 0
    counts = [own for (own,) in layers_of(given)]
    assert sum(counts) == 8
    assert counts[0] >= 1 > counts[-1]


@pytest.mark.parametrize(
    ("plan", "words"),
    [
        (
            {"pipeline": 2, "stages": [4, 5]},
            "plan.stages: 4, 5 are 2 counts of 9 layers; the plan has 2 chunks",
        ),
        ({"pipeline": 2, "stages": [2, 2, 2, 2]}, "the plan has 2 chunks"),
        ({"pipeline": 4, "schedule": "dualpipe", "micro_batch": 8}, "'dualpipe' needs an even number"),
        ({"pipeline": 2, "schedule": "zbv", "training": {"mode": "infer"}}, "inference has none"),
    ],
)
def test_pipelines_that_cannot_run_are_refused_in_one_line(plan: dict[str, Any], words: str) -> None:
    with pytest.raises(InputError, match=re.escape(words)):
        PREDICTOR.predict(job(**plan))


def test_splitting_the_backward_pass_makes_a_pipeline_shorter_and_fills_its_last_ranks() -> None:
    wide = {**LLAMA, "hidden_size": 4096, "intermediate_size": 8192, "num_attention_heads": 32}

    def forecast(schedule: str) -> Forecast:
        given = job(pipeline=4, micro_batch=16, schedule=schedule, training=LARGE).to_dict()
        given["model"]["config"] = wide
        return PREDICTOR.predict(Job.read(given))

    plain, split, folded = (forecast(schedule) for schedule in ("1f1b", "zero-bubble", "zbv"))
    times = [one["step_time_s"].median for one in (plain, split, folded)]
    assert times[0] > times[1] > times[2]
    held = [one.ranks[-1].by_category["activations"] for one in (plain, split)]
    assert held[1] > 2 * held[0]


def test_messages_are_waited_for_in_plain_schedules_only() -> None:
    far = {"node": "dgx-h100", "nodes": 4}
    given: dict[str, Any] = {"pipeline": 4, "tensor": 8, "micro_batch": 16, "training": LARGE}
    waits, overlaps = (step_s(job(far, overlap={"messages": value}, **given)) for value in (False, True))
    assert step_s(job(far, **given)) == waits > overlaps
    given |= {"schedule": "interleaved"}
    assert step_s(job(far, **given)) == step_s(job(far, overlap={"messages": True}, **given))


def test_tied_embeddings_are_summed_up_over_both_ends_of_a_pipeline() -> None:
    far = {"node": "dgx-h100", "nodes": 2}
    exposed = {}
    for tied in (True, False):
        given = job(far, pipeline=2).to_dict()
        given["model"]["config"] = {**LLAMA, "tie_word_embeddings": tied}
        exposed[tied] = PREDICTOR.predict(Job.read(given)).inside("time").causes_s["exposed communication"]
    assert exposed[True] > exposed[False]


def test_each_pass_of_a_chunk_has_time_of_megatrons_own() -> None:
    def host_s(chunks: int) -> float:
        given = job(pipeline=2, schedule="interleaved", virtual_stages=chunks)
        return PREDICTOR.predict(given).inside("time").works[0].passes.host_s

    own_s = profile(job()).pass_s
    assert own_s > 0
    assert host_s(4) - host_s(2) == pytest.approx(2 * 2 * own_s)


def test_nanotrons_messages_are_held_up_on_many_nodes_of_efa() -> None:
    def step(node: str, nodes: int) -> float:
        training = {"framework": "nanotron", "global_batch": 4 * nodes * 2}
        return step_s(job({"node": node, "nodes": nodes}, training, pipeline=2))

    assert step("p5.48xlarge", 64) > step("p5.48xlarge", 32) + 0.5
    assert step("dgx-h100", 64) < step("dgx-h100", 32) + 0.5


def test_in_fp32_megatron_has_host_and_device_one_after_the_other() -> None:
    training = {"precision": "tf32", "master_weights": False}
    step = PREDICTOR.predict(job(training=training, tensor=2, micro_batch=1)).inside("time")
    (work,) = step.works
    assert work.passes.steady_s == pytest.approx(work.passes.host_s + work.passes.device_s, rel=0.02)


def test_chunks_are_as_many_as_divide_the_layers_of_a_stage() -> None:
    plan = job(pipeline=2, schedule="interleaved").plan
    assert virtual_stages(plan, 8) == 4
    assert virtual_stages(plan, 160) == 8


def test_teams_lie_tensor_first() -> None:
    teams = Teams.of(job({"node": "dgx-h100", "nodes": 4}, tensor=4, pipeline=2))
    assert (teams.tensor.size, teams.tensor.nodes) == (4, 1)
    assert teams.data.size == 4
    assert teams.stages.nodes == 2


def test_experts_are_dealt_out_over_the_ranks_of_a_stage_anew() -> None:
    """Megatron: those that share an expert side by side, then the expert group, then replicas; experts are
    whole where there are no devices to cut them as other layers are."""
    nodes = {"node": "dgx-h100", "nodes": 4}
    cut = Teams.of(job(nodes, tensor=2, pipeline=2, expert=4, sequence_parallel=True))
    assert (cut.expert_tensor.size, cut.expert.size, cut.expert_data.size) == (2, 4, 2)
    assert (cut.expert_tensor.nodes, cut.expert.nodes, cut.expert_data.nodes) == (1, 1, 2)
    whole = Teams.of(job(nodes, tensor=4, pipeline=2, expert=16, sequence_parallel=True))
    assert (whole.expert_tensor.size, whole.expert.size, whole.expert_data.size) == (1, 16, 1)
    assert whole.expert.nodes == 2
    given = Teams.of(job(nodes, tensor=2, expert=4, expert_tensor=1, sequence_parallel=True))
    assert (given.expert_tensor.size, given.expert.size, given.expert_data.size) == (1, 4, 8)


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        ({"expert": 3}, "plan.expert: 3 does not divide the 8 devices"),
        (
            {"expert": 8, "pipeline": 2},
            "plan.expert: 8 does not divide the 4 devices of a pipeline stage; the plan needs 16 or a multiple",
        ),
        (
            {"expert": 4, "expert_tensor": 4, "tensor": 2},
            "plan.expert_tensor: 4 x expert 4 = 16 does not divide the 8 devices",
        ),
        ({"expert_imbalance": 1.2, "expert_capacity": 1.5}, "plan.expert_imbalance: 1.2 has no effect"),
    ],
)
def test_expert_groups_fill_the_ranks_of_a_stage(plan: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        job(**plan)


def test_measured_runs_have_plans_that_ran() -> None:
    """Published tables name expert groups that are larger than a stage."""
    tables = job(expert=4, pipeline=2, data=4).to_dict()
    tables["plan"]["expert"] = 8
    with pytest.raises(InputError, match="of a pipeline stage"):
        Job.read(tables)
    assert Run.read({"job": tables, "measured": {"step_time_s": 1.0}}).job.plan.expert == 4


def test_torchtitan_cuts_experts_by_the_tensor_team_or_not_at_all() -> None:
    with pytest.raises(InputError, match=r"plan.expert_tensor: 2 is not 1 or plan.tensor = 4 in torchtitan"):
        job(training={"framework": "torchtitan"}, tensor=4, expert_tensor=2, sequence_parallel=True)


def test_attention_of_earlier_generations_takes_longer() -> None:
    assert attention_factor(profile(job(training={"framework": "nanotron"})), 9.0) > 1
    assert attention_factor(profile(job(training={"framework": "nanotron"})), 8.0) == 1
    assert attention_factor(profile(job()), 9.0) == 1


def test_pods_sum_up_gradients_beside_the_backward_pass_over_one_connection() -> None:
    nodes = {"device": "t4", "devices_per_node": 1, "nodes": 4, "node": "g4dn.12xlarge"}

    def exposed_s(framework: str, micro_batch: int) -> float:
        training = {"framework": framework, "global_batch": 4 * micro_batch}
        return play(PREDICTOR.layout(job(nodes, training, micro_batch=micro_batch))).time.exposed_s

    assert exposed_s("adaptdl", 8) < 0.9 * exposed_s("adaptdl", 1)
    assert exposed_s("adaptdl", 1) > 1.3 * exposed_s("pytorch", 1)


def test_megatrons_fused_softmax_leaves_dropout_to_its_own_kernel() -> None:
    config = {"model_type": "gpt2", "n_embd": 256, "n_layer": 2, "n_head": 4, "vocab_size": 1024}
    training = {"global_batch": 8, "sequence": 512, "precision": "fp16", "optimizer": "adam",
                "framework": "megatron"}  # fmt: skip

    def device_s(dropout: float) -> float:
        made = Job.read({
            "model": {"source": "transformers", "task": "causal-lm",
                      "config": {**config, "attn_pdrop": dropout}},
            "training": training, "cluster": {"node": "dgx-a100", "nodes": 1},
            "plan": {"micro_batch": 1, "recompute": "full"},
        })  # fmt: skip
        return float(PREDICTOR.layout(made).calls.device_s.sum())

    assert device_s(0.1) > 1.005 * device_s(0.0)


def test_the_yardstick_forecasts_many_devices_too() -> None:
    assert RooflinePredictor().predict(job())["step_time_s"].median > 0


# Calibration


PLANS: tuple[dict[str, Any], ...] = (
    {}, {"tensor": 2}, {"pipeline": 2}, {"micro_batch": 4}, {"micro_batch": 8}, {"tensor": 4},
    {"shard": "zero1"}, {"micro_batch": 1},
    {"tensor": 2, "micro_batch": 4}, {"pipeline": 4},
)  # fmt: skip


def cases(tuning: Tuning) -> list[Case]:
    """Runs that are as the forecast says once the factors are applied."""
    made = []
    for plan in PLANS:
        layout = PREDICTOR.layout(job(**plan))
        step = play(layout.tuned(tuning))
        measured = {"step_time_s": step.time_s, "peak_memory_bytes": logged(step).allocated_bytes}
        made.append(Case(run=Run(job=layout.job, measured=measured), layout=layout))
    return made


def test_a_calibration_finds_what_runs_differ_by() -> None:
    truth = Tuning(products=1.3, traffic=1.2, host=1.5, activations=1.2, memory_bytes=2.0**29)
    found = calibrate_parts(cases(truth))
    assert found.benefit is not None
    assert found.benefit.error_before is not None
    assert found.benefit.error_after is not None
    assert found.benefit.error_before > 0.1
    assert found.benefit.error_after < found.benefit.error_before / 2
    assert found.tuning.host == pytest.approx(1.5, rel=0.15)
    assert found.tuning.activations == pytest.approx(1.2, rel=0.1)
    assert Calibration.from_dict(found.to_dict()).tuning == found.tuning


def calibrated_s(case: Case, found: Calibration) -> float:
    factor = 1.0 if found.residuals is None else found.residuals.factor(case.run.job)
    return case.tuned_s(found.tuning) * factor


def test_a_calibration_that_does_not_help_changes_no_step() -> None:
    found = calibrate_parts(cases(Tuning()))
    assert [calibrated_s(case, found) for case in cases(Tuning())] == pytest.approx(
        [case.tuned_s(Tuning()) for case in cases(Tuning())], rel=0.02
    )


def test_a_calibration_that_takes_time_off_each_step_leaves_the_host_no_less_than_none() -> None:
    layout = PREDICTOR.layout(job())
    assert play(layout.tuned(Tuning(step_s=-play(layout).host_issue_s - 1e-3))).host_issue_s == 0.0


def test_an_odd_run_does_not_decide_for_others() -> None:
    """Nine runs agree that steps take a fifth longer; the tenth, between them, takes three times as long."""
    made = cases(Tuning())
    slower = [
        dataclasses.replace(
            case, run=Run(job=case.run.job, measured={"step_time_s": times * case.tuned_s(Tuning())})
        )
        for case, times in zip(made, [1.2] * 3 + [3.0] + [1.2] * 6, strict=True)
    ]
    found = calibrate_parts(slower)
    ratios = [calibrated_s(case, found) / case.tuned_s(Tuning()) for case in made]
    assert np.delete(ratios, 3) == pytest.approx(1.2, rel=0.08)


def test_what_is_left_over_is_learned_near_runs_and_fades_far_from_them() -> None:
    jobs = [job(micro_batch=size, tensor=tensor) for size in (1, 2, 4) for tensor in (1, 2, 4)]
    learned = Residuals.of(jobs, np.full(len(jobs), 0.3), np.full(len(jobs), 0.03))
    assert learned.factor(jobs[4]) == pytest.approx(np.exp(0.3), rel=0.05)
    far = job({"node": "dgx-h100", "nodes": 1024}, training={"global_batch": 2**20, "sequence": 65536})
    assert abs(np.log(learned.factor(far))) < 0.1
    assert Residuals.from_dict(learned.to_dict()).factor(jobs[0]) == pytest.approx(learned.factor(jobs[0]))


def test_boards_that_differ_in_memory_share_a_calibration() -> None:
    large, small = ({"device": f"a100-sxm-{size}gb", "devices_per_node": 8} for size in (80, 40))
    runs = [
        Run(job=made, measured={"step_time_s": 1.3 * step_s(made)})
        for size in (1, 2, 4, 8)
        for made in [job(large, micro_batch=size)]
    ]
    fitted = DeletePopPredictor().fit(runs)
    assert list(fitted.calibrations_) == ["a100-sxm megatron"]
    other = job(small, micro_batch=4)
    assert fitted.predict(other)["step_time_s"].median == pytest.approx(1.3 * step_s(other), rel=0.06)


def test_a_calibrated_predictor_is_saved_with_its_factors(tmp_path: Any) -> None:
    runs = [case.run for case in cases(Tuning(products=1.4, host=1.3))]
    fitted = DeletePopPredictor().fit(runs)
    fitted.save(tmp_path / "fitted")
    again = DeletePopPredictor.load(tmp_path / "fitted")
    assert again.predict(job())["step_time_s"].median == pytest.approx(
        fitted.predict(job())["step_time_s"].median
    )
    assert again.predict(job())["step_time_s"].median > 1.05 * step_s(job())


# Parameter servers

WORKERS = {"device": "cpu", "cores_per_device": 4, "nodes": 4}
SERVED = {"framework": "pytorch", "precision": "fp32", "master_weights": False, "steps": 100}


def test_parameter_servers_are_paid_for() -> None:
    plain, served = job(WORKERS, SERVED), job(WORKERS, SERVED, servers=2)
    assert plain.price_per_hour is not None
    assert served.price_per_hour == pytest.approx(plain.price_per_hour * 6 / 4)
    own = {**WORKERS, "servers": {"nodes": 2, "price": "$3/h"}}
    assert job(own, SERVED, servers=2).price_per_hour == pytest.approx(plain.price_per_hour + 6)
    by_cores = {**WORKERS, "servers": {"nodes": 1, "cores": 8}}
    assert job(by_cores, SERVED, servers=2).price_per_hour == pytest.approx(plain.price_per_hour * 1.5)
    on_gpus = {"node": "p5.48xlarge"}
    assert job(on_gpus, servers=2).price_per_hour == job(on_gpus).price_per_hour


def test_servers_say_where_they_run_what_they_hold_and_who_pays() -> None:
    given = job(WORKERS, SERVED, servers=2)
    (note,) = [note for note in PREDICTOR.predict(given).assumptions if note.startswith("plan.servers")]
    assert "2 on the workers' nodes" in note
    assert "each paid as a worker; each holds" in note
    own = {**WORKERS, "servers": {"nodes": 2, "memory": "64 MiB"}}
    forecast = PREDICTOR.predict(job(own, SERVED, servers=2))
    (note,) = [note for note in forecast.assumptions if note.startswith("plan.servers")]
    assert "2 on 2 nodes of their own; each holds" in note
    assert "are more than its 64 MiB" in note
    assert forecast.cost is None
    assert "no price known for the servers' nodes: no cost" in forecast.assumptions


def test_servers_take_the_optimizer_state_off_the_workers_and_get_their_gradients() -> None:
    plain, served = (PREDICTOR.predict(job(servers=servers)) for servers in (0, 2))
    assert plain.memory_by_category["optimizer_state"] > 0
    assert served.memory_by_category["optimizer_state"] == 0
    weights = 4.0 * served.inside("bytes").layout.graph.parameters
    assert served.inside("bytes").sent_bytes == pytest.approx(weights, rel=0.01)


def test_servers_with_nodes_of_their_own_are_reached_over_the_network() -> None:
    near = {"device": "cpu", "cores_per_device": 4, "devices_per_node": 4, "inter_node": "1 Gb/s"}
    far = {**near, "servers": {"nodes": 1, "cores": 4}}
    assert step_s(job(far, SERVED, servers=1)) > 1.5 * step_s(job(near, SERVED, servers=1))
    assert Job.read(job(far, SERVED, servers=1).to_dict()) == job(far, SERVED, servers=1)


@pytest.mark.parametrize(
    ("training", "plan", "message"),
    [
        ({"mode": "infer"}, {}, r"plan\.servers: 2, but inference has no gradients"),
        (
            {},
            {"tensor": 2},
            r"plan\.servers: 2 serve workers that hold the whole model; leave out plan\.tensor",
        ),
    ],
)
def test_servers_serve_training_workers_that_hold_the_whole_model(
    training: dict[str, Any], plan: dict[str, Any], message: str
) -> None:
    with pytest.raises(InputError, match=message):
        job(training=training, servers=2, **plan)


def test_stages_that_wait_for_the_longest_exchange_are_not_waiting_for_the_host() -> None:
    slow = {"device": "h100", "nodes": 8, "inter_node": {"kind": "ethernet", "bandwidth": "10 Gb/s"}}
    tables = job(slow, {"global_batch": 8}, pipeline=2, micro_batch=2).to_dict()
    uneven = {**LLAMA, "vocab_size": 65536, "tie_word_embeddings": True}
    one_sided = Job.read({**tables, "model": {**tables["model"], "config": uneven}})
    step = PREDICTOR.predict(one_sided).inside("test")
    longest = max(sum(seconds for _, seconds in work.buckets) + work.after_backward_s for work in step.works)
    assert step.causes_s["exposed communication"] > 0.8 * longest
    assert step.causes_s["waiting for the host"] < step.time_s - longest


@pytest.mark.parametrize(
    ("servers", "nodes", "words"),
    [
        (0, 1, "1 nodes need parameter servers"),
        (1, 2, "2 is not at most plan.servers = 1"),
        (1, 0, "above 0"),
    ],
)
def test_nodes_of_servers_need_servers(servers: int, nodes: int, words: str) -> None:
    with pytest.raises(InputError, match=words):
        job({**WORKERS, "servers": {"nodes": nodes}}, SERVED, servers=servers)
