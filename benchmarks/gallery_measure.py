"""Measures the trainings of the gallery for real: each script as it is, for a few whole steps.

    python benchmarks/gallery_measure.py --out measured.jsonl [NAME ...]

Writes one JSON line per script: the median time of a whole step (all optimizers, data at hand), peak memory,
and on a GPU kernels (copies and fills among them) and busy time of a step. Downloads are stood in for. Each
script runs in a process of its own under a time limit; what it had measured by then is kept.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import runpy
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import tomllib
from pathlib import Path
from typing import Any

GALLERY = Path(__file__).resolve().parent.parent / "examples" / "gallery"
WARM_UP_STEPS = 3
PROFILED_STEPS = 2
KEPT_BATCHES = 4
"""Batches of a data loader that are kept and given again, so that no step waits for data."""


class Meter:
    """Counts optimizer steps, times whole steps, and ends the process when it has seen enough."""

    def __init__(self, row: dict[str, Any], steps: int, limit_s: float, result: Path) -> None:
        import torch
        from torch.optim.optimizer import register_optimizer_step_post_hook

        self.torch, self.result, self.steps = torch, result, steps
        self.warm_up = min(WARM_UP_STEPS, steps)
        self.cuda = torch.cuda.is_available()
        self.began, self.limit_s = time.perf_counter(), limit_s
        self.calls_per_step = row.get("optimizer_steps", 1)
        self.calls = 0
        self.marks: list[Any] = []
        self.optimizers: dict[int, Any] = {}
        self.parameters: dict[int, int] = {}
        self.profiler: Any = None
        self.measured: dict[str, Any] = {"device": torch.cuda.get_device_name() if self.cuda else "cpu"}
        register_optimizer_step_post_hook(self.after_optimizer)
        self.parameter_hook = torch.nn.modules.module.register_module_forward_pre_hook(self.before_module)

    def before_module(self, module: Any, inputs: Any) -> None:
        for parameter in module.parameters():
            if isinstance(parameter, self.torch.nn.Parameter):
                self.parameters[id(parameter)] = parameter.numel()

    def after_optimizer(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        self.optimizers[id(optimizer)] = optimizer
        self.calls += 1
        if self.calls % self.calls_per_step == 0:
            self.after_step()

    def after_step(self) -> None:
        if len(self.marks) == 0:
            self.parameter_hook.remove()
        if self.profiler is not None:
            self.profiled += 1
            if self.profiled == PROFILED_STEPS:
                self.finish_profile()
                self.end()
            return
        self.marks.append(self.mark())
        if len(self.marks) == self.warm_up and self.cuda:
            self.torch.cuda.reset_peak_memory_stats()
        late = time.perf_counter() - self.began > 0.6 * self.limit_s and len(self.marks) > 1
        if len(self.marks) > self.warm_up + self.steps or late:
            self.finish_times()
            if not self.cuda:
                self.end()
            self.start_profile()

    def mark(self) -> Any:
        if not self.cuda:
            return time.perf_counter()
        event = self.torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def finish_times(self) -> None:
        """Times between the ends of whole steps by the device's clock: the host runs ahead as it does in
        training."""
        if self.cuda:
            self.torch.cuda.synchronize()
            between = [a.elapsed_time(b) / 1000 for a, b in zip(self.marks, self.marks[1:], strict=False)]
            self.measured |= {
                "peak_memory_bytes": self.torch.cuda.max_memory_allocated(),
                "reserved_memory_bytes": self.torch.cuda.max_memory_reserved(),
            }
        else:
            between = [b - a for a, b in zip(self.marks, self.marks[1:], strict=False)]
        usual = between[self.warm_up :] or between
        trained = {
            id(p): p.numel()
            for optimizer in self.optimizers.values()
            for group in optimizer.param_groups
            for p in group["params"]
            if p.requires_grad or p.grad is not None
        }
        self.measured |= {
            "step_time_s": statistics.median(usual),
            "step_time_mean_s": statistics.fmean(usual),
            "steps": len(usual),
            "optimizers": len(self.optimizers),
            "trained": sum(trained.values()),
            "parameters": sum(self.parameters.values()),
        }
        self.write()

    def start_profile(self) -> None:
        activities = self.torch.profiler.ProfilerActivity
        self.profiler = self.torch.profiler.profile(activities=[activities.CPU, activities.CUDA])
        self.profiled = 0
        self.profiler.start()

    def finish_profile(self) -> None:
        self.torch.cuda.synchronize()
        self.profiler.stop()
        spans = sorted(
            (event.start_ns(), event.start_ns() + event.duration_ns())
            for event in self.profiler.profiler.kineto_results.events()
            if "CUDA" in str(event.device_type()) and not getattr(event, "is_user_annotation", bool)()
        )
        busy_ns, reached = 0, 0
        for start, end in spans:
            busy_ns += max(0, end - max(start, reached))
            reached = max(reached, end)
        self.measured |= {
            "kernels": len(spans) / PROFILED_STEPS,
            "device_busy_s": busy_ns * 1e-9 / PROFILED_STEPS,
        }
        self.write()

    def write(self) -> None:
        self.result.write_text(json.dumps(self.measured))

    def end(self) -> None:
        """Leave at once: the rest of the training, its checkpoints and its workers are not wanted."""
        sys.stdout.flush()
        os._exit(0)


def small_batches(size: int) -> None:
    """Let data loaders give batches of no more than some samples."""
    from torch.utils.data import DataLoader

    start = DataLoader.__init__

    def start_small(self: Any, dataset: Any, batch_size: int = 1, *args: Any, **kwargs: Any) -> None:
        start(self, dataset, min(batch_size, size) if batch_size else batch_size, *args, **kwargs)

    DataLoader.__init__ = start_small  # type: ignore[assignment, method-assign]


def keep_batches() -> None:
    """Let data loaders give their first batches again and again."""
    from torch.utils.data.dataloader import DataLoader, _BaseDataLoaderIter

    real = _BaseDataLoaderIter.__next__

    def next_batch(self: Any) -> Any:
        given = self.__dict__.setdefault("_given", 0)
        kept = self.__dict__.setdefault("_kept", [])
        if given < KEPT_BATCHES:
            kept.append(real(self))
        elif given >= self._length:
            raise StopIteration
        self._given = given + 1
        return kept[given % KEPT_BATCHES]

    start = _BaseDataLoaderIter.__init__

    def remember_length(self: Any, loader: DataLoader[Any]) -> None:
        start(self, loader)
        self._length = len(loader)

    _BaseDataLoaderIter.__init__ = remember_length  # type: ignore[method-assign]
    _BaseDataLoaderIter.__next__ = next_batch  # type: ignore[method-assign]


def run_one(row: dict[str, Any], options: argparse.Namespace, result: Path) -> None:
    """Run a script as ``python FILE`` would, in an empty folder, with the meter on."""
    script = GALLERY / row["file"]
    sys.path.insert(0, str(Path(__file__).parent))
    from gallery_offline import stand_in

    Meter(row, options.steps, options.limit, result)
    keep_batches()
    if options.small:
        small_batches(options.small)
    stand_in(script)
    sys.argv = [str(script)]
    sys.path[0] = str(script.parent)
    runpy.run_path(str(script), run_name="__main__")


def measure(row: dict[str, Any], options: argparse.Namespace, limit_s: float) -> dict[str, Any]:
    """What a process of its own measured of a script within the limit."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        result = Path(folder) / "result.json"
        command = [sys.executable, str(Path(__file__).resolve()), "--child", row["file"], str(result)]
        command += ["--steps", str(options.steps), "--limit", str(limit_s), "--small", str(options.small)]
        began = time.perf_counter()
        with (Path(folder) / "log").open("w+") as log:
            child = subprocess.Popen(
                command, cwd=folder, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
            )
            try:
                child.wait(timeout=limit_s)
                ended = f"exit code {child.returncode}"
            except subprocess.TimeoutExpired:
                ended = f"not done after {limit_s:g} s"
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)
            child.wait()
            log.seek(0)
            lines = [line for line in log.read().splitlines() if line.strip()]
        line = {"file": row["file"], "wall_s": round(time.perf_counter() - began, 1)}
        if result.is_file():
            return {**line, **json.loads(result.read_text())}
        return {**line, "error": f"{ended}: {lines[-1] if lines else 'no output'}"}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*", help="files of the gallery; all of them when none is named")
    parser.add_argument("--out", type=Path, help="where the JSON lines go, beside the screen")
    parser.add_argument("--steps", type=int, default=20, help="whole steps to time")
    parser.add_argument("--limit", type=float, default=25.0, help="seconds for a script")
    parser.add_argument("--budget", type=float, default=float("inf"), help="seconds for all of them")
    parser.add_argument(
        "--small", type=int, default=0, help="at most so many samples in a batch, to try the scripts on a CPU"
    )
    parser.add_argument("--child", nargs=2, metavar=("FILE", "RESULT"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    rows = {row["file"]: row for row in tomllib.loads((GALLERY / "gallery.toml").read_text())["training"]}
    if options.child:
        file, result = options.child
        run_one(rows[file], options, Path(result))
        return
    unknown = [name for name in options.names if name not in rows]
    if unknown:
        parser.error(f"{unknown[0]} is not in the gallery")
    began = time.perf_counter()
    for name in options.names or rows:
        limit_s = max(options.limit, rows[name].get("limit_s", 0))
        if time.perf_counter() - began + limit_s > options.budget:
            line = {"file": name, "error": "no time left"}
        else:
            line = measure(rows[name], options, limit_s)
        text = json.dumps(line)
        print(text, flush=True)
        if options.out:
            with options.out.open("a") as out:
                out.write(text + "\n")


if __name__ == "__main__":
    main()
