"""The examples work as they stand: jobs are read and forecast, the script records, the notebook runs."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest

import foretrain
from commands import PATIENCE_S, ok
from foretrain.cli.app import COMMANDS
from foretrain.job import Job, read_runs

pytest.importorskip("torch", reason="models cannot be traced without torch")
ROOT = Path(__file__).parent.parent
EXAMPLES = ROOT / "examples"
README = (EXAMPLES / "README.md").read_text(encoding="utf-8")
JOBS = sorted((EXAMPLES / "jobs").glob("*.toml"))
LIBRARIES = {"transformers": "transformers", "timm": "timm", "torchvision": "torchvision"}

pytestmark = pytest.mark.usefixtures("shared_cache")


def by_name(path: Path) -> str:
    return path.stem


def tables(path: Path) -> dict[str, Any]:
    return tomllib.loads(path.read_text(encoding="utf-8"))


def shortened(job: dict[str, Any]) -> dict[str, Any]:
    """The same training of a model of two layers; of a pipeline, with as many stages."""
    config = job["model"].get("config", {})
    if "num_hidden_layers" in config:
        config["num_hidden_layers"] = 2
    plan = job.get("plan", {})
    if plan.get("pipeline", 1) > 2:
        plan["data"] *= plan["pipeline"] // 2
        plan["pipeline"] = 2
        plan["schedule"] = "1f1b"
        plan.pop("virtual_stages", None)
    return job


def test_there_are_ten_jobs() -> None:
    assert len(JOBS) == 10


@pytest.mark.parametrize("path", JOBS, ids=by_name)
def test_a_job_is_read_and_begins_by_saying_what_it_is(path: Path) -> None:
    job = Job.read(tables(path), base=path.parent)
    assert job.cluster.world_size >= 1
    assert path.read_text(encoding="utf-8").startswith("# ")


@pytest.mark.parametrize("path", JOBS, ids=by_name)
def test_a_job_is_forecast_and_fits(path: Path) -> None:
    job = shortened(tables(path))
    if job["model"]["source"] in LIBRARIES:
        pytest.importorskip(LIBRARIES[job["model"]["source"]])
    forecast = foretrain.predict(Job.read(job, base=path.parent))
    assert 0 < forecast.step_time_s.low <= forecast.step_time_s.median <= forecast.step_time_s.high
    assert forecast.fits
    assert ("total_time_s" in forecast) == (job["training"].get("mode") != "infer")


def commands() -> list[str]:
    return sorted(set(re.findall(r"`(foretrain [^`]+)`", README)))


def test_the_table_has_every_job_and_every_file_it_names() -> None:
    listed = re.findall(r"^\| \[(\w+\.toml)\]\(jobs/", README, re.MULTILINE)
    assert sorted(listed) == [path.name for path in JOBS]
    assert all((EXAMPLES / name).exists() for name in re.findall(r"\]\(([^)]+)\)", README))
    assert all(any(path.name in command for command in commands()) for path in JOBS)


@pytest.mark.parametrize("command", commands())
def test_commands_of_the_table_have_their_options(command: str) -> None:
    _, name, *words = shlex.split(command)
    assert name in COMMANDS
    group = [words[0]] if name == "measure" else []
    known = ok(name, *group, "--help")
    for option in (word for word in words if word.startswith("--")):
        assert re.search(rf"(?<![\w-]){option}(?![\w-])", known), option
    for word in words:
        assert not word.startswith("examples/jobs/") or (ROOT / word).is_file()


def test_the_recording_script_adds_a_run(tmp_path: Path) -> None:
    words = [sys.executable, str(EXAMPLES / "recording.py"), str(tmp_path / "runs.jsonl")]
    env = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "FORETRAIN_SERVER": ""}
    done = subprocess.run(
        words, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=PATIENCE_S, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "forecast: " in done.stderr
    ((_, run),) = read_runs(tmp_path / "runs.jsonl")
    assert run.measured["step_time_s"] > 0
    assert run.provenance["steps"] == 40


def cells() -> list[dict[str, Any]]:
    notebook = json.loads((EXAMPLES / "notebook.ipynb").read_text(encoding="utf-8"))
    assert (notebook["nbformat"], notebook["nbformat_minor"]) == (4, 5)
    found: list[dict[str, Any]] = notebook["cells"]
    return found


def test_the_notebook_is_kept_without_outputs() -> None:
    for cell in cells():
        assert cell["cell_type"] in ("code", "markdown")
        assert {"id", "metadata", "source"} <= set(cell)
        if cell["cell_type"] == "code":
            assert cell["outputs"] == []
            assert cell["execution_count"] is None
    assert len({cell["id"] for cell in cells()}) == len(cells())


def test_the_notebook_runs() -> None:
    pytest.importorskip("pandas")
    pytest.importorskip("torchvision")
    names: dict[str, Any] = {}
    for cell in cells():
        if cell["cell_type"] == "code":
            exec("".join(cell["source"]), names)
    assert names["forecast"].fits
    assert set(names["rows"]) == {"t4", "l4", "a100", "h100"}
    assert "<table" in names["forecast"]._repr_html_()
