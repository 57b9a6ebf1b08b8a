"""The command plan: what it prints, writes and refuses."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

import foretrain
from browsing import Browser
from commands import run
from foretrain.job import Job
from planning import LLAMA


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, shared_cache: Path) -> Path:
    made = tmp_path_factory.mktemp("plans")
    document = {
        "model": {"source": "transformers", "task": "causal-lm", "config": LLAMA},
        "training": {
            "global_batch": 16,
            "sequence": 1024,
            "precision": "bf16",
            "optimizer": "adamw",
            "steps": 1000,
        },
        "cluster": {"device": "h100-sxm-80gb", "devices_per_node": 8, "nodes": 1},
    }
    (made / "job.json").write_text(json.dumps(document))
    return made


OPTIONS = ("--predictor", "roofline", "--framework", "megatron")


def test_plans_are_shown_with_their_reasons(folder: Path) -> None:
    result = run("plan", str(folder / "job.json"), *OPTIONS, "--deadline", "30d")
    assert result.exit_code == 0, result.output
    for words in (
        "plans for megatron: least cost, within 30 d", "the first is the best of all with a chance of",
        "1 before 2:", "one step from the first plan:", "costed",
    ):  # fmt: skip
        assert words in result.output


def test_json_has_all_of_it(folder: Path) -> None:
    result = run(
        "plan", str(folder / "job.json"), *OPTIONS, "--max-devices", "8", "--probes", "--runs", "10", "--json"
    )
    document = json.loads(result.stdout)
    assert document["framework"] == "megatron"
    assert document["plans"]
    assert {"front", "clusters", "curves", "probes", "many_runs", "around", "search"} <= document.keys()
    assert document["many_runs"][0]["runs"] == 10


@pytest.fixture(scope="module")
def page(folder: Path) -> Path:
    """Of plans on two numbers of devices."""
    path = folder / "plans.html"
    words = ("--counts", "4,8", "--html", str(path), "--html-seconds", "0.5", "--top", "3")
    result = run("plan", str(folder / "job.json"), *OPTIONS, *words)
    assert result.exit_code == 0, result.output
    return path


def test_a_page_needs_no_network(page: Path) -> None:
    text = page.read_text()
    assert "The best plans" in text
    assert "https://cdn." not in text
    assert "default-src 'none'" in text


def test_a_page_of_plans_goes_to_each_of_them(page: Path, browser: Browser) -> None:
    browser.resize(1280)
    browser.open(page)
    browser.wait("return document.querySelector('#explorer').dataset.drawn === 'all'")
    shown = browser.text("#plans")
    for words in (
        "plans for megatron",
        "Time against cost and energy",
        "More devices",
        "One step from the first plan",
        "costed",
    ):
        assert words in shown
    assert browser.run("return document.querySelectorAll('#plans svg circle').length") >= 4
    assert "megatron_args.sh" in browser.run("return document.querySelector('textarea.launch').value")
    rows = "document.querySelectorAll('#plans table tbody')[0].rows"
    first = browser.text(".subtitle")
    browser.run(f"{rows}[2].querySelector('button').click()")
    browser.wait(f"return {rows}[2].className === 'chosen'")
    assert browser.text(".subtitle") != first
    assert browser.violations() == []
    assert browser.complaints() == []
    assert browser.requests() == []


def test_a_page_without_a_plan_says_why(folder: Path, browser: Browser) -> None:
    path = folder / "none.html"
    words = (
        "--counts",
        "1",
        "--batch",
        "4096",
        "--sequence",
        "65536",
        "--devices",
        "p4",
        "--html",
        str(path),
    )
    result = run("plan", str(folder / "job.json"), "--predictor", "roofline", "--framework", "fsdp2", *words)
    assert result.exit_code == 1, result.output
    browser.open(path)
    browser.wait("return document.querySelector('h1')")
    assert browser.text("h1") == "No plan was found"
    assert "p4" in browser.text("main")
    assert browser.complaints() == []


def test_each_plan_gets_a_folder_that_launches_it(folder: Path) -> None:
    out = folder / "launch"
    result = run("plan", str(folder / "job.json"), *OPTIONS, "--top", "2", "--out", str(out), "--json")
    assert result.exit_code == 0, result.output
    ranked = json.loads((out / "plans.json").read_text())["plans"]
    assert len(ranked) == 2
    for number, option in enumerate(ranked, start=1):
        own = out / f"plan-{number}"
        for name in (
            "job.toml",
            "launch.sh",
            "megatron_args.sh",
            "slurm.sbatch",
            "benchmark.py",
            "README.md",
        ):
            assert (own / name).is_file(), name
        assert Job.load(own / "job.toml").to_dict() == option["job"]
        launched, planned = foretrain.read_launch(own / "launch.sh").job.plan, Job.load(own / "job.toml").plan
        assert (
            dataclasses.replace(launched, overlap=None) == planned
        )  # what is usual is said in so many words


def test_frameworks_without_launch_files_are_refused_before_the_search(folder: Path) -> None:
    words = ("--framework", "nanotron", "--out", str(folder / "none"))
    result = run("plan", str(folder / "job.json"), *OPTIONS, *words)
    assert result.exit_code == 2
    assert "out: launch files of nanotron are not written" in result.output
    assert not (folder / "none").exists()


def test_fields_are_swept_and_axes_held(folder: Path) -> None:
    result = run(
        "plan", str(folder / "job.json"), *OPTIONS, "--set", "training.global_batch=8,16", "--set", "plan.tensor=1",
        "--json",
    )  # fmt: skip
    rows = json.loads(result.stdout)["sweep"]
    assert [row["set"]["training.global_batch"] for row in rows] == ["8", "16"]
    for row in rows:
        plan = row["plans"][0]["job"]["plan"]
        assert plan.get("tensor", 1) == 1
    shown = run("plan", str(folder / "job.json"), *OPTIONS, "--set", "training.global_batch=8,16")
    assert "training.global_batch" in shown.output


def test_no_plan_within_the_goal_is_an_exit_code(folder: Path) -> None:
    result = run("plan", str(folder / "job.json"), *OPTIONS, "--budget", "$0.000001")
    assert result.exit_code == 1
    assert "none of them keeps within the budget" in result.output


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--deadline", "soon"], "deadline: 'soon'"),
        (["--budget", "much"], "budget: 'much' is not a number of dollars, such as 5000"),
        (["--counts", "8,x"], "counts: '8,x' is not whole numbers with commas between them"),
        (["--devices", "h1000"], "devices: 'h1000' is not one of"),
        (["--fits", "2"], "fits: 2.0 is not a probability between 0 and 1"),
        (["--framework", "keras"], "framework: 'keras' is not one of"),
        (["--set", "plan.tensor=x"], "plan.tensor: 'x'"),
        (["--set", "plan.shard=zero9"], "plan.shard: 'zero9' is not one of"),
        (["--set", "plan.colour=3"], "plan.colour: 'colour' is not a known key"),
        (["--set", "tensor"], "--set: 'tensor' is not of the form section.field=value"),
        (["--runs", "0"], "runs: '0' is not a number of at least 1, or a file of runs"),
        (["--runs", "nowhere.jsonl"], "nowhere.jsonl"),
        (["--objective", "beauty"], "objective"),
        (["--largest", "batch", "--probes"], "probes: goes with the plans of one search, not with largest"),
        (["--out", "job.json/x"], "job.json/x: cannot be written"),
        (["--set", "plan.pipeline=2", "--framework", "fsdp2"], "plan.pipeline: 2: fsdp2 has no pipelines"),
    ],
)
def test_mistakes_are_one_line(folder: Path, words: list[str], message: str) -> None:
    words = [word.replace("job.json", str(folder / "job.json")) for word in words]
    result = run("plan", str(folder / "job.json"), *OPTIONS, *words)
    assert result.exit_code == 2
    lines = [line for line in result.output.splitlines() if line.strip()]
    assert len(lines) == 1
    assert message in lines[0]


def test_predict_suggests(folder: Path) -> None:
    result = run("predict", str(folder / "job.json"), "--predictor", "roofline", "--suggest")
    assert result.exit_code == 0, result.output
    assert "would help" in result.output
    document = json.loads(
        run("predict", str(folder / "job.json"), "--predictor", "roofline", "--suggest", "--json").stdout
    )
    assert all(one["gain"] >= 0.01 for one in document["suggestions"])
