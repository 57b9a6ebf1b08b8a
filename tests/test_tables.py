"""Tables of candidates: read from three kinds of files; what they lack is said with file, row and column."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from foretrain.errors import InputError
from foretrain.measure.tables import CandidateTable, operator_key, operator_of, operators, replay_s

OPERATOR = {"name": "relu", "inputs": [[[4], "float32", None]], "flops": 4, "bytes": 32}


def table(*rows: dict[str, Any]) -> CandidateTable:
    return CandidateTable(path=Path("rows.csv"), rows=list(rows))


def candidates(given: CandidateTable, **options: Any) -> tuple[str, ...]:
    usual = {"cost_column": "cost_s", "features": None, "log": False, "quadratic": False}
    costs = given.costs("cost_s", needed=False)
    return given.candidates(costs, **{**usual, **options}).names


def test_rows_of_every_kind_of_file_say_the_same(tmp_path: Path) -> None:
    pytest.importorskip("pyarrow")
    from pyarrow import Table, parquet

    rows = [{"batch": 1, "cost_s": 2.5}, {"batch": 8, "cost_s": 3.0}]
    (tmp_path / "a.csv").write_text("batch,cost_s\n1,2.5\n8,3.0\n")
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    parquet.write_table(Table.from_pylist(rows), tmp_path / "a.parquet")
    for ending in ("csv", "jsonl", "parquet"):
        read = CandidateTable.read(tmp_path / f"a.{ending}")
        assert (read.column("batch"), read.costs("cost_s", needed=True)) == ([1, 8], [2.5, 3])


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("none.csv", None, "cannot be read"),
        ("table.xlsx", None, "is not a file of .csv, .jsonl, .parquet"),
        ("empty.csv", "x,cost_s\n", "holds no candidates"),
        ("ragged.csv", "x,cost_s\n1\n", "row 1 does not have as many cells"),
        ("list.jsonl", "[1]\n", "list.jsonl:1: not a JSON object"),
        ("not.parquet", "words", "not.parquet: cannot be read"),
    ],
)
def test_a_file_without_rows_is_named(tmp_path: Path, name: str, text: str | None, message: str) -> None:
    if name.endswith(".parquet"):
        pytest.importorskip("pyarrow")
    if text is not None:
        (tmp_path / name).write_text(text)
    with pytest.raises(InputError, match=message):
        CandidateTable.read(tmp_path / name)


@pytest.mark.parametrize("cell", ["", "many", "nan", None, True, "inf"])
def test_a_cell_without_a_number_is_named_by_its_row(cell: object) -> None:
    bad = table({"batch": 1}, {"batch": cell})
    with pytest.raises(InputError, match=f"batch of row 2 is {cell!r}, not a number"):
        bad.column("batch")


def test_costs_are_alike_where_none_are_needed() -> None:
    rows = table({"batch": 1}, {"batch": 2})
    assert rows.costs("cost_s", needed=False) == [1.0, 1.0]
    with pytest.raises(InputError, match="no column 'cost_s' with the seconds"):
        rows.costs("cost_s", needed=True)


def test_every_column_of_numbers_but_the_cost_is_modelled() -> None:
    rows = table(*({"batch": n, "note": "wide", "depth": n * n, "cost_s": n} for n in (1, 2, 3)))
    assert candidates(rows) == ("1", "batch", "depth")
    assert candidates(rows, features="depth", log=True) == ("1", "log depth")
    with pytest.raises(InputError, match="did you mean batch"):
        candidates(rows, features="batsh")
    with pytest.raises(InputError, match=r"no column of numbers to model \(columns: note\)"):
        candidates(table({"note": "wide", "cost_s": 1}))
    with pytest.raises(InputError, match="batch of row 1 is 0: --log is for positive features"):
        candidates(table({"batch": 0}, {"batch": 1}), log=True)


# Operators


def test_an_operator_is_the_same_as_text_and_measured() -> None:
    text = {**OPERATOR, "inputs": json.dumps(OPERATOR["inputs"]), "warm_s": 1e-5}
    assert operator_of(text) == OPERATOR
    assert operator_key(operator_of(text)) == operator_key(OPERATOR)
    assert operator_key({**OPERATOR, "precision": "bf16"}) != operator_key(OPERATOR)


def test_an_operator_that_moves_more_takes_longer_to_measure() -> None:
    assert replay_s({"bytes": "1e12"}) > replay_s({"flops": 1e13}) > replay_s({}) > 0


@pytest.mark.parametrize(
    "change",
    [
        {"inputs": [[1]]},
        {"inputs": [1]},
        {"inputs": [["ab", "float32", None]]},
        {"flops": None},
        {"bytes": "x"},
    ],
)
def test_what_is_no_operator_is_named_by_its_row(change: dict[str, Any]) -> None:
    message = r"ops\.jsonl: row 2 is not an operator with name, inputs, flops and bytes"
    with pytest.raises(InputError, match=message):
        operators(Path("ops.jsonl"), [OPERATOR, {**OPERATOR, **change}], [1.0, 1.0], quadratic=False)
