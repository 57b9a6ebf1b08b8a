"""The buffers of a graph, replayed through a model of the CUDA caching allocator, become peak memory by category and over time."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable
from dataclasses import dataclass, field

from foretrain.graph import CATEGORIES, Category, Operator, OpGraph

_UNIT = 512
_SMALL = 1 << 20  # requests up to here come from the small pool
_SMALL_SEGMENT = 2 << 20
_LARGE_SEGMENT = 20 << 20
_LARGE = 10 << 20  # requests from here on get a segment of their own
_LARGE_UNIT = 2 << 20

Workspace = Callable[[Operator], int]
"""Bytes that a call needs while it runs, beside its inputs and outputs."""


@dataclass(slots=True, eq=False)
class _Block:
    address: int
    size: int
    pool: int
    previous: _Block | None = None
    next: _Block | None = None
    free: bool = False


class CachingAllocator:
    """torch's CUDA allocator: sizes rounded to 512 bytes, two pools, best fit, split and merged blocks, segments never returned."""

    def __init__(self) -> None:
        self.allocated = 0
        self.reserved = 0
        self.peak_allocated = 0
        self._free: tuple[list[tuple[int, int]], ...] = ([], [])  # (size, address), ascending, per pool
        self._free_at: dict[int, _Block] = {}
        self._top = 0

    def allocate(self, size_bytes: int) -> _Block:
        size = max(_UNIT, -(-size_bytes // _UNIT) * _UNIT)
        pool = int(size > _SMALL)
        free = self._free[pool]
        position = bisect_left(free, (size, 0))
        block = (
            self._free_at.pop(free.pop(position)[1]) if position < len(free) else self._segment(size, pool)
        )
        remaining = block.size - size
        if remaining >= _UNIT and (pool == 0 or remaining > _SMALL):
            rest = _Block(block.address + size, remaining, pool, block, block.next, True)
            if block.next is not None:
                block.next.previous = rest
            block.next, block.size = rest, size
            self._add(rest)
        block.free = False
        self.allocated += block.size
        if self.allocated > self.peak_allocated:
            self.peak_allocated = self.allocated
        return block

    def release(self, block: _Block) -> None:
        self.allocated -= block.size
        block.free = True
        for neighbour in (block.previous, block.next):
            if neighbour is not None and neighbour.free:
                self._remove(neighbour)
        if block.next is not None and block.next.free:
            block.size += block.next.size
            block.next = block.next.next
            if block.next is not None:
                block.next.previous = block
        if block.previous is not None and block.previous.free:
            previous = block.previous
            previous.size += block.size
            previous.next = block.next
            if previous.next is not None:
                previous.next.previous = previous
            block = previous
        self._add(block)

    def _segment(self, size: int, pool: int) -> _Block:
        if pool == 0:
            length = _SMALL_SEGMENT
        elif size < _LARGE:
            length = _LARGE_SEGMENT
        else:
            length = -(-size // _LARGE_UNIT) * _LARGE_UNIT
        self.reserved += length
        self._top += length
        return _Block(self._top - length, length, pool)

    def _add(self, block: _Block) -> None:
        insort(self._free[block.pool], (block.size, block.address))
        self._free_at[block.address] = block

    def _remove(self, block: _Block) -> None:
        free = self._free[block.pool]
        del free[bisect_left(free, (block.size, block.address))]
        del self._free_at[block.address]


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryProfile:
    """Peak memory of a step: what the allocator hands out and holds, and what it is made of at the peak."""

    allocated_bytes: int
    reserved_bytes: int
    peak_op: int
    """The op during which the peak is reached; -1 before the first."""
    by_category: dict[Category | str, int] = field(default_factory=dict)
    """Bytes at the peak by category, workspaces and rounding included; they add up to ``allocated_bytes``."""


def profile_memory(
    graph: OpGraph, workspace: Workspace = lambda _: 0, persistent_bytes: tuple[int, ...] = (), steps: int = 2
) -> MemoryProfile:
    """Replay ``steps`` steps (the second finds the cache as the first left it) and report the peak of the last.

    ``persistent_bytes`` are library workspaces that stay allocated, one size each.
    """
    allocator = CachingAllocator()
    held = {
        number: allocator.allocate(b.size_bytes)
        for number, b in enumerate(graph.buffers)
        if b.born < 0 and b.size_bytes
    }
    for size in persistent_bytes:
        allocator.allocate(size)
    schedule = _schedule(graph)
    per_operator = [workspace(operator) for operator in graph.operators]
    needs = [per_operator[kind] for kind in graph.operator_index.tolist()]
    peak_op = -1
    for _ in range(steps):
        allocator.peak_allocated = allocator.allocated
        peak_op = _replay(graph, schedule, needs, allocator, held)
    return MemoryProfile(
        allocated_bytes=allocator.peak_allocated,
        reserved_bytes=allocator.reserved,
        peak_op=peak_op,
        by_category=_categories(graph, peak_op, needs, sum(persistent_bytes), allocator.peak_allocated),
    )


def _schedule(graph: OpGraph) -> list[tuple[list[int], list[int]]]:
    """For each op, the buffers it allocates and those released after it."""
    schedule: list[tuple[list[int], list[int]]] = [([], []) for _ in graph.ops]
    for number, buffer in enumerate(graph.buffers):
        if buffer.size_bytes and buffer.born >= 0:
            schedule[buffer.born][0].append(number)
            schedule[min(buffer.dies, len(graph.ops) - 1)][1].append(number)
    return schedule


def _replay(
    graph: OpGraph,
    schedule: list[tuple[list[int], list[int]]],
    needs: list[int],
    allocator: CachingAllocator,
    held: dict[int, _Block],
) -> int:
    """Play one step; the op at which the peak was reached."""
    sizes = [buffer.size_bytes for buffer in graph.buffers]
    allocate, release = allocator.allocate, allocator.release
    peak_op = -1
    for index, (born, dying) in enumerate(schedule):
        if born or needs[index]:
            before = allocator.peak_allocated
            for number in born:
                held[number] = allocate(sizes[number])
            if needs[index]:
                release(allocate(needs[index]))
            if allocator.peak_allocated > before:
                peak_op = index
        for number in dying:
            release(held.pop(number))
    return peak_op


def _categories(
    graph: OpGraph, peak_op: int, needs: list[int], persistent_bytes: int, total: int
) -> dict[Category | str, int]:
    sizes: dict[Category | str, int] = dict.fromkeys(CATEGORIES, 0)
    for buffer in graph.buffers:
        if buffer.born < 0 or buffer.born <= peak_op <= buffer.dies:
            sizes[buffer.category] += buffer.size_bytes
    sizes["workspaces"] = persistent_bytes + (needs[peak_op] if peak_op >= 0 else 0)
    sizes["rounding"] = total - sum(sizes.values())
    return sizes
