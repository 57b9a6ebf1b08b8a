"""Makes the table of a page of plans: what a search has found, with its ranking, its front and what lies
around it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from foretrain.catalog import Catalog
from foretrain.estimate import Estimate
from foretrain.forecast import Forecast
from foretrain.launchers.writing import TARGETS
from foretrain.planner.curves import curves
from foretrain.planner.outcome import Option, Plans
from foretrain.predictors.base import Predictor
from foretrain.predictors.evidence import with_evidence
from foretrain.report.plans import cluster_words, heading, nothing_lines, plan_words, search_lines, verdicts
from foretrain.web.table import SECONDS, ForecastTable, fill
from foretrain.web.views import Choices, of_jobs


def plan_table(
    plans: Plans, predictor: Predictor, *, seconds: float = SECONDS, catalog: Catalog | None = None
) -> ForecastTable | None:
    """Make a table of every option that was forecast, then of other batches and clusters of their plans; None
    where nothing was found."""
    options = options_of(plans)
    if not options:
        return None
    choices = of_jobs([option.job for option in options], catalog or Catalog.load())
    table = ForecastTable(choices=choices, predictor=predictor.name)
    target = plans.target if plans.target in TARGETS else None
    for number, option in enumerate(options):
        view = choices.view_of(option.job)
        if not table.has(view):
            forecast = with_evidence(option.forecast, predictor)
            table.add(view, forecast, predictor, fine=number == 0, target=target)
    fill(table, predictor, seconds)
    table.extra["plans"] = plan_section(plans, choices, options)
    return table


def options_of(plans: Plans) -> list[Option]:
    """List all options that were forecast, the best first."""
    return list(dict.fromkeys([*plans, *(one for one in plans.by_cluster if isinstance(one, Option))]))


def plan_section(
    plans: Plans, choices: Choices | None = None, options: Sequence[Option] = ()
) -> dict[str, Any]:
    """The ranking, the front, the curves and the notes."""
    front = plans.front
    ranks = {id(option): number for number, option in enumerate(plans, start=1)}
    return {
        "heading": list(heading(plans)),
        "has_length": bool(options) and options[0].has_length,
        "options": [
            {
                "rank": ranks.get(id(option)),
                "front": option in front,
                "view": None if choices is None else choices.view_of(option.job).to_dict(),
                "cluster": cluster_words(option.job),
                "plan": plan_words(option.job),
                "devices": option.devices,
                "step": option.step_time_s.to_dict(),
                "time": option.time_s.to_dict(),
                "cost": _plain(option.cost),
                "energy": _plain(option.energy_j),
                "memory": _share(option.forecast),
                "late": option.late,
                "over_budget": option.over_budget,
                "misses": list(option.misses),
            }
            for option in options
        ],
        "verdicts": list(verdicts(plans)) if len(plans) else [],
        "curves": [
            {
                "kind": curve.kind,
                "knee": None if curve.knee in (None, curve.points[-1]) else curve.knee.devices,
                "points": [
                    {"devices": point.devices, "time": point.time_s.to_dict()} for point in curve.points
                ],
            }
            for curve in curves(plans)
        ],
        "around": [step.to_dict() for step in plans.around],
        "notes": [*nothing_lines(plans), *plans.notes, *search_lines(plans)],
        "goal": {"deadline_s": plans.goal.deadline_s, "budget": plans.goal.budget},
    }


def _plain(estimate: Estimate | None) -> dict[str, float] | None:
    return None if estimate is None else estimate.to_dict()


def _share(forecast: Forecast) -> float | None:
    need = forecast.fullest
    return None if need is None else need.median / forecast.memory_capacity_bytes
