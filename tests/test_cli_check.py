"""The command check: what it says of limits, its exit codes, its comment for a pull request, what it refuses."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from commands import fails, ok, run
from foretrain.estimate import Estimate
from foretrain.planner.checking import LimitVerdict

MODEL = """
import torch

def net(batch, width=16):
    return torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(192, width), torch.nn.ReLU(), torch.nn.Linear(width, 10))
"""
ROOFLINE = ("--predictor", "roofline")


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, shared_cache: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a job of known length and price, one that is wider, and one that says neither."""
    (tmp_path / "tiny.py").write_text(MODEL)
    write(tmp_path / "job.json")
    write(tmp_path / "wide.json", args={"width": 8192}, batch=65536)
    write(tmp_path / "endless.json", steps=None)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def write(
    path: Path, *, args: dict[str, int] | None = None, batch: int = 8, steps: int | None = 1000
) -> None:
    training = {"global_batch": batch, "image": 8, "precision": "fp32", "optimizer": "sgd"}
    document: dict[str, Any] = {
        "model": {"source": "python", "name": "tiny.py:net", "args": args or {}},
        "training": training | ({} if steps is None else {"steps": steps}),
        "cluster": {"device": "a100", "price": 2.0},
    }
    path.write_text(json.dumps(document))


def checked(*words: str) -> dict[str, Any]:
    return dict(json.loads(run("check", *words, *ROOFLINE, "--json").stdout))


def test_one_line_for_each_limit_and_exit_code_0() -> None:
    shown = ok(
        "check",
        "job.json",
        *ROOFLINE,
        "--max-time",
        "1h",
        "--max-cost",
        "$500",
        "--max-memory",
        "70GiB",
        "--fits",
        "0.95",
    )
    lines = shown.splitlines()
    for line, name, limit in zip(
        lines, ("time", "cost", "memory", "fits"), ("1 h", "$500.00", "70 GiB", "79.2 GiB"), strict=False
    ):
        assert line.startswith(f"ok      {name}")
        assert f"limit {limit}" in line
        assert "chance to miss it under 1%" in line
        assert " to " in line
    assert " reserved [" in lines[2]
    assert "(5% allowed)" in lines[3]
    assert lines[4].startswith("A step takes")


def test_exit_code_1_where_a_limit_is_missed() -> None:
    result = run("check", "job.json", *ROOFLINE, "--max-time", "1ms", "--max-cost", "500")
    assert result.exit_code == 1
    assert "missed  time" in result.stdout
    assert "ok      cost" in result.stdout
    assert result.stderr == ""


def test_without_limits_memory_must_be_enough() -> None:
    assert [limit["name"] for limit in checked("job.json")["limits"]] == ["fits"]
    result = run("check", "wide.json", *ROOFLINE, "--batch", "4000000")
    assert result.exit_code == 1
    assert "missed  fits" in result.stdout
    assert "It would fit with" in result.stdout


def test_limits_are_held_by_probability() -> None:
    total = checked("job.json", "--max-time", "1h")["limits"][0]["value"]
    for quantile, chance in (("high", 0.1), ("low", 0.9), ("median", 0.5)):
        limit = f"{total[quantile] * 1e3:.9f}ms"
        document = checked("job.json", "--max-time", limit, "--risk", "0.3")
        assert document["limits"][0]["chance_to_miss"] == pytest.approx(chance, abs=1e-3)
        assert document["holds"] is (chance < 0.3)


@pytest.mark.parametrize(
    ("chance", "allowed", "holds"), [(0.1, 0.1, True), (0.11, 0.1, False), (0.0, 0.01, True)]
)
def test_a_limit_holds_up_to_the_chance_that_is_allowed(chance: float, allowed: float, holds: bool) -> None:
    estimate = Estimate(1.0, 0.9, 1.1)
    verdict = LimitVerdict(name="time", value=estimate, limit=1.0, chance=chance, allowed=allowed)
    assert verdict.holds is holds


def test_against_a_base_it_says_what_changed() -> None:
    shown = ok("check", "wide.json", *ROOFLINE, "--base", "job.json", "--max-cost", "5")
    assert "This job is " in shown
    assert "slower" in shown
    for words in ("time per step: ", "whole training: ", "cost: ", "memory at peak: ", " -> "):
        assert words in shown
    assert "The base and this job take the same time per step" in ok(
        "check", "job.json", *ROOFLINE, "--base", "job.json"
    )
    against = checked("wide.json", "--base", "job.json")["against_base"]
    assert against["fields"]["training.global_batch"] == {"a": 8, "b": 65536}


def test_options_change_the_job_and_not_its_base() -> None:
    against = checked("job.json", "--batch", "16", "--base", "job.json")["against_base"]
    assert against["fields"] == {"training.global_batch": {"a": 8, "b": 16}}


def test_a_comment_for_a_pull_request_is_short() -> None:
    result = run(
        "check",
        "wide.json",
        *ROOFLINE,
        "--base",
        "job.json",
        "--max-time",
        "1ms",
        "--max-cost",
        "5",
        "--markdown",
    )
    assert result.exit_code == 1
    comment = result.stdout
    assert comment.startswith("### Training forecast: missed: time\n\n| ")
    assert "| :x: time |" in comment
    assert "| :white_check_mark: cost |" in comment
    assert "|  | base | this job | change |" in comment
    seen, _, hidden = comment.partition("<details>")
    assert "This job is " in seen
    assert len(seen.splitlines()) < 20
    assert "- `training.global_batch`: `8` → `65536`" in hidden
    assert hidden.rstrip().endswith("</details>")


def test_a_comment_without_a_base_says_what_a_step_is() -> None:
    comment = ok("check", "job.json", *ROOFLINE, "--max-cost", "5", "--markdown")
    assert comment.startswith("### Training forecast: all limits hold\n")
    assert "A step takes" in comment


BAD = """
check -> give a job file, a model or --from
check job.json --max-time soon -> max-time: 'soon' is not a time such as
check job.json --max-time 0s -> max-time: 0.0 is not a finite number above zero
check job.json --max-cost much -> max-cost: 'much' is not a number of dollars
check job.json --max-cost nan -> max-cost: nan is not a finite number above zero
check job.json --max-memory 70miles -> max-memory: '70miles' is not a size such as
check job.json --fits 95 -> fits: 95.0 is not a probability between 0 and 1
check job.json --risk 0 -> risk: 0.0 is not a probability between 0 and 1
check job.json --fits often -> --fits: 'often' is not a valid
check endless.json --max-time 1h -> max-time: of a whole training; give its steps, or its samples and epochs
check endless.json --max-cost 1 -> max-cost: of a whole training; give its steps, or its samples and epochs
check job.json --base missing.toml -> missing.toml: cannot be read
check job.json --base resnet18 -> resnet18: not a job file (.toml or .json)
check job.json --markdown --json -> give --markdown or --json, not both
check missing.toml -> missing.toml: cannot be read
check nosuchmodel -> model: 'nosuchmodel'
check job.json --predictor nope -> predictor: 'nope' is not one of
""".strip().splitlines()


@pytest.mark.parametrize("row", BAD)
def test_bad_input_is_one_line_that_names_the_field(row: str) -> None:
    words, _, said = row.partition(" -> ")
    assert said in fails(*words.split())


def test_a_price_that_is_not_known_is_asked_for(folder: Path) -> None:
    document = json.loads((folder / "job.json").read_text())
    document["cluster"] = {"device": "a30"}
    (folder / "a30.json").write_text(json.dumps(document))
    assert "max-cost: the price of a30 is not known; give price" in fails(
        "check", "a30.json", "--max-cost", "1"
    )


def test_a_predictor_without_memory_has_nothing_to_say_of_it(folder: Path) -> None:
    runs = [run_of(batch, seconds) for batch, seconds in ((8, 0.1), (16, 0.2), (32, 0.4), (64, 0.8))]
    (folder / "runs.jsonl").write_text("\n".join(map(json.dumps, runs)))
    ok("fit", "flops", "runs.jsonl", "--out", "fitted")
    assert "fits: flops does not forecast memory" in fails(
        "check", "job.json", "--predictor", "fitted", "--fits", "0.9"
    )
    assert "ok      time" in ok("check", "job.json", "--predictor", "fitted", "--max-time", "1h")


def run_of(batch: int, seconds: float) -> dict[str, Any]:
    job = json.loads(Path("job.json").read_text())
    job["training"]["global_batch"] = batch
    return {"job": job, "measured": {"step_time_s": seconds}, "provenance": {}}
