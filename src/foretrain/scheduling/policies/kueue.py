"""Admits jobs by queues with GPUs of their own, which lend what they do not use, as Kueue does."""

from __future__ import annotations

from bisect import insort

from foretrain.scheduling.machines import Pool
from foretrain.scheduling.policies.base import Policy
from foretrain.scheduling.policies.moment import carry_out
from foretrain.scheduling.rules import Queue
from foretrain.scheduling.simulator import Active, Simulation


class Kueue(Policy):
    """Kueue's ClusterQueues with cohorts.

    A job is admitted when its queue has quota for it: its own GPUs, and of its cohort what the others leave
    unused, up to ``borrow``. Queues take turns; the one whose next job would borrow least, over its own GPUs,
    goes first. In a queue jobs go by priority, then arrival; one that cannot be admitted lets others pass
    (BestEffortFIFO) or not (``strict``). With ``preempt``, a job within its own quota takes back what others
    of the cohort borrowed (reclaimWithinCohort), and one of higher priority takes the place of lower ones of
    its queue (withinClusterQueue), the youngest of the lowest first, and of none that need not give way.

    Simpler than Kueue: one resource (GPUs), one flavour per kind of device; admission is all or nothing and
    looks at quota and at free GPUs alike, so a job that is admitted runs at once; no hierarchy of cohorts.
    """

    name = "kueue"
    honours = ("quotas", "cohorts", "preempt")

    def __init__(self, strict: bool = False) -> None:
        self._strict = strict

    def decide(self, cluster: Simulation) -> None:
        takes = cluster.settings.rules.preempt
        if not cluster.waiting or (not takes and not cluster.machines.free):
            return
        state = _State(cluster)
        while state.lines and (takes or any(state.free)):
            group = min(
                state.lines,
                key=lambda group: (
                    self._borrows(cluster, state.lines[group][-1], state.held),
                    state.lines[group][-1].arrival_s,
                    group,
                ),
            )
            job = state.next_of(group)
            if not self._admit(cluster, job, state) and self._strict:
                state.close(group)
        carry_out(cluster, state.places)

    def _admit(self, cluster: Simulation, job: Active, state: _State) -> bool:
        if self._has_quota(cluster, job, state.held):
            pool = cluster.fastest(job, state.free)
            if pool is not None:
                state.place(job, pool)
                return True
        if not cluster.settings.rules.preempt or job in state.gave_way:
            return False
        found = self._victims(cluster, job, state)
        if found is None:
            return False
        pool, victims = found
        for victim in victims:
            state.take_off(victim)
        state.place(job, pool)
        return True

    # Quota

    def _queue(self, cluster: Simulation, group: str) -> Queue:
        return cluster.settings.rules.queue(group)

    def _borrows(self, cluster: Simulation, job: Active, held: dict[str, int]) -> float:
        """GPUs that its queue has with a job beyond its own, over its own: Kueue's share of a queue, for the
        order of turns."""
        own = self._queue(cluster, job.spec.group).gpus
        if own is None:
            return 0.0
        return max(held.get(job.spec.group, 0) + job.gpus - own, 0) / max(own, 1)

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

    def _victims(self, cluster: Simulation, job: Active, state: _State) -> tuple[Pool, list[Active]] | None:
        """The jobs that give way, none that need not, and the pool where that makes room; None where nothing
        does."""
        queue, group = self._queue(cluster, job.spec.group), job.spec.group
        own = queue.gpus is not None and state.held.get(group, 0) + job.gpus <= queue.gpus
        candidates = [other for other in state.places if self._may_take(cluster, job, other, own, state.held)]
        candidates.sort(
            key=lambda other: (
                other.spec.group == group, other.spec.priority, -state.since_s(other), -other.number,
            )
        )  # fmt: skip
        for pool in cluster.pools_for(job):
            victims: list[Active] = []
            for other in candidates:
                if self._suffices(cluster, job, pool, victims, state):
                    break
                left = state.held_without(victims)
                if state.places[other] is pool and self._may_take(cluster, job, other, own, left):
                    victims.append(other)
            if self._suffices(cluster, job, pool, victims, state):
                return pool, self._needed(cluster, job, pool, victims, state)
        return None

    def _needed(
        self, cluster: Simulation, job: Active, pool: Pool, victims: list[Active], state: _State
    ) -> list[Active]:
        """Those of the victims without whom a job has no room; the last ones found go on first."""
        for victim in reversed(victims):
            fewer = [other for other in victims if other is not victim]
            if self._suffices(cluster, job, pool, fewer, state):
                victims = fewer
        return victims

    def _suffices(
        self, cluster: Simulation, job: Active, pool: Pool, victims: list[Active], state: _State
    ) -> bool:
        """Whether a job has room and quota once these have given way."""
        free = state.free[pool.number] + sum(victim.gpus for victim in victims)
        return free >= job.gpus and self._has_quota(cluster, job, state.held_without(victims))

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


class _State:
    """What one decision has come to so far: who has a place, who waits, and what is left."""

    def __init__(self, cluster: Simulation) -> None:
        self._now_s = cluster.now
        self.free = [pool.free for pool in cluster.machines.pools]
        self.held: dict[str, int] = {}
        """GPUs that each group holds."""
        self.places: dict[Active, Pool] = {}
        self.gave_way: set[Active] = set()
        """Those that were taken off; they may have what is free, and take nobody's place in turn."""
        self.lines: dict[str, list[Active]] = {}
        """Jobs that wait, by group; the next is the last."""
        self._closed: set[str] = set()
        for job in cluster.running.values():
            assert job.allocation is not None
            self.places[job] = cluster.machines.pools[job.allocation.pool]
            self.held[job.spec.group] = self.held.get(job.spec.group, 0) + job.gpus
        for job in cluster.waiting.values():
            self.lines.setdefault(job.spec.group, []).append(job)
        for line in self.lines.values():
            line.sort(key=_turn)

    def next_of(self, group: str) -> Active:
        """Take the next job out of a line."""
        job = self.lines[group].pop()
        if not self.lines[group]:
            del self.lines[group]
        return job

    def close(self, group: str) -> None:
        """Let nobody of a group pass the job that could not be admitted."""
        self.lines.pop(group, None)
        self._closed.add(group)

    def place(self, job: Active, pool: Pool) -> None:
        self.places[job] = pool
        self._count(job, pool, job.gpus)

    def take_off(self, job: Active) -> None:
        """Let a job wait again."""
        self._count(job, self.places.pop(job), -job.gpus)
        self.gave_way.add(job)
        if job.spec.group not in self._closed:
            insort(self.lines.setdefault(job.spec.group, []), job, key=_turn)

    def held_without(self, victims: list[Active]) -> dict[str, int]:
        """GPUs that each group holds once these have given way."""
        held = dict(self.held)
        for victim in victims:
            held[victim.spec.group] -= victim.gpus
        return held

    def since_s(self, job: Active) -> float:
        return job.since_s if job.is_running else self._now_s

    def _count(self, job: Active, pool: Pool, gpus: int) -> None:
        self.free[pool.number] -= gpus
        self.held[job.spec.group] = self.held.get(job.spec.group, 0) + gpus


def _turn(job: Active) -> tuple[float, float, int]:
    return job.spec.priority, -job.arrival_s, -job.number
