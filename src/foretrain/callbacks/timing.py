"""Times the steps of a training: by a clock, or on a GPU by the device itself, which nothing waits for."""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Callable
from typing import Any, final

_UNFINISHED = 64
"""Steps that the host may be ahead of the device; more are not timed."""


@final
class RunningMedian:
    """The median of any number of times in bounded memory: whenever that is full, every second one goes."""

    def __init__(self, room: int = 2048) -> None:
        self.count, self.low, self.high = 0, float("inf"), 0.0
        self._room, self._stride, self._kept = room, 1, list[float]()

    def add(self, time_s: float) -> None:
        if self.count % self._stride == 0:
            self._kept.append(time_s)
        self.count, self.low, self.high = self.count + 1, min(self.low, time_s), max(self.high, time_s)
        if len(self._kept) >= self._room:
            self._kept, self._stride = self._kept[::2], 2 * self._stride

    @property
    def median(self) -> float | None:
        return statistics.median(self._kept) if self._kept else None


@final
class ClockTimer:
    """Times steps by a clock."""

    def __init__(self, clock: Callable[[], float], times: RunningMedian) -> None:
        self._clock, self._times = clock, times

    def begin(self) -> Any:
        return self._clock()

    def end(self, began: Any) -> None:
        self._times.add(self._clock() - began)

    def read(self, *, wait: bool = False) -> None:
        """Read nothing: nothing is left to be read."""


@final
class DeviceTimer:
    """Times steps by events in the device's stream; ``gpu`` is ``torch.cuda``.

    A step lasts from the end of the work before it, or from when it was begun if the device was idle then, to
    the end of its own work: the pace of a training whose host runs ahead, without a wait for data that the
    device does not notice.
    """

    def __init__(self, gpu: Any, times: RunningMedian) -> None:
        self._gpu, self._times = gpu, times
        self._open: deque[tuple[Any, Any]] = deque()

    def begin(self) -> Any:
        mark = self._gpu.Event(enable_timing=True)
        mark.record()
        return mark

    def end(self, began: Any) -> None:
        if len(self._open) < _UNFINISHED:
            self._open.append((began, self.begin()))

    def read(self, *, wait: bool = False) -> None:
        """Take the times of the steps that the device has finished; all of them with ``wait``."""
        if wait and self._open:
            self._open[-1][1].synchronize()
        while self._open and self._open[0][1].query():
            began, ended = self._open.popleft()
            self._times.add(began.elapsed_time(ended) * 1e-3)
