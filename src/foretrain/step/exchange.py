"""Costs what the replicas of a rank exchange: parameters, gradients and their buckets, and the bytes that a
rank sends."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from foretrain.costs.collectives import Kind, Team
from foretrain.graph import Weight
from foretrain.step.layout import Layout
from foretrain.step.messages import KINDS, message_bytes
from foretrain.step.partition import Stage, handed_on_bytes
from foretrain.step.passes import recomputed, traced_blocks
from foretrain.step.schedules import ChunkPlace, place
from foretrain.step.sharding import (
    copies,
    neighbours,
    reshards,
    shards,
    stays_gathered,
    syncs_last,
    wire_bytes,
)
from foretrain.step.spans import Column

_FIRST_BUCKET = 1 << 20
"""Bytes of the first bucket of torch's DistributedDataParallel, so that summing up begins early."""


def _elements(weights: Iterable[Weight], *, expert: bool, trainable: bool) -> float:
    """Parameters inside or outside of experts: those that are trained, or all."""
    return float(sum(w.elements for w in weights if w.expert == expert and w.trainable >= trainable))


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardTraffic:
    """Seconds of what ZeRO 3 exchanges, block by block: fetching parameters before the forward pass and again
    before the backward pass, handing out gradients, and summing them up over copies of a shard."""

    gathers_s: tuple[float, ...] = ()
    again_s: tuple[float, ...] = ()
    reduces_s: tuple[float, ...] = ()
    copies_s: tuple[float, ...] = ()

    @property
    def first_s(self) -> float:
        """Fetching all blocks for the first micro-batch."""
        return sum(self.gathers_s)

    @property
    def buckets(self) -> tuple[tuple[int, float], ...]:
        """Handing out the gradients of the last micro-batch, the last block first."""
        copied = self.copies_s or (0.0,) * len(self.reduces_s)
        seconds = [a + b for a, b in zip(self.reduces_s, copied, strict=True)]
        return tuple((i, seconds[i]) for i in range(len(seconds) - 1, -1, -1) if seconds[i])


def shard_traffic(layout: Layout, stage: Stage) -> ShardTraffic:
    """Cost what ZeRO 3 exchanges in a micro-batch; nothing where a rank has no replicas."""
    if max(layout.teams.data.size, layout.teams.expert_data.size) == 1:
        return ShardTraffic()
    job, habits = layout.job, layout.profile
    count = len(stage.blocks)
    gathers, again, reduces, summed_up = (np.zeros(count) for _ in range(4))
    stays = np.array([stays_gathered(layout, block) for block in stage.blocks])
    kept = reshards(job, habits)
    for expert, members in ((False, layout.teams.data), (True, layout.teams.expert_data)):
        if members.size == 1 or (expert and not any(block.experts for block in stage.blocks)):
            continue
        inner, outer = shards(job.plan, members), copies(job.plan, members)
        held, trained = (
            np.array([_elements(block.weights, expert=expert, trainable=trained) for block in stage.blocks])
            for trained in (False, True)
        )
        if not habits.splits_root:
            held, trained = (_with_root(stage, elements) for elements in (held, trained))
        near = _near(inner, kept)
        gathered = held * wire_bytes(layout, 1.0, gradients=False, trained=False)
        reduced = trained * wire_bytes(layout, 1.0, gradients=True)
        gathers += _seconds(layout, "all_gather", gathered, inner)
        again += _seconds(layout, "all_gather", gathered, near) * ~stays
        reduces += _seconds(layout, "reduce_scatter", reduced, inner)
        summed_up += _seconds(layout, "all_reduce", reduced / inner.size, outer)
    if not job.trains:
        return ShardTraffic(gathers_s=tuple(gathers.tolist()))
    return ShardTraffic(
        gathers_s=tuple(gathers.tolist()),
        again_s=tuple(again.tolist()),
        reduces_s=tuple(reduces.tolist()),
        copies_s=tuple(summed_up.tolist()) if summed_up.any() else (),
    )


def _near(inner: Team, kept: bool | int) -> Team:
    """Name the team that parameters come from again: those that share a copy, or the neighbours that kept
    it."""
    if isinstance(kept, bool):
        return inner
    return neighbours(inner, min(kept, inner.size), "plan.reshard", kept)


def _with_root(stage: Stage, elements: Column) -> Column:
    """Put what is outside of layers into one unit of its own, the root's, which comes first and goes last."""
    outside = np.array([not block.is_layer for block in stage.blocks])
    together = np.where(outside, 0.0, elements)
    together[0] += elements[outside].sum()
    return together


def _seconds(layout: Layout, kind: Kind, sizes: Column, members: Team) -> Column:
    """Time calls of a collective, one for each size that is not zero."""
    factor = layout.tuning.team(members)
    if members.nodes > 1 and any(group.inter_node.kind == "ethernet" for group in layout.site.groups):
        factor *= layout.profile.socket_slowdown
    steps = (members.size - 1) * (2 if kind == "all_reduce" else 1) if members.nodes > 1 else 0
    times_s = layout.network.time_s(kind, sizes, members) * factor + layout.tuning.hop_s * steps
    return np.where(sizes > 0, times_s, 0.0)


_OF_ATTENTION, _OF_OTHERS = 0.5, 0.3
"""What attention and kernels that move data lose beside a collective, as a share of what products lose."""
_FEW_CHANNELS = 0.45
"""Of the same, where a collective has a few channels: sockets, PCIe, and processes on CPUs."""


def slowdown(layout: Layout, stage: Stage) -> float:
    """Give the share of a rank's computing time that hidden communication takes from it: by what the rank
    computes, and by how many processors the collectives' kernels hold."""
    calls, costs = stage.calls, layout.calls
    calls = calls[~costs.communicates[calls]]
    weights = np.where(costs.attends, _OF_ATTENTION, np.where(costs.multiplies, 1.0, _OF_OTHERS))[calls]
    seconds = costs.device_s[calls]
    lost = float((weights * seconds).sum() / seconds.sum()) if seconds.any() else 1.0
    groups, leaves = layout.site.groups, layout.teams.data.nodes > 1
    links = {(group.inter_node if leaves else group.intra_node).kind for group in groups}
    few = bool(links & {"pcie", "ethernet", "loopback"}) or any(group.device.is_cpu for group in groups)
    return layout.slowdown * (_FEW_CHANNELS if few else lost)


def replica_traffic(layout: Layout, stage: Stage) -> tuple[tuple[tuple[int, float], ...], float, float]:
    """Buckets beside the backward pass, what waits for its end, and what follows the optimizer or goes beside
    the next forward pass."""
    habits, plan = layout.profile, layout.job.plan
    if plan.servers:
        return (), _server_s(layout, stage), 0.0
    if not layout.job.trains:
        return (), 0.0, 0.0
    times: list[tuple[int, float]] = []
    gather = 0.0
    for expert, members in ((False, layout.teams.data), (True, layout.teams.expert_data)):
        if members.size == 1 or (expert and not any(block.experts for block in stage.blocks)):
            continue
        sizes = _buckets(layout, stage, habits.bucket_bytes if habits.overlaps_reduce else 0.0, expert=expert)
        seconds = _summing_s(layout, np.array([size for _, size in sizes]), members)
        times += zip([block for block, _ in sizes], seconds.tolist(), strict=True)
        if plan.shard in ("zero1", "zero2"):
            updated = _elements(stage.weights, expert=expert, trainable=True)
            size = np.array([wire_bytes(layout, updated, gradients=False)])
            gather += float(_seconds(layout, "all_gather", size, shards(plan, members))[0])
    if habits.overlaps_reduce:
        return tuple(sorted(times, key=lambda one: -one[0])), 0.0, gather
    return (), sum(seconds for _, seconds in times), gather


def _summing_s(layout: Layout, sizes: Column, members: Team) -> Column:
    """Summing up gradients: on all members, or on the shards of each and then over their copies."""
    plan = layout.job.plan
    if plan.shard == "none":
        return _seconds(layout, "all_reduce", sizes, members)
    inner, outer = shards(plan, members), copies(plan, members)
    return _seconds(layout, "reduce_scatter", sizes, inner) + _seconds(
        layout, "all_reduce", sizes / inner.size, outer
    )


def _server_s(layout: Layout, stage: Stage) -> float:
    plan, cluster = layout.job.plan, layout.job.cluster
    size = wire_bytes(layout, _elements(stage.weights, expert=False, trainable=True), gradients=True)
    workers = 1 if plan.asynchronous else plan.data or 1
    own = 0 if cluster.servers is None else cluster.servers.nodes
    return layout.network.parameter_server_s(
        size, workers=workers, servers=plan.servers, nodes=cluster.nodes, server_nodes=own
    )


def server_bytes(layout: Layout) -> float:
    """Host memory of one parameter server: its part of the weights in fp32, their gradients from each worker
    and together, and the optimizer's state."""
    plan, graph = layout.job.plan, layout.graph
    trained = sum(w.elements for stage in layout.stages for w in stage.weights if w.trainable)
    traced = sum(w.elements for block in traced_blocks(graph) for w in block.weights if w.trainable)
    state = sum(buffer.size_bytes for buffer in graph.buffers if buffer.category == "optimizer_state")
    each = 4.0 * (2 + (plan.data or 1)) + state / max(1, traced)
    return trained * each / plan.servers


def _buckets(layout: Layout, stage: Stage, bucket_bytes: float, *, expert: bool) -> list[tuple[int, float]]:
    """Gradients inside or outside of experts in reverse order of the parameters, in buckets of so many bytes:
    the block that completes each, and its size."""
    buckets: list[tuple[int, float]] = []
    filled, limit = 0.0, float(_FIRST_BUCKET) if bucket_bytes else np.inf
    item = wire_bytes(layout, 1.0, gradients=True)
    for i in range(len(stage.blocks) - 1, -1, -1):
        for weight in reversed(stage.blocks[i].weights):
            if weight.trainable and weight.expert == expert:
                filled += item * weight.elements
            if filled >= limit:
                buckets.append((i, filled))
                filled, limit = 0.0, bucket_bytes
    return [*buckets, (0, filled)] if filled else buckets


def sent_bytes(layout: Layout, stage: Stage) -> dict[str, float]:
    """Count the bytes that a rank sends over its links in a step, by whom they go to: its replicas (or
    parameter servers), its team inside the layers, and the other stages of the pipeline."""
    micro_batches = layout.job.accumulation // stage.copies
    return {
        "replicas": _to_replicas(layout, stage),
        "team": micro_batches * _to_team(layout, stage),
        "stages": micro_batches * _to_stages(layout, stage),
    }


def _to_replicas(layout: Layout, stage: Stage) -> float:
    plan, network, teams = layout.job.plan, layout.network, layout.teams
    if plan.servers:
        return wire_bytes(layout, _elements(stage.weights, expert=False, trainable=True), gradients=True)
    sent = 0.0
    for expert, members in ((False, teams.data), (True, teams.expert_data)):
        inner, outer = (members, members)
        if plan.shard != "none":
            inner, outer = shards(plan, members), copies(plan, members)
        fetches, again, sums = _times(layout)
        summed = wire_bytes(layout, _elements(stage.weights, expert=expert, trainable=True), gradients=True)
        if plan.shard == "none":
            sent += sums * network.traffic_bytes("all_reduce", summed, members)
            continue
        sent += sums * network.traffic_bytes("reduce_scatter", summed, inner)
        sent += sums * network.traffic_bytes("all_reduce", summed / inner.size, outer)
        for block in stage.blocks:
            held = _elements(block.weights, expert=expert, trainable=plan.shard != "zero3")
            size = wire_bytes(layout, held, gradients=False, trained=plan.shard != "zero3")
            sent += fetches * network.traffic_bytes("all_gather", size, inner)
            if again and not stays_gathered(layout, block):
                near = _near(inner, reshards(layout.job, layout.profile))
                sent += again * network.traffic_bytes("all_gather", size, near)
    return sent


def _times(layout: Layout) -> tuple[int, int, int]:
    """Count how often in a step parameters are fetched for forward passes and again for backward passes, and
    gradients are summed up."""
    job = layout.job
    passes, trains = job.accumulation, int(job.trains)
    if job.plan.shard != "zero3":
        return trains, 0, trains
    once = trains and syncs_last(job, layout.profile)
    return (1 if once else passes), passes * trains, (1 if once else passes) * trains


def _to_team(layout: Layout, stage: Stage) -> float:
    """Count the bytes that a rank sends to its team in a micro-batch, by the collectives of its layers and
    those that recomputation runs again."""
    again = [recomputed(layout, block) for block in stage.blocks]
    calls = np.concatenate([stage.calls, *again])
    sent = 0.0
    for i in calls[layout.calls.communicates[calls]].tolist():
        operator = layout.graph.ops[i].operator
        members = layout.teams.named(operator.overload)
        sent += layout.network.traffic_bytes(KINDS[operator.name], message_bytes(operator), members)
    return sent


def _to_stages(layout: Layout, stage: Stage) -> float:
    """Count the bytes that a rank sends to other stages in a micro-batch: what the next chunk reads of each
    chunk's results and, in training, the gradients of what each chunk read of the one before it."""
    count, schedule = len(layout.stages), layout.job.plan.schedule
    if count == 1:
        return 0.0
    places = {
        place(schedule, one.index, number, count): (one.index, handed_on_bytes(chunk, layout.stages))
        for one in layout.stages
        for number, chunk in enumerate(one.chunks)
    }
    nobody, sent = (stage.index, 0), 0
    for number in range(len(stage.chunks)):
        copy, number_in_model = place(schedule, stage.index, number, count)
        above, below = (places.get(ChunkPlace(copy, number_in_model + by), nobody) for by in (-1, 1))
        if below[0] != stage.index:
            sent += places[ChunkPlace(copy, number_in_model)][1]
        if layout.job.trains and above[0] != stage.index:
            sent += above[1]
    return float(sent)
