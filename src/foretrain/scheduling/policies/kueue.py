"""Admits jobs by queues with GPUs of their own, which lend what they do not use, as Kueue does."""

from __future__ import annotations

from foretrain.scheduling.machines import Pool
from foretrain.scheduling.policies.base import Policy
from foretrain.scheduling.rules import Queue
from foretrain.scheduling.simulator import Active, Simulation


class Kueue(Policy):
    """Kueue's ClusterQueues with cohorts.

    A job is admitted when its queue has quota for it: its own GPUs, and of its cohort what the others leave
    unused, up to ``borrow``. Queues take turns; the one that borrows least in its part goes first. In a queue
    jobs go by priority, then arrival; one that cannot be admitted lets others pass (BestEffortFIFO) or not
    (``strict``). With ``preempt``, a job within its own quota takes back what others of the cohort borrowed
    (reclaimWithinCohort), and one of higher priority takes the place of lower ones of its queue
    (withinClusterQueue), the youngest of the lowest first.

    Simpler than Kueue: one resource (GPUs), one flavour per kind of device; admission is all or nothing and
    looks at quota and at free GPUs alike, so a job that is admitted runs at once; no hierarchy of cohorts.
    """

    name = "kueue"

    def __init__(self, strict: bool = False) -> None:
        self._strict = strict

    def decide(self, cluster: Simulation) -> None:
        takes = cluster.settings.rules.preempt
        if not cluster.waiting or (not takes and not cluster.machines.free):
            return
        held = self._held(cluster)
        lines: dict[str, list[Active]] = {}
        for job in cluster.waiting.values():
            lines.setdefault(job.spec.group, []).append(job)
        for line in lines.values():
            line.sort(key=lambda job: (job.spec.priority, -job.arrival_s, -job.number))  # the next is last
        while lines and (takes or cluster.machines.free):
            group = min(
                lines,
                key=lambda group: (self._borrows(cluster, group, held), lines[group][-1].arrival_s, group),
            )
            admitted = self._admit(cluster, lines[group].pop(), held)
            if (not admitted and self._strict) or not lines[group]:
                del lines[group]

    def _admit(self, cluster: Simulation, job: Active, held: dict[str, int]) -> bool:
        if self._has_quota(cluster, job, held) and (pool := cluster.pool_for(job)) is not None:
            self._start(cluster, job, pool, held)
            return True
        if not cluster.settings.rules.preempt:
            return False
        found = self._victims(cluster, job, held)
        if found is None:
            return False
        pool, victims = found
        for victim in victims:
            held[victim.spec.group] -= victim.gpus
            cluster.preempt(victim)
        self._start(cluster, job, pool, held)
        return True

    def _start(self, cluster: Simulation, job: Active, pool: Pool, held: dict[str, int]) -> None:
        cluster.start(job, pool=pool)
        held[job.spec.group] = held.get(job.spec.group, 0) + job.gpus

    # Quota

    def _held(self, cluster: Simulation) -> dict[str, int]:
        held: dict[str, int] = {}
        for job in cluster.running.values():
            held[job.spec.group] = held.get(job.spec.group, 0) + job.gpus
        return held

    def _queue(self, cluster: Simulation, group: str) -> Queue:
        return cluster.settings.rules.queue(group)

    def _borrows(self, cluster: Simulation, group: str, held: dict[str, int]) -> float:
        """GPUs beyond its own, over its own: Kueue's share of a queue, for the order of turns."""
        own = self._queue(cluster, group).gpus
        if own is None:
            return 0.0
        return max(held.get(group, 0) - own, 0) / max(own, 1)

    def _has_quota(self, cluster: Simulation, job: Active, held: dict[str, int]) -> bool:
        queue, group = self._queue(cluster, job.spec.group), job.spec.group
        if queue.gpus is None:
            return True
        wanted = held.get(group, 0) + job.gpus
        if wanted <= queue.gpus and not queue.cohort:
            return True
        if not queue.cohort:
            return False
        if queue.borrow is not None and wanted > queue.gpus + queue.borrow:
            return False
        members = self._members(cluster, queue.cohort)
        together = sum(self._queue(cluster, member).gpus or 0 for member in members)
        return sum(held.get(member, 0) for member in members) + job.gpus <= together

    def _members(self, cluster: Simulation, cohort: str) -> list[str]:
        return [name for name, queue in cluster.settings.rules.queues.items() if queue.cohort == cohort]

    # Preemption

    def _victims(
        self, cluster: Simulation, job: Active, held: dict[str, int]
    ) -> tuple[Pool, list[Active]] | None:
        """The jobs that give way, and the pool where that makes room; None where nothing does."""
        queue, group = self._queue(cluster, job.spec.group), job.spec.group
        own = queue.gpus is not None and held.get(group, 0) + job.gpus <= queue.gpus
        candidates = [
            other for other in cluster.running.values() if self._may_take(cluster, job, other, own, held)
        ]
        candidates.sort(
            key=lambda other: (other.spec.group == group, other.spec.priority, -other.since_s, -other.number)
        )
        for pool in cluster.pools_for(job):
            victims: list[Active] = []
            left, free = dict(held), pool.free
            for other in candidates:
                if free >= job.gpus and self._has_quota(cluster, job, left):
                    break
                assert other.allocation is not None
                if other.allocation.pool != pool.number or not self._may_take(cluster, job, other, own, left):
                    continue
                victims.append(other)
                left[other.spec.group] -= other.gpus
                free += other.allocation.gpus
            if victims and free >= job.gpus and self._has_quota(cluster, job, left):
                return pool, victims
        return None

    def _may_take(
        self, cluster: Simulation, job: Active, other: Active, own: bool, held: dict[str, int]
    ) -> bool:
        """Of its own queue jobs of a lower priority; of others in the cohort what they borrowed, for a job
        within its own quota."""
        if other.spec.group == job.spec.group:
            return other.spec.priority < job.spec.priority
        theirs, ours = self._queue(cluster, other.spec.group), self._queue(cluster, job.spec.group)
        borrowed = theirs.gpus is not None and held.get(other.spec.group, 0) > theirs.gpus
        return own and bool(ours.cohort) and theirs.cohort == ours.cohort and borrowed
