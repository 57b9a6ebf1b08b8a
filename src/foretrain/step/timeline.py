"""Host and device times per op become when everything happens: the host issues in order, the device runs in order, neither starts early."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from foretrain.graph import PHASES, OpGraph, Phase

Column = npt.NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class Stream:
    """When each call of a stretch of work was issued by the host and ran on the device, in seconds from its start."""

    op: npt.NDArray[np.int64]
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
    op: npt.NDArray[np.int64],
    host_s: Column,
    device_s: Column,
    waits: npt.NDArray[np.bool_],
    *,
    host_start_s: float = 0.0,
) -> Stream:
    """Play calls through one host thread and one device queue.

    A kernel starts when it has been issued and the one before it has ended: ``end[i] = D[i] + max(issued[j] - D[j-1], j <= i)``
    with D the running sum of device times. At a call in ``waits`` the host reads a result and so waits for the device.
    """
    issued = np.empty(len(op))
    end = np.empty(len(op))
    clock, free = host_start_s, 0.0
    cuts = [*(np.flatnonzero(waits) + 1).tolist(), len(op)]
    first = 0
    for last in dict.fromkeys(cuts):
        part = slice(first, last)
        issued[part] = clock + np.cumsum(host_s[part])
        done = np.cumsum(device_s[part])
        slack = (
            np.maximum.accumulate(issued[part] - np.concatenate(([0.0], done[:-1])))
            if last > first
            else issued[part]
        )
        end[part] = done + np.maximum(slack, free)
        if last > first:
            free = float(end[last - 1])
            clock = max(float(issued[last - 1]), free) if waits[last - 1] else float(issued[last - 1])
        first = last
    return Stream(op=op, issued=issued, start=end - device_s, end=end)


@dataclass(frozen=True, kw_only=True, eq=False)
class Timeline:
    """One optimizer step: the stream in the steady state, each phase on its own, and totals."""

    graph: OpGraph
    host_s: Column
    device_s: Column
    kernels_per_call: Column
    accumulation: int = 1
    step_overhead_s: float = 0.0
    gap_s: float = 0.0
    """Time between two kernels that follow at once; the device is not busy in it."""

    @functools.cached_property
    def _occupied_s(self) -> Column:
        return self.device_s + self.gap_s * self.kernels_per_call

    @functools.cached_property
    def _waits(self) -> npt.NDArray[np.bool_]:
        return np.array([op.operator.name == "_local_scalar_dense" for op in self.graph.ops], dtype=np.bool_)

    def _play(self, op: npt.NDArray[np.int64], overhead_s: float = 0.0) -> Stream:
        return run(op, self.host_s[op], self._occupied_s[op], self._waits[op], host_start_s=overhead_s)

    def _calls(self, micro_batches: int) -> npt.NDArray[np.int64]:
        """The ops of one step: forward and backward once per micro-batch, then the optimizer."""
        optimizer = self.graph.phase_index == PHASES.index("optimizer")
        return np.concatenate([np.tile(np.flatnonzero(~optimizer), micro_batches), np.flatnonzero(optimizer)])

    @functools.cached_property
    def step(self) -> Stream:
        """One step as a profiler would show it, from an idle device; at most three micro-batches are laid out."""
        return self._play(self._calls(min(self.accumulation, 3)), self.step_overhead_s)

    @functools.cached_property
    def step_time_s(self) -> float:
        """Time per step when steps follow one another without a pause: the host may already issue the next one."""
        laid_out = min(self.accumulation, 3)
        time_s = self._steady(self._calls(laid_out), self.step_overhead_s)
        if self.accumulation > laid_out:
            micro_batch = np.flatnonzero(self.graph.phase_index != PHASES.index("optimizer"))
            time_s += self._steady(micro_batch, 0.0) * (self.accumulation - laid_out)
        return max(time_s, self.host_issue_s, self.device_busy_s)

    def _steady(self, op: npt.NDArray[np.int64], overhead_s: float) -> float:
        once = self._play(op, overhead_s)
        if not len(op):
            return overhead_s
        host = np.concatenate([[overhead_s + self.host_s[op[0]]], self.host_s[op[1:]]])
        twice = run(
            np.tile(op, 2), np.tile(host, 2), np.tile(self._occupied_s[op], 2), np.tile(self._waits[op], 2)
        )
        return float(twice.end[-1] - once.end[-1])

    def phase_time_s(self, phase: Phase) -> float:
        """One phase alone, from an idle device until its last kernel ends."""
        op = np.flatnonzero(self.graph.phase_index == PHASES.index(phase))
        return self._play(op).makespan_s * (1 if phase == "optimizer" else self.accumulation)

    @property
    def device_busy_s(self) -> float:
        calls = self._repeats()
        return float((self.device_s * calls).sum())

    @property
    def kernels(self) -> float:
        """Kernels that the device runs in a step."""
        return float((self.kernels_per_call * self._repeats()).sum())

    @property
    def bytes_moved(self) -> float:
        """Least memory traffic of a step."""
        return float((self.graph.column("bytes") * self._repeats()).sum())

    @property
    def host_issue_s(self) -> float:
        return float((self.host_s * self._repeats()).sum()) + self.step_overhead_s

    def _repeats(self) -> Column:
        return np.where(self.graph.phase_index == PHASES.index("optimizer"), 1.0, float(self.accumulation))

    def by(self, what: str) -> dict[str, float]:
        """Device seconds per step by ``phase``, ``operator`` or ``layer``, largest first."""
        weights = self.device_s * self._repeats()
        totals: dict[str, float] = {}
        for op, value in zip(self.graph.ops, weights.tolist(), strict=True):
            if value:
                name = {
                    "phase": op.phase,
                    "operator": op.operator.name,
                    "layer": op.layer or f"({op.phase})",
                }[what]
                totals[name] = totals.get(name, 0.0) + value
        return dict(sorted(totals.items(), key=lambda item: -item[1]))

    def trace_events(self) -> Iterator[dict[str, Any]]:
        """Chrome trace events of one step: the host thread, the device stream and the bytes allocated; Perfetto opens them."""
        for process, name in ((0, "foretrain forecast"),):
            yield {"ph": "M", "pid": process, "name": "process_name", "args": {"name": name}}
        for thread, name in ((0, "host"), (1, "device")):
            yield {"ph": "M", "pid": 0, "tid": thread, "name": "thread_name", "args": {"name": name}}
        stream = self.step
        for position, index in enumerate(stream.op.tolist()):
            op = self.graph.ops[index]
            host_us, device_us = self.host_s[index] * 1e6, self.device_s[index] * 1e6
            details = {"layer": op.layer, "phase": op.phase}
            if host_us:
                yield _event(
                    op.operator.name, op.phase, 0, stream.issued[position] * 1e6 - host_us, host_us, details
                )
            if device_us:
                shapes = [list(spec.shape) for spec in op.operator.inputs[:4]]
                more = {**details, "inputs": shapes, "flops": op.operator.flops, "bytes": op.operator.bytes}
                yield _event(op.operator.name, op.phase, 1, stream.start[position] * 1e6, device_us, more)
        yield from self._memory_events(stream)

    def _memory_events(self, stream: Stream) -> Iterator[dict[str, Any]]:
        """The bytes of the graph's buffers over time, during the last micro-batch."""
        change = np.zeros(len(self.graph.ops) + 1)
        for buffer in self.graph.buffers:
            change[max(buffer.born, 0)] += buffer.size_bytes
            if buffer.dies < len(self.graph.ops):
                change[buffer.dies + 1] -= buffer.size_bytes
        live = np.cumsum(change)
        when = dict(zip(stream.op.tolist(), stream.issued.tolist(), strict=True))
        for index, time_s in sorted(when.items(), key=lambda item: item[1]):
            yield {
                "ph": "C",
                "pid": 0,
                "name": "memory",
                "ts": time_s * 1e6,
                "args": {"bytes": int(live[index])},
            }


def _event(
    name: str, category: str, thread: int, start_us: float, length_us: float, details: Mapping[str, Any]
) -> dict[str, Any]:
    return {
        "ph": "X",
        "pid": 0,
        "tid": thread,
        "name": name,
        "cat": category,
        "ts": round(start_us, 3),
        "dur": round(length_us, 3),
        "args": details,
    }
