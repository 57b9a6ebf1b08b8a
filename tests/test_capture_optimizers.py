"""Every optimizer steps on meta, with the kernels and the state it has on CUDA."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from foretrain.capture import capture
from foretrain.capture.tracing.optimizers import build_optimizer
from foretrain.errors import CaptureError
from foretrain.graph import OpGraph
from foretrain.graph.ir import CATEGORIES
from foretrain.workload import OPTIMIZERS

ROWS = torch.zeros(4, 8)
STATE = {
    "sgd-plain": 0, "sgd": 4, "adagrad": 4, "rmsprop": 4, "adam": 8, "adamw": 8, "adam-fused": 8, "sparse-adam": 8,
    "adamw-fused": 8,
    "lamb": 8, "nadam": 8, "radam": 8, "adamax": 8, "adadelta": 8, "rprop": 8,
}  # fmt: skip
"""Bytes per fp32 parameter."""


def trace(name: str, *, bias: bool = True, master_weights: bool = False) -> OpGraph:
    precision = "bf16" if master_weights else "fp32"
    return capture(
        nn.Linear(8, 6, bias=bias), ROWS, precision=precision, optimizer=name, master_weights=master_weights
    )


def kernels(graph: OpGraph) -> list[str]:
    return [op.operator.name for op in graph.ops if op.phase == "optimizer" and op.operator.launches]


def state_bytes(graph: OpGraph) -> int:
    return sum(buffer.size_bytes for buffer in graph.buffers if buffer.category == "optimizer_state")


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_optimizer_writes_every_weight(name: str) -> None:
    graph = trace(name)
    weights = {number for number, buffer in enumerate(graph.buffers) if buffer.category == "weights"}
    written = {number for op in graph.ops if op.phase == "optimizer" for number in op.writes}
    assert len(weights) == 2
    assert weights <= written


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_half_precision_unscales_gradients_and_asks_whether_they_are_finite(name: str) -> None:
    graph = capture(nn.Linear(8, 6), ROWS, precision="amp-fp16", optimizer=name)
    names = [op.operator.name for op in graph.ops if op.phase == "optimizer"]
    plain = kernels(capture(nn.Linear(8, 6), ROWS, precision="amp-bf16", optimizer=name))
    unscaled = names.index("_amp_foreach_non_finite_check_and_unscale_")
    waits = "_local_scalar_dense" in names[unscaled:]
    assert waits != name.endswith("-fused")  # a fused update looks for itself
    assert names[-1] == "_amp_update_scale_"
    assert {one for one in plain if one != "_local_scalar_dense"} <= set(names[unscaled:])


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_optimizer_steps_masters_of_low_weights(name: str) -> None:
    graph = trace(name, master_weights=True)
    assert kernels(graph)[-1] == "_foreach_copy_"
    assert state_bytes(graph) >= 4 * graph.parameters


@pytest.mark.parametrize("name", [*STATE])
def test_the_state_per_parameter(name: str) -> None:
    graph = trace(name)
    assert state_bytes(graph) == pytest.approx(
        STATE[name] * graph.parameters, abs=8
    )  # fused optimizers count steps on the device


def test_muon_keeps_one_moment_of_matrices_and_two_of_vectors() -> None:
    assert state_bytes(trace("muon")) == 4 * 48 + 8 * 6


def test_muon_trains_a_model_of_matrices_alone() -> None:
    assert state_bytes(trace("muon", bias=False)) == 4 * 48


class Words(nn.Module):
    """Embeddings of words and places, a hidden matrix as large as the latter, and the scores of words."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(32, 8), nn.Embedding(8, 8)
        self.hidden, self.scores = nn.Linear(8, 8, bias=False), nn.Linear(8, 32, bias=False)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.scores(self.hidden(self.words(words) + self.places(words % 8))).sum()
        return result


@pytest.mark.parametrize("master_weights", [False, True])
def test_muon_leaves_embeddings_and_scores_of_words_to_adamw(master_weights: bool) -> None:
    graph = capture(
        Words(), torch.zeros(4, dtype=torch.long), loss=lambda loss: loss, optimizer="muon",
        precision="bf16" if master_weights else "fp32", master_weights=master_weights,
    )  # fmt: skip
    masters = 4 * graph.parameters if master_weights else 0
    assert state_bytes(graph) == masters + 8 * (2 * 32 * 8 + 8 * 8) + 4 * 8 * 8


@pytest.mark.parametrize("name", ["adam-fused", "adamw-fused"])
def test_fused_adam_is_one_kernel_call(name: str) -> None:
    assert len([kernel for kernel in kernels(trace(name)) if "fused" in kernel]) == 1
    assert kernels(trace(name))[-1] == f"_fused_{name.removesuffix('-fused')}_"


@pytest.mark.parametrize(
    "name", [name for name in OPTIMIZERS if name not in ("rprop", "muon", "adafactor", "asgd", "adamw-8bit")]
)
def test_the_number_of_kernels_does_not_grow_with_the_number_of_parameters(name: str) -> None:
    def count(layers: int) -> int:
        module = nn.Sequential(*(nn.Linear(8, 8) for _ in range(layers)))
        return len(kernels(capture(module, ROWS, optimizer=name)))

    assert count(1) == count(3)


class WithIdleHead(nn.Linear):
    """A layer beside a head that the forward pass leaves out."""

    def __init__(self) -> None:
        super().__init__(8, 6)
        self.idle = nn.Linear(8, 100)


@pytest.mark.parametrize("name", [one for one in OPTIMIZERS if one != "muon"])  # which tells matrices apart
@pytest.mark.parametrize("accumulate", [False, True])
def test_what_no_gradient_comes_to_has_neither_state_nor_gradient(name: str, accumulate: bool) -> None:
    idle, plain = (
        capture(module, ROWS, optimizer=name, accumulate=accumulate)
        for module in (WithIdleHead(), nn.Linear(8, 6))
    )
    held = [
        {kind: sum(b.size_bytes for b in graph.buffers if b.category == kind) for kind in CATEGORIES}
        for graph in (idle, plain)
    ]
    assert held[0] == {**held[1], "weights": held[1]["weights"] + 4 * (8 * 100 + 100)}


def test_the_state_exists_before_the_first_traced_step() -> None:
    graph = trace("adamw")
    assert all(buffer.born == -1 for buffer in graph.buffers if buffer.category == "optimizer_state")
    assert not {"zeros_like", "clone"} & set(kernels(graph))


def test_building_an_optimizer_leaves_gradients_as_they_were() -> None:
    trained, frozen = (
        nn.Parameter(torch.zeros(2, 2, device="meta"), requires_grad=flag) for flag in (True, False)
    )
    trained.grad = gradient = torch.zeros(2, 2, device="meta")
    step = build_optimizer("adam", [trained, frozen])
    assert trained.grad is gradient
    assert frozen.grad is None
    assert [tensor.numel() for tensor in step.state_tensors()] == [4, 4]


def test_states_of_8_bits_are_updated_tensor_by_tensor_and_waited_for() -> None:
    module = nn.Sequential(nn.Linear(64, 64, bias=False), nn.Linear(64, 64))
    graph = capture(module, torch.zeros(4, 64), optimizer="adamw-8bit")
    assert kernels(graph) == ["adamw_8bit", "adamw_8bit", "adamw_32bit"]
    assert state_bytes(graph) == 2 * (2 * 64 * 64 + 2 * 4 * 16) + 8 * 64
    waits = [op for op in graph.ops if op.phase == "optimizer" and op.operator.name == "_local_scalar_dense"]
    assert len(waits) == 3


def test_nothing_to_train_is_an_error() -> None:
    with pytest.raises(CaptureError, match="no trainable parameter"):
        capture(nn.Linear(8, 6).requires_grad_(False), ROWS)


# Sparse gradients


class Tables(nn.Module):
    """Tables of a recommender: bags of rows, each with a sparse gradient."""

    def __init__(self, rows: int, tables: int = 3, **how: Any) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.EmbeddingBag(rows, 4, sparse=True, **how) for _ in range(tables))
        self.top = nn.Linear(4 * tables, 2)

    def forward(self, *indices: torch.Tensor) -> Any:
        return self.top(torch.cat([table(ids) for table, ids in zip(self.tables, indices, strict=True)], 1))


def recommender(optimizer: str, rows: int = 1000, **how: Any) -> OpGraph:
    ids = tuple(torch.arange(16).view(8, 2) // 2 for _ in range(3))
    return capture(Tables(rows, **how), ids, optimizer=optimizer)


@pytest.mark.parametrize("how", [{"mode": "sum"}, {"mode": "mean"}, {"mode": "sum", "padding_idx": 0}])
def test_a_sparse_gradient_has_the_rows_of_the_batch_and_moves_them_alone(how: dict[str, Any]) -> None:
    small, large = (recommender("sgd-plain", rows, **how) for rows in (1000, 100_000))
    held = [
        sum(buffer.size_bytes for buffer in graph.buffers if buffer.category == "gradients")
        for graph in (small, large)
    ]
    dense = 4 * (12 * 2 + 2)
    rows = 14 if "padding_idx" in how else 16
    positions = 0 if rows == 16 else 8 * rows  # the inputs themselves, where none is left out
    assert held == [dense + 3 * (rows * 4 * 4 + positions)] * 2
    moved = [sum(op.operator.bytes for op in graph.ops) for graph in (small, large)]
    assert moved[0] == moved[1]


def test_rows_of_a_sparse_gradient_that_are_equal_are_summed_before_adam_sees_them() -> None:
    graph = recommender("sparse-adam")
    state = sum(buffer.size_bytes for buffer in graph.buffers if buffer.category == "optimizer_state")
    assert state == 2 * 4 * (3 * 1000 * 4 + 12 * 2 + 2)
    sorts = [op for op in graph.ops if op.operator.name == "sort"]
    looked_up = [op for op in graph.ops if op.operator.name == "index_select" and op.phase == "optimizer"]
    assert len(sorts) == 3
    assert {op.operator.outputs[0].shape for op in looked_up} == {(8, 4)}
    assert "assumptions" not in graph.info


@pytest.mark.parametrize(("optimizer", "instead"), [("adamw", "SparseAdam"), ("sgd", "SGD without momentum")])
def test_what_updates_a_table_that_an_optimizer_does_not_take_is_said(optimizer: str, instead: str) -> None:
    note = f"tables with sparse gradients are updated by {instead}, beside {optimizer}"
    assert recommender(optimizer).info["assumptions"] == [note]


def test_a_table_used_twice_has_its_rows_one_after_the_other() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(1000, 4, sparse=True)

        def forward(self, x: torch.Tensor) -> Any:
            return (self.table(x) * self.table(x.flip(0))).sum()

    graph = capture(Twice(), torch.arange(6), lambda output: output, optimizer="sgd-plain")
    assert "clone" not in [op.operator.name for op in graph.ops]
    (update,) = [op.operator for op in graph.ops if op.phase == "optimizer" and op.writes]
    assert (update.name, update.inputs[2].shape) == ("index_add_", (12, 4))
