"""Learns from measured starts how long a training takes until its steps run, and says how well.

    python benchmarks/startup.py data/h200_startup.jsonl data/h200_modern.jsonl data/h200_compiled.jsonl \\
        [--out src/foretrain/costs/startup.json]

The runs have import_s, context_s, build_s and first_steps_s (a list) in their provenance, as
``foretrain measure steps`` writes them for the first job of a process. Those of compiled models that have
only first_step_s or first_steps_s, of a process that ran others before, tell of compiling alone.
"""

from __future__ import annotations

import argparse
import dataclasses
from pathlib import Path

import reading
from foretrain.costs.startup import Started, StartUp
from foretrain.measure.store import open_runs
from foretrain.predictors.base import source_of
from foretrain.run import Run
from foretrain.step.graph import step_graph
from foretrain.units import format_seconds


def tells(run: Run) -> bool:
    if run.job.workload.training.compile and {"first_step_s", "first_steps_s"} & run.provenance.keys():
        return True
    return "import_s" in run.provenance and "first_steps_s" in run.provenance


def start_of(run: Run) -> Started:
    graph = step_graph(run.job)
    return Started.of(
        {"first_steps_s": [run.provenance.get("first_step_s")], **run.provenance},
        library=run.job.workload.model.source,
        operators=len(graph.operators),
        calls=sum(op.operator.launches for op in graph.ops if op.phase != "optimizer"),
        compiled=bool(run.job.workload.training.compile),
        step_s=run.measured["step_time_s"],
    )


def source(path: Path) -> dict[str, str]:
    """A file by its name and content, wherever it lies."""
    return {**source_of(path), "file": path.name}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("runs", type=reading.existing, nargs="+")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    runs = [run for path in options.runs for _, run in open_runs(path) if tells(run)]
    starts = [start_of(run) for run in runs]
    found = StartUp.fit(starts, {run.job.cluster.device.name for run in runs})
    found = dataclasses.replace(found, sources=tuple(source(path) for path in options.runs))
    for run, start in zip(runs, starts, strict=True):
        said_s = found.median_s(start.library, start.operators, compiled=start.compiled, calls=start.calls)
        first_s = said_s - found.before_s(start.library)
        how = "compiled" if start.compiled else "eager"
        times = f"{format_seconds(start.first_steps_s):>12}{format_seconds(first_s):>12}"
        print(f"{run.job.workload.model.label:<32}{how:<10}{start.operators:>6}{times}")
    print(found)
    if options.out is not None:
        found.save(options.out)


if __name__ == "__main__":
    reading.run(main)
