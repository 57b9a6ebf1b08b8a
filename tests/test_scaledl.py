"""ScaleDL: layers and collectives add up to the step on every plan, networks learn a bounded correction that
counts as far as left-out runs bear it out, a folder keeps it."""

from __future__ import annotations

import copy
import dataclasses
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
from foretrain.job import Job
from foretrain.measure.job_candidates import cells_of_jobs, job_candidates
from foretrain.predictors import neural
from foretrain.predictors import scaledl as package
from foretrain.predictors.checks import check_predictor, on_two_devices
from foretrain.predictors.deletepop import DeletePopPredictor
from foretrain.predictors.deletepop.calibration import Calibration
from foretrain.predictors.scaledl.correction import Place, Region, apply, intervals, mixed
from foretrain.predictors.scaledl.graph import (
    DESIGN_COLUMNS,
    NODE_COLUMNS,
    NODES_AT_MOST,
    RUN_COLUMNS,
    TEAMS,
    LayerGraph,
    layer_graph,
)
from foretrain.predictors.scaledl.predictor import ScaleDLPredictor
from foretrain.run import Run

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


def beside_cpus(one: Job) -> Job:
    """The same on one GPU and one CPU."""
    tables = one.to_dict()
    groups = [{"device": "h200-sxm-141gb"}, {"device": "cpu", "cores_per_device": 4}]
    tables = {**tables, "cluster": {"groups": groups}, "plan": {}}
    return Job.read(tables, base=one.workload.base)


def on_machine(one: Job, host: str) -> Job:
    return dataclasses.replace(one, cluster=dataclasses.replace(one.cluster, host=host or None))


def llama(**changes: Any) -> Job:
    """A small Llama on 16 H100 in two nodes."""
    config = {
        "model_type": "llama", "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 4,
        "num_attention_heads": 8, "vocab_size": 1024,
    }  # fmt: skip
    plan = {"tensor": 2, "pipeline": 2, "data": 4, "micro_batch": 1, "shard": "zero1", **changes}
    return Job.read(
        {
            "model": {"source": "transformers", "task": "causal-lm", "config": config},
            "training": {
                "global_batch": 32, "sequence": 128, "precision": "bf16", "framework": "megatron"
            },
            "cluster": {"node": "dgx-h100", "nodes": 2},
            "plan": plan,
        }
    )  # fmt: skip


def layers_of(one: Job) -> LayerGraph:
    return layer_graph(DeletePopPredictor().step(one))


def column(graph: LayerGraph, name: str) -> Any:
    return graph.nodes[:, NODE_COLUMNS.index(name)].astype(np.float64)


@pytest.mark.parametrize("mode", ["train", "infer"])
def test_it_passes_the_conformance_checks(folder: Path, mode: str) -> None:
    check_predictor(predictors.get("scaledl"), job(folder, mode=mode, samples=100, epochs=2))


def test_layers_add_up_to_the_step(folder: Path) -> None:
    step = DeletePopPredictor().step(job(folder))
    graph = layer_graph(step)
    microseconds = np.expm1(column(graph, "device_time")).sum()
    assert microseconds == pytest.approx(step.device_busy_s * 1e6, rel=1e-4)
    assert graph.share.sum() == pytest.approx(1.0, abs=1e-5)
    assert graph.base_s == step.time_s
    assert graph.additive_s == pytest.approx(step.device_busy_s, rel=1e-4)


def test_data_flow_forward_through_the_layers_and_back(folder: Path) -> None:
    graph = layers_of(job(folder))
    assert graph.edges.min() >= 0
    assert graph.edges.max() < len(graph.nodes)
    forward, backward = (column(graph, name) == 1 for name in ("forward", "backward"))
    source, target = graph.edges
    assert (forward[source] & backward[target]).any()
    assert not (backward[source] & forward[target]).any()


def test_many_layers_are_joined_to_few(folder: Path) -> None:
    assert 80 < len(layers_of(job(folder, depth=80)).nodes) <= NODES_AT_MOST


def test_inference_has_forward_layers_only(folder: Path) -> None:
    assert set(column(layers_of(job(folder, mode="infer")), "forward")) == {1.0}


def test_collectives_of_every_team_are_nodes() -> None:
    graph = layers_of(llama())
    teams = {team for team in TEAMS if column(graph, team).any()}
    assert teams == {"tensor", "replicas", "stages"}
    moving = sum(column(graph, team) for team in TEAMS) > 0
    assert (column(graph, "sent")[moving] > 0).all()
    assert (np.expm1(column(graph, "device_time"))[moving] > 0).all()
    assert set(graph.edges.ravel()) >= set(np.flatnonzero(moving))
    assert graph.additive_s > 0


def test_a_node_of_a_stage_counts_for_all_stages_alike() -> None:
    few, many = (layers_of(llama(pipeline=stages, data=8 // stages)) for stages in (2, 4))
    assert column(many, "stages_alike").max() > column(few, "stages_alike").max()
    shares = [graph.run[RUN_COLUMNS.index("pipeline")] for graph in (few, many)]
    assert shares == [1.0, 2.0]


def test_sharded_parameters_are_fetched_before_layers_run() -> None:
    graph = layers_of(llama(tensor=1, pipeline=1, data=16, shard="zero3"))
    fetching = np.flatnonzero((column(graph, "replicas") == 1) & (column(graph, "forward") == 1))
    assert len(fetching) == 1
    reached = graph.edges[1][graph.edges[0] == fetching[0]]
    assert (column(graph, "forward")[reached] == 1).all()
    assert len(reached) > 3


def test_every_plan_is_forecast() -> None:
    predictor = predictors.get("scaledl")
    plain = DeletePopPredictor()
    for changes in ({}, {"recompute": "full"}, {"tensor": 1, "pipeline": 1, "data": 16, "shard": "zero3"}):
        one = llama(**changes)
        ratio = predictor.predict(one)["step_time_s"].median / plain.predict(one)["step_time_s"].median
        assert 0.49 < ratio < 2.05


def test_the_correction_is_learned_from_runs_of_other_architectures(
    fitted: ScaleDLPredictor, folder: Path
) -> None:
    asked = job(folder, "net")
    plain = DeletePopPredictor().predict(asked)["step_time_s"].median
    assert fitted.predict(asked)["step_time_s"].median == pytest.approx(1.3 * plain, rel=0.1)


def test_the_busy_time_is_not_corrected(fitted: ScaleDLPredictor, folder: Path) -> None:
    asked = job(folder)
    plain, corrected = (one.predict(asked) for one in (DeletePopPredictor(), fitted))
    assert corrected["device_busy_s"].median == plain["device_busy_s"].median
    assert corrected["step_time_s"].median > plain["step_time_s"].median


def test_the_correction_is_bounded(runs: list[Run], folder: Path) -> None:
    slow = [Run(job=run.job, measured={"step_time_s": 4 * run.measured["step_time_s"]}) for run in runs]
    asked = job(folder)
    ratio = (
        ScaleDLPredictor().fit(slow).predict(asked)["step_time_s"].median
        / DeletePopPredictor().predict(asked)["step_time_s"].median
    )
    assert 1.5 < ratio < 2.1


def test_without_torch_the_networks_say_the_same(fitted: ScaleDLPredictor, runs: list[Run]) -> None:
    import torch

    from foretrain.predictors.scaledl import network

    graph = layers_of(llama())
    member = network.CorrectionMember(len(NODE_COLUMNS), len(RUN_COLUMNS))
    learned = fitted.state().members[0]
    member.load_state_dict(
        {name: torch.from_numpy(np.array(value, np.float32)) for name, value in learned.items()}
    )
    known = network.Known(graph=graph, place=Place.of(llama()), family="llama", measured_s=1.0)
    with_torch = network._apply(member.eval(), [network._data(known)])[0]
    assert apply(learned, graph, mixed(graph)) == pytest.approx(with_torch, abs=1e-5)


def test_what_left_out_runs_do_not_bear_out_is_not_corrected(runs: list[Run], folder: Path) -> None:
    """Noise that nothing tells: networks fit it, and left-out runs show that it was nothing."""
    noise = np.random.default_rng(0).normal(size=2 * len(runs)).tolist()
    noisy = [
        Run(job=run.job, measured={"step_time_s": run.measured["step_time_s"] / 1.3 * np.exp(0.3 * one)})
        for run, one in zip([*runs, *runs], noise, strict=True)
    ]
    predictor = ScaleDLPredictor().fit(noisy)
    asked = job(folder)
    plain = DeletePopPredictor().predict(asked)["step_time_s"].median
    assert predictor.predict(asked)["step_time_s"].median == pytest.approx(plain, rel=0.15)


def test_how_near_a_job_lies_is_named() -> None:
    places = [Place(device="h100-sxm", framework="megatron", mode="train", devices=64)]
    region = Region.around([*places, Place(device="t4", framework="pytorch", mode="train", devices=1)])

    def trust(device: str, framework: str, devices: int = 8) -> str:
        return region.trust(Place(device=device, framework=framework, mode="train", devices=devices))

    assert trust("h100-sxm", "megatron") == "seen"
    assert trust("h100-sxm", "megatron", 128) == "larger"
    assert trust("h100-sxm", "pytorch") == "device"
    assert trust("a100-sxm", "megatron") == "framework"
    assert trust("a100-sxm", "nanotron") == "neither"


def test_devices_far_from_all_runs_are_told_of(fitted: ScaleDLPredictor, folder: Path) -> None:
    near, far = (fitted.predict(job(folder, device=name)) for name in ("h200-sxm-141gb", "mi250"))
    assert any("these devices with this framework were learned from" in note for note in near.assumptions)
    assert any("not corrected: runs of this framework on other devices" in note for note in far.assumptions)
    wide, narrow = (one["step_time_s"].high / one["step_time_s"].low for one in (far, near))
    assert wide > narrow


def test_intervals_hold_their_share_of_weighted_runs() -> None:
    ratios = np.exp(np.random.default_rng(1).normal(0.0, 0.2, size=4000))
    found = intervals(ratios, np.where(ratios > 1, 1.0, 3.0))
    inside = (found.low <= ratios) & (ratios <= found.high)
    held = np.where(ratios > 1, 1.0, 3.0)[inside].sum() / np.where(ratios > 1, 1.0, 3.0).sum()
    assert 0.78 < held < 0.86


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


def test_residuals_may_come_from_forecasts_that_have_not_seen_the_family(
    runs: list[Run], folder: Path
) -> None:
    """Graphs whose steps are a tenth shorter leave a tenth more to correct."""
    import dataclasses

    plain = ScaleDLPredictor()

    def shorter(run: Run) -> LayerGraph:
        graph = plain.layer_graph(run)
        return dataclasses.replace(graph, base_s=graph.base_s / 1.1)

    asked = job(folder, "net")
    usual = DeletePopPredictor().predict(asked)["step_time_s"].median
    learned = ScaleDLPredictor().fit(runs, played=shorter)
    assert learned.predict(asked)["step_time_s"].median == pytest.approx(1.43 * usual, rel=0.1)


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
    assert sum(path.stat().st_size for path in ScaleDLPredictor.shipped.iterdir()) < 2_000_000


def test_runs_that_cannot_be_learned_from_are_told_of(runs: list[Run], folder: Path) -> None:
    unusable = [
        Run(job=runs[0].job, measured={"kernels": 10.0}),
        Run(job=beside_cpus(runs[0].job), measured={"step_time_s": 1.0}),
    ]
    predictor = ScaleDLPredictor().fit([*runs[:2], *unusable])
    assert [reason.partition(": ")[2] for reason in predictor.left_out_] == [
        "no step_time_s",
        "cluster.groups: CPUs beside GPUs; scaledl forecasts steps on either",
    ]
    with pytest.raises(InputError, match="none has a step time"):
        ScaleDLPredictor().fit(unusable)


def test_cpu_workers_are_not_corrected_by_what_gpus_taught(folder: Path) -> None:
    shipped, plain = predictors.get("scaledl"), DeletePopPredictor()
    one = job(folder, device="cpu")
    told = shipped.predict(one)
    assert told["step_time_s"] == plain.predict(one)["step_time_s"]
    assert "no run of mode train on CPU workers was learned from: the played step is not corrected" in (
        told.assumptions
    )


def test_a_step_that_is_not_corrected_is_no_surer_than_it_was_played(runs: list[Run]) -> None:
    one = runs[0].job
    told = ScaleDLPredictor().fit(runs[:1]).predict(one)["step_time_s"]
    played = DeletePopPredictor().predict(one)["step_time_s"]
    assert told.median == played.median
    assert told.low <= played.low
    assert told.high >= played.high


def test_cpu_workers_are_corrected_by_runs_of_their_own(folder: Path) -> None:
    plain, jobs = DeletePopPredictor(), [job(folder, kind, device="cpu") for kind in KINDS]
    fitted = ScaleDLPredictor().fit(
        Run(job=one, measured={"step_time_s": 1.4 * plain.predict(one)["step_time_s"].median})
        for one in [*jobs, *(job(folder, kind, depth=3, device="cpu") for kind in KINDS)]
    )
    one = jobs[0]
    assert fitted.predict(one)["step_time_s"].median == pytest.approx(
        1.4 * plain.predict(one)["step_time_s"].median, rel=0.1
    )
    gpu = job(folder)
    assert fitted.predict(gpu)["step_time_s"] == plain.predict(gpu)["step_time_s"]


@pytest.mark.parametrize(
    ("asked", "trust"),
    [("", "seen"), ("AMD EPYC, 2 cores", "seen"), ("Intel Xeon, 16 cores", "framework")],
)
def test_a_cpu_is_known_by_its_machine_where_a_job_tells_it(asked: str, trust: str, folder: Path) -> None:
    known, one = job(folder, device="cpu"), job(folder, device="cpu")
    region = Region.around([Place.of(on_machine(known, "AMD EPYC, 2 cores"))])
    assert region.trust(Place.of(on_machine(one, asked))) == trust


def test_runs_of_two_devices_are_learned_from(runs: list[Run]) -> None:
    plain = DeletePopPredictor()
    two = [on_two_devices(run.job) for run in runs]
    doubled = [
        Run(job=one, measured={"step_time_s": 1.5 * plain.predict(one)["step_time_s"].median}) for one in two
    ]
    fitted = ScaleDLPredictor().fit([*runs, *doubled])
    assert not fitted.left_out_
    assert fitted.predict(two[0])["step_time_s"].median > 1.2 * plain.predict(two[0])["step_time_s"].median


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


def test_without_the_extra_it_forecasts_and_says_what_learning_needs(
    runs: list[Run], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(package, "network", raising=False)
    monkeypatch.delitem(sys.modules, "foretrain.predictors.scaledl.network", raising=False)
    monkeypatch.setitem(sys.modules, "torch_geometric.data", None)
    neural._shipped_state.cache_clear()
    assert ScaleDLPredictor().predict(runs[0].job)["step_time_s"].median > 0
    with pytest.raises(
        ForetrainError, match=r"^scaledl: torch_geometric is not installed; install foretrain\[learn\]$"
    ):
        ScaleDLPredictor().fit(runs)


# Design


def test_a_design_is_over_what_the_played_step_says(folder: Path) -> None:
    row = predictors.get("scaledl").design_row(job(folder))
    step = DeletePopPredictor().step(job(folder))
    assert tuple(row) == DESIGN_COLUMNS
    assert row["device_time"] == pytest.approx(np.log(step.device_busy_s), abs=1e-4)
    assert row["host_over_device"] == pytest.approx(np.log(step.host_issue_s / step.device_busy_s), abs=1e-4)
    assert row["kernel_time"] == pytest.approx(np.log(step.device_busy_s / step.kernels), abs=1e-4)
    assert row["devices"] == row["exposed communication"] == row["pipeline bubble"] == 0.0
    many = predictors.get("scaledl").design_row(llama())
    assert many["devices"] == 4.0
    assert many["exposed communication"] > 0
    assert many["pipeline bubble"] > 0


def test_a_design_has_no_jobs_that_networks_cannot_learn_from(folder: Path) -> None:
    with pytest.raises(UnsupportedJob, match="CPUs beside GPUs"):
        predictors.get("scaledl").design_row(beside_cpus(job(folder)))


def test_a_design_has_squares_and_products(folder: Path) -> None:
    jobs = [job(folder, depth=depth, global_batch=batch) for depth in (1, 2, 4) for batch in (4, 64, 1024)]
    found = job_candidates(cells_of_jobs(jobs), predictors.get("scaledl"), step_s=lambda _: 1.0)
    varied = ("device_time", "host_over_device", "kernel_time")
    assert {"1", *varied, "device_time * device_time", "device_time * kernel_time"} <= {
        *found.candidates.names
    }
    generic = job_candidates(cells_of_jobs(jobs), DeletePopPredictor(), step_s=lambda _: 1.0)
    assert not any("*" in name for name in generic.candidates.names)
