"""Grows intervals with the distance of a job from what runs have shown, as runs that were left out tell."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from foretrain.estimate import WIDER_95, Factors
from foretrain.job import Job
from foretrain.predictors.seen import DATA_NUMBERS, Array, Away, Numbers, Seen, row_of
from foretrain.splits import Part, extrapolation, interpolation

_UNVARIED_IN_LAW, _UNVARIED = 1 / WIDER_95, 1.0
"""How an 80 % interval grows, in e-folds of time per e-fold, with a number that was the same in all runs:
where a law tells what it does, proportion in either direction is the 95 % interval; where none does, the
80 % interval."""
_UNVARIED_DATA = 0.13
"""The same for the size of the data: step times of ``data/ray_campaign.jsonl.zst`` that differ in it alone
are up to 1.44 times apart, over 16 times the data."""
_LEAST_GROWTH = 0.05
"""However well left-out runs were forecast: the far is less known than the near."""
_FEWEST_LEFT_OUT = 4
"""Left-out runs from which on there is an 80 % quantile."""
_MOST_INNER = 2
"""Inner values of a number that are left out, to calibrate the gaps between values."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LeftOutAlong:
    """A run that was left out with all of its like along a number, and forecast by the others: how far it is
    from them, and by how many e-folds it lies outside of the interval that holds at no distance."""

    along: str
    away: Away
    excess: float

    @classmethod
    def of(cls, along: str, away: Away, miss: float, spread: Factors) -> LeftOutAlong:
        """``miss`` is the logarithm of measured over forecast."""
        held = math.log(spread.high) if miss > 0 else -math.log(spread.low)
        return cls(along=along, away=away, excess=max(abs(miss) - held, 0.0))


@dataclass(frozen=True, slots=True, kw_only=True)
class Reach:
    """Says how an interval grows with the distance from what was seen, in e-folds of time: by so much in a
    gap between the values of a number, and for each e-fold beyond them. What left-out runs do not tell is
    missing."""

    gaps: Mapping[str, float] = field(default_factory=dict)
    beyond: Mapping[str, float] = field(default_factory=dict)

    @classmethod
    def of(cls, left_out: Sequence[LeftOutAlong]) -> Reach:
        """Let intervals grow so that what was left out lies in its interval as often as that says (split
        conformal prediction of the error over the distance)."""
        gaps: dict[str, list[float]] = {}
        beyond: dict[str, list[float]] = {}
        for one in left_out:
            if one.along in one.away.beyond:
                distance = math.hypot(*one.away.beyond.values())
                beyond.setdefault(one.along, []).append(one.excess / distance)
            elif one.along in one.away.gaps and not one.away.beyond:
                gaps.setdefault(one.along, []).append(one.excess)
        return cls(
            gaps={
                name: quantile_80(errors) for name, errors in gaps.items() if len(errors) >= _FEWEST_LEFT_OUT
            },
            beyond={
                name: max(quantile_80(errors), _LEAST_GROWTH)
                for name, errors in beyond.items()
                if len(errors) >= _FEWEST_LEFT_OUT
            },
        )

    def grown(
        self,
        spread: Factors,
        away: Away,
        numbers: Numbers,
        in_law: Iterable[str] | None = None,
        data: Collection[str] = DATA_NUMBERS,
    ) -> Factors:
        """The interval of a job. ``in_law`` are the numbers that the predictor has a law for (None: all),
        ``data`` those of the size of the data."""
        lawful = frozenset(numbers.values) if in_law is None else frozenset(in_law)

        def unknown(name: str) -> float:
            if name in data:
                return _UNVARIED_DATA
            return _UNVARIED_IN_LAW if name in lawful else _UNVARIED

        def beyond(name: str) -> float:
            return self.beyond.get(name, unknown(name)) if numbers.varied(name) else unknown(name)

        parts = [
            *(self.gaps.get(name, distance * unknown(name) / 2) for name, distance in away.gaps.items()),
            *(distance * beyond(name) for name, distance in away.beyond.items()),
        ]
        return spread.longer(math.hypot(*parts))

    def to_dict(self) -> dict[str, dict[str, float]]:
        return {"gaps": dict(self.gaps), "beyond": dict(self.beyond)}


def widened(
    job: Job,
    seen: Seen,
    row: Mapping[str, float | None],
    spread: Factors,
    reach: Reach,
    in_law: Iterable[str] | None = None,
) -> tuple[Factors, list[str]]:
    """Widen an interval by how far a job, whose numbers are ``row``, is from what was seen; and say what lies
    outside of that."""
    away = seen.numbers.away(row)
    spread, elsewhere = seen.on_machine(job, reach.grown(spread, away, seen.numbers, in_law))
    return spread, [*seen.notes(away, row), *elsewhere]


def quantile_80(values: Sequence[float]) -> float:
    """Give the value that 80 % stay below, the next one too."""
    return sorted(values)[min(math.ceil(0.8 * (len(values) + 1)), len(values)) - 1]


Along = tuple[str, Part]
"""A part of runs, and the number along which it was left out."""


def beyond_parts(columns: Mapping[str, Array]) -> list[Along]:
    """Along each number of three values or more, the largest third of them."""
    return [(name, part) for name, column in _several(columns) for part in extrapolation(column)]


def inner_parts(columns: Mapping[str, Array]) -> list[Along]:
    """Along each number of three values or more, some inner values, one at a time."""
    parts_along = []
    for name, column in _several(columns):
        parts = interpolation(column)
        places = np.linspace(0, len(parts) - 1, min(len(parts), _MOST_INNER)).round().astype(int)
        parts_along += [(name, parts[place]) for place in places]
    return parts_along


def _several(columns: Mapping[str, Array]) -> list[tuple[str, Array]]:
    return [
        (name, column)
        for name, column in columns.items()
        if np.isfinite(column).all() and len(np.unique(column)) > 2
    ]


def aways(columns: Mapping[str, Array], part: Part) -> list[Away]:
    """Say how far the runs of a part that are forecast are from the others."""
    known, asked = part
    numbers = Numbers.of({name: column[known] for name, column in columns.items()})
    return [numbers.away(row_of(columns, i)) for i in asked]


def left_out_along(
    columns: Mapping[str, Array],
    times_s: Array,
    forecast: Callable[[Part], Sequence[tuple[float, Factors]]],
) -> list[LeftOutAlong]:
    """Runs that are left out with all of their like: the largest of each number, and inner ones.
    ``forecast`` gives medians and intervals of those asked, by those known."""
    return [
        LeftOutAlong.of(along, away, math.log(times_s[i] / median_s), spread)
        for along, part in (*beyond_parts(columns), *inner_parts(columns))
        for i, away, (median_s, spread) in zip(part[1], aways(columns, part), forecast(part), strict=True)
    ]
