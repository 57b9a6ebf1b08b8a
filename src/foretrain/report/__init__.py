"""A Forecast in; JSON and a Chrome trace out here, text for the terminal in ``text``, one self-contained page in ``html``."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from foretrain.files import write_atomically
from foretrain.forecast import Forecast
from foretrain.report.breakdown import What, timeline_of
from foretrain.step.playback import trace_events

__all__ = ["dump", "to_json", "write_trace"]


def to_json(
    forecast: Forecast,
    breakdown: What | None = None,
    extra: Mapping[str, Any] | None = None,
    *,
    indent: int | None = 2,
) -> str:
    """The forecast in SI units; ``breakdown`` adds the device seconds of a step by that key, ``extra`` keys of its own."""
    document = {**forecast.to_dict(), **(extra or {})}
    if breakdown is not None:
        document.setdefault("breakdown_s", {})[breakdown] = timeline_of(
            forecast, f"breakdown by {breakdown}"
        ).by(breakdown)
    return dump(document, indent=indent)


def dump(document: Any, *, indent: int | None = 2) -> str:
    """Strict JSON: NaN and infinity are errors, not text that other programs refuse."""
    return json.dumps(document, indent=indent, allow_nan=False)


def write_trace(forecast: Forecast, path: Path) -> int:
    """One step as a Chrome trace, for Perfetto or chrome://tracing; returns the number of events."""
    events = list(_events(forecast))
    write_atomically(path, dump({"traceEvents": events, "displayTimeUnit": "ms"}, indent=None))
    return len(events)


def _events(forecast: Forecast) -> Iterable[dict[str, Any]]:
    """Host and device of one device, or the stages of a pipeline side by side."""
    if forecast.step is not None:
        return trace_events(forecast.step.slots, forecast.job.workload.model.label)
    return timeline_of(forecast, "trace").trace_events()
