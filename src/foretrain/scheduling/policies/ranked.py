"""Deals GPUs out anew at intervals, to jobs in the order of a rank that changes over time."""

from __future__ import annotations

from abc import abstractmethod

from foretrain.scheduling.policies.base import Policy
from foretrain.scheduling.simulator import Active, Simulation

Rank = tuple[float, ...]


class Ranked(Policy):
    """At intervals the jobs of the best rank keep or get GPUs, as far as they go; in between, waiting jobs
    start on free ones in that order. Looks at all jobs: for thousands of them."""

    def __init__(self, interval_s: float) -> None:
        self.interval_s = interval_s
        self._over = True

    @abstractmethod
    def rank(self, cluster: Simulation, job: Active) -> Rank:
        """The least is best."""

    def round(self, cluster: Simulation) -> None:
        self._over = True

    def decide(self, cluster: Simulation) -> None:
        if not cluster.waiting:
            self._over = False
            return
        if self._over:
            self._deal(cluster)
        self._over = False
        for job in self._in_order(cluster, list(cluster.waiting.values())):
            if cluster.fits(job):
                cluster.start(job)
            if not cluster.machines.free:
                return

    def _deal(self, cluster: Simulation) -> None:
        left = {pool.number: pool.free for pool in cluster.machines.pools}
        for job in cluster.running.values():
            assert job.allocation is not None
            left[job.allocation.pool] += job.allocation.gpus
        winners: dict[int, int] = {}
        for job in self._in_order(cluster, [*cluster.running.values(), *cluster.waiting.values()]):
            held = job.allocation
            pools = [held.pool] if held else [pool.number for pool in cluster.pools_for(job)]
            pool = next((number for number in pools if left[number] >= job.gpus), None)
            if pool is not None:
                left[pool] -= job.gpus
                winners[job.number] = pool
        for job in [job for job in cluster.running.values() if job.number not in winners]:
            cluster.preempt(job)
        for number, pool in winners.items():
            if number in cluster.waiting:
                job = cluster.waiting[number]
                if cluster.machines.pools[pool].free >= job.gpus:
                    cluster.start(job, pool=cluster.machines.pools[pool])

    def _in_order(self, cluster: Simulation, jobs: list[Active]) -> list[Active]:
        ranks = {job.number: self.rank(cluster, job) for job in jobs}
        return sorted(jobs, key=lambda job: (ranks[job.number], job.arrival_s, job.number))
