"""Plans who holds GPUs now and later, pool by pool, before anything is started or taken off."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Collection, Sequence
from typing import NamedTuple

from foretrain.scheduling.machines import Pool
from foretrain.scheduling.policies.moment import carry_out
from foretrain.scheduling.policies.outlook import Hold, Outlook
from foretrain.scheduling.simulator import Active, Simulation

_SLACK_S = 1e-6


class Room(NamedTuple):
    """A pool where a job can start at once if these give way."""

    pool: int
    victims: Sequence[Active]


class GpuPlan:
    """What is planned at one moment: jobs that hold GPUs, and those that are promised some for later."""

    def __init__(self, cluster: Simulation, kept: Sequence[Sequence[Hold]]) -> None:
        """``kept`` are the reservations of each pool, by its number."""
        self._cluster = cluster
        now_s, pools = cluster.now, cluster.machines.pools
        self._kept = [[each for each in of_pool if each.end_s > now_s] for of_pool in kept]
        self._sizes = [pool.free for pool in pools]
        self._free = [pool.free for pool in pools]
        self._holds: list[dict[Active, Hold]] = [{} for _ in pools]
        self._places: dict[Active, Pool] = {}
        self.held: dict[str, int] = {}
        """GPUs that each group holds."""
        for job in cluster.running.values():
            assert job.allocation is not None
            number, gpus, group = job.allocation.pool, job.allocation.gpus, job.spec.group
            end_s = max(_end_s(cluster, job), now_s + _SLACK_S)
            self._holds[number][job] = Hold(now_s, end_s, gpus, group)
            self._places[job] = pools[number]
            self._sizes[number] += gpus
            self.held[group] = self.held.get(group, 0) + gpus
        self._lowest = min((job.spec.priority for job in self._places), default=math.inf)
        """No class of those that hold GPUs is below it."""
        self._promises: list[list[tuple[Active, Hold]]] = [[] for _ in pools]
        """Those that some of the outlooks do not count on yet."""
        self._outlooks: list[dict[float, tuple[Outlook, int]]] = [{} for _ in pools]
        """Of each pool, by the class below which jobs give way, with the promises that it counts on."""

    @property
    def free(self) -> int:
        """GPUs that nobody holds."""
        return sum(self._free)

    def earliest(self, job: Active) -> tuple[float, int]:
        """When a job can start, and in which pool."""
        time_s = _length_s(self._cluster, job)
        return min(
            (self._outlook(pool.number).earliest(job.spec.group, job.gpus, time_s), pool.number)
            for pool in self._cluster.pools_for(job)
        )

    def promise(self, job: Active, number: int, start_s: float) -> None:
        """Give a job GPUs of a pool from some time on."""
        hold = Hold(start_s, start_s + _length_s(self._cluster, job), job.gpus, job.spec.group)
        self._holds[number][job] = hold
        self._promises[number].append((job, hold))
        if start_s <= self._cluster.now:
            self._places[job] = self._cluster.machines.pools[number]
            self._lowest = min(self._lowest, job.spec.priority)
            self._count(number, hold.group, hold.gpus)

    def take_off(self, job: Active) -> None:
        """Let a job that holds GPUs hold none."""
        number = self._places.pop(job).number
        hold = self._holds[number].pop(job)
        self._count(number, hold.group, -hold.gpus)
        self._promises[number].clear()
        self._outlooks[number].clear()

    def room_for(self, job: Active) -> Room | None:
        """Where a job can start at once, for its whole length and beside all that is promised, if jobs of
        lower classes give way: the youngest of the lowest first, and none that need not."""
        if job.spec.priority <= self._lowest:
            return None
        time_s = _length_s(self._cluster, job)
        for pool in self._cluster.pools_for(job):
            outlook = self._outlook(pool.number, job.spec.priority)
            if outlook.earliest(job.spec.group, job.gpus, time_s) <= self._cluster.now:
                return Room(pool.number, self._victims(job, pool, time_s))
        return None

    def carry_out(self) -> None:
        """Start and take off what the plan says."""
        carry_out(self._cluster, self._places)

    def _victims(self, job: Active, pool: Pool, time_s: float) -> list[Active]:
        """As few jobs of lower classes as make room for one, where all of them do."""
        lower = [other for other in self._places if self._gives_way(other, pool, job.spec.priority)]
        lower.sort(key=lambda other: (other.spec.priority, -self._since_s(other), -other.number))

        def suffice(victims: list[Active]) -> bool:
            outlook = self._without(pool.number, victims)
            return outlook.earliest(job.spec.group, job.gpus, time_s) <= self._cluster.now

        count = bisect_left(range(len(lower)), True, key=lambda count: suffice(lower[:count]))
        victims = lower[:count]
        for victim in reversed(victims):
            fewer = [other for other in victims if other is not victim]
            if suffice(fewer):
                victims = fewer
        return victims

    def _outlook(self, number: int, priority: float = -math.inf) -> Outlook:
        """Of a pool, where the jobs there whose class is below ``priority`` give way."""
        promises, pool = self._promises[number], self._cluster.machines.pools[number]
        if priority not in self._outlooks[number]:
            lower = {job for job in self._places if self._gives_way(job, pool, priority)}
            outlook, counted = self._without(number, lower), len(promises)
        else:
            outlook, counted = self._outlooks[number][priority]
        for job, hold in promises[counted:]:
            if not self._gives_way(job, pool, priority):
                outlook.hold(hold)
        self._outlooks[number][priority] = outlook, len(promises)
        return outlook

    def _without(self, number: int, victims: Collection[Active]) -> Outlook:
        """Of a pool, where these give way."""
        holds = self._holds[number]
        left = [hold for job, hold in holds.items() if job not in victims] if victims else holds.values()
        return Outlook(self._cluster.now, self._sizes[number], left, self._kept[number])

    def _gives_way(self, job: Active, pool: Pool, priority: float) -> bool:
        return job.spec.priority < priority and self._places.get(job) is pool

    def _since_s(self, job: Active) -> float:
        return job.since_s if job.is_running else self._cluster.now

    def _count(self, number: int, group: str, gpus: int) -> None:
        self._free[number] -= gpus
        self.held[group] = self.held.get(group, 0) + gpus


def _length_s(cluster: Simulation, job: Active) -> float:
    """For how long a job that starts holds its GPUs at most."""
    limit_s = _left_of_limit_s(cluster, job)
    return max(cluster.remaining_s(job) if limit_s is None else limit_s, _SLACK_S)


def _end_s(cluster: Simulation, job: Active) -> float:
    """When a job that runs gives its GPUs back at the latest."""
    limit_s = _left_of_limit_s(cluster, job)
    return cluster.now + (cluster.expected_s(job) if limit_s is None else limit_s)


def _left_of_limit_s(cluster: Simulation, job: Active) -> float | None:
    """What a job has not run of its limit; None where it has none."""
    if job.spec.limit_s is None:
        return None
    return job.spec.limit_s - job.ran_s - (cluster.now - job.since_s if job.is_running else 0.0)
