"""Spreads simulations over processes or a Ray cluster, where they take longer than starting processes."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from typing import Any, Generic, Self, TypeVar

from foretrain.fanout import Crew
from foretrain.fanout.chunks import call

Item = TypeVar("Item")
Result = TypeVar("Result")

_WORTH_S = 2.0
"""Work that is left, above which processes are started for it; starting them takes about as long."""


class Spreader(Generic[Item, Result]):
    """``function(shared, item)`` for items that come in several rounds: here, as long as the mean so far lets
    one expect little for the rest of a round; else by processes, or on a Ray cluster, which then stay until
    the ``with`` block ends.

    >>> with Spreader(pow, 2) as spread:
    ...     print([spread.run(items) for items in ([1, 2], [3])])
    [[2, 4], [8]]
    """

    def __init__(
        self,
        function: Callable[[Any, Item], Result],
        shared: Any,
        *,
        processes: int | None = None,
        ray: str | None = None,
    ) -> None:
        self._function, self._shared = function, shared
        self._crew = Crew(function, shared=shared, processes=processes or os.cpu_count() or 1, ray=ray)
        self._on_ray, self._at_work = ray is not None, False

    def __enter__(self) -> Self:
        if self._on_ray:
            self._start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._at_work:
            self._crew.__exit__()

    def _start(self) -> None:
        self._crew.__enter__()
        self._at_work = True

    def run(self, items: Sequence[Item], done: Callable[[int], None] = lambda _: None) -> list[Result]:
        """The results of a round, in the order of the items; ``done`` hears how many there are."""
        results: list[Result] = []
        begin = time.monotonic()
        while not self._at_work and len(results) < len(items):
            results.append(call(self._function, self._shared, items[len(results)]))
            done(len(results))
            left = len(items) - len(results)
            if left > 1 and left * (time.monotonic() - begin) / len(results) > _WORTH_S:
                self._start()
        ended = len(results)

        def progress(count: int, _: int) -> None:
            done(ended + count)

        return results + list(self._crew.run(items[ended:], progress=progress)) if self._at_work else results
