"""Explains why two forecasts differ: seconds of a step by cause, memory by category, a sentence on each."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from foretrain.forecast import Forecast
from foretrain.job import Job
from foretrain.report import figures
from foretrain.units import format_bytes, format_seconds

_SAME = 0.005
"""Ratios this close to 1 are not worth a reason."""
_COUNTERWEIGHT = 0.2
"""A part that goes the other way is named when it is at least this share of the whole difference."""


@dataclass(frozen=True, slots=True)
class ComparedFigure:
    """One figure of A and of B."""

    name: str
    a: float
    b: float

    @property
    def difference(self) -> float:
        return self.b - self.a


@dataclass(frozen=True, slots=True)
class ComparedParts:
    """A figure of A and of B, and its parts, which add up to it."""

    whole: ComparedFigure
    parts: tuple[ComparedFigure, ...]

    def share(self, part: ComparedFigure) -> float | None:
        """Give a part as a share of the whole difference; None when there is hardly any. Parts that go the
        other way are below zero."""
        return None if self.is_same else part.difference / self.whole.difference

    @property
    def is_same(self) -> bool:
        return abs(self.whole.difference) <= _SAME * max(abs(self.whole.a), abs(self.whole.b))

    def to_dict(self) -> dict[str, dict[str, float | None]]:
        entries = {part.name: self.share(part) for part in self.parts}
        return {
            part.name: {
                "a": part.a,
                "b": part.b,
                "difference": part.difference,
                "share": entries.get(part.name),
            }
            for part in (self.whole, *self.parts)
        }


@dataclass(frozen=True, kw_only=True)
class Explanation:
    """Says what is different in the jobs, in a step and in the memory of the fullest rank."""

    a: Forecast
    b: Forecast
    fields: Mapping[str, tuple[Any, Any]]
    """Fields of the jobs that differ, such as ``plan.tensor``; None for one that is not given."""
    time: ComparedParts
    memory: ComparedParts
    names: tuple[str, str] = ("A", "B")
    """What sentences call the two."""

    @property
    def sentences(self) -> list[str]:
        """Write a sentence for somebody who reads one line, and what to add to it."""
        return [sentence[0].upper() + sentence[1:] for sentence in _sentences(self)]

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values in SI units."""
        return {
            "summary": self.sentences,
            "predictor": self.b.predictor,
            "fields": {name: {"a": a, "b": b} for name, (a, b) in self.fields.items()},
            "step_s": self.time.to_dict(),
            "memory_bytes": self.memory.to_dict(),
            "a": self.a.to_dict(),
            "b": self.b.to_dict(),
        }


def explain(a: Forecast, b: Forecast, *, names: tuple[str, str] = ("A", "B")) -> Explanation:
    """B beside A, which sentences call by their names."""
    time = ComparedFigure("time per step", a["step_time_s"].median, b["step_time_s"].median)
    sizes_a, sizes_b = a.memory_by_category, b.memory_by_category
    memory = ComparedFigure("memory at peak", sum(sizes_a.values()), sum(sizes_b.values()))
    return Explanation(
        a=a,
        b=b,
        fields=_different_fields(a.job, b.job),
        time=ComparedParts(
            time, _parts(*(forecast.inside("split of the step by cause").causes_s for forecast in (a, b)))
        ),
        memory=ComparedParts(memory, _parts(sizes_a, sizes_b)),
        names=names,
    )


def _parts(a: Mapping[str, float], b: Mapping[str, float]) -> tuple[ComparedFigure, ...]:
    """The parts that either has, in their order."""
    names = dict.fromkeys([*a, *b])
    changes = (ComparedFigure(name.replace("_", " "), a.get(name, 0), b.get(name, 0)) for name in names)
    return tuple(change for change in changes if change.a or change.b)


def _different_fields(a: Job, b: Job) -> dict[str, tuple[Any, Any]]:
    fields_a, fields_b = (dict(_flat(job.to_dict())) for job in (a, b))
    if "model.title" in fields_a or "model.title" in fields_b:
        for job, fields in ((a, fields_a), (b, fields_b)):
            fields |= {"model.name": job.workload.model.label, "model.title": None}
    names = dict.fromkeys([*fields_a, *fields_b])
    pairs = {name: (fields_a.get(name), fields_b.get(name)) for name in names}
    return {name: pair for name, pair in pairs.items() if pair[0] != pair[1]}


def _flat(table: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in table.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


# In words


def signed(form: Callable[[float], str], value: float) -> str:
    """``+1.2 s``, ``-300 MiB``; plain where there is nothing."""
    return form(value) if not value else f"{'-' if value < 0 else '+'}{form(abs(value))}"


def _sentences(explained: Explanation) -> Iterator[str]:
    time, (a, b) = explained.time, explained.names
    if time.is_same:
        yield f"{a} and {b} take the same time per step ({format_seconds(time.whole.b)})"
    else:
        slower = time.whole.difference > 0
        ratio = time.whole.b / time.whole.a if slower else time.whole.a / time.whole.b
        yield f"{b} is {ratio:.3g}x {'slower' if slower else 'faster'}{_reason(time, format_seconds)}"
    rates = _rates(explained)
    if rates is not None:
        unit, more = rates
        yield f"A step of {b} is of another size: {b} trains {more:.3g}x as many {unit} per second"
    memory = explained.memory
    if memory.parts and not memory.is_same:
        size, less = abs(memory.whole.difference), "less" if memory.whole.difference < 0 else "more"
        reason = _reason(memory, format_bytes)
        yield f"{b} takes {format_bytes(size)} {less} memory on {_fullest(explained)}{reason}"


def _fullest(explanation: Explanation) -> str:
    return (
        "its fullest rank"
        if any(len(forecast.ranks) > 1 for forecast in (explanation.a, explanation.b))
        else "each device"
    )


def _rates(explained: Explanation) -> tuple[str, float] | None:
    """The unit and ratio of what is trained in a second, where a step of A and one of B are not as large."""
    (samples_a, tokens_a), (samples_b, tokens_b) = (
        figures.step_size(forecast.job) for forecast in (explained.a, explained.b)
    )
    pace = explained.time.whole.a / explained.time.whole.b
    if tokens_a and tokens_b:
        return None if tokens_a == tokens_b else ("tokens", tokens_b / tokens_a * pace)
    return None if samples_a == samples_b else ("samples", samples_b / samples_a * pace)


def _reason(changes: ComparedParts, form: Callable[[float], str]) -> str:
    """``, mostly because of exposed communication (+0.9 s), in spite of pipeline bubble (-0.3 s)``."""
    ordered = sorted(changes.parts, key=lambda part: -(changes.share(part) or 0.0))
    if not ordered:
        return ""
    first, last = ordered[0], ordered[-1]
    if (changes.share(first) or 0.0) >= 0.5:
        reason = f", mostly because of {_named([first], form)}"
    else:
        reason = f", because of {_named(ordered[:2], form)}"
    against = (changes.share(last) or 0.0) <= -_COUNTERWEIGHT
    return f"{reason}, in spite of {_named([last], form)}" if against else reason


def _named(parts: Sequence[ComparedFigure], form: Callable[[float], str]) -> str:
    return " and ".join(f"{part.name} ({signed(form, part.difference)})" for part in parts)
