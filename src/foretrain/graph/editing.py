"""Edits a graph: leaves calls out, puts others in their place or before them, and gives buffers their new
lifetimes."""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Sequence

from foretrain.graph.ir import Buffer, Category, Op, OpGraph


class Edit:
    """Changes to the calls of a graph, by their places in it."""

    def __init__(self, graph: OpGraph) -> None:
        self.old = graph
        self._replaced: dict[int, Op] = {}
        self._before: dict[int, list[Op]] = defaultdict(list)
        self._dropped: set[int] = set()
        self._same: dict[int, int] = {}
        self._buffers = list(graph.buffers)
        self._readers: dict[int, list[int]] = defaultdict(list)
        for i, op in enumerate(graph.ops):
            for number in op.reads:
                self._readers[number].append(i)

    def readers(self, buffer: int, *, views: bool = False) -> list[int]:
        """The calls that read a buffer and launch something; with ``views`` all that touch it."""
        return [i for i in self._readers[buffer] if views or self.old.ops[i].operator.launches]

    def replace(self, i: int, op: Op) -> None:
        self._replaced[i] = op

    def insert(self, i: int, op: Op) -> None:
        """Put a call before the one at ``i``."""
        self._before[i].append(op)

    def drop(self, i: int) -> None:
        """Leave a call out."""
        self._dropped.add(i)

    def rename(self, number: int, other: int) -> None:
        """Let every call that is left touch another buffer in the place of one."""
        self._same[number] = other

    def add_buffer(self, size_bytes: int, category: Category) -> int:
        """A new one, which lives from the first call that writes it to the last that touches it."""
        self._buffers.append(Buffer(size_bytes, category, 0, 0))
        return len(self._buffers) - 1

    def change_buffer(self, number: int, size_bytes: int, category: Category) -> None:
        """Another size and kind, and a lifetime by the calls that touch it."""
        self._buffers[number] = Buffer(size_bytes, category, 0, 0)

    def unite(self, number: int, other: int) -> None:
        """Put one buffer in the place of two, for as long as either lives."""
        first, second = self.old.buffers[number], self.old.buffers[other]
        kept = "activations" if "activations" in (first.category, second.category) else first.category
        dies = max(first.dies, second.dies)
        self._buffers[number] = Buffer(first.size_bytes, kept, first.born, dies)
        self.rename(other, number)

    def halve_buffer(self, number: int) -> None:
        """Half its size, for as long as before."""
        buffer = self.old.buffers[number]
        self._buffers[number] = dataclasses.replace(buffer, size_bytes=buffer.size_bytes // 2)

    def keep_buffer(self, number: int) -> None:
        """Let a buffer be there before the step, as weights are, and stay."""
        size = self._buffers[number].size_bytes
        self._buffers[number] = Buffer(size, "weights", -1, len(self.old.ops))

    def graph(self) -> OpGraph:
        """The graph with all changes."""
        if not (self._dropped or self._replaced or self._before):
            return self.old
        ops: list[Op] = []
        place: list[int] = []
        for i, op in enumerate(self.old.ops):
            ops += [self._renamed(new) for new in self._before.get(i, ())]
            if i not in self._dropped:
                ops.append(self._renamed(self._replaced.get(i, op)))
            place.append(len(ops) - 1)
        written, used = _uses(ops)
        buffers = tuple(
            _moved(buffer, place, len(ops), written.get(number), used.get(number))
            for number, buffer in enumerate(self._buffers)
        )
        return dataclasses.replace(self.old, ops=tuple(ops), buffers=buffers)

    def _renamed(self, op: Op) -> Op:
        same = self._same
        if same.keys().isdisjoint((*op.reads, *op.writes)):
            return op
        reads, writes = (
            tuple(same.get(number, number) for number in numbers) for numbers in (op.reads, op.writes)
        )
        return dataclasses.replace(op, reads=reads, writes=writes)


def _uses(ops: Sequence[Op]) -> tuple[dict[int, int], dict[int, int]]:
    """Find, of each buffer, the first call that writes it and the last that touches it."""
    written: dict[int, int] = {}
    used: dict[int, int] = {}
    for i, op in enumerate(ops):
        for number in op.writes:
            written.setdefault(number, i)
        for number in (*op.reads, *op.writes):
            used[number] = i
    return written, used


def _moved(buffer: Buffer, place: Sequence[int], count: int, written: int | None, used: int | None) -> Buffer:
    """A buffer with its lifetime by the calls that are left; one that none of them touches has no size."""
    if used is None and buffer.born >= 0:
        return dataclasses.replace(buffer, size_bytes=0, born=-1, dies=-1)
    before = len(place)
    born = buffer.born
    if born >= 0:
        born = max(0, place[born]) if written is None else written
    dies = max(0, place[buffer.dies]) if 0 <= buffer.dies < before else buffer.dies - before + count
    return dataclasses.replace(buffer, born=born, dies=max(dies, born, -1 if used is None else used))
