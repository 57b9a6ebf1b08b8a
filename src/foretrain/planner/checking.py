"""Holds a forecast against limits of time, cost and memory, each with the chance to miss it."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

from foretrain.errors import InputError, UnsupportedJob, invalid
from foretrain.forecast import Estimate, Forecast
from foretrain.job import Job
from foretrain.planner.goal import Goal
from foretrain.planner.outcome import Option
from foretrain.predictors.base import Predictor
from foretrain.predictors.fitting_changes import with_remedies
from foretrain.predictors.plugins import told_in_one_line

_USUAL_FITS = 0.9
"""The least probability that memory is enough, where none is given."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JobLimits:
    """Says what a training must keep within."""

    max_time_s: float | None = None
    """Of the whole training."""
    max_cost: float | None = None
    """Dollars of the whole training."""
    max_memory_bytes: float | None = None
    """Of the fullest device, whatever it has."""
    fits: float | None = None
    """The least probability that the devices have memory enough; ``_USUAL_FITS`` where memory is forecast."""
    risk: float = 0.1
    """The probability with which the other limits may be missed."""

    def __post_init__(self) -> None:
        names = {"max_time_s": "max-time", "max_cost": "max-cost", "max_memory_bytes": "max-memory"}
        for field, name in names.items():
            value = getattr(self, field)
            if value is not None and not 0 < value < math.inf:
                raise invalid(name, value, "a finite number above zero")
        self.goal()  # checks the probabilities

    def goal(self) -> Goal:
        """Make the goal with which a planner keeps within these limits."""
        fits = _USUAL_FITS if self.fits is None else self.fits
        return Goal(deadline_s=self.max_time_s, budget=self.max_cost, fits=fits, risk=self.risk)

    def check_job(self, job: Job) -> None:
        """Refuse limits that nothing can be said of."""
        for name, limit in (("max-time", self.max_time_s), ("max-cost", self.max_cost)):
            if limit is not None and job.workload.training.total_steps is None:
                raise InputError(f"{name}: of a whole training; give its steps, or its samples and epochs")
        if self.max_cost is not None and job.price_per_hour is None:
            devices = ", ".join(group.device.name for group in job.cluster.groups)
            raise InputError(f'max-cost: the price of {devices} is not known; give price, as "$2.50/h"')


@dataclass(frozen=True, slots=True, kw_only=True)
class LimitVerdict:
    """One limit, and what is forecast of it."""

    name: Literal["time", "cost", "memory", "fits"]
    value: Estimate
    """Seconds, dollars, or bytes of the fullest device."""
    limit: float
    """In the same unit; of ``fits`` what the device has."""
    chance: float
    """To miss the limit."""
    allowed: float
    """The chance that is accepted."""

    @property
    def holds(self) -> bool:
        return self.chance <= self.allowed

    def to_dict(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "holds": self.holds,
            "value": self.value.to_dict(),
            "limit": self.limit,
            "chance_to_miss": self.chance,
            "allowed_chance": self.allowed,
        }


@dataclass(frozen=True, kw_only=True, eq=False)
class JobCheck:
    """A forecast beside its limits; ``check_job`` makes it."""

    forecast: Forecast
    limits: JobLimits

    @functools.cached_property
    def verdicts(self) -> tuple[LimitVerdict, ...]:
        """Judge each limit; never empty, but where nothing is asked and memory is not forecast."""
        return tuple(self._verdicts())

    @property
    def holds(self) -> bool:
        return all(verdict.holds for verdict in self.verdicts)

    @property
    def option(self) -> Option:
        """The job as a planner sees it."""
        return Option(forecast=self.forecast, goal=self.limits.goal())

    def _verdicts(self) -> Iterator[LimitVerdict]:
        option, limits = self.option, self.limits
        if limits.max_time_s is not None and option.late is not None:
            yield LimitVerdict(
                name="time",
                value=option.time_s,
                limit=limits.max_time_s,
                chance=option.late,
                allowed=limits.risk,
            )
        if limits.max_cost is not None and option.cost is not None and option.over_budget is not None:
            yield LimitVerdict(
                name="cost",
                value=option.cost,
                limit=limits.max_cost,
                chance=option.over_budget,
                allowed=limits.risk,
            )
        yield from self._memory_verdicts(option)

    def _memory_verdicts(self, option: Option) -> Iterator[LimitVerdict]:
        limits, need, chance = self.limits, self.forecast.fullest, option.out_of_memory
        if need is None or chance is None:
            for field, given in (("max-memory", limits.max_memory_bytes), ("fits", limits.fits)):
                if given is not None:
                    raise UnsupportedJob(f"{field}: {self.forecast.predictor} does not forecast memory")
            return
        if limits.max_memory_bytes is not None:
            yield LimitVerdict(
                name="memory",
                value=need,
                limit=limits.max_memory_bytes,
                chance=need.chance_above(limits.max_memory_bytes),
                allowed=limits.risk,
            )
        yield LimitVerdict(
            name="fits",
            value=need,
            limit=self.forecast.memory_capacity_bytes,
            chance=chance,
            allowed=1.0 - option.goal.fits,
        )

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values in SI units."""
        return {
            "holds": self.holds,
            "limits": [verdict.to_dict() for verdict in self.verdicts],
            "risk": self.limits.risk,
            "fits": self.limits.goal().fits,
            "predictor": self.forecast.predictor,
            "job": self.forecast.job.to_dict(),
        }


def check_job(job: Job, predictor: Predictor, limits: JobLimits) -> JobCheck:
    """The forecast of a job beside its limits, with what would make it fit where it does not."""
    limits.check_job(job)
    with told_in_one_line(type(predictor)):
        forecast = with_remedies(predictor.predict(job), predictor)
    return JobCheck(forecast=forecast, limits=limits)
