"""Tests campaigns on real Ray clusters: one that they start, and one of nodes of which one dies."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest

from foretrain.api import make_job
from foretrain.errors import InputError
from foretrain.measure.backends import backend
from foretrain.measure.campaign import cells, read_grid, run_campaign
from foretrain.measure.tasks import Protocol
from foretrain.run import read_runs
from ray_clusters import wait_for

pytest.importorskip("ray", reason="Ray is not installed")
pytestmark = [
    pytest.mark.usefixtures("quick_ray_train"),
    pytest.mark.xdist_group("ray"),  # one cluster at a time
]

MODEL = """
import torch

def net(batch):
    layers = torch.nn.Flatten(), torch.nn.Linear(192, 16), torch.nn.ReLU(), torch.nn.Linear(16, 10)
    return torch.nn.Sequential(*layers)
"""
HELD_UP = """
import pathlib, time
import ray, torch

def net(batch):
    here = pathlib.Path(__file__).parent
    if not (here / "killed").exists():
        (here / ray.get_runtime_context().get_node_id()).touch()
        (here / "begun").touch()
        time.sleep(600)
    return torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(192, 10))
"""


def test_two_workers_train_on_ray(tmp_path: Path) -> None:
    (tmp_path / "tiny.py").write_text(MODEL)
    grid = read_grid({"models": "tiny.py:net", "workers": 2, "batch": 16, "image": 8, "samples": 160})
    wanted = cells([grid], make_job, base=tmp_path, home=tmp_path)
    summary = run_campaign(
        wanted, tmp_path / "runs.jsonl", backend("ray", cpus=2), protocol=Protocol(seconds=0.3), timeout_s=400
    )
    failures = tmp_path / "runs.failures.jsonl"
    assert summary.measured == 1, failures.read_text() if failures.exists() else summary
    [(_, run)] = read_runs(tmp_path / "runs.jsonl")
    assert run.provenance["backend"] == "ray"
    assert run.job.plan.data == 2
    assert run.measured["step_time_s"] > 0
    assert run.measured["epoch_time_s"] > 0
    assert run.provenance["epoch"] == "timed: 10 steps"


def test_a_cell_whose_node_dies_is_measured_on_another(tmp_path: Path, ray_cluster: Any) -> None:
    (tmp_path / "held_up.py").write_text(HELD_UP)
    grid = read_grid({"models": "held_up.py:net", "workers": 1, "batch": 16, "image": 8})
    wanted = cells([grid], make_job, base=tmp_path, home=tmp_path)

    def kill() -> None:
        wait_for(tmp_path / "begun")
        [node] = [node for node in ray_cluster.worker_nodes if (tmp_path / node.node_id).exists()]
        (tmp_path / "killed").touch()
        ray_cluster.remove_node(node, allow_graceful=False)

    killer = threading.Thread(target=kill)
    killer.start()
    chosen = backend("ray", address=ray_cluster.address)
    summary = run_campaign(
        wanted, tmp_path / "runs.jsonl", chosen, protocol=Protocol(seconds=0.3), timeout_s=400
    )
    killer.join()
    ray_cluster.add_node(num_cpus=1)
    failures = tmp_path / "runs.failures.jsonl"
    assert summary.measured == 1, failures.read_text() if failures.exists() else summary
    [(_, run)] = read_runs(tmp_path / "runs.jsonl")
    assert run.measured["step_time_s"] > 0


def test_an_address_where_nobody_answers_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    grid = read_grid({"models": "resnet18", "workers": 2, "batch": 16, "image": 32})
    with pytest.raises(InputError, match="address: no Ray cluster answers at 'auto'"):
        run_campaign(cells([grid], make_job), tmp_path / "runs.jsonl", backend("ray", address="auto"))
