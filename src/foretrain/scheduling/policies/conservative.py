"""Reserves GPUs for every waiting job and lets later ones go ahead only where they delay none of them."""

from __future__ import annotations

import math
from bisect import bisect_right

from foretrain.scheduling.machines import Pool
from foretrain.scheduling.policies.base import Policy
from foretrain.scheduling.simulator import Simulation

_SLACK_S = 1e-6


class FreeProfile:
    """Free GPUs of a pool from now on: steps of a time and the count that holds from then.

    >>> profile = FreeProfile(0.0, 2, [(10.0, 2)])
    >>> profile.earliest(3, 5.0)
    10.0
    >>> profile.reserve(0.0, 4.0, 2)
    >>> profile.earliest(1, 5.0)
    4.0
    """

    def __init__(self, now_s: float, free: int, ends: list[tuple[float, int]]) -> None:
        self._times, self._free = [now_s], [free]
        for end_s, gpus in sorted(ends):
            free += gpus
            if end_s <= self._times[-1]:
                self._free[-1] = free
            else:
                self._times.append(end_s)
                self._free.append(free)

    def earliest(self, gpus: int, time_s: float) -> float:
        """When so many GPUs are free for so long."""
        place = 0
        while place < len(self._times):
            if self._free[place] < gpus:
                place += 1
                continue
            end_s = self._times[place] + time_s - _SLACK_S
            short = next(
                (
                    later
                    for later in range(place + 1, len(self._times))
                    if self._times[later] < end_s and self._free[later] < gpus
                ),
                None,
            )
            if short is None:
                return self._times[place]
            place = short + 1
        return math.inf

    def reserve(self, start_s: float, end_s: float, gpus: int) -> None:
        first, last = self._split(start_s), self._split(end_s)
        for place in range(first, last):
            self._free[place] -= gpus

    def _split(self, time_s: float) -> int:
        """The step that begins at a time, made where there is none."""
        place = bisect_right(self._times, time_s) - 1
        if self._times[place] == time_s:
            return place
        self._times.insert(place + 1, time_s)
        self._free.insert(place + 1, self._free[place])
        return place + 1


class ConservativeBackfill(Policy):
    """Reservations for all, made anew in order of arrival whenever something changes."""

    name = "conservative"

    def decide(self, cluster: Simulation) -> None:
        if not cluster.waiting or not cluster.machines.free:
            return
        profiles = {pool.number: self._profile(cluster, pool) for pool in cluster.machines.pools}
        for job in sorted(cluster.waiting.values(), key=lambda job: (job.arrival_s, job.number)):
            time_s = max(cluster.remaining_s(job), _SLACK_S)
            options = [
                (profiles[pool.number].earliest(job.gpus, time_s), pool.number)
                for pool in cluster.pools_for(job)
            ]
            start_s, number = min(options)
            if start_s <= cluster.now:
                cluster.start(job, pool=cluster.machines.pools[number])
                if not cluster.machines.free:
                    return
            if start_s < math.inf:
                profiles[number].reserve(start_s, start_s + time_s, job.gpus)

    def _profile(self, cluster: Simulation, pool: Pool) -> FreeProfile:
        ends = [
            (max(cluster.now + cluster.remaining_s(job), cluster.now + _SLACK_S), job.allocation.gpus)
            for job in cluster.running.values()
            if job.allocation is not None and job.allocation.pool == pool.number
        ]
        return FreeProfile(cluster.now, pool.free, ends)
