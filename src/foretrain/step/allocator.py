"""Replays the buffers of a step through a model of torch's CUDA caching allocator."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from foretrain.graph import CATEGORIES, Buffer

_UNIT = 512
_SMALL = 1 << 20  # requests up to here come from the small pool
_SMALL_SEGMENT = 2 << 20
_LARGE_SEGMENT = 20 << 20
_LARGE = 10 << 20  # requests from here on get a segment of their own
_LARGE_UNIT = 2 << 20


@dataclass(slots=True, eq=False)
class _Block:
    address: int
    size: int
    pool: int
    previous: _Block | None = None
    next: _Block | None = None
    free: bool = False


class CachingAllocator:
    """torch's CUDA allocator: sizes rounded to 512 bytes, two pools, best fit, split and merged blocks,
    segments never returned."""

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
class Replay:
    """Peak memory of a step: what the allocator hands out and holds, and what it is made of at the peak."""

    allocated_bytes: int
    reserved_bytes: int
    peak: int
    """The call during which the peak is reached; -1 before the first."""
    by_category: dict[str, int]
    """Bytes at the peak by category, workspaces and rounding included; they add up to ``allocated_bytes``."""


def replay(
    buffers: Sequence[Buffer],
    workspaces: Sequence[int],
    persistent_bytes: Sequence[int] = (),
    *,
    steps: int = 2,
) -> Replay:
    """Play the buffers of ``steps`` steps (the second finds the cache as the first left it); the peak of the
    last.

    Buffers are born and die at calls, each of which needs its workspace while it runs. ``persistent_bytes``
    are library workspaces that stay allocated, one size each.
    """
    allocator = CachingAllocator()
    held = {n: allocator.allocate(b.size_bytes) for n, b in enumerate(buffers) if b.born < 0 and b.size_bytes}
    for size in persistent_bytes:
        allocator.allocate(size)
    events, inherited = _events(buffers, len(workspaces)), _inherited(buffers, len(workspaces))
    peak, left = -1, dict[int, _Block]()
    for _ in range(steps):
        allocator.peak_allocated = allocator.allocated
        peak = _play(buffers, events, inherited, workspaces, allocator, held, left)
    beside = sum(persistent_bytes) + (workspaces[peak] if peak >= 0 else 0)
    return Replay(
        allocated_bytes=allocator.peak_allocated,
        reserved_bytes=allocator.reserved,
        peak=peak,
        by_category=_categories(buffers, len(workspaces), peak, beside, allocator.peak_allocated),
    )


def _events(buffers: Sequence[Buffer], calls: int) -> list[tuple[list[int], list[int]]]:
    """For each call, the buffers it allocates and those released after it."""
    events: list[tuple[list[int], list[int]]] = [([], []) for _ in range(calls)]
    for number, buffer in enumerate(buffers):
        if buffer.size_bytes and buffer.born >= 0:
            events[buffer.born][0].append(number)
            events[min(buffer.dies, calls - 1)][1].append(number)
    return events


def _inherited(buffers: Sequence[Buffer], calls: int) -> dict[int, list[int]]:
    """The buffers that one step leaves to the next, by the call of that after which they are released."""
    released: dict[int, list[int]] = {}
    for number, buffer in enumerate(buffers):
        if buffer.size_bytes and buffer.born >= 0 and buffer.dies > calls:
            released.setdefault(buffer.dies - calls - 1, []).append(number)
    return released


def _play(
    buffers: Sequence[Buffer],
    events: list[tuple[list[int], list[int]]],
    inherited: Mapping[int, list[int]],
    workspaces: Sequence[int],
    allocator: CachingAllocator,
    held: dict[int, _Block],
    left: dict[int, _Block],
) -> int:
    """Play one step, which finds what the one before ``left``; the call at which the peak was reached."""
    sizes = [buffer.size_bytes for buffer in buffers]
    allocate, release = allocator.allocate, allocator.release
    peak = -1
    for index, (born, dying) in enumerate(events):
        if born or workspaces[index]:
            before = allocator.peak_allocated
            for number in born:
                held[number] = allocate(sizes[number])
            if workspaces[index]:
                release(allocate(workspaces[index]))
            if allocator.peak_allocated > before:
                peak = index
        for number in inherited.get(index, ()):
            if number in left:
                release(left.pop(number))
        for number in dying:
            if buffers[number].dies > len(events):
                left[number] = held.pop(number)
            else:
                release(held.pop(number))
    return peak


def _categories(
    buffers: Sequence[Buffer], calls: int, peak: int, workspaces_bytes: int, total: int
) -> dict[str, int]:
    sizes: dict[str, int] = dict.fromkeys(CATEGORIES, 0)
    for buffer in buffers:
        if buffer.born < 0 or buffer.born <= peak <= buffer.dies:
            sizes[buffer.category] += buffer.size_bytes
        if buffer.born >= 0 and peak <= buffer.dies - calls - 1:  # the one that the step before has left
            sizes[buffer.category] += buffer.size_bytes
    sizes["workspaces"] = workspaces_bytes
    sizes["rounding"] = total - sum(sizes.values())
    return sizes
