"""Keeps the books of memory as torch's CUDA caching allocator does."""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from dataclasses import dataclass

from foretrain.allocator_settings import AllocatorSettings

_UNIT = 512
_SMALL = 1 << 20  # requests up to here come from the small pool
_SMALL_SEGMENT = 2 << 20
_LARGE_SEGMENT = 20 << 20
_LARGE = 10 << 20  # requests from here on get a segment of their own
_LARGE_UNIT = 2 << 20
_REGION = 32 << 20  # in whole numbers of which the driver takes addresses
_HIGHEST = _LARGE_SEGMENT << 38
"""Below this address the driver gives out the first segment: there is room under it for any number."""
_ROOM = _LARGE_SEGMENT << 26
"""Addresses that an expandable segment reserves: more than any device has memory, and whole granules."""


class OutOfMemory(Exception):
    """The device has no room for a request, also after all that is cached was returned to it."""


@dataclass(slots=True, eq=False)
class MemoryBlock:
    """A stretch of addresses in a segment, in use or free, between its neighbours."""

    address: int
    size: int
    pool: int
    previous: MemoryBlock | None = None
    next: MemoryBlock | None = None
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
        self._free_at: dict[int, MemoryBlock] = {}
        self._unmapped: tuple[dict[int, MemoryBlock], ...] = ({}, {})  # by address, per pool
        self._rests: dict[int, int] = {}  # bytes that are left of the driver's regions, by address
        self._lowest = _HIGHEST
        self._is_plain = not self.settings.expandable_segments and self.settings.max_split_bytes == math.inf

    def allocate(self, size_bytes: int) -> MemoryBlock:
        size = self._rounded(size_bytes)
        pool = 1 if size > _SMALL else 0
        block = self._best_fit(size, pool) or self._from_device(size, pool)
        if block.size > size and self._splits(block.size - size, size, pool):
            self._split(block, size)
            assert block.next is not None
            self._add(block.next)
        block.free = False
        self.allocated += block.size
        if self.allocated > self.peak_allocated:
            self.peak_allocated = self.allocated
        return block

    def release(self, block: MemoryBlock) -> None:
        self.allocated -= block.size
        block.free = True
        after, before = block.next, block.previous
        if (after is not None and after.free) or (before is not None and before.free):
            block = self._merged(block)
        insort(self._free[block.pool], (block.size, block.address))
        self._free_at[block.address] = block

    # Sizes

    def _rounded(self, size_bytes: int) -> int:
        divisions = self.settings.power2_divisions
        if divisions > 1 and size_bytes > _UNIT * divisions:
            step = (1 << (size_bytes.bit_length() - 1)) // divisions
            return -(-size_bytes // step) * step
        return -(-size_bytes // _UNIT) * _UNIT or _UNIT

    def _splits(self, remaining: int, size: int, pool: int) -> bool:
        if pool == 0 or self.settings.expandable_segments:
            return remaining >= _UNIT
        return remaining > _SMALL and size < self.settings.max_split_bytes

    # Free blocks

    def _best_fit(self, size: int, pool: int) -> MemoryBlock | None:
        """The smallest free block that does; the end of an expandable segment counts as what it can grow to,
        a block beyond the limit on splitting serves only requests of nearly its size."""
        free = self._free[pool]
        position = bisect_left(free, (size, 0))
        if position == len(free):
            return None
        if self._is_plain:
            return self._free_at.pop(free.pop(position)[1])
        limit = self.settings.max_split_bytes
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

    def _add(self, block: MemoryBlock) -> None:
        insort(self._free[block.pool], (block.size, block.address))
        self._free_at[block.address] = block

    def _remove(self, block: MemoryBlock) -> None:
        free = self._free[block.pool]
        del free[bisect_left(free, (block.size, block.address))]
        del self._free_at[block.address]

    def _split(self, block: MemoryBlock, size: int) -> None:
        """Cut a block down to ``size``; what follows is a block like it."""
        rest = MemoryBlock(
            block.address + size, block.size - size, block.pool, block, block.next, True, block.mapped
        )
        if block.next is not None:
            block.next.previous = rest
        block.next, block.size = rest, size

    def _merged(self, block: MemoryBlock) -> MemoryBlock:
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

    def _from_device(self, size: int, pool: int) -> MemoryBlock:
        grow = self._expand if self.settings.expandable_segments else self._segment
        if (block := grow(size, pool)) is None:
            self.returns += 1
            self._return_cache()
            block = grow(size, pool)
        if block is None:
            raise OutOfMemory(f"{size} bytes beside the {self.reserved} of {self.capacity_bytes:.0f}")
        return block

    def _segment(self, size: int, pool: int) -> MemoryBlock | None:
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
        return MemoryBlock(self._address(length), length, pool)

    def _address(self, length: int) -> int:
        """Place a segment as the driver does: in the smallest rest of an earlier region that has room, else
        in a new region below all others. Of free blocks of one size torch takes the one with the lowest
        address."""
        fitting = [(room, start) for start, room in self._rests.items() if room >= length]
        if fitting:
            room, start = min(fitting)
            del self._rests[start]
        else:
            room = -(-length // _REGION) * _REGION
            self._lowest -= room
            start = self._lowest
        if room > length:
            self._rests[start + length] = room - length
        return start

    def _expand(self, size: int, pool: int) -> MemoryBlock | None:
        """Room in the lowest gap of an expandable segment that is large enough, with the free block before
        it; None where the device has no memory to put there."""
        for address in sorted(self._unmapped[pool]):
            block = self._unmapped[pool][address]
            if block.previous is not None and block.previous.free:
                block = block.previous
            if self._room_from(block) >= size:
                break
        else:
            self._lowest -= _ROOM
            block = MemoryBlock(self._lowest, _ROOM, pool, free=True, mapped=False)
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
    def _room_from(block: MemoryBlock | None) -> int:
        """Bytes from the start of a free block to the next one in use."""
        room = 0
        while block is not None and block.free:
            room, block = room + block.size, block.next
        return room

    def _map(self, block: MemoryBlock, size: int) -> MemoryBlock | None:
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

    def _unmap(self, block: MemoryBlock) -> None:
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
    """Give the bytes by which an expandable segment grows."""
    return _LARGE_SEGMENT if pool else _SMALL_SEGMENT
