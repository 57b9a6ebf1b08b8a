"""The Python API: what ``predict`` takes, how options go over a job, and modules in hand."""

from __future__ import annotations

import functools
import inspect
import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import foretrain
from foretrain import CaptureError, Forecast, InputError, Job, Run, UnsupportedJob
from foretrain.api import job_of, make_job
from foretrain.capture import capture, capture_rank
from foretrain.capture.sources.in_hand import Example
from foretrain.graph import OpGraph
from foretrain.options import optimizer_name, option_names, places
from foretrain.predictors.roofline import RooflinePredictor
from foretrain.report.evidence import evidence_table
from foretrain.report.explain import explain
from foretrain.web.page import page as whole_page
from foretrain.web.table import forecast_table

predict = functools.partial(foretrain.predict, predictor="roofline")

pytestmark = pytest.mark.usefixtures("own_cache")


class Classifier(nn.Module):
    def __init__(self, width: int = 16, classes: int = 10) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(8, width), nn.Linear(width, classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.relu(self.body(x)))  # type: ignore[no-any-return]


def graph_of(forecast: Forecast) -> OpGraph:
    return capture_rank(forecast.job)


def shapes(graph: OpGraph) -> list[Any]:
    """What runs on the device, call by call."""
    return [(op.operator.name, op.operator.inputs, op.phase) for op in graph.ops if op.operator.launches]


def median(forecast: Forecast, name: str = "step_time_s") -> float:
    return forecast[name].median


# What it takes

TABLES: dict[str, Any] = {
    "model": {"source": "python", "name": "nets.py:build"},
    "training": {"global_batch": 8, "samples": 80, "epochs": 2},
    "cluster": {"device": "a100"},
}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """With a model of the user's own and a job that trains it."""
    source = "import torch\ndef build(batch):\n    return torch.nn.Linear(8, 3), torch.zeros(batch, 8)\n"
    (tmp_path / "nets.py").write_text(source)
    (tmp_path / "job.json").write_text(json.dumps(TABLES))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_a_job_in_any_form_is_the_same_job(folder: Path) -> None:
    job = Job.load(Path("job.json"))
    line = {"job": TABLES, "measured": {"step_time_s": 1.0}}
    forms: list[Any] = ["job.json", Path("job.json"), folder / "job.json", TABLES, job, line, Run.read(line)]
    expected = median(predict(job))
    for form in forms:
        forecast = predict(form)
        assert median(forecast) == expected
        assert forecast.job.to_dict() == job.to_dict()
    assert median(predict("nets.py:build", device="a100", batch=8)) == expected


@pytest.mark.parametrize("form", ["file", "tables", "job"])
def test_options_go_over_the_fields_of_a_job(folder: Path, form: str) -> None:
    target = {"file": "job.json", "tables": TABLES, "job": Job.read(TABLES)}[form]
    options = {
        "batch": 32, "devices": 16, "device": "h100", "precision": torch.bfloat16, "steps": 7,
        "optimizer": torch.optim.Adam, "shard": "zero2", "loader_rate": 1e4, "node_mtbf": "50d",
        "checkpoint_every": 5, "host": "Xeon Platinum 8480", "title": "mine",
    }  # fmt: skip
    job = job_of(target, options)
    training, cluster = job.workload.training, job.cluster
    assert (training.global_batch, training.precision, training.optimizer) == (32, "bf16", "adam")
    assert (training.steps, training.epochs, training.samples) == (7, None, 80)
    assert (training.loader_rate, training.checkpoint_every) == (1e4, 5)
    assert (cluster.nodes, cluster.devices_per_node, cluster.device.name) == (2, 8, "h100-sxm-80gb")
    assert (cluster.node_mtbf, cluster.host) == (50 * 86400, "Xeon Platinum 8480")
    assert (job.plan.data, job.plan.shard, job.workload.model.label) == (16, "zero2", "mine")
    assert job_of(target) == Job.read(TABLES)


def test_every_field_of_a_job_is_an_option() -> None:
    assert {"batch", "devices", "loader_workers", "evaluate_every", "restart_time", "tensor_plan", "title",
            "machines", "asynchronous", "groups", "inter_node"} <= set(option_names())  # fmt: skip
    parameters = inspect.signature(foretrain.predict).parameters
    assert list(parameters)[:3] == ["model", "inputs", "loss"]
    assert set(option_names()) - set(parameters) == {"global_batch"}
    assert places()["servers"] == ("cluster", "plan")


def test_servers_are_a_number_of_the_plan_or_a_table_of_the_cluster() -> None:
    both = job_of({**TABLES, "plan": {"servers": 2}}, {"servers": {"nodes": 2, "cores": 4}})
    assert both.plan.servers == 2
    assert both.cluster.servers is not None
    assert job_of(TABLES, {"servers": 1}).plan.servers == 1


def spread(tables: dict[str, Any], **options: Any) -> tuple[int, int]:
    cluster = job_of({**TABLES, "training": {"global_batch": 960}, "cluster": tables}, options).cluster
    return cluster.nodes, cluster.devices_per_node


def test_devices_in_all_are_spread_over_nodes() -> None:
    assert spread({"device": "h100", "devices_per_node": 4}, devices=8) == (1, 8)
    assert spread({"device": "h100"}, devices=16) == (2, 8)
    assert spread({"device": "h100", "devices_per_node": 4, "nodes": 2}, devices=16) == (4, 4)
    assert spread({"device": "h100", "devices_per_node": 4, "nodes": 2}, devices=2) == (1, 2)
    assert spread({"device": "h100", "devices_per_node": 4, "nodes": 2}, devices=6) == (2, 3)
    assert spread({"device": "h100"}, devices=8, devices_per_node=4) == (2, 4)
    assert spread({"device": "h100"}, devices=8, nodes=4) == (4, 2)
    assert spread({"node": "dgx-h100", "nodes": 2}, device="h100") == (2, 8)
    for options, message in (
        ({"devices": 6, "nodes": 4}, "devices: 6 does not divide over nodes = 4"),
        ({"devices": 6, "devices_per_node": 4}, "devices: 6 does not divide over devices_per_node = 4"),
        ({"devices": 8, "devices_per_node": 4, "nodes": 4}, "is not devices_per_node 4 x nodes 4"),
        ({"devices": 0}, "devices: 0 is not a whole number of at least 1"),
        ({"devices": "4"}, "devices: '4' is not a whole number"),
    ):
        with pytest.raises(InputError, match=message):
            spread({"device": "h100"}, **options)


def test_a_degree_that_is_given_replaces_the_data_parallel_one() -> None:
    tables = {**TABLES, "cluster": {"device": "h100", "devices_per_node": 8}, "plan": {"data": 8}}
    assert job_of(tables, {"tensor": 2}).plan.data == 4
    with pytest.raises(InputError, match=r"^plan: data 8 x tensor 2"):
        job_of(tables, {"tensor": 2, "data": 8})


def test_numbers_of_numpy_are_numbers() -> None:
    job = make_job("resnet18", batch=np.int64(64), loader_rate=np.float32(0.5))
    assert (job.workload.training.global_batch, job.workload.training.loader_rate) == (64, 0.5)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"batch_size": 8}, "batch_size: unknown; did you mean batch?"),
        ({"gpus": 8}, "gpus: unknown; did you mean devices?"),
        ({"num_gpus": 8}, "num_gpus: unknown; did you mean devices?"),
        ({"world_size": 8}, "world_size: unknown; did you mean devices?"),
        ({"gpu": "h100"}, "gpu: unknown; did you mean device?"),
        ({"seq_len": 8}, "seq_len: unknown; did you mean sequence?"),
        ({"sequence_length": 8}, "sequence_length: unknown; did you mean sequence?"),
        ({"dtype": "bf16"}, "dtype: unknown; did you mean precision?"),
        (
            {"gradient_accumulation_steps": 2},
            "gradient_accumulation_steps: unknown; did you mean micro_batch?",
        ),
        ({"labels": 2}, "labels: unknown; did you mean targets?"),
        ({"lr": 0.1}, "lr: unknown; the learning rate changes neither time nor memory; leave it out"),
        ({"presicion": "fp32"}, "presicion: unknown; did you mean precision?"),
        ({"nonsense": 1}, "nonsense: unknown; options are the fields of a job by name"),
        ({"batch": 8, "global_batch": 4}, "batch: 8 and global_batch: 4 are the same; give one"),
        ({"epochs": 1, "steps": 2}, "training.steps: 2 and training.epochs: 1.0 are both given; give one"),
        ({"precision": torch.int8}, "training.precision: torch.int8 is not one of"),
        ({"inputs": 1}, "inputs: only a module in hand takes them, not a model's name"),
    ],
)
def test_a_wrong_option_names_the_right_one(options: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError) as error:
        predict("resnet18", **options)
    assert str(error.value).startswith(message)
    assert "\n" not in str(error.value)


def test_what_is_no_model_says_what_would_be() -> None:
    targets: tuple[tuple[Any, str], ...] = (
        (Classifier, r"^model: the class Classifier \(an instance of it would do\)"),
        (lambda batch: None, r"^model: the function <lambda> \(in a file, file.py:function would do\)"),
        (3, r"^model: an int is not a module, a job, a path or a model's name$"),
        ("runs.jsonl", r"^runs\.jsonl: a file of many jobs, and one is forecast here$"),
        ("nothing.toml", r"^nothing\.toml: "),
    )
    for target, message in targets:
        with pytest.raises(InputError, match=message):
            predict(target)


def test_a_predictor_may_be_an_object(folder: Path) -> None:
    by_name = predict("job.json")
    assert median(foretrain.predict("job.json", predictor=RooflinePredictor())) == median(by_name)


# A module in hand


def test_the_batch_of_a_module_is_that_of_all_devices() -> None:
    module, inputs = Classifier(), torch.zeros(4, 8)
    at_16 = capture(module, torch.zeros(16, 8))
    cases: list[tuple[dict[str, Any], tuple[int, int, int]]] = [
        ({}, (4, 4, 1)),
        ({"devices": 4}, (16, 4, 1)),
        ({"devices": 4, "batch": 16}, (16, 4, 1)),
        ({"devices": 4, "batch": 64}, (64, 16, 1)),
        ({"devices": 4, "batch": 64, "micro_batch": 4}, (64, 4, 4)),
        ({"devices": 4, "micro_batch": 2}, (8, 2, 1)),
        ({"batch": 2}, (2, 2, 1)),
        ({"devices": 2, "pipeline": 2, "batch": 8, "micro_batch": 2}, (8, 2, 4)),
        ({"devices": 4, "shard": "zero3", "batch": 64}, (64, 16, 1)),
        ({"devices": 2, "offload": True, "batch": 8}, (8, 4, 1)),
        ({"devices": 2, "servers": 1, "batch": 8}, (8, 4, 1)),
        ({"recompute": "full"}, (4, 4, 1)),
    ]
    for options, (batch, at_once, times) in cases:
        forecast = predict(module, inputs, **options)
        job, graph = forecast.job, graph_of(forecast)
        assert (job.workload.training.global_batch, job.micro_batch, job.accumulation) == (
            batch,
            at_once,
            times,
        )
        assert (graph.samples, graph.accumulates) == (at_once, times > 1)
        if at_once == 16:
            assert shapes(graph) == shapes(at_16)
    assert median(predict(module, inputs, devices=4, batch=64)) > 0


def test_several_devices_need_a_batch_that_divides() -> None:
    with pytest.raises(InputError, match=r"^training.global_batch: 6 does not divide over plan.data = 4$"):
        predict(Classifier(), torch.zeros(4, 8), devices=4, batch=6)


def test_layers_of_a_module_in_hand_are_not_cut() -> None:
    for name in ("tensor", "context"):
        plan: dict[str, Any] = {name: 2}
        with pytest.raises(UnsupportedJob, match=rf"^plan.{name}: 2 cuts layers.* give file\.py:function$"):
            predict(Classifier(), torch.zeros(4, 8), devices=2, **plan)


class Masked(nn.Module):
    """Takes named inputs, some with a row per sample."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(50, 8), nn.Linear(8, 50)

    def forward(self, input_ids: Tensor, mask: Tensor | None = None, scale: Tensor | None = None) -> Tensor:
        hidden = self.table(input_ids)
        hidden = hidden if mask is None else hidden * mask.unsqueeze(-1)
        return self.head(hidden if scale is None else hidden * scale).transpose(1, 2)  # type: ignore[no-any-return]


def test_all_inputs_with_a_row_per_sample_are_resized() -> None:
    def inputs(rows: int) -> dict[str, Any]:
        return {"input_ids": torch.zeros(rows, 6, dtype=torch.long), "mask": torch.ones(rows, 6),
                "scale": torch.ones(8)}  # fmt: skip

    for rows in (1, 3):
        shared = inputs(rows) if rows > 1 else {name: inputs(1)[name] for name in ("input_ids", "mask")}
        forecast = predict(Masked(), shared, batch=12)
        exact = predict(Masked(), {**shared, **{name: inputs(12)[name] for name in ("input_ids", "mask")}})
        assert graph_of(forecast).digest() == graph_of(exact).digest()
        assert forecast.job.workload.training.sequence == 6
        assert median(forecast, "tokens_per_s") == pytest.approx(6 * median(forecast, "samples_per_s"))


def test_the_layout_of_resized_inputs_is_kept() -> None:
    images = torch.zeros(2, 3, 8, 8).to(memory_format=torch.channels_last)
    module = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(), nn.LazyLinear(2))
    module(images)
    exact = predict(module, torch.zeros(6, 3, 8, 8).to(memory_format=torch.channels_last))
    assert graph_of(predict(module, images, batch=6)).digest() == graph_of(exact).digest()
    across = torch.zeros(8, 4).t()
    exact = predict(Classifier(), torch.zeros(6, 8))
    assert graph_of(predict(Classifier(), across, batch=6)).digest() == graph_of(exact).digest()


def test_resized_inputs_keep_their_values() -> None:
    ids, numbers, many = torch.arange(3), torch.arange(6.0).view(3, 2).t(), torch.zeros(3, 2**20)
    example = Example.of(Classifier(), (ids, {"many": many}))
    resized = example.at(5)
    assert resized[0].tolist() == [0, 1, 2, 0, 1]
    assert resized[1]["many"].is_meta
    assert resized[1]["many"].shape == (5, 2**20)
    by_column = Example(inputs=(numbers,), samples=3, along=1)
    assert by_column.at(4)[0].tolist() == [[0, 2, 4, 0], [1, 3, 5, 1]]
    assert by_column.at(4)[0].stride() == numbers.stride() == (1, 2)


class Joined(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x: Tensor, others: Tensor) -> Any:
        return self.layer(x) @ self.layer(others).t()


def test_inputs_that_grow_in_an_unclear_way_are_refused() -> None:
    with pytest.raises(
        InputError, match=r"of 4 samples, and the job takes 8 at once; how a tensor of \[12, 8\]"
    ):
        predict(Joined(), (torch.zeros(4, 8), torch.zeros(12, 8)), batch=8)
    with pytest.raises(InputError, match=r"of 1 samples.*\[3, 8\].*give inputs of 8 samples$"):
        predict(Joined(), (torch.zeros(1, 8), torch.zeros(3, 8)), batch=8)
    fixed = nn.Sequential(nn.Flatten(0), nn.Linear(32, 4), nn.Unflatten(0, (1, 4)))
    with pytest.raises(CaptureError, match=r"^inputs: of 4 samples, resized to the 8 .* or micro_batch=4$"):
        predict(fixed, torch.zeros(4, 8), batch=8)
    assert predict(fixed, torch.zeros(4, 8), batch=8, micro_batch=4).job.accumulation == 2
    with pytest.raises(CaptureError, match=r"unexpected keyword argument 'image'"):
        predict(Classifier(), {"image": torch.zeros(4, 8)}, batch=8)
    with pytest.raises(InputError, match=r"^inputs: 3 is not a tensor, or a tuple or a dict of them$"):
        predict(Classifier(), 3)


class Recurrent(nn.Module):
    """Takes tokens by time and sample, as the layer in it does, or turns them round."""

    def __init__(self, turns: bool) -> None:
        super().__init__()
        self.table, self.layer, self.turns = nn.Embedding(9, 4), nn.LSTM(4, 8), turns

    def forward(self, tokens: Tensor) -> Tensor:
        return self.layer(self.table(tokens.t() if self.turns else tokens))[0]  # type: ignore[no-any-return]


@pytest.mark.parametrize("turns", [False, True])
def test_samples_are_where_layers_take_them_to_be(turns: bool) -> None:
    def by_time(samples: int) -> Tensor:
        tokens = torch.zeros(5, samples, dtype=torch.long)
        return tokens.t().contiguous() if turns else tokens

    module = Recurrent(turns)
    alone, more = (predict(module, by_time(3), Tensor.sum, batch=batch) for batch in (None, 12))
    assert (alone.job.micro_batch, more.job.micro_batch) == (3, 12)
    assert shapes(graph_of(more)) == shapes(graph_of(predict(module, by_time(12), Tensor.sum)))
    assert not module.layer._forward_pre_hooks


def test_inputs_follow_from_what_the_job_says_of_them() -> None:
    module = nn.Sequential(nn.Flatten(), nn.Linear(3 * 4 * 4, 5))
    assert graph_of(predict(module, image=4, batch=6)).samples == 6
    assert median(predict(nn.Sequential(nn.Embedding(9, 4), nn.Flatten(), nn.Linear(20, 4)), sequence=5)) > 0
    with pytest.raises(InputError, match=r"^inputs: missing; .* give examples, or image=, or sequence=$"):
        predict(module)


def test_a_replicated_module_is_the_one_inside() -> None:
    module = Classifier()
    whole = predict(module, torch.zeros(4, 8))
    assert graph_of(predict(nn.DataParallel(module), torch.zeros(4, 8))).digest() == graph_of(whole).digest()


def test_weights_that_are_kept_in_a_low_precision_say_so() -> None:
    module = Classifier().to(torch.bfloat16)
    forecast = predict(module, torch.zeros(4, 8, dtype=torch.bfloat16))
    assert forecast.job.workload.training.precision == "bf16"
    given = predict(Classifier(), torch.zeros(4, 8), precision=torch.bfloat16)
    assert graph_of(given).digest() == graph_of(forecast).digest()


# Losses


def test_a_loss_of_torch_takes_targets() -> None:
    module, inputs, targets = Classifier(), torch.zeros(4, 8), torch.zeros(4, dtype=torch.long)
    plain = shapes(graph_of(predict(module, inputs)))
    for loss in (
        nn.CrossEntropyLoss(),
        F.cross_entropy,
        lambda output, classes: F.cross_entropy(output, classes),
    ):
        assert shapes(graph_of(predict(module, inputs, loss, targets=targets))) == plain
    assert shapes(graph_of(predict(module, inputs, targets=targets))) == plain
    squares = graph_of(predict(module, inputs, nn.MSELoss(), targets=torch.zeros(4, 10)))
    assert any("mse_loss" in operator.name for operator in squares.operators)


def test_targets_are_resized_with_the_inputs() -> None:
    module, inputs, targets = Classifier(), torch.zeros(4, 8), torch.zeros(4, dtype=torch.long)
    exact = shapes(graph_of(predict(module, torch.zeros(12, 8))))
    resized = predict(module, inputs, nn.CrossEntropyLoss(), targets=targets, batch=12)
    assert shapes(graph_of(resized)) == exact


def test_tensors_that_a_loss_closes_over_are_resized_with_the_inputs() -> None:
    module, inputs, targets = Classifier(), torch.zeros(4, 8), torch.zeros(4, 1, dtype=torch.long)
    exact = shapes(graph_of(predict(module, torch.zeros(12, 8))))

    def loss(output: Tensor) -> Tensor:
        assert targets.shape[0] == len(targets) == output.shape[0]
        return F.cross_entropy(output, targets.view(-1))

    assert shapes(graph_of(predict(module, inputs, loss, batch=12))) == exact
    weighted = nn.CrossEntropyLoss(weight=torch.ones(4))
    four = Classifier(classes=4)
    assert median(predict(four, inputs, lambda output: weighted(output, targets[:, 0]))) > 0
    assert targets.shape == (4, 1)


@pytest.mark.parametrize(
    ("loss", "targets", "message"),
    [
        (
            nn.CrossEntropyLoss(),
            None,
            r"^loss: CrossEntropyLoss takes 2 arguments; give targets=\.\.\., or a loss of",
        ),
        (lambda output: output.sum(), torch.zeros(4), r"^targets: the loss takes the output alone"),
        ("cross_entropy", None, r"^loss: 'cross_entropy' is not a callable"),
        (lambda output: (output, 1), None, r"^loss: it returned tuple; a tensor of one number is allowed$"),
        (lambda output: output, None, r"^loss: it returned a tensor of \[4, 10\]; one number is allowed"),
    ],
)
def test_a_loss_that_cannot_be_one_is_told(loss: Any, targets: Tensor | None, message: str) -> None:
    with pytest.raises((InputError, CaptureError), match=message):
        predict(Classifier(), torch.zeros(4, 8), loss, targets=targets)


# Optimizers


class Own(torch.optim.AdamW):
    """A user's variant."""


def test_optimizers_have_the_names_of_jobs() -> None:
    weights = [nn.Parameter(torch.zeros(2))]
    optimizers: list[tuple[Any, str]] = [
        (torch.optim.AdamW, "adamw"),
        (torch.optim.SGD, "sgd-plain"),
        (torch.optim.SGD(weights, momentum=0.9), "sgd"),
        (torch.optim.AdamW(weights, fused=True), "adamw-fused"),
        (functools.partial(torch.optim.Adam, fused=True), "adam-fused"),
        (functools.partial(torch.optim.SGD, momentum=0.9), "sgd"),
        (torch.optim.Adam([{"params": weights, "fused": True}]), "adam-fused"),
        (Own(weights), "adamw"),
        (torch.optim.RMSprop, "rmsprop"),
        ("lamb", "lamb"),
    ]
    assert [optimizer_name(one) for one, _ in optimizers] == [name for _, name in optimizers]
    with pytest.raises(InputError, match=r"^training.optimizer: LBFGS is not one of sgd, sgd-plain, adam, "):
        predict("resnet18", optimizer=torch.optim.LBFGS)


def phase(forecast: Forecast, name: str = "optimizer") -> list[str]:
    graph = graph_of(forecast)
    return [op.operator.name for op in graph.ops if op.phase == name]


def test_what_an_optimizer_is_set_to_is_what_a_step_computes() -> None:
    module, inputs = Classifier(), torch.zeros(4, 8)

    def given(make: Callable[..., Any], **settings: Any) -> Forecast:
        return predict(module, inputs, optimizer=make(module.parameters(), lr=0.5, **settings))

    usual = given(torch.optim.SGD, momentum=0.5)
    assert graph_of(usual).digest() == graph_of(predict(module, inputs, optimizer="sgd")).digest()
    decayed = given(torch.optim.SGD, momentum=0.9, weight_decay=1e-4)
    assert len(phase(decayed)) == len(phase(usual)) + 1
    assert "the optimizer as given: sgd with weight_decay 0.0001" in decayed.assumptions
    left_out = predict(usual.job, optimizer=functools.partial(torch.optim.SGD, momentum=0.9, nesterov=True))
    assert left_out.assumptions[-1].endswith("as the name stands for, and not sgd with nesterov True")
    adam, kept = given(torch.optim.Adam), given(torch.optim.Adam, amsgrad=True)
    size = 4 * sum(parameter.numel() for parameter in module.parameters())
    assert kept.memory_by_category["optimizer_state"] == adam.memory_by_category["optimizer_state"] + size
    assert not any("foreach" in name for name in phase(given(torch.optim.Adam, foreach=False)))
    assert any("_fused_sgd" in name for name in phase(given(torch.optim.SGD, momentum=0.9, fused=True)))
    assert phase(given(torch.optim.AdamW, weight_decay=0.0)) != phase(given(torch.optim.AdamW))
    centred = given(torch.optim.RMSprop, centered=True)
    assert centred.memory_by_category["optimizer_state"] > 1.9 * size


def test_a_module_in_hand_is_trained_with_a_scaler_unless_told_otherwise() -> None:
    module = Classifier()
    scaled, plain = (
        graph_of(predict(module, torch.zeros(4, 8), device="a100", precision="amp-fp16", grad_scaler=scales))
        for scales in (None, False)
    )
    names = [{op.operator.name for op in graph.ops} for graph in (scaled, plain)]
    assert ["_amp_foreach_non_finite_check_and_unscale_" in found for found in names] == [True, False]


def test_an_optimizer_updates_what_it_was_given() -> None:
    module, inputs = Classifier(), torch.zeros(4, 8)
    head = 2 * 4 * sum(parameter.numel() for parameter in module.head.parameters())
    forecast = predict(module, inputs, optimizer=torch.optim.Adam(module.head.parameters()))
    assert forecast.memory_by_category["optimizer_state"] == pytest.approx(head, abs=64)
    with pytest.raises(InputError, match=r"^optimizer: it holds no parameter of the module"):
        predict(module, inputs, optimizer=torch.optim.Adam(Classifier().parameters()))


# Names


def page(forecast: Forecast) -> str:
    """The page of a forecast alone, but for its scripts."""
    table = forecast_table(forecast, RooflinePredictor(), seconds=0.0)
    return re.sub(r"<script>.*?</script>", "", whole_page("a page", table.to_dict()), flags=re.DOTALL)


def test_a_module_is_called_by_its_class_everywhere() -> None:
    narrow, wide = (predict(Classifier(width), torch.zeros(4, 8)) for width in (16, 64))
    title = "Classifier (314 parameters)"
    assert wide.job.workload.model.label == "Classifier (1.23k parameters)"
    found = explain(narrow, wide)
    assert found.fields["model.name"] == (title, "Classifier (1.23k parameters)")
    assert narrow.to_dict()["job"]["model"]["title"] == title
    shown = [
        str(narrow),
        repr(narrow),
        narrow._repr_html_(),
        page(narrow),
    ]
    assert all(title in text for text in shown)
    for text in (*shown, str(evidence_table(narrow.evidence)), str(narrow.assumptions), str(found.fields)):
        assert "module-" not in text
    assert predict(Classifier(), torch.zeros(4, 8), title="mine").job.workload.model.label == "mine"
    with pytest.raises(InputError, match=r"the graph Classifier \(314 parameters\) was captured with 'fp32'"):
        predict(narrow.job, precision="bf16")


def test_a_graph_is_called_by_its_file(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "step.json.zst"
    capture(Classifier(), torch.zeros(4, 8)).save(path)
    assert predict(path, device="a100").job.workload.model.label == "step.json.zst"
    with pytest.raises(InputError, match=r"^training.precision: .* was captured with 'fp32', not 'bf16'$"):
        predict(path, precision="bf16")


def test_forecasts_write_nothing(capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture) -> None:
    foretrain.predict(Classifier(), torch.zeros(4, 8), devices=2, batch=16)
    assert capfd.readouterr() == ("", "")
    assert not caplog.messages


# docs/python.md


def test_the_examples_of_the_documentation_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = (Path(__file__).parent.parent / "docs" / "python.md").read_text()
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {"__name__": "examples"}
    monkeypatch.setitem(sys.modules, "examples", type(sys)("examples"))
    blocks = re.findall(r"```python\n(.*?)```", text, re.S)
    assert len(blocks) > 3
    for block in blocks:
        exec(compile(block, "docs/python.md", "exec"), names)
