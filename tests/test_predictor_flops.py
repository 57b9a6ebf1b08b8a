"""Tests the FLOPs regression: times that follow FLOPs are found again; unseen families are unsure."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from foretrain import predictors
from foretrain.errors import UnsupportedJob
from foretrain.job import Job
from foretrain.predictors.checks import check_predictor
from foretrain.predictors.flops_regression import COLUMNS, FlopsPredictor, columns
from foretrain.run import Run
from made_up import MODELS
from made_up import job as made_up_job


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    made = tmp_path_factory.mktemp("flops")
    (made / "models.py").write_text(MODELS)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FORETRAIN_CACHE", str(made / "cache"))
        yield made


def mlp(folder: Path, width: int, batch: int) -> Job:
    return made_up_job(folder, batch=batch, width=width)


def test_it_passes_the_conformance_checks(folder: Path) -> None:
    check_predictor(predictors.get("flops"), mlp(folder, 64, 8))


def test_times_that_follow_flops_are_found_again(folder: Path) -> None:
    jobs = [mlp(folder, width, batch) for width in (64, 128, 256) for batch in (16, 64, 128)]
    runs = [Run(job=one, measured={"step_time_s": work_s(one)}) for one in jobs]
    asked = mlp(folder, 192, 32)
    assert FlopsPredictor().fit(runs).predict(asked)["step_time_s"].median == pytest.approx(
        work_s(asked), rel=0.05
    )


def test_another_device_is_named_and_less_sure_and_other_settings_are_refused(folder: Path) -> None:
    jobs = [mlp(folder, width, batch) for width in (64, 256) for batch in (16, 64, 128)]
    learned = FlopsPredictor().fit([Run(job=one, measured={"step_time_s": work_s(one)}) for one in jobs])
    near, other = (
        learned.predict(jobs[1]),
        learned.predict(made_up_job(folder, batch=64, width=64, device="v100")),
    )
    note = "cluster.device: v100-sxm-16gb, which no run has (a100-sxm-80gb), is told by its peak rate alone"
    assert note in other.assumptions
    widths = [one["step_time_s"].high / one["step_time_s"].low for one in (near, other)]
    assert widths[1] > 2 * widths[0]
    far = learned.predict(mlp(folder, 256, 4096))
    assert any(one.startswith("beyond the runs in seconds at the peak rate: ") for one in far.assumptions)
    with pytest.raises(
        UnsupportedJob, match=r"^training.optimizer: 'adamw'; the runs of this model have 'sgd'$"
    ):
        learned.predict(made_up_job(folder, batch=64, width=64, optimizer="adamw"))


def test_the_columns_have_names(folder: Path) -> None:
    assert len(columns(mlp(folder, 64, 16))) == len(COLUMNS)


def test_it_refuses_before_it_has_learned(folder: Path) -> None:
    with pytest.raises(
        UnsupportedJob, match=r"^flops: has learned from no runs yet; fit it first: foretrain fit flops "
    ):
        FlopsPredictor().predict(mlp(folder, 64, 16))


def work_s(one: Job) -> float:
    import math

    return 3 * math.exp(columns(one)[0])
