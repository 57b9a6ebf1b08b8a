"""Memory: the allocator keeps its books like torch's, and a step's peak is what is alive at its worst
moment."""

from __future__ import annotations

import functools
import itertools
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from foretrain.allocator_settings import AllocatorSettings
from foretrain.graph import CATEGORIES, Buffer
from foretrain.step.allocator import CachingAllocator, OutOfMemory
from foretrain.step.replay import Replay, least_capacity, replay

DATA = Path(__file__).parents[1] / "data"
KIB, MIB = 1 << 10, 1 << 20
SIZES = (
    st.integers(1, 4 * KIB)
    | st.integers(1, 30 * MIB)
    | st.sampled_from([512, MIB, MIB + 1, 10 * MIB - 512, 10 * MIB, 20 * MIB])
)
ACTIONS = st.lists(SIZES | st.integers(0, 50).map(lambda position: -position), max_size=40)
"""Above zero: allocate so many bytes; below: release the live block at that position."""


EXPANDABLE = AllocatorSettings(expandable_segments=True)


def play(actions: list[int], settings: AllocatorSettings | None = None) -> tuple[CachingAllocator, list[Any]]:
    allocator, live = CachingAllocator(settings), []
    for action in actions:
        if action > 0:
            live.append(allocator.allocate(action))
        elif live:
            allocator.release(live.pop(-action % len(live)))
    return allocator, live


def free_blocks(allocator: CachingAllocator) -> list[Any]:
    return list(allocator._free_at.values())


# The allocator


@given(ACTIONS)
def test_allocated_is_what_live_blocks_hold_and_never_more_than_reserved(actions: list[int]) -> None:
    allocator, live = play(actions)
    assert allocator.allocated == sum(block.size for block in live)
    assert allocator.allocated <= allocator.peak_allocated <= allocator.reserved
    assert allocator.allocated + sum(block.size for block in free_blocks(allocator)) == allocator.reserved


@given(ACTIONS)
def test_blocks_never_overlap(actions: list[int]) -> None:
    allocator, live = play(actions)
    blocks = sorted([*live, *free_blocks(allocator)], key=lambda block: block.address)
    for one, other in itertools.pairwise(blocks):
        assert one.address + one.size <= other.address


@given(ACTIONS)
def test_releasing_everything_leaves_whole_segments(actions: list[int]) -> None:
    allocator, live = play(actions)
    for block in live:
        allocator.release(block)
    assert allocator.allocated == 0
    blocks = free_blocks(allocator)
    assert all(block.previous is None and block.next is None for block in blocks)
    assert sum(block.size for block in blocks) == allocator.reserved
    assert all(block.size % (2 * MIB) == 0 for block in blocks)


@given(ACTIONS)
def test_free_neighbours_are_merged_and_free_lists_sorted(actions: list[int]) -> None:
    allocator, _ = play(actions)
    assert all(block.free and not (block.next and block.next.free) for block in free_blocks(allocator))
    for pool in allocator._free:
        assert pool == sorted(pool)
        assert all(allocator._free_at[address].size == size for size, address in pool)


@given(ACTIONS)
def test_an_expandable_segment_keeps_the_same_books_in_whole_granules(actions: list[int]) -> None:
    allocator, live = play(actions, EXPANDABLE)
    assert allocator.allocated == sum(block.size for block in live) <= allocator.peak_allocated
    assert allocator.allocated + sum(block.size for block in free_blocks(allocator)) == allocator.reserved
    blocks = sorted([*live, *free_blocks(allocator)], key=lambda block: block.address)
    for one, other in itertools.pairwise(blocks):
        assert one.address + one.size <= other.address
        assert not (one.free and one.next is other and other.free)
    for block in live:
        allocator.release(block)
    assert len(free_blocks(allocator)) <= 2  # one for each pool
    assert all(block.size % (20 * MIB if block.pool else 2 * MIB) == 0 for block in free_blocks(allocator))
    allocator._return_cache()
    assert allocator.reserved == 0


def test_an_expandable_segment_grows_at_its_end_and_serves_any_size() -> None:
    """What three segments of 30, 12 and 20 MiB could not: a request of all they have together."""
    allocator = CachingAllocator(EXPANDABLE)
    blocks = [allocator.allocate(size * MIB) for size in (30, 12, 20)]
    assert allocator.reserved == 80 * MIB
    assert blocks[2].address == 42 * MIB + blocks[0].address
    for block in blocks:
        allocator.release(block)
    allocator.allocate(75 * MIB)
    assert allocator.reserved == 80 * MIB
    usual = CachingAllocator()
    for block in [usual.allocate(size * MIB) for size in (30, 12, 20)]:
        usual.release(block)
    usual.allocate(60 * MIB)
    assert usual.reserved == 122 * MIB


def test_the_end_of_an_expandable_segment_is_taken_last() -> None:
    """A hole of 19 MiB is filled before the 5 MiB that are left at the end, which can grow."""
    allocator = CachingAllocator(EXPANDABLE)
    first, _, _ = (allocator.allocate(size * MIB) for size in (19, 16, 20))
    allocator.release(first)
    assert allocator.reserved == 60 * MIB
    assert allocator.allocate(4 * MIB).address == first.address


def test_a_full_device_gets_back_what_is_free_whole() -> None:
    allocator = CachingAllocator(capacity_bytes=70 * MIB)
    small, large = allocator.allocate(20 * MIB), allocator.allocate(40 * MIB)
    allocator.release(large)
    allocator.allocate(44 * MIB)
    assert (allocator.reserved, allocator.returns) == (64 * MIB, 1)
    with pytest.raises(OutOfMemory):
        allocator.allocate(20 * MIB)
    allocator.release(small)
    assert allocator.allocate(20 * MIB).size == 20 * MIB


def test_a_full_device_gets_back_the_granules_of_an_expandable_segment() -> None:
    allocator = CachingAllocator(EXPANDABLE, capacity_bytes=80 * MIB)
    first, second, _ = (allocator.allocate(size * MIB) for size in (30, 10, 20))
    allocator.release(first)
    assert allocator.allocate(36 * MIB).address == second.address + 30 * MIB
    assert (allocator.reserved, allocator.returns) == (80 * MIB, 1)


def test_of_blocks_of_one_size_the_one_of_the_youngest_segment_is_taken() -> None:
    """The driver puts each new region below the others, and torch takes the lowest address."""
    allocator = CachingAllocator()
    blocks = [allocator.allocate(100 * MIB) for _ in range(3)]
    assert blocks[0].address > blocks[1].address > blocks[2].address
    small = allocator.allocate(20 * MIB)
    assert small.address == blocks[2].address + 100 * MIB  # in what is left of a region of 128 MiB
    for block in blocks:
        allocator.release(block)
    assert allocator.allocate(100 * MIB).address == blocks[2].address


@pytest.mark.parametrize(
    ("file", "settings", "reserved"), [("", None, 9158), ("_expandable", EXPANDABLE, 8444)]
)
def test_the_events_of_a_training_are_replayed_to_the_byte(
    file: str, settings: AllocatorSettings | None, reserved: int
) -> None:
    events = np.load(DATA / f"h200_events{file}.npz")
    names = events["actions"].tolist()
    allocator, live, segments = CachingAllocator(settings), {}, 0
    for action, address, size in zip(
        *(events[name].tolist() for name in ("action", "address", "size")), strict=True
    ):
        if names[action] == "alloc":
            live[address] = allocator.allocate(size)
        elif names[action] == "free_completed":
            allocator.release(live.pop(address))
        elif names[action] in ("segment_alloc", "segment_map"):
            segments += size
    assert allocator.reserved == segments == reserved * MIB


def test_beyond_the_limit_blocks_are_not_split() -> None:
    limited = CachingAllocator(AllocatorSettings.read("max_split_size_mb:40"))
    limited.release(limited.allocate(60 * MIB))
    assert limited.allocate(10 * MIB).size == 10 * MIB
    assert limited.allocate(50 * MIB).size == 60 * MIB
    assert limited.reserved == 70 * MIB


def test_sizes_are_rounded_to_parts_of_powers_of_two() -> None:
    allocator = CachingAllocator(AllocatorSettings.read("roundup_power2_divisions:4"))
    assert [allocator.allocate(size).size for size in (512, 1200 * KIB, 1280 * KIB)] == [
        512, 1280 * KIB, 1280 * KIB,
    ]  # fmt: skip


def test_a_step_can_do_with_less_than_it_reserves_where_the_device_has_no_more() -> None:
    """Two segments that never serve at once: one is returned for the other, in each step."""
    sizes = (100, 110, 55, 55)  # MiB; the last two are alive together
    buffers = [Buffer(size * MIB, "temporaries", min(n, 2), min(n, 2)) for n, size in enumerate(sizes)]
    free = replay(buffers, [0, 0, 0])
    assert (free.reserved_bytes, free.returns) == (210 * MIB, 0)
    least = least_capacity(functools.partial(replay, buffers, [0, 0, 0]), free)
    assert 110 * MIB <= least <= 112 * MIB
    expandable = replay(buffers, [0, 0, 0], settings=EXPANDABLE)
    assert expandable.reserved_bytes == 120 * MIB


def test_a_device_that_is_full_in_each_step_is_told() -> None:
    """Many small tensors, then a large one: the pool of either is returned for that of the other."""
    buffers = [Buffer(MIB, "temporaries", 0, 0)] * 40 + [Buffer(60 * MIB, "temporaries", 1, 1)]
    assert replay(buffers, [0, 0]).reserved_bytes == 100 * MIB
    full = replay(buffers, [0, 0], capacity_bytes=70 * MIB)
    assert (full.reserved_bytes, full.returns) == (60 * MIB, 2)
    with pytest.raises(OutOfMemory):
        replay(buffers, [0, 0], capacity_bytes=59 * MIB)


@given(st.integers(0, MIB))
def test_small_requests_are_rounded_up_to_512(size: int) -> None:
    block = CachingAllocator().allocate(size)
    assert block.size == max(512, -(-size // 512) * 512)


@pytest.mark.parametrize(
    ("size", "segment"),
    [
        (1, 2 * MIB),
        (MIB, 2 * MIB),
        (MIB + 1, 20 * MIB),
        (10 * MIB - 512, 20 * MIB),
        (10 * MIB, 10 * MIB),
        (10 * MIB + 1, 12 * MIB),
        (33 * MIB, 34 * MIB),
    ],
)
def test_a_segment_has_the_size_of_its_pool(size: int, segment: int) -> None:
    allocator = CachingAllocator()
    allocator.allocate(size)
    assert allocator.reserved == segment


def test_a_small_remainder_of_a_large_block_is_not_split_off() -> None:
    allocator = CachingAllocator()
    assert allocator.allocate(11 * MIB).size == 12 * MIB
    assert free_blocks(allocator) == []
    assert allocator.allocate(11 * MIB - 512).size == 11 * MIB - 512
    assert [block.size for block in free_blocks(allocator)] == [MIB + 512]


def test_a_large_remainder_is_split_off_and_used() -> None:
    allocator = CachingAllocator()
    first = allocator.allocate(2 * MIB)
    second = allocator.allocate(5 * MIB)
    assert (first.size, second.size, allocator.reserved) == (2 * MIB, 5 * MIB, 20 * MIB)
    assert second.address == first.address + 2 * MIB


def test_every_remainder_of_a_small_block_is_split_off() -> None:
    allocator = CachingAllocator()
    allocator.allocate(MIB)
    assert allocator.allocate(MIB - 512).size == MIB - 512
    assert [block.size for block in free_blocks(allocator)] == [512]


def test_the_smallest_block_that_fits_is_taken() -> None:
    allocator = CachingAllocator()
    blocks = [allocator.allocate(size * MIB) for size in (30, 12, 20)]
    for block in blocks:
        allocator.release(block)
    assert allocator.allocate(11 * MIB + 1) is blocks[1]
    assert allocator.reserved == 62 * MIB


def test_small_requests_never_take_from_the_large_pool() -> None:
    allocator = CachingAllocator()
    allocator.release(allocator.allocate(20 * MIB))
    allocator.allocate(512)
    assert allocator.reserved == 22 * MIB


def test_released_memory_is_used_again() -> None:
    allocator = CachingAllocator()
    for _ in range(5):
        allocator.release(allocator.allocate(40 * MIB))
    assert allocator.reserved == 40 * MIB


# A step


def play_step(*buffers: Buffer, calls: int = 4, workspace: int = 0, steps: int = 2) -> Replay:
    return replay(buffers, [workspace] * calls, steps=steps)


WEIGHTS = Buffer(512, "weights", -1, 4)


def test_the_peak_of_a_step_by_hand() -> None:
    profile = play_step(
        WEIGHTS,
        Buffer(1024, "activations", 0, 3),
        Buffer(2048, "temporaries", 1, 1),
        Buffer(512, "gradients", 2, 4),
    )
    assert (profile.allocated_bytes, profile.peak, profile.reserved_bytes) == (
        512 + 1024 + 2048,
        1,
        2 * MIB,
    )
    expected = dict.fromkeys(CATEGORIES, 0) | {
        "weights": 512,
        "activations": 1024,
        "temporaries": 2048,
        "workspaces": 0,
        "rounding": 0,
    }
    assert profile.by_category == expected


def test_a_dying_buffer_and_a_new_one_share_an_op() -> None:
    profile = play_step(Buffer(512, "temporaries", 0, 1), Buffer(512, "temporaries", 1, 2))
    assert profile.allocated_bytes == 1024


def test_buffers_that_never_meet_share_their_memory() -> None:
    profile = play_step(Buffer(512, "temporaries", 0, 1), Buffer(512, "temporaries", 2, 3))
    assert profile.allocated_bytes == 512


def test_rounding_is_told_apart() -> None:
    profile = play_step(Buffer(100, "weights", -1, 4), Buffer(600, "activations", 0, 1))
    assert profile.allocated_bytes == 512 + 1024
    assert profile.by_category["rounding"] == 412 + 424


def test_workspaces_are_held_while_their_op_runs_and_libraries_keep_theirs() -> None:
    profile = replay((WEIGHTS, Buffer(512, "activations", 2, 3)), (0, 4096, 0, 0), ((0, 1024), (1, 2048)))
    assert (profile.allocated_bytes, profile.peak) == (512 + 1024 + 2048 + 4096, 1)
    assert profile.by_category["workspaces"] == 1024 + 2048 + 4096
    assert profile.by_category["activations"] == 0


def test_the_state_of_an_optimizer_is_made_by_the_first_update_among_what_is_cached() -> None:
    """It splits the segment that activations will want again."""
    state, activation = Buffer(30 * MIB, "optimizer_state", -1, 4), Buffer(100 * MIB, "activations", 0, 1)
    assert replay((state, activation), [0] * 4).reserved_bytes == 130 * MIB
    late = replay((state, activation), [0] * 4, update=3)
    assert (late.allocated_bytes, late.reserved_bytes) == (130 * MIB, 200 * MIB)
    assert late.by_category["optimizer_state"] == 30 * MIB


def test_an_empty_step_holds_what_was_there_before() -> None:
    profile = play_step(Buffer(512, "weights", -1, 0), calls=0)
    assert (profile.allocated_bytes, profile.peak) == (512, -1)


def test_empty_buffers_take_nothing() -> None:
    assert play_step(WEIGHTS, Buffer(0, "activations", 0, 3)).allocated_bytes == 512


@st.composite
def buffers(draw: st.DrawFn, largest: int = 40 * MIB) -> list[Buffer]:
    result = []
    for _ in range(draw(st.integers(1, 8))):
        born = draw(st.integers(-1, 5))
        dies = 6 if born < 0 else draw(st.integers(born, 6))
        result.append(Buffer(draw(st.integers(0, largest)), draw(st.sampled_from(CATEGORIES)), born, dies))
    return result


@given(buffers(), st.lists(st.integers(1, 40 * MIB), max_size=2).map(tuple), st.integers(0, 40 * MIB))
def test_categories_add_up_and_the_peak_is_at_least_what_is_alive(
    parts: list[Buffer], kept: tuple[int, ...], workspace: int
) -> None:
    profile = replay(parts, [workspace] * 6, [(number, size) for number, size in enumerate(kept)])
    assert sum(profile.by_category.values()) == profile.allocated_bytes <= profile.reserved_bytes
    assert all(size >= 0 for size in profile.by_category.values())
    alive = [sum(part.size_bytes for part in parts if part.born <= index <= part.dies) for index in range(6)]
    assert profile.allocated_bytes >= max(alive) + workspace + sum(kept)


@given(buffers(largest=MIB // 2), st.integers(0, 7), st.integers(1, MIB // 2), st.integers(0, MIB))
def test_more_bytes_never_need_less_memory(
    parts: list[Buffer], which: int, more: int, workspace: int
) -> None:
    which %= len(parts)
    larger = [
        replace(part, size_bytes=part.size_bytes + more) if i == which else part
        for i, part in enumerate(parts)
    ]
    before, after = (play_step(*some, calls=6, workspace=workspace) for some in (parts, larger))
    assert after.allocated_bytes >= before.allocated_bytes


@given(buffers(), st.integers(2, 4))
def test_once_warm_more_steps_change_nothing(parts: list[Buffer], steps: int) -> None:
    few, many = (play_step(*parts, calls=6, steps=count) for count in (steps, steps + 1))
    assert many.reserved_bytes >= few.reserved_bytes
    assert many.allocated_bytes >= sum(part.size_bytes for part in parts if part.born < 0)
