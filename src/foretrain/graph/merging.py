"""Joins products of a graph as frameworks with layers of their own do: projections of one input are one
product, and weight gradients are added up by the products that make them."""

from __future__ import annotations

import dataclasses
import functools
from collections import defaultdict
from collections.abc import Iterable, Sequence

from foretrain.graph.editing import Edit
from foretrain.graph.ir import Operator, OpGraph, TensorSpec
from foretrain.graph.opset import traits

_TOGETHER = (
    ("q_proj", "k_proj", "v_proj"), ("query", "key", "value"), ("q", "k", "v"), ("gate_proj", "up_proj"),
    ("w1", "w3"), ("wi_0", "wi_1"),
)  # fmt: skip
"""Names of layers beside one another whose weights lie in one matrix."""
_ADDS = ("add", "add_")


@functools.lru_cache(maxsize=256)
def with_joined_projections(graph: OpGraph) -> OpGraph:
    """Join query, key and value, and the two halves of a gated layer, into one product each: forward, for the
    gradient of their input, which is then no sum, and for that of their weights."""
    edit = _Joining(graph)
    products: dict[str, list[int]] = defaultdict(list)
    for i, op in enumerate(graph.ops):
        if traits(op.operator.name).kind == "product" and op.phase != "optimizer":
            products[op.layer].append(i)
    for layers in _groups(products):
        calls = [products[layer] for layer in layers]
        forward = [[i for i in members if graph.ops[i].phase == "forward"] for members in calls]
        if any(len(members) != 1 for members in forward):
            continue
        first = [members[0] for members in forward]
        inputs = {graph.ops[i].reads[graph.ops[i].operator.name == "addmm"] for i in first}
        if len(inputs) > 1 or len({graph.ops[i].operator.name for i in first}) > 1:
            continue
        edit.join(first, [write for i in first for write in graph.ops[i].writes], axis="columns")
        backward = [[i for i in members if graph.ops[i].phase == "backward"] for members in calls]
        of_weights = [[i for i in members if edit.is_weight_gradient(i)] for members in backward]
        of_inputs = [[i for i in members if not edit.is_weight_gradient(i)] for members in backward]
        if all(len(members) == 1 for members in of_weights):
            one = [members[0] for members in of_weights]
            edit.join(one, [write for i in one for write in graph.ops[i].writes], axis="rows")
        if all(len(members) == 1 for members in of_inputs):
            edit.join_sum([members[0] for members in of_inputs])
    return edit.graph()


@functools.lru_cache(maxsize=256)
def with_fused_accumulation(graph: OpGraph) -> OpGraph:
    """Leave out the calls that add a micro-batch's gradients to those of the ones before: the kernels that
    make them do it."""
    edit = Edit(graph)
    for i, op in enumerate(graph.ops):
        if op.phase == "backward" and op.operator.name == "add_" and _is_gradient(graph, op.reads[:1]):
            new_gradients = [number for number in op.reads[1:] if graph.buffers[number].born >= 0]
            if len(new_gradients) == 1 and op.writes == op.reads[:1]:
                edit.drop(i)
                edit.rename(new_gradients[0], op.writes[0])
    return edit.graph()


def _groups(products: Iterable[str]) -> list[list[str]]:
    """Layers of products whose names say that they are one, by their parent."""
    known = set(products)
    groups = []
    for layer in products:
        parent, _, name = layer.rpartition(".")
        for names in _TOGETHER:
            members = [f"{parent}.{other}" for other in names]
            if name == names[0] and known.issuperset(members):
                groups.append(members)
    return groups


def _is_gradient(graph: OpGraph, buffers: Sequence[int]) -> bool:
    return any(graph.buffers[number].category == "gradients" for number in buffers)


class _Joining:
    """Products of a graph that become one."""

    def __init__(self, graph: OpGraph) -> None:
        self._old, self._edit = graph, Edit(graph)
        self._operators: dict[tuple[object, ...], Operator] = {}

    def graph(self) -> OpGraph:
        return self._edit.graph()

    def is_weight_gradient(self, i: int) -> bool:
        """Whether a product's result is a gradient of parameters, or is added to one."""
        writes, ops = self._old.ops[i].writes, self._old.ops
        if _is_gradient(self._old, writes):
            return True
        return any(
            ops[reader].operator.name in _ADDS and _is_gradient(self._old, ops[reader].reads)
            for number in writes
            for reader in self._edit.readers(number)
        )

    def join(self, calls: Sequence[int], writes: Sequence[int], *, axis: str) -> None:
        """Put one product in the place of the first of several that read the same operand (``columns``: their
        left one), or of the last (``rows``: their right one; ``depth``: they are added up)."""
        ops = [self._old.ops[i] for i in calls]
        at = min(calls) if axis == "columns" else max(calls)
        reads = tuple(dict.fromkeys(number for op in ops for number in op.reads))
        operators = [op.operator for op in ops]
        key = (axis, *map(id, operators))
        joined = self._operators.get(key) or self._operators.setdefault(key, _joined(operators, axis))
        hooks = sum(op.hooks for op in ops)
        self._edit.replace(
            at, dataclasses.replace(ops[0], operator=joined, reads=reads, writes=tuple(writes), hooks=hooks)
        )
        for i in calls:
            if i != at:
                self._edit.drop(i)

    def join_sum(self, calls: Sequence[int]) -> None:
        """Put one product in the place of several whose results are added up, without the additions."""
        results = {number for i in calls for number in self._old.ops[i].writes[:1]}
        additions = []
        for i in range(min(calls), len(self._old.ops)):
            op = self._old.ops[i]
            if op.operator.name in _ADDS and op.phase == "backward" and results.issuperset(op.reads):
                additions.append(i)
                results.update(op.writes)
        if len(additions) != len(calls) - 1:
            return
        self.join(calls, self._old.ops[additions[-1]].writes, axis="depth")
        for i in additions:
            self._edit.drop(i)


def _joined(operators: Sequence[Operator], axis: str) -> Operator:
    """Make one product of the size of several: of more columns, more rows, or more terms."""
    first = operators[0]
    at = 1 if first.name == "addmm" else 0  # behind the bias
    bias, (left, right, *scales) = first.inputs[:at], first.inputs[at:]
    (rows, depth), columns = left.shape, right.shape[-1]
    if axis == "columns":
        columns = sum(operator.inputs[at + 1].shape[-1] for operator in operators)
    elif axis == "rows":
        rows = sum(operator.inputs[at].shape[0] for operator in operators)
    else:
        depth = sum(operator.inputs[at].shape[-1] for operator in operators)
    wide = (dataclasses.replace(spec, shape=(columns,)) for spec in bias)
    inputs = (*wide, _resized(left, rows, depth), _resized(right, depth, columns), *scales)
    outputs = (_resized(first.outputs[0], rows, columns),)
    flops = sum(operator.flops for operator in operators)
    return dataclasses.replace(first.on(inputs, outputs), flops=flops)


def _resized(spec: TensorSpec, rows: int, columns: int) -> TensorSpec:
    """A matrix of another size that lies in memory as before: by rows or by columns."""
    by_columns = spec.strides is not None and spec.strides[-1] != 1 and spec.strides[-2] == 1
    strides = None if spec.strides is None else (1, rows) if by_columns else (columns, 1)
    return dataclasses.replace(spec, shape=(rows, columns), strides=strides)
