"""Reads off a search what more devices bring: time and cost against their number, where it stops paying, and
what a pool of devices does for many runs."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from foretrain.forecast import Estimate
from foretrain.planner.goal import Goal
from foretrain.planner.outcome import Option, Plans

WORTH_WHILE = 0.7
"""Of the speed that as many times the devices would bring at best, as exponents, what is called worth while:
twice as many make a training 1.6 times as fast or more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Curve:
    """The fastest options of one kind of device, by their number."""

    kind: str
    points: tuple[Option, ...]

    @property
    def knee(self) -> Option | None:
        """The last up to which more devices are worth while; None of a single point."""
        if len(self.points) < 2:
            return None
        for one, other in itertools.pairwise(self.points):
            gained = math.log(one.time_s.median / other.time_s.median)
            if gained < WORTH_WHILE * math.log(other.devices / one.devices):
                return one
        return self.points[-1]

    def to_dict(self) -> dict[str, Any]:
        return {
            "device": self.kind,
            "points": [
                {
                    "devices": point.devices,
                    "time_s": point.time_s.to_dict(),
                    "cost_usd": None if point.cost is None else point.cost.to_dict(),
                }
                for point in self.points
            ],
            "knee": None if self.knee is None else self.knee.devices,
        }


def curves(plans: Plans) -> tuple[Curve, ...]:
    """Draw a curve of each kind of device that was looked at in several numbers."""
    by_kind: dict[str, list[Option]] = {}
    for one in plans.by_cluster:
        if isinstance(one, Option) and len(one.job.cluster.groups) == 1:
            by_kind.setdefault(one.job.cluster.groups[0].device.name, []).append(one)
    return tuple(
        Curve(kind=kind, points=tuple(sorted(points, key=lambda option: option.devices)))
        for kind, points in by_kind.items()
        if len(points) > 1
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class ManyRuns:
    """Many trainings alike on a pool of devices: how many at once, each on how many."""

    option: Option
    """One of them."""
    runs: int
    at_once: int
    goal: Goal

    @property
    def waves(self) -> int:
        return math.ceil(self.runs / self.at_once)

    @property
    def time_s(self) -> Estimate:
        """Time all runs, until the last has ended."""
        return self.option.time_s * float(self.waves)

    @property
    def cost(self) -> Estimate | None:
        return None if self.option.cost is None else self.option.cost * float(self.runs)

    @property
    def misses(self) -> tuple[str, ...]:
        goal, missed = self.goal, []
        if goal.deadline_s is not None and self.time_s.chance_above(goal.deadline_s) > goal.risk:
            missed.append("deadline")
        if goal.budget is not None and (self.cost is None or self.cost.chance_above(goal.budget) > goal.risk):
            missed.append("budget")
        return tuple(missed)

    def to_dict(self) -> dict[str, Any]:
        return {
            "runs": self.runs,
            "at_once": self.at_once,
            "waves": self.waves,
            "time_s": self.time_s.to_dict(),
            "cost_usd": None if self.cost is None else self.cost.to_dict(),
            "misses": list(self.misses),
            "each": self.option.to_dict(),
        }


def many_runs(plans: Plans, runs: int, pool: int) -> list[ManyRuns]:
    """List ways to make so many runs with a pool of devices, in parallel and in turn, the best by the goal
    first; limits are those of all runs together."""
    ways = [
        ManyRuns(option=option, runs=runs, at_once=min(runs, max(1, pool // option.devices)), goal=plans.goal)
        for option in _on_clusters(plans.by_cluster)
        if option.devices <= pool
    ]

    def value(one: ManyRuns) -> tuple[int, float, float]:
        cost = math.inf if one.cost is None else one.cost.median
        energy = one.option.energy_j
        wanted = {
            "time": one.time_s.median,
            "cost": cost,
            "energy": math.inf if energy is None else energy.median * runs,
        }[plans.goal.objective]
        return len(one.misses), wanted, one.time_s.median

    return sorted(ways, key=value)


def _on_clusters(entries: Iterable[Any]) -> Iterable[Option]:
    return (one for one in entries if isinstance(one, Option))
