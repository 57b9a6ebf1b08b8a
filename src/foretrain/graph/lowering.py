"""Rewrites a graph to what torch's compiler makes of it before it fuses: norms as reductions and element-wise
loops, convolutions in the layout of its choice, products of odd sizes filled up.

The rules are those of torch 2.11's Inductor: its decompositions, and ``pad_mm`` among its passes.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence

from foretrain.graph import ITEM_BYTES, Buffer, Category, Op, Operator, OpGraph, TensorSpec
from foretrain.graph.inductor import ADD_ROWS
from foretrain.graph.layouts import prefers_channels_last

_STATISTICS, _GRADIENT_SUMS, _APPLY = "var_mean", "sum", "addcmul"
"""The operators that a batch norm and its gradient become."""


@functools.lru_cache(maxsize=64)
def lowered(graph: OpGraph, *, gives_logits: bool = False) -> OpGraph:
    """The step as the compiler sees it; ``gives_logits`` where the compiled model computes its loss and gives
    its logits back beside."""
    graph = _without_copies(graph)
    if prefers_channels_last(graph):
        graph = _channels_last(graph)
    graph = _with_small_places(_expanded(graph, _loops))
    return _with_gradient_of_logits(graph) if gives_logits else graph


AUTOGRAD = "autograd"
"""The overload of calls that autograd makes around compiled code."""


# Ops for ops

New = Callable[[TensorSpec, Category], int]
"""Makes a buffer for a tensor."""
Rule = Callable[[Op, New], Sequence[Op]]


def _expanded(graph: OpGraph, rule: Rule) -> OpGraph:
    """The graph with each call as the ones that a rule makes of it; calls that are equal stay equal."""
    ops: list[Op] = []
    first: list[int] = []
    last: list[int] = []
    new_buffers: list[Buffer] = []
    cache: dict[tuple[object, ...], Operator] = {}

    def new(spec: TensorSpec, category: Category) -> int:
        new_buffers.append(Buffer(spec.size_bytes, category, 0, 0))
        return len(graph.buffers) + len(new_buffers) - 1

    for op in graph.ops:
        first.append(len(ops))
        for number, part in enumerate([op] if op.phase == "optimizer" else rule(op, new)):
            key = id(op.operator), number, part.operator.name, part.operator.inputs
            ops.append(dataclasses.replace(part, operator=cache.setdefault(key, part.operator)))
        last.append(len(ops) - 1)
    touched: dict[int, list[int]] = defaultdict(list)
    for index, op in enumerate(ops):
        for buffer in {*op.reads, *op.writes}:
            touched[buffer].append(index)

    def moved(number: int, buffer: Buffer) -> Buffer:
        born, dies, ends = buffer.born, buffer.dies, len(graph.ops)
        if born >= 0:
            writers = [i for i in range(first[born], last[born] + 1) if number in ops[i].writes]
            born = writers[0] if writers else first[born]
        if dies == ends:
            dies = len(ops)
        else:
            dies = last[dies] if dies < ends else len(ops) + 1 + last[dies - ends - 1]
        return dataclasses.replace(buffer, born=born, dies=max(born, dies))

    own = [
        dataclasses.replace(buffer, born=min(touched[number]), dies=max(touched[number]))
        for number, buffer in enumerate(new_buffers, start=len(graph.buffers))
    ]
    buffers = [moved(number, buffer) for number, buffer in enumerate(graph.buffers)]
    return dataclasses.replace(graph, ops=tuple(ops), buffers=(*buffers, *own))


def _call(
    op: Op,
    name: str,
    reads: Mapping[int, TensorSpec],
    writes: Mapping[int, TensorSpec],
    *,
    overload: str = "default",
    args: Mapping[str, object] | None = None,
) -> Op:
    """A call in the place of another one, by its buffers and their tensors."""
    inputs, outputs = tuple(reads.values()), tuple(writes.values())
    read, written = (sum(spec.size_bytes for spec in specs) for specs in (inputs, outputs))
    operator = Operator(name, overload, inputs, outputs, args or {}, 0, read, written, True)
    return Op(operator, op.phase, op.layer, tuple(reads), tuple(writes), op.recomputed)


def _part(op: Op, name: str, reads: Sequence[int], writes: Sequence[int], **args: object) -> Op:
    """A part of a call: inputs by position, results by number below them (``~0`` is the first result)."""
    known, results = op.operator.inputs, op.operator.outputs
    return _call(
        op,
        name,
        {(op.writes[~i] if i < 0 else op.reads[i]): (results[~i] if i < 0 else known[i]) for i in reads},
        {op.writes[i]: results[i] for i in writes},
        args=args,
    )


def _whole(op: Op, inputs: int, outputs: int) -> bool:
    """Whether each tensor of a call has a buffer of its own, so that it can be taken apart."""
    return (
        len(op.operator.inputs) == len(op.reads) == len(set(op.reads)) >= inputs
        and len(op.operator.outputs) == len(op.writes) == outputs
    )


# Loops of norms, embeddings, pooling and products


def _loops(op: Op, new: New) -> Sequence[Op]:
    rule = _LOOPS.get(op.operator.name)
    return [op] if rule is None else rule(op, new)


def _others(x: TensorSpec) -> list[int]:
    """The dimensions beside channels."""
    return [dim for dim in range(len(x.shape)) if dim != 1]


def _batch_norm(op: Op, new: New) -> list[Op]:
    """Statistics over channels, then an element-wise loop; with given ones the loop alone."""
    x, args = op.operator.inputs[0], op.operator.args
    if not _whole(op, 1, 3):
        return [op]
    if not args.get("training"):
        return [_part(op, _APPLY, range(len(op.reads)), (0, 1, 2))]
    weights = [int(place[1:]) for name in ("weight", "bias") if (place := args.get(name)) is not None]
    running = [i for i in range(1, len(op.reads)) if i not in weights]
    statistics = _part(op, _STATISTICS, (0, *running), (1, 2), dim=_others(x))
    return [statistics, _part(op, _APPLY, (0, *weights, ~1, ~2), (0,))]


def _batch_norm_backward(op: Op, new: New) -> list[Op]:
    """Sums of the gradient and of its product with the input over channels, then an element-wise loop."""
    x = op.operator.inputs[1]
    if not _whole(op, 2, 3):
        return [op]
    wanted = op.operator.args.get("output_mask", [True])
    small = range(2, len(op.reads))
    sums = _part(op, _GRADIENT_SUMS, (0, 1, *small), (1, 2), dim=_others(x))
    return [sums, _part(op, _APPLY, (0, 1, *small, ~1, ~2), (0,))] if wanted[0] else [sums]


def _layer_norm_backward(op: Op, new: New) -> list[Op]:
    """The gradient of the input along rows, those of weight and bias along columns."""
    shape, results = op.operator.args.get("normalized_shape"), len(op.writes)
    if not isinstance(shape, list) or results < 2 or not _whole(op, 2, results):
        return [op]
    known = range(len(op.reads))
    rows = list(range(len(op.operator.inputs[0].shape) - len(shape)))
    return [
        _part(op, op.operator.name, known, (0,), normalized_shape=shape),
        _part(op, _GRADIENT_SUMS, known, range(1, results), dim=rows),
    ]


def _embedding_backward(op: Op, new: New) -> list[Op]:
    """Zeros, and rows that are added to them."""
    return [_part(op, ADD_ROWS, range(len(op.reads)), range(len(op.writes)))]


def _max_pooling(op: Op, new: New) -> list[Op]:
    """Write the places of maxima in their windows in a byte each."""
    if not _whole(op, 1, 2):
        return [op]
    values, places = op.operator.outputs
    operator = dataclasses.replace(
        op.operator,
        outputs=(values, dataclasses.replace(places, dtype="int8")),
        bytes_written=values.size_bytes + places.numel,
    )
    return [dataclasses.replace(op, operator=operator)]


def _with_small_places(graph: OpGraph) -> OpGraph:
    buffers = list(graph.buffers)
    for op in graph.ops:
        if op.operator.name == "max_pool2d_with_indices" and _whole(op, 1, 2):
            place = op.writes[1]
            buffers[place] = dataclasses.replace(buffers[place], size_bytes=op.operator.outputs[1].size_bytes)
    return dataclasses.replace(graph, buffers=tuple(buffers))


_ALIGNED = {2: 8, 4: 4}
"""Elements, by their bytes, to which sizes of products are filled up."""
_FILLED_UP_FROM = 250.0
"""Multiply-adds per element of operands and result, from which that pays: the compiler tries it out."""


def _product(op: Op, new: New) -> list[Op]:
    """Large products of odd sizes (a vocabulary of 50,257) work on copies that are filled up to whole
    vectors."""
    if len(op.operator.inputs) < 2:
        return [op]
    a, b = op.operator.inputs[-2:]
    m, k, n = a.shape[-2], a.shape[-1], b.shape[-1]
    unit = _ALIGNED.get(ITEM_BYTES[a.dtype], 1)
    even = [math.ceil(size / unit) * unit for size in (m, k, n)]
    if even == [m, k, n] or m * k * n < _FILLED_UP_FROM * (m * k + k * n + m * n):
        return [op]
    sizes = dict(zip((m, k, n), even, strict=True))
    inputs, outputs = (
        tuple(_filled_up(spec, sizes) for spec in specs)
        for specs in (op.operator.inputs, op.operator.outputs)
    )
    reads, copies = list(op.reads), []
    if len(op.reads) == len(inputs):
        for i in (len(inputs) - 2, len(inputs) - 1):
            old, wide = op.operator.inputs[i], inputs[i]
            if old.shape != wide.shape:
                reads[i] = new(wide, "temporaries")
                copies.append(_call(op, "constant_pad_nd", {op.reads[i]: old}, {reads[i]: wide}))
    flops = op.operator.flops * math.prod(even) // (m * k * n)
    operator = dataclasses.replace(op.operator.on(inputs, outputs), flops=flops)
    return [*copies, dataclasses.replace(op, operator=operator, reads=tuple(reads))]


def _filled_up(spec: TensorSpec, sizes: Mapping[int, int]) -> TensorSpec:
    """Change the last two dimensions to their new sizes; a matrix that was turned still is."""
    outer, matrix = spec.shape[:-2], tuple(sizes.get(size, size) for size in spec.shape[-2:])
    strides = None
    if spec.strides is not None and len(matrix) == 2 and spec.strides[-2] == 1:
        area = math.prod(matrix)
        strides = (*(area * math.prod(outer[i + 1 :]) for i in range(len(outer))), 1, matrix[0])
    return TensorSpec((*outer, *matrix), spec.dtype, strides)


_LOOPS: dict[str, Callable[[Op, New], list[Op]]] = {
    "native_batch_norm": _batch_norm,
    "cudnn_batch_norm": _batch_norm,
    "native_batch_norm_backward": _batch_norm_backward,
    "cudnn_batch_norm_backward": _batch_norm_backward,
    "native_layer_norm_backward": _layer_norm_backward,
    "embedding_dense_backward": _embedding_backward,
    "max_pool2d_with_indices": _max_pooling,
    **dict.fromkeys(("mm", "addmm", "bmm", "baddbmm"), _product),
}


# What autograd does beside


def _without_copies(graph: OpGraph) -> OpGraph:
    """Take out the copies that autograd makes of what an activation is about to overwrite: to a compiler
    nothing is overwritten, so the copy is what was there before."""
    writers: dict[int, list[int]] = defaultdict(list)
    readers: dict[int, list[int]] = defaultdict(list)
    for index, op in enumerate(graph.ops):
        for number in op.writes:
            writers[number].append(index)
        for number in op.reads if op.operator.launches else ():
            readers[number].append(index)
    ops, buffers = list(graph.ops), list(graph.buffers)
    for index, op in enumerate(graph.ops):
        if op.phase != "forward" or op.operator.name != "clone" or len(op.reads) != 1 or len(op.writes) != 1:
            continue
        (old,), (copy,) = op.reads, op.writes
        earlier = [one for one in writers[old] if one < index]
        over = [one for one in writers[old] if one > index]
        used = [one for one in readers[old] if one < index or (over and index < one < over[0])]
        if len(earlier) != 1 or len(over) != 1 or used or buffers[old].born < 0:
            continue
        first, last = earlier[0], over[0]
        ops[first] = dataclasses.replace(ops[first], writes=_renamed(ops[first].writes, old, copy))
        ops[last] = dataclasses.replace(ops[last], reads=_renamed(ops[last].reads, old, copy))
        view = dataclasses.replace(op.operator, launches=False, bytes_read=0, bytes_written=0)
        ops[index] = dataclasses.replace(op, operator=view, reads=(copy,), writes=())
        buffers[copy] = dataclasses.replace(buffers[copy], born=buffers[old].born)
        buffers[old] = dataclasses.replace(buffers[old], born=last)
    return dataclasses.replace(graph, ops=tuple(ops), buffers=tuple(buffers))


def _renamed(numbers: Sequence[int], old: int, new: int) -> tuple[int, ...]:
    return tuple(new if number == old else number for number in numbers)


def _with_gradient_of_logits(graph: OpGraph) -> OpGraph:
    """The gradient of logits that nobody asks for: autograd hands the compiled backward pass zeros, which it
    adds to that of the loss."""
    place = next(
        (i for i, op in enumerate(graph.ops) if op.operator.name == "_log_softmax_backward_data"), None
    )
    products = [op for op in graph.ops if op.phase == "forward" and op.operator.name in ("mm", "addmm")]
    if place is None or not products or not products[-1].operator.outputs:
        return graph
    logits = products[-1].operator.outputs[-1]

    def rule(op: Op, new: New) -> list[Op]:
        if op is not graph.ops[place]:
            return [op]
        zeros = new(logits, "temporaries")
        operator = dataclasses.replace(
            op.operator,
            inputs=(*op.operator.inputs, logits),
            bytes_read=op.operator.bytes_read + logits.size_bytes,
        )
        return [
            _call(op, "zeros", {}, {zeros: logits}, overload=AUTOGRAD),
            dataclasses.replace(op, operator=operator, reads=(*op.reads, zeros)),
        ]

    return _expanded(graph, rule)


# Layout of convolutions


def _channels_last(graph: OpGraph) -> OpGraph:
    """Lay all contiguous images and weights of convolutions out with channels last, as far as the optimizer.

    What the user gave is copied where nothing casts it, and gradients of weights are copied back.
    """
    given = {n for n, buffer in enumerate(graph.buffers) if buffer.category in ("inputs", "weights")}
    gradients = {n for n, buffer in enumerate(graph.buffers) if buffer.category == "gradients"}
    turned: dict[int, int] = {}

    def rule(op: Op, new: New) -> list[Op]:
        old = op.operator
        casts = old.name == "_to_copy" and not given.isdisjoint(op.reads)
        inputs = old.inputs if casts else tuple(map(_with_channels_last, old.inputs))
        operator = dataclasses.replace(
            old, inputs=inputs, outputs=tuple(map(_with_channels_last, old.outputs))
        )
        before: list[Op] = []
        if old.name.startswith("convolution") and len(op.reads) == len(old.inputs):
            for number, spec, wanted in zip(op.reads, old.inputs, inputs, strict=True):
                if number in given and number not in turned and _moves(spec):
                    turned[number] = new(spec, "activations")
                    before.append(_call(op, "clone", {number: spec}, {turned[number]: wanted}))
            op = dataclasses.replace(op, reads=tuple(turned.get(number, number) for number in op.reads))
        hands_over = old.launches and old.name != "copy_"  # else autograd copies it already
        behind = [
            _call(op, "clone", {number: spec}, {}, overload=AUTOGRAD)
            for number, spec in zip(op.writes, operator.outputs, strict=False)
            if number in gradients and _moves(spec) and op.phase == "backward" and hands_over
        ]
        return [*before, dataclasses.replace(op, operator=operator), *behind]

    return _expanded(graph, rule)


def _moves(spec: TensorSpec) -> bool:
    """Whether its elements lie elsewhere in the other layout."""
    return len(spec.shape) == 4 and spec.shape[1] > 1 and math.prod(spec.shape[2:]) > 1


def _with_channels_last(spec: TensorSpec) -> TensorSpec:
    if len(spec.shape) != 4 or spec.strides is not None or spec.shape[1] == 1:
        return spec
    _, channels, height, width = spec.shape
    strides = (channels * height * width, 1, width * channels, channels)
    return dataclasses.replace(spec, strides=strides)
