"""Says how far off a predictor was on the measured runs nearest to a job, and whether the job is far from
all."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from foretrain.forecast import Forecast
    from foretrain.predictors.base import Predictor

_HALF = 0.5
_IN_JSON = 5
"""Neighbours that go into a forecast's JSON, which may be one of many."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """Says how a forecast compares with what was measured: of one run, or of several alike."""

    error: float
    """(predicted - measured) / measured; of several, the median of its absolute value."""
    inside: float
    """Share of the measured values inside the 80 % interval."""
    memory_error: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Neighbour:
    """A record as one job and one predictor see it."""

    source: str
    about: str
    distance: float
    differs: tuple[str, ...]
    """The weightiest differences to the job, in words."""
    runs: int
    outcome: Outcome
    measured: float | None
    """Of the predictor's main quantity."""
    left_out: bool = False
    """Whether it was forecast without having learned from the architecture's family, where it would have."""

    @property
    def predicted(self) -> float | None:
        return None if self.measured is None else self.measured * (1 + self.outcome.error)

    def to_dict(self) -> dict[str, Any]:
        return {
            "source": self.source,
            "run": self.about,
            "distance": round(self.distance, 3),
            "differs": list(self.differs),
            "runs": self.runs,
            "measured": self.measured,
            "predicted": self.predicted,
            "error": self.outcome.error,
            "coverage": self.outcome.inside,
            "left_out": self.left_out,
            "memory_error": self.outcome.memory_error,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """Says what measured runs tell of a predictor's forecast of a job."""

    quantity: str
    nearest: tuple[Neighbour, ...]
    """The nearest first: those like the job, or the nearest few where none is."""
    far_from: float
    """The distance from which on intervals hold less than they say."""
    holds_beyond: float
    """The share of 80 % intervals that held, of runs farther than that from all others."""
    learned_from: bool = False
    """Whether the predictor learned from these very runs, so that the errors are too small."""

    @property
    def is_far(self) -> bool:
        return self.nearest[0].distance > self.far_from

    @property
    def runs(self) -> int:
        """Count the runs that are like the job."""
        return 0 if self.is_far else sum(one.runs for one in self.nearest)

    @property
    def median_error(self) -> float:
        """Give the median error of the runs shown, by its absolute value."""
        return _median([abs(one.outcome.error) for one in self.nearest], [one.runs for one in self.nearest])

    @property
    def coverage(self) -> float:
        """Share of them inside the predictor's 80 % intervals."""
        runs = sum(one.runs for one in self.nearest)
        return sum(one.outcome.inside * one.runs for one in self.nearest) / runs

    @property
    def is_known(self) -> bool:
        """Whether runs like the job were measured, and at least half of them lay in the predictor's 80 %
        intervals."""
        return not self.is_far and self.coverage >= _HALF

    @property
    def line(self) -> str:
        """Write one line for the screen."""
        first = self.nearest[0]
        of = "" if self.quantity == "step_time_s" else f" in {self.quantity}"
        median = "median " if first.measured is None and first.runs > 1 else ""
        start = f"nearest measured: {first.about}: {median}{abs(first.outcome.error):.0%} off{of}"
        known = " (it learned from them)" if self.learned_from else ""
        if self.is_far:
            return f"{start}, but far from this job: {'; '.join(first.differs)}{known}"
        runs = f"{self.runs:,} run{'s' if self.runs > 1 else ''} like it"
        return f"{start} ({runs}, median error {self.median_error:.0%}){known}"

    @property
    def flag(self) -> str | None:
        """Say what to assume of a job far from everything measured."""
        if not self.is_far:
            return None
        first = self.nearest[0]
        return (
            f"no measured run is like this job (distance {first.distance:.2f}, far is {self.far_from:.2f}: "
            f"{'; '.join(first.differs)}); of runs as far from others, {self.holds_beyond:.0%} lay in their "
            "80 % intervals"
        )

    def to_dict(self, most: int | None = _IN_JSON) -> dict[str, Any]:
        return {
            "quantity": self.quantity,
            "far": self.is_far,
            "far_from": self.far_from,
            "runs": self.runs,
            "median_error": self.median_error,
            "coverage": self.coverage,
            "learned_from": self.learned_from,
            "nearest": [one.to_dict() for one in self.nearest[:most]],
        }


def with_evidence(forecast: Forecast, predictor: Predictor) -> Forecast:
    """Put what measured runs say of it into a forecast, and a flag among its assumptions where they are
    far."""
    evidence = predictor.knows(forecast)
    flag = None if evidence is None else evidence.flag
    notes = forecast.assumptions if flag is None else (*forecast.assumptions, flag)
    return dataclasses.replace(forecast, evidence=evidence, assumptions=notes)


def _median(values: Sequence[float], weights: Sequence[int]) -> float:
    """The value that half of the weight lies below."""
    order = np.argsort(values)
    below = np.cumsum(np.array(weights)[order])
    return float(values[order[int(np.searchsorted(below, below[-1] / 2))]])
