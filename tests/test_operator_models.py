"""Operator models: trees as arrays equal LightGBM's, figures are complete and finite, and what was learned
survives a file."""

from __future__ import annotations

import copy
import dataclasses
import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import lightgbm
import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
from hypothesis import given
from hypothesis import strategies as st

from foretrain.capture import capture_job
from foretrain.cluster import Catalog, Device
from foretrain.costs import fitting
from foretrain.costs.features import COLUMNS, FAMILIES, KERNEL_FLOOR_S, SERIAL, Described, describe, family_of
from foretrain.costs.fitting import dispatch_costs, fit_costs
from foretrain.costs.host import DispatchHost
from foretrain.costs.learned import GENERAL, LearnedCosts, load_costs, save_costs
from foretrain.costs.measured import ANY, MeasuredOperator, load_measured
from foretrain.costs.roofline import Roofline
from foretrain.costs.trees import Forest, from_lightgbm, grow
from foretrain.errors import InputError
from foretrain.graph import Operator, OpGraph, TensorSpec
from foretrain.job import Job
from made_up import H200, call, dataset, made_up, measured, product, spec

CATALOG = Catalog.load()
H100, T4, CPU = (CATALOG.device(name) for name in ("h100-sxm-80gb", "t4", "cpu"))
DEVICES = st.sampled_from([H100, H200, T4, CATALOG.device("mi210"), CATALOG.device("p4")])
PRECISIONS = st.sampled_from(["fp32", "tf32", "amp-bf16", "bf16", "fp16", "fp8"])
DTYPES = st.sampled_from(["float32", "bfloat16", "float16", "float64", "int64", "bool"])
SIZES = st.integers(1, 5000)


def convolution(
    n: int,
    c: int,
    k: int,
    side: int,
    window: int,
    *,
    groups: int = 1,
    stride: int = 1,
    backward: bool = False,
) -> Operator:
    x, weight, out = spec(n, c, side, side), spec(k, c // groups, window, window), -(-side // stride)
    y = spec(n, k, out, out)
    args: dict[str, Any] = {
        "stride": [stride, stride],
        "padding": [window // 2, window // 2],
        "dilation": [1, 1],
        "transposed": False,
        "groups": groups,
    }
    if backward:
        return call(
            "convolution_backward", y, x, weight, outputs=(x, weight), output_mask=[True, True, False], **args
        )
    return call("convolution", x, weight, outputs=(y,), **args)


# Trees


@pytest.fixture(scope="module")
def rows() -> np.ndarray[Any, np.dtype[np.float64]]:
    """Random rows; some columns have few distinct values, so that rows lie on thresholds."""
    made = np.random.default_rng(0).normal(size=(600, 6))
    made[:, 2] = np.round(made[:, 2])
    made[:, 3] = 0.0
    return made


def train(rows: Any, targets: Any) -> lightgbm.Booster:
    return lightgbm.train(
        {"verbosity": -1, "num_leaves": 15, "seed": 1, "num_threads": 1},
        lightgbm.Dataset(rows.astype(np.float32), targets),
        30,
    )


def test_a_forest_predicts_as_lightgbm_does(rows: Any) -> None:
    booster = train(rows, rows[:, 0] * rows[:, 2] + np.sin(3 * rows[:, 1]))
    forest = from_lightgbm([tree["tree_structure"] for tree in booster.dump_model()["tree_info"]])
    others = np.random.default_rng(1).normal(size=(400, 6))
    for some in (rows, others, np.round(others)):
        np.testing.assert_allclose(forest.predict(some), booster.predict(some.astype(np.float32)), atol=1e-5)


def test_targets_without_a_pattern_give_a_forest_of_leaves(rows: Any) -> None:
    forest = grow(rows, np.full(len(rows), 0.7), np.ones(len(rows)), trees=5, num_threads=1)
    np.testing.assert_allclose(forest.predict(rows), 0.7, atol=1e-5)


def test_a_forest_survives_its_columns(rows: Any) -> None:
    forest = grow(rows, rows[:, 0], np.ones(len(rows)), trees=8, num_threads=1)
    again = Forest.from_columns(forest.to_columns())
    np.testing.assert_array_equal(again.predict(rows), forest.predict(rows))
    assert all(column.dtype != np.float64 for column in forest.to_columns().values())


def test_the_same_rows_grow_the_same_trees(rows: Any) -> None:
    first, second = (
        grow(
            rows, rows[:, 0], np.ones(len(rows)), trees=8, num_threads=1, bagging_fraction=0.8, bagging_freq=1
        )
        for _ in range(2)
    )
    for name, column in first.to_columns().items():
        np.testing.assert_array_equal(column, second.to_columns()[name])


def test_no_rows_need_no_walk(rows: Any) -> None:
    forest = grow(rows, rows[:, 0], np.ones(len(rows)), trees=3, num_threads=1)
    assert forest.predict(np.empty((0, 6))).shape == (0,)


# Figures

FP8 = "float8_e4m3fn"


def scaled_product(*scales: TensorSpec, dtype: str = FP8, **args: Any) -> Operator:
    """Of 256 x 512 with 512 x 1024 numbers."""
    k = 256 if dtype == "float4_e2m1fn_x2" else 512
    a, b = spec(256, k, dtype=dtype), spec(k, 1024, dtype=dtype, strides=(1, k))
    return call("_scaled_mm", a, b, *scales, outputs=(spec(256, 1024, dtype="bfloat16"),), **args)


X = spec(8, 16, 28, 28)
QUERY = spec(2, 8, 128, 64, dtype="bfloat16")
EXAMPLES: dict[str, Operator] = {
    "product": product(128, 256, 512),
    "scaled product": scaled_product(spec(), spec()),
    "state space": call("mamba.state_passing", spec(2, 4, 8, 64, 16), outputs=(spec(2, 4, 8, 64, 16),)),
    "convolution": convolution(8, 64, 128, 28, 3),
    "depthwise": convolution(8, 64, 64, 28, 3, groups=64),
    "convolution_backward": convolution(8, 64, 128, 28, 3, backward=True),
    "depthwise_backward": convolution(8, 64, 64, 28, 3, groups=64, backward=True),
    "attention": call("_scaled_dot_product_flash_attention", QUERY, QUERY, QUERY, is_causal=True),
    "attention_backward": call(
        "_scaled_dot_product_flash_attention_backward", QUERY, QUERY, QUERY, QUERY, QUERY, is_causal=True
    ),
    "norm": call("native_layer_norm", X, spec(28), spec(28), normalized_shape=[28]),
    "norm_backward": call("native_batch_norm_backward", X, X, spec(16), spec(16), spec(16)),
    "softmax": call("_softmax", spec(512, 1000), dim=-1),
    "reduction": call("sum", X, dim=[2, 3], outputs=(spec(8, 16),)),
    "copy": call(
        "clone", spec(8, 28, 28, 16, strides=(12544, 28, 1, 784)), memory_format="torch.contiguous_format"
    ),
    "lookup": call("embedding", spec(32000, 64), spec(4, 128, dtype="int64"), outputs=(spec(4, 128, 64),)),
    "pooling": call("max_pool2d_with_indices", X, kernel_size=[3, 3]),
    "recurrence": call("_cudnn_rnn", spec(1, 2, 8), spec(10**7), num_layers=1, hidden_size=8, mode=2),
    "optimizer": call("_foreach_add_", *[spec(1000)] * 40),
    "pointwise": call("relu", X),
}


@pytest.mark.parametrize(
    ("scales", "dtype", "finest"),
    [
        ((spec(), spec()), FP8, 1.0),
        ((spec(256, 1), spec(1, 1024)), FP8, 2.0),
        ((spec(256, 4, strides=(1, 256)), spec(4, 8)), FP8, 3.0),
        ((spec(256, 32, dtype=FP8), spec(1024, 32, dtype=FP8)), "float4_e2m1fn_x2", 4.0),
    ],
    ids=["tensor", "rows", "blocks", "nvfp4"],
)
def test_a_scaled_product_knows_how_finely_it_is_scaled_and_how_deep_it_is(
    scales: tuple[TensorSpec, ...], dtype: str, finest: float
) -> None:
    one = scaled_product(*scales, dtype=dtype)
    figures = dict(zip(COLUMNS["scaled product"], describe(one, H200, "bf16").figures, strict=False))
    assert figures["scaling"] == finest
    assert (figures["m"], figures["n"], figures["k"]) == (8.0, 10.0, 9.0)
    assert one.flops == 2 * 256 * 512 * 1024


def test_a_scaled_product_is_not_told_from_another_device_by_its_balance() -> None:
    columns = COLUMNS["scaled product"]
    assert not {"ridge", "bandwidth_per_sm"} & set(columns)
    assert {"ridge", "bandwidth_per_sm"} < set(COLUMNS["product"])


def check(described: Described) -> None:
    assert math.isfinite(described.ideal_s)
    assert described.ideal_s >= KERNEL_FLOOR_S
    expected = 0 if described.family == SERIAL else len(COLUMNS[described.family]) - 1
    assert len(described.figures) == expected, described.family
    assert all(map(math.isfinite, described.figures)), dict(
        zip(COLUMNS[described.family], described.figures, strict=False)
    )


def test_there_is_an_example_of_each_family() -> None:
    assert EXAMPLES.keys() == set(FAMILIES)


def test_state_space_kernels_reach_less_than_the_peak() -> None:
    """None was measured: their time is a roofline that small products and decays stay below."""
    states = spec(8, 64, 64, 64, 128)
    operator = call("mamba.state_passing", states, outputs=(states,))
    traffic_s = operator.bytes / (H200.memory_bytes_per_s * H200.sustained_memory)
    assert describe(operator, H200, "bf16").ideal_s == pytest.approx(traffic_s / 0.75)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("device", [H200, T4, CATALOG.device("mi210")], ids=lambda device: device.name)
def test_every_family_gives_the_figures_that_it_names(family: str, device: Device) -> None:
    assert family_of(EXAMPLES[family]) == family
    check(describe(EXAMPLES[family], device, "fp32"))


@pytest.mark.parametrize(
    "odd",
    [
        call("arange", outputs=(spec(128, dtype="int64"),)),
        call("add", spec(), spec()),
        call("fill_", spec(0)),
        call("upsample_bilinear2d", X, output_size=[56, 56]),
        call("index_put", spec(1000, 8), spec(20000, dtype="int64"), spec(20000, 8), accumulate=True),
        call("index_put", spec(1000, 8), spec(1000, dtype="bool"), spec(20, 8), accumulate=True),
        call(
            "_cudnn_rnn",
            spec(64, 8, 32),
            num_layers=2,
            hidden_size=32,
            mode=2,
            batch_first=False,
            bidirectional=True,
        ),
        call("mm", spec(0, 16), spec(16, 8), outputs=(spec(0, 8),)),
        call("mm", spec(16, 0), spec(0, 8), outputs=(spec(16, 8),)),
        call("bmm", spec(0, 16, 16), spec(0, 16, 8), outputs=(spec(0, 16, 8),)),
        call(
            "_scaled_dot_product_efficient_attention",
            QUERY,
            spec(2, 2, 0, 64, dtype="bfloat16"),
            spec(2, 2, 0, 64, dtype="bfloat16"),
        ),
        *(
            call(
                "convolution",
                spec(samples, 4, 50),
                spec(8, 4, 3),
                outputs=(spec(samples, 8, 48),),
                stride=[1],
                padding=[0],
                dilation=[1],
                groups=1,
            )
            for samples in (2, 0)
        ),
        call(
            "convolution",
            spec(2, 4, 8, 8),
            spec(4, 2, 3, 3),
            outputs=(spec(2, 4, 17, 17),),
            stride=[2, 2],
            groups=2,
            transposed=True,
        ),
        call("expand_copy", spec(8, 16, strides=(0, 1))),
    ],
    ids=lambda odd: f"{odd.name}-{'-'.join('x'.join(map(str, one.shape)) for one in odd.inputs)}",
)
def test_odd_operators_are_described(odd: Operator) -> None:
    check(describe(odd, H200, "fp32"))


@given(SIZES, SIZES, SIZES, DTYPES, DEVICES, PRECISIONS)
def test_any_product_is_described(m: int, k: int, n: int, dtype: str, device: Device, precision: str) -> None:
    check(describe(product(m, k, n, dtype), device, precision))


@given(
    st.integers(1, 64),
    st.integers(1, 64),
    st.integers(1, 64),
    st.integers(1, 100),
    st.sampled_from([1, 3, 7]),
    st.booleans(),
    st.booleans(),
    DEVICES,
)
def test_any_convolution_is_described(
    n: int, c: int, k: int, side: int, window: int, depthwise: bool, backward: bool, device: Device
) -> None:
    operator = convolution(
        n,
        c,
        c if depthwise else k,
        side,
        window,
        groups=c if depthwise else 1,
        stride=1 + n % 2,
        backward=backward,
    )
    check(describe(operator, device, "amp-bf16"))


@given(
    st.sampled_from(
        [
            "unheard_of",
            "cat",
            "sum",
            "gelu",
            "clone",
            "_softmax",
            "native_layer_norm",
            "_foreach_add_",
            "embedding",
            "avg_pool2d",
        ]
    ),
    st.lists(st.lists(st.integers(0, 40), max_size=5), max_size=4),
    DTYPES,
    DEVICES,
)
def test_traffic_of_any_shape_is_described(
    name: str, shapes: list[list[int]], dtype: str, device: Device
) -> None:
    check(
        describe(
            call(name, *(spec(*shape, dtype=dtype) for shape in shapes), dim=[-1], dtype="torch.float16"),
            device,
            "fp32",
        )
    )


@given(SIZES, SIZES, SIZES, st.integers(1, 8))
def test_more_of_a_product_never_has_a_lower_roof(m: int, k: int, n: int, factor: int) -> None:
    assert (
        describe(product(m * factor, k, n), H200, "fp32").ideal_s
        >= describe(product(m, k, n), H200, "fp32").ideal_s
    )


# Captured models


@pytest.fixture(scope="module")
def captured(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, OpGraph]]:
    folder = tmp_path_factory.mktemp("models")
    (folder / "models.py").write_text("""
import torch

class Recurrent(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.lstm, self.head = torch.nn.LSTM(16, 32, num_layers=2, batch_first=True, bidirectional=True), torch.nn.Linear(64, 5)

    def forward(self, x):
        return self.head(self.lstm(x)[0][:, -1])

def lstm(batch):
    return Recurrent(), (torch.zeros(batch, 20, 16),)
""")
    llama = {"model_type": "llama", "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
    "num_attention_heads": 4,
             "num_key_value_heads": 2, "vocab_size": 100}  # fmt: skip
    resnet = {"source": "torchvision", "name": "resnet18"}
    jobs: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
        "resnet18": (resnet, {"image": 64, "precision": "amp-bf16"}),
        "channels_last": (resnet, {"image": 64, "channels_last": True}),
        "llama": (
            {"source": "transformers", "config": llama, "task": "causal-lm"},
            {"sequence": 32, "optimizer": "adamw", "precision": "bf16"},
        ),
        "lstm": ({"source": "python", "name": "models.py:lstm"}, {"optimizer": "adamw-fused"}),
    }
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FORETRAIN_CACHE", str(folder / "cache"))
        yield {
            name: capture_job(
                Job.read(
                    {
                        "model": model,
                        "training": {"global_batch": 2, **training},
                        "cluster": {"device": "h200"},
                    },
                    base=folder,
                )
            )
            for name, (model, training) in jobs.items()
        }


@pytest.mark.parametrize("model", ["resnet18", "channels_last", "llama", "lstm"])
def test_every_operator_of_a_captured_model_is_described(model: str, captured: dict[str, OpGraph]) -> None:
    launching = [operator for operator in captured[model].operators if operator.launches]
    assert len(launching) > 10
    for device in (H200, T4, CATALOG.device("mi210")):
        for operator in launching:
            check(describe(operator, device, "fp32"))


def figure(operator: Operator, name: str) -> float:
    described = describe(operator, H200, "fp32")
    return described.figures[COLUMNS[described.family].index(name)]


def test_a_bias_is_added_by_a_kernel_of_its_own() -> None:
    plain, x = convolution(8, 64, 128, 28, 1), spec(8, 64, 28, 28)
    biased = call("convolution", x, spec(128, 64, 1, 1), spec(128), **{**plain.args, "bias": "%2"})
    assert describe(biased, H200, "fp32").ideal_s > describe(plain, H200, "fp32").ideal_s
    assert figure(biased, "added_us") > figure(plain, "added_us") == 0


def test_gradients_of_a_product_of_each_sample_need_no_other_layout() -> None:
    one, three = (convolution(8, 64, 128, 28, window, backward=True) for window in (1, 3))
    assert figure(one, "convertible_us") == 0 < figure(three, "convertible_us")
    assert figure(one, "added_us") > figure(three, "added_us") == 0


def test_the_two_formats_of_two_bytes_are_told_apart() -> None:
    assert [figure(call("relu", spec(64, dtype=dtype)), "fp16") for dtype in ("float16", "bfloat16")] == [
        1,
        0,
    ]


def test_norms_know_their_rows() -> None:
    image = spec(8, 64, 28, 28)
    rows = [
        call("native_layer_norm", spec(32, 100, 768), normalized_shape=[768]),
        call("native_group_norm", image, N=8, C=64, HxW=784, group=16),
        call("cudnn_batch_norm", image, *[spec(64)] * 4, training=False),
    ]
    assert [round(2 ** figure(one, "row")) for one in rows] == [768, 4 * 784, 8 * 784]
    assert [figure(one, "inference") for one in rows] == [0, 0, 1]


def test_a_loss_over_rows_reads_what_it_picks() -> None:
    loss = call("nll_loss_forward", spec(4096, 32000), spec(4096, dtype="int64"), outputs=(spec(),))
    assert describe(loss, H200, "fp32").ideal_s < 0.1 * loss.bytes / H200.memory_bytes_per_s


def test_what_is_done_in_turn_has_a_time_whatever_the_device() -> None:
    image, half = spec(8, 64, 28, 28), spec(8, 64, 28, 28, dtype="bfloat16")
    up = [call("upsample_bicubic2d_backward", one, output_size=[28, 28]) for one in (image, half)]
    assert [describe(one, H200, "fp32").family for one in up] == [SERIAL, SERIAL]
    assert describe(up[1], H200, "fp32").ideal_s > 4 * describe(up[0], H200, "fp32").ideal_s
    pooled = call("adaptive_max_pool2d", spec(8, 64, 112, 112), output_size=[1, 1])
    assert describe(pooled, H200, "fp32").ideal_s > 1e-3
    labelled = [call("_ctc_loss", spec(times, 4, 32), spec(4, 10, dtype="int64")) for times in (100, 1000)]
    short, long = (describe(one, H200, "fp32").ideal_s for one in labelled)
    assert long == pytest.approx(10 * short)


def test_equal_indices_are_those_that_share_a_row() -> None:
    def added(rows: int) -> float:
        inputs = spec(rows, 8), spec(50000, dtype="int64"), spec(50000, 8)
        return describe(call("index_put", *inputs, indices=["%1"], accumulate=True), H200, "fp32").ideal_s

    assert added(10) > 5 * added(1000)
    few = call("index_put", spec(6, 784), spec(50000, dtype="int64"), spec(6, 50000), accumulate=True)
    columns = replace(few, args={**few.args, "indices": [None, "%1"]})
    assert describe(columns, H200, "fp32").ideal_s < added(10) / 5


def test_a_layout_that_needs_no_conversion_has_a_lower_roof() -> None:
    plain = convolution(32, 64, 64, 56, 3)
    x = plain.inputs[0]
    strides = (64 * 56 * 56, 1, 56 * 64, 64)
    last = replace(plain, inputs=(replace(x, strides=strides), *plain.inputs[1:]))
    assert describe(last, H200, "fp32").ideal_s < describe(plain, H200, "fp32").ideal_s


@pytest.mark.parametrize("model", ["resnet18", "channels_last", "llama", "lstm"])
def test_every_operator_of_a_captured_model_gets_a_time(
    model: str, captured: dict[str, OpGraph], learned: LearnedCosts
) -> None:
    operators = captured[model].operators
    for device in (H200, T4):
        times = learned.device_time_s(operators, device, "fp32")
        assert np.isfinite(times).all()
        assert all((time > 0) == operator.launches for time, operator in zip(times, operators, strict=True))


# What is learned


@pytest.fixture(scope="module")
def operators() -> list[MeasuredOperator]:
    return made_up()


@pytest.fixture(scope="module")
def learned(operators: list[MeasuredOperator]) -> LearnedCosts:
    return fit_costs(operators)


def one(costs: LearnedCosts, operator: Operator, device: Device = H200) -> float:
    return float(costs.device_time_s([operator], device, "fp32")[0])


def over_roof(costs: LearnedCosts, operator: Operator, device: Device = H200) -> float:
    return one(costs, operator, device) / describe(operator, device, "fp32").ideal_s


def test_a_measured_operator_is_looked_up(operators: list[MeasuredOperator], learned: LearnedCosts) -> None:
    for wanted in operators[:20]:
        assert one(learned, call(wanted.name, *wanted.inputs, **wanted.args)) == pytest.approx(
            wanted.device_s, rel=1e-6
        )


def test_kernels_are_looked_up_and_learned_by_name(
    operators: list[MeasuredOperator], learned: LearnedCosts
) -> None:
    wanted = operators[0]
    calls = [
        call(wanted.name, *wanted.inputs, **wanted.args),
        product(3000, 3000, 3000),
        call("unheard_of", X),
        call("view", X, launches=False),
    ]
    assert learned.kernels(calls, H200, "fp32").tolist() == [2, 2, 1, 0]


def test_kernels_of_other_sizes_follow_what_decides_their_number(tmp_path: Path) -> None:
    """A deep and narrow product is split over its depth, and a second kernel adds the parts up."""
    sizes = [
        (m, n, k) for m in (64, 128, 192, 2048) for n in (64, 160, 2048) for k in (*range(64, 4096, 320),)
    ]
    costs = fit_costs(
        [
            replace(measured(product(m, n, k), 2.0), kernels=1 + (m * n < 100_000 < 128 * k))
            for m, n, k in sizes
        ]
    )
    save_costs(tmp_path / "operators", costs, DispatchHost(), {})
    deep, flat, other = (
        product(96, 96, 3000),
        product(2000, 2000, 3000),
        call("bmm", spec(4, 8, 8), spec(4, 8, 8)),
    )
    for learned in (costs, load_costs(tmp_path / "operators")[0]):
        counts = learned.kernels([deep, flat, other], H200, "fp32")
        assert counts.tolist() == pytest.approx([2.0, 1.0, 1.0], abs=0.1)


def test_tf32_products_are_looked_up_apart() -> None:
    operator = product(2048, 2048, 2048)
    costs = fit_costs([measured(operator, 2.0), measured(operator, 3.0, precision="tf32")])
    plain, rounded = (
        float(costs.device_time_s([operator], H200, precision)[0]) for precision in ("fp32", "tf32")
    )
    assert plain == pytest.approx(measured(operator, 2.0).device_s)
    assert rounded == pytest.approx(measured(operator, 3.0, precision="tf32").device_s)


@pytest.mark.parametrize(
    ("operator", "factor"),
    [
        (product(3000, 3000, 3000), 2.0),
        (call("relu", spec(3000, 3001)), 1.5),
        (call("gelu", spec(3000, 3001)), 3.0),
    ],
)
def test_other_sizes_follow_what_was_learned(
    learned: LearnedCosts, operator: Operator, factor: float
) -> None:
    assert over_roof(learned, operator, H200) == pytest.approx(factor, rel=0.1)


@pytest.mark.parametrize("device", [H100, T4], ids=lambda device: device.name)
def test_arithmetic_is_as_efficient_on_other_devices(learned: LearnedCosts, device: Device) -> None:
    assert over_roof(learned, product(3000, 3000, 3000), device) == pytest.approx(2.0, rel=0.1)


@pytest.mark.parametrize(("name", "factor"), [("relu", 1.5), ("gelu", 3.0)])
@pytest.mark.parametrize("device", [H100, T4], ids=lambda device: device.name)
def test_traffic_is_nearer_the_roofline_with_less_bandwidth(
    learned: LearnedCosts, name: str, factor: float, device: Device
) -> None:
    """What the multiprocessors bound takes no longer on slower memory, until that bounds it."""
    assert 1.0 <= over_roof(learned, call(name, spec(3000, 3001)), device) < 0.8 * factor


@given(
    st.sampled_from(["unheard_of", "fft", "cholesky"]),
    st.lists(st.integers(1, 300), min_size=1, max_size=4),
    DEVICES,
)
def test_unknown_operators_get_finite_positive_times(
    learned: LearnedCosts, name: str, shape: list[int], device: Device
) -> None:
    time_s = one(learned, call(name, spec(*shape)), device)
    assert 0 < time_s < math.inf


def test_nothing_learned_is_the_roofline() -> None:
    empty = fit_costs([])
    assert over_roof(empty, product(3000, 3000, 3000)) == 1.0


def test_what_launches_nothing_takes_no_time(learned: LearnedCosts) -> None:
    view = call("view", spec(4, 4), launches=False)
    assert learned.device_time_s([view, product(64, 64, 64), view], H200, "fp32").tolist()[::2] == [0.0, 0.0]
    assert learned.device_time_s([], H200, "fp32").shape == (0,)
    assert learned.device_time_s([view], H200, "fp32").tolist() == [0.0]


def test_a_cpu_is_slower_than_its_roofline(learned: LearnedCosts) -> None:
    calls = [product(512, 512, 512), call("relu", X), call("view", X, launches=False)]
    times, bound = (
        learned.device_time_s(calls, CPU, "fp32"),
        Roofline(kernel_floor_s=0.0).device_time_s(calls, CPU, "fp32"),
    )
    assert (times[:2] > bound[:2]).all()
    assert times[2] == 0.0
    more = dataclasses.replace(CPU, cores=4)
    assert (learned.device_time_s(calls, more, "fp32")[:2] < times[:2]).all()


def test_calibration_scales_a_group_of_one_device(learned: LearnedCosts) -> None:
    large, relu = product(3000, 3000, 3000), call("relu", spec(3000, 3001))
    scaled = learned.scaled(H200.name, {"products": 1.5}).scaled(H200.name, {"products": 2.0, "traffic": 0.5})
    assert one(scaled, large) == pytest.approx(3 * one(learned, large))
    assert one(scaled, relu) == pytest.approx(0.5 * one(learned, relu))
    assert one(scaled, large, H100) == one(learned, large, H100)


def test_a_device_with_many_operators_has_models_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fitting, "_OWN", 100)
    slow = [replace(operator, device_s=4 * operator.device_s, key="") for operator in made_up(T4)]
    costs = fit_costs([*made_up(H200), *slow])
    assert costs.knows(H200)
    assert not costs.knows(T4), "operators without a key were not measured by us"
    assert over_roof(costs, call("relu", spec(3000, 3001))) == pytest.approx(1.5, rel=0.05)


def test_times_by_events_leave_out_short_operators() -> None:
    short = MeasuredOperator.of("relu", (spec(8),), (spec(8),), {}, "p4", 5e-6)
    assert fit_costs([short]).models[GENERAL] == {}
    assert "pointwise" in fit_costs([replace(short, device="t4")]).models[GENERAL]


def test_dispatch_costs_are_medians_and_per_tensor_for_lists() -> None:
    some = [replace(measured(product(8, 8, 8 * i), 1.0), host_s=i * 1e-6) for i in (1, 2, 9)]
    many = replace(measured(call("_foreach_add_", *[spec(10)] * 4), 1.0), host_s=8e-6)
    assert dispatch_costs([*some, many, replace(many, name="relu", host_s=None)]) == {
        "_foreach_add_": 2e-6,
        "mm": 2e-6,
    }


@pytest.mark.parametrize(
    ("families", "held_out", "known"),
    [
        ("resnet", "", True),
        ("resnet", "vit", True),
        ("resnet", "resnet", False),
        ("resnet vit", "vit", True),
        ("", "vit", True),
        (ANY, "vit", False),
    ],
)
def test_an_operator_is_forgotten_with_the_last_family_that_calls_it(
    families: str, held_out: str, known: bool
) -> None:
    some = replace(measured(product(8, 8, 8), 1.0), families=frozenset(families.split()))
    assert some.known_without(frozenset(held_out.split())) is known


# Files


def test_what_was_saved_gives_the_same_numbers(
    learned: LearnedCosts, tmp_path: Path, captured: dict[str, OpGraph]
) -> None:
    host = DispatchHost(names={"mm": 1e-6}, speed=1.5)
    scaled = learned.scaled(H200.name, {"products": 1.5})
    save_costs(tmp_path / "operators.safetensors", scaled, host, {"sources": ["here"]})
    again, host_again, about = load_costs(tmp_path / "operators.safetensors")
    assert (host_again, about) == (host, {"sources": ["here"]})
    for device in (H200, H100):
        for graph in captured.values():
            before, after = (
                costs.device_time_s(graph.operators, device, "fp32") for costs in (scaled, again)
            )
            np.testing.assert_allclose(after, before, rtol=1e-6)


def test_the_same_operators_give_the_same_bytes(
    operators: list[MeasuredOperator], learned: LearnedCosts, tmp_path: Path
) -> None:
    for name, costs in (("a", learned), ("b", fit_costs(copy.deepcopy(operators)))):
        save_costs(tmp_path / name, costs, DispatchHost(names=dispatch_costs(operators)), {})
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()


@pytest.mark.parametrize("content", [b"", b"not safetensors", b"\x08\0\0\0\0\0\0\0{}      "])
def test_another_file_is_refused_in_one_line(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "operators.safetensors"
    path.write_bytes(content)
    with pytest.raises(InputError, match=r"operators\.safetensors: ") as caught:
        load_costs(path)
    assert "\n" not in str(caught.value)


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"none\.safetensors: cannot be read as fitted operator models"):
        load_costs(tmp_path / "none.safetensors")


def test_models_of_other_figures_are_refused(
    learned: LearnedCosts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_costs(tmp_path / "models", learned, DispatchHost(), {})
    monkeypatch.setitem(COLUMNS, "product", ("m", "n"))
    with pytest.raises(
        InputError,
        match="the figures of product operators are others than this version computes; fit it again",
    ):
        load_costs(tmp_path / "models")


def test_a_dataset_is_read_back(operators: list[MeasuredOperator], tmp_path: Path) -> None:
    path = dataset(tmp_path / "ops.parquet", operators[:9], H200.name)
    for before, after in zip(operators, load_measured(path), strict=False):
        assert after.device_s == pytest.approx(before.device_s)
        assert replace(after, device_s=before.device_s) == before


def test_a_dataset_of_an_unnamed_device_needs_its_name(
    operators: list[MeasuredOperator], tmp_path: Path
) -> None:
    path = dataset(tmp_path / "ops.parquet", operators[:3])
    with pytest.raises(InputError, match=r"ops\.parquet: does not say which device .*; give --device"):
        list(load_measured(path))
    assert {one.device for one in load_measured(path, "t4")} == {"t4"}


def test_a_file_that_is_no_dataset_is_refused_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "ops.parquet").write_text("junk")
    pyarrow.parquet.write_table(pyarrow.table({"x": [1]}), tmp_path / "other.parquet")
    for name in ("ops", "other", "none"):
        with pytest.raises(InputError, match=rf"{name}\.parquet: ") as caught:
            list(load_measured(tmp_path / f"{name}.parquet", "t4"))
        assert "\n" not in str(caught.value)
