"""Tells how sure a ranking is: parts of forecasts that err alike are drawn together, and the rest by itself.

The time of each option is multiplied by ``exp(sum of deviation x z)``, with one z for each part of a step
(computing, network, pipeline, ...) that all options share, so that what all of them have in common does not
change their order; one for what no part explains of how wide the forecast's interval is, shared too; and one
of its own.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt

from foretrain.estimate import SHARES, WIDTH_80, Estimate
from foretrain.forecast import Forecast
from foretrain.predictors.base import Predictor
from foretrain.predictors.whitebox import RatingPredictor

Column = npt.NDArray[np.float64]

OWN = 0.04
"""Standard deviation of the logarithm of a time that is an option's own. With it the first plan is the best
about as often as is said, in sweeps of nanotron and vTrain (``benchmarks/planner.py --only regret``)."""
_DRAWS = 4000
_SEED = 0


def drawn_s(predictor: Predictor, forecasts: Sequence[Forecast]) -> Column:
    """Times of a step that may be: a row for each draw, a column for each forecast; the same each time."""
    deviations = _deviations(predictor, forecasts)
    random = np.random.default_rng(_SEED)
    common = random.standard_normal((_DRAWS, deviations.shape[1])) @ deviations.T
    own = OWN * random.standard_normal((_DRAWS, len(forecasts)))
    medians = np.array([forecast["step_time_s"].median for forecast in forecasts])
    times: Column = medians * np.exp(common + own)
    return times


def covariance(predictor: Predictor, forecasts: Sequence[Forecast]) -> tuple[Column, Column]:
    """Say how the logarithms of the times vary together, and give their means."""
    deviations = _deviations(predictor, forecasts)
    together: Column = deviations @ deviations.T + OWN**2 * np.eye(len(forecasts))
    return together, np.log([forecast["step_time_s"].median for forecast in forecasts])


def _deviations(predictor: Predictor, forecasts: Sequence[Forecast]) -> Column:
    """Tabulate the deviations of each forecast by each part."""
    parts = [_parts(predictor, forecast) for forecast in forecasts]
    names = sorted({name for one in parts for name in one})
    return np.array([[one.get(name, 0.0) for name in names] for one in parts])


def _parts(predictor: Predictor, forecast: Forecast) -> Mapping[str, float]:
    errors: dict[str, float] = {}
    if isinstance(predictor, RatingPredictor) and forecast.step is not None:
        errors |= predictor.errors_by_part(forecast.step)
    time = forecast["step_time_s"]
    whole = math.log(time.high / time.low) / WIDTH_80 if time.low > 0 else 0.0
    explained = OWN**2 + sum(part**2 for part in errors.values())
    return {**errors, "unexplained": math.sqrt(max(0.0, whole**2 - explained))}


NEARLY = 0.03
"""By how much an option may be worse and still count as good as another."""


def first_is_best(times_s: Column, factors: Sequence[float], within: float = 0.0) -> float:
    """Count how often the first column is the smallest, or ``within`` such a share of it; each multiplied by
    its factor (a price, say)."""
    values = times_s * np.asarray(factors)
    return float(np.mean(values[:, 0] <= values.min(axis=1) * (1.0 + within)))


def of_the_best(times_s: Column) -> Estimate:
    """Estimate the smallest column, whichever that is."""
    smallest = times_s.min(axis=1)
    low_95, low, high, high_95 = (float(one) for one in np.quantile(smallest, SHARES))
    return Estimate(float(np.median(smallest)), low, high, low_95, high_95)
