"""Makes a trace of the queue as it stands: what runs and what waits, as long as history lets one expect."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from foretrain.errors import InputError
from foretrain.scheduling.jobs import MalformedLines, Trace, TraceJob
from foretrain.scheduling.traces import FORMATS, format_of
from foretrain.scheduling.traces.kubernetes import unfinished_kubernetes
from foretrain.scheduling.traces.rows import Unfinished, lines_of
from foretrain.scheduling.traces.slurm import unfinished_sacct

_READERS: dict[str, Callable[[Sequence[str]], list[Unfinished]]] = {
    "sacct": unfinished_sacct,
    "kubernetes": unfinished_kubernetes,
}
_ENOUGH = 5
"""Jobs of a user that have ended, from which on they tell more of the user's than all jobs do."""
_USUAL_S, _USUAL_PART = 3600.0, 0.5
"""Of a job without a limit, and of its limit, where nothing has ended yet."""
_LEAST_LEFT_S = 60.0
_TURN_S = 1e-3
"""Between jobs that wait, so that they keep the order of their submission."""


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueNow:
    """What runs at time 0, what waits right after it, and how far off expected lengths have been."""

    trace: Trace
    running: int
    waiting: int
    history: int
    """Jobs that have ended, which tell how long others take."""
    error: float | None
    """Mean absolute error of what is expected, on them."""


class PastJobs:
    """How long jobs take of the time that they ask for, and in all, by user."""

    def __init__(self, ended: Sequence[TraceJob]) -> None:
        self._parts: dict[str, list[float]] = {}
        self._times: dict[str, list[float]] = {}
        for job in ended:
            if job.duration_s is None:
                continue
            for user in {job.user, ""}:
                self._times.setdefault(user, []).append(job.duration_s)
                if job.limit_s is not None:
                    self._parts.setdefault(user, []).append(min(job.duration_s / job.limit_s, 1.0))

    def expected_s(self, job: TraceJob, ran_s: float = 0.0) -> float:
        """The median of the jobs alike that took at least as long as this one has run already."""
        if job.limit_s is not None:
            parts = _of(self._parts, job.user) or [_USUAL_PART]
            longer = [part for part in parts if part * job.limit_s > ran_s]
            return statistics.median(longer) * job.limit_s if longer else max(job.limit_s, ran_s)
        times = _of(self._times, job.user) or [_USUAL_S]
        longer = [time for time in times if time > ran_s]
        return statistics.median(longer) if longer else 2 * ran_s

    def error(self, ended: Sequence[TraceJob]) -> float | None:
        """Mean absolute error of what is expected of the jobs that have ended, 9 at most of each."""
        errors = [abs(self.expected_s(job) / job.duration_s - 1) for job in ended if job.duration_s]
        return statistics.mean(min(error, 9.0) for error in errors) if len(errors) >= _ENOUGH else None


def _of(values: dict[str, list[float]], user: str) -> list[float]:
    own_values = values.get(user, [])
    return own_values if len(own_values) >= _ENOUGH else values.get("", [])


def queue_now(path: Path, format: str | None = None) -> QueueNow | None:
    """Of a log that holds jobs which run or wait; None of any other."""
    lines = lines_of(path)
    name = format or format_of(path, lines)
    if name not in _READERS:
        return None
    try:
        unfinished = _READERS[name](lines)
    except InputError as error:
        raise InputError(f"{path}: {error}") from error
    if not unfinished:
        return None
    try:
        ended = FORMATS[name](lines, MalformedLines())
    except InputError:
        ended = []
    history = PastJobs(ended)
    running = [each for each in unfinished if each.ran_s is not None]
    waiting = sorted((each for each in unfinished if each.ran_s is None), key=lambda each: each.job.arrival_s)
    jobs = [_running(each, history) for each in running]
    jobs += [
        dataclasses.replace(each.job, arrival_s=place * _TURN_S, duration_s=history.expected_s(each.job))
        for place, each in enumerate(waiting, start=1)
    ]
    return QueueNow(
        trace=Trace(name=path.name, format=name, jobs=jobs),
        running=len(running),
        waiting=len(waiting),
        history=len(ended),
        error=history.error(ended),
    )


def _running(each: Unfinished, history: PastJobs) -> TraceJob:
    assert each.ran_s is not None
    left_s = max(history.expected_s(each.job, each.ran_s) - each.ran_s, _LEAST_LEFT_S)
    limit_s = each.job.limit_s
    return dataclasses.replace(
        each.job,
        arrival_s=0.0,
        duration_s=left_s,
        limit_s=None if limit_s is None else max(limit_s - each.ran_s, _LEAST_LEFT_S),
    )
