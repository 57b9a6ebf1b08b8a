"""Puts the tasks of all ranks of a pipeline into one order, each behind those whose results it needs."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from foretrain.step.schedules import KINDS, Order, Place, order, place

PAIR = "FB"
"""A forward and a backward pass that run together."""
TURNS = (*KINDS, PAIR)
NOTHING = -1
"""The message of what stays on its rank, and the time of what takes none: the last one of a list."""


class Turn(NamedTuple):
    """What a rank runs next."""

    stage: int
    lasting: int
    """Its time, by stage, kind of turn and chunk (``time_number``); ``NOTHING`` where it only waits."""
    behind: int
    """The turn that makes what it needs, numbered from 1; 0 for none."""
    brought: int
    """The message that brings it: from which place of the model."""
    sent: int
    """The message that takes away what it makes."""


class Program(NamedTuple):
    """The turns of all ranks, and the task of its rank that each begins with, by its place in the rank's
    order; ``NOTHING`` for turns that only wait."""

    turns: tuple[Turn, ...]
    tasks: tuple[int, ...]


def time_number(stage: int, kind: int, chunk: int, chunks: int) -> int:
    """Which of the times of all stages that of a turn is."""
    return (stage * len(TURNS) + kind) * chunks + chunk


def named(schedule: str, stages: int, chunks: int, micro_batches: int) -> list[tuple[int, int, str]]:
    """The turns of a program that run something: number, stage and name."""
    turns, tasks = program(schedule, stages, chunks, micro_batches)
    orders = [list(order(schedule, i, stages, chunks, micro_batches).tasks) for i in range(stages)]
    found = []
    for number, (turn, at) in enumerate(zip(turns, tasks, strict=True)):
        if at != NOTHING:
            own = orders[turn.stage]
            together = own[at : at + 1 + (at + 1 < len(own) and own[at + 1].beside)]
            found.append((number, turn.stage, " ".join(task.named(chunks) for task in together)))
    return found


@functools.lru_cache(maxsize=64)
def program(schedule: str, stages: int, chunks: int, micro_batches: int) -> Program:
    """The turns of all ranks, each behind those that it needs."""
    route = _Route(schedule, stages, chunks, micro_batches)
    queues = [
        route.waiting(stage, order(schedule, stage, stages, chunks, micro_batches)) for stage in range(stages)
    ]
    made_by = [-1] * route.results
    made_by[route.none] = 0
    turns: list[Turn] = []
    tasks: list[int] = []
    position = [0] * stages
    waiting = True
    while waiting:
        waiting = False
        for stage, queue in enumerate(queues):
            first = at = position[stage]
            for at in range(first, len(queue)):
                needs, makes, also, lasting, brought, sent, task = queue[at]
                behind = made_by[needs]
                if behind < 0:
                    break
                turns.append(Turn(stage, lasting, behind, brought, sent))
                tasks.append(task)
                made_by[makes] = made_by[also] = len(turns)
            else:
                at = len(queue)
            position[stage] = at
            waiting = waiting or at > first
        waiting = waiting or _step_past(queues, position, made_by, route)
    return Program(tuple(turns), tuple(tasks))


class _Waiting(NamedTuple):
    """A turn before its place in the program is known."""

    needs: int
    makes: int
    also: int
    """The second result of a pair."""
    lasting: int
    brought: int
    sent: int
    task: int


class _Route:
    """The way of a micro-batch through the chunks of a pipeline. Results, of forward and then of backward
    passes, are numbered by copy of the model, place in it and micro-batch."""

    def __init__(self, schedule: str, stages: int, chunks: int, micro_batches: int) -> None:
        self._places = [[place(schedule, i, chunk, stages) for chunk in range(chunks)] for i in range(stages)]
        self._stage_at = {one: stage for stage, own in enumerate(self._places) for one in own}
        self._micro_batches, self._chunks = micro_batches, chunks
        self._length = 1 + max(one.number for one in self._stage_at)
        copies = 1 + max(one.copy for one in self._stage_at)
        self._backward = copies * self._length * micro_batches
        self.none = 2 * self._backward
        """What a task needs that needs nothing."""
        self.nobody = self.none + 1
        """What a task makes that nobody waits for."""
        self.results = self.none + 2

    def waiting(self, stage: int, tasks: Order) -> list[_Waiting]:
        """The turns of a rank in its order."""
        kind, chunk, micro_batch, beside = tasks
        forward, weights = kind == KINDS.index("F"), kind == KINDS.index("W")
        links = [self._links(one) for one in self._places[stage]]
        ahead, back = (np.array([link[i] for link in links]) for i in (0, 1))
        needs, brought, makes, sent = np.where(forward, ahead[chunk].T, back[chunk].T)
        needs = np.where((needs == self.none) | weights, self.none, needs + micro_batch)
        makes = np.where(weights, self.nobody, makes + micro_batch)
        brought, sent = (np.where(weights, NOTHING, message) for message in (brought, sent))
        lasting = time_number(stage, 0, 0, self._chunks) + kind * self._chunks + chunk
        columns = (
            needs,
            makes,
            np.full(len(kind), self.nobody),
            lasting,
            brought,
            sent,
            np.arange(len(kind)),
        )
        found = list(map(_Waiting._make, zip(*(column.tolist() for column in columns), strict=True)))
        return self._paired(found, stage, beside.tolist()) if beside.any() else found

    def _paired(self, turns: Sequence[_Waiting], stage: int, beside: Sequence[bool]) -> list[_Waiting]:
        """Two that run together as one turn: before it, the rank waits for what the second one needs; behind
        it, where sending holds it up, for what that has made."""
        found: list[_Waiting] = []
        idle = _Waiting(self.none, self.nobody, self.nobody, NOTHING, NOTHING, NOTHING, NOTHING)
        for turn, runs_beside in zip(turns, beside, strict=True):
            if not runs_beside:
                found.append(turn)
                continue
            first = found.pop()
            chunk = first.lasting % self._chunks
            lasting = time_number(stage, TURNS.index(PAIR), chunk, self._chunks)
            found.append(idle._replace(needs=turn.needs, brought=turn.brought))
            found.append(first._replace(also=turn.makes, lasting=lasting))
            found.append(idle._replace(sent=turn.sent))
        return found

    def _links(self, here: Place) -> tuple[tuple[int, int, int, int], tuple[int, int, int, int]]:
        """Of forward and of backward passes at a place: the result that they need, the message that brings
        it, the one that they make, and the message that takes it away."""
        above, below = (Place(here.copy, here.number + by) for by in (-1, 1))
        made, made_back = self._result(here), self._backward + self._result(here)
        up, down = self._message(here, above), self._message(here, below)
        first = self._result(above) if above in self._stage_at else self.none
        last = self._backward + self._result(below) if below in self._stage_at else made
        return (first, up, made, down), (last, down, made_back, up)

    def _result(self, here: Place) -> int:
        return (here.copy * self._length + here.number) * self._micro_batches

    def _message(self, one: Place, other: Place) -> int:
        """Between two places, numbered by the first of them; none inside a rank and at the ends."""
        apart = self._stage_at.get(other) not in (None, self._stage_at[one])
        return min(one.number, other.number) if apart else NOTHING


def _step_past(
    queues: Sequence[list[_Waiting]], position: Sequence[int], made_by: Sequence[int], route: _Route
) -> bool:
    """Where all stages wait for one another, a stage takes its first task that can run: the last group of
    micro-batches of an interleaved schedule may be smaller than the pipeline. Whether there was one."""
    for stage, queue in enumerate(queues):
        for number in range(position[stage], len(queue)):
            turn = queue[number]
            if turn.makes != route.nobody and made_by[turn.needs] >= 0:
                queue.insert(position[stage], queue.pop(number))
                return True
    return False
