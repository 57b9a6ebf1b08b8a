"""Takes out of a graph what computes a value that is there already, as compilers do before they fuse.

Layers in fp8 repeat themselves: query, key and value each cast the same input, a gradient is cast for both
products that it goes into, and the backward pass takes the largest value of weights and inputs again.
"""

from __future__ import annotations

from foretrain.graph.editing import Edit
from foretrain.graph.ir import Op, OpGraph
from foretrain.graph.opset import Kind, traits

_PURE: frozenset[Kind] = frozenset({"activation", "pointwise", "copy", "sum", "reduction", "vector norm"})
_SMALL_BYTES = 1 << 16
"""A result of no more (a scale) is kept from the forward for the backward pass; a larger one is computed
again there."""


def without_repeats(graph: OpGraph) -> OpGraph:
    """Compute each value once in a pass, and leave out what nobody reads then."""
    same = _equal_results(graph)
    if not same:
        return graph
    dead: set[int] = set()
    read_by = _readers(graph, same)
    for i in reversed(range(len(graph.ops))):
        op = graph.ops[i]
        if _is_pure(graph, i) and all(
            buffer in same or not (read_by[buffer] - dead - {i}) for buffer in op.writes
        ):
            dead.add(i)
    edit = Edit(graph)
    for i in dead:
        edit.drop(i)
    for buffer, holder in same.items():
        edit.rename(buffer, holder)
    return edit.graph()


def _is_pure(graph: OpGraph, i: int) -> bool:
    """Whether a call does nothing but make new tensors from others, which the step alone sees."""
    op = graph.ops[i]
    return (
        bool(op.writes)
        and traits(op.operator.name).kind in _PURE
        and not traits(op.operator.name).multi_tensor
        and all(
            graph.buffers[buffer].born == i
            and graph.buffers[buffer].category in ("activations", "temporaries")
            for buffer in op.writes
        )
    )


def _whole(graph: OpGraph, op: Op) -> bool:
    """Whether a call reads all of its operands' memory: parts of one tensor are not told apart."""
    specs = op.operator.inputs
    return len(specs) == len(op.reads) and all(
        spec.size_bytes == graph.buffers[buffer].size_bytes
        for spec, buffer in zip(specs, op.reads, strict=True)
    )


def _equal_results(graph: OpGraph) -> dict[int, int]:
    """Buffers whose content an earlier one has, and which one that is."""
    values: dict[int, int] = {}
    first: dict[tuple[int, ...], tuple[int, int]] = {}
    counted = len(graph.buffers)
    same: dict[int, int] = {}
    for i, op in enumerate(graph.ops):
        if not (_is_pure(graph, i) and _whole(graph, op)):
            for buffer in op.writes:
                values[buffer] = counted = counted + 1
            continue
        key = (id(op.operator), *(values.get(buffer, buffer) for buffer in op.reads))
        earlier, value = first.get(key, (i, -1))
        holders = graph.ops[earlier].writes
        if earlier == i or [values[holder] for holder in holders] != list(range(value, value + len(holders))):
            first[key] = i, counted + 1
            for buffer in op.writes:
                values[buffer] = counted = counted + 1
            continue
        values.update(zip(op.writes, range(value, value + len(holders)), strict=True))
        if graph.ops[earlier].phase == op.phase or op.operator.bytes_written <= _SMALL_BYTES:
            same.update(
                (written, same.get(holder, holder))
                for written, holder in zip(op.writes, holders, strict=True)
            )
    return same


def _readers(graph: OpGraph, same: dict[int, int]) -> list[set[int]]:
    """The calls that read each buffer, once equal ones are one."""
    readers: list[set[int]] = [set() for _ in graph.buffers]
    for i, op in enumerate(graph.ops):
        for buffer in op.reads:
            readers[same.get(buffer, buffer)].add(i)
    return readers
