"""Linear layers in fp8: the casts and products of each way, on meta and with numbers."""

from __future__ import annotations

import copy
from collections import Counter
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from torch import nn

from foretrain.api import make_job
from foretrain.capture import capture
from foretrain.capture.sources.float8 import into_fp8
from foretrain.errors import InputError
from foretrain.graph import OpGraph
from foretrain.workload import TORCHAO, Fp8, Training

FP8 = ("float8_e4m3fn", "float8_e5m2")


class Layers(nn.Module):
    """Two layers that fit, one whose width does not, and one of logits."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(64, 96), nn.Linear(96, 64, bias=False)
        self.odd, self.head = nn.Linear(64, 40), nn.Linear(64, 32)

    def forward(self, x: torch.Tensor) -> Any:
        x = self.second(torch.nn.functional.gelu(self.first(x)))
        return self.head(x).sum() + self.odd(x).sum()


def traced(fp8: Fp8 | None, rows: int = 128) -> OpGraph:
    precision = "bf16" if fp8 is None else "fp8"
    with_recipe: dict[str, Any] = {} if fp8 is None else {"fp8": fp8}
    x = torch.empty(rows, 64, device="meta")
    return capture(Layers().to("meta"), x, lambda y: y, precision=precision, **with_recipe)


def calls(graph: OpGraph) -> Counter[str]:
    return Counter(op.operator.name for op in graph.ops if op.operator.launches)


def casts(graph: OpGraph) -> int:
    """Calls that turn wide numbers into fp8."""
    return sum(
        any(spec.dtype in FP8 for spec in op.operator.outputs)
        and not any(spec.dtype in FP8 for spec in op.operator.inputs)
        for op in graph.ops
    )


@pytest.mark.parametrize("recipe", get_args(Fp8))
def test_a_layer_has_three_products_and_they_do_the_work_that_they_did(recipe: Fp8) -> None:
    graph, plain = traced(recipe), traced(None)
    hp = recipe == "rowwise-gw-hp"
    in_fp8 = [op.operator for op in graph.ops if op.operator.name == "_scaled_mm"]
    assert len(in_fp8) == (3 if hp else 5), "the input of the first layer needs no gradient"
    assert sum(op.operator.flops for op in graph.ops) == sum(op.operator.flops for op in plain.ops)
    for one in in_fp8:
        assert {spec.dtype for spec in one.inputs[:2]} <= set(FP8)
        assert one.inputs[0].strides is None, "rows side by side"
        assert one.inputs[1].strides == (1, one.inputs[1].shape[0]), "columns side by side"
        assert one.outputs[0].dtype == "bfloat16"


@pytest.mark.parametrize(
    ("recipe", "number"), [("tensorwise", 10), ("rowwise", 10), ("rowwise-gw-hp", 6), ("delayed", 6)]
)
def test_what_is_cast_and_how_often(recipe: Fp8, number: int) -> None:
    """torchao casts both operands of each product; Transformer Engine input, weight and gradient once."""
    assert casts(traced(recipe)) == number


def test_scales_come_from_the_largest_value_of_a_tensor_or_of_a_row() -> None:
    assert calls(traced("tensorwise"))["max"] == 10
    assert (calls(traced("rowwise"))["amax"], calls(traced("rowwise"))["max"]) == (10, 0)
    assert calls(traced("current"))["te.amax"] == calls(traced("current"))["te.cast_transpose"] == 6
    assert calls(traced("delayed"))["te.amax"] == 0
    scales = {
        recipe: [op.operator.inputs[2].shape for op in traced(recipe).ops if op.operator.name == "_scaled_mm"]
        for recipe in ("tensorwise", "rowwise", "blockwise", "mxfp8")
    }
    assert set(scales["tensorwise"]) == {()}
    assert set(scales["rowwise"]) == {(128, 1), (96, 1), (64, 1)}
    assert scales["blockwise"][0] == (128, 1)
    assert scales["mxfp8"][0] == (128, 2)


def test_layers_of_logits_and_odd_widths_stay_in_bf16() -> None:
    module = Layers()
    assert into_fp8(module, "rowwise") == 2
    assert [type(layer) is nn.Linear for layer in (module.odd, module.head)] == [True, True]
    assert calls(traced("delayed"))["addmm"] == 2


def test_transformer_engine_keeps_activations_in_fp8_for_the_backward_pass() -> None:
    """torchao keeps the layer's input in bf16: two bytes of each number, where the other keeps one."""

    def kept(graph: OpGraph) -> int:
        begins = next(i for i, op in enumerate(graph.ops) if op.phase == "backward")
        return sum(
            one.size_bytes
            for one in graph.buffers
            if one.category == "activations" and 0 <= one.born < begins <= one.dies
        )

    rows = 4096
    bf16, tensorwise, delayed = kept(traced(None, rows)), kept(traced("tensorwise", rows)), kept(
        traced("delayed", rows)
    )  # fmt: skip
    assert tensorwise == pytest.approx(bf16, rel=0.01)
    assert delayed - bf16 == pytest.approx(rows * 64 + (96 + 0) * rows - 2 * 96 * rows, abs=40_000)


@pytest.mark.parametrize("recipe", TORCHAO)
def test_a_layer_in_fp8_computes_what_the_layer_does(recipe: Fp8) -> None:
    torch.manual_seed(0)
    plain = nn.Linear(64, 96).to(torch.bfloat16)
    holder = nn.ModuleList([copy.deepcopy(plain)])
    assert into_fp8(holder, recipe) == 1
    results = []
    for layer in (plain, holder[0]):
        x = torch.randn(4, 16, 64, generator=torch.Generator().manual_seed(1)).to(torch.bfloat16)
        y = layer(x.requires_grad_())
        y.backward(torch.randn(y.shape, generator=torch.Generator().manual_seed(2)).to(torch.bfloat16))
        assert x.grad is not None
        results.append([y, x.grad, layer.weight.grad, layer.bias.grad])
    for wide, narrow in zip(*results, strict=True):
        assert ((narrow - wide).float().norm() / wide.float().norm()).item() < 0.1


def test_frameworks_have_their_own_way() -> None:
    assert Training(global_batch=1, precision="fp8").fp8_recipe == "tensorwise"
    assert Training(global_batch=1, precision="fp8", framework="megatron").fp8_recipe == "delayed"
    assert Training(global_batch=1, precision="fp8", fp8="blockwise").fp8_recipe == "blockwise"
    with pytest.raises(InputError, match=r"training\.fp8: 'rowwise' needs precision fp8, not bf16"):
        Training(global_batch=1, precision="bf16", fp8="rowwise")
    mx: dict[str, Any] = {"sequence": 64, "precision": "fp8", "fp8": "mxfp8"}
    with pytest.raises(
        InputError, match=r"training\.fp8: 'mxfp8' cannot run on h100.*; use delayed, current"
    ):
        make_job("gpt2", device="h100", **mx)
    assert make_job("gpt2", device="b200", **mx)


def test_gpt2_s_layers_are_in_fp8_with_transformer_engine_alone() -> None:
    """Their weights are transposed: gradients come as the weights lie."""
    from transformers.pytorch_utils import Conv1D

    with torch.device("meta"):
        holder = nn.Sequential(Conv1D(96, 64))
        x = torch.empty(32, 64)
    assert into_fp8(copy.deepcopy(holder), "rowwise") == 0
    graph = capture(holder, x, lambda y: (y * y).sum(), precision="fp8", fp8="delayed")
    forward, backward = (op.operator for op in graph.ops if op.operator.name == "_scaled_mm")
    assert forward.outputs[0].shape == (32, 96)
    assert backward.outputs[0].shape == (64, 96)
    assert not calls(graph)["clone"]


def test_micro_batches_share_the_casts_of_weights_and_layers_those_of_an_input() -> None:
    from foretrain.graph.transformer_engine import with_kept_casts

    x = torch.empty(128, 64, device="meta")
    graph = capture(
        Layers().to("meta"), x, lambda y: y, precision="fp8", fp8="delayed", accumulate=True
    )  # fmt: skip
    kept = with_kept_casts(graph)
    assert (calls(graph)["te.cast_transpose"], calls(kept)["te.cast_transpose"]) == (6, 4)

    def weights(graph: OpGraph) -> int:
        return sum(one.size_bytes for one in graph.buffers if one.category == "weights")

    assert weights(kept) - weights(graph) == 2 * 2 * 64 * 96 + 4 * 4, "both layouts, and their scales"


def test_a_captured_graph_is_told_by_its_way_of_fp8(tmp_path: Path) -> None:
    path = tmp_path / "layers.json.zst"
    traced("rowwise").save(path)
    assert make_job(str(path), device="h100").workload.training.fp8_recipe == "rowwise"
    with pytest.raises(
        InputError, match=r"training\.fp8: the graph .* was captured with 'rowwise', not 'ten"
    ):
        make_job(str(path), device="h100", fp8="tensorwise")


def test_current_scaling_takes_the_largest_value_in_every_step_that_is_played() -> None:
    from foretrain.graph.repeats import without_repeats
    from foretrain.graph.transformer_engine import with_kept_casts

    x = torch.empty(128, 64, device="meta")
    graph = capture(Layers().to("meta"), x, lambda y: y, precision="fp8", fp8="current", accumulate=True)
    played = calls(without_repeats(graph))
    assert played["te.amax"] == played["te.cast_transpose"] > 0
    kept = calls(with_kept_casts(graph))
    assert (kept["te.amax"], kept["te.cast_transpose"]) == (4, 4), "weights are cast for all micro-batches"
