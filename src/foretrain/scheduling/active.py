"""Follows a job through the cluster: what it has done, what it holds, and what that cost."""

from __future__ import annotations

from dataclasses import dataclass, field

from foretrain.scheduling.jobs import TraceJob
from foretrain.scheduling.machines import Allocation, Pool


@dataclass(slots=True, eq=False, repr=False)
class Active:
    """A job in the cluster, as policies see it. They read it; only the simulator writes."""

    number: int
    spec: TraceJob
    work: float
    estimated_work: float
    """The median of what is believed."""
    nominal_rate: float
    """Work per second on the GPUs it asks for."""
    pools: tuple[Pool, ...] = ()
    gpus: int = field(init=False)
    arrival_s: float = field(init=False)
    done: float = 0.0
    rate: float = 0.0
    since_s: float = 0.0
    ready_s: float = 0.0
    allocation: Allocation | None = None
    version: int = 0
    attained_gpu_s: float = 0.0
    lost_gpu_s: float = 0.0
    overhead_gpu_s: float = 0.0
    overhead_s: float = 0.0
    ran_s: float = 0.0
    """Run time that counted towards its limit before this start; a failure sets it to nothing."""
    kept: float = 0.0
    """Work done when it went to work, or at a checkpoint since then."""
    kept_s: float = 0.0
    """When that was."""
    first_start_s: float | None = None
    starts: int = 0
    preemptions: int = 0
    failures: int = 0
    believed_most: float = 0.0
    """The upper end of the interval of what is believed of its work."""
    futile: int = 0
    """Failures in a row by which it got no further than ``furthest``."""
    furthest: float = 0.0
    fruitless: int = 0
    """Times in a row that it was taken off before it got to work."""

    def __post_init__(self) -> None:
        self.gpus, self.arrival_s = self.spec.gpus, self.spec.arrival_s

    @property
    def is_running(self) -> bool:
        return self.allocation is not None

    def __repr__(self) -> str:
        return f"Active({self.spec.name!r})"
