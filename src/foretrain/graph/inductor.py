"""Rewrites a graph to what torch's compiler makes of it before it fuses: norms as reductions and element-wise
loops, convolutions in the layout that it chooses, indices of pooling in a byte each.

The rules are those of torch 2.11's Inductor (``decide_layout_opt`` in ``graph.py``, ``reduction_split_factor``
in ``choices.py``).
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from foretrain.graph import ITEM_BYTES, Buffer, Op, Operator, OpGraph, TensorSpec
from foretrain.graph.opset import Kind, traits

Order = Literal["", "row", "column"]

_REDUCING: frozenset[Kind] = frozenset({"sum", "reduction", "vector norm"})
_MOMENTS = frozenset({"var", "var_mean", "std", "std_mean"})
_STATISTICS, _GRADIENT_SUMS, _APPLY = "var_mean", "sum", "addcmul"
"""The operators that a batch norm and its gradient become."""
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
class Space:
    """The loop that an operator is: over ``total`` elements, which are reduced to ``points`` along rows or
    columns."""

    total: int
    points: int = 0
    order: Order = ""
    stages: int = 1
    """Kernels of a reduction: few results of many elements come from partial ones."""

    sums: int = 0
    """Sums over columns that a kernel along rows makes beside, of which a library's kernels add up parts."""

    def with_(self, other: Space) -> Space | None:
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

    def _mixed(self, other: Space) -> Space | None:
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


def space_of(operator: Operator, processors: int) -> Space:
    """The loop of an operator that the compiler writes itself, on a device of so many multiprocessors."""
    of, inputs, outputs = traits(operator.name), operator.inputs, operator.outputs
    total = max((spec.numel for spec in (*outputs, *inputs[: 0 if outputs else 1])), default=1)
    if operator.name == ADD_ROWS:
        return Space(inputs[0].numel)
    if of.kind == "row loss" and not of.backward and inputs and inputs[0].shape:
        rows = max(1, inputs[0].numel // inputs[0].shape[-1])
        return Space(inputs[0].numel, rows, "row", 1 + row_stages(1, rows, processors))
    if not inputs or of.kind not in _REDUCING | {"softmax", "row norm"}:
        return Space(total)
    x = max(inputs, key=lambda spec: spec.numel)
    if of.kind in ("softmax", "row norm"):
        points = max(1, x.numel // _row(operator, x))
        return Space(x.numel, points, "row", row_stages(points, x.numel // points, processors))
    points = max((spec.numel for spec in outputs), default=1)
    if points >= x.numel:
        return Space(total)
    if _keeps_fastest(operator, x):
        moments = operator.name in _MOMENTS
        stages = column_stages(points, x.numel // points, processors, deepest=3 if moments else 2)
        return Space(x.numel, points, "column", stages, sums_of(operator))
    return Space(x.numel, points, "row", row_stages(points, x.numel // points, processors))


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
    """How many blocks of rows there are."""
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


# Norms and pooling


@functools.lru_cache(maxsize=64)
def lowered(graph: OpGraph) -> OpGraph:
    """The step as the compiler sees it: in the layout of its choice, and each call as the loops that it is."""
    graph = _without_copies(graph)
    return _decomposed(_channels_last(graph) if prefers_channels_last(graph) else graph)


def _without_copies(graph: OpGraph) -> OpGraph:
    """Without the copies that autograd makes of what an activation is about to overwrite: to a compiler
    nothing is overwritten, so the copy is what was there before."""
    writers: dict[int, list[int]] = {}
    readers: dict[int, list[int]] = {}
    for index, op in enumerate(graph.ops):
        for number in op.writes:
            writers.setdefault(number, []).append(index)
        if op.operator.launches:
            for number in op.reads:
                readers.setdefault(number, []).append(index)
    ops, buffers = list(graph.ops), list(graph.buffers)
    for index, op in enumerate(graph.ops):
        if op.phase != "forward" or op.operator.name != "clone" or len(op.reads) != 1 or len(op.writes) != 1:
            continue
        (old,), (copy,) = op.reads, op.writes
        made = [one for one in writers.get(old, ()) if one < index]
        over = [one for one in writers.get(old, ()) if one > index]
        used = [one for one in readers[old] if one < index or (over and index < one < over[0])]
        if len(made) != 1 or len(over) != 1 or used or buffers[old].born < 0:
            continue
        first, last = made[0], over[0]
        ops[first] = dataclasses.replace(ops[first], writes=_renamed(ops[first].writes, old, copy))
        ops[last] = dataclasses.replace(ops[last], reads=_renamed(ops[last].reads, old, copy))
        view = dataclasses.replace(op.operator, launches=False, bytes_read=0, bytes_written=0)
        ops[index] = dataclasses.replace(op, operator=view, reads=(copy,), writes=())
        buffers[copy] = dataclasses.replace(buffers[copy], born=buffers[old].born)
        buffers[old] = dataclasses.replace(buffers[old], born=last)
    return dataclasses.replace(graph, ops=tuple(ops), buffers=tuple(buffers))


def _renamed(numbers: Sequence[int], old: int, new: int) -> tuple[int, ...]:
    return tuple(new if number == old else number for number in numbers)


def _decomposed(graph: OpGraph) -> OpGraph:
    ops: list[Op] = []
    first: list[int] = []
    last: list[int] = []
    cache: dict[tuple[int, int], Operator] = {}
    for op in graph.ops:
        first.append(len(ops))
        rule = _LOOPS.get(op.operator.name) if op.phase != "optimizer" else None
        ops += [op] if rule is None else [_shared(part, op, i, cache) for i, part in enumerate(rule(op))]
        last.append(len(ops) - 1)
    narrow = {number for op in graph.ops for number in _pooling_indices(op)}

    def moved(number: int, buffer: Buffer) -> Buffer:
        born, dies, ends = buffer.born, buffer.dies, len(graph.ops)
        if born >= 0:
            writers = [i for i in range(first[born], last[born] + 1) if number in ops[i].writes]
            born = writers[0] if writers else first[born]
        dies = len(ops) + dies - ends if dies == ends else last[dies] if dies < ends else _next(dies, ends)
        size = buffer.size_bytes // 8 if number in narrow else buffer.size_bytes
        return dataclasses.replace(buffer, born=born, dies=max(born, dies), size_bytes=size)

    def _next(dies: int, ends: int) -> int:
        return len(ops) + 1 + last[dies - ends - 1]

    buffers = tuple(moved(number, buffer) for number, buffer in enumerate(graph.buffers))
    return dataclasses.replace(graph, ops=tuple(ops), buffers=buffers)


def _shared(part: Op, op: Op, number: int, cache: dict[tuple[int, int], Operator]) -> Op:
    """Equal calls share the operators of their parts."""
    return dataclasses.replace(part, operator=cache.setdefault((id(op.operator), number), part.operator))


def _part(op: Op, name: str, reads: Sequence[int], writes: Sequence[int], **args: object) -> Op:
    """A part of a call: inputs by position, results by number below them (``~0`` is the first result)."""
    known, results = op.operator.inputs, op.operator.outputs
    inputs = tuple(results[~i] if i < 0 else known[i] for i in reads)
    outputs = tuple(results[i] for i in writes)
    operator = Operator(
        name,
        "default",
        inputs,
        outputs,
        args,
        0,
        sum(spec.size_bytes for spec in inputs),
        sum(spec.size_bytes for spec in outputs),
        True,
    )
    read = tuple(op.writes[~i] if i < 0 else op.reads[i] for i in reads)
    return Op(operator, op.phase, op.layer, read, tuple(op.writes[i] for i in writes))


def _whole(op: Op, inputs: int, outputs: int) -> bool:
    """Whether each tensor of a call has a buffer of its own, so that it can be taken apart."""
    return (
        len(op.operator.inputs) == len(op.reads) >= inputs
        and len(op.operator.outputs) == len(op.writes) == outputs
    )


def _others(x: TensorSpec) -> list[int]:
    """The dimensions beside channels."""
    return [dim for dim in range(len(x.shape)) if dim != 1]


def _batch_norm(op: Op) -> list[Op]:
    """Statistics over channels, then an element-wise loop; with given ones the loop alone."""
    x = op.operator.inputs[0]
    if not _whole(op, 1, 3):
        return [op]
    if not op.operator.args.get("training"):
        return [_part(op, _APPLY, range(len(op.reads)), (0, 1, 2))]
    names = ("weight", "bias")
    weights = [int(place[1:]) for name in names if (place := op.operator.args.get(name)) is not None]
    running = [i for i in range(1, len(op.reads)) if i not in weights]
    statistics = _part(op, _STATISTICS, (0, *running), (1, 2), dim=_others(x))
    return [statistics, _part(op, _APPLY, (0, *weights, ~1, ~2), (0,))]


def _batch_norm_backward(op: Op) -> list[Op]:
    """Sums of the gradient and of its product with the input over channels, then an element-wise loop."""
    x = op.operator.inputs[1]
    if not _whole(op, 2, 3):
        return [op]
    wanted = op.operator.args.get("output_mask", [True])
    small = range(2, len(op.reads))
    sums = _part(op, _GRADIENT_SUMS, (0, 1, *small), (1, 2), dim=_others(x))
    return [sums, _part(op, _APPLY, (0, 1, *small, ~1, ~2), (0,))] if wanted[0] else [sums]


def _layer_norm_backward(op: Op) -> list[Op]:
    """The gradient of the input along rows, those of weight and bias along columns."""
    shape = op.operator.args.get("normalized_shape")
    results = len(op.writes)
    if not isinstance(shape, list) or results < 2 or not _whole(op, 2, results):
        return [op]
    name, known = op.operator.name, range(len(op.reads))
    rows = list(range(len(op.operator.inputs[0].shape) - len(shape)))
    return [
        _part(op, name, known, (0,), normalized_shape=shape),
        _part(op, _GRADIENT_SUMS, known, range(1, results), dim=rows),
    ]


def _embedding_backward(op: Op) -> list[Op]:
    """Zeros, and rows that are added to them."""
    return [_part(op, ADD_ROWS, range(len(op.reads)), range(len(op.writes)))]


_ALIGNED = {2: 8, 4: 4}
"""Elements, by their bytes, to which sizes of products are filled up."""
_FILLED_UP_FROM = 100.0
"""Multiply-adds per element of operands and result, from which products are bound by arithmetic."""


def _product(op: Op) -> list[Op]:
    """Large products of odd sizes (a vocabulary of 50,257) are filled up to whole vectors."""
    a, b = op.operator.inputs[-2:]
    m, k, n = a.shape[-2], a.shape[-1], b.shape[-1]
    unit = _ALIGNED.get(ITEM_BYTES[a.dtype], 1)
    even = [math.ceil(size / unit) * unit for size in (m, k, n)]
    if even == [m, k, n] or m * k * n < _FILLED_UP_FROM * (m * k + k * n + m * n):
        return [op]
    new = dict(zip((m, k, n), even, strict=True))
    inputs, outputs = (
        tuple(_filled_up(spec, new) for spec in specs) for specs in (op.operator.inputs, op.operator.outputs)
    )
    operator = dataclasses.replace(
        op.operator,
        inputs=inputs,
        outputs=outputs,
        flops=op.operator.flops * math.prod(even) // (m * k * n),
        bytes_read=sum(spec.size_bytes for spec in inputs),
        bytes_written=sum(spec.size_bytes for spec in outputs),
    )
    return [dataclasses.replace(op, operator=operator)]


def _filled_up(spec: TensorSpec, new: Mapping[int, int]) -> TensorSpec:
    shape = tuple(
        new.get(size, size) if i >= len(spec.shape) - 2 else size for i, size in enumerate(spec.shape)
    )
    turned = spec.strides is not None and len(shape) > 1 and spec.strides[-2] == 1
    strides = None
    if turned:
        outer = [math.prod(shape[i + 1 :]) for i in range(len(shape) - 2)]
        strides = (*outer, 1, shape[-2])
    return TensorSpec(shape, spec.dtype, strides)


_LOOPS: dict[str, Callable[[Op], list[Op]]] = {
    "native_batch_norm": _batch_norm,
    "cudnn_batch_norm": _batch_norm,
    "native_batch_norm_backward": _batch_norm_backward,
    "cudnn_batch_norm_backward": _batch_norm_backward,
    "native_layer_norm_backward": _layer_norm_backward,
    "embedding_dense_backward": _embedding_backward,
    **dict.fromkeys(("mm", "addmm", "bmm", "baddbmm"), _product),
}


def _pooling_indices(op: Op) -> Iterable[int]:
    """Where maxima were in their windows fits a byte."""
    if op.operator.name != "max_pool2d_with_indices" or not _whole(op, 1, 2):
        return ()
    return (op.writes[1],)


# Layout of convolutions

_NODES_PER_CONVOLUTION = 300
_SMALL_CHANNELS = 64


def prefers_channels_last(graph: OpGraph) -> bool:
    """Whether the compiler brings all images of a training step to channels last.

    Not where convolutions are few among many calls, grouped (but depthwise), from many channels to half as
    many or fewer, or all of few channels.
    """
    forward = [op.operator for op in graph.ops if op.phase == "forward"]
    weights = [
        (operator.inputs[1], operator.args.get("groups", 1))
        for operator in forward
        if operator.name == "convolution" and len(operator.inputs[1].shape) == 4
    ]
    if not weights or len(forward) >= _NODES_PER_CONVOLUTION * len(weights):
        return False
    if any(groups > 1 and weight.shape[1] > 1 for weight, groups in weights):
        return False
    if any(weight.shape[0] * 2 <= weight.shape[1] and weight.shape[2] > 1 for weight, _ in weights):
        return False
    return any(max(weight.shape[:2]) > _SMALL_CHANNELS for weight, _ in weights)


def _channels_last(graph: OpGraph) -> OpGraph:
    """All contiguous images and convolutions' weights with channels last, as far as the optimizer."""
    layouts: dict[TensorSpec, TensorSpec] = {}
    known: dict[tuple[int, bool], Operator] = {}

    def spec(old: TensorSpec) -> TensorSpec:
        return layouts.setdefault(old, _with_channels_last(old))

    def operator(old: Operator, *, given: bool) -> Operator:
        """``given`` where it reads what the user made: it is turned on the way."""
        if (id(old), given) not in known:
            inputs = old.inputs if given else tuple(map(spec, old.inputs))
            outputs = tuple(map(spec, old.outputs))
            known[id(old), given] = dataclasses.replace(old, inputs=inputs, outputs=outputs)
        return known[id(old), given]

    ops: list[Op] = []
    for op in graph.ops:
        if op.phase != "optimizer":
            kinds = {graph.buffers[number].category for number in op.reads}
            given = op.operator.name == "_to_copy" and not kinds.isdisjoint(("inputs", "weights"))
            op = dataclasses.replace(op, operator=operator(op.operator, given=given))
        ops.append(op)
    return dataclasses.replace(graph, ops=tuple(ops))


def _with_channels_last(spec: TensorSpec) -> TensorSpec:
    if len(spec.shape) != 4 or spec.strides is not None or spec.shape[1] == 1:
        return spec
    _, channels, height, width = spec.shape
    strides = (channels * height * width, 1, width * channels, channels)
    return dataclasses.replace(spec, strides=strides)
