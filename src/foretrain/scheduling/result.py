"""Holds what a simulation gives: what happened to every job, and the stretches in which it held GPUs."""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, overload

import numpy as np
import numpy.typing as npt

from foretrain.scheduling.failures import Outage
from foretrain.scheduling.jobs import TraceJob
from foretrain.scheduling.machines import FULL, Allocation, Machine

if TYPE_CHECKING:
    from foretrain.scheduling.active import Active

Column = npt.NDArray[np.float64]


class Segment(NamedTuple):
    """A stretch in which a job held GPUs, and why it ended: finished, preempted, failed, node failed."""

    job: int
    start_s: float
    end_s: float
    reason: str
    allocation: Allocation


class Segments(Sequence[Segment]):
    """Stretches in the order in which they ended, kept as columns: there may be millions.

    >>> segments = Segments()
    >>> segments.add(0, 1.0, 3.0, "finished", Allocation(0, ((0, 0b11),), 2))
    >>> segments[0].end_s, segments.held_gpu_s(1).tolist()
    (3.0, [4.0])
    """

    def __init__(self, segments: Sequence[Segment] = ()) -> None:
        self._jobs, self._starts, self._ends = array("l"), array("d"), array("d")
        self._reasons: list[str] = []
        self._allocations: list[Allocation] = []
        for segment in segments:
            self.add(*segment)

    def add(self, job: int, start_s: float, end_s: float, reason: str, allocation: Allocation) -> None:
        self._jobs.append(job)
        self._starts.append(start_s)
        self._ends.append(end_s)
        self._reasons.append(reason)
        self._allocations.append(allocation)

    def take_back(self, job: int) -> Segment:
        """Remove the last stretch of a job, which goes on after all."""
        place = len(self) - 1
        while self._jobs[place] != job:
            place -= 1
        segment = self[place]
        for column in (self._jobs, self._starts, self._ends, self._reasons, self._allocations):
            del column[place]
        return segment

    @property
    def starts_s(self) -> Column:
        return np.array(self._starts, dtype=np.float64)

    @property
    def ends_s(self) -> Column:
        return np.array(self._ends, dtype=np.float64)

    def jobs_ended(self, reason: str) -> list[int]:
        """The jobs of the stretches that ended so."""
        return [job for job, why in zip(self._jobs, self._reasons, strict=True) if why == reason]

    @property
    def gpus(self) -> Column:
        """GPUs held, parts of a GPU as such."""
        return np.fromiter(
            (
                each.gpus if each.share == FULL else each.gpus * each.share / FULL
                for each in self._allocations
            ),
            np.float64,
            len(self),
        )

    def held_gpu_s(self, jobs: int) -> Column:
        """GPU time that each of so many jobs held."""
        lengths = (self.ends_s - self.starts_s) * self.gpus
        return np.bincount(np.array(self._jobs, dtype=np.int64), lengths, jobs).astype(np.float64)

    def __len__(self) -> int:
        return len(self._jobs)

    @overload
    def __getitem__(self, place: int) -> Segment: ...
    @overload
    def __getitem__(self, place: slice) -> list[Segment]: ...
    def __getitem__(self, place: int | slice) -> Segment | list[Segment]:
        if isinstance(place, slice):
            return [self[each] for each in range(*place.indices(len(self)))]
        return Segment(
            self._jobs[place], self._starts[place], self._ends[place],
            self._reasons[place], self._allocations[place],
        )  # fmt: skip

    def __iter__(self) -> Iterator[Segment]:
        columns = (self._jobs, self._starts, self._ends, self._reasons, self._allocations)
        return map(Segment._make, zip(*columns, strict=True))


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """One entry per job in every column, in the order of the trace."""

    policy: str
    jobs: Sequence[TraceJob]
    arrival_s: Column
    start_s: Column
    finish_s: Column
    service_s: Column
    """Time on the GPUs asked for, undisturbed."""
    gpus: Column
    preemptions: Column
    failures: Column
    lost_gpu_s: Column
    """Work that failures undid."""
    overhead_gpu_s: Column
    """Checkpoints and restarts."""
    segments: Segments
    machines: Sequence[Machine]
    taken_back: Sequence[Outage] = ()
    """When spot nodes were away."""

    @classmethod
    def of(
        cls,
        policy: str,
        jobs: Sequence[Active],
        finish_s: Sequence[float],
        segments: Segments,
        machines: Sequence[Machine],
        taken_back: Sequence[Outage] = (),
    ) -> Result:
        def column(name: str) -> Column:
            return np.array([getattr(job, name) for job in jobs], dtype=float)

        return cls(
            policy=policy,
            jobs=[job.spec for job in jobs],
            arrival_s=column("arrival_s"),
            start_s=column("first_start_s"),
            finish_s=np.array(finish_s, dtype=float),
            service_s=column("work") / column("nominal_rate"),
            gpus=column("gpus"),
            preemptions=column("preemptions"),
            failures=column("failures"),
            lost_gpu_s=column("lost_gpu_s"),
            overhead_gpu_s=column("overhead_gpu_s"),
            segments=segments,
            machines=machines,
            taken_back=taken_back,
        )

    @property
    def completion_s(self) -> Column:
        """From arrival to end."""
        return self.finish_s - self.arrival_s

    @property
    def size(self) -> int:
        """GPUs of the cluster."""
        return sum(machine.gpus for machine in self.machines)
