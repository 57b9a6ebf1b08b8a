"""Forecasts what sharing a GPU costs from two figures of each job: how busy it keeps the device, and how long
its kernels are.

Beside others a step takes ``(1 + (busy * (1 + w))^p)^(1/p)`` over the same with w = 0 times as long as alone:
what the device does is stretched by waiting w, and the host's part hides it, more or less (p). Each other job
adds ``k * its busy^e * (its kernel's time / ours)^g`` to w. Processes that take turns on a device wait for
slices of time (g = 0); under MPS their kernels run side by side and queue behind each other's, so that long
kernels hold up short ones (g > 0).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from foretrain.errors import ForetrainError, invalid, unknown
from foretrain.scheduling.sharing.interference import Interference
from foretrain.scheduling.sharing.link import NO_BURSTS, Bursts, excess

if TYPE_CHECKING:
    from foretrain.forecast import Forecast


LEAST_BUSY = 1e-3
"""A job that is forecast to be less busy counts as this."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Use:
    """How a job uses a device that it has to itself."""

    busy: float = 1.0
    """Share of a step with a kernel on the device."""
    kernel_s: float = 20e-6
    """Mean time of a kernel."""
    memory_bytes: float = 0.0
    """Of the device's memory, at its peak; 0 where it is not known."""
    received: Bursts = NO_BURSTS
    """Over the device's link to its host; none where it is not known."""
    sent: Bursts = NO_BURSTS

    def __post_init__(self) -> None:
        if not 0 < self.busy <= 1:
            raise invalid("busy", self.busy, "a share above 0 and at most 1")
        if not 0 < self.kernel_s < math.inf:
            raise invalid("kernel_s", self.kernel_s, "a time above 0")
        if not 0 <= self.memory_bytes < math.inf:
            raise invalid("memory_bytes", self.memory_bytes, "a number of at least 0")

    @classmethod
    def of(cls, forecast: Forecast, steps_per_s: float | None = None) -> Use:
        """As a forecast has it: its device's utilisation, kernels and peak memory. Where the pace alone was
        measured, the device's time is put over that step: hosts are harder to forecast than devices."""
        quantities = forecast.quantities
        missing = [name for name in ("step_time_s", "device_utilization") if name not in quantities]
        if missing:
            raise ForetrainError(
                f"sharing: the forecast has no {missing[0]}, which tells how busy the device is"
            )
        busy = min(max(quantities["device_utilization"].median, LEAST_BUSY), 1.0)
        busy_s = busy * quantities["step_time_s"].median
        kernels = quantities["kernels"].median if "kernels" in quantities else 0.0
        memory = quantities["peak_memory_bytes"].median if "peak_memory_bytes" in quantities else 0.0
        if steps_per_s is not None:
            busy = min(max(busy_s * steps_per_s, LEAST_BUSY), 1.0)
        return cls(busy=busy, kernel_s=busy_s / kernels if kernels else cls().kernel_s, memory_bytes=memory)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sharing:
    """The coefficients of a way to share a device."""

    waits: float
    """k: what a job that is always busy, of equal kernels, adds to the time on the device."""
    by_busy: float
    """e: how that falls with its busy share."""
    by_kernel: float
    """g: how it grows with the length of its kernels over ours."""
    hides: float
    """p: how well the host's part of a step hides waiting; infinite for wholly."""

    def speed(self, job: Use, others: Sequence[Use]) -> float:
        """Of a job beside others, over that alone.

        >>> round(WAYS["turns"].speed(Use(), [Use()]), 2)
        0.45
        """
        if not others:
            return 1.0
        waits = math.fsum(
            self.waits * other.busy**self.by_busy * (other.kernel_s / job.kernel_s) ** self.by_kernel
            for other in others
        )
        stretched, alone = job.busy * (1 + waits), job.busy
        return float(((1 + alone**self.hides) / (1 + stretched**self.hides)) ** (1 / self.hides))


WAYS: Mapping[str, Sharing] = {
    "turns": Sharing(waits=1.457, by_busy=0.115, by_kernel=0.0, hides=7.67),
    "mps": Sharing(waits=1.256, by_busy=1.136, by_kernel=0.613, hides=3.14),
}
"""Processes that take turns, as the driver has it, and under NVIDIA's MPS: fitted to the 45 pairs of ten jobs
in data/studies/h200_sharing.jsonl (``python benchmarks/sharing.py h200``)."""


def way(name: str) -> Sharing:
    if name not in WAYS:
        raise unknown("sharing", name, WAYS)
    return WAYS[name]


class ByUse(Interference):
    """What sharing costs by the use that each kind of job makes of a device and of its link to the host; one
    that is not known keeps the device busy all the time."""

    def __init__(self, uses: Mapping[str, Use], sharing: Sharing) -> None:
        self._uses, self._sharing = dict(uses), sharing

    def use(self, kind: str) -> Use:
        return self._uses.get(kind, Use())

    def memory_bytes(self, kind: str) -> float:
        return self.use(kind).memory_bytes

    def speed(self, device: str, kind: str, others: Sequence[str]) -> float:
        job, beside = self.use(kind), [self.use(other) for other in others]
        waits = excess(job.received, (other.received for other in beside))
        waits += excess(job.sent, (other.sent for other in beside))
        return self._sharing.speed(job, beside) / (1.0 + waits)
