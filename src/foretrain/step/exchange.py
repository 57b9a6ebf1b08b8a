"""Costs what the replicas of a rank exchange: parameters, gradients and their buckets, and the bytes that a
rank sends."""

from __future__ import annotations

import functools
from collections.abc import Iterable

import numpy as np

from foretrain.costs.collectives import Kind
from foretrain.graph import ITEM_BYTES, OpGraph, Weight
from foretrain.step.layout import KINDS, Layout, message_bytes
from foretrain.step.partition import Stage, handed_on_bytes
from foretrain.step.passes import recomputed, traced_blocks
from foretrain.step.schedules import Place, place

_FIRST_BUCKET = 1 << 20
"""Bytes of the first bucket of torch's DistributedDataParallel, so that summing up begins early."""


def wire_bytes(layout: Layout, elements: float, *, gradients: bool, trained: bool = True) -> float:
    """Bytes of so many gradients or parameters on the network; of those that are ``trained``, or of all."""
    habits, precision = layout.profile, layout.job.workload.training.precision
    if gradients and habits.reduces_in_fp32 and precision != "fp16":
        return 4 * elements
    low = habits.casts_shards and layout.job.plan.shard == "zero3" and precision.startswith("amp")
    return _item_bytes(layout.graph, trained=trained, most=2 if low else 8) * elements


@functools.lru_cache(maxsize=64)
def _item_bytes(graph: OpGraph, *, trained: bool, most: int) -> float:
    """Of the parameters as the rank holds them, on average; none is sent in more bytes than ``most``."""
    weights = [weight for weight in graph.weights if weight.trainable >= trained]
    elements = sum(weight.elements for weight in weights)
    held = sum(weight.elements * min(ITEM_BYTES[weight.dtype], most) for weight in weights)
    return held / elements if elements else 4.0


def _elements(weights: Iterable[Weight], *, expert: bool, trainable: bool) -> float:
    """Parameters inside or outside of experts: those that are trained, or all."""
    return float(sum(w.elements for w in weights if w.expert == expert and w.trainable >= trainable))


def shard_traffic(layout: Layout, stage: Stage) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """ZeRO 3: fetching the parameters of each block, and handing out the gradients of those that are trained;
    none where nothing is."""
    if layout.teams.data.size == 1:
        return (), ()
    gathers, reduces = np.zeros(len(stage.blocks)), np.zeros(len(stage.blocks))
    for expert, members in ((False, layout.teams.data), (True, layout.teams.expert_data)):
        if members.size == 1 or (expert and not any(block.experts for block in stage.blocks)):
            continue
        held, summed = (
            np.array([_elements(block.weights, expert=expert, trainable=trained) for block in stage.blocks])
            for trained in (False, True)
        )
        factor, network = layout.tuning.team(members), layout.network
        gathered = held * wire_bytes(layout, 1.0, gradients=False, trained=False)
        reduced = summed * wire_bytes(layout, 1.0, gradients=True)
        gathers += network.time_s("all_gather", gathered, members) * factor
        reduces += network.time_s("reduce_scatter", reduced, members) * factor
    return tuple(gathers.tolist()), tuple(reduces.tolist()) if layout.job.trains else ()


def replica_traffic(layout: Layout, stage: Stage) -> tuple[tuple[tuple[int, float], ...], float, float]:
    """Buckets beside the backward pass, what waits for its end, and what follows the optimizer or goes beside
    the next forward pass."""
    habits, plan, data = layout.profile, layout.job.plan, layout.teams.data
    if plan.servers:
        return (), _server_s(layout, stage), 0.0
    if data.size == 1 or not layout.job.trains:
        return (), 0.0, 0.0
    factor = layout.tuning.team(data)
    kind: Kind = "all_reduce" if plan.shard == "none" else "reduce_scatter"
    sizes = _buckets(layout, stage, habits.bucket_bytes if habits.overlaps_reduce else 0.0)
    seconds = layout.network.time_s(kind, np.array([size for _, size in sizes]), data) * factor
    times = list(zip([block for block, _ in sizes], seconds.tolist(), strict=True))
    experts = _elements(stage.weights, expert=True, trainable=True)
    own = layout.teams.expert_data
    after = 0.0
    if experts and own.size > 1:
        after = layout.network.time_s(
            kind, wire_bytes(layout, experts, gradients=True), own
        ) * layout.tuning.team(own)
    gather = 0.0
    if plan.shard in ("zero1", "zero2"):
        updated = _elements(stage.weights, expert=False, trainable=True)
        gather = (
            layout.network.time_s("all_gather", wire_bytes(layout, updated, gradients=False), data) * factor
        )
    if habits.overlaps_reduce:
        return tuple(times), after, gather
    return (), after + sum(seconds for _, seconds in times), gather


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


def _buckets(layout: Layout, stage: Stage, bucket_bytes: float) -> list[tuple[int, float]]:
    """Gradients in reverse order of the parameters, in buckets of so many bytes: the block that completes
    each, and its size."""
    found: list[tuple[int, float]] = []
    filled, limit = 0.0, float(_FIRST_BUCKET) if bucket_bytes else np.inf
    item = wire_bytes(layout, 1.0, gradients=True)
    for i in range(len(stage.blocks) - 1, -1, -1):
        for weight in reversed(stage.blocks[i].weights):
            if weight.trainable and not weight.expert:
                filled += item * weight.elements
            if filled >= limit:
                found.append((i, filled))
                filled, limit = 0.0, bucket_bytes
    return [*found, (0, filled)] if filled else found


def sent_bytes(layout: Layout, stage: Stage) -> dict[str, float]:
    """What a rank sends over its links in a step, by whom it goes to: its replicas (or parameter servers),
    its team inside the layers, and the other stages of the pipeline."""
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
    kind: Kind = "all_reduce" if plan.shard == "none" else "reduce_scatter"
    passes = layout.job.accumulation if plan.shard == "zero3" else 1
    sent = 0.0
    for expert, members in ((False, teams.data), (True, teams.expert_data)):
        if layout.job.trains:
            summed = wire_bytes(
                layout, _elements(stage.weights, expert=expert, trainable=True), gradients=True
            )
            sent += passes * network.traffic_bytes(kind, summed, members)
        if plan.shard == "zero3" or (plan.shard != "none" and layout.job.trains):
            fetched = _elements(stage.weights, expert=expert, trainable=plan.shard != "zero3")
            times = (1 + layout.job.trains) * passes if plan.shard == "zero3" else 1
            size = wire_bytes(layout, fetched, gradients=False, trained=plan.shard != "zero3")
            sent += times * network.traffic_bytes("all_gather", size, members)
    return sent


def _to_team(layout: Layout, stage: Stage) -> float:
    """In a micro-batch, by the collectives of its layers and those that recomputation runs again."""
    again = [recomputed(layout, block) for block in stage.blocks]
    calls = np.concatenate([stage.calls, *again])
    sent = 0.0
    for i in calls[layout.calls.communicates[calls]].tolist():
        operator = layout.graph.ops[i].operator
        members = layout.teams.named(operator.overload)
        sent += layout.network.traffic_bytes(KINDS[operator.name], message_bytes(operator), members)
    return sent


def _to_stages(layout: Layout, stage: Stage) -> float:
    """In a micro-batch: what the next chunk reads of each chunk's results and, in training, the gradients of
    what each chunk read of the one before it."""
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
        copy, here = place(schedule, stage.index, number, count)
        above, below = (places.get(Place(copy, here + by), nobody) for by in (-1, 1))
        if below[0] != stage.index:
            sent += places[Place(copy, here)][1]
        if layout.job.trains and above[0] != stage.index:
            sent += above[1]
    return float(sent)
