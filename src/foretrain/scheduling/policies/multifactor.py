"""Orders jobs by age, fair share, size and class, and backfills, as Slurm does when it is set up so."""

from __future__ import annotations

import math

from foretrain.scheduling.machines import Pool
from foretrain.scheduling.policies.base import Policy
from foretrain.scheduling.policies.fair_tree import FairTree, User
from foretrain.scheduling.policies.profile import FreeProfile
from foretrain.scheduling.simulator import Active, Simulation

_SLACK_S = 1e-6
_DAY_S = 86400.0


class Multifactor(Policy):
    """Slurm's priority/multifactor with sched/backfill.

    Priority = age x w + fair share (Fair Tree) x w + GPUs x w + class x w, each factor between 0 and 1. Jobs
    start in that order; those that cannot get a reservation for when the limits of running jobs (their
    estimates, without limits) let them start, and others start before where they delay none of the first
    ``depth``. Quotas of groups hold jobs back, reservations keep GPUs free, and with ``preempt`` jobs of a
    higher class take the GPUs of the youngest jobs of the lowest class, which wait again.

    Simpler than Slurm: it decides at every event rather than every 30 s; GPUs are counted, nodes are not; a
    group has one quota (GrpTRES=gres/gpu) and users none; weights are ours, as Slurm's are 0 until set.
    """

    name = "multifactor"

    def __init__(
        self,
        age_weight: float = 1000.0,
        fair_share_weight: float = 10000.0,
        size_weight: float = 500.0,
        class_weight: float = 20000.0,
        oldest_days: float = 7.0,
        half_life_days: float = 7.0,
        depth: int = 100,
    ) -> None:
        self._age, self._fair, self._size, self._class = (
            age_weight, fair_share_weight, size_weight, class_weight,
        )  # fmt: skip
        self._oldest_s, self._half_life_s, self._depth = oldest_days * _DAY_S, half_life_days * _DAY_S, depth
        self._tree = FairTree(self._half_life_s, lambda _: 1.0)
        self._top_class = 1.0

    def begin(self, cluster: Simulation) -> None:
        rules = cluster.settings.rules
        self._tree = FairTree(self._half_life_s, lambda group: rules.queue(group).shares)
        self._top_class = max((abs(job.spec.priority) for job in cluster.jobs), default=0.0) or 1.0
        if rules.reservations:
            self.interval_s = 300.0  # so that what a reservation gives back is noticed

    def waits(self, cluster: Simulation, job: Active) -> None:
        self._tree.meet(_user(job))

    def finished(self, cluster: Simulation, job: Active) -> None:
        self._pass_time(cluster, job)

    def decide(self, cluster: Simulation) -> None:
        self._pass_time(cluster)
        takes = cluster.settings.rules.preempt
        if not cluster.waiting or (not takes and not cluster.machines.free):
            return
        waiting = self._by_priority(cluster)
        held = self._held(cluster)
        profiles = {pool.number: self._profile(cluster, pool) for pool in cluster.machines.pools}
        tried = 0
        for job in waiting:
            if tried >= self._depth or (not takes and not cluster.machines.free):
                return
            if not self._in_quota(cluster, job, held):
                continue
            tried += 1
            start_s, number, length_s = self._earliest(cluster, job, profiles)
            if start_s > cluster.now and takes:
                pool = self._make_room(cluster, job)
                if pool is not None:
                    profiles = {each.number: self._profile(cluster, each) for each in cluster.machines.pools}
                    start_s, number = cluster.now, pool.number
                    held = self._held(cluster)
            if start_s <= cluster.now:
                cluster.start(job, pool=cluster.machines.pools[number])
                held[job.spec.group] = held.get(job.spec.group, 0) + job.gpus
            if start_s < math.inf:
                for profile in profiles[number].values():
                    profile.reserve(start_s, start_s + length_s, job.gpus)

    # Priorities

    def _pass_time(self, cluster: Simulation, ended: Active | None = None) -> None:
        running = [*cluster.running.values(), *([ended] if ended is not None else [])]
        holding = [
            (_user(job), float(job.gpus if job.allocation is None else job.allocation.gpus))
            for job in running
        ]
        self._tree.advance(cluster.now, holding)

    def _by_priority(self, cluster: Simulation) -> list[Active]:
        fair = self._tree.factors()
        size = cluster.machines.size

        def priority(job: Active) -> float:
            age = min(max(cluster.now - job.arrival_s, 0.0) / self._oldest_s, 1.0)
            return (
                self._age * age
                + self._fair * fair[_user(job)]
                + self._size * job.gpus / size
                + self._class * job.spec.priority / self._top_class
            )

        return sorted(cluster.waiting.values(), key=lambda job: (-priority(job), job.arrival_s, job.number))

    # Quotas and reservations

    def _held(self, cluster: Simulation) -> dict[str, int]:
        """GPUs that each group holds."""
        held: dict[str, int] = {}
        for job in cluster.running.values():
            held[job.spec.group] = held.get(job.spec.group, 0) + job.gpus
        return held

    def _in_quota(self, cluster: Simulation, job: Active, held: dict[str, int]) -> bool:
        own = cluster.settings.rules.queue(job.spec.group).gpus
        return own is None or held.get(job.spec.group, 0) + job.gpus <= own

    def _profile(self, cluster: Simulation, pool: Pool) -> dict[str, FreeProfile]:
        """GPUs that will be free in a pool, as everybody sees it (""), and as each group with a reservation
        does."""
        ends = [
            (max(self._end_s(cluster, job), cluster.now + _SLACK_S), job.allocation.gpus)
            for job in cluster.running.values()
            if job.allocation is not None and job.allocation.pool == pool.number
        ]
        kept = [
            each for each in cluster.settings.rules.reservations if _of_pool(cluster, each.device) is pool
        ]
        kept = [each for each in kept if each.end_s > cluster.now]
        profiles = {}
        for group in ("", *{each.group for each in kept if each.group}):
            profiles[group] = FreeProfile(cluster.now, pool.free, ends)
            for each in kept:
                if not each.group or each.group != group:
                    profiles[group].reserve(max(each.start_s, cluster.now), each.end_s, each.gpus)
        return profiles

    def _earliest(
        self, cluster: Simulation, job: Active, profiles: dict[int, dict[str, FreeProfile]]
    ) -> tuple[float, int, float]:
        """When and where a job can start, and for how long it then holds its GPUs at most."""
        length_s = max(self._length_s(cluster, job), _SLACK_S)
        return min(
            (_seen(profiles[pool.number], job).earliest(job.gpus, length_s), pool.number, length_s)
            for pool in cluster.pools_for(job)
        )

    def _length_s(self, cluster: Simulation, job: Active) -> float:
        limit_s = job.spec.limit_s
        return cluster.remaining_s(job) if limit_s is None else limit_s

    def _end_s(self, cluster: Simulation, job: Active) -> float:
        limit_s = job.spec.limit_s
        return cluster.now + cluster.expected_s(job) if limit_s is None else job.since_s + limit_s

    # Preemption

    def _make_room(self, cluster: Simulation, job: Active) -> Pool | None:
        """Take off the youngest jobs of the lowest classes, if that suffices; the pool where it does."""
        lower = sorted(
            (other for other in cluster.running.values() if other.spec.priority < job.spec.priority),
            key=lambda other: (other.spec.priority, -other.since_s, -other.number),
        )
        rules = cluster.settings.rules
        if any(each.start_s < cluster.now + self._length_s(cluster, job) for each in rules.reservations):
            return None  # what would be freed may be reserved
        for pool in cluster.pools_for(job):
            free, victims = pool.free, []
            for other in lower:
                if free >= job.gpus:
                    break
                if other.allocation is not None and other.allocation.pool == pool.number:
                    victims.append(other)
                    free += other.allocation.gpus
            if free >= job.gpus and victims:
                for victim in victims:
                    cluster.preempt(victim)
                return pool
        return None


def _user(job: Active) -> User:
    return job.spec.group, job.spec.user


def _seen(profiles: dict[str, FreeProfile], job: Active) -> FreeProfile:
    return profiles.get(job.spec.group, profiles[""])


def _of_pool(cluster: Simulation, device: str | None) -> Pool | None:
    """The pool that a reservation is about: the largest of its kind of device."""
    of_kind = [pool for pool in cluster.machines.pools if device in (None, pool.device)]
    return max(of_kind, key=lambda pool: pool.size, default=None)
