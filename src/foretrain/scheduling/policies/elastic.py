"""Chooses how many GPUs each job gets: Pollux-like by goodput, Optimus-like by marginal gain."""

from __future__ import annotations

import bisect
import heapq
from abc import abstractmethod

from foretrain.scheduling.policies.base import Policy
from foretrain.scheduling.simulator import Active, Simulation

_NOISE_SCALE = 4.0
"""Of the asked-for batch: how far a larger batch still helps. Efficiency halves when a job has this many
times more GPUs than it asked for."""
_WORTH_IT = 1.25
"""A running job changes its size only when that makes it faster by this factor, since it costs a restart; or
to make room."""


class Elastic(Policy):
    """At intervals all jobs get their least number of GPUs; the rest go one by one to whoever gains most."""

    resizes = True

    def __init__(self, interval_s: float = 300.0) -> None:
        self.interval_s = interval_s
        self._due = True

    @abstractmethod
    def value(self, cluster: Simulation, job: Active, gpus: int) -> float:
        """What so many GPUs are worth to a job."""

    def first(self, cluster: Simulation, job: Active) -> float:
        """The order in which jobs get their least number of GPUs, before any gets more."""
        return job.arrival_s

    def round(self, cluster: Simulation) -> None:
        self._due = True

    def decide(self, cluster: Simulation) -> None:
        if self._due:
            self._due = False
            self._apply(cluster, self._deal(cluster))
        for job in sorted(cluster.waiting.values(), key=lambda job: (job.arrival_s, job.number)):
            if cluster.machines.free < 1:
                return
            fewest = cluster.sizes(job)[0]
            if cluster.fits(job, fewest):
                cluster.start(job, gpus=fewest)

    def _deal(self, cluster: Simulation) -> dict[int, int]:
        """GPUs for each job. Every job's next step is its least number first, then to the next on which it
        runs."""
        left = cluster.machines.up
        sizes: dict[int, int] = {}
        jobs = [*cluster.running.values(), *cluster.waiting.values()]
        steps = [self._step(cluster, job, 0) for job in jobs]
        heapq.heapify(steps)
        while steps and left:
            _, _, number, gpus = heapq.heappop(steps)
            job = cluster.jobs[number]
            more = gpus - sizes.get(number, 0)
            if more > left:
                continue
            left -= more
            sizes[number] = gpus
            if gpus < cluster.sizes(job)[-1]:
                further = self._step(cluster, job, gpus)
                if further[1] < 0:
                    heapq.heappush(steps, further)
        return sizes

    def _step(self, cluster: Simulation, job: Active, gpus: int) -> tuple[bool, float, int, int]:
        """A job's next step, for a heap: the first one of every job, then by what each further GPU gains."""
        wider = next_size(cluster.sizes(job), gpus)
        if gpus == 0:
            return False, self.first(cluster, job), job.number, wider
        gain = (self.value(cluster, job, wider) - self.value(cluster, job, gpus)) / (wider - gpus)
        return True, -gain, job.number, wider

    def _apply(self, cluster: Simulation, sizes: dict[int, int]) -> None:
        """Jobs that lose GPUs first, then those that gain, as far as GPUs of one kind are free."""
        for job in list(cluster.running.values()):
            size = sizes.get(job.number, 0)
            assert job.allocation is not None
            pool = cluster.machines.pools[job.allocation.pool]
            narrower = size < job.allocation.gpus and bool(cluster.waiting)
            if size == 0 or (narrower and not cluster.rate_in(job, pool, size)):
                cluster.preempt(job)
            elif narrower:
                cluster.resize(job, size)
        for job in sorted(cluster.waiting.values(), key=lambda job: (job.arrival_s, job.number)):
            size = sizes.get(job.number, 0)
            if size and cluster.fits(job, size):
                cluster.start(job, gpus=size)
        for job in list(cluster.running.values()):
            self._grow(cluster, job, sizes.get(job.number, 0))

    def _grow(self, cluster: Simulation, job: Active, size: int) -> None:
        assert job.allocation is not None
        held = job.allocation.gpus
        pool = cluster.machines.pools[job.allocation.pool]
        within = [each for each in cluster.sizes(job) if held < each <= min(size, held + pool.free)]
        size = max((each for each in within if cluster.rate_in(job, pool, each) > 0), default=0)
        if size > held and cluster.rate_on(job, size) >= _WORTH_IT * cluster.rate_on(job, held):
            cluster.resize(job, size)


class Pollux(Elastic):
    """Pollux-like (Qiao et al., OSDI 2021): by goodput, which is speed times statistical efficiency."""

    name = "pollux"

    def first(self, cluster: Simulation, job: Active) -> float:
        return cluster.attained_gpu_s(job)

    def value(self, cluster: Simulation, job: Active, gpus: int) -> float:
        speedup = cluster.rate_on(job, gpus) / cluster.rate_on(job, cluster.sizes(job)[0])
        return float((speedup * efficiency(gpus / job.gpus)) ** 0.5)


class Optimus(Elastic):
    """Optimus-like (Peng et al., EuroSys 2018): the estimated remaining time that one more GPU saves."""

    name = "optimus"

    def first(self, cluster: Simulation, job: Active) -> float:
        return cluster.remaining_s(job)

    def value(self, cluster: Simulation, job: Active, gpus: int) -> float:
        return -max(job.estimated_work - cluster.done(job), 0.0) / cluster.rate_on(job, gpus)


def next_size(sizes: tuple[int, ...], gpus: int) -> int:
    """The least of a job's sizes that is more than it has.

    >>> next_size((1, 2, 4), 2)
    4
    """
    return sizes[bisect.bisect(sizes, gpus)]


def efficiency(scale: float) -> float:
    """Progress per sample with ``scale`` times the batch asked for, over that (McCandlish et al. 2018).

    >>> efficiency(1.0)
    1.0
    """
    return (_NOISE_SCALE + 1.0) / (_NOISE_SCALE + scale) if scale > 1 else 1.0
