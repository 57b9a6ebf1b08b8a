"""ScaleDL: layers add up to the step, the network learns a bounded correction, the same runs give the same
network, a folder keeps it."""

from __future__ import annotations

import copy
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from foretrain import predictors
from foretrain.costs.measured import MeasuredOperator
from foretrain.errors import ForetrainError, InputError, UnsupportedJob
from foretrain.graph import TensorSpec
from foretrain.job import Job, Run
from foretrain.predictors import neural
from foretrain.predictors import scaledl as package
from foretrain.predictors.checks import check_predictor, on_two_devices
from foretrain.predictors.deletepop import DeletePopPredictor
from foretrain.predictors.deletepop.calibration import Calibration
from foretrain.predictors.scaledl.predictor import (
    NODE_COLUMNS,
    NODES_AT_MOST,
    LayerGraph,
    ScaleDLPredictor,
    layer_graph,
)

MODELS = """
import torch

def net(batch, depth=2):
    layers = [torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU()) for _ in range(depth)]
    return torch.nn.Sequential(*layers, torch.nn.Linear(64, 10)), (torch.zeros(batch, 64),)

a = b = c = d = e = net
"""
KINDS = ("a", "b", "c", "d", "e")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    made = tmp_path_factory.mktemp("scaledl")
    (made / "models.py").write_text(MODELS)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FORETRAIN_CACHE", str(made / "cache"))
        yield made


@pytest.fixture(scope="module")
def runs(folder: Path) -> list[Run]:
    """Steps of five architectures that take 1.3 times what their layers do."""
    plain = DeletePopPredictor()
    jobs = [job(folder, kind, depth=depth) for kind in KINDS for depth in (1, 2)]
    return [
        Run(job=one, measured={"step_time_s": 1.3 * plain.predict(one)["step_time_s"].median}) for one in jobs
    ]


@pytest.fixture(scope="module")
def fitted(runs: list[Run]) -> ScaleDLPredictor:
    return ScaleDLPredictor().fit(runs)


def job(
    base: Path, kind: str = "net", depth: int = 2, device: str = "h200-sxm-141gb", **training: Any
) -> Job:
    model = {"source": "python", "name": f"models.py:{kind}", "args": {"depth": depth}}
    cluster = {"device": device, **({"cores_per_device": 4} if device == "cpu" else {})}
    return Job.read(
        {"model": model, "training": {"global_batch": 4, **training}, "cluster": cluster}, base=base
    )


def layers_of(one: Job) -> LayerGraph:
    return layer_graph(DeletePopPredictor().step(one))


@pytest.mark.parametrize("mode", ["train", "infer"])
def test_it_passes_the_conformance_checks(folder: Path, mode: str) -> None:
    check_predictor(predictors.get("scaledl"), job(folder, mode=mode, samples=100, epochs=2))


def test_layers_add_up_to_the_step(folder: Path) -> None:
    step = DeletePopPredictor().step(job(folder))
    graph = layer_graph(step)
    microseconds = np.expm1(graph.nodes[:, NODE_COLUMNS.index("operator_time")].astype(np.float64)).sum()
    assert microseconds == pytest.approx(step.device_busy_s * 1e6, rel=1e-4)
    assert graph.share.sum() == pytest.approx(1.0, abs=1e-5)
    assert graph.base_s == step.time_s


def test_data_flow_forward_through_the_layers_and_back(folder: Path) -> None:
    graph = layers_of(job(folder))
    assert graph.edges.min() >= 0
    assert graph.edges.max() < len(graph.nodes)
    forward = graph.nodes[:, NODE_COLUMNS.index("forward")] == 1
    backward = graph.nodes[:, NODE_COLUMNS.index("backward")] == 1
    source, target = graph.edges
    assert (forward[source] & backward[target]).any()
    assert not (backward[source] & forward[target]).any()


def test_many_layers_are_joined_to_few(folder: Path) -> None:
    assert 80 < len(layers_of(job(folder, depth=80)).nodes) <= NODES_AT_MOST


def test_inference_has_forward_layers_only(folder: Path) -> None:
    assert set(layers_of(job(folder, mode="infer")).nodes[:, NODE_COLUMNS.index("forward")]) == {1.0}


def test_the_correction_is_learned_from_runs_of_other_architectures(
    fitted: ScaleDLPredictor, folder: Path
) -> None:
    asked = job(folder, "net")
    plain = DeletePopPredictor().predict(asked)["step_time_s"].median
    assert fitted.predict(asked)["step_time_s"].median == pytest.approx(1.3 * plain, rel=0.1)


def test_the_correction_is_bounded(runs: list[Run], folder: Path) -> None:
    slow = [Run(job=run.job, measured={"step_time_s": 100 * run.measured["step_time_s"]}) for run in runs]
    asked = job(folder)
    ratio = (
        ScaleDLPredictor().fit(slow).predict(asked)["step_time_s"].median
        / DeletePopPredictor().predict(asked)["step_time_s"].median
    )
    assert 1.5 < ratio < 2.1


def test_a_mode_without_runs_is_not_corrected_and_says_so(fitted: ScaleDLPredictor, folder: Path) -> None:
    asked = job(folder, mode="infer")
    forecast = fitted.predict(asked)
    assert forecast["step_time_s"].median == DeletePopPredictor().predict(asked)["step_time_s"].median
    assert any("no run of mode infer" in note for note in forecast.assumptions)


def test_the_same_runs_give_the_same_network(fitted: ScaleDLPredictor, runs: list[Run], folder: Path) -> None:
    again, other = ScaleDLPredictor().fit(iter(runs)), ScaleDLPredictor(seed=1).fit(runs)
    first, second, third = (one.predict(job(folder))["step_time_s"] for one in (fitted, again, other))
    assert first == second
    assert first != third


def test_a_folder_keeps_what_was_learned(fitted: ScaleDLPredictor, folder: Path, tmp_path: Path) -> None:
    fitted.save(tmp_path / "plain")
    assert sorted(path.name for path in (tmp_path / "plain").iterdir()) == [
        "network.safetensors",
        "predictor.json",
    ]
    assert (
        predictors.get(tmp_path / "plain").predict(job(folder)).quantities
        == fitted.predict(job(folder)).quantities
    )


def test_a_folder_keeps_operator_models_of_its_own(
    fitted: ScaleDLPredictor, folder: Path, tmp_path: Path
) -> None:
    shipped = DeletePopPredictor()
    slower = {"h200-sxm-141gb": Calibration(groups={"products": 50.0})}
    operators = DeletePopPredictor(shipped.costs, shipped.host, calibrations=slower)
    own = ScaleDLPredictor(operators, fitted.learned_)
    own.save(tmp_path)
    loaded = ScaleDLPredictor.load(tmp_path)
    assert loaded.predict(job(folder)).quantities == own.predict(job(folder)).quantities
    assert (
        loaded.predict(job(folder))["device_busy_s"].median
        > fitted.predict(job(folder))["device_busy_s"].median
    )


def test_a_broken_network_file_is_refused(fitted: ScaleDLPredictor, tmp_path: Path) -> None:
    fitted.save(tmp_path)
    (tmp_path / "network.safetensors").write_bytes(b"nothing")
    with pytest.raises(InputError, match="cannot be read as a fitted network"):
        ScaleDLPredictor.load(tmp_path)


def test_what_is_shipped_is_small() -> None:
    assert sum(path.stat().st_size for path in ScaleDLPredictor.shipped.iterdir()) < 500_000


def test_runs_that_cannot_be_learned_from_are_told_of(runs: list[Run], folder: Path) -> None:
    unusable = [
        Run(job=on_two_devices(runs[0].job), measured={"step_time_s": 1.0}),
        Run(job=runs[0].job, measured={"kernels": 10.0}),
        Run(job=job(folder, device="cpu"), measured={"step_time_s": 1.0}),
    ]
    predictor = ScaleDLPredictor().fit([*runs[:2], *unusable])
    assert [reason.partition(": ")[2] for reason in predictor.left_out_] == [
        "cluster: 2 devices; scaledl forecasts steps of one GPU that keeps its activations", "no step_time_s",
        "cluster.device: cpu; scaledl forecasts steps on GPUs",
    ]  # fmt: skip
    with pytest.raises(InputError, match="none is of one device"):
        ScaleDLPredictor().fit(unusable)


def test_without_forgets_the_network_and_learns_the_operators_anew(
    fitted: ScaleDLPredictor, runs: list[Run], folder: Path
) -> None:
    shipped = DeletePopPredictor()
    spec = TensorSpec((4, 64), "float32")
    few = [MeasuredOperator.of("relu", (spec,), (spec,), {"self": "%0"}, "h200-sxm-141gb", 1e-3)]
    predictor = ScaleDLPredictor(
        DeletePopPredictor(shipped.costs, shipped.host, operators=lambda: few), fitted.learned_
    )
    forgetful = copy.deepcopy(predictor).without(families=frozenset({"resnet"}))
    with pytest.raises(UnsupportedJob, match="fit it first"):
        forgetful.predict(job(folder))
    forgetful.fit(runs[:2])
    assert forgetful.predict(job(folder))["device_busy_s"].median > 1e-3
    assert predictor.predict(job(folder)).quantities == fitted.predict(job(folder)).quantities


def test_without_the_extra_it_says_what_to_install(runs: list[Run], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(package, "network", raising=False)
    monkeypatch.delitem(sys.modules, "foretrain.predictors.scaledl.network", raising=False)
    monkeypatch.setitem(sys.modules, "torch_geometric.data", None)
    neural._shipped_state.cache_clear()
    with pytest.raises(
        ForetrainError, match=r"^scaledl: torch_geometric is not installed; install foretrain\[learn\]$"
    ):
        ScaleDLPredictor().predict(runs[0].job)
    with pytest.raises(ForetrainError, match="not installed"):
        ScaleDLPredictor().fit(runs)
