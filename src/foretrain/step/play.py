"""Plays a job that is laid out on its ranks: its step, with the work of each rank, its memory, kernels and
bytes."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from foretrain.forecast import RankMemory, fullest_of
from foretrain.graph import OpGraph, Phase
from foretrain.job import Job
from foretrain.step.calls import COLLECTIVE_HOST_S
from foretrain.step.exchange import (
    ShardTraffic,
    replica_traffic,
    sent_bytes,
    shard_traffic,
    slowdown,
)
from foretrain.step.layout import Layout
from foretrain.step.partition import Block, Index, Stage
from foretrain.step.passes import (
    Pass,
    is_recomputed,
    kind_of,
    optimizer_pass,
    passes_by_kind,
    recomputed,
    stage_kinds,
    traced_parameters,
    update_share,
)
from foretrain.step.pipeline import pipeline_step, pipeline_time_s
from foretrain.step.playback import StepTime, Work, play_rank, shares
from foretrain.step.power import within_power
from foretrain.step.sharding import syncs_last
from foretrain.step.spans import Span, total
from foretrain.step.stage_memory import memory_by_group

OUTSIDE = "(communication outside of layers)"
"""Of the device's time: it waits for gradients and parameters, or computes slower beside them."""
RECOMPUTED = "recomputed"
"""Of the device's time by phase: what the backward pass computes again."""
_JITTER = 0.01
"""Standard deviation of the step time from rank to rank, as a share of it."""
_ROUNDING = 1e-9
_CPU_EXCHANGE, _CPU_SERVED = 0.2, 0.05
"""Of its cores' time, what a CPU worker uses while its step waits for its replicas, with which it copies and
adds up, and for parameter servers; fitted to ``data/cpu16_campaign.jsonl.zst``."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Step:
    """One optimizer step of a job: when everything happens, and what the busiest rank does and each rank
    holds."""

    layout: Layout
    time: StepTime
    works: tuple[Work, ...]
    """Of a rank of each stage."""
    memory: tuple[RankMemory, ...]
    phases_s: dict[Phase, float]
    """Of the busiest stage, by its clock in a step that begins idle and waits for no other rank."""
    device_busy_s: float
    """With a kernel on the device, or a CPU's cores at work: computation; on a GPU the collectives that it
    waits for, whose kernels run, and on a CPU the work that an exchange is for its cores. Not the gaps
    between kernels, nor waiting for parameter servers on a GPU."""
    host_issue_s: float
    """From an idle start until all is issued, with what the host waits for the device where it reads."""
    kernels: float
    bytes_moved: float
    """Least memory traffic of the busiest rank."""
    sent: Mapping[str, float]
    """Bytes that the busiest rank sends in a step over its links, by whom they go to: ``replicas`` (or
    parameter servers), ``team`` (inside of layers), ``stages``."""
    busiest: int
    """The stage whose ranks compute longest."""
    totals: dict[str, dict[str, float]] = field(default_factory=dict, repr=False)
    """Sums of the calls' device seconds that were asked for; no scaling of the step changes them."""

    def of_job(self, job: Job) -> Step:
        """Give the step of a job that differs in its length alone."""
        return dataclasses.replace(self, layout=self.layout.of_job(job))

    @property
    def time_s(self) -> float:
        return self.time.time_s

    @property
    def of_busiest(self) -> Layout:
        """The layout as the ranks that compute longest see it."""
        return self.layout.at(self.layout.stages[self.busiest])

    @property
    def sent_bytes(self) -> float:
        """Count the bytes that one rank sends in a step, over its links."""
        return sum(self.sent.values())

    @property
    def causes_s(self) -> dict[str, float]:
        """Seconds by cause that add up to the step; parts that were found one by one may overlap a little."""
        return _causes(self.time)

    def scaled(self, factor: float) -> Step:
        """Scale the time of the step; phases and calls stay as they were costed.

        Where the device waits for the host longer than the step changes, this wait changes and the device
        works as before; else all times of the schedule are multiplied.
        """
        time, more = self.time.scaled(factor), self.time_s * (factor - 1.0)
        if self.time.host_s < abs(more):
            return dataclasses.replace(self, time=time, device_busy_s=self.device_busy_s * factor)
        waiting = dataclasses.replace(
            self.time, time_s=time.time_s, slots=time.slots, host_s=self.time.host_s + more
        )
        return dataclasses.replace(self, time=waiting)

    def by(self, grouping: str) -> dict[str, float]:
        """Device seconds by ``phase``, ``operator`` or ``layer``, largest first: of a rank of every stage
        together.

        Without a pipeline they add up to ``device_busy_s``: what of it is in no call, mostly waiting for
        gradients and parameters, is a part of its own.
        """
        if grouping not in self.totals:
            self.totals[grouping] = _totals(self.layout, list(self._passes()), grouping)
        totals = self.totals[grouping]
        if len(self.layout.stages) == 1:
            totals = _up_to(self.device_busy_s, totals)
        return dict(sorted(totals.items(), key=lambda item: -item[1]))

    def by_layer_and_operator(self) -> dict[tuple[str, str, str], float]:
        """Device seconds by layer, operator and phase, as ``by`` has them by one of these; a layer that was
        traced stands for all that it is like."""
        times: dict[tuple[Phase, int], tuple[Pass, int]] = {}
        for phase, _, calls, count in self._passes():
            before = times.get((phase, id(calls)), (calls, 0))
            times[phase, id(calls)] = (calls, before[1] + count)
        totals: dict[tuple[str, str, str], float] = {}
        for (phase, _), (calls, count) in times.items():
            for key, value in _by_three(self.layout.graph, phase, calls):
                totals[key] = totals.get(key, 0.0) + value * count
        if len(self.layout.stages) > 1:
            return totals
        whole = _up_to(self.device_busy_s, {"": sum(totals.values())})
        scale = whole[""] / (sum(totals.values()) or 1.0)
        totals = {key: value * scale for key, value in totals.items()}
        return totals | ({(OUTSIDE, OUTSIDE, OUTSIDE): whole[OUTSIDE]} if OUTSIDE in whole else {})

    def _passes(self) -> Iterator[Placed]:
        layout, passes = self.layout, passes_by_kind(self.layout)
        for stage in layout.stages:
            times = layout.job.accumulation // stage.copies
            for block in stage.blocks:
                forward, backward = passes[kind_of(layout, stage, block)]
                yield "forward", block, forward, times
                yield "backward", block, backward, times
            yield "optimizer", None, optimizer_pass(layout.at(stage), stage), 1


def _up_to(whole: float, parts: dict[str, float]) -> dict[str, float]:
    """The parts and what is left of the whole, or the parts made smaller where they are more than it."""
    total = sum(parts.values())
    if total > whole:
        return {name: seconds * whole / total for name, seconds in parts.items()}
    return {**parts, OUTSIDE: whole - total} if whole - total > _ROUNDING * whole else parts


def _causes(time: StepTime) -> dict[str, float]:
    parts = shares(time)
    whole = sum(parts.values())
    scale = time.time_s / (whole or 1.0)
    return {name: seconds * scale if seconds > _ROUNDING * whole else 0.0 for name, seconds in parts.items()}


def play(layout: Layout) -> Step:
    """Play the step of a job, and what each of its ranks holds and does."""
    (layout, works), job = _limited(layout), layout.job
    time = _delayed(_time(layout, works), _waiting_ranks(job))
    busiest = max(range(len(works)), key=lambda i: works[i].passes.device_s)
    stage = layout.stages[busiest]
    work, own = works[busiest], layout.at(stage)
    calls = _StageCalls.of(own, stage)
    forward, backward = total(work.forward), total(work.backward[::-1])
    passes, micro_batches = forward + backward, job.accumulation // stage.copies
    time = dataclasses.replace(
        time,
        computing_s=max(0.0, time.computing_s - calls.gaps_s - calls.offloaded_s),
        gaps_s=calls.gaps_s,
        offloaded_s=calls.offloaded_s,
    )
    issued_s, _ = (passes * micro_batches + work.optimizer).after(0.0, 0.0)
    return Step(
        layout=layout,
        time=time,
        works=tuple(works),
        memory=max(memory_by_group(layout), key=lambda ranks: fullest_of(ranks).fullness),
        phases_s=_phases(forward, backward, work.optimizer, micro_batches),
        device_busy_s=_busy_s(own, work, time),
        host_issue_s=max(0.0, issued_s + own.step_overhead_s),  # a calibration may take time off
        kernels=calls.kernels,
        bytes_moved=calls.bytes_moved,
        sent=sent_bytes(own, stage),
        busiest=busiest,
    )


def step_time_s(layout: Layout) -> float:
    """Time a step alone, as ``play`` has it."""
    (layout, works), ranks = _limited(layout), _waiting_ranks(layout.job)
    if len(works) > 1:
        return pipeline_time_s(layout, works) * (1.0 + straggling(ranks))
    return _delayed(_time(layout, works), ranks).time_s


def _limited(layout: Layout) -> tuple[Layout, list[Work]]:
    """Give the work of the ranks, within the power of their boards."""
    works = _works(layout)
    limited = within_power(layout, works)
    return (layout, works) if limited is layout else (limited, _works(limited))


def _phases(forward: Span, backward: Span, optimizer: Span, accumulation: int) -> dict[Phase, float]:
    """Time the phases by the device's clock in a step that begins idle, each from the end of the one before:
    they add up to that step. Micro-batches after the third are as long as it."""
    parts: dict[Phase, float] = {"forward": 0.0, "backward": 0.0, "optimizer": 0.0}
    clocks = (0.0, 0.0)

    def run(phase: Phase, span: Span, times: int = 1) -> None:
        nonlocal clocks
        before, clocks = clocks[1], span.after(*clocks)
        parts[phase] += times * (clocks[1] - before)

    for number in range(min(accumulation, 3)):
        times = accumulation - 2 if number == 2 else 1
        run("forward", forward, times)
        run("backward", backward, times)
    run("optimizer", optimizer)
    return parts


@dataclass(frozen=True, slots=True, kw_only=True)
class _StageCalls:
    """Adds up the calls of a rank in a step."""

    kernels: float
    bytes_moved: float
    gaps_s: float
    """Between kernels that follow at once."""
    offloaded_s: float
    """The update, where the host makes it."""

    @classmethod
    def of(cls, layout: Layout, stage: Stage) -> _StageCalls:
        moved = layout.graph.column("bytes")
        again = [recomputed(layout, block) for block in stage.blocks]
        index, times = np.concatenate([stage.calls, *again]), layout.job.accumulation // stage.copies
        update = optimizer_pass(layout, stage)
        offloaded = update.beside_s if layout.job.plan.offload else 0.0
        return cls(
            kernels=float(layout.calls.kernels[index].sum()) * times
            + float(layout.calls.kernels[update.op].sum()) * _tensors_share(layout, stage),
            bytes_moved=float(moved[index].sum()) * times
            + float(moved[update.op].sum()) * update_share(layout, stage)[0],
            gaps_s=float(layout.calls.gaps_s[index].sum()) * times + float(update.gaps_s.sum()),
            offloaded_s=offloaded,
        )


def _tensors_share(layout: Layout, stage: Stage) -> float:
    """Parameter tensors that a rank updates beside those that were traced."""
    _, traced = traced_parameters(layout.graph)
    return sum(w.trainable for w in stage.weights) / traced if traced else 1.0


Placed = tuple[Phase, Block | None, Pass, int]
"""A pass of a rank, and how often it runs in a step."""


def _totals(layout: Layout, passes: Sequence[Placed], grouping: str) -> dict[str, float]:
    """Device seconds of passes by ``phase``, ``operator`` or ``layer``."""
    names: dict[str, int] = {}
    codes = [_codes(layout, one, grouping, names) for one in passes] if grouping != "operator" else []
    seconds = [calls.busy_s * times for _, _, calls, times in passes]
    if grouping == "operator":
        known, which = layout.graph.operator_names
        names.update((name, code) for code, name in enumerate(known))
        codes = [which[np.concatenate([calls.op for _, _, calls, _ in passes])]]
    sums = np.bincount(np.concatenate(codes), np.concatenate(seconds), minlength=len(names)).tolist()
    totals = {name: total_s for name, total_s in zip(names, sums, strict=True) if total_s}
    for phase, _, calls, times in passes:
        if calls.beside_s:
            name = phase if grouping == "phase" else f"({phase})"
            totals[name] = totals.get(name, 0.0) + calls.beside_s * times
    return totals


def _codes(layout: Layout, placed: Placed, grouping: str, names: dict[str, int]) -> Index:
    """Say what each call of a pass counts as, by numbers of ``names``."""
    phase, block, calls, _ = placed
    if grouping == "phase":
        plain = names.setdefault(phase, len(names))
        again = is_recomputed(layout.graph, calls.op) if phase == "backward" else None
        if again is None or not again.any():
            return np.full(len(calls.op), plain)
        return np.where(again, names.setdefault(RECOMPUTED, len(names)), plain)
    paths, which = layout.graph.layers
    used, place = np.unique(which[calls.op], return_inverse=True)
    layers = [layer_of(layout, block, paths[i]) or f"({phase})" for i in used.tolist()]
    own = np.array([names.setdefault(name, len(names)) for name in layers], dtype=np.int64)
    return own[place]


def _by_three(graph: OpGraph, phase: Phase, calls: Pass) -> Iterator[tuple[tuple[str, str, str], float]]:
    """Device seconds of a pass by layer, operator and phase, and what it has beside its calls."""
    (layers, of_layer), (operators, of_operator) = graph.layers, graph.operator_names
    again = is_recomputed(graph, calls.op) & (phase == "backward")
    codes = (of_layer[calls.op] * len(operators) + of_operator[calls.op]) * 2 + again
    used, place = np.unique(codes, return_inverse=True)
    sums = np.bincount(place, calls.busy_s, minlength=len(used))
    for code, seconds in zip(used.tolist(), sums.tolist(), strict=True):
        layer, operator = divmod(code // 2, len(operators))
        if seconds:
            yield (
                (layers[layer] or f"({phase})", operators[operator], RECOMPUTED if code % 2 else phase),
                seconds,
            )
    if calls.beside_s:
        yield (f"({phase})", f"({phase})", phase), calls.beside_s


def layer_of(layout: Layout, block: Block | None, path: str) -> str:
    """The path in the model: a traced layer stands for others at their own places."""
    stack = layout.graph.stack
    if stack is None or block is None or block.number is None or (traced := stack.layer_of(path)) is None:
        return path
    start = f"{stack.path}.{traced}"
    return f"{stack.path}.{block.number}{path[len(start) :]}"


def _works(layout: Layout) -> list[Work]:
    passes = {
        kind: (forward.span, backward.span) for kind, (forward, backward) in passes_by_kind(layout).items()
    }
    works: dict[Hashable, Work] = {}
    for kind, stage in zip(kinds := stage_kinds(layout), layout.stages, strict=True):
        if kind not in works:
            chunks = [[passes[kind_of(layout, stage, block)] for block in chunk] for chunk in stage.chunks]
            begun = [one for chunk in chunks for one in _with_own_time(layout, chunk)]
            works[kind] = _work(layout.at(stage), stage, begun)
    return [works[kind] for kind in kinds]


def _with_own_time(layout: Layout, chunk: Sequence[tuple[Span, Span]]) -> list[tuple[Span, Span]]:
    """The passes of a chunk with the host's time that belongs to no operator, before the first of each."""
    own_s = layout.profile.pass_s * layout.tuning.host
    if not own_s or not chunk:
        return list(chunk)
    own = Span(own_s, 0.0, own_s)
    forward, backward = ([one[i] for one in chunk] for i in (0, 1))
    forward[0], backward[-1] = own + forward[0], own + backward[-1]
    return list(zip(forward, backward, strict=True))


def _work(layout: Layout, stage: Stage, passes: Sequence[tuple[Span, Span]]) -> Work:
    habits, sharded = layout.profile, layout.job.plan.shard == "zero3"
    traffic = shard_traffic(layout, stage) if sharded else ShardTraffic()
    buckets, after_backward, after_optimizer = ((), 0.0, 0.0) if sharded else replica_traffic(layout, stage)
    once = sharded and layout.job.trains and syncs_last(layout.job, habits)
    if once and len(layout.stages) > 1:
        buckets, after_optimizer = traffic.buckets, traffic.first_s
        traffic = dataclasses.replace(traffic, gathers_s=(), reduces_s=(), copies_s=())
    hidden = total([forward for forward, _ in passes])
    if habits.overlaps_gather or once:  # at most the next forward pass hides it
        after_optimizer = max(0.0, after_optimizer - max(hidden.host_s, hidden.device_s))
    return Work(
        forward=tuple(forward for forward, _ in passes),
        backward=tuple(backward for _, backward in passes) if layout.job.trains else (),
        optimizer=optimizer_pass(layout, stage).span,
        gathers_s=traffic.gathers_s,
        again_s=traffic.again_s,
        reduces_s=traffic.reduces_s,
        copies_s=traffic.copies_s,
        syncs_last=once,
        prefetches=habits.prefetches,
        hands_out_beside=habits.overlaps_reduce,
        host_waits=habits.sharding == "flat",
        buckets=buckets,
        after_backward_s=after_backward,
        after_optimizer_s=after_optimizer,
        host_call_s=COLLECTIVE_HOST_S,
        step_overhead_s=layout.step_overhead_s,
        waits_for_device=layout.profile.waits_each_step,
        slowdown=slowdown(layout, stage),
    )


def _time(layout: Layout, works: Sequence[Work]) -> StepTime:
    return pipeline_step(layout, works) if len(works) > 1 else play_rank(works[0], layout.job.accumulation)


def _waiting_ranks(job: Job) -> int:
    """Ranks that wait for one another: all in training, those that share a batch in inference."""
    return job.cluster.world_size // (1 if job.trains else job.plan.data or 1)


def straggling(ranks: int) -> float:
    """Give the time that the slowest of many ranks takes longer, as a share of a step: the expected maximum
    of as many normal deviations."""
    return _JITTER * math.sqrt(2 * math.log(ranks))


def _delayed(step: StepTime, ranks: int) -> StepTime:
    """Add the wait for the slowest of many ranks."""
    longer = step.time_s * straggling(ranks)
    return dataclasses.replace(step, time_s=step.time_s + longer, straggler_s=longer)


def _busy_s(layout: Layout, work: Work, time: StepTime) -> float:
    """Time the device's work in a step, as ``Step.device_busy_s`` says it."""
    causes = _causes(time)
    exposed, servers = causes["exposed communication"], layout.job.plan.servers
    device = layout.site.groups[0].device
    if device.is_cpu:
        working = causes["computation"] + (_CPU_SERVED if servers else _CPU_EXCHANGE) * exposed
        return working / layout.site.workers_per_core(device)
    served = work.after_backward_s if servers else 0.0
    return causes["computation"] + max(0.0, exposed - served)
