"""Keeps jobs off devices whose memory they do not go into."""

from __future__ import annotations

from collections.abc import Iterable

from foretrain.cluster import Catalog
from foretrain.errors import InputError, invalid
from foretrain.scheduling.jobs import TraceJob
from foretrain.scheduling.speeds import Shape, Speeds


def checked_risk(risk: float) -> float:
    if not 0 <= risk <= 1:
        raise invalid("memory_risk", risk, "a chance from 0 to 1")
    return risk


class FittingSpeeds(Speeds):
    """Speeds of another kind, and none where a device has less memory than a job needs by the trace."""

    def __init__(self, inner: Speeds) -> None:
        self._inner = inner
        self._memory: dict[str, float | None] = {}

    def work(self, job: TraceJob) -> float:
        return self._inner.work(job)

    def rate(self, job: TraceJob, device: str, shape: Shape) -> float:
        if job.memory_bytes is not None:
            most = self._memory_of(device)
            if most is not None and job.memory_bytes > most:
                return 0.0
        return self._inner.rate(job, device, shape)

    def why_not(self, job: TraceJob, devices: Iterable[str]) -> str:
        kinds = list(devices)
        sizes = [self._memory_of(device) for device in kinds]
        if job.memory_bytes is not None and all(
            size is not None and size < job.memory_bytes for size in sizes
        ):
            largest = max(size for size in sizes if size is not None)
            return f"needs more memory than the {largest / 2**30:.0f} GiB of the cluster's largest device"
        return self._inner.why_not(job, kinds)

    def _memory_of(self, device: str) -> float | None:
        """Bytes of a device; None where the catalogue does not know it."""
        if device not in self._memory:
            try:
                self._memory[device] = float(Catalog.load().device(device).memory_bytes)
            except InputError:
                self._memory[device] = None
        return self._memory[device]
