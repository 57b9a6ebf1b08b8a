"""Searches the cheapest configuration in time by measuring one after the other, as CherryPick does.

What was tried is told by the runs alone, so a search goes on wherever they are.
"""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from foretrain.advice import describe
from foretrain.errors import InputError, invalid
from foretrain.job import Job
from foretrain.predictors.base import timed
from foretrain.predictors.cherrypick import Process, configuration, expected_improvement
from foretrain.predictors.seen import DATA_NUMBERS, number_row, workload_key
from foretrain.run import Run

Array = npt.NDArray[np.float64]

IMPROVEMENT = 0.1
"""The share of the best cost that a run must promise to take off it, as in the paper."""
START, LEAST = 3, 6
"""Configurations measured before anything is promised, and before a search may end, as in the paper."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tried:
    """A configuration that runs tell of: how long the whole training takes by them, and what it costs."""

    job: Job
    time_s: float
    cost: float
    in_time: bool
    runs: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """Says where a search stands: what was tried, the best of it, and what to measure next or why to end."""

    tried: tuple[Tried, ...]
    candidates: int
    best: Tried | None
    """The cheapest that is in time."""
    following: Job | None
    promise: float | None
    """The share of the best cost that the next run is expected to take off; None where nothing tells."""
    stopped: str
    """Why the search has ended; empty while it goes on."""

    def to_dict(self) -> dict[str, Any]:
        return {
            "tried": [
                {
                    "configuration": describe(one.job), "job": one.job.to_dict(), "total_time_s": one.time_s,
                    "cost": one.cost, "in_time": one.in_time, "runs": one.runs,
                }
                for one in self.tried
            ],
            "candidates": self.candidates,
            "best": None if self.best is None else describe(self.best.job),
            "next": None if self.following is None else self.following.to_dict(),
            "expected_improvement": self.promise,
            "stopped": self.stopped,
        }  # fmt: skip


def next_turn(
    candidates: Sequence[Job],
    runs: Sequence[Run],
    deadline_s: float,
    *,
    improvement: float = IMPROVEMENT,
    start: int = START,
    least: int = LEAST,
    failed: Collection[str] = (),
) -> Turn:
    """Choose what to measure next of ``candidates``, by the runs so far.

    The first ``start`` are those farthest from one another, the others those whose expected improvement of
    the cost, times the chance to be in time, is largest. ``failed`` are configurations (``configured``) that
    could not be measured.
    """
    if not 0 <= improvement < 1:
        raise invalid("improvement", improvement, "a share between 0 and 1")
    sizes = sorted({job.workload.training.samples or 0 for job in candidates})
    if len(sizes) > 1:
        raise invalid("samples", ",".join(map(str, sizes)), "one size of the data, as a search is of")
    open_to = [job for job in candidates if configured(job) not in failed]
    if not open_to:
        raise InputError(
            "candidates: there are none to search" + (", but for those that failed" * bool(failed))
        )
    tried = tried_by(open_to, runs, deadline_s)
    known = {configured(one.job) for one in tried}
    left = [job for job in open_to if configured(job) not in known]
    in_time = [one for one in tried if one.in_time]
    best = min(in_time, key=lambda one: one.cost) if in_time else None
    following, promise, stopped = None, None, ""
    if not left:
        stopped = "every configuration was measured"
    elif len(tried) < start:
        following = _farthest(left, [one.job for one in tried])
    else:
        following, promise = _promising(left, tried, best, deadline_s)
        if len(tried) >= least and promise is not None and promise < improvement:
            following, stopped = None, f"no configuration promises {improvement:.0%} less"
    return Turn(
        tried=tuple(tried), candidates=len(open_to), best=best, following=following, promise=promise,
        stopped=stopped,
    )  # fmt: skip


def configured(job: Job) -> str:
    """A text that is the same for jobs of one training and configuration, however much data they have."""
    return json.dumps([_measured_as(job), _node(job)])


def tried_by(candidates: Sequence[Job], runs: Sequence[Run], deadline_s: float) -> list[Tried]:
    """The candidates that runs have measured steps of, by the median of these.

    Runs that do not name their machine stand for every machine of their device that no run names.
    """
    steps: dict[tuple[str, str | None], list[float]] = {}
    for run in map(timed, runs):
        if 0 < run.measured.get("step_time_s", 0.0) < math.inf:
            where = (_measured_as(run.job), _node(run.job))
            steps.setdefault(where, []).append(run.measured["step_time_s"])
    tried = []
    for job in candidates:
        how = _measured_as(job)
        times = steps.get((how, _node(job))) or steps.get((how, None))
        if times:
            time_s = float(np.median(times)) * (job.workload.training.total_steps or 1)
            tried.append(
                Tried(
                    job=job, time_s=time_s, cost=time_s * _rate(job), in_time=time_s <= deadline_s,
                    runs=len(times),
                )
            )  # fmt: skip
    return tried


def _measured_as(job: Job) -> str:
    """Make a key as ``configured`` does, but for the name of a machine, which a run need not tell."""
    link = job.cluster.groups[0].inter_node.bandwidth_bytes_per_s if job.over_network else None
    numbers = {name: figure for name, figure in number_row(job).items() if name not in DATA_NUMBERS}
    return json.dumps([workload_key(job), numbers, link], sort_keys=True)


def _node(job: Job) -> str | None:
    """The name of its machine, where it tells."""
    node = job.cluster.groups[0].node
    return node.name if node else None


def _rate(job: Job) -> float:
    """Dollars per second, or devices where prices are not known."""
    price = job.cluster.price_per_hour
    return float(job.cluster.world_size) if price is None else price / 3600


def _rows(jobs: Sequence[Job]) -> Array:
    return np.array([configuration(job) for job in jobs], dtype=np.float64)


def _farthest(left: Sequence[Job], tried: Sequence[Job]) -> Job:
    """The one that is farthest from what was tried; at first, the one nearest to the middle of all."""
    rows = _rows([*left, *tried])
    spread = rows.std(axis=0)
    rows = (rows - rows.mean(axis=0)) / np.where(spread > 0, spread, 1.0)
    left_rows, others = rows[: len(left)], rows[len(left) :]
    if not len(others):
        return left[int(np.argmin((left_rows**2).sum(axis=1)))]
    apart = ((left_rows[:, None] - others[None]) ** 2).sum(axis=2).min(axis=1)
    return left[int(np.argmax(apart))]


def _promising(
    left: Sequence[Job], tried: Sequence[Tried], best: Tried | None, deadline_s: float
) -> tuple[Job, float | None]:
    """The candidate that promises most, and the share of the best cost that it promises; nobody can tell a
    share while none was in time, and the one most likely to be comes next."""
    from scipy.stats import norm

    times = Process.learn(_rows([one.job for one in tried]), np.array([one.time_s for one in tried]))
    rows = _rows(left)
    mean, deviation = times(rows)
    in_time = norm.cdf((math.log(deadline_s) - mean) / np.maximum(deviation, 1e-9))
    rates = np.array([_rate(job) for job in left])
    if best is None:
        likely = np.flatnonzero(in_time >= 0.9 * in_time.max())
        return left[int(likely[np.argmin((mean + np.log(rates))[likely])])], None
    gains = expected_improvement(times, rows, best.cost / rates) * rates * in_time
    place = int(gains.argmax())
    return left[place], float(gains[place] / best.cost)
