"""``measure ops`` and ``measure steps`` as a user types them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from foretrain.cli import app

MODEL = "import torch\n\ndef net(batch):\n    return torch.nn.Linear(8, 4), (torch.randn(batch, 8),)\n"


@pytest.fixture
def jobs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("FORETRAIN_CACHE", str(tmp_path / "cache"))
    (tmp_path / "net.py").write_text(MODEL)
    job = {
        "model": {"source": "python", "name": "net.py:net"},
        "training": {"global_batch": 2},
        "cluster": {"device": "cpu", "cores_per_device": 1},
    }
    path = tmp_path / "jobs.jsonl"
    path.write_text(json.dumps(job) + "\n")
    return path


def test_operators_are_collected_here_and_replayed_there(jobs: Path, tmp_path: Path) -> None:
    listed, measured = tmp_path / "operators.jsonl", tmp_path / "ops.jsonl"
    collected = CliRunner().invoke(app, ["measure", "ops", str(jobs), "--collect-only", "-o", str(listed)])
    replayed = CliRunner().invoke(
        app, ["measure", "ops", str(listed), "--device", "cpu", "-o", str(measured)]
    )
    assert (collected.exit_code, replayed.exit_code) == (0, 0), replayed.output
    keys = {json.loads(line)["key"] for line in measured.read_text().splitlines()}
    assert len(keys) == len(listed.read_text().splitlines())
    assert "0 failed" in replayed.output


def test_steps_are_written_as_runs(jobs: Path, tmp_path: Path) -> None:
    out = tmp_path / "runs.jsonl"
    result = CliRunner().invoke(
        app, ["measure", "steps", str(jobs), "--device", "cpu", "--seconds", "0.01", "-o", str(out)]
    )
    assert result.exit_code == 0, result.output
    assert json.loads(out.read_text())["measured"]["step_time_s"] > 0


def test_a_model_by_its_name_is_measured_on_the_device_that_is_here(jobs: Path, tmp_path: Path) -> None:
    out = tmp_path / "runs.jsonl"
    model = f"{tmp_path}/net.py:net"
    result = CliRunner().invoke(
        app, ["measure", "steps", model, "--device", "cpu", "--seconds", "0.01", "-o", str(out)]
    )
    assert result.exit_code == 0, result.output
    assert json.loads(out.read_text())["job"]["cluster"]["device"] == "cpu"


def test_what_failed_is_tried_again_when_asked(jobs: Path, tmp_path: Path) -> None:
    (tmp_path / "net.py").write_text(MODEL.replace("torch.randn(batch, 8)", "torch.randn(batch, 9)"))
    words = [
        "measure",
        "steps",
        str(jobs),
        "--device",
        "cpu",
        "--seconds",
        "0.01",
        "-o",
        str(tmp_path / "runs.jsonl"),
    ]
    first = CliRunner().invoke(app, words)
    assert "0 measured, 1 failed" in first.stderr
    assert f"failures in {tmp_path}/runs.failures.jsonl, the last: " in first.stderr
    assert "mat1 and mat2" in first.stderr
    (tmp_path / "net.py").write_text(MODEL)
    assert (
        "0 left, 1 failed before (--retry-failed tries them again)" in CliRunner().invoke(app, words).stderr
    )
    assert "1 measured, 0 failed" in CliRunner().invoke(app, [*words, "--retry-failed"]).stderr


def test_no_gpu_is_one_line_and_exit_code_2(jobs: Path, tmp_path: Path) -> None:
    import torch

    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    result = CliRunner().invoke(app, ["measure", "ops", str(jobs), "-o", str(tmp_path / "ops.jsonl")])
    assert result.exit_code == 2
    assert "torch finds no GPU" in result.output
