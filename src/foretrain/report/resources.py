"""The use of device, memory and network that a job is forecast to make in; a table for the terminal and a figure for the page out."""

from __future__ import annotations

from typing import Any

from rich.console import RenderableType

from foretrain.predictors.driple import Resources
from foretrain.predictors.driple_features import MEANS, RESOURCES
from foretrain.report.tables import table
from foretrain.units import format_bytes, format_seconds

_NAMES = {"device_utilization": "device", "memory_utilization": "memory", "network_rx": "received", "network_tx": "sent"}
_COLORS = {"device_utilization": "#3b7dd8", "memory_utilization": "#4c9f70", "network_rx": "#d9822b", "network_tx": "#b07aa1"}
HEADINGS = ("resource", "idle for", "active for", "peak", "average", "by")


def resource_table(found: Resources) -> RenderableType:
    """A row per resource: how long it is idle and active at a stretch, its peak, its average."""
    rows = []
    for name, mean in zip(RESOURCES, MEANS, strict=True):
        figures = [found.figures[f"{name}_{figure}"] for figure in ("idle_s", "active_s", "peak")]
        levels = [_level(name, figures[2]), _level(name, found.figures[mean])]
        sources = " and ".join(sorted({found.by[f"{name}_peak"], found.by[mean]}))
        rows.append([_NAMES[name], format_seconds(figures[0]), format_seconds(figures[1]), *levels, sources])
    return table(HEADINGS, rows, right=HEADINGS[1:-1])


def document(found: Resources) -> dict[str, Any]:
    """For JSON."""
    return {"window_s": found.window_s, "figures": dict(found.figures), "by": dict(found.by)}


def burst_figure(found: Resources, objects: Any) -> Any:
    """Shares of device and memory, and bytes per second on an axis of their own, over a few steps."""
    figure = objects.Figure()
    for name in RESOURCES:
        values = found.steps.values[name]
        times = [1e3 * found.steps.period_s * i for i in range(len(values))]
        network = name.startswith("network")
        figure.add_scatter(
            x=times, y=(values / 1e9 if network else values * 100).round(4).tolist(), name=_NAMES[name], mode="lines",
            yaxis="y2" if network else "y", line={"shape": "hv", "width": 1.5, "color": _COLORS[name], "dash": "dot" if network else "solid"},
            hovertemplate="%{y:.3g} GB/s" if network else "%{y:.3g} %",
        )  # fmt: skip
    other = {"title": "GB/s", "overlaying": "y", "side": "right", "rangemode": "tozero", "showgrid": False}
    figure.update_layout(height=360, xaxis_title="ms", yaxis={"title": "%", "range": [0, 105]}, yaxis2=other, hovermode="x unified")
    return figure


def _level(name: str, value: float) -> str:
    return f"{format_bytes(value)}/s" if name.startswith("network") else f"{value:.1%}"
