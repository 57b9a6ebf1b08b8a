"""Cuts forecasts, plans and explanations down to what an agent needs: short texts, and JSON of few keys."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from foretrain.estimate import Estimate
from foretrain.forecast import Forecast
from foretrain.planner.outcome import Nothing, Option, Plans
from foretrain.report import figures
from foretrain.report.check import remedy_lines
from foretrain.report.explain import ComparedParts, Explanation
from foretrain.report.plans import cluster_words, heading, nothing_lines, plan_words
from foretrain.units import format_dollars, format_seconds

_MOST_ASSUMPTIONS = 8
_QUANTITIES = (
    "step_time_s", "tokens_per_s", "samples_per_s", "epoch_time_s", "total_time_s", "peak_memory_bytes",
    "device_utilization",
)  # fmt: skip


def rounded(value: Any) -> Any:
    """Round numbers to four digits."""
    if isinstance(value, Mapping):
        return {name: rounded(inner) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return [rounded(inner) for inner in value]
    return float(f"{value:.4g}") if isinstance(value, float) else value


def _interval(estimate: Estimate | None) -> dict[str, float] | None:
    """The median and the 80 % interval."""
    if estimate is None:
        return None
    return {"median": estimate.median, "low": estimate.low, "high": estimate.high}


def _given(document: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in document.items() if value not in (None, [], {}, "")}


# Forecasts


def forecast_text(forecast: Forecast) -> str:
    """Say what is trained and where, how long, what it costs, whether it fits."""
    return "\n".join(_forecast_lines(forecast))


def _forecast_lines(forecast: Forecast) -> Iterator[str]:
    job = forecast.job
    yield f"{figures.describe_model(job)}, {figures.describe_cluster(job)}"
    shown = [figures.step_figure(forecast), *figures.rate_figures(forecast)][:2]
    totals = [one for one in figures.training_figures(forecast) if one.label in ("whole training", "cost")]
    for figure in (*shown, *totals):
        if figure is not None:
            yield f"{figure.label}: {figure.value} {figure.detail}".rstrip()
    if (verdict := figures.fits(forecast)) is not None:
        yield f"fits: {verdict[1].value}"
    yield from remedy_lines(forecast)
    if forecast.bound:
        yield f"bound by {forecast.bound}"


def forecast_data(forecast: Forecast) -> dict[str, Any]:
    """Figures with their intervals in SI units, where time and memory go, and what was assumed."""
    intervals = {name: _interval(forecast.quantities.get(name)) for name in _QUANTITIES}
    document = {
        **intervals,
        "cost_usd": _interval(forecast.cost),
        "price_usd_per_hour": forecast.price_per_hour,
        "energy_j": _interval(forecast.energy_j),
        "needed_memory_bytes": _interval(forecast.fullest),
        "memory_capacity_bytes": forecast.memory_capacity_bytes,
        "out_of_memory_chance": forecast.out_of_memory_chance,
        "fits": forecast.fits,
        "fits_with": [one.change for one in forecast.remedies or ()],
        "mfu": None if forecast.mfu is None else forecast.mfu.median,
        "bound": forecast.bound,
        "step_parts_s": figures.step_parts(forecast),
        "memory_by_category_bytes": figures.category_sizes(forecast),
        "evidence": None if forecast.evidence is None else forecast.evidence.line,
        "assumptions": forecast.all_assumptions[:_MOST_ASSUMPTIONS],
        "predictor": forecast.predictor,
        "job": forecast.job.to_dict(),
    }
    return dict(rounded(_given(document)))


# Plans


def plans_text(plans: Plans) -> str:
    """The goal, a line for each plan, and why clusters have none."""
    lines = list(heading(plans))
    lines += [f"{number}. {_option_words(option)}" for number, option in enumerate(plans, start=1)]
    if plans.first_is_best is not None and len(plans) > 1:
        lines.append(f"the first is the best with a chance of {plans.first_is_best:.0%}")
    if plans.best is None:
        lines.append("no plan keeps within the goal")
    if plans.interrupted:
        lines.append("the search was ended early: these are the best so far")
    return "\n".join([*lines, *nothing_lines(plans)])


def _option_words(option: Option) -> str:
    step = option.step_time_s
    words = [
        f"{cluster_words(option.job)}, {plan_words(option.job)}: a step {format_seconds(step.median)} "
        f"[{format_seconds(step.low)} to {format_seconds(step.high)}]"
    ]
    if option.has_length:
        words.append(f"training {format_seconds(option.time_s.median)}")
        words += [] if option.cost is None else [f"cost {format_dollars(option.cost.median)}"]
    words += [f"misses the {name}" for name in option.misses]
    return ", ".join(words)


def plans_data(plans: Plans) -> dict[str, Any]:
    """Write each plan with its figures; of the first its whole job, to ask for more."""
    best = plans.best
    document = {
        "objective": plans.goal.objective,
        "framework": plans.target,
        "plans": [_option_data(option) for option in plans],
        "best_job": None if best is None else best.job.to_dict(),
        "first_is_best_chance": plans.first_is_best,
        "no_plan_on": [one.to_dict() for one in plans.by_cluster if isinstance(one, Nothing)],
        "interrupted": plans.interrupted or None,
        "notes": list(plans.notes),
    }
    return dict(rounded(_given(document)))


def _option_data(option: Option) -> dict[str, Any]:
    return _given(
        {
            "cluster": cluster_words(option.job),
            "plan": plan_words(option.job),
            "devices": option.devices,
            "step_time_s": _interval(option.step_time_s),
            "total_time_s": _interval(option.time_s) if option.has_length else None,
            "cost_usd": _interval(option.cost) if option.has_length else None,
            "out_of_memory_chance": option.out_of_memory,
            "late_chance": option.late,
            "over_budget_chance": option.over_budget,
            "misses": list(option.misses),
            "mfu": None if option.forecast.mfu is None else option.forecast.mfu.median,
        }
    )


# Two jobs


def explanation_data(explained: Explanation) -> dict[str, Any]:
    """Fields that differ, and the seconds and bytes that the difference is made of."""
    document = {
        "fields": {name: {"a": a, "b": b} for name, (a, b) in explained.fields.items()},
        "step_s": _changes(explained.time),
        "memory_bytes": _changes(explained.memory),
    }
    return dict(rounded(_given(document)))


def _changes(changes: ComparedParts) -> dict[str, Any]:
    parts = (changes.whole, *changes.parts)
    return {part.name: {"a": part.a, "b": part.b, "difference": part.difference} for part in parts}
