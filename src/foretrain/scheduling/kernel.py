"""Orders the events of a simulation by time, then kind, then the order in which they were set."""

from __future__ import annotations

import itertools
from enum import IntEnum
from heapq import heapify, heappop, heappush
from typing import Any


class Kind(IntEnum):
    """What happens, in the order in which things of the same moment happen."""

    FINISH = 0
    LIMIT = 1
    REPAIR = 2
    JOB_FAILURE = 3
    NODE_FAILURE = 4
    TIMER = 5
    ROUND = 6
    WAKE = 7


Event = tuple[float, int, int, Any, int]
"""Time, kind, serial number, what it is about, and the version of that for which it holds."""


_ROOM = 1024
"""Events below which none is thrown out."""


class Events:
    """A heap of events to come."""

    def __init__(self) -> None:
        self.heap: list[Event] = []
        """For loops that look at the next event again and again, and take it out."""
        self._serial = itertools.count()
        self._most = _ROOM

    def push(self, time_s: float, kind: int, about: Any, version: int = 0) -> None:
        heappush(self.heap, (time_s, kind, next(self._serial), about, version))

    def pop(self) -> Event:
        return heappop(self.heap)

    def prune(self) -> None:
        """Once there are four times as many as there were, throw out those that hold no more: what they are
        about is of another version than that for which they were set."""
        if len(self.heap) > self._most:
            self.heap[:] = [
                event for event in self.heap if getattr(event[3], "version", event[4]) == event[4]
            ]
            heapify(self.heap)
            self._most = max(_ROOM, 4 * len(self.heap))

    @property
    def next_s(self) -> float | None:
        """When the next event happens."""
        return self.heap[0][0] if self.heap else None

    def __len__(self) -> int:
        return len(self.heap)
