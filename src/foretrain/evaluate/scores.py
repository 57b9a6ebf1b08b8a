"""Computes the figures that forecasts are scored by, one definition for the evaluation, the board and the
benchmarks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np
from numpy.typing import ArrayLike


@dataclass(frozen=True, slots=True, kw_only=True)
class Scores:
    """Says how far forecasts are off; errors are fractions of the measured value."""

    n: int
    mape: float
    median_ape: float
    p90_ape: float
    bias: float
    """Median of the signed error: above zero where forecasts say too much."""
    mre: float
    """The mean absolute error over the mean measured value: large values count for more than small ones."""
    rmse: float
    """Root of the mean squared error, in the unit of what was measured."""
    coverage: float | None = None
    """Share of measured values inside the interval; None where forecasts have none."""

    @classmethod
    def of(
        cls,
        measured: ArrayLike,
        predicted: ArrayLike,
        low: ArrayLike | None = None,
        high: ArrayLike | None = None,
    ) -> Self:
        """Score one forecast or more, each beside what was measured.

        >>> scores = Scores.of([1.0, 2.0], [1.5, 1.0])
        >>> scores.mape, scores.bias
        (0.5, 0.0)
        """
        true, forecast = np.asarray(measured, float), np.asarray(predicted, float)
        off = forecast - true
        errors = off / true
        sizes = np.abs(errors)
        inside = None
        if low is not None and high is not None:
            inside = float(np.mean((np.asarray(low) <= true) & (true <= np.asarray(high))))
        return cls(
            n=len(true),
            mape=float(sizes.mean()),
            median_ape=float(np.median(sizes)),
            p90_ape=float(np.quantile(sizes, 0.9)),
            bias=float(np.median(errors)),
            mre=float(np.abs(off).mean() / true.mean()),
            rmse=float(np.sqrt((off**2).mean())),
            coverage=inside,
        )

    @classmethod
    def of_errors(cls, errors: Sequence[float] | ArrayLike) -> Self:
        """Score relative errors alone, as if 1 had been measured."""
        given = np.asarray(errors, float)
        return cls.of(np.ones(len(given)), 1.0 + given)
