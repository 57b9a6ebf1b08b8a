"""Measures the device and host times of operators."""

from __future__ import annotations

import contextlib
import gc
import time
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from foretrain.errors import first_line
from foretrain.measure import special_calls  # noqa: F401  its builders join those of calls
from foretrain.measure.calls import Call, build_call
from foretrain.measure.instances import Instance


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """Seconds of one call. Cold: its data was flushed from the L2 cache before; warm: it ran just before."""

    cold_s: float
    warm_s: float
    host_s: float
    kernels: int
    kernel_names: tuple[str, ...] = ()


@contextlib.contextmanager
def _matmul_precision(instance: Instance) -> Iterator[None]:
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = instance.precision == "tf32"
    try:
        yield
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before


_HOST_CALLS, _PROFILED_CALLS = 5, 3
"""Calls that are timed by the host's clock, and that are profiled, cold and warm each: the middle one
counts."""


def time_on_cpu(instance: Instance) -> Timing:
    """Time a call by the host's clock; the cache is left as the call before it left it."""
    call = build_call(instance, "cpu")
    with torch.no_grad():
        call()
        times = _host_times_s(call, _HOST_CALLS)
    middle = sorted(times)[len(times) // 2]
    return Timing(cold_s=max(times), warm_s=middle, host_s=middle, kernels=1)


def _host_times_s(call: Call, calls: int) -> list[float]:
    """Time each of so many calls by the host's clock."""
    times = []
    for _ in range(calls):
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return times


_MANY_KERNELS_S = 5e-4
"""Of a call that issues so many kernels that a few of them fill the device's queue."""


class CudaTimer:
    """Kernel times of many calls from one profile: events would measure the gap before a small kernel."""

    def __init__(self) -> None:
        properties = torch.cuda.get_device_properties(0)
        self._flush = torch.empty(
            2 * int(properties.L2_cache_size or 64 << 20) // 4, dtype=torch.float32, device="cuda"
        )

    def host_time_s(self, call: Call) -> float:
        """Time how long the host takes to issue a call, while the device's queue is far from full."""
        times: list[float] = []
        for _ in range(_HOST_CALLS):
            if not times or times[-1] > _MANY_KERNELS_S:
                torch.cuda.synchronize()
            times += _host_times_s(call, 1)
        torch.cuda.synchronize()
        return sorted(times)[len(times) // 2]

    def time(self, instances: Sequence[Instance]) -> Iterator[tuple[Instance, Timing | str]]:
        """Time each instance, or give the reason why there is no timing."""
        host: dict[int, float] = {}
        failed: dict[int, str] = {}
        activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
        with torch.no_grad():
            for number, instance in enumerate(instances):
                try:
                    with _matmul_precision(instance):
                        call = build_call(instance, "cuda")
                        call()
                        host[number] = self.host_time_s(call)
                    del call
                except Exception as error:
                    failed[number] = _why(error)
            with torch.profiler.profile(activities=activities) as profile:
                for number, instance in enumerate(instances):
                    if number not in failed:
                        self._profiled_calls(number, instance, failed)
                torch.cuda.synchronize()
        kernels = _kernels_by_label(profile)
        for number, instance in enumerate(instances):
            yield (
                instance,
                failed[number] if number in failed else self._summary(kernels, number, host[number]),
            )

    def _profiled_calls(self, number: int, instance: Instance, failed: dict[int, str]) -> None:
        try:
            with _matmul_precision(instance):
                call = build_call(instance, "cuda")
                call()
                for repeat in range(_PROFILED_CALLS):
                    self._flush.zero_()
                    with torch.profiler.record_function(f"cold {number} {repeat}"):
                        call()
                for repeat in range(_PROFILED_CALLS):
                    with torch.profiler.record_function(f"warm {number} {repeat}"):
                        call()
        except Exception as error:
            failed[number] = _why(error)

    def _summary(
        self, kernels: dict[str, list[tuple[str, int, int]]], number: int, host_s: float
    ) -> Timing | str:
        runs = {
            kind: [kernels.get(f"{kind} {number} {repeat}", []) for repeat in range(_PROFILED_CALLS)]
            for kind in ("cold", "warm")
        }
        if not any(runs["warm"]):
            return "no kernel ran"
        times = {kind: sorted(map(busy_s, each)) for kind, each in runs.items()}
        middle = _PROFILED_CALLS // 2
        names = tuple(name[:80] for name, _, _ in runs["warm"][-1])
        return Timing(
            cold_s=times["cold"][middle],
            warm_s=times["warm"][middle],
            host_s=host_s,
            kernels=len(names),
            kernel_names=names,
        )


def _why(error: Exception) -> str:
    """The reason in one line; memory that the failed call held is given back first."""
    text = f"{type(error).__name__}: {first_line(error)}"[:200]
    error.__traceback__ = None
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    return text


def is_kernel(event: Any) -> bool:
    """Kernels, copies and fills; the profiler also puts its annotations (a label, ``Optimizer.step``) on
    the device's track."""
    return (
        "CUDA" in str(event.device_type())
        and not getattr(event, "is_user_annotation", bool)()
        and not event.name().startswith(("cold ", "warm "))
    )


def busy_s(kernels: Sequence[tuple[str, int, int]]) -> float:
    """Seconds with any of the kernels (name, start and end in ns) on the device: cuDNN runs some side by
    side."""
    busy_ns, until = 0, 0
    for _, start, end in sorted(kernels, key=lambda kernel: kernel[1]):
        busy_ns += max(0, end - max(start, until))
        until = max(until, end)
    return busy_ns * 1e-9


def _kernels_by_label(profile: Any) -> dict[str, list[tuple[str, int, int]]]:
    """The kernels that ran for each label, matched by when the host launched them."""
    labels: list[tuple[int, int, str]] = []
    launched: dict[int, int] = {}
    kernels: list[tuple[int, str, int, int]] = []
    for event in profile.profiler.kineto_results.events():
        name = event.name()
        if is_kernel(event):
            start = event.start_ns()
            kernels.append((event.correlation_id(), name, start, start + event.duration_ns()))
        elif "CUDA" in str(event.device_type()):
            continue
        elif name.startswith(("cold ", "warm ")):
            labels.append((event.start_ns(), event.start_ns() + event.duration_ns(), name))
        elif name.startswith(("cudaLaunch", "cuLaunch", "cudaMemcpy", "cudaMemset", "cudaGraphLaunch")):
            launched[event.correlation_id()] = event.start_ns()
    return _match(sorted(labels), launched, kernels)


def _match(
    labels: list[tuple[int, int, str]],
    launched: dict[int, int],
    kernels: list[tuple[int, str, int, int]],
) -> dict[str, list[tuple[str, int, int]]]:
    starts = [start for start, _, _ in labels]
    kernels_of: dict[str, list[tuple[str, int, int]]] = {}
    for correlation, name, start, end in kernels:
        when = launched.get(correlation)
        position = -1 if when is None else bisect_right(starts, when) - 1
        if position >= 0 and when is not None and when <= labels[position][1]:
            kernels_of.setdefault(labels[position][2], []).append((name, start, end))
    return kernels_of


def batch_by_memory(instances: Sequence[Instance], limit_bytes: float, most: int) -> Iterator[list[Instance]]:
    """Instances in groups that one profile holds; one that needs more than the limit is alone."""
    group: list[Instance] = []
    size = 0.0
    for instance in instances:
        need = sum(spec.size_bytes for spec in instance.inputs) + instance.bytes
        if group and (len(group) >= most or size + need > limit_bytes):
            yield group
            group, size = [], 0.0
        group.append(instance)
        size += need
    if group:
        yield group
