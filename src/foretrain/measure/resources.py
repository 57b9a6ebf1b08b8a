"""Samples a worker's use of device, memory and network, and reduces it to Driple's twelve figures."""

from __future__ import annotations

import itertools
import math
import os
import resource
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol, Self

from foretrain.errors import InputError, invalid

PERIOD_S = 0.05
THRESHOLD = 0.1
AUTO = "auto"
"""In place of an interface: the one of the default route."""
RESOURCES = ("device_utilization", "memory_utilization", "network_rx", "network_tx")
FIGURES = ("idle_s", "active_s", "peak")
NETWORK_PEAKS = ("network_rx_peak", "network_tx_peak")
FLOORS: Mapping[str, float] = {
    "device_utilization": 0.02,
    "memory_utilization": 0.0,
    "network_rx": 20e3,
    "network_tx": 20e3,
}
"""Below this (shares, bytes/s) a resource is idle whatever its own maximum: background noise of a machine at
rest."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Series:
    """Samples of the four resources; each holds from the end of the one before, or zero, to its own end."""

    ends_s: tuple[float, ...] = ()
    device_utilization: tuple[float, ...] = ()
    memory_utilization: tuple[float, ...] = ()
    network_rx: tuple[float, ...] = ()
    network_tx: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        for name in RESOURCES:
            if len(getattr(self, name)) != len(self.ends_s):
                raise InputError(
                    f"series.{name}: has {len(getattr(self, name))} samples, ends_s has {len(self.ends_s)}"
                )
        if any(later <= earlier for earlier, later in itertools.pairwise((0.0, *self.ends_s))):
            raise InputError("series.ends_s: the times do not increase")

    @property
    def durations_s(self) -> tuple[float, ...]:
        return tuple(later - earlier for earlier, later in itertools.pairwise((0.0, *self.ends_s)))

    @property
    def length_s(self) -> float:
        return self.ends_s[-1] if self.ends_s else 0.0

    def mean(self, name: str) -> float:
        """Over time, not over samples."""
        values = zip(getattr(self, name), self.durations_s, strict=True)
        total = sum(value * length for value, length in values)
        return total / self.length_s if self.ends_s else 0.0

    def downsampled(self, points: int) -> Series:
        """At most ``points`` samples, each the mean over time of those it stands for."""
        size = max(1, math.ceil(len(self.ends_s) / max(1, points)))
        groups = [
            range(start, min(start + size, len(self.ends_s))) for start in range(0, len(self.ends_s), size)
        ]
        lengths = self.durations_s

        def means(values: Sequence[float]) -> tuple[float, ...]:
            return tuple(
                sum(values[i] * lengths[i] for i in group) / sum(lengths[i] for i in group)
                for group in groups
            )

        return Series(
            ends_s=tuple(self.ends_s[group[-1]] for group in groups),
            **{name: means(getattr(self, name)) for name in RESOURCES},
        )

    def to_dict(self) -> dict[str, list[float]]:
        """Four significant digits, which is more than the sampling has; times to 0.1 ms."""
        values = {name: [float(f"{value:.4g}") for value in getattr(self, name)] for name in RESOURCES}
        return {"ends_s": [round(end, 4) for end in self.ends_s], **values}

    @classmethod
    def read(cls, data: Mapping[str, Sequence[float]]) -> Series:
        return cls(**{name: tuple(data[name]) for name in ("ends_s", *RESOURCES)})


# The twelve figures


def twelve_figures(series: Series, threshold: float = THRESHOLD) -> dict[str, float]:
    """Average idle time, active time and peak of each resource (Driple, SIGMETRICS 2022).

    A resource is active while it is above ``threshold`` times its own maximum in the series and above its
    floor. Idle and active times are the mean lengths of contiguous spans; the peak is the mean over active
    spans of the largest value in each.

    >>> same = {"memory_utilization": (0.5,) * 4, "network_rx": (0,) * 4, "network_tx": (0,) * 4}
    >>> figures = twelve_figures(Series(ends_s=(1, 2, 3, 4), device_utilization=(1, 1, 0, 1), **same))
    >>> figures["device_utilization_idle_s"], figures["device_utilization_active_s"]
    (1.0, 1.5)
    """
    if not 0 <= threshold < 1:
        raise invalid("threshold", threshold, "a share of the maximum, from 0 to less than 1")
    return {
        f"{name}_{figure}": value
        for name in RESOURCES
        for figure, value in zip(FIGURES, _figures(series, name, threshold), strict=True)
    }


class UseSpan(NamedTuple):
    """A contiguous stretch in which a resource is idle or active."""

    active: bool
    length_s: float
    peak: float


def spans(series: Series, name: str, threshold: float = THRESHOLD) -> list[UseSpan]:
    """The idle and active stretches of one resource, in order, without gaps."""
    values = getattr(series, name)
    limit = max(FLOORS[name], threshold * max(values, default=0.0))
    samples = zip(values, series.durations_s, strict=True)
    stretches = []
    for active, group in itertools.groupby(samples, key=lambda sample: sample[0] > limit):
        values, lengths_s = zip(*group, strict=True)
        stretches.append(UseSpan(active, sum(lengths_s), max(values)))
    return stretches


def _figures(series: Series, name: str, threshold: float) -> tuple[float, float, float]:
    """Compute the figures that ``FIGURES`` names."""
    stretches = spans(series, name, threshold)
    active = [span for span in stretches if span.active]
    idle_s = _mean(span.length_s for span in stretches if not span.active)
    return idle_s, _mean(span.length_s for span in active), _mean(span.peak for span in active)


def _mean(values: Iterator[float]) -> float:
    known = list(values)
    return sum(known) / len(known) if known else 0.0


def mean_figures(workers: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Figure by figure, the mean over workers."""
    return {name: _mean(worker[name] for worker in workers) for name in (workers[0] if workers else ())}


# Sampling


class Meter(Protocol):
    """Reads a device: its utilisation since the last reading, and the share of its memory in use."""

    limit_bytes: float

    def utilization(self, elapsed_s: float) -> float: ...

    def memory(self) -> float: ...


class CpuMeter:
    """This process on its cores: CPU time over cores and wall time; resident memory over the memory limit."""

    def __init__(self, cores: int) -> None:
        self._cores, self.limit_bytes = cores, memory_limit()
        self._page = resource.getpagesize()
        self._last = time.process_time()

    def utilization(self, elapsed_s: float) -> float:
        now = time.process_time()
        used, self._last = now - self._last, now
        return min(1.0, used / (elapsed_s * self._cores)) if elapsed_s > 0 else 0.0

    def memory(self) -> float:
        return int(Path("/proc/self/statm").read_text().split()[1]) * self._page / self.limit_bytes


class GpuMeter:
    """One GPU through NVML, whose utilisation is itself an average over 1/6 s to 1 s."""

    def __init__(self, index: int) -> None:
        from foretrain.measure.nvml import Gpu

        self._gpu = Gpu(index)
        self.limit_bytes = float(self._gpu.memory()[1])

    def utilization(self, elapsed_s: float) -> float:
        return self._gpu.utilization()

    def memory(self) -> float:
        return self._gpu.memory_held()


def memory_limit() -> float:
    """Bytes that this machine or container may use."""
    physical = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    for file in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        try:
            text = Path(file).read_text().strip()
        except OSError:
            continue
        if text.isdigit():
            return float(min(physical, int(text)))
    return float(physical)


def interface_bytes(interface: str) -> tuple[int, int]:
    """Bytes that a network interface has received and sent so far."""
    try:
        lines = Path("/proc/net/dev").read_text().splitlines()[2:]
    except OSError as error:
        raise InputError(
            f"/proc/net/dev: cannot be read ({error.strerror}); network use is sampled on Linux only"
        ) from error
    counters = {name.strip(): rest.split() for name, _, rest in (line.partition(":") for line in lines)}
    if interface not in counters:
        raise invalid("interface", interface, f"a network interface of this machine: {', '.join(counters)}")
    return int(counters[interface][0]), int(counters[interface][8])


def find_interface(name: str) -> str:
    """The interface itself; for ``auto`` the one of the default route, or loopback where there is none."""
    if name != AUTO:
        return name
    rows = [line.split() for line in Path("/proc/net/route").read_text().splitlines()[1:]]
    return next((row[0] for row in rows if row[1] == "00000000"), "lo")


class Sampler:
    """A thread that reads a meter and an interface every ``period_s`` in the ``with`` block, for ``series``.

    The counters of an interface are those of everyone who uses it: on ``lo`` all workers of the machine, each
    byte once as received and once as sent. In a network namespace of its own a worker sees its own traffic.
    """

    def __init__(self, meter: Meter, *, interface: str = "lo", period_s: float = PERIOD_S) -> None:
        if period_s <= 0:
            raise invalid("period", period_s, "a time greater than zero")
        self._meter, self._interface, self._period_s = meter, interface, period_s
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._sample, name="resource sampler", daemon=True)
        self._rows: list[tuple[float, ...]] = []
        self.series = Series()

    def __enter__(self) -> Self:
        self._received, self._sent = interface_bytes(self._interface)
        self._start = self._last = time.perf_counter()
        self._meter.utilization(0.0)
        self._thread.start()
        return self

    def __exit__(self, *_: Any) -> None:
        self._stop.set()
        self._thread.join()
        columns = list(zip(*self._rows, strict=True)) or [()] * 5
        self.series = Series(**dict(zip(("ends_s", *RESOURCES), columns, strict=True)))

    def _sample(self) -> None:
        stopped = False
        while not stopped:
            stopped = self._stop.wait(max(0.0, self._last + self._period_s - time.perf_counter()))
            now = time.perf_counter()
            elapsed = now - self._last
            if elapsed >= self._period_s / 4 or (stopped and elapsed > 0 and not self._rows):
                self._rows.append((now - self._start, *self._reading(elapsed)))
                self._last = now

    def _reading(self, elapsed_s: float) -> tuple[float, float, float, float]:
        received, sent = interface_bytes(self._interface)
        rates = (received - self._received) / elapsed_s, (sent - self._sent) / elapsed_s
        self._received, self._sent = received, sent
        return self._meter.utilization(elapsed_s), self._meter.memory(), *rates
