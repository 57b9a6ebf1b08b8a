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


def pack_rows(folder: Path, *words: str, **devices: str) -> tuple[int, str]:
    """The exit code and what is said of packing a file for each device."""
    files = [folder / f"{name}.jsonl" for name in devices]
    for path, device in zip(files, devices.values(), strict=True):
        path.write_text(json.dumps({**ROW, "key": path.name, "device": device}) + "\n")
    command = ["measure", "pack", *map(str, files), *words, "-o", str(folder / "ops.parquet")]
    result = CliRunner().invoke(app, command)
    return result.exit_code, result.stderr


@pytest.mark.parametrize(
    ("said", "given", "found"),
    [
        ("cpu, Some Processor, 2 cores", (), "1 operators of cpu in"),
        ("NVIDIA A100-SXM4-80GB", (), "1 operators of a100-sxm-80gb in"),
        ("NVIDIA H200", ("--device", "h200"), "1 operators of h200-sxm-141gb in"),
        ("NVIDIA H200", (), "'NVIDIA H200' can be h200-sxm-141gb or h200-nvl-141gb"),
        ("cpu, Some One", ("--device", "h100"), "'h100-sxm-80gb', but the operators were measured on 'cpu"),
        ("NVIDIA H200", ("--device", "cpu"), "'cpu', but the operators were measured on 'NVIDIA H200'"),
        ("NVIDIA L4", ("--device", "l40"), "'l40', but the operators were measured on 'NVIDIA L4'"),
        ("Other GPU", (), "'Other GPU' can be no device of the catalogue"),
    ],
)
def test_the_device_is_that_of_the_rows(
    tmp_path: Path, said: str, given: tuple[str, ...], found: str
) -> None:
    code, told = pack_rows(tmp_path, *given, one=said)
    assert found in told
    assert code == (0 if "operators of" in found else 2)


def test_a_device_is_filled_in_only_where_it_is_missing(tmp_path: Path) -> None:
    (tmp_path / "old.jsonl").write_text(json.dumps({**ROW, "key": "old"}) + "\n")
    words = ["measure", "pack", str(tmp_path / "old.jsonl"), "-o", str(tmp_path / "ops.parquet")]
    assert "--device: missing" in CliRunner().invoke(app, words).stderr
    told = CliRunner().invoke(app, [*words, "--device", "h100"]).stderr
    assert "do not say what they were measured on; taken as h100-sxm-80gb" in told
    (tmp_path / "old.info.json").write_text('{"device": "NVIDIA H200"}')
    assert "measured on 'NVIDIA H200'" in CliRunner().invoke(app, [*words, "--device", "h100"]).stderr
    assert "several devices" in pack_rows(tmp_path, a="NVIDIA H200", b="NVIDIA L4")[1]


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ('{"job": {}, "measured": {}}', ":1: not a measured operator but one of runs"),
        ('{"name": "mm", "inputs": []}', ":1: not a measured operator but one of operators"),
        ('{"name": "mm", "inputs": [], "cold_s": 1}', ":1: not a measured operator but without key"),
        ("words", "cannot be read as measured operators"),
    ],
)
def test_other_files_are_refused_in_one_line(tmp_path: Path, line: str, said: str) -> None:
    (tmp_path / "a.jsonl").write_text(line + "\n")
    words = ["measure", "pack", str(tmp_path / "a.jsonl"), "-o", str(tmp_path / "o.parquet")]
    refused = CliRunner().invoke(app, words)
    assert refused.exit_code == 2
    assert said in refused.stderr
    assert refused.stderr.count("\n") == 1
