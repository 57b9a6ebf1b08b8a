"""Checks intervals of step times on every runs file, each with widths learned from all other files.

    python benchmarks/interval_coverage.py --data DIR [--only NAME ...] [--limit 180] [--rows FILE]
                                           [--write FILE]

DIR holds runs/ and ops/ with the public files (README.md there); data/ is the project's own. Runs are
forecast by the shipped predictor; those of ``h200_steps`` with their architecture families left out, and once
more the runs of NeuSight with all operators of their vendor or generation left out, which tells how forecasts
carry over to devices of which nothing was measured. --rows keeps the forecasts: a second call only learns.

A step's bounds are those of its parts, each by its share of the time (``deletepop/spread.py``). The parts'
own are found by quantile regression on the logarithm of measured over forecast, every file counting alike,
drawn to ``_EXPECTED`` where there is little to learn from.
--write src/foretrain/predictors/deletepop/fitted/intervals.json puts what all files together give there.
"""

from __future__ import annotations

import argparse
import copy
import json
import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

import reading
from foretrain.costs.measured import load_measured
from foretrain.errors import ForetrainError
from foretrain.evaluate import split_runs
from foretrain.job import Run, read_runs
from foretrain.measure.published import read_published
from foretrain.predictors.deletepop import DeletePopPredictor
from foretrain.predictors.deletepop.spread import (
    BY_ROOFLINE,
    CHANNELS_LAST,
    COMPUTING,
    ESTIMATED,
    HOST,
    HOST_MEASURED,
    LOOKED_UP,
    PARTS,
    Tier,
    shares,
)

OWN = ("cpu16_ddp.jsonl", "cpu16_campaign.jsonl.zst", "links_campaign.jsonl.zst", "ray_campaign.jsonl.zst",
       "h200_random_steps.jsonl", "h200_steps.jsonl")  # fmt: skip
PUBLIC = ("timm_rtx3090", "ets_t4", "pollux_t4", "neusight_transformers", "vtrain_a100_single_node",
          "megatron_ci_a100", "llm_foundry_mpt_a100", "nanotron_h100", "nvidia_llm",
          "nvidia_deeplearningexamples", "dgxc_h100", "automodel_h100", "sailor_gh200",
          "h200_modern")  # fmt: skip
LEFT_OUT: dict[str, tuple[Tier, frozenset[str]]] = {
    "neusight, AMD left out": ("never", frozenset({"mi100", "mi210", "mi250"})),
    "neusight, Volta left out": ("vendor", frozenset({"v100-pcie-32gb"})),
    "neusight, Ampere left out": ("vendor", frozenset({"a100-pcie-40gb", "a100-pcie-80gb"})),
}
SIDES = ((0.975, -1), (0.9, -1), (0.9, 1), (0.975, 1))
"""Quantile and sign of each bound."""
_EXPECTED = 0.4
"""The half width, as a logarithm, of a part of which nothing is known: a third less to half as much again."""
_EXPECTED_OF = {
    LOOKED_UP: 0.1,
    COMPUTING["measured"]: 0.2,
    COMPUTING["scored"]: 0.2,
    COMPUTING["vendor"]: 0.3,
    COMPUTING["never"]: 0.4,
    BY_ROOFLINE: 0.9,
    HOST: (0.28, 0.55),
    HOST_MEASURED: 0.25,
    CHANNELS_LAST: 0.1,
    ESTIMATED: 0.15,
}
"""Computing is known better the nearer it was measured. Hosts of one kind differ, and the one learned
from was the fastest: steps bound by them take up to 1.8 times as long (``data/h200_repeat_steps.jsonl``)."""
_LEAST = {COMPUTING["vendor"]: 0.3, COMPUTING["never"]: 0.4}
"""What stands for devices that were not measured are fp32 forward passes of transformers, the easiest."""
_PULL = 0.008
"""What a unit of distance to the expected width costs, where a file's mean error counts 1 / files."""
_WIDER = 1.6
"""The 95 % bounds of a part are at least so much wider than its 80 % bounds, as of a normal deviation."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A run: the logarithm of measured over forecast, and of what its step is made of."""

    file: str
    line: int
    error: float
    low: float
    high: float
    parts: dict[str, float]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", type=reading.existing, required=True)
    parser.add_argument("--only", nargs="*", help="files by name; all by default")
    parser.add_argument("--limit", type=int, default=180, help="runs of each file, drawn at random")
    parser.add_argument("--rows", type=Path, help="where forecasts are kept (JSON lines)")
    parser.add_argument("--write", type=Path, help="the intervals.json to put the widths into")
    options = parser.parse_args()
    kept = options.rows.read_text().splitlines() if options.rows and options.rows.exists() else []
    rows = [Row(**json.loads(line)) for line in kept]
    for name, found in forecasts(options.data, options.limit, {row.file for row in rows}, options.only):
        rows += found
        print(f"{name}: {len(found)} forecasts", flush=True)
        if options.rows:
            with options.rows.open("a") as file:
                file.writelines(json.dumps(asdict(row)) + "\n" for row in found)
    show(rows)
    if options.write:
        document = json.loads(options.write.read_text())
        document["parts"] = {
            part: [round(float(width), 3) for width in widths]
            for part, widths in zip(PARTS, learn(rows).T, strict=True)
        }
        options.write.write_text(json.dumps(document, indent=1, sort_keys=True) + "\n")


# Forecasts


def forecasts(
    data: Path, limit: int, known: set[str], only: Sequence[str] | None
) -> Iterator[tuple[str, list[Row]]]:
    """The rows of each file that is not known yet."""
    paths = [*(Path("data", name) for name in OWN), *(data / "runs" / f"{name}.jsonl" for name in PUBLIC)]
    for path in paths:
        name = path.name.partition(".")[0]
        if name in known or (only and name not in only):
            continue
        runs = [(line, run) for line, run in read_runs(path) if run.measured.get("step_time_s", 0) > 0]
        random.Random(1).shuffle(runs)
        runs = runs[:limit]
        predictors = [DeletePopPredictor()] * len(runs)
        if name == "h200_steps":
            for fold in split_runs([run for _, run in runs], "leave-model-out"):
                learned = DeletePopPredictor().without(families=fold.families)
                for i in fold.test:
                    predictors[i] = learned
        found = (row(name, line, run, one) for (line, run), one in zip(runs, predictors, strict=True))
        yield name, [one for one in found if one is not None]
    wanted = [name for name in LEFT_OUT if name not in known and (not only or name in only)]
    if wanted:
        own = sorted(Path("data").glob("ops_h200*.parquet"))
        operators = [*(one for path in own for one in load_measured(path)), *read_published(data / "ops")]
        everything = DeletePopPredictor(operators=lambda: operators)
        for name in wanted:
            tier, devices = LEFT_OUT[name]
            learned = copy.deepcopy(everything).without(devices=devices)
            rows = (
                row(name, line, run, learned, tier)
                for line, run in read_runs(data / "runs" / "neusight_transformers.jsonl")
                if run.job.cluster.device.name in devices and run.measured.get("step_time_s", 0) > 0
            )
            yield name, [one for one in rows if one is not None]


def row(
    file: str, line: int, run: Run, predictor: DeletePopPredictor, tier: Tier | None = None
) -> Row | None:
    try:
        step = predictor.step(run.job)
    except ForetrainError:
        return None
    known = predictor.spread_of(step).around("step_time_s", step.time_s)
    return Row(
        file=file,
        line=line,
        error=math.log(run.measured["step_time_s"] / step.time_s),
        low=math.log(known.low / step.time_s),
        high=math.log(known.high / step.time_s),
        parts=shares(step, predictor.costs, tier or predictor.tier(run.job)),
    )


# Widths

Matrix = npt.NDArray[np.float64]


def learn(rows: Sequence[Row]) -> Matrix:
    """The bounds of the parts, as logarithms: a row for each of ``SIDES``."""
    columns = np.array([[one.parts[part] for part in PARTS] for one in rows])
    errors = np.array([one.error for one in rows])
    files = [one.file for one in rows]
    weights = np.array([1.0 / files.count(file) for file in files]) / len(set(files))
    low_95, low, high, high_95 = (
        regress(columns, sign * errors, weights, quantile, sign) for quantile, sign in SIDES
    )
    return np.array([-np.maximum(low_95, _WIDER * low), -low, high, np.maximum(high_95, _WIDER * high)])


def expected_of(part: str, sign: int) -> float:
    expected = _EXPECTED_OF.get(part, _EXPECTED)
    return expected if isinstance(expected, float) else expected[sign > 0]


def regress(columns: Matrix, errors: Matrix, weights: Matrix, quantile: float, sign: int) -> Matrix:
    """Widths whose sums by share leave so much of the errors below: a linear programme."""
    from scipy import sparse
    from scipy.optimize import linprog

    expected = np.array([expected_of(part, sign) for part in PARTS])
    expected *= 1.0 if quantile < 0.95 else _WIDER
    least = np.array([_LEAST.get(part, 0.02) for part in PARTS])
    count, parts = columns.shape
    start = np.maximum(expected, least)
    costs = np.concatenate([np.full(2 * parts, _PULL), weights * quantile, weights * (1 - quantile)])
    slack = sparse.identity(count)
    matrix = sparse.hstack([columns, -columns, slack, -slack], format="csc")
    limits = [(0, None)] * parts + [(0, room) for room in start - least] + [(0, None)] * (2 * count)
    found = linprog(costs, A_eq=matrix, b_eq=errors - columns @ start, bounds=limits, method="highs").x
    return np.asarray(start + found[:parts] - found[parts : 2 * parts])


def show(rows: Sequence[Row]) -> None:
    everything = learn(rows)
    print(f"{'part':55s} {'low 95':>7s} {'low':>7s} {'high':>7s} {'high 95':>7s}")
    for part, widths in zip(PARTS, everything.T, strict=True):
        print(f"{part:55s} {' '.join(f'{width:+7.2f}' for width in widths)}")
    heads = ("n", "shipped", "all files", "left out", "below", "above")
    print(f"{'runs':30s} " + " ".join(f"{head:>9s}" for head in heads))
    for file in dict.fromkeys(one.file for one in rows):
        own = [one for one in rows if one.file == file]
        others = learn([one for one in rows if one.file != file])
        shipped = np.mean([one.low <= one.error <= one.high for one in own])
        inside, (within, below, above) = coverage(own, everything)[0], coverage(own, others)
        print(
            f"{file:30s} {len(own):9d} {shipped:9.0%} {inside:9.0%} {within:9.0%} {below:9.0%} {above:9.0%}",
            flush=True,
        )


def coverage(rows: Sequence[Row], widths: Matrix) -> tuple[float, float, float]:
    """Shares of the runs inside the 80 % interval, below and above it."""
    columns = np.array([[one.parts[part] for part in PARTS] for one in rows])
    errors = np.array([one.error for one in rows])
    below, above = errors < columns @ widths[1], errors > columns @ widths[2]
    return float(np.mean(~below & ~above)), float(np.mean(below)), float(np.mean(above))


if __name__ == "__main__":
    reading.run(main)
