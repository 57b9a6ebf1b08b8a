"""Scores learned operator costs on architectures never seen on the H200, and on devices never seen at all.

    python benchmarks/operator_models.py --data DIR [--limit 400] [--only h200 timm ets neusight]
                                         [--intervals FILE]
DIR holds runs/ and ops/ with the public files (README.md there); data/ is the project's own. Each line is a
scored case: ``zero-shot`` has seen no run and no operator of the device, ``calibrated`` has learned from 20
runs of it and is scored on the others. The comparisons are what the shipped intervals are made of:
--intervals src/foretrain/predictors/deletepop/fitted/intervals.json writes them (the coverage printed by the
same run is still that of the old ones).
"""

from __future__ import annotations

import argparse
import copy
import json
import random
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import reading
from foretrain.costs.measured import MeasuredOperator, load_measured
from foretrain.evaluate import Comparison, evaluate, scores_of
from foretrain.measure.published import read_published
from foretrain.predictors.conformal import factors
from foretrain.predictors.deletepop import DeletePopPredictor
from foretrain.step.assembly import HOST_BOUND

OWN = Path("data")
CALIBRATION_RUNS = 20


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", type=reading.existing, required=True)
    parser.add_argument(
        "--limit", type=int, default=400, help="runs scored of each public file, drawn at random; 0 for all"
    )
    parser.add_argument("--only", nargs="*", default=["h200", "timm", "ets", "neusight"])
    parser.add_argument(
        "--intervals", type=Path, help="where to write the intervals of the cases that were scored"
    )
    options = parser.parse_args()
    own = [one for path in sorted(OWN.glob("ops_h200*.parquet")) for one in load_measured(path)]
    operators = [*own, *read_published(options.data / "ops")]
    runs = options.data / "runs"
    cases: dict[str, list[Comparison]] = {}
    print(
        f"{'runs':44s} {'quantity':16s} {'n':>5s} {'MAPE':>6s} "
        f"{'median':>6s} {'p90':>6s} {'bias':>6s} {'80 %':>5s}"
    )
    if "h200" in options.only:
        cases.update(by_bound(families_out(own)))
    if "timm" in options.only:
        other_device("timm_rtx3090", "rtx-3090", ("step_time_s",), operators, runs, options.limit, cases)
    if "ets" in options.only:
        other_device("ets_t4", "t4", ("device_busy_s",), operators, runs, options.limit, cases)
    if "neusight" in options.only:
        cases.setdefault("data sheet", []).extend(
            each_device_out(runs / "neusight_transformers.jsonl", operators)
        )
    if options.intervals:
        write_intervals(options.intervals, cases)


def families_out(own: Sequence[MeasuredOperator]) -> list[Comparison]:
    """Plain training and today's ways of it without the architecture's operators; returns the former."""
    predictor = DeletePopPredictor(operators=lambda: own)
    files = [OWN / "h200_steps.jsonl", OWN / "h200_modern.jsonl"]
    found = evaluate(files, predictors=[predictor], split="leave-model-out").runs
    quantities = ("step_time_s", "device_busy_s", "kernels", "peak_memory_bytes", "reserved_memory_bytes")
    for path in files:
        runs = [json.loads(line) for line in path.read_text().splitlines()]
        mine = [row for row in found if row.runs_file == str(path)]
        by_way: dict[str, list[Comparison]] = {path.stem: mine}
        for row in mine:
            run = runs[row.line - 1]
            if (way := run["provenance"].get("way")) is not None:
                by_way.setdefault(f"{path.stem}, {way}", []).append(row)
        for title, rows in by_way.items():
            show(f"{title}, families out", rows, quantities)
            for bound in ("device-bound", "host-bound"):
                show(
                    f"{title}, {bound}",
                    [row for row in rows if bound_of(runs[row.line - 1]) == bound],
                    ("step_time_s",),
                )
    return [row for row in found if row.runs_file == str(files[0])]


def bound_of(run: Mapping[str, Any]) -> str:
    """What bounds a measured step."""
    measured = run["measured"]
    busy = measured["device_busy_s"] >= HOST_BOUND * measured["step_time_s"]
    return "device-bound" if busy else "host-bound"


def by_bound(rows: Sequence[Comparison]) -> dict[str, list[Comparison]]:
    """Runs by what their forecasts say bounds the step."""
    said = {(row.line, row.quantity): row.predicted for row in rows}
    cases: dict[str, list[Comparison]] = {"device-bound": [], "host-bound": []}
    for row in rows:
        busy, step = said[row.line, "device_busy_s"], said[row.line, "step_time_s"]
        cases["host-bound" if busy < HOST_BOUND * step else "device-bound"].append(row)
    return cases


def write_intervals(path: Path, cases: Mapping[str, Sequence[Comparison]]) -> None:
    """Update the cases that were scored; the others stay as they are."""
    known = json.loads(path.read_text())["cases"] if path.exists() else {}
    for case, rows in cases.items():
        table = {}
        for quantity in sorted({row.quantity for row in rows}):
            found = factors(
                [
                    row.measured / row.predicted
                    for row in rows
                    if row.quantity == quantity and row.predicted > 0
                ]
            )
            if found is not None:
                table[quantity] = [round(value, 4) for value in found]
        known[case] = table
    path.write_text(json.dumps({"cases": known}, indent=1, sort_keys=True) + "\n")


def other_device(
    name: str,
    device: str,
    quantities: Sequence[str],
    operators: Sequence[MeasuredOperator],
    folder: Path,
    limit: int,
    cases: dict[str, list[Comparison]],
) -> None:
    """Zero-shot, then calibrated on runs drawn by five seeds."""
    lines = (folder / f"{name}.jsonl").read_text().splitlines()
    random.Random(0).shuffle(lines)
    lines = lines[:limit] if limit else lines
    predictor = DeletePopPredictor(operators=lambda: operators)
    if any(one.device == device for one in operators):
        predictor = predictor.without(devices=frozenset({device}))
    cases.setdefault("data sheet", []).extend(show(f"{name}, zero-shot", score(predictor, lines), quantities))
    calibrated: list[Comparison] = []
    for seed in range(5):
        chosen = set(random.Random(seed + 1).sample(range(len(lines)), CALIBRATION_RUNS))
        fitted = learn(predictor, [lines[i] for i in sorted(chosen)])
        calibrated += score(fitted, [line for i, line in enumerate(lines) if i not in chosen])
    title = f"{name}, calibrated on {CALIBRATION_RUNS}, five draws"
    cases.setdefault("calibrated", []).extend(show(title, calibrated, quantities))


def each_device_out(path: Path, operators: Sequence[MeasuredOperator]) -> list[Comparison]:
    """Each device's runs by models that have not seen the device; the two sizes of A100 count as one."""
    by_device: dict[str, list[str]] = {}
    for line in path.read_text().splitlines():
        by_device.setdefault(json.loads(line)["job"]["cluster"]["device"], []).append(line)
    found: list[Comparison] = []
    for device, lines in sorted(by_device.items()):
        alike = (
            frozenset({"a100-pcie-40gb", "a100-pcie-80gb"})
            if device.startswith("a100")
            else frozenset({device})
        )
        mine = score(DeletePopPredictor(operators=lambda: operators).without(devices=alike), lines)
        found += mine
        show(f"neusight_transformers, {device} left out", mine, ("forward_time_s", "backward_time_s"))
    return show("neusight_transformers, all", found, ("forward_time_s", "backward_time_s"))


def learn(predictor: DeletePopPredictor, lines: Sequence[str]) -> DeletePopPredictor:
    from foretrain.run import read_runs

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "runs.jsonl"
        path.write_text("\n".join(lines) + "\n")
        return copy.deepcopy(predictor).fit([run for _, run in read_runs(path)])


def score(predictor: DeletePopPredictor, lines: Sequence[str]) -> list[Comparison]:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "runs.jsonl"
        path.write_text("\n".join(lines) + "\n")
        return list(evaluate([path], predictors=[predictor]).runs)


def show(title: str, rows: Iterable[Comparison], quantities: Sequence[str]) -> list[Comparison]:
    kept: list[Any] = []
    for quantity in quantities:
        own_rows = [row for row in rows if row.quantity == quantity]
        if not own_rows:
            continue
        scores = scores_of(own_rows)
        figures = (scores.mape, scores.median_ape, scores.p90_ape, scores.bias)
        percents = " ".join(f"{100 * figure:5.1f}%" for figure in figures)
        print(
            f"{title:44s} {quantity:16s} {len(own_rows):5d} {percents} {scores.coverage:5.0%}",
            flush=True,
        )
        kept += own_rows
    return kept


if __name__ == "__main__":
    reading.run(main)
