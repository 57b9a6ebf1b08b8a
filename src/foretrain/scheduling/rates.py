"""Tells how fast every job runs where, and where it can run at all; each answer is worked out once."""

from __future__ import annotations

from foretrain.errors import InputError
from foretrain.scheduling.jobs import TraceJob
from foretrain.scheduling.machines import MIXED, Allocation, Machines, Pool, packed
from foretrain.scheduling.speeds import Speeds

_Request = tuple[str | None, str, int, int, str, float | None]
"""What tells where a job can run: device, kind, GPUs asked for and at least, partition, memory."""


class Rates:
    """Work per second of jobs in the pools of a cluster; ``mixed`` gangs may span several."""

    def __init__(self, speeds: Speeds, machines: Machines, *, mixed: bool = False) -> None:
        self._speeds, self._machines, self._mixed = speeds, machines, mixed
        self._pools = machines.pools
        self._rates: dict[tuple[str, int, str, tuple[int, ...], float | None], float] = {}
        self._usable: dict[_Request, tuple[tuple[Pool, ...], float]] = {}
        self._sizes: dict[tuple[object, ...], tuple[int, ...]] = {}

    def work(self, job: TraceJob) -> float:
        return self._speeds.work(job)

    def time_s(self, job: TraceJob) -> float:
        """What a job takes on the GPUs it asks for, by the trace or the forecast."""
        return self.work(job) / self.usable_by(job)[1]

    def checkpoint_write_s(self, job: TraceJob) -> float:
        return self._speeds.checkpoint_write_s(job)

    def on(self, job: TraceJob, allocation: Allocation) -> float:
        """On the very GPUs; a gang over several kinds of devices is as slow as it would be on one of them."""
        if allocation.pool == MIXED:
            devices = {self._machines.machines[node].device for node, _ in allocation.parts}
            return min(self._rate(job, device, allocation.shape) for device in devices)
        return self._rate(job, self._pools[allocation.pool].device, allocation.shape)

    def packed(self, job: TraceJob, pool: Pool, gpus: int) -> float:
        """On so many GPUs of a pool, on as few nodes as possible; 0 where the job cannot run."""
        return self._rate(job, pool.device, packed(gpus, len(pool.by_free) - 1))

    def usable_by(self, job: TraceJob) -> tuple[tuple[Pool, ...], float]:
        """The pools with a job's device, enough GPUs and a speed for it, and the best of these speeds."""
        key = (job.device, job.kind, job.gpus, job.fewest, job.partition, job.memory_bytes)
        usable = self._usable.get(key)
        if usable is None:
            usable = self._usable[key] = self._find_usable(job)
        return usable

    def sizes(self, job: TraceJob) -> tuple[int, ...]:
        """The numbers of GPUs, of those that a job takes, on which it runs in a pool that has as many."""
        if job.fewest == job.most:
            return (job.gpus,)
        key = (job.device, job.kind, job.gpus, job.fewest, job.most, job.partition, job.memory_bytes)
        sizes = self._sizes.get(key)
        if sizes is None:
            pools, _ = self.usable_by(job)
            largest = min(job.most, max(pool.size for pool in pools))
            sizes = self._sizes[key] = tuple(
                gpus
                for gpus in range(job.fewest, largest + 1)
                if any(pool.size >= gpus and self.packed(job, pool, gpus) > 0 for pool in pools)
            )
        return sizes

    def _find_usable(self, job: TraceJob) -> tuple[tuple[Pool, ...], float]:
        allowed = [pool for pool in self._pools if pool.takes(job.device, job.partition)]
        if self._mixed and (across := self._usable_together(job, allowed)) is not None:
            return across
        most = max((pool.size for pool in allowed), default=0)
        if most < job.fewest:
            needs = f"{job.fewest} GPUs of {job.device or 'one kind'}"
            raise InputError(f"trace: job {job.name!r} needs {needs} and the cluster has {most}")
        rates = {pool: self.packed(job, pool, job.gpus) for pool in allowed if pool.size >= job.fewest}
        pools = tuple(pool for pool, rate in rates.items() if rate > 0)
        if not pools:
            raise InputError(f"trace: job {job.name!r} ({job.kind}) runs on none of the cluster's devices")
        return pools, max(rates.values())

    def _usable_together(self, job: TraceJob, allowed: list[Pool]) -> tuple[tuple[Pool, ...], float] | None:
        """The pools with a speed for a job, and that on the fastest ones which hold it; None if none do."""
        rates = {pool: self.packed(job, pool, job.gpus) for pool in allowed}
        size, pools = 0, tuple(pool for pool in allowed if rates[pool] > 0)
        for pool in sorted(pools, key=lambda pool: -rates[pool]):
            size += pool.size
            if size >= job.gpus:
                return pools, rates[pool]
        return None

    def _rate(self, job: TraceJob, device: str, shape: tuple[int, ...]) -> float:
        key = (job.kind, job.gpus, device, shape, job.memory_bytes)
        rate = self._rates.get(key)
        if rate is None:
            rate = self._rates[key] = self._speeds.rate(job, device, shape)
        return rate
