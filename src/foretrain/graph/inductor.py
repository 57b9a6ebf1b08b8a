"""Says which loop an operator is to torch's compiler, and which loops it makes one kernel of.

The rules are those of torch 2.11's Inductor: ``reduction_split_factor`` in its ``choices.py``, and
``MixOrderReduction`` in its ``scheduler.py``.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Literal

from foretrain.graph import Operator, TensorSpec
from foretrain.graph.opset import Kind, traits

Order = Literal["", "row", "column"]

_REDUCING: frozenset[Kind] = frozenset({"sum", "reduction", "vector norm"})
_MOMENTS = frozenset({"var", "var_mean", "std", "std_mean"})
ADD_ROWS = "scatter_add"
"""The operator that the gradient of an embedding becomes."""
_THREADS_PER_PROCESSOR, _THREADS_PER_BLOCK = 2048, 256
_LEAST, _MOST = 32, 512
"""Elements that a thread of a split reduction adds up."""
_UNSPLIT_ROW = 8192
_COLUMNS_PER_BLOCK, _ROWS_PER_THREAD = 128, 4
_MIXED_FROM, _MIXED_ROWS, _MIXED_COLUMNS = 5 << 20, 4096, 16384
"""Elements, rows and columns of a reduction along rows that also sums columns up."""


# Loops


@dataclass(frozen=True, slots=True)
class LoopSpace:
    """The loop that an operator is: over ``total`` elements, which are reduced to ``points`` along rows or
    columns."""

    total: int
    points: int = 0
    order: Order = ""
    stages: int = 1
    """Kernels of a reduction: few results of many elements come from partial ones."""

    sums: int = 0
    """Sums over columns that a kernel along rows makes beside, of which a library's kernels add up parts."""

    def with_(self, other: LoopSpace) -> LoopSpace | None:
        """The loop of both in one kernel, this one first; None where that takes two."""
        if other.total == 1 or self.total == 1:
            return self if other.total == 1 else other
        if not self.order and not other.order:
            return self if self.total == other.total else None
        if not other.order:
            fits = other.total == self.points or (
                other.total == self.total and self.stages == 1 and self.order == "row"
            )
            return self if fits else None
        if not self.order:
            return other if self.total == other.total else None
        if (self.total, self.points, self.order) == (other.total, other.points, other.order):
            return self
        return self._mixed(other)

    def _mixed(self, other: LoopSpace) -> LoopSpace | None:
        """A kernel along rows that sums up columns beside: of many rows that are not too long."""
        rows, columns = self.points, other.points
        fits = (
            self.order == "row"
            and other.order == "column"
            and self.stages == 1
            and self.total == other.total == rows * columns
            and self.total >= _MIXED_FROM
            and rows >= max(_MIXED_ROWS, 2 * columns)
            and columns <= _MIXED_COLUMNS
        )
        return dataclasses.replace(self, sums=self.sums + max(1, other.sums)) if fits else None


def space_of(operator: Operator, processors: int) -> LoopSpace:
    """The loop of an operator that the compiler writes itself, on a device of so many multiprocessors."""
    of, inputs, outputs = traits(operator.name), operator.inputs, operator.outputs
    total = max((spec.numel for spec in (*outputs, *inputs[: 0 if outputs else 1])), default=1)
    if operator.name == ADD_ROWS:
        return LoopSpace(inputs[0].numel)
    if of.kind == "row loss" and not of.backward and inputs and inputs[0].shape:
        rows = max(1, inputs[0].numel // inputs[0].shape[-1])
        return LoopSpace(inputs[0].numel, rows, "row", 1 + row_stages(1, rows, processors))
    if not inputs or of.kind not in _REDUCING | {"softmax", "row norm"}:
        return LoopSpace(total)
    x = max(inputs, key=lambda spec: spec.numel)
    if of.kind in ("softmax", "row norm"):
        points = max(1, x.numel // _row(operator, x))
        return LoopSpace(x.numel, points, "row", row_stages(points, x.numel // points, processors))
    points = max((spec.numel for spec in outputs), default=1)
    if points >= x.numel:
        return LoopSpace(total)
    if _keeps_fastest(operator, x):
        moments = operator.name in _MOMENTS
        stages = column_stages(points, x.numel // points, processors, deepest=3 if moments else 2)
        return LoopSpace(x.numel, points, "column", stages, sums_of(operator))
    return LoopSpace(x.numel, points, "row", row_stages(points, x.numel // points, processors))


def sums_of(operator: Operator) -> int:
    """Results of a reduction that come from partial results apart; moments come together."""
    of = traits(operator.name)
    if of.kind not in _REDUCING | {"row loss"}:
        return 0
    return 1 if operator.name in _MOMENTS or of.kind == "row loss" else len(operator.outputs)


def _row(operator: Operator, x: TensorSpec) -> int:
    """Elements that are worked on together."""
    shape = operator.args.get("normalized_shape")
    if isinstance(shape, list):
        return max(1, math.prod(shape))
    dim = operator.args.get("dim", -1)
    return max(1, x.shape[dim] if isinstance(dim, int) and x.shape else 1)


def _keeps_fastest(operator: Operator, x: TensorSpec) -> bool:
    """Whether neighbours in memory belong to different results."""
    dims, rank = operator.args.get("dim"), len(x.shape)
    if isinstance(dims, int) and not isinstance(dims, bool):
        dims = [dims]
    if not isinstance(dims, list) or not dims or rank < 2:
        return False
    fastest = 1 if x.channels_last else rank - 1
    return all(dim % rank != fastest for dim in dims)


def row_stages(points: int, reduced: int, processors: int) -> int:
    """Kernels of a reduction over neighbours: two where there are too few results to fill the device."""
    return 1 if points >= 2 * processors or reduced <= _UNSPLIT_ROW else 2


def column_stages(points: int, reduced: int, processors: int, *, deepest: int = 2) -> int:
    """Kernels of a reduction over columns: blocks of rows are added up apart, then their results.

    >>> column_stages(64, 128 * 112 * 112, 132, deepest=3), column_stages(768, 25088, 132)
    (3, 2)
    >>> column_stages(1000, 128, 132)
    1
    """
    stages = 1
    while stages < deepest and (reduced := _column_split(points, reduced, processors)) > 1:
        stages += 1
    return stages


def _column_split(points: int, reduced: int, processors: int) -> int:
    """Count the blocks of rows that a reduction of columns is split into."""
    threads = processors * _THREADS_PER_PROCESSOR
    total = points * reduced
    if total < _LEAST * threads:
        size = _LEAST
    elif total < _MOST * threads:
        blocks = threads // _THREADS_PER_BLOCK
        blocks = math.ceil(blocks / math.ceil(points / _COLUMNS_PER_BLOCK))
        size = max(_LEAST, math.ceil(reduced / (_ROWS_PER_THREAD * blocks)))
    else:
        size = _MOST
    return math.ceil(reduced / (_ROWS_PER_THREAD * size))
