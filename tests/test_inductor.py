"""Compiled steps: loops, layouts, what is saved, and what kernels and the host cost."""

from __future__ import annotations

import dataclasses
import json
import math
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from foretrain.capture import capture
from foretrain.catalog import Catalog
from foretrain.costs.compiled_host import CompiledHost
from foretrain.costs.generated import generated_time_s
from foretrain.costs.host import DispatchHost
from foretrain.costs.kernels import kernel_count
from foretrain.graph import Buffer, Category, Op, Operator, OpGraph, Phase, TensorSpec
from foretrain.graph.fusion import COMPILED, Fusion, fuse
from foretrain.graph.inductor import LoopSpace, column_stages, row_stages
from foretrain.graph.layouts import prefers_channels_last
from foretrain.graph.lowering import AUTOGRAD
from foretrain.graph.runs import FUSED, GENERATED
from foretrain.job import Job
from foretrain.step.frameworks import profile

KERNELS = Path(__file__).parents[1] / "data" / "studies" / "h200_compiled_kernels.jsonl"
H200 = Catalog.load().device("h200-sxm-141gb")
IMAGES = TensorSpec((64, 128, 28, 28), "bfloat16")
CHANNELS = TensorSpec((128,), "float32")
Call = tuple[
    Phase, str, Sequence[int], Sequence[int], Sequence[TensorSpec], Sequence[TensorSpec], dict[str, Any]
]


def a_graph(calls: Sequence[Call], held: Sequence[tuple[TensorSpec, Category]]) -> OpGraph:
    """A step of these calls; buffers that no call writes are there before, all live to their last use."""
    ops = []
    for phase, name, reads, writes, inputs, outputs, args in calls:
        read_bytes, written_bytes = (sum(spec.size_bytes for spec in specs) for specs in (inputs, outputs))
        operator = Operator(
            name, "default", tuple(inputs), tuple(outputs), args, 0, read_bytes, written_bytes, True
        )
        ops.append(Op(operator, phase, "", tuple(reads), tuple(writes)))
    buffers = []
    for number, (spec, category) in enumerate(held):
        writes = [i for i, op in enumerate(ops) if number in op.writes]
        uses = [i for i, op in enumerate(ops) if number in (*op.reads, *op.writes)]
        lasts = category in ("weights", "inputs", "gradients")
        buffers.append(
            Buffer(spec.size_bytes, category, min(writes, default=-1), len(ops) if lasts else max(uses))
        )
    return OpGraph(ops=tuple(ops), buffers=tuple(buffers), samples=64)


def batch_norm_step() -> OpGraph:
    """A convolution, its batch norm and activation, a second convolution, and back."""
    weight = TensorSpec((128, 128, 3, 3), "bfloat16")
    conv = {"stride": [1, 1], "padding": [1, 1], "dilation": [1, 1], "groups": 1}
    norm = {"input": "%0", "weight": "%1", "bias": "%2", "training": True}
    back = {**conv, "output_mask": [True, False, False]}
    held: list[tuple[TensorSpec, Category]] = [
        (IMAGES, "inputs"), (weight, "weights"), (CHANNELS, "weights"), (CHANNELS, "weights"),
        (IMAGES, "activations"), (IMAGES, "activations"), (CHANNELS, "activations"), (CHANNELS, "activations"),
        (IMAGES, "activations"), (IMAGES, "temporaries"), (IMAGES, "temporaries"), (IMAGES, "temporaries"),
        (IMAGES, "temporaries"), (CHANNELS, "gradients"), (CHANNELS, "gradients"),
    ]  # fmt: skip
    calls: list[Call] = [
        ("forward", "convolution", (0, 1), (4,), (IMAGES, weight), (IMAGES,), conv),
        ("forward", "native_batch_norm", (4, 2, 3), (5, 6, 7), (IMAGES, CHANNELS, CHANNELS),
         (IMAGES, CHANNELS, CHANNELS), norm),
        ("forward", "silu", (5,), (8,), (IMAGES,), (IMAGES,), {}),
        ("forward", "convolution", (8, 1), (9,), (IMAGES, weight), (IMAGES,), conv),
        ("backward", "convolution_backward", (9, 8, 1), (10,), (IMAGES, IMAGES, weight), (IMAGES,), back),
        ("backward", "silu_backward", (10, 5), (11,), (IMAGES, IMAGES), (IMAGES,), {}),
        ("backward", "native_batch_norm_backward", (11, 4, 2, 6, 7), (12, 13, 14),
         (IMAGES, IMAGES, CHANNELS, CHANNELS, CHANNELS), (IMAGES, CHANNELS, CHANNELS),
         {"output_mask": [True, True, True]}),
        ("backward", "convolution_backward", (12, 0, 1), (), (IMAGES, IMAGES, weight), (), back),
    ]  # fmt: skip
    return a_graph(calls, held)


def generated(graph: OpGraph) -> list[tuple[str, list[str], int]]:
    return [
        (op.operator.overload, op.operator.args["ops"], kernel_count(op.operator))
        for op in graph.ops
        if op.operator.name == FUSED
    ]


def test_a_batch_norm_is_statistics_in_stages_and_a_loop_that_fuses() -> None:
    assert generated(fuse(batch_norm_step(), COMPILED)) == [
        ("pointwise", ["clone"], 1),
        ("pointwise", ["clone"], 1),
        ("column", ["var_mean"], 3),
        ("pointwise", ["addcmul", "silu"], 1),
        ("column", ["silu_backward", "sum"], 3),
        ("pointwise", ["addcmul"], 1),
    ]


def test_loops_of_what_a_checkpoint_computes_again_are_recomputed() -> None:
    plain = batch_norm_step()
    again = tuple(dataclasses.replace(op, recomputed=op.phase == "backward") for op in plain.ops)
    graph = fuse(dataclasses.replace(plain, ops=again), COMPILED)
    assert all(op.recomputed == (op.phase == "backward") for op in graph.ops)


def test_what_a_loop_makes_again_is_not_saved() -> None:
    plain, fused = batch_norm_step(), fuse(batch_norm_step(), COMPILED)
    (norm,) = [op for op in fused.ops if op.operator.args.get("ops") == ["addcmul", "silu"]]
    assert len(norm.writes) == 1, (
        "the input of the activation is computed again from the convolution's result"
    )
    (back,) = [op for op in fused.ops if op.operator.args.get("ops") == ["silu_backward", "sum"]]
    assert back.operator.bytes_read == pytest.approx(2 * IMAGES.size_bytes, rel=0.01)
    saved = [
        sum(buffer.size_bytes for buffer in graph.buffers if buffer.category == "activations")
        for graph in (plain, fused)
    ]
    weights_and_images = IMAGES.size_bytes + 128 * 128 * 9 * 2
    assert saved[0] - saved[1] == IMAGES.size_bytes - weights_and_images, "they are copied to channels last"


def test_images_go_to_channels_last_where_convolutions_gain_by_it() -> None:
    def chosen(weight: tuple[int, ...], groups: int = 1, others: int = 0, trains: bool = True) -> bool:
        spec = TensorSpec(weight, "bfloat16")
        back: Call = ("backward", "relu", (2,), (2,), (IMAGES,), (IMAGES,), {})
        other: Call = ("forward", "relu", (2,), (2,), (IMAGES,), (IMAGES,), {})
        calls: list[Call] = [
            *[back] * trains,
            ("forward", "convolution", (0, 1), (2,), (IMAGES, spec), (IMAGES,), {"groups": groups}),
            *[other] * others,
        ]
        return prefers_channels_last(
            a_graph(calls, [(IMAGES, "inputs"), (spec, "weights"), (IMAGES, "activations")])
        )

    assert chosen((128, 128, 3, 3))
    assert chosen((128, 1, 3, 3), groups=128), "depthwise"
    assert not chosen((128, 16, 3, 3), groups=8), "grouped"
    assert not chosen((32, 128, 3, 3)), "many channels to few, as in DenseNet"
    assert not chosen((64, 64, 3, 3)), "few channels throughout"
    assert not chosen((128, 128, 3, 3), others=300), "one convolution among many calls, as in a ViT"
    assert chosen((64, 64, 3, 3), trains=False), "inference has rules of its own"
    turned = fuse(batch_norm_step(), COMPILED)
    assert all(op.operator.inputs[0].channels_last for op in turned.ops if op.operator.name == "convolution")


def test_large_products_of_odd_sizes_are_filled_up() -> None:
    def products(vocabulary: int) -> list[tuple[str, tuple[int, ...]]]:
        x, weight = TensorSpec((4096, 1024), "bfloat16"), TensorSpec((1024, vocabulary), "bfloat16")
        logits = TensorSpec((4096, vocabulary), "bfloat16")
        call: Call = ("forward", "mm", (0, 1), (2,), (x, weight), (logits,), {})
        graph = a_graph([call], [(x, "inputs"), (weight, "weights"), (logits, "activations")])
        return [(op.operator.name, op.operator.outputs[0].shape) for op in fuse(graph, COMPILED).ops]

    assert products(50304) == [("mm", (4096, 50304))]
    assert products(50257) == [(FUSED, (1024, 50264)), ("mm", (4096, 50264))]
    assert products(255) == [("mm", (4096, 255))], "what is bound by memory stays"


@pytest.mark.parametrize(
    ("first", "second", "joint"),
    [
        (LoopSpace(100), LoopSpace(100), LoopSpace(100)),
        (LoopSpace(100), LoopSpace(50), None),
        (LoopSpace(100), LoopSpace(100, 10, "row"), LoopSpace(100, 10, "row")),
        (LoopSpace(100, 10, "row"), LoopSpace(100), LoopSpace(100, 10, "row")),
        (LoopSpace(100, 10, "column"), LoopSpace(100), None),
        (LoopSpace(100, 10, "column"), LoopSpace(10), LoopSpace(100, 10, "column")),
        (LoopSpace(100, 10, "row"), LoopSpace(100, 20, "row"), None),
        (LoopSpace(100, 10, "row"), LoopSpace(100, 10, "column"), None),
        (
            LoopSpace(2**23, 2**13, "row"),
            LoopSpace(2**23, 2**10, "column", 2, 2),
            LoopSpace(2**23, 2**13, "row", 1, 2),
        ),
        (LoopSpace(2**22, 2**12, "row"), LoopSpace(2**22, 2**10, "column", 2, 2), None),
    ],
)
def test_loops_share_a_kernel_where_their_sizes_agree(
    first: LoopSpace, second: LoopSpace, joint: LoopSpace | None
) -> None:
    assert first.with_(second) == joint


def test_few_results_of_many_elements_take_several_kernels() -> None:
    assert [column_stages(64, rows, 132, deepest=3) for rows in (100, 10_000, 1_605_632)] == [1, 2, 3]
    assert [row_stages(points, 50_000, 132) for points in (1, 263, 264)] == [2, 2, 1]


def test_measured_kernels_take_the_time_that_their_loops_say() -> None:
    """Of the kernels that make up the most of the time, without what only their text knows."""
    ratios = []
    for line in KERNELS.read_text().splitlines():
        row = json.loads(line)
        kind = "pointwise" if row["kind"] == "pointwise" else "column"
        if row.get("hint") in ("INNER", "DEFAULT"):
            kind = "row"
        args = {
            "ops": [], "kernels": 1, "total": row["points"] * row["reduced"],
            "points": row["points"] if kind != "pointwise" else 0,
        }  # fmt: skip
        operator = Operator(FUSED, kind, (), (), args, 0, row["bytes"], 0, True)
        if row["time_s"] > 5e-6:
            ratios.append(math.log(generated_time_s(operator, H200) / row["time_s"]))
    assert len(ratios) > 200
    assert abs(statistics.median(ratios)) < 0.15
    assert statistics.median(map(abs, ratios)) < 0.35


def test_kernels_take_longer_for_more_bytes_instructions_and_stages() -> None:
    def time_s(
        kind: str = "pointwise", size: int = 10**8, ops: Sequence[str] = (), kernels: int = 1
    ) -> float:
        args = {"ops": ops, "kernels": kernels, "total": size // 4, "points": 1000}
        return generated_time_s(Operator(FUSED, kind, (), (), args, 0, size, 0, True), H200)

    assert time_s(size=10**9) > 5 * time_s()
    assert time_s(ops=["native_dropout"]) > time_s(ops=["add"]) == time_s()
    assert time_s(kernels=3) > time_s()
    assert all(time_s(kind) > 0 for kind in GENERATED)


def test_the_host_launches_what_the_compiler_wrote_or_replays_it() -> None:
    kernel = Operator(
        FUSED, "column", (), (), {"ops": [], "kernels": 3, "total": 1, "points": 1}, 0, 1, 1, True
    )
    view = Operator("view", "default", (), (), {}, 0, 0, 0, False)
    phases = ["forward", "backward", "optimizer"]
    plain = DispatchHost(optimizer_s=7e-5)
    host = CompiledHost(plain=plain, parameters=100)
    once, again = host.issue_time_s([kernel] * 3, phases), host.issue_time_s([view] * 3, phases)
    assert once[0] == once[1] > 0
    assert again[:2].tolist() == [0, 0], "the compiler's code makes no views"
    assert once[2] == plain.issue_time_s([kernel], ["optimizer"])[0]
    graphs = CompiledHost(plain=plain, parameters=100, graphs=True)
    assert graphs.issue_time_s([kernel], ["forward"])[0] == 0
    assert graphs.step_overhead_s < host.step_overhead_s
    more = dataclasses.replace(host, micro_batches=4)
    assert host.step_overhead_s < more.step_overhead_s < 4 * host.step_overhead_s


def test_a_loss_that_a_model_of_ones_own_computes_is_compiled_with_it() -> None:
    class Scores(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.last = torch.nn.Linear(16, 64, bias=False)

        def forward(self, x: torch.Tensor, wanted: torch.Tensor | None = None) -> Any:
            scores = self.last(x)
            if wanted is None:
                return scores
            return scores, torch.nn.functional.cross_entropy(scores, wanted)

    x, wanted = torch.randn(8, 16), torch.zeros(8, dtype=torch.long)
    outside = capture(Scores(), x, loss=lambda scores: torch.nn.functional.cross_entropy(scores, wanted))
    inside = capture(Scores(), (x, wanted))
    assert inside.info["own_loss"]
    assert "own_loss" not in outside.info

    def names(graph: OpGraph) -> set[str]:
        return {op.operator.name for op in fuse(graph, COMPILED).ops if op.phase != "optimizer"}

    assert "_log_softmax" in names(outside)
    assert "_log_softmax" not in names(inside)


def test_losses_of_classifiers_are_outside_of_the_compiled_model() -> None:
    def fusion(model: dict[str, Any], precision: str) -> Fusion:
        training = {"global_batch": 8, "precision": precision, "compile": True, "image": 224, "sequence": 64}
        training.pop("sequence" if model["source"] == "timm" else "image")
        job = {"model": model, "training": training, "cluster": {"device": "a100-sxm-80gb"}}
        return profile(Job.read(job)).fusion

    vision = fusion({"source": "timm", "name": "resnet18"}, "amp-bf16")
    text = {"source": "transformers", "task": "causal-lm", "config": {"model_type": "llama"}}
    assert (vision.losses, vision.processors) == (False, 108)
    assert [(found.losses, found.logits) for found in (fusion(text, "amp-bf16"), fusion(text, "bf16"))] == [
        (True, False),
        (True, True),
    ]


def test_an_allocation_stays_before_what_fills_it() -> None:
    """Stochastic depth: a mask of the samples is made in the shape of what it is multiplied with."""
    mask = TensorSpec((64, 1, 1, 1), "bfloat16")
    held: list[tuple[TensorSpec, Category]] = [
        (IMAGES, "inputs"), (IMAGES, "temporaries"), (mask, "activations"), (IMAGES, "temporaries"),
    ]  # fmt: skip
    calls: list[Call] = [
        ("forward", "tanh", (0,), (1,), (IMAGES,), (IMAGES,), {}),
        ("forward", "new_empty", (1,), (2,), (IMAGES,), (mask,), {}),
        ("forward", "bernoulli_", (2,), (2,), (mask,), (mask,), {}),
        ("forward", "mul", (1, 2), (3,), (IMAGES, mask), (IMAGES,), {}),
    ]
    graph = a_graph(calls, held)
    allocation = graph.ops[1]
    empty = dataclasses.replace(allocation.operator, launches=False)
    ops = (graph.ops[0], dataclasses.replace(allocation, operator=empty), *graph.ops[2:])
    fused = fuse(dataclasses.replace(graph, ops=ops), COMPILED)
    assert [op.operator.args.get("ops") for op in fused.ops] == [None, ["bernoulli_"], ["tanh", "mul"]]
    for index, op in enumerate(fused.ops):
        assert all(fused.buffers[number].born < index for number in op.reads)


def test_gradients_of_turned_weights_are_copied_back_once() -> None:
    weight, gradient = TensorSpec((128, 128, 3, 3), "bfloat16"), TensorSpec((128, 128, 3, 3), "float32")
    conv = {"groups": 1, "output_mask": [False, True, False]}
    held: list[tuple[TensorSpec, Category]] = [
        (IMAGES, "inputs"), (weight, "weights"), (IMAGES, "temporaries"), (weight, "temporaries"),
        (gradient, "gradients"),
    ]  # fmt: skip

    def copies(last: str) -> int:
        calls: list[Call] = [
            ("forward", "convolution", (0, 1), (2,), (IMAGES, weight), (IMAGES,), conv),
            ("backward", "convolution_backward", (2, 0, 1), (3,), (IMAGES, IMAGES, weight), (weight,), conv),
            ("backward", last, (3,), (4,), (weight,), (gradient,), {}),
        ]
        return sum(op.operator.overload == AUTOGRAD for op in fuse(a_graph(calls, held), COMPILED).ops)

    assert copies("_to_copy") == 1
    assert copies("copy_") == 0, "autograd has done so"
