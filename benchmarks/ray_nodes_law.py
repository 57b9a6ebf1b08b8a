"""Scores the law of the Ray models alone on the campaign of four Ray nodes, beside the noise of its repeats.

    python benchmarks/ray_nodes_law.py [--runs data/ray_nodes_campaign.jsonl.zst] [--model NAME]

Repeats of a cell count by their median. Along workers, steps of an epoch, cores and links every inner value
is forecast from the others, and the largest third of the values from those below; epochs, without our own
forecast. The noise is how far a measurement is off the mean of the other two of its cell.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

import numpy as np

import reading
from foretrain.job import Run, read_runs
from foretrain.predictors.ray_models import RayModelsPredictor
from foretrain.predictors.ray_models.law import Law
from foretrain.predictors.ray_models.scaling import ernest_times_s
from foretrain.splits import extrapolation, interpolation

RUNS = Path(__file__).parents[1] / "data" / "ray_nodes_campaign.jsonl.zst"
KINDS = {"interpolation": interpolation, "extrapolation": extrapolation}
FEWEST = 6
"""Cells that a law is learned from at least."""

Scores = dict[tuple[str, str], list[tuple[float, float, float]]]
"""By dimension and kind: the law's errors, Ernest's, and the cores of a worker."""


def score(runs: Sequence[Run], scores: Scores) -> None:
    """Of one model."""
    table, times_s = RayModelsPredictor(physics=None).tables(runs)[1]["epoch"]
    columns = np.column_stack([*table.scales.values(), table.levels])
    _, first, cell = np.unique(columns, axis=0, return_index=True, return_inverse=True)
    medians_s = np.array([np.median(times_s[cell == number]) for number in range(len(first))])
    cells = table.take(first)
    for dimension in ("workers", "steps", "cores", "links"):
        for kind, split in KINDS.items():
            for train, test in split(cells.number(dimension)):
                if len(train) < FEWEST:
                    continue
                known, asked = cells.take(train), cells.take(test)
                law_s = np.exp(Law.fit(known, medians_s[train]).log_times(asked))
                ernest_s = ernest_times_s(known, medians_s[train], asked)
                ours, ernest = (np.abs(one / medians_s[test] - 1) for one in (law_s, ernest_s))
                scores[dimension, kind] += zip(ours, ernest, asked.cores, strict=True)


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


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--runs", type=reading.existing, default=RUNS)
    parser.add_argument("--model", default="", help="a part of the name of one model")
    options = parser.parse_args()
    by_model: dict[str, list[Run]] = defaultdict(list)
    for _, run in read_runs(options.runs):
        if options.model in run.job.workload.model.label:
            by_model[run.job.workload.model.key].append(run)
    scores: Scores = defaultdict(list)
    for runs in by_model.values():
        score(runs, scores)
    for (dimension, kind), rows in sorted(scores.items()):
        ours, ernest, cores = (np.array(column) for column in zip(*rows, strict=True))
        one = f"{ours[cores == 1].mean():6.1%}" if (cores == 1).any() else "     -"
        middle = f"median {np.median(ours):6.1%}"
        print(
            f"{dimension:8} {kind:14} {len(rows):4d} {ours.mean():6.1%} {middle} {one} {ernest.mean():6.1%}"
        )
    repeats = noise([run for runs in by_model.values() for run in runs])
    every = [miss for misses in repeats.values() for miss in misses]
    for worker_cores, misses in [*sorted(repeats.items()), ("all", every)]:
        middle = f"median {statistics.median(misses):.1%}"
        print(f"noise, {worker_cores} cores: {statistics.fmean(misses):.1%}, {middle}")


if __name__ == "__main__":
    reading.run(main)
