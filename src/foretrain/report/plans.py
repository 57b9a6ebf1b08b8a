"""Shows plans: ranked in a table, their Pareto front as a plot of characters, why the first beats the next,
and what lies around it."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from foretrain.forecast import Estimate
from foretrain.job import Job
from foretrain.planner.certainty import NEARLY
from foretrain.planner.curves import WORTH_WHILE, Curve, ManyRuns
from foretrain.planner.largest import Largest
from foretrain.planner.outcome import AxisStep, Nothing, Option, Plans
from foretrain.planner.probes import STEPS, Probe
from foretrain.planner.suggest import Suggestion
from foretrain.report.explain import explain
from foretrain.report.notebook import printed
from foretrain.report.tables import table
from foretrain.units import format_count, format_dollars, format_seconds

_PLOT_COLUMNS, _PLOT_ROWS = 64, 14
_EXPLAINED = 4
"""Options that are set beside the next one."""


def plan_words(job: Job) -> str:
    """``data 16 x tensor 8 x pipeline 2, micro-batch 1, zero1, interleaved x 4, recompute full``."""
    plan = job.plan
    degrees = [
        f"{name} {getattr(plan, name)}"
        for name in ("data", "tensor", "pipeline", "context", "expert")
        if (getattr(plan, name) or 1) > 1
    ]
    if plan.expert > 1 and job.expert_tensor > 1:
        degrees.append(f"expert-tensor {job.expert_tensor}")
    words = [" x ".join(degrees) or "one device", f"micro-batch {job.micro_batch}"]
    if plan.shard != "none":
        copies = f", {plan.replicate} copies" if plan.replicate > 1 else ""
        kept = ", kept gathered" if plan.reshard is False else ""
        words.append(f"{plan.shard}{copies}{kept}")
    if plan.pipeline > 1:
        chunks = f" x {plan.virtual_stages}" if plan.virtual_stages else ""
        words.append(f"{plan.schedule}{chunks}")
    if job.balance == "speed" and len(job.cluster.distinct_groups) > 1:
        words.append(f"{'layers' if plan.pipeline > 1 else 'batch'} by speed")
    if plan.recompute != "none":
        words.append(f"recompute {plan.recompute}")
    if plan.offload:
        words.append("optimizer on the host")
    return ", ".join(words)


def cluster_words(job: Job) -> str:
    return " + ".join(f"{group.world_size} x {group.device.name}" for group in job.cluster.groups)


def to_text(plans: Plans) -> str:
    """Write what the command line prints, without colours."""
    return printed(shown(plans))


def shown(plans: Plans) -> RenderableType:
    """Lay out all that there is to say."""
    parts: list[RenderableType] = [Text(line) for line in heading(plans)]
    if plans.options:
        parts.append(plans_table(plans))
        parts += [Text(f"- {line}") for line in verdicts(plans)]
        if len(plans.front) > 2:
            parts += [Text(""), Text("Pareto front (nothing else is faster, cheaper and leaner):")]
            parts += [Text(line) for line in front_plot(plans)]
        if plans.around:
            parts += [Text(""), Text("one step from the first plan:"), around_table(plans.around)]
    parts += [Text(f"- {line}") for line in (*nothing_lines(plans), *plans.notes, *search_lines(plans))]
    return Group(*parts)


def heading(plans: Plans) -> Iterator[str]:
    """Say what was searched: for which framework, with which goal and limits."""
    goal = plans.goal
    wanted = [f"least {goal.objective}"]
    if goal.deadline_s is not None:
        wanted.append(f"within {format_seconds(goal.deadline_s)}")
    if goal.budget is not None:
        wanted.append(f"for at most {format_dollars(goal.budget)}")
    yield f"plans for {plans.target}: {', '.join(wanted)}; memory is enough with {goal.fits:.0%} or more"


def plans_table(plans: Plans) -> Table:
    """The options, the best first."""
    length, goal = plans[0].has_length, plans.goal
    late, over = goal.deadline_s is not None, goal.budget is not None
    headings = (
        "",
        "cluster and plan",
        "step",
        "80 % interval",
        *(["training"] if length else []),
        "cost" if length else "of 1,000 steps",
        "memory",
        *(["late"] if late else []),
        *(["over"] if over else []),
    )
    rows = [
        [
            str(number),
            f"{cluster_words(option.job)}\n{plan_words(option.job)}",
            format_seconds(option.step_time_s.median),
            f"{format_seconds(option.step_time_s.low)} to {format_seconds(option.step_time_s.high)}",
            *([format_seconds(option.time_s.median)] if length else []),
            _dollars(option.cost, 1.0 if length else 1000.0),
            _memory(option),
            *([_chance(option.late)] if late else []),
            *([_chance(option.over_budget)] if over else []),
        ]
        for number, option in enumerate(plans, start=1)
    ]
    return table(headings, rows, right=headings[2:])


def _dollars(cost: Estimate | None, times: float) -> str:
    return "unknown" if cost is None else format_dollars(cost.median * times)


def _energy(option: Option) -> str:
    return "unknown" if option.energy_j is None else format_count(option.energy_j.median / 3600, "Wh")


def _memory(option: Option) -> str:
    need, forecast = option.forecast.fullest, option.forecast
    return "unknown" if need is None else f"{need.median / forecast.memory_capacity_bytes:.0%}"


def _chance(chance: float | None) -> str:
    return "-" if chance is None else f"{chance:.0%}"


# How sure, and why


def verdicts(plans: Plans) -> Iterator[str]:
    """Say how sure the ranking is, and why the first option comes before the second."""
    first = plans[0]
    if first.misses:
        yield f"none of them keeps within the {' and the '.join(first.misses)}; the nearest come first"
    if plans.first_is_best is not None and len(plans) > 1:
        yield (
            f"the first is the best of all with a chance of {plans.first_is_best:.0%}, "
            f"and at most {NEARLY:.0%} worse than the best with {plans.first_is_nearly_best:.0%}"
        )
    if plans.best_time_s is not None and len(plans) > 1:
        best = plans.best_time_s
        yield (
            f"a step of the best plan on {cluster_words(first.job)}, whichever it is, takes "
            f"{format_seconds(best.low)} to {format_seconds(best.high)}"
        )
    yield from reasons(plans)


def reasons(plans: Plans) -> Iterator[str]:
    """Say for each option why it comes before the next one, by cause; of those on the same cluster."""
    for number, (one, other) in enumerate(itertools.pairwise(plans[:_EXPLAINED]), start=1):
        if one.forecast.step is None or other.forecast.step is None:
            continue
        if one.job.cluster != other.job.cluster:
            yield f"{number} before {number + 1}: {_between_clusters(one, other)}"
            continue
        explained = explain(one.forecast, other.forecast)
        sentence = (
            next(iter(explained.sentences), "").replace("B is", f"{number + 1} is").replace("A and B", "both")
        )
        yield f"{number} before {number + 1}: {sentence[:1].lower()}{sentence[1:]}"


def _between_clusters(one: Option, other: Option) -> str:
    time = other.time_s.median / one.time_s.median - 1.0
    share = f"{abs(time):.0%}"
    taken = "as long" if share == "0%" else f"{share} {'more' if time > 0 else 'less'} time"
    words = f"{cluster_words(other.job)} takes {taken}"
    if one.cost is None or other.cost is None:
        return words
    cost = other.cost.median / one.cost.median - 1.0
    return f"{words} and costs {abs(cost):.1%} {'more' if cost > 0 else 'less'}"


def around_table(steps: Sequence[AxisStep]) -> Table:
    """Lay out what one step along each axis changes."""
    rows = [
        [
            step.axis.replace("_", " "),
            f"{step.before} to {step.after}",
            "-" if step.slower is None else f"{step.slower:+.1%}",
            "-" if step.out_of_memory is None else f"{step.out_of_memory:.0%}",
            step.why,
        ]
        for step in steps
    ]
    return table(
        ("axis", "change", "time", "out of memory", "why not"), rows, right=("time", "out of memory")
    )


def nothing_lines(plans: Plans) -> Iterator[str]:
    """Clusters without a plan, those of one reason together."""
    reasons: dict[str, list[str]] = {}
    for one in plans.by_cluster:
        if isinstance(one, Nothing):
            names = " + ".join(f"{g.world_size} x {g.device.name}" for g in one.cluster.groups)
            reasons.setdefault(one.why, []).append(names)
    for why, clusters in reasons.items():
        yield f"no plan for {', '.join(clusters)}: {why}"


def search_lines(plans: Plans) -> Iterator[str]:
    """Say how many plans were considered, and why most of them were not costed."""
    unseen = plans.cuts_left and not plans.interrupted
    left = f"; {plans.cuts_left} ways to cut the model promised nothing" if unseen else ""
    by_bounds = plans.too_large - plans.costed_too_large
    slower = plans.considered - plans.costed - by_bounds - plans.impossible
    costed = f"{plans.costed:,} costed"
    if plans.costed_too_large:
        costed += f" ({plans.costed_too_large:,} of them too large)"
    others = (
        (by_bounds, "too large"),
        (plans.impossible, "impossible for the model"),
        (slower, "slower by bounds"),
    )
    counts = [costed, *(f"{count:,} {what}" for count, what in others if count)]
    yield f"{plans.considered:,} plans in {format_seconds(plans.seconds)}: {', '.join(counts)}{left}"


# The front, drawn with characters


def front_plot(plans: Plans) -> Iterator[str]:
    """Time against cost on logarithmic scales, or against energy where no price is known; the front numbered,
    other clusters as dots."""
    front = plans.front
    priced = all(option.cost is not None for option in front)
    others = [one for one in plans.by_cluster if isinstance(one, Option) and one not in front]
    points = [(_x(option), _y(option, priced=priced), str(i)) for i, option in enumerate(front, start=1)]
    points += [
        (_x(option), _y(option, priced=priced), ".")
        for option in others
        if not priced or option.cost is not None
    ]
    xs, ys = [x for x, _, _ in points], [y for _, y, _ in points]
    grid = [[" "] * _PLOT_COLUMNS for _ in range(_PLOT_ROWS)]
    for x, y, mark in reversed(points):
        column = _place(x, min(xs), max(xs), _PLOT_COLUMNS - 2)
        row = _PLOT_ROWS - 1 - _place(y, min(ys), max(ys), _PLOT_ROWS - 1)
        for i, character in enumerate(mark):
            grid[row][column + i] = character
    labels = [_label(max(ys), priced), _label(min(ys), priced)]
    width = max(map(len, labels))
    for i, row_text in enumerate(grid):
        label = labels[0] if i == 0 else labels[1] if i == _PLOT_ROWS - 1 else ""
        yield f"{label:>{width}} |{''.join(row_text).rstrip()}"
    yield f"{'':>{width}} +{'-' * _PLOT_COLUMNS}"
    left, right = format_seconds(math.exp(min(xs))), format_seconds(math.exp(max(xs)))
    yield f"{'':>{width}}  {left}{right:>{_PLOT_COLUMNS - len(left)}}"
    for number, option in enumerate(front, start=1):
        figures = [format_seconds(option.time_s.median)]
        figures += [format_dollars(option.cost.median)] if option.cost is not None else []
        figures += [_energy(option)] if option.energy_j is not None and option.has_length else []
        yield f"  {number}: {cluster_words(option.job)}: {', '.join(figures)}"


def _x(option: Option) -> float:
    return math.log(option.time_s.median)


def _y(option: Option, *, priced: bool) -> float:
    estimate = option.cost if priced else option.energy_j
    return math.log(estimate.median) if estimate is not None and estimate.median > 0 else 0.0


def _label(log: float, priced: bool) -> str:
    return format_dollars(math.exp(log)) if priced else format_count(math.exp(log) / 3600, "Wh")


def _place(value: float, low: float, high: float, most: int) -> int:
    return round((value - low) / (high - low) * most) if high > low else 0


# What if


def curve_tables(all_curves: Sequence[Curve]) -> Iterator[RenderableType]:
    """Time and cost against the number of devices, with the knee marked."""
    for curve in all_curves:
        knee = curve.knee
        rows = [
            [
                f"{point.devices:,}",
                format_seconds(point.time_s.median),
                "unknown" if point.cost is None else format_dollars(point.cost.median),
                f"{curve.points[0].time_s.median / point.time_s.median:.2f}x",
                f"{_efficiency(curve, point):.0%}",
                "knee" if point is knee and point is not curve.points[-1] else "",
            ]
            for point in curve.points
        ]
        headings = (curve.kind, "time", "cost", "speed", "efficiency", "")
        yield table(headings, rows, right=headings[:5])
        if knee is not None and knee is not curve.points[-1]:
            yield Text(
                f"- beyond the knee twice the devices are less than {2**WORTH_WHILE:.1f} times as fast"
            )


def _efficiency(curve: Curve, point: Option) -> float:
    first = curve.points[0]
    return first.time_s.median * first.devices / (point.time_s.median * point.devices)


def many_runs_table(ways: Sequence[ManyRuns]) -> Table:
    """Lay out ways to make many runs."""
    rows = [
        [
            cluster_words(one.option.job),
            plan_words(one.option.job),
            f"{one.at_once:,}",
            format_seconds(one.time_s.median),
            "unknown" if one.cost is None else format_dollars(one.cost.median),
            ", ".join(one.misses),
        ]
        for one in ways
    ]
    count = ways[0].runs if ways else 0
    headings = ("each on", "plan", "at once", f"time of {count} runs", "cost of all", "misses")
    return table(headings, rows, right=headings[2:5])


def probe_lines(chosen: Sequence[Probe]) -> Iterator[RenderableType]:
    """Short runs that would settle the choice."""
    if not chosen:
        yield Text("no short run is worth while: none is expected to change the choice by much")
        return
    yield Text("short runs that would settle the choice (foretrain plan ... --runs FILE plans with them):")
    for probe in chosen:
        cost = "" if probe.cost is None else f", {format_dollars(probe.cost)}"
        yield Text(
            f"- plan {probe.number}: {STEPS} steps, {format_seconds(probe.time_s)} with its start{cost}; "
            f"expected to save {probe.gain:.1%} of the time of a step"
        )


def sweep_table(swept: Sequence[tuple[Mapping[str, Any], Plans]]) -> Table:
    """The best plan for each combination of fields that were set."""
    names = list(swept[0][0])
    headings = (*names, "cluster", "plan", "step", "80 % interval", "throughput", "time", "cost")
    rows = []
    for settings, plans in swept:
        values = [str(value) for value in settings.values()]
        option = plans.best or (plans[0] if len(plans) else None)
        if option is None:
            why = next((one.why for one in plans.by_cluster if isinstance(one, Nothing)), "no plan")
            rows.append([*values, "-", why, "-", "-", "-", "-", "-"])
            continue
        step, rate = option.step_time_s, option.forecast["samples_per_s"]
        rows.append(
            [
                *values,
                cluster_words(option.job),
                plan_words(option.job),
                format_seconds(step.median),
                f"{format_seconds(step.low)} to {format_seconds(step.high)}",
                f"{format_count(rate.median)}/s",
                format_seconds(option.time_s.median) if option.has_length else "-",
                _dollars(option.cost, 1.0) if option.has_length else "-",
            ]
        )
    return table(headings, rows, right=headings[len(names) + 2 :])


def largest_lines(largest: Largest) -> Iterator[RenderableType]:
    """The largest that fits, its plan, and why no more does."""
    if largest.option is None:
        yield Text(f"no {largest.what} fits: {largest.why}")
        return
    value = f"{largest.value:,}" if isinstance(largest.value, int) else largest.value
    option = largest.option
    yield Text(f"largest {largest.what} on {cluster_words(option.job)}: {value}")
    yield Text(f"  {plan_words(option.job)}, {format_seconds(option.step_time_s.median)} a step")
    if largest.next_value is not None:
        more = f"{largest.next_value:,}" if isinstance(largest.next_value, int) else largest.next_value
        yield Text(f"  {more} does not: {largest.why}")


def suggestion_lines(suggestions: Sequence[Suggestion]) -> Iterator[RenderableType]:
    """The changes that help most."""
    if not suggestions:
        yield Text("nothing that was tried would help by 1 % or more")
        return
    yield Text("would help most:")
    for suggestion in suggestions:
        step, chance = suggestion.forecast["step_time_s"], suggestion.forecast.out_of_memory_chance
        notes = [] if chance is None else [f"{chance:.0%} chance of running out of memory"]
        notes += ["other numbers"] if suggestion.changes_numbers else []
        yield Text(
            f"- {suggestion.change}: {suggestion.faster:+.0%} samples/s, {format_seconds(step.median)} a step"
            + (f" ({', '.join(notes)})" if notes else "")
        )
