"""Operators are collected once, replayed on the CPU, and whatever fails is written down beside what works."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
import torch

import foretrain
from foretrain.costs.measured import operator_key
from foretrain.errors import InputError
from foretrain.graph import OpGraph, TensorSpec
from foretrain.measure.calls import build_call
from foretrain.measure.instances import Instance, by_value, collect, load_instances, save_instances
from foretrain.measure.ops import measure_operators
from foretrain.measure.replay import _match, batch_by_memory, busy_s


@pytest.fixture(scope="module")
def graph() -> OpGraph:
    net = torch.nn.Sequential(
        torch.nn.Conv2d(3, 8, 3),
        torch.nn.BatchNorm2d(8),
        torch.nn.ReLU(),
        torch.nn.AdaptiveAvgPool2d(1),
        torch.nn.Flatten(),
        torch.nn.Linear(8, 8),
        torch.nn.LayerNorm(8),
        torch.nn.Dropout(0.1),
        torch.nn.Linear(8, 4),
    )
    return foretrain.capture(net, torch.empty(4, 3, 16, 16), optimizer="adamw")


@pytest.fixture(scope="module")
def instances(graph: OpGraph) -> list[Instance]:
    return collect([(graph, "fp32")])


def broken(name: str = "no_such_operator") -> Instance:
    spec = TensorSpec((2, 2), "float32")
    return Instance(name=name, overload="default", inputs=(spec,), args={"self": "%0"}, phase="forward")


def test_only_operators_that_launch_are_collected_and_each_once(
    graph: OpGraph, instances: list[Instance]
) -> None:
    assert {one.name for one in instances} >= {
        "convolution",
        "cudnn_batch_norm",
        "addmm",
        "native_layer_norm",
        "_foreach_addcdiv_",
    }
    assert not {one.name for one in instances} & {"view", "t", "detach"}
    assert len({one.key for one in instances}) == len(instances)
    twice = collect([(graph, "fp32"), (graph, "fp32")])
    assert [one.uses for one in twice] == [2 * one.uses for one in instances]


def test_an_operator_of_a_graph_finds_its_instance(graph: OpGraph, instances: list[Instance]) -> None:
    keys = {one.key for one in instances}
    assert all(
        operator_key(one.name, one.inputs, one.args) in keys for one in graph.operators if one.launches
    )


def test_tf32_makes_other_instances_of_matrix_products_only(graph: OpGraph) -> None:
    plain = {one.key for one in collect([(graph, "fp32")])}
    other = [one for one in collect([(graph, "tf32")]) if one.key not in plain]
    assert {one.name for one in other} == {"addmm", "mm"}
    assert {one.precision for one in other} == {"tf32"}


def test_instances_survive_a_file(tmp_path: Path, instances: list[Instance]) -> None:
    save_instances(tmp_path / "operators.jsonl", instances)
    assert [one.key for one in load_instances(tmp_path / "operators.jsonl")] == [one.key for one in instances]


def test_kinds_take_turns_and_large_ones_come_first() -> None:
    def mm(side: int, name: str = "mm") -> Instance:
        spec = TensorSpec((side, side), "float32")
        return Instance(
            name=name,
            overload="default",
            inputs=(spec, spec),
            args={"self": "%0", "mat2": "%1"},
            phase="forward",
            bytes=spec.size_bytes,
        )

    ordered = by_value([*(mm(side) for side in (1, 2, 3, 4)), mm(1, "relu"), mm(9, "relu")])
    assert [(one.name, one.inputs[0].shape[0]) for one in ordered[:3]] == [("mm", 4), ("relu", 9), ("mm", 3)]


def test_every_operator_of_a_step_can_be_replayed(tmp_path: Path, instances: list[Instance]) -> None:
    out = tmp_path / "ops.jsonl"
    summary = measure_operators(instances, out, device="cpu")
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert (summary.measured, summary.failed) == (len(instances), 0)
    assert all(row["warm_s"] > 0 for row in rows)
    assert json.loads((tmp_path / "ops.info.json").read_text())["torch"] == torch.__version__


def test_a_failure_is_recorded_and_the_rest_goes_on(tmp_path: Path, instances: list[Instance]) -> None:
    out = tmp_path / "ops.jsonl"
    summary = measure_operators([broken(), *instances[:2]], out, device="cpu")
    assert (summary.measured, summary.failed) == (2, 1)
    assert len(out.read_text().splitlines()) == 2
    assert "no_such_operator" in json.loads((tmp_path / "ops.failures.jsonl").read_text())["error"]


def test_failures_among_the_results_of_an_older_file_are_failures(
    tmp_path: Path, instances: list[Instance]
) -> None:
    out = tmp_path / "ops.jsonl"
    out.write_text(json.dumps({"key": instances[0].key, "error": "no kernel ran"}) + "\n")
    assert measure_operators(instances[:1], out, device="cpu").failed_before == 1
    assert measure_operators(instances[:1], out, device="cpu", retry_failed=True).measured == 1
    assert measure_operators(instances[:1], out, device="cpu", retry_failed=True).known == 1


def test_a_file_of_something_else_is_not_added_to(tmp_path: Path, instances: list[Instance]) -> None:
    save_instances(tmp_path / "operators.jsonl", instances)
    with pytest.raises(
        InputError, match=r"operators\.jsonl:1: operator: not the line of a measured operator"
    ):
        measure_operators(instances, tmp_path / "operators.jsonl", device="cpu")


def test_a_second_start_goes_on_where_the_first_stopped(tmp_path: Path, instances: list[Instance]) -> None:
    out = tmp_path / "ops.jsonl"
    measure_operators(instances[:3], out, device="cpu")
    summary = measure_operators(instances[:5], out, device="cpu")
    assert (summary.known, summary.measured, summary.left) == (3, 2, 0)
    assert len(out.read_text().splitlines()) == 5


def test_when_the_time_is_up_the_rest_is_left(tmp_path: Path, instances: list[Instance]) -> None:
    summary = measure_operators(instances, tmp_path / "ops.jsonl", device="cpu", budget_s=-1.0)
    assert (summary.measured, summary.left) == (0, len(instances))


def test_a_missing_gpu_is_one_line(tmp_path: Path, instances: list[Instance]) -> None:
    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    with pytest.raises(InputError, match="torch finds no GPU"):
        measure_operators(instances, tmp_path / "ops.jsonl")


@pytest.mark.parametrize("causal", [False, True])
def test_attention_and_its_gradient_are_replayed_through_autograd(causal: bool) -> None:
    class Attention(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            q = k = v = x * self.scale
            return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=causal)

        def __init__(self) -> None:
            super().__init__()
            self.scale = torch.nn.Parameter(torch.ones(1))

    graph = foretrain.capture(Attention(), torch.empty(1, 2, 8, 8), lambda out: out.sum(), precision="bf16")
    found = {one.name: one for one in collect([(graph, "bf16")])}
    output = build_call(found["_scaled_dot_product_flash_attention"], "cpu")()
    gradients = build_call(found["_scaled_dot_product_flash_attention_backward"], "cpu")()
    assert output.shape == (1, 2, 8, 8)
    assert [gradient.shape for gradient in gradients] == [output.shape] * 3


def test_expanded_and_strided_inputs_keep_their_layout() -> None:
    spec = TensorSpec((4, 3, 2), "int64", (0, 1, 3))
    one = Instance(name="clone", overload="default", inputs=(spec,), args={"self": "%0"}, phase="forward")
    assert build_call(one, "cpu")().shape == (4, 3, 2)


def test_kernels_belong_to_the_label_during_which_they_were_launched() -> None:
    labels = [(0, 10, "cold 0 0"), (20, 30, "warm 0 0")]
    launched = {1: 5, 2: 15, 3: 25, 4: 29}
    kernels = [
        (1, "a", 6, 7),
        (2, "flush", 16, 18),
        (3, "a", 26, 29),
        (4, "b", 30, 34),
        (5, "unknown", 35, 40),
    ]
    assert _match(labels, launched, kernels) == {
        "cold 0 0": [("a", 6, 7)],
        "warm 0 0": [("a", 26, 29), ("b", 30, 34)],
    }


def test_kernels_side_by_side_keep_the_device_busy_once() -> None:
    kernels = [("a", 1000, 4000), ("b", 2000, 3000), ("c", 3500, 5000), ("d", 7000, 8000)]
    assert busy_s(kernels) == pytest.approx(5e-6)


def test_batches_stay_within_the_memory() -> None:
    many = [broken(f"operator_{number}") for number in range(10)]
    assert [len(group) for group in batch_by_memory(many, limit_bytes=40, most=3)] == [2] * 5
    assert [len(group) for group in batch_by_memory(many, limit_bytes=1e9, most=3)] == [3, 3, 3, 1]
    assert [len(group) for group in batch_by_memory(many, limit_bytes=1, most=3)] == [1] * 10


def called(name: str, inputs: list[tuple[tuple[int, ...], str]], **args: object) -> Instance:
    specs = tuple(TensorSpec(shape, dtype) for shape, dtype in inputs)
    overload = "Tensor" if "ctc" in name else "default"
    return Instance(name=name, overload=overload, inputs=specs, args=args, phase="forward")


def test_bags_are_filled_evenly_and_their_gradient_is_that_of_the_table() -> None:
    specs = [((50, 4), "float32"), ((30,), "int64"), ((6,), "int64")]
    refs = {"weight": "%0", "indices": "%1", "offsets": "%2"}
    output, _, sizes, _ = build_call(called("_embedding_bag", specs, **refs, mode=1), "cpu")()
    assert output.shape == (6, 4)
    assert sizes.tolist() == [5] * 6 or not sizes.numel()
    gradient = called(
        "_embedding_bag_backward", [((6, 4), "float32"), ((30,), "int64")], num_weights=50, mode=0
    )
    assert build_call(gradient, "cpu")()[0].shape == (50, 4)


def test_packed_recurrences_are_replayed_over_the_steps_they_have() -> None:
    args = {"mode": 2, "hidden_size": 5, "num_layers": 1, "bidirectional": True, "batch_sizes": [3, 2, 1]}
    forward = build_call(called("_cudnn_rnn", [((6, 4), "float32")], **args), "cpu")
    assert forward()[0].data.shape == (6, 10)
    backward = build_call(called("_cudnn_rnn_backward", [((6, 4), "float32")], **args), "cpu")
    assert backward()[0].shape == (6, 4)


def test_label_sequences_have_their_full_length() -> None:
    specs = [((20, 2, 8), "float32"), ((2, 5), "int64"), ((2,), "int64"), ((2,), "int64")]
    loss, alpha = build_call(called("_ctc_loss", specs), "cpu")()
    assert loss.shape == (2,)
    assert alpha.shape == (2, 20, 11)
    gradient = called("_ctc_loss_backward", [((2,), "float32"), *specs])
    assert build_call(gradient, "cpu")().shape == (20, 2, 8)


def test_an_index_reaches_every_row_of_the_dimension_that_it_picks_from() -> None:
    args = {"self": "%0", "indices": ["%1"]}
    gathered = called("index", [((4000, 2), "float32"), ((2000,), "int64")], **args)
    gathered = dataclasses.replace(gathered, overload="Tensor")
    assert len(build_call(gathered, "cpu")().unique(dim=0)) > 1000
