"""Tests trainings with Lightning's Trainer: it fills in the job and the run is recorded."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from foretrain.capture import capture_job  # noqa: E402
from foretrain.capture.sources.zoo import import_zoo  # noqa: E402
from foretrain.errors import InputError  # noqa: E402
from foretrain.evaluate import evaluate  # noqa: E402
from foretrain.run import Run, read_runs  # noqa: E402

pytestmark = [
    pytest.mark.filterwarnings("ignore:`isinstance.treespec, LeafSpec.` is deprecated:FutureWarning"),
    pytest.mark.filterwarnings("ignore:The 'train_dataloader' does not have many workers"),
]

MODEL = """
import torch

def net(batch):
    from torch.nn import Flatten, Linear, ReLU, Sequential

    return Sequential(Flatten(), Linear(192, 16), ReLU(), Linear(16, 10))
"""


@pytest.fixture(scope="module")
def pl() -> Any:
    import_zoo("torchvision")
    return pytest.importorskip("lightning.pytorch", reason="Lightning is not installed")


@pytest.fixture
def job(tmp_path: Path) -> dict[str, Any]:
    (tmp_path / "net.py").write_text(MODEL)
    return {
        "model": {"source": "python", "name": str(tmp_path / "net.py:net")},
        "training": {"image": 8, "classes": 10},
    }


@pytest.fixture
def fit(pl: Any, tmp_path: Path) -> Callable[..., None]:
    class Net(pl.LightningModule):  # type: ignore[misc]
        def __init__(self, fail_at: int | None) -> None:
            super().__init__()
            self.net = torch.nn.Sequential(
                torch.nn.Flatten(), torch.nn.Linear(192, 16), torch.nn.ReLU(), torch.nn.Linear(16, 10)
            )
            self.fail_at = fail_at

        def training_step(self, batch: Any, index: int) -> Any:
            if self.global_step == self.fail_at:
                raise RuntimeError("no more")
            return torch.nn.functional.cross_entropy(self.net(batch[0]), batch[1])

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters())

    def run(job: Any, *, fail_at: int | None = None, predictor: str | None = None, **options: Any) -> None:
        from foretrain.callbacks.lightning import ForetrainCallback

        own = ForetrainCallback(tmp_path / "runs.jsonl", job, predictor=predictor, show=lambda line: None)
        data = torch.utils.data.TensorDataset(torch.randn(160, 3, 8, 8), torch.randint(0, 10, (160,)))
        quiet = {
            "logger": False,
            "enable_checkpointing": False,
            "enable_progress_bar": False,
            "enable_model_summary": False,
        }
        trainer = pl.Trainer(
            accelerator="cpu", max_epochs=2, callbacks=[own], default_root_dir=tmp_path, **quiet, **options
        )
        trainer.fit(Net(fail_at), torch.utils.data.DataLoader(data, batch_size=8))

    return run


def only_run(path: Path) -> Run:
    [(_, run)] = read_runs(path)
    return run


def test_a_training_is_recorded_and_scored(
    fit: Callable[..., None], job: dict[str, Any], tmp_path: Path
) -> None:
    fit(job, accumulate_grad_batches=2)
    run = only_run(tmp_path / "runs.jsonl")
    training = run.job.workload.training
    assert (training.global_batch, training.optimizer, training.precision, training.image) == (
        16,
        "adamw",
        "fp32",
        8,
    )
    assert (training.samples, training.epochs, run.job.micro_batch) == (160, 2, 8)
    assert run.provenance["steps"] == training.total_steps == 20
    assert run.provenance["framework"].startswith("lightning ")
    assert run.measured["step_time_s"] < run.measured["epoch_time_s"] < run.measured["total_time_s"]
    [scored] = [
        row
        for row in evaluate([tmp_path / "runs.jsonl"], predictors=["roofline"]).runs
        if row.quantity == "step_time_s"
    ]
    assert scored.measured == run.measured["step_time_s"]


def test_without_a_job_the_step_itself_is_traced(fit: Callable[..., None], tmp_path: Path) -> None:
    fit(None, accumulate_grad_batches=2)
    run = only_run(tmp_path / "runs.jsonl")
    model, training = run.job.workload.model, run.job.workload.training
    assert model.source == "graph"
    assert str(model.name).startswith("runs.graphs/Net-")
    assert (training.global_batch, training.optimizer, run.job.micro_batch) == (16, "adamw", 8)
    graph = capture_job(run.job)
    assert (graph.samples, graph.parameters, graph.accumulates) == (8, 192 * 16 + 16 + 16 * 10 + 10, True)
    assert {"addmm", "_log_softmax", "nll_loss_forward"} <= {op.operator.name for op in graph.ops}
    assert evaluate([tmp_path / "runs.jsonl"], predictors=["roofline"]).runs


def test_a_job_that_cannot_be_found_is_one_line(fit: Callable[..., None]) -> None:
    with pytest.raises(
        InputError, match=r"^job: the training step of Net cannot be traced \(.*no more.*\); name"
    ):
        fit(None, fail_at=0)


def test_a_training_that_fails_is_recorded_at_once(
    fit: Callable[..., None], job: dict[str, Any], tmp_path: Path
) -> None:
    with pytest.raises(RuntimeError, match="no more"):
        fit(job, fail_at=9)
    run = only_run(tmp_path / "runs.jsonl")
    assert run.provenance["interrupted"] == "RuntimeError: no more"
    assert run.provenance["steps"] == 9
    assert "total_time_s" not in run.measured


def test_a_training_in_steps_has_a_job_in_steps(
    fit: Callable[..., None], job: dict[str, Any], tmp_path: Path
) -> None:
    fit(job, max_steps=7)
    run = only_run(tmp_path / "runs.jsonl")
    assert run.job.workload.training.steps == 7
    assert "total_time_s" in run.measured
    assert "interrupted" not in run.provenance


def test_a_forecast_that_fails_only_warns(
    fit: Callable[..., None], job: dict[str, Any], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    fit(job, predictor=str(tmp_path / "nowhere"))
    assert [line for line in caplog.messages if line.startswith("no forecast (")]
    assert "total_time_s" in only_run(tmp_path / "runs.jsonl").measured


def test_the_callback_is_one_of_lightnings_and_can_be_sent_to_another_process(
    pl: Any, job: dict[str, Any], tmp_path: Path
) -> None:
    from foretrain.callbacks.lightning import ForetrainCallback

    own = ForetrainCallback(tmp_path / "runs.jsonl", job, predictor=None)
    assert isinstance(own, pl.Callback)
    assert pickle.loads(pickle.dumps(own)).recorder.target.where == str(tmp_path / "runs.jsonl")
