"""Holds what a search for plans comes to: ranked options with their forecasts, the Pareto front, and how sure
it all is."""

from __future__ import annotations

import functools
import os
import pkgutil
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, overload

from foretrain.cluster import Cluster
from foretrain.forecast import Estimate, Forecast, the_pandas
from foretrain.job import Job
from foretrain.plan import Plan
from foretrain.planner.goal import Goal

SECONDS_PER_HOUR = 3600.0


@dataclass(frozen=True, kw_only=True, eq=False)
class Option:
    """A plan on a cluster: its forecast, and how it meets the goal. Time, cost and energy are those of the
    whole training, or of a step where its length is not given."""

    forecast: Forecast
    goal: Goal

    @property
    def job(self) -> Job:
        return self.forecast.job

    @property
    def plan(self) -> Plan:
        return self.job.plan

    @property
    def devices(self) -> int:
        return self.job.cluster.world_size

    @property
    def has_length(self) -> bool:
        return "total_time_s" in self.forecast

    @property
    def step_time_s(self) -> Estimate:
        return self.forecast["step_time_s"]

    @property
    def time_s(self) -> Estimate:
        return self.forecast["total_time_s"] if self.has_length else self.step_time_s

    @property
    def cost(self) -> Estimate | None:
        """Dollars."""
        price = self.forecast.price_per_hour
        return None if price is None else self.time_s * (price / SECONDS_PER_HOUR)

    @property
    def energy_j(self) -> Estimate | None:
        if self.has_length:
            return self.forecast.energy_j
        power = self.forecast.quantities.get("power_w")
        return None if power is None else self.step_time_s * (power.median * self.devices)

    @property
    def out_of_memory(self) -> float | None:
        """The chance of it."""
        return self.forecast.out_of_memory_chance

    @property
    def late(self) -> float | None:
        """The chance to miss the deadline; None without one."""
        deadline = self.goal.deadline_s
        return None if deadline is None else self.time_s.chance_above(deadline)

    @property
    def over_budget(self) -> float | None:
        """The chance to cost more than the budget; None without one, or without a price."""
        budget, cost = self.goal.budget, self.cost
        return None if budget is None or cost is None else cost.chance_above(budget)

    @property
    def misses(self) -> tuple[str, ...]:
        """Name the limits of the goal that it does not keep within."""
        missed = []
        if self.late is not None and self.late > self.goal.risk:
            missed.append("deadline")
        if self.goal.budget is not None and (self.over_budget is None or self.over_budget > self.goal.risk):
            missed.append("budget")
        return tuple(missed)

    @property
    def excess(self) -> float:
        """Say how far time or cost is above what they may be, as a share; 0 where the goal is kept."""
        goal, cost = self.goal, self.cost
        ratios = [0.0]
        if "deadline" in self.misses and goal.deadline_s is not None:
            ratios.append(self.time_s.median / goal.deadline_s)
        if "budget" in self.misses and goal.budget is not None:
            ratios.append(float("inf") if cost is None else cost.median / goal.budget)
        return max(ratios)

    @functools.cached_property
    def value(self) -> float:
        """Give the figure that the objective counts; infinite where it is not known."""
        kinds = {"time": self.time_s, "cost": self.cost, "energy": self.energy_j}
        estimate = kinds[self.goal.objective]
        return float("inf") if estimate is None else estimate.median

    def to_dict(self) -> dict[str, Any]:
        def plain(estimate: Estimate | None) -> dict[str, float] | None:
            return None if estimate is None else estimate.to_dict()

        return {
            "job": self.job.to_dict(),
            "devices": self.devices,
            "step_time_s": plain(self.step_time_s),
            "total_time_s": plain(self.time_s) if self.has_length else None,
            "cost_usd": plain(self.cost),
            "energy_j": plain(self.energy_j),
            "peak_memory_bytes": plain(self.forecast.quantities.get("peak_memory_bytes")),
            "out_of_memory_chance": self.out_of_memory,
            "late_chance": self.late,
            "over_budget_chance": self.over_budget,
            "misses": list(self.misses),
            "mfu": None if self.forecast.mfu is None else self.forecast.mfu.median,
            "bound": self.forecast.bound,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Nothing:
    """A cluster on which no plan fits, or none is legal."""

    job: Job
    """On that cluster, with any plan."""
    need: float | None
    """Memory that the leanest plan needs over what there is; None where no plan is legal."""
    leanest: Plan | None
    why: str
    """In words."""

    @property
    def cluster(self) -> Cluster:
        return self.job.cluster

    def to_dict(self) -> dict[str, Any]:
        return {"cluster": self.cluster.to_dict(), "memory_need": self.need, "why": self.why}


@dataclass(frozen=True, slots=True, kw_only=True)
class AxisStep:
    """One step along one axis from the best plan."""

    axis: str
    before: Any
    after: Any
    slower: float | None
    """How much longer a step takes, as a share; None where it is no plan."""
    out_of_memory: float | None
    why: str = ""
    """Why it is no plan."""

    def to_dict(self) -> dict[str, Any]:
        return {
            "axis": self.axis,
            "from": self.before,
            "to": self.after,
            "time_change": self.slower,
            "out_of_memory_chance": self.out_of_memory,
            "why": self.why,
        }


@dataclass(frozen=True, kw_only=True, eq=False)
class Plans(Sequence[Option]):
    """The options of a search, the best first; a sequence of them. Printed, it is what ``foretrain plan``
    shows; in a notebook, a table."""

    options: tuple[Option, ...]
    goal: Goal
    target: str
    """The framework that they are for."""
    by_cluster: tuple[Option | Nothing, ...] = ()
    """The fastest option of each cluster that was looked at, or why there is none."""
    first_is_best: float | None = None
    """The chance that none that was forecast, shown or not, is better by the objective than the first."""
    first_is_nearly_best: float | None = None
    """The chance that it is at most ``NEARLY`` worse than the best of them."""
    best_time_s: Estimate | None = None
    """Of a step of whichever option on the first one's cluster is the fastest."""
    around: tuple[AxisStep, ...] = ()
    considered: int = 0
    """Plans that were looked at: costed, too large by bounds, impossible for the model, or slower than others
    by bounds."""
    costed: int = 0
    too_large: int = 0
    """By bounds, or when they were costed."""
    costed_too_large: int = 0
    impossible: int = 0
    cuts_left: int = 0
    interrupted: bool = False
    seconds: float = 0.0
    refused: Counter[str] = field(default_factory=Counter)
    notes: tuple[str, ...] = ()

    @overload
    def __getitem__(self, index: int) -> Option: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[Option, ...]: ...
    def __getitem__(self, index: int | slice) -> Option | tuple[Option, ...]:
        return self.options[index]

    def __len__(self) -> int:
        return len(self.options)

    def __iter__(self) -> Iterator[Option]:
        return iter(self.options)

    @property
    def best(self) -> Option | None:
        """The first that keeps within the goal; None where none does."""
        return next((option for option in self.options if not option.misses), None)

    @property
    def front(self) -> tuple[Option, ...]:
        """Options that no other beats in time, cost and energy together, the fastest first."""
        unbeaten = [one for one in self._all if not any(_beats(other, one) for other in self._all)]
        return tuple(sorted(unbeaten, key=lambda option: option.time_s.median))

    @property
    def _all(self) -> list[Option]:
        fastest = [one for one in self.by_cluster if isinstance(one, Option)]
        return list(dict.fromkeys([*self.options, *fastest]))

    def __repr__(self) -> str:
        first = f"; the first {self.options[0].forecast!r}" if self.options else ""
        return f"<Plans: {len(self.options)} for {self.target}{first}>"

    def __str__(self) -> str:
        return str(pkgutil.resolve_name("foretrain.report.plans:to_text")(self))

    def _repr_html_(self) -> str:
        return str(pkgutil.resolve_name("foretrain.report.plan_notebook:to_html")(self))

    def plot(self) -> Any:
        """The Pareto front as a figure of plotly: time against cost, with intervals."""
        return pkgutil.resolve_name("foretrain.report.plan_notebook:front_figure")(self)

    def write(self, folder: str | os.PathLike[str]) -> list[Path]:
        """Folders with the files that launch the plans that keep within the goal, as ``--out`` writes."""
        from foretrain.planner.launching import write_plans

        return [one.folder for one in write_plans(self, Path(folder))]

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values in SI units."""
        goal = self.goal
        return {
            "objective": goal.objective,
            "deadline_s": goal.deadline_s,
            "budget_usd": goal.budget,
            "fits": goal.fits,
            "risk": goal.risk,
            "framework": self.target,
            "plans": [option.to_dict() for option in self.options],
            "front": [option.to_dict() for option in self.front],
            "clusters": [one.to_dict() for one in self.by_cluster],
            "first_is_best": self.first_is_best,
            "first_is_nearly_best": self.first_is_nearly_best,
            "best_step_time_s": None if self.best_time_s is None else self.best_time_s.to_dict(),
            "around": [step.to_dict() for step in self.around],
            "search": {
                "considered": self.considered,
                "costed": self.costed,
                "too_large": self.too_large,
                "costed_too_large": self.costed_too_large,
                "impossible": self.impossible,
                "cuts_left": self.cuts_left,
                "interrupted": self.interrupted,
                "seconds": self.seconds,
                "refused": dict(self.refused.most_common(20)),
            },
            "notes": list(self.notes),
        }

    def to_frame(self) -> Any:
        """A pandas DataFrame with a row for each option."""
        return the_pandas().DataFrame([_row(option) for option in self.options])


def _row(option: Option) -> dict[str, Any]:
    plan, cost, energy = option.plan, option.cost, option.energy_j
    fields = ("data", "tensor", "pipeline", "context", "expert", "micro_batch", "shard", "recompute")
    return {
        "device": " + ".join(group.device.name for group in option.job.cluster.groups),
        "devices": option.devices,
        **{name: getattr(plan, name) for name in (*fields, "schedule", "virtual_stages")},
        "step_time_s": option.step_time_s.median,
        "step_time_low_s": option.step_time_s.low,
        "step_time_high_s": option.step_time_s.high,
        "total_time_s": option.time_s.median if option.has_length else None,
        "cost_usd": None if cost is None else cost.median,
        "energy_j": None if energy is None else energy.median,
        "out_of_memory": option.out_of_memory,
        "misses": ", ".join(option.misses),
    }


def _beats(one: Option, other: Option) -> bool:
    """Whether an option is as good in all that is known of both, and better in something."""
    pairs = [
        (a.median, b.median)
        for a, b in (
            (one.time_s, other.time_s),
            (one.cost, other.cost),
            (one.energy_j, other.energy_j),
        )
        if a is not None and b is not None
    ]
    return all(a <= b for a, b in pairs) and any(a < b for a, b in pairs)
