"""Divides GPU time so that the product of jobs' progress is greatest (Shockwave, Zheng et al., NSDI 2023)."""

from __future__ import annotations

import math

from foretrain.scheduling.policies.ranked import Rank, Ranked
from foretrain.scheduling.simulator import Active, Simulation

_LEAST_S = 1.0


class Shockwave(Ranked):
    """Efficiency and fairness over a window of the future, as a market of equal budgets divides it.

    The paper's programme makes the sum over jobs of weight x log(progress at the end of the window) greatest,
    with weights that grow with the forecast finish-time fairness to the power of ``power``, less a
    regulariser on the makespan. Its best first step is taken here greedily: a job's rank is what one more
    interval of its GPUs adds to that sum, per GPU, plus ``makespan`` x its part of the longest job left. The
    paper also forecasts how jobs change their batch size as they go; jobs here do not.
    """

    name = "shockwave"

    def __init__(self, interval_s: float = 120.0, power: float = 5.0, makespan: float = 0.1) -> None:
        super().__init__(interval_s)
        self._power, self._makespan = power, makespan
        self._longest_s = 1.0

    def _deal(self, cluster: Simulation) -> None:
        jobs = [*cluster.running.values(), *cluster.waiting.values()]
        self._longest_s = max(max(cluster.remaining_nominal_s(job) for job in jobs), _LEAST_S)
        super()._deal(cluster)

    def rank(self, cluster: Simulation, job: Active) -> Rank:
        jobs = len(cluster.running) + len(cluster.waiting)
        total_s = max(job.estimated_work / job.nominal_rate, _LEAST_S)
        left_s = cluster.remaining_nominal_s(job)
        done_s = max(total_s - left_s, 0.0)
        contention = max(1.0, jobs * job.gpus / cluster.machines.size)
        unfair = (cluster.now - job.arrival_s + left_s * contention) / (total_s * contention)
        step_s = min(self.interval_s or 1.0, max(left_s, _LEAST_S))
        gain = math.log1p(step_s / (done_s + _LEAST_S))
        value = min(unfair, 1e3) ** self._power * gain / job.gpus + self._makespan * left_s / self._longest_s
        return (-value,)
