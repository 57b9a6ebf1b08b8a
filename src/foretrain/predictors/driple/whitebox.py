"""Derives Driple's figures from a forecast step: how device, memory and network are used over a window."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Self

import numpy as np

from foretrain.capture import capture_job
from foretrain.duration import batch_loading_s, paced
from foretrain.forecast import Estimate, Forecast
from foretrain.job import Job
from foretrain.predictors.base import Predictor
from foretrain.predictors.driple.features import (
    MEANS,
    RESOURCES,
    TARGETS,
    TWELVE,
    Array,
    exchanges,
    figures_of,
    graph_key,
    on_cpu,
    over_host_link,
)
from foretrain.predictors.physics import link_bytes_per_s
from foretrain.run import Run
from foretrain.step.passes import host_link_bytes_per_s
from foretrain.step.timeline import StepUse

CPU_PERIOD_S, GPU_PERIOD_S = 0.05, 0.01
"""Of the samples, as ``measure campaign`` and ``measure steps --resources`` take them."""
THRESHOLD = 0.1
COPY_BYTES, REQUEST_BYTES = 1.067, 0.064
"""Bytes over PCIe to the device, and back to ask for them, per byte that is copied to it."""
_SIZEABLE_BYTES, _BOUND = 5e6, 0.8
"""Batches whose handing over can be told from noise, and the share of the pace at which loaders set it."""
WINDOW_S, FEWEST_STEPS = 0.5, 3
"""The window that the figures are of: as many steps as fill the time, but a few at least; as a campaign
measures it."""
_TELLING = 4
"""Sizes of jobs from which on runs tell how much is held for each byte of tensors."""
_OVER_TIME = np.isin(TARGETS, (MEANS[0], *MEANS[2:], "memory_busy"))
"""Averages of what a step does, which a longer step has less of."""
_FLOORS = {"device_utilization": 0.02, "memory_utilization": 0.0, "network_rx": 20e3, "network_tx": 20e3}


@dataclass(frozen=True, slots=True, kw_only=True)
class Levels:
    """Holds what a forecast does not tell: what a process holds beside its tensors, on a CPU and on a GPU,
    and what goes over the link to a GPU beside batches. Figures of a GPU are those of
    ``data/h200_resources``."""

    process_bytes: float = 350e6
    tensors: float = 1.3
    """Resident bytes for each allocated one."""
    limit_bytes: float | None = None
    """What memory utilisation is a share of; None for the device's memory."""
    context_bytes: float = 880e6
    """Of a GPU, that a process holds beside its tensors."""
    launch_received_bytes: float = 2500.0
    """Over a GPU's link with each kernel."""
    launch_sent_bytes: float = 450.0
    idle_received_bytes_per_s: float = 3.6e6
    """Over the link of a GPU that does nothing."""
    idle_sent_bytes_per_s: float = 4.6e6
    handing_s_per_byte: float = 0.5e-9
    """What it delays a step that batches are taken over from the workers of a loader and pinned, in the
    process that issues the kernels."""

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)


@dataclass(frozen=True, eq=False, kw_only=True)
class ResourceUse:
    """The four resources of a rank over a window, in samples of equal length."""

    period_s: float
    values: Mapping[str, Array]
    memory_busy: float = math.nan
    """Share of the time in which memory is read or written."""


class Whitebox:
    """The figures from a forecast of another predictor: averages are those of the forecast."""

    def __init__(self, predictor: Predictor, levels: Levels | None = None) -> None:
        self.predictor, self.levels = predictor, levels or Levels()

    def figures(self, job: Job) -> Array:
        """Forecast the figures that ``TARGETS`` names; spans as shares of the window."""
        forecast = self.predictor.predict(job)
        figures = figures_in(self.use(forecast))
        figures[_OVER_TIME] *= self._handed_share(forecast)
        return figures

    def use(self, forecast: Forecast, steps: int | None = None, samples: int | None = None) -> ResourceUse:
        """The resources over a measuring window, or over so many steps in so many samples."""
        job = forecast.job
        step, feeding = self._fed(_step_use(forecast), job)
        each_s = step.time_s / feeding.steps
        turns = math.ceil(_steps_in_window(each_s) / feeding.steps)
        window = (steps or turns * feeding.steps) * each_s
        samples = samples or max(1, round(window / period_s(job)))
        ends_s = np.linspace(0.0, window, samples + 1)[1:]
        busy, sent = step.sampled(ends_s)
        received = sent
        if over_host_link(job):
            received, sent = self._host_link(feeding.copies.sampled(ends_s)[1], forecast, each_s)
        values = (busy, np.full(samples, self.held(forecast)), received, sent)
        read = forecast.quantities.get("memory_busy")
        return ResourceUse(
            period_s=window / samples,
            values=dict(zip(RESOURCES, values, strict=True)),
            memory_busy=math.nan if read is None else read.median,
        )

    def _host_link(self, copied: Array, forecast: Forecast, each_s: float) -> tuple[Array, Array]:
        """Give the rates at which a GPU receives from its host and sends to it: batches, and what comes with
        kernels."""
        launches = forecast.quantities.get("kernels")
        launched = 0.0 if launches is None else launches.median / each_s
        known = self.levels
        return (
            COPY_BYTES * copied + known.idle_received_bytes_per_s + known.launch_received_bytes * launched,
            REQUEST_BYTES * copied + known.idle_sent_bytes_per_s + known.launch_sent_bytes * launched,
        )

    def held(self, forecast: Forecast) -> float:
        """Share of the device's memory that a rank holds; on a CPU with the process itself."""
        if forecast.job.cluster.groups[0].device.is_cpu:
            tensors = self.levels.tensors * forecast["peak_memory_bytes"].median
            limit = self.levels.limit_bytes or forecast.memory_capacity_bytes
            return min(1.0, (self.levels.process_bytes + tensors) / limit)
        fullest = forecast.fullest
        assert fullest is not None
        return min(1.0, (self.levels.context_bytes + fullest.median) / forecast.memory_capacity_bytes)

    def window_s(self, job: Job) -> Estimate:
        """Say how long the measuring window is that the figures are of."""
        handing_s = self._handing_s(job)
        step_time = self.predictor.predict(job)["step_time_s"].mapped(lambda step_s: step_s + handing_s)
        step_time = paced(job, step_time)
        return step_time * _steps_in_window(step_time.median)

    def _handed_share(self, forecast: Forecast) -> float:
        """Give what is left of the pace where batches are handed over: the host issues kernels later now and
        then, in stretches that are shorter than a sample."""
        step_s, loading_s = forecast["step_time_s"].median, batch_loading_s(forecast.job) or 0.0
        slowed_s = step_s + self._handing_s(forecast.job)
        return max(step_s, loading_s) / max(slowed_s, loading_s) if step_s else 1.0

    def _handing_s(self, job: Job) -> float:
        if job.workload.training.loader_rate is None or on_cpu(job):
            return 0.0
        return self.levels.handing_s_per_byte * loaded_bytes(job)

    def _fed(self, step: StepUse, job: Job) -> tuple[StepUse, Feeding]:
        """Steps as a loader lets them run. Its workers begin together, so their batches come together."""
        loading_s = batch_loading_s(job)
        if loading_s is None:
            return step, Feeding(1, StepUse.even(step.time_s, 0.0, 0.0))
        link = host_link_bytes_per_s(job.cluster)
        copying_s = 0.0 if on_cpu(job) else loaded_bytes(job) / link
        waiting_s = max(0.0, loading_s - step.time_s - copying_s)
        together = (job.workload.training.loader_workers or 1) if waiting_s else 1
        copies = StepUse(
            ends_s=np.array([copying_s, copying_s + step.time_s]),
            busy=np.zeros(2),
            sent_bytes_per_s=np.array([link, 0.0]),
        )
        return (
            step.waiting(copying_s, together * waiting_s, together),
            Feeding(together, copies.waiting(0.0, together * waiting_s, together)),
        )

    def fit(self, runs: Sequence[Run]) -> Self:
        """Find what processes hold and what goes over a GPU's link; the schedule itself stays as it is."""
        known = [(run, figures) for run in runs if (figures := figures_of(run)) is not None]
        cores = [(run, figures) for run, figures in known if on_cpu(run.job)]
        if cores:
            allocated = [self.predictor.predict(run.job)["peak_memory_bytes"].median for run, _ in cores]
            self.levels = _with_memory(self.levels, cores, allocated)
        self.levels = _with_gpu(
            self.levels,
            [
                (run, figures, self.predictor.predict(run.job))
                for run, figures in known
                if over_host_link(run.job) and "pace_s" in run.provenance
            ],
        )
        return self


def _step_use(forecast: Forecast) -> StepUse:
    if forecast.step is not None:
        return StepUse.of(forecast.step)
    sent = forecast.quantities.get("network_tx_bytes_per_s")
    return StepUse.even(
        forecast["step_time_s"].median,
        forecast["device_utilization"].median,
        0.0 if sent is None else sent.median,
    )


def period_s(job: Job) -> float:
    """Give the seconds between samples of a job's resources."""
    return CPU_PERIOD_S if on_cpu(job) else GPU_PERIOD_S


def rank_link_bytes_per_s(job: Job) -> float:
    """Say what the network's figures of a rank may reach: the rate of its links, or of the link to its
    host."""
    if over_host_link(job):
        return host_link_bytes_per_s(job.cluster)
    return link_bytes_per_s(job) if exchanges(job) else math.inf


class Feeding(NamedTuple):
    """Says how batches come: so many steps follow one another, then all wait."""

    steps: int
    copies: StepUse
    """What a GPU receives from its host, as bytes that are sent."""


def loaded_bytes(job: Job) -> float:
    """Count the bytes of a rank's batch as its loader hands it on, numbers in fp32 whatever the model
    computes in."""
    held = sum(buffer.size_bytes for buffer in capture_job(job).buffers if buffer.category == "inputs")
    halved = job.workload.training.precision in ("bf16", "fp16") and job.workload.training.sequence is None
    return float(held * (2 if halved else 1))


def _steps_in_window(step_time_s: float) -> int:
    return max(FEWEST_STEPS, math.ceil(WINDOW_S / step_time_s))


def figures_in(use: ResourceUse) -> Array:
    """Compute the figures that ``TARGETS`` names, of resources over a window; spans as shares of it."""
    figures: dict[str, float] = {"memory_busy": use.memory_busy}
    for name, mean in zip(RESOURCES, MEANS, strict=True):
        values = use.values[name]
        figures[mean] = float(values.mean())
        figures.update(
            dict(
                zip(
                    [one for one in TWELVE if one.startswith(name)],
                    _three(values, _FLOORS[name]),
                    strict=True,
                )
            )
        )
    return np.array([figures[name] for name in TARGETS])


def _three(values: Array, floor: float) -> tuple[float, float, float]:
    """Mean length of idle and of active spans as shares of the window, and the mean of the active spans'
    peaks."""
    active = values > max(floor, THRESHOLD * float(values.max(initial=0.0)))
    edges = np.flatnonzero(np.diff(active.astype(np.int8))) + 1
    pieces = np.split(np.arange(len(values)), edges)
    on = [piece for piece in pieces if active[piece[0]]]
    off = [piece for piece in pieces if not active[piece[0]]]
    lengths = [
        float(np.mean([len(piece) for piece in runs])) / len(values) if runs else 0.0 for runs in (off, on)
    ]
    return lengths[0], lengths[1], float(np.mean([values[piece].max() for piece in on])) if on else 0.0


# The constants


def _with_memory(
    levels: Levels, known: Sequence[tuple[Run, Array]], allocated_bytes: Sequence[float]
) -> Levels:
    """Learn the levels of memory by least squares of relative errors; few sizes of jobs tell the process
    alone."""
    limits = [
        float((run.provenance.get("resources") or {}).get("memory_limit_bytes", math.nan)) for run, _ in known
    ]
    limit = float(np.nanmedian(limits)) if np.isfinite(limits).any() else math.nan
    measured = np.array(
        [figures[TARGETS.index("memory_utilization_peak")] for _, figures in known]
    ) * np.array(limits)
    rows = np.array([[1.0, allocated] for allocated in allocated_bytes])
    kept = np.isfinite(measured) & (measured > 0)
    if not kept.any():
        return levels
    if len(np.unique(rows[kept], axis=0)) < _TELLING:
        tensors = levels.tensors
        process = float(np.median(measured[kept] - tensors * rows[kept, 1]))
    else:
        (process, tensors), *_ = np.linalg.lstsq(
            rows[kept] / measured[kept, None], np.ones(int(kept.sum())), rcond=None
        )
    held = {"process_bytes": max(0.0, float(process)), "tensors": max(0.0, float(tensors))}
    return dataclasses.replace(levels, **held, limit_bytes=limit)


def _with_gpu(levels: Levels, known: Sequence[tuple[Run, Array, Forecast]]) -> Levels:
    """Learn the levels of GPUs by medians over runs of single ones."""
    held, received, sent = (
        TARGETS.index(name)
        for name in ("memory_utilization", "network_rx_bytes_per_s", "network_tx_bytes_per_s")
    )
    contexts, launches, handing = [], [], []
    alone_s = {
        graph_key(run.job): run.provenance["pace_s"]
        for run, _, _ in known
        if run.job.workload.training.loader_rate is None
    }
    for run, figures, forecast in known:
        pace_s, loading_s, fullest = run.provenance["pace_s"], batch_loading_s(run.job), forecast.fullest
        assert fullest is not None
        contexts.append(figures[held] * forecast.memory_capacity_bytes - fullest.median)
        per_launch = pace_s / forecast["kernels"].median
        if loading_s is None:
            launches.append(
                (
                    (figures[received] - levels.idle_received_bytes_per_s) * per_launch,
                    (figures[sent] - levels.idle_sent_bytes_per_s) * per_launch,
                )
            )
            continue
        usual_s, size = alone_s.get(graph_key(run.job)), loaded_bytes(run.job)
        if usual_s is not None and size > _SIZEABLE_BYTES and loading_s < _BOUND * pace_s:
            handing.append((pace_s - usual_s) / size)
    fitted = {}
    if contexts:
        fitted["context_bytes"] = max(0.0, float(np.nanmedian(contexts)))
    if launches:
        both = np.nanmedian(np.array(launches), axis=0)
        fitted["launch_received_bytes"], fitted["launch_sent_bytes"] = np.maximum(both, 0.0).tolist()
    if handing:
        fitted["handing_s_per_byte"] = max(0.0, float(np.median(handing)))
    return dataclasses.replace(levels, **fitted)
