"""Leases GPUs to the jobs that are treated worst, as Themis does (Mahajan et al., NSDI 2020)."""

from __future__ import annotations

from foretrain.scheduling.policies.base import Policy
from foretrain.scheduling.simulator import Active, Simulation


class Themis(Policy):
    """By the time that a job will have taken over that on its own part of the cluster, worst first."""

    name = "themis"

    def __init__(self, lease_s: float = 1200.0) -> None:
        self.interval_s = lease_s
        self._over = True

    def unfairness(self, cluster: Simulation, job: Active) -> float:
        """Time from arrival to the estimated end, over the estimated time alone on its part of the GPUs."""
        jobs = len(cluster.running) + len(cluster.waiting)
        part = max(cluster.machines.size / jobs / job.gpus, 1e-9)
        alone_s = job.estimated_work / job.nominal_rate / min(part, 1.0)
        return (cluster.now - job.arrival_s + cluster.remaining_s(job)) / max(alone_s, 1e-9)

    def round(self, cluster: Simulation) -> None:
        self._over = True

    def decide(self, cluster: Simulation) -> None:
        if self._over and cluster.waiting:
            self._auction(cluster)
        self._over = False
        for job in self._worst_first(cluster, list(cluster.waiting.values())):
            if cluster.fits(job):
                cluster.start(job)
            if not cluster.machines.free:
                return

    def _auction(self, cluster: Simulation) -> None:
        """All leases end: the jobs that are treated worst keep or get GPUs, as far as they go."""
        left = {pool.number: pool.free for pool in cluster.machines.pools}
        for job in cluster.running.values():
            assert job.allocation is not None
            left[job.allocation.pool] += job.allocation.gpus
        winners: dict[int, None] = {}
        for job in self._worst_first(cluster, [*cluster.running.values(), *cluster.waiting.values()]):
            held = job.allocation
            pools = [held.pool] if held else [pool.number for pool in cluster.pools_for(job)]
            pool = next((pool for pool in pools if left[pool] >= job.gpus), None)
            if pool is not None:
                left[pool] -= job.gpus
                winners[job.number] = None
        for job in [job for job in cluster.running.values() if job.number not in winners]:
            cluster.preempt(job)
        for number in [number for number in winners if number in cluster.waiting]:
            job = cluster.waiting[number]
            if cluster.fits(job):
                cluster.start(job)

    def _worst_first(self, cluster: Simulation, jobs: list[Active]) -> list[Active]:
        return sorted(jobs, key=lambda job: (-self.unfairness(cluster, job), job.arrival_s, job.number))
