"""Runs jobs in order of arrival and lets later ones go ahead where they do not delay the first that waits."""

from __future__ import annotations

import math
from bisect import bisect_left, insort

from foretrain.scheduling.machines import Pool
from foretrain.scheduling.policies.base import Policy
from foretrain.scheduling.policies.priority import Request, request
from foretrain.scheduling.simulator import Active, Simulation

_SLACK_S = 1e-6


class FirstShort:
    """Jobs in order of arrival with their times; finds the first that is short enough in logarithmic time.

    >>> queue = FirstShort([10.0, 3.0, 5.0])
    >>> queue.first(4.0), queue.first(2.0)
    (1, None)
    """

    def __init__(self, times: list[float]) -> None:
        self._size = 1 << max(0, (len(times) - 1).bit_length())
        self._least = [math.inf] * self._size + times + [math.inf] * (self._size - len(times))
        for node in range(self._size - 1, 0, -1):
            self._least[node] = min(self._least[2 * node], self._least[2 * node + 1])

    def put(self, place: int, time_s: float) -> None:
        node = place + self._size
        self._least[node] = time_s
        while node > 1:
            node //= 2
            least = min(self._least[2 * node], self._least[2 * node + 1])
            if self._least[node] == least:
                return
            self._least[node] = least

    def first(self, at_most: float) -> int | None:
        """The first place with a time of at most so much."""
        if self._least[1] > at_most or math.isinf(self._least[1]):
            return None
        node = 1
        while node < self._size:
            node *= 2
            if self._least[node] > at_most:
                node += 1
        return node - self._size


class _Line:
    """The jobs of one request, in order of arrival."""

    def __init__(self, jobs: list[Active]) -> None:
        self.jobs = jobs
        self.place = {job.number: place for place, job in enumerate(jobs)}
        self.waiting = FirstShort([math.inf] * len(jobs))

    def first(self, at_most: float = 1e300) -> Active | None:
        place = self.waiting.first(at_most)
        return None if place is None else self.jobs[place]


class EasyBackfill(Policy):
    """EASY: the first waiting job has a reservation for when enough GPUs should be free; none delays it."""

    name = "backfill"

    def __init__(self) -> None:
        self._lines: dict[Request, _Line] = {}
        self._ends: dict[int, list[tuple[float, int, int]]] = {}
        self._end_of: dict[int, tuple[int, tuple[float, int, int]]] = {}
        self.reservations: dict[int, float] = {}
        """The earliest start promised to each job that ever was first in line."""

    def begin(self, cluster: Simulation) -> None:
        lines: dict[Request, list[Active]] = {}
        for job in sorted(cluster.jobs, key=lambda job: (job.arrival_s, job.number)):
            lines.setdefault(request(job), []).append(job)
        self._lines = {wanted: _Line(jobs) for wanted, jobs in lines.items()}
        self._ends = {pool.number: [] for pool in cluster.machines.pools}

    def waits(self, cluster: Simulation, job: Active) -> None:
        self._forget(job)
        line = self._lines[request(job)]
        line.waiting.put(line.place[job.number], cluster.remaining_s(job))

    def finished(self, cluster: Simulation, job: Active) -> None:
        self._forget(job)

    def decide(self, cluster: Simulation) -> None:
        head = self._head()
        while head is not None and (pool := cluster.pool_for(head)) is not None:
            self._start(cluster, head, pool)
            head = self._head()
        if head is None or not cluster.machines.free:
            return
        self._extend(cluster)
        reserved, time_s, extra = self._reservation(cluster, head)
        self.reservations.setdefault(head.number, time_s)
        while (candidate := self._candidate(cluster, head, reserved, time_s, extra)) is not None:
            job, pool = candidate
            if pool.number == reserved and cluster.now + cluster.remaining_s(job) > time_s + _SLACK_S:
                extra -= job.gpus
            self._start(cluster, job, pool)

    def _head(self) -> Active | None:
        heads = [head for line in self._lines.values() if (head := line.first()) is not None]
        return min(heads, key=lambda job: (job.arrival_s, job.number), default=None)

    def _start(self, cluster: Simulation, job: Active, pool: Pool) -> None:
        cluster.start(job, pool=pool)
        line = self._lines[request(job)]
        line.waiting.put(line.place[job.number], math.inf)
        end = (cluster.now + cluster.remaining_s(job), job.number, job.gpus)
        insort(self._ends[pool.number], end)
        self._end_of[job.number] = (pool.number, end)

    def moved(self, cluster: Simulation, job: Active) -> None:
        assert job.allocation is not None
        self._forget(job)
        end = (cluster.now + cluster.remaining_s(job), job.number, job.gpus)
        insort(self._ends[job.allocation.pool], end)
        self._end_of[job.number] = (job.allocation.pool, end)

    def _forget(self, job: Active) -> None:
        if job.number in self._end_of:
            pool, end = self._end_of.pop(job.number)
            ends = self._ends[pool]
            del ends[bisect_left(ends, end)]

    def _extend(self, cluster: Simulation) -> None:
        """Expect a later end of jobs that outlived what was expected of them."""
        for pool, ends in self._ends.items():
            while ends and ends[0][0] < cluster.now - _SLACK_S:
                _, number, gpus = ends.pop(0)
                end = (cluster.now + cluster.expected_s(cluster.jobs[number]), number, gpus)
                insort(ends, end)
                self._end_of[number] = (pool, end)

    def _reservation(self, cluster: Simulation, head: Active) -> tuple[int, float, int]:
        """The pool and time at which the first job should fit, and how many GPUs are then left over."""
        best: tuple[float, int, int] | None = None
        for pool in cluster.pools_for(head):
            free, time_s = pool.free, math.inf
            for end, _, gpus in self._ends[pool.number]:
                if end > time_s + _SLACK_S:
                    break
                free += gpus
                if free >= head.gpus and time_s == math.inf:
                    time_s = max(end, cluster.now)
            if time_s < math.inf and (best is None or time_s < best[0]):
                best = (time_s, pool.number, free - head.gpus)
        return (-1, math.inf, 0) if best is None else (best[1], best[0], best[2])

    def _candidate(
        self, cluster: Simulation, head: Active, reserved: int, time_s: float, extra: int
    ) -> tuple[Active, Pool] | None:
        """The first job behind the head that may start now, and where."""
        window = time_s - cluster.now + _SLACK_S
        best: tuple[Active, Pool] | None = None
        for (gpus, usable, *_), line in self._lines.items():
            for pool in cluster.machines.pools:
                if pool.free < gpus or pool.number not in usable:
                    continue
                unbounded = pool.number != reserved or gpus <= extra
                job = line.first() if unbounded else line.first(window)
                if (
                    job is not None
                    and job is not head
                    and (best is None or (job.arrival_s, job.number) < (best[0].arrival_s, best[0].number))
                ):
                    best = (job, pool)
        return best
