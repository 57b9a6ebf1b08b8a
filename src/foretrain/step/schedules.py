"""Orders the passes of a pipeline: what each rank runs after what, where the input of a pass is made, and
what is held meanwhile."""

from __future__ import annotations

import functools
from collections.abc import Collection, Iterator, Sequence
from typing import Literal, NamedTuple

from foretrain.errors import InputError
from foretrain.plan import Plan

FORWARD_ONLY = "forward"
"""The schedule of a pipeline that serves."""
SPLIT = ("zero-bubble", "zbv", "dualpipe")
"""Schedules in which the gradients of weights are a pass of their own, run where a rank would wait."""
BIDIRECTIONAL = "dualpipe"
_FOLDED = ("zbv", "dualpipe")
"""Schedules whose ranks have two chunks, one on the way down the pipeline and one on the way up."""

Kind = Literal["F", "B", "I", "W"]


class Task(NamedTuple):
    """One pass of a rank: forward, backward, or of a backward pass the gradients of inputs or of weights."""

    kind: Kind
    chunk: int
    micro_batch: int
    beside: bool = False
    """Runs together with the task before it, each hiding the communication of the other."""

    def named(self, chunks: int) -> str:
        return f"{self.kind}{self.micro_batch}" + (f".{self.chunk}" if chunks > 1 else "")


class Place(NamedTuple):
    """Where a chunk is in the model, and in which copy of the model."""

    copy: int
    number: int


def chunks_of(plan: Plan) -> int | None:
    """Chunks on each rank where the schedule alone says so."""
    if plan.schedule in _FOLDED:
        return 2
    return 1 if plan.schedule in ("gpipe", "1f1b") or plan.pipeline == 1 else None


def model_copies(plan: Plan) -> int:
    """How often the model lies in the pipeline: DualPipe has a copy for each direction."""
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


def place(schedule: str, stage: int, chunk: int, stages: int) -> Place:
    """Where a chunk of a rank is: one after the other down the pipeline, or back up in the second chunk.

    >>> [place("zbv", stage, 1, 4).number for stage in range(4)]
    [7, 6, 5, 4]
    """
    if schedule == BIDIRECTIONAL:
        return Place(chunk, stages - 1 - stage if chunk else stage)
    if schedule in _FOLDED and chunk:
        return Place(0, 2 * stages - 1 - stage)
    return Place(0, chunk * stages + stage)


@functools.lru_cache(maxsize=256)
def order(schedule: str, stage: int, stages: int, chunks: int, micro_batches: int) -> tuple[Task, ...]:
    """The order in which a rank takes its tasks; micro-batches are numbered in each copy of the model."""
    if schedule == "zbv":
        return tuple(_zbv(stage, stages, micro_batches))
    if schedule == BIDIRECTIONAL:
        return tuple(_dualpipe(stage, stages, micro_batches))
    return tuple(_one_by_one(schedule, stage, stages, chunks, micro_batches))


def _one_by_one(schedule: str, stage: int, stages: int, chunks: int, micro_batches: int) -> Iterator[Task]:
    """All forward passes first (gpipe, and all there is in inference), or one forward and one backward after
    a warm-up (Narayanan et al. 2021, arXiv 2104.04473).

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
    split, postponed = schedule in SPLIT, 0
    for i in range(tasks if schedule == FORWARD_ONLY else tasks + warm_up):
        if i < tasks:
            yield Task("F", *_interleaved(i, stages, chunks, micro_batches))
        done = i - warm_up
        if done < 0:
            continue
        yield _back(done, stages, chunks, micro_batches, "I" if split else "B")
        if split and done - postponed >= stage:
            yield _back(postponed, stages, chunks, micro_batches, "W")
            postponed += 1
    for i in range(postponed, tasks if split else 0):
        yield _back(i, stages, chunks, micro_batches, "W")


def _back(i: int, stages: int, chunks: int, micro_batches: int, kind: Kind) -> Task:
    chunk, micro_batch = _interleaved(i, stages, chunks, micro_batches)
    return Task(kind, chunks - 1 - chunk, micro_batch)


def _interleaved(i: int, stages: int, chunks: int, micro_batches: int) -> tuple[int, int]:
    """The chunk and micro-batch of the i-th pass: groups of as many micro-batches as stages go through a
    chunk together."""
    group, within = divmod(i, stages * chunks)
    size = min(stages, micro_batches - group * stages)
    chunk, offset = divmod(within, size)
    return chunk, group * stages + offset


class _Counter:
    """Numbers the micro-batches of each kind of task and chunk as they come."""

    def __init__(self) -> None:
        self._next: dict[tuple[Kind, int], int] = {}

    def task(self, kind: Kind, chunk: int, *, beside: bool = False) -> Task:
        number = self.begun(kind, chunk)
        self._next[kind, chunk] = number + 1
        return Task(kind, chunk, number, beside)

    def begun(self, kind: Kind, chunk: int) -> int:
        return self._next.get((kind, chunk), 0)


def _zbv(stage: int, stages: int, micro_batches: int) -> Iterator[Task]:
    """The V schedule (Qi et al. 2024, arXiv 2405.15362, in the order of torch's ``ScheduleZBVZeroBubble``).

    It is made for as many micro-batches as fill it; of fewer, those that are there run in the same order.
    """
    whole, count = max(micro_batches, 2 * stages - 1), _Counter()
    tasks = [count.task("F", 0) for _ in range(2 * (stages - stage) - 1)]
    for _ in range(stage):
        tasks += [count.task("F", 1), count.task("F", 0)]
    for _ in range(stages - stage):
        tasks += [count.task("F", 1), count.task("I", 1), count.task("W", 1)]
    while count.begun("F", 1) < whole:
        if count.begun("F", 0) < whole:
            tasks.append(count.task("F", 0))
        tasks += [count.task("I", 0), count.task("W", 0)]
        tasks += [count.task("F", 1), count.task("I", 1), count.task("W", 1)]
    for _ in range(stage):
        tasks += [count.task("I", 0), count.task("I", 1)]
    for _ in range(stages - stage):
        tasks += [count.task("I", 0), count.task("W", 0)]
    for chunk in (1, 0):
        tasks += [count.task("W", chunk) for _ in range(count.begun("I", chunk) - count.begun("W", chunk))]
    return (task for task in tasks if task.micro_batch < micro_batches)


def _dualpipe(stage: int, stages: int, micro_batches: int) -> Iterator[Task]:
    """The bidirectional schedule of DeepSeek-V3 (arXiv 2412.19437): half of the micro-batches enter at each
    end; in its middle part a forward pass of one direction runs beside a backward pass of the other."""
    half, near = stages // 2, min(stage, stages - 1 - stage)
    own = 0 if stage < half else 1
    other = 1 - own
    far = half - near - 1
    count = _Counter()
    postponed: list[Task] = []

    def back(chunk: int, *, split: bool = False, beside: bool = False) -> Task:
        task = count.task("B", chunk, beside=beside)
        if split:
            postponed.append(task._replace(kind="W"))
            return task._replace(kind="I")
        return task

    def both(forward: int, backward: int) -> Iterator[Task]:
        yield count.task("F", forward)
        yield back(backward, beside=True)

    for _ in range(2 * far):
        yield count.task("F", own)
    for _ in range(near + 1):
        yield from (count.task("F", own), count.task("F", other))
    for _ in range(far):
        yield back(other, split=True)
        yield postponed.pop(0)
        yield count.task("F", other)
    for i in range(micro_batches // 2 - stages + near + 1):
        if i == 0 and near == half - 1:  # the middle ranks have nothing to overlap yet
            yield from (count.task("F", own), back(other))
        else:
            yield from both(own, other)
        yield from both(other, own)
    for _ in range(far):
        yield back(other)
        yield from both(other, own)
    split = False
    for i in range(near + 1):
        split = split or (i == (near + 1) // 2 and near % 2 == 1)
        yield back(other, split=split)
        split = split or (i == (near + 1) // 2 and near % 2 == 0)
        yield back(own, split=split)
    for _ in range(far):
        yield postponed.pop(0)
        yield back(own, split=True)
    yield from postponed


# All ranks together


class Turn(NamedTuple):
    """What a rank runs next: one task, or two of them together."""

    stage: int
    tasks: tuple[Task, ...]
    needs: tuple[tuple[int, int], ...]
    """Results that it waits for, by their number, and the message that brings each: from which place, or -1
    for none."""
    makes: tuple[tuple[int, int], ...]
    """Results that it makes, and the message that takes each away."""
    kind: str
    name: str


@functools.lru_cache(maxsize=64)
def program(schedule: str, stages: int, chunks: int, micro_batches: int) -> tuple[Turn, ...]:
    """The turns of all ranks, each behind those that it needs."""
    queues = [list(order(schedule, stage, stages, chunks, micro_batches)) for stage in range(stages)]
    route = _Route(schedule, stages, chunks)
    numbers: dict[_Result, int] = {}
    turns: list[Turn] = []
    position = [0] * stages
    waiting = True
    while waiting:
        waiting = False
        for stage, queue in enumerate(queues):
            while position[stage] < len(queue):
                at = position[stage]
                tasks = queue[at : at + 1 + (at + 1 < len(queue) and queue[at + 1].beside)]
                needed = [one for task in tasks if (one := route.before(stage, task)) is not None]
                if any(one not in numbers for one in needed):
                    break
                made = [one for task in tasks if (one := route.made(stage, task)) is not None]
                for one in made:
                    numbers[one] = len(numbers)
                turns.append(
                    Turn(
                        stage=stage,
                        tasks=tuple(tasks),
                        needs=tuple((numbers[one], route.message(one)) for one in needed),
                        makes=tuple((numbers[one], route.message(one)) for one in made),
                        kind="".join(task.kind for task in tasks),
                        name=" ".join(task.named(chunks) for task in tasks),
                    )
                )
                position[stage] += len(tasks)
                waiting = True
        waiting = waiting or _step_past(queues, position, numbers, route)
    return tuple(turns)


_Result = tuple[str, Place, int]
"""What others wait for: of a forward ("F") or a backward pass ("B"), at a place, of a micro-batch."""


class _Route:
    """The way of a micro-batch through the chunks of a pipeline."""

    def __init__(self, schedule: str, stages: int, chunks: int) -> None:
        self._places = [[place(schedule, i, chunk, stages) for chunk in range(chunks)] for i in range(stages)]
        self._stage_at = {one: stage for stage, own in enumerate(self._places) for one in own}

    def before(self, stage: int, task: Task) -> _Result | None:
        """The result that a task needs from another one."""
        here = self._places[stage][task.chunk]
        if task.kind == "W":
            return None
        if task.kind == "F":
            return ("F", Place(here.copy, here.number - 1), task.micro_batch) if here.number else None
        below = Place(here.copy, here.number + 1)
        return ("B", below, task.micro_batch) if below in self._stage_at else ("F", here, task.micro_batch)

    def made(self, stage: int, task: Task) -> _Result | None:
        if task.kind == "W":
            return None
        return "F" if task.kind == "F" else "B", self._places[stage][task.chunk], task.micro_batch

    def message(self, result: _Result) -> int:
        """The place between which and the next one a result travels; -1 where it stays."""
        direction, (copy, number), _ = result
        after, message = (number + 1, number) if direction == "F" else (number - 1, number - 1)
        reader = self._stage_at.get(Place(copy, after))
        return -1 if reader in (None, self._stage_at[result[1]]) else message


def _step_past(
    queues: Sequence[list[Task]], position: Sequence[int], there: Collection[_Result], route: _Route
) -> bool:
    """Where all stages wait for one another, a stage takes its first task that can run: the last group of
    micro-batches of an interleaved schedule may be smaller than the pipeline. Whether there was one."""
    for stage, queue in enumerate(queues):
        for number in range(position[stage], len(queue)):
            task = queue[number]
            needed = route.before(stage, task)
            if task.kind != "W" and (needed is None or needed in there):
                queue.insert(position[stage], queue.pop(number))
                return True
    return False


# Memory


@functools.lru_cache(maxsize=4096)
def _held(schedule: str, stage: int, stages: int, chunks: int, micro_batches: int) -> tuple[int, ...]:
    held, most = [0] * chunks, (0,) * chunks
    for task in order(schedule, stage, stages, chunks, micro_batches):
        held[task.chunk] += {"F": 1, "I": 0, "B": -1, "W": -1}[task.kind]
        if sum(held) > sum(most):
            most = tuple(held)
    return most


def in_flight(plan: Plan, stage: int, chunks: int, micro_batches: int) -> tuple[int, ...]:
    """For each chunk of a stage, the micro-batches whose activations it holds when it holds most of them:
    from their forward pass until the gradients of the weights are there.

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
