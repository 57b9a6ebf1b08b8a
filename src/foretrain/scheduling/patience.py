"""Notices policies that go round in circles or leave jobs waiting for ever."""

from __future__ import annotations

from collections.abc import Sized

MOST_ACTS = 20
"""Starts at one moment, per job in the cluster, after which a policy is taken to go round in circles."""
_MOST_IDLE = 1000
"""Moments at which jobs wait, GPUs for one of them are free and none runs, after which a policy is taken to
starve them."""
_MOST_DOWN = 100_000
"""Moments at which jobs wait and none runs since nodes are down, after which they are taken never to run."""


class Patience:
    """Counts what a policy does at one moment, and the moments at which all stands still."""

    def __init__(self) -> None:
        self.acts = 0
        """Starts at this moment; the simulator sets it to nothing at the next one."""
        self.stood = False
        """Whether nothing ran at the last moment."""
        self._idle = self._down = 0

    def too_many(self, waiting: Sized, running: Sized) -> bool:
        """Whether there were too many starts at this moment for the jobs in the cluster."""
        return self.acts > MOST_ACTS * (len(waiting) + len(running) + 1)

    def stands_too_long(self, *, could_start: bool) -> bool:
        """Whether jobs wait and none runs once too often; one of them could start, or nodes are down."""
        self.stood = True
        if could_start:
            self._idle += 1
        else:
            self._down += 1
        return self._idle > _MOST_IDLE or self._down > _MOST_DOWN

    def goes_on(self) -> None:
        """Something runs."""
        self._idle = self._down = 0
        self.stood = False
