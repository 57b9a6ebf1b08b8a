"""Checks intervals: factors from half the architecture families, coverage on the other half, both ways.

    python benchmarks/interval_coverage.py [--seeds 10]

Forecasts are leave-model-out (evaluate's folds), so neither half was seen by the predictor that forecast it.
Takes about five minutes.
"""

from __future__ import annotations

import argparse
import random
from pathlib import Path

import numpy as np

from foretrain.architectures import family
from foretrain.evaluate import Comparison, evaluate
from foretrain.job import read_runs
from foretrain.predictors.conformal import factors
from foretrain.predictors.deletepop import DeletePopPredictor
from foretrain.step.assembly import HOST_BOUND

RUNS = Path("data/h200_steps.jsonl")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, default=10)
    options = parser.parse_args()
    families = {line: family(run.job.workload.model) for line, run in read_runs(RUNS)}
    rows = evaluate([RUNS], predictors=[DeletePopPredictor()], split="leave-model-out").runs
    said = {(row.line, row.quantity): row.predicted for row in rows}
    for quantity in ("step_time_s", "device_busy_s", "peak_memory_bytes", "reserved_memory_bytes"):
        mine = [row for row in rows if row.quantity == quantity]
        bound = {
            row.line: said[row.line, "device_busy_s"] < HOST_BOUND * said[row.line, "step_time_s"]
            for row in mine
        }
        shares = [coverage(mine, families, bound, seed) for seed in range(options.seeds)]
        narrow, wide = np.mean(shares, axis=0)
        print(
            f"{quantity:24s} 80 % interval holds {narrow:.1%}, 95 % interval {wide:.1%} of {len(mine)} runs"
        )


def coverage(
    rows: list[Comparison], families: dict[int, str], bound: dict[int, bool], seed: int
) -> tuple[float, float]:
    """Shares of the runs inside the two intervals."""
    names = sorted(set(families.values()))
    random.Random(seed).shuffle(names)
    halves = (set(names[::2]), set(names[1::2]))
    inside: list[tuple[bool, bool]] = []
    for learn, score in (halves, halves[::-1]):
        for host_bound in (False, True):
            case = [row for row in rows if bound[row.line] == host_bound]
            found = factors([row.measured / row.predicted for row in case if families[row.line] in learn])
            if found is not None:
                ratios = [row.measured / row.predicted for row in case if families[row.line] in score]
                inside += [
                    (found.low <= ratio <= found.high, found.low_95 <= ratio <= found.high_95)
                    for ratio in ratios
                ]
    narrow, wide = np.mean(inside, axis=0)
    return float(narrow), float(wide)


if __name__ == "__main__":
    main()
