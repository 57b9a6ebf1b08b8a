"""Finds the GPUs that a job would get: free ones where the placement says, or room on one in use."""

from __future__ import annotations

from collections.abc import Sequence

from foretrain.scheduling.active import Active
from foretrain.scheduling.machines import FULL, MIXED, Allocation, Machines, Pool
from foretrain.scheduling.placement import Placement
from foretrain.scheduling.rates import Rates
from foretrain.scheduling.settings import Settings
from foretrain.scheduling.sharing.mates import Mates


class Places:
    """Where jobs would run now; nothing is taken yet."""

    def __init__(
        self, machines: Machines, rates: Rates, placement: Placement, settings: Settings, mates: Mates | None
    ) -> None:
        self._machines, self._rates = machines, rates
        self._choose, self._pick = placement.choose, machines.pick
        self._sharing, self._mates = settings.sharing, mates
        self._shares = settings.sharing or mates is not None
        self._mixed = settings.mixed_gangs

    def pool_for(self, job: Active, gpus: int) -> Pool | None:
        """The fastest pool with enough free GPUs; None when there is none."""
        pools = job.pools
        if len(pools) == 1:
            pool = pools[0]
            if pool.free >= gpus:
                runs = gpus == job.gpus or self._rates.packed(job.spec, pool, gpus) > 0
                return pool if runs else None
            return pool if self._shares and self._sharable(job, pool) else None
        best, best_rate = None, 0.0
        for pool in pools:
            if pool.free >= gpus or self._sharable(job, pool):
                rate = self._rates.packed(job.spec, pool, gpus)
                if rate > best_rate:
                    best, best_rate = pool, rate
        return best

    def fastest(self, job: Active, left: Sequence[int]) -> Pool | None:
        """The fastest pool where a job's GPUs would go into what is ``left`` of each, by its number."""
        gpus, pools = job.gpus, job.pools
        if len(pools) == 1:
            return pools[0] if left[pools[0].number] >= gpus else None
        fitting = [pool for pool in pools if left[pool.number] >= gpus]
        return max(fitting, key=lambda pool: self._rates.packed(job.spec, pool, gpus), default=None)

    def fits(self, job: Active, gpus: int) -> bool:
        """Whether there is room for a job."""
        return self.pool_for(job, gpus) is not None or (self._mixed and self._across(job, gpus) is not None)

    def find(self, job: Active, gpus: int, pool: Pool | None) -> Allocation | None:
        """The GPUs that a job would get, of a pool where one is given; None where there are too few."""
        if pool is not None and pool.free >= gpus and not self._shares:
            return self._pick(pool.number, self._choose(self._machines, pool, gpus))
        pool = pool or self.pool_for(job, gpus)
        if pool is None and self._mixed:
            return self._across(job, gpus)
        if pool is None or (pool.free < gpus and not self._sharable(job, pool)):
            return None
        share = self._share(job)
        if share < FULL:
            place = self._place_to_share(job, pool, share)
            if place is not None and (self._mates is None or not pool.free):
                return Allocation(pool.number, ((place[0], 1 << place[1]),), 1, share)
        picked = self._free(pool, gpus)
        return picked if share == FULL else Allocation(pool.number, picked.parts, 1, share)

    def _across(self, job: Active, gpus: int) -> Allocation | None:
        """GPUs of the fastest kinds that have enough together. They all go at the pace of the slowest, so
        that one gives what it has, and the faster ones the rest."""
        chosen, room = [], 0
        for pool in sorted(job.pools, key=lambda pool: -self._rates.packed(job.spec, pool, gpus)):
            if room < gpus and pool.free:
                chosen.append(pool)
                room += pool.free
        if room < gpus:
            return None
        parts: list[tuple[int, int]] = []
        left = gpus
        for pool in reversed(chosen):
            count = min(pool.free, left)
            if count:
                parts += self._free(pool, count).parts
                left -= count
        allocation = Allocation(MIXED, tuple(parts), gpus)
        return allocation if self._rates.on(job.spec, allocation) > 0 else None

    def _free(self, pool: Pool, gpus: int) -> Allocation:
        return self._pick(pool.number, self._choose(self._machines, pool, gpus))

    def _share(self, job: Active) -> int:
        if self._mates is not None:
            return FULL // 2 if job.spec.most == 1 else FULL
        return max(1, round(job.spec.share * FULL)) if self._sharing and job.spec.share < 1 else FULL

    def _sharable(self, job: Active, pool: Pool) -> bool:
        return (share := self._share(job)) < FULL and self._place_to_share(job, pool, share) is not None

    def _place_to_share(self, job: Active, pool: Pool, share: int) -> tuple[int, int] | None:
        """A GPU in use that has room for a job; where pairs are told apart, beside whom it goes best."""
        if self._mates is not None:
            return self._mates.place_for(job, pool)
        return self._machines.sharable(pool.number, share)
