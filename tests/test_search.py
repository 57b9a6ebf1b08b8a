"""Tests the search of advise --search: what it measures next, when it ends, and that the runs alone tell where it stands."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import commands
from foretrain.errors import InputError
from foretrain.job import Job
from foretrain.predictors.cherrypick import configuration
from foretrain.run import Run
from foretrain.search import Turn, configured, next_turn, tried_by
from scaled_runs import job, run, step_s

WORKERS, BATCHES, CORES = (1, 2, 4, 6, 8, 16), (8, 32), (1, 2)
CANDIDATES = [
    job(workers, batch, cores, samples=96_000, epochs=1)
    for workers in WORKERS
    for batch in BATCHES
    for cores in CORES
]


def total_s(one: Job) -> float:
    steps = one.workload.training.total_steps
    assert steps is not None
    return step_s(one) * steps


def price(one: Job) -> float:
    return total_s(one) * (one.cluster.price_per_hour or 0.0)


def measured(one: Job) -> Run:
    """Of less data than the candidates have, as people measure."""
    training = one.workload.training
    batch = training.global_batch // one.cluster.world_size
    return run(job(one.cluster.world_size, batch, one.cluster.device.cores or 1, samples=960))


def searched(deadline_s: float, runs: list[Run], **options: Any) -> tuple[Turn, list[Run]]:
    turn = next_turn(CANDIDATES, runs, deadline_s, **options)
    while turn.following is not None:
        runs = [*runs, measured(turn.following)]
        turn = next_turn(CANDIDATES, runs, deadline_s, **options)
    return turn, runs


DEADLINE_S = float(np.quantile([total_s(one) for one in CANDIDATES], 0.4))


def test_a_search_finds_a_cheap_configuration_in_time_and_ends_early() -> None:
    turn, runs = searched(DEADLINE_S, [])
    assert 6 <= len(runs) < len(CANDIDATES) / 2
    assert "promises 10% less" in turn.stopped
    cheapest = min(price(one) for one in CANDIDATES if total_s(one) <= DEADLINE_S)
    assert turn.best is not None
    assert turn.best.in_time
    assert price(turn.best.job) <= 1.25 * cheapest


def test_the_runs_alone_tell_where_a_search_stands() -> None:
    whole, runs = searched(DEADLINE_S, [])
    halfway = next_turn(CANDIDATES, runs[:4], DEADLINE_S)
    assert halfway.following is not None
    assert configured(halfway.following) == configured(measured(halfway.following).job)
    again, resumed = searched(DEADLINE_S, runs[:4])
    assert [one.job for one in resumed] == [one.job for one in runs]
    assert again == whole


def test_a_smaller_promise_is_followed_longer() -> None:
    short, long = (len(searched(DEADLINE_S, [], improvement=share)[1]) for share in (0.5, 0.0))
    assert short == 6
    assert long > short


def test_the_first_runs_lie_far_apart() -> None:
    _, runs = searched(DEADLINE_S, [], improvement=0.99, least=3)
    rows = np.array([configuration(one.job) for one in runs[:3]])
    assert len(np.unique(rows[:, 0])) >= 2
    assert len({configured(one.job) for one in runs[:3]}) == 3


def test_while_nothing_is_in_time_no_share_is_promised() -> None:
    turn = next_turn(CANDIDATES, [measured(one) for one in CANDIDATES[:3]], 1.0)
    assert turn.best is None
    assert turn.following is not None
    assert turn.promise is None


def test_what_failed_is_not_proposed_again() -> None:
    first = next_turn(CANDIDATES, [], DEADLINE_S).following
    assert first is not None
    other = next_turn(CANDIDATES, [], DEADLINE_S, failed={configured(first)}).following
    assert other is not None
    assert configured(other) != configured(first)
    with pytest.raises(InputError, match="candidates: there are none"):
        next_turn(CANDIDATES[:1], [], DEADLINE_S, failed={configured(CANDIDATES[0])})


def test_repeated_runs_of_a_configuration_count_by_their_median() -> None:
    one = CANDIDATES[0]
    times = [Run(job=measured(one).job, measured={"step_time_s": value}) for value in (0.1, 0.2, 9.0)]
    (tried,) = tried_by(CANDIDATES, times, 1e9)
    assert tried.runs == 3
    assert tried.time_s == pytest.approx(0.2 * (one.workload.training.total_steps or 0))
    rate = one.workload.training.global_batch / 0.2
    (told,) = tried_by(CANDIDATES, [Run(job=times[0].job, measured={"samples_per_s": rate})], 1e9)
    assert told.time_s == pytest.approx(tried.time_s)


@pytest.mark.parametrize(
    "other",
    [
        {"sequence": 32},
        {"optimizer": "adamw"},
        {"precision": "bf16"},
        {"name": "model.py:other"},
        {"plan": {"data": 2, "shard": "zero3"}},
        {"plan": {"data": 2, "micro_batch": 4}},
    ],
)
def test_runs_of_another_training_tell_nothing_of_a_candidate(other: dict[str, Any]) -> None:
    wanted = job(2, samples=1000, epochs=3)
    assert not tried_by([wanted], [run(job(2, samples=1000, **other))], 1e9)
    assert configured(job(2, samples=1000, **other)) != configured(wanted)
    assert len(tried_by([wanted], [run(job(2, samples=50))], 1e9)) == 1


def on_node(node: str | None, step_time_s: float = 0.1) -> Run:
    named = {} if node is None else {"node": node}
    cluster = {"device": "v100-sxm-32gb", "devices_per_node": 2, "nodes": 1, **named}
    return run(
        Job.read({**job(2, samples=1000, epochs=1).to_dict(), "cluster": cluster}), step_time_s=step_time_s
    )


def test_machines_of_one_device_are_told_apart_where_runs_name_them() -> None:
    aws, dgx, unnamed = on_node("p3dn.24xlarge", 0.1), on_node("dgx-1-v100", 0.4), on_node(None, 0.2)
    wanted = [aws.job, dgx.job]

    def steps_s(*runs: Run) -> list[tuple[str, float, int]]:
        rows = []
        for one in tried_by(wanted, runs, 1e9):
            node, steps = one.job.cluster.node, one.job.workload.training.total_steps
            assert node is not None
            assert steps is not None
            rows.append((node.name, round(one.time_s / steps, 6), one.runs))
        return rows

    assert steps_s(aws, dgx) == [("p3dn.24xlarge", 0.1, 1), ("dgx-1-v100", 0.4, 1)]
    assert steps_s(aws) == [("p3dn.24xlarge", 0.1, 1)]
    assert next_turn(wanted, [aws], 1e9).following is dgx.job
    assert steps_s(aws, unnamed) == [("p3dn.24xlarge", 0.1, 1), ("dgx-1-v100", 0.2, 1)]


def test_a_share_that_is_none_is_refused() -> None:
    with pytest.raises(InputError, match=r"improvement: 1.5"):
        next_turn(CANDIDATES, [], DEADLINE_S, improvement=1.5)


def test_a_search_is_of_one_size_of_the_data() -> None:
    several = [job(workers, samples=samples) for workers in (1, 2) for samples in (1000, 100_000)]
    with pytest.raises(InputError, match=r"^samples: '1000,100000' is not one size of the data"):
        next_turn(several, [run(job(1, samples=1000))], 1e9)


# The command


@pytest.fixture
def runs_file(tmp_path: Path) -> Path:
    (tmp_path / "model.py").write_text("def net(batch): raise RuntimeError('not needed')")
    path = tmp_path / "runs.jsonl"
    some = [run(job(workers, 8, cores, samples=960)) for workers, cores in ((1, 1), (2, 1), (8, 2))]
    path.write_text("".join(json.dumps(one.to_dict()) + "\n" for one in some))
    return path


def asked(path: Path, *words: str) -> list[str]:
    data = ["--samples", "96000", "--epochs", "1", "--workers", "1,2,4,8", "--cores", "1,2"]
    return ["advise", str(path), "--search", "--deadline", "1h", *data, *words]


def test_the_command_proposes_a_run_and_writes_it(runs_file: Path, tmp_path: Path) -> None:
    following = tmp_path / "next.jsonl"
    shown = commands.run(*asked(runs_file, "--next", str(following)))
    assert shown.exit_code == 0, shown.output
    assert "next: " in shown.stderr
    assert f"foretrain measure campaign {following} -o {runs_file}" in shown.stderr
    proposed = json.loads(following.read_text())
    answer = json.loads(commands.ok(*asked(runs_file, "--json")))
    assert answer["next"]["plan"] == proposed["plan"]
    assert answer["stopped"] == ""
    assert len(answer["tried"]) == 3


def test_the_command_says_why_it_goes_on_where_little_is_promised(runs_file: Path) -> None:
    shown = commands.run(*asked(runs_file, "--improvement", "0.99"))
    assert shown.exit_code == 0, shown.output
    words = " ".join(shown.stderr.split())
    assert "a search ends after 6 configurations at the earliest, and 3 of 8 were measured" in words
    assert "at the earliest" not in commands.run(*asked(runs_file, "--improvement", "0")).stderr


def test_what_failed_of_another_training_takes_no_candidate(runs_file: Path) -> None:
    failures = runs_file.with_name("runs.failures.jsonl")

    def fail(one: Job) -> None:
        with failures.open("a") as file:
            file.write(json.dumps({"job": one.to_dict(), "error": "out of memory"}) + "\n")

    fail(job(4, 8, 2, name="model.py:other"))
    fail(job(4, 8, 2, sequence=32))
    assert json.loads(commands.ok(*asked(runs_file, "--json")))["candidates"] == 8
    fail(job(4, 8, 2, name="./model.py:net"))
    assert json.loads(commands.ok(*asked(runs_file, "--json")))["candidates"] == 7


def test_runs_in_several_folders_are_of_one_model(runs_file: Path, tmp_path: Path) -> None:
    folder = tmp_path / "more"
    folder.mkdir()
    more = folder / "runs.jsonl"
    more.write_text(json.dumps(run(job(4, 8, 1, name="../model.py:net", samples=960)).to_dict()) + "\n")
    told = json.loads(commands.ok(*asked(runs_file, str(more), "--json")))
    assert len(told["tried"]) == 4


def test_a_search_can_start_without_runs_and_measure_by_itself(tmp_path: Path) -> None:
    (tmp_path / "tiny.py").write_text(
        "import torch\n\ndef net(batch):\n    return torch.nn.Linear(8, 2), torch.randn(batch, 8)\n"
    )
    start = tmp_path / "job.toml"
    start.write_text(
        '[model]\nsource = "python"\nname = "tiny.py:net"\n[training]\nglobal_batch = 4\nsamples = 16\n'
        '[cluster]\ndevice = "cpu"\ncores_per_device = 1\n'
    )
    path = tmp_path / "runs.jsonl"
    words = ["advise", str(path), "--search", "--deadline", "1h", "--job", str(start), "--workers", "1"]
    asked_first = commands.run(*words)
    assert "next: 1 worker on" in asked_first.stderr
    assert "data: 16 samples an epoch, as the job has it" in asked_first.stderr
    shown = commands.run(*words, "--measure")
    assert shown.exit_code == 0, shown.output
    assert "every configuration was measured" in shown.stderr
    assert len(path.read_text().splitlines()) == 1


def test_a_search_starts_from_its_job_where_the_runs_are_of_others(runs_file: Path) -> None:
    start = runs_file.with_name("job.json")

    def told(one: Job) -> dict[str, Any]:
        start.write_text(json.dumps(one.to_dict()))
        found: dict[str, Any] = json.loads(commands.ok(*asked(runs_file, "--job", str(start), "--json")))
        return found

    other = told(job(1, 4, name="model.py:other"))
    assert other["tried"] == []
    assert other["next"]["model"]["name"] == "model.py:other"
    longer = told(job(1, 4, sequence=32))
    assert longer["tried"] == []
    assert longer["next"]["training"]["sequence"] == 32
    same = told(job(1, 4))
    assert len(same["tried"]) == 3
    assert same["next"]["training"]["global_batch"] == 8 * same["next"]["plan"]["data"]


def test_the_model_of_a_search_is_that_of_its_job(runs_file: Path) -> None:
    start = runs_file.with_name("job.json")
    start.write_text(json.dumps(job().to_dict()))
    shown = commands.run(*asked(runs_file, "--job", str(start), "--model", "resnet18"))
    assert shown.exit_code == 2
    assert "--model: 'resnet18' is not the model of --job, model.py:net" in shown.stderr


def test_options_of_a_search_need_one(runs_file: Path) -> None:
    assert commands.run("advise", str(runs_file), "--deadline", "1h", "--measure").exit_code == 2
