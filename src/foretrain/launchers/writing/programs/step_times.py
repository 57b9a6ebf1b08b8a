"""Times the steps of a training and prints them, one line each, for people and for benchmark.py."""

from __future__ import annotations

import importlib
import os
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor


class StepTimes:
    """Times steps, on a GPU by events in its stream so that nothing waits, and prints them now and then."""

    def __init__(self, *, on_gpu: bool, steps: int, every: int) -> None:
        self.on_gpu, self.steps, self.every, self.done = on_gpu, steps, every, 0
        self.open: list[tuple[Any, Any, Tensor | None]] = []
        if on_gpu:
            torch.cuda.reset_peak_memory_stats()

    def mark(self) -> Any:
        if not self.on_gpu:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def end(self, began: Any, loss: Tensor | None = None) -> None:
        """A step has ended, which began at this mark."""
        self.open.append((began, self.mark(), loss))
        self.done += 1
        if self.done % self.every and self.done != self.steps:
            return
        if self.on_gpu:
            torch.cuda.synchronize()
        for number, (first, last, value) in enumerate(self.open, start=self.done - len(self.open) + 1):
            time_s = first.elapsed_time(last) * 1e-3 if self.on_gpu else last - first
            shown = "" if value is None else f", loss {float(value):.4f}"
            print(f"step {number} of {self.steps}: {time_s:.6f} s{shown}", flush=True)
        self.open.clear()

    def print_memory(self) -> None:
        if self.on_gpu:
            allocated, reserved = torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()
            print(f"peak memory: {allocated} bytes allocated, {reserved} bytes reserved", flush=True)


def recorder_of(runs: Path | None, job: Path) -> Any:
    """Record the steps as a run of foretrain, where it is installed; else None."""
    if runs is None or os.environ.get("RANK", "0") != "0":
        return None
    try:
        callbacks = importlib.import_module("foretrain.callbacks")
    except ImportError:
        return None
    return callbacks.Recorder(runs, job=str(job), predictor=None, show=lambda line: None, framework="torch")
