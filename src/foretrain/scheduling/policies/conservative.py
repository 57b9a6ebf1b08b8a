"""Reserves GPUs for every waiting job and lets later ones go ahead only where they delay none of them."""

from __future__ import annotations

import heapq
import math

from foretrain.scheduling.machines import Pool
from foretrain.scheduling.policies.base import Policy
from foretrain.scheduling.policies.profile import FreeProfile
from foretrain.scheduling.simulator import Active, Simulation

_SLACK_S = 1e-6
_QUIET = 10
"""Decisions without a surprise after which all reservations are worth keeping again."""


class ConservativeBackfill(Policy):
    """Reservations for all, in order of arrival.

    As long as jobs end when they should, reservations hold, and a job that arrives gets the first that delays
    nobody. When one ends earlier or later than estimated, or fails, all are made anew at every decision, as
    far as jobs might start at once, until nothing unexpected happened for a while.
    """

    name = "conservative"

    def __init__(self) -> None:
        self._profiles: list[FreeProfile] = []
        self._arrived: list[Active] = []
        self._reserved: list[tuple[float, float, int, Active, Pool]] = []
        """A heap: start, arrival, number, job and pool."""
        self._ends: dict[int, float] = {}
        """When jobs that run should end."""
        self._quiet: int | None = None
        """Decisions since the last surprise, while reservations are not kept."""

    def begin(self, cluster: Simulation) -> None:
        self._profiles = [FreeProfile(cluster.now, pool.free, []) for pool in cluster.machines.pools]

    def waits(self, cluster: Simulation, job: Active) -> None:
        if self._ends.pop(job.number, None) is not None:
            self._quiet = 0
        self._arrived.append(job)

    def finished(self, cluster: Simulation, job: Active) -> None:
        if abs(self._ends.pop(job.number) - cluster.now) > _SLACK_S:
            self._quiet = 0

    def moved(self, cluster: Simulation, job: Active) -> None:
        self._ends[job.number] = cluster.now + max(cluster.remaining_s(job), _SLACK_S)
        self._quiet = 0

    def decide(self, cluster: Simulation) -> None:
        if self._quiet is None and not self._as_planned(cluster):
            self._quiet = 0
        if self._quiet is None:
            for job in self._arrived:
                self._reserve(cluster, job)
            self._arrived.clear()
            self._start_due(cluster)
        elif self._quiet < _QUIET:
            self._quiet += 1
            self._anew(cluster, only_now=True)
        else:
            self._quiet = None
            self._anew(cluster, only_now=False)
            self._start_due(cluster)

    def _as_planned(self, cluster: Simulation) -> bool:
        """Whether as many GPUs are free as reservations have it: those of jobs due now are free still."""
        free = [pool.free for pool in cluster.machines.pools]
        soon = cluster.now + _SLACK_S
        stack = [0] if self._reserved else []
        while stack:  # the part of the heap that is due now
            place = stack.pop()
            start_s, _, _, job, pool = self._reserved[place]
            if start_s <= soon:
                free[pool.number] -= job.gpus
                stack += [child for child in (2 * place + 1, 2 * place + 2) if child < len(self._reserved)]
        for profile in self._profiles:
            profile.forget(cluster.now)
        return all(profile.at(soon) == rest for profile, rest in zip(self._profiles, free, strict=True))

    def _reserve(self, cluster: Simulation, job: Active) -> float:
        """When a job may start, which is kept free for it."""
        options = []
        for pool in job.pools:
            time_s = cluster.remaining_s(job)
            slower = 1.0
            if len(job.pools) > 1:
                slower = job.nominal_rate / cluster.rate_in(job, pool, job.gpus)
            time_s = max(time_s * slower, _SLACK_S)
            start_s = self._profiles[pool.number].earliest(job.gpus, time_s)
            options.append((start_s, slower, pool.number, time_s))
        start_s, _, number, time_s = min(options)
        if start_s < math.inf:
            self._profiles[number].reserve(start_s, start_s + time_s, job.gpus)
            pool = cluster.machines.pools[number]
            heapq.heappush(self._reserved, (start_s, job.arrival_s, job.number, job, pool))
        return start_s

    def _start_due(self, cluster: Simulation) -> None:
        soon = cluster.now + _SLACK_S
        while self._reserved and self._reserved[0][0] <= soon:
            _, _, _, job, pool = heapq.heappop(self._reserved)
            if pool.free < job.gpus:  # by less than the slack too early
                self._quiet = 0
                self._arrived.append(job)
                continue
            self._start(cluster, job, pool)

    def _start(self, cluster: Simulation, job: Active, pool: Pool) -> None:
        cluster.start(job, pool=pool)
        self._ends[job.number] = cluster.now + max(cluster.remaining_s(job), _SLACK_S)

    def _anew(self, cluster: Simulation, *, only_now: bool) -> None:
        """All reservations again; or only as far as jobs might start now, and then they are started."""
        self._arrived.clear()
        self._reserved.clear()
        if not cluster.waiting or (only_now and not cluster.machines.free):
            return
        ends: list[list[tuple[float, int]]] = [[] for _ in cluster.machines.pools]
        for job in cluster.running.values():
            assert job.allocation is not None
            end_s = max(cluster.now + cluster.expected_s(job), cluster.now + _SLACK_S)
            ends[job.allocation.pool].append((end_s, job.allocation.gpus))
        self._profiles = [
            FreeProfile(cluster.now, pool.free, ends[pool.number]) for pool in cluster.machines.pools
        ]
        waiting = sorted(cluster.waiting.values(), key=lambda job: (job.arrival_s, job.number))
        narrowest = [*waiting]
        for place in range(len(waiting) - 2, -1, -1):
            narrowest[place] = min(waiting[place], narrowest[place + 1], key=lambda job: job.gpus)
        for place, job in enumerate(waiting):
            if only_now and narrowest[place].gpus > cluster.machines.free:
                return
            start_s = self._reserve(cluster, job)
            if only_now and start_s <= cluster.now:
                _, _, _, _, pool = heapq.heappop(self._reserved)
                self._start(cluster, job, pool)
