"""Shows a step operator by operator: when each call is issued by the host and runs on the device; and how
much of device and network it uses from beginning to end."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from foretrain.graph import OpGraph
from foretrain.job import Job
from foretrain.step.partition import Block, Index
from foretrain.step.passes import Pass, backward_pass, forward_pass, optimizer_pass
from foretrain.step.pipeline import TAIL
from foretrain.step.play import Step, layer_of
from foretrain.step.playback import Slot, from_idle
from foretrain.step.spans import Column, Mask

_SHOWN = 3
"""Micro-batches of a step that are shown one by one."""


@dataclass(frozen=True, eq=False)
class Stream:
    """Says when each call of a stretch of work was issued by the host and ran on the device, in seconds from
    its start."""

    op: Index
    """Which op of the graph each call is."""
    issued: Column
    start: Column
    end: Column

    @property
    def makespan_s(self) -> float:
        return float(max(self.end.max(initial=0.0), self.issued.max(initial=0.0)))

    @functools.cached_property
    def busy_s(self) -> float:
        """Time with a kernel on the device (calls of one stream do not overlap)."""
        return float((self.end - self.start).sum())


def run(
    op: Index,
    host_s: Column,
    device_s: Column,
    waits: Mask,
    *,
    host_start_s: float = 0.0,
    free_s: float = 0.0,
) -> Stream:
    """Play calls through one host thread and one device queue, which is free from ``free_s`` on.

    A kernel starts when it has been issued and the one before it has ended: ``end[i] = D[i] + max(issued[j] -
    D[j-1], j <= i)`` with D the running sum of device times. At a call in ``waits`` the host reads a result
    and so waits for the device.
    """
    issued = np.empty(len(op))
    end = np.empty(len(op))
    clock, free = host_start_s, free_s
    cuts = [*(np.flatnonzero(waits) + 1).tolist(), len(op)]
    first = 0
    for last in dict.fromkeys(cuts):
        part = slice(first, last)
        issued[part] = clock + np.cumsum(host_s[part])
        done = np.cumsum(device_s[part])
        if last > first:
            slack = np.maximum.accumulate(issued[part] - np.concatenate(([0.0], done[:-1])))
            end[part] = done + np.maximum(slack, free)
            free = float(end[last - 1])
            clock = max(float(issued[last - 1]), free) if waits[last - 1] else float(issued[last - 1])
        first = last
    return Stream(op=op, issued=issued, start=end - device_s, end=end)


@dataclass(frozen=True, eq=False, kw_only=True)
class Timeline:
    """One step of a rank that has no pipeline, from an idle device; of many micro-batches the last few."""

    step: Step
    slots: Sequence[Slot]
    stream: Stream
    host_s: Column
    busy_s: Column
    layers: Sequence[str]
    """Of each call of the stream."""

    @classmethod
    def of(cls, step: Step) -> Timeline:
        layout = step.layout
        slots = from_idle(step.works[0], min(layout.job.accumulation, _SHOWN))
        parts: list[tuple[Stream, Pass, list[str]]] = []
        for slot in slots:
            if slot.phase is not None:
                calls, layers = _calls(step, slot)
                waits = layout.calls.waits[calls.op]
                begun = {"host_start_s": slot.issued_s, "free_s": slot.free_s}
                parts.append((run(calls.op, calls.host_s, calls.occupied_s, waits, **begun), calls, layers))
        return cls(
            step=step,
            slots=slots,
            stream=Stream(
                op=np.concatenate([np.zeros(0, dtype=np.int64), *(stream.op for stream, _, _ in parts)]),
                issued=_joined(stream.issued for stream, _, _ in parts),
                start=_joined(stream.start for stream, _, _ in parts),
                end=_joined(stream.end for stream, _, _ in parts),
            ),
            host_s=_joined(calls.host_s for _, calls, _ in parts),
            busy_s=_joined(calls.busy_s for _, calls, _ in parts),
            layers=[layer for _, _, layers in parts for layer in layers],
        )

    @property
    def graph(self) -> OpGraph:
        return self.step.layout.graph

    def events(self) -> Iterator[dict[str, Any]]:
        """Chrome trace events: the host thread, the device stream, the network, and the bytes allocated."""
        yield _named("process_name", 0, None, "foretrain forecast")
        network = [slot for slot in self.slots if slot.lane == "network"]
        for thread, name in enumerate(("host", "device", *(("network",) if network else ()))):
            yield _named("thread_name", 0, thread, name)
        stream = self.stream
        for position, index in enumerate(stream.op.tolist()):
            op = self.graph.ops[index]
            host_us, device_us = self.host_s[position] * 1e6, self.busy_s[position] * 1e6
            details: dict[str, Any] = {"layer": self.layers[position], "phase": op.phase}
            details |= {"recomputed": True} if op.recomputed else {}
            if host_us:
                start_us = stream.issued[position] * 1e6 - host_us
                yield _event(op.operator.name, op.phase, 0, start_us, host_us, details)
            if device_us:
                details |= {
                    "inputs": [list(spec.shape) for spec in op.operator.inputs[:4]],
                    "flops": op.operator.flops,
                    "bytes": op.operator.bytes,
                }
                yield _event(op.operator.name, op.phase, 1, stream.start[position] * 1e6, device_us, details)
        for slot in network:
            yield _event(slot.name, "network", 2, slot.start_s * 1e6, (slot.end_s - slot.start_s) * 1e6, {})
        yield from self._memory_events()

    def _memory_events(self) -> Iterator[dict[str, Any]]:
        """The bytes of the graph's buffers over time, during the last micro-batch; of a graph with all
        layers."""
        if not self.holds_all_buffers:
            return
        change = np.zeros(len(self.graph.ops) + 1)
        for buffer in self.graph.buffers:
            change[max(buffer.born, 0)] += buffer.size_bytes
            if buffer.dies < len(self.graph.ops):
                change[buffer.dies + 1] -= buffer.size_bytes
        live = np.cumsum(change)
        when = dict(zip(self.stream.op.tolist(), self.stream.issued.tolist(), strict=True))
        for index, time_s in sorted(when.items(), key=lambda item: item[1]):
            yield {
                "ph": "C",
                "pid": 0,
                "name": "memory",
                "ts": time_s * 1e6,
                "args": {"bytes": int(live[index])},
            }

    @property
    def holds_all_buffers(self) -> bool:
        """Whether the buffers of the graph are those of the step: every layer is traced, and runs once."""
        job = self.step.layout.job
        once = job.plan.recompute == "none" or self.graph.recomputes
        return job.cluster.world_size == 1 and once and not job.plan.offload


# Use of device and network


@dataclass(frozen=True, eq=False, kw_only=True)
class StepUse:
    """Says how busy the device of a rank is during a step, and what the rank sends, in stretches of equal
    use.

    Over the step they add up to ``Step.device_busy_s`` and ``Step.sent_bytes``; a rank receives as much as it
    sends.
    """

    ends_s: Column
    """Of the stretches; the last one ends with the step."""
    busy: Column
    """Share of the time with a kernel on the device, or of a CPU's cores."""
    sent_bytes_per_s: Column

    @classmethod
    def of(cls, step: Step) -> StepUse:
        """Read the use of the busiest rank: where its slots are, filled up to what the step has in all."""
        work, moves = _stretches(step)
        ends = [time for one in (*work, *moves) for time in one[:2]]
        points = np.unique([0.0, *(time for time in ends if 0.0 < time < step.time_s), step.time_s])
        lengths, sent = np.diff(points), step.sent
        working, moving = _density(work, points), _density(moves, points)
        inside = _amounting(sent["team"] + sent["stages"], working, lengths)
        return cls(
            ends_s=points[1:],
            busy=_filled(step.device_busy_s, working, lengths),
            sent_bytes_per_s=inside + _amounting(sent["replicas"], moving, lengths),
        )

    @classmethod
    def even(cls, time_s: float, busy: float, sent_bytes_per_s: float) -> StepUse:
        """Spread use evenly from beginning to end."""
        return cls(
            ends_s=np.array([time_s]), busy=np.array([busy]), sent_bytes_per_s=np.array([sent_bytes_per_s])
        )

    @property
    def time_s(self) -> float:
        return float(self.ends_s[-1])

    def waiting(self, before_s: float, after_s: float, steps: int = 1) -> StepUse:
        """Repeat the step, the device idle for a while before each and for longer after the last."""
        length = before_s + self.time_s
        begun = [
            number * length + np.concatenate(([before_s], before_s + self.ends_s)) for number in range(steps)
        ]
        idle = np.zeros(1)
        return StepUse(
            ends_s=np.concatenate([*begun, [steps * length + after_s]]),
            busy=np.concatenate([*[idle, self.busy] * steps, idle]),
            sent_bytes_per_s=np.concatenate([*[idle, self.sent_bytes_per_s] * steps, idle]),
        )

    def sampled(self, ends_s: Column) -> tuple[Column, Column]:
        """Mean busy share and rate of samples that end at these times, of steps that follow one another."""
        points = np.concatenate(([0.0], self.ends_s))
        whole, rest = np.divmod(ends_s, self.time_s)
        means = []
        for level in (self.busy, self.sent_bytes_per_s):
            used = np.concatenate(([0.0], np.cumsum(level * np.diff(points))))
            total = whole * used[-1] + np.interp(rest, points, used)
            means.append(np.diff(total, prepend=0.0) / np.diff(ends_s, prepend=0.0))
        return means[0], means[1]


Stretch = tuple[float, float, float]
"""From, to, and the seconds of work or of communication in between."""


def _stretches(step: Step) -> tuple[list[Stretch], list[Stretch]]:
    """The work of the busiest rank's device in a step, and its exchange with its replicas.

    Micro-batches that were not laid out are put into the middle of those that were, as one stretch.
    """
    alone = len(step.layout.stages) == 1
    slots = [slot for slot in step.time.slots if slot.stage == step.busiest]
    begun = [slot.start_s if slot.lane == "network" or not alone else _begun_s(slot) for slot in slots]
    first, last = min(begun, default=0.0), max((slot.end_s for slot in slots), default=0.0)
    more_s = max(0.0, step.time_s - (last - first)) if step.time.repeated > 1.0 else 0.0
    cut = sorted(slot.end_s for slot in slots)[len(slots) // 2] if slots else 0.0
    work: list[Stretch] = []
    moves: list[Stretch] = []
    again = {"compute": 0.0, "network": 0.0}
    for slot, start in zip(slots, begun, strict=True):
        seconds, by = slot.end_s - slot.start_s, more_s * (start >= cut) - first
        ends = slot.name == TAIL or slot.phase == "optimizer"
        again[slot.lane] += 0.0 if ends else seconds * (step.time.repeated - 1.0)
        if slot.lane == "compute" and not (slot.phase == "optimizer" and step.time.offloaded_s):
            work.append((start + by, slot.end_s + by, seconds))
        if slot.lane == "network" or slot.name == TAIL:
            moves.append((start + by, slot.end_s + by, seconds))
    if more_s:
        work.append((cut - first, cut - first + more_s, again["compute"]))
        moves.append((cut - first, cut - first + more_s, again["network"]))
    turn = _turn(step.layout.job)
    return work, [_middle(move, turn) for move in moves]


def _turn(job: Job) -> float:
    """The share of an exchange in which the link of a worker is busy: servers on a network of their own serve
    workers one after another. What workers of one machine exchange goes over one link, which is busy for all
    of them."""
    if not job.plan.servers or not job.over_network:
        return 1.0
    return min(1.0, job.plan.servers / job.cluster.world_size)


def _middle(stretch: Stretch, share: float) -> Stretch:
    start, end, seconds = stretch
    cut = (1.0 - share) * (end - start) / 2
    return start + cut, end - cut, seconds


def _begun_s(slot: Slot) -> float:
    """Tell when the work of a slot may begin: it is issued, and what it needs is there."""
    return min(slot.start_s, max(slot.issued_s, slot.free_s))


def _density(stretches: Sequence[Stretch], points: Column) -> Column:
    """Seconds of work per second between the points."""
    density = np.zeros(len(points) - 1)
    for start, end, seconds in stretches:
        first, last = np.searchsorted(points, (start, end))
        if last > first:
            density[first:last] += seconds / (end - start)
    return density


def _amounting(total: float, density: Column, lengths: Column) -> Column:
    """Spread an amount in proportion to a density, or evenly where there is none."""
    if not density.any():
        density = np.ones(len(lengths))
    return density * (total / float(density @ lengths))


def _filled(total: float, density: Column, lengths: Column) -> Column:
    """Spread shares of time, of which none is above one: what does not fit goes where there is room."""
    level = np.minimum(_amounting(total, density, lengths), 1.0)
    rest, room = total - float(level @ lengths), float((1.0 - level) @ lengths)
    return level + (1.0 - level) * min(1.0, rest / room) if rest > 0 and room > 0 else level


def trace_events(step: Step, name: str) -> Iterator[dict[str, Any]]:
    """Chrome trace events of a step: operators of a rank, or the stages of a pipeline side by side; Perfetto
    opens them."""
    if len(step.layout.stages) > 1:
        return slot_events(step.time.slots, name)
    return Timeline.of(step).events()


def slot_events(slots: Sequence[Slot], name: str) -> Iterator[dict[str, Any]]:
    """Make each stage of the pipeline a process, its computation and its network a thread each."""
    lanes = {"compute": 0, "network": 1}
    for stage in sorted({slot.stage for slot in slots}):
        yield _named("process_name", stage, None, f"{name}, stage {stage}")
        for lane, thread in lanes.items():
            yield _named("thread_name", stage, thread, lane)
    for slot in slots:
        start, end = round(slot.start_s * 1e6, 3), round(slot.end_s * 1e6, 3)
        times = {"ts": start, "dur": round(end - start, 3)}
        yield {
            "ph": "X",
            "pid": slot.stage,
            "tid": lanes[slot.lane],
            "name": slot.name,
            "cat": slot.lane,
            **times,
        }


def _joined(columns: Iterable[Column]) -> Column:
    return np.concatenate([np.zeros(0), *columns])


def _calls(step: Step, slot: Slot) -> tuple[Pass, list[str]]:
    """The calls of a slot in their order, and the layer of each."""
    layout, stage = step.layout, step.layout.stages[0]
    if slot.phase == "optimizer":
        calls = optimizer_pass(layout, stage)
        return calls, [""] * len(calls.op)
    make = forward_pass if slot.phase == "forward" else backward_pass
    chosen = [stage.blocks[number] for number in slot.blocks]
    passes = [make(layout, block) for block in chosen]
    layers = [
        _layer(step, block, i) for block, one in zip(chosen, passes, strict=True) for i in one.op.tolist()
    ]
    return functools.reduce(Pass.__add__, passes), layers


def _layer(step: Step, block: Block, op: int) -> str:
    return layer_of(step.layout, block, step.layout.graph.ops[op].layer)


def _named(field: str, process: int, thread: int | None, name: str) -> dict[str, Any]:
    place = {} if thread is None else {"tid": thread}
    return {"ph": "M", "pid": process, **place, "name": field, "args": {"name": name}}


def _event(
    name: str, category: str, thread: int, start_us: float, length_us: float, details: Mapping[str, Any]
) -> dict[str, Any]:
    times = {"ts": round(start_us, 3), "dur": round(length_us, 3)}
    return {"ph": "X", "pid": 0, "tid": thread, "name": name, "cat": category, **times, "args": details}
