"""Draws what a page says beside the main figures: settings, queue, failures, cost of errors, job by job."""

from __future__ import annotations

import html
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from foretrain.scheduling.result import Column, Result, Segment
from foretrain.units import format_seconds

if TYPE_CHECKING:
    from foretrain.scheduling.study import Outcome, Scenario

_ENDED = ("finished", "killed")
_TROUBLE = ("failed", "node failed", "killed")
_MOST_NAMES = 7
"""Groups, users or kinds that have a colour of their own."""
OTHERS = "others"


def table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table as HTML."""
    lines = [[f"<th>{html.escape(head)}</th>" for head in heads]]
    lines += [[f"<td>{html.escape(cell)}</td>" for cell in row] for row in rows]
    return "<table>" + "\n".join(f"<tr>{''.join(line)}</tr>" for line in lines) + "</table>"


def settings_of(scenario: Scenario) -> dict[str, str]:
    """What a simulation was told, in words, but for what it was not told."""
    settings, failures = scenario.settings, scenario.settings.failures
    nodes = Counter((each.partition, each.gpus, each.device) for each in scenario.machines)
    cluster = ", ".join(
        f"{partition + ': ' if partition else ''}{count} x {gpus} x {device}"
        for (partition, gpus, device), count in nodes.items()
    )
    rules = settings.rules
    told: Mapping[str, object] = {
        "cluster": cluster,
        "placement": scenario.placement,
        "speeds": scenario.speeds.predictor or scenario.speeds.throughputs or "the trace's durations",
        "checkpoint": format_seconds(settings.checkpoint_s) if settings.checkpoint_s else "",
        "restart": format_seconds(settings.restart_s) if settings.restart_s else "",
        "failures of a job, per GPU": _seconds(failures.job_mtbf_gpu_s),
        "failures of a node": _seconds(failures.node_mtbf_s),
        "outages": len(failures.outages) or "",
        "sharing": "parts of a GPU" if settings.sharing else "",
        "pairs on a GPU": type(settings.pairs).__name__ if settings.pairs is not None else "",
        "queues": ", ".join(rules.queues),
        "reservations": len(rules.reservations) or "",
        "limits": "end jobs" if rules.kill else "",
        "priorities": "take GPUs" if rules.preempt else "",
        "spot nodes": scenario.spot.nodes if scenario.spot is not None else "",
        "rounds": format_seconds(scenario.rounds_s) if scenario.rounds_s else "",
    }
    return {name: str(value) for name, value in told.items() if str(value)}


def _seconds(value_s: float) -> str:
    return format_seconds(value_s) if value_s < float("inf") else ""


def settings_table(scenario: Scenario) -> str:
    return table(("setting", "value"), list(settings_of(scenario).items()))


def errors_table(outcomes: Sequence[Outcome]) -> str:
    """Average completion time by quality of estimates; empty where only one was tried."""
    from foretrain.scheduling.summary import cost_of_errors, mean_outcomes

    means = mean_outcomes(outcomes)
    if len({quality for _, quality in means}) < 2:
        return ""
    rows = []
    for (policy, quality), found in means.items():
        cost = cost_of_errors(means, policy, found)
        rows.append(
            [policy, quality.text, format_seconds(found.average_jct_s), "" if cost is None else f"{cost:+.1%}"]
        )
    return table(("policy", "estimates", "average JCT", "vs exact"), rows)


def queue_over_time(result: Result, points: int) -> tuple[Column, Column]:
    """Times, and how many jobs wait then."""
    starts, ends = result.segments.starts_s, result.segments.ends_s
    again = np.array([segment.reason not in _ENDED for segment in result.segments], dtype=bool)
    arrivals = np.sort(np.concatenate([result.arrival_s, ends[again]]))
    begin, end = float(result.arrival_s.min()), float(result.finish_s.max())
    times = np.linspace(begin, max(end, begin + 1.0), points)
    came = np.searchsorted(arrivals, times, side="right")
    left = np.searchsorted(np.sort(starts), times, side="right")
    return times, (came - left).astype(float)


def trouble(result: Result) -> dict[str, Column]:
    """The moments at which stretches ended in failure or at a limit, by what it was."""
    moments: dict[str, list[float]] = {reason: [] for reason in _TROUBLE}
    for segment in result.segments:
        if segment.reason in moments:
            moments[segment.reason].append(segment.end_s)
    return {reason: np.sort(np.array(each)) for reason, each in moments.items() if each}


def names_of(result: Result, field: str) -> list[str]:
    """For every job the group, user or kind that it is coloured by: the most frequent, and others."""
    values = [str(getattr(job, field)) for job in result.jobs]
    frequent = {name for name, _ in Counter(values).most_common(_MOST_NAMES)}
    return [value if value in frequent else OTHERS for value in values]


def colourings(result: Result) -> dict[str, list[str]]:
    """By what stretches can be coloured beside how they ended: whatever tells jobs apart."""
    found = {field: names_of(result, field) for field in ("group", "user", "kind")}
    return {field: names for field, names in found.items() if len(set(names)) > 1}


def against(one: Result, other: Result) -> tuple[Column, str]:
    """Completion times of one policy over those of another, job by job and sorted, and in words."""
    ratio = np.sort(one.completion_s / np.maximum(other.completion_s, 1e-9))
    sooner, later = float((ratio < 0.99).mean()), float((ratio > 1.01).mean())
    words = f"{sooner:.0%} of jobs end sooner under {one.policy} than under {other.policy}, {later:.0%} later"
    return ratio, words


def name_of(names: Sequence[str], segment: Segment) -> str:
    return names[segment.job]


def buttons(labels: Sequence[str], counts: Sequence[int]) -> dict[str, Any]:
    """A menu that shows one set of a figure's traces at a time; the first is shown at first."""
    total, made, before = sum(counts), [], 0
    for label, count in zip(labels, counts, strict=True):
        visible = [before <= place < before + count for place in range(total)]
        made.append({"label": label, "method": "update", "args": [{"visible": visible}]})
        before += count
    where = {"x": 1, "xanchor": "right", "y": 1.02, "yanchor": "bottom"}
    return {"buttons": made, "direction": "right", "type": "buttons", **where}
