"""Forecasts the same jobs with another commit and with this one, and shows what changed.

    python benchmarks/compare.py --base REV [--jobs 500] [--data data] [--work scratch/compare]

The jobs are drawn evenly from the files of runs. What the base forecast and this commit does not ends with
exit code 1; figures that drift are a table and nothing more. The base is checked out into a folder of its
own, and runs with the same libraries.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import shutil
import statistics
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

import reading
from foretrain.errors import InputError
from foretrain.files import text_lines

QUANTITIES = ("step_time_s", "device_busy_s", "peak_memory_bytes", "reserved_memory_bytes", "kernels")
SAME = 1e-6
"""Relative differences up to this are none."""
WORST = 10

Forecasts = Mapping[int, Mapping[str, Any]]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--base", required=True, help="a commit, branch or tag")
    parser.add_argument("--jobs", type=int, default=500)
    parser.add_argument("--data", type=reading.existing, default=Path("data"))
    parser.add_argument("--work", type=Path, default=Path("scratch/compare"))
    parser.add_argument("--processes", type=int, default=2)
    options = parser.parse_args()
    options.work.mkdir(parents=True, exist_ok=True)
    jobs = written_jobs(options.data, options.work, options.jobs)
    tree = checked_out(options.base, options.work / "base")
    try:
        before = forecasts(tree, jobs, options.work / "before.jsonl", options.processes)
    finally:
        subprocess.run(["git", "worktree", "remove", "--force", tree], check=False)
    after = forecasts(Path.cwd(), jobs, options.work / "after.jsonl", options.processes)
    tell(before, after, [json.loads(text) for _, text in text_lines(jobs)])
    if _only(before, after):
        sys.exit(1)


def _only(one: Forecasts, other: Forecasts) -> list[int]:
    """Lines that one side forecast and the other did not."""
    return [line for line in one if "quantities" in one[line] and "quantities" not in other.get(line, {})]


def written_jobs(data: Path, work: Path, count: int) -> Path:
    """A file of jobs, the same number of each file of runs, with the models that they name beside it."""
    for module in data.glob("*.py"):
        shutil.copy(module, work)
    files = sorted(path for path in data.iterdir() if path.name.endswith((".jsonl", ".jsonl.zst")))
    if not files:
        raise InputError(f"{data}: no file of runs in it (*.jsonl, *.jsonl.zst)")
    each, chosen = -(-count // len(files)), []
    for path in files:
        jobs = list(dict.fromkeys(_job(text) for _, text in text_lines(path)))
        places = np.linspace(0, len(jobs) - 1, min(each, len(jobs))).round().astype(int)
        chosen += [jobs[place] for place in places]
    target = work / "jobs.jsonl"
    target.write_text("".join(f"{job}\n" for job in chosen[:count]))
    return target


def _job(text: str) -> str:
    return json.dumps(json.loads(text)["job"], sort_keys=True)


def checked_out(base: str, folder: Path) -> Path:
    """The base as a tree of its own."""
    subprocess.run(["git", "worktree", "remove", "--force", folder], check=False, capture_output=True)
    made = subprocess.run(
        ["git", "worktree", "add", "--detach", folder, base], check=False, capture_output=True, text=True
    )
    if made.returncode:
        raise InputError(f"base: {base!r} cannot be checked out ({made.stderr.strip().splitlines()[-1]})")
    return folder


def forecasts(tree: Path, jobs: Path, out: Path, processes: int) -> Forecasts:
    """What ``foretrain predict --jobs`` of a tree says, by line."""
    command = [sys.executable, "-m", "foretrain", "predict", "--jobs", str(jobs), "--out", str(out.resolve())]
    subprocess.run(
        [*command, "--processes", str(processes)],
        env={**os.environ, "PYTHONPATH": str((tree / "src").resolve())},
        check=False,
    )
    answers = [json.loads(text) for _, text in text_lines(out)]
    return {answer["line"]: answer.get("forecast") or {"error": answer["error"]} for answer in answers}


def tell(before: Forecasts, after: Forecasts, jobs: Sequence[Mapping[str, Any]]) -> None:
    """What fails now, what works now, and how far figures moved."""
    lost, won = _only(before, after), _only(after, before)
    print(f"{len(jobs):,} jobs: {len(won):,} are forecast that were not, {len(lost):,} fail that were")
    for line in lost:
        print(f"  line {line}: {_name(jobs[line - 1])}: {after.get(line, {}).get('error', 'no answer')}")
    print("\n| quantity | forecasts | changed | median change | largest |\n|---|---|---|---|---|")
    moved: list[tuple[float, str]] = []
    for quantity in QUANTITIES:
        ratios = {}
        for line in before:
            pair = [_median(side.get(line, {}), quantity) for side in (before, after)]
            if all(pair):
                ratios[line] = pair[1] / pair[0] - 1  # type: ignore[operator]
        changed = {line: ratio for line, ratio in ratios.items() if abs(ratio) > SAME}
        middle = statistics.median(changed.values()) if changed else 0.0
        largest = max(changed.values(), key=abs, default=0.0)
        print(f"| `{quantity}` | {len(ratios):,} | {len(changed):,} | {middle:+.2%} | {largest:+.2%} |")
        moved += [(ratio, f"{_name(jobs[line - 1])}: {quantity}") for line, ratio in changed.items()]
    print()
    for ratio, name in sorted(moved, key=lambda one: -abs(math.log1p(one[0])))[:WORST]:
        print(f"{ratio:+8.1%} {name}")


def _median(forecast: Mapping[str, Any], quantity: str) -> float | None:
    found = forecast.get("quantities", {}).get(quantity)
    return None if found is None else float(found["median"])


def _name(job: Mapping[str, Any]) -> str:
    model, training = job["model"], job["training"]
    name = model.get("name") or (model.get("config") or {}).get("model_type", "")
    return f"{name}, batch {training.get('global_batch')}, on {job['cluster'].get('device')}"


if __name__ == "__main__":
    reading.run(main)
