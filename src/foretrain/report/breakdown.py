"""Breaks the device time of a step down to rows: by phase, operator or layer."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

from foretrain.forecast import Forecast
from foretrain.units import format_seconds

What = Literal["layer", "operator", "phase"]


@dataclass(frozen=True, slots=True)
class Row:
    """A part of the step: its device seconds, its share of all of them, and the share of this row and those
    above it."""

    name: str
    time_s: float
    share: float
    cumulated: float


def breakdown(forecast: Forecast, grouping: What, *, rows: int = 20, depth: int | None = None) -> list[Row]:
    """The largest parts first; what is beyond ``rows`` is added up in a last row."""
    seconds = forecast.inside(f"breakdown by {grouping}").by(grouping)
    if grouping == "layer":
        seconds = merge_layers(seconds, depth=depth)
    total = sum(seconds.values())
    listed = sorted(seconds.items(), key=lambda item: -item[1])
    if len(listed) > rows:
        rest = listed[rows:]
        listed = [*listed[:rows], (f"({len(rest)} more)", sum(value for _, value in rest))]
    result: list[Row] = []
    passed = 0.0
    for name, value in listed:
        passed += value
        result.append(Row(name, value, value / total if total else 0.0, passed / total if total else 0.0))
    return result


def device_time(forecast: Forecast) -> str:
    """Say in words what the parts of a breakdown add up to."""
    step = forecast.inside("breakdown")
    stages, seconds = len(step.layout.stages), sum(step.by("phase").values())
    if stages > 1:
        return f"{format_seconds(seconds)} on a rank of each of the {stages} stages together"
    return f"{format_seconds(seconds)}, {seconds / (step.time_s or 1.0):.0%} of the step"


def merge_layers(seconds: Mapping[str, float], *, depth: int | None = None) -> dict[str, float]:
    """Layers cut to ``depth`` names, with repeated numbered blocks merged: ``model.layers.12.mlp.up_proj`` is
    ``model.layers.*.mlp``.

    Without a depth, as many names as it takes until no row holds more than half of the time.
    """
    blocks = _blocks(seconds)
    if depth is not None:
        return _merged(seconds, blocks, depth)
    table = _merged(seconds, blocks, 1)
    for deeper in range(2, 1 + max((path.count(".") + 1 for path in seconds), default=0)):
        if max(table.values()) <= sum(table.values()) / 2:
            break
        table = _merged(seconds, blocks, deeper)
    return table


_DEEPEST = 12
"""Names of a layer's path that tell its kind."""


def kinds_of_layers(paths: Iterable[str]) -> dict[str, str]:
    """Name the kind of each layer, where numbered blocks are one: ``model.layers.*.mlp`` of
    ``model.layers.12.mlp``."""
    known = list(paths)
    blocks = _blocks(known)
    return {path: _cut(path, blocks, _DEEPEST) for path in known}


def _blocks(paths: Iterable[str]) -> frozenset[str]:
    """The paths that contain others: a number at their end counts blocks; any other number is a layer's own
    name."""
    parts = (path.split(".") for path in paths)
    return frozenset(".".join(names[:end]) for names in parts for end in range(1, len(names)))


def _merged(seconds: Mapping[str, float], blocks: frozenset[str], depth: int) -> dict[str, float]:
    totals: dict[str, float] = {}
    for path, value in seconds.items():
        name = _cut(path, blocks, depth)
        totals[name] = totals.get(name, 0.0) + value
    return totals


def _cut(path: str, blocks: frozenset[str], depth: int) -> str:
    parts = path.split(".")
    kept: list[str] = []
    named = 0
    for position, part in enumerate(parts):
        if part.isdigit() and ".".join(parts[: position + 1]) in blocks:
            kept.append("*")
            continue
        if named == depth:
            break
        kept.append(part)
        named += 1
    return ".".join(kept)
