"""Draws a forecast as one HTML page that needs no network: summary, what a step goes to, memory, timeline,
assumptions."""

from __future__ import annotations

import html
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from foretrain.files import write_atomically
from foretrain.forecast import Forecast, RankMemory
from foretrain.graph import CATEGORIES, OpGraph
from foretrain.pages import drawn, graph_objects, whole_page
from foretrain.report import figures
from foretrain.report.breakdown import What, breakdown, device_time
from foretrain.step.play import Step
from foretrain.step.playback import Slot
from foretrain.step.timeline import Timeline
from foretrain.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from foretrain.predictors.driple.resources import Resources

Column = npt.NDArray[np.float64]

MAX_EVENTS = 3000
_MAX_POINTS = 1500
_PHASE_COLORS = {"forward": "#3b7dd8", "backward": "#d9822b", "optimizer": "#4c9f70"}
_CATEGORY_COLORS = {
    "weights": "#1f4e8c", "gradients": "#d9822b", "optimizer_state": "#4c9f70",
    "inputs": "#8a8f98", "activations": "#6fa8dc", "temporaries": "#b07aa1", "buffers": "#8a8f98",
    "workspaces": "#c9a227",
}  # fmt: skip
_SLOT_COLORS = {
    "F": _PHASE_COLORS["forward"],
    "B": _PHASE_COLORS["backward"],
    "I": _PHASE_COLORS["backward"],
    "W": "#e8b77d",
    "O": _PHASE_COLORS["optimizer"],
    "network": "#b3261e",
}
_SLOT_KINDS = {
    "F": "forward",
    "B": "backward",
    "I": "gradients of inputs",
    "W": "gradients of weights",
    "O": "optimizer",
    "network": "network",
}
"""What the first letter of a slot on the timeline of a stage stands for."""


def write_html(forecast: Forecast, path: Path, resources: Resources | None = None) -> None:
    """The page as one file, plotly.js included."""
    write_atomically(path, page(forecast, resources))


def page(forecast: Forecast, resources: Resources | None = None) -> str:
    """The page as text; with ``resources``, how they are used over a few steps."""
    about = filter(None, (figures.describe_work(forecast), figures.describe_cluster(forecast.job)))
    title, sections = figures.describe_model(forecast.job), _sections(forecast, resources)
    return whole_page(title, about, sections, style=_STYLE)


_STYLE = """
td, th { padding: .2rem 1.5rem .2rem 0; text-align: left; vertical-align: top } .part { padding-left: 1.2rem }
"""


def _sections(forecast: Forecast, resources: Resources | None) -> Iterator[tuple[str, str]]:
    yield "Summary", summary_table(forecast)
    if forecast.step is not None:
        yield from _inside(forecast, forecast.step)
    if resources is not None:
        from foretrain.report.resources import burst_figure, definitions

        words = "".join(map(_note, definitions(resources)))
        yield "Use of resources over a few steps", _draw(burst_figure(resources, graph_objects())) + words
    notes = "".join(f"<li>{html.escape(note)}</li>" for note in figures.notes(forecast))
    yield "Assumptions", f'<ul class="dim">{notes}</ul>'


def _inside(forecast: Forecast, step: Step) -> Iterator[tuple[str, str]]:
    """What the predictor saw inside the step."""
    several, capacity = len(forecast.ranks) > 1, forecast.memory_capacity_bytes
    if parts := figures.step_parts(forecast):
        yield "What the time of a step goes to", _draw(_parts_figure(parts))
    yield (
        "Where the device time of a step goes",
        _note(device_time(forecast))
        + "".join(_draw(_composition(forecast, what)) for what in ("phase", "operator", "layer")),
    )
    if several:
        yield "Memory of a rank of each stage", _draw(_stages_figure(forecast.ranks, capacity))
        yield "Timeline of a step", _stages_timeline(step)
        return
    timeline = Timeline.of(step)
    if timeline.holds_all_buffers:
        note = "Buffers of the traced step, without library workspaces and what the allocator rounds up."
        yield "Memory over a step", _draw(_memory_figure(timeline, capacity)) + _note(note)
    figure, shown, total = _timeline_figure(timeline)
    cut = f" The {shown:,} longest of {total:,} calls are drawn." if shown < total else ""
    note = f"The host issues, the device runs; from an idle device.{cut}"
    yield "Timeline of a step", _draw(figure) + _note(note)


def _stages_timeline(step: Step) -> str:
    slots = step.time.slots
    figure, shown = _slots_figure(slots)
    end_s = max(slot.end_s for slot in slots)
    note = "The passes of one rank of each stage."
    if end_s < 0.9 * step.time_s:
        note += (
            f" {format_seconds(end_s)} of {format_seconds(step.time_s)}: further micro-batches go on alike."
        )
    if shown < len(slots):
        note += f" The {shown:,} longest of {len(slots):,} parts are drawn."
    return _draw(figure) + _note(note)


def _note(text: str) -> str:
    return f'<p class="dim">{html.escape(text)}</p>'


def summary_table(forecast: Forecast) -> str:
    """The figures of a forecast, a row each."""
    time = figures.step_figure(forecast)
    rows = [time] if time else []
    rows += _share_rows(figures.step_parts(forecast), format_seconds)
    rows += figures.rate_figures(forecast)
    rows += [figures.Figure("bound by", forecast.bound)] if forecast.bound else []
    memory = list(figures.memory_figures(forecast))
    rows += memory[:1]
    rows += _share_rows(figures.category_sizes(forecast), format_bytes)
    moment = figures.peak_moment(forecast)
    rows += [moment] if moment else []
    rows += memory[1:]
    stages = figures.stage_sizes(forecast)
    rows += [figures.Figure("peak by stage", ", ".join(stages))] if stages else []
    verdict = figures.fits(forecast)
    rows += [verdict[1]] if verdict else []
    rows += figures.recomputation(forecast)
    rows += figures.remedies(forecast)
    rows += figures.training_figures(forecast)
    return f"<table>{''.join(_table_row(row) for row in rows)}</table>"


def _share_rows(parts: Mapping[str, float], form: Callable[[float], str]) -> Iterator[figures.Figure]:
    total = sum(parts.values())
    return (figures.Figure(f"  {name}", form(size), f"{size / total:.0%}") for name, size in parts.items())


def _table_row(row: figures.Figure) -> str:
    label = html.escape(row.label.strip())
    indent = ' class="part"' if row.label.startswith(" ") else ""
    value, detail = html.escape(row.value), html.escape(row.detail)
    return f'<tr><td{indent}>{label}</td><td><b>{value}</b></td><td class="dim">{detail}</td></tr>\n'


def _draw(figure: Any) -> str:
    figure.update_layout(
        template="plotly_white", margin={"l": 10, "r": 10, "t": 40, "b": 40}, font={"size": 13}, autosize=True
    )
    return drawn(figure)


def _composition(forecast: Forecast, what: What) -> Any:
    """Horizontal bars, the largest at the top."""
    rows = breakdown(forecast, what)
    return _bars({row.name: row.time_s for row in rows}, f"by {what}", "ms of device time")


def _parts_figure(parts: Mapping[str, float]) -> Any:
    return _bars(parts, "", "ms")


def _bars(parts: Mapping[str, float], title: str, unit: str) -> Any:
    """Horizontal bars, the first at the top."""
    objects = graph_objects()
    total = sum(parts.values())
    names = list(parts)[::-1]
    bar = objects.Bar(
        orientation="h", x=[parts[name] * 1e3 for name in names], y=names, hoverinfo="y+text",
        cliponaxis=False,
        marker_color=[_PHASE_COLORS.get(name, _PHASE_COLORS["forward"]) for name in names],
        text=[f"{format_seconds(parts[name])} ({parts[name] / total:.1%})" for name in names],
    )  # fmt: skip
    figure = objects.Figure(bar)
    figure.update_layout(title=title, height=110 + 24 * len(names), xaxis_title=unit, yaxis_automargin=True)
    return figure


# Memory


def memory_over_time(timeline: Timeline) -> tuple[Column, dict[str, Column]]:
    """When each op of the (last) micro-batch is issued, and the bytes alive then, by category."""
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


def _memory_figure(timeline: Timeline, capacity_bytes: float | None) -> Any:
    objects = graph_objects()
    times, live = memory_over_time(timeline)
    total = np.sum(list(live.values()), axis=0) if live else np.zeros(len(times))
    chosen = thin(total, _MAX_POINTS)
    figure = objects.Figure()
    for category, sizes in live.items():
        figure.add_scatter(
            x=(times[chosen] * 1e3).round(4), y=(sizes[chosen] / 2**30).round(5), name=category.replace("_",
            " "), stackgroup="memory", mode="lines",
            line={"width": 0.5, "shape": "hv", "color": _CATEGORY_COLORS[category]},
            hovertemplate="%{y:.3g} GiB",
        )  # fmt: skip
    peak = float(total.max(initial=0.0))
    figure.update_layout(height=420, xaxis_title="ms", yaxis_title="GiB", hovermode="x unified")
    if capacity_bytes is not None:
        _add_capacity(figure, peak, capacity_bytes)
    return figure


def _stages_figure(ranks: Sequence[RankMemory], capacity_bytes: float | None) -> Any:
    """A bar per stage, of its categories."""
    objects = graph_objects()
    figure = objects.Figure()
    stages = [f"stage {rank.stage}" for rank in ranks]
    for category in dict.fromkeys(name for rank in ranks for name in rank.by_category):
        sizes = [rank.by_category.get(category, 0.0) / 2**30 for rank in ranks]
        if any(sizes):
            figure.add_bar(
                x=stages,
                y=sizes,
                name=category.replace("_", " "),
                marker_color=_CATEGORY_COLORS.get(category),
                hovertemplate="%{y:.3g} GiB",
            )
    figure.update_layout(barmode="stack", height=380, yaxis_title="GiB", bargap=0.4, hovermode="x unified")
    if capacity_bytes is not None:
        _add_capacity(figure, max(rank.allocated_bytes for rank in ranks), capacity_bytes)
    return figure


def _add_capacity(figure: Any, peak_bytes: float, capacity_bytes: float) -> None:
    """The capacity as a line; where it is far above the curves, as words, so that the curves stay
    readable."""
    words = f"capacity {format_bytes(capacity_bytes)}"
    if capacity_bytes <= 5 * peak_bytes:
        figure.add_hline(
            y=capacity_bytes / 2**30, line={"color": "#b3261e", "dash": "dash"}, annotation_text=words
        )
        figure.update_yaxes(range=[0, 1.08 * max(capacity_bytes, peak_bytes) / 2**30])
    else:
        figure.add_annotation(
            text=f"{words}, far above this scale",
            xref="paper",
            yref="paper",
            x=1,
            y=1.06,
            showarrow=False,
            font_color="#b3261e",
        )


# Timeline


def _timeline_figure(timeline: Timeline) -> tuple[Any, int, int]:
    """The figure, how many calls are drawn, and how many there are."""
    objects = graph_objects()
    events = [event for event in timeline.events() if event["ph"] == "X"]
    shown = sorted(
        sorted(events, key=lambda event: -event["dur"])[:MAX_EVENTS], key=lambda event: event["ts"]
    )
    figure, lanes = objects.Figure(), ["host", "device", "network"]
    for phase, color in {**_PHASE_COLORS, "network": _SLOT_COLORS["network"]}.items():
        mine = [event for event in shown if event["cat"] == phase]
        figure.add_bar(
            orientation="h", name=phase, marker_color=color, marker_line_width=0,
            base=[event["ts"] / 1e3 for event in mine], x=[event["dur"] / 1e3 for event in mine],
            y=[lanes[event["tid"]] for event in mine],
            text=[f"{event['name']} {event['args'].get('layer', '')}" for event in mine], textposition="none",
            hovertemplate="%{text}<br>%{x:.4f} ms from %{base:.4f} ms",
        )  # fmt: skip
    figure.update_layout(
        barmode="overlay",
        height=260,
        xaxis_title="ms",
        bargap=0.15,
        yaxis={"categoryarray": lanes[::-1], "fixedrange": True},
    )
    return figure, len(shown), len(events)


def _slots_figure(slots: Sequence[Slot]) -> tuple[Any, int]:
    """The stages below one another, and how many of their parts are drawn."""
    objects = graph_objects()
    shown = sorted(
        sorted(slots, key=lambda slot: slot.start_s - slot.end_s)[:MAX_EVENTS],
        key=lambda slot: slot.start_s,
    )
    lanes = list(
        dict.fromkeys(
            (slot.stage, slot.lane) for slot in sorted(slots, key=lambda slot: (slot.stage, slot.lane))
        )
    )
    figure = objects.Figure()
    for kind, name in _SLOT_KINDS.items():
        mine = [
            slot for slot in shown if (slot.lane if slot.lane == "network" else slot.name[:1].upper()) == kind
        ]
        if mine:
            figure.add_bar(
                orientation="h", name=name, marker_color=_SLOT_COLORS[kind], marker_line={"width": 0.5,
                "color": "#fff"},
                base=[slot.start_s * 1e3 for slot in mine],
                x=[(slot.end_s - slot.start_s) * 1e3 for slot in mine],
                y=[f"stage {slot.stage}, {slot.lane}" for slot in mine], text=[slot.name for slot in mine],
                textposition="none",
                hovertemplate="%{text}<br>%{x:.4f} ms from %{base:.4f} ms",
            )  # fmt: skip
    order = [f"stage {stage}, {lane}" for stage, lane in lanes][::-1]
    figure.update_layout(
        barmode="overlay",
        height=160 + 32 * len(lanes),
        xaxis_title="ms",
        bargap=0.15,
        yaxis={"categoryarray": order, "fixedrange": True},
    )
    return figure, len(shown)
