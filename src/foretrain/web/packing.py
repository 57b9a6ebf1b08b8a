"""Packs records that are much alike: each section is the number of a skeleton that many share, and the
figures that fill it."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

_EXACT = ("job",)
"""Sections whose figures are not rounded."""
_TIMELINE = "details.timeline"
_WORDED = {_TIMELINE: ("kind", "name"), "details.parts": ("layer", "operator", "phase")}
"""Sections with columns of text that repeats."""
_MANY = 500
_FINE, _COARSE = 1_000_000, 20_000
"""Units of a timeline with more stretches than these, and of others."""


class Packer:
    """Takes records one by one; ``skeletons`` has what they share.

    >>> packer = Packer()
    >>> packer.add({"time": {"median": 2.5}, "bound": "host"})
    {'time': [0, 2.5], 'bound': [1]}
    >>> packer.add({"time": {"median": 3.5}, "bound": "host"}), packer.skeletons
    ({'time': [0, 3.5], 'bound': [1]}, [{'median': 0}, 'host'])
    """

    def __init__(self) -> None:
        self.skeletons: list[Any] = []
        self.words: dict[str, int] = {}
        """Of columns of text, by their numbers."""
        self.new_bytes = 0
        """That the last record added to the skeletons."""
        self._known: dict[str, int] = {}

    def add(self, record: Mapping[str, Any]) -> dict[str, list[float]]:
        """Pack a record: of each section the number of its skeleton, then its figures in order."""
        packed, self.new_bytes = {}, 0
        for name, section in record.items():
            figures: list[float] = []
            section = self._worded(section, _WORDED[name]) if name in _WORDED else section
            section = _in_units(section) if name == _TIMELINE else section
            skeleton = _emptied(section, figures, exact=name in _EXACT)
            packed[name] = [self._number(skeleton), *figures]
        return packed

    def _worded(self, section: Mapping[str, Any], names: Sequence[str]) -> dict[str, Any]:
        """Columns of text as numbers of words."""
        return {**section, **{name: [self._word(one) for one in section[name]] for name in names}}

    def _word(self, word: str) -> int:
        return self.words.setdefault(word, len(self.words))

    def _number(self, skeleton: Any) -> int:
        text = json.dumps(skeleton)
        if text not in self._known:
            self._known[text] = len(self.skeletons)
            self.skeletons.append(skeleton)
            self.new_bytes += len(text)
        return self._known[text]


def _in_units(timeline: Mapping[str, Any]) -> dict[str, Any]:
    """Times in whole units of a small part of it."""
    unit_s = timeline["end_s"] / (_FINE if len(timeline["start"]) > _MANY else _COARSE) or 1.0
    times = {name: [round(one / unit_s) for one in timeline[name]] for name in ("start", "length")}
    return {**timeline, **times, "unit_s": unit_s}


def _emptied(value: Any, figures: list[float], *, exact: bool) -> Any:
    """The value with 0 in the place of every number, and lists of numbers as how many they are."""
    if isinstance(value, Mapping):
        return {str(key): _emptied(one, figures, exact=exact) for key, one in value.items()}
    if isinstance(value, list | tuple):
        if value and all(isinstance(one, int | float) and not isinstance(one, bool) for one in value):
            figures += [one if exact else shortened(one) for one in value]
            return {"#": len(value)}
        return [_emptied(one, figures, exact=exact) for one in value]
    if isinstance(value, bool) or value is None or isinstance(value, str):
        return value
    figures.append(value if exact else shortened(value))
    return 0


def shortened(value: float) -> float:
    """Round to six digits, which no forecast is as sure as."""
    if isinstance(value, int) and abs(value) < 1_000_000:
        return value
    short = float(f"{value:.6g}")
    return int(short) if short.is_integer() and abs(short) < 1e15 else short
