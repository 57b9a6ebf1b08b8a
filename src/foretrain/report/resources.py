"""Shows how a job will use device, memory and network: a table for the terminal, panels for the page."""

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
HEADINGS = ("resource", "idle for", "active for", "peak", "average", "by")
DEFINITIONS = {
    "device_utilization": "share of the time with a kernel on the device; of a CPU, of its cores at work",
    "memory_utilization": "share of the device's memory that a rank holds; of a CPU, with its process",
    "network_rx": "bytes that one rank receives over its links; a GPU alone, from its host",
    "network_tx": "bytes that one rank sends over its links; a GPU alone, to its host",
}
"""What each resource is, whoever measures or forecasts it."""


def resource_table(resources: Resources) -> RenderableType:
    """A row per resource: how long it is idle and active at a stretch, its peak, its average; and what they
    are."""
    rows = []
    for name, mean in zip(RESOURCES, MEANS, strict=True):
        names = [f"{name}_{figure}" for figure in ("idle_s", "active_s", "peak")]
        figures = [resources.figures[one] for one in names]
        levels = [_level(name, figures[2]), _level(name, resources.figures[mean])]
        sources = " and ".join(sorted({resources.by[one] for one in (*names, mean)}))
        rows.append([_NAMES[name], format_seconds(figures[0]), format_seconds(figures[1]), *levels, sources])
    lines = (Text(f"- {line}", style="dim") for line in definitions(resources))
    return Group(table(HEADINGS, rows, right=HEADINGS[1:-1]), *lines)


def definitions(resources: Resources) -> list[str]:
    """Say in words what the figures are."""
    window, sampled = format_seconds(resources.window_s), format_seconds(resources.sampled_s)
    return [
        *(f"{_NAMES[name]}: {words}" for name, words in DEFINITIONS.items()),
        "averages are those of the step; idle and active times are mean stretches, and peaks the mean of"
        f" theirs, in a window of {window} sampled every {sampled}",
    ]


def document(resources: Resources) -> dict[str, Any]:
    """Write the resources as JSON values."""
    return {
        "window_s": resources.window_s,
        "figures": dict(resources.figures),
        "by": dict(resources.by),
        "definitions": dict(DEFINITIONS),
    }


def panels(resources: Resources) -> dict[str, Any]:
    """Make the panels of the page: one for each resource over a few steps, with where steps end."""
    period_s = resources.steps.period_s
    samples = len(resources.steps.values[RESOURCES[0]])
    times = [round(1e3 * period_s * i, 4) for i in range(samples + 1)]
    drawn = []
    for name in RESOURCES:
        unit, factor = _unit(name, float(resources.steps.values[name].max(initial=0.0)))
        levels = (resources.steps.values[name] * factor).round(4).tolist()
        drawn.append({"name": _NAMES[name], "unit": unit, "values": [*levels, levels[-1]]})
    ends = [times[-1] * step / resources.drawn_steps for step in range(1, resources.drawn_steps)]
    return {"times_ms": times, "ends_ms": ends, "panels": drawn, "definitions": definitions(resources)}


def _unit(name: str, highest: float) -> tuple[str, float]:
    """Choose the unit that a resource is drawn in, and how much of it a share or a byte per second is."""
    if not name.startswith("network"):
        return "%", 100.0
    return ("GB/s", 1e-9) if highest >= 1e8 else ("MB/s", 1e-6)


def _level(name: str, value: float) -> str:
    return format_count(value, "B/s") if name.startswith("network") else f"{value:.1%}"
