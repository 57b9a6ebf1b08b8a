"""Puts together what profiler and counters saw of a GPU, its memory and its link to the host."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from foretrain.measure.resources import RESOURCES, Series

COPY_OVERHEAD, REQUESTS = 0.067, 0.064
"""PCIe bytes beyond those of a copy to the device (headers), and bytes that the device sends to ask for them,
both per byte copied: counters of an H200 during copies of 64 MiB (``benchmarks/driple_gpu.py``, response)."""
_BOUND = 0.8
"""Of the time between steps: loaders that take so much of it set the pace, not the host."""
_MOST_SLOWED = 2.0


class LinkRates(NamedTuple):
    """Mean bytes per second over a PCIe link, as counters saw them."""

    received: float
    sent: float


def link_rates(samples: Mapping[str, Any]) -> LinkRates | None:
    """Average the rates of links by hardware counters, which have a new value every 100 ms; else by NVML's
    readings of 20 ms each; None where there is neither."""
    counters, readings = samples.get("counters") or {}, samples.get("pcie") or {}
    known = [
        (received, sent)
        for received, sent in zip(
            counters.get("pcie_received", ()), counters.get("pcie_sent", ()), strict=True
        )
        if received and sent
    ] or list(zip(readings.get("received", ()), readings.get("sent", ()), strict=True))
    if not known:
        return None
    return LinkRates(*(statistics.mean(column) for column in zip(*known, strict=True)))


def slowed_by(watched_s: float, pace_s: float, loading_s: float | None) -> float:
    """Say how many times as long a step took under the profiler, which slows the host down. Where loaders set
    the pace nothing is."""
    if loading_s is not None and loading_s > _BOUND * pace_s:
        return 1.0
    return min(max(watched_s / pace_s, 1.0 / _MOST_SLOWED), _MOST_SLOWED)


def joined_series(series: Series, rates: LinkRates | None, slowed: float) -> Series:
    """The series with the device as busy as at its own pace, and all traffic of the link.

    Kernels take what they take, however slow the host is: shares grow as the profiler's delay is taken out.
    ``network_rx`` has the copies from the host. What else the counters saw, which comes with the launches of
    kernels, is spread evenly.
    """
    device = tuple(min(1.0, share * slowed) for share in series.device_utilization)
    if rates is None:
        return _with(series, device, series.network_rx, series.network_tx)
    copied = series.mean("network_rx")
    received = max(0.0, rates.received - (1 + COPY_OVERHEAD) * copied)
    sent = max(0.0, rates.sent - REQUESTS * copied)
    return _with(
        series,
        device,
        [received + (1 + COPY_OVERHEAD) * rate for rate in series.network_rx],
        [sent + REQUESTS * rate for rate in series.network_rx],
    )


def _with(
    series: Series, device: Sequence[float], received: Sequence[float], sent: Sequence[float]
) -> Series:
    return Series(
        ends_s=series.ends_s,
        device_utilization=tuple(device),
        memory_utilization=series.memory_utilization,
        network_rx=tuple(received),
        network_tx=tuple(sent),
    )


def whole_turns(series: Series, turn_s: float) -> Series | None:
    """The series cut to whole turns, each of which has a batch of every worker; None where it is shorter than
    one."""
    turns = int(series.length_s / turn_s + 0.02)
    if not turns:
        return None
    count = sum(end <= turns * turn_s * 1.02 for end in series.ends_s)
    columns = {name: getattr(series, name)[:count] for name in ("ends_s", *RESOURCES)}
    return Series(**columns)
