"""Forecasts every training of the gallery (examples/gallery) as its author would, without a change to it.

    python benchmarks/gallery.py [NAME ...] [--device h200] [--measured measured.jsonl] [--json OUT]

Each target of examples/gallery/gallery.toml goes through `foretrain predict` in a process of its own. A
training passes when all its targets give a forecast that says what the table says of its samples and
parameters. Prints a row for each, with the reason of a failure; exits 1 when more than two trainings fail.
With --measured (of benchmarks/gallery_measure.py) the forecasts stand beside what was measured.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import signal
import subprocess
import sys
import time
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from foretrain.evaluate import Scores

GALLERY = Path(__file__).resolve().parent.parent / "examples" / "gallery"
ALLOWED_FAILURES = 2
TOLERANCE = 1e-3
"""Relative; of samples and parameters, which are counted."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """What became of one target of the gallery."""

    file: str
    target: str
    took_s: float
    reason: str | None = None
    forecast: dict[str, Any] = field(default_factory=dict)

    def quantity(self, name: str) -> float | None:
        value = self.forecast.get("quantities", {}).get(name)
        return None if value is None else value["median"]


def predict(row: dict[str, Any], target: str, options: list[str], limit_s: float) -> Outcome:
    """Forecast a target in a process of its own, from the gallery's folder."""
    what = f"{row['file']}:{target}" if target else row["file"]
    command = [sys.executable, "-m", "foretrain", "predict", what, *shlex.split(row.get("options", ""))]
    began = time.perf_counter()
    child = subprocess.Popen(
        [*command, *options, "--json"],
        cwd=GALLERY,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        stdout, stderr = child.communicate(timeout=limit_s)
    except subprocess.TimeoutExpired:
        os.killpg(child.pid, signal.SIGKILL)
        child.communicate()
        stdout, stderr = "", f"no forecast after {limit_s:g} s"
    took_s = time.perf_counter() - began
    forecast, reason = read_forecast(stdout, stderr, child.returncode)
    if reason is None:
        reason = next(contradictions(row, forecast), None)
    return Outcome(file=row["file"], target=target, took_s=took_s, reason=reason, forecast=forecast)


def read_forecast(stdout: str, stderr: str, code: int) -> tuple[dict[str, Any], str | None]:
    """The forecast, or why there is none."""
    said = [line for line in stderr.splitlines() if line.strip()]
    if code != 0:
        traced = "a traceback: " if any(line.startswith("Traceback") for line in said) else ""
        return {}, traced + (said[-1] if said else f"exit code {code} and no word")
    try:
        return json.loads(stdout), None
    except ValueError:
        return {}, f"standard output is no JSON: it begins {stdout[:60]!r}"


def contradictions(row: dict[str, Any], forecast: dict[str, Any]) -> Iterator[str]:
    """Where a forecast says something else than the table."""
    quantities = {name: value["median"] for name, value in forecast["quantities"].items()}
    for name in ("step_time_s", "peak_memory_bytes"):
        if not quantities.get(name, 0) > 0:
            yield f"{name} is {quantities.get(name)}"
    if "samples" in row:
        samples = quantities["samples_per_s"] * quantities["step_time_s"]
        if abs(samples / row["samples"] - 1) > TOLERANCE:
            yield f"{samples:g} samples in a step; the script has {row['samples']}"
    counted = (forecast.get("flops") or {}).get("trainable_parameters")
    if "trained" in row and counted is not None and abs(counted / row["trained"] - 1) > TOLERANCE:
        yield f"{counted:g} trained parameters; the script has {row['trained']}"


def show(outcome: Outcome, measured: dict[str, Any]) -> str:
    name = f"{outcome.file}:{outcome.target}" if outcome.target else outcome.file
    if outcome.reason is not None:
        return f"{name:36} FAILED {outcome.took_s:7.1f} s  {outcome.reason}"
    step_s, memory = outcome.quantity("step_time_s"), outcome.quantity("peak_memory_bytes")
    assert step_s is not None
    assert memory is not None
    line = f"{name:36} ok     {outcome.took_s:7.1f} s  {step_s * 1e3:10.2f} ms  {memory / 2**30:8.3f} GiB"
    if "step_time_s" in measured:
        line += f"  measured {measured['step_time_s'] * 1e3:10.2f} ms"
        if "peak_memory_bytes" in measured:
            line += f"  {measured['peak_memory_bytes'] / 2**30:8.3f} GiB"
    return line


def errors(outcomes: list[Outcome], measured: dict[str, dict[str, Any]], quantity: str) -> list[float]:
    """Relative errors, of the whole script where it is forecast: it is what is measured."""
    passed = [outcome for outcome in outcomes if outcome.reason is None]
    forecasts = {one.file: one for one in sorted(passed, key=lambda one: one.target, reverse=True)}
    pairs = [
        (forecast.quantity(quantity), measured.get(file, {}).get(quantity))
        for file, forecast in forecasts.items()
    ]
    return [predicted / true - 1 for predicted, true in pairs if predicted is not None and true]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*", help="files of the gallery; all of them when none is named")
    parser.add_argument("--device", help="device to forecast for")
    parser.add_argument("--refresh", action="store_true", help="trace anew, cached or not")
    parser.add_argument("--limit", type=float, default=300.0, help="seconds for a target")
    parser.add_argument("--measured", type=Path, help="what gallery_measure.py wrote")
    parser.add_argument("--json", type=Path, help="write the outcomes as JSON lines")
    options = parser.parse_args()
    rows = {row["file"]: row for row in tomllib.loads((GALLERY / "gallery.toml").read_text())["training"]}
    unknown = [name for name in options.names if name not in rows]
    if unknown:
        parser.error(f"{unknown[0]} is not in the gallery")
    measured: dict[str, dict[str, Any]] = {}
    if options.measured:
        lines = options.measured.read_text().splitlines()
        measured = {line["file"]: line for line in map(json.loads, lines)}
    extra = (["--device", options.device] if options.device else []) + ["--refresh"] * options.refresh

    outcomes = []
    for name in options.names or rows:
        for target in rows[name]["targets"]:
            outcome = predict(rows[name], target, extra, options.limit)
            outcomes.append(outcome)
            print(show(outcome, measured.get(name, {})), flush=True)
            if options.json:
                with options.json.open("a") as out:
                    fields = ("file", "target", "took_s", "reason", "forecast")
                    out.write(json.dumps({key: getattr(outcome, key) for key in fields}) + "\n")
    for quantity in ("step_time_s", "peak_memory_bytes", "device_busy_s", "kernels"):
        off = errors(outcomes, measured, quantity)
        if off:
            scores = Scores.of_errors(off)
            print(f"{quantity}: median error {scores.median_ape:.1%} over {scores.n} trainings")
    tried = list(dict.fromkeys(outcome.file for outcome in outcomes))
    failed = {outcome.file for outcome in outcomes if outcome.reason is not None}
    print(f"{len(tried) - len(failed)} of {len(tried)} trainings forecast without a change")
    sys.exit(1 if len(failed) > ALLOWED_FAILURES else 0)


if __name__ == "__main__":
    main()
