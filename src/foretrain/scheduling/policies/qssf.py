"""Starts the jobs with the least estimated GPU time first (QSSF of Helios, Hu et al., SC 2021)."""

from __future__ import annotations

from foretrain.scheduling.policies.priority import Greedy, Key
from foretrain.scheduling.simulator import Active, Simulation


class QuasiShortestServiceFirst(Greedy):
    """By GPUs x estimated duration, without preemption.

    The paper's estimate is a regression over a user's earlier jobs; here it is whatever policies are told.
    """

    name = "qssf"

    def key(self, cluster: Simulation, job: Active) -> Key:
        return (cluster.remaining_s(job) * job.gpus, job.arrival_s)
