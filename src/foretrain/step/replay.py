"""Replays the buffers of a step through the allocator: what it hands out and holds at the peak."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from foretrain.allocator_settings import AllocatorSettings
from foretrain.graph import CATEGORIES, Buffer
from foretrain.step.allocator import CachingAllocator, MemoryBlock, OutOfMemory

MOST_STEPS = 5
"""That are played for the cache to settle; most do in the second."""
_CAPACITY_STEP = 0.01
"""Share of the memory to which the smallest device is found."""


Lasting = tuple[int, int]
"""The call that first needs something which then stays, -1 for before the first, and its bytes."""


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
    lasting: Sequence[Lasting] = (),
    *,
    update: int = -1,
    settings: AllocatorSettings | None = None,
    capacity_bytes: float = math.inf,
    steps: int = MOST_STEPS,
) -> Replay:
    """Play the buffers of up to ``steps`` steps, each of which finds the cache as the one before left it,
    until one needs nothing more of the device; the peak of the last. Raises OutOfMemory where that has too
    little.

    Buffers are born and die at calls, each of which needs its workspace while it runs. What the first step
    makes and no step lets go, it makes where it comes to it, between its tensors: ``lasting`` workspaces of
    libraries, and the optimizer's state at the call of the first ``update``.
    """
    allocator = CachingAllocator(settings, capacity_bytes=capacity_bytes)
    held, made = dict[int, MemoryBlock](), dict[int, list[int]]()
    for number, buffer in enumerate(buffers):
        if buffer.born < 0 and buffer.size_bytes:
            if buffer.category == "optimizer_state" and update >= 0:
                made.setdefault(update, []).append(buffer.size_bytes)
            else:
                held[number] = allocator.allocate(buffer.size_bytes)
    for call, size in lasting:
        made.setdefault(call, []).append(size)
    events, inherited = _events(buffers, len(workspaces)), _inherited(buffers, len(workspaces))
    peak, left = -1, dict[int, MemoryBlock]()
    for size in made.pop(-1, ()):
        allocator.allocate(size)
    for number in range(steps):
        allocator.peak_allocated, allocator.returns = allocator.allocated, 0
        before = allocator.reserved
        peak = _play(buffers, events, inherited, workspaces, allocator, held, left, made)
        made = {}
        if number and allocator.reserved == before:
            break
    beside = sum(size for _, size in lasting) + (workspaces[peak] if peak >= 0 else 0)
    return Replay(
        allocated_bytes=allocator.peak_allocated,
        reserved_bytes=allocator.reserved,
        peak=peak,
        by_category=_categories(buffers, len(workspaces), peak, beside, allocator.peak_allocated),
        returns=allocator.returns,
    )


def least_capacity(play: Callable[..., Replay], free: Replay) -> int:
    """The memory of the smallest device on which the steps run, to a hundredth; ``play`` is their replay with
    given ``capacity_bytes``, ``free`` that on a device without bounds.

    Where room is short, torch returns what is cached: tensors and what lies between them must fit.
    """
    low, high = free.allocated_bytes, free.reserved_bytes
    while high - low > _CAPACITY_STEP * high:
        middle = (low + high) // 2
        try:
            play(capacity_bytes=middle)
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
    held: dict[int, MemoryBlock],
    left: dict[int, MemoryBlock],
    made: Mapping[int, list[int]],
) -> int:
    """Play one step, which finds what the one before ``left`` and begins calls with what is ``made`` for
    good; the call at which the peak was reached."""
    sizes = [buffer.size_bytes for buffer in buffers]
    allocate, release = allocator.allocate, allocator.release
    peak = -1
    for index, (born, dying) in enumerate(events):
        for size in made.get(index, ()):
            allocate(size)
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
