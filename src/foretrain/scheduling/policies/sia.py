"""Chooses how many GPUs of which kind each job gets, by an integer programme (Sia, Jayaram Subramanya et al.,
SOSP 2023)."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from foretrain.errors import ForetrainError
from foretrain.scheduling.machines import Pool
from foretrain.scheduling.policies.base import Policy
from foretrain.scheduling.policies.elastic import efficiency
from foretrain.scheduling.simulator import Active, Simulation

_WAITS = 1.1
"""What a job without GPUs costs (the paper's lambda); one on its worst configuration costs 1."""
_GAP = 1e-3
"""Relative distance to the best solution at which the solver may stop."""


class Configuration(NamedTuple):
    """So many GPUs of a pool for a job."""

    job: Active
    pool: Pool
    gpus: int
    cost: float


class Sia(Policy):
    """Every interval, the configurations that make the sum of (goodput over the job's worst)^p least.

    A job takes the least number of GPUs that it runs on, that times powers of two, up to its most, all of one
    kind of device; p = -0.5 leans to fairness. A configuration other than the present one is worth less by
    the restarts that the job has paid for: (age - restarts x cost) / (age + cost). Goodput is the speed on
    that device (of the table or predictor) times the efficiency of a larger batch, with the same noise for
    all jobs; the paper learns both of each job as it runs. Hybrid-parallel jobs are those of a template with
    a plan.
    """

    name = "sia"

    resizes = True

    def __init__(self, interval_s: float = 60.0, power: float = -0.5) -> None:
        self.interval_s = interval_s
        self._power = power
        self._due = True
        self._solved_for: tuple[object, ...] = ()

    def round(self, cluster: Simulation) -> None:
        self._due = True

    def decide(self, cluster: Simulation) -> None:
        jobs = [*cluster.running.values(), *cluster.waiting.values()]
        if not self._due or not jobs:
            return
        self._due = False
        state = (frozenset(job.number for job in jobs), cluster.machines.up)
        if state == self._solved_for and not self._stands_still(cluster):
            return  # what jobs make of GPUs does not change as they run
        self._solved_for = state
        chosen = self._solve(cluster, [each for job in jobs for each in self._configurations(cluster, job)])
        for job in list(cluster.running.values()):
            wanted = chosen.get(job.number)
            if wanted is None or not _is_present(job, wanted):
                cluster.preempt(job)
        for number, wanted in chosen.items():
            if number in cluster.waiting and wanted.pool.free >= wanted.gpus:
                cluster.start(wanted.job, gpus=wanted.gpus, pool=wanted.pool)

    def _stands_still(self, cluster: Simulation) -> bool:
        """Whether jobs wait that would go into what is free."""
        return any(cluster.fits(job, cluster.sizes(job)[0]) for job in cluster.waiting.values())

    def _configurations(self, cluster: Simulation, job: Active) -> list[Configuration]:
        sizes, size = {job.gpus}, cluster.sizes(job)[0]
        while size <= job.spec.most:
            sizes.add(size)
            size *= 2
        candidates = [
            (pool, gpus, cluster.rate_in(job, pool, gpus) * efficiency(gpus / job.gpus))
            for pool in cluster.pools_for(job)
            for gpus in sorted(sizes)
            if gpus <= pool.size
        ]
        candidates = [each for each in candidates if each[2] > 0]
        worst = min((goodput for _, _, goodput in candidates), default=1.0)
        age_s = max(cluster.now - job.arrival_s, 1.0)
        restart_s = cluster.settings.checkpoint_s + cluster.settings.restart_s
        kept = max(age_s - job.preemptions * restart_s, 1.0) / (age_s + restart_s)
        configurations = []
        for pool, gpus, goodput in candidates:
            present = job.allocation is not None and (job.allocation.pool, job.allocation.gpus) == (
                pool.number,
                gpus,
            )
            value = goodput / worst * (1.0 if present or not job.starts else kept)
            configurations.append(Configuration(job, pool, gpus, min(value**self._power, _WAITS - 0.01)))
        return configurations

    def _solve(self, cluster: Simulation, options: list[Configuration]) -> dict[int, Configuration]:
        try:
            from scipy.optimize import Bounds, LinearConstraint, milp
            from scipy.sparse import csr_array
        except ImportError as error:
            raise ForetrainError("policy sia: scipy is not installed; install foretrain[learn]") from error
        if not options:
            return {}
        numbers = {
            number: row for row, number in enumerate(dict.fromkeys(each.job.number for each in options))
        }
        pools = {pool.number: row for row, pool in enumerate(cluster.machines.pools)}
        room = np.array([float(pool.free) for pool in cluster.machines.pools])
        for job in cluster.running.values():
            assert job.allocation is not None
            room[pools[job.allocation.pool]] += job.allocation.gpus
        columns = np.arange(len(options))
        per_job = csr_array(
            (np.ones(len(options)), ([numbers[each.job.number] for each in options], columns)),
            shape=(len(numbers), len(options)),
        )
        per_pool = csr_array(
            (
                [float(each.gpus) for each in options],
                ([pools[each.pool.number] for each in options], columns),
            ),
            shape=(len(pools), len(options)),
        )
        with _nothing_printed():
            solution = milp(
                np.array([each.cost - _WAITS for each in options]),
                integrality=np.ones(len(options)),
                bounds=Bounds(0, 1),
                constraints=[LinearConstraint(per_job, ub=1.0), LinearConstraint(per_pool, ub=room)],
                options={"mip_rel_gap": _GAP},
            )
        if solution.x is None:
            raise ForetrainError(f"policy sia: the integer programme has no solution ({solution.message})")
        return {each.job.number: each for each, taken in zip(options, solution.x, strict=True) if taken > 0.5}


@contextlib.contextmanager
def _nothing_printed() -> Iterator[None]:
    """Keep what the solver prints by itself, past Python, from standard output, where JSON may go."""
    kept, nowhere = os.dup(1), os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(nowhere, 1)
        yield
    finally:
        os.dup2(kept, 1)
        os.close(kept)
        os.close(nowhere)


def _is_present(job: Active, wanted: Configuration) -> bool:
    held = job.allocation
    return held is not None and held.pool == wanted.pool.number and held.gpus == wanted.gpus
