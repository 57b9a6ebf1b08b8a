"""Prints a forecast that a server gave."""

from __future__ import annotations

from collections.abc import Iterator

from rich.console import RenderableType
from rich.text import Text

from foretrain.client import ServedForecast
from foretrain.quantities import QUANTITIES
from foretrain.report.tables import table
from foretrain.units import format_bytes, format_count, format_dollars, format_seconds

_MOST_NOTES = 8
_SHOWN = (
    "step_time_s", "samples_per_s", "tokens_per_s", "epoch_time_s", "total_time_s", "peak_memory_bytes",
    "reserved_memory_bytes", "device_utilization", "power_w",
)  # fmt: skip


def served_summary(forecast: ServedForecast, *, all_notes: bool = False) -> Iterator[RenderableType]:
    """The figures that people ask for with their intervals, cost, whether it fits, and what was assumed."""
    rows = []
    for name in (name for name in _SHOWN if name in forecast.quantities):
        one = forecast[name]
        interval = f"{_figure(name, one.low)} to {_figure(name, one.high)}"
        rows.append([name.removesuffix("_s").replace("_", " "), _figure(name, one.median), interval])
    if (cost := forecast.document.get("cost_usd")) is not None:
        interval = f"{format_dollars(cost['low'])} to {format_dollars(cost['high'])}"
        rows.append(["cost", format_dollars(cost["median"]), interval])
    yield table(("", "forecast", "80 % interval"), rows, right=("forecast", "80 % interval"))
    if forecast.fits is not None:
        yield Text("memory is enough" if forecast.fits else "memory is not enough")
    notes = forecast.assumptions if all_notes else forecast.assumptions[:_MOST_NOTES]
    for note in notes:
        yield Text(f"- {note}", style="dim")


def _figure(name: str, value: float) -> str:
    unit = QUANTITIES.get(name, "")
    if unit in ("s", "B"):
        return format_seconds(value) if unit == "s" else format_bytes(value)
    return format_count(value, unit) if unit else f"{value:.1%}"
