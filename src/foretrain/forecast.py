"""The answer: quantities with intervals, where the time and the memory go, what it costs, and what was assumed."""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from foretrain.job import QUANTITIES, Job
from foretrain.step.allocator import MemoryProfile
from foretrain.step.playback import Step, shares
from foretrain.step.rank_memory import RankMemory, fullest_of
from foretrain.step.timeline import Timeline

_NORMAL_90 = statistics.NormalDist().inv_cdf(0.9)


@dataclass(frozen=True, slots=True)
class Estimate:
    """A median, the bounds of the 80 % interval around it and, where they are known, those of the 95 % interval."""

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
                f"an estimate needs low_95 <= low <= median <= high <= high_95, not {', '.join(map(str, bounds))}"
            )

    def __mul__(self, factor: float) -> Estimate:
        return self._map(lambda value: value * factor)

    def inverse(self, numerator: float = 1.0) -> Estimate:
        """``numerator`` divided by the estimate: throughput from time."""
        return self._map(lambda value: numerator / value)

    def _map(self, change: Callable[[float], float]) -> Estimate:
        """Each bound changed; a falling function swaps them."""
        ends = [
            None if end is None else change(end)
            for end in (self.low_95, self.low, self.median, self.high, self.high_95)
        ]
        low_95, low, median, high, high_95 = ends if change(1.0) <= change(2.0) else reversed(ends)
        assert low is not None
        assert median is not None
        assert high is not None
        return Estimate(median, low, high, low_95, high_95)

    def chance_above(self, limit: float) -> float:
        """The probability of more than ``limit``, with the logarithm spread normally on either side of the median."""
        if min(self.median, self.low, limit) <= 0:
            return float(self.median > limit)
        above = limit >= self.median
        deviation = abs(math.log((self.high if above else self.low) / self.median)) / _NORMAL_90
        if not deviation:
            return float(self.median > limit)
        return 1.0 - statistics.NormalDist().cdf(math.log(limit / self.median) / deviation)


@dataclass(frozen=True, kw_only=True)
class Forecast:
    """What a predictor says of a job. ``timeline`` and ``memory`` are there when the predictor looked inside the step."""

    job: Job
    predictor: str
    quantities: Mapping[str, Estimate]
    cost: Estimate | None = None
    """Dollars for the whole training."""
    energy_j: Estimate | None = None
    """Joules for the whole training, all devices together."""
    price_per_hour: float | None = None
    memory_by_category: Mapping[str, int] = field(default_factory=dict)
    memory_capacity_bytes: float | None = None
    bound: str = ""
    """What limits the step, in words."""
    assumptions: tuple[str, ...] = ()
    timeline: Timeline | None = field(default=None, repr=False)
    memory: MemoryProfile | None = field(default=None, repr=False)
    step: Step | None = field(default=None, repr=False)
    """The parts of a step on many devices."""
    rank_memory: tuple[RankMemory, ...] = ()
    """What a rank of each pipeline stage holds at its peak."""

    def __post_init__(self) -> None:
        for name in self.quantities:
            if name not in QUANTITIES:
                raise ValueError(f"{name!r} is not a quantity")

    def __getitem__(self, quantity: str) -> Estimate:
        return self.quantities[quantity]

    @property
    def out_of_memory_chance(self) -> float | None:
        """The probability that the allocator asks for more than a device has; None when either is not known."""
        fullest = self.fullest
        if fullest is None or self.memory_capacity_bytes is None:
            return None
        return fullest.chance_above(self.memory_capacity_bytes)

    @property
    def fits(self) -> bool | None:
        """Whether the peak of memory is below the device's capacity on every rank; None when either is not known."""
        fullest = self.fullest
        if fullest is None or self.memory_capacity_bytes is None:
            return None
        return fullest.median <= self.memory_capacity_bytes

    @property
    def fullest(self) -> Estimate | None:
        """What the fullest rank needs; the quantities are of the rank whose memory the framework reports."""
        peak = self.quantities.get("reserved_memory_bytes") or self.quantities.get("peak_memory_bytes")
        allocated = self.quantities.get("peak_memory_bytes")
        if peak is None or allocated is None or not self.rank_memory:
            return peak
        return peak * (fullest_of(self.rank_memory).allocated_bytes / allocated.median)

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values; medians and 80 % bounds in SI units."""
        result: dict[str, Any] = {
            "predictor": self.predictor,
            "job": self.job.to_dict(),
            "quantities": {name: _estimate(value) for name, value in self.quantities.items()},
            "bound": self.bound,
            "fits": self.fits,
            "out_of_memory_chance": self.out_of_memory_chance,
            "memory_capacity_bytes": self.memory_capacity_bytes,
            "memory_by_category_bytes": dict(self.memory_by_category),
            "cost_usd": None if self.cost is None else _estimate(self.cost),
            "energy_j": None if self.energy_j is None else _estimate(self.energy_j),
            "price_usd_per_hour": self.price_per_hour,
            "assumptions": list(self.assumptions),
        }
        if self.step is not None:
            result["step_breakdown_s"] = dict(shares(self.step))
            result["memory_by_stage_bytes"] = [rank.allocated_bytes for rank in self.rank_memory]
        if self.timeline is not None:
            result["breakdown_s"] = {what: self.timeline.by(what) for what in ("phase", "operator")}
        return result


def _estimate(value: Estimate) -> dict[str, float]:
    return {
        name: bound
        for name in ("median", "low", "high", "low_95", "high_95")
        if (bound := getattr(value, name)) is not None
    }


def whole_training(job: Job, step_time: Estimate) -> dict[str, Estimate]:
    """Throughput, epoch and total time that follow from the time of a step."""
    training = job.workload.training
    quantities = {"step_time_s": step_time, "samples_per_s": step_time.inverse(training.global_batch)}
    if training.sequence:
        quantities["tokens_per_s"] = step_time.inverse(training.global_batch * training.sequence)
    if training.steps_per_epoch is not None:
        quantities["epoch_time_s"] = step_time * training.steps_per_epoch
    if training.total_steps is not None:
        quantities["total_time_s"] = step_time * training.total_steps
    return quantities
