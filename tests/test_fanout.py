"""Tests fanning out: the same results in the same order from one process, several, and a Ray cluster."""

from __future__ import annotations

import json
import os
import pickle
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from commands import fails, run, tiny_job
from foretrain import predictors
from foretrain.cli.scale_out import with_address
from foretrain.errors import InputError, UnsupportedJob
from foretrain.evaluate import evaluate
from foretrain.fanout import Crew, WorkerLost, fan_out, ray_tasks
from foretrain.fanout.cluster import connect, found_at
from foretrain.predictors.portable import Portable
from made_up import MODEL
from plugin import PLUGIN
from ray_clusters import wait_for

pytestmark = pytest.mark.xdist_group("ray")  # one cluster at a time

Ways = Callable[[str], dict[str, Any]]


# What is fanned out


def square(number: int) -> int:
    return number * number


def scaled(factor: float, number: int) -> float:
    return factor * number


def process_of(number: int) -> int:
    return os.getpid()


def refuse_seven(number: int) -> int:
    if number == 7:
        raise UnsupportedJob("seven: not supported")
    return number


class Unsendable(Exception):
    """Cannot be made again from its arguments."""

    def __init__(self, one: int, two: int) -> None:
        super().__init__(f"{one} and {two}")


def fail_unsendably(number: int) -> int:
    raise Unsendable(number, number)


def unsendable(number: int) -> Callable[[], int]:
    return lambda: number


def fall_at_five(number: int) -> int:
    if number == 5:
        os.kill(os.getpid(), signal.SIGKILL)
    return number


def fall_once(folder: Path, number: int) -> int:
    if number == 5 and not (folder / "fell").exists():
        (folder / "fell").touch()
        os.kill(os.getpid(), signal.SIGKILL)
    return number


def stay_on_the_victim(shared: tuple[str, Path], number: int) -> int:
    """The victim holds on to what it gets until it is killed; the others wait until it has got something."""
    import ray

    victim, folder = shared
    if ray.get_runtime_context().get_node_id() == victim:
        (folder / "reached").touch()
        time.sleep(600)
    until = time.monotonic() + 300
    while not (folder / "reached").exists() and time.monotonic() < until:
        time.sleep(0.05)
    return number


# Where


@pytest.fixture(scope="module")
def connection(ray_cluster: Any, cache: Path) -> Iterator[str]:
    """One that lasts over several tests, as one that is made anew starts new workers, which learn of the
    cache when it is made."""
    import ray

    connect(ray_cluster.address)
    yield ray_cluster.address
    assert ray.is_initialized()
    ray.shutdown()


@pytest.fixture
def ways(request: pytest.FixtureRequest) -> Ways:
    """The arguments for each way to fan out."""
    return lambda name: (
        {"here": {}, "processes": {"processes": 2}}[name]
        if name != "ray"
        else {"ray": request.getfixturevalue("connection")}
    )


EVERYWHERE = pytest.mark.parametrize("way", ["here", "processes", "ray"])
ELSEWHERE = pytest.mark.parametrize("way", ["processes", "ray"])


# The function


def test_a_connection_is_made_and_ended(ray_cluster: Any) -> None:
    import ray

    assert list(fan_out(scaled, [1, 2, 3], shared=0.5, ray=ray_cluster.address)) == [0.5, 1.0, 1.5]
    assert not ray.is_initialized()


@EVERYWHERE
def test_results_come_in_the_order_of_the_items(way: str, ways: Ways) -> None:
    heard: list[tuple[int, int]] = []
    numbers = range(3000)
    results = fan_out(square, numbers, progress=lambda done, total: heard.append((done, total)), **ways(way))
    assert list(results) == [number * number for number in numbers]
    assert heard[-1] == (3000, 3000)
    assert heard == sorted(heard)


@EVERYWHERE
def test_rounds_do_not_mix(way: str, ways: Ways) -> None:
    with Crew(square, **ways(way)) as crew:
        left_off = crew.run(range(50))
        assert next(left_off) == 0
        del left_off
        assert list(crew.run([3, 4, 5, 6])) == [9, 16, 25, 36]


def test_workers_stay_from_round_to_round() -> None:
    with Crew(process_of, processes=2) as crew:
        assert len({process for _ in range(3) for process in crew.run(range(4))} - {os.getpid()}) <= 2


@EVERYWHERE
def test_nothing_to_do_is_nothing_done(way: str, ways: Ways) -> None:
    assert list(fan_out(square, [], **ways(way))) == []


@EVERYWHERE
def test_an_error_comes_with_its_type_in_its_turn(way: str, ways: Ways) -> None:
    results = fan_out(refuse_seven, range(20), **ways(way))
    assert [next(results) for _ in range(7)] == list(range(7))
    with pytest.raises(UnsupportedJob, match="seven: not supported"):
        next(results)


@ELSEWHERE
def test_what_cannot_be_sent_back_is_an_error_that_says_so(way: str, ways: Ways) -> None:
    with pytest.raises(RuntimeError, match="Unsendable: 0 and 0"):
        list(fan_out(fail_unsendably, range(2), **ways(way)))
    with pytest.raises((AttributeError, pickle.PicklingError), match="pickle"):
        list(fan_out(unsendable, range(2), **ways(way)))


@ELSEWHERE
def test_a_worker_that_dies_once_costs_nothing(way: str, ways: Ways, tmp_path: Path) -> None:
    assert list(fan_out(fall_once, range(12), shared=tmp_path, **ways(way))) == list(range(12))
    assert (tmp_path / "fell").exists()


@ELSEWHERE
def test_an_item_that_kills_every_worker_is_given_up(way: str, ways: Ways) -> None:
    answers = list(
        fan_out(fall_at_five, range(12), lost=lambda why: -1 if "lost 3 times" in why else -2, **ways(way))
    )
    assert answers == [0, 1, 2, 3, 4, -1, *range(6, 12)]


def test_an_item_that_kills_every_worker_is_one_line() -> None:
    with pytest.raises(
        WorkerLost,
        match=r"item 6 of 12: its worker was lost 3 times \(its "
        r"process was ended by SIGKILL; out of memory\?\)",
    ):
        list(fan_out(fall_at_five, range(12), processes=2))


def test_tasks_that_end_by_themselves_are_not_cancelled(
    connection: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ray may end the process that cancels a task which is just ending."""
    import ray

    cancelled: list[Any] = []
    monkeypatch.setattr(ray, "cancel", lambda task, **how: cancelled.append(task))
    monkeypatch.setattr(ray_tasks, "_LEFT_S", 300.0)
    with pytest.raises(UnsupportedJob, match="seven: not supported"):
        list(fan_out(refuse_seven, range(20), ray=connection))
    assert not cancelled


def test_a_node_dies_half_way(ray_cluster: Any, connection: str, tmp_path: Path) -> None:
    victim = ray_cluster.add_node(num_cpus=1)
    killed: list[int] = []

    def kill(done: int, total: int) -> None:
        if not killed:
            wait_for(tmp_path / "reached")
            ray_cluster.remove_node(victim, allow_graceful=False)
            killed.append(done)

    results = fan_out(
        stay_on_the_victim, range(20), shared=(victim.node_id, tmp_path), ray=connection, progress=kill
    )
    assert list(results) == list(range(20))
    assert killed[0] < 20


def test_processes_must_be_some() -> None:
    with pytest.raises(InputError, match="processes: 0 is not a whole number of at least 1"):
        fan_out(square, [1], processes=0)


# The command


@pytest.fixture
def jobs(tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file of jobs, of which some fail, in the folder where commands run."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tiny.py").write_text(MODEL)
    records = [
        tiny_job(cluster={"device": device})
        for device in ("a100", "t4", "h100", "v100", "h101", "l4", "a10g", "rtx-4090")
    ]
    records.insert(3, tiny_job(model={"source": "python", "name": "gone.py:net"}))
    write_lines(tmp_path / "jobs.jsonl", records)
    return tmp_path / "jobs.jsonl"


def write_lines(path: Path, records: list[dict[str, Any]]) -> None:
    path.write_text("".join(f"{json.dumps(record)}\n" for record in records))


@ELSEWHERE
def test_predict_gives_the_same_file(way: str, ways: Ways, jobs: Path) -> None:
    words = [part for name, value in ways(way).items() for part in (f"--{name}", str(value))]
    for out, how in (("here.jsonl", []), ("there.jsonl", words)):
        result = run("predict", "--jobs", "jobs.jsonl", "--out", out, *how)
        assert result.exit_code == 1
        assert "9 jobs, 2 failed" in result.stderr
    here = Path("here.jsonl").read_text()
    assert Path("there.jsonl").read_text() == here
    answers = [json.loads(line) for line in here.splitlines()]
    assert [answer["line"] for answer in answers if "error" in answer] == [4, 6]
    assert "gone.py" in answers[3]["error"]


@ELSEWHERE
def test_evaluate_gives_the_same_figures(way: str, ways: Ways, jobs: Path) -> None:
    """With what comes with foretrain, and with a file that only this process has read, learned anew for each
    fold."""
    Path("mine.py").write_text(PLUGIN)
    batches = [tiny_job(training={"global_batch": 2**i, "image": 8}) for i in range(6)]
    write_lines(
        jobs, [{"job": one, "measured": {"step_time_s": 0.1 + 0.1 * i}} for i, one in enumerate(batches)]
    )
    options: dict[str, Any] = {
        "predictors": ["mine.py:PerSample", "deletepop"],
        "split": "random",
        "folds": 2,
    }
    assert evaluate([jobs], **options, **ways(way)) == evaluate([jobs], **options)


def test_a_saved_predictor_is_carried_along(tmp_path: Path) -> None:
    predictors.get("deletepop").save(tmp_path / "mine")
    sent = pickle.loads(pickle.dumps(Portable.of(str(tmp_path / "mine"))))
    (tmp_path / "mine").rename(tmp_path / "gone")
    assert sent.predictor.name == "deletepop"
    assert sent.predictor is sent.predictor


def test_an_address_where_nobody_answers_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("ray", reason="Ray is not installed")
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    with pytest.raises(
        InputError, match=r"ray: no Ray cluster answers at '127.0.0.1:1' \(Connection refused\)"
    ):
        connect("127.0.0.1:1")
    words = ("--models", "resnet18", "--batch", "8", "--image", "32")
    assert "ray: no Ray cluster answers at 'auto'" in fails(
        "measure", "campaign", "-o", str(tmp_path / "runs.jsonl"), *words, "--ray", "auto"
    )


def test_without_an_address_it_is_the_cluster_that_runs_or_one_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    assert found_at("any") == "local"
    (tmp_path / "ray").mkdir()
    (tmp_path / "ray" / "ray_current_cluster").write_text("127.0.0.1:1")
    assert found_at("auto") == "127.0.0.1:1"
    assert found_at("any") == "local"
    monkeypatch.setenv("RAY_ADDRESS", "head:6379")
    assert found_at("any") == found_at("auto") == "head:6379"


def test_scaling_out_is_for_many_jobs() -> None:
    for words in (["--ray"], ["--processes", "2"]):
        assert "are for --jobs" in run("predict", "job.toml", *words).stderr


def test_the_address_may_be_left_out() -> None:
    assert with_address(["--jobs", "x", "--ray"]) == ["--jobs", "x", "--ray=any"]
    assert with_address(["--ray", "ray://head:10001", "x"]) == ["--ray", "ray://head:10001", "x"]
    assert with_address(["--ray", "--", "head:1"]) == ["--ray=any", "--", "head:1"]
    assert with_address(["--ray=head:1", "x", "--", "--ray"]) == ["--ray=head:1", "x", "--", "--ray"]
