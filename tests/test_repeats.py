"""What computes a value again is taken out of a graph; what only looks the same stays."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from torch import nn

from foretrain.capture import capture
from foretrain.graph import OpGraph
from foretrain.graph.repeats import without_repeats


class Attention(nn.Module):
    """Three layers of one input and one behind them."""

    def __init__(self) -> None:
        super().__init__()
        self.queries, self.keys, self.values, self.out = (nn.Linear(64, 64, bias=False) for _ in range(4))

    def forward(self, x: torch.Tensor) -> Any:
        x = x * 2
        return self.out(self.queries(x) + self.keys(x) + self.values(x)).sum()


def traced(fp8: str) -> OpGraph:
    x = torch.empty(32, 64, device="meta")
    return capture(Attention().to("meta"), x, lambda y: y, precision="fp8", fp8=fp8)  # type: ignore[arg-type]


def calls(graph: OpGraph, phase: str) -> Counter[str]:
    return Counter(op.operator.name for op in graph.ops if op.phase == phase and op.operator.launches)


def test_an_input_is_cast_once_for_all_layers_that_read_it() -> None:
    before, after = traced("tensorwise"), without_repeats(traced("tensorwise"))
    assert calls(before, "forward")["max"] == 8
    assert calls(after, "forward")["max"] == 6, "four weights, and two inputs"
    assert calls(before, "backward")["max"] == 10
    assert calls(after, "backward")["max"] == 2, "gradients alone: scales of weights and inputs are kept"
    assert calls(after, "backward")["abs"] == 2
    for name in ("_scaled_mm", "add"):
        assert sum(calls(after, phase)[name] for phase in ("forward", "backward")) == sum(
            calls(before, phase)[name] for phase in ("forward", "backward")
        )


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise", "delayed"])
def test_the_graph_stays_whole(recipe: str) -> None:
    """Whatever is read was written before and is still there."""
    graph = without_repeats(traced(recipe))
    for i, op in enumerate(graph.ops):
        for number in op.reads:
            assert graph.buffers[number].born <= i <= graph.buffers[number].dies, (i, op.operator.name)
        for number in op.writes:
            assert graph.buffers[number].size_bytes
    assert without_repeats(graph).ops == graph.ops


def test_parts_of_a_tensor_are_not_taken_for_one_another() -> None:
    class Halves(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.both = nn.Linear(8, 16)

        def forward(self, x: torch.Tensor) -> Any:
            first, second = self.both(x).chunk(2, dim=-1)
            return (first.abs() + second.abs()).sum()

    graph = capture(Halves().to("meta"), torch.empty(4, 8, device="meta"), lambda y: y)
    assert calls(without_repeats(graph), "forward")["abs"] == 2
