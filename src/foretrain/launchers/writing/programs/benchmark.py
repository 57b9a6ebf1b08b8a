"""Measures some steps of this plan and says in a line whether the forecast held.

python benchmark.py [--steps 20]

It runs launch.sh with a limit of steps, on every node as launch.sh is, and adds a run to runs.jsonl, which
foretrain reads. Needs Python alone; where foretrain is installed, its recorder times the steps.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import re
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

FOLDER = Path(__file__).resolve().parent
WARM_UP_STEPS = 3
_COLOURS = re.compile(r"\x1b\[[\d;]*m")


class Figures(NamedTuple):
    """Holds what a log tells: the time of each step, and the most memory of a device."""

    times_s: list[float]
    peak_bytes: float | None = None
    reserved_bytes: float | None = None


# Logs of frameworks


def of_program(lines: Iterable[str], job: Mapping[str, Any], workers: int) -> Figures:
    """The lines of train.py."""
    times, peak, reserved = [], None, None
    for line in lines:
        if match := re.search(r"step \d+ of \d+: ([\d.]+) s", line):
            times.append(float(match[1]))
        if match := re.search(r"peak memory: (\d+) bytes allocated, (\d+) bytes reserved", line):
            peak, reserved = float(match[1]), float(match[2])
    return Figures(times, peak, reserved)


def of_megatron(lines: Iterable[str], job: Mapping[str, Any], workers: int) -> Figures:
    """``elapsed time per iteration (ms): ...``, and what each rank tells of its memory after a step."""
    times, peaks, reserves = list[float](), list[float](), list[float]()
    for line in lines:
        if match := re.search(r"elapsed time per iteration \(ms\): ([\d.]+)", line):
            times.append(float(match[1]) * 1e-3)
        if match := re.search(r"memory \(MB\).*max allocated: ([\d.]+)", line):
            peaks.append(float(match[1]) * 2**20)
        if match := re.search(r"memory \(MB\).*max reserved: ([\d.]+)", line):
            reserves.append(float(match[1]) * 2**20)
    return Figures(times, max(peaks, default=None), max(reserves, default=None))


def of_torchtitan(lines: Iterable[str], job: Mapping[str, Any], workers: int) -> Figures:
    """``step: ... memory: ...GiB(...) tps: ...``: tokens per second and device, and reserved memory."""
    times, reserves = list[float](), list[float]()
    tokens = job["training"]["global_batch"] * job["training"]["sequence"]
    for line in lines:
        match = re.search(r"step:\s*\d+.*memory:\s*([\d.]+)GiB.*tps:\s*([\d,]+)", _COLOURS.sub("", line))
        if match and "validate" not in line:
            times.append(tokens / (float(match[2].replace(",", "")) * workers))
            reserves.append(float(match[1]) * 2**30)
    return Figures(times, None, max(reserves, default=None))


Reader = Callable[[Iterable[str], Mapping[str, Any], int], Figures]
READERS: dict[str, Reader] = {"megatron": of_megatron, "torchtitan": of_torchtitan}


def limits(target: str, steps: int, runs: Path) -> list[str]:
    """List the arguments with which launch.sh runs so many steps."""
    if target == "megatron":
        return ["--train-iters", str(steps), "--log-interval", "1", "--eval-iters", "0"]
    if target == "torchtitan":
        return ["--training.steps", str(steps), "--metrics.log_freq", "1"]
    return ["--steps", str(steps), "--runs", str(runs)]


# The run


def load_job(folder: Path) -> dict[str, Any]:
    if (file := folder / "job.json").is_file():
        loaded: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
        return loaded
    import tomllib

    return tomllib.loads((folder / "job.toml").read_text(encoding="utf-8"))


def run_of(job: dict[str, Any], figures: Figures, launch: Mapping[str, Any]) -> dict[str, Any]:
    """A run as foretrain reads it."""
    timed = figures.times_s[WARM_UP_STEPS:] or figures.times_s[-1:]
    step_s, training = statistics.median(timed), dict(job["training"])
    measured = {"step_time_s": step_s, "samples_per_s": training["global_batch"] / step_s}
    if training.get("sequence"):
        measured["tokens_per_s"] = training["global_batch"] * training["sequence"] / step_s
    memory = {"peak_memory_bytes": figures.peak_bytes, "reserved_memory_bytes": figures.reserved_bytes}
    measured |= {name: value for name, value in memory.items() if value is not None}
    if launch.get("allocator"):
        training["allocator"] = launch["allocator"]
    provenance = {
        "source": "foretrain benchmark",
        "framework": launch["target"],
        "machine": platform.machine(),
        "started": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),  # noqa: UP017
        "steps": len(figures.times_s),
        "timed_steps": len(timed),
        "step_time_min_s": min(timed),
        "step_time_max_s": max(timed),
        "forecast": {"step_time_s": launch["forecast"]["step_time_s"]["median"]},
    }
    return {"job": {**job, "training": training}, "measured": measured, "provenance": provenance}


def verdict(measured: Mapping[str, float], forecast: Mapping[str, Mapping[str, float] | None]) -> str:
    """Whether the forecast held, in a line."""
    parts = []
    for name, title, shown in (
        ("step_time_s", "step time", seconds),
        ("peak_memory_bytes", "peak memory", gibibytes),
        ("reserved_memory_bytes", "reserved memory", gibibytes),
    ):
        value, expected = measured.get(name), forecast.get(name)
        if value is None or expected is None:
            if name == "peak_memory_bytes":
                parts.append(f"{title} {'has no forecast' if expected is None else 'was not measured'}")
            continue
        held = expected["low"] <= value <= expected["high"]
        off = 100 * (value / expected["median"] - 1)
        parts.append(
            f"{title} {'held' if held else 'did not hold'}: {shown(value)}, forecast "
            f"{shown(expected['median'])} ({off:+.1f} %), interval {shown(expected['low'])} to "
            f"{shown(expected['high'])}"
        )
    return "; ".join(parts)


def seconds(value: float) -> str:
    return f"{value:.3f} s" if value >= 1 else f"{value * 1e3:.4g} ms"


def gibibytes(value: float) -> str:
    return f"{value / 2**30:.2f} GiB"


def lines_in(path: Path) -> list[str]:
    return path.read_text(encoding="utf-8").splitlines() if path.is_file() else []


def launched(steps: int, target: str, runs: Path) -> list[str]:
    """The lines that launch.sh printed, which go to the screen and to benchmark.log too."""
    command = ["bash", str(FOLDER / "launch.sh"), *limits(target, steps, runs)]
    lines = []
    with (
        (FOLDER / "benchmark.log").open("w", encoding="utf-8") as log,
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process,
    ):
        for line in process.stdout or ():
            lines.append(line)
            log.write(line)
            sys.stdout.write(line)
    if process.returncode:
        raise SystemExit(f"benchmark: launch.sh ended with code {process.returncode}")
    return lines


def node_rank() -> int:
    names = ("NODE_RANK", "PET_NODE_RANK", "SLURM_NODEID", "SKYPILOT_NODE_RANK")
    return int(next((os.environ[name] for name in names if os.environ.get(name)), "0"))


def main() -> None:
    parser = argparse.ArgumentParser(description="Measures this plan against its forecast.")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--runs", type=Path, default=FOLDER / "runs.jsonl")
    given = parser.parse_args()
    launch = json.loads((FOLDER / "launch.json").read_text(encoding="utf-8"))
    runs, before = given.runs.resolve(), len(lines_in(given.runs))
    lines = launched(given.steps, launch["target"], runs)
    if node_rank():
        return
    if len(recorded := lines_in(runs)) > before:
        run = json.loads(recorded[-1])
    else:
        job = load_job(FOLDER)
        figures = READERS.get(launch["target"], of_program)(lines, job, launch["workers"])
        if not figures.times_s:
            raise SystemExit("benchmark: no step was found in what launch.sh printed (benchmark.log)")
        run = run_of(job, figures, launch)
        with runs.open("a", encoding="utf-8") as file:
            file.write(json.dumps(run) + "\n")
    print(f"foretrain: {verdict(run['measured'], launch['forecast'])}; run in {runs.name}")


if __name__ == "__main__":
    main()
