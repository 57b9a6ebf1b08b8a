"""Tells what the lines of a file are, so that a file in the wrong place is named in one line."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from foretrain.errors import InputError
from foretrain.files import parse_json, text_lines

Kind = Literal["operators", "measured operators", "jobs", "runs", "failures", "cluster sizes", "other lines"]

_TAKEN_BY: Mapping[Kind, str] = {
    "operators": "foretrain measure ops and design --operators take them",
    "measured operators": "foretrain measure pack takes them",
    "jobs": "foretrain measure steps, measure campaign, design and predict --jobs take them",
    "runs": "foretrain fit and evaluate take them, and measure steps or campaign measures their jobs again",
    "failures": "of an earlier measurement: --retry-failed tries them again",
    "cluster sizes": "without a job; foretrain design JOB.toml --cluster writes jobs",
    "other lines": "neither operators nor jobs nor runs",
}
"""What to do with each."""


def kind_of(line: Any) -> Kind:
    """Tell the kind of a line by the keys that only lines of this kind have.

    >>> kind_of({"job": {}, "measured": {}}), kind_of({"machines": 2, "scale": 0.5})
    ('runs', 'cluster sizes')
    """
    if not isinstance(line, Mapping):
        return "other lines"
    if "error" in line:
        return "failures"
    if "name" in line and "inputs" in line:
        return "measured operators" if "cold_s" in line else "operators"
    if "job" in line:
        return "runs" if "measured" in line else "jobs"
    if "model" in line and ("training" in line or "cluster" in line):
        return "jobs"
    return "cluster sizes" if "machines" in line and "scale" in line else "other lines"


def first_kind(path: Path) -> Kind | None:
    """Tell the kind of the first line of a ``.jsonl`` file; None where it has none, or where that is not
    JSON."""
    for _, text in text_lines(path):
        try:
            return kind_of(parse_json(text))
        except ValueError:
            return None
    return None


def expect(path: Path, *kinds: Kind, command: str) -> None:
    """Refuse a file whose first line is of another kind, or that has none."""
    kind = first_kind(path) if path.name.endswith((".jsonl", ".jsonl.zst")) else None
    if kind in kinds:
        return
    wants = f"{command} takes {' or '.join(kinds)}"
    if kind is None:
        raise InputError(f"{path}: does not begin with a line of JSON; {wants}")
    raise InputError(f"{path}: holds {kind} ({_TAKEN_BY[kind]}); {wants}")
