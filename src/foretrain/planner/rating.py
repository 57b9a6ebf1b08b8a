"""Rates the plans of a cut, the most promising first: their time, and whether they fit, as far as bounds do
not rule them out."""

from __future__ import annotations

import dataclasses
import heapq
import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from foretrain.errors import CaptureError, ForetrainError, InputError, UnsupportedJob, first_line
from foretrain.forecast import usable_memory
from foretrain.plan import Plan
from foretrain.planner.bounds import Bounds
from foretrain.planner.space import Cut, Space
from foretrain.predictors.base import Predictor
from foretrain.predictors.whitebox import RatingPredictor

_SURELY_FULL = 0.3
"""How far the chance of running out of memory by a quick estimate may lie above what is allowed for a plan to
be looked at more closely."""
_DOUBTFUL = 4
"""Such plans that are kept."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rating:
    """Says what a plan comes to by the predictor's median."""

    plan: Plan
    time_s: float
    """Of a step."""
    chance: float | None
    """Of running out of memory, by a quick estimate; None where the predictor does not tell."""
    least_s: float = 0.0
    """What bounds say that a step takes at least."""


@dataclass(slots=True, kw_only=True)
class Rated:
    """The plans of a cut on one cluster: the fastest that may fit, and what became of the others."""

    best: list[Rating] = field(default_factory=list)
    """The fastest first."""
    doubtful: list[Rating] = field(default_factory=list)
    """As fast, which a closer look may find to fit."""
    considered: int = 0
    costed: int = 0
    """Plans that bounds did not rule out."""
    too_large: int = 0
    """Those that do not fit, by bounds or when they were costed."""
    costed_too_large: int = 0
    impossible: int = 0
    """Neither costed nor ruled out, as the model cannot be cut so."""
    too_large_s: float = math.inf
    """What bounds say that the fastest of those takes at least."""
    least: tuple[float, Plan] | None = None
    """Of those that do not fit, the one that comes nearest to it: what it needs at least over what there is
    (1 where that is not known so closely)."""
    hopeless: bool = False
    """Whether no plan of any cut fits."""
    refused: Counter[str] = field(default_factory=Counter)
    untraced: str = ""
    """Why the model could not be traced so cut."""

    def add_too_large(self, least_s: float) -> None:
        self.too_large += 1
        self.too_large_s = min(self.too_large_s, least_s)

    def nearest(self, plan: Plan, need: float) -> None:
        if self.least is None or need < self.least[0]:
            self.least = need, plan


def rate_cut(
    predictor: Predictor, space: Space, cut: Cut, *, most: int, below_s: float, risk: float
) -> Rated:
    """The ``most`` fastest plans of a cut that may fit, of those faster than ``below_s``."""
    rated = Rated()
    before = Counter(space.refused)
    plans = list(space.plans(cut))
    rated.considered = len(plans)
    try:
        for rating in _rated(predictor, space, plans, rated, most=most, below_s=below_s, risk=risk):
            if rating.chance is None or rating.chance <= risk:
                rated.best = heapq.nsmallest(most, [*rated.best, rating], key=order)
                continue
            rated.add_too_large(rating.least_s)
            rated.costed_too_large += 1
            if rating.chance <= risk + _SURELY_FULL:
                rated.doubtful = heapq.nsmallest(_DOUBTFUL, [*rated.doubtful, rating], key=order)
            else:
                rated.nearest(rating.plan, 1.0)
    except (CaptureError, InputError, UnsupportedJob) as error:
        rated.refused[f"{cut.words}: {first_line(error)}"] += max(1, len(plans))
        rated.impossible = len(plans) - rated.costed - (rated.too_large - rated.costed_too_large)
        rated.untraced = str(error) if isinstance(error, CaptureError) else ""
    rated.refused.update(space.refused - before)
    return rated


def order(rating: Rating) -> tuple[float, str]:
    """The fastest first, the same each time."""
    return rating.time_s, repr(rating.plan)


def _rated(
    predictor: Predictor,
    space: Space,
    plans: Sequence[Plan],
    rated: Rated,
    *,
    most: int,
    below_s: float,
    risk: float,
) -> Iterator[Rating]:
    if not plans:
        return
    if not isinstance(predictor, RatingPredictor):
        yield from _by_forecasts(predictor, space, plans, rated)
        return
    families: dict[Family, Bounds] = {}

    def bounds(plan: Plan) -> Bounds:
        family = _family(space, plan)
        if family not in families:
            families[family] = _bounds(predictor, space, plan)
        return families[family]

    offload = space.offloads and space.ability.offloads
    rated.hopeless = bounds(plans[0]).least_of_all_bytes(offload=offload) > _usable_bytes(space)
    ordered = sorted((bounds(plan).least_s(plan), i) for i, plan in enumerate(plans))
    fitting: set[Plan] = set()
    for least_s, i in ordered:
        if (kept := _keeping_all(plans[i])) in fitting:
            continue  # computes again what there is room for
        limit_s = min(below_s, rated.best[-1].time_s if len(rated.best) == most else below_s)
        if least_s >= limit_s:
            return
        usable_bytes = _usable_bytes(space, plans[i])
        if (least_bytes := bounds(plans[i]).least_bytes(plans[i])) > usable_bytes:
            rated.add_too_large(least_s)
            rated.nearest(plans[i], least_bytes / usable_bytes)
            continue
        rated.costed += 1
        try:
            rating = _rate(predictor, space, plans[i], limit_s, risk)
        except (CaptureError, InputError, UnsupportedJob) as error:
            rated.refused[first_line(error)] += 1
            continue
        if rating is None or (rating.chance or 0.0) <= risk:
            fitting.add(kept)
        if rating is not None:
            yield dataclasses.replace(rating, least_s=least_s)


def _keeping_all(plan: Plan) -> Plan:
    return dataclasses.replace(plan, recompute="none", offload=False)


def _rate(predictor: RatingPredictor, space: Space, plan: Plan, limit_s: float, risk: float) -> Rating | None:
    """The memory first, as it takes less time; None for a plan that fits and is not fast enough."""
    layout = predictor.tuned_layout(space.job_with(plan))
    chance = predictor.quick_chance(layout)
    if chance > risk + _SURELY_FULL:
        return Rating(plan=plan, time_s=limit_s, chance=chance)
    time_s = predictor.quick_time_s(layout)
    return Rating(plan=plan, time_s=time_s, chance=chance) if time_s < limit_s else None


def _bounds(predictor: RatingPredictor, space: Space, plan: Plan) -> Bounds:
    """Make bounds of a plan of the cut that shards nothing, keeps everything and deals layers out alike."""
    plain = dataclasses.replace(
        plan,
        shard="none",
        replicate=1,
        reshard=None,
        recompute="none",
        offload=False,
        schedule="1f1b",
        virtual_stages=None,
        balance="even" if plan.pipeline > 1 else plan.balance,
    )
    return Bounds.of(predictor.tuned_layout(space.job_with(plain)), tuple(space.recomputes()))


Family = tuple[str | None, bool] | None


def _family(space: Space, plan: Plan) -> Family:
    """Plans that share bounds: on groups that differ those in which all have even parts of a batch, parts by
    their speed, or stages of their own; elsewhere all."""
    return (plan.balance, plan.pipeline > 1) if space.is_mixed else None


def _usable_bytes(space: Space, plan: Plan | None = None) -> float:
    """Count the bytes that may be used of a device: of the smallest where all hold the same; else on average,
    as what does not fit there on average does not fit."""
    groups = space.job.cluster.groups
    sizes = [usable_memory(space.job, group.device.memory_bytes) for group in groups]
    if plan is not None and plan.balance != "speed" and plan.pipeline == 1:
        return min(sizes)
    held = sum(size * group.world_size for size, group in zip(sizes, groups, strict=True))
    return held / space.job.cluster.world_size


def _by_forecasts(
    predictor: Predictor, space: Space, plans: Sequence[Plan], rated: Rated
) -> Iterator[Rating]:
    """Rate plans by the forecasts of a predictor that does not look inside a step."""
    for plan in plans:
        rated.costed += 1
        try:
            forecast = predictor.predict(space.job_with(plan))
        except ForetrainError as error:
            rated.refused[first_line(error)] += 1
            continue
        if "step_time_s" in forecast:
            time_s = forecast["step_time_s"].median
            yield Rating(plan=plan, time_s=time_s, chance=forecast.out_of_memory_chance, least_s=time_s)
