"""Looks one step along each axis from a plan: how sharp an optimum it is."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

from foretrain.errors import ForetrainError, first_line
from foretrain.job import Job
from foretrain.plan import Plan, divisors
from foretrain.planner.outcome import AxisStep, Option
from foretrain.planner.space import Space
from foretrain.predictors.base import Predictor
from foretrain.predictors.whitebox import RatingPredictor

_DEGREES = ("tensor", "pipeline", "context")
"""Which change the number of replicas."""


def steps_around(predictor: Predictor, option: Option, space: Space) -> tuple[AxisStep, ...]:
    """The plans next to an option, each with what it changes."""
    plan = option.plan
    return tuple(
        _stepped(predictor, option, axis, getattr(plan, axis), changed)
        for axis, changed in _changes(plan, space)
    )


def _stepped(
    predictor: Predictor, option: Option, axis: str, before: Any, fields: dict[str, Any]
) -> AxisStep:
    after = fields[axis]
    try:
        job = dataclasses.replace(option.job, plan=dataclasses.replace(option.plan, **fields))
        time_s, chance = _rated(predictor, job)
    except ForetrainError as error:
        return AxisStep(
            axis=axis, before=before, after=after, slower=None, out_of_memory=None, why=first_line(error)
        )
    slower = time_s / option.step_time_s.median - 1.0
    return AxisStep(axis=axis, before=before, after=after, slower=slower, out_of_memory=chance)


def _rated(predictor: Predictor, job: Job) -> tuple[float, float | None]:
    if isinstance(predictor, RatingPredictor):
        layout = predictor.tuned_layout(job)
        return predictor.quick_time_s(layout), predictor.quick_chance(layout)
    forecast = predictor.predict(job)
    return forecast["step_time_s"].median, forecast.out_of_memory_chance


def _changes(plan: Plan, space: Space) -> Iterator[tuple[str, dict[str, Any]]]:
    """Axes, with the fields that one step along each changes."""
    ability, data = space.ability, plan.data or 1
    for axis in _DEGREES:
        own = getattr(plan, axis)
        if axis not in ability.degrees:
            continue
        for other in (own // 2, own * 2):
            if other >= 1 and (data * own) % other == 0 and other != own:
                yield axis, _with_teams(plan, space, axis, other, data * own // other)
    if space.facts.experts and "expert" in ability.degrees:
        for other in (plan.expert // 2, plan.expert * 2):
            if other >= 1 and (space.facts.experts or 1) % other == 0:
                yield "expert", {"expert": other}
    parts = divisors(space.job.workload.training.global_batch // data)
    micro = plan.micro_batch or 1
    for other in [one for one in parts if one < micro][-1:] + [one for one in parts if one > micro][:1]:
        yield "micro_batch", {"micro_batch": other}
    for axis, values in (
        ("recompute", space.recomputes()),
        ("shard", ability.shards_in(plan.pipeline) if data * plan.context > 1 and space.job.trains else ()),
        ("schedule", ability.schedules if plan.pipeline > 1 and space.job.trains else ()),
        ("balance", ("even", "speed") if space.is_mixed else ()),
    ):
        for value in values:
            if value != getattr(plan, axis):
                fields: dict[str, Any] = {axis: value}
                if axis == "schedule":
                    fields["virtual_stages"] = None
                if axis == "shard" and value != "zero3":
                    fields |= {"replicate": 1, "reshard": None}
                yield axis, fields


def _with_teams(plan: Plan, space: Space, axis: str, degree: int, data: int) -> dict[str, Any]:
    """Another degree, with as many replicas as are left and what goes with it."""
    fields: dict[str, Any] = {axis: degree, "data": data}
    if data % plan.replicate:
        fields["replicate"] = 1
    if axis == "tensor":
        fields["sequence_parallel"] = degree > 1 and space.ability.cuts_sequences
        if plan.expert_tensor not in (None, 1):
            fields["expert_tensor"] = degree
    if axis == "pipeline" and degree == 1:
        fields |= {"schedule": "1f1b", "virtual_stages": None}
    if data * plan.context == 1:
        fields["shard"] = "none"
    elif plan.shard == "none" and space.job.trains:
        fields["shard"] = space.ability.shards[0]
    return fields
