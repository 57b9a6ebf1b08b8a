"""Implements the ONNX operators with windows and borders: convolutions, pools, padding, resampling."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from foretrain.capture.sources.onnx.ops import Number, register

_HALF_PIXEL = ("half_pixel", "pytorch_half_pixel", "half_pixel_symmetric")


def _by_rank(spatial: int, *functions: Callable[..., Any]) -> Callable[..., Any]:
    if not 1 <= spatial <= len(functions):
        raise NotImplementedError(f"{spatial} spatial dimensions")
    return functions[spatial - 1]


def _same_pads(
    x: Tensor, kernel: Sequence[int], strides: Sequence[int], dilations: Sequence[int], upper: bool
) -> list[int]:
    begins, ends = [], []
    for size, k, stride, dilation in zip(x.shape[2:], kernel, strides, dilations, strict=True):
        total = max((-(-size // stride) - 1) * stride + (k - 1) * dilation + 1 - size, 0)
        small, large = total // 2, total - total // 2
        begins.append(small if upper else large)
        ends.append(large if upper else small)
    return begins + ends


def _window_pads(
    x: Tensor,
    kernel: Sequence[int],
    strides: Sequence[int],
    dilations: Sequence[int],
    pads: list[int] | None,
    auto_pad: str,
) -> list[int]:
    if auto_pad in ("SAME_UPPER", "SAME_LOWER"):
        return _same_pads(x, kernel, strides, dilations, auto_pad == "SAME_UPPER")
    return pads if pads and auto_pad == "NOTSET" else [0] * (2 * len(kernel))


def _torch_pads(pads: Sequence[int]) -> list[int]:
    """ONNX lists all begins, then all ends; torch lists (begin, end) pairs from the last dimension
    backwards."""
    half = len(pads) // 2
    return [pad for i in reversed(range(half)) for pad in (pads[i], pads[half + i])]


def _split_pads(
    x: Tensor, pads: Sequence[int], fill: float, most: Sequence[int] | None = None
) -> tuple[Tensor, list[int]]:
    """What the kernel can pad itself, after padding the tensor first where the two sides differ or exceed
    ``most``."""
    half = len(pads) // 2
    begins, ends = list(pads[:half]), list(pads[half:])
    fits = most is None or all(begin <= limit for begin, limit in zip(begins, most, strict=True))
    if begins == ends and fits:
        return x, begins
    return F.pad(x, _torch_pads(pads), value=fill), [0] * half


@register("Conv")
def conv(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    auto_pad: str = "NOTSET",
    dilations: list[int] | None = None,
    group: int = 1,
    kernel_shape: list[int] | None = None,
    pads: list[int] | None = None,
    strides: list[int] | None = None,
) -> Tensor:
    kernel = weight.shape[2:]
    strides, dilations = strides or [1] * len(kernel), dilations or [1] * len(kernel)
    x, padding = _split_pads(x, _window_pads(x, kernel, strides, dilations, pads, auto_pad), 0.0)
    function = _by_rank(len(kernel), F.conv1d, F.conv2d, F.conv3d)
    return function(x, weight, bias, strides, padding, dilations, group)  # type: ignore[no-any-return]


@register("ConvTranspose")
def conv_transpose(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    auto_pad: str = "NOTSET",
    dilations: list[int] | None = None,
    group: int = 1,
    kernel_shape: list[int] | None = None,
    output_padding: list[int] | None = None,
    output_shape: list[int] | None = None,
    pads: list[int] | None = None,
    strides: list[int] | None = None,
) -> Tensor:
    if output_shape or auto_pad not in ("NOTSET", "VALID"):
        raise NotImplementedError("output_shape and auto_pad")
    rank = weight.ndim - 2
    strides, dilations = strides or [1] * rank, dilations or [1] * rank
    pads, extra = pads or [0] * (2 * rank), output_padding or [0] * rank
    even = pads[:rank] == pads[rank:]
    function = _by_rank(rank, F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d)
    out: Tensor = function(x, weight, bias, strides, pads[:rank] if even else 0, extra, group, dilations)
    return out if even else F.pad(out, [-pad for pad in _torch_pads(pads)])


@register("MaxPool")
def max_pool(
    x: Tensor,
    *,
    kernel_shape: list[int],
    auto_pad: str = "NOTSET",
    ceil_mode: int = 0,
    dilations: list[int] | None = None,
    pads: list[int] | None = None,
    storage_order: int = 0,
    strides: list[int] | None = None,
) -> Tensor:
    rank = len(kernel_shape)
    strides, dilations = strides or [1] * rank, dilations or [1] * rank
    pads = _window_pads(x, kernel_shape, strides, dilations, pads, auto_pad)
    x, padding = _split_pads(x, pads, -math.inf, [k // 2 for k in kernel_shape])
    function = _by_rank(rank, F.max_pool1d, F.max_pool2d, F.max_pool3d)
    return function(x, kernel_shape, strides, padding, dilations, bool(ceil_mode))  # type: ignore[no-any-return]


@register("AveragePool")
def average_pool(
    x: Tensor,
    *,
    kernel_shape: list[int],
    auto_pad: str = "NOTSET",
    ceil_mode: int = 0,
    count_include_pad: int = 0,
    dilations: list[int] | None = None,
    pads: list[int] | None = None,
    strides: list[int] | None = None,
) -> Tensor:
    rank = len(kernel_shape)
    if any(dilation != 1 for dilation in dilations or ()):
        raise NotImplementedError("dilations")
    strides = strides or [1] * rank
    pads = _window_pads(x, kernel_shape, strides, [1] * rank, pads, auto_pad)
    function = _by_rank(rank, F.avg_pool1d, F.avg_pool2d, F.avg_pool3d)
    padded, padding = _split_pads(x, pads, 0.0, [k // 2 for k in kernel_shape])
    out: Tensor = function(padded, kernel_shape, strides, padding, bool(ceil_mode), bool(count_include_pad))
    if padded is x or count_include_pad:
        return out
    inside = F.pad(torch.ones_like(x[:1, :1]), _torch_pads(pads))
    return out / function(inside, kernel_shape, strides, 0, bool(ceil_mode))  # type: ignore[no-any-return]


@register("GlobalAveragePool")
def global_average_pool(x: Tensor) -> Tensor:
    return x.mean(tuple(range(2, x.ndim)), keepdim=True)


@register("GlobalMaxPool")
def global_max_pool(x: Tensor) -> Tensor:
    return x.amax(tuple(range(2, x.ndim)), keepdim=True)


_PAD_MODES = {"constant": "constant", "reflect": "reflect", "edge": "replicate", "wrap": "circular"}


def _pad(x: Tensor, pads: Sequence[int], mode: str, value: float) -> Tensor:
    """Leave out the outer dimensions that are not padded: only the constant mode takes more than the spatial
    ones."""
    pairs = _torch_pads(pads)
    fewest = 2 if mode == "constant" else 2 * max(x.ndim - 2, 1)
    while len(pairs) > fewest and pairs[-2:] == [0, 0]:
        pairs = pairs[:-2]
    return F.pad(x, pairs, _PAD_MODES[mode], value if mode == "constant" else None)


@register("Pad")
def pad_by_attributes(
    x: Tensor,
    *,
    pads: list[int] | None = None,
    paddings: list[int] | None = None,
    mode: str = "constant",
    value: float = 0.0,
) -> Tensor:
    return _pad(x, pads or paddings or [], mode, value)


@register("Pad", since=11, reads=(1, 2, 3))
def pad(
    x: Tensor,
    pads: list[int],
    value: Number | list[Number] | None = None,
    axes: list[int] | None = None,
    *,
    mode: str = "constant",
) -> Tensor:
    fill = value[0] if isinstance(value, list) and value else value or 0
    full = list(pads)
    if axes is not None:
        full = [0] * (2 * x.ndim)
        for i, axis in enumerate(axes):
            full[axis % x.ndim], full[axis % x.ndim + x.ndim] = pads[i], pads[len(axes) + i]
    return _pad(x, full, mode, float(fill) if x.is_floating_point() else fill)  # type: ignore[arg-type]


# --- resampling
# -------------------------------------------------------------------------------------------------------


def _interpolate_mode(mode: str, spatial: int, transform: str, nearest_mode: str) -> str:
    if mode == "nearest":
        exact = transform in _HALF_PIXEL and nearest_mode.startswith("round")
        return "nearest-exact" if exact else "nearest"
    return {"cubic": "bicubic", "linear": ("linear", "bilinear", "trilinear")[spatial - 1]}[mode]


@register("Resize", since=11, reads=(1, 2, 3))
def resize(
    x: Tensor,
    roi: list[float] | None = None,
    scales: list[float] | None = None,
    sizes: list[int] | None = None,
    *,
    mode: str = "nearest",
    coordinate_transformation_mode: str = "half_pixel",
    nearest_mode: str = "round_prefer_floor",
    axes: list[int] | None = None,
    antialias: int = 0,
    cubic_coeff_a: float = -0.75,
    exclude_outside: int = 0,
    extrapolation_value: float = 0.0,
    keep_aspect_ratio_policy: str = "stretch",
) -> Tensor:
    """Sampling positions that torch does not have are taken as its nearest kind, which has the same shape and
    cost."""
    order = list(range(x.ndim)) if axes is None else [axis % x.ndim for axis in axes]
    align = coordinate_transformation_mode == "align_corners" if mode != "nearest" else None
    how: dict[str, Any] = {
        "mode": _interpolate_mode(mode, x.ndim - 2, coordinate_transformation_mode, nearest_mode),
        "align_corners": align,
        "antialias": bool(antialias),
    }
    if scales:
        factors = dict(zip(order, scales, strict=True))
        return F.interpolate(x, scale_factor=[factors.get(i, 1.0) for i in range(2, x.ndim)], **how)
    targets = dict(zip(order, sizes or (), strict=True))
    return F.interpolate(x, size=[int(targets.get(i, x.shape[i])) for i in range(2, x.ndim)], **how)


@register("Upsample", "Resize", reads=(1,))
def upsample(
    x: Tensor, factors: list[float] | None = None, *, scales: list[float] | None = None, mode: str = "nearest"
) -> Tensor:
    return resize(x, None, factors or scales, mode=mode, coordinate_transformation_mode="asymmetric")
