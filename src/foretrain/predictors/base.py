"""The interface that every predictor has: fit on runs, predict a job, and the quantities it can give."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from typing import ClassVar, Self

from foretrain.forecast import Forecast
from foretrain.job import Job, Run


class Predictor(ABC):
    """Learns from runs, forecasts jobs. A job it cannot do raises ``UnsupportedJob``, never a silent fallback."""

    name: ClassVar[str]
    quantities: ClassVar[frozenset[str]]

    @abstractmethod
    def fit(self, runs: Iterable[Run]) -> Self:
        """Learn from measured runs; a predictor with nothing to learn returns itself unchanged."""

    def without(self, families: frozenset[str] = frozenset(), devices: frozenset[str] = frozenset()) -> Self:
        """Forget what was learned beforehand of these architecture families and devices, so that scoring on them is fair."""
        return self

    @abstractmethod
    def predict(self, job: Job) -> Forecast:
        """The forecast for one job."""
