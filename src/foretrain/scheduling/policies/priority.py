"""Orders jobs by a key and keeps the best running: shortest job or remaining time first, an oracle.

Waiting jobs are kept in one heap per request (GPUs, where they may be, share): of jobs with the same request
only the best can be next, so a decision looks at as many jobs as there are requests, however long the queue
is.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Sequence
from heapq import heapify, heappop, heappush
from typing import ClassVar

from foretrain.scheduling.machines import Pool
from foretrain.scheduling.policies.base import Policy
from foretrain.scheduling.simulator import Active, Simulation

Key = tuple[float, ...]
Request = tuple[int, tuple[int, ...], float, str]
"""GPUs, where they may be, the share of each, and the kind of job where that decides who may share."""
Waiting = tuple[float, Key, int, Active]
"""A waiting job by its key and number; the key's first figure stands before it, since comparing two floats is
faster than two tuples."""
Head = tuple[float, Key, int, Active, Request]
Ranked = tuple[float, Key, int, int, Active]
"""A running job in the same way, with the version for which that holds."""

_SLACK_S = 1e-6
"""A job must be better by more than this to take another one's GPUs, so that rounding never does."""
_LEAST_RANKED = 1024
"""Entries of the ranking below which those of jobs that stopped are not thrown out."""


def request(job: Active, kind: str = "") -> Request:
    """What a job asks for; jobs that ask for the same fit or don't fit alike."""
    if len(job.pools) == 1:
        return job.gpus, (job.pools[0].number,), job.spec.share, kind
    return job.gpus, tuple(pool.number for pool in job.pools), job.spec.share, kind


class Greedy(Policy):
    """The best waiting job that fits, again and again; running jobs are left alone."""

    def __init__(self) -> None:
        self._heaps: dict[Request, list[Waiting]] = {}

    @abstractmethod
    def key(self, cluster: Simulation, job: Active) -> Key:
        """Of a job that begins to wait; the least is best."""

    def waits(self, cluster: Simulation, job: Active) -> None:
        wanted = request(job, "" if cluster.settings.pairs is None else job.spec.kind)
        key = self.key(cluster, job)
        heappush(self._heaps.setdefault(wanted, []), (key[0], key, job.number, job))

    def decide(self, cluster: Simulation) -> None:
        heads = self._heads(cluster)
        heapify(heads)
        while heads:
            *_, job, wanted = heappop(heads)
            if cluster.fits(job):
                heap = self._heaps[wanted]
                heappop(heap)
                cluster.start(job)
                if heap:
                    heappush(heads, (*heap[0], wanted))

    def _heads(self, cluster: Simulation) -> list[Head]:
        """The best job of each request, but for those that plainly cannot start now."""
        room = max(pool.free for pool in cluster.machines.pools)
        if cluster.settings.sharing or cluster.settings.pairs is not None:
            return [(*heap[0], wanted) for wanted, heap in self._heaps.items() if heap]
        if cluster.settings.mixed_gangs:
            room = cluster.machines.free
        heaps = self._heaps.items()
        return [(*heap[0], wanted) for wanted, heap in heaps if heap and wanted[0] <= room]


class Preemptive(Greedy):
    """The best jobs run: a waiting job takes the GPUs of worse running ones when that makes room for it.

    A decision is planned as a whole, and only then are jobs taken off and started: none is taken off that
    would be started again at the same moment.
    """

    def __init__(self) -> None:
        super().__init__()
        self._worst: list[Ranked] = []
        self._most_ranked = _LEAST_RANKED
        self._acting = False

    @abstractmethod
    def running_key(self, cluster: Simulation, job: Active) -> Key:
        """Of a job that runs: the least is taken off first. It must hold until the job stops."""

    @abstractmethod
    def beats(self, cluster: Simulation, waiting: Key, running: Key) -> bool:
        """Whether a waiting job is better than a running one."""

    def waits(self, cluster: Simulation, job: Active) -> None:
        if self._acting:
            return  # planned as one that waits already
        key = self.key(cluster, job)
        heappush(self._heaps.setdefault(request(job), []), (key[0], key, job.number, job))

    def decide(self, cluster: Simulation) -> None:
        heads = self._candidates(cluster)
        if not heads:
            return
        heapify(heads)
        at_once = [head[4] for head in heads]
        left, beats, heaps = [pool.free for pool in cluster.machines.pools], self.beats, self._heaps
        starts: list[tuple[Active, Pool]] = []
        victims: dict[int, Active] = {}
        others: list[Head] | None = None
        while heads:
            _, key, number, job, wanted = heappop(heads)
            heap = heaps[wanted]
            if not heap or heap[0][3] is not job:
                continue  # planned already, or behind one that gave way
            pool, made_room = self._place(cluster, job, left), False
            if pool is None:
                worst = self._worst_key()
                if worst is None or not beats(cluster, key, worst):
                    continue
                found = self._victims(cluster, job, key, left)
                if found is None:
                    continue
                pool, gives_way = found
                if others is None:  # they need what is left over of those who give way
                    others = [(*h[0], w) for w, h in heaps.items() if h and w not in at_once]
                for victim in gives_way:
                    self._give_way(cluster, victim, left, others)
                    victims[victim.number] = victim
                made_room = True
            heappop(heap)
            left[pool.number] -= job.gpus
            if made_room and others and (room := max(left)):
                for other in others:
                    if other[4][0] <= room:
                        heappush(heads, other)
                others = [other for other in others if other[4][0] > room]
            if job.allocation is not None and job.allocation.pool == pool.number:
                del victims[number]
                self._rank(cluster, job)
            else:
                starts.append((job, pool))
            if heap:
                heappush(heads, (*heap[0], wanted))
        self._act(cluster, victims.values(), starts)

    def _candidates(self, cluster: Simulation) -> list[Head]:
        """The best job of each request, but for those that cannot start as things stand."""
        pools = cluster.machines.pools
        room = pools[0].free if len(pools) == 1 else max(pool.free for pool in pools)
        worst, beats = self._worst_key(), self.beats
        return [
            (*heap[0], wanted)
            for wanted, heap in self._heaps.items()
            if heap and (wanted[0] <= room or (worst is not None and beats(cluster, heap[0][1], worst)))
        ]

    def _worst_key(self) -> Key | None:
        """Of the running job that would be taken off first."""
        ranked = self._worst
        while ranked:
            _, key, _, version, job = ranked[0]
            if job.version == version and job.allocation is not None:
                return key
            heappop(ranked)
        return None

    def _place(self, cluster: Simulation, job: Active, left: list[int]) -> Pool | None:
        """Where a job has room; one that was to give way stays where it is, if it can."""
        held = job.allocation
        if held is not None and left[held.pool] >= job.gpus:
            return cluster.machines.pools[held.pool]
        pools = job.pools
        if len(pools) == 1:
            return pools[0] if left[pools[0].number] >= job.gpus else None
        return cluster.fastest(job, left)

    def _give_way(self, cluster: Simulation, victim: Active, left: list[int], others: list[Head]) -> None:
        """Plan a running job as one that waits."""
        assert victim.allocation is not None
        left[victim.allocation.pool] += victim.allocation.gpus
        wanted = request(victim)
        heap = self._heaps.setdefault(wanted, [])
        key = self.key(cluster, victim)
        entry = (key[0], key, victim.number, victim)
        heappush(heap, entry)
        if heap[0] is entry:
            others.append((*entry, wanted))

    def _victims(
        self, cluster: Simulation, job: Active, key: Key, left: list[int]
    ) -> tuple[Pool, list[Active]] | None:
        """The worst running jobs whose GPUs, with those left of their pool, suffice; never better jobs."""
        if len(cluster.machines.pools) == 1:
            return self._victims_of_one_pool(cluster, job, key, left)
        room = {pool.number: left[pool.number] for pool in job.pools}
        taken: dict[int, list[Ranked]] = {number: [] for number in room}
        passed: list[Ranked] = []
        enough = None
        ranked, beats = self._worst, self.beats
        while ranked and enough is None:
            entry = ranked[0]
            _, running_key, _, version, other = entry
            held = other.allocation
            if held is not None and other.version == version:
                if not beats(cluster, key, running_key):
                    break
                if held.pool in room:
                    room[held.pool] += held.gpus
                    taken[held.pool].append(entry)
                    if room[held.pool] >= job.gpus:
                        enough = held.pool
                else:
                    passed.append(entry)
            heappop(ranked)
        for entry in passed:
            heappush(ranked, entry)
        for pool, entries in taken.items():
            if pool != enough:
                for entry in entries:
                    heappush(ranked, entry)
        if enough is None:
            return None
        return cluster.machines.pools[enough], [entry[4] for entry in taken[enough]]

    def _victims_of_one_pool(
        self, cluster: Simulation, job: Active, key: Key, left: list[int]
    ) -> tuple[Pool, list[Active]] | None:
        """The same where all jobs run in one pool, so that nobody is passed over."""
        room, gpus, taken = left[0], job.gpus, []
        ranked, beats = self._worst, self.beats
        while ranked:
            entry = ranked[0]
            other = entry[4]
            held = other.allocation
            if held is not None and other.version == entry[3]:
                if not beats(cluster, key, entry[1]):
                    break
                taken.append(entry)
                room += held.gpus
                if room >= gpus:
                    heappop(ranked)
                    return cluster.machines.pools[0], [entry[4] for entry in taken]
            heappop(ranked)
        for entry in taken:
            heappush(ranked, entry)
        return None

    def _act(
        self, cluster: Simulation, victims: Iterable[Active], starts: Sequence[tuple[Active, Pool]]
    ) -> None:
        self._acting = True
        for victim in victims:
            cluster.preempt(victim)
        self._acting = False
        for job, pool in starts:
            cluster.start(job, pool=pool)
            self._rank(cluster, job)

    def moved(self, cluster: Simulation, job: Active) -> None:
        self._rank(cluster, job)

    def _rank(self, cluster: Simulation, job: Active) -> None:
        """File a running job under its key."""
        ranked = self._worst
        if len(ranked) > self._most_ranked:
            ranked[:] = [entry for entry in ranked if _current(entry)]
            heapify(ranked)
            self._most_ranked = max(_LEAST_RANKED, 4 * len(ranked))
        key = self.running_key(cluster, job)
        heappush(ranked, (key[0], key, -job.number, job.version, job))


def _current(entry: Ranked) -> bool:
    """Whether an entry still holds: the job runs on, under this key."""
    return entry[4].version == entry[3] and entry[4].allocation is not None


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
    _truly: ClassVar[bool] = False
    """Whether it is told the truth."""

    def key(self, cluster: Simulation, job: Active) -> Key:
        return (cluster.remaining_nominal_s(job, truly=self._truly), job.arrival_s)

    def running_key(self, cluster: Simulation, job: Active) -> Key:
        return (-(cluster.now + cluster.remaining_nominal_s(job, truly=self._truly)), -job.arrival_s)

    def beats(self, cluster: Simulation, waiting: Key, running: Key) -> bool:
        return waiting[0] < -running[0] - cluster.now - _SLACK_S


class Oracle(ShortestRemainingTimeFirst):
    """Shortest remaining time first, told the truth: what perfect predictions would give."""

    name = "oracle"
    _truly = True
