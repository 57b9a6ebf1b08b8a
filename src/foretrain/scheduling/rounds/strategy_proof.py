"""Divides the time of devices so that no job gains by saying that it is faster or slower than it is.

The partial allocation mechanism of Cole, Gkatzelis and Goel (EC 2013), which Gavel (Narayanan et al., OSDI
2020) has among its policies: of the division whose product of throughputs is greatest, every job gets as much
as its being there leaves of the product of the others' throughputs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from foretrain.scheduling.result import Column
from foretrain.scheduling.rounds.figures import counts_of, gpus_of, rates_of
from foretrain.scheduling.rounds.proportional import proportional
from foretrain.scheduling.rounds.simulation import Leased, RoundPolicy

_AT_ONCE = 1_000_000
"""Shares in as many programmes as are solved together."""


class MaxMinFairnessStrategyProof(RoundPolicy):
    """The product of throughputs is greatest; a job's part of it is multiplied by what the product of the
    others' throughputs is over what it would be without the job, which is at least 1/e.

    A weight is a power of the throughput. What the factors leave goes, in rounds, to whoever is next.
    """

    name = "max_min_fairness_strategy_proof"
    knows_devices = True

    def allot(self, jobs: Sequence[Leased], devices: Mapping[str, int], now_s: float) -> Column:
        weights = np.array([job.spec.weight for job in jobs])
        return partial_allocation(rates_of(jobs, devices), weights, gpus_of(jobs), counts_of(devices))


def partial_allocation(rates: Column, weights: Column, gpus: Column, counts: Column) -> Column:
    """Shares by kind of device of which no job has more for saying other speeds than its own."""
    shares: Column = proportional(rates[None], weights[None], gpus[None], counts)[0]
    jobs = len(rates)
    if jobs == 1:
        return shares
    logs = weights * np.log((rates * shares).sum(axis=1))
    others = np.array([[other for other in range(jobs) if other != job] for job in range(jobs)])
    without = np.empty(jobs)
    step = max(1, _AT_ONCE // rates.size)
    for first in range(0, jobs, step):
        chosen = others[first : first + step]
        found = proportional(rates[chosen], weights[chosen], gpus[chosen], counts)
        reached = np.log((rates[chosen] * found).sum(axis=2))
        without[first : first + step] = (weights[chosen] * reached).sum(axis=1)
    kept = np.exp(np.clip((logs.sum() - logs - without) / weights, -1.0, 0.0))  # but for rounding, within
    parts: Column = shares * kept[:, None]
    return parts


STRATEGY_PROOF_POLICIES = (MaxMinFairnessStrategyProof,)
