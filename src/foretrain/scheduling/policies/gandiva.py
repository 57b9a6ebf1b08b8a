"""Takes turns: all jobs run for a while, one set after another (Gandiva, Xiao et al., OSDI 2018)."""

from __future__ import annotations

from foretrain.scheduling.policies.ranked import Rank, Ranked
from foretrain.scheduling.simulator import Active, Simulation


class Gandiva(Ranked):
    """Suspend and resume: at every interval those come first that ran least so far.

    With ``--sharing`` jobs are packed onto GPUs in use as well. Left out: moving jobs to close gaps, growing
    into idle GPUs, and unpacking pairs whose speed was seen to suffer (what pairs lose is forecast instead).
    """

    name = "gandiva"

    def __init__(self, interval_s: float = 60.0) -> None:
        super().__init__(interval_s)

    def rank(self, cluster: Simulation, job: Active) -> Rank:
        return (round(cluster.attained_gpu_s(job) / job.gpus / max(self.interval_s or 1.0, 1.0), 6),)
