"""Slows jobs down that share a link, where their bursts meet.

A job sends (or receives) in bursts: for a share ``a`` of its time, at a part ``p`` of the link's rate. Two
jobs whose bursts come independently of one another meet for ``a * a'`` of the time. What they then want
together, ``p + p'``, takes ``max(0, p + p' - 1)`` longer than the link has time for, so the expected step of
each is longer by ``a * a' * max(0, p + p' - 1)``. The two directions of a link are added. No figure is
fitted, and none has been measured.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from foretrain.errors import invalid


@dataclass(frozen=True, slots=True, kw_only=True)
class Bursts:
    """What a job sends over a link, or receives."""

    active: float = 0.0
    """Share of its time."""
    peak: float = 0.0
    """Of the link's rate, while it is active."""

    def __post_init__(self) -> None:
        for name in ("active", "peak"):
            if not 0 <= getattr(self, name) <= 1:
                raise invalid(f"bursts.{name}", getattr(self, name), "a share from 0 to 1")


NO_BURSTS = Bursts()


def excess(job: Bursts, others: Iterable[Bursts]) -> float:
    """By how much of itself a job's time is expected to be longer beside others.

    >>> excess(Bursts(active=0.5, peak=1.0), [Bursts(active=0.5, peak=0.5)])
    0.125
    >>> excess(Bursts(active=0.5, peak=0.3), [Bursts(active=1.0, peak=0.6)])
    0.0
    """
    return math.fsum(job.active * other.active * max(0.0, job.peak + other.peak - 1.0) for other in others)
