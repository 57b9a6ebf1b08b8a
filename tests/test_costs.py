"""Costs: no operator beats either roof, more work never costs less, and what launches nothing is free."""

from __future__ import annotations

import dataclasses
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from foretrain.catalog.hosts import Host
from foretrain.cluster import Catalog, Device
from foretrain.costs.host import PLAIN_HOST, DispatchHost
from foretrain.costs.kernels import kernel_count
from foretrain.costs.recurrences import is_persistent
from foretrain.costs.roofline import Roofline, arithmetic
from foretrain.costs.workspace import library_workspace, operator_workspace
from foretrain.graph import Operator, TensorSpec

CATALOG = Catalog()
H100 = CATALOG.device("h100-sxm-80gb")
DEVICES = st.sampled_from(
    [CATALOG.device(name) for name in ("h100-sxm-80gb", "a100-sxm-80gb", "t4", "mi100", "cpu")]
)
PRECISIONS = st.sampled_from(["fp32", "tf32", "amp-bf16", "bf16", "fp16", "fp8"])
WORK = st.integers(0, 10**15)


def operator(
    name: str = "mm",
    flops: int = 0,
    read: int = 0,
    written: int = 0,
    launches: bool = True,
    dtype: str = "float32",
    **args: Any,
) -> Operator:
    return Operator(
        name,
        "default",
        (TensorSpec((4, 4), dtype),),
        (TensorSpec((4, 4), dtype),),
        args,
        flops,
        read,
        written,
        launches,
    )


OPERATORS = st.builds(
    operator,
    st.sampled_from(["mm", "convolution", "add", "relu"]),
    WORK,
    WORK,
    WORK,
    dtype=st.sampled_from(["float32", "float64", "bfloat16", "float16", "int64", "float8_e4m3fn"]),
)


def seconds(costs: Roofline, operator: Operator, device: Device = H100, precision: str = "fp32") -> float:
    return float(costs.device_time_s([operator], device, precision)[0])


# The roofline


@given(OPERATORS, DEVICES, PRECISIONS)
def test_an_operator_beats_neither_roof_nor_the_floor(call: Operator, device: Device, precision: str) -> None:
    time_s = seconds(Roofline(), call, device, precision)
    roofs = (
        call.flops / device.peak_flops(arithmetic(call, precision)),
        call.bytes / device.memory_bytes_per_s,
        Roofline().kernel_floor_s,
    )
    assert time_s == pytest.approx(max(roofs))


@given(OPERATORS, DEVICES, PRECISIONS, WORK, WORK, WORK)
def test_more_work_never_costs_less(
    call: Operator, device: Device, precision: str, flops: int, read: int, written: int
) -> None:
    more = replace(
        call,
        flops=call.flops + flops,
        bytes_read=call.bytes_read + read,
        bytes_written=call.bytes_written + written,
    )
    assert seconds(Roofline(), more, device, precision) >= seconds(Roofline(), call, device, precision)


@given(OPERATORS, st.floats(0.05, 1), st.floats(0.05, 1))
def test_less_efficiency_never_costs_less(some: Operator, compute: float, memory: float) -> None:
    worse = Roofline(compute_efficiency=compute, memory_efficiency=memory)
    assert seconds(worse, some) >= seconds(Roofline(), some)


@given(WORK, WORK, DEVICES)
def test_what_launches_nothing_costs_nothing(flops: int, read: int, device: Device) -> None:
    assert seconds(Roofline(), operator("view", flops, read, launches=False), device) == 0


@given(st.lists(OPERATORS, max_size=5), DEVICES)
def test_a_column_holds_each_operator_as_if_alone(some: list[Operator], device: Device) -> None:
    column = Roofline().device_time_s(some, device, "fp32")
    np.testing.assert_array_equal(column, np.array([seconds(Roofline(), one, device) for one in some]))


def test_a_matrix_product_by_hand() -> None:
    costs = Roofline(kernel_floor_s=0)
    assert H100.tf32 is not None
    assert seconds(costs, operator(flops=10**12)) == pytest.approx(1e12 / H100.peak_flops("fp32"))
    assert seconds(costs, operator(flops=10**12), precision="tf32") == pytest.approx(1e12 / H100.tf32)
    assert seconds(costs, operator(read=10**9, written=10**9)) == pytest.approx(2e9 / H100.memory_bytes_per_s)


@pytest.mark.parametrize(
    ("name", "dtype", "precision", "expected"),
    [
        ("mm", "float32", "fp32", "fp32"),
        ("mm", "float32", "tf32", "tf32"),
        ("convolution", "float32", "fp32", "tf32"),
        ("_cudnn_rnn", "float32", "fp32", "tf32"),
        ("add", "float32", "tf32", "fp32"),
        ("mm", "bfloat16", "amp-bf16", "bf16"),
        ("convolution", "float16", "amp-fp16", "fp16"),
        ("mm", "bfloat16", "fp8", "bf16"),
        ("_grouped_mm", "bfloat16", "fp8", "fp8"),
        ("bmm", "bfloat16", "fp8", "bf16"),
        ("mm", "float64", "fp32", "fp64"),
        ("embedding", "int64", "fp32", "fp32"),
    ],
)
def test_the_number_format_of_an_operator(name: str, dtype: str, precision: str, expected: str) -> None:
    assert arithmetic(operator(name, dtype=dtype), precision) == expected


@pytest.mark.parametrize(
    ("first", "second", "expected"),
    [("float8_e5m2", "float8_e4m3fn", "fp8"), ("bfloat16", "float8_e4m3fn", "fp8"),
     ("float4_e2m1fn_x2", "float4_e2m1fn_x2", "fp4")],
)  # fmt: skip
def test_the_format_of_a_scaled_product_is_that_of_its_second_matrix(
    first: str, second: str, expected: str
) -> None:
    inputs = (TensorSpec((16, 16), first), TensorSpec((16, 16), second))
    assert arithmetic(Operator("_scaled_mm", "default", inputs, (), {}, 0, 0, 0, True), "bf16") == expected


def test_an_operator_without_inputs_is_costed_in_fp32() -> None:
    assert arithmetic(Operator("rand", "default", (), (), {}, 0, 0, 0, True), "bf16") == "fp32"


# Kernels


def foreach(*sizes: int, lists: int = 1, name: str = "_foreach_add_") -> Operator:
    inputs = tuple(TensorSpec((size,), "float32") for _ in range(lists) for size in sizes)
    args = {f"list{i}": [f"%{i * len(sizes) + j}" for j in range(len(sizes))] for i in range(lists)}
    return Operator(name, "List", inputs, (), args, 0, 0, 0, True)


def test_a_call_is_one_kernel_and_a_view_none() -> None:
    assert kernel_count(operator()) == 1
    assert kernel_count(operator("view", launches=False)) == 0


@pytest.mark.parametrize(
    ("mask", "kernels"), [([True, True, True], 3), ([False, True, False], 1), ([False, False, False], 1)]
)
def test_a_convolution_launches_one_kernel_per_gradient(mask: list[bool], kernels: int) -> None:
    assert kernel_count(operator("convolution_backward", output_mask=mask)) == kernels


def test_windows_are_unfolded_sample_by_sample() -> None:
    def unfold(strides: tuple[int, ...] | None) -> Operator:
        return Operator(
            "im2col", "default", (TensorSpec((8, 3, 4, 4), "float32", strides),), (), {}, 0, 0, 0, True
        )

    assert [kernel_count(unfold(strides)) for strides in (None, (48, 1, 12, 3))] == [8, 10]


def test_a_ctc_loss_copies_its_lengths_and_collects_blanks_apart_where_it_is_large() -> None:
    def backward(steps: int) -> Operator:
        scores = TensorSpec((steps, 8, 32), "float32")
        return Operator("_ctc_loss_backward", "Tensor", (scores, scores), (), {}, 0, 0, 0, True)

    assert kernel_count(operator("_ctc_loss")) == 4
    assert kernel_count(backward(50)) == 7
    assert kernel_count(backward(500)) == 21


@pytest.mark.parametrize(
    ("call", "kernels"),
    [
        (foreach(*[10] * 110), 1),
        (foreach(*[10] * 111), 2),
        (foreach(*[10] * 64, lists=2), 1),
        (foreach(*[10] * 65, lists=2), 2),
        (foreach(*[10] * 36, lists=4, name="_fused_adamw_"), 1),
        (foreach(*[10] * 60, lists=6, name="_fused_adamw_"), 2),
        (foreach(320 * 65536), 1),
        (foreach(320 * 65536 + 1), 2),
    ],
)
def test_a_multi_tensor_call_is_cut_by_tensors_and_by_chunks(call: Operator, kernels: int) -> None:
    assert kernel_count(call) == kernels


@given(st.lists(st.integers(1, 10**8), min_size=1, max_size=150), st.integers(1, 10**8), st.integers(1, 6))
def test_one_more_tensor_never_needs_fewer_kernels(sizes: list[int], another: int, lists: int) -> None:
    assert (
        kernel_count(foreach(*sizes, another, lists=lists)) >= kernel_count(foreach(*sizes, lists=lists)) >= 1
    )


# The host


def test_the_host_by_hand() -> None:
    host = dataclasses.replace(
        PLAIN_HOST, forward_s=3, backward_s=5, view_s=1, optimizer_s=7, optimizer_tensor_s=0.5
    )
    view = operator("view", launches=False)
    calls = [operator(), operator(), view, view, foreach(1, 2, 3, 4)]
    phases = ["forward", "backward", "forward", "backward", "optimizer"]
    assert host.issue_time_s(calls, phases).tolist() == [3, 5, 1, 0, 9]


@given(
    st.lists(OPERATORS, max_size=5), st.sampled_from(["forward", "backward", "optimizer"]), st.floats(0.1, 10)
)
def test_a_faster_host_issues_in_proportion(some: list[Operator], phase: str, speed: float) -> None:
    plain, fast = (
        dataclasses.replace(PLAIN_HOST, speed=s).issue_time_s(some, [phase] * len(some)) for s in (1.0, speed)
    )
    np.testing.assert_allclose(fast * speed, plain)
    assert (plain >= 0).all()


def test_a_measured_host_has_a_speed_for_each_phase() -> None:
    plain = dataclasses.replace(PLAIN_HOST, step_overhead_s=3.0, hook_s=1.0)
    found = plain.on(Host(speed=0.5, forward=0.25, optimizer=1.0))
    some, phases = [operator(), operator(), foreach(1, 2)], ["forward", "backward", "optimizer"]
    ratios = found.issue_time_s(some, phases) / plain.issue_time_s(some, phases)
    np.testing.assert_allclose(ratios, [4.0, 2.0, 1.0])
    assert (found.step_overhead_s, found.hook_time_s) == (6.0, 2.0)


# Workspaces


def test_cublas_keeps_two_workspaces_on_nvidia_devices_only() -> None:
    assert library_workspace(H100) == 32 << 20
    assert library_workspace(CATALOG.device("t4")) == (8 << 20) + (128 << 10)
    assert library_workspace(CATALOG.device("mi100")) == 0


@given(st.sampled_from(["mm", "convolution", "sum", "_softmax_backward_data", "view"]))
def test_a_cpu_or_a_call_that_launches_nothing_needs_no_workspace(name: str) -> None:
    assert operator_workspace(operator(name), CATALOG.device("cpu")) == 0
    assert operator_workspace(operator(name, launches=False), H100) == 0


def test_an_operator_without_a_rule_needs_no_workspace() -> None:
    assert operator_workspace(operator("relu"), H100) == 0


H200 = CATALOG.device("h200-sxm-141gb")
MIB = 1 << 20


@pytest.mark.parametrize(
    ("shape", "dtype", "mib"),
    [
        ((50432, 768), "bfloat16", 132.0),
        ((50432, 2304), "bfloat16", 132.75),
        ((16384, 1024), "bfloat16", 128.0),
        ((16384, 4096), "bfloat16", 132.0),
        ((64, 256), "float32", 0.0),
    ],
)
def test_blocks_that_share_a_column_keep_what_was_measured(
    shape: tuple[int, int], dtype: str, mib: float
) -> None:
    total = TensorSpec((shape[1],), dtype)
    one = Operator("sum", "dim_IntList", (TensorSpec(shape, dtype),), (total,), {"dim": [0]}, 0, 0, 0, True)
    assert operator_workspace(one, H200) == mib * MIB


def test_a_sum_of_two_needs_no_blocks_to_share_it() -> None:
    x, total = TensorSpec((128, 2, 64, 56, 56), "bfloat16"), TensorSpec((128, 64, 56, 56), "bfloat16")
    one = Operator("sum", "dim_IntList", (x,), (total,), {"dim": [1]}, 0, 0, 0, True)
    assert operator_workspace(one, H200) == 0


@pytest.mark.parametrize(
    ("x", "weight", "stride", "groups", "dtype", "forward_mib", "backward_mib"),
    [
        ((128, 3, 224, 224), (64, 3, 7, 7), 2, 1, "bfloat16", 294.05, 299.9),  # channels padded to 8
        ((128, 3, 224, 224), (32, 3, 3, 3), 2, 1, "bfloat16", 0.0, 197.1),
        ((8, 3, 224, 224), (64, 3, 7, 7), 2, 1, "float32", 29.13, None),
        ((128, 64, 56, 56), (64, 64, 3, 3), 1, 1, "bfloat16", 98.07, None),
        ((128, 128, 56, 56), (128, 4, 3, 3), 1, 32, "bfloat16", 196.01, 198.5),
        ((128, 256, 56, 56), (512, 256, 1, 1), 2, 1, "bfloat16", 294.0, 297.5),
        ((128, 64, 56, 56), (256, 64, 1, 1), 1, 1, "bfloat16", 0.0, 8.0),  # a sum for each image
        ((128, 512, 28, 28), (512, 512, 1, 1), 1, 1, "bfloat16", 0.0, 128.0),
        ((128, 256, 14, 14), (1024, 256, 1, 1), 1, 1, "bfloat16", 0.0, 63.25),
        ((128, 1024, 14, 14), (512, 1024, 1, 1), 1, 1, "bfloat16", 73.5, 79.5),
        ((128, 1024, 7, 7), (2048, 1024, 1, 1), 1, 1, "bfloat16", 36.75, 36.75),
        ((128, 64, 1, 1), (32, 64, 1, 1), 1, 1, "bfloat16", 0.0, 0.0),
    ],
)
def test_a_convolution_takes_the_workspace_that_was_measured(
    x: tuple[int, ...],
    weight: tuple[int, ...],
    stride: int,
    groups: int,
    dtype: str,
    forward_mib: float,
    backward_mib: float | None,
) -> None:
    sides = [side // stride for side in x[2:]]
    specs = [TensorSpec(tuple(shape), dtype) for shape in (x, weight, (x[0], weight[0], *sides))]
    args = {"stride": [stride, stride], "groups": groups}
    forward = Operator("convolution", "default", (*specs[:2],), (specs[2],), args, 0, 0, 0, True)
    assert operator_workspace(forward, H200) == pytest.approx(forward_mib * MIB, rel=0.001, abs=MIB // 64)
    if backward_mib is not None:
        inputs = (specs[2], *specs[:2])
        backward = Operator("convolution_backward", "default", inputs, (*specs[:2],), args, 0, 0, 0, True)
        assert operator_workspace(backward, H200) == pytest.approx(backward_mib * MIB, rel=0.09)


def recurrence(
    times: int, hidden: int, *, dtype: str = "float32", backward: bool = False, **args: Any
) -> Operator:
    name = "_cudnn_rnn_backward" if backward else "_cudnn_rnn"
    usual = {"mode": 2, "hidden_size": hidden, "num_layers": 1, "bidirectional": False, "batch_first": True}
    call = operator(name, **{**usual, **args})
    return replace(call, inputs=(TensorSpec((8, times, 64), dtype), *call.inputs[1:]))


def test_a_recurrence_launches_kernels_for_each_cell_unless_a_layer_stays_in_place() -> None:
    short, long = (kernel_count(recurrence(times, 512)) for times in (10, 100))
    assert 180 < long - short < 220
    assert kernel_count(recurrence(10, 64)) == kernel_count(recurrence(100, 64)) < 10
    assert kernel_count(recurrence(10, 512, bidirectional=True)) == 2 * kernel_count(recurrence(10, 512))


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("backward", [False, True])
def test_what_stays_in_place_is_torch_s_choice(dtype: str, backward: bool) -> None:
    most = 128 if backward else 192
    inside, beyond = (recurrence(50, hidden, dtype=dtype, backward=backward) for hidden in (most, most + 1))
    assert is_persistent(inside) == (dtype != "bfloat16")
    assert not is_persistent(beyond)
    assert not is_persistent(recurrence(50, 64, dtype=dtype, backward=backward, batch_sizes=[8] * 50))


def test_the_host_issues_a_recurrence_by_its_kernels_whatever_was_measured_by_name() -> None:
    host = DispatchHost(names={"_cudnn_rnn": 4e-3}, forward_factor=1.0, forward_s=0.0)
    short, long = host.issue_time_s([recurrence(5, 64), recurrence(100, 512)], ["forward"] * 2)
    assert short < 3e-4 < 2e-3 < long
