"""Divides the time of devices for the most throughput per dollar with which jobs are done at their deadlines,
alone or in pairs, by the policies of Gavel (Narayanan et al., OSDI 2020) with service-level objectives.

No figures of Gavel's own simulator for these are at hand; they follow the paper.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np

from foretrain.scheduling.result import Column
from foretrain.scheduling.rounds.figures import rates_of
from foretrain.scheduling.rounds.linear import Division
from foretrain.scheduling.rounds.packed import Packing
from foretrain.scheduling.rounds.simulation import Leased
from foretrain.scheduling.rounds.throughput import per_dollar


class CostWithDeadlinesPacked(Packing):
    """The sum of throughputs per dollar is as large as possible, while jobs with a deadline have the
    throughput that they need from now on to be done at it. A deadline that a job would miss with its fastest
    devices to itself counts no more; where the others cannot all be kept, none does for this time."""

    name = "max_sum_throughput_normalized_by_cost_packed_SLOs"

    def divide(
        self, division: Division, jobs: Sequence[Leased], devices: Mapping[str, int], now_s: float
    ) -> Column:
        fastest = rates_of(jobs, devices).max(axis=1)
        needed = np.array([_needed(job, now_s) for job in jobs])
        needed = np.where(needed <= fastest, needed, 0.0)
        worth, value = 1 / fastest, per_dollar(list(devices))
        shares = division.greatest(worth, value, needed)
        if shares is None:
            shares = division.greatest(worth, value, np.zeros(len(jobs)))
        assert shares is not None
        return shares


class CostWithDeadlines(CostWithDeadlinesPacked):
    """The same without pairs."""

    name = "max_sum_throughput_normalized_by_cost_perf_SLOs"
    packs = False


def _needed(job: Leased, now_s: float) -> float:
    """Work per second with which a job is done at its deadline; infinite where that has passed."""
    if job.spec.deadline_s is None:
        return 0.0
    left_s = job.spec.arrival_s + job.spec.deadline_s - now_s
    return job.left / left_s if left_s > 0 else math.inf


DEADLINE_POLICIES = (CostWithDeadlines, CostWithDeadlinesPacked)
