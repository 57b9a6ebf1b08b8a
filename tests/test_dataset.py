"""Measured operators survive the way into Parquet and back."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

pytest.importorskip("pyarrow", reason="pyarrow is not installed")

from foretrain.cli import app
from foretrain.costs.measured import load_columns, load_measured
from foretrain.errors import InputError
from foretrain.measure.dataset import pack

ROW = {
    "key": "a",
    "name": "mm",
    "overload": "default",
    "phase": "forward",
    "precision": "",
    "inputs": [[[2, 3], "float32", None]],
    "args": {"self": "%0"},
    "flops": 12,
    "bytes": 24,
    "uses": 3,
    "cold_s": 1.23456e-6,
    "warm_s": 1e-6,
    "host_s": 2e-6,
    "kernels": 1,
    "kernel_names": ["void gemm"],
}


def test_rows_come_back_once_and_failures_stay_out(tmp_path: Path) -> None:
    plain, packed = tmp_path / "a.jsonl", tmp_path / "b.jsonl.gz"
    plain.write_text(json.dumps(ROW) + "\n" + json.dumps({"key": "b", "error": "no kernel ran"}) + "\n")
    packed.write_bytes(
        gzip.compress((json.dumps(ROW) + "\n" + json.dumps({**ROW, "key": "c"}) + "\n").encode())
    )
    assert pack([plain, packed], tmp_path / "ops.parquet", {"device": "test"}) == 2
    columns = load_columns(tmp_path / "ops.parquet")
    assert columns["key"] == ["a", "c"]
    assert columns["inputs"][0] == [[[2, 3], "float32", None]]
    assert columns["cold_s"][0] == pytest.approx(1.235e-6)


def test_nothing_measured_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text("")
    with pytest.raises(InputError, match="no measured operator"):
        pack([tmp_path / "a.jsonl"], tmp_path / "ops.parquet")


def test_the_command_names_the_device_for_fit(tmp_path: Path) -> None:
    lines, out = tmp_path / "a.jsonl", tmp_path / "ops.parquet"
    lines.write_text(json.dumps(ROW) + "\n")
    packed = CliRunner().invoke(app, ["measure", "pack", str(lines), "--device", "h100", "-o", str(out)])
    assert packed.exit_code == 0, packed.output
    assert "1 operators of h100-sxm-80gb" in packed.stderr
    [operator] = load_measured(out)
    assert (operator.device, operator.name) == ("h100-sxm-80gb", "mm")
    assert operator.device_s == pytest.approx((1.235e-6 + 1e-6) / 2)


@pytest.mark.parametrize(
    ("words", "sentence"),
    [(("none.jsonl", "--device", "h100"), "no such file"), (("a.jsonl", "--device", "h10"), "'h10'")],
)
def test_packing_names_what_is_wrong(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...], sentence: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.jsonl").write_text(json.dumps(ROW) + "\n")
    refused = CliRunner().invoke(app, ["measure", "pack", *words, "-o", "ops.parquet"])
    assert refused.exit_code == 2
    assert sentence in refused.stderr
