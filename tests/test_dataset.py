"""Measured operators survive the way into Parquet and back."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

pytest.importorskip("pyarrow", reason="pyarrow is not installed")

from foretrain.costs.measured import load_columns
from foretrain.errors import InputError
from foretrain.measure.dataset import pack

ROW = {
    "key": "a", "name": "mm", "overload": "default", "phase": "forward", "precision": "", "inputs": [[[2, 3], "float32", None]],
    "args": {"self": "%0"}, "flops": 12, "bytes": 24, "uses": 3, "cold_s": 1.23456e-6, "warm_s": 1e-6, "host_s": 2e-6, "kernels": 1,
    "kernel_names": ["void gemm"],
}  # fmt: skip


def test_rows_come_back_once_and_failures_stay_out(tmp_path: Path) -> None:
    plain, packed = tmp_path / "a.jsonl", tmp_path / "b.jsonl.gz"
    plain.write_text(json.dumps(ROW) + "\n" + json.dumps({"key": "b", "error": "no kernel ran"}) + "\n")
    packed.write_bytes(gzip.compress((json.dumps(ROW) + "\n" + json.dumps({**ROW, "key": "c"}) + "\n").encode()))
    assert pack([plain, packed], tmp_path / "ops.parquet", {"device": "test"}) == 2
    columns = load_columns(tmp_path / "ops.parquet")
    assert columns["key"] == ["a", "c"]
    assert columns["inputs"][0] == [[[2, 3], "float32", None]]
    assert columns["cold_s"][0] == pytest.approx(1.235e-6)


def test_nothing_measured_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text("")
    with pytest.raises(InputError, match="no measured operator"):
        pack([tmp_path / "a.jsonl"], tmp_path / "ops.parquet")
