"""Writes public tables of measurements as runs, where a job can say what was measured:

    python benchmarks/tables.py --data DIR --out FOLDER
    foretrain evaluate FOLDER/lambda_bench.jsonl

One file of runs for each table of ``DIR/tables``, and a copy of the models behind them. How many rows were
left out, and why, is printed and written to ``FOLDER/left_out.json``.
"""

from __future__ import annotations

import argparse
import csv
import gzip
import io
import json
import shutil
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import reading
import table_detectors
import table_models
import table_rows
from foretrain.errors import InputError
from table_rows import LeftOut, Row, Run

TABLES: dict[str, tuple[str, Callable[[Row], Run]]] = {
    "lambda_bench": ("lambda_bench.csv", table_rows.lambda_bench),
    "bigscience_v100": ("bigscience_v100.csv", table_rows.bigscience_v100),
    "neusight_4gpu": ("neusight_4gpu.csv", table_rows.neusight_4gpu),
    "modded_nanogpt": ("modded_nanogpt.csv.gz", table_rows.modded_nanogpt),
    "mmdetection_zoo": ("mmdetection_zoo.csv", table_detectors.mmdetection_zoo),
    "mlperf_training": ("mlperf_training.csv.gz", table_detectors.mlperf_training),
}


def rows_of(path: Path) -> Iterator[Row]:
    """Rows of a table as texts by column."""
    data = path.read_bytes()
    text = (gzip.decompress(data) if path.suffix == ".gz" else data).decode()
    yield from csv.DictReader(io.StringIO(text, newline=""))


def runs_of(path: Path, convert: Callable[[Row], Run]) -> tuple[list[Run], Counter[str]]:
    """Runs of a table, and how many of its rows are none, by reason."""
    runs: list[Run] = []
    left_out: Counter[str] = Counter()
    for number, row in enumerate(rows_of(path), 2):
        try:
            runs.append(convert(row))
        except LeftOut as reason:
            left_out[str(reason)] += 1
        except KeyError as column:
            raise InputError(f"{path}: line {number}: no column {column}") from None
    return runs, left_out


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", type=reading.existing, required=True, help="folder with tables/")
    parser.add_argument("--out", type=Path, required=True, help="folder to write")
    parser.add_argument("--only", choices=sorted(TABLES), action="append", help="one table; may be repeated")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    shutil.copy(table_models.__file__, options.out / table_rows.MODELS)
    reasons: dict[str, Counter[str]] = {}
    for name in options.only or TABLES:
        file, convert = TABLES[name]
        runs, reasons[name] = runs_of(options.data / "tables" / file, convert)
        text = "".join(json.dumps(one) + "\n" for one in runs)
        (options.out / f"{name}.jsonl").write_text(text)
        print(f"{name}: {len(runs)} runs, {reasons[name].total()} rows left out")
        for reason, count in reasons[name].most_common():
            print(f"  {count:5d}  {reason}")
    (options.out / "left_out.json").write_text(json.dumps(reasons, indent=1) + "\n")


if __name__ == "__main__":
    reading.run(main)
