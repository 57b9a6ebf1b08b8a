"""Tests PredictDDL's law of GPUs: what is played, what is fitted, and predictors by device."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from foretrain import predictors
from foretrain.capture import capture_job
from foretrain.cli import app
from foretrain.errors import InputError, UnsupportedJob
from foretrain.job import Job
from foretrain.predictors.predictddl import baseline as laws
from foretrain.predictors.predictddl.baseline import GPU, baseline, fit_baseline, physics
from foretrain.predictors.predictddl.features import work_of
from foretrain.predictors.predictddl.gpu import GPU_COLUMNS, PARTS, device_work, gpu_columns, play
from foretrain.predictors.predictddl.predictor import PredictDDLPredictor, PredictDDLSettings
from foretrain.run import Run

MODELS = """
from torch import nn

def net(batch, width=16, depth=2):
    layers = [nn.Conv2d(3, width, 3, padding=1)]
    for _ in range(depth):
        layers += [nn.Conv2d(width, width, 3, padding=1), nn.BatchNorm2d(width), nn.ReLU()]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, 10))

a = b = c = d = e = f = net
"""
FEW = ("constant", "log-linear, ridge 3")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    made = tmp_path_factory.mktemp("predictddl_gpu")
    (made / "models.py").write_text(MODELS)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FORETRAIN_CACHE", str(made / "cache"))
        yield made


def job(base: Path, kind: str = "net", device: str = "t4", devices: int = 1, **args: Any) -> Job:
    batch = args.pop("batch", 16)
    model = {"source": "python", "name": f"models.py:{kind}", "args": {"width": 16, "depth": 2, **args}}
    training = {"global_batch": batch * devices, "image": 32, "classes": 10}
    cluster = {"device": device, "devices_per_node": devices}
    return Job.read({"model": model, "training": training, "cluster": cluster}, base=base)


@pytest.fixture(scope="module")
def runs(folder: Path) -> list[Run]:
    """Twice what the roofline gives on the device, and 50 us for each call of the host."""
    jobs = [
        job(folder, kind, width=16 * (1 + number), depth=1 + number % 3, batch=batch)
        for number, kind in enumerate("abcdef")
        for batch in (8, 64, 512)
    ]
    return [Run(job=one, measured=measured(one)) for one in jobs]


def measured(one: Job) -> dict[str, float]:
    work = device_work(capture_job(one), one.cluster.device)
    busy_s, host_s = 2 * float(work.seconds.sum()), 50e-6 * float(work.host[:, :6].sum())
    return {"step_time_s": max(busy_s, host_s) + 1e-4, "device_busy_s": busy_s}


def test_a_step_takes_at_least_what_device_and_host_take_and_no_more_than_both() -> None:
    draw = np.random.default_rng(0)
    device_s, host = draw.exponential(size=(50, 6)), draw.exponential(size=(50, 6, 3)) / 3
    alone, many, busy = play(device_s, host, np.zeros((50, 6, 0)))
    host_s = host.sum(axis=(1, 2))
    assert (alone.seconds >= np.maximum(busy.seconds, host_s) - 1e-12).all()
    assert (alone.seconds <= busy.seconds + host_s).all()
    assert many.seconds == pytest.approx(np.maximum(busy.seconds, host_s))


def test_a_single_step_is_learned_from(runs: list[Run], folder: Path) -> None:
    one = runs[0]
    for repeats in (1, 3):
        predictor = PredictDDLPredictor(candidates=FEW).fit([one] * repeats)
        forecast = predictor.predict(one.job)["step_time_s"]
        assert forecast.median == pytest.approx(one.measured["step_time_s"], rel=0.5)
        assert forecast.low < forecast.median < forecast.high


def test_slopes_are_those_of_small_steps(folder: Path) -> None:
    jobs = [job(folder, "a", devices=devices, batch=batch) for devices in (1, 4) for batch in (8, 512)]
    terms = physics([work_of(one, capture_job(one)) for one in jobs], jobs)
    logs = 0.2 * np.random.default_rng(1).normal(size=len(GPU.names))
    slopes = laws._gpu_slopes(logs, terms, np.ones(len(logs)), np.zeros(len(jobs), dtype=np.bool_))
    for place in range(0, len(logs), 7):
        step = np.zeros(len(logs))
        step[place] = 1e-6
        wanted = (baseline(logs + step, terms) - baseline(logs - step, terms)) / 2e-6 / laws._NOISE
        assert slopes[: len(jobs), place] == pytest.approx(wanted, abs=1e-4)


def test_the_law_tells_device_from_host_by_the_time_that_the_device_was_busy(runs: list[Run]) -> None:
    jobs = [run.job for run in runs]
    terms = physics([work_of(one, capture_job(one)) for one in jobs], jobs)
    targets, busy = (
        np.log([run.measured[name] for run in runs]) for name in ("step_time_s", "device_busy_s")
    )
    logs = fit_baseline(terms, targets, busy=busy)
    assert np.abs(baseline(logs, terms) - targets).mean() < 0.1
    assert np.abs(np.log(laws._gpu_time(logs, terms).busy.seconds) - busy).mean() < 0.1


def test_columns_are_shares_and_parts_hold_every_call(folder: Path) -> None:
    graph = capture_job(job(folder))
    work = device_work(graph, job(folder).cluster.device)
    assert len(gpu_columns(work)) == len(GPU_COLUMNS)
    shares = [place for place, name in enumerate(GPU_COLUMNS) if name.startswith("share")]
    assert gpu_columns(work)[shares].sum() == pytest.approx(1.0, rel=1e-3)
    assert work.part.max() == PARTS
    assert work.times(3).seconds.sum() > 2 * work.seconds[work.part < PARTS].sum()


def test_each_device_has_predictors_of_its_own(runs: list[Run], folder: Path, tmp_path: Path) -> None:
    others = [
        Run(job=job(folder, kind, "rtx-3090"), measured={"step_time_s": 0.01 + 0.001 * number})
        for number, kind in enumerate("abc")
    ]
    predictor = PredictDDLPredictor(embedding=None, candidates=FEW).fit([*runs, *others])
    predictor.save(tmp_path)
    again = PredictDDLPredictor.load(tmp_path)
    asked = job(folder, "net", width=40, batch=256)
    forecast = again.predict(asked)["step_time_s"]
    assert forecast == predictor.predict(asked)["step_time_s"]
    assert forecast.median == pytest.approx(measured(asked)["step_time_s"], rel=0.3)
    slow, fast = (again.predict(job(folder, "a", name))["step_time_s"].median for name in ("rtx-3090", "t4"))
    assert slow > fast
    with pytest.raises(
        UnsupportedJob, match=r"^cluster.device: 'h200-sxm-141gb'; predictddl learned from rtx"
    ):
        again.predict(job(folder, device="h200-sxm-141gb"))


def test_more_devices_over_a_link_take_longer_for_the_exchange(runs: list[Run], folder: Path) -> None:
    predictor = PredictDDLPredictor(embedding=None, candidates=("constant",)).fit(runs)
    one, four = (predictor.predict(job(folder, "a", devices=devices, width=512)) for devices in (1, 4))
    assert four["step_time_s"].median > one["step_time_s"].median
    assert any(note.startswith("workers: 4 was not learned from") for note in four.assumptions)


def test_form_and_embedding_are_options_of_fit(runs: list[Run], folder: Path, tmp_path: Path) -> None:
    path = folder / "runs.jsonl"
    path.write_text("".join(json.dumps(run.to_dict()) + "\n" for run in runs))
    asked = [
        "fit",
        "predictddl",
        str(path),
        "--form",
        "paper",
        "--embedding",
        "none",
        "--out",
        str(tmp_path / "p"),
    ]
    result = CliRunner().invoke(app, asked)
    assert result.exit_code == 0, result.output
    made = PredictDDLPredictor.load(tmp_path / "p")
    assert (made.form, made.embedding) == ("paper", None)
    for words, said in (
        (["--form", "luck"], "'luck' is not one of"),
        (["--embedding", "x.y"], "'x.y'; neither"),
    ):
        result = CliRunner().invoke(
            app, ["fit", "predictddl", str(path), *words, "--out", str(tmp_path / "q")]
        )
        assert result.exit_code != 0
        assert said in result.output
    with pytest.raises(InputError, match="has its own"):
        made.configure(PredictDDLSettings(form="ratio"))


@pytest.mark.parametrize("device", ["h200-sxm-141gb", "rtx-3090", "t4", "a100-sxm-80gb", "cpu"])
def test_what_ships_knows_gpus_and_cpu_workers(device: str) -> None:
    cores = {"cores_per_device": 1} if device == "cpu" else {}
    asked = Job.read({
        "model": {"source": "torchvision", "name": "resnet18"},
        "training": {"global_batch": 32, "image": 32 if device == "cpu" else 224, "classes": 1000},
        "cluster": {"device": device, "devices_per_node": 1, **cores},
    })  # fmt: skip
    assert 1e-3 < predictors.get("predictddl").predict(asked)["step_time_s"].median < 10
