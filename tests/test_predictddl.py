"""Tests PredictDDL: primitives and embeddings, regressors chosen on unseen architectures, refusals."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from foretrain import predictors
from foretrain.capture import capture_job
from foretrain.errors import InputError, UnsupportedJob
from foretrain.forecast import Forecast
from foretrain.job import Job
from foretrain.predictors.base import Table
from foretrain.predictors.blackbox import UNSURE
from foretrain.predictors.checks import check_predictor
from foretrain.predictors.predictddl.baseline import CPU, baseline, fit_baseline, physics
from foretrain.predictors.predictddl.features import (
    CLUSTER_COLUMNS,
    FAMILY_COLUMNS,
    cluster_columns,
    dataset_type,
    work_of,
)
from foretrain.predictors.predictddl.predictor import (
    OTHERS,
    GraphEmbedder,
    PredictDDLPredictor,
    embedding_module,
)
from foretrain.predictors.predictddl.primitives import KINDS, SHAPES, primitives
from foretrain.predictors.predictddl.regressors import CANDIDATES, REGRESSORS, Problem, Scaled, choose
from foretrain.run import Run

MODELS = """
import torch
from torch import nn

class Residual(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.one, self.two = nn.Conv2d(width, width, 3, padding=1), nn.Conv2d(width, width, 1)
        self.norm = nn.BatchNorm2d(width)
    def forward(self, x):
        return x + self.two(torch.relu(self.norm(self.one(x))))

def net(batch, width=8, depth=2):
    blocks = [Residual(width) for _ in range(depth)]
    head = (nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, 10))
    return nn.Sequential(nn.Conv2d(3, width, 3, padding=1), *blocks, *head)

a = b = c = d = e = f = net
"""
FEW = ("constant", "log-linear, ridge 3", "polynomial, ridge 3")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    made = tmp_path_factory.mktemp("predictddl")
    (made / "models.py").write_text(MODELS)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FORETRAIN_CACHE", str(made / "cache"))
        yield made


def job(
    base: Path,
    kind: str = "net",
    workers: int = 1,
    width: int = 8,
    depth: int = 2,
    device: str = "cpu",
    plan: Any = None,
    **training: Any,
) -> Job:
    model = {"source": "python", "name": f"models.py:{kind}", "args": {"width": width, "depth": depth}}
    section = {"global_batch": 8 * workers, "image": 32, "classes": 10, **training}
    cluster = {
        "device": device,
        "devices_per_node": workers,
        **({"cores_per_device": 1} if device == "cpu" else {}),
    }
    return Job.read({"model": model, "training": section, "cluster": cluster, "plan": plan or {}}, base=base)


@pytest.fixture(scope="module")
def runs(folder: Path) -> list[Run]:
    """Steps of six architectures whose time follows their work and the workers."""
    jobs = [
        job(folder, kind, workers, 8 * (1 + number), 1 + number % 3)
        for number, kind in enumerate("abcdef")
        for workers in (1, 2, 4, 8)
    ]
    return [Run(job=one, measured={"step_time_s": time_s(one)}) for one in jobs]


def time_s(one: Job) -> float:
    work = work_of(one, capture_job(one))
    return float(3 * work.arithmetic_s.sum() + 80 * work.traffic_s.sum() + 1e-4 * work.calls) * (
        1 + 0.05 * one.cluster.world_size
    )


@pytest.fixture(scope="module")
def fitted(runs: list[Run]) -> PredictDDLPredictor:
    return PredictDDLPredictor(embedding=GraphEmbedder(embedding_module().untrained()), candidates=FEW).fit(
        runs
    )


def width(forecast: Forecast) -> float:
    return float(np.log(forecast["step_time_s"].high / forecast["step_time_s"].low))


# Features


def test_dataset_types_are_known_by_the_size_of_images(folder: Path) -> None:
    asked = {
        (32, 10): "cifar10",
        (64, 200): "tiny-imagenet",
        (64, 10): "tiny-imagenet",
        (224, 1000): "imagenet",
        (160, 447): "imagenet",
        (48, 5): "cifar10",
    }
    for (image, classes), name in asked.items():
        assert dataset_type(job(folder, image=image, classes=classes)) == name


def test_image_models_at_their_default_size_are_imagenet() -> None:
    plain = {"model": {"source": "torchvision", "name": "resnet50"}, "training": {"global_batch": 8}}
    cluster = {"device": "cpu", "devices_per_node": 1, "cores_per_device": 1}
    assert dataset_type(Job.read({**plain, "cluster": cluster})) == "imagenet"
    few = {**plain, "training": {"global_batch": 8, "image": 32, "classes": 10}}
    assert dataset_type(Job.read({**few, "cluster": cluster})) == "cifar10"


def test_a_graph_becomes_its_primitives(folder: Path) -> None:
    graph = primitives(capture_job(job(folder, depth=2)))
    counts = dict(zip(KINDS, graph.kinds.sum(axis=0).tolist(), strict=True))
    assert (
        counts["convolution"],
        counts["pointwise convolution"],
        counts["sum"],
        counts["batch normalisation"],
        counts["product"],
    ) == (
        3,
        2,
        2,
        2,
        1,
    )
    assert graph.shapes.shape == (len(graph.kinds), len(SHAPES))
    assert (graph.edges[0] < graph.edges[1]).all()
    assert set(graph.edges[1].tolist()) == set(range(1, len(graph.kinds)))


def test_columns_have_names_and_work_adds_up(folder: Path) -> None:
    one = job(folder, workers=2)
    graph = capture_job(one)
    work = work_of(one, graph)
    assert len(work.columns) == len(FAMILY_COLUMNS)
    assert len(cluster_columns(one, work.parameters)) == len(CLUSTER_COLUMNS)
    assert work.arithmetic_s.sum() * one.cluster.device.peak_flops("fp32") == pytest.approx(
        graph.total("flops")
    )


def test_equal_graphs_are_embedded_once(fitted: PredictDDLPredictor, folder: Path) -> None:
    graph = capture_job(job(folder, "a"))
    assert fitted.embed(graph, "cifar10") is fitted.embed(copy.deepcopy(graph), "cifar10")


# The engine


@pytest.mark.parametrize("name", CANDIDATES)
def test_every_regressor_learns_a_plane_and_comes_back_from_arrays(name: str) -> None:
    rows = np.random.default_rng(0).normal(size=(200, 4))
    targets = rows @ [0.3, -0.2, 0.1, 0.0] + 1
    model = Scaled.learn(CANDIDATES[name](), rows[:150], targets[:150])
    found = model.predict(rows[150:])
    if name != "constant":
        assert np.abs(found - targets[150:]).mean() < 0.1
    kind = type(model.regressor)
    assert REGRESSORS[kind.kind] is kind
    again = kind.from_arrays(model.regressor.to_arrays())
    assert (again.predict(model.scaled(rows)) == model.predict(rows)).all()


def test_the_baseline_finds_its_parameters_again(runs: list[Run]) -> None:
    works = [work_of(run.job, capture_job(run.job)) for run in runs]
    terms = physics(works, [run.job for run in runs])
    targets = np.log([run.measured["step_time_s"] for run in runs])
    logs = fit_baseline(terms, targets)
    assert len(logs) == len(CPU.names)
    assert np.abs(baseline(logs, terms) - targets).mean() < 0.05


@given(st.integers(0, len(CPU.names) - 2), st.floats(0.01, 2.0))
def test_more_of_anything_never_takes_less_time(place: int, more: float) -> None:
    from foretrain.predictors.predictddl.families import FAMILIES
    from foretrain.predictors.predictddl.features import OperatorWork

    one = Job.read(
        {
            "model": {"source": "torchvision", "name": "resnet18"},
            "training": {"global_batch": 32, "image": 32, "classes": 10},
            "cluster": {"device": "cpu", "devices_per_node": 4, "cores_per_device": 1},
        }
    )
    ones = np.ones(len(FAMILIES))
    terms = physics(
        [
            OperatorWork(
                arithmetic_s=ones,
                traffic_s=ones,
                calls=9.0,
                convolutions=3.0,
                parameters=1e6,
                activations_bytes=1e6,
            )
        ],
        [one],
    )
    logs = np.zeros(len(CPU.names))
    before = baseline(logs, terms)
    logs[place] = more
    assert (baseline(logs, terms) >= before - 1e-12).all()


def test_the_regressor_that_does_best_on_other_architectures_is_chosen() -> None:
    draw = np.random.default_rng(0)
    rows = draw.normal(size=(80, 3))
    problem = Problem(
        rows=rows,
        terms=None,
        targets=rows @ [1.0, 0.5, 0.0],
        groups=[str(i // 4) for i in range(80)],
        types=["x"] * 80,
        steps=[str(i) for i in range(80)],
    )
    choice = choose(problem)["x"]
    assert choice.name != "constant"
    assert choice.errors[choice.name] == min(choice.errors.values()) < choice.errors["constant"] / 5


def test_repeats_of_a_step_are_left_out_together_where_all_are_of_one_architecture() -> None:
    """Four measurements of each step tell its noise by heart, and nothing else."""
    draw = np.random.default_rng(0)
    rows, noise = draw.normal(size=(12, 3)), draw.normal(size=12)
    times = 4
    problem = Problem(
        rows=np.tile(rows, (times, 1)),
        terms=None,
        targets=np.tile(noise, times),
        groups=["x"] * 12 * times,
        types=["x"] * 12 * times,
        steps=[str(i) for i in range(12)] * times,
    )
    errors = choose(problem)["x"].errors
    assert min(errors.values()) > 0.3


def test_repeats_of_one_step_tell_of_no_other(runs: list[Run]) -> None:
    """None can be left out, so there is no error to be told."""
    learned = PredictDDLPredictor().without().fit(runs[:1] * 3)
    (benefit,) = learned.benefits_.values()
    assert (benefit.runs, benefit.error_before, benefit.error_after) == (3, None, None)
    (table,) = learned.report()
    assert isinstance(table, Table)
    assert table.rows[0][2:] == (None, None)


# The predictor


def test_it_passes_the_conformance_checks(folder: Path) -> None:
    check_predictor(
        PredictDDLPredictor(embedding=GraphEmbedder(embedding_module().untrained()), candidates=FEW),
        job(folder, samples=100, epochs=2),
    )
    check_predictor(predictors.get("predictddl"), job(folder, "d"))


@pytest.mark.parametrize("form", ["ratio", "paper"])
def test_an_architecture_that_was_not_seen_is_forecast(form: Any, runs: list[Run], folder: Path) -> None:
    predictor = PredictDDLPredictor(
        form=form, embedding=GraphEmbedder(embedding_module().untrained()), candidates=FEW
    ).fit(runs)
    asked = job(folder, "net", workers=4, width=20, depth=2)
    assert predictor.predict(asked)["step_time_s"].median == pytest.approx(
        time_s(asked), rel=0.1 if form == "ratio" else 0.5
    )


def test_an_unknown_dataset_type_is_forecast_by_what_the_others_share_and_named(
    fitted: PredictDDLPredictor, folder: Path
) -> None:
    known, other = (fitted.predict(job(folder, "a", depth=1, image=size)) for size in (32, 64))
    assert other.assumptions[0] == (
        "training: dataset type 'tiny-imagenet' was not learned from, only cifar10"
    )
    assert other["step_time_s"].median > known["step_time_s"].median
    assert width(other) > 1.5 * width(known)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"device": "h200-sxm-141gb"},
            "cluster.device: 'h200-sxm-141gb'; predictddl learned from cpu; train one: foretrain fit",
        ),
        (
            {"mode": "infer"},
            "training.mode: 'infer'; the predictor of cifar10 on cpu learned from train; train one",
        ),
        (
            {"adapter": "lora:4"},
            "training.adapter: 'lora 4'; the predictor of cifar10 on cpu learned from runs without; train one",
        ),
    ],
)
def test_what_was_not_learned_from_is_refused(
    fitted: PredictDDLPredictor, folder: Path, settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(UnsupportedJob, match=f"^{message}"):
        fitted.predict(job(folder, **settings))


def test_a_setting_that_no_run_had_widens_the_interval_and_is_named(
    fitted: PredictDDLPredictor, folder: Path
) -> None:
    known, other = (
        fitted.predict(job(folder, "a", depth=1)),
        fitted.predict(job(folder, "a", depth=1, optimizer="adamw")),
    )
    assert "training.optimizer: adamw was not learned from, only sgd" in other.assumptions
    assert (
        other["step_time_s"].high / other["step_time_s"].low
        > (known["step_time_s"].high / known["step_time_s"].low) ** 1.5
    )


def test_links_and_ways_of_exchange_that_no_run_had_are_named() -> None:
    def told(kind: str, **plan: Any) -> Forecast:
        return PredictDDLPredictor().predict(
            Job.read({
                "model": {"source": "torchvision", "name": "resnet18"},
                "training": {"global_batch": 64, "image": 32, "classes": 10},
                "cluster": {
                    "device": "cpu", "cores_per_device": 1, "nodes": 4,
                    "inter_node": {"kind": kind, "bandwidth": "10 Gb/s"},
                },
                "plan": {"servers": 1, **plan},
            })
        )  # fmt: skip

    def width(forecast: Forecast) -> float:
        return forecast["step_time_s"].high / forecast["step_time_s"].low

    known, others = told("ethernet"), [told("infiniband"), told("ethernet", asynchronous=True)]
    notes = ["cluster.inter_node.kind: infiniband", "plan.asynchronous: True"]
    for other, note in zip(others, notes, strict=True):
        assert any(one.startswith(f"{note} was not learned from") for one in other.assumptions)
        assert width(other) > 1.1 * width(known)


def test_what_lies_far_from_everything_seen_gets_a_wide_interval_and_says_so(
    fitted: PredictDDLPredictor, folder: Path
) -> None:
    near, far = (
        fitted.predict(job(folder, "a", width=8, depth=1)),
        fitted.predict(job(folder, workers=64, width=96, depth=30)),
    )
    assert near.assumptions == ()
    assert "lies far from everything learned" in far.assumptions[0]
    assert far.assumptions[-1].endswith("times as wide")
    assert (
        far["step_time_s"].high / far["step_time_s"].low > near["step_time_s"].high / near["step_time_s"].low
    )


# Links, cores and machines


def on_nodes(name: str, nodes: int = 1, rate: str | None = None, **cluster: Any) -> Job:
    """A CIFAR-10 job of one worker per node."""
    section: dict[str, Any] = {
        "device": "cpu", "devices_per_node": 1, "cores_per_device": 1, "nodes": nodes, "host": HOST, **cluster,
    }  # fmt: skip
    if rate is not None:
        section["inter_node"] = {"kind": "ethernet", "bandwidth": rate}
    training = {"global_batch": 16 * nodes, "image": 32, "classes": 10}
    model = {"source": "torchvision", "name": name}
    return Job.read({"model": model, "training": training, "cluster": section})


HOST = "Intel(R) Xeon(R) Processor, 16 cores"


def test_a_slower_link_takes_longer_by_what_its_rate_takes(fitted: PredictDDLPredictor) -> None:
    """VGG-11 on 16 nodes sends 966 MB from each of them, whatever was learned."""
    for predictor in (fitted, predictors.get("predictddl")):
        alone, *slower = (
            predictor.predict(on_nodes("vgg11", *where))
            for where in ((1, None), (16, "100 Gb/s"), (16, "1 Gb/s"), (16, "10 Mb/s"))
        )
        medians = [one["step_time_s"].median for one in slower]
        assert medians[0] < medians[1] / 2
        assert medians[2] - medians[1] == pytest.approx(966e6 * (1 / 1.25e6 - 1 / 1.25e8), rel=0.3)
        assert medians[2] > 100 * alone["step_time_s"].median
        assert width(slower[2]) >= width(slower[1]) > width(alone)
        assert any(
            note.startswith("cluster.nodes: 16 was not learned from") for note in slower[2].assumptions
        )
        assert any(note.startswith("cluster.inter_node: ") for note in slower[2].assumptions)


def test_servers_on_nodes_of_their_own_are_reached_over_the_network(fitted: PredictDDLPredictor) -> None:
    """VGG-11 has 515 MB of gradients, which go there and back as weights."""
    alone = on_nodes("vgg11", 1, "10 Mb/s").to_dict()
    beside, apart = (
        Job.read({**alone, "plan": {"servers": 1}, "cluster": {**alone["cluster"], **servers}})
        for servers in ({}, {"servers": {"nodes": 1}})
    )
    for predictor in (fitted, predictors.get("predictddl")):
        near, far = predictor.predict(beside), predictor.predict(apart)
        longer_s = far["step_time_s"].median - near["step_time_s"].median
        assert longer_s == pytest.approx(2 * 515e6 / 1.25e6, rel=0.3)
        assert width(far) > width(near)
        assert "cluster.servers.nodes: 1, and no run was made with any" in far.assumptions
        assert not any("node" in note for note in near.assumptions)


def test_a_worker_of_more_cores_is_faster_and_its_forecast_less_sure(
    fitted: PredictDDLPredictor, folder: Path
) -> None:
    found = [
        fitted.predict(Job.read({**one.to_dict(), "cluster": {**one.cluster.to_dict(), "cores_per_device": cores}}, base=folder))
        for one in [job(folder, "d", width=32)]
        for cores in (1, 2, 4)
    ]  # fmt: skip
    assert found[0]["step_time_s"].median > found[1]["step_time_s"].median > found[2]["step_time_s"].median
    assert width(found[0]) < width(found[1]) < width(found[2])
    assert "cluster.cores_per_device: 4 was not learned from, only 1" in found[2].assumptions


def measured_on(run: Run, host: str | None, factor: float = 1.0) -> Run:
    about = {} if host is None else {"host": host}
    times = {"step_time_s": factor * run.measured["step_time_s"]}
    return Run.read(
        {"job": run.job.to_dict(), "measured": times, "provenance": about}, base=run.job.workload.base
    )


def test_a_machine_is_known_by_its_runs_and_another_one_widens_the_interval(runs: list[Run]) -> None:
    both = [
        measured_on(run, host, factor)
        for host, factor in (("Intel Xeon, 16 cores", 1.0), ("AMD EPYC, 16 cores", 2.0))
        for run in runs
    ]
    predictor = PredictDDLPredictor(embedding=None, candidates=FEW).fit(both)
    xeon, epyc, other, unnamed = (
        predictor.predict(measured_on(runs[0], host).job)
        for host in ("16-core Xeon, virtual machine", "AMD EPYC, 16 cores", "Graviton, 16 cores", None)
    )
    ratio = epyc["step_time_s"].median / xeon["step_time_s"].median
    assert ratio == pytest.approx(2.0, rel=0.1)
    assert xeon.assumptions == epyc.assumptions == ()
    assert xeon["step_time_s"].median < other["step_time_s"].median < epyc["step_time_s"].median
    assert other["step_time_s"].low < xeon["step_time_s"].median
    assert other["step_time_s"].high > epyc["step_time_s"].median
    assert other.assumptions[0].startswith("cluster.host: graviton, 16 cores, and runs were made on epyc, ")
    assert unnamed.assumptions[0].startswith("cluster.host: not given, and runs were made on epyc, 16 cores")


def test_more_workers_than_a_machine_has_cores_share_them(fitted: PredictDDLPredictor, folder: Path) -> None:
    def step_s(host: str) -> float:
        return fitted.predict(measured_on(Run(job=job(folder, "a", 4), measured={"step_time_s": 1.0}), host).job)[
            "step_time_s"
        ].median  # fmt: skip

    assert step_s("Xeon, 2 cores") == pytest.approx(2 * step_s("Xeon, 4 cores"), rel=0.3)


def test_a_column_that_never_varied_makes_a_job_far(fitted: PredictDDLPredictor) -> None:
    assert fitted.learned_ is not None
    trained = fitted.learned_["cpu: cifar10"]
    constant = int(np.flatnonzero(np.isinf(trained.model.deviation))[-1])
    row = trained.seen[0].astype(np.float64)
    row[constant] += 100.0
    one = job(Path(), "a")
    near, far = trained.judge(one, trained.seen[0].astype(np.float64)), trained.judge(one, row)
    assert not near[1]
    assert "lies far from everything learned" in far[1][0]
    assert far[0].high > near[0].high


def test_each_dataset_type_has_its_own_predictor_on_disk(
    runs: list[Run], folder: Path, tmp_path: Path
) -> None:
    other = [Run(job=job(folder, kind, image=64, classes=10), measured={"step_time_s": 0.2}) for kind in "ab"]
    PredictDDLPredictor(embedding=None, candidates=FEW).fit([*runs, *other]).save(tmp_path)
    document = json.loads((tmp_path / "predictor.json").read_text())
    assert [one["type"] for one in document["types"]] == [
        f"cpu: {name}" for name in ("cifar10", "tiny-imagenet", OTHERS)
    ]
    again = PredictDDLPredictor.load(tmp_path)
    assert again.predict(other[0].job)["step_time_s"].median == pytest.approx(0.2, rel=0.2)
    assert again.learned_ is not None
    assert again.learned_["cpu: tiny-imagenet"].spread == UNSURE


def test_a_later_fit_keeps_the_dataset_types_of_an_earlier_one(
    runs: list[Run], folder: Path, tmp_path: Path
) -> None:
    other = [Run(job=job(folder, kind, image=64, classes=10), measured={"step_time_s": 0.2}) for kind in "ab"]
    PredictDDLPredictor(embedding=None, candidates=FEW).fit(runs).save(tmp_path)
    both = PredictDDLPredictor.load(tmp_path).fit(other)
    assert both.learned_ is not None
    assert list(both.learned_) == [f"cpu: {name}" for name in ("cifar10", OTHERS, "tiny-imagenet")]
    assert both.learned_[f"cpu: {OTHERS}"].types == ["cifar10"]
    assert (
        both.predict(runs[0].job)["step_time_s"]
        == PredictDDLPredictor.load(tmp_path).predict(runs[0].job)["step_time_s"]
    )


def test_no_arithmetic_is_forecast_faster_than_the_device_can(folder: Path) -> None:
    """Runs that all do the same arithmetic in no time teach no factor below one."""
    jobs = [job(folder, kind, width=8 * (1 + number)) for number, kind in enumerate("abcdef")]
    fast = PredictDDLPredictor(embedding=None, candidates=("constant",)).fit(
        [Run(job=one, measured={"step_time_s": 1e-6}) for one in jobs]
    )
    wide = job(folder, width=512)
    assert fast.learned_ is not None
    terms = physics([work := work_of(wide, capture_job(wide))], [wide])
    factors = fast.learned_["cpu: cifar10"].baseline
    assert factors is not None
    assert float(np.exp(baseline(factors, terms))[0]) >= work.arithmetic_s.sum()


def test_a_damaged_folder_is_one_line(fitted: PredictDDLPredictor, tmp_path: Path) -> None:
    fitted.save(tmp_path)
    document = json.loads((tmp_path / "predictor.json").read_text())
    del document["types"][0]["reach"]
    (tmp_path / "predictor.json").write_text(json.dumps(document))
    with pytest.raises(InputError, match="lacks 'reach'; fit it again"):
        PredictDDLPredictor.load(tmp_path)
    (tmp_path / "arrays.safetensors").write_text("no")
    with pytest.raises(InputError, match=r"arrays.safetensors: cannot be read"):
        PredictDDLPredictor.load(tmp_path)


def test_a_folder_with_other_features_is_refused(fitted: PredictDDLPredictor, tmp_path: Path) -> None:
    fitted.save(tmp_path)
    document = json.loads((tmp_path / "predictor.json").read_text())
    document["columns"][0] = "luck"
    (tmp_path / "predictor.json").write_text(json.dumps(document))
    with pytest.raises(InputError, match="fit it again"):
        PredictDDLPredictor.load(tmp_path)
