"""Runs a function over many items in this process, in several here, or on a Ray cluster."""

from __future__ import annotations

import collections
import math
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Generic, Self, TypeVar

from foretrain.errors import ForetrainError, invalid
from foretrain.fanout.chunks import Chunk, ChunkOutcome, Workers, call
from foretrain.fanout.processes import Processes
from foretrain.fanout.ray_tasks import RayTasks

Item = TypeVar("Item")
Result = TypeVar("Result")
Progress = Callable[[int, int], None]
"""Hears how many items are done, of how many."""
Lost = Callable[[str], Result]
"""The result of an item that cannot be had, from the reason."""

TRIES = 3
"""How often an item is begun whose worker or node is lost each time."""

_CHUNK_S = 0.25
_CHUNK_ITEMS = 256
_AHEAD = 1024
"""Items that may be done before the first one that is not."""
_POLL_S = 0.02


class WorkerLost(ForetrainError):
    """An item that took its worker down with it, every time it was tried."""


def fan_out(
    function: Callable[..., Result],
    items: Sequence[Item],
    *,
    shared: Any = None,
    processes: int = 1,
    ray: str | None = None,
    progress: Progress = lambda done, total: None,
    lost: Lost[Result] | None = None,
) -> Iterator[Result]:
    """``function(item)``, or ``function(shared, item)``, for every item, results in the order of the items.

    In this process one by one, as they are asked for; in so many ``processes``; or on the Ray cluster at
    ``ray`` ("auto", "host:port", "ray://host:port", "local" or "any"). The function, what is shared, the
    items and the results must be picklable. What the function raises is raised here, in the item's turn. An
    item whose worker or node is lost is tried again; where that does not help, ``lost`` makes its result from
    the reason, or ``WorkerLost`` is raised.

    >>> list(fan_out(pow, [1, 2, 3], shared=2))
    [2, 4, 8]
    """
    crew = Crew(function, shared=shared, processes=min(processes, max(1, len(items))), ray=ray)
    return _all(crew, items, progress, lost)


def _all(
    crew: Crew[Result], items: Sequence[Item], progress: Progress, lost: Lost[Result] | None
) -> Iterator[Result]:
    if items:
        with crew:
            yield from crew.run(items, progress=progress, lost=lost)


class Crew(Generic[Result]):
    """``fan_out`` for items that come in several rounds: workers stay until the ``with`` block ends.

    >>> with Crew(pow, shared=2) as crew:
    ...     print([list(crew.run(items)) for items in ([1, 2], [3])])
    [[2, 4], [8]]
    """

    def __init__(
        self,
        function: Callable[..., Result],
        *,
        shared: Any = None,
        processes: int = 1,
        ray: str | None = None,
    ) -> None:
        if processes < 1:
            raise invalid("processes", processes, "a whole number of at least 1")
        self._function, self._shared, self._processes, self._ray = function, shared, processes, ray
        self._workers: Workers | None = None

    def __enter__(self) -> Self:
        if self._ray is not None:
            self._workers = RayTasks(self._function, self._shared, self._ray)
        elif self._processes > 1:
            self._workers = Processes(self._function, self._shared, self._processes)
        return self

    def __exit__(self, *_: object) -> None:
        if self._workers is not None:
            self._workers.close()
            self._workers = None

    def run(
        self,
        items: Sequence[Any],
        *,
        progress: Progress = lambda done, total: None,
        lost: Lost[Result] | None = None,
    ) -> Iterator[Result]:
        """The results of one round, in the order of the items; one round at a time."""
        if self._workers is None:
            return self._here(items, progress)
        return _Gathered(items, progress, lost).results(self._workers)

    def _here(self, items: Sequence[Any], progress: Progress) -> Iterator[Result]:
        for count, item in enumerate(items, start=1):
            result = call(self._function, self._shared, item)
            progress(count, len(items))
            yield result


class _Gathered:
    """Hands chunks to workers, a bounded number ahead, and puts what comes back into order.

    Chunks grow to about a quarter of a second.
    """

    def __init__(self, items: Sequence[Any], progress: Progress, lost: Lost[Any] | None) -> None:
        self._items, self._progress, self._lost = items, progress, lost
        self._again: collections.deque[Chunk] = collections.deque()
        self._ended: dict[int, ChunkOutcome] = {}
        self._ready: collections.deque[Any] = collections.deque()
        self._running = self._begun = self._done = self._next = 0
        self._item_s = math.inf
        self._failed: Exception | None = None

    def results(self, workers: Workers) -> Iterator[Any]:
        looked = -math.inf
        try:
            while self._ready or self._next < len(self._items):
                if not self._ready and self._failed is not None:
                    raise self._failed
                if not self._ready or time.monotonic() - looked > _POLL_S:
                    self._hand_out(workers)
                    self._take(workers.ended(0.0 if self._ready else None))
                    looked = time.monotonic()
                if self._ready:
                    yield self._ready.popleft()
        finally:
            workers.drop()

    def _hand_out(self, workers: Workers) -> None:
        slots = workers.slots
        while self._running < slots and self._failed is None:
            if self._again:
                chunk = self._again.popleft()
            elif self._begun < len(self._items) and self._begun < self._next + _AHEAD:
                chunk = Chunk(
                    start=self._begun, items=self._items[self._begun : self._begun + self._size(slots)]
                )
                self._begun += len(chunk.items)
            else:
                return
            workers.begin(chunk)
            self._running += 1

    def _size(self, slots: int) -> int:
        """Count the items that fill a chunk's time at the last one's pace, but few enough for every
        worker."""
        share = math.ceil((len(self._items) - self._begun) / (2 * slots))
        return max(1, min(_CHUNK_ITEMS, share, int(_CHUNK_S / max(self._item_s, 1e-6))))

    def _take(self, ended: Sequence[tuple[Chunk, ChunkOutcome]]) -> None:
        for chunk, outcome in ended:
            self._running -= 1
            if outcome.lost is not None and chunk.tries < TRIES:
                self._again.extend(chunk.again())
                continue
            if outcome.lost is not None:
                outcome = self._given_up(chunk, outcome.lost)
            elif outcome.error is None:
                self._item_s = outcome.seconds / len(chunk.items)
            self._done += len(outcome.results)
            self._ended[chunk.start] = outcome
        if ended:
            self._progress(self._done, len(self._items))
        while self._failed is None and self._next in self._ended:
            outcome = self._ended.pop(self._next)
            self._ready.extend(outcome.results)
            self._next += len(outcome.results)
            self._failed = outcome.error

    def _given_up(self, chunk: Chunk, why: str) -> ChunkOutcome:
        reason = f"its worker was lost {chunk.tries} times ({why})"
        if self._lost is not None:
            return ChunkOutcome(results=[self._lost(reason)])
        return ChunkOutcome(error=WorkerLost(f"item {chunk.start + 1:,} of {len(self._items):,}: {reason}"))
