"""Plans a job: prepares it for a framework, searches its clusters, forecasts the best plans whole and ranks
them by the goal."""

from __future__ import annotations

import dataclasses
import itertools
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from foretrain.catalog import Catalog
from foretrain.cluster import Cluster
from foretrain.errors import ForetrainError, InputError
from foretrain.forecast import Forecast
from foretrain.job import UNSAID_RECOMPUTATION, Job
from foretrain.placing import group_sizes
from foretrain.plan import Plan
from foretrain.planner.abilities import Ability, ability_of
from foretrain.planner.around import steps_around
from foretrain.planner.cache import remembered
from foretrain.planner.certainty import NEARLY, drawn_s, first_is_best, of_the_best
from foretrain.planner.clusters import Wanted, clusters_of, in_other_order
from foretrain.planner.facts import Facts
from foretrain.planner.goal import Goal
from foretrain.planner.launching import unlaunchable
from foretrain.planner.outcome import Nothing, Option, Plans
from foretrain.planner.rating import order
from foretrain.planner.search import Listener, OnCluster, SearchState, search
from foretrain.planner.space import LONG_SEQUENCE, Space
from foretrain.predictors.base import Predictor
from foretrain.predictors.fitting_changes import Remedy, with_remedies
from foretrain.predictors.whitebox import RatingPredictor
from foretrain.progress import tell
from foretrain.step.partition import layers_of_chunks

EXPANDABLE = "expandable_segments:True"
"""The allocator's setting that plans are made for and launch files have."""
_PER_CLUSTER = 3
"""Options of one cluster that are shown."""
_SHOWN_DIGITS = 3
"""Of a time."""
_DOUBTFUL = 4
"""Plans of a cluster, of those that may turn out to fit, that are forecast whole."""
_UNSAID_PRECISION = "precision fp32"
"""Among what is assumed of a job that does not say it."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Effort:
    """Says how a search is run."""

    seconds: float | None = None
    """After which it ends with what it has."""
    exhaustive: bool = False
    """Whether every cut is tried."""
    processes: int = 1
    ray: str | None = None
    cached: bool = True
    """Whether what was searched before is looked up."""


def make_plans(
    job: Job,
    predictor: Predictor,
    *,
    goal: Goal,
    wanted: Wanted,
    target: str | None = None,
    allowed: Mapping[str, Sequence[Any]] | None = None,
    top: int = 10,
    effort: Effort | None = None,
    catalog: Catalog | None = None,
    listener: Listener = lambda searched: None,
) -> Plans:
    """The best plans of a job for a goal."""
    began_s, effort = time.monotonic(), effort or Effort()
    ability = ability_of(target, job.workload.training.framework)
    _check_model(job, ability)
    job, notes = prepared(job, ability)
    goal.check_length(has_length=job.workload.training.total_steps is not None)
    spaces = list(_spaces(job, ability, wanted, allowed or {}, catalog or Catalog.load()))
    asked: dict[str, Any] = {"risk": 1.0 - goal.fits, "exhaustive": effort.exhaustive}
    searched = remembered(
        predictor,
        spaces,
        asked,
        lambda: search(
            predictor,
            spaces,
            **asked,
            seconds=effort.seconds,
            processes=effort.processes,
            ray=effort.ray,
            listener=listener,
        ),
        wanted=effort.cached and effort.seconds is None,
    )
    options, by_cluster = _forecast(predictor, searched, goal, top)
    everything = sorted(options, key=_order)
    ranked = everything[:top]
    return Plans(
        options=tuple(ranked),
        goal=goal,
        target=ability.target,
        by_cluster=tuple(by_cluster),
        considered=searched.considered,
        costed=searched.costed,
        too_large=searched.too_large,
        costed_too_large=searched.costed_too_large,
        impossible=searched.impossible,
        cuts_left=searched.left,
        interrupted=searched.interrupted,
        refused=searched.refused,
        notes=(*notes, *_notes(job, ability, searched, ranked)),
        **_certainty(predictor, everything, spaces),
        seconds=time.monotonic() - began_s,
    )


# The job


def _check_model(job: Job, ability: Ability) -> None:
    """Refuse models that a framework with models of its own surely has not."""
    model = job.workload.model
    if ability.language_models_only and model.source in ("timm", "torchvision"):
        raise InputError(
            f"framework: {ability.target} trains language models of its own, and {model.label} is none; "
            "fsdp2 takes any model"
        )


def prepared(job: Job, ability: Ability) -> tuple[Job, tuple[str, ...]]:
    """The job as its framework is planned: with nothing left open that decides about memory."""
    training, notes = job.workload.training, []
    changes: dict[str, Any] = {"framework": ability.framework}
    if _UNSAID_PRECISION in job.assumed and all(group.device.bf16 for group in job.cluster.groups):
        changes["precision"] = "bf16" if ability.language_models_only else "amp-bf16"
        notes.append(f"training.precision is not given: {changes['precision']} is planned")
    if training.allocator is None and not any(group.device.is_cpu for group in job.cluster.groups):
        changes["allocator"] = EXPANDABLE
    precision = changes.get("precision", training.precision)
    if ability.framework == "megatron" and precision in ("bf16", "fp8") and job.trains:
        changes["gradient_precision"] = training.gradient_precision or "fp32"
    training = dataclasses.replace(training, **changes)
    kept = tuple(one for one in job.assumed if one not in (UNSAID_RECOMPUTATION, _UNSAID_PRECISION))
    plan = job.plan
    if precision == "fp8" and plan.fp8_gather is None:
        plan = dataclasses.replace(plan, fp8_gather=False)
    workload = dataclasses.replace(job.workload, training=training)
    return dataclasses.replace(job, workload=workload, plan=plan, assumed=kept), tuple(notes)


def _spaces(
    job: Job, ability: Ability, wanted: Wanted, allowed: Mapping[str, Sequence[Any]], catalog: Catalog
) -> Iterator[Space]:
    """The plans on each cluster; a pipeline over groups that differ may begin on the last of them too."""
    for cluster in clusters_of(job, wanted, catalog):
        space = space_on(cluster, job, ability, allowed)
        yield space
        piped = "pipeline" in ability.degrees and max(allowed.get("pipeline", (2,))) > 1
        if piped and (turned := in_other_order(cluster, catalog)) is not None:
            yield dataclasses.replace(space_on(turned, job, ability, allowed), pipelines_only=True)


def space_on(cluster: Cluster, job: Job, ability: Ability, allowed: Mapping[str, Sequence[Any]]) -> Space:
    """The plans of a job on a cluster."""
    world, batch = cluster.world_size, job.workload.training.global_batch
    shared = math.gcd(*group_sizes(cluster), batch)
    anything = Plan(data=shared, pipeline=world // shared)  # a plan that is legal; those of the space differ
    return Space(
        job=dataclasses.replace(job, cluster=cluster, plan=anything),
        own=job.plan,
        ability=ability,
        facts=Facts.of(job.workload),
        allowed=allowed,
    )


# Forecasts of what was found


def _forecast(
    predictor: Predictor, searched: SearchState, goal: Goal, top: int
) -> tuple[list[Option], list[Option | Nothing]]:
    """The options: the fastest of each cluster that fits, then more of the clusters that do best."""
    walks = [_fitting(predictor, one, goal) for one in searched.clusters]
    by_cluster: list[Option | Nothing] = []
    leaders: list[tuple[Option, int]] = []
    for i, one in enumerate(searched.clusters):
        tell(f"forecasting plans of {one.space.job.cluster.world_size} devices")
        first = next(walks[i], None)
        if first or not one.space.pipelines_only:
            by_cluster.append(first or nothing_on(one))
        leaders += [(first, i)] if first else []
    options = [first for first, _ in leaders]
    for _, i in sorted(leaders, key=lambda leader: _order(leader[0])):
        if len(options) >= max(top, len(leaders)) + _PER_CLUSTER:
            break
        options += itertools.islice(walks[i], _PER_CLUSTER - 1)
    return options, by_cluster


def _fitting(predictor: Predictor, on_cluster: OnCluster, goal: Goal) -> Iterator[Option]:
    """Plans of a cluster that fit by a whole forecast, the fastest first."""
    space = on_cluster.space
    for rating in sorted([*on_cluster.best, *on_cluster.doubtful[:_DOUBTFUL]], key=order):
        job, target = space.job_with(rating.plan), space.ability.target
        if unlaunchable(job, target):
            job = _spelled_out(predictor, job)
            if why := unlaunchable(job, target):
                on_cluster.unlaunchable = why
                continue
        try:
            forecast = predictor.predict(job)
        except ForetrainError:
            continue
        if fits(forecast, goal):
            yield Option(forecast=forecast, goal=goal)


def _spelled_out(predictor: Predictor, job: Job) -> Job:
    """Spell out the layers of each chunk of a pipeline, where they do not divide."""
    plan, layers = job.plan, Facts.of(job.workload).layers or 0
    if plan.pipeline == 1 or plan.stages is not None or not isinstance(predictor, RatingPredictor):
        return job
    counts = layers_of_chunks(predictor.tuned_layout(job).stages, plan.schedule)
    if layers % len(counts) == 0 or sum(counts) != layers or len(job.cluster.distinct_groups) > 1:
        return job
    return dataclasses.replace(job, plan=dataclasses.replace(plan, stages=counts))


def fits(forecast: Forecast, goal: Goal) -> bool:
    """Whether memory is enough with the probability that is wanted, and torch returns none in a step."""
    chance = forecast.out_of_memory_chance
    return chance is None or (chance <= 1.0 - goal.fits and forecast.memory_short_of is None)


def _order(option: Option) -> tuple[float, float, float, float, int]:
    """Order options: what keeps within the goal comes first, the best by the objective before the others; of
    what does not, what comes nearest to it. Of those that are as fast in the figures that are shown, the
    cheaper one."""
    value, cost = option.value, math.inf
    if option.goal.objective == "time":
        value = float(f"{value:.{_SHOWN_DIGITS}g}")
        cost = math.inf if option.cost is None else option.cost.median
    return option.excess, value, cost, option.time_s.median, option.devices


def nothing_on(on_cluster: OnCluster) -> Nothing:
    """Why a cluster has no plan."""
    cluster = on_cluster.space.job.cluster
    if on_cluster.best and on_cluster.unlaunchable:
        return Nothing(job=on_cluster.space.job, need=None, leanest=None, why=on_cluster.unlaunchable)
    if on_cluster.cuts and not on_cluster.tried:
        why = "time was up before a plan was looked at"
        return Nothing(job=on_cluster.space.job, need=None, leanest=None, why=why)
    if on_cluster.least is None:
        reason = on_cluster.untraced or next(iter(on_cluster.space.refused), "no plan is legal")
        return Nothing(job=on_cluster.space.job, need=None, leanest=None, why=reason)
    need, plan = on_cluster.least
    sizes = sorted({group.device.memory_bytes for group in cluster.groups})
    rooms = " or ".join(f"{size / 2**30:.0f} GiB" for size in sizes)
    if on_cluster.hopeless:
        words = "weights, gradients and optimizer state alone, dealt out over all devices, are more"
    else:
        words = (
            f"the leanest plan needs {need:.1f} times the memory of a device"
            if need > 1
            else ("the leanest plan fits with too small a chance")
        )
    return Nothing(job=on_cluster.space.job, need=need, leanest=plan, why=f"{words} ({rooms} a device)")


def _certainty(predictor: Predictor, ranked: Sequence[Option], spaces: Sequence[Space]) -> dict[str, Any]:
    if not ranked:
        return {}
    first = ranked[0]
    within = [option for option in ranked if not option.misses] or list(ranked)
    factors = [option.value / option.step_time_s.median for option in within]
    times_s = drawn_s(predictor, [option.forecast for option in within])
    alike = [option for option in ranked if option.job.cluster == first.job.cluster]
    space = next(space for space in spaces if space.job.cluster == first.job.cluster)
    return {
        "first_is_best": first_is_best(times_s, factors),
        "first_is_nearly_best": first_is_best(times_s, factors, NEARLY),
        "best_time_s": of_the_best(drawn_s(predictor, [option.forecast for option in alike])),
        "around": steps_around(predictor, first, space),
    }


def _notes(job: Job, ability: Ability, searched: SearchState, ranked: Sequence[Option]) -> Iterator[str]:
    sequence = job.workload.training.sequence or 0
    if (
        "context" in ability.degrees
        and 0 < sequence < LONG_SEQUENCE
        and any(one.best for one in searched.clusters)
    ):
        yield (
            f"plan.context is looked at from {LONG_SEQUENCE:,} tokens on, or where nothing else fits; "
            "--set plan.context=1,2,4 asks for it"
        )
    if any(option.cost is None for option in ranked):
        yield "no price is known of some devices: give cluster.price, or a catalogue of your own"
    if searched.interrupted:
        yield f"time was up with {searched.left} cuts of the model left; give more --seconds"


def remedies(predictor: Predictor, plans: Plans) -> Iterator[str]:
    """The smallest changes with which the leanest plan of the largest cluster would fit, in words."""
    tried = [one for one in plans.by_cluster if isinstance(one, Nothing) and one.leanest is not None]
    if not tried:
        return
    one = max(tried, key=lambda nothing: nothing.cluster.world_size)
    assert one.leanest is not None
    job = dataclasses.replace(one.job, plan=one.leanest)
    try:
        forecast = with_remedies(predictor.predict(job), predictor)
    except ForetrainError:
        return
    for remedy in forecast.remedies or ():
        yield _on_its_devices(remedy, one.cluster)


def _on_its_devices(remedy: Remedy, cluster: Cluster) -> str:
    """A change in words, with the devices that it is for: those of a cluster, or others in their place."""
    own = " + ".join(f"{group.world_size} x {group.device.name}" for group in cluster.groups)
    fields = {name: remedy.fields.get(f"cluster.{name}") for name in ("device", "devices_per_node", "nodes")}
    if not any(fields.values()):
        return f"{remedy.change} on {own}"
    device = fields["device"] or cluster.device.name
    count = (fields["devices_per_node"] or 0) * (fields["nodes"] or 0) or cluster.world_size
    moved = (f"device {device}", f"{count} devices")
    rest = ", ".join(words for words in remedy.change.split(", ") if words not in moved)
    return f"{rest}{' on ' if rest else ''}{count} x {device} instead of {own}"
