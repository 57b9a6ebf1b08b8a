"""Computes the figures that compare policies, for all jobs and for each virtual cluster."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass

import numpy as np

from foretrain.scheduling.energy import energy
from foretrain.scheduling.result import Column, Result

_SLACK_S = 1e-6
Chosen = np.ndarray[tuple[int], np.dtype[np.bool_]]
"""Which of the jobs."""
Numbers = np.ndarray[tuple[int], np.dtype[np.int64]]
"""Jobs, by their place in the trace."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Metrics:
    """Times in seconds. ``None`` where nothing is known."""

    jobs: int
    average_jct_s: float
    median_jct_s: float
    p95_jct_s: float
    p99_jct_s: float
    average_queueing_s: float
    """From arrival to the first start."""
    average_wait_s: float
    """All time without GPUs or without progress."""
    makespan_s: float
    utilization: float
    """Share of the GPU time, from the first arrival to the last end, that jobs held."""
    fairness: float
    """Jain's index of speeds (undisturbed time over completion time): 1 when all jobs are slowed alike."""
    worst_slowdown: float
    """Completion time over undisturbed time, 99th percentile."""
    preemptions: int
    failures: int
    lost_gpu_s: float
    overhead_gpu_s: float
    cost: float | None = None
    """Dollars for the whole cluster over the makespan; for spot nodes while they are there."""
    held_gpu_s: float = 0.0
    """GPU time that jobs held, with checkpoints, restarts and what failures undid."""
    killed: int = 0
    """Jobs that ended at their limit, not done."""
    missed_deadlines: int | None = None
    """Of the jobs that have a deadline, those that were not done by then; None where none has."""
    energy_kwh: float | None = None
    """Of the whole cluster from the first arrival to the last end, by the power of its devices."""

    def to_dict(self) -> dict[str, float | int | None]:
        return dataclasses.asdict(self)


def metrics(result: Result) -> Metrics:
    """Of all jobs."""
    everyone = np.arange(len(result.jobs))
    held = result.segments.held_gpu_s(len(result.jobs))
    return _metrics(result, everyone, held, _killed(result), _deadlines(result), whole=True)


def metrics_by_group(result: Result) -> dict[str, Metrics]:
    """Of each virtual cluster; the utilisation is its share of the whole cluster's GPU time."""
    members: dict[str, list[int]] = {}
    for number, job in enumerate(result.jobs):
        members.setdefault(job.group, []).append(number)
    held, killed, deadlines = (
        result.segments.held_gpu_s(len(result.jobs)), _killed(result), _deadlines(result)
    )  # fmt: skip
    return {
        name: _metrics(result, np.array(members[name]), held, killed, deadlines, whole=False)
        for name in sorted(members)
    }


def _metrics(
    result: Result, chosen: Numbers, held: Column, killed: Chosen, deadlines: Column | None, *, whole: bool
) -> Metrics:
    """Of the jobs of these numbers, each of which held so much GPU time."""
    completion = result.finish_s[chosen] - result.arrival_s[chosen]
    if not completion.size:
        raise ValueError("metrics need at least one job")
    service = result.service_s[chosen]
    begin, end = float(result.arrival_s.min()), float(result.finish_s.max())
    slowdown = completion / service
    speed = 1.0 / slowdown
    median, p95, p99 = (float(value) for value in np.percentile(completion, [50, 95, 99]))
    return Metrics(
        jobs=int(completion.size),
        average_jct_s=float(completion.mean()),
        median_jct_s=median,
        p95_jct_s=p95,
        p99_jct_s=p99,
        average_queueing_s=float((result.start_s[chosen] - result.arrival_s[chosen]).mean()),
        average_wait_s=float(np.maximum(completion - service, 0.0).mean()),
        makespan_s=float(result.finish_s[chosen].max() - result.arrival_s[chosen].min()),
        utilization=float(held[chosen].sum()) / (result.size * (end - begin)) if end > begin else 0.0,
        fairness=float(speed.sum() ** 2 / (len(speed) * (speed**2).sum())),
        worst_slowdown=float(np.percentile(slowdown, 99)),
        preemptions=int(result.preemptions[chosen].sum()),
        failures=int(result.failures[chosen].sum()),
        lost_gpu_s=float(result.lost_gpu_s[chosen].sum()),
        overhead_gpu_s=float(result.overhead_gpu_s[chosen].sum()),
        cost=_cost(result, begin, end) if whole else None,
        held_gpu_s=float(held[chosen].sum()),
        killed=int(killed[chosen].sum()),
        missed_deadlines=_late(result, chosen, killed, deadlines),
        energy_kwh=drawn.total_kwh if whole and (drawn := energy(result)) is not None else None,
    )


def _cost(result: Result, begin: float, end: float) -> float | None:
    """Dollars from one moment to another; None where a node has no price."""
    prices = [machine.price_per_hour for machine in result.machines]
    known = [price for price in prices if price is not None]
    if len(known) < len(prices):
        return None
    unpaid = 0.0
    for outage in result.taken_back:
        away_s = min(outage.time_s + outage.repair_s, end) - max(outage.time_s, begin)
        unpaid += known[outage.node] * max(away_s, 0.0) / 3600
    return sum(known) * (end - begin) / 3600 - unpaid


def _killed(result: Result) -> Chosen:
    """The jobs that ended at their limit."""
    killed = np.zeros(len(result.jobs), dtype=bool)
    killed[result.segments.jobs_ended("killed")] = True
    return killed


def _deadlines(result: Result) -> Column | None:
    """Of every job, from its arrival on; None where none has one."""
    if all(job.deadline_s is None for job in result.jobs):
        return None
    return np.array([math.inf if job.deadline_s is None else job.deadline_s for job in result.jobs])


def _late(result: Result, chosen: Numbers, killed: Chosen, deadlines: Column | None) -> int | None:
    """Jobs that were not done at their deadline; one that ended at its limit never was."""
    if deadlines is None or not np.isfinite(deadlines[chosen]).any():
        return None
    late = (result.completion_s > deadlines + _SLACK_S) | (killed & np.isfinite(deadlines))
    return int(late[chosen].sum())


def utilization_over_time(result: Result, points: int = 400) -> tuple[Column, Column]:
    """Times and the mean share of GPUs held between one and the next."""
    begin, end = float(result.arrival_s.min()), float(result.finish_s.max())
    edges = np.linspace(begin, max(end, begin + 1.0), points + 1)
    width = edges[1] - edges[0]
    gpus = result.segments.gpus
    held = _integral(result.segments.starts_s, gpus, edges) - _integral(result.segments.ends_s, gpus, edges)
    return edges[:-1], np.diff(held) / (width * result.size)


def _integral(moments: Column, gpus: Column, edges: Column) -> Column:
    """At every edge, the sum of gpus x (edge - moment) over the moments before it."""
    order = np.argsort(moments, kind="stable")
    passed = np.searchsorted(moments[order], edges, side="right")
    count = np.concatenate([[0.0], np.cumsum(gpus[order])])
    weighted = np.concatenate([[0.0], np.cumsum(gpus[order] * moments[order])])
    total: Column = edges * count[passed] - weighted[passed]
    return total
