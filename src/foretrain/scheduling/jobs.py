"""Describes jobs as they are submitted to a cluster, and traces of them with the lines that are none."""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from foretrain.errors import InputError, invalid

LONGEST_S = 1e10
"""317 years: what takes longer is a mistake, and policies that look at jobs at intervals would not end."""
LATEST_S = 1e13
"""Times since 1970 in milliseconds are within it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceJob:
    """A job as it was submitted.

    ``duration_s`` is its time on the GPUs it asks for; ``steps`` is its length where a table gives speeds.
    """

    name: str
    arrival_s: float
    gpus: int
    duration_s: float | None = None
    steps: float | None = None
    group: str = ""
    """The virtual cluster, user or tenant that it belongs to."""
    kind: str = ""
    """The model or job type, by which tables and templates know it."""
    device: str | None = None
    """The only kind of device that it runs on; None for any."""
    share: float = 1.0
    """How much of each GPU it needs."""
    least_gpus: int | None = None
    most_gpus: int | None = None
    """An elastic job may shrink and grow between these."""
    weight: float = 1.0
    user: str = ""
    partition: str = ""
    """The part of the cluster that it was submitted to; empty for any."""
    priority: float = 0.0
    """Of its class; the greater is served first by policies that heed it."""
    limit_s: float | None = None
    """The run time asked for."""
    deadline_s: float | None = None
    """When it should be done, from its arrival."""
    memory_bytes: float | None = None
    """Of each GPU, at most, where it is known; a device with less is not given to it."""

    def __post_init__(self) -> None:
        if self.gpus < 1:
            raise invalid("gpus", self.gpus, "a whole number of at least 1")
        if not abs(self.arrival_s) <= LATEST_S:
            raise invalid("arrival_s", self.arrival_s, f"a time of at most {LATEST_S:.0e} s")
        if self.duration_s is None and self.steps is None:
            raise InputError("duration_s: missing; a job has a duration or a number of steps")
        for name in ("duration_s", "steps", "weight", "limit_s", "deadline_s", "memory_bytes"):
            value = getattr(self, name)
            if value is not None and not 0 < value < math.inf:
                raise invalid(name, value, "a number greater than zero")
        if self.duration_s is not None and self.duration_s > LONGEST_S:
            raise invalid("duration_s", self.duration_s, f"at most {LONGEST_S:.0e} s")
        if not math.isfinite(self.priority):
            raise invalid("priority", self.priority, "a finite number")
        if not 0 < self.share <= 1:
            raise invalid("share", self.share, "above 0 and at most 1")
        if self.share < 1 and self.gpus > 1:
            raise InputError(f"share: {self.share} is for jobs on one GPU, and this one asks for {self.gpus}")
        if not 1 <= self.fewest <= self.gpus <= self.most:
            counts = (self.least_gpus, self.gpus, self.most_gpus)
            raise invalid("least_gpus, gpus, most_gpus", counts, "in rising order from 1")

    @property
    def fewest(self) -> int:
        return self.gpus if self.least_gpus is None else self.least_gpus

    @property
    def most(self) -> int:
        return self.gpus if self.most_gpus is None else self.most_gpus


@dataclass(frozen=True, slots=True, kw_only=True)
class Malformed:
    """Lines of a trace that are no jobs: how many for each reason, and where the first one stands."""

    counts: dict[str, int] = field(default_factory=dict)
    first: dict[str, int] = field(default_factory=dict)

    @property
    def total(self) -> int:
        return sum(self.counts.values())

    def lines(self) -> list[str]:
        """One line for people per reason."""
        counts = {
            reason: f"{count:,} line{'s' if count > 1 else ''}" for reason, count in self.counts.items()
        }
        return [
            f"{counts[reason]} left out: {reason} (first in line {self.first[reason]})"
            for reason in sorted(counts)
        ]


@dataclass(frozen=True, slots=True, kw_only=True)
class Refused:
    """Jobs that a cluster can never run: how many for each reason, and the name of the first."""

    counts: dict[str, int] = field(default_factory=dict)
    first: dict[str, str] = field(default_factory=dict)

    @property
    def total(self) -> int:
        return sum(self.counts.values())

    def lines(self) -> list[str]:
        """One line for people per reason."""
        return [
            f"{count:,} job{'s' if count > 1 else ''} refused: {reason} (first: {self.first[reason]!r})"
            for reason, count in sorted(self.counts.items())
        ]


class MalformedLines:
    """Collects lines that are no jobs while a trace is read."""

    def __init__(self) -> None:
        self._counts: Counter[str] = Counter()
        self._first: dict[str, int] = {}

    def add(self, number: int, reason: str) -> None:
        self._counts[reason] += 1
        self._first.setdefault(reason, number)

    def result(self) -> Malformed:
        return Malformed(counts=dict(self._counts), first=dict(self._first))


@dataclass(frozen=True, slots=True, kw_only=True)
class Trace:
    """Jobs in order of arrival, where they come from, the lines that were none, and those that cannot run."""

    name: str
    format: str
    jobs: Sequence[TraceJob]
    malformed: Malformed = field(default_factory=Malformed)
    refused: Refused = field(default_factory=Refused)

    def first(self, count: int) -> Trace:
        """The jobs that arrive first."""
        return dataclasses.replace(self, jobs=self.jobs[:count])


def in_order(jobs: Sequence[TraceJob], *, from_zero: bool = True) -> list[TraceJob]:
    """By arrival, ties in the order given; the first one arrives at 0 unless times are to stay."""
    ordered = sorted(jobs, key=lambda job: job.arrival_s)
    start = ordered[0].arrival_s if ordered and from_zero else 0.0
    if not start:
        return ordered
    return [dataclasses.replace(job, arrival_s=job.arrival_s - start) for job in ordered]
