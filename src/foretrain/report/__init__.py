"""A Forecast in; JSON and a Chrome trace out here, text for the terminal in ``text``, one self-contained page in ``html``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from foretrain.files import write_atomically
from foretrain.forecast import Forecast
from foretrain.report.breakdown import What, timeline_of

__all__ = ["dump", "to_json", "write_trace"]


def to_json(forecast: Forecast, breakdown: What | None = None, *, indent: int | None = 2) -> str:
    """The forecast in SI units; ``breakdown`` adds the device seconds of a step by that key."""
    document = forecast.to_dict()
    if breakdown is not None:
        document.setdefault("breakdown_s", {})[breakdown] = timeline_of(forecast, "a breakdown").by(breakdown)
    return dump(document, indent=indent)


def dump(document: Any, *, indent: int | None = 2) -> str:
    """Strict JSON: NaN and infinity are errors, not text that other programs refuse."""
    return json.dumps(document, indent=indent, allow_nan=False)


def write_trace(forecast: Forecast, path: Path) -> int:
    """One step as a Chrome trace, for Perfetto or chrome://tracing; returns the number of events."""
    events = list(timeline_of(forecast, "a trace").trace_events())
    write_atomically(path, dump({"traceEvents": events, "displayTimeUnit": "ms"}, indent=None))
    return len(events)
