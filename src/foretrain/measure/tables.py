"""Reads tables of candidates for measurement: rows of .csv, .jsonl or .parquet, and what they say."""

from __future__ import annotations

import contextlib
import csv
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np

from foretrain.errors import InputError, first_line, missing, unknown
from foretrain.files import read_lines, read_text
from foretrain.measure.candidates import Candidates, operator_candidates, table_candidates
from foretrain.measure.instances import FIELDS

Rows = list[dict[str, Any]]

_SETUP_S, _REPEATS = 0.005, 100
_USUAL_FLOPS, _USUAL_BYTES_PER_S = 1e14, 1e12
"""What operators cost whose rows do not say it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CandidateTable:
    """Rows that can be chosen from, and the file that they stand in."""

    path: Path
    rows: Rows

    @classmethod
    def read(cls, path: Path) -> Self:
        if path.suffix not in READERS:
            raise unknown("candidates", path.suffix or path.name, READERS, "a file of")
        rows = READERS[path.suffix](path)
        if not rows:
            raise InputError(f"{path}: holds no candidates")
        return cls(path=path, rows=rows)

    def has(self, name: str) -> bool:
        """Whether any row has a cell of that name."""
        return any(name in row for row in self.rows)

    def column(self, name: str) -> list[float]:
        """The numbers of a column; refuses a cell that holds none."""
        values = []
        for number, row in enumerate(self.rows, start=1):
            value = number_in(row.get(name))
            if value is None or not math.isfinite(value):
                raise InputError(f"{self.path}: {name} of row {number} is {row.get(name)!r}, not a number")
            values.append(value)
        return values

    def costs(self, name: str, *, needed: bool) -> list[float]:
        """The seconds that each measurement takes; alike where no column says it and none is needed."""
        if self.has(name):
            return self.column(name)
        if needed:
            raise InputError(
                f"{self.path}: no column {name!r} with the seconds that "
                "each measurement takes; name it with --cost-column, or use --count"
            )
        return [1.0] * len(self.rows)

    def candidates(
        self, costs: Sequence[float], *, cost_column: str, features: str | None, log: bool, quadratic: bool
    ) -> Candidates:
        """Make candidates of the columns that ``features`` names, or else of every column of numbers but the
        cost."""
        columns = {name: np.array(self.column(name)) for name in self._modelled(features, cost_column)}
        if log:
            for name, column in columns.items():
                if column.min() <= 0:
                    raise InputError(
                        f"{self.path}: {name} of row {column.argmin() + 1} "
                        f"is {column.min():g}: --log is for positive features"
                    )
            columns = {f"log {name}": np.log(column) for name, column in columns.items()}
        return table_candidates(columns, np.array(costs), self.rows, quadratic=quadratic)

    def _modelled(self, features: str | None, cost_column: str) -> list[str]:
        names = list(dict.fromkeys(name for row in self.rows for name in row if name != cost_column))
        if features is not None:
            wanted = [name.strip() for name in features.split(",")]
            if lacking := [name for name in wanted if name not in names]:
                raise unknown("--features", lacking[0], names)
            return wanted
        wanted = [name for name in names if any(number_in(row.get(name)) is not None for row in self.rows)]
        if not wanted:
            raise InputError(f"{self.path}: no column of numbers to model (columns: {', '.join(names)})")
        return wanted


def number_in(cell: Any) -> float | None:
    """The number that a cell holds, if it holds one."""
    if isinstance(cell, bool) or not isinstance(cell, int | float | str):
        return None
    try:
        return float(cell)
    except ValueError:
        return None


# Operators


def operator_of(row: Mapping[str, Any]) -> dict[str, Any]:
    """The operator of a row, without what was measured of it; tables have inputs and arguments as text."""
    kept = {name: row[name] for name in FIELDS if name in row}
    with contextlib.suppress(ValueError):  # what is not JSON is refused where it is read
        for name in ("inputs", "args"):
            if isinstance(kept.get(name), str):
                kept[name] = json.loads(kept[name])
    return kept


def operator_key(row: Mapping[str, Any]) -> str:
    """A text that rows share when they are of the same operator."""
    return json.dumps([row.get(name) for name in ("name", "inputs", "args", "precision")], sort_keys=True)


def replay_s(row: Mapping[str, Any]) -> float:
    """Seconds that measuring an operator takes: its set-up, and repeats at the roofline of a usual GPU."""
    flops, size = (number_in(row.get(name)) or 0.0 for name in ("flops", "bytes"))
    return _SETUP_S + _REPEATS * max(flops / _USUAL_FLOPS, size / _USUAL_BYTES_PER_S)


def operators(path: Path, rows: Rows, costs: Sequence[float], *, quadratic: bool) -> Candidates:
    """Lines of operator instances: name, input tensors as (shape, dtype, strides), precision, FLOPs and
    bytes."""
    described = []
    for number, (row, cost) in enumerate(zip(rows, costs, strict=True), start=1):
        try:
            described.append({**_described(row), "cost_s": cost})
        except (KeyError, TypeError, ValueError) as error:
            raise InputError(
                f"{path}: row {number} is not an operator with name, inputs, flops and bytes ({error})"
            ) from error
    return operator_candidates(described, quadratic=quadratic)


def _described(row: Mapping[str, Any]) -> dict[str, Any]:
    inputs = json.loads(row["inputs"]) if isinstance(row["inputs"], str) else row["inputs"]
    tensors = [(shape, dtype) for shape, dtype, *_ in inputs]
    work = {name: row[name] for name in ("flops", "bytes")}
    return {
        "op": row["name"],
        "dtype": f"{tensors[0][1] if tensors else ''}{row.get('precision', '')}",
        "dims": [int(dim) for shape, _ in tensors[:2] for dim in shape][:6],
        **{name: value if isinstance(value, int) else float(value) for name, value in work.items()},
    }


# Files


def _read_csv(path: Path) -> Rows:
    rows: Rows = list(csv.DictReader(read_text(path).splitlines()))
    for number, row in enumerate(rows, start=1):
        if None in row or None in row.values():
            raise InputError(f"{path}: row {number} does not have as many cells as the heading")
    return rows


def _read_jsonl(path: Path) -> Rows:
    rows = []
    for number, row in read_lines(path):
        if not isinstance(row, Mapping):
            raise InputError(f"{path}:{number}: not a JSON object")
        rows.append(dict(row))
    return rows


def _read_parquet(path: Path) -> Rows:
    try:
        from pyarrow import ArrowException, parquet
    except ImportError as error:
        raise missing("pyarrow", "parquet") from error
    try:
        rows: Rows = parquet.read_table(path).to_pylist()
    except (OSError, ArrowException) as error:
        raise InputError(f"{path}: cannot be read ({first_line(error)})") from error
    return rows


READERS: Mapping[str, Callable[[Path], Rows]] = {
    ".csv": _read_csv,
    ".jsonl": _read_jsonl,
    ".parquet": _read_parquet,
}
"""By the ending of the file."""
