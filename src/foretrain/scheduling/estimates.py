"""Estimates durations for policies: the truth, or the truth distorted as a predictor distorts it."""

from __future__ import annotations

import math
import random
from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path

from foretrain.errors import InputError, invalid
from foretrain.files import read_text
from foretrain.scheduling.jobs import TraceJob

_TIMES = ("step_time_s", "total_time_s")


class Estimates(ABC):
    """A factor on the true work of each job, which is all that a policy gets to see."""

    @abstractmethod
    def factor(self, job: TraceJob, number: int) -> float:
        """Estimated over true work; the same for the same job whenever it is asked for."""


class Exact(Estimates):
    """The truth."""

    def factor(self, job: TraceJob, number: int) -> float:
        return 1.0


class LogNormal(Estimates):
    """Errors as a predictor makes them: factors with median 1 and a given mean absolute percentage error."""

    def __init__(self, mape: float, seed: int = 0) -> None:
        if not 0 <= mape < 10:
            raise invalid("error", mape, "a fraction between 0 and 10, such as 0.1 for 10 %")
        self._sigma = spread_of(mape)
        self._seed = seed

    def factor(self, job: TraceJob, number: int) -> float:
        return math.exp(self._sigma * random.Random(f"{self._seed}/{number}").gauss(0.0, 1.0))


class ResidualEstimates(Estimates):
    """Factors drawn from what a predictor was off by on measured runs: predicted over measured."""

    def __init__(self, ratios: Sequence[float], seed: int = 0) -> None:
        bad = [ratio for ratio in ratios if not 0 < ratio < math.inf]
        if bad or not ratios:
            allowed = "a list of positive ratios of predicted to measured time"
            raise invalid("residuals", bad[0] if bad else list(ratios), allowed)
        self._ratios = tuple(ratios)
        self._seed = seed

    @property
    def mape(self) -> float:
        """Mean absolute percentage error, as a fraction."""
        return sum(abs(ratio - 1) for ratio in self._ratios) / len(self._ratios)

    @classmethod
    def load(cls, path: Path, seed: int = 0) -> dict[str, ResidualEstimates]:
        """By predictor, of the step times (else total times) that ``foretrain evaluate --json`` writes."""
        import json

        try:
            runs = json.loads(read_text(path))["runs"]
            ratios: dict[str, dict[str, list[float]]] = {}
            for run in runs:
                if run["quantity"] in _TIMES:
                    ratio = float(run["predicted"]) / float(run["measured"])
                    ratios.setdefault(str(run["predictor"]), {}).setdefault(run["quantity"], []).append(ratio)
        except (KeyError, TypeError, ValueError, ZeroDivisionError) as error:
            raise InputError(
                f"{path}: not a result of foretrain evaluate --json ({type(error).__name__}: {error})"
            ) from error
        if not ratios:
            raise InputError(f"{path}: holds no predicted {' or '.join(_TIMES)}")
        return {
            name: cls(next(of_time[time] for time in _TIMES if time in of_time), seed)
            for name, of_time in ratios.items()
        }

    def factor(self, job: TraceJob, number: int) -> float:
        return random.Random(f"{self._seed}/{number}").choice(self._ratios)


def spread_of(mape: float) -> float:
    """The sigma of a log-normal factor with median 1 whose mean absolute error is ``mape``.

    >>> round(spread_of(0.1), 4)
    0.1247
    """
    low, high = 0.0, 5.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if _mape_of(middle) < mape else (low, middle)
    return (low + high) / 2


def _mape_of(sigma: float) -> float:
    """E|exp(sigma Z) - 1|."""
    normal = 0.5 * (1 + math.erf(sigma / math.sqrt(2)))
    return math.exp(sigma * sigma / 2) * (2 * normal - 1)
