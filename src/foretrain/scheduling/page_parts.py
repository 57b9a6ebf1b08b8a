"""Draws what a page says beside the main figures: settings, queue, failures, cost of errors, job by job."""

from __future__ import annotations

import html
import math
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from foretrain.scheduling.result import Column, Result, Segment
from foretrain.units import format_seconds

if TYPE_CHECKING:
    from foretrain.scheduling.spot import Spot
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
    parts = (_machines_of, _speeds_of, _failures_of, _sharing_of)
    shown = {name: str(value) for part in parts for name, value in part(scenario).items()}
    return {name: value for name, value in shown.items() if value}


def _machines_of(scenario: Scenario) -> dict[str, object]:
    nodes = Counter((each.partition, each.gpus, each.device) for each in scenario.machines)
    cluster = ", ".join(
        f"{partition + ': ' if partition else ''}{count} x {gpus} x {device}"
        for (partition, gpus, device), count in nodes.items()
    )
    racks = Counter(each.rack for each in scenario.machines)
    settings = scenario.settings
    return {
        "cluster": cluster,
        "placement": scenario.placement,
        "nodes to a rack": max(racks.values()) if scenario.placement == "topology" else "",
        "moves to faster devices": "yes" if settings.migrate else "",
        "gangs on several kinds of devices": "yes" if settings.mixed_gangs else "",
        "rounds": _seconds(scenario.rounds_s),
    }


def _speeds_of(scenario: Scenario) -> dict[str, object]:
    speeds, shares = scenario.speeds, scenario.shares
    alike = "" if shares is None else f"users {shares.user:g}, models {shares.model:g} of the variance"
    return {
        "speeds": speeds.predictor or speeds.throughputs or "the trace's durations",
        "templates": speeds.templates or "",
        "slowdown per node": speeds.slowdown_per_node or "",
        "risk of running out of memory": "" if speeds.predictor is None else f"{speeds.memory_risk:.3g}",
        "kinds with a known use of a device": len(speeds.uses) or "",
        "truth": "" if scenario.truth_of is None else f"forecasts, off as {scenario.truth_of} was",
        "errors alike": alike,
    }


def _failures_of(scenario: Scenario) -> dict[str, object]:
    settings, failures, speeds = scenario.settings, scenario.settings.failures, scenario.speeds
    node_fails, fails = failures.nodes_fail(scenario.machines), failures.jobs_fail
    of_nodes: dict[str, set[float]] = {}
    for machine in scenario.machines:
        of_nodes.setdefault(machine.device, set()).add(failures.mtbf_of(machine))
    of_jobs = {device: {failures.job_mtbf_of.get(device, failures.job_mtbf_gpu_s)} for device in of_nodes}
    any_fails = node_fails or fails or failures.outages or scenario.spot is not None
    by_kind = [f"{kind}: {format_seconds(time_s)}" for kind, time_s in speeds.checkpoint_writes_s.items()]
    return {
        "checkpoint": _seconds(settings.checkpoint_s),
        "restart": _seconds(settings.restart_s),
        "time between checkpoints": (
            _seconds(settings.checkpoint_every_s) if any_fails or speeds.writes_checkpoints else ""
        ),
        "writing a checkpoint": ", ".join(by_kind) or _seconds(speeds.checkpoint_write_s),
        "failures of a job, per GPU": _times_of(of_jobs),
        "failures of a node": _times_of(of_nodes),
        "repair of a node": _seconds(failures.repair_s) if node_fails else "",
        "outages": len(failures.outages) or "",
        "spot nodes": _spot(scenario.spot),
    }


def _spot(spot: Spot | None) -> str:
    if spot is None:
        return ""
    times = f"away after {format_seconds(spot.mean_s)} for {format_seconds(spot.away_s)}"
    return f"{spot.nodes}, {times}, at {spot.price:.3g} of the price"


def _sharing_of(scenario: Scenario) -> dict[str, object]:
    settings, rules = scenario.settings, scenario.settings.rules
    return {
        "sharing": "parts of a GPU" if settings.sharing else "",
        "pairs on a GPU": type(settings.pairs).__name__ if settings.pairs is not None else "",
        "queues": ", ".join(rules.queues),
        "reservations": len(rules.reservations) or "",
        "limits": "end jobs" if rules.kill else "",
        "priorities": "take GPUs" if rules.preempt else "",
    }


def _seconds(value_s: float | None) -> str:
    """Empty where nothing takes time, or what is timed never happens."""
    return format_seconds(value_s) if value_s and value_s < math.inf else ""


def _times_of(kinds: Mapping[str, Collection[float]]) -> str:
    """Times by kind of device, or of all where they are the same; empty where nothing ever happens."""
    texts = {kind: _between(times_s) for kind, times_s in kinds.items()}
    if len({*texts.values()}) == 1:
        return next(iter(texts.values()))
    return ", ".join(f"{kind} {text or 'never'}" for kind, text in texts.items())


def _between(times_s: Collection[float]) -> str:
    """The shortest and the longest of them."""
    ends = dict.fromkeys(_seconds(end) for end in (min(times_s), max(times_s)))
    return " to ".join(text or "never" for text in ends) if any(ends) else ""


def settings_table(scenario: Scenario) -> str:
    return table(("setting", "value"), list(settings_of(scenario).items()))


def errors_table(outcomes: Sequence[Outcome]) -> str:
    """Average completion time by quality of estimates; empty where only one was tried."""
    from foretrain.scheduling.summary import cost_of_errors, mean_outcomes

    means = mean_outcomes(outcomes)
    if len({quality for _, quality in means}) < 2:
        return ""
    rows = []
    for (policy, quality), averages in means.items():
        cost = cost_of_errors(means, policy, averages)
        rows.append(
            [
                policy,
                quality.text,
                format_seconds(averages.average_jct_s),
                "" if cost is None else f"{cost:+.1%}",
            ]
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


def menu(labels: Sequence[str], counts: Sequence[int]) -> dict[str, Any]:
    """The layout of buttons that show one set of a figure's traces at a time, the first at first, below the
    icons of plotly."""
    total, made, before = sum(counts), [], 0
    for label, count in zip(labels, counts, strict=True):
        visible = [before <= place < before + count for place in range(total)]
        made.append({"label": label, "method": "update", "args": [{"visible": visible}]})
        before += count
    where = {"x": 1, "xanchor": "right", "y": 1.02, "yanchor": "bottom"}
    return {
        "updatemenus": [{"buttons": made, "direction": "right", "type": "buttons", **where}],
        "margin_t": 76,
    }
