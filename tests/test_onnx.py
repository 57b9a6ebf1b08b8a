"""ONNX files become torch modules: the same numbers with real weights, no data on meta, errors that say what
to do."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import onnx
import pytest
import torch
import torch.nn.functional as F
from onnx import TensorProto, helper, numpy_helper
from torch import Tensor, nn

from foretrain.capture.sources.onnx.module import OnnxModule, build, load_onnx
from foretrain.errors import CaptureError, InputError

Dims = Sequence[int | str | None]


def save(
    path: Path,
    nodes: Sequence[onnx.NodeProto],
    inputs: Mapping[str, Dims],
    outputs: Sequence[str],
    weights: Mapping[str, Tensor | Sequence[int]] = {},
    *,
    opset: int = 20,
    integers: Sequence[str] = (),
    output_dims: Dims | None = None,
    **model: Any,
) -> Path:
    """Write a graph as a file; lists among the weights are int64 constants."""
    kind = {name: TensorProto.INT64 if name in integers else TensorProto.FLOAT for name in inputs}
    graph = helper.make_graph(
        list(nodes),
        "graph",
        [helper.make_tensor_value_info(name, kind[name], list(dims)) for name, dims in inputs.items()],
        [helper.make_tensor_value_info(name, TensorProto.FLOAT, output_dims) for name in outputs],
        [numpy_helper.from_array(torch.as_tensor(w).numpy(), name) for name, w in weights.items()],
    )
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], **model), str(path))
    return path


def node(kind: str, inputs: str, outputs: str = "y", **attributes: Any) -> onnx.NodeProto:
    """``node("Add", "x b", "y")``; a ``-`` is an optional input left out."""
    names = ["" if name == "-" else name for name in inputs.split()]
    return helper.make_node(kind, names, outputs.split(), **attributes)


def kinds(module: nn.Module) -> list[str]:
    assert isinstance(module, OnnxModule)
    return [step.kind for step in module._steps]


def check(path: Path, want: Tensor, *inputs: Tensor, tolerance: float = 1e-5) -> OnnxModule:
    """The module with the file's weights gives the wanted values, and the one on meta gives their shape and
    type."""
    real, _ = build(path, keep_data=True)
    got = real.eval()(*inputs)
    torch.testing.assert_close(got, want, atol=tolerance, rtol=1e-4)
    module, examples = load_onnx(path)
    assert [(x.shape, x.dtype) for x in examples] == [(x.shape, x.dtype) for x in inputs]
    out = module(*examples)
    assert (out.device.type, out.shape, out.dtype) == ("meta", want.shape, want.dtype)
    assert all(tensor.is_meta for tensor in (*module.parameters(), *module.buffers()))
    return real


def image(channels: int = 3, size: int = 8) -> Tensor:
    return torch.randn(1, channels, size, size, generator=torch.Generator().manual_seed(0))


# --- one operator at a time
# -------------------------------------------------------------------------------------------

W = torch.randn(4, 3, 3, 3, generator=torch.Generator().manual_seed(1))
B = torch.randn(4, generator=torch.Generator().manual_seed(2))
C = torch.rand(3, generator=torch.Generator().manual_seed(3)) + 0.5
M = torch.randn(8, 5, generator=torch.Generator().manual_seed(4))
SLOPE = torch.rand(3, 1, 1, generator=torch.Generator().manual_seed(5))

Case = tuple[str, onnx.NodeProto, dict[str, Any], Callable[[Tensor], Tensor]]
CASES: list[Case] = [
    (
        "conv",
        node("Conv", "x w b", pads=[1, 1, 1, 1], strides=[2, 2]),
        {"w": W, "b": B},
        lambda x: F.conv2d(x, W, B, 2, 1),
    ),
    (
        "conv_uneven_pads",
        node("Conv", "x w", pads=[0, 1, 1, 2]),
        {"w": W},
        lambda x: F.conv2d(F.pad(x, [1, 2, 0, 1]), W),
    ),
    (
        "conv_same_upper",
        node("Conv", "x w", auto_pad="SAME_UPPER", strides=[2, 2]),
        {"w": W},
        lambda x: F.conv2d(F.pad(x, [0, 1, 0, 1]), W, stride=2),
    ),
    (
        "conv_transpose",
        node("ConvTranspose", "x w", strides=[2, 2], pads=[1, 1, 1, 1], output_padding=[1, 1]),
        {"w": W.transpose(0, 1).contiguous()},
        lambda x: F.conv_transpose2d(x, W.transpose(0, 1), stride=2, padding=1, output_padding=1),
    ),
    (
        "max_pool",
        node("MaxPool", "x", kernel_shape=[3, 3], strides=[2, 2], pads=[1, 1, 1, 1], ceil_mode=1),
        {},
        lambda x: F.max_pool2d(x, 3, 2, 1, ceil_mode=True),
    ),
    (
        "average_pool",
        node("AveragePool", "x", kernel_shape=[3, 3], pads=[1, 1, 1, 1]),
        {},
        lambda x: F.avg_pool2d(x, 3, 1, 1, count_include_pad=False),
    ),
    (
        "average_pool_uneven",
        node("AveragePool", "x", kernel_shape=[2, 2], pads=[0, 0, 1, 1]),
        {},
        lambda x: (
            F.avg_pool2d(F.pad(x, [0, 1, 0, 1]), 2, 1)
            / F.avg_pool2d(F.pad(torch.ones_like(x), [0, 1, 0, 1]), 2, 1)
        ),
    ),
    ("global_max_pool", node("GlobalMaxPool", "x"), {}, lambda x: x.amax((2, 3), keepdim=True)),
    ("matmul", node("MatMul", "x m"), {"m": M}, lambda x: x @ M),
    ("clip", node("Clip", "x - high"), {"high": torch.tensor(0.5)}, lambda x: x.clamp(max=0.5)),
    ("pow", node("Pow", "x p"), {"p": torch.tensor(2.0)}, lambda x: x**2),
    ("sub_from_scalar", node("Sub", "one x"), {"one": torch.tensor(1.0)}, lambda x: 1 - x),
    ("p_relu", node("PRelu", "x s"), {"s": SLOPE}, lambda x: F.prelu(x, SLOPE.flatten())),
    ("hard_sigmoid", node("HardSigmoid", "x", alpha=1 / 6), {}, F.hardsigmoid),
    ("selu", node("Selu", "x"), {}, F.selu),
    ("gelu_tanh", node("Gelu", "x", approximate="tanh"), {}, lambda x: F.gelu(x, approximate="tanh")),
    ("log_softmax", node("LogSoftmax", "x", axis=1), {}, lambda x: x.log_softmax(1)),
    (
        "instance_norm",
        node("InstanceNormalization", "x c c"),
        {"c": C},
        lambda x: F.instance_norm(x, weight=C, bias=C),
    ),
    ("reduce_mean", node("ReduceMean", "x axes"), {"axes": [2, -1]}, lambda x: x.mean((2, 3), keepdim=True)),
    ("reduce_l2", node("ReduceL2", "x axes", keepdims=0), {"axes": [1]}, lambda x: x.norm(dim=1)),
    ("reduce_prod", node("ReduceProd", "x axes", keepdims=0), {"axes": [1, 3]}, lambda x: x.prod(3).prod(1)),
    (
        "slice",
        node("Slice", "x s e a t"),
        {"s": [-7, 1], "e": [2**62, -1], "a": [3, 2], "t": [2, 3]},
        lambda x: x[..., 1:-1:3, 1::2],
    ),
    (
        "slice_backwards",
        node("Slice", "x s e a t"),
        {"s": [-1], "e": [-(2**62)], "a": [3], "t": [-2]},
        lambda x: x.flip(3)[..., ::2],
    ),
    (
        "pad",
        node("Pad", "x p v"),
        {"p": [0, 0, 1, 2, 0, 0, 3, 4], "v": torch.tensor(1.5)},
        lambda x: F.pad(x, [2, 4, 1, 3], value=1.5),
    ),
    (
        "pad_axes",
        node("Pad", "x p - a", mode="reflect"),
        {"p": [2, 1], "a": [-1]},
        lambda x: F.pad(x, [2, 1, 0, 0], "reflect"),
    ),
    (
        "resize_scales",
        node("Resize", "x - f", mode="linear"),
        {"f": torch.tensor([1.0, 1.0, 2.0, 1.5])},
        lambda x: F.interpolate(x, scale_factor=(2.0, 1.5), mode="bilinear"),
    ),
    (
        "resize_sizes",
        node(
            "Resize",
            "x - - n",
            mode="nearest",
            coordinate_transformation_mode="asymmetric",
            nearest_mode="floor",
        ),
        {"n": [1, 3, 5, 16]},
        lambda x: F.interpolate(x, (5, 16)),
    ),
    (
        "space_to_depth",
        node("SpaceToDepth", "x", blocksize=2),
        {},
        lambda x: F.pixel_unshuffle(x, 2).reshape(1, 3, 4, 4, 4).transpose(1, 2).reshape(1, 12, 4, 4),
    ),
    ("tile", node("Tile", "x n"), {"n": [1, 2, 1, 3]}, lambda x: x.repeat(1, 2, 1, 3)),
    (
        "gather",
        node("Gather", "x i", axis=-1),
        {"i": torch.tensor([[1, -1], [0, 2]])},
        lambda x: x[..., [[1, -1], [0, 2]]],
    ),
    ("gather_one", node("Gather", "x i", axis=2), {"i": torch.tensor(-1)}, lambda x: x[:, :, -1]),
    (
        "gather_nd",
        node("GatherND", "x i", batch_dims=1),
        {"i": torch.tensor([[[2, 1], [0, 3]]])},
        lambda x: x[:, [2, 0], [1, 3]],
    ),
    (
        "scatter_nd",
        node("ScatterND", "x i u"),
        {"i": torch.tensor([[0, 1]]), "u": torch.zeros(1, 8, 8)},
        lambda x: x * torch.tensor([1.0, 0, 1]).view(3, 1, 1),
    ),
    (
        "cum_sum",
        node("CumSum", "x a", reverse=1),
        {"a": torch.tensor(2)},
        lambda x: x.flip(2).cumsum(2).flip(2),
    ),
    ("trilu", node("Trilu", "x k", upper=0), {"k": torch.tensor(1)}, lambda x: x.tril(1)),
    (
        "einsum",
        node("Einsum", "x m", equation="bchw,wk->bckh"),
        {"m": M},
        lambda x: torch.einsum("bchw,wk->bckh", x, M),
    ),
    ("flatten", node("Flatten", "x", axis=2), {}, lambda x: x.reshape(3, 64)),
    ("reshape_zero", node("Reshape", "x s"), {"s": [0, 0, -1]}, lambda x: x.flatten(2)),
    ("mean", node("Mean", "x x c"), {"c": SLOPE}, lambda x: (2 * x + SLOPE) / 3),
]


@pytest.mark.parametrize(
    ("operator", "weights", "torch_function"), [pytest.param(*c[1:], id=c[0]) for c in CASES]
)
def test_operator_gives_the_values_of_torch(
    tmp_path: Path,
    operator: onnx.NodeProto,
    weights: dict[str, Any],
    torch_function: Callable[[Tensor], Tensor],
) -> None:
    x = image()
    path = save(tmp_path / "m.onnx", [operator], {"x": x.shape}, ["y"], weights)
    check(path, torch_function(x), x)


def test_softmax_before_opset_13_flattens(tmp_path: Path) -> None:
    x = image()
    path = save(tmp_path / "m.onnx", [node("Softmax", "x")], {"x": x.shape}, ["y"], opset=11)
    check(path, x.flatten(1).softmax(1).view_as(x), x)


def test_attributes_of_old_opsets(tmp_path: Path) -> None:
    x = image()
    nodes = [
        node("Slice", "x", "a", starts=[1], ends=[5], axes=[2]),
        node("Pad", "a", "b", pads=[0, 0, 0, 1, 0, 0, 0, 1], mode="edge"),
        node("Unsqueeze", "b", "c", axes=[0]),
        node("Squeeze", "c", "d", axes=[0]),
        node("ReduceSum", "d", "e", axes=[1], keepdims=0),
        node("Clip", "e", "y", min=-1.0, max=1.0),
    ]
    path = save(tmp_path / "m.onnx", nodes, {"x": x.shape}, ["y"], opset=9)
    check(path, F.pad(x[:, :, 1:5], [1, 1, 0, 0], "replicate").sum(1).clamp(-1, 1), x)


def test_attention_operator(tmp_path: Path) -> None:
    x = torch.randn(2, 5, 12)
    attention = node("Attention", "x x x", q_num_heads=3, kv_num_heads=3, is_causal=1)
    path = save(tmp_path / "m.onnx", [attention], {"x": x.shape}, ["y"], opset=23)
    heads = x.view(2, 5, 3, 4).transpose(1, 2)
    want = (
        F.scaled_dot_product_attention(heads, heads, heads, is_causal=True).transpose(1, 2).reshape(2, 5, 12)
    )
    check(path, want, x)


@pytest.mark.parametrize(("kind", "order"), [("LSTM", (0, 3, 1, 2)), ("GRU", (1, 0, 2))])
def test_recurrences(tmp_path: Path, kind: str, order: Sequence[int]) -> None:
    """ONNX stacks the gates in another order than torch; ``order`` lists torch's gates as ONNX wants them."""
    layer = {"LSTM": nn.LSTM, "GRU": nn.GRU}[kind](6, 4, bidirectional=True)

    def stacked(name: str) -> Tensor:
        both = [getattr(layer, f"{name}_l0{suffix}").detach() for suffix in ("", "_reverse")]
        return torch.stack([torch.cat([w.chunk(len(order))[i] for i in order]) for w in both])

    weights = {"w": stacked("weight_ih"), "r": stacked("weight_hh")}
    weights["b"] = torch.cat([stacked("bias_ih"), stacked("bias_hh")], 1)
    extra = {"linear_before_reset": 1} if kind == "GRU" else {}
    recurrence = node(kind, "x w r b", "y", hidden_size=4, direction="bidirectional", **extra)
    x = torch.randn(7, 2, 6)
    want = layer(x)[0].detach().view(7, 2, 2, 4).transpose(1, 2)
    check(save(tmp_path / "m.onnx", [recurrence], {"x": x.shape}, ["y"], weights), want, x)


# --- shapes
# -----------------------------------------------------------------------------------------------------------


def shape_arithmetic() -> list[onnx.NodeProto]:
    """Flatten all but the first dimension of x by Shape, Gather, Unsqueeze, Mul and Concat."""
    return [
        node("Shape", "x", "shape"),
        node("Gather", "shape zero", "n"),
        node("Gather", "shape one", "c"),
        node("Gather", "shape two", "h"),
        node("Mul", "c h", "ch"),
        node("Unsqueeze", "n axis", "n1"),
        node("Unsqueeze", "ch axis", "ch1"),
        node("Concat", "n1 ch1", "target", axis=0),
        node("Reshape", "x target", "y"),
    ]


SHAPE_CONSTANTS: dict[str, Any] = {
    "zero": torch.tensor(0),
    "one": torch.tensor(1),
    "two": torch.tensor(2),
    "axis": [0],
}


def test_shape_arithmetic_is_done_at_load(tmp_path: Path) -> None:
    path = save(tmp_path / "m.onnx", shape_arithmetic(), {"x": ["batch", 3, 4]}, ["y"], SHAPE_CONSTANTS)
    module, (example,) = load_onnx(path, batch=5)
    assert kinds(module) == ["Reshape"]
    assert module(example).shape == (5, 12)
    check(path, torch.arange(12.0).view(1, 12), torch.arange(12.0).view(1, 3, 4))


def test_mask_from_range_and_where(tmp_path: Path) -> None:
    """A causal mask computed from the input's length is a constant of the module."""
    nodes = [
        node("Shape", "x", "shape"),
        node("Gather", "shape last", "n"),
        node("Range", "zero n one", "keys"),
        node("Unsqueeze", "keys axis", "queries"),
        node("LessOrEqual", "keys queries", "seen"),
        node("Where", "seen x low", "masked"),
        node("Softmax", "masked", "y"),
    ]
    constants: dict[str, Any] = {
        **SHAPE_CONSTANTS,
        "axis": [1],
        "last": torch.tensor(-1),
        "low": torch.tensor(-math.inf),
    }
    x = torch.randn(2, 6, 6)
    path = save(tmp_path / "m.onnx", nodes, {"x": x.shape}, ["y"], constants)
    real = check(path, x.masked_fill(~torch.ones(6, 6).tril().bool(), -math.inf).softmax(-1), x)
    assert kinds(real) == ["Where", "Softmax"]


def test_resize_to_computed_float_scales(tmp_path: Path) -> None:
    """Float constants whose values decide about a shape keep them, even behind other operators."""
    nodes = [
        node("Concat", "outer inner", "scales", axis=0),
        node("Resize", "x - scales", "y", mode="nearest"),
    ]
    weights = {"outer": torch.tensor([1.0, 1.0]), "inner": torch.tensor([2.0, 2.0])}
    path = save(tmp_path / "m.onnx", nodes, {"x": (1, 3, 8, 8)}, ["y"], weights)
    x = image()
    real = check(path, F.interpolate(x, scale_factor=2.0), x)
    assert not list(real.parameters())


def test_if_with_a_known_condition_runs_one_branch(tmp_path: Path) -> None:
    info = helper.make_tensor_value_info("inner", TensorProto.FLOAT, None)
    branches = {
        name: helper.make_graph([node(kind, "x", "inner")], name, [], [info])
        for name, kind in (("then_branch", "Relu"), ("else_branch", "Neg"))
    }
    nodes = [node("Size", "x", "n"), node("Greater", "n four", "c"), node("If", "c", "y", **branches)]
    path = save(tmp_path / "m.onnx", nodes, {"x": (1, 6)}, ["y"], {"four": torch.tensor(4)})
    x = torch.randn(1, 6)
    check(path, x.relu(), x)


def test_local_functions_are_inlined(tmp_path: Path) -> None:
    opsets = [helper.make_opsetid("", 20)]
    body = [node("Mul", "a a", "s"), node("Add", "s a", "b")]
    function = helper.make_function("local", "SquarePlus", ["a"], ["b"], body, opsets)
    caller = helper.make_node("SquarePlus", ["x"], ["y"], domain="local")
    path = save(tmp_path / "m.onnx", [caller], {"x": (1, 6)}, ["y"], functions=[function])
    model = onnx.load(path)
    model.opset_import.append(helper.make_opsetid("local", 1))
    onnx.save(model, path)
    x = torch.randn(1, 6)
    check(path, x * x + x, x)


# --- one kernel where torch has one
# -----------------------------------------------------------------------------------


def test_matmul_and_bias_become_one_linear(tmp_path: Path) -> None:
    bias = torch.randn(5)
    nodes = [node("MatMul", "x m", "p"), node("Add", "bias p", "y")]
    path = save(tmp_path / "m.onnx", nodes, {"x": (1, 4, 8)}, ["y"], {"m": M, "bias": bias})
    x = torch.randn(1, 4, 8)
    assert kinds(check(path, x @ M + bias, x)) == ["linear"]


def test_a_product_used_twice_is_not_fused(tmp_path: Path) -> None:
    nodes = [node("MatMul", "x m", "p"), node("Add", "p bias", "q"), node("Mul", "p q", "y")]
    path = save(tmp_path / "m.onnx", nodes, {"x": (1, 8)}, ["y"], {"m": M, "bias": torch.ones(5)})
    x = torch.randn(1, 8)
    assert "linear" not in kinds(check(path, (x @ M) * (x @ M + 1), x))


def test_sigmoid_gate_becomes_silu(tmp_path: Path) -> None:
    path = save(
        tmp_path / "m.onnx", [node("Sigmoid", "x", "g"), node("Mul", "x g", "y")], {"x": (1, 8)}, ["y"]
    )
    x = torch.randn(1, 8)
    assert kinds(check(path, F.silu(x), x)) == ["swish"]


@pytest.mark.parametrize("half_first", [True, False])
def test_erf_formula_becomes_gelu(tmp_path: Path, half_first: bool) -> None:
    tail = (
        [node("Mul", "x half", "h"), node("Mul", "h g", "y")]
        if half_first
        else [node("Mul", "x g", "h"), node("Mul", "h half", "y")]
    )
    nodes = [node("Div", "x root", "d"), node("Erf", "d", "e"), node("Add", "e one", "g"), *tail]
    weights = {"root": torch.tensor(math.sqrt(2)), "one": torch.tensor(1.0), "half": torch.tensor(0.5)}
    path = save(tmp_path / "m.onnx", nodes, {"x": (1, 8)}, ["y"], weights)
    x = torch.randn(1, 8)
    assert kinds(check(path, F.gelu(x), x)) == ["gelu"]


def test_written_out_layer_norm_becomes_one_step(tmp_path: Path) -> None:
    nodes = [
        node("ReduceMean", "x", "mean", axes=[-1]),
        node("Sub", "x mean", "d"),
        node("Pow", "d two", "q"),
        node("ReduceMean", "q", "v", axes=[-1]),
        node("Add", "v eps", "ve"),
        node("Sqrt", "ve", "s"),
        node("Div", "d s", "n"),
        node("Mul", "n scale", "m"),
        node("Add", "m bias", "y"),
    ]
    scale, bias = torch.rand(8), torch.rand(8)
    weights = {"two": torch.tensor(2.0), "eps": torch.tensor(1e-5), "scale": scale, "bias": bias}
    path = save(tmp_path / "m.onnx", nodes, {"x": (1, 4, 8)}, ["y"], weights, opset=13)
    x = torch.randn(1, 4, 8)
    assert kinds(check(path, F.layer_norm(x, (8,), scale, bias), x)) == ["layer_norm"]


# --- weights
# ----------------------------------------------------------------------------------------------------------


def conv_bn_gemm(path: Path, first: int | str = "batch") -> tuple[Path, nn.Sequential]:
    layers = nn.Sequential(
        nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 36, 5)
    )
    layers[1].running_mean = torch.rand(4)
    nodes = [
        node("Conv", "x 0.weight 0.bias", "c"),
        node("BatchNormalization", "c 1.weight 1.bias 1.running_mean 1.running_var", "b"),
        node("Relu", "b", "r"),
        node("Flatten", "r", "f"),
        node("Gemm", "f 4.weight 4.bias", "y", transB=1),
    ]
    weights = {name: value for name, value in layers.state_dict().items() if "num_batches" not in name}
    return save(path, nodes, {"x": (first, 3, 8, 8)}, ["y"], weights, output_dims=(first, 5)), layers


def test_running_statistics_are_buffers_and_weights_are_parameters(tmp_path: Path) -> None:
    path, layers = conv_bn_gemm(tmp_path / "m.onnx")
    module, _ = load_onnx(path)
    want = {name.replace(".", "_"): value.shape for name, value in layers.named_parameters()}
    assert {name: value.shape for name, value in module.named_parameters()} == want
    assert {name for name, _ in module.named_buffers()} == {"1_running_mean", "1_running_var"}


def test_batch_norm_follows_the_training_mode(tmp_path: Path) -> None:
    path, layers = conv_bn_gemm(tmp_path / "m.onnx")
    module, _ = build(path, batch=6, keep_data=True)
    x = torch.randn(6, 3, 8, 8)
    torch.testing.assert_close(module.eval()(x), layers.eval()(x), atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(module.train()(x), layers.train()(x), atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(module.get_buffer("1_running_mean"), layers[1].running_mean)


def test_statistics_may_be_those_of_a_bias(tmp_path: Path) -> None:
    nodes = [node("Identity", "bias", "mean"), node("BatchNormalization", "x scale bias mean var")]
    weights = {"scale": torch.ones(3), "bias": torch.zeros(3), "var": torch.ones(3)}
    module, inputs = load_onnx(save(tmp_path / "m.onnx", nodes, {"x": (2, 3, 4, 4)}, ["y"], weights))
    module.train()(*inputs).sum().backward()
    assert all(parameter.grad is not None for parameter in module.parameters())


def test_dropout_follows_the_training_mode(tmp_path: Path) -> None:
    path = save(
        tmp_path / "m.onnx", [node("Dropout", "x p")], {"x": (1, 100)}, ["y"], {"p": torch.tensor(0.5)}
    )
    x = torch.ones(1, 100)
    dropped = check(path, x, x).train()(x)
    assert set(dropped.unique().tolist()) == {0.0, 2.0}


def test_gradients_reach_every_parameter_on_meta(tmp_path: Path) -> None:
    module, inputs = load_onnx(conv_bn_gemm(tmp_path / "m.onnx")[0], batch=4)
    module.train()(*inputs).sum().backward()
    assert all(p.grad is not None and p.grad.is_meta for p in module.parameters())


def test_data_files_need_not_exist(tmp_path: Path) -> None:
    path, _ = conv_bn_gemm(tmp_path / "m.onnx")
    model = onnx.load(path)
    onnx.save(model, path, save_as_external_data=True, location="weights.bin", size_threshold=0)
    (tmp_path / "weights.bin").unlink()
    module, (x,) = load_onnx(path, batch=2)
    assert module(x).shape == (2, 5)


def test_half_precision_weights_keep_their_type(tmp_path: Path) -> None:
    nodes = [node("Cast", "x", "h", to=TensorProto.FLOAT16), node("MatMul", "h m", "y")]
    module, (x,) = load_onnx(save(tmp_path / "m.onnx", nodes, {"x": (2, 8)}, ["y"], {"m": M.half()}))
    assert module(x).dtype == torch.float16
    assert [p.dtype for p in module.parameters()] == [torch.float16]


def test_a_two_valued_matrix_is_a_mask_and_not_trained(tmp_path: Path) -> None:
    mask = torch.zeros(6, 6).masked_fill(~torch.ones(6, 6).tril().bool(), -math.inf)
    module, _ = load_onnx(
        save(tmp_path / "m.onnx", [node("Add", "x mask")], {"x": (1, 6, 6)}, ["y"], {"mask": mask})
    )
    assert [name for name, _ in module.named_buffers()] == ["mask"]
    assert not list(module.parameters())


def test_weights_in_constant_nodes_are_trained(tmp_path: Path) -> None:
    constant = helper.make_node("Constant", [], ["m"], value=numpy_helper.from_array(M.numpy()))
    path = save(tmp_path / "m.onnx", [constant, node("MatMul", "x m")], {"x": (1, 8)}, ["y"])
    x = torch.randn(1, 8)
    assert [name for name, _ in check(path, x @ M, x).named_parameters()] == ["m"]


def test_names_that_become_equal_stay_apart(tmp_path: Path) -> None:
    nodes = [node("Add", "x a.b", "s"), node("Add", "s a/b", "y")]
    module, _ = load_onnx(
        save(tmp_path / "m.onnx", nodes, {"x": (1, 8)}, ["y"], {"a.b": torch.rand(8), "a/b": torch.rand(8)})
    )
    assert [name for name, _ in module.named_parameters()] == ["a_b", "a_b_2"]


# --- inputs and batch
# -------------------------------------------------------------------------------------------------


def test_token_ids_are_int64_and_embeddings_are_looked_up(tmp_path: Path) -> None:
    path = save(
        tmp_path / "m.onnx", [node("Gather", "m ids")], {"ids": (1, 3)}, ["y"], {"m": M}, integers=["ids"]
    )
    ids = torch.tensor([[1, 7, 0]])
    check(path, M[ids], ids)


@pytest.mark.parametrize(
    ("first", "batch", "want"),
    [("batch", None, 1), ("batch", 4, 4), (None, 4, 4), ("s0", 4, 4), (1, 4, 4), (4, 4, 4)],
)
def test_batch(tmp_path: Path, first: int | str | None, batch: int | None, want: int) -> None:
    path = save(tmp_path / "m.onnx", [node("Relu", "x")], {"x": (first, 3)}, ["y"])
    module, (x,) = load_onnx(path, batch=batch)
    assert x.shape == module(x).shape == (want, 3)


def test_batch_by_name_in_another_place(tmp_path: Path) -> None:
    path = save(tmp_path / "m.onnx", [node("Relu", "x")], {"x": (7, "batch_size", 3)}, ["y"])
    assert load_onnx(path, batch=4)[1][0].shape == (7, 4, 3)


def test_another_dynamic_dimension_is_an_error(tmp_path: Path) -> None:
    path = save(tmp_path / "m.onnx", [node("Relu", "x")], {"x": ("batch", "length")}, ["y"])
    with pytest.raises(
        CaptureError, match=r"m\.onnx: input 'x': dimension 1 \('length'\) has no fixed size; export"
    ):
        load_onnx(path)


@pytest.mark.parametrize("target", [[1, 12], [1, -1]])
def test_a_batch_baked_into_a_reshape_is_an_error(tmp_path: Path, target: list[int]) -> None:
    nodes = [node("Reshape", "x target")]
    path = save(tmp_path / "m.onnx", nodes, {"x": (1, 3, 4)}, ["y"], {"target": target}, output_dims=(1, 12))
    assert load_onnx(path, batch=1)[1][0].shape == (1, 3, 4)
    with pytest.raises(CaptureError, match=r"exported with a fixed batch of 1 .* dynamic batch dimension"):
        load_onnx(path, batch=4)


def test_another_fixed_batch_is_an_error(tmp_path: Path) -> None:
    path = save(tmp_path / "m.onnx", [node("Relu", "x")], {"x": (8, 3)}, ["y"])
    with pytest.raises(
        CaptureError, match=r"batch 4 was asked for, but the inputs have a fixed first dimension \(8\)"
    ):
        load_onnx(path, batch=4)


def test_batch_must_be_positive(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="batch: 0 is not"):
        load_onnx(tmp_path / "m.onnx", batch=0)


# --- errors
# -----------------------------------------------------------------------------------------------------------


def test_all_unknown_operators_are_named_with_their_count(tmp_path: Path) -> None:
    nodes = [
        node("NonZero", "x", "a"),
        node("NonZero", "a", "b"),
        helper.make_node("Magic", ["b"], ["y"], domain="acme"),
    ]
    path = save(tmp_path / "m.onnx", nodes, {"x": (1, 3)}, ["y"])
    with pytest.raises(
        CaptureError, match=r"unsupported ONNX operators .*: NonZero \(2\), acme::Magic \(1\)"
    ):
        load_onnx(path)


def test_a_shape_that_depends_on_data_is_an_error(tmp_path: Path) -> None:
    nodes = [node("Cast", "x", "s", to=TensorProto.INT64), node("Reshape", "x s", "y")]
    path = save(tmp_path / "m.onnx", nodes, {"x": (3,)}, ["y"])
    with pytest.raises(CaptureError, match=r"a Reshape node .* depends on the values of s"):
        load_onnx(path)


def test_a_failing_node_is_named(tmp_path: Path) -> None:
    wrong = helper.make_node("MatMul", ["x", "m"], ["y"], name="/head/MatMul")
    path = save(tmp_path / "m.onnx", [wrong], {"x": (1, 3)}, ["y"], {"m": M})
    with pytest.raises(CaptureError, match=r"m\.onnx: node '/head/MatMul' \(MatMul\): "):
        load_onnx(path)


@pytest.mark.parametrize("content", [None, b"", b"this is not a protocol buffer"])
def test_a_file_that_is_not_onnx_is_an_error(tmp_path: Path, content: bytes | None) -> None:
    path = tmp_path / "m.onnx"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(CaptureError, match=r"m\.onnx: (cannot be read as an ONNX file|holds no ONNX graph)"):
        load_onnx(path)


# --- a file of the exporter
# -------------------------------------------------------------------------------------------


class Block(nn.Module):
    """Patches, attention by matrix products, layer norm and an MLP: a small vision transformer."""

    def __init__(self) -> None:
        super().__init__()
        self.patch = nn.Conv2d(3, 16, 4, 4)
        self.norm = nn.LayerNorm(16)
        self.qkv = nn.Linear(16, 48)
        self.mlp = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16))
        self.head = nn.Linear(16, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.patch(x).flatten(2).transpose(1, 2)
        n, length, _ = x.shape
        q, k, v = self.qkv(self.norm(x)).reshape(n, length, 3, 4, 4).permute(2, 0, 3, 1, 4).unbind(0)
        weights = (q @ k.transpose(-2, -1) / 2.0).softmax(-1)
        x = x + (weights @ v).transpose(1, 2).reshape(n, length, 16)
        x = x + self.mlp(x)
        out: Tensor = self.head(x.mean(1))
        return out


@pytest.mark.filterwarnings("ignore")
def test_exported_module_gives_the_same_values_for_another_batch(tmp_path: Path) -> None:
    block, path = Block().eval(), tmp_path / "block.onnx"
    batch = torch.export.Dim("batch", min=1, max=64)
    torch.onnx.export(
        block, (torch.randn(2, 3, 16, 16),), path, dynamo=True, verbose=False, dynamic_shapes=({0: batch},)
    )
    real, _ = build(path, batch=3, keep_data=True)
    x = torch.randn(3, 3, 16, 16)
    torch.testing.assert_close(real(x), block(x), atol=1e-5, rtol=1e-4)
    assert sum(p.numel() for p in real.parameters()) == sum(p.numel() for p in block.parameters())
    module, inputs = load_onnx(path, batch=3)
    assert module(*inputs).shape == (3, 10)
