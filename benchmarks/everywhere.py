"""Scores every predictor on every file of runs in data/, at home and away, as one table for docs/scores.md.

    python benchmarks/everywhere.py [--processes 2] [--predictor NAME ...] [--runs FILE ...] > scores.md

Predictors that come with what they learned are scored as shipped, so that a user's runs are like those of any
file but those they learned from; on these (their home) architecture families are left out in turn. The others
learn from the rest of each file: from all other runs, or from the smaller scales for the larger ones.
Takes about half an hour.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path

import reading
from evidence import LEARNED, label
from foretrain import predictors
from foretrain.errors import ForetrainError
from foretrain.evaluate import Result, evaluate

DATA = Path("data")
LEARNERS = {"ernest": "random", "cherrypick": "random", "ray_models": "random", "flops": "leave-model-out"}
"""Predictors that come with nothing learned, and the split they are scored with, in each file by itself."""
FARTHER = {"ernest", "ray_models"}
"""Those whose business it is to extrapolate: scored beyond the largest scale they saw as well."""
QUANTITIES = ("step_time_s", "device_busy_s", "peak_memory_bytes")
RESOURCES = ("device_utilization", "memory_utilization", "network_tx_bytes_per_s")
"""What Driple is scored on."""
_SPLITS = {
    None: "as shipped",
    "leave-model-out": "families left out",
    "random": "a fifth left out",
    "extrapolate:workers": "more workers",
    "extrapolate:samples": "more data",
}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--predictor", action="append")
    parser.add_argument("--runs", type=reading.existing, nargs="*")
    options = parser.parse_args()
    files = options.runs or sorted(
        path for path in DATA.iterdir() if path.name.endswith((".jsonl", ".jsonl.zst"))
    )
    print("| predictor | runs | how | quantity | forecast | refused | MAPE | median | in the 80 % interval |")
    print("|---|---|---|---|---|---|---|---|---|")
    for name in options.predictor or predictors.names():
        for paths, split in tasks(name, files):
            for line in rows(name, paths, split, options.processes):
                print(line, flush=True)


def tasks(name: str, files: list[Path]) -> Iterator[tuple[list[Path], str | None]]:
    """Files that are scored together, and how they are split."""
    home = [path for path in files if label(path) in LEARNED.get(name, ())]
    if home:
        yield home, "leave-model-out"
    for path in files:
        if path not in home:
            yield [path], LEARNERS.get(name)
        if name in FARTHER:
            yield [path], "extrapolate:workers"
            yield [path], "extrapolate:samples"


def rows(name: str, paths: list[Path], split: str | None, processes: int) -> Iterator[str]:
    try:
        document = evaluate(paths, predictors=[name], split=split, processes=processes)
    except ForetrainError as error:
        print(f"{name}, {', '.join(map(label, paths))}, {split}: {error}", file=sys.stderr)
        return
    for path in paths:
        for quantity in RESOURCES if name == "driple" else QUANTITIES:
            for one in (*document.results, *document.by_bound):
                if (Path(one.runs_file), one.quantity) == (path, quantity) and one.n:
                    yield row(one, name, path)


def row(one: Result, name: str, path: Path) -> str:
    shares = [one.mape, one.median_ape, one.coverage]
    figures = ["" if share is None else f"{share:.1%}" for share in shares]
    what = f"`{one.quantity}`" if one.bound is None else f"`{one.quantity}`, {one.bound}-bound"
    cells = [name, label(path), _SPLITS[one.split], what, str(one.n), str(one.unsupported)]
    return "| " + " | ".join([*cells, *figures]) + " |"


if __name__ == "__main__":
    reading.run(main)
