"""Chooses short runs that would settle which plan is best, where forecasts leave it open.

The logarithms of the options' times are jointly normal: what parts of a step err by is common to all
(``certainty.py``). Measuring one option tells its own time, nearly, and something of all others. Chosen is,
one after another, the run after which the option that then looks best is expected to be the fastest by most:
the knowledge gradient (Frazier, Powell, Dayanik 2008).
"""

from __future__ import annotations

from dataclasses import dataclass
from statistics import NormalDist
from typing import Any

import numpy as np

from foretrain.planner.certainty import Column, covariance
from foretrain.planner.outcome import SECONDS_PER_HOUR, Option, Plans
from foretrain.predictors.base import Predictor

STEPS = 20
"""That a probe measures."""
_WARM_UP = 5
_MOST = 3
_WORTH = 0.002
"""Of the time of a step, the gain from which on a probe is worth while."""
_MEASURED = 0.01
"""Standard deviation of the logarithm of a measured time."""
_OUTCOMES = np.array([NormalDist().inv_cdf((i + 0.5) / 255) for i in range(255)])
"""Of a measurement, as standard deviations: each as likely as the others."""
_STARTUP_S = 120.0
"""Where the start of a training is not forecast."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Probe:
    """A short run of an option."""

    option: Option
    number: int
    """Of the option in the ranking, from 1."""
    time_s: float
    cost: float | None
    gain: float
    """Of the time of a step, what is expected to be gained by it beside the probes before."""

    def to_dict(self) -> dict[str, Any]:
        return {
            "plan": self.number,
            "job": self.option.job.to_dict(),
            "steps": STEPS,
            "time_s": self.time_s,
            "cost_usd": self.cost,
            "expected_gain": self.gain,
        }


def probes(predictor: Predictor, plans: Plans) -> list[Probe]:
    """The runs that are worth while, the most telling first; none where the first option is sure enough."""
    options = [option for option in plans.options if not option.misses] or list(plans.options)
    if len(options) < 2:
        return []
    known, means = covariance(predictor, [option.forecast for option in options])
    values = means + np.log([option.value / option.step_time_s.median for option in options])
    chosen: list[Probe] = []
    for _ in range(_MOST):
        gains = [_gain(values, known, i) for i in range(len(options))]
        best = int(np.argmax(gains))
        if gains[best] < _WORTH:
            break
        chosen.append(_probe(options[best], plans.options.index(options[best]) + 1, gains[best]))
        known = _after(known, best)
    return chosen


def _gain(means: Column, known: Column, i: int) -> float:
    """Say by how much smaller the smallest mean is expected to be once option ``i`` is measured."""
    spread = known[:, i] / np.sqrt(known[i, i] + _MEASURED**2)
    after = (means[:, None] + spread[:, None] * _OUTCOMES).min(axis=0)
    return float(means.min() - after.mean())


def _after(known: Column, i: int) -> Column:
    """Say what is left unknown when option ``i`` is measured."""
    remaining: Column = known - np.outer(known[:, i], known[i]) / (known[i, i] + _MEASURED**2)
    return remaining


def _probe(option: Option, number: int, gain: float) -> Probe:
    start = option.forecast.quantities.get("startup_time_s")
    time_s = (start.median if start else _STARTUP_S) + (STEPS + _WARM_UP) * option.step_time_s.median
    price = option.forecast.price_per_hour
    cost = None if price is None else price * time_s / SECONDS_PER_HOUR
    return Probe(option=option, number=number, time_s=time_s, cost=cost, gain=gain)
