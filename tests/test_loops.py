"""From a design to a forecast by commands alone: what ``design`` writes, ``measure`` reads, and ``fit`` learns."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import foretrain
from commands import fails, ok, run
from foretrain import predictors

MODELS = """
import torch

def net(batch, width=16):
    return torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(192, width), torch.nn.Linear(width, 10))

def conv(batch):
    return torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3), torch.nn.ReLU(), torch.nn.Flatten(), torch.nn.Linear(288, 10))

def norm(batch):
    return torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(192, 10), torch.nn.BatchNorm1d(10))
"""
JOB = """
[model]
source = "python"
name = "tiny.py:net"
[training]
global_batch = 16
image = 8
classes = 10
samples = 64
[cluster]
device = "cpu"
cores_per_device = 1
"""
GRID = """
models = ["tiny.py:net", "tiny.py:conv"]
workers = [1, 2]
batch_per_worker = [4, 16]
image = 8
classes = 10
"""
OWN = """
from foretrain.predictors.roofline import RooflinePredictor
from foretrain.predictors.base import Predictor

class Own(Predictor):
    name, quantities, learns = "own", frozenset({"step_time_s"}), True

    def fit(self, runs):
        return self

    def predict(self, job):
        return RooflinePredictor().predict(job)
"""
LEARNING = [name for name in predictors.names() if predictors.class_of(name).learns]
QUICK = ("--seconds", "0.1")


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name, text in (("tiny.py", MODELS), ("job.toml", JOB), ("grid.toml", GRID), ("own.py", OWN)):
        (tmp_path / name).write_text(text)
    monkeypatch.setenv("PYTHONPATH", str(Path(foretrain.__file__).parents[1]))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def lines(name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in Path(name).read_text().splitlines()]


def job(model: str = "net", batch: int = 8, **training: Any) -> dict[str, Any]:
    return {
        "model": {"source": "python", "name": f"tiny.py:{model}"},
        "training": {"global_batch": batch, "image": 8, "classes": 10, **training},
        "cluster": {"device": "cpu", "cores_per_device": 1},
    }


def write_jobs(name: str, *jobs: dict[str, Any]) -> str:
    Path(name).write_text("".join(json.dumps(one) + "\n" for one in jobs))
    return name


# The loops


def test_runs_of_a_campaign_are_known_whatever_machine_they_were_measured_on() -> None:
    place = {"device": "cpu", "cores_per_device": 1, "devices_per_node": 1, "nodes": 2}
    jobs = [{**job(batch=batch), "cluster": place} for batch in (4, 8)]
    about = {"host": "AMD EPYC, 2 cores", "machines": 1}
    write_jobs(
        "runs.jsonl", *({"job": one, "measured": {"step_time_s": 1}, "provenance": about} for one in jobs)
    )
    again = ("--count", "1", "--measured", "runs.jsonl", "--predictor", "ernest")
    assert "all of them were measured before" in fails("design", "runs.jsonl", *again)
    named = [
        {**one, "cluster": {**place, "host": host}} for one in jobs for host in ("AMD EPYC, 2 cores", "X")
    ]
    write_jobs("named.jsonl", *named)
    ok("design", "named.jsonl", *again, "-o", "next.jsonl")
    assert lines("next.jsonl")[0]["job"]["cluster"]["host"] == "X"


def test_a_size_that_cannot_be_is_left_out_and_the_others_keep_their_prices() -> None:
    text = JOB.replace("net", "norm").replace("samples = 64\n", "").replace("= 16", "= 4")
    Path("norm.toml").write_text(text)
    sizes = ("--cluster", "1,2", "--scale", "0.5,1")
    done = run("design", "norm.toml", *sizes, "--budget", "10m", "-o", "jobs.jsonl")
    assert done.exit_code == 0, done.stderr
    assert "left out: tiny.py:norm, 2 workers, batch 2: " in done.stderr
    chosen = {
        (one["job"]["plan"]["data"], one["job"]["training"]["global_batch"]) for one in lines("jobs.jsonl")
    }
    assert chosen == {(1, 2), (1, 4), (2, 4)}
    assert all(one["provenance"]["expected_s"] > 5 for one in lines("jobs.jsonl"))
    only = ("--cluster", "2", "--scale", "0.5")
    assert "no forecast says how long" in run("design", "norm.toml", *only, "--budget", "10m").stderr
    assert (
        "how long the measurements take is not known"
        in run("design", "norm.toml", *only, "--count", "1").stderr
    )


def test_operators_from_a_design_to_a_forecast(tmp_path: Path) -> None:
    pytest.importorskip("lightgbm")
    ok("measure", "ops", "job.toml", "--collect-only", "-o", "all.jsonl")
    ok("design", "all.jsonl", "--operators", "--count", "9", "--method", "half-d-optimal", "-o", "ops.jsonl")
    ok("measure", "ops", "ops.jsonl", "--device", "cpu", "-o", "measured.jsonl")
    assert [line["name"] for line in lines("measured.jsonl")] == [line["name"] for line in lines("ops.jsonl")]
    assert {line["source"] for line in lines("ops.jsonl")} == {"foretrain design"}
    assert {line["device"][:4] for line in lines("measured.jsonl")} == {"cpu,"}
    ok("measure", "pack", "measured.jsonl", "-o", "ops.parquet")
    ok("fit", "deletepop", "ops.parquet", "--out", "fitted")
    assert "time per step" in ok("predict", "job.toml", "--predictor", "fitted")
    for known in ("measured.jsonl", "ops.parquet"):
        ok("design", "all.jsonl", "--operators", "--count", "5", "--measured", known, "-o", "next.jsonl")
        chosen = {json.dumps([line["name"], line["inputs"], line["args"]]) for line in lines("next.jsonl")}
        assert len(chosen) == 5
        assert not chosen & {
            json.dumps([line["name"], line["inputs"], line["args"]]) for line in lines("ops.jsonl")
        }


def test_operators_of_a_dataset_can_be_replayed() -> None:
    pytest.importorskip("pyarrow")
    ok("measure", "ops", "job.toml", "--collect-only", "-o", "all.jsonl")
    ok("measure", "ops", "all.jsonl", "--device", "cpu", "-o", "measured.jsonl")
    ok("measure", "pack", "measured.jsonl", "-o", "ops.parquet")
    ok("design", "ops.parquet", "--operators", "--budget", "25ms", "-o", "ops.jsonl")
    assert 1 <= len(lines("ops.jsonl")) <= 5
    assert ", 0 failed" in run("measure", "ops", "ops.jsonl", "--device", "cpu", "-o", "again.jsonl").stderr


def test_steps_from_a_design_to_a_score() -> None:
    write_jobs("jobs.jsonl", *(job(model, batch) for model in ("net", "conv") for batch in (4, 8, 16, 32)))
    ok("design", "jobs.jsonl", "--count", "4", "-o", "chosen/jobs.jsonl")
    ok("measure", "steps", "chosen/jobs.jsonl", "--device", "cpu", "-o", "runs.jsonl", *QUICK)
    assert {line["provenance"]["source"] for line in lines("runs.jsonl")} == {"foretrain measure steps"}
    ok("fit", "flops", "runs.jsonl", "--out", "fitted")
    assert "step_time_s" in ok("evaluate", "runs.jsonl", "--predictor", "fitted")
    ok("design", "jobs.jsonl", "--count", "4", "--measured", "runs.jsonl", "-o", "next.jsonl")
    batches = [
        {(line["job"]["model"]["name"], line["job"]["training"]["global_batch"]) for line in lines(name)}
        for name in ("runs.jsonl", "next.jsonl")
    ]
    assert len(batches[0] | batches[1]) == 8
    assert "all of them were measured before" in fails(
        "design", "runs.jsonl", "--count", "1", "--measured", "runs.jsonl"
    )


def test_campaigns_from_a_design_to_forecasts() -> None:
    ok("design", "job.toml", "--cluster", "1,2", "--scale", "0.25,0.5,1", "--count", "4", "-o", "cells.jsonl")
    sizes = [
        (line["job"]["plan"]["data"], line["job"]["training"]["samples"]) for line in lines("cells.jsonl")
    ]
    assert {workers for workers, _ in sizes} == {1, 2}
    assert {samples for _, samples in sizes} <= {16, 32, 64}
    ok("measure", "campaign", "cells.jsonl", "-o", "runs.jsonl", *QUICK)
    measured = [
        (line["job"]["plan"]["data"], line["job"]["training"]["samples"]) for line in lines("runs.jsonl")
    ]
    assert measured == sizes
    for name in ("predictddl", "ray_models"):
        ok("fit", name, "runs.jsonl", "--out", f"fitted-{name}")
        assert f"predicted by {name}" in ok("predict", "job.toml", "--predictor", f"fitted-{name}")
    again = run("measure", "campaign", "cells.jsonl", "-o", "runs.jsonl", *QUICK)
    assert "0 measured, 0 failed, 4 known before" in again.stderr


@pytest.mark.parametrize("name", [*LEARNING, "own.py:Own"])
def test_any_predictor_says_what_to_run_next(name: str) -> None:
    ok("design", "grid.toml", "--predictor", name, "--count", "3", "-o", "cells.jsonl")
    assert len(lines("cells.jsonl")) == 3
    about = lines("cells.jsonl")[0]["provenance"]
    assert about["source"] == "foretrain design"
    assert about["predictor"] in name.lower()
    assert about["expected_s"] > 0


# What is refused, in one line


def test_files_in_the_wrong_place_are_named() -> None:
    write_jobs(
        "ops.jsonl", {"name": "relu", "overload": "default", "inputs": [], "args": {}, "phase": "forward"}
    )
    write_jobs("sizes.jsonl", {"machines": 2, "scale": 0.5})
    write_jobs("runs.jsonl", {"job": job(), "measured": {"step_time_s": 1.0}})
    write_jobs("failures.jsonl", {"job": job(), "error": "no"})
    Path("empty.jsonl").touch()
    for command in ("steps", "campaign"):
        for file, said in (
            ("ops.jsonl", "ops.jsonl: holds operators"),
            ("sizes.jsonl", "sizes.jsonl: holds cluster sizes"),
            ("failures.jsonl", "failures.jsonl: holds failures"),
            ("empty.jsonl", "empty.jsonl: does not begin with a line of JSON"),
            ("x.parquet", f"measure {command} takes jobs or runs"),
        ):
            assert said in fails("measure", command, file, "-o", "out.jsonl")
    for file in ("sizes.jsonl", "empty.jsonl", "x.parquet"):
        assert "measure ops takes operators or jobs or runs" in fails(
            "measure", "ops", file, "-o", "out.jsonl"
        )
    assert "one of operators, not a run" in fails("measure", "campaign", "runs.jsonl", "-o", "ops.jsonl")
    assert "takes measured operators" in fails(
        "design", "ops.jsonl", "--operators", "--count", "1", "--measured", "runs.jsonl"
    )
    assert "takes runs" in fails("design", "grid.toml", "--count", "1", "--measured", "ops.jsonl")


@pytest.mark.parametrize(
    ("provenance", "said"),
    [
        ("x", "provenance: 'x' is not a table of keys and values"),
        ({"cores_per_worker": "many"}, "provenance.cores_per_worker: 'many' is not a whole number"),
        ({"link": 5}, "provenance.link: 5 is not"),
    ],
)
def test_a_provenance_that_is_none_is_one_line(provenance: object, said: str) -> None:
    write_jobs("jobs.jsonl", {"job": job()}, {"job": job(), "provenance": provenance})
    answer = fails("measure", "campaign", "jobs.jsonl", "-o", "runs.jsonl")
    assert f"jobs.jsonl:2: {said}" in answer


def test_a_line_that_is_no_job_is_one_line() -> None:
    Path("jobs.jsonl").write_text(json.dumps(job()) + "\n[1]\n")
    answer = fails("measure", "campaign", "jobs.jsonl", "-o", "runs.jsonl")
    assert "jobs.jsonl:2: job: [1] is not a table" in answer


def test_an_operator_that_cannot_be_replayed_is_named() -> None:
    write_jobs("ops.jsonl", {"name": "relu", "inputs": [], "flops": 0, "bytes": 8})
    told = run("design", "ops.jsonl", "--operators", "--count", "1", "-o", "chosen.jsonl").stderr
    assert "the operators lack overload, args, phase, so foretrain measure ops cannot replay them" in told
    assert "chosen.jsonl:1: not an operator that can be replayed: it lacks overload, args, phase" in fails(
        "measure", "ops", "chosen.jsonl", "--device", "cpu", "-o", "out.jsonl"
    )


def test_a_campaign_carries_out_what_its_jobs_say_or_fails() -> None:
    served = {**job(), "plan": {"servers": 1}}
    own_nodes = {**served, "cluster": {**served["cluster"], "servers": {"nodes": 1}}}
    write_jobs(
        "jobs.jsonl", job(compile=True), job(mode="infer"), own_nodes, job(loader_rate=9.0),
        job(evaluate_every=5, evaluate_samples=4), job(checkpoint_every="1h"),
    )  # fmt: skip
    result = run("measure", "campaign", "jobs.jsonl", "-o", "runs.jsonl", *QUICK)
    assert result.exit_code == 1
    assert [line["error"] for line in lines("runs.failures.jsonl")] == [
        "training.compile: True cannot be measured in a campaign",
        "training.mode: 'infer' cannot be measured in a campaign",
        "cluster.servers: {'nodes': 1} cannot be measured in a campaign",
        "training.loader_rate: 9.0 cannot be measured in a campaign",
        "training.evaluate_every: 5 cannot be measured in a campaign",
        "training.checkpoint_every: '1h' cannot be measured in a campaign",
    ]
    assert "--models: is for a grid" in fails(
        "measure", "campaign", "jobs.jsonl", "--models", "x", "-o", "o.jsonl"
    )


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--cluster", "1,2", "-o", "x.jsonl"), "--out: needs the job to scale"),
        (("--cluster", "1,2", "--predictor", "ernest"), "--predictor: needs the job to scale"),
        (("grid.toml", "--predictor", "roofline"), "roofline has nothing to learn"),
        (("job.toml",), "models"),
        (("job.toml", "--cluster", "1,2", "--scale", "2"), "--scale: '2' is not above 0 and at most 1"),
        (("x.csv", "--cluster", "1,2"), "with --cluster the file is the job to scale"),
    ],
)
def test_designs_that_cannot_be_are_refused(words: tuple[str, ...], said: str) -> None:
    assert said in fails("design", *words, "--count", "1")
