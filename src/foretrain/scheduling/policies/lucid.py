"""Starts the jobs with the least GPU time first and packs those that bear each other (Lucid, Hu et al.,
ASPLOS 2023)."""

from __future__ import annotations

from foretrain.scheduling.policies.priority import Greedy, Key
from foretrain.scheduling.simulator import Active, Simulation


class Lucid(Greedy):
    """By GPUs x estimated duration, without preemption; where no GPU is free and two jobs may share one
    (``--pairs``), a job goes beside the one with which it goes best, if both keep enough of their speed.

    The paper sorts jobs into three classes by their utilisation and packs by the sum of their scores; here
    the forecast of what a pair costs decides (indolent packing). Left out: profiling jobs on nodes of their
    own before they are queued (forecasts take its place), and packing gangs.
    """

    name = "lucid"

    def key(self, cluster: Simulation, job: Active) -> Key:
        return (cluster.remaining_s(job) * job.gpus, job.arrival_s)
