"""Runs jobs first in, first out: one that does not fit holds up all behind it."""

from __future__ import annotations

import heapq

from foretrain.scheduling.policies.base import Policy
from foretrain.scheduling.simulator import Active, Simulation


class Fifo(Policy):
    """By arrival."""

    name = "fifo"

    def __init__(self) -> None:
        self._queue: list[tuple[float, int, Active]] = []

    def waits(self, cluster: Simulation, job: Active) -> None:
        heapq.heappush(self._queue, (job.arrival_s, job.number, job))

    def decide(self, cluster: Simulation) -> None:
        while self._queue and cluster.fits(self._queue[0][2]):
            cluster.start(heapq.heappop(self._queue)[2])
