"""Keeps how many GPUs of a pool will be free over time, for policies that promise them."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence

_SLACK_S = 1e-6


class Profile:
    """Free GPUs from now on: steps of a time and the count that holds from then; it may fall below 0.

    >>> profile = Profile(0.0, 2, [(10.0, 2)])
    >>> profile.earliest(3, 5.0)
    10.0
    >>> profile.reserve(0.0, 4.0, 2)
    >>> profile.earliest(1, 5.0)
    4.0
    """

    def __init__(self, now_s: float, free: int, ends: Sequence[tuple[float, int]]) -> None:
        self._times, self._free = [now_s], [free]
        for end_s, gpus in sorted(ends):
            free += gpus
            if end_s <= self._times[-1]:
                self._free[-1] = free
            else:
                self._times.append(end_s)
                self._free.append(free)

    def earliest(self, gpus: int, time_s: float) -> float:
        """When so many GPUs are free for so long."""
        times, free = self._times, self._free
        start: int | None = None
        for place in range(len(times)):
            if start is not None and times[place] >= times[start] + time_s - _SLACK_S:
                return times[start]
            if free[place] < gpus:
                start = None
            elif start is None:
                start = place
        return math.inf if start is None else times[start]

    def reserve(self, start_s: float, end_s: float, gpus: int) -> None:
        first, last = self._split(start_s), self._split(end_s)
        for place in range(first, last):
            self._free[place] -= gpus

    def _split(self, time_s: float) -> int:
        """The step that begins at a time, made where there is none."""
        place = bisect_right(self._times, time_s) - 1
        if self._times[place] == time_s:
            return place
        self._times.insert(place + 1, time_s)
        self._free.insert(place + 1, self._free[place])
        return place + 1
