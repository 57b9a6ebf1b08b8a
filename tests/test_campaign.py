"""Tests campaigns: the grid and its order, real runs of small models, and what failures leave."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner, Result

from commands import PATIENCE_S
from foretrain.api import make_job
from foretrain.cli import app
from foretrain.errors import InputError
from foretrain.measure import campaign as campaigns
from foretrain.measure.backends import Backend, CellFailed, Local, backend
from foretrain.measure.campaign import (
    Cell,
    Grid,
    cells,
    read_campaign,
    read_grid,
    run_campaign,
    spread,
)
from foretrain.measure.resources import FIGURES, RESOURCES
from foretrain.measure.summary import Summary
from foretrain.measure.tasks import Protocol, WorkerTask, shards
from foretrain.run import read_runs

MODELS = '''
import os, pathlib, signal, time
import torch
import torch.distributed as dist

HERE = pathlib.Path(__file__).parent

def net(batch):
    """Weights alike and data unlike on all workers; every loss is written down."""
    torch.manual_seed(0)
    module = torch.nn.Sequential(torch.nn.Linear(16, 8), torch.nn.Tanh(), torch.nn.Linear(8, 4))
    torch.manual_seed(1 + dist.get_rank())
    inputs, targets = torch.randn(batch, 16), torch.randint(4, (batch,))
    log = HERE / f"loss-{dist.get_world_size()}-{dist.get_rank()}"
    def loss(output):
        value = torch.nn.functional.cross_entropy(output, targets)
        with log.open("a") as file:
            file.write(f"{value.item()}\\n")
        return value
    return module, (inputs,), loss

class Acting(torch.nn.Module):
    """Does something in the third forward pass of the second worker."""

    def __init__(self, action):
        super().__init__()
        self.layer, self.calls, self.action = torch.nn.Linear(16, 4), 0, action

    def forward(self, x):
        self.calls += 1
        if self.calls == 3 and dist.get_rank() == dist.get_world_size() - 1:
            self.action()
        return self.layer(x)

def boom():
    raise RuntimeError("boom at step 2")

def wait():
    (HERE / "pid").write_text(str(os.getpid()))
    time.sleep(600)

def dies(batch):
    return Acting(boom), torch.randn(batch, 16)

def killed(batch):
    return Acting(lambda: os.kill(os.getpid(), signal.SIGKILL)), torch.randn(batch, 16)

def hangs(batch):
    return Acting(wait), torch.randn(batch, 16)
'''
QUICK = Protocol(seconds=0.3, min_steps=3, period_s=0.02)


def run(*words: str) -> Result:
    return CliRunner().invoke(app, ["measure", "campaign", *words])


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("campaign")
    (path / "tiny.py").write_text(MODELS)
    return path


@pytest.fixture(scope="module")
def first(folder: Path) -> Result:
    """Two workers, both ways to synchronise, with a model that works and one whose second worker dies."""
    (folder / "grid.toml").write_text(
        """
        workers = 2
        batch_per_worker = 8
        samples = 64
        [[grid]]
        models = ["tiny.py:net"]
        sync = ["allreduce", "ps"]
        [[grid]]
        models = ["tiny.py:dies"]
        """
    )
    return run(
        str(folder / "grid.toml"), "--out", str(folder / "runs.jsonl"), "--seconds", "0.3", "--period", "20ms"
    )


class Staying(Local):
    """Forks the workers of several campaigns from one process."""

    def __exit__(self, *_: object) -> None:
        return None


@pytest.fixture(scope="module")
def local() -> Iterator[Local]:
    made = Staying()
    yield made
    Local.__exit__(made)


def small(folder: Path, *models: str, home: Path | None = None, **dimensions: Any) -> list[Cell]:
    grid = read_grid(
        {"models": [f"tiny.py:{model}" for model in models], "batch": 16, "workers": 2, **dimensions}
    )
    return cells([grid], make_job, base=folder, home=home or folder)


# Real runs


def test_a_campaign_goes_on_when_a_worker_dies(first: Result, folder: Path) -> None:
    assert first.exit_code == 1, first.output
    assert "2 measured, 1 failed, 0 known before, 0 left" in first.stderr
    failure = json.loads((folder / "runs.failures.jsonl").read_text())
    assert failure["error"] == "process 1: RuntimeError: boom at step 2"
    assert failure["job"]["model"]["name"] == "tiny.py:dies"


def test_runs_carry_times_and_resources(first: Result, folder: Path) -> None:
    runs = {run.provenance["sync"]: run for _, run in read_runs(folder / "runs.jsonl")}
    assert set(runs) == {"allreduce", "ps"}
    for one in runs.values():
        measured, about = one.measured, one.provenance
        assert (one.job.plan.data, one.job.cluster.device.cores, one.job.workload.training.global_batch) == (
            2,
            1,
            16,
        )
        assert measured["step_time_s"] > 0
        assert measured["step_time_without_sync_s"] > 0
        assert measured["samples_per_s"] == pytest.approx(16 / measured["step_time_s"])
        assert 0 < measured["device_utilization"] <= 1
        assert 0 < measured["memory_utilization"] < 1
        assert measured["network_tx_bytes_per_s"] > 0
        assert about["resources"]["network_shared_by"] == (4 if about["sync"] == "ps" else 2)
        assert about["epoch"] == "timed: 4 steps"
        assert about["torch"]
        assert set(about["resources"]["figures"]) == {
            f"{name}_{figure}" for name in RESOURCES for figure in FIGURES
        }
        assert about["resources"]["series"]["ends_s"]
        assert "all processes" in about["resources"]["interface_counts"]
    assert runs["ps"].job.plan.servers == 1
    assert set(runs["ps"].provenance["resources"]["server_figures"]) == set(
        runs["ps"].provenance["resources"]["figures"]
    )


def test_parameter_servers_train_as_all_reduce_does(first: Result, folder: Path) -> None:
    """Three processes are two workers and a server, with the losses, step by step, of two that all-reduce."""
    for rank in (0, 1):
        reduced, served = (
            [float(line) for line in (folder / f"loss-{world}-{rank}").read_text().split()[:6]]
            for world in (2, 3)
        )
        assert served == pytest.approx(reduced, rel=1e-4)
        assert reduced[1] > reduced[-1]


def test_cells_in_the_file_are_not_measured_again(first: Result, folder: Path) -> None:
    again = run(
        str(folder / "grid.toml"),
        "--out",
        str(folder / "runs.jsonl"),
        "--models",
        f"{folder / 'tiny.py'}:net",
        "--sync",
        "allreduce,ps",
    )
    assert again.exit_code == 0, again.output
    assert "0 measured, 0 failed, 4 known before" in again.stderr


def test_torchrun(folder: Path) -> None:
    out = folder / "torchrun.jsonl"
    summary = run_campaign(small(folder, "net"), out, backend("torchrun"), protocol=QUICK)
    failures = folder / "torchrun.failures.jsonl"
    assert summary == Summary(measured=1, failed=0, known=0, left=0), failures.read_text()
    [(_, one)] = read_runs(out)
    assert one.provenance["backend"] == "torchrun"
    assert one.measured["startup_time_s"] > one.measured["step_time_s"]
    assert one.measured["step_time_s"] > 0


def test_one_worker_extrapolates_a_long_epoch(folder: Path, local: Local) -> None:
    out = folder / "one.jsonl"
    run_campaign(small(folder, "net", workers=1, samples=10**9), out, local, protocol=QUICK)
    [(_, one)] = read_runs(out)
    assert "extrapolated to 62500000 steps from" in one.provenance["epoch"]
    assert one.measured["epoch_time_s"] > 62500000 * 0.5 * one.measured["step_time_s"]
    assert "step_time_without_sync_s" not in one.measured


def test_a_killed_worker_is_named(folder: Path, local: Local) -> None:
    with pytest.raises(CellFailed, match="process 1 was ended by SIGKILL"):
        local.run(small(folder, "killed")[0].task(QUICK, "lo", PATIENCE_S))


def test_a_worker_that_hangs_is_given_up(folder: Path, local: Local, monkeypatch: pytest.MonkeyPatch) -> None:
    hanging = folder / "pid"
    clock = SimpleNamespace(monotonic=lambda: 61.0 * hanging.exists(), sleep=time.sleep)
    monkeypatch.setattr("foretrain.measure.backends.time", clock)
    with pytest.raises(CellFailed, match=r"no result after 60 s; 2 of 2 processes killed"):
        local.run(small(folder, "hangs")[0].task(QUICK, "lo", 60))
    assert _gone(int((folder / "pid").read_text()))


def _until(seconds: float) -> Iterator[None]:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        yield
        time.sleep(0.05)


def _gone(pid: int) -> bool:
    status = Path(f"/proc/{pid}/status")
    return any(not status.exists() or "State:\tZ" in status.read_text() for _ in _until(PATIENCE_S))


def test_without_torch_no_worker_starts(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "torch.py").write_text("raise ModuleNotFoundError(\"No module named 'torch'\")")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with (
        Local() as local,
        pytest.raises(CellFailed, match=r"no worker could be started: .*No module named 'torch'"),
    ):
        local.run(small(folder, "net")[0].task(QUICK, "lo", PATIENCE_S))


# Keeping and stopping, with a backend that measures nothing


class Pretending(Backend):
    name = "local"

    def __init__(self, *, each_s: float = 0.0, fails: str = "", breaks: bool = False) -> None:
        self.each_s, self.fails, self.breaks = each_s, fails, breaks
        self.seen: list[WorkerTask] = []
        self.closed = False

    def __exit__(self, *_: object) -> None:
        self.closed = True

    def run(self, task: WorkerTask, *, link_bytes_per_s: float | None = None) -> dict[str, Any]:
        self.seen.append(task)
        time.sleep(self.each_s)
        if self.breaks:
            raise InputError("address: nobody answers")
        if self.fails and self.fails in task.job["model"]["name"]:
            raise CellFailed("it failed")
        return {"measured": {"step_time_s": 1.0}, "provenance": {"source": "pretended"}}


def test_a_budget_leaves_the_rest(folder: Path, tmp_path: Path) -> None:
    wanted = small(folder, "net", "dies", batch=[2, 4, 6, 8], home=tmp_path)
    summary = run_campaign(wanted, tmp_path / "runs.jsonl", Pretending(each_s=0.1), budget_s=0.55)
    assert 2 <= summary.measured <= 5
    assert summary.left == 8 - summary.measured
    rest = run_campaign(wanted, tmp_path / "runs.jsonl", Pretending())
    assert (rest.known, rest.measured, rest.left) == (summary.measured, summary.left, 0)


def test_failures_are_said_and_tried_again_when_asked(folder: Path, tmp_path: Path) -> None:
    said: list[str] = []
    moved: list[tuple[int, int]] = []
    out, wanted = tmp_path / "runs.jsonl", small(folder, "net", "dies", home=tmp_path)
    summary = run_campaign(
        wanted, out, Pretending(fails="dies"), say=said.append, progress=lambda *at: moved.append(at)
    )
    assert summary == Summary(measured=1, failed=1, known=0, left=0)
    assert said == ["failed: tiny.py:dies, 2 workers x 1 cores, batch 16, allreduce: it failed"]
    assert moved == [(0, 2), (1, 2), (2, 2)]
    assert run_campaign(wanted, out, Pretending()) == Summary(
        measured=0, failed=0, known=1, left=0, failed_before=1
    )
    assert run_campaign(wanted, out, Pretending(), retry_failed=True) == Summary(
        measured=1, failed=0, known=1, left=0
    )


def test_an_error_that_no_cell_would_survive_stops_the_campaign(folder: Path, tmp_path: Path) -> None:
    broken = Pretending(breaks=True)
    with pytest.raises(InputError, match="nobody answers"):
        run_campaign(small(folder, "net", home=tmp_path), tmp_path / "runs.jsonl", broken)
    assert broken.closed


def test_runs_of_others_in_the_file_do_no_harm(folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "runs.jsonl"
    out.write_text(
        '{"job": {}, "measured": {}}\n{"job": {}, "measured": {}, "provenance": {"backend": "local"}}\n'
    )
    assert run_campaign(small(folder, "net", home=tmp_path), out, Pretending()) == Summary(
        measured=1, failed=0, known=0, left=0
    )


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_full_disk_is_one_line(folder: Path) -> None:
    with pytest.raises(InputError, match="/dev/full: cannot be written"):
        run_campaign(small(folder, "net"), Path("/dev/full"), Pretending())


# The grid


def test_files_of_models_are_named_from_where_the_runs_are(folder: Path, tmp_path: Path) -> None:
    [cell] = small(folder, "net", home=tmp_path)
    name = str(cell.job.workload.model.name)
    assert (tmp_path / name.rpartition(":")[0]).resolve() == (folder / "tiny.py").resolve()


def test_the_first_cells_span_models_and_sizes(folder: Path) -> None:
    order = small(folder, "net", "dies", "killed", "hangs", workers=[1, 2, 4, 8], batch=[8, 16])
    assert len(order) == 32
    for turn in range(0, 32, 4):
        assert len({cell.job.workload.model.name for cell in order[turn : turn + 4]}) == 4
    assert len({cell.job.plan.data for cell in order[:8]}) >= 3


@given(st.lists(st.integers(), unique=True), st.integers(0, 20))
def test_spreading_is_a_permutation(items: list[int], start: int) -> None:
    assert sorted(spread(items, start)) == sorted(items)


@given(st.lists(st.integers(1, 10**6), min_size=1, max_size=30), st.integers(1, 8))
def test_shards_hold_every_parameter_once_and_are_balanced(sizes: list[int], servers: int) -> None:
    if servers > len(sizes):
        with pytest.raises(InputError, match="servers"):
            shards(sizes, servers)
        return
    parts = shards(sizes, servers)
    assert sorted(index for part in parts for index in part) == list(range(len(sizes)))
    loads = [sum(sizes[index] for index in part) for part in parts]
    assert max(loads) - min(loads) <= max(sizes)


def test_parameter_servers_are_a_dimension_of_their_own(folder: Path) -> None:
    found = small(folder, "net", sync=["allreduce", "ps"], servers=[1, 2])
    assert sorted((cell.sync, cell.job.plan.servers) for cell in found) == [
        ("allreduce", 0),
        ("ps", 1),
        ("ps", 2),
    ]
    assert len({cell.key("local") for cell in found}) == 3


def test_workers_train_in_amp_fp16_without_a_scaler(folder: Path) -> None:
    (one,) = small(folder, "net", precision="amp-fp16")
    assert one.job.workload.training.grad_scaler is False
    assert small(folder, "net")[0].job.workload.training.grad_scaler is None


def test_limited_links_make_each_worker_a_node(folder: Path) -> None:
    [cell] = small(folder, "net", links=["1Gbit"])
    cluster = cell.job.cluster
    assert (cluster.nodes, cluster.devices_per_node, cluster.inter_node.bandwidth_bytes_per_s) == (
        2,
        1,
        125e6,
    )


def test_models_may_be_tables(tmp_path: Path) -> None:
    (tmp_path / "grid.toml").write_text(
        'models = [{source = "torchvision", name = "resnet18"}]\nbatch = 8\nimage = 32\n'
    )
    [grid] = read_campaign(tmp_path / "grid.toml", {"classes": 10})
    [cell] = cells([grid], make_job)
    assert (
        cell.job.workload.model.source,
        cell.job.workload.training.image,
        cell.job.workload.training.classes,
    ) == ("torchvision", 32, 10)


def test_a_task_survives_json(folder: Path) -> None:
    task = small(folder, "net", sync="ps")[0].task(QUICK, "lo", 5)
    assert WorkerTask.from_json(task.to_json()) == task
    assert (task.workers, task.processes) == (2, 3)


# Bad input


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (
            ["--models", "resnet18", "--batch", "8", "--on", "slurm"],
            "on: 'slurm' is not one of local, ray, torchrun",
        ),
        (
            ["--models", "resnet18", "--batch", "8", "--address", "auto"],
            "address: 'auto' is for --on ray, not for --on local",
        ),
        (["--models", "resnet18"], "batch: give batch"),
        (["--batch", "8"], "models: missing"),
        (
            ["--models", "resnet18", "--batch", "8", "--workers", "two"],
            "workers: 'two' is not whole numbers with commas between them",
        ),
        (["--models", "resnet18", "--batch", "8", "--workers", "0"], "workers: 0 is not 1 or more"),
        (
            ["--models", "resnet18", "--batch", "8", "--workers", "3"],
            "training.global_batch: 8 does not divide over plan.data = 3",
        ),
        (
            ["--models", "resnet18", "--batch", "8", "--sync", "gossip"],
            "'gossip' is not one of allreduce, ps",
        ),
        (
            ["--models", "resnet18", "--batch", "8", "--threshold", "2"],
            "threshold: 2.0 is not a share of the maximum",
        ),
        (["--models", "resnet18", "--batch", "8", "--budget", "soon"], "budget: 'soon' is not a time"),
        (["--models", "resnet18", "--batch", "8", "--links", "fast"], "links: 'fast' is not a rate"),
        (
            ["--models", "resnet18", "--batch", "8", "--on", "torchrun", "--links", "1Gbit"],
            "links: only --on local limits links",
        ),
        (["nowhere.toml"], "nowhere.toml: cannot be read"),
    ],
)
def test_bad_input_is_one_line(words: list[str], line: str, tmp_path: Path) -> None:
    result = run(*words, "--out", str(tmp_path / "runs.jsonl"))
    assert result.exit_code == 2, result.output
    assert line in result.stderr
    assert len(result.stderr.splitlines()) == 1
    assert not (tmp_path / "runs.jsonl").exists()


def test_no_gpu_is_one_line(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(campaigns, "gpu_count", lambda: 0)
    with pytest.raises(
        InputError, match="device: 'h100-sxm-80gb' needs an NVIDIA GPU, and there is none here"
    ):
        run_campaign(
            small(folder, "net", device="h100", home=tmp_path), tmp_path / "runs.jsonl", Pretending()
        )


def test_links_without_root_are_one_line(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(InputError, match="links: network namespaces need root"):
        run_campaign(
            small(folder, "net", links="1Gbit", home=tmp_path), tmp_path / "runs.jsonl", Pretending()
        )


def test_no_ray_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(InputError, match="on: 'ray' needs Ray, which is not installed"):
        backend("ray")


def test_a_grid_needs_something_to_measure() -> None:
    with pytest.raises(InputError, match="models: empty"):
        Grid(models=(), batch=(1,))
