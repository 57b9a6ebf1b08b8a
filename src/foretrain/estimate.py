"""Holds a figure that is not known for sure: a median with the bounds of its intervals."""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

_NORMAL_90 = statistics.NormalDist().inv_cdf(0.9)
WIDTH_80 = 2 * _NORMAL_90
"""The 80 % interval of a normal distribution in standard deviations."""
WIDER_95 = 1.53
"""The 95 % interval of a normal distribution over its 80 % interval."""


class Factors(NamedTuple):
    """Holds the bounds of the 95 % and of the 80 % interval around a median, as multiples of it."""

    low_95: float
    low: float
    high: float
    high_95: float

    @classmethod
    def of(cls, estimate: Estimate) -> Factors:
        """Take the factors of an estimate; where the 95 % interval is not known, it is as long as the 80 %
        interval."""
        low_95 = estimate.low if estimate.low_95 is None else estimate.low_95
        high_95 = estimate.high if estimate.high_95 is None else estimate.high_95
        return cls(*(bound / estimate.median for bound in (low_95, estimate.low, estimate.high, high_95)))

    def inverse(self) -> Factors:
        """Turn them into the factors of one over the figure."""
        return Factors(*(1 / factor for factor in reversed(self)))

    def power(self, exponent: float) -> Factors:
        """The intervals with their logarithms that many times as long."""
        return Factors(*(factor**exponent for factor in self))

    def longer(self, efolds: float) -> Factors:
        """The intervals with so many e-folds more on either side of the 80 %, and the 95 % in proportion."""
        inner, outer = math.exp(efolds), math.exp(WIDER_95 * efolds)
        return Factors(self.low_95 / outer, self.low / inner, self.high * inner, self.high_95 * outer)

    def widest(self, other: Factors) -> Factors:
        """Take on each side the bound that is farther out."""
        low_95, low, high, high_95 = zip(self, other, strict=True)
        return Factors(min(low_95), min(low), max(high), max(high_95))

    def joined(self, other: Factors) -> Factors:
        """Join them to the factors of a product of two that are unsure, neither because of the other."""
        pairs = zip(self, other, strict=True)
        low_95, low, high, high_95 = (math.hypot(math.log(one), math.log(two)) for one, two in pairs)
        return Factors(math.exp(-low_95), math.exp(-low), math.exp(high), math.exp(high_95))


SHARES = (0.025, 0.1, 0.9, 0.975)
"""Of values, what lies below each bound of ``Factors``."""
CERTAIN = Factors(1.0, 1.0, 1.0, 1.0)
"""Of a figure that is known."""


@dataclass(frozen=True, slots=True)
class Estimate:
    """A median, the bounds of the 80 % interval around it and, where they are known, those of the 95 %
    interval."""

    median: float
    low: float
    high: float
    low_95: float | None = None
    high_95: float | None = None

    def __post_init__(self) -> None:
        bounds = [
            bound
            for bound in (self.low_95, self.low, self.median, self.high, self.high_95)
            if bound is not None
        ]
        if not all(low <= high for low, high in itertools.pairwise(bounds)):
            raise ValueError(
                "an estimate needs low_95 <= low <= median <= "
                f"high <= high_95, not {', '.join(map(str, bounds))}"
            )

    def __float__(self) -> float:
        """The median."""
        return float(self.median)

    def __format__(self, spec: str) -> str:
        """The median as a number is written; without a format, all of it.

        >>> f"{Estimate(0.08674, 0.07, 0.1):.3f} s"
        '0.087 s'
        """
        return format(self.median, spec) if spec else str(self)

    def __mul__(self, factor: float | Estimate) -> Estimate:
        """The product with a number, or of two that are high and low together and not negative."""
        if isinstance(factor, Estimate):
            return self._with(factor, lambda a, b: a * b)
        return self.mapped(lambda value: value * factor)

    def __add__(self, other: Estimate) -> Estimate:
        """The sum of two that are high and low together."""
        return self._with(other, lambda a, b: a + b)

    def beside(self, other: Estimate) -> Estimate:
        """The sum of two that have nothing to do with one another: their spreads add up as squares."""
        whole = self + other

        def spread(name: str) -> float | None:
            both = getattr(whole, name)
            if both is None:
                return None
            ends = [getattr(one, name) - one.median for one in (self, other)]
            bound = whole.median + math.copysign(math.hypot(*ends), sum(ends))
            inner, outer = (max, min) if name.startswith("low") else (min, max)
            return float(inner(both, outer(whole.median, bound)))  # rounding may pass either

        low, high, low_95, high_95 = (spread(name) for name in ("low", "high", "low_95", "high_95"))
        assert low is not None
        assert high is not None
        low_95, high_95 = (low_95 and min(low_95, low)), (high_95 and max(high_95, high))
        return Estimate(whole.median, low, high, low_95, high_95)

    def at_least(self, limit: float) -> Estimate:
        """Raise every bound to a limit, below which nothing counts."""
        return self.mapped(lambda value: max(value, limit))

    def at_most(self, limit: float) -> Estimate:
        """Lower every bound to a limit, above which nothing counts."""
        return self.mapped(lambda value: min(value, limit))

    def _with(self, other: Estimate, join: Callable[[float, float], float]) -> Estimate:
        """Bound by bound; those of the 95 % interval where both have them."""

        def both(name: str) -> float | None:
            a, b = getattr(self, name), getattr(other, name)
            return None if a is None or b is None else join(a, b)

        low, high = both("low"), both("high")
        assert low is not None
        assert high is not None
        return Estimate(join(self.median, other.median), low, high, both("low_95"), both("high_95"))

    @classmethod
    def around(cls, median: float, spread: Factors) -> Estimate:
        """A median with these multiples of it as bounds."""
        low_95, low, high, high_95 = (median * factor for factor in spread)
        return cls(median, low, high, low_95, high_95)

    def inverse(self, numerator: float = 1.0) -> Estimate:
        """``numerator`` divided by the estimate: throughput from time."""
        return self.mapped(lambda value: numerator / value)

    def mapped(self, change: Callable[[float], float]) -> Estimate:
        """Change each bound by a function that only rises or only falls, which swaps them."""
        ends = [
            None if end is None else change(end)
            for end in (self.low_95, self.low, self.median, self.high, self.high_95)
        ]
        known = [end for end in ends if end is not None]
        low_95, low, median, high, high_95 = ends if known[0] <= known[-1] else reversed(ends)
        assert low is not None
        assert median is not None
        assert high is not None
        return Estimate(median, low, high, low_95, high_95)

    def to_dict(self) -> dict[str, float]:
        """The median and the bounds that are known, by name."""
        names = ("median", "low", "high", "low_95", "high_95")
        return {name: bound for name in names if (bound := getattr(self, name)) is not None}

    def chance_above(self, limit: float) -> float:
        """The probability of more than ``limit``, with the logarithm spread normally on either side of the
        median."""
        if min(self.median, self.low, limit) <= 0:
            return float(self.median > limit)
        above = limit >= self.median
        deviation = abs(math.log((self.high if above else self.low) / self.median)) / _NORMAL_90
        if not deviation:
            return float(self.median > limit)
        return 1.0 - statistics.NormalDist().cdf(math.log(limit / self.median) / deviation)
