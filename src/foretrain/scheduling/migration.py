"""Moves running jobs to faster devices that nobody wants."""

from __future__ import annotations

from typing import TYPE_CHECKING

from foretrain.scheduling.active import Active
from foretrain.scheduling.machines import FULL, Pool

if TYPE_CHECKING:
    from foretrain.scheduling.simulator import Simulation

_LEAST_GAIN_S = 1.0
"""That a job must gain by a move."""


def migrate_all(cluster: Simulation) -> None:
    """One job after the other, those first that gain most by it."""
    while (best := _best_move(cluster)) is not None:
        cluster.migrate(*best)


def _best_move(cluster: Simulation) -> tuple[Active, Pool] | None:
    overhead_s = cluster.settings.checkpoint_s + cluster.settings.restart_s
    best: tuple[float, int, Active, Pool] | None = None
    for job in cluster.running.values():
        held = job.allocation
        if held is None or held.share < FULL or len(job.pools) == 1 or job.since_s == cluster.now:
            continue
        left = max(job.estimated_work - cluster.done(job), 0.0)
        for pool in job.pools:
            if pool.number == held.pool or pool.free < held.gpus:
                continue
            rate = cluster.rate_in(job, pool, held.gpus)
            gain_s = left / job.rate - left / rate - overhead_s if rate > job.rate else 0.0
            if gain_s > _LEAST_GAIN_S and (best is None or (-gain_s, job.number) < best[:2]):
                best = (-gain_s, job.number, job, pool)
    return None if best is None else best[2:]
