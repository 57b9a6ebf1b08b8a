"""Holds what a simulation gives: what happened to every job, and the stretches in which it held GPUs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import numpy.typing as npt

from foretrain.scheduling.jobs import TraceJob
from foretrain.scheduling.machines import Allocation, Machine

if TYPE_CHECKING:
    from foretrain.scheduling.simulator import Active

Column = npt.NDArray[np.float64]


class Segment(NamedTuple):
    """A stretch in which a job held GPUs, and why it ended: finished, preempted, failed, node failed."""

    job: int
    start_s: float
    end_s: float
    reason: str
    allocation: Allocation


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
    segments: Sequence[Segment]
    machines: Sequence[Machine]

    @classmethod
    def of(
        cls,
        policy: str,
        jobs: Sequence[Active],
        finish_s: Sequence[float],
        segments: Sequence[Segment],
        machines: Sequence[Machine],
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
        )

    @property
    def completion_s(self) -> Column:
        """From arrival to end."""
        return self.finish_s - self.arrival_s

    @property
    def size(self) -> int:
        """GPUs of the cluster."""
        return sum(machine.gpus for machine in self.machines)
