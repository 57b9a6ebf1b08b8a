"""Writes forecasts: JSON and Chrome traces here, text for the terminal in ``text``, tables of notebooks in
``notebook``."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from foretrain.files import write_atomically
from foretrain.forecast import Forecast
from foretrain.report.breakdown import What
from foretrain.step.timeline import trace_events

__all__ = ["dump", "to_json", "write_trace"]


def to_json(
    forecast: Forecast,
    breakdown: What | None = None,
    extra: Mapping[str, Any] | None = None,
    *,
    indent: int | None = 2,
) -> str:
    """The forecast in SI units; ``breakdown`` adds the device seconds of a step by that key, ``extra`` keys
    of its own."""
    document = {**forecast.to_dict(), **(extra or {})}
    if breakdown is not None:
        step = forecast.inside(f"breakdown by {breakdown}")
        document.setdefault("breakdown_s", {})[breakdown] = step.by(breakdown)
    return dump(document, indent=indent)


def dump(document: Any, *, indent: int | None = 2) -> str:
    """Strict JSON: NaN and infinity are errors, not text that other programs refuse."""
    return json.dumps(document, indent=indent, allow_nan=False)


def write_trace(forecast: Forecast, path: Path) -> int:
    """Write one step as a Chrome trace, for Perfetto or chrome://tracing; returns the number of events."""
    step = forecast.inside("trace")
    events = list(trace_events(step, forecast.job.workload.model.label))
    write_atomically(path, dump({"traceEvents": events, "displayTimeUnit": "ms"}, indent=None))
    return len(events)
