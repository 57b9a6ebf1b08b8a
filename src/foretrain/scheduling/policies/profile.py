"""Keeps how many GPUs of a pool are free from now on, and finds when so many are free for so long."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

_SLACK_S = 1e-6
_ROOM = 64
"""Steps for which there is room at first; doubled whenever they are used up."""


class FreeProfile:
    """Free GPUs from now on: steps of a time and the count that holds from then.

    >>> profile = FreeProfile(0.0, 2, [(10.0, 2)])
    >>> profile.earliest(3, 5.0)
    10.0
    >>> profile.reserve(0.0, 4.0, 2)
    >>> profile.earliest(1, 5.0), profile.at(5.0)
    (4.0, 2)
    """

    def __init__(self, now_s: float, free: int, changes: Sequence[tuple[float, int]]) -> None:
        """``changes`` are times and how many more (or fewer) GPUs are free from then on."""
        times, counts = [now_s], [free]
        for time_s, gpus in sorted(changes):
            free += gpus
            if time_s <= times[-1]:
                counts[-1] = free
            else:
                times.append(time_s)
                counts.append(free)
        self._first, self._last = 0, len(times)
        size = max(_ROOM, 2 * len(times))
        self._times, self._free = np.full(size, math.inf), np.zeros(size, dtype=np.int64)
        self._times[: len(times)], self._free[: len(times)] = times, counts

    def at(self, time_s: float) -> int:
        """Free GPUs at a time."""
        return int(self._free[self._step(time_s)])

    def earliest(self, gpus: int, time_s: float) -> float:
        """When so many GPUs are free for so long; infinite where they never are."""
        times, free = self._times[self._first : self._last], self._free[self._first : self._last]
        short = (free < gpus).nonzero()[0]
        if not short.size or (short[0] > 0 and times[short[0]] - times[0] >= time_s - _SLACK_S):
            return float(times[0])
        starts, ends = short[:-1] + 1, short[1:]
        long = (starts < ends) & (times[ends] - times[starts[: ends.size]] >= time_s - _SLACK_S)
        place = int(long.argmax()) if long.size else 0
        if long.size and long[place]:
            return float(times[starts[place]])
        after = int(short[-1]) + 1
        return float(times[after]) if after < times.size else math.inf

    def fewest(self, start_s: float, end_s: float) -> int:
        """Free GPUs from one time to another, all along."""
        first, last = self._between(start_s, end_s)
        return int(self._free[first:last].min())

    def reserve(self, start_s: float, end_s: float, gpus: int) -> None:
        first, last = self._between(start_s, end_s)
        self._free[first:last] -= gpus

    def use_up(self, start_s: float, end_s: float, gpus: int) -> list[tuple[float, float, int]]:
        """Reserve as many of so many GPUs as there are: from when to when, and how many.

        >>> FreeProfile(0.0, 1, [(10.0, 3)]).use_up(5.0, 20.0, 2)
        [(5.0, 10.0, 1), (10.0, 20.0, 2)]
        """
        first, last = self._between(start_s, end_s)
        used = np.minimum(self._free[first:last], gpus)
        self._free[first:last] -= used
        times = [*self._times[first:last].tolist(), end_s]
        return [
            (begin_s, stop_s, count)
            for begin_s, stop_s, count in zip(times, times[1:], used.tolist(), strict=False)
            if count > 0
        ]

    def forget(self, now_s: float) -> None:
        """Drop what is over."""
        self._first = max(self._first, self._step(now_s))
        self._times[self._first] = min(max(self._times[self._first], now_s), self._next())

    def _next(self) -> float:
        return float(self._times[self._first + 1]) if self._first + 1 < self._last else math.inf

    def _step(self, time_s: float) -> int:
        """The step in which a time lies."""
        place = int(self._times[self._first : self._last].searchsorted(time_s, side="right")) - 1
        return self._first + max(place, 0)

    def _between(self, start_s: float, end_s: float) -> tuple[int, int]:
        """The steps from one time to another, which begin and end with a step of their own."""
        self._split(start_s)
        last = self._split(end_s)
        return self._step(start_s), last

    def _split(self, time_s: float) -> int:
        """The step that begins at a time, made where there is none."""
        place = self._step(time_s)
        if self._times[place] >= time_s:
            return place
        if self._last == self._times.size:
            self._make_room()
            place = self._step(time_s)
        for column in (self._times, self._free):
            column[place + 2 : self._last + 1] = column[place + 1 : self._last].copy()
        self._times[place + 1], self._free[place + 1] = time_s, self._free[place]
        self._last += 1
        return place + 1

    def _make_room(self) -> None:
        steps = self._last - self._first
        times, free = self._times[self._first : self._last], self._free[self._first : self._last]
        self._times, self._free = (
            np.full(max(_ROOM, 2 * steps), math.inf),
            np.zeros(2 * steps + _ROOM, np.int64),
        )
        self._times[:steps], self._free[:steps] = times, free
        self._first, self._last = 0, steps
