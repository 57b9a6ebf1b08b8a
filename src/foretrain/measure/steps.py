"""Measures the training steps of a job: time, phases, kernels, memory, utilisation and power."""

from __future__ import annotations

import contextlib
import functools
import gc
import itertools
import json
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from foretrain.allocator_settings import VARIABLES, AllocatorSettings, set_in_environment
from foretrain.capture.keys import installed_versions
from foretrain.capture.parallel.stacks import LEAST_BLOCKS
from foretrain.capture.recomputing import recompute_layers
from foretrain.catalog import Catalog
from foretrain.errors import ForetrainError, InputError, UnsupportedJob, first_line
from foretrain.job import Job
from foretrain.measure.models import autocast, compiled, real_model, real_optimizer
from foretrain.measure.nvml import Gpu, gpu_count, same_gpu
from foretrain.measure.ops import check_available, machine
from foretrain.measure.replay import busy_s, is_kernel
from foretrain.measure.resume import Resumed
from foretrain.measure.summary import Progress, Summary
from foretrain.measure.tasks import not_carried_out
from foretrain.run import Run

_WARM_UP_S, _WARM_UP_STEPS = 0.25, 3
_FIRST_STEPS = 6
"""Of the warm-up, that are kept; later ones are as usual."""
_LOAD_PERIOD_S = 0.1
"""Between two samples of the use and power of the device."""
_PHASED_STEPS, _ISSUED_STEPS = 5, 3
"""Steps whose phases are timed, and steps whose issue by the host is."""


_BEFORE_FIRST_STEP = """
import json, sys, time
start = time.perf_counter()
import torch
imported = time.perf_counter()
torch.zeros(1, device=sys.argv[1])
print(json.dumps({"import_s": imported - start, "context_s": time.perf_counter() - imported}))
"""
_libraries_in_use: set[str] = set()
"""Sources of models that this process has built already: their libraries are imported."""


@functools.cache
def process_start(device: str) -> dict[str, float]:
    """Seconds that a new process takes to import torch, and to have a context on the device."""
    command = [sys.executable, "-c", _BEFORE_FIRST_STEP, device]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return dict(json.loads(done.stdout)) if done.returncode == 0 else {}


def measure_step(
    job: Job, *, device: str = "cuda", seconds: float = 0.5, start: Mapping[str, float] | None = None
) -> Run:
    """Measure real steps of a job on one local device for about ``seconds``, after warming up.

    With the ``start`` of a process (``process_start``), also how long the training takes until its steps run
    at their usual pace; not where the model's library was in use before.
    """
    if job.cluster.world_size > 1:
        how = "measure steps runs on one, measure campaign on several"
        raise UnsupportedJob(f"cluster: {job.cluster.world_size} devices; {how}")
    check_machine(job, device)
    stepper: Stepper | None = None
    try:
        library, begun = job.workload.model.source, time.perf_counter()
        fresh = library not in _libraries_in_use
        _libraries_in_use.add(library)
        stepper = Stepper(job, device)
        build_s = time.perf_counter() - begun
        if device == "cuda":  # what frozen weights and adapters were made from is no part of the steps
            torch.cuda.empty_cache()
        measured, spread, first_s = _measure(stepper, device, seconds)
    except ForetrainError:
        raise
    except Exception as error:
        raise UnsupportedJob(
            f"model {job.workload.model.label}: {type(error).__name__}: {first_line(error)}"
        ) from error
    finally:
        stepper = None
        if device == "cuda":
            forget_jobs()
    versions = {**dict(installed_versions(job.workload.model)), **machine(device)}
    provenance = {"source": "foretrain measure steps", **versions, **spread, "first_steps_s": first_s}
    if start and fresh:
        provenance |= {**start, "build_s": build_s}
        warm_up_s = max(0.0, sum(first_s) - len(first_s) * measured["step_time_s"])
        measured["startup_time_s"] = sum(start.values()) + build_s + warm_up_s
    return Run(job=job, measured=measured, provenance=provenance)


def forget_jobs() -> None:
    """Hand back what earlier jobs of the process hold on the device: tensors that only cycles keep, cuBLAS
    workspaces of their threads, and what the allocator has cached."""
    gc.collect()
    torch._C._cuda_clearCublasWorkspaces()
    torch.cuda.empty_cache()


def device_here(device: str) -> dict[str, Any]:
    """The device that steps run on here as fields of a job, for one that names none."""
    if device == "cpu":
        return {"device": "cpu", "cores_per_device": torch.get_num_threads()}
    check_available(device)
    catalog, said = Catalog.load(), torch.cuda.get_device_name(0)
    fitting = [name for name in catalog.names("devices") if name != "cpu" and same_gpu(name, said)]
    if len(fitting) != 1:
        several = " or ".join(fitting) or "no device of the catalogue"
        raise InputError(f"cluster.device: missing; {said!r} can be {several}; name it in a job file")
    return {"device": fitting[0]}


def check_machine(job: Job, device: str, done: Collection[str] = ("compile",)) -> None:
    """A run must say what it ran on and how: no other kind of device, no option that is not carried out but
    those that are ``done``."""
    check_available(device)
    named = job.cluster.device
    names = f"cluster.device: the job names {named.name!r}"
    if named.is_cpu != (device == "cpu"):
        raise UnsupportedJob(f"{names}, but the steps would run on {device!r}")
    if device == "cuda" and not same_gpu(named.name, here := torch.cuda.get_device_name(0)):
        raise UnsupportedJob(f"{names}, but this machine has {here!r}")
    more = {"servers": 0, "recompute": job.plan.recompute}
    if (option := not_carried_out(job, plan=more, done=done)) is not None:
        raise UnsupportedJob(f"{option} cannot be measured here")
    wanted, here = job.workload.training.allocator or "", set_in_environment() or ""
    if device == "cuda" and AllocatorSettings.read(wanted) != AllocatorSettings.read(here, VARIABLES[1]):
        raise UnsupportedJob(
            f"training.allocator: {wanted!r} needs {VARIABLES[1]}={wanted} in the environment, not {here!r}"
        )


class Stepper:
    """The parts of a step, each callable on its own."""

    def __init__(self, job: Job, device: str) -> None:
        self.training, self.device, self.accumulation = job.workload.training, device, job.accumulation
        torch.backends.cuda.matmul.allow_tf32 = self.training.precision == "tf32"
        self.model = real_model(job.workload, job.micro_batch, device)
        if job.plan.recompute != "none":
            _recompute(self.model.module, job)
        self.module = compiled(self.model.module, self.training.compile)
        trained = [parameter for parameter in self.model.module.parameters() if parameter.requires_grad]
        trains = self.training.mode == "train"
        self.optimizer = (
            real_optimizer(self.training.optimizer, trained, self.model.module) if trains else None
        )
        scales = self.training.scales_loss
        self.scaler = torch.amp.GradScaler(torch.device(device).type) if scales else None
        self._value: Any = None

    def forward(self) -> None:
        self._value, trains = None, self.optimizer is not None
        with autocast(self.training.precision, self.device), torch.set_grad_enabled(trains):
            called = self.model.compute if trains else self.model.output
            self._value = called(self.module)

    def backward(self) -> None:
        (self._value if self.scaler is None else self.scaler.scale(self._value)).backward()
        self._value = None

    def update(self) -> None:
        assert self.optimizer is not None
        if self.scaler is None:
            self.optimizer.step()
        else:
            self.scaler.step(self.optimizer)
            self.scaler.update()
        self.optimizer.zero_grad(set_to_none=True)

    def phases(self) -> dict[str, Callable[[], None]]:
        if self.optimizer is None:
            return {"forward": self.forward}
        return {"forward": self.forward, "backward": self.backward, "optimizer": self.update}

    def __call__(self) -> None:
        for _ in range(self.accumulation):
            self.forward()
            if self.optimizer is not None:
                self.backward()
        if self.optimizer is not None:
            self.update()


def _recompute(module: torch.nn.Module, job: Job) -> None:
    """Switch activation checkpointing on; refuse what a module of torch cannot do."""
    what = f"plan.recompute: {job.plan.recompute!r} cannot be measured here"
    if job.plan.recompute == "selective":
        raise UnsupportedJob(f"{what}; full and operators can")
    if recompute_layers(module, job.plan) is None:
        label = job.workload.model.label
        blocks = f"a list of {LEAST_BLOCKS} blocks or more that holds half of its weights"
        raise UnsupportedJob(f"{what}; {label} has neither a switch for it nor {blocks}")


def _measure(
    stepper: Stepper, device: str, seconds: float
) -> tuple[dict[str, float], dict[str, float], list[float]]:
    """Measure steps; returns the figures, how they spread, and the time of each step of the warm-up."""
    sync: Callable[[], None] = torch.cuda.synchronize if device == "cuda" else lambda: None
    first_s = _warm_up(stepper, sync)
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    with _load(device) as load:
        times = _timed_groups(stepper, sync, seconds)
    step_s = statistics.median(times)
    measured = {"step_time_s": step_s, "samples_per_s": stepper.training.global_batch / step_s, **load}
    if device == "cuda":
        measured["peak_memory_bytes"] = float(torch.cuda.max_memory_allocated())
        measured["reserved_memory_bytes"] = float(torch.cuda.max_memory_reserved())
        measured |= _phase_times(stepper)
        measured |= _profile(stepper)
        measured["host_issue_s"] = _host_issue(stepper, sync)
    spread = {"step_time_min_s": min(times), "step_time_max_s": max(times), "step_groups": len(times)}
    return measured, spread, first_s[:_FIRST_STEPS]


def _warm_up(stepper: Stepper, sync: Callable[[], None]) -> list[float]:
    """Run steps until they are as usual; returns the seconds of each."""
    times: list[float] = []
    while len(times) < _WARM_UP_STEPS or sum(times) < _WARM_UP_S:
        begin = time.perf_counter()
        stepper()
        sync()
        times.append(time.perf_counter() - begin)
    return times


def _timed_groups(stepper: Stepper, sync: Callable[[], None], seconds: float) -> list[float]:
    """Seconds per step of synchronised groups of steps; four steps a group when a step is short."""
    times: list[float] = []
    steps = 1
    start = time.perf_counter()
    while len(times) < 4 or time.perf_counter() - start < seconds:
        begin = time.perf_counter()
        for _ in range(steps):
            stepper()
        sync()
        times.append((time.perf_counter() - begin) / steps)
        steps = 4 if times[0] < 0.05 else 1
    return times


def _phase_times(stepper: Stepper) -> dict[str, float]:
    """Time each phase of a step that begins idle, from the last kernel of the one before to its own, by
    device events; micro-batches are added up.

    The host runs ahead as it does in training, so what it hides behind earlier kernels is not counted twice.
    """
    passes = [name for name in stepper.phases() if name != "optimizer"] * stepper.accumulation
    order = [*passes, *([] if stepper.optimizer is None else ["optimizer"])]
    times: dict[str, list[float]] = {name: [] for name in order}
    for _ in range(_PHASED_STEPS):
        marks = [torch.cuda.Event(enable_timing=True) for _ in range(len(order) + 1)]
        torch.cuda.synchronize()
        marks[0].record()
        for name, mark in zip(order, marks[1:], strict=True):
            stepper.phases()[name]()
            mark.record()
        torch.cuda.synchronize()
        took = [begin.elapsed_time(end) * 1e-3 for begin, end in itertools.pairwise(marks)]
        for name, totals in times.items():
            totals.append(sum(time_s for phase, time_s in zip(order, took, strict=True) if phase == name))
    return {f"{name}_time_s": statistics.median(values) for name, values in times.items()}


def _profile(stepper: Stepper) -> dict[str, float]:
    """Profile one step: how long a kernel, copy or fill ran, and their number."""
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    stepper()
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=activities) as profile:
        stepper()
        torch.cuda.synchronize()
    kernels = [
        (event.name(), event.start_ns(), event.start_ns() + event.duration_ns())
        for event in profile.profiler.kineto_results.events()
        if is_kernel(event)
    ]
    return {"device_busy_s": busy_s(kernels), "kernels": float(len(kernels))}


def _host_issue(stepper: Stepper, sync: Callable[[], None]) -> float:
    """Time how long the host takes to issue a step."""
    times = []
    for _ in range(_ISSUED_STEPS):
        sync()
        start = time.perf_counter()
        stepper()
        times.append(time.perf_counter() - start)
        sync()
    return statistics.median(times)


@contextlib.contextmanager
def _load(device: str) -> Iterator[dict[str, float]]:
    """Sample mean use and power of the device while the block runs; nothing where there is no NVML."""
    result: dict[str, float] = {}
    if device != "cuda" or not gpu_count():
        yield result
        return
    gpu, stop = Gpu(torch.cuda.current_device()), threading.Event()
    samples: list[tuple[float, float, float, float]] = []

    def sample() -> None:
        while not stop.wait(_LOAD_PERIOD_S):
            samples.append((gpu.utilization(), gpu.memory_held(), gpu.memory_busy(), gpu.power_w() or 0.0))

    thread = threading.Thread(target=sample, daemon=True)
    thread.start()
    try:
        yield result
    finally:
        stop.set()
        thread.join()
        settled = samples[10:]  # NVML's own averages lag behind by up to a second
        if len(settled) >= 2:
            names = ("device_utilization", "memory_utilization", "memory_busy", "power_w")
            result |= zip(names, map(statistics.mean, zip(*settled, strict=True)), strict=True)


# Many jobs


def measure_jobs(
    jobs: Sequence[Job],
    out: Path,
    *,
    device: str = "cuda",
    seconds: float = 0.5,
    retry_failed: bool = False,
    budget_s: float | None = None,
    progress: Progress = lambda done, total: None,
    measure: Callable[[Job], Run] | None = None,
) -> Summary:
    """Measure the jobs that ``out`` does not hold yet; each run is on disk before the next begins.

    ``measure`` makes the run of a job; None for ``measure_step``.
    """
    check_available(device)
    measure = measure or functools.partial(_measured_step, device=device, seconds=seconds)
    seen = [job.seen_from(out.parent) for job in jobs]
    todo = Resumed(seen, out, _key, _key_of, retry_failed=retry_failed, progress=progress)
    for job in todo.within(budget_s, todo.wanted):
        todo.write(_line(job, measure))
    return todo.summary


def _measured_step(job: Job, *, device: str, seconds: float) -> Run:
    return measure_step(job, device=device, seconds=seconds, start=process_start(device))


def _line(job: Job, measure: Callable[[Job], Run]) -> dict[str, Any]:
    try:
        return measure(job).to_dict()
    except ForetrainError as error:
        return {"job": job.to_dict(), "error": str(error)}


def _key(job: Job) -> str:
    return json.dumps(job.to_dict(), sort_keys=True)


def _key_of(line: Any) -> str:
    if not (isinstance(line, Mapping) and "error" in line):
        Run.read(line)
    return _key(Job.read(line.get("job")))
