"""Every long command ends on SIGTERM as on Ctrl-C: at once, in one line, with what is done kept and no process
left."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

import foretrain
from commands import PATIENCE_S, begin, run
from foretrain import interrupts
from foretrain.fanout.cluster import connect
from foretrain.interrupts import ended_as_interrupted, exit_code, is_interrupt
from servers import serving

TINY = """
import os, pathlib, time

def net(batch):
    import torch
    return torch.nn.Linear(16, 4), torch.randn(batch, 16)

def asleep(batch):
    sleep()

def sleep():
    here = pathlib.Path(__file__).parent
    (here / f"pid-{os.getpid()}").touch()
    (here / "asleep").touch()
    time.sleep(3600)
"""
OWN = """
import pathlib, sys
sys.path.insert(0, str(pathlib.Path(__file__).parent))
from foretrain.predictors.base import Predictor
from foretrain.scheduling.policies.base import Policy

class Sleepy(Predictor):
    name, quantities, learns = "sleepy", frozenset({"step_time_s"}), True

    def fit(self, runs):
        from tiny import sleep
        sleep()

    def predict(self, job):
        from tiny import sleep
        sleep()

class Slow(Policy):
    name = "slow"

    def decide(self, cluster):
        from tiny import sleep
        sleep()
"""
SCHEDULE = ["--generate", "jobs=5,gap=30s,median=20min,spread=1", "--cluster", "2x2xv100", "--seeds", "2"]
CAMPAIGN = ["--models", "tiny.py:net,tiny.py:asleep", "--workers", "2", "--batch", "16", "--seconds", "0.1"]
COMMANDS = {
    "predict": ["predict", "--jobs", "jobs.jsonl", "--out", "out.jsonl"],
    "predict in processes": ["predict", "--jobs", "jobs.jsonl", "--out", "out.jsonl", "--processes", "2"],
    "evaluate": ["evaluate", "runs.jsonl", "--predictor", "own.py:Sleepy", "--processes", "2"],
    "fit": ["fit", "own.py:Sleepy", "runs.jsonl", "--out", "fitted"],
    "measure steps": ["measure", "steps", "jobs.jsonl", "-o", "out.jsonl", "--device", "cpu"],
    "measure campaign": ["measure", "campaign", *CAMPAIGN, "-o", "out.jsonl"],
    "schedule": ["schedule", *SCHEDULE, "--policy", "own.py:Slow", "--processes", "2"],
}
SAID = {
    "predict": "interrupted: 1 of 3 jobs done, in out.jsonl",
    "predict in processes": "of 3 jobs done, in out.jsonl",
    **dict.fromkeys(
        ("measure steps", "measure campaign"),
        "interrupted: what was measured is in out.jsonl; the same command goes on from there",
    ),
}
CTRL_C = ("predict", "predict in processes", "measure campaign")


def job(name: str) -> dict[str, object]:
    return {
        "model": {"source": "python", "name": f"tiny.py:{name}"},
        "training": {"global_batch": 8},
        "cluster": {"device": "cpu", "cores_per_device": 1},
    }


@pytest.fixture(scope="module")
def graphs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The cache of all commands, of which the first traces the model."""
    return tmp_path_factory.mktemp("graphs")


@pytest.fixture
def folder(tmp_path: Path, graphs: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "tiny.py").write_text(TINY)
    (tmp_path / "own.py").write_text(OWN)
    jobs = [job("net"), job("asleep"), job("net")]
    runs = [{"job": job("net"), "measured": {"step_time_s": 0.1}} for _ in range(4)]
    for name, lines in (("jobs", jobs), ("runs", runs)):
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    monkeypatch.setenv("FORETRAIN_CACHE", str(graphs))
    monkeypatch.setenv("PYTHONPATH", str(Path(foretrain.__file__).parents[1]))
    monkeypatch.chdir(tmp_path)
    return tmp_path


@contextlib.contextmanager
def running(*words: str, sigint: str = "SIG_DFL") -> Iterator[subprocess.Popen[str]]:
    """The command, ended with its whole group whatever the test finds."""
    process = begin(*words, sigint=sigint)
    try:
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        assert process.stderr is not None
        process.stderr.close()


def wait_until(path: Path, process: subprocess.Popen[str]) -> None:
    """Until the file is there and holds something to interrupt; a command that ends before has failed."""
    until = time.monotonic() + PATIENCE_S
    while not path.exists():
        assert process.poll() is None, process.communicate()[1]
        assert time.monotonic() < until
        time.sleep(0.02)


def assert_gone(folder: Path, group: int) -> None:
    """Neither the command's group nor a worker that went to sleep, wherever it runs, is left."""
    until = time.monotonic() + PATIENCE_S
    while _group_is_there(group) or any(map(_is_there, folder.glob("pid-*"))):
        assert time.monotonic() < until, "processes are left"
        time.sleep(0.05)


def _group_is_there(group: int) -> bool:
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True


def _is_there(marker: Path) -> bool:
    status = Path(f"/proc/{marker.name.removeprefix('pid-')}/status")
    try:
        return "State:\tZ" not in status.read_text()
    except OSError:
        return False


@pytest.mark.parametrize(
    ("command", "number", "sigint"),
    [
        *((command, signal.SIGTERM, "SIG_IGN") for command in COMMANDS),
        *((command, signal.SIGINT, "SIG_DFL") for command in CTRL_C),
    ],
)
def test_it_ends_and_keeps_what_is_done(
    folder: Path, command: str, number: signal.Signals, sigint: str
) -> None:
    with running(*COMMANDS[command], sigint=sigint) as process:
        wait_until(folder / "asleep", process)
        os.killpg(process.pid, number)
        _, said = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 128 + number, said
    assert SAID.get(command, "foretrain: interrupted") in said
    assert "Traceback" not in said
    assert_gone(folder, process.pid)
    if command in ("predict", "measure steps", "measure campaign"):
        assert len((folder / "out.jsonl").read_text().splitlines()) == 1


def test_operators_are_kept_too(folder: Path) -> None:
    shapes = [[[[rows, 64], "float32", None]] for rows in range(1, 4000)]
    lines = [
        {"name": "relu", "overload": "default", "inputs": shape, "args": {"self": "%0"}, "phase": "forward"}
        for shape in shapes
    ]
    (folder / "list.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    with running("measure", "ops", "list.jsonl", "-o", "ops.jsonl", "--device", "cpu") as process:
        wait_until(folder / "ops.jsonl", process)
        while not (folder / "ops.jsonl").stat().st_size:
            assert process.poll() is None, process.communicate()[1]
        process.send_signal(signal.SIGTERM)
        _, said = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 143
    assert "interrupted: what was measured is in ops.jsonl" in said
    assert 1 <= len((folder / "ops.jsonl").read_text().splitlines()) < len(lines)


def test_an_ignored_sigint_stays_ignored(folder: Path) -> None:
    with running(*COMMANDS["predict"], sigint="SIG_IGN") as process:
        wait_until(folder / "asleep", process)
        process.send_signal(signal.SIGINT)
        process.send_signal(signal.SIGTERM)
        _, said = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 143, said


@pytest.mark.parametrize("gap_s", [0.0, 0.01, 0.3])
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_server_that_is_told_twice_to_end_says_so_once(
    folder: Path, gap_s: float, number: signal.Signals, code: int
) -> None:
    with serving(str(folder / "runs.db")) as server:
        assert server.ask("GET", "/health").status == 200
        server.process.send_signal(number)
        time.sleep(gap_s)
        server.process.send_signal(number)
        _, said = server.process.communicate(timeout=PATIENCE_S)
        assert (server.process.returncode, said) == (code, "foretrain: interrupted\n")


# In this process


@pytest.fixture
def plain_sigterm() -> Iterator[None]:
    """What libraries of other tests left behind must not answer, nor the default end this process."""
    before = signal.signal(signal.SIGTERM, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGTERM, before)


@pytest.mark.usefixtures("plain_sigterm")
def test_two_signals_at_once_are_one_request(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = SimpleNamespace(now_s=100.0)
    monkeypatch.setattr(interrupts, "time", SimpleNamespace(monotonic=lambda: clock.now_s))
    cleaned = list[bool]()

    def interrupted() -> None:
        try:
            os.kill(os.getpid(), signal.SIGTERM)
        finally:
            clock.now_s += 0.9
            os.kill(os.getpid(), signal.SIGTERM)
            cleaned.append(True)
            clock.now_s += 1.1
            with pytest.raises(KeyboardInterrupt):
                os.kill(os.getpid(), signal.SIGTERM)

    with ended_as_interrupted(), pytest.raises(KeyboardInterrupt):
        interrupted()
    assert cleaned
    assert exit_code() == 143
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def test_other_answers_to_sigterm_are_left_alone() -> None:
    heard = list[int]()
    before = signal.signal(signal.SIGTERM, lambda number, _: heard.append(number))
    try:
        with ended_as_interrupted():
            os.kill(os.getpid(), signal.SIGTERM)
        assert heard == [signal.SIGTERM]
    finally:
        signal.signal(signal.SIGTERM, before)


@pytest.mark.usefixtures("plain_sigterm")
def test_ray_which_takes_sigterm_gives_it_back(monkeypatch: pytest.MonkeyPatch) -> None:
    ray = pytest.importorskip("ray")
    monkeypatch.setattr(ray, "init", lambda **_: signal.signal(signal.SIGTERM, lambda *_: None))
    with ended_as_interrupted():
        ours = signal.getsignal(signal.SIGTERM)
        connect("local")
        assert signal.getsignal(signal.SIGTERM) is ours


def test_ctrl_c_that_a_library_wraps_is_an_interrupt(monkeypatch: pytest.MonkeyPatch) -> None:
    def wrapping(*_: object) -> None:
        try:
            raise KeyboardInterrupt
        except KeyboardInterrupt as error:
            raise RuntimeError("Error calling __set_name__ on 'Field' instance") from error

    monkeypatch.setattr("foretrain.predictors.get", wrapping)
    result = run("predict", "resnet18")
    assert (result.exit_code, result.stderr) == (130, "foretrain: interrupted\n")
    assert not is_interrupt(RuntimeError("a bug"))


def test_errors_that_cause_one_another_are_no_interrupt() -> None:
    one, other = RuntimeError("one"), RuntimeError("other")
    one.__cause__, other.__cause__ = other, one
    assert not is_interrupt(one)
