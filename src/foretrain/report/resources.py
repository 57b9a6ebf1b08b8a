"""Shows how a job will use device, memory and network: a table for the terminal, a figure for the page."""

from __future__ import annotations

from typing import Any

from rich.console import Group, RenderableType
from rich.text import Text

from foretrain.predictors.driple.features import MEANS, RESOURCES
from foretrain.predictors.driple.resources import Resources
from foretrain.report.tables import table
from foretrain.units import format_count, format_seconds

_NAMES = {
    "device_utilization": "device",
    "memory_utilization": "memory",
    "network_rx": "received",
    "network_tx": "sent",
}
_COLORS = {
    "device_utilization": "#3b7dd8",
    "memory_utilization": "#4c9f70",
    "network_rx": "#d9822b",
    "network_tx": "#b07aa1",
}
HEADINGS = ("resource", "idle for", "active for", "peak", "average", "by")
DEFINITIONS = {
    "device_utilization": "share of the time with a kernel on the device; of a CPU, of its cores at work",
    "memory_utilization": "share of the device's memory that a rank holds; of a CPU, with its process",
    "network_rx": "bytes that one rank receives over its links; a GPU alone, from its host",
    "network_tx": "bytes that one rank sends over its links; a GPU alone, to its host",
}
"""What each resource is, whoever measures or forecasts it."""


def resource_table(found: Resources) -> RenderableType:
    """A row per resource: how long it is idle and active at a stretch, its peak, its average; and what they
    are."""
    rows = []
    for name, mean in zip(RESOURCES, MEANS, strict=True):
        names = [f"{name}_{figure}" for figure in ("idle_s", "active_s", "peak")]
        figures = [found.figures[one] for one in names]
        levels = [_level(name, figures[2]), _level(name, found.figures[mean])]
        sources = " and ".join(sorted({found.by[one] for one in (*names, mean)}))
        rows.append([_NAMES[name], format_seconds(figures[0]), format_seconds(figures[1]), *levels, sources])
    lines = (Text(f"- {line}", style="dim") for line in definitions(found))
    return Group(table(HEADINGS, rows, right=HEADINGS[1:-1]), *lines)


def definitions(found: Resources) -> list[str]:
    """What the figures are, in words."""
    window, sampled = format_seconds(found.window_s), format_seconds(found.sampled_s)
    return [
        *(f"{_NAMES[name]}: {words}" for name, words in DEFINITIONS.items()),
        "averages are those of the step; idle and active times are mean stretches, and peaks the mean of"
        f" theirs, in a window of {window} sampled every {sampled}",
    ]


def document(found: Resources) -> dict[str, Any]:
    """For JSON."""
    return {
        "window_s": found.window_s,
        "figures": dict(found.figures),
        "by": dict(found.by),
        "definitions": dict(DEFINITIONS),
    }


def burst_figure(found: Resources, objects: Any) -> Any:
    """A panel for each resource over a few steps, one above the other; dashed lines are where steps end."""
    figure = objects.Figure()
    samples = len(found.steps.values[RESOURCES[0]])
    times = [1e3 * found.steps.period_s * i for i in range(samples + 1)]
    axes: dict[str, Any] = {}
    for number, name in enumerate(RESOURCES):
        unit, factor = _unit(name, float(found.steps.values[name].max(initial=0.0)))
        levels = (found.steps.values[name] * factor).round(4).tolist()
        axis = str(number + 1) if number else ""
        figure.add_scatter(
            x=times, y=[*levels, levels[-1]], name=_NAMES[name], mode="lines", yaxis=f"y{axis}",
            fill="tozeroy",
            line={"shape": "hv", "width": 1.5, "color": _COLORS[name]}, hovertemplate=f"%{{y:.3g}} {unit}",
        )  # fmt: skip
        top = 1.0 - number / len(RESOURCES)
        highest = 100.0 if name == "device_utilization" else max(levels) or 1.0
        axes[f"yaxis{axis}"] = {
            "title": f"{_NAMES[name]}<br>{unit}", "domain": [top - 0.21, top], "range": [0, 1.1 * highest],
            "nticks": 4, "anchor": "x",
        }  # fmt: skip
    for step in range(1, found.drawn_steps):
        at = times[-1] * step / found.drawn_steps
        figure.add_shape(
            type="line",
            x0=at,
            x1=at,
            y0=0,
            y1=1,
            yref="paper",
            line={"width": 1, "dash": "dash", "color": "#888888"},
        )
    figure.update_layout(
        height=520, xaxis={"title": "ms", "anchor": "y4"}, hovermode="x unified", showlegend=False, **axes
    )
    return figure


def _unit(name: str, highest: float) -> tuple[str, float]:
    """What a resource is drawn in, and how much of it a share or a byte per second is."""
    if not name.startswith("network"):
        return "%", 100.0
    return ("GB/s", 1e-9) if highest >= 1e8 else ("MB/s", 1e-6)


def _level(name: str, value: float) -> str:
    return format_count(value, "B/s") if name.startswith("network") else f"{value:.1%}"
