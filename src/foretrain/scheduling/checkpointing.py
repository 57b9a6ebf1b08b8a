"""Slows jobs down by the checkpoints that they write as they go."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from foretrain.duration import USUAL_STORAGE_BYTES_PER_S
from foretrain.errors import invalid
from foretrain.forecast import Forecast
from foretrain.scheduling.jobs import TraceJob
from foretrain.scheduling.speeds import Shape, Speeds

_STATE = ("weights", "optimizer_state")
"""Of a rank's memory, what a checkpoint holds."""


class CheckpointedSpeeds(Speeds):
    """Of ``every_s + write_s`` of running, ``every_s`` are work. The time of a write is that of the job's
    kind, else the same for all."""

    def __init__(
        self, inner: Speeds, every_s: float, write_s: float = 0.0, by_kind: Mapping[str, float] | None = None
    ) -> None:
        if not every_s > 0:
            raise invalid("checkpoint_every", every_s, "a time above 0")
        self._inner, self._every_s, self._write_s, self._kinds = inner, every_s, write_s, dict(by_kind or {})

    def work(self, job: TraceJob) -> float:
        return self._inner.work(job)

    def rate(self, job: TraceJob, device: str, shape: Shape) -> float:
        whole_s = self._every_s + self.checkpoint_write_s(job)
        return self._inner.rate(job, device, shape) * self._every_s / whole_s

    def checkpoint_write_s(self, job: TraceJob) -> float:
        return self._kinds.get(job.kind, self._write_s)

    def why_not(self, job: TraceJob, devices: Iterable[str]) -> str:
        return self._inner.why_not(job, devices)


def write_time_s(forecast: Forecast) -> float | None:
    """Seconds to write what the forecast says a checkpoint holds: weights and optimizer state of a rank of
    every stage, to the storage of the job's cluster; None where the forecast does not tell."""
    if not forecast.ranks:
        return None
    state = sum(rank.by_category.get(name, 0.0) for rank in forecast.ranks for name in _STATE)
    ranks = forecast.job.cluster.world_size if forecast.job.plan.shard != "none" else forecast.job.plan.tensor
    rate = forecast.job.cluster.storage_bandwidth or USUAL_STORAGE_BYTES_PER_S
    writers = forecast.job.cluster.nodes if forecast.job.plan.shard != "none" else 1
    return state * ranks / (rate * writers) if state else None
