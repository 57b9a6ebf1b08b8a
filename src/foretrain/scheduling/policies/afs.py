"""Grows and shrinks jobs by who makes more of one more GPU (AFS, Hwang et al., NSDI 2021)."""

from __future__ import annotations

from foretrain.scheduling.policies.elastic import Elastic
from foretrain.scheduling.simulator import Active, Simulation


class ApatheticFutureShare(Elastic):
    """Every job gets its least number of GPUs, the shortest left first; each further one goes to the winner
    of comparisons of two jobs.

    Of two jobs, a ends sooner than b: the GPU goes to b when (p_b(n+1) - p_b(n)) / p_b(n+1) is greater than
    (p_a(m+1) - p_a(m)) / p_a(m), else to a, with p the speed on so many GPUs (AFS-L, algorithm 1 of the
    paper). The comparison is not transitive; as in the paper, the winner so far meets one job after another.
    """

    name = "afs"

    def value(self, cluster: Simulation, job: Active, gpus: int) -> float:
        return cluster.rate_on(job, gpus)

    def first(self, cluster: Simulation, job: Active) -> float:
        return cluster.remaining_s(job)

    def _deal(self, cluster: Simulation) -> dict[int, int]:
        left = cluster.machines.up
        sizes: dict[int, int] = {}
        jobs = sorted(
            [*cluster.running.values(), *cluster.waiting.values()],
            key=lambda job: (cluster.remaining_nominal_s(job), job.arrival_s, job.number),
        )
        for job in jobs:
            if job.spec.fewest <= left:
                sizes[job.number] = job.spec.fewest
                left -= job.spec.fewest
        growing = [job for job in jobs if job.number in sizes and job.spec.most > sizes[job.number]]
        while left and growing:
            winner = growing[0]
            for job in growing[1:]:
                winner = self._better(cluster, winner, job, sizes)
            sizes[winner.number] += 1
            left -= 1
            if sizes[winner.number] >= winner.spec.most:
                growing.remove(winner)
        return sizes

    def _better(self, cluster: Simulation, one: Active, other: Active, sizes: dict[int, int]) -> Active:
        def speed(job: Active, more: int = 0) -> float:
            return self.value(cluster, job, sizes[job.number] + more)

        def left_s(job: Active) -> float:
            return max(job.estimated_work - cluster.done(job), 0.0) / speed(job)

        a, b = (one, other) if left_s(one) <= left_s(other) else (other, one)
        gain_b = (speed(b, 1) - speed(b)) / speed(b, 1)
        gain_a = (speed(a, 1) - speed(a)) / speed(a)
        return b if gain_b > gain_a else a
