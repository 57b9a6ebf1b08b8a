"""Starts the jobs with the earliest deadline first; those without one go behind, by arrival."""

from __future__ import annotations

from foretrain.scheduling.policies.priority import Greedy, Key
from foretrain.scheduling.simulator import Active, Simulation


class EarliestDeadlineFirst(Greedy):
    """By deadline, without preemption; jobs that cannot make theirs any more go last.

    Jackson's rule, and what deadline-aware schedulers of GPU clusters start from (Chronus, Gao et al., SoCC
    2021, leases on top of it). Whether a job can make it is judged once, when it begins to wait.
    """

    name = "edf"

    def key(self, cluster: Simulation, job: Active) -> Key:
        if job.spec.deadline_s is None:
            return (1.0, job.arrival_s, 0.0)
        due_s = job.arrival_s + job.spec.deadline_s
        late = cluster.now + cluster.remaining_s(job) > due_s
        return (2.0, due_s, job.arrival_s) if late else (0.0, due_s, job.arrival_s)
