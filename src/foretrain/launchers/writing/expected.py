"""Holds what was forecast of a job that is launched, and the time limit that follows from it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from foretrain.estimate import Estimate
from foretrain.job import Job

STEPS_WHERE_NONE_ARE_GIVEN = 1000
"""What launch files run of a job that does not say how long it trains."""
START_UP_MARGIN_S = 600.0
"""What schedulers add before a training begins: fetching images, starting containers, meeting of nodes."""
_MINUTE_S = 60


@dataclass(frozen=True, slots=True, kw_only=True)
class Expected:
    """The forecast of a job, as far as launch files need it."""

    step_time_s: Estimate
    total_time_s: Estimate | None = None
    peak_memory_bytes: Estimate | None = None
    reserved_memory_bytes: Estimate | None = None

    def limit_s(self, job: Job) -> int:
        """Seconds after which a scheduler may end the job: the upper end of the total time's interval (the
        95 % one where it is known) and a margin for the start, in whole minutes."""
        total = self.total_time_s or self.step_time_s * float(steps_of(job))
        upper = total.high if total.high_95 is None else total.high_95
        return math.ceil((upper + START_UP_MARGIN_S) / _MINUTE_S) * _MINUTE_S

    def to_dict(self) -> dict[str, Any]:
        named = {
            "step_time_s": self.step_time_s,
            "total_time_s": self.total_time_s,
            "peak_memory_bytes": self.peak_memory_bytes,
            "reserved_memory_bytes": self.reserved_memory_bytes,
        }
        return {name: None if one is None else one.to_dict() for name, one in named.items()}


def steps_of(job: Job) -> int:
    """Optimizer steps that launch files run."""
    return job.workload.training.total_steps or STEPS_WHERE_NONE_ARE_GIVEN
