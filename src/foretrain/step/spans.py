"""Adds up stretches of calls exactly: what host and device need for them, alone and one after the other."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

Column = npt.NDArray[np.float64]
Index = npt.NDArray[np.int64]
Mask = npt.NDArray[np.bool_]


class ResultReads(NamedTuple):
    """Says what a stretch takes in which the host reads results, and so waits for the device, from one point
    to another."""

    host_s: float
    """From the host's start to the host's end."""
    back_s: float
    """From the device being free to the host's end."""
    device_s: float
    """From the device being free to the device's end."""


@dataclass(frozen=True, slots=True)
class Span:
    """A stretch of calls: what the host needs to issue them, what the device needs to run them, and both from
    a standstill.

    Stretches add up exactly: the device starts a call when it is issued and the one before it has ended.

    >>> Span(2.0, 1.0, 2.5) + Span(2.0, 5.0, 6.0)
    Span(host_s=4.0, device_s=6.0, alone_s=8.0, communication_s=0.0, reads=None)
    """

    host_s: float = 0.0
    device_s: float = 0.0
    alone_s: float = 0.0
    communication_s: float = 0.0
    """The part of ``device_s`` in which the device waits for its team."""
    reads: ResultReads | None = None
    """Where the host waits for the device on the way; None where it does not."""

    def __add__(self, other: Span) -> Span:
        host_s, device_s = self.host_s + other.host_s, self.device_s + other.device_s
        communication_s = self.communication_s + other.communication_s
        if self.reads is None and other.reads is None:
            alone_s = max(self.alone_s + other.device_s, self.host_s + other.alone_s)
            return Span(host_s, device_s, alone_s, communication_s)
        a, b = self._reads, other._reads
        reads = ResultReads(
            max(a.host_s + b.host_s, self.alone_s + b.back_s),
            max(a.back_s + b.host_s, a.device_s + b.back_s),
            max(a.back_s + other.alone_s, a.device_s + b.device_s),
        )
        alone_s = max(a.host_s + other.alone_s, self.alone_s + b.device_s)
        return Span(host_s, device_s, alone_s, communication_s, reads)

    def __mul__(self, times: int) -> Span:
        if times < 1:
            return Span()
        if self.reads is not None:
            half = self * (times // 2)
            return half + half + self if times % 2 and times > 1 else half + half if times > 1 else self
        again = (times - 1) * max(self.host_s, self.device_s)
        return Span(
            times * self.host_s, times * self.device_s, self.alone_s + again, times * self.communication_s
        )

    def after(self, host: float, device: float) -> tuple[float, float]:
        """Tell when host and device are done with it, if they are free at these times."""
        reads = self.reads
        if reads is None:
            return host + self.host_s, max(host + self.alone_s, device + self.device_s)
        return max(host + reads.host_s, device + reads.back_s), max(
            host + self.alone_s, device + reads.device_s
        )

    @property
    def _reads(self) -> ResultReads:
        return self.reads or ResultReads(self.host_s, -math.inf, self.device_s)

    @property
    def steady_s(self) -> float:
        """Time of one of many that follow one another without a pause."""
        reads = self._reads
        return max(reads.host_s, reads.device_s, (reads.back_s + self.alone_s) / 2)


def span(host_s: Column, device_s: Column, communication_s: float = 0.0, waits: Mask | None = None) -> Span:
    """The stretch of these calls in their order; after those in ``waits`` the host waits for the device."""
    if waits is None or not waits.any():
        return replace(_plain(host_s, device_s), communication_s=communication_s)
    cuts = [0, *(np.flatnonzero(waits) + 1).tolist(), len(host_s)]
    parts = [_plain(host_s[start:end], device_s[start:end]) for start, end in itertools.pairwise(cuts)]
    together = functools.reduce(lambda before, part: _read(before) + part, parts)
    return replace(together, communication_s=communication_s)


def _plain(host_s: Column, device_s: Column) -> Span:
    if not len(host_s):
        return Span()
    done, issued = np.cumsum(device_s), np.cumsum(host_s)
    alone = float((issued - done + device_s).max() + done[-1])
    return Span(float(issued[-1]), float(done[-1]), max(alone, float(issued[-1])))


def _read(before: Span) -> Span:
    """Let the host wait for the device at the end of the stretch."""
    reads = before._reads
    ended = ResultReads(max(reads.host_s, before.alone_s), max(reads.back_s, reads.device_s), reads.device_s)
    return replace(before, reads=ended)


def total(spans: Sequence[Span]) -> Span:
    """Put spans one after the other; as layers alike share a span, those that follow one another are
    multiplied."""
    runs = (list(alike) for _, alike in itertools.groupby(spans, key=id))
    return functools.reduce(Span.__add__, (alike[0] * len(alike) for alike in runs), Span())
