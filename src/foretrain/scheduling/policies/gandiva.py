"""Takes turns: all jobs run for a while, one set after another (Gandiva, Xiao et al., OSDI 2018)."""

from __future__ import annotations

from foretrain.scheduling.policies.ranked import Rank, Ranked
from foretrain.scheduling.simulator import Active, Simulation


class Gandiva(Ranked):
    """Suspend and resume: at every interval those come first that ran least so far.

    Left out: packing jobs onto GPUs in use, moving them to close gaps, and growing into idle GPUs.
    """

    name = "gandiva"

    def __init__(self, interval_s: float = 60.0) -> None:
        super().__init__(interval_s)

    def rank(self, cluster: Simulation, job: Active) -> Rank:
        return (round(cluster.attained_gpu_s(job) / job.gpus / max(self.interval_s or 1.0, 1.0), 6),)
