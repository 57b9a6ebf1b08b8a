"""Tests trainings with Ray's TorchTrainer: workers time their steps and the run is recorded."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

ray = pytest.importorskip("ray", reason="Ray is not installed")
pytest.importorskip("torch", reason="torch is not installed")

from foretrain.errors import InputError  # noqa: E402
from foretrain.evaluate import evaluate  # noqa: E402
from foretrain.fanout.cluster import connect  # noqa: E402
from foretrain.run import Run, read_runs  # noqa: E402

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*is deprecated:DeprecationWarning:ray.data.context"),
    pytest.mark.xdist_group("ray"),  # one cluster at a time
]

MODEL = """
import torch

def net(batch):
    from torch.nn import Flatten, Linear, ReLU, Sequential

    return Sequential(Flatten(), Linear(192, 16), ReLU(), Linear(16, 10))
"""
SLEEP_S = 0.02


@pytest.fixture
def connection(ray_cluster: Any, quick_ray_train: None) -> Iterator[None]:
    connect(ray_cluster.address)
    yield
    ray.shutdown()


@pytest.fixture
def job(tmp_path: Path) -> dict[str, Any]:
    (tmp_path / "net.py").write_text(MODEL)
    training = {"global_batch": 16, "image": 8, "classes": 10, "steps": 20}
    return {"model": {"source": "python", "name": str(tmp_path / "net.py:net")}, "training": training}


def training_function() -> Any:
    """Made here, so that Ray sends it whole to workers that cannot import this file."""

    def loop(config: dict[str, Any]) -> None:
        """Five reports of four steps."""
        import ray.train
        import torch
        from ray.train.torch import prepare_model

        net = torch.nn.Sequential(
            torch.nn.Flatten(), torch.nn.Linear(192, 16), torch.nn.ReLU(), torch.nn.Linear(16, 10)
        )
        model = prepare_model(net)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
        for _ in range(5):
            for _ in range(4):
                time.sleep(config["sleep_s"])
                optimizer.zero_grad()
                torch.nn.functional.cross_entropy(
                    model(torch.randn(8, 3, 8, 8)), torch.randint(0, 10, (8,))
                ).backward()
                optimizer.step()
            ray.train.report({})

    return loop


def fit(tmp_path: Path, job: Any) -> None:
    from ray.train import RunConfig, ScalingConfig
    from ray.train.torch import TorchTrainer

    from foretrain.callbacks.ray_train import ForetrainCallback

    own = ForetrainCallback(tmp_path / "runs.jsonl", job, predictor=None, steps_per_report=4)
    trainer = TorchTrainer(
        training_function(),
        train_loop_config={"sleep_s": SLEEP_S},
        scaling_config=ScalingConfig(num_workers=2),
        run_config=RunConfig(storage_path=str(tmp_path / "ray"), callbacks=[own]),
    )
    trainer.fit()


def only_run(path: Path) -> Run:
    [(_, run)] = read_runs(path)
    return run


def test_two_workers_train_and_the_run_is_recorded_and_scored(
    connection: None, tmp_path: Path, job: dict[str, Any]
) -> None:
    fit(tmp_path, job)
    run = only_run(tmp_path / "runs.jsonl")
    assert run.job.plan.data == 2
    assert run.job.cluster.device.is_cpu
    assert run.provenance["steps"] == 20
    assert len(run.provenance["worker_step_times_s"]) == 2
    assert run.provenance["timed_reports"] == 4
    assert SLEEP_S <= run.measured["step_time_s"] < run.measured["total_time_s"]
    assert "interrupted" not in run.provenance
    [scored] = [
        row
        for row in evaluate([tmp_path / "runs.jsonl"], predictors=["roofline"]).runs
        if row.quantity == "step_time_s"
    ]
    assert scored.measured == run.measured["step_time_s"]


class GoneWorkers:
    """What the controller sees of two workers that were lost."""

    def get_workers(self) -> list[Any]:
        return [
            SimpleNamespace(resources={"CPU": 1.0}, metadata=SimpleNamespace(node_id="a")) for _ in range(2)
        ]

    def execute_single(self, rank: int, function: Any, *args: Any) -> Any:
        return function(*args)

    def execute_async(self, function: Any) -> Any:
        raise ConnectionError("the workers are gone")


def test_a_training_whose_workers_are_lost_is_recorded_with_the_times_that_they_reported(
    tmp_path: Path, job: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    from foretrain.callbacks.ray_train import ForetrainCallback

    workers = GoneWorkers()
    own = ForetrainCallback(
        tmp_path / "runs.jsonl", job, predictor=None, steps_per_report=4, time_key="seconds"
    )
    own.after_worker_group_start(workers)
    own.after_worker_group_training_start(workers)
    for _ in range(3):
        own.after_report(None, [{"seconds": 0.1}, {"seconds": 0.15}])
    own.before_worker_group_shutdown(workers)
    own.after_controller_finish(
        SimpleNamespace(error=SimpleNamespace(worker_failures={1: ValueError("no more")}))
    )
    run = only_run(tmp_path / "runs.jsonl")
    assert run.job.plan.data == 2
    assert run.measured["step_time_s"] == pytest.approx(0.125)
    assert "total_time_s" not in run.measured
    assert run.provenance["steps"] == 12
    assert run.provenance["interrupted"] == "ValueError: no more"
    assert caplog.messages == ["the workers' step times are not known (the workers are gone)"]


def test_what_cannot_be_recorded_is_told_before_ray_is_asked(tmp_path: Path, job: dict[str, Any]) -> None:
    from foretrain.callbacks.ray_train import ForetrainCallback

    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match="cannot be written"):
        ForetrainCallback(tmp_path / "file" / "runs.jsonl", job)
    with pytest.raises(InputError, match="job: it does not say which model is trained"):
        ForetrainCallback(tmp_path / "runs.jsonl", {"training": job["training"]})
    with pytest.raises(InputError, match="steps_per_report: 0 is not 1 or more"):
        ForetrainCallback(tmp_path / "runs.jsonl", job, steps_per_report=0)
