"""Reads operator times that others have published as calls of torch's own operators.

ETS (T4, RTX 2080 Ti), NeuSight (P4 to A100, AMD) and aiconfigurator (A100 to GB200: matrix products in bf16,
fp8 and nvfp4, causal attention). The files are not part of the project; a folder holds some of ``_READERS``.
"""

from __future__ import annotations

import csv
import functools
import gzip
import hashlib
import json
import math
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from foretrain.costs.measured import MeasuredOperator
from foretrain.errors import InputError
from foretrain.graph import TensorSpec
from foretrain.graph.ir import PACKED

_MOST = 3000
"""Rows that are kept of one operator, phase, dtype and device; beyond, a hash of the shape chooses."""
_MOST_OF_GRID = 1000
"""The same where shapes are a grid: of one dtype, device and framework."""

Specs = tuple[TensorSpec, ...]
Made = tuple[str, Specs, Specs, dict[str, Any]]
"""A call: name, inputs, outputs, arguments."""


def read_published(folder: Path) -> Iterator[MeasuredOperator]:
    """The operators of every known file in the folder, without shapes that torch's cannot express."""
    for path in published_files(folder):
        yield from _READERS[path.name](path)


def published_files(folder: Path) -> list[Path]:
    """The known files in a folder, in the order in which they are read."""
    files = [folder / name for name in _READERS if (folder / name).exists()]
    if not files:
        raise InputError(f"data: {folder} has none of {', '.join(_READERS)}")
    return files


def _rows(
    path: Path, group: Callable[[Mapping[str, str]], object], most: int = _MOST
) -> Iterator[dict[str, str]]:
    """Read about so many rows of each group, chosen by a hash of the row, so always the same."""
    with gzip.open(path, "rt", newline="") as file:
        rows = list(csv.DictReader(file))
    sizes: dict[object, int] = {}
    for row in rows:
        sizes[group(row)] = sizes.get(group(row), 0) + 1
    for row in rows:
        chance = int(hashlib.sha256(json.dumps(row, sort_keys=True).encode()).hexdigest()[:8], 16) / 2**32
        if chance * sizes[group(row)] < most:
            yield row


# ETS


def _read_ets(path: Path, device: str) -> Iterator[MeasuredOperator]:
    for row in _rows(path, lambda row: (row["op"], row["phase"], row["dtype"])):
        maker = _ETS_CALLS.get((row["op"], row["phase"]))
        if maker is None:
            continue
        dtype = {"fp32": "float32", "fp16": "float16"}[row["dtype"]]
        call = maker(json.loads(row["shape"]), dtype)
        if call is not None:
            yield MeasuredOperator.of(*call, device, float(row["device_s"]))


def _convolution(shape: Mapping[str, Any], dtype: str, *, backward: bool) -> Made | None:
    x, weight = _spec(shape["in"], dtype), _spec(shape["weight"], dtype)
    stride, pad, dilation = shape["stride"], shape["pad"], shape.get("dilation", [1, 1])
    if len(x.shape) != 4 or len(stride) != 2:
        return None
    out = [
        (size + 2 * p - d * (k - 1) - 1) // s + 1
        for size, k, s, p, d in zip(x.shape[2:], weight.shape[2:], stride, pad, dilation, strict=True)
    ]
    y = _spec([x.shape[0], weight.shape[0], *out], dtype)
    args = {
        "stride": stride,
        "padding": pad,
        "dilation": dilation,
        "transposed": False,
        "output_padding": [0, 0],
        "groups": shape["groups"],
    }
    if not backward:
        return "convolution", (x, weight), (y,), args
    stem = x.shape[1] == 3
    gradients = (weight,) if stem else (x, weight)
    return "convolution_backward", (y, x, weight), gradients, {**args, "output_mask": [not stem, True, False]}


def _pointwise(name: str, inputs: int, **args: int) -> Callable[[Mapping[str, Any], str], Made]:
    """A call whose operands and result are alike."""

    def make(shape: Mapping[str, Any], dtype: str) -> Made:
        x = _spec(shape["in"], dtype)
        return name, (x,) * inputs, (x,), dict(args)

    return make


def _binary(name: str) -> Callable[[Mapping[str, Any], str], Made]:
    def make(shape: Mapping[str, Any], dtype: str) -> Made:
        a, b = _spec(shape["a"], dtype), _spec(shape["b"], dtype)
        return name, (a, b), (max(a, b, key=lambda spec: spec.numel),), {}

    return make


def _batch_norm(shape: Mapping[str, Any], dtype: str, *, backward: bool) -> Made | None:
    """cuDNN has no batch norm with fp16 weights, which the fp16 models of ETS have: torch ran its own."""
    x = _spec(shape["in"], dtype)
    if len(x.shape) < 2:
        return None
    channel = _spec([x.shape[1]], dtype)
    library = "cudnn" if dtype == "float32" else "native"
    if backward:
        return f"{library}_batch_norm_backward", (x, x, channel, channel, channel), (x, channel, channel), {}
    return f"{library}_batch_norm", (x, channel, channel, channel, channel), (x, channel, channel), {}


def _layer_norm(shape: Mapping[str, Any], dtype: str, *, backward: bool) -> Made:
    x, normalized = _spec(shape["in"], dtype), shape["normalized"]
    rows = _spec([x.numel // max(1, math.prod(normalized))], "float32")
    affine = _spec(normalized, dtype)
    if backward:
        return (
            "native_layer_norm_backward",
            (x, x, rows, rows, affine),
            (x, affine, affine),
            {"normalized_shape": normalized},
        )
    return "native_layer_norm", (x, affine, affine), (x, rows, rows), {"normalized_shape": normalized}


def _linear(shape: Mapping[str, Any], dtype: str) -> Made:
    x, weight = shape["in"], shape["weight"]
    rows = math.prod(x[:-1])
    a, b = _spec([rows, x[-1]], dtype), TensorSpec((x[-1], weight[0]), dtype, (1, x[-1]))
    out = (_spec([rows, weight[0]], dtype),)
    return (
        ("addmm", (_spec([weight[0]], dtype), a, b), out, {})
        if shape.get("bias")
        else ("mm", (a, b), out, {})
    )


def _matmul(shape: Mapping[str, Any], dtype: str) -> Made | None:
    a, b = shape["a"], shape["b"]
    if len(a) < 3 or len(a) != len(b) or a[:-2] != b[:-2]:
        return None
    batch = math.prod(a[:-2])
    left, right = _spec([batch, *a[-2:]], dtype), _spec([batch, *b[-2:]], dtype)
    return "bmm", (left, right), (_spec([batch, a[-2], b[-1]], dtype),), {}


def _cat(shape: Mapping[str, Any], dtype: str) -> Made | None:
    out, axis, count = list(shape["out"]), shape["axis"], shape["n"]
    if out[axis] < count:
        return None
    out[axis] //= count
    return "cat", (_spec(out, dtype),) * count, (_spec(shape["out"], dtype),), {"dim": axis}


def _mean(shape: Mapping[str, Any], dtype: str) -> Made | None:
    x = shape["in"]
    return (
        ("mean", (_spec(x, dtype),), (_spec([*x[:2], 1, 1], dtype),), {"dim": [-1, -2]})
        if len(x) == 4
        else None
    )


_ETS_ACTIVATIONS = {
    **{name: name for name in ("silu", "gelu", "hardswish", "sigmoid", "hardsigmoid")},
    "relu6/hardtanh": "hardtanh",
}
_ETS_CALLS: dict[tuple[str, str], Callable[[Mapping[str, Any], str], Made | None]] = {
    ("conv2d", "forward"): lambda shape, dtype: _convolution(shape, dtype, backward=False),
    ("conv2d", "backward"): lambda shape, dtype: _convolution(shape, dtype, backward=True),
    ("batch_norm", "forward"): lambda shape, dtype: _batch_norm(shape, dtype, backward=False),
    ("batch_norm", "backward"): lambda shape, dtype: _batch_norm(shape, dtype, backward=True),
    ("layer_norm", "forward"): lambda shape, dtype: _layer_norm(shape, dtype, backward=False),
    ("layer_norm", "backward"): lambda shape, dtype: _layer_norm(shape, dtype, backward=True),
    ("linear", "forward"): _linear,
    ("matmul", "forward"): _matmul,
    ("cat", "forward"): _cat,
    ("mean", "forward"): _mean,
    ("adaptive_avg_pool2d", "forward"): _mean,
    ("add", "forward"): _binary("add"),
    ("add_", "forward"): _binary("add_"),
    ("mul", "forward"): _binary("mul"),
    ("relu", "forward"): _pointwise("relu_", 1),
    ("relu", "backward"): _pointwise("threshold_backward", 2),
    **{(op, "forward"): _pointwise(name, 1) for op, name in _ETS_ACTIVATIONS.items()},
    **{(op, "backward"): _pointwise(f"{name}_backward", 2) for op, name in _ETS_ACTIVATIONS.items()},
    ("softmax", "forward"): _pointwise("_softmax", 1, dim=-1),
    ("softmax", "backward"): _pointwise("_softmax_backward_data", 2, dim=-1),
    ("sgd_add_", "optimizer"): _pointwise("add_", 2),
    ("sgd_mul_", "optimizer"): _pointwise("mul_", 1),
}


# NeuSight


def _read_neusight(path: Path) -> Iterator[MeasuredOperator]:
    for row in _rows(path, lambda row: (row["op"], row["device"])):
        call = _neusight_call(row)
        if call is not None:
            yield MeasuredOperator.of(*call, row["device"], float(row["latency_s"]))


def _neusight_call(row: Mapping[str, str]) -> Made | None:
    op, dtype = row["op"], "float32"

    def size(name: str) -> int:
        return int(float(row[name]))

    if op == "bmm":
        b, m, n, k = map(size, ("B", "M", "N", "K"))
        return "bmm", (_spec([b, m, n], dtype), _spec([b, n, k], dtype)), (_spec([b, m, k], dtype),), {}
    if op == "linear":
        b, m, n, k = map(size, ("B", "M", "N", "K"))
        return _linear({"in": [b, m, n], "weight": [k, n], "bias": True}, dtype)
    if op == "conv":
        if row["device"].startswith("a100"):
            return None  # measured without TF32, which no job asks for
        b, c, k, kernel, side, stride, pad = map(
            size, ("B", "c_in", "c_out", "kernel", "size", "stride", "padding")
        )
        shape = {
            "in": [b, c, side, side],
            "weight": [k, c, kernel, kernel],
            "stride": [stride] * 2,
            "pad": [pad] * 2,
            "groups": 1,
        }
        return _convolution(shape, dtype, backward=False)
    rows = {"in": [size("B"), size("H")], "normalized": [size("H")]}
    x = _spec(rows["in"], dtype)
    if op == "ln":
        return _layer_norm(rows, dtype, backward=False)
    if op == "softmax":
        return "_softmax", (x,), (x,), {"dim": -1}
    scalar = op.endswith("u") and op != "relu" and op != "gelu"
    return (
        op.removesuffix("u") if scalar else op,
        (x,) * (1 if scalar or op in ("relu", "gelu", "tanh") else 2),
        (x,),
        {},
    )


# aiconfigurator


def _read_products(path: Path) -> Iterator[MeasuredOperator]:
    """Linear layers. Frameworks take turns: kernels differ, and two boards of one kind."""
    for row in _rows(path, lambda row: (row["device"], row["dtype"], row["framework"]), _MOST_OF_GRID):
        call = product_call(row)
        if call is not None:
            yield MeasuredOperator.of(*call, row["device"], float(row["latency_s"]))


def product_call(row: Mapping[str, str]) -> Made | None:
    """A linear layer without bias; its weight is stored as (outputs, inputs).

    Times of vLLM's fp8 layers hold the cast of the input, row by row: beside SGLang's, where both have a
    shape, they grow by 3 us and the traffic of the cast. Its layers with blockwise scales take no less than
    80 us on Hopper and 160 to 280 us on Blackwell, which is the host's time; they are left out.
    """
    m, n, k = (int(row[name]) for name in "mnk")
    kernel, by_vllm = row["kernel"].lower(), row["framework"] == "vllm"
    out = (_spec([m, n], "bfloat16"),)

    def weight(rows: int, dtype: str) -> TensorSpec:
        return TensorSpec((rows, n), dtype, (1, rows))

    if row["dtype"] == "bfloat16":
        return "mm", (_spec([m, k], "bfloat16"), weight(k, "bfloat16")), out, {}
    if row["dtype"] == "nvfp4":
        a, b = _spec([m, k // 2], PACKED), weight(k // 2, PACKED)
        scales = [_spec([rows, k // 16], "float8_e4m3fn") for rows in (m, n)]
        library = "cutedsl" if "cutedsl" in kernel else "cutlass"
    elif row["dtype"] == "fp8":
        a, b = _spec([m, k], "bfloat16" if by_vllm else _FP8), weight(k, _FP8)
        scales, library = [_spec([m, 1], "float32"), _spec([1, n], "float32")], "cutlass"
    elif row["dtype"] == "fp8_block" and not by_vllm:
        a, b, library = _spec([m, k], _FP8), weight(k, _FP8), "deepgemm"
        blocks = math.ceil(k / 128)
        scales = [_spec([m, blocks], "float32"), _spec([blocks, math.ceil(n / 128)], "float32")]
    else:
        return None
    return "_scaled_mm", (a, b, *scales), out, {"library": library, "use_fast_accum": True}


def _read_attention(path: Path) -> Iterator[MeasuredOperator]:
    """Causal attention over whole sequences, long and with few heads of keys alone: the times hold what a
    server does around it (tens of microseconds, and writing keys and values to its cache), which is twice
    the kernel's on short ones. FlashAttention 3 and 4 and TensorRT-LLM's kernels on Hopper and Blackwell
    stand for cuDNN's, which torch calls there."""
    for row in _rows(path, lambda row: (row["device"], row["kernel"])):
        b, s, heads, shared, d = (
            int(row[name]) for name in ("batch", "sequence", "heads", "kv_heads", "head_dim")
        )
        if float(row["latency_s"]) < _ATTENTION_S or heads < _SHARED_BY * shared:
            continue
        query, key = (
            TensorSpec((b, h, s, d), row["dtype"], (s * h * d, d, h * d, 1)) for h in (heads, shared)
        )
        library = "flash" if row["kernel"] == "vllm_flash_attn" else "cudnn"
        name = f"_scaled_dot_product_{library}_attention"
        call = name, (query, key, key), (query,), {"is_causal": True}
        yield MeasuredOperator.of(*call, row["device"], float(row["latency_s"]))


_FP8 = "float8_e4m3fn"
_ATTENTION_S, _SHARED_BY = 5e-4, 4
"""Seconds, and heads of queries for each of keys, from which on a server's attention is the kernel's."""
_READERS: dict[str, Callable[[Path], Iterator[MeasuredOperator]]] = {
    "ets_t4.csv.gz": functools.partial(_read_ets, device="t4"),
    "ets_2080ti.csv.gz": functools.partial(_read_ets, device="rtx-2080-ti"),
    "neusight_fp32.csv.gz": _read_neusight,
    "aic_gemm.csv.gz": _read_products,
    "aic_attention.csv.gz": _read_attention,
}


def _spec(shape: Any, dtype: str) -> TensorSpec:
    return TensorSpec(tuple(shape), dtype)
