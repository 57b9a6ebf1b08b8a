"""Checks intervals of step times and of memory on every runs file, each with widths learned from all others.

    python benchmarks/interval_coverage.py --data DIR [--only NAME ...] [--limit 100] [--rows FILE]
                                           [--write FILE]

DIR holds runs/ and ops/ with the public files (README.md there); data/ is the project's own. Runs are
forecast by the shipped predictor; those of ``h200_steps`` with their architecture families left out, and once
more the runs of NeuSight with all operators of their vendor or generation left out, which tells how forecasts
carry over to devices of which nothing was measured. --rows keeps the forecasts: a second call only learns;
``--again NAME ...`` forecasts those files anew. With graphs in the cache the runs on many devices take two
minutes (``--only many``), everything a quarter of an hour.

A step's bounds are those of its parts, each by its share of the time (``deletepop/spread.py``), and those of
memory of its parts by their bytes. The parts' own are found by quantile regression on the logarithm of
measured over forecast, every file counting alike, drawn to ``_EXPECTED`` where there is little to learn from.
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
from foretrain.evaluate import Scores, split_runs
from foretrain.measure.published import read_published
from foretrain.predictors.deletepop import DeletePopPredictor
from foretrain.predictors.deletepop.spread import (
    ACTIVATIONS,
    ATTENTION,
    BUFFERS,
    BY_ROOFLINE,
    CACHED,
    CHANNELS_LAST,
    COMPUTING,
    CONVOLUTIONS,
    EFA,
    ESTIMATED,
    EXPERTS,
    HOST,
    HOST_MEASURED,
    HOST_OF_RANKS,
    INSIDE,
    LOOKED_UP,
    MEMORY_PARTS,
    OTHERS,
    PARTS,
    PIPELINE,
    RDMA,
    SOCKETS,
    STATES,
    Tier,
    memory_shares,
    shares,
)
from foretrain.run import Run, read_runs
from foretrain.step.assembly import logged

OWN = ("cpu16_ddp.jsonl", "cpu16_campaign.jsonl.zst", "links_campaign.jsonl.zst", "ray_campaign.jsonl.zst",
       "h200_random_steps.jsonl", "h200_steps.jsonl", "h200_ranks.jsonl", "h200_fsdp.jsonl")  # fmt: skip
MANY = ("pollux_t4", "vtrain_a100_single_node", "megatron_ci_a100", "llm_foundry_mpt_a100", "nanotron_h100",
        "nvidia_llm", "nvidia_deeplearningexamples", "dgxc_h100", "automodel_h100", "sailor_gh200",
        "h200_ranks", "h200_fsdp")  # fmt: skip
PUBLIC = ("timm_rtx3090", "ets_t4", "neusight_transformers", "h200_modern",
          *(name for name in MANY if not name.startswith("h200")))  # fmt: skip
LEFT_OUT: dict[str, tuple[Tier, frozenset[str]]] = {
    "neusight, AMD left out": ("never", frozenset({"mi100", "mi210", "mi250"})),
    "neusight, Volta left out": ("vendor", frozenset({"v100-pcie-32gb"})),
    "neusight, Ampere left out": ("vendor", frozenset({"a100-pcie-40gb", "a100-pcie-80gb"})),
}
SIDES = ((0.975, -1), (0.9, -1), (0.9, 1), (0.975, 1))
"""Quantile and sign of each bound."""
_EXPECTED = 0.4
"""The half width, as a logarithm, of a part of which nothing is known: a third less to half as much again."""
_EXPECTED_OF: dict[str, float | tuple[float, float]] = {
    LOOKED_UP: (0.03, 0.06),
    COMPUTING["measured"]: (0.04, 0.08),
    COMPUTING["scored"]: (0.06, 0.1),
    COMPUTING["vendor"]: 0.3,
    COMPUTING["never"]: 0.4,
    BY_ROOFLINE: 0.9,
    HOST: (0.15, 0.55),
    HOST_MEASURED: (0.2, 0.25),
    HOST_OF_RANKS: (0.15, 0.25),
    INSIDE: (0.2, 0.25),
    RDMA: (0.2, 0.25),
    EFA: (0.2, 0.25),
    SOCKETS: 0.3,
    PIPELINE: (0.15, 0.2),
    CHANNELS_LAST: (0.05, 0.1),
    ESTIMATED: (0.02, 0.03),
    ATTENTION: 0.1,
    CONVOLUTIONS: (0.1, 0.2),
    OTHERS: (0.15, 0.2),
    EXPERTS: (0.05, 0.15),
    STATES: 0.02,
    ACTIVATIONS: (0.08, 0.15),
    BUFFERS: (0.2, 0.4),
    CACHED: 0.6,
}
"""Computing is known better the nearer it was measured, products better than other kernels. More goes wrong
in a step than is forecast, so that bounds above are the wider ones: hosts of one kind differ, and the one
learned from was the fastest (``data/h200_repeat_steps.jsonl``). What a rank keeps follows from the plan,
what its allocator holds beside it hardly."""
_LEAST = {COMPUTING["vendor"]: 0.3, COMPUTING["never"]: 0.4, HOST: 0.12, HOST_OF_RANKS: 0.12}
"""Hosts of one kind differ by so much (``data/h200_repeat_steps.jsonl``). What stands for devices that were
not measured are fp32 forward passes of transformers, the easiest."""
_NEARER = (LOOKED_UP, *COMPUTING.values())
"""Of these none is narrower than the one before it."""
_PULL = 0.12
"""What a unit of distance to the expected width costs, where the mean error of a file counts 1."""
_WIDER = 1.6
"""The 95 % bounds of a part are at least so much wider than its 80 % bounds, as of a normal deviation."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A run: the logarithm of measured over forecast, and of what its step or its memory is made of."""

    file: str
    line: int
    quantity: str
    error: float
    low: float
    high: float
    parts: dict[str, float]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", type=reading.existing, required=True)
    parser.add_argument("--only", nargs="*", help="files by name, many for those on many devices; all else")
    parser.add_argument("--limit", type=int, default=100, help="runs of each file, drawn at random")
    parser.add_argument("--rows", type=Path, help="where forecasts are kept (JSON lines)")
    parser.add_argument("--again", nargs="*", default=[], help="files whose forecasts are not to be kept")
    parser.add_argument("--write", type=Path, help="the intervals.json to put the widths into")
    options = parser.parse_args()
    only, again = (
        [*(MANY if "many" in names else ()), *names] for names in (options.only or [], options.again)
    )
    kept = options.rows.read_text().splitlines() if options.rows and options.rows.exists() else []
    rows = [one for one in (Row(**json.loads(line)) for line in kept) if one.file not in again]
    for name, found in forecasts(options.data, options.limit, {row.file for row in rows}, only):
        rows += found
        print(f"{name}: {len(found)} forecasts", flush=True)
        if options.rows:
            options.rows.write_text("".join(json.dumps(asdict(row)) + "\n" for row in rows))
    times = [one for one in rows if one.quantity == "step_time_s"]
    memory = [one for one in rows if one.quantity != "step_time_s"]
    for part_rows, parts in ((times, PARTS), (memory, MEMORY_PARTS)):
        if part_rows:
            show(part_rows, parts)
    if options.write:
        document = json.loads(options.write.read_text())
        document["parts"] = written(times, PARTS)
        document["memory"] = written(memory, MEMORY_PARTS)
        options.write.write_text(json.dumps(document, indent=1, sort_keys=True) + "\n")


def written(rows: Sequence[Row], parts: Sequence[str]) -> dict[str, list[float]]:
    found = learn(rows, parts).T
    return {
        part: [round(float(width), 3) for width in widths] for part, widths in zip(parts, found, strict=True)
    }


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
        runs = [(line, run) for line, run in read_runs(path) if any(map(run.measured.get, QUANTITIES))]
        random.Random(1).shuffle(runs)
        runs = runs[:limit]
        predictors = [DeletePopPredictor()] * len(runs)
        if name == "h200_steps":
            for fold in split_runs([run for _, run in runs], "leave-model-out"):
                learned = DeletePopPredictor().without(families=fold.families)
                for i in fold.test:
                    predictors[i] = learned
        pairs = zip(runs, predictors, strict=True)
        yield name, [one for (line, run), by in pairs for one in rows_of(name, line, run, by)]
    wanted = [name for name in LEFT_OUT if name not in known and (not only or name in only)]
    if wanted:
        measured = sorted(Path("data").glob("ops_h200*.parquet"))
        operators = [
            *(one for path in measured for one in load_measured(path)),
            *read_published(data / "ops"),
        ]
        everything = DeletePopPredictor(operators=lambda: operators)
        for name in wanted:
            tier, devices = LEFT_OUT[name]
            learned = copy.deepcopy(everything).without(devices=devices)
            every = read_runs(data / "runs" / "neusight_transformers.jsonl")
            chosen = [(line, run) for line, run in every if run.job.cluster.device.name in devices]
            yield name, [one for line, run in chosen for one in rows_of(name, line, run, learned, tier)]


QUANTITIES = ("step_time_s", "peak_memory_bytes", "reserved_memory_bytes")


def rows_of(
    file: str, line: int, run: Run, predictor: DeletePopPredictor, tier: Tier | None = None
) -> Iterator[Row]:
    """Of the step, and of memory where several devices are used: one device's is replayed."""
    try:
        step = predictor.step(run.job)
    except ForetrainError:
        return
    spread, rank = predictor.spread_of(step), logged(step)
    medians = {"step_time_s": step.time_s}
    if not run.job.runs_alone:
        medians |= {"peak_memory_bytes": rank.allocated_bytes, "reserved_memory_bytes": rank.reserved_bytes}
    for quantity, median in medians.items():
        measured = run.measured.get(quantity, 0)
        if measured > 0:
            known = spread.around(quantity, median)
            yield Row(
                file=file,
                line=line,
                quantity=quantity,
                error=math.log(measured / median),
                low=math.log(known.low / median),
                high=math.log(known.high / median),
                parts=shares(step, predictor.costs, tier or predictor.tier(run.job))
                if quantity == "step_time_s"
                else memory_shares(rank, reserved=quantity == "reserved_memory_bytes"),
            )


# Widths

Matrix = npt.NDArray[np.float64]


def learn(rows: Sequence[Row], parts: Sequence[str]) -> Matrix:
    """The bounds of the parts, as logarithms: a row for each of ``SIDES``."""
    columns = np.array([[one.parts[part] for part in parts] for one in rows])
    errors = np.array([one.error for one in rows])
    files = [one.file for one in rows]
    weights = np.array([1.0 / files.count(file) for file in files]) / len(set(files))
    low_95, low, high, high_95 = (
        regress(parts, columns, sign * errors, weights, len(set(files)), quantile, sign)
        for quantile, sign in SIDES
    )
    return np.array([-np.maximum(low_95, _WIDER * low), -low, high, np.maximum(high_95, _WIDER * high)])


def expected_of(part: str, sign: int) -> float:
    expected = _EXPECTED_OF.get(part, _EXPECTED)
    return expected if isinstance(expected, float) else expected[sign > 0]


def regress(
    names: Sequence[str],
    columns: Matrix,
    errors: Matrix,
    weights: Matrix,
    files: int,
    quantile: float,
    sign: int,
) -> Matrix:
    """Widths whose sums by share leave so much of the errors below: a linear programme."""
    from scipy import sparse
    from scipy.optimize import linprog

    expected = np.array([expected_of(part, sign) for part in names])
    expected *= 1.0 if quantile < 0.95 else _WIDER
    least = np.array([_LEAST.get(part, 0.02) for part in names])
    count, parts = columns.shape
    start = np.maximum(expected, least)
    pull = _PULL / files
    costs = np.concatenate([np.full(2 * parts, pull), weights * quantile, weights * (1 - quantile)])
    slack = sparse.identity(count)
    matrix = sparse.hstack([columns, -columns, slack, -slack], format="csc")
    limits = [(0, None)] * parts + [(0, room) for room in start - least] + [(0, None)] * (2 * count)
    found = linprog(costs, A_eq=matrix, b_eq=errors - columns @ start, bounds=limits, method="highs").x
    widths = np.asarray(start + found[:parts] - found[parts : 2 * parts])
    ordered = [names.index(part) for part in _NEARER if part in names]
    widths[ordered] = np.maximum.accumulate(widths[ordered])
    return widths


def show(rows: Sequence[Row], parts: Sequence[str]) -> None:
    everything = learn(rows, parts)
    print(f"{'part':55s} {'low 95':>7s} {'low':>7s} {'high':>7s} {'high 95':>7s}")
    for part, widths in zip(parts, everything.T, strict=True):
        print(f"{part:55s} {' '.join(f'{width:+7.2f}' for width in widths)}")
    heads = ("n", "shipped", "all files", "left out", "below", "above")
    print(f"{'runs':30s} " + " ".join(f"{head:>9s}" for head in heads))
    for file in dict.fromkeys(one.file for one in rows):
        own = [one for one in rows if one.file == file]
        others = learn([one for one in rows if one.file != file], parts)
        shipped = inside_of(*np.array([(one.error, one.low, one.high) for one in own]).T)
        inside, (within, below, above) = coverage(own, parts, everything)[0], coverage(own, parts, others)
        print(
            f"{file:30s} {len(own):9d} {shipped:9.0%} {inside:9.0%} {within:9.0%} {below:9.0%} {above:9.0%}",
            flush=True,
        )


def coverage(rows: Sequence[Row], parts: Sequence[str], widths: Matrix) -> tuple[float, float, float]:
    """Shares of the runs inside the 80 % interval, below and above it."""
    columns = np.array([[one.parts[part] for part in parts] for one in rows])
    errors = np.array([one.error for one in rows])
    low, high = columns @ widths[1], columns @ widths[2]
    return inside_of(errors, low, high), float(np.mean(errors < low)), float(np.mean(errors > high))


def inside_of(errors: Matrix, low: Matrix, high: Matrix) -> float:
    """The share of logarithms of measured over forecast that their bounds hold."""
    scores = Scores.of(np.exp(errors), np.ones(len(errors)), np.exp(low), np.exp(high))
    assert scores.coverage is not None
    return scores.coverage


if __name__ == "__main__":
    reading.run(main)
