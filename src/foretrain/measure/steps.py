"""A job in; a Run with the measured time, phases, kernels, memory, utilisation and power of its training steps out."""

from __future__ import annotations

import contextlib
import statistics
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch

from foretrain.capture.optimizers import optimizer_of
from foretrain.errors import ForetrainError, InputError, UnsupportedJob
from foretrain.job import Job, Run
from foretrain.measure.models import real_model
from foretrain.measure.ops import machine

_WARM_UP_S, _WARM_UP_STEPS = 0.25, 3
_AUTOCAST = {"amp-bf16": torch.bfloat16, "amp-fp16": torch.float16}


def measure_step(job: Job, *, device: str = "cuda", seconds: float = 0.5) -> Run:
    """Run real steps of a job on one local device for about ``seconds`` (after warming up) and measure them."""
    if job.cluster.world_size > 1:
        raise UnsupportedJob(f"cluster: {job.cluster.world_size} devices; measure steps runs on one, measure campaign on several")
    if device == "cuda" and not torch.cuda.is_available():
        raise InputError("device: 'cuda' is not available: torch finds no GPU; use --device cpu")
    try:
        stepper = Stepper(job, device)
        measured, spread = _measure(stepper, device, seconds)
    except ForetrainError:
        raise
    except (RuntimeError, ValueError, TypeError) as error:
        raise UnsupportedJob(f"model {job.workload.model.label}: {type(error).__name__}: {str(error).splitlines()[0]}") from error
    finally:
        if device == "cuda":
            torch.cuda.empty_cache()
    return Run(job=job, measured=measured, provenance={"source": "foretrain measure steps", **machine(device), **spread})


class Stepper:
    """The parts of a step, each callable on its own."""

    def __init__(self, job: Job, device: str) -> None:
        training = job.workload.training
        self.training, self.device, self.accumulation = training, device, job.accumulation
        torch.backends.cuda.matmul.allow_tf32 = training.precision == "tf32"
        self.module, self.inputs, self.loss = real_model(job.workload, job.micro_batch, device)
        self.module.train(training.mode == "train")
        dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(training.precision)
        if dtype is not None:
            self.module = self.module.to(dtype)
            self.inputs = _cast(self.inputs, dtype)
        if training.channels_last:
            self.module = self.module.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
            self.inputs = _channels_last(self.inputs)
        self.optimizer = (
            optimizer_of(training.optimizer, [p for p in self.module.parameters() if p.requires_grad]) if training.mode == "train" else None
        )
        self._value: Any = None

    def forward(self) -> None:
        dtype = _AUTOCAST.get(self.training.precision)
        context: Any = torch.autocast(self.device, dtype) if dtype is not None else contextlib.nullcontext()
        with context, torch.set_grad_enabled(self.optimizer is not None):
            output = self.module(**self.inputs) if isinstance(self.inputs, dict) else self.module(*self.inputs)
            self._value = self.loss(output) if self.optimizer is not None and self.loss is not None else output

    def backward(self) -> None:
        self._value.backward()
        self._value = None

    def update(self) -> None:
        assert self.optimizer is not None
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)

    def phases(self) -> dict[str, Callable[[], None]]:
        return (
            {"forward": self.forward}
            if self.optimizer is None
            else {"forward": self.forward, "backward": self.backward, "optimizer": self.update}
        )

    def __call__(self) -> None:
        for _ in range(self.accumulation):
            self.forward()
            if self.optimizer is not None:
                self.backward()
        if self.optimizer is not None:
            self.update()


def _cast(inputs: Any, dtype: torch.dtype) -> Any:
    def one(value: Any) -> Any:
        return value.to(dtype) if isinstance(value, torch.Tensor) and value.is_floating_point() else value

    return {name: one(value) for name, value in inputs.items()} if isinstance(inputs, dict) else tuple(map(one, inputs))


def _channels_last(inputs: Any) -> Any:
    def one(value: Any) -> Any:
        return value.to(memory_format=torch.channels_last) if isinstance(value, torch.Tensor) and value.dim() == 4 else value

    return {name: one(value) for name, value in inputs.items()} if isinstance(inputs, dict) else tuple(map(one, inputs))


def _measure(stepper: Stepper, device: str, seconds: float) -> tuple[dict[str, float], dict[str, float]]:
    sync: Callable[[], None] = torch.cuda.synchronize if device == "cuda" else lambda: None
    _warm_up(stepper, sync)
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    with _nvml(device) as load:
        times = _timed_groups(stepper, sync, seconds)
    step_s = statistics.median(times)
    measured = {"step_time_s": step_s, "samples_per_s": stepper.training.global_batch / step_s, **load}
    if device == "cuda":
        measured["peak_memory_bytes"] = float(torch.cuda.max_memory_allocated())
        measured["reserved_memory_bytes"] = float(torch.cuda.max_memory_reserved())
        measured |= _phase_times(stepper)
        measured |= _profile(stepper)
        measured["host_issue_s"] = _host_issue(stepper, sync)
    return measured, {"step_time_min_s": min(times), "step_time_max_s": max(times), "step_groups": len(times)}


def _warm_up(stepper: Stepper, sync: Callable[[], None]) -> None:
    start, steps = time.perf_counter(), 0
    while steps < _WARM_UP_STEPS or time.perf_counter() - start < _WARM_UP_S:
        stepper()
        sync()
        steps += 1


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


def _phase_times(stepper: Stepper, repeats: int = 5) -> dict[str, float]:
    """Each phase from an idle device until its last kernel, by device events."""
    times: dict[str, list[float]] = {}
    for _ in range(repeats):
        for name, phase in stepper.phases().items():
            torch.cuda.synchronize()
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            begin.record()
            phase()
            end.record()
            torch.cuda.synchronize()
            times.setdefault(f"{name}_time_s", []).append(begin.elapsed_time(end) * 1e-3)
    return {name: statistics.median(values) for name, values in times.items()}


def _profile(stepper: Stepper) -> dict[str, float]:
    """The union of the intervals in which a kernel, copy or fill ran, and their number, in one step."""
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    stepper()
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=activities) as profile:
        stepper()
        torch.cuda.synchronize()
    spans = sorted(
        (event.start_ns(), event.start_ns() + event.duration_ns())
        for event in profile.profiler.kineto_results.events()  # type: ignore[union-attr]
        if "CUDA" in str(event.device_type())
    )
    busy, reached = 0, 0
    for start, end in spans:
        busy += max(0, end - max(start, reached))
        reached = max(reached, end)
    return {"device_busy_s": busy * 1e-9, "kernels": float(len(spans))}


def _host_issue(stepper: Stepper, sync: Callable[[], None], repeats: int = 3) -> float:
    times = []
    for _ in range(repeats):
        sync()
        start = time.perf_counter()
        stepper()
        times.append(time.perf_counter() - start)
        sync()
    return statistics.median(times)


@contextlib.contextmanager
def _nvml(device: str, period_s: float = 0.1) -> Iterator[dict[str, float]]:
    """Mean utilisation and power of the device while the block runs; nothing where there is no NVML."""
    result: dict[str, float] = {}
    try:
        import pynvml

        pynvml.nvmlInit()
        handle = pynvml.nvmlDeviceGetHandleByIndex(0)
    except Exception:
        handle = None
    if device != "cuda" or handle is None:
        yield result
        return
    samples: list[tuple[float, float, float]] = []
    stop = threading.Event()

    def sample() -> None:
        while not stop.wait(period_s):
            rates = pynvml.nvmlDeviceGetUtilizationRates(handle)
            samples.append((rates.gpu / 100, rates.memory / 100, pynvml.nvmlDeviceGetPowerUsage(handle) * 1e-3))

    thread = threading.Thread(target=sample, daemon=True)
    thread.start()
    try:
        yield result
    finally:
        stop.set()
        thread.join()
        if len(samples) >= 4:
            later = samples[len(samples) // 3 :]  # NVML's own averages lag behind by up to a second
            for place, name in enumerate(("device_utilization", "memory_utilization", "power_w")):
                result[name] = statistics.mean(one[place] for one in later)
