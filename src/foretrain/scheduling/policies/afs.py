"""Grows and shrinks jobs by who makes more of one more GPU (AFS, Hwang et al., NSDI 2021)."""

from __future__ import annotations

from foretrain.scheduling.policies.elastic import Elastic, next_size
from foretrain.scheduling.simulator import Active, Simulation


class ApatheticFutureShare(Elastic):
    """Every job gets its least number of GPUs, the shortest left first; each further one goes to the winner
    of comparisons of two jobs.

    Of two jobs, a ends sooner than b: the GPU goes to b when (p_b(n+1) - p_b(n)) / p_b(n+1) is greater than
    (p_a(m+1) - p_a(m)) / p_a(m), else to a, with p the speed on so many GPUs (AFS-L, algorithm 1 of the
    paper). Where a job does not run on one more, the next number on which it does counts, by each GPU of the
    way. The comparison is not transitive; as in the paper, the winner so far meets one job after another.
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
            fewest = cluster.sizes(job)[0]
            if fewest <= left:
                sizes[job.number] = fewest
                left -= fewest
        growing = [job for job in jobs if job.number in sizes]
        while left:
            growing = [job for job in growing if 0 < self._further(cluster, job, sizes) <= left]
            if not growing:
                break
            winner = growing[0]
            for job in growing[1:]:
                winner = self._better(cluster, winner, job, sizes)
            further = self._further(cluster, winner, sizes)
            sizes[winner.number] += further
            left -= further
        return sizes

    def _further(self, cluster: Simulation, job: Active, sizes: dict[int, int]) -> int:
        """GPUs to the next number on which a job runs; 0 where there is none."""
        possible, held = cluster.sizes(job), sizes[job.number]
        return next_size(possible, held) - held if held < possible[-1] else 0

    def _better(self, cluster: Simulation, one: Active, other: Active, sizes: dict[int, int]) -> Active:
        def speed(job: Active, more: int = 0) -> float:
            return self.value(cluster, job, sizes[job.number] + more)

        def left_s(job: Active) -> float:
            return max(job.estimated_work - cluster.done(job), 0.0) / speed(job)

        def gain(job: Active) -> float:
            """Of each further GPU."""
            further = self._further(cluster, job, sizes)
            return (speed(job, further) - speed(job)) / further

        a, b = (one, other) if left_s(one) <= left_s(other) else (other, one)
        gain_b = gain(b) / speed(b, self._further(cluster, b, sizes))
        gain_a = gain(a) / speed(a)
        return b if gain_b > gain_a else a
