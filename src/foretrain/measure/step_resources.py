"""Measures what the steps of a job use of one device, of its memory and of the link to its host."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from foretrain.capture.keys import installed_versions
from foretrain.duration import batch_loading_s
from foretrain.errors import ForetrainError, UnsupportedJob, first_line
from foretrain.job import Job
from foretrain.measure.activity import Activity, profiled, sampled
from foretrain.measure.gpu_series import joined_series, link_rates, slowed_by
from foretrain.measure.loading import PREFETCH, Feed, Loader, fed_input
from foretrain.measure.ops import machine
from foretrain.measure.resources import THRESHOLD, CpuMeter, Sampler, Series, twelve_figures
from foretrain.measure.steps import Stepper, check_machine, forget_jobs
from foretrain.measure.watching import PERIOD_S, Watcher
from foretrain.run import Run

LINK = "pcie"
"""What ``network`` is in the figures of one GPU: its link to the host."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Window:
    """Says what is watched: so long, and so many steps at least, after warming up."""

    seconds: float = 0.5
    steps: int = 3
    warm_up_s: float = 0.3
    limit_s: float = 6.0
    """No pass over the steps lasts longer."""
    period_s: float = PERIOD_S


class Session:
    """A model that is built once and whose steps are watched, with data at hand or behind a loader."""

    def __init__(self, job: Job, device: str, watcher: Watcher, window: Window | None = None) -> None:
        self.job, self.device, self._watcher, self.window = job, device, watcher, window or Window()
        self.begun_s = time.time()
        self.held_before = self._held()
        self._stepper = Stepper(job, device)
        if device == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()

    def measure(self, loader: Loader | None = None) -> Run:
        """A run: step time without the profiler, then the twelve figures of as many steps with it."""
        inputs = self._stepper.model.inputs
        feed = None if loader is None else Feed(loader, fed_input(inputs)[1])
        begun_s = time.time()
        try:
            with feed or contextlib.nullcontext():
                return self._measured(loader, feed, begun_s)
        finally:
            self._stepper.model = self._stepper.model._replace(inputs=inputs)

    def _measured(self, loader: Loader | None, feed: Feed | None, begun_s: float) -> Run:
        ahead = 1 if loader is None else PREFETCH * loader.workers + 2
        marks = self._run(feed, self._warm(ahead))
        together = 1 if loader is None else loader.workers
        marks = self._run(feed, self._enough(1, together))
        plain = marks[1], marks[-1]
        step_s = (plain[1] - plain[0]) / (len(marks) - 2)
        series, spans, about = self._watched(feed, ahead, together)
        training = self.job.workload.training
        if feed is not None:
            assert loader is not None
            rate = loader.rate or self.job.micro_batch / statistics.median(feed.made_in_s)
            training = dataclasses.replace(training, loader_rate=rate, loader_workers=loader.workers)
        workload = dataclasses.replace(self.job.workload, training=training)
        job = dataclasses.replace(self.job, workload=workload)
        samples = self._samples(*plain)
        if self.device == "cuda":
            slowed = slowed_by(about["step_time_profiled_s"], step_s, batch_loading_s(job))
            series = joined_series(series, link_rates(samples), slowed)
            about["slowed_by"] = slowed
        alone = {"step_time_s": step_s, "samples_per_s": training.global_batch / step_s}
        measured = {
            **(alone if loader is None else {}),  # a step's time is without what it waits for data
            "device_utilization": series.mean("device_utilization"),
            "memory_utilization": series.mean("memory_utilization"),
            "network_rx_bytes_per_s": series.mean("network_rx"),
            "network_tx_bytes_per_s": series.mean("network_tx"),
        }
        if self.device == "cuda":
            measured["peak_memory_bytes"] = float(torch.cuda.max_memory_allocated())
            measured["reserved_memory_bytes"] = float(torch.cuda.max_memory_reserved())
        resources = {
            "period_s": self.window.period_s,
            "threshold": THRESHOLD,
            "figures": twelve_figures(series),
            "series": series.to_dict(),
            "network": LINK,
            "network_shared_by": 1,
        }
        provenance = {
            "source": "foretrain measure steps --resources",
            **dict(installed_versions(self.job.workload.model)),
            **machine(self.device),
            "resources": resources,
            **_about_loading(loader, feed),
            **about,
            "held_before_bytes": self.held_before[0],
            "pace_s": step_s,
            "seconds": time.time() - begun_s,
            "nvml": {"plain": samples, "watched": self._samples(*spans)},
        }
        return Run(job=job, measured=measured, provenance=provenance)

    # Steps

    def _run(self, feed: Feed | None, enough: Callable[[list[float]], bool]) -> list[float]:
        """Run steps; returns when each was over, in seconds since the epoch; on a GPU, which follows its
        host, the one before it."""
        stepper, marks = self._stepper, list[float]()
        before: torch.cuda.Event | None = None
        while not enough(marks):
            if feed is not None:
                self._put(feed.next())
            stepper()
            if self.device == "cuda":
                done = torch.cuda.Event()
                done.record()
                if before is not None:
                    before.synchronize()
                before = done
            marks.append(time.time())
        if self.device == "cuda":
            torch.cuda.synchronize()
        return marks

    def _put(self, batch: torch.Tensor) -> None:
        inputs = self._stepper.model.inputs
        key, _ = fed_input(inputs)
        if isinstance(inputs, Mapping):
            changed: Any = {**inputs, key: batch}
        else:
            changed = (*inputs[:key], batch, *inputs[key + 1 :])
        self._stepper.model = self._stepper.model._replace(inputs=changed)

    def _warm(self, ahead: int) -> Callable[[list[float]], bool]:
        begun, window = time.time(), self.window

        def enough(marks: list[float]) -> bool:
            spent_s = time.time() - begun
            return (len(marks) >= ahead + 2 and spent_s > window.warm_up_s) or spent_s > window.limit_s

        return enough

    def _enough(self, skipped: int, together: int) -> Callable[[list[float]], bool]:
        """Whole turns of steps that run together."""
        begun, window = time.time(), self.window
        least = together * math.ceil(max(window.steps, 2 * together) / together)

        def enough(marks: list[float]) -> bool:
            inside = len(marks) - 1 - skipped
            watched_s = marks[-1] - marks[skipped] if inside > 0 else 0.0
            done = inside >= least and inside % together == 0 and watched_s >= window.seconds
            return done or (inside >= 1 and time.time() - begun > window.limit_s)

        return enough

    # What they use

    def _watched(
        self, feed: Feed | None, skipped: int, together: int
    ) -> tuple[Series, tuple[float, float], dict[str, Any]]:
        """The samples, when they began and ended, and what else is known of the steps."""
        if self.device == "cpu":
            period_s, cores = self.window.period_s, torch.get_num_threads()
            with Sampler(CpuMeter(cores), period_s=period_s) as sampler:
                marks = self._run(feed, self._enough(skipped, together))
            return sampler.series, (marks[0], marks[-1]), {}
        marks, activity = profiled(lambda: self._run(feed, self._enough(skipped, together)))
        start, end = marks[skipped], marks[-1]
        count = max(1, round((end - start) / self.window.period_s))
        points = start + self.window.period_s * np.arange(count + 1)
        copied = np.zeros(count)
        if feed is not None and len(activity.from_host):
            took_s = float((activity.from_host[:, 1] - activity.from_host[:, 0]).sum())
            bandwidth = len(marks) * feed.size_bytes / took_s
            copied = sampled(activity.from_host, points) * bandwidth
        series = Series(
            ends_s=tuple((points[1:] - start).tolist()),
            device_utilization=tuple(sampled(activity.kernels, points).tolist()),
            memory_utilization=tuple([self._held()[0] / self._held()[1]] * count),
            network_rx=tuple(copied.tolist()),
            network_tx=(0.0,) * count,
        )
        return series, (start, float(points[-1])), self._about(activity, marks, skipped)

    def _about(self, activity: Activity, marks: list[float], skipped: int) -> dict[str, Any]:
        steps = len(marks) - 1 - skipped
        to_host = activity.to_host
        return {
            "step_time_profiled_s": (marks[-1] - marks[skipped]) / steps,
            "steps_watched": steps,
            "launched_per_step": activity.launched / len(marks),
            "from_host_s_per_step": float(np.diff(activity.from_host, axis=1).sum()) / len(marks),
            "to_host_s_per_step": float(np.diff(to_host, axis=1).sum()) / len(marks),
            "clock_off_s": activity.clock_off_s,
        }

    def _held(self) -> tuple[float, float]:
        """Bytes of the device's memory that are in use, and all."""
        if self.device != "cuda":
            return 0.0, 1.0
        free, whole = torch.cuda.mem_get_info()
        return float(whole - free), float(whole)

    def _samples(self, start_s: float, end_s: float) -> dict[str, Any]:
        """NVML's samples of a stretch of time, by kind: columns, times from its beginning."""
        samples_of: dict[str, Any] = {}
        for kind in ("use", "pcie", "counters"):
            samples = self._watcher.between(start_s, end_s, kind)
            if samples:
                names = [name for name in samples[0] if name not in ("kind", "time_s", "took_s")]
                samples_of[kind] = {
                    "at_s": [round(one["time_s"] - start_s, 4) for one in samples],
                    **{name: [_short(one.get(name)) for one in samples] for name in names},
                }
        return samples_of


def _short(value: Any) -> Any:
    return float(f"{value:.4g}") if isinstance(value, float) else value


def measure_resources(job: Job, *, device: str, watcher: Watcher, window: Window | None = None) -> Run:
    """The run of a job in a model that is built for it, behind a loader of its rate where it says one."""
    if job.cluster.world_size > 1:
        how = "measure steps runs on one, measure campaign on several"
        raise UnsupportedJob(f"cluster: {job.cluster.world_size} devices; {how}")
    check_machine(job, device, done=("compile", "loader_rate"))
    training, loader = job.workload.training, None
    if training.loader_rate is not None:
        loader = Loader(kind="paced", workers=training.loader_workers or 1, rate=training.loader_rate)
    session: Session | None = None
    try:
        session = Session(job, device, watcher, window)
        return session.measure(loader)
    except ForetrainError:
        raise
    except Exception as error:
        label = job.workload.model.label
        raise UnsupportedJob(f"model {label}: {type(error).__name__}: {first_line(error)}") from error
    finally:
        session = None
        if device == "cuda":
            forget_jobs()


def _about_loading(loader: Loader | None, feed: Feed | None) -> dict[str, Any]:
    """Say for the provenance of a run how its batches were made, where a loader made them."""
    if loader is None or feed is None:
        return {}
    making_s = sorted(feed.made_in_s)
    return {
        "loader": loader.kind,
        "loader_batch_bytes": feed.size_bytes,
        "loader_made_in_s": [making_s[0], statistics.median(making_s), making_s[-1]],
    }
