"""Replays what a rank allocates through the rules of torch's allocator, block by block as the schedule runs
them: what the memory of each of its streams comes to.

Blocks alike are played from the buffers of the one that was traced, with the buffers of ZeRO 3 between them
as FSDP2 allocates and frees them (``shard_buffers.py``). No stream uses the memory of another. Buffers of the
allocator's pool of small ones are left out.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from typing import Any

import numpy as np

from foretrain.allocator_settings import AllocatorSettings
from foretrain.graph import OpGraph
from foretrain.job import Job
from foretrain.step.allocator import CachingAllocator, MemoryBlock
from foretrain.step.frameworks import Profile
from foretrain.step.held_states import ShardedRank, shard_bytes
from foretrain.step.partition import Block, Piece, blocks
from foretrain.step.passes import not_kept
from foretrain.step.shard_buffers import ShardBuffers

Task = tuple[bool, int]
"""Whether a micro-batch goes forward, else backward, and which one."""
Name = tuple[bool, int, int]
"""A buffer of a block: whether its forward pass makes it, in which call, and which of that call's it is."""
Key = tuple[str, int, int]
_SMALL = 1 << 20
"""Bytes up to which a buffer comes from the pool of small ones."""
_STEPS = 3


@dataclass(frozen=True, slots=True)
class _Birth:
    name: Name
    size: int
    gradient: bool
    ends: int
    """The call after which it goes where nothing is kept for the backward pass; -1 where the next block reads
    it, or it is not kept anyway."""


@dataclass(frozen=True, slots=True)
class _Call:
    """Says what a call makes, and what goes after it: how many blocks further on it was made, and its
    name."""

    number: int
    births: tuple[_Birth, ...]
    deaths: tuple[tuple[int, Name], ...]


Passes = tuple[tuple[_Call, ...], tuple[_Call, ...]]
"""The calls of a block forward and backward that make or let go of anything large."""


@functools.lru_cache(maxsize=32)
def _passes(graph: OpGraph) -> dict[tuple[int, int], Passes]:
    """List the passes of each piece of the graph, by its first calls."""
    pieces = list({_begins(block.piece): block.piece for block in blocks(graph)}.values())
    where: dict[int, tuple[int, bool, int]] = {}
    for number, piece in enumerate(pieces):
        for forward, calls in ((True, piece.forward), (False, piece.backward)):
            where.update({op: (number, forward, call) for call, op in enumerate(calls.tolist())})
    readers: dict[int, list[tuple[int, bool, int]]] = {}
    for op, one in enumerate(graph.ops):
        if one.phase == "forward" and op in where:
            for read in one.reads:
                readers.setdefault(read, []).append(where[op])
    born: dict[tuple[int, bool, int], list[_Birth]] = {}
    dying: dict[tuple[int, bool, int], list[tuple[int, Name]]] = {}
    for number, buffer in enumerate(graph.buffers):
        if buffer.size_bytes <= _SMALL or buffer.born not in where:
            continue
        made = where[buffer.born]
        place, forward, call = made
        own = born.setdefault(made, [])
        name = (forward, call, len(own))
        handed_on = any(read > place for read, _, _ in readers.get(number, ()))
        kept = buffer.category == "activations" and not handed_on
        last = max([call, *(at for read, _, at in readers.get(number, ()) if read == place)])
        gradient = buffer.category == "gradients"
        own.append(_Birth(name, buffer.size_bytes, gradient, last if kept else -1))
        if not gradient and buffer.dies in where:
            dying.setdefault(where[buffer.dies], []).append((place - where[buffer.dies][0], name))

    def calls_of(piece: int, count: int, *, forward: bool) -> tuple[_Call, ...]:
        places = [(piece, forward, call) for call in range(count)]
        return tuple(
            _Call(place[2], tuple(born.get(place, ())), tuple(dying.get(place, ())))
            for place in places
            if place in born or place in dying
        )

    return {
        _begins(piece): (
            calls_of(number, len(piece.forward), forward=True),
            calls_of(number, len(piece.backward), forward=False),
        )
        for number, piece in enumerate(pieces)
    }


def _begins(piece: Piece) -> tuple[int, int]:
    """The first calls of a piece forward and backward."""
    first, last = (int(calls[0]) if len(calls) else -1 for calls in (piece.forward, piece.backward))
    return first, last


class _Stream:
    """The memory of a stream, and what is in it by name."""

    def __init__(self, settings: AllocatorSettings) -> None:
        self.allocator = CachingAllocator(settings)
        self._held: dict[Key, MemoryBlock] = {}

    def take(self, kind: str, size: float, i: int = 0, number: int = 0) -> None:
        key = (kind, i, number)
        if size > _SMALL and key not in self._held:
            self._held[key] = self.allocator.allocate(int(size))

    def give(self, kind: str, i: int = 0, number: int = 0) -> None:
        if (block := self._held.pop((kind, i, number), None)) is not None:
            self.allocator.release(block)


@dataclass(slots=True, kw_only=True)
class RankReplay:
    """A rank that trains: its blocks, and what it holds all the time."""

    graph: OpGraph
    blocks: Sequence[Block]
    again: Sequence[frozenset[int]]
    """Of each block, the calls of its forward pass that run again before its backward pass."""
    shards: ShardBuffers | None
    lasting: Sequence[float]
    """Bytes of each tensor that stays: parameters, and gradients that do."""
    states: Sequence[float]
    """Of the optimizer, which makes them in the first update."""
    gradients: Sequence[float]
    """Of each block's parameters as they are handed out, until the update; empty where they stay."""
    update: float
    """Temporaries of the update."""
    tasks: Sequence[Task]
    settings: AllocatorSettings
    _main: _Stream = field(init=False)
    _fetching: _Stream = field(init=False)
    _reducing: _Stream = field(init=False)
    _calls: list[Passes] = field(init=False)
    _held: dict[tuple[int, int], dict[Name, MemoryBlock]] = field(init=False, default_factory=dict)
    """Buffers of passes, by micro-batch and block."""
    _made: dict[int, list[MemoryBlock]] = field(init=False, default_factory=dict)
    """Gradients of a block as its backward pass makes them."""

    def reserved_bytes(self) -> int:
        """Count the bytes reserved after steps enough for the cache to settle; played once for ranks
        alike."""
        given = {one.name: getattr(self, one.name) for one in fields(self) if one.init}
        return _settled(
            **{name: tuple(value) if isinstance(value, list) else value for name, value in given.items()}
        )

    def _settled(self) -> int:
        streams = tuple(_Stream(self.settings) for _ in range(3))
        self._main, self._fetching, self._reducing = streams
        passes = _passes(self.graph)
        self._calls = [passes[_begins(block.piece)] for block in self.blocks]
        for number, size in enumerate(self.lasting):
            self._main.take("lasting", size, number)
        reserved = -1
        for step in range(_STEPS):
            for forward, micro in self.tasks:
                for i in range(len(self.blocks)) if forward else reversed(range(len(self.blocks))):
                    (self._forward if forward else self._backward)(i, micro)
            self._update(first=step == 0)
            before, reserved = reserved, sum(stream.allocator.reserved for stream in streams)
            if reserved == before:
                break
        return reserved

    def _update(self, *, first: bool) -> None:
        for number, size in enumerate(self.states if first else ()):
            self._main.take("state", size, number)
        self._main.take("update", self.update)
        self._main.give("update")
        for i in range(len(self.blocks)):
            self._reducing.give("gradient", i)
            self._main.give("summed", i)
            self._let_go(i)
            self._whole(i, taken=False)

    # Passes

    def _forward(self, i: int, micro: int) -> None:
        if self.shards is not None:
            self._fetching.take("fetched", self.shards.fetched(i), i)
            self._fetching.give("fetched", i - 1)
            self._whole(i, taken=True)
        self._play(i, micro, forward=True, keeps=not self.again[i])
        if self.shards is not None and self.shards.lets_go(i):
            self._whole(i, taken=False)

    def _backward(self, i: int, micro: int) -> None:
        if self.shards is not None:
            self._whole(i, taken=True)
            self._fetching.give("fetched", i)
            if i and self.shards.lets_go(i - 1):
                self._fetching.take("fetched", self.shards.parameters[i - 1], i - 1)
        second: dict[Name, MemoryBlock] = {}
        if self.again[i]:
            second = self._play(i, micro, forward=True, keeps=True, second=True)
        self._play(i, micro, forward=False, keeps=True)
        if self.shards is not None:
            self._reduce(i)
        done = [i + 1] if i else [1, 0]
        for buffers in (second, *(self._held.pop((micro, one), {}) for one in done)):
            for block in buffers.values():
                self._main.allocator.release(block)

    def _whole(self, i: int, *, taken: bool) -> None:
        """The parameters of a block at their places."""
        if self.shards is None:
            return
        for number, size in enumerate(self.shards.tensors[i]):
            if taken:
                self._main.take("whole", size, i, number)
            else:
                self._main.give("whole", i, number)

    def _reduce(self, i: int) -> None:
        """Gradients of a block are copied into the buffer that is reduced, which makes shards of them."""
        assert self.shards is not None
        size = self.shards.sent(i)
        if self.shards.sums_up:
            self._main.take("summed", size, i)
            self._let_go(i)
        elif size:
            self._main.give("reduced")
            if self.shards.lets_go(i) or not self.shards.blocks[i].is_layer:
                self._whole(i, taken=False)
            self._main.take("reduced", size)
            self._let_go(i)
        if self.gradients:
            self._reducing.take("gradient", self.gradients[i], i)
        if i == 0:
            self._main.give("reduced")
            for other in range(1, len(self.blocks)):
                self._let_go(other)

    def _let_go(self, i: int) -> None:
        for block in self._made.pop(i, ()):
            self._main.allocator.release(block)

    def _play(
        self, i: int, micro: int, *, forward: bool, keeps: bool, second: bool = False
    ) -> dict[Name, MemoryBlock]:
        """A pass of a block, or its forward pass for the ``second`` time: what of that was there already
        comes back, to be let go with the block."""
        allocator, repeated = self._main.allocator, self.again[i]
        allocate, release = allocator.allocate, allocator.release
        own, beside = self._held.setdefault((micro, i), {}), dict[Name, MemoryBlock]()
        ends: dict[int, list[Name]] = {}
        nothing: dict[Name, MemoryBlock] = {}
        for call in self._calls[i][0 if forward else 1]:
            runs_again = call.number in repeated
            for birth in call.births if runs_again or not second else ():
                block = allocate(birth.size)
                if birth.gradient:
                    self._made.setdefault(i, []).append(block)
                elif birth.name in own:
                    beside[birth.name] = block
                else:
                    own[birth.name] = block
                if not keeps and birth.ends >= 0 and runs_again:
                    ends.setdefault(birth.ends, []).append(birth.name)
            for away, name in call.deaths:
                made = self._held.get((micro, i + away), nothing) if away else own
                if away == 0 and name in beside:
                    release(beside.pop(name))
                elif name in made:
                    release(made.pop(name))
            for number in [one for one in ends if one <= call.number] if ends else ():
                for name in ends.pop(number):
                    if name in own:
                        release(own.pop(name))
        return beside


@functools.lru_cache(maxsize=64)
def _settled(**rank: Any) -> int:
    return RankReplay(**rank)._settled()


def replayed_bytes(rank: ShardedRank, shards: ShardBuffers | None, flying: int) -> float | None:
    """Count the bytes that a rank of a stage has reserved, with so many micro-batches ``flying``; None where
    its framework keeps buffers of its own, or what it runs is not a stack of layers in their order."""
    job, graph, stage, profile = rank.job, rank.graph, rank.stage, rank.profile
    sizes, trained = rank.sizes, rank.trained
    buffers = profile.keeps_fp32_gradients or profile.loss_copies is not None or profile.sharding == "flat"
    whole = shards is not None or job.plan.pipeline > 1
    plan, loss = job.plan, job.workload.training.loss
    odd = len(stage.chunks) != 1 or plan.servers or plan.offload or plan.offload_activations or loss
    if buffers or odd or not whole or graph.stack is None or job.cluster.groups[0].device.is_cpu:
        return None
    blocks = stage.chunks[0]
    sharded = job.plan.shard == "zero3"
    weights = [weight for block in blocks for weight in block.weights]
    parts = [
        [trained.own(weight, sharded=sharded) for weight in block.weights if weight.trainable]
        for block in blocks
    ]
    each = [elements for block in parts for elements in block]
    shares = [
        trained.own(weight, sharded=sharded) * shard_bytes(job, graph, sizes, weight) for weight in weights
    ]
    return float(
        RankReplay(
            graph=graph,
            blocks=blocks,
            again=[_places(job, graph, block, profile) for block in blocks],
            shards=shards,
            lasting=[*shares, *(elements * sizes.gradient for elements in each if sizes.gradient)],
            states=[elements * sizes.state / _MOMENTS for elements in each for _ in range(_MOMENTS)],
            gradients=[sizes.fleeting_gradient * sum(block) for block in parts] if shards else (),
            update=sizes.update * sum(each),
            tasks=_tasks(flying, job.accumulation),
            settings=AllocatorSettings.read(job.workload.training.allocator or ""),
        ).reserved_bytes()
    )


_MOMENTS = 2
"""Tensors of an optimizer's state for each parameter, of Adam and its kin."""
_STEADY = 3
"""Micro-batches that are played beyond those that fill a pipeline."""


def _tasks(flying: int, micro_batches: int) -> tuple[Task, ...]:
    """The passes of 1F1B with so many micro-batches in flight at most, as far as they differ."""
    count = min(micro_batches, flying + _STEADY) if flying > 1 else 1
    ahead = [(True, micro) for micro in range(flying - 1)]
    rest = [(True, micro) for micro in range(flying - 1, count)]
    back = [(False, micro) for micro in range(count)]
    turns = itertools.zip_longest(rest, back)
    return (*ahead, *(task for turn in turns for task in turn if task is not None))


def _places(job: Job, graph: OpGraph, block: Block, profile: Profile) -> frozenset[int]:
    """The calls of a block that run again, by their places in its forward pass."""
    again = not_kept(job.plan, profile.selective_recompute, graph, block)
    return frozenset(np.searchsorted(block.piece.forward, again).tolist())
