"""Derives Driple's figures from a forecast step: how device, memory and network are used over a window."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

import numpy as np

from foretrain.forecast import Estimate, Forecast
from foretrain.job import Job, Run
from foretrain.predictors.base import Predictor
from foretrain.predictors.driple.features import (
    MEANS,
    RESOURCES,
    TARGETS,
    TWELVE,
    Array,
    exchanges,
    figures_of,
)

PERIOD_S = 0.05
THRESHOLD = 0.1
WINDOW_S, FEWEST_STEPS = 0.5, 3
"""The window that the figures are of: as many steps as fill the time, but a few at least; as a campaign
measures it."""
_FLOORS = {"device_utilization": 0.02, "memory_utilization": 0.0, "network_rx": 20e3, "network_tx": 20e3}
_WAITING = tuple(np.linspace(0.0, 1.0, 21).tolist())
_DEVICE = [name.startswith("device") for name in TARGETS]


@dataclass(frozen=True, slots=True, kw_only=True)
class Levels:
    """What a schedule does not tell: how busy a CPU is that waits for its network, and what a process holds
    beside its tensors."""

    waiting: Mapping[str, float] = dataclasses.field(default_factory=lambda: {"allreduce": 0.4, "ps": 0.3})
    traffic: Mapping[str, float] = dataclasses.field(default_factory=lambda: {"allreduce": 1.0, "ps": 1.0})
    """Bytes on the interface for each byte of gradients and weights."""
    process_bytes: float = 350e6
    tensors: float = 1.3
    """Resident bytes for each allocated one."""
    limit_bytes: float | None = None
    """What memory utilisation is a share of; None for the device's memory."""

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)


@dataclass(frozen=True, eq=False, kw_only=True)
class Use:
    """The four resources over a window, in samples of equal length."""

    period_s: float
    values: Mapping[str, Array]


@dataclass(frozen=True, eq=False, kw_only=True)
class _Step:
    """What a forecast tells: when the device computes and the network moves data in a step, and how much of
    them there is."""

    time_s: float
    computing: Sequence[tuple[float, float]]
    moving: Sequence[tuple[float, float]]
    bytes_moved: float
    allocated_bytes: float
    sync: str
    memory_share: float | None = None
    """On a GPU, NVML's figure: the share of time in which its memory is read or written."""


class Whitebox:
    """The figures from a forecast of another predictor."""

    def __init__(self, predictor: Predictor, levels: Levels | None = None) -> None:
        self.predictor, self.levels = predictor, levels or Levels()

    def figures(self, job: Job) -> Array:
        """As ``TARGETS`` names them; spans as shares of the window."""
        return figures_in(self.use(job))

    def use(self, job: Job, steps: int | None = None, samples: int | None = None) -> Use:
        """The resources over a measuring window, or over so many steps in so many samples."""
        return _use(self._step(job), self._levels(job), steps, samples)

    def window_s(self, job: Job) -> Estimate:
        """How long the measuring window is that the figures are of."""
        step_time = self.predictor.predict(job)["step_time_s"]
        return step_time * _steps_in_window(step_time.median)

    def fit(self, runs: Sequence[Run]) -> Self:
        """Find the constants; the schedule itself stays as it is."""
        known = [
            (run, figures)
            for run in runs
            if (figures := figures_of(run)) is not None and run.job.cluster.device.is_cpu
        ]
        if not known:
            return self
        steps = [self._step(run.job) for run, _ in known]
        measured = np.stack([figures for _, figures in known])
        self.levels = _with_memory(self.levels, known, steps)
        for sync in ("allreduce", "ps"):
            mine = [i for i, step in enumerate(steps) if step.sync == sync and step.bytes_moved > 0]
            if mine:
                self.levels = _fitted(self.levels, sync, [steps[i] for i in mine], measured[mine])
        return self

    def _levels(self, job: Job) -> Levels:
        limit = self.levels.limit_bytes if job.cluster.device.is_cpu else None
        return dataclasses.replace(self.levels, limit_bytes=limit or job.cluster.device.memory_bytes)

    def _step(self, job: Job) -> _Step:
        return _step_of(job, self.predictor.predict(job))


def _step_of(job: Job, forecast: Forecast) -> _Step:
    step, time_s = forecast.step, forecast["step_time_s"].median
    sync = "ps" if job.plan.servers else "allreduce"
    allocated = forecast["peak_memory_bytes"].median
    if step is None or (job.cluster.world_size == 1 and not job.cluster.device.is_cpu):
        computing = [(0.0, min(1.0, forecast["device_utilization"].median) * time_s)]
        share = forecast.quantities.get("memory_utilization")
        read = None if share is None or job.cluster.device.is_cpu else share.median
        return _Step(
            time_s=time_s, computing=computing, moving=[], bytes_moved=0.0, allocated_bytes=allocated,
            sync=sync, memory_share=read
        )  # fmt: skip
    lanes: dict[str, list[tuple[float, float]]] = {"compute": [], "network": []}
    for slot in step.time.slots:
        if slot.stage == 0:
            lanes[slot.lane].append((slot.start_s, slot.end_s))
    moved = _moved_bytes(job, forecast)
    return _Step(
        time_s=time_s,
        computing=lanes["compute"],
        moving=lanes["network"],
        bytes_moved=moved,
        allocated_bytes=allocated,
        sync=sync,
    )


def _moved_bytes(job: Job, forecast: Forecast) -> float:
    """Bytes that pass the interface in a step: of all workers on loopback, of one where each node has its
    own."""
    if not exchanges(job):
        return 0.0
    workers = job.cluster.world_size
    counted = workers if job.cluster.nodes == 1 else job.cluster.devices_per_node
    if job.plan.servers:
        return 2.0 * forecast.memory_by_category["weights"] * counted
    sent = forecast.quantities.get("network_tx_bytes_per_s")
    return counted * sent.median * forecast["step_time_s"].median if sent is not None else 0.0


def _steps_in_window(step_time_s: float) -> int:
    return max(FEWEST_STEPS, math.ceil(WINDOW_S / step_time_s))


def _use(step: _Step, levels: Levels, steps: int | None = None, samples: int | None = None) -> Use:
    count = steps or _steps_in_window(step.time_s)
    window = count * step.time_s
    samples = samples or max(1, round(window / PERIOD_S))
    ends = np.linspace(0.0, window, samples + 1)
    waiting = levels.waiting[step.sync] if step.moving else 0.0
    busy = _sampled(step.computing, step.time_s, ends)
    moving = _sampled(step.moving, step.time_s, ends)
    seconds = sum(end - start for start, end in step.moving)
    rate = moving * (step.bytes_moved * levels.traffic[step.sync] / seconds) if seconds > 0 else moving
    held = step.memory_share
    if held is None:
        held = (levels.process_bytes + levels.tensors * step.allocated_bytes) / float(
            levels.limit_bytes or 1.0
        )
    device = np.minimum(1.0, busy + waiting * (1.0 - busy))
    values = (device, np.full(samples, min(held, 1.0)), rate, rate)
    return Use(period_s=window / samples, values=dict(zip(RESOURCES, values, strict=True)))


def _sampled(spans: Sequence[tuple[float, float]], step_s: float, ends: Array) -> Array:
    """The share of each sample in which one of the spans, repeated every step, is under way."""
    if not spans:
        return np.zeros(len(ends) - 1)
    points, done = [0.0], [0.0]
    for start, end in sorted(spans):
        start, end = max(start, points[-1]), min(end, step_s)
        if end > start:
            points += [start, end]
            done += [done[-1], done[-1] + end - start]
    points, done = [*points, step_s], [*done, done[-1]]
    whole, rest = np.divmod(ends, step_s)
    total = whole * done[-1] + np.interp(rest, points, done)
    return np.asarray(np.clip(np.diff(total) / np.diff(ends), 0.0, 1.0))


def figures_in(use: Use) -> Array:
    """As ``TARGETS`` names them, of resources over a window; spans as shares of it."""
    found: dict[str, float] = {}
    for name, mean in zip(RESOURCES, MEANS, strict=True):
        values = use.values[name]
        found[mean] = float(values.mean())
        found.update(
            dict(
                zip(
                    [one for one in TWELVE if one.startswith(name)],
                    _three(values, _FLOORS[name]),
                    strict=True,
                )
            )
        )
    return np.array([found[name] for name in TARGETS])


def _three(values: Array, floor: float) -> tuple[float, float, float]:
    """Mean length of idle and of active spans as shares of the window, and the mean of the active spans'
    peaks."""
    active = values > max(floor, THRESHOLD * float(values.max(initial=0.0)))
    edges = np.flatnonzero(np.diff(active.astype(np.int8))) + 1
    pieces = np.split(np.arange(len(values)), edges)
    on = [piece for piece in pieces if active[piece[0]]]
    off = [piece for piece in pieces if not active[piece[0]]]
    lengths = [
        float(np.mean([len(piece) for piece in some])) / len(values) if some else 0.0 for some in (off, on)
    ]
    return lengths[0], lengths[1], float(np.mean([values[piece].max() for piece in on])) if on else 0.0


# The constants


def _with_memory(levels: Levels, known: Sequence[tuple[Run, Array]], steps: Sequence[_Step]) -> Levels:
    """By least squares of relative errors."""
    limits = [
        float((run.provenance.get("resources") or {}).get("memory_limit_bytes", math.nan)) for run, _ in known
    ]
    limit = float(np.nanmedian(limits)) if np.isfinite(limits).any() else math.nan
    measured = np.array(
        [figures[TARGETS.index("memory_utilization_peak")] for _, figures in known]
    ) * np.array(limits)
    rows = np.array([[1.0, step.allocated_bytes] for step in steps])
    kept = np.isfinite(measured) & (measured > 0)
    if kept.sum() < 2:
        return levels
    (process, tensors), *_ = np.linalg.lstsq(
        rows[kept] / measured[kept, None], np.ones(int(kept.sum())), rcond=None
    )
    return dataclasses.replace(
        levels, process_bytes=max(0.0, float(process)), tensors=max(0.0, float(tensors)), limit_bytes=limit
    )


def _fitted(levels: Levels, sync: str, steps: Sequence[_Step], measured: Array) -> Levels:
    """The interface's bytes by the median ratio; how busy a waiting CPU is by what fits the figures of the
    device best.

    Utilisation alone does not tell: whether a waiting CPU counts as active hangs on its being above the
    threshold.
    """
    rate = TARGETS.index("network_tx_bytes_per_s")
    ratio = float(
        np.nanmedian(measured[:, rate] / np.array([step.bytes_moved / step.time_s for step in steps]))
    )
    errors = []
    for waiting in _WAITING:
        levels = dataclasses.replace(
            levels, traffic={**levels.traffic, sync: ratio}, waiting={**levels.waiting, sync: waiting}
        )
        found = np.stack([figures_in(_use(step, levels)) for step in steps])
        errors.append((float(np.nanmean(np.abs(found - measured)[:, _DEVICE])), levels))
    return min(errors, key=lambda one: one[0])[1]
