"""Scores the law of the Ray models alone on the campaign of four Ray nodes, beside the noise of its repeats.

    python benchmarks/ray_nodes_law.py [--runs data/ray_nodes_campaign.jsonl.zst] [--model NAME]

Repeats of a cell count by their median. Along workers, steps and samples of an epoch, cores and links every
inner value is forecast from the others, and the largest third of the values from those below; epochs, without
our own forecast. The noise is how far a measurement is off the mean of the other two of its cell. With
``--worst 10`` the worst rows are listed as well.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

import reading
from foretrain.predictors.ray_models.law import Law
from foretrain.predictors.ray_models.scaling import ernest_times_s
from foretrain.run import Run, read_runs
from ray_models import KINDS, by_cell, series_of

RUNS = Path(__file__).parents[1] / "data" / "ray_nodes_campaign.jsonl.zst"
ALONG = ("workers", "steps", "samples", "cores", "links")
FEWEST = 6
"""Cells that a law is learned from at least."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A cell that was forecast: relative errors with their sign, the law's and Ernest's."""

    dimension: str
    kind: str
    cores: float
    error: float
    ernest: float
    cell: str


def score(runs: Sequence[Run]) -> list[Row]:
    """Of one model."""
    epochs = next(one for one in series_of(runs, "", physics=None) if one.source.endswith("epochs"))
    series, rows = by_cell(epochs), []
    table, times_s = series.table, series.times_s
    for dimension in ALONG:
        for kind in KINDS:
            for train, test in series.parts(dimension, kind):
                if len(train) < FEWEST:
                    continue
                known, asked = table.take(train), table.take(test)
                law_s = np.exp(Law.fit(known, times_s[train]).log_times(asked))
                ernest_s = ernest_times_s(known, times_s[train], asked)
                for place, ours_s, rival_s in zip(test, law_s, ernest_s, strict=True):
                    numbers = {name: f"{column[place]:g}" for name, column in table.scales.items()}
                    size = ", ".join(f"{name} {number}" for name, number in numbers.items() if name != "work")
                    rows.append(
                        Row(
                            dimension=dimension,
                            kind=kind,
                            cores=float(table.cores[place]),
                            error=float(ours_s / times_s[place] - 1),
                            ernest=float(rival_s / times_s[place] - 1),
                            cell=f"{series.label}, {size}: {times_s[place]:.2f} s",
                        )
                    )
    return rows


def noise(runs: Sequence[Run]) -> dict[float, list[float]]:
    """By cores of a worker."""
    cells: dict[str, list[Run]] = defaultdict(list)
    for run in runs:
        cells[json.dumps(run.job.to_dict(), sort_keys=True)].append(run)
    found: dict[float, list[float]] = defaultdict(list)
    for own in cells.values():
        times = [run.measured["epoch_time_s"] for run in own]
        for i, time_s in enumerate(times):
            if len(times) > 2:
                others = statistics.fmean(times[:i] + times[i + 1 :])
                found[own[0].job.cluster.device.cores or 1].append(abs(others / time_s - 1))
    return found


def show(rows: Sequence[Row], dimension: str) -> None:
    """A line: how many, mean and median error of the law, its mean for workers of one core, and Ernest's."""
    if not rows:
        return
    errors, ernest = (np.abs([getattr(row, name) for row in rows]) for name in ("error", "ernest"))
    one = errors[np.array([row.cores == 1 for row in rows])]
    single = f"{one.mean():6.1%}" if len(one) else "     -"
    line = f"{dimension:8} {rows[0].kind:14} {len(rows):4d} {errors.mean():6.1%}"
    print(f"{line} median {np.median(errors):6.1%} {single} {ernest.mean():7.1%}")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--runs", type=reading.existing, default=RUNS)
    parser.add_argument("--model", default="", help="a part of the name of one model")
    parser.add_argument("--worst", type=int, default=0, help="how many of the worst rows are listed")
    options = parser.parse_args()
    by_model: dict[str, list[Run]] = defaultdict(list)
    for _, run in read_runs(options.runs):
        if options.model in run.job.workload.model.label:
            by_model[run.job.workload.model.key].append(run)
    rows = [row for runs in by_model.values() for row in score(runs)]
    for dimension in (*ALONG, "all"):
        for kind in KINDS:
            show([row for row in rows if row.kind == kind and dimension in (row.dimension, "all")], dimension)
    for row in sorted(rows, key=lambda row: -abs(row.error))[: options.worst]:
        print(f"{row.error:+7.1%} {row.dimension:8} {row.kind:14} {row.cell}")
    repeats = noise([run for runs in by_model.values() for run in runs])
    every = [miss for misses in repeats.values() for miss in misses]
    for worker_cores, misses in [*sorted(repeats.items()), ("all", every)]:
        middle = f"median {statistics.median(misses):.1%}"
        print(f"noise, {worker_cores} cores: {statistics.fmean(misses):.1%}, {middle}")


if __name__ == "__main__":
    reading.run(main)
