"""Memory: the allocator keeps its books like torch's, and a step's peak is what is alive at its worst
moment."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from foretrain.graph import CATEGORIES, Buffer
from foretrain.step.allocator import CachingAllocator, Replay, replay

KIB, MIB = 1 << 10, 1 << 20
SIZES = (
    st.integers(1, 4 * KIB)
    | st.integers(1, 30 * MIB)
    | st.sampled_from([512, MIB, MIB + 1, 10 * MIB - 512, 10 * MIB, 20 * MIB])
)
ACTIONS = st.lists(SIZES | st.integers(0, 50).map(lambda position: -position), max_size=40)
"""Above zero: allocate so many bytes; below: release the live block at that position."""


def play(actions: list[int]) -> tuple[CachingAllocator, list[Any]]:
    allocator, live = CachingAllocator(), []
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
    profile = replay((WEIGHTS, Buffer(512, "activations", 2, 3)), (0, 4096, 0, 0), (1024, 2048))
    assert (profile.allocated_bytes, profile.peak) == (512 + 1024 + 2048 + 4096, 1)
    assert profile.by_category["workspaces"] == 1024 + 2048 + 4096
    assert profile.by_category["activations"] == 0


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
    profile = replay(parts, [workspace] * 6, kept)
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
