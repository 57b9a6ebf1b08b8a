"""The command that says what to measure next, within a budget: ``design``."""

from __future__ import annotations

import csv
import dataclasses
import json
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from foretrain.cli.app import JsonFlag, registry, say, show
from foretrain.errors import ForetrainError, InputError, first_line, invalid, unknown

if TYPE_CHECKING:
    from rich.console import RenderableType

    from foretrain.measure.candidates import Candidates
    from foretrain.measure.design import Design, Gain

Rows = list[dict[str, Any]]


@registry.command()
def design(
    file: Annotated[
        Path | None, typer.Argument(metavar="CANDIDATES.csv|.jsonl|.parquet", show_default=False)
    ] = None,
    *,
    cluster: Annotated[
        str | None,
        typer.Option(help="Numbers of machines, such as 1,2,4,8: choose among cluster sizes instead."),
    ] = None,
    scale: Annotated[
        str, typer.Option(help="Shares of the data to run on, with --cluster.")
    ] = "0.125,0.25,0.5,1",
    whole_time: Annotated[
        str, typer.Option(help="Time of a run on all data and one machine, with --cluster.")
    ] = "1h",
    budget: Annotated[
        str | None, typer.Option(help="Time for all measurements together, such as 2h.")
    ] = None,
    count: Annotated[int | None, typer.Option(help="Number of measurements, instead of a budget.")] = None,
    method: Annotated[
        Literal["d-optimal", "a-optimal", "random", "cheap-random", "grid"],
        typer.Option(help="How to choose.", show_default=True),
    ] = "d-optimal",
    features: Annotated[
        str | None, typer.Option(help="Columns to model, by name (else every column of numbers).")
    ] = None,
    cost_column: Annotated[
        str, typer.Option(help="Column with the seconds that a measurement takes.")
    ] = "cost_s",
    log: Annotated[bool, typer.Option("--log", help="Take logarithms of the features.")] = False,
    quadratic: Annotated[
        bool, typer.Option("--quadratic", help="Model squares and products of the features too.")
    ] = False,
    operators: Annotated[
        bool, typer.Option("--operators", help="The rows are operators: name, inputs, flops, bytes.")
    ] = False,
    seed: Annotated[int, typer.Option(help="For random choices and ties.")] = 0,
    out: Annotated[
        Path | None, typer.Option(help="Write the chosen rows, in the order to measure them, as JSON lines.")
    ] = None,
    as_json: JsonFlag = False,
) -> None:
    """Choose what to measure next: the candidates that tell most for their cost."""
    from foretrain.measure import design as choose
    from foretrain.units import parse_seconds

    if (file is None) == (cluster is None):
        raise typer.BadParameter("give a file of candidates or --cluster (and only one of them)")
    if (budget is None) == (count is None):
        raise typer.BadParameter("give --budget or --count (and only one of them)")
    budget_s = None if budget is None else parse_seconds(budget, "budget")
    if file is None:
        candidates = _clusters(str(cluster), scale, parse_seconds(whole_time, "whole-time"))
    else:
        rows = _read(file)
        costs = _costs(file, rows, cost_column, needed=budget is not None)
        candidates = (
            _operators(file, rows, costs, quadratic)
            if operators
            else _table(file, rows, costs, features, cost_column, log, quadratic)
        )
    chosen = choose.design(method, candidates, budget_s=budget_s, count=count, seed=seed)
    gain = choose.gain(chosen, candidates, budget_s=budget_s, count=count)
    priced = file is None or any(cost_column in row for row in rows)
    chosen_rows = [dict((candidates.labels if file is None else rows)[place]) for place in chosen.chosen]
    if out is not None:
        _write(out, chosen_rows)
    if as_json:
        from foretrain.report import dump

        typer.echo(dump(_document(chosen, candidates, gain, chosen_rows, priced)))
    else:
        show(*_report(chosen, candidates, gain, priced))


# Candidates


def _clusters(machines: str, scales: str, whole_s: float) -> Candidates:
    from foretrain.measure.candidates import cluster_candidates, ernest_cost

    counts = _numbers("cluster", machines)
    if not all(value.is_integer() for value in counts):
        raise invalid("--cluster", machines, "a list of whole numbers of machines")
    return cluster_candidates(
        map(int, counts),
        _numbers("scale", scales),
        lambda count, share: ernest_cost(count, share, whole_s=whole_s),
    )


def _numbers(field: str, text: str) -> list[float]:
    try:
        numbers = [float(part) for part in text.split(",")]
    except ValueError:
        numbers = [math.nan]
    if not all(map(math.isfinite, numbers)):
        raise invalid(f"--{field}", text, "a list of numbers such as 1,2,4")
    return numbers


def _table(
    path: Path,
    rows: Rows,
    costs: Sequence[float],
    features: str | None,
    cost_column: str,
    log: bool,
    quadratic: bool,
) -> Candidates:
    import numpy as np

    from foretrain.measure.candidates import table_candidates

    names = list(dict.fromkeys(name for row in rows for name in row if name != cost_column))
    if features is not None:
        wanted = [name.strip() for name in features.split(",")]
        missing = [name for name in wanted if name not in names]
        if missing:
            raise unknown("--features", missing[0], names)
    else:
        wanted = [name for name in names if any(_number(row.get(name)) is not None for row in rows)]
        if not wanted:
            raise InputError(f"{path}: no column of numbers to model (columns: {', '.join(names)})")
    columns = {name: np.array(_column(path, rows, name)) for name in wanted}
    if log:
        for name, column in columns.items():
            if column.min() <= 0:
                raise InputError(
                    f"{path}: {name} of row {column.argmin() + 1} "
                    f"is {column.min():g}: --log is for positive features"
                )
        columns = {f"log {name}": np.log(column) for name, column in columns.items()}
    return table_candidates(columns, np.array(costs), rows, quadratic=quadratic)


def _operators(path: Path, rows: Rows, costs: Sequence[float], quadratic: bool) -> Candidates:
    """Lines of operator instances: name, input tensors as (shape, dtype, strides), precision, FLOPs and
    bytes."""
    from foretrain.measure.candidates import operator_candidates

    described = []
    for number, (row, cost) in enumerate(zip(rows, costs, strict=True), start=1):
        try:
            inputs = json.loads(row["inputs"]) if isinstance(row["inputs"], str) else row["inputs"]
            shapes = [shape for shape, *_ in inputs]
            dtype = f"{inputs[0][1] if inputs else ''}{row.get('precision', '')}"
            dims = [dim for shape in shapes[:2] for dim in shape][:6]
            described.append(
                {
                    "op": row["name"],
                    "dtype": dtype,
                    "dims": dims,
                    "flops": row["flops"],
                    "bytes": row["bytes"],
                    "cost_s": cost,
                }
            )
        except (KeyError, TypeError, ValueError) as error:
            raise InputError(
                f"{path}: row {number} is not an operator with name, inputs, flops and bytes ({error})"
            ) from error
    return operator_candidates(described, quadratic=quadratic)


def _costs(path: Path, rows: Rows, name: str, *, needed: bool) -> list[float]:
    if any(name in row for row in rows):
        return _column(path, rows, name)
    if needed:
        raise InputError(
            f"{path}: no column {name!r} with the seconds that "
            "each measurement takes; name it with --cost-column, or use --count"
        )
    return [1.0] * len(rows)


def _column(path: Path, rows: Rows, name: str) -> list[float]:
    values = []
    for number, row in enumerate(rows, start=1):
        value = _number(row.get(name))
        if value is None or not math.isfinite(value):
            raise InputError(f"{path}: {name} of row {number} is {row.get(name)!r}, not a number")
        values.append(value)
    return values


def _number(value: Any) -> float | None:
    """The number that a cell holds, if it holds one."""
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        return None
    try:
        return float(value)
    except ValueError:
        return None


# Files


def _read(path: Path) -> Rows:
    if path.suffix not in _READERS:
        raise unknown("candidates", path.suffix or path.name, _READERS, "a file of")
    rows = _READERS[path.suffix](path)
    if not rows:
        raise InputError(f"{path}: holds no candidates")
    return rows


def _read_csv(path: Path) -> Rows:
    from foretrain.files import read_text

    rows: Rows = list(csv.DictReader(read_text(path).splitlines()))
    for number, row in enumerate(rows, start=1):
        if None in row or None in row.values():
            raise InputError(f"{path}: row {number} does not have as many cells as the heading")
    return rows


def _read_jsonl(path: Path) -> Rows:
    from foretrain.job import read_lines

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
        raise ForetrainError("parquet: pyarrow is not installed; install foretrain[learn]") from error
    try:
        rows: Rows = parquet.read_table(path).to_pylist()
    except (OSError, ArrowException) as error:
        raise InputError(f"{path}: cannot be read ({first_line(error)})") from error
    return rows


_READERS: dict[str, Callable[[Path], Rows]] = {
    ".csv": _read_csv,
    ".jsonl": _read_jsonl,
    ".parquet": _read_parquet,
}


def _write(path: Path, rows: Rows) -> None:
    from foretrain.files import write_atomically
    from foretrain.report import dump

    write_atomically(path, "".join(dump(row, indent=None) + "\n" for row in rows))
    say(f"{len(rows):,} rows in {path}")


# Results


def _document(chosen: Design, candidates: Candidates, gain: Gain, rows: Rows, priced: bool) -> dict[str, Any]:
    return {
        "method": chosen.method,
        "candidates": len(candidates.cost_s),
        "features": list(candidates.names),
        "count": len(chosen.chosen),
        "cost_s": chosen.cost_s if priced else None,
        "log_det": chosen.log_det,
        "trace_inverse": chosen.trace_inverse,
        "determined": chosen.determined,
        "gain": dataclasses.asdict(gain),
        "chosen": [int(row) for row in chosen.chosen],
        "rows": rows,
    }


def _report(
    chosen: Design, candidates: Candidates, gain: Gain, priced: bool, first: int = 10
) -> list[RenderableType]:
    from foretrain.report.tables import table
    from foretrain.units import format_seconds

    rows = [candidates.labels[place] for place in chosen.chosen]
    costs = [format_seconds(cost) for cost in candidates.cost_s[chosen.chosen]]
    headings = [
        *list(dict.fromkeys(name for row in rows for name in row if name != "cost_s"))[:8],
        *(["takes"] if priced else []),
    ]
    cells = [
        [_cell(row.get(name, cost)) for name in headings]
        for row, cost in zip(rows[:first], costs, strict=False)
    ]
    more = [f"... and {len(rows) - first:,} more (--out writes them all)"] if len(rows) > first else []
    cost = f", {format_seconds(chosen.cost_s)} in all" if priced else ""
    return [
        table(headings, cells, right=headings),
        *more,
        f"chosen    {len(rows):,} of {len(candidates.cost_s):,} "
        f"candidates{cost} ({chosen.method}, {len(candidates.names)} coefficients)",
        *_gain(chosen, gain),
    ]


def _gain(chosen: Design, gain: Gain) -> list[str]:
    """Ratios mean something only where both designs determine the whole model."""
    if gain.random_determined < chosen.determined:
        return [
            f"gain      {chosen.determined} coefficients determined, "
            f"by a random choice of the same budget {gain.random_determined:.3g} "
            f"({gain.seeds} seeds)"
        ]
    return [
        f"gain      {gain.d_efficiency:.3g}x the information "
        f"of a random choice of the same budget (D-efficiency; {gain.seeds} seeds)",
        f"          {gain.a_efficiency:.3g}x lower variance of the coefficients (A-efficiency)",
    ]


def _cell(value: Any) -> str:
    text = f"{value:g}" if isinstance(value, float) else str(value)
    return text if len(text) <= 32 else text[:31] + "…"
