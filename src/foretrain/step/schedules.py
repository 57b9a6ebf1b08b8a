"""Orders the passes of a pipeline: what each rank runs after what, where a chunk is in the model, and what is
held meanwhile."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from typing import Literal, NamedTuple

import numpy as np

from foretrain.errors import InputError
from foretrain.plan import Plan
from foretrain.step.spans import Index, Mask

FORWARD_ONLY = "forward"
"""The schedule of a pipeline that serves."""
SPLIT = ("zero-bubble", "zbv", "dualpipe")
"""Schedules in which the gradients of weights are a pass of their own, run where a rank would wait."""
BIDIRECTIONAL = "dualpipe"
_FOLDED = ("zbv", "dualpipe")
"""Schedules whose ranks have two chunks, one on the way down the pipeline and one on the way up."""

Kind = Literal["F", "B", "I", "W"]
KINDS: tuple[Kind, ...] = ("F", "B", "I", "W")
_HOLDS: dict[Kind, int] = {"F": 1, "B": -1, "I": 0, "W": -1}
"""Micro-batches whose activations a rank holds more after a task."""


class Task(NamedTuple):
    """One pass of a rank: forward, backward, or of a backward pass the gradients of inputs or of weights."""

    kind: Kind
    chunk: int
    micro_batch: int
    beside: bool = False
    """Runs together with the task before it, each hiding the communication of the other."""

    def named(self, chunks: int) -> str:
        return f"{self.kind}{self.micro_batch}" + (f".{self.chunk}" if chunks > 1 else "")


class ChunkPlace(NamedTuple):
    """Says where a chunk is in the model, and in which copy of the model."""

    copy: int
    number: int


def chunks_of(plan: Plan) -> int | None:
    """Chunks on each rank where the schedule alone says so."""
    if plan.schedule in _FOLDED:
        return 2
    return 1 if plan.schedule in ("gpipe", "1f1b") or plan.pipeline == 1 else None


def model_copies(plan: Plan) -> int:
    """Count how often the model lies in the pipeline: DualPipe has a copy for each direction."""
    return 2 if plan.schedule == BIDIRECTIONAL and plan.pipeline > 1 else 1


def check(plan: Plan, micro_batches: int, *, trains: bool) -> None:
    """Refuse what a schedule cannot run."""
    if plan.schedule in SPLIT and plan.pipeline > 1 and not trains:
        raise InputError(
            f"plan.schedule: {plan.schedule!r} splits backward passes, and inference has none; leave it out"
        )
    if model_copies(plan) == 1:
        return
    if plan.pipeline % 2:
        raise InputError(
            f"plan.pipeline: {plan.pipeline} stages are odd; schedule = 'dualpipe' needs an even number"
        )
    least = 2 * plan.pipeline
    if micro_batches % 2 or micro_batches < least:
        raise InputError(
            f"plan.schedule: 'dualpipe' needs an even number of micro-batches, {least} or more for "
            f"{plan.pipeline} stages, not {micro_batches}"
        )


def place(schedule: str, stage: int, chunk: int, stages: int) -> ChunkPlace:
    """Tell where a chunk of a rank is: one after the other down the pipeline, or back up in the second chunk.

    >>> [place("zbv", stage, 1, 4).number for stage in range(4)]
    [7, 6, 5, 4]
    """
    if schedule == BIDIRECTIONAL:
        return ChunkPlace(chunk, stages - 1 - stage if chunk else stage)
    if schedule in _FOLDED and chunk:
        return ChunkPlace(0, 2 * stages - 1 - stage)
    return ChunkPlace(0, chunk * stages + stage)


class Order(NamedTuple):
    """The tasks of a rank in their order, column by column."""

    kind: Index
    """Places in ``KINDS``."""
    chunk: Index
    micro_batch: Index
    """Numbered in each copy of the model."""
    beside: Mask

    @property
    def tasks(self) -> Iterator[Task]:
        for kind, *which in zip(*(column.tolist() for column in self), strict=True):
            yield Task(KINDS[kind], *which)


@functools.lru_cache(maxsize=1024)
def order(schedule: str, stage: int, stages: int, chunks: int, micro_batches: int) -> Order:
    """The order in which a rank takes its tasks."""
    if schedule == "zbv":
        return _zbv(stage, stages, micro_batches)
    if schedule == BIDIRECTIONAL:
        return _dualpipe(stage, stages, micro_batches)
    return _one_by_one(schedule, stage, stages, chunks, micro_batches)


def _one_by_one(schedule: str, stage: int, stages: int, chunks: int, micro_batches: int) -> Order:
    """Order all forward passes first (gpipe, and all there is in inference), or one forward and one backward
    after a warm-up (Narayanan et al. 2021, arXiv 2104.04473).

    Zero bubble (ZB-H1 of Qi et al. 2023, arXiv 2401.10241) keeps that order for gradients of inputs; those of
    weights follow later by as many micro-batches as the rank has begun fewer than the first one, so that all
    ranks hold as much as the first.
    """
    tasks = micro_batches * chunks
    if schedule in ("gpipe", FORWARD_ONLY):
        warm_up = tasks
    elif chunks == 1:
        warm_up = min(tasks, stages - stage - 1)
    else:
        warm_up = min(tasks, (stages - stage - 1) * 2 + (chunks - 1) * stages)
    chunk, micro_batch = _interleaved(tasks, stages, chunks, micro_batches)
    split, back = schedule in SPLIT, chunks - 1 - chunk
    turns: list[tuple[Kind, int, Index]] = [("F", 0, chunk)]
    if schedule != FORWARD_ONLY:
        turns.append(("I" if split else "B", warm_up, back))
    if split:
        turns.append(("W", warm_up + stage, back))
    places = [3 * (np.arange(tasks) + later) + i for i, (_, later, _) in enumerate(turns)]
    ordered = np.argsort(np.concatenate(places))
    return Order(
        np.repeat([KINDS.index(kind) for kind, _, _ in turns], tasks)[ordered],
        np.concatenate([chunk for _, _, chunk in turns])[ordered],
        np.tile(micro_batch, len(turns))[ordered],
        np.zeros(len(ordered), dtype=np.bool_),
    )


def _interleaved(tasks: int, stages: int, chunks: int, micro_batches: int) -> tuple[Index, Index]:
    """The chunk and micro-batch of each pass: groups of as many micro-batches as stages go through a chunk
    together."""
    group, within = np.divmod(np.arange(tasks), stages * chunks)
    chunk, offset = np.divmod(within, np.minimum(stages, micro_batches - group * stages))
    return chunk, group * stages + offset


def _next(kind: Kind, chunk: int, *, beside: bool = False) -> int:
    """A task whose micro-batch is the next one of its kind and chunk, as a number."""
    return 4 * KINDS.index(kind) + 2 * chunk + beside


def _numbered(steps: Sequence[int]) -> Order:
    """The tasks of ``_next`` with their micro-batches. Gradients of inputs and whole backward passes are
    numbered together; those of weights follow the former in their order."""
    codes = np.array(steps)
    kind, chunk, beside = codes // 4, codes // 2 % 2, codes % 2 == 1
    is_forward, is_inputs, is_weights = (kind == KINDS.index(one) for one in ("F", "I", "W"))
    number = np.zeros(len(kind), dtype=np.int64)
    for own in (chunk == one for one in range(2)):
        for which in (np.flatnonzero(own & part) for part in (is_forward, ~is_forward & ~is_weights)):
            number[which] = np.arange(len(which))
        later = np.flatnonzero(own & is_weights)
        number[later] = number[np.flatnonzero(own & is_inputs)[: len(later)]]
    return Order(kind, chunk, number, beside)


def _zbv(stage: int, stages: int, micro_batches: int) -> Order:
    """The V schedule (Qi et al. 2024, arXiv 2405.15362, in the order of torch's ``ScheduleZBVZeroBubble``).

    It is made for as many micro-batches as fill it; of fewer, those that are there run in the same order.
    """
    whole, left = max(micro_batches, 2 * stages - 1), stages - stage
    ahead = 2 * stages - stage - 1
    (f0, i0, w0), (f1, i1, w1) = ((_next("F", i), _next("I", i), _next("W", i)) for i in (0, 1))
    steps = [f0] * (2 * left - 1) + [f1, f0] * stage + [f1, i1, w1] * left
    steps += [f0, i0, w0, f1, i1, w1] * (whole - ahead) + [i0, w0, f1, i1, w1] * (ahead - stages)
    steps += [i0, i1] * stage + [i0, w0] * left + [w1] * stage + [w0] * stage
    order = _numbered(steps)
    kept = order.micro_batch < micro_batches
    return Order(order.kind[kept], order.chunk[kept], order.micro_batch[kept], order.beside[kept])


def _dualpipe(stage: int, stages: int, micro_batches: int) -> Order:
    """The bidirectional schedule of DeepSeek-V3 (arXiv 2412.19437): half of the micro-batches enter at each
    end; in its middle part a forward pass of one direction runs beside a backward pass of the other."""
    half, near = stages // 2, min(stage, stages - 1 - stage)
    own = 0 if stage < half else 1
    other = 1 - own
    far = half - near - 1

    def both(forward: int, backward: int) -> list[int]:
        return [_next("F", forward), _next("B", backward, beside=True)]

    steps = [_next("F", own)] * (2 * far) + [_next("F", own), _next("F", other)] * (near + 1)
    steps += [_next("I", other), _next("W", other), _next("F", other)] * far
    steady = micro_batches // 2 - stages + near + 1
    if near == half - 1 and steady > 0:  # the middle ranks have nothing to overlap yet
        steps += [_next("F", own), _next("B", other), *both(other, own)]
        steady -= 1
    steps += [*both(own, other), *both(other, own)] * steady
    steps += [_next("B", other), *both(other, own)] * far
    chunks = [other, own] * (near + 1)  # of what is left, the second half is split
    whole, waiting = chunks[: near + 1], chunks[near + 1 :]
    steps += [_next("B", chunk) for chunk in whole] + [_next("I", chunk) for chunk in waiting]
    for _ in range(far):
        waiting.append(own)
        steps += [_next("W", waiting.pop(0)), _next("I", own)]
    steps += [_next("W", chunk) for chunk in waiting]
    return _numbered(steps)


# Memory


@functools.lru_cache(maxsize=4096)
def _held(schedule: str, stage: int, stages: int, chunks: int, micro_batches: int) -> tuple[int, ...]:
    tasks = order(schedule, stage, stages, chunks, micro_batches)
    changes = np.array([_HOLDS[kind] for kind in KINDS])[tasks.kind]
    fullest = int(np.argmax(np.cumsum(changes))) + 1
    return tuple(int(changes[:fullest][tasks.chunk[:fullest] == chunk].sum()) for chunk in range(chunks))


def in_flight(plan: Plan, stage: int, chunks: int, micro_batches: int) -> tuple[int, ...]:
    """Count, for each chunk of a stage, the micro-batches whose activations it holds when it holds most of
    them: from their forward pass until the gradients of the weights are there.

    >>> in_flight(Plan(pipeline=4), 0, 1, 8), in_flight(Plan(pipeline=4), 3, 1, 8)
    ((4,), (1,))
    >>> in_flight(Plan(pipeline=4, schedule="interleaved"), 3, 3, 8)
    (4, 4, 1)
    >>> in_flight(Plan(pipeline=4, schedule="zero-bubble"), 3, 1, 8)
    (4,)
    """
    if plan.pipeline == 1:
        return (1,) * chunks
    if plan.schedule == "gpipe":
        return (micro_batches,) * chunks
    shown = min(micro_batches, 4 * plan.pipeline)
    return _held(plan.schedule, stage, plan.pipeline, chunks, shown)
