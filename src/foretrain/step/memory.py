"""Says what a rank holds at its peak: replayed through the allocator where its graph is whole, estimated
where it is sharded."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator, Mapping, Sequence

import numpy as np

from foretrain.allocator_settings import AllocatorSettings
from foretrain.cluster import Device
from foretrain.costs.workspace import library_workspace, operator_workspace
from foretrain.forecast import PeakMoment, RankMemory
from foretrain.graph import PHASES, Buffer, OpGraph
from foretrain.graph.opset import PRODUCTS, traits
from foretrain.step.layout import Layout
from foretrain.step.partition import Stage, blocks
from foretrain.step.passes import not_kept
from foretrain.step.replay import Lasting, Replay, least_capacity, replay
from foretrain.step.sharded_memory import sharded_memory

_CUBLAS = PRODUCTS | {"vector product"}
_NEARLY_FULL = 0.8
"""Share of a device's memory that may be reserved before it is asked what a step can do with."""

Call = tuple[int, bool]
"""An op of the graph, and whether it runs again before the backward pass of its block."""


def rank_memory(layout: Layout, stage: Stage, *, stalled: bool = False, replays: bool = True) -> RankMemory:
    """The peak of a rank of ``stage``.

    ``stalled`` says that the host is held up at the messages of the pipeline for longer than the device works
    in between; ``replays`` whether the allocator of a sharded rank is replayed or estimated.
    """
    if not _is_whole(layout):
        alike = [one.index for one in layout.stages if one.group == stage.group]
        return sharded_memory(
            layout.job,
            layout.graph,
            stage,
            len(layout.stages),
            layout.profile,
            site=layout.site,
            ends=(alike[0], alike[-1]),
            stalled=stalled,
            replays=replays,
        )
    job, selective = layout.job, layout.profile.selective_recompute
    again = tuple(
        tuple(not_kept(job.plan, selective, layout.graph, block).tolist()) for block in stage.blocks
    )
    device = job.cluster.groups[0].device
    elsewhere = job.plan.offload or bool(job.plan.servers)
    settings = AllocatorSettings.read(job.workload.training.allocator or "")
    return _replayed(layout.graph, device, again, elsewhere, settings)


def _is_whole(layout: Layout) -> bool:
    """Whether the graph holds every buffer of the step: on a GPU by itself, where the framework keeps none of
    its own."""
    training = layout.job.workload.training
    keeps_own = layout.profile.keeps_fp32_gradients or layout.profile.loss_copies is not None
    set_otherwise = training.loss or training.optimizer_state or training.gradient_precision
    keeps_own = keeps_own or bool(set_otherwise) or layout.job.plan.offload_activations
    on_cpu = any(group.device.is_cpu for group in layout.job.cluster.groups)
    return layout.job.runs_alone and not on_cpu and not (keeps_own and layout.job.trains)


@functools.lru_cache(maxsize=256)
def _replayed(
    graph: OpGraph,
    device: Device,
    again: tuple[tuple[int, ...], ...],
    offload: bool,
    settings: AllocatorSettings,
) -> RankMemory:
    calls, buffers = _calls(graph, again), graph.buffers
    if any(again):
        buffers = tuple(_lives(graph, calls, again))
    if offload:
        kept = sum(graph.ops[op].phase != "optimizer" for op, _ in calls)
        calls, buffers = calls[:kept], tuple(_without_update(buffers, kept))
    needs = {id(operator): operator_workspace(operator, device) for operator in graph.operators}
    workspaces = [needs[id(graph.ops[op].operator)] for op, _ in calls]
    play = functools.partial(
        replay,
        buffers,
        workspaces,
        tuple(_libraries(graph, device, calls)),
        update=next((n for n, (op, _) in enumerate(calls) if graph.ops[op].phase == "optimizer"), -1),
        settings=settings,
    )
    peak = play()
    needed = peak.reserved_bytes
    if needed > _NEARLY_FULL * device.memory_bytes:
        needed = least_capacity(play, peak)
    capacity, returns = device.memory_bytes, 0
    if needed <= capacity < peak.reserved_bytes:
        returns = play(capacity_bytes=capacity).returns
    return RankMemory(
        stage=0,
        by_category={name: float(size) for name, size in peak.by_category.items()},
        cached_bytes=float(peak.reserved_bytes - peak.allocated_bytes),
        returnable_bytes=float(peak.reserved_bytes - needed),
        returns=returns,
        peak=_moment(graph, calls, peak),
    )


def _libraries(graph: OpGraph, device: Device, calls: Sequence[Call]) -> Iterator[Lasting]:
    """The workspaces of cuBLAS, each made at the first product of its thread: of the forward pass, and of the
    backward pass with what is computed again."""
    size = library_workspace(device)
    threads: dict[bool, int] = {}
    for position, (op, again) in enumerate(calls):
        one = graph.ops[op]
        if traits(one.operator.name).kind in _CUBLAS:
            threads.setdefault(again or one.phase == "backward", position)
    return ((position, size) for position in threads.values() if size)


def _moment(graph: OpGraph, calls: Sequence[Call], peak: Replay) -> PeakMoment:
    """Name the moment of the peak; what runs again belongs to the backward pass."""
    if peak.peak < 0:
        return PeakMoment(phase="before a step")
    position, again = calls[peak.peak]
    op = graph.ops[position]
    return PeakMoment(phase="backward" if again else op.phase, operator=op.operator.name, layer=op.layer)


def _calls(graph: OpGraph, again: Sequence[Sequence[int]]) -> list[Call]:
    """The calls of a step in their order, with those that run again just before the next backward pass of
    their block: a step may have several passes."""
    before: dict[int, list[int]] = {}
    for block, repeated in zip(blocks(graph), again, strict=True):
        backward = block.piece.backward
        for op, place in zip(repeated, np.searchsorted(backward, repeated), strict=True):
            if place < len(backward):
                before.setdefault(int(backward[place]), []).append(op)
    return [
        call
        for op in range(len(graph.ops))
        for call in (*((repeated, True) for repeated in before.get(op, ())), (op, False))
    ]


def _lives(graph: OpGraph, calls: Sequence[Call], again: Sequence[Sequence[int]]) -> Iterator[Buffer]:
    """The buffers of a step in which calls run again, by the calls at which they are born and die.

    What a repeated call makes for the backward pass is let go after its last reader in the forward pass, and
    made anew by the repetition; what other blocks read of it (their inputs) stays. What a repetition reads
    stays until then.
    """
    place = {call: position for position, call in enumerate(calls)}
    block_of = {op: number for number, repeated in enumerate(again) for op in repeated if (op, True) in place}
    backward = np.flatnonzero(graph.phase_index == PHASES.index("backward"))
    readers = _forward_readers(graph)
    ends = len(graph.ops)
    for number, buffer in enumerate(graph.buffers):
        born, dies = place.get((buffer.born, False), -1), place.get((buffer.dies, False), len(calls))
        block = block_of.get(buffer.born)
        outside = any(block_of.get(reader) != block for reader in readers.get(number, ()))
        if block is None or outside or buffer.dies >= ends:
            needed = [place[reader, True] for reader in readers.get(number, ()) if (reader, True) in place]
            yield Buffer(buffer.size_bytes, buffer.category, born, max([dies, *needed]))
            continue
        last = max([buffer.born, *readers.get(number, ())])
        yield Buffer(buffer.size_bytes, "temporaries", born, place[last, False])
        second = place[buffer.born, True]
        if np.searchsorted(backward, buffer.born) == np.searchsorted(backward, buffer.dies, side="right"):
            dies = max((place.get((op, True), 0) for op in again[block] if op <= buffer.dies), default=second)
        yield Buffer(buffer.size_bytes, buffer.category, second, max(dies, second))


def _forward_readers(graph: OpGraph) -> Mapping[int, list[int]]:
    readers: dict[int, list[int]] = {}
    for i, op in enumerate(graph.ops):
        for number in op.reads if op.phase == "forward" else ():
            readers.setdefault(number, []).append(i)
    return readers


def _without_update(buffers: Iterable[Buffer], calls: int) -> Iterator[Buffer]:
    """The buffers of a step whose optimizer, with its state, is on the host."""
    for buffer in buffers:
        if buffer.category != "optimizer_state" and buffer.born < calls:
            yield Buffer(buffer.size_bytes, buffer.category, buffer.born, min(buffer.dies, calls))
