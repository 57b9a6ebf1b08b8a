"""Puts the tasks of all ranks of a pipeline into one order, each behind those whose results it needs."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from foretrain.step.schedules import KINDS, ChunkPlace, Order, order, place
from foretrain.step.spans import Index

PAIR = "FB"
"""A forward and a backward pass that run together."""
TURNS = (*KINDS, PAIR)
NOTHING = -1
"""The message of what stays on its rank, and the time of what takes none: the last one of a list."""


class TurnOrder(NamedTuple):
    """The turns of all ranks in an order in which each is behind those that it needs, column by column."""

    stage: list[int]
    lasting: list[int]
    """The time of each, by stage, kind of turn and chunk (``time_number``); ``NOTHING`` where it only
    waits."""
    behind: list[int]
    """The turn that makes what it needs, numbered from 1; 0 for none."""
    brought: list[int]
    """The message that brings it: from which place of the model."""
    sent: list[int]
    """The message that takes away what it makes."""
    task: list[int]
    """The task of its rank that it begins with, by its place in the rank's order; ``NOTHING`` where it only
    waits."""


def time_number(stage: int, kind: int, chunk: int, chunks: int) -> int:
    """Number a turn among those of all stages."""
    return (stage * len(TURNS) + kind) * chunks + chunk


def named(schedule: str, stages: int, chunks: int, micro_batches: int) -> list[tuple[int, int, str]]:
    """The turns of a program that run something: number, stage and name."""
    turns = program(schedule, stages, chunks, micro_batches)
    orders = [list(order(schedule, i, stages, chunks, micro_batches).tasks) for i in range(stages)]
    rows = []
    for number, (stage, at) in enumerate(zip(turns.stage, turns.task, strict=True)):
        if at != NOTHING:
            own = orders[stage]
            together = own[at : at + 1 + (at + 1 < len(own) and own[at + 1].beside)]
            rows.append((number, stage, " ".join(task.named(chunks) for task in together)))
    return rows


@functools.lru_cache(maxsize=64)
def program(schedule: str, stages: int, chunks: int, micro_batches: int) -> TurnOrder:
    """The turns of all ranks, each behind those that it needs."""
    route = _MicroBatchRoute(schedule, stages, chunks, micro_batches)
    orders = (order(schedule, stage, stages, chunks, micro_batches) for stage in range(stages))
    waiting = [route.waiting(stage, tasks) for stage, tasks in enumerate(orders)]
    numbers, behind = _in_order(waiting, route)
    joined = (np.concatenate(column)[numbers].tolist() for column in zip(*waiting, strict=True))
    stage, _, _, _, lasting, brought, sent, task = joined
    return TurnOrder(stage, lasting, behind, brought, sent, task)


def _in_order(waiting: Sequence[_Waiting], route: _MicroBatchRoute) -> tuple[list[int], list[int]]:
    """The turns of all ranks, counted through rank by rank, as they come to run; and the one behind which
    each of them is."""
    made_by = [-1] * route.results
    made_by[route.none] = 0
    ran: list[int] = []
    behind: list[int] = []
    wanted = [[column.tolist() for column in (one.needs, one.makes, one.also)] for one in waiting]
    before = np.cumsum([0, *(len(one.needs) for one in waiting)]).tolist()
    queues = [list(range(len(one.needs))) for one in waiting]
    position = [0] * len(queues)
    moves = True
    while moves:
        moves = False
        for stage, (queue, (needs, makes, also)) in enumerate(zip(queues, wanted, strict=True)):
            first, begun = position[stage], before[stage]
            for own in queue[first:]:
                maker = made_by[needs[own]]
                if maker < 0:
                    break
                ran.append(begun + own)
                behind.append(maker)
                made_by[makes[own]] = made_by[also[own]] = len(ran)
                position[stage] += 1
            moves = moves or position[stage] > first
        moves = moves or _step_past(queues, position, wanted, made_by, route)
    return ran, behind


class _Waiting(NamedTuple):
    """The turns of a rank before their places in the program are known, column by column."""

    stage: Index
    needs: Index
    makes: Index
    also: Index
    """The second result of a pair."""
    lasting: Index
    brought: Index
    sent: Index
    task: Index


class _MicroBatchRoute:
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

    def waiting(self, stage: int, tasks: Order) -> _Waiting:
        """The turns of a rank in its order."""
        kind, chunk, micro_batch, beside = tasks
        forward, weights = kind == KINDS.index("F"), kind == KINDS.index("W")
        links = [self._links(one) for one in self._places[stage]]
        ahead, back = (np.array([link[i] for link in links]) for i in (0, 1))
        needs, brought, makes, sent = np.where(forward, ahead[chunk].T, back[chunk].T)
        unpaired = _Waiting(
            stage=np.full(len(kind), stage),
            needs=np.where((needs == self.none) | weights, self.none, needs + micro_batch),
            makes=np.where(weights, self.nobody, makes + micro_batch),
            also=np.full(len(kind), self.nobody),
            lasting=time_number(stage, 0, 0, self._chunks) + kind * self._chunks + chunk,
            brought=np.where(weights, NOTHING, brought),
            sent=np.where(weights, NOTHING, sent),
            task=np.arange(len(kind)),
        )
        return self._paired(unpaired, np.flatnonzero(beside)) if beside.any() else unpaired

    def _paired(self, turns: _Waiting, second: Index) -> _Waiting:
        """Two that run together as one turn, that of the first: before it, the rank waits for what the second
        one needs; behind it, where sending holds it up, for what that has made."""
        first, idle, nobody = second - 1, np.full(len(second), NOTHING), np.full(len(second), self.nobody)
        gates = _Waiting(
            turns.stage[second], turns.needs[second], nobody, nobody, idle, turns.brought[second], idle, idle
        )
        turns.also[first] = turns.makes[second]
        turns.lasting[first] += (TURNS.index(PAIR) - KINDS.index("F")) * self._chunks
        turns.needs[second], turns.makes[second] = self.none, self.nobody
        turns.lasting[second] = turns.brought[second] = turns.task[second] = NOTHING
        return _Waiting(*(np.insert(column, first, gate) for column, gate in zip(turns, gates, strict=True)))

    def _links(self, chunk: ChunkPlace) -> tuple[tuple[int, int, int, int], tuple[int, int, int, int]]:
        """Number, of forward and of backward passes at a place, the result that they need, the message that
        brings it, the one that they make, and the message that takes it away."""
        above, below = (ChunkPlace(chunk.copy, chunk.number + by) for by in (-1, 1))
        made, made_back = self._result(chunk), self._backward + self._result(chunk)
        up, down = self._message(chunk, above), self._message(chunk, below)
        first = self._result(above) if above in self._stage_at else self.none
        last = self._backward + self._result(below) if below in self._stage_at else made
        return (first, up, made, down), (last, down, made_back, up)

    def _result(self, chunk: ChunkPlace) -> int:
        return (chunk.copy * self._length + chunk.number) * self._micro_batches

    def _message(self, one: ChunkPlace, other: ChunkPlace) -> int:
        """Between two places, numbered by the first of them; none inside a rank and at the ends."""
        apart = self._stage_at.get(other) not in (None, self._stage_at[one])
        return min(one.number, other.number) if apart else NOTHING


def _step_past(
    queues: Sequence[list[int]],
    position: Sequence[int],
    wanted: Sequence[Sequence[Sequence[int]]],
    made_by: Sequence[int],
    route: _MicroBatchRoute,
) -> bool:
    """Let a stage take its first task that can run, where all stages wait for one another: the last group of
    micro-batches of an interleaved schedule may be smaller than the pipeline. Returns whether there was
    one."""
    for first, queue, (needs, makes, _) in zip(position, queues, wanted, strict=True):
        for number in range(first, len(queue)):
            own = queue[number]
            if makes[own] != route.nobody and made_by[needs[own]] >= 0:
                queue.insert(first, queue.pop(number))
                return True
    return False
