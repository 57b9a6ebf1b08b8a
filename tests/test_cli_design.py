"""``foretrain design`` as a user types it: what it prints, writes and refuses."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from foretrain.cli import app

ROWS = [
    {"batch": batch, "width": width, "model": f"m{width}", "cost_s": batch * width / 100}
    for batch in (1, 2, 4, 8)
    for width in (10, 20, 40)
]


def run(*words: object) -> Result:
    return CliRunner().invoke(app, ["design", *map(str, words)])


def fails(*words: object) -> str:
    """The one line of a command that was refused."""
    result = run(*words)
    assert result.exit_code == 2, result.output
    assert result.stderr.count("\n") == 1
    return result.stderr


def write_csv(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text(
        "\n".join([",".join(rows[0]), *(",".join(map(str, row.values())) for row in rows)]) + "\n"
    )
    return path


@pytest.fixture
def table(tmp_path: Path) -> Path:
    return write_csv(tmp_path / "candidates.csv", ROWS)


@pytest.mark.parametrize(
    "method", ["d-optimal", "half-d-optimal", "a-optimal", "random", "cheap-random", "grid"]
)
def test_it_prints_what_it_chose_the_cost_and_the_gain(table: Path, method: str) -> None:
    result = run(table, "--budget", "4s", "--method", method)
    assert result.exit_code == 0, result.output
    for word in (
        "batch",
        "model",
        "takes",
        "of 12 candidates",
        "in all",
        "a random choice of the same budget",
    ):
        assert word in result.stdout


def test_json_holds_the_rows_in_order(table: Path, tmp_path: Path) -> None:
    result = run(table, "--count", 4, "--json", "--out", tmp_path / "chosen.jsonl")
    document = json.loads(result.stdout)
    assert document["count"] == 4
    assert document["features"] == ["1", "batch", "width"]
    assert document["gain"]["d_efficiency"] > 1
    written = [json.loads(line) for line in (tmp_path / "chosen.jsonl").read_text().splitlines()]
    assert written == document["rows"]
    assert [int(row["width"]) for row in written] == [ROWS[place]["width"] for place in document["chosen"]]
    assert document["cost_s"] == pytest.approx(sum(ROWS[place]["cost_s"] for place in document["chosen"]))


def test_the_kind_of_file_does_not_matter(table: Path, tmp_path: Path) -> None:
    lines = tmp_path / "candidates.jsonl"
    lines.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    files = [table, lines]
    try:
        from pyarrow import Table, parquet
    except ImportError:
        pass
    else:
        files.append(tmp_path / "candidates.parquet")
        parquet.write_table(Table.from_pylist(ROWS), files[-1])
    assert (
        len({str(json.loads(run(file, "--budget", "3s", "--json").stdout)["chosen"]) for file in files}) == 1
    )


def test_seeds_matter_for_random_choices_only(table: Path) -> None:
    chosen = [
        json.loads(run(table, "--count", 4, "--method", "random", "--seed", seed, "--json").stdout)["chosen"]
        for seed in (0, 0, 1)
    ]
    assert chosen[0] == chosen[1] != chosen[2]


def test_cluster_sizes_after_ernest() -> None:
    result = run(
        "--cluster",
        "1,2,4,8,16",
        "--scale",
        "0.125,0.25,0.5,1",
        "--budget",
        "1h",
        "--method",
        "a-optimal",
        "--json",
    )
    document = json.loads(result.stdout)
    assert document["candidates"] == 20
    assert document["cost_s"] <= 3600
    assert {1, 16} <= {row["machines"] for row in document["rows"]}


def test_too_few_measurements_for_the_model_are_pointed_out() -> None:
    assert "determines 2 of 4 coefficients" in run("--cluster", "1,2,4,8", "--count", 2).stdout
    assert "determines 4 coefficients" in run("--cluster", "1,2,4,8", "--count", 6).stdout


def test_the_model_can_be_told(table: Path) -> None:
    document = json.loads(
        run(table, "--count", 6, "--features", "width,batch", "--log", "--quadratic", "--json").stdout
    )
    assert document["features"] == [
        "1",
        "log width",
        "log batch",
        "log width * log width",
        "log width * log batch",
        "log batch * log batch",
    ]


def test_operators_by_their_shapes(tmp_path: Path) -> None:
    file = tmp_path / "operators.jsonl"
    sizes = [(m, n) for m in (1, 16, 256) for n in (8, 64, 512)]
    rows = [
        {"name": name, "inputs": [[[m, n], "float32", None]], "flops": m * n, "bytes": 8 * m * n}
        for name in ("relu", "gelu")
        for m, n in sizes
    ]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    result = run(file, "--operators", "--count", 6)
    assert result.exit_code == 0, result.output
    assert "in all" in result.stdout
    assert json.loads(run(file, "--operators", "--count", 6, "--json").stdout)["cost_s"] > 6 * 0.005
    assert "row 1 is not an operator" in fails(
        write_csv(tmp_path / "x.csv", ROWS), "--operators", "--count", 2
    )


def test_what_a_row_lacks_stays_empty(tmp_path: Path) -> None:
    rows = [{"batch": 3, "cost_s": 5}, {"batch": 9, "note": "wide", "cost_s": 5}]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    result = run(tmp_path / "rows.jsonl", "--count", 2)
    shown = [line.split() for line in result.stdout.splitlines() if line.endswith(" 5 s ")]
    assert sorted(shown) == [["3", "5", "s"], ["9", "wide", "5", "s"]]


def test_a_cost_column_of_another_name(tmp_path: Path) -> None:
    file = write_csv(tmp_path / "a.csv", [{"x": value, "takes": 2} for value in range(5)])
    assert json.loads(run(file, "--budget", "6s", "--cost-column", "takes", "--json").stdout)["count"] == 3


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"cost_s": ""}, "cost_s of row 3 is '', not a number"),
        ({"cost_s": -1}, "cost_s of row 3 is -1, not a positive number"),
        ({"batch": "many"}, "batch of row 3 is 'many', not a number"),
    ],
)
def test_a_bad_cell_is_named(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    rows = [dict(row) for row in ROWS]
    rows[2] |= change
    assert message in fails(write_csv(tmp_path / "bad.csv", rows), "--budget", "4s")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--budget", "1ms"], "is below the cheapest candidate, which takes 100 ms"),
        (["--budget", "soon"], "budget: 'soon' is not a time"),
        (["--budget", "1h", "--cost-column", "price"], "no column 'price' with the seconds"),
        (["--count", "13"], "count: 13 is not between 1 and the 12 candidates"),
        (["--count", "3", "--features", "batsh"], "did you mean batch?"),
        (["--count", "3", "--features", "model"], "model of row 1 is 'm10', not a number"),
    ],
)
def test_a_bad_option_is_named(table: Path, words: list[str], message: str) -> None:
    assert message in fails(table, *words)


def test_bad_files_are_named(tmp_path: Path) -> None:
    assert "cannot be read" in fails(tmp_path / "none.csv", "--count", 1)
    assert "is not a file of .csv, .jsonl, .parquet" in fails(tmp_path / "table.xlsx", "--count", 1)


def test_bad_cluster_sizes_are_named() -> None:
    assert "--cluster: '1,two' is not a list of numbers" in fails("--cluster", "1,two", "--count", 1)
    assert "whole numbers" in fails("--cluster", "1.5", "--count", 1)
    assert "scales above 0" in fails("--cluster", "1,2", "--scale", "3", "--count", 1)


def test_one_source_and_one_limit(table: Path) -> None:
    assert run("--count", 1).exit_code == 2
    assert run(table, "--cluster", "1,2", "--count", 1).exit_code == 2
    assert run(table).exit_code == 2
    assert run(table, "--count", 1, "--budget", "1h").exit_code == 2
