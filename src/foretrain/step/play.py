"""A job laid out on its ranks becomes its step: the work of each rank, what replicas and stages exchange, memory and bytes."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from foretrain.costs.collectives import Kind
from foretrain.graph import ITEM_BYTES, PHASES, OpGraph
from foretrain.job import Job
from foretrain.step.frameworks import Profile
from foretrain.step.layout import (
    COLLECTIVE_HOST_S,
    COPY_SHARE,
    KINDS,
    Layout,
    Tuning,
    memory_rate,
    message_bytes,
    on_efa,
)
from foretrain.step.partition import COLLECTIVES, Block, Index, Stage, blocks
from foretrain.step.playback import Column, Span, StageWork, Step, Work, play_pipeline, play_rank, span, total
from foretrain.step.rank_memory import RankMemory, rank_memory

_HIDDEN_SHARE = 0.8
"""Of a collective that runs beside a product of the same length."""
_TRAFFIC_POWER, _WAITING_POWER = 0.75, 0.35
"""Power as a share of the limit: of kernels that move data, and of waiting for the network, the host or other stages."""
_JITTER = 0.01
"""Standard deviation of the step time from rank to rank, as a share of it."""
_FIRST_BUCKET = 1 << 20
_PRODUCTS = ("mm", "addmm", "bmm", "baddbmm")
_STALLS_OVER_NODES = 0.35
"""How stalls grow with the nodes that a tensor team spans."""
_HOST_LINK_BYTES_PER_S = 20e9
_HOST_MEMORY_BYTES_PER_S = 60e9


@dataclass(frozen=True, kw_only=True, eq=False)
class RanksForecast:
    """What the flow finds, before intervals."""

    layout: Layout
    step: Step
    memory: tuple[RankMemory, ...]
    forward_s: float
    backward_s: float
    optimizer_s: float
    """Of the busiest stage: the passes of all micro-batches, each by itself, and its update."""
    device_busy_s: float
    host_issue_s: float
    kernels: float
    sent_bytes: float
    """By one rank in a step, over its links."""


def play(layout: Layout, step_overhead_s: float) -> RanksForecast:
    """The step of a job, and what each of its ranks holds and does."""
    step_overhead_s = (step_overhead_s + layout.profile.step_s) * layout.tuning.host + layout.tuning.step_s
    layout = _within_power(layout, step_overhead_s)
    works = _works(layout, step_overhead_s)
    step = _delayed(_step(layout, works, step_overhead_s), layout.job)
    memory = tuple(_memory(layout, stage) for stage in layout.stages)
    busiest = max(works, key=_device_s)
    passes = total(busiest.forward) + total(busiest.backward)
    stage = layout.stages[works.index(busiest)]
    return RanksForecast(
        layout=layout,
        step=step,
        memory=memory,
        forward_s=(total(busiest.forward) * layout.job.accumulation).alone_s,
        backward_s=(total(busiest.backward[::-1]) * layout.job.accumulation).alone_s,
        optimizer_s=busiest.optimizer.alone_s,
        device_busy_s=min(
            step.time_s, passes.device_s * layout.job.accumulation + busiest.optimizer.device_s
        ),
        host_issue_s=passes.host_s * layout.job.accumulation + busiest.optimizer.host_s + step_overhead_s,
        kernels=_kernels(layout, stage),
        sent_bytes=_sent_bytes(layout, stage),
    )


def _works(layout: Layout, step_overhead_s: float) -> list[Work]:
    pieces = {id(block.piece): block for stage in layout.stages for block in stage.blocks}
    passes = {piece: _passes(layout, block) for piece, block in pieces.items()}
    return [
        _work(layout, stage, step_overhead_s, [passes[id(block.piece)] for block in stage.blocks])
        for stage in layout.stages
    ]


def _step(layout: Layout, works: Sequence[Work], step_overhead_s: float) -> Step:
    if len(works) > 1:
        return _pipeline(layout, works, step_overhead_s)
    return play_rank(works[0], layout.job.accumulation)


def _delayed(step: Step, job: Job) -> Step:
    """With the wait for the slowest of many ranks: the expected maximum of as many normal deviations."""
    longer = step.time_s * _JITTER * math.sqrt(2 * math.log(job.cluster.world_size))
    return dataclasses.replace(step, time_s=step.time_s + longer, straggler_s=longer)


def _device_s(work: Work) -> float:
    return (total(work.forward) + total(work.backward)).device_s


def _within_power(layout: Layout, step_overhead_s: float) -> Layout:
    """Slow matrix products down so far that the average power of the busiest rank keeps within its limit.

    At full clock, products draw more than the limit (``Device.under_load``); other kernels, communication and waiting draw less.
    """
    limit = min(group.device.under_load for group in layout.job.cluster.groups)
    if limit >= 1.0:
        return layout
    works = _works(layout, step_overhead_s)
    busiest = max(works, key=_device_s)
    stage, count = layout.stages[works.index(busiest)], layout.job.accumulation
    calls = _calls(stage)
    again = 1.0 + (layout.job.plan.recompute == "full") / 3
    products = float(layout.calls.device_s[calls][layout.calls.multiplies[calls]].sum()) * count * again
    if len(works) > 1:
        passes = total(busiest.forward) + total(busiest.backward)
        computing = (passes.device_s - passes.communication_s) * count
        time_s = max(passes.device_s, passes.host_s) * (count + (len(works) - 1) / len(stage.chunks))
    else:
        step = play_rank(busiest, count)
        computing, time_s = step.computing_s, step.time_s
    others = max(0.0, computing - products)
    waiting = max(0.0, time_s - products - others)
    energy = products / limit + _TRAFFIC_POWER * others + _WAITING_POWER * waiting
    if energy <= time_s or not products:
        return layout
    slower = 1.0 + (energy - time_s) / products
    return dataclasses.replace(layout, calls=layout.calls.tuned(Tuning(products=slower, attention=slower)))


# The work of a rank


def _work(layout: Layout, stage: Stage, step_overhead_s: float, passes: Sequence[tuple[Span, Span]]) -> Work:
    plan, habits = layout.job.plan, layout.profile
    gathers, reduces = _shard_traffic(layout, stage) if plan.shard == "zero3" else ((), ())
    buckets, after_backward, after_optimizer = (
        ((), 0.0, 0.0) if plan.shard == "zero3" else _replica_traffic(layout, stage)
    )
    return Work(
        forward=tuple(forward for forward, _ in passes),
        backward=tuple(backward for _, backward in passes),
        optimizer=_optimizer(layout, stage),
        gathers_s=gathers,
        reduces_s=reduces,
        buckets=buckets,
        after_backward_s=after_backward,
        after_optimizer_s=after_optimizer,
        host_call_s=COLLECTIVE_HOST_S,
        step_overhead_s=step_overhead_s,
        waits_for_device=habits.waits_each_step,
        slowdown=layout.tuning.slowdown,
    )


def _passes(layout: Layout, block: Block) -> tuple[Span, Span]:
    """The forward and the backward pass of a block; recomputation comes before the latter."""
    hides_forward = layout.profile.overlaps_tensor_forward and layout.job.plan.sequence_parallel
    forward = _span(layout, block.piece.forward, hides=hides_forward)
    backward = _span(layout, block.piece.backward, hides=layout.profile.overlaps_tensor) + _accumulation(
        layout, block
    )
    recompute = layout.job.plan.recompute
    if recompute == "full" and block.is_layer:
        return forward, forward + backward
    if recompute == "selective" and block.is_layer:
        half = layout.profile.selective_recompute == "half"
        again = (_without_half_of_products if half else _attention)(layout.graph, block.piece.forward)
        return forward, _span(layout, again) + backward
    return forward, backward


def _accumulation(layout: Layout, block: Block) -> Span:
    """Adding low-precision gradients to fp32 ones, as far as the captured step does not: 10 bytes each, 6 of which it may have."""
    if not layout.profile.keeps_fp32_gradients or layout.job.workload.training.precision not in (
        "bf16",
        "fp8",
    ):
        return Span()
    moved = (block.dense + block.experts) * (4.0 if layout.graph.accumulates else 10.0)
    seconds = moved / (COPY_SHARE * memory_rate(layout.job)) * layout.tuning.traffic
    return Span(0.0, seconds, seconds)


def _without_half_of_products(graph: OpGraph, calls: Index) -> Index:
    """All calls but attention and every second matrix product, whose results are kept."""
    products = [i for i in calls.tolist() if graph.ops[i].operator.name in _PRODUCTS]
    kept = {*products[::2], *_attention(graph, calls).tolist()}
    return np.array([i for i in calls.tolist() if i not in kept], dtype=np.int64)


def _attention(graph: OpGraph, calls: Index) -> Index:
    """The calls between the projections of attention: what selective recomputation runs again."""
    chosen = [
        i
        for i in calls.tolist()
        if "attention" in graph.ops[i].operator.name or graph.ops[i].operator.name in ("bmm", "_softmax")
    ]
    return np.array(chosen, dtype=np.int64)


def _span(layout: Layout, calls: Index, *, hides: bool = False) -> Span:
    costs = layout.calls
    device_s = costs.device_s[calls]
    if hides:
        device_s = device_s - _hidden(layout.graph, calls, device_s)
    return span(costs.host_s[calls], device_s, float(device_s[costs.communicates[calls]].sum()))


def _hidden(graph: OpGraph, calls: Index, device_s: Column) -> Column:
    """What of each collective runs beside a matrix product: the next one, or the last one where gradients or sums are handed out."""
    hidden = np.zeros(len(calls))
    pending: int | None = None
    last: int | None = None
    for position, i in enumerate(calls.tolist()):
        operator = graph.ops[i].operator
        if operator.name in COLLECTIVES and operator.overload == "tensor":
            pending = position
            if operator.name == "reduce_scatter" and last is not None and graph.ops[i].phase == "forward":
                hidden[position], pending, last = min(device_s[position], device_s[last]), None, None
        elif operator.name in _PRODUCTS:
            last = position
            if pending is not None:
                hidden[pending], pending, last = min(device_s[pending], device_s[position]), None, None
    return _HIDDEN_SHARE * hidden


def _optimizer(layout: Layout, stage: Stage) -> Span:
    """The traced optimizer, scaled to the parameters that the rank updates; and clipping, which reads the gradients twice."""
    plan, graph, calls = layout.job.plan, layout.graph, layout.calls
    index = np.flatnonzero(graph.phase_index == PHASES.index("optimizer"))
    traced = sum(
        weight.elements for block in _traced_blocks(graph) for weight in block.weights if weight.trainable
    )
    dense, experts = (
        (1, 1) if plan.shard == "none" else (layout.teams.data.size, layout.teams.expert_data.size)
    )
    updated = sum(
        weight.elements / (experts if weight.expert else dense)
        for weight in stage.weights
        if weight.trainable
    )
    share = updated / max(1, traced)
    device_s = calls.device_s[index] * share
    if plan.offload:
        return _on_host(updated)
    clip_s = 12.0 * updated / memory_rate(layout.job) if layout.profile.clips_gradients else 0.0
    base = span(calls.host_s[index] * min(1.0, share), device_s)
    return base + Span(0.0, clip_s, clip_s)


def _on_host(updated: float) -> Span:
    """Gradients to the host, the update there, weights back."""
    moved = 6.0 * updated / _HOST_LINK_BYTES_PER_S
    update = 16.0 * updated / _HOST_MEMORY_BYTES_PER_S
    return Span(update, moved + update, moved + update)


def _traced_blocks(graph: OpGraph) -> Sequence[Block]:
    everything = blocks(graph)
    if graph.stack is None:
        return everything
    return (everything[0], *everything[1 : 1 + graph.stack.traced], everything[-1])


# What goes between replicas


def _wire_bytes(layout: Layout, elements: float, *, gradients: bool) -> float:
    """Bytes of so many parameters or gradients on the network."""
    habits, precision = layout.profile, layout.job.workload.training.precision
    if gradients and habits.reduces_in_fp32 and precision != "fp16":
        return 4 * elements
    if habits.casts_shards and layout.job.plan.shard == "zero3" and precision.startswith("amp"):
        return 2 * elements
    return _item_bytes(layout.graph) * elements


@functools.lru_cache(maxsize=64)
def _item_bytes(graph: OpGraph) -> int:
    """Of the parameters as the rank holds them."""
    return max((ITEM_BYTES[weight.dtype] for weight in graph.weights), default=4)


def _shard_traffic(layout: Layout, stage: Stage) -> tuple[tuple[float, ...], tuple[float, ...]]:
    data = layout.teams.data
    if data.size == 1:
        return (), ()
    factor = layout.tuning.team(data)
    held = np.array([float(block.dense) for block in stage.blocks])
    gathers = (
        layout.network.time_s("all_gather", held * _wire_bytes(layout, 1.0, gradients=False), data) * factor
    )
    reduces = (
        layout.network.time_s("reduce_scatter", held * _wire_bytes(layout, 1.0, gradients=True), data)
        * factor
    )
    return tuple(gathers.tolist()), tuple(reduces.tolist())


def _replica_traffic(layout: Layout, stage: Stage) -> tuple[tuple[tuple[int, float], ...], float, float]:
    """Buckets beside the backward pass, what waits for its end, and what follows the optimizer."""
    habits, plan, data = layout.profile, layout.job.plan, layout.teams.data
    if plan.servers:
        return (), _server_s(layout, stage), 0.0
    if data.size == 1:
        return (), 0.0, 0.0
    factor = layout.tuning.team(data)
    kind: Kind = "all_reduce" if plan.shard == "none" else "reduce_scatter"
    sizes = _buckets(layout, stage, habits.bucket_bytes if habits.overlaps_reduce else 0.0)
    seconds = layout.network.time_s(kind, np.array([size for _, size in sizes]), data) * factor
    times = list(zip([block for block, _ in sizes], seconds.tolist(), strict=True))
    experts = float(sum(block.experts for block in stage.blocks))
    own = layout.teams.expert_data
    after = 0.0
    if experts and own.size > 1:
        after = layout.network.time_s(
            kind, _wire_bytes(layout, experts, gradients=True), own
        ) * layout.tuning.team(own)
    gather = 0.0
    if plan.shard in ("zero1", "zero2"):
        dense = float(sum(block.dense for block in stage.blocks))
        gather = (
            layout.network.time_s("all_gather", _wire_bytes(layout, dense, gradients=False), data) * factor
        )
    if habits.overlaps_reduce:
        return tuple(times), after, 0.0 if habits.overlaps_gather else gather
    return (), after + sum(seconds for _, seconds in times), 0.0 if habits.overlaps_gather else gather


def _server_s(layout: Layout, stage: Stage) -> float:
    plan, cluster = layout.job.plan, layout.job.cluster
    size = _wire_bytes(layout, float(sum(block.dense for block in stage.blocks)), gradients=True)
    workers = 1 if plan.asynchronous else plan.data or 1
    return layout.network.parameter_server_s(size, workers=workers, servers=plan.servers, nodes=cluster.nodes)


def _buckets(layout: Layout, stage: Stage, bucket_bytes: float) -> list[tuple[int, float]]:
    """Gradients in reverse order of the parameters, in buckets of so many bytes: the block that completes each, and its size."""
    found: list[tuple[int, float]] = []
    filled, limit = 0.0, float(_FIRST_BUCKET) if bucket_bytes else np.inf
    item = _wire_bytes(layout, 1.0, gradients=True)
    for i in range(len(stage.blocks) - 1, -1, -1):
        for weight in reversed(stage.blocks[i].weights):
            if weight.trainable and not weight.expert:
                filled += item * weight.elements
            if filled >= limit:
                found.append((i, filled))
                filled, limit = 0.0, bucket_bytes
    return [*found, (0, filled)] if filled else found


# Stages


def _pipeline(layout: Layout, works: Sequence[Work], step_overhead_s: float) -> Step:
    job, habits = layout.job, layout.profile
    message = _message_s(layout)
    own: list[StageWork] = []
    for stage, work in zip(layout.stages, works, strict=True):
        forward, backward, first = [], [], 0
        for chunk in stage.chunks:
            part = slice(first, first + len(chunk))
            first += len(chunk)
            least = _stall_s(layout) * sum(block.is_layer for block in chunk)
            fetched, handed = sum(work.gathers_s[part]), sum(work.reduces_s[part])
            forward.append(
                max(_lasting(total(work.forward[part]), habits) + layout.tuning.message_s, least / 3, fetched)
            )
            backward.append(
                max(
                    _lasting(total(work.backward[part][::-1]), habits) + layout.tuning.message_s,
                    least * 2 / 3,
                    fetched + handed,
                )
            )
        own.append(StageWork(forward_s=tuple(forward), backward_s=tuple(backward), tail_s=_tail_s(work)))
    time_s, busiest, slots = play_pipeline(own, job.accumulation, message, job.plan.schedule)
    slowest = max(works, key=lambda work: (total(work.forward) + total(work.backward)).device_s)
    passes = total(slowest.forward) + total(slowest.backward)
    computing = (passes.device_s - passes.communication_s) * job.accumulation + slowest.optimizer.device_s
    tail = max(stage.tail_s for stage in own) - slowest.optimizer.device_s
    exposed = passes.communication_s * job.accumulation + max(0.0, tail)
    bubble = max(0.0, time_s - busiest - max(stage.tail_s for stage in own))
    time_s += step_overhead_s
    return Step(
        time_s=time_s, exposed_s=exposed, bubble_s=bubble, computing_s=computing, host_s=max(0.0, time_s - exposed - bubble - computing),
        slots=slots,
    )  # fmt: skip


def _lasting(passes: Span, habits: Profile) -> float:
    """The time of a pass; from a standstill where the host waits for the device at each message."""
    return passes.alone_s if habits.waits_at_messages else passes.steady_s


def _stall_s(layout: Layout) -> float:
    """The framework's own stall of a layer and micro-batch, forward and backward."""
    tensor, stages = layout.teams.tensor.size, layout.teams.stages
    once, each = layout.profile.stalls_s if on_efa(layout.job) else (0.0, 0.0)
    across = layout.teams.tensor.nodes**_STALLS_OVER_NODES
    return (
        (once + each * tensor) * across * layout.tuning.stalls
        if tensor > 1 and layout.job.cluster.nodes > 1 and stages.size > 1
        else 0.0
    )


def _message_s(layout: Layout) -> float:
    """A message from one stage to the next: the activations that the next one reads."""
    size = max(stage.chunks[0][-1].piece.handed_on_bytes for stage in layout.stages[:-1])
    members = layout.teams.stages
    meta = layout.profile.metadata_messages * layout.network.time_s("send", 1024.0, members)
    return layout.network.time_s("send", float(size), members) * layout.tuning.team(members) + meta


def _tail_s(work: Work) -> float:
    """After the last backward pass: what of the gradients is still to be summed up, the optimizer, and handing out parameters."""
    reduce_s = sum(seconds for _, seconds in work.buckets)
    last = total(work.backward).device_s
    exposed = max(work.buckets[-1][1], reduce_s - last) if work.buckets else 0.0
    return exposed + work.after_backward_s + work.optimizer.alone_s + work.after_optimizer_s


# Memory, kernels, bytes


def _memory(layout: Layout, stage: Stage) -> RankMemory:
    layers = sum(block.is_layer for block in stage.blocks)
    stalled = _stall_s(layout) * layers > float(layout.calls.device_s[_calls(stage)].sum())
    found = rank_memory(layout.job, layout.graph, stage, len(layout.stages), layout.profile, stalled=stalled)
    factor, beside = layout.tuning.activations, layout.tuning.memory_bytes
    if factor == 1.0 and not beside:
        return found
    changed = {name: found.by_category[name] * factor for name in ("activations", "temporaries")}
    workspaces = max(0.0, found.by_category["workspaces"] + beside)
    by_category = {**found.by_category, **changed, "workspaces": workspaces}
    return dataclasses.replace(found, by_category=by_category, cached_bytes=found.cached_bytes * factor)


def _kernels(layout: Layout, stage: Stage) -> float:
    return float(layout.calls.kernels[_calls(stage)].sum()) * layout.job.accumulation


def _sent_bytes(layout: Layout, stage: Stage) -> float:
    """What a rank sends over its links in a step."""
    plan, network, teams = layout.job.plan, layout.network, layout.teams
    dense = float(sum(block.dense for block in stage.blocks))
    gradients = _wire_bytes(layout, dense, gradients=True)
    sent = network.traffic_bytes(
        "all_reduce" if plan.shard == "none" else "reduce_scatter", gradients, teams.data
    )
    if plan.shard != "none":
        times = 2 * layout.job.accumulation if plan.shard == "zero3" else 1
        sent += times * network.traffic_bytes(
            "all_gather", _wire_bytes(layout, dense, gradients=False), teams.data
        )
    for i in _calls(stage)[layout.calls.communicates[_calls(stage)]].tolist():
        operator = layout.graph.ops[i].operator
        once = network.traffic_bytes(
            KINDS[operator.name], message_bytes(operator), teams.named(operator.overload)
        )
        sent += layout.job.accumulation * once
    if plan.pipeline > 1:
        sent += 2.0 * layout.job.accumulation * stage.chunks[0][-1].piece.handed_on_bytes
    return sent


def _calls(stage: Stage) -> Index:
    """All calls of a micro-batch on a stage."""
    return np.concatenate(
        [index for block in stage.blocks for index in (block.piece.forward, block.piece.backward)]
    )
