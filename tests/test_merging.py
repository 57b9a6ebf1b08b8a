"""Products that a framework joins, gradients that products add up, and what Transformer Engine does in fp8: the
arithmetic stays, and no call reads what is not there."""

from __future__ import annotations

import functools
from collections import Counter
from typing import Any

import pytest

from foretrain.errors import InputError
from foretrain.graph import OpGraph
from foretrain.graph.opset import is_product
from foretrain.job import Job
from foretrain.step.graph import step_graph

LLAMA = {
    "model_type": "llama", "hidden_size": 256, "intermediate_size": 1024, "num_attention_heads": 8,
    "num_key_value_heads": 4, "vocab_size": 1024, "max_position_embeddings": 128, "num_hidden_layers": 2,
}  # fmt: skip


def a_job(framework: str, device: str = "h100", model: Any = None, **training: Any) -> Job:
    tensor = {"tensor": 4, "sequence_parallel": True, "micro_batch": 2}
    return Job.read({
        "model": {"source": "transformers", "task": "causal-lm", "config": model or LLAMA},
        "training": {"global_batch": 4, "precision": "bf16", "optimizer": "adam", "sequence": 128,
        "framework": framework, **training},
        "cluster": {"device": device, "devices_per_node": 4}, "plan": tensor,
    })  # fmt: skip


@functools.cache
def graph(framework: str, device: str = "h100", **training: Any) -> OpGraph:
    return step_graph(a_job(framework, device, **training))


def names(graph: OpGraph, phase: str) -> Counter[str]:
    return Counter(
        op.operator.name
        for op in graph.ops
        if op.phase == phase and "layers.0." in op.layer and op.operator.launches
    )


def check_lifetimes(graph: OpGraph) -> None:
    for i, op in enumerate(graph.ops):
        for number in (*op.reads, *op.writes):
            buffer = graph.buffers[number]
            assert buffer.born <= i <= buffer.dies, (i, op.operator.name, number)


def product_flops(graph: OpGraph) -> int:
    return sum(op.operator.flops for op in graph.ops if is_product(op.operator.name))


@pytest.mark.parametrize("model", [LLAMA, {**LLAMA, "model_type": "qwen2"}])
def test_projections_of_one_input_are_one_product(model: dict[str, Any]) -> None:
    plain, joined = step_graph(a_job("pytorch", model=model)), step_graph(a_job("megatron", model=model))
    for phase, apart, together in (("forward", 7, 4), ("backward", 14, 8)):
        counted = [
            sum(n for name, n in names(one, phase).items() if is_product(name)) for one in (plain, joined)
        ]
        assert counted == [apart, together]
    assert product_flops(joined) == product_flops(plain)
    check_lifetimes(joined)


def test_a_joined_product_has_the_size_of_its_parts() -> None:
    first = next(
        op.operator for op in graph("megatron").ops if op.layer.endswith("layers.0.self_attn.q_proj") and
        is_product(op.operator.name)
    )  # fmt: skip
    assert [spec.shape for spec in first.inputs] == [(256, 256), (256, 64 + 2 * 32)]
    assert first.flops == 2 * 256 * 256 * 128


def test_products_add_up_gradients_themselves() -> None:
    def adds(framework: str) -> int:
        return sum(
            op.operator.name == "add_"
            for op in graph(framework).ops
            if op.reads and graph(framework).buffers[op.reads[0]].category == "gradients"
        )

    assert adds("megatron") == 0 < adds("nanotron")


def gathers(graph: OpGraph, phase: str) -> list[tuple[str, int]]:
    return [
        (op.operator.inputs[0].dtype, op.operator.bytes_written)
        for op in graph.ops
        if op.operator.name == "all_gather" and op.phase == phase and "layers.0." in op.layer
    ]


@pytest.mark.parametrize("recipe", ["delayed", "current", "blockwise"])
def test_tensor_teams_gather_in_fp8_and_keep_their_part(recipe: str) -> None:
    wide, low = graph("megatron"), graph("megatron", precision="fp8", fp8=recipe)
    for phase in ("forward", "backward"):
        before, after = gathers(wide, phase), gathers(low, phase)
        assert len(before) == len(after)
        assert {dtype for dtype, _ in after} == {"float8_e4m3fn"}
        assert sum(size for _, size in after) * 2 == sum(size for _, size in before)
    check_lifetimes(low)
    kept = [
        sum(buffer.size_bytes for buffer in one.buffers if buffer.category == "activations")
        for one in (wide, low)
    ]
    assert kept[1] < kept[0]


def test_blackwell_makes_no_transposed_copies() -> None:
    def written(device: str) -> int:
        made = graph("megatron", device, precision="fp8")
        check_lifetimes(made)
        return sum(op.operator.bytes_written for op in made.ops if op.operator.name == "te.cast_transpose")

    assert written("b200") < written("h100")


def test_four_bits_are_half_of_eight() -> None:
    def operands(recipe: str) -> list[tuple[str, int, int]]:
        made = graph("megatron", "b200", precision="fp8", fp8=recipe)
        check_lifetimes(made)
        return [
            (op.operator.inputs[1].dtype, op.operator.inputs[0].size_bytes, op.operator.flops)
            for op in made.ops
            if op.operator.name == "_scaled_mm"
        ]

    eight, four = operands("mxfp8"), operands("nvfp4")
    assert [(size, flops) for _, size, flops in eight] == [(size * 2, flops) for _, size, flops in four]
    assert {dtype for dtype, *_ in four} == {"float4_e2m1fn_x2"}


def test_four_bits_need_blackwell() -> None:
    with pytest.raises(InputError, match=r"training.fp8: 'nvfp4' cannot run on h100-sxm-80gb"):
        a_job("megatron", precision="fp8", fp8="nvfp4")
