"""Measures what torch's allocator holds on a GPU, each job in a process of its own, and keeps its events.

    python benchmarks/memory_gpu.py jobs.jsonl --out DIR [--settings "" expandable_segments:True]

Lines of the file are jobs or runs; ``"settings": [...]`` beside a job replaces ``--settings`` for it,
``"events": true`` keeps every allocation and release, with the operators of a last step beside them,
``"after": {job}`` trains that one first, in the same process, and ``"held_gb"`` is what it may hold. Writes
``DIR/memory.jsonl``, a run per job and setting, and ``DIR/events_N.npz``. Processes run side by side as far
as the device's memory goes: nothing is timed.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import multiprocessing
import os
import time
from collections.abc import Callable
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

STEPS = 6
ACTIONS = ("alloc", "free_requested", "free_completed", "segment_alloc", "segment_free", "segment_map",
           "segment_unmap")  # fmt: skip
DEVICE_GB = 120.0
"""Of the device's memory, what processes side by side may hold."""
CONTEXT_GB = 0.8
TOGETHER = 10


def measured(task: dict[str, Any], settings: str, events: Path | None, device: str) -> dict[str, Any]:
    """The run of one job in this process, which has not used the device before."""
    if settings:
        os.environ["PYTORCH_CUDA_ALLOC_CONF"] = os.environ["PYTORCH_ALLOC_CONF"] = settings
    import torch

    from foretrain.job import Job
    from foretrain.measure.steps import Stepper, forget_jobs

    on_gpu = device == "cuda"
    if on_gpu and settings:
        with contextlib.suppress(AttributeError, RuntimeError, ValueError):
            torch.cuda.memory._set_allocator_settings(settings)
    if "after" in task:
        stepper = Stepper(Job.read(task["after"], base=Path(task["base"])), device)
        stepper()
        del stepper
        if on_gpu and task.get("forget", True):
            forget_jobs()
    if events is not None and on_gpu:
        torch.cuda.memory._record_memory_history(enabled="all", context=None, max_entries=3_000_000)
    job = Job.read(task["job"], base=Path(task["base"]))
    stepper = Stepper(job, device)
    if job.plan.recompute == "full":
        module: Any = stepper.model.module
        enable = getattr(module, "gradient_checkpointing_enable", None)
        enable() if enable is not None else module.set_grad_checkpointing(True)
    built = _held(torch, on_gpu)
    steps, marks, peaks = [], [time.time_ns() // 1000], dict[str, int]()
    for number in range(STEPS):
        marks.append(time.time_ns() // 1000)
        stepper()
        steps.append(_held(torch, on_gpu))
        if number == 1 and on_gpu:
            torch.cuda.reset_peak_memory_stats()
    figures = _held(torch, on_gpu)
    for name, phase in stepper.phases().items():
        if on_gpu:
            torch.cuda.reset_peak_memory_stats()
        phase()
        peaks[name] = _held(torch, on_gpu)["peak"]
    if events is not None:
        marks.append(time.time_ns() // 1000)
        _keep_events(torch, stepper, events, marks, on_gpu)
    expandable = None
    if on_gpu:
        expandable = any(one.get("is_expandable") for one in torch.cuda.memory._snapshot()["segments"])
    return {
        "job": task["job"],
        "measured": {"peak_memory_bytes": figures["peak"], "reserved_memory_bytes": figures["reserved"]},
        "provenance": {
            "source": "benchmarks/memory_gpu.py",
            "torch": torch.__version__,
            "device": torch.cuda.get_device_name() if on_gpu else "cpu",
            "allocator": settings,
            "expandable": expandable,
            "after": task.get("after"),
            "forget": task.get("forget"),
            "built": built,
            "steps": steps,
            "phase_peak_bytes": peaks,
            "events": None if events is None else events.name,
            "row": task.get("row"),
        },
    }


def _held(torch: Any, on_gpu: bool) -> dict[str, int]:
    if not on_gpu:
        return dict.fromkeys(("allocated", "peak", "reserved", "peak_reserved"), 0)
    stats = torch.cuda.memory_stats()
    return {
        "allocated": stats["allocated_bytes.all.current"],
        "peak": stats["allocated_bytes.all.peak"],
        "reserved": stats["reserved_bytes.all.current"],
        "peak_reserved": stats["reserved_bytes.all.peak"],
        "requested": stats["requested_bytes.all.peak"],
        "small_reserved": stats["reserved_bytes.small_pool.current"],
    }


def _keep_events(torch: Any, stepper: Callable[[], None], path: Path, marks: list[int], on_gpu: bool) -> None:
    """What the allocator was asked for since the process began, and the operators of one more step."""
    import numpy as np
    from torch.utils._python_dispatch import TorchDispatchMode

    ops: list[tuple[int, str]] = []

    class Names(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            shapes = [
                f"{str(one.dtype)[6:]}{list(one.shape)}{'' if one.is_contiguous() else list(one.stride())}"
                for one in args
                if isinstance(one, torch.Tensor)
            ]
            ops.append((time.time_ns() // 1000, f"{func} {' '.join(shapes)}"))
            return func(*args, **(kwargs or {}))

    with Names():  # type: ignore[no-untyped-call]
        stepper()
    marks.append(time.time_ns() // 1000)
    names = sorted({name for _, name in ops})
    place = {name: number for number, name in enumerate(names)}
    trace = torch.cuda.memory._snapshot()["device_traces"][0] if on_gpu else []
    kept = [one for one in trace if one["action"] in ACTIONS]
    np.savez_compressed(
        path,
        action=np.array([ACTIONS.index(one["action"]) for one in kept], np.uint8),
        address=np.array([one["addr"] for one in kept], np.int64),
        size=np.array([one["size"] for one in kept], np.int64),
        time_us=np.array([one["time_us"] for one in kept], np.int64),
        marks_us=np.array(marks, np.int64),
        op_time_us=np.array([when for when, _ in ops], np.int64),
        op=np.array([place[name] for _, name in ops], np.int32),
        op_names=np.array(names),
        actions=np.array(ACTIONS),
    )


# Processes


def import_libraries() -> None:
    """Import what every child needs, once; nothing here may touch the device."""
    import transformers

    import foretrain.measure.steps  # noqa: F401
    from foretrain.capture.sources.torchvision_ops import import_with_operators

    try:
        import timm  # noqa: F401
    except RuntimeError:
        import_with_operators("timm")
    transformers.Trainer  # noqa: B018


def child(function: Callable[..., Any], *args: Any) -> tuple[BaseProcess, Any]:
    """Run a function in a fork of this process, whose imports it finds; the pipe gives what it returns."""
    ours, theirs = multiprocessing.get_context("fork").Pipe(duplex=False)

    def run() -> None:
        try:
            result = function(*args)
        except BaseException as error:
            result = {"error": f"{type(error).__name__}: {error}"[:400]}
        theirs.send(result)

    process = multiprocessing.get_context("fork").Process(target=run, daemon=True)
    process.start()
    theirs.close()
    return process, ours


def collect(process: BaseProcess, pipe: Any, wait_s: float) -> dict[str, Any] | None:
    """What a child returned, or why it did not; None while it works."""
    if not pipe.poll(wait_s):
        return None
    try:
        result = dict(pipe.recv())
    except EOFError:
        process.join(5)
        result = {"error": f"the process ended with {process.exitcode}"}
    process.join(5)
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("jobs", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--settings", nargs="*", default=["", "expandable_segments:True"])
    parser.add_argument("--seconds", type=float, default=70.0)
    parser.add_argument("--device", default="cuda")
    options = parser.parse_args()
    ends = time.monotonic() + options.seconds
    import_libraries()

    options.out.mkdir(parents=True, exist_ok=True)
    tasks: list[tuple[dict[str, Any], str, Path | None]] = []
    for line in options.jobs.read_text().splitlines():
        task = json.loads(line)
        for settings in task.get("settings", options.settings):
            name = f"events_{len(tasks)}.npz" if task.get("events") else None
            task.setdefault("base", str(options.jobs.parent))
            tasks.append((task, settings, None if name is None else options.out / name))
    running: list[tuple[Any, Any, float, dict[str, Any]]] = []
    with (options.out / "memory.jsonl").open("a") as out:
        while (tasks or running) and time.monotonic() < ends:
            held = sum(size for *_, size, _ in running)
            if tasks and len(running) < TOGETHER and (
                not running or held + tasks[0][0].get("held_gb", 10) + CONTEXT_GB < DEVICE_GB
            ):  # fmt: skip
                task, settings, events = tasks.pop(0)
                size = task.get("held_gb", 10) + CONTEXT_GB
                process, pipe = child(measured, task, settings, events, options.device)
                running.append((process, pipe, size, {"job": task["job"], "allocator": settings}))
                continue
            for one in list(running):
                result = collect(one[0], one[1], 0.02)
                if result is not None:
                    running.remove(one)
                    out.write(json.dumps({**one[3], **result} if "error" in result else result) + "\n")
                    out.flush()
        for process, _, _, about in running:
            process.kill()
            out.write(json.dumps({**about, "error": "no time left"}) + "\n")


if __name__ == "__main__":
    main()
