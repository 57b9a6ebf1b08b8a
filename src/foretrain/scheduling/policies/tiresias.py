"""Serves jobs that received least GPU time first, in queues, as Tiresias (Gu et al., NSDI 2019)."""

from __future__ import annotations

from bisect import bisect_right

from foretrain.scheduling.policies.priority import Key, Preemptive
from foretrain.scheduling.simulator import Active, Simulation

THRESHOLDS_GPU_S = (3250.0, 7200.0, 18000.0)
"""GPU time after which a job falls into the next queue; the values of the authors' simulator."""


class Tiresias(Preemptive):
    """Queues by GPU time received, first in first out within a queue; jobs of lower queues give way."""

    name = "tiresias"

    def __init__(self, thresholds_gpu_s: tuple[float, ...] = THRESHOLDS_GPU_S) -> None:
        super().__init__()
        self._thresholds = thresholds_gpu_s
        self._filed: dict[int, Key] = {}

    def level(self, cluster: Simulation, job: Active) -> int:
        """The queue a job is in, 0 being served first."""
        return bisect_right(self._thresholds, cluster.attained_gpu_s(job) + 1e-6)

    def key(self, cluster: Simulation, job: Active) -> Key:
        return (self.level(cluster, job), job.arrival_s, job.number)

    def running_key(self, cluster: Simulation, job: Active) -> Key:
        level = self.level(cluster, job)
        self._filed[job.number] = key = (-level, -job.arrival_s, -job.number)
        if level < len(self._thresholds):
            left = self._thresholds[level] - cluster.attained_gpu_s(job)
            cluster.wake(job, cluster.now + left / job.gpus)
        return key

    def beats(self, cluster: Simulation, waiting: Key, running: Key) -> bool:
        return waiting < (-running[0], -running[1], -running[2])

    def timer(self, cluster: Simulation, job: Active) -> None:
        self.rank(cluster, job)

    def _current(self, cluster: Simulation, entry: tuple[Key, int, int, Active]) -> bool:
        return super()._current(cluster, entry) and self._filed[entry[3].number] == entry[0]
