"""Measures operator instances into a file, one line each."""

from __future__ import annotations

import dataclasses
import datetime
import json
import platform
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from foretrain.errors import InputError, first_line
from foretrain.files import write_atomically
from foretrain.measure.dataset import info_file
from foretrain.measure.instances import Instance
from foretrain.measure.replay import CudaTimer, Timing, batch_by_memory, time_on_cpu
from foretrain.measure.resume import Resumed
from foretrain.measure.summary import Progress, Summary
from foretrain.measure.tasks import host, processor

_BATCH = 64
"""Instances in one profile."""


def measure_operators(
    instances: Sequence[Instance],
    out: Path,
    *,
    device: str = "cuda",
    retry_failed: bool = False,
    budget_s: float | None = None,
    progress: Progress = lambda done, total: None,
) -> Summary:
    """Measure what ``out`` does not hold yet, in order; each batch is on disk before the next begins."""
    check_available(device)
    about, here = machine(device), device_name(device)

    def key_of(line: Any) -> str:
        key = _key_of(line)
        if (there := line.get("device", here)) != here:
            raise InputError(f"operator: measured on {there!r}, but this is {here!r}; give another --out")
        return key

    todo = Resumed(instances, out, _key, key_of, retry_failed=retry_failed, progress=progress)
    write_atomically(info_file(out), json.dumps(about, indent=1))
    facts = {"device": here, "source": "foretrain measure ops"}
    for group in todo.within(budget_s, _batches(todo.wanted, device)):
        try:
            timed = list(_time(group, device))
            _check_context(device)
        except _Poisoned as error:
            todo.write(*({**_line(instance, str(error)), **facts} for instance in group))
            names = ", ".join(sorted({instance.name for instance in group}))
            raise InputError(f"{error} among {names}; start again to go on behind them") from error
        todo.write(*({**_line(instance, result), **facts} for instance, result in timed))
    return todo.summary


def check_available(device: str) -> None:
    """Refuse a GPU where there is none."""
    if device == "cuda" and not torch.cuda.is_available():
        raise InputError("device: 'cuda' is not available: torch finds no GPU; use --device cpu")


def _key(instance: Instance) -> str:
    return instance.key


def _key_of(line: Any) -> str:
    if not isinstance(line, Mapping) or "key" not in line:
        raise InputError("operator: not the line of a measured operator, which has a key")
    return str(line["key"])


def _batches(wanted: Sequence[Instance], device: str) -> Iterable[list[Instance]]:
    if device == "cpu":
        return ([instance] for instance in wanted)
    return batch_by_memory(wanted, 0.5 * torch.cuda.get_device_properties(0).total_memory, _BATCH)


class _Poisoned(Exception):
    """A kernel did what ends a CUDA process for good, such as an illegal access."""


def _time(group: list[Instance], device: str) -> Iterable[tuple[Instance, Timing | str]]:
    if device == "cuda":
        try:
            return list(_cuda_timer().time(group))
        except RuntimeError as error:
            raise _Poisoned(f"the GPU reported {first_line(error)!r}") from error
    return [(instance, _cpu(instance)) for instance in group]


def _cpu(instance: Instance) -> Timing | str:
    try:
        return time_on_cpu(instance)
    except Exception as error:
        return f"{type(error).__name__}: {first_line(error)}"[:200]


_TIMERS: list[CudaTimer] = []


def _cuda_timer() -> CudaTimer:
    """Make a timer, once per process; the device is brought to its working clock first."""
    if not _TIMERS:
        warm = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
        for _ in range(50):
            warm @ warm
        torch.cuda.synchronize()
        _TIMERS.append(CudaTimer())
    return _TIMERS[0]


def _line(instance: Instance, result: Timing | str) -> dict[str, Any]:
    outcome = {"error": result} if isinstance(result, str) else dataclasses.asdict(result)
    return {"key": instance.key, **instance.to_dict(), **outcome}


def _check_context(device: str) -> None:
    if device == "cuda":
        try:
            torch.cuda.synchronize()
        except RuntimeError as error:
            raise _Poisoned(f"the GPU reported {first_line(error)!r}") from error


def machine(device: str) -> dict[str, Any]:
    """Say where and with what a measurement was made."""
    info = {
        "date": datetime.datetime.now(tz=datetime.UTC).date().isoformat(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "processor": processor(),
        "device": device_name(device),
    }
    if device == "cuda":
        info |= {"cuda": torch.version.cuda or "", "cudnn": str(torch.backends.cudnn.version())}
    return info


def device_name(device: str) -> str:
    """Name the GPU here as the driver does, or the processor in words."""
    return torch.cuda.get_device_properties(0).name if device == "cuda" else f"cpu, {host()}"
