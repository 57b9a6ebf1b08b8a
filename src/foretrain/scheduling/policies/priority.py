"""Orders jobs by a key and keeps the best running: shortest job or remaining time first, an oracle.
Waiting jobs are kept in one heap per request (GPUs, where they may be, share): of jobs with the same request
only the best can be next, so a decision looks at as many jobs as there are requests, however long the queue
is.
"""

from __future__ import annotations

import heapq
from abc import abstractmethod

from foretrain.scheduling.policies.base import Policy
from foretrain.scheduling.simulator import Active, Simulation

Key = tuple[float, ...]
Request = tuple[int, tuple[int, ...], float]

_SLACK_S = 1e-6
"""A job must be better by more than this to take another one's GPUs, so that rounding never does."""


def request(job: Active) -> Request:
    """What a job asks for; jobs that ask for the same fit or don't fit alike."""
    return job.spec.gpus, tuple(pool.number for pool in job.pools), job.spec.share


class Greedy(Policy):
    """The best waiting job that fits, again and again; running jobs are left alone."""

    def __init__(self) -> None:
        self._heaps: dict[Request, list[tuple[Key, int, Active]]] = {}

    @abstractmethod
    def key(self, cluster: Simulation, job: Active) -> Key:
        """Of a job that begins to wait; the least is best."""

    def waits(self, cluster: Simulation, job: Active) -> None:
        heapq.heappush(self._heaps.setdefault(request(job), []), (self.key(cluster, job), job.number, job))

    def decide(self, cluster: Simulation) -> None:
        again = True
        while again:
            again = False
            heads = self._heads(cluster)
            heapq.heapify(heads)
            while heads and not again:
                key, _, job, wanted = heapq.heappop(heads)
                if not cluster.fits(job):
                    again = self._make_room(cluster, job, key)
                    if not again:
                        continue
                heap = self._heaps[wanted]
                heapq.heappop(heap)
                self._start(cluster, job)
                if heap:
                    heapq.heappush(heads, (*heap[0], wanted))

    def _heads(self, cluster: Simulation) -> list[tuple[Key, int, Active, Request]]:
        """The best job of each request, but for those that plainly cannot start now."""
        room = max(pool.free for pool in cluster.machines.pools)
        worst, sharing = self._worst_key(cluster), cluster.settings.sharing

        def may_start(gpus: int, key: Key) -> bool:
            return gpus <= room or sharing or (worst is not None and self.beats(cluster, key, worst))

        heaps = self._heaps.items()
        return [(*heap[0], wanted) for wanted, heap in heaps if heap and may_start(wanted[0], heap[0][0])]

    def _worst_key(self, cluster: Simulation) -> Key | None:
        """Of the running job that would be taken off first, if any may be."""
        return None

    def beats(self, cluster: Simulation, waiting: Key, running: Key) -> bool:
        """Whether a waiting job is better than a running one."""
        return False

    def _start(self, cluster: Simulation, job: Active) -> None:
        cluster.start(job)

    def _make_room(self, cluster: Simulation, job: Active, key: Key) -> bool:
        """Whether GPUs for a job were freed."""
        return False


class Preemptive(Greedy):
    """The best jobs run: a waiting job takes the GPUs of worse running ones when that makes room for it."""

    def __init__(self) -> None:
        super().__init__()
        self._worst: list[tuple[Key, int, int, Active]] = []

    @abstractmethod
    def running_key(self, cluster: Simulation, job: Active) -> Key:
        """Of a job that runs: the least is taken off first.

        It must hold until the job stops or ``rank`` is called again.
        """

    def rank(self, cluster: Simulation, job: Active) -> None:
        """File a running job under its key."""
        heapq.heappush(self._worst, (self.running_key(cluster, job), -job.number, job.version, job))

    def _start(self, cluster: Simulation, job: Active) -> None:
        cluster.start(job)
        self.rank(cluster, job)

    def _worst_key(self, cluster: Simulation) -> Key | None:
        while self._worst and not self._current(cluster, self._worst[0]):
            heapq.heappop(self._worst)
        return self._worst[0][0] if self._worst else None

    def _make_room(self, cluster: Simulation, job: Active, key: Key) -> bool:
        victims = self._victims(cluster, job, key)
        for victim in victims:
            cluster.preempt(victim)
        return bool(victims)

    def _victims(self, cluster: Simulation, job: Active, key: Key) -> list[Active]:
        """The worst running jobs whose GPUs, with the free ones of their pool, suffice; never better jobs."""
        pools = {pool.number: pool.free for pool in cluster.pools_for(job)}
        seen: list[tuple[Key, int, int, Active]] = []
        taken: dict[int, list[Active]] = {}
        while self._worst:
            entry = self._worst[0]
            victim = entry[3]
            if not self._current(cluster, entry):
                heapq.heappop(self._worst)
                continue
            if not self.beats(cluster, key, entry[0]):
                break
            seen.append(heapq.heappop(self._worst))
            assert victim.allocation is not None
            pool = victim.allocation.pool
            if pool not in pools:
                continue
            pools[pool] += victim.allocation.gpus
            taken.setdefault(pool, []).append(victim)
            if pools[pool] >= job.gpus:
                for other in seen:
                    if other[3] not in taken[pool]:
                        heapq.heappush(self._worst, other)
                return taken[pool]
        for entry in seen:
            heapq.heappush(self._worst, entry)
        return []

    def _current(self, cluster: Simulation, entry: tuple[Key, int, int, Active]) -> bool:
        """Whether an entry still holds: the job runs on, under this key."""
        return entry[3].is_running and entry[3].version == entry[2]


class ShortestJobFirst(Greedy):
    """By estimated duration; jobs that run are left alone."""

    name = "sjf"

    def key(self, cluster: Simulation, job: Active) -> Key:
        return (cluster.remaining_s(job), job.arrival_s)


class ShortestRemainingTimeFirst(Preemptive):
    """By estimated remaining time, with preemption.

    With exact estimates it minimises the mean completion time on one machine.
    """

    name = "srtf"

    def key(self, cluster: Simulation, job: Active) -> Key:
        return (self._remaining_s(cluster, job), job.arrival_s)

    def running_key(self, cluster: Simulation, job: Active) -> Key:
        return (-(cluster.now + self._remaining_s(cluster, job)), -job.arrival_s)

    def beats(self, cluster: Simulation, waiting: Key, running: Key) -> bool:
        return waiting[0] < -running[0] - cluster.now - _SLACK_S

    def _remaining_s(self, cluster: Simulation, job: Active) -> float:
        return cluster.remaining_nominal_s(job)


class Oracle(ShortestRemainingTimeFirst):
    """Shortest remaining time first, told the truth: what perfect predictions would give."""

    name = "oracle"

    def _remaining_s(self, cluster: Simulation, job: Active) -> float:
        return cluster.remaining_nominal_s(job, truly=True)
