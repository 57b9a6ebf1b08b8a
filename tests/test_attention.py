"""Attention that a model writes out becomes the one kernel of a framework: the arithmetic stays, the scores go."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import replace

import pytest

from foretrain.graph import OpGraph
from foretrain.graph.attention import BACKWARD, FORWARD, with_flash_attention, with_fused_softmax
from foretrain.graph.opset import traits
from foretrain.graph.runs import FUSED
from foretrain.step.replay import replay

torch = pytest.importorskip("torch", reason="models cannot be traced without torch")
from torch import Tensor, nn  # noqa: E402
from torch.nn.functional import dropout, scaled_dot_product_attention  # noqa: E402

from foretrain.capture import capture  # noqa: E402

BATCH, HEADS, TOKENS, WIDTH = 2, 4, 64, 8
SCORES = BATCH * HEADS * TOKENS * TOKENS


class Attention(nn.Module):
    """Written out as a product, a softmax and a product, or by torch's one function."""

    def __init__(self, *, written_out: bool, values: int = WIDTH, dropout: float = 0.0) -> None:
        super().__init__()
        self.written_out, self.share = written_out, dropout
        hidden = HEADS * WIDTH
        self.query, self.key = nn.Linear(hidden, hidden), nn.Linear(hidden, hidden)
        self.value, self.out = nn.Linear(hidden, HEADS * values), nn.Linear(HEADS * values, hidden)

    def forward(self, x: Tensor) -> Tensor:
        shape = (*x.shape[:2], HEADS, -1)
        query, key, value = (one(x).view(shape).transpose(1, 2) for one in (self.query, self.key, self.value))
        if self.written_out:
            scores = query @ key.transpose(-1, -2) / math.sqrt(WIDTH)
            out = dropout(scores.softmax(-1), self.share, self.training) @ value
        else:
            out = scaled_dot_product_attention(query, key, value)
        return self.out(out.transpose(1, 2).flatten(2))  # type: ignore[no-any-return]


class Layers(nn.Module):
    def __init__(self, *layers: Attention) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return x


@functools.cache
def graph(
    *,
    written_out: bool = True,
    values: int = WIDTH,
    dropout: float = 0.0,
    layers: int = 2,
    mode: str = "train",
) -> OpGraph:
    made = (Attention(written_out=written_out, values=values, dropout=dropout) for _ in range(layers))
    x = torch.zeros(BATCH, TOKENS, HEADS * WIDTH)
    return capture(Layers(*made), (x,), lambda out: out.sum(), mode=mode, precision="bf16")


def peak_bytes(graph: OpGraph) -> int:
    return replay(graph.buffers, [0] * len(graph.ops)).allocated_bytes


def kept_bytes(graph: OpGraph) -> int:
    return sum(buffer.size_bytes for buffer in graph.buffers if buffer.category == "activations")


def names(graph: OpGraph, layer: str, phase: str) -> list[str]:
    return [op.operator.name for op in graph.ops if op.layer == layer and op.phase == phase]


def touches_scores(graph: OpGraph) -> bool:
    return any(
        spec.numel == SCORES for op in graph.ops for spec in (*op.operator.inputs, *op.operator.outputs)
    )


@pytest.mark.parametrize("causal", [True, False])
def test_every_written_out_attention_becomes_one_kernel_for_each_direction(causal: bool) -> None:
    flash = with_flash_attention(graph(), causal=causal)
    for name in ("layers.0", "layers.1"):
        assert names(flash, name, "forward").count(FORWARD) == 1
        assert names(flash, name, "backward").count(BACKWARD) == 1
    assert touches_scores(graph())
    assert not touches_scores(flash)
    assert not any(traits(op.operator.name).kind == "batched product" for op in flash.ops)
    merged = [op.operator for op in flash.ops if op.operator.name in (FORWARD, BACKWARD)]
    assert {one.args["is_causal"] for one in merged} == {causal}


def test_it_is_the_kernel_that_torch_calls() -> None:
    """Shapes and FLOPs are those of ``scaled_dot_product_attention``, and so are all other calls' FLOPs."""
    flash = with_flash_attention(graph(), causal=False)
    called = with_flash_attention(graph(written_out=False), causal=False)
    for name in (FORWARD, BACKWARD):
        own, torch_s = (
            [op.operator for op in one.ops if op.operator.name == name] for one in (flash, called)
        )
        assert [one.flops for one in own] == [one.flops for one in torch_s]
        assert [one.inputs[0].shape for one in own] == [one.inputs[0].shape for one in torch_s]
    assert flash.total("flops") == called.total("flops")


def test_scores_are_not_kept_but_a_number_for_each_row_is() -> None:
    plain, flash = graph(), with_flash_attention(graph(), causal=True)
    kept = SCORES * 2  # bytes of bf16 of one layer
    assert peak_bytes(plain) - peak_bytes(flash) > 2 * kept
    rows = [buffer for buffer in flash.buffers[len(plain.buffers) :] if buffer.size_bytes]
    assert [one.size_bytes for one in rows] == [BATCH * HEADS * TOKENS * 4] * 2
    for one in rows:
        assert flash.ops[one.born].operator.name == FORWARD
        assert flash.ops[one.dies].operator.name == BACKWARD
        assert flash.ops[one.born].layer == flash.ops[one.dies].layer


@pytest.mark.parametrize("dropout", [0.0, 0.1])
@pytest.mark.parametrize("merged", [functools.partial(with_flash_attention, causal=True), with_fused_softmax])
def test_what_is_read_was_written_before_and_is_still_there(
    merged: Callable[[OpGraph], OpGraph], dropout: float
) -> None:
    made = merged(graph(dropout=dropout))
    for index, op in enumerate(made.ops):
        assert all(made.buffers[number].born < index <= made.buffers[number].dies for number in op.reads)
        assert all(made.buffers[number].born <= index <= made.buffers[number].dies for number in op.writes)


def test_dropout_of_the_scores_is_part_of_the_kernel() -> None:
    flash = with_flash_attention(graph(dropout=0.1), causal=True)
    assert any("dropout" in op.operator.name for op in graph(dropout=0.1).ops)
    assert not any("dropout" in op.operator.name for op in flash.ops)


def test_inference_has_no_backward_kernel_and_keeps_nothing() -> None:
    plain = graph(mode="infer")
    flash = with_flash_attention(plain, causal=True)
    assert [op.operator.name for op in flash.ops].count(FORWARD) == 2
    assert BACKWARD not in {op.operator.name for op in flash.ops}
    assert len(flash.buffers) == len(plain.buffers)


def test_values_may_be_of_another_width_than_keys() -> None:
    flash = with_flash_attention(graph(values=16), causal=True)
    forward = next(op.operator for op in flash.ops if op.operator.name == FORWARD)
    assert [spec.shape[-1] for spec in forward.inputs] == [WIDTH, WIDTH, 16]
    assert forward.outputs[0].shape == (BATCH, HEADS, TOKENS, 16)
    assert forward.flops == 2 * SCORES * (WIDTH + 16)


def test_kernels_of_torch_for_wide_keys_become_the_framework_s() -> None:
    plain = graph(written_out=False)
    efficient = {
        one: replace(one, name=one.name.replace("flash", "efficient"))
        for one in plain.operators
        if "flash_attention" in one.name
    }
    assert len(efficient) == 2
    renamed = replace(
        plain, ops=tuple(replace(op, operator=efficient.get(op.operator, op.operator)) for op in plain.ops)
    )
    flash = with_flash_attention(renamed, causal=True)
    assert [op.operator.name for op in flash.ops] == [op.operator.name for op in plain.ops]


def test_a_window_of_keys_is_told_to_the_kernel_in_place_of_a_mask() -> None:
    windowed = replace(graph(), info={**graph().info, "windows": {"layers.1": 16}})
    flash = with_flash_attention(windowed, causal=True)
    windows = {
        op.layer: op.operator.args.get("window")
        for op in flash.ops
        if op.operator.name in (FORWARD, BACKWARD)
    }
    assert windows == {"layers.0": None, "layers.1": 16}


def test_a_graph_without_attention_stays_as_it_is() -> None:
    plain = capture(nn.Linear(8, 4), torch.zeros(2, 8), lambda out: out.sum())
    assert with_flash_attention(plain, causal=True) is plain
    assert with_fused_softmax(plain) is plain


def test_a_fused_softmax_leaves_products_and_dropout() -> None:
    plain, fused = graph(dropout=0.1), with_fused_softmax(graph(dropout=0.1))
    for phase in ("forward", "backward"):
        before, after = (names(one, "layers.0", phase) for one in (plain, fused))
        products = [name for name in before if traits(name).kind == "batched product"]
        assert [name for name in after if traits(name).kind == "batched product"] == products
        assert after.count(FUSED) == 1
        assert not {"_softmax", "_softmax_backward_data"} & set(after)
    assert fused.total("flops") == plain.total("flops")
    assert any("dropout" in op.operator.name for op in fused.ops)
    assert kept_bytes(fused) <= kept_bytes(plain)
