"""Orders jobs by age, fair share, size and class, and backfills, as Slurm does when it is set up so."""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable

from foretrain.scheduling.policies.base import Policy
from foretrain.scheduling.policies.fair_tree import FairTree, User
from foretrain.scheduling.policies.outlook import Hold, kept_in_pools
from foretrain.scheduling.policies.plan import GpuPlan
from foretrain.scheduling.simulator import Active, Simulation

_DAY_S = 86400.0
Rank = tuple[float, float, int, Active]
"""What a job is sorted by, the first in line least, and the job."""


class Multifactor(Policy):
    """Slurm's priority/multifactor with sched/backfill.

    Priority = age x w + fair share (Fair Tree) x w + GPUs x w + class x w, each factor between 0 and 1. Jobs
    start in that order; those that cannot get a reservation for when the limits of running jobs (their
    estimates, without limits) let them start, and others start before where they delay none of the first
    ``depth``. Quotas of groups hold jobs back, reservations keep GPUs free, and with ``preempt`` jobs of a
    higher class take the GPUs of the youngest jobs of the lowest class, which wait again, where that delays
    none of those before them either.

    Simpler than Slurm: it decides at every event rather than every 30 s; GPUs are counted, nodes are not; a
    group has one quota (GrpTRES=gres/gpu) and users none; weights are ours, as Slurm's are 0 until set.
    """

    name = "multifactor"
    honours = ("quotas", "shares", "reservations", "preempt")

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
        self._kept: list[list[Hold]] = []

    def begin(self, cluster: Simulation) -> None:
        rules = cluster.settings.rules
        self._tree = FairTree(self._half_life_s, lambda group: rules.queue(group).shares)
        self._top_class = max((abs(job.spec.priority) for job in cluster.jobs), default=0.0) or 1.0
        self._kept = kept_in_pools(rules.reservations, cluster.machines.pools)
        for reservation in rules.reservations:
            cluster.decide_at(reservation.end_s)

    def waits(self, cluster: Simulation, job: Active) -> None:
        self._tree.meet(_user(job))

    def finished(self, cluster: Simulation, job: Active) -> None:
        self._pass_time(cluster, job)

    def decide(self, cluster: Simulation) -> None:
        self._pass_time(cluster)
        takes = cluster.settings.rules.preempt
        if not cluster.waiting or (not takes and not cluster.machines.free):
            return
        plan = GpuPlan(cluster, self._kept)
        rank = self._ranking(cluster)
        queue = [rank(job) for job in cluster.waiting.values()]
        heapq.heapify(queue)
        tried = 0
        while queue and tried < self._depth and (takes or plan.free):
            job = heapq.heappop(queue)[-1]
            if not self._in_quota(cluster, job, plan.held):
                continue
            tried += 1
            start_s, number = plan.earliest(job)
            room = plan.room_for(job) if takes and start_s > cluster.now else None
            if room is not None:
                start_s, number = cluster.now, room.pool
                for victim in room.victims:
                    plan.take_off(victim)
                    heapq.heappush(queue, rank(victim))
            if start_s < math.inf:
                plan.promise(job, number, start_s)
        plan.carry_out()

    # Priorities

    def _pass_time(self, cluster: Simulation, ended: Active | None = None) -> None:
        running = [*cluster.running.values(), *([ended] if ended is not None else [])]
        holding = [
            (_user(job), float(job.gpus if job.allocation is None else job.allocation.gpus))
            for job in running
        ]
        self._tree.advance(cluster.now, holding)

    def _ranking(self, cluster: Simulation) -> Callable[[Active], Rank]:
        """By priority as it is now, then arrival."""
        fair = self._tree.factors()
        size = cluster.machines.size

        def rank(job: Active) -> Rank:
            age = min(max(cluster.now - job.arrival_s, 0.0) / self._oldest_s, 1.0)
            priority = (
                self._age * age
                + self._fair * fair[_user(job)]
                + self._size * job.gpus / size
                + self._class * job.spec.priority / self._top_class
            )
            return -priority, job.arrival_s, job.number, job

        return rank

    def _in_quota(self, cluster: Simulation, job: Active, held: dict[str, int]) -> bool:
        own = cluster.settings.rules.queue(job.spec.group).gpus
        return own is None or held.get(job.spec.group, 0) + job.gpus <= own


def _user(job: Active) -> User:
    return job.spec.group, job.spec.user
