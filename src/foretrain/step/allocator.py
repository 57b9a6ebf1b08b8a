"""Replays the buffers of a step through a model of torch's CUDA caching allocator."""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from foretrain.allocator_settings import AllocatorSettings
from foretrain.graph import CATEGORIES, Buffer

_UNIT = 512
_SMALL = 1 << 20  # requests up to here come from the small pool
_SMALL_SEGMENT = 2 << 20
_LARGE_SEGMENT = 20 << 20
_LARGE = 10 << 20  # requests from here on get a segment of their own
_LARGE_UNIT = 2 << 20
_ROOM = _LARGE_SEGMENT << 26
"""Addresses that an expandable segment reserves: more than any device has memory, and whole granules."""

_CAPACITY_STEP = 0.01
"""Share of the memory to which the smallest device is found."""


class OutOfMemory(Exception):
    """The device has no room for a request, also after all that is cached was returned to it."""


@dataclass(slots=True, eq=False)
class _Block:
    address: int
    size: int
    pool: int
    previous: _Block | None = None
    next: _Block | None = None
    free: bool = False
    mapped: bool = True
    """Whether memory lies behind its addresses; else it is a part of an expandable segment to grow into."""


class CachingAllocator:
    """torch's CUDA allocator: sizes rounded to 512 bytes, two pools, best fit, split and merged blocks.

    Segments are returned to the device only when it has no room left, and then all that are free. Expandable
    segments grow in granules instead; of these the free ones are returned.
    """

    def __init__(
        self, settings: AllocatorSettings | None = None, *, capacity_bytes: float = math.inf
    ) -> None:
        self.settings, self.capacity_bytes = settings or AllocatorSettings(), capacity_bytes
        self.allocated = 0
        self.reserved = 0
        self.peak_allocated = 0
        self.returns = 0
        """How often the cache was returned to the device for want of room."""
        self._free: tuple[list[tuple[int, int]], ...] = ([], [])  # (size, address), ascending, per pool
        self._free_at: dict[int, _Block] = {}
        self._unmapped: tuple[dict[int, _Block], ...] = ({}, {})  # by address, per pool
        self._top = 0

    def allocate(self, size_bytes: int) -> _Block:
        size = self._rounded(size_bytes)
        pool = int(size > _SMALL)
        block = self._best_fit(size, pool) or self._from_device(size, pool)
        if self._splits(block.size - size, size, pool):
            self._split(block, size)
            assert block.next is not None
            self._add(block.next)
        block.free = False
        self.allocated += block.size
        if self.allocated > self.peak_allocated:
            self.peak_allocated = self.allocated
        return block

    def release(self, block: _Block) -> None:
        self.allocated -= block.size
        block.free = True
        self._add(self._merged(block))

    # Sizes

    def _rounded(self, size_bytes: int) -> int:
        divisions = self.settings.power2_divisions
        if divisions > 1 and size_bytes > _UNIT * divisions:
            step = (1 << (size_bytes.bit_length() - 1)) // divisions
            return -(-size_bytes // step) * step
        return max(_UNIT, -(-size_bytes // _UNIT) * _UNIT)

    def _splits(self, remaining: int, size: int, pool: int) -> bool:
        if pool == 0 or self.settings.expandable_segments:
            return remaining >= _UNIT
        return remaining > _SMALL and size < self.settings.max_split_bytes

    # Free blocks

    def _best_fit(self, size: int, pool: int) -> _Block | None:
        """The smallest free block that does; the end of an expandable segment counts as what it can grow to,
        a block beyond the limit on splitting serves only requests of nearly its size."""
        free, limit = self._free[pool], self.settings.max_split_bytes
        position = bisect_left(free, (size, 0))
        if position == len(free):
            return None
        if self.settings.expandable_segments:
            while position + 1 < len(free) and self._grows_to(free[position + 1]) < self._grows_to(
                free[position]
            ):
                position += 1
        if free[position][0] >= (limit if size < limit else size + _LARGE_SEGMENT) and limit < math.inf:
            return None
        return self._free_at.pop(free.pop(position)[1])

    def _grows_to(self, entry: tuple[int, int]) -> int:
        after = self._free_at[entry[1]].next
        return entry[0] + (after.size if after is not None and not after.mapped else 0)

    def _add(self, block: _Block) -> None:
        insort(self._free[block.pool], (block.size, block.address))
        self._free_at[block.address] = block

    def _remove(self, block: _Block) -> None:
        free = self._free[block.pool]
        del free[bisect_left(free, (block.size, block.address))]
        del self._free_at[block.address]

    def _split(self, block: _Block, size: int) -> None:
        """Cut a block down to ``size``; what follows is a block like it."""
        rest = _Block(
            block.address + size, block.size - size, block.pool, block, block.next, True, block.mapped
        )
        if block.next is not None:
            block.next.previous = rest
        block.next, block.size = rest, size

    def _merged(self, block: _Block) -> _Block:
        """A free block together with its free neighbours, or an unmapped one with its unmapped ones; they are
        taken out of their lists."""
        for neighbour in (block.next, block.previous):
            if neighbour is None or not neighbour.free or neighbour.mapped != block.mapped:
                continue
            if neighbour.mapped:
                self._remove(neighbour)
            else:
                del self._unmapped[neighbour.pool][neighbour.address]
            first, second = (block, neighbour) if neighbour is block.next else (neighbour, block)
            first.size += second.size
            first.next = second.next
            if first.next is not None:
                first.next.previous = first
            block = first
        return block

    # The device

    def _from_device(self, size: int, pool: int) -> _Block:
        grow = self._expand if self.settings.expandable_segments else self._segment
        if (block := grow(size, pool)) is None:
            self.returns += 1
            self._return_cache()
            block = grow(size, pool)
        if block is None:
            raise OutOfMemory(f"{size} bytes beside the {self.reserved} of {self.capacity_bytes:.0f}")
        return block

    def _segment(self, size: int, pool: int) -> _Block | None:
        """A segment of its own; None where there is no room for it."""
        if pool == 0:
            length = _SMALL_SEGMENT
        elif size < _LARGE:
            length = _LARGE_SEGMENT
        else:
            length = -(-size // _LARGE_UNIT) * _LARGE_UNIT
        if self.reserved + length > self.capacity_bytes:
            return None
        self.reserved += length
        self._top += length
        return _Block(self._top - length, length, pool)

    def _expand(self, size: int, pool: int) -> _Block | None:
        """Room in the lowest gap of an expandable segment that is large enough, with the free block before
        it; None where the device has no memory to put there."""
        for address in sorted(self._unmapped[pool]):
            block = self._unmapped[pool][address]
            if block.previous is not None and block.previous.free:
                block = block.previous
            if self._room_from(block) >= size:
                break
        else:
            block = _Block(self._top, _ROOM, pool, free=True, mapped=False)
            self._top += _ROOM
            self._unmapped[pool][block.address] = block
        if not block.mapped:
            if (mapped := self._map(block, min(block.size, size))) is None:
                return None
            block = mapped
        while block.size < size:
            assert block.next is not None
            if (mapped := self._map(block.next, min(size - block.size, block.next.size))) is None:
                return None
            block = mapped
        self._remove(block)
        return block

    @staticmethod
    def _room_from(block: _Block | None) -> int:
        """Bytes from the start of a free block to the next one in use."""
        room = 0
        while block is not None and block.free:
            room, block = room + block.size, block.next
        return room

    def _map(self, block: _Block, size: int) -> _Block | None:
        """Put memory behind the first granules of an unmapped block; it is free then, with its neighbours."""
        granule = _granule(block.pool)
        length = -(-size // granule) * granule
        if self.reserved + length > self.capacity_bytes:
            return None
        del self._unmapped[block.pool][block.address]
        if length < block.size:
            self._split(block, length)
            assert block.next is not None
            self._unmapped[block.pool][block.next.address] = block.next
        block.mapped = True
        self.reserved += length
        block = self._merged(block)
        self._add(block)
        return block

    def _return_cache(self) -> None:
        """Give back every segment that is free whole, and of expandable ones every granule."""
        for block in list(self._free_at.values()):
            if self.settings.expandable_segments:
                self._unmap(block)
            elif block.previous is None and block.next is None:
                self._remove(block)
                self.reserved -= block.size

    def _unmap(self, block: _Block) -> None:
        granule, end = _granule(block.pool), block.address + block.size
        first, last = -(-block.address // granule) * granule, end // granule * granule
        if first >= last:
            return
        self._remove(block)
        if first > block.address:
            self._split(block, first - block.address)
            self._add(block)
            assert block.next is not None
            block = block.next
        if last < end:
            self._split(block, last - first)
            assert block.next is not None
            self._add(block.next)
        block.mapped = False
        self.reserved -= block.size
        block = self._merged(block)
        self._unmapped[block.pool][block.address] = block


def _granule(pool: int) -> int:
    """By which an expandable segment grows."""
    return _LARGE_SEGMENT if pool else _SMALL_SEGMENT


@dataclass(frozen=True, slots=True, kw_only=True)
class Replay:
    """Peak memory of a step: what the allocator hands out and holds, and what it is made of at the peak."""

    allocated_bytes: int
    reserved_bytes: int
    peak: int
    """The call during which the peak is reached; -1 before the first."""
    by_category: dict[str, int]
    """Bytes at the peak by category, workspaces and rounding included; they add up to ``allocated_bytes``."""
    returns: int = 0
    """How often a step found no room on the device until the cache was returned to it."""


def replay(
    buffers: Sequence[Buffer],
    workspaces: Sequence[int],
    persistent_bytes: Sequence[int] = (),
    *,
    settings: AllocatorSettings | None = None,
    capacity_bytes: float = math.inf,
    steps: int = 2,
) -> Replay:
    """Play the buffers of ``steps`` steps (the second finds the cache as the first left it); the peak of the
    last. Raises OutOfMemory where the device has too little.

    Buffers are born and die at calls, each of which needs its workspace while it runs. ``persistent_bytes``
    are library workspaces that stay allocated, one size each.
    """
    allocator = CachingAllocator(settings, capacity_bytes=capacity_bytes)
    held = {n: allocator.allocate(b.size_bytes) for n, b in enumerate(buffers) if b.born < 0 and b.size_bytes}
    for size in persistent_bytes:
        allocator.allocate(size)
    events, inherited = _events(buffers, len(workspaces)), _inherited(buffers, len(workspaces))
    peak, left = -1, dict[int, _Block]()
    for _ in range(steps):
        allocator.peak_allocated, allocator.returns = allocator.allocated, 0
        peak = _play(buffers, events, inherited, workspaces, allocator, held, left)
    beside = sum(persistent_bytes) + (workspaces[peak] if peak >= 0 else 0)
    return Replay(
        allocated_bytes=allocator.peak_allocated,
        reserved_bytes=allocator.reserved,
        peak=peak,
        by_category=_categories(buffers, len(workspaces), peak, beside, allocator.peak_allocated),
        returns=allocator.returns,
    )


def least_capacity(
    buffers: Sequence[Buffer],
    workspaces: Sequence[int],
    persistent_bytes: Sequence[int] = (),
    *,
    settings: AllocatorSettings | None = None,
    free: Replay,
) -> int:
    """The memory of the smallest device on which the steps run, to a hundredth; ``free`` is their replay on a
    device without bounds.

    Where room is short, torch returns what is cached: tensors and what lies between them must fit.
    """
    low, high = free.allocated_bytes, free.reserved_bytes
    while high - low > _CAPACITY_STEP * high:
        middle = (low + high) // 2
        try:
            replay(buffers, workspaces, persistent_bytes, settings=settings, capacity_bytes=middle)
        except OutOfMemory:
            low = middle
        else:
            high = middle
    return high


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
