"""Carries out what a policy has made up its mind about, once it has looked at all jobs."""

from __future__ import annotations

from collections.abc import Mapping

from foretrain.scheduling.machines import Pool
from foretrain.scheduling.simulator import Active, Simulation


def carry_out(cluster: Simulation, places: Mapping[Active, Pool]) -> None:
    """Have those run that have a place, in that order, and take off the others; who stays is left alone."""
    starting = [job for job, pool in places.items() if not _is_in(job, pool)]
    for job in list(cluster.running.values()):
        if job not in places or not _is_in(job, places[job]):
            cluster.preempt(job)
    for job in starting:
        cluster.start(job, pool=places[job])


def _is_in(job: Active, pool: Pool) -> bool:
    return job.allocation is not None and job.allocation.pool == pool.number
