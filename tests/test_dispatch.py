"""Tokens on their way to experts: what dispatchers cost, which one is used, and what runs beside them."""

from __future__ import annotations

import dataclasses
import itertools
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from foretrain.capture.parallel.permutation import Routing
from foretrain.cluster import Cluster
from foretrain.costs.collectives import Collectives
from foretrain.costs.dispatch import Direction, exchange_s
from foretrain.costs.features import COLUMNS, describe, family_of
from foretrain.costs.features.products import grouped_sizes
from foretrain.costs.grouped import casts_s, issue_s, uneven_factors
from foretrain.costs.measured import MeasuredOperator
from foretrain.dispatching import choices_of, dispatcher, distinct, overlaps_exchange, spreads_by_chance
from foretrain.errors import InputError
from foretrain.graph import Operator, TensorSpec
from foretrain.job import Job
from foretrain.plan import Plan
from foretrain.predictors.deletepop import DeletePopPredictor
from foretrain.provenance import as_measured
from foretrain.step.messages import collective_s
from foretrain.step.passes import hidden_exchange_s
from foretrain.step.play import Step
from foretrain.step.teams import Teams

NODE: dict[str, Any] = {
    "tokens": 4096,
    "copies": 5.25,
    "reached": 1,
    "width_bytes": 14336,
    "near": 8,
    "domains": 1,
}
NODES = {"node": "dgx-h100", "nodes": 1}
H100: dict[str, Any] = {"inside_bytes_per_s": 450e9, "outside_bytes_per_s": 50e9}


def job(plan: dict[str, Any], cluster: dict[str, Any], framework: str = "megatron") -> Job:
    model = {"source": "transformers", "task": "causal-lm", "config": {"model_type": "qwen3_moe"}}
    training = {"global_batch": 512, "sequence": 4096, "precision": "bf16", "framework": framework}
    return Job.read({"model": model, "training": training, "cluster": cluster, "plan": plan})


# What an exchange costs


@pytest.mark.parametrize("way", ["deepep", "hybridep"])
def test_more_of_anything_never_takes_less(way: str) -> None:
    directions: tuple[Direction, ...] = ("dispatch", "combine")
    for name, direction in itertools.product(("tokens", "copies", "width_bytes"), directions):
        times = [
            exchange_s(way, direction, **{**NODE, name: NODE[name] * times}, **H100) for times in (1, 2, 4)
        ]
        assert times == sorted(times)


def test_a_token_goes_once_to_a_rank_and_once_to_a_node() -> None:
    assert distinct(8, 8) == pytest.approx(5.25, abs=0.01)
    assert choices_of(distinct(6, 32), 32) == pytest.approx(6)
    far = {**NODE, "domains": 8, "copies": distinct(8, 64)}
    times = [exchange_s("hybridep", "dispatch", **{**far, "reached": n}, **H100) for n in (1, 4)]
    assert 3 < times[1] / times[0] < 4


def test_deepep_on_eight_h100_is_as_fast_as_published() -> None:
    """8,192 tokens of 7,168 numbers to 8 of 256 experts, with 20 processors: fp8 there, bf16 back
    (aiconfigurator, sglang 0.5.12)."""
    there = exchange_s("deepep", "dispatch", **{**NODE, "tokens": 8192, "width_bytes": 7392}, **H100)
    back = exchange_s("deepep", "combine", **{**NODE, "tokens": 8192}, **H100)
    assert there == pytest.approx(PUBLISHED_S[0], rel=0.1)
    assert back == pytest.approx(PUBLISHED_S[1], rel=0.1)


PUBLISHED_S = (968e-6, 1845e-6)


def test_hybridep_needs_no_processors() -> None:
    assert exchange_s("hybridep", "dispatch", **NODE, **H100) < exchange_s(
        "deepep", "dispatch", **NODE, **H100
    )


# Which one is used


def test_the_framework_has_a_dispatcher_of_its_own() -> None:
    rack, node = {"node": "gb200-nvl72", "nodes": 16}, {"node": "dgx-h100", "nodes": 8}
    plan = {"expert": 8, "micro_batch": 1}
    assert dispatcher(job(plan, rack)) == "hybridep"
    assert dispatcher(job({**plan, "expert": 1}, rack)) == "alltoall"
    assert dispatcher(job(plan, node)) == "alltoall"
    assert dispatcher(job({**plan, "expert": 16}, node)) == "deepep"
    assert dispatcher(job({**plan, "expert": 16, "expert_capacity": 1.0}, node)) == "alltoall"
    assert dispatcher(job({**plan, "expert": 16}, {"node": "dgx-a100", "nodes": 8})) == "alltoall"
    assert dispatcher(job(plan, rack, "torchtitan")) == "alltoall"
    assert dispatcher(job({**plan, "dispatcher": "deepep"}, node)) == "deepep"


def test_the_exchange_of_a_graph_is_that_of_its_dispatcher() -> None:
    tokens, many = TensorSpec((4096, 7168), "bfloat16"), TensorSpec((4096 * 5, 7168), "bfloat16")
    args: dict[str, Any] = {"overload": "expert", "args": {}, "launches": True}
    args |= dict.fromkeys(("flops", "bytes_read", "bytes_written"), 0)
    there = Operator(name="all_to_all", inputs=(tokens,), outputs=(many,), **args)
    back = Operator(name="all_to_all", inputs=(many,), outputs=(tokens,), **args)
    weights = Operator(name="all_to_all", inputs=(TensorSpec((4096, 8), "float32"),), outputs=(many,), **args)
    one = job({"expert": 8, "micro_batch": 1}, {"node": "dgx-h100", "nodes": 1})
    network, teams = Collectives(one.cluster), Teams.of(one)
    assert collective_s(there, network, teams) == collective_s(back, network, teams)
    assert collective_s(there, network, teams, dispatcher="deepep") < collective_s(
        back, network, teams, dispatcher="deepep"
    )
    assert collective_s(weights, network, teams, dispatcher="deepep") == 0


# What runs beside it


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"dispatcher": "deepep"}, "plan.dispatcher: 'deepep' brings tokens to other ranks"),
        ({"overlap": {"experts": True}}, "plan.overlap.experts: true, but no tokens travel"),
        ({"overlap": {"experts": True}, "expert": 8, "recompute": "full"}, "plan.recompute = 'full'"),
        ({"overlap": {"experts": True}, "expert": 8, "pipeline": 2}, "needs schedule = 'interleaved'"),
    ],
)
def test_what_cannot_be_is_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        Plan(**fields)


def hidden(plan: Plan, micro_batches: int, exchanged_s: float) -> list[float]:
    """What is hidden of an exchange, of a product of a second, and of a collective of tensor parallelism."""
    operators = [
        SimpleNamespace(name=name, overload=group)
        for name, group in (("all_to_all", "expert"), ("mm", ""), ("all_gather", "tensor"))
    ]
    layout: Any = SimpleNamespace(
        job=SimpleNamespace(plan=plan, accumulation=micro_batches),
        graph=SimpleNamespace(ops=[SimpleNamespace(operator=one) for one in operators]),
        calls=SimpleNamespace(communicates=np.array([True, False, True])),
    )
    hidden_s: list[float] = hidden_exchange_s(
        layout, np.arange(3), np.array([exchanged_s, 1.0, 1.0])
    ).tolist()
    return hidden_s


def test_an_exchange_runs_beside_the_computation_of_another_micro_batch() -> None:
    assert hidden(Plan(expert=8), 8, 0.5) == pytest.approx([0.8 * 7 / 8 * 0.5, 0, 0])
    assert hidden(Plan(expert=8), 8, 4.0) == pytest.approx([0.8 * 7 / 8, 0, 0])
    assert hidden(Plan(expert=8), 1, 0.5) == [0, 0, 0]
    deep = Plan(expert=8, pipeline=4, schedule="interleaved", virtual_stages=2)
    assert hidden(deep, 8, 0.5)[0] == pytest.approx(0.8 * 0.5 * 0.5)


def test_dualpipe_hides_the_exchange() -> None:
    assert overlaps_exchange(Plan(schedule="dualpipe", expert=8, pipeline=4))
    assert not overlaps_exchange(Plan(expert=8))
    assert not overlaps_exchange(Plan(schedule="dualpipe", expert=8))


SMALL = {
    "model_type": "qwen3_moe", "hidden_size": 256, "num_hidden_layers": 4, "intermediate_size": 512,
    "moe_intermediate_size": 128, "num_experts": 8, "num_experts_per_tok": 2, "num_attention_heads": 4,
    "num_key_value_heads": 4, "vocab_size": 512,
}  # fmt: skip


def small(**plan: Any) -> Step:
    cut = {"pipeline": 4, "expert": 2, "micro_batch": 1, **plan}
    tables = job(cut, NODES).to_dict()
    tables["model"]["config"] = SMALL
    step = DeletePopPredictor().predict(Job.read(tables)).step
    assert step is not None
    return step


def test_what_pairs_of_dualpipe_hide_is_not_hidden_before() -> None:
    plain, paired = small(), small(schedule="dualpipe")
    exchanged = plain.works[1].forward[0].communication_s
    assert exchanged > 0
    assert paired.works[1].forward[0].communication_s == exchanged
    assert small(schedule="dualpipe", overlap={"experts": False}).time_s > paired.time_s


def test_gradients_of_experts_are_summed_up_beside_the_backward_pass() -> None:
    work = small(pipeline=1, shard="zero1").works[0]
    dense = small(pipeline=1, expert=8, shard="zero1").works[0]
    assert work.after_backward_s == 0
    assert sum(seconds for _, seconds in work.buckets) > sum(seconds for _, seconds in dense.buckets)
    assert [block for block, _ in work.buckets] == sorted((block for block, _ in work.buckets), reverse=True)


def test_rows_are_spread_by_chance_unless_the_plan_says_otherwise() -> None:
    assert spreads_by_chance(Plan())
    assert not spreads_by_chance(Plan(routing="round-robin"))
    assert not spreads_by_chance(Plan(expert=8, expert_capacity=1.0))
    even, uneven = small(routing="round-robin"), small()
    assert uneven.device_busy_s > even.device_busy_s


def test_a_runs_recipe_tells_how_its_tokens_travelled() -> None:
    recipe = {"source": "NVIDIA-NeMo/Automodel", "recipe": "qwen3_moe_30b_te_deepep.yaml"}
    plain = {"expert": 8, "micro_batch": 1}
    plan = as_measured(job(plain, NODES), recipe).plan
    assert (plan.dispatcher, plan.routing) == ("deepep", "round-robin")
    assert as_measured(job({**plain, "dispatcher": "alltoall"}, NODES), recipe).plan.dispatcher == "alltoall"
    alone = job({"micro_batch": 1}, NODES)
    assert as_measured(alone, recipe).plan == alone.plan


def test_neighbouring_experts_lie_on_few_ranks() -> None:
    routing = Routing.of(job({"expert": 8, "micro_batch": 1, "dispatcher": "deepep"}, NODES))
    by_chance, in_turn = (
        dataclasses.replace(routing, local=local, in_turn=in_turn)
        for local, in_turn in ((16, False), (16, True))
    )
    assert by_chance.unique(1000, 8) == pytest.approx(5251, abs=5)
    assert in_turn.unique(1000, 8) == 1000
    assert dataclasses.replace(in_turn, local=4).unique(1000, 8) == 2000
    assert dataclasses.replace(in_turn, local=12).unique(1000, 8) == pytest.approx(1333, abs=1)


# Grouped products


def grouped(a: tuple[int, ...], b: tuple[int, ...], out: tuple[int, ...], experts: int) -> MeasuredOperator:
    specs = (TensorSpec(a, "bfloat16"), TensorSpec(b, "bfloat16"), TensorSpec((experts,), "int32"))
    return MeasuredOperator.of("_grouped_mm", specs, (TensorSpec(out, "bfloat16"),), {}, "", 0.0)


def test_a_grouped_product_is_a_batch_of_products() -> None:
    forward = grouped((4096, 2048), (16, 2048, 768), (4096, 768), 16)
    weights = grouped((768, 4096), (4096, 2048), (16, 768, 2048), 16)
    assert grouped_sizes(forward) == (256, 768, 2048, 16)
    assert grouped_sizes(weights) == (768, 2048, 256, 16)
    assert forward.flops == weights.flops == 2 * 4096 * 2048 * 768
    assert family_of(forward, "bf16") == "product"
    assert family_of(forward, "fp8") == "scaled product"


def test_experts_with_few_rows_fill_no_tiles() -> None:
    """At equal work, tiles of 128 rows are a quarter full where each expert has 32 rows."""
    device = Cluster.read({"node": "dgx-h100", "nodes": 1}).groups[0].device
    few, many = (grouped((4096, 2048), (n, 2048, 768), (4096, 768), n) for n in (128, 4))
    fills = []
    for one in (few, many):
        described = describe(one, device, "bf16")
        fills.append(dict(zip(COLUMNS[described.family], described.figures, strict=False))["fill128"])
    assert few.flops == many.flops
    assert fills[0] < 0.3 < 0.6 < fills[1]


def operator(a: tuple[int, ...], b: tuple[int, ...], experts: int) -> Operator:
    specs = (TensorSpec(a, "bfloat16"), TensorSpec(b, "bfloat16"), TensorSpec((experts,), "int32"))
    counts = dict.fromkeys(("flops", "bytes_read", "bytes_written"), 0)
    return Operator(
        name="_grouped_mm", overload="", inputs=specs, outputs=specs[:1], args={}, launches=True, **counts
    )


def test_rows_by_chance_leave_tiles_empty() -> None:
    few, many = operator((4096, 64), (16, 64, 64), 16), operator((65536, 64), (16, 64, 64), 16)
    weights, odd = operator((64, 4096), (4096, 64), 16), operator((16 * 200, 64), (16, 64, 64), 16)
    assert uneven_factors([few, many, weights]) == pytest.approx([1.35, 1.022, 1.0], abs=0.005)
    assert uneven_factors([odd])[0] == pytest.approx((200 + 90) / 256)


def test_experts_in_fp8_cast_their_rows_and_call_for_each() -> None:
    device = Cluster.read(NODES).groups[0].device
    forward, weights = operator((4096, 2048), (16, 2048, 64), 16), operator((64, 4096), (4096, 2048), 16)
    cast_s = casts_s([forward, weights], device, "mxfp8")
    assert cast_s[0] == pytest.approx(4 * 4096 * 2048 / (0.85 * device.memory_bytes_per_s))
    assert cast_s[1] == 0
    ways = (None, "mxfp8", "current")
    even = [float(issue_s([forward], way, by_chance=False)[0]) * 1e6 for way in ways]
    assert even == pytest.approx([80, 320, 320])
    by_chance = [float(issue_s([forward], way, by_chance=True)[0]) * 1e6 for way in ways]
    assert by_chance == pytest.approx([560, 800, 800])
