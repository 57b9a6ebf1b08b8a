"""Serves jobs by the Gittins index of the GPU time they have had (Tiresias-G, Gu et al., NSDI 2019)."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence

from foretrain.scheduling.policies.ranked import Rank, Ranked
from foretrain.scheduling.simulator import Active, Simulation

_POINTS = 48
"""Amounts of GPU time at which the index is computed."""


class Gittins(Ranked):
    """The job with the best chance of ending soon for the GPU time it would still take.

    The index after GPU time a is the greatest, over d, of P(S - a <= d | S > a) / E[min(S - a, d) | S > a],
    with S the GPU time of jobs; its distribution is that of the jobs that have ended, renewed every 50. Until
    there are as many, first in, first out. As in the paper nothing is known of a single job; unlike it, which
    discretises into queues, ranks are taken anew at every interval.
    """

    name = "gittins"

    def __init__(self, interval_s: float = 300.0, renew: int = 50) -> None:
        super().__init__(interval_s)
        self._renew = renew
        self._ended: list[float] = []
        self._attained: list[float] = []
        self._indices: list[float] = []

    def finished(self, cluster: Simulation, job: Active) -> None:
        self._ended.append(job.attained_gpu_s)
        if len(self._ended) % self._renew == 0:
            self._attained, self._indices = indices(self._ended)

    def rank(self, cluster: Simulation, job: Active) -> Rank:
        if not self._indices:
            return (0.0, job.arrival_s)
        place = bisect_right(self._attained, cluster.attained_gpu_s(job)) - 1
        return (-self._indices[max(place, 0)], job.arrival_s)


def indices(times: Sequence[float], points: int = _POINTS) -> tuple[list[float], list[float]]:
    """Amounts of time received, and the Gittins index from each on.

    >>> attained, gittins = indices([1.0] * 9 + [100.0])
    >>> attained[0], round(gittins[0], 2)  # nine of ten end after 1 s
    (0.0, 0.9)
    >>> round(gittins[-1], 3) < 0.02  # what is left then is the long one
    True
    """
    ordered = sorted(times)
    marks = sorted({ordered[round(place * (len(ordered) - 1) / points)] for place in range(points + 1)})
    starts = [0.0, *marks[:-1]]
    gittins = []
    for start in starts:
        longer = [time - start for time in ordered if time > start]
        best, total = 0.0, 0.0
        for place, time in enumerate(longer):
            total += time
            spent = total + time * (len(longer) - place - 1)
            best = max(best, (place + 1) / spent if spent > 0 else math.inf)
        gittins.append(best)
    return starts, gittins
