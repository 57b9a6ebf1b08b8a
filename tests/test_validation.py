"""Published tables: every row is a job with its source, and their forecasts are as near as the docs say."""

from __future__ import annotations

import json

import pytest

import commands
from commands import fails
from foretrain.errors import CaptureError, InputError
from foretrain.forecast import Forecast
from foretrain.job import Job
from foretrain.predictors.roofline import RooflinePredictor
from foretrain.run import read_runs
from foretrain.validation import FOLDER, tables, validate


@pytest.mark.parametrize("name", tables())
def test_every_row_is_a_run_that_names_its_source_table_and_row(name: str) -> None:
    runs = [run for _, run in read_runs(FOLDER / f"{name}.jsonl")]
    assert runs
    for run in runs:
        assert {"source", "table", "label"} <= set(run.provenance)
        assert run.measured["step_time_s"] > 0


def test_flops_over_printed_rates_are_the_step_times_of_megatron_2021() -> None:
    _, last = list(read_runs(FOLDER / "megatron_2021.jsonl"))[-1]
    # 1008B: 96 B s l h^2 (1 + s / 6h + V / 16lh) FLOPs on 3,072 GPUs at 163 TFLOP/s
    flops = 96 * 3072 * 2048 * 128 * 25600**2 * (1 + 2048 / (6 * 25600) + 51200 / (16 * 128 * 25600))
    assert last.measured["step_time_s"] == pytest.approx(flops / (3072 * 163e12), rel=1e-3)


def test_rows_come_with_their_forecast_and_caveats() -> None:
    rows, scored = validate(["megatron_2021"], predictor="roofline")
    assert len(rows) == 10
    assert all(row.caveats and row.comparison.predicted > 0 for row in rows)
    assert scored.results[0].n == 10


def test_a_table_that_is_not_there_is_one_line() -> None:
    with pytest.raises(InputError, match="megatron_2021"):
        validate(["megatron_2022"])
    assert "megatron_2022" in fails("validate", "megatron_2022")


def test_tables_are_json_lines_without_blank_fields() -> None:
    for name in tables():
        for line in (FOLDER / f"{name}.jsonl").read_text().splitlines():
            assert set(json.loads(line)) == {"job", "measured", "provenance"}


def test_forecasts_that_all_failed_end_the_command_and_say_why(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: RooflinePredictor, job: Job) -> Forecast:
        raise CaptureError("model: cannot be traced here")

    monkeypatch.setattr(RooflinePredictor, "predict", refuse)
    result = commands.run("validate", "torchtitan_2024", "--predictor", "roofline")
    assert result.exit_code == 1
    assert "roofline: model: cannot be traced here (5 more like it)" in result.stderr
