"""Asks NVIDIA's management library how busy a GPU, its memory and its link are, by ctypes alone."""

from __future__ import annotations

import ctypes
import functools
import re
from collections.abc import Mapping
from typing import Any, ClassVar

from foretrain.errors import InputError

_FORMS = ("sxm", "pci", "nvl")
_UNSAID = ("mobile",)
"""Words of the catalogue that drivers have others for."""


def same_gpu(catalogue_name: str, driver_name: str) -> bool:
    """Whether a device of the catalogue can be what the driver calls so: the model, and the form and the
    memory where both say them (the driver counts the host's in a superchip's).

    >>> names = ("a100-sxm-80gb", "a100-sxm-40gb", "a100-pcie-80gb", "h100-sxm-80gb")
    >>> [same_gpu(name, "NVIDIA A100-SXM4-80GB") for name in names]
    [True, False, False, False]
    """
    named, said = (re.split(r"[-\s]+", name.lower()) for name in (catalogue_name, driver_name))
    forms = [{word[:3] for word in words if word.startswith(_FORMS)} for words in (named, said)]
    sizes = [{word for word in words if re.fullmatch(r"\d+gb", word)} for words in (named, said)]
    model = {word for word in named if not word.startswith(_FORMS) and word not in (*sizes[0], *_UNSAID)}
    compared = (forms,) if named[0].startswith(("gh", "gb")) else (forms, sizes)
    return model <= set(said) and all(not (one and other) or one == other for one, other in compared)


class _Utilization(ctypes.Structure):
    _fields_ = (("gpu", ctypes.c_uint), ("memory", ctypes.c_uint))


class _Memory(ctypes.Structure):
    _fields_ = (("total", ctypes.c_ulonglong), ("free", ctypes.c_ulonglong), ("used", ctypes.c_ulonglong))


class _GpmSupport(ctypes.Structure):
    _fields_ = (("version", ctypes.c_uint), ("supported", ctypes.c_uint))


class _GpmMetric(ctypes.Structure):
    _fields_ = (
        ("metric", ctypes.c_uint),
        ("result", ctypes.c_uint),
        ("value", ctypes.c_double),
        ("names", ctypes.c_char_p * 3),
    )


class _GpmQuestion(ctypes.Structure):
    _fields_ = (
        ("version", ctypes.c_uint),
        ("count", ctypes.c_uint),
        ("samples", ctypes.c_void_p * 2),
        ("metrics", _GpmMetric * 400),
    )


@functools.cache
def _library() -> Any:
    """The library, ready for use, or None where there is no NVIDIA driver."""
    try:
        library = ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        return None
    return library if library.nvmlInit_v2() == 0 else None


def gpu_count() -> int:
    """GPUs that NVML sees; 0 where there is no NVML."""
    library, count = _library(), ctypes.c_uint()
    counted = library is not None and library.nvmlDeviceGetCount_v2(ctypes.byref(count)) == 0
    return int(count.value) if counted else 0


class Gpu:
    """One GPU by its index."""

    def __init__(self, index: int) -> None:
        self._nvml, self._handle = _library(), ctypes.c_void_p()
        if self._nvml is None:
            raise InputError("device: NVML is not available here, so a GPU's utilisation cannot be sampled")
        if self._nvml.nvmlDeviceGetHandleByIndex_v2(index, ctypes.byref(self._handle)) != 0:
            raise InputError(f"device: NVML knows no GPU {index}; it sees {gpu_count()}")

    def _ask(self, function: str, answer: Any) -> Any:
        """The answer, or None where this GPU does not tell."""
        return answer if getattr(self._nvml, function)(self._handle, ctypes.byref(answer)) == 0 else None

    def utilization(self) -> float:
        """Share of the last sample period (1/6 s to 1 s, by GPU) in which a kernel ran."""
        answer = self._ask("nvmlDeviceGetUtilizationRates", _Utilization())
        return 0.0 if answer is None else float(answer.gpu) / 100.0

    def memory_busy(self) -> float:
        """Share of that period in which device memory was read or written."""
        answer = self._ask("nvmlDeviceGetUtilizationRates", _Utilization())
        return 0.0 if answer is None else float(answer.memory) / 100.0

    def memory(self) -> tuple[int, int]:
        """Bytes in use and in all."""
        answer = self._ask("nvmlDeviceGetMemoryInfo", _Memory())
        return (0, 0) if answer is None else (int(answer.used), int(answer.total))

    def memory_held(self) -> float:
        """Share of device memory in use."""
        used, total = self.memory()
        return used / total if total else 0.0

    def power_w(self) -> float | None:
        answer = self._ask("nvmlDeviceGetPowerUsage", ctypes.c_uint())
        return None if answer is None else float(answer.value) / 1000.0

    def pcie_bytes_per_s(self, *, sent: bool) -> float | None:
        """Read what the GPU sent to its host or received from it in the last 20 ms, which the call takes."""
        answer = ctypes.c_uint()
        failed = self._nvml.nvmlDeviceGetPcieThroughput(
            self._handle, ctypes.c_uint(0 if sent else 1), ctypes.byref(answer)
        )
        return None if failed else float(answer.value) * 1024.0


class Counters:
    """Hardware counters of a GPU between one reading and the next (Hopper and later): shares of time and
    bytes per second."""

    METRICS: ClassVar[Mapping[str, int]] = {
        "graphics": 1,
        "sm": 2,
        "occupancy": 3,
        "tensor": 5,
        "memory": 10,
        "pcie_sent": 20,
        "pcie_received": 21,
    }
    """By the numbers that NVML gives them; the first five are percentages, the others MiB per second."""
    _BYTES, _SHARE = float(1 << 20), 0.01

    def __init__(self, gpu: Gpu) -> None:
        self._nvml, self._handle = gpu._nvml, gpu._handle
        support = _GpmSupport(version=1)
        try:
            failed = self._nvml.nvmlGpmQueryDeviceSupport(self._handle, ctypes.byref(support))
        except AttributeError:
            failed = 1
        if failed or not support.supported:
            raise InputError("device: this GPU or its driver has no counters that NVML reads")
        self._samples = [ctypes.c_void_p(), ctypes.c_void_p()]
        for sample in self._samples:
            if self._nvml.nvmlGpmSampleAlloc(ctypes.byref(sample)):
                raise InputError("device: NVML has no room for the counters of this GPU")
        if failed := self._nvml.nvmlGpmSampleGet(self._handle, self._samples[0]):
            raise InputError(f"device: NVML does not tell the counters of this GPU (error {failed})")

    def read(self) -> dict[str, float] | None:
        """Since the last reading; None where NVML does not tell."""
        before, now = self._samples
        if self._nvml.nvmlGpmSampleGet(self._handle, now):
            return None
        question = _GpmQuestion(version=1, count=len(self.METRICS))
        question.samples[0], question.samples[1] = before.value, now.value
        for place, number in enumerate(self.METRICS.values()):
            question.metrics[place].metric = number
        failed = self._nvml.nvmlGpmMetricsGet(ctypes.byref(question))
        self._samples = [now, before]
        if failed:
            return None
        values = {}
        for place, name in enumerate(self.METRICS):
            metric = question.metrics[place]
            if metric.result == 0:
                values[name] = metric.value * (self._BYTES if name.startswith("pcie") else self._SHARE)
        return values
