"""Tells of a forecast what a page draws beyond its JSON: the parts of a step, its timeline, its memory over
time, and the figures that its time is derived from."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from foretrain.costs.learned import LearnedCosts
from foretrain.forecast import Forecast
from foretrain.graph import CATEGORIES, PHASES, OpGraph
from foretrain.predictors.base import Predictor
from foretrain.predictors.whitebox import RatingPredictor
from foretrain.report.breakdown import kinds_of_layers
from foretrain.step.play import Step
from foretrain.step.playback import Slot
from foretrain.step.power import at_peak_s
from foretrain.step.timeline import Timeline

Column = npt.NDArray[np.float64]

FINE_SPANS = 3000
"""Calls that are drawn of the job itself, the longest."""
COARSE_SPANS = 120
"""Stretches of one layer that are drawn of other combinations."""
_MOST_PARTS = 60
_LEAST_PART = 0.002
"""Of the device's time, below which parts are put together."""
_MOST_POINTS = 400
OTHER = "(smaller parts)"

_SLOT_KINDS = {
    "F": "forward", "B": "backward", "I": "backward", "W": "weights", "O": "optimizer",
}  # fmt: skip
"""What the first letter of a slot on the timeline of a stage stands for."""


def details(forecast: Forecast, predictor: Predictor | None = None, *, fine: bool = True) -> dict[str, Any]:
    """Gather what can be drawn of the step; empty where the predictor does not look inside it."""
    step = forecast.step
    if step is None:
        return {}
    sections: dict[str, Any] = {
        "parts": parts(step),
        "timeline": timeline(step, FINE_SPANS if fine else COARSE_SPANS, fine=fine),
        "derivation": derivation(forecast, step, predictor),
    }
    if fine and len(step.layout.stages) == 1:
        drawn = Timeline.of(step)
        if drawn.holds_all_buffers:
            sections["memory_over_step"] = memory_over_step(drawn)
    if len(forecast.ranks) > 1:
        sections["stages"] = [
            {"stage": rank.stage, "by_category": dict(rank.by_category)} for rank in forecast.ranks
        ]
    return sections


# The parts of a step


def parts(step: Step) -> dict[str, list[Any]]:
    """Device seconds by layer, operator and phase, as columns; layers that repeat are one."""
    seconds = step.by_layer_and_operator()
    names = kinds_of_layers(dict.fromkeys(layer for layer, _, _ in seconds))
    merged: dict[tuple[str, str, str], float] = {}
    for (layer, operator, phase), value in seconds.items():
        key = (names[layer], operator, phase)
        merged[key] = merged.get(key, 0.0) + value
    whole = sum(merged.values()) or 1.0
    largest = sorted(merged.items(), key=lambda item: -item[1])
    kept = [item for item in largest[:_MOST_PARTS] if item[1] >= _LEAST_PART * whole]
    rest: dict[str, float] = {}
    for (_, _, phase), value in largest[len(kept) :]:
        rest[phase] = rest.get(phase, 0.0) + value
    rows = sorted([*kept, *(((OTHER, OTHER, phase), value) for phase, value in rest.items())])
    return {
        "layer": [key[0] for key, _ in rows],
        "operator": [key[1] for key, _ in rows],
        "phase": [key[2] for key, _ in rows],
        "seconds": [value for _, value in rows],
    }


# The timeline


def timeline(step: Step, most: int, *, fine: bool) -> dict[str, Any]:
    """Stretches of a step as columns: the calls of host, device and network of a rank, or the passes of each
    stage of a pipeline."""
    if len(step.layout.stages) > 1:
        return _of_stages(step, min(most, 1200 if fine else 240))
    drawn = Timeline.of(step)
    spans = list(_calls(drawn)) if fine else _layers(drawn)
    note = "The host issues, the device runs; from an idle device."
    return _columns(["host", "device", "network"], spans, most, note)


Span = tuple[int, str, str, float, float]
"""Lane, kind, name, start and length in seconds."""


def _columns(lanes: Sequence[str], spans: Sequence[Span], most: int, note: str) -> dict[str, Any]:
    """The longest spans, in the order of their start."""
    shown = sorted(sorted(spans, key=lambda span: -span[4])[:most], key=lambda span: (span[0], span[3]))
    used = [lane for number, lane in enumerate(lanes) if any(span[0] == number for span in spans)]
    places = {number: used.index(lane) for number, lane in enumerate(lanes) if lane in used}
    if len(shown) < len(spans):
        note += f" The {len(shown):,} longest of {len(spans):,} stretches are drawn."
    return {
        "lanes": used,
        "lane": [places[span[0]] for span in shown],
        "kind": [span[1] for span in shown],
        "name": [span[2] for span in shown],
        "start": [span[3] for span in shown],
        "length": [span[4] for span in shown],
        "end_s": max((span[3] + span[4] for span in spans), default=0.0),
        "note": note,
    }


def _calls(drawn: Timeline) -> list[Span]:
    """List every call, on the host and on the device."""
    stream, graph = drawn.stream, drawn.graph
    rows = zip(
        stream.op.tolist(), drawn.layers, stream.issued.tolist(), stream.start.tolist(),
        drawn.host_s.tolist(), drawn.busy_s.tolist(), strict=True,
    )  # fmt: skip
    spans: list[Span] = []
    for index, layer, issued, start, host_s, busy_s in rows:
        op = graph.ops[index]
        name = f"{op.operator.name} {layer}".rstrip()
        kind = "recomputed" if op.recomputed else op.phase
        if host_s:
            spans.append((0, kind, name, issued - host_s, host_s))
        if busy_s:
            spans.append((1, kind, name, start, busy_s))
    return [*spans, *_network(drawn.slots)]


def _layers(drawn: Timeline) -> list[Span]:
    """Join what follows at once in one layer and phase to one stretch on the host and one on the device."""
    stream, graph = drawn.stream, drawn.graph
    phases = [graph.ops[i].phase for i in stream.op.tolist()]
    spans: list[Span] = []
    first = 0
    for (layer, phase), group in itertools.groupby(zip(drawn.layers, phases, strict=True)):
        last = first + sum(1 for _ in group) - 1
        begun = float(stream.issued[first] - drawn.host_s[first])
        spans.append((0, phase, layer or phase, begun, float(stream.issued[last]) - begun))
        start = float(stream.start[first])
        spans.append((1, phase, layer or phase, start, float(stream.end[last]) - start))
        first = last + 1
    return [*(span for span in spans if span[4] > 0), *_network(drawn.slots)]


def _network(slots: Sequence[Slot]) -> list[Span]:
    return [
        (2, "network", slot.name, slot.start_s, slot.end_s - slot.start_s)
        for slot in slots
        if slot.lane == "network" and slot.end_s > slot.start_s
    ]


def _of_stages(step: Step, most: int) -> dict[str, Any]:
    slots = step.time.slots
    keys = sorted({(slot.stage, slot.lane) for slot in slots})
    lanes = [f"stage {stage}" if lane == "compute" else f"stage {stage}, {lane}" for stage, lane in keys]
    places = {key: number for number, key in enumerate(keys)}
    spans = [
        (
            places[slot.stage, slot.lane],
            "network" if slot.lane == "network" else _SLOT_KINDS.get(slot.name[:1].upper(), "forward"),
            slot.name,
            slot.start_s,
            slot.end_s - slot.start_s,
        )
        for slot in slots
    ]
    end_s = max((slot.end_s for slot in slots), default=0.0)
    note = "The passes of one rank of each stage."
    if end_s < 0.9 * step.time_s:
        note += f" {end_s / step.time_s:.0%} of the step: further micro-batches go on alike."
    return _columns(lanes, spans, most, note)


# Memory over a step


def memory_over_time(timeline: Timeline) -> tuple[Column, dict[str, Column]]:
    """Say when each op of the (last) micro-batch is issued, and the bytes alive then, by category."""
    stream = timeline.stream
    last = dict(zip(stream.op.tolist(), stream.issued.tolist(), strict=True))
    order = sorted(last, key=lambda op: last[op])
    live = {category: _live_bytes(timeline.graph, category)[order] for category in CATEGORIES}
    return np.array([last[op] for op in order]), {name: sizes for name, sizes in live.items() if sizes.any()}


def _live_bytes(graph: OpGraph, category: str) -> Column:
    change = np.zeros(len(graph.ops) + 2)
    for buffer in graph.buffers:
        if buffer.category == category:
            change[max(buffer.born, 0)] += buffer.size_bytes
            change[min(buffer.dies, len(graph.ops)) + 1] -= buffer.size_bytes
    return np.cumsum(change)[: len(graph.ops)]


def thin(total: Column, points: int) -> npt.NDArray[np.int64]:
    """Positions to draw: all of them, or of each stretch the one with the most bytes, so that no peak is
    lost."""
    if len(total) <= points:
        return np.arange(len(total))
    edges = np.linspace(0, len(total), points + 1).astype(np.int64)
    return np.array(
        [first + int(total[first:end].argmax()) for first, end in itertools.pairwise(edges.tolist())]
    )


def memory_over_step(drawn: Timeline) -> dict[str, Any]:
    """Bytes alive by category at moments of a step."""
    times, live = memory_over_time(drawn)
    total = np.sum(list(live.values()), axis=0) if live else np.zeros(len(times))
    chosen = thin(total, _MOST_POINTS)
    return {
        "times": times[chosen].tolist(),
        "bytes": {name: sizes[chosen].tolist() for name, sizes in live.items()},
    }


# Where the time comes from


def derivation(forecast: Forecast, step: Step, predictor: Predictor | None) -> dict[str, Any]:
    """Figures between operators and the time of a step that the forecast's quantities do not have."""
    job, causes = forecast.job, step.causes_s
    shown: dict[str, Any] = {
        "kernels": step.kernels,
        "micro_batches": job.accumulation,
        "stages": len(step.layout.stages),
        "computation_s": causes["computation"],
        "host_issue_s": step.host_issue_s,
        "sent_bytes": step.sent_bytes,
        "calibration": predictor.time_factor(job) if isinstance(predictor, RatingPredictor) else 1.0,
    }
    shares = _roofline(step, getattr(predictor, "costs", None))
    return shown if shares is None else {**shown, **shares}


def _roofline(step: Step, costs: object) -> dict[str, float] | None:
    """Say, of the busiest rank's computation, what its operators would take at the peak rates of the device;
    of this time, what lies in operators that were measured on it."""
    layout = step.of_busiest
    device, precision = layout.site.groups[0].device, layout.job.workload.training.precision
    if device.is_cpu:
        return None
    graph = layout.graph
    update = np.flatnonzero(graph.phase_index == PHASES.index("optimizer"))
    calls = np.concatenate([layout.stages[step.busiest].calls, update])
    calls = calls[~layout.calls.communicates[calls] & (layout.calls.device_s[calls] > 0)]
    moved_s = graph.column("bytes") / device.memory_bytes_per_s
    ideal_s = np.maximum(at_peak_s(graph, device, precision), moved_s)[calls]
    seconds = layout.calls.device_s[calls]
    whole = float(seconds.sum())
    if whole <= 0:
        return None
    share = float(ideal_s.sum()) / whole
    shares = {"roofline_s": step.causes_s["computation"] * share}
    if isinstance(costs, LearnedCosts):
        measured = costs.looked_up(graph.operators, device, precision)[graph.operator_index[calls]]
        shares["measured_share"] = float(seconds[measured].sum()) / whole
    return shares
