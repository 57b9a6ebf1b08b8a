"""Compares sums of measured operator times with the measured busy time of runs.

    python benchmarks/operator_sums.py [--runs data/h200_steps.jsonl] [--ops data/ops_h200.parquet]

Only runs whose every launching operator was measured count; the others are reported with what is missing.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import numpy as np

import reading
from foretrain.capture import capture_job
from foretrain.costs.measured import load_columns, matmul_precision, operator_key
from foretrain.evaluate import Scores
from foretrain.run import read_runs


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--runs", type=reading.existing, default=Path("data/h200_steps.jsonl"))
    parser.add_argument("--ops", type=reading.existing, default=Path("data/ops_h200.parquet"))
    options = parser.parse_args()
    columns = load_columns(options.ops)
    measured = dict(
        zip(
            columns["key"],
            zip(columns["cold_s"], columns["warm_s"], columns["kernels"], strict=True),
            strict=True,
        )
    )
    rows: list[tuple[Any, ...]] = []
    incomplete = 0
    for line, run in read_runs(options.runs):
        precision = run.job.workload.training.precision
        ops = [op.operator for op in capture_job(run.job).ops if op.operator.launches]
        keys = [operator_key(op.name, op.inputs, op.args, matmul_precision(op, precision)) for op in ops]
        if all(key in measured for key in keys):
            cold, warm, kernels = (
                sum(column) for column in zip(*(measured[key] for key in keys), strict=True)
            )
            busy = run.measured["device_busy_s"]
            rows.append(
                (
                    run.job.workload.model.label,
                    precision,
                    line,
                    cold / busy,
                    warm / busy,
                    kernels / run.measured["kernels"],
                )
            )
        else:
            incomplete += 1
    print(f"{len(rows)} runs have all their operators measured, {incomplete} do not")
    errors = np.array([row[3:] for row in rows]) - 1
    for name, column in (("cold caches", errors[:, 0]), ("warm caches", errors[:, 1])):
        scores = Scores.of_errors(column)
        print(
            f"sum of operator times against device_busy_s, {name}: "
            f"median error {scores.median_ape:.1%}, ratio {1 + scores.bias:.3f}"
        )
    between = Scores.of_errors(errors[:, :2].mean(axis=1))
    print(
        f"mean of the two: median error {between.median_ape:.1%}; "
        f"kernels: median ratio {1 + Scores.of_errors(errors[:, 2]).bias:.3f}"
    )
    print("furthest off:")
    for label, precision, line, cold, warm, kernels in sorted(rows, key=lambda row: -abs(row[4] - 1))[:10]:
        print(
            f"  {label:28s} {precision:9s} line {line:4d}  cold "
            f"{cold:.2f}  warm {warm:.2f}  kernels {kernels:.2f}"
        )


if __name__ == "__main__":
    reading.run(main)
