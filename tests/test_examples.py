"""The examples work as they stand: jobs are read and forecast, the campaign is measured, the study simulated, the
script records, the notebook runs."""

from __future__ import annotations

import importlib.util
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
from foretrain.api import make_job
from foretrain.cli.app import COMMANDS
from foretrain.job import Job
from foretrain.measure.campaign import cells, read_campaign
from foretrain.run import read_runs

pytest.importorskip("torch", reason="models cannot be traced without torch")
ROOT = Path(__file__).parent.parent
EXAMPLES = ROOT / "examples"
README = (EXAMPLES / "README.md").read_text(encoding="utf-8")
CAMPAIGN = EXAMPLES / "campaign" / "ray_workers.toml"
JOBS = sorted((EXAMPLES / "jobs").glob("*.toml"))
LIBRARIES = {"transformers": "transformers", "timm": "timm", "torchvision": "torchvision"}

pytestmark = pytest.mark.usefixtures("shared_cache")


def needs(library: str) -> None:
    """Not imported here: foretrain knows how where its compiled part does not load."""
    if importlib.util.find_spec(library) is None:
        pytest.skip(f"{library} is not installed")


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
        needs(LIBRARIES[job["model"]["source"]])
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
        assert not re.match(r"examples/(jobs|campaign|scheduling)/", word) or (ROOT / word).is_file()


def command_of(part: str, file: str) -> list[str]:
    """The words of the one command of the table that has these."""
    (found,) = (command for command in commands() if part in command and file in command)
    return shlex.split(found)[1:]


def test_the_campaign_is_a_grid_of_cells() -> None:
    grids = read_campaign(CAMPAIGN, {})
    planned = cells(grids, make_job)
    assert len(planned) == 2 * 4 * 2
    assert {cell.job.plan.data for cell in planned} == {1, 2, 4, 8}
    assert {cell.cores for cell in planned} == {2}
    assert CAMPAIGN.read_text(encoding="utf-8").startswith("# ")


def test_the_campaign_is_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Cut down, as the table shows, and further: one small model."""
    needs("torchvision")
    monkeypatch.chdir(ROOT)
    words = command_of("--seconds", "ray_workers.toml")
    words[words.index("--seconds") + 1] = "0.1"
    words[words.index("--samples") + 1] = "8"
    words[words.index("--out") + 1] = str(tmp_path / "runs.jsonl")
    ok(*words, "--models", "squeezenet1_1", "--batch-per-worker", "4", "--image", "32")
    runs = [run for _, run in read_runs(tmp_path / "runs.jsonl")]
    assert [run.job.plan.data for run in runs] == [1, 2]
    assert all(run.measured["epoch_time_s"] > 0 for run in runs)


def test_the_study_compares_policies_by_what_wrong_estimates_cost(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    told = json.loads(ok(*command_of("--errors", "jobs.csv"), "--processes", "1", "--json"))
    jct_s = {one["policy"]: one["average_jct_s"] for one in told["results"] if one["estimates"] == "exact"}
    assert set(jct_s) == {"fifo", "backfill", "srtf", "tiresias"}
    assert jct_s["srtf"] < jct_s["backfill"] < jct_s["fifo"]


def test_the_study_has_rules_for_both_teams(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    for part, told in (("--by-group", ("vision", "language")), ("--when", ("starts", "ends"))):
        shown = ok(*command_of(part, "rules.toml"), "--processes", "1")
        assert all(word in shown for word in told), shown


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


def notebook_cells() -> list[dict[str, Any]]:
    notebook = json.loads((EXAMPLES / "notebook.ipynb").read_text(encoding="utf-8"))
    assert (notebook["nbformat"], notebook["nbformat_minor"]) == (4, 5)
    found: list[dict[str, Any]] = notebook["cells"]
    return found


def test_the_notebook_is_kept_without_outputs() -> None:
    for cell in notebook_cells():
        assert cell["cell_type"] in ("code", "markdown")
        assert {"id", "metadata", "source"} <= set(cell)
        if cell["cell_type"] == "code":
            assert cell["outputs"] == []
            assert cell["execution_count"] is None
    assert len({cell["id"] for cell in notebook_cells()}) == len(notebook_cells())


def test_the_notebook_runs() -> None:
    pytest.importorskip("pandas")
    needs("torchvision")
    names: dict[str, Any] = {}
    for cell in notebook_cells():
        if cell["cell_type"] == "code":
            exec("".join(cell["source"]), names)
    assert names["forecast"].fits
    assert set(names["rows"]) == {"t4", "l4", "a100", "h100"}
    assert "<table" in names["forecast"]._repr_html_()
