"""Asks every predictor that comes with foretrain for one job, and says which of them knows such jobs, whether
these agree, and why the default is what it is."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from foretrain import predictors
from foretrain.errors import ForetrainError
from foretrain.forecast import Estimate, Forecast
from foretrain.job import Job
from foretrain.predictors.evidence import Evidence, with_evidence
from foretrain.progress import tell
from foretrain.units import format_seconds

STEP = "step_time_s"
_LEAST_RUNS = 5
"""Runs like a job below which one predictor's errors on them are no reason to prefer it to another."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PredictorAnswer:
    """Holds what one predictor says: a forecast, or why there is none."""

    predictor: str
    forecast: Forecast | None = None
    refusal: str = ""

    @property
    def evidence(self) -> Evidence | None:
        return None if self.forecast is None else self.forecast.evidence

    @property
    def knows(self) -> bool:
        """Whether runs like the job were measured, and its intervals held them."""
        return self.evidence is not None and self.evidence.is_known

    @property
    def why_not(self) -> str:
        """Why it does not know such jobs."""
        if self.evidence is None or self.evidence.is_far:
            return f"{self.predictor} has no measured run like this job"
        error, held = self.evidence.median_error, self.evidence.coverage
        return f"{self.predictor} was {error:.0%} off on runs like it, and {held:.0%} of its intervals held"

    @property
    def step_time(self) -> Estimate | None:
        return None if self.forecast is None else self.forecast.quantities.get(STEP)

    def to_dict(self) -> dict[str, Any]:
        if self.forecast is None:
            return {"predictor": self.predictor, "refusal": self.refusal}
        evidence = self.evidence
        return {
            "predictor": self.predictor,
            "forecast": {**self.forecast.to_dict(), "evidence": evidence and evidence.to_dict()},
            "knows": self.knows,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class SideBySide:
    """One job by all of them."""

    job: Job
    entries: tuple[PredictorAnswer, ...]

    @property
    def default(self) -> PredictorAnswer:
        return next(entry for entry in self.entries if entry.predictor == predictors.DEFAULT)

    @property
    def why_default(self) -> str:
        """Why the default is what it is, and whether another did better on runs like the job."""
        default = self.default
        if default.forecast is None:
            return f"{default.predictor} is the default and refuses this job"
        start = f"{default.predictor} is the default: it forecasts every model, device and plan, with memory"
        others = [entry for entry in self._timed() if entry is not default and entry.knows]
        if not default.knows:
            knowing = " and ".join(entry.predictor for entry in others)
            rest = f"but {knowing} knows such jobs" if knowing else "and no other predictor knows such jobs"
            return f"{start}; {default.why_not}, {rest}"
        score = f"median error {_score(default)} like this job"
        compared = [entry for entry in others if entry.evidence and entry.evidence.runs >= _LEAST_RUNS]
        if not compared:
            return f"{start}; {score}, and no other predictor knows as many"
        best = min(compared, key=_error)
        verdict = "closer" if _error(best) < _error(default) else "not closer"
        return f"{start}; {score}; {best.predictor} was {verdict}: {_score(best)}"

    @property
    def disagreements(self) -> list[str]:
        """A line for each pair whose 80 % intervals of the step time do not meet, where both know such jobs
        or one is the default."""
        lines = []
        for one, other in itertools.combinations(self._timed(), 2):
            first, second = one.step_time, other.step_time
            assert first is not None
            assert second is not None
            if first.low <= second.high and second.low <= first.high:
                continue
            pair = (
                f"{one.predictor} ({_with_interval(first)}) and {other.predictor} ({_with_interval(second)})"
            )
            strangers = [entry for entry in (one, other) if not entry.knows]
            if not strangers:
                lines.append(f"{pair} both know such jobs and disagree beyond their intervals")
            elif self.default in (one, other):
                whys = "; ".join(entry.why_not for entry in strangers)
                lines.append(f"{pair} disagree beyond their intervals: {whys}")
        return lines

    def to_dict(self) -> dict[str, Any]:
        return {
            "job": self.job.to_dict(),
            "default": predictors.DEFAULT,
            "why_default": self.why_default,
            "disagreements": self.disagreements,
            "predictors": [entry.to_dict() for entry in self.entries],
        }

    def _timed(self) -> Iterator[PredictorAnswer]:
        return (entry for entry in self.entries if entry.step_time is not None)


def side_by_side(job: Job) -> SideBySide:
    """The default first, then the others by name."""
    names = sorted(predictors.names(), key=lambda name: (name != predictors.DEFAULT, name))
    return SideBySide(job=job, entries=tuple(_entry(name, job) for name in names))


def _entry(name: str, job: Job) -> PredictorAnswer:
    tell(f"asking {name}")
    predictor = predictors.get(name)
    try:
        forecast = predictor.predict(job)
    except ForetrainError as error:
        return PredictorAnswer(predictor=name, refusal=" ".join(str(error).splitlines()))
    return PredictorAnswer(predictor=name, forecast=with_evidence(forecast, predictor))


def _error(entry: PredictorAnswer) -> float:
    assert entry.evidence is not None
    return entry.evidence.median_error


def _score(entry: PredictorAnswer) -> str:
    assert entry.evidence is not None
    return f"{entry.evidence.median_error:.0%} on {entry.evidence.runs:,} runs"


def _with_interval(time: Estimate) -> str:
    return f"{format_seconds(time.median)} [{format_seconds(time.low)} to {format_seconds(time.high)}]"
