"""Tells from the profiler when a GPU computed and when it copied, in samples of equal length."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from foretrain.measure.replay import is_kernel

Array = npt.NDArray[np.float64]
_SAME_CLOCK_S = 0.02
"""The profiler's clock is the host's where the last event ends no further than this from when the host saw
the device idle."""
_FROM_HOST, _TO_HOST = "Memcpy HtoD", "Memcpy DtoH"


@dataclass(frozen=True, eq=False, kw_only=True)
class Activity:
    """Says when a device worked, in seconds since the epoch: rows of beginnings and ends that do not
    overlap."""

    kernels: Array
    """With fills and copies inside the device."""
    from_host: Array
    to_host: Array
    launched: int
    """Kernels, fills and copies inside the device."""
    clock_off_s: float
    """What was added to the profiler's times."""


def profiled(work: Callable[[], Any]) -> tuple[Any, Activity]:
    """Run work under the profiler; returns its result, and what the device did meanwhile; it is idle before
    and after."""
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        returned = work()
        torch.cuda.synchronize()
        idle_s = time.time()
    events = [
        (event.name(), event.start_ns(), event.start_ns() + event.duration_ns())
        for event in profile.profiler.kineto_results.events()
        if is_kernel(event)
    ]
    last_s = max((end for _, _, end in events), default=0) * 1e-9
    off_s = 0.0 if abs(idle_s - last_s) < _SAME_CLOCK_S or not events else idle_s - last_s
    kinds: dict[str, list[tuple[int, int]]] = {"kernels": [], "from_host": [], "to_host": []}
    for name, start, end in events:
        copied = (
            "from_host" if name.startswith(_FROM_HOST) else "to_host" if name.startswith(_TO_HOST) else None
        )
        kinds[copied or "kernels"].append((start, end))
    launched = len(kinds["kernels"])
    rows = {kind: joined(spans) * 1e-9 + off_s for kind, spans in kinds.items()}
    return returned, Activity(**rows, launched=launched, clock_off_s=off_s)


def joined(spans: Sequence[tuple[int, int]]) -> Array:
    """The spans in order, those that overlap as one.

    >>> joined([(5, 7), (0, 2), (1, 3)]).tolist()
    [[0.0, 3.0], [5.0, 7.0]]
    """
    if not spans:
        return np.zeros((0, 2))
    order = np.array(sorted(spans), dtype=np.float64)
    reached = np.maximum.accumulate(order[:, 1])
    first = np.concatenate(([True], order[1:, 0] > reached[:-1]))
    starts = order[first, 0]
    ends = reached[np.concatenate((first[1:], [True]))]
    return np.column_stack([starts, ends])


def sampled(spans: Array, points: Array) -> Array:
    """The share of each stretch between the points that the spans cover.

    >>> sampled(np.array([[0.0, 0.5], [1.0, 2.0]]), np.array([0.0, 1.0, 3.0])).tolist()
    [0.5, 0.5]
    """
    if not len(spans):
        return np.zeros(len(points) - 1)
    lengths = spans[:, 1] - spans[:, 0]
    covered = np.column_stack([np.concatenate(([0.0], np.cumsum(lengths)[:-1])), np.cumsum(lengths)])
    total = np.interp(points, spans.ravel(), covered.ravel(), left=0.0)
    shares: Array = np.diff(total) / np.diff(points)
    return shares
