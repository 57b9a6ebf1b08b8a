"""Serves jobs that received least GPU time first, in queues, as Tiresias (Gu et al., NSDI 2019)."""

from __future__ import annotations

import heapq
from collections.abc import Sequence

from foretrain.scheduling.active import Active
from foretrain.scheduling.machines import Pool
from foretrain.scheduling.policies.base import Policy
from foretrain.scheduling.policies.priority import Request, request
from foretrain.scheduling.simulator import Simulation

THRESHOLDS_GPU_S = (3250.0, 7200.0)
"""GPU time after which a job falls into the next of three queues; the values of the authors' simulator."""
_SLACK_GPU_S = 1e-6

Place = tuple[int, int, Active]
"""Where a job stands in its queue, its number, and itself."""


class _Queue:
    """The jobs of one level. Those that run stand before those that wait."""

    def __init__(self, pools: int) -> None:
        self.running: dict[int, Active] = {}
        self.held = [0] * pools
        """GPUs of those that run, by pool."""
        self.fallen: list[Active] = []
        """Jobs that run and fell into this queue since the last decision; they stand behind all that wait."""
        self.waiting: dict[Request, list[Place]] = {}
        self._front = self._back = 0

    def append(self, job: Active) -> None:
        """Behind all that wait."""
        self._back += 1
        heapq.heappush(self.waiting.setdefault(request(job), []), (self._back, job.number, job))

    def prepend(self, jobs: Sequence[Active]) -> None:
        """Before all that wait, in the order given."""
        self._front -= len(jobs)
        for place, job in enumerate(jobs, start=self._front):
            heapq.heappush(self.waiting.setdefault(request(job), []), (place, job.number, job))

    def runs(self, job: Active, pool: int, gpus: int) -> None:
        self.running[job.number] = job
        self.held[pool] += gpus

    def stops(self, job: Active, pool: int, gpus: int) -> None:
        if self.running.pop(job.number, None) is not None:
            self.held[pool] -= gpus
        else:
            self.fallen.remove(job)


class Tiresias(Policy):
    """Discretised two-dimensional least attained service: queues by GPU time received.

    At every decision the cluster is dealt out anew: queue by queue, and within a queue first those that run,
    then those that wait, whoever fits. So a job gives way to jobs of higher queues, and to one of its own
    queue only when it has just fallen into it.
    """

    name = "tiresias"

    def __init__(self, thresholds_gpu_s: tuple[float, ...] = THRESHOLDS_GPU_S) -> None:
        self._thresholds = thresholds_gpu_s
        self._queues: list[_Queue] = []
        self._level: dict[int, int] = {}
        self._where: dict[int, tuple[int, int]] = {}
        """Pool and GPUs of each job that runs."""
        self._dealing = False

    def begin(self, cluster: Simulation) -> None:
        self._queues = [_Queue(len(cluster.machines.pools)) for _ in range(len(self._thresholds) + 1)]

    def waits(self, cluster: Simulation, job: Active) -> None:
        if self._dealing:
            return
        queue = self._queues[self._level.setdefault(job.number, 0)]
        if job.number in self._where:
            queue.stops(job, *self._where.pop(job.number))
        queue.append(job)

    def finished(self, cluster: Simulation, job: Active) -> None:
        self._queues[self._level.pop(job.number)].stops(job, *self._where.pop(job.number))

    def timer(self, cluster: Simulation, job: Active) -> None:
        level = self._level[job.number]
        self._queues[level].stops(job, *self._where[job.number])
        self._level[job.number] = level + 1
        self._queues[level + 1].fallen.append(job)
        self._watch(cluster, job, level + 1)

    def moved(self, cluster: Simulation, job: Active) -> None:
        assert job.allocation is not None
        level = self._level[job.number]
        self._queues[level].stops(job, *self._where[job.number])
        self._where[job.number] = (job.allocation.pool, job.gpus)
        self._queues[level].runs(job, job.allocation.pool, job.gpus)
        self._watch(cluster, job, level)

    def decide(self, cluster: Simulation) -> None:
        left = [pool.free for pool in cluster.machines.pools]
        for queue in self._queues:
            left = [rest + held for rest, held in zip(left, queue.held, strict=True)]
            for job in queue.fallen:
                pool, gpus = self._where[job.number]
                left[pool] += gpus
        started: list[tuple[Active, Pool, int]] = []
        stopped: list[Active] = []
        for level, queue in enumerate(self._queues):
            stopped += self._keep(queue, left, crowded=bool(started))
            if queue.waiting and any(left):
                started += [(job, pool, level) for job, pool in _deal(cluster, queue, left)]
            for job in queue.fallen:
                pool_number, gpus = self._where[job.number]
                if gpus <= left[pool_number]:
                    left[pool_number] -= gpus
                    queue.runs(job, pool_number, gpus)
                else:
                    stopped.append(job)
                    queue.append(job)
            queue.fallen.clear()
        if started or stopped:
            self._apply(cluster, started, stopped)

    def _keep(self, queue: _Queue, left: list[int], *, crowded: bool) -> list[Active]:
        """Let those go on that run and still fit; the others, which are returned, wait before all others."""
        if not crowded or all(held <= rest for held, rest in zip(queue.held, left, strict=True)):
            for pool, held in enumerate(queue.held):
                left[pool] -= held
            return []
        stopped = []
        for job in self._last_ones(queue, left):
            pool, gpus = self._where[job.number]
            if gpus <= left[pool]:
                left[pool] -= gpus
            else:
                stopped.append(job)
                queue.stops(job, pool, gpus)
        queue.prepend(stopped)
        return stopped

    def _last_ones(self, queue: _Queue, left: list[int]) -> list[Active]:
        """The jobs from the first on that might not fit, in order; those before them are let go on."""
        before, last = list(queue.held), []
        for number in reversed(queue.running):
            if all(held <= rest for held, rest in zip(before, left, strict=True)):
                break
            pool, gpus = self._where[number]
            before[pool] -= gpus
            last.append(queue.running[number])
        for pool, held in enumerate(before):
            left[pool] -= held
        return last[::-1]

    def _apply(
        self, cluster: Simulation, started: list[tuple[Active, Pool, int]], stopped: list[Active]
    ) -> None:
        self._dealing = True
        for job in stopped:
            del self._where[job.number]
            cluster.preempt(job)
        self._dealing = False
        for job, pool, level in started:
            cluster.start(job, pool=pool)
            self._where[job.number] = (pool.number, job.gpus)
            self._queues[level].runs(job, pool.number, job.gpus)
            self._watch(cluster, job, level)

    def _watch(self, cluster: Simulation, job: Active, level: int) -> None:
        """Have the moment told at which a job falls into the next queue."""
        if level < len(self._thresholds):
            more = max(self._thresholds[level] - cluster.attained_gpu_s(job), _SLACK_GPU_S)
            cluster.wake(job, cluster.now + more / job.gpus)


def _deal(cluster: Simulation, queue: _Queue, left: list[int]) -> list[tuple[Active, Pool]]:
    """Take jobs out of a queue, in order, that fit into what is left, and where."""
    heads = [(*heap[0], wanted) for wanted, heap in queue.waiting.items() if heap]
    heapq.heapify(heads)
    dealt = []
    while heads:
        _, _, job, wanted = heapq.heappop(heads)
        pool = cluster.fastest(job, left)
        if pool is None:
            continue
        left[pool.number] -= job.gpus
        dealt.append((job, pool))
        heap = queue.waiting[wanted]
        heapq.heappop(heap)
        if heap:
            heapq.heappush(heads, (*heap[0], wanted))
    return dealt
