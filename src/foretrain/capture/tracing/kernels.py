"""Tells what an operator is on CUDA: its name there, whether it launches anything, the bytes it moves, and
its outputs where those of the meta kernel differ or are missing."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch._prims_common import suggest_memory_format

from foretrain.capture.parallel.collectives import NAMESPACE as COLLECTIVES
from foretrain.graph import TensorSpec

aten = torch.ops.aten


def cuda_name(func: Any, args: Mapping[str, Any], inputs: tuple[TensorSpec, ...]) -> str:
    """The operator's name as CUDA runs it: without ``aten`` and overload; batch norm by the library that
    torch picks."""
    namespace, _, name = func._schema.name.partition("::")
    name = _SAME.get(name, name)
    if name in ("batch_norm", "batch_norm_backward"):
        name = ("cudnn_" if _cudnn_batch_norm(args, inputs) else "native_") + name
    return name if namespace in ("aten", COLLECTIVES) else f"{namespace}.{name}"


_SAME = {
    "native_batch_norm": "batch_norm",
    "_native_batch_norm_legit": "batch_norm",
    "_batch_norm_with_update": "batch_norm",
    "native_batch_norm_backward": "batch_norm_backward",
    "_unsafe_view": "view",
    "_reshape_alias": "view",
}


def _cudnn_batch_norm(args: Mapping[str, Any], inputs: tuple[TensorSpec, ...]) -> bool:
    """cuDNN takes fp32, and fp16 with fp32 weights; bf16, affine-free layers and tables of rows stay with
    torch's own kernels."""
    if "weight" not in args:
        return False
    x, weight = (inputs[int(args[name][1:])] for name in ("input", "weight"))
    return len(x.shape) > 2 and x.dtype in ("float32", "float16") and weight.dtype == "float32"


_RESERVED = {0: 2.0, 1: 2.0, 2: 5.5, 3: 6.2}
"""Values per hidden unit, step and layer that cuDNN keeps for the backward pass, by its mode (relu, tanh,
LSTM, GRU)."""


def _rnn(
    x: torch.Tensor, weights: list[torch.Tensor], _stride: int, _weight_buf: Any, hx: torch.Tensor,
    cx: torch.Tensor | None, mode: int,
    hidden_size: int, proj_size: int, num_layers: int, batch_first: bool, _dropout: float, train: bool,
    bidirectional: bool, *_rest: Any,
) -> tuple[torch.Tensor, ...]:  # fmt: skip
    directions = 2 if bidirectional else 1
    packed = x.dim() == 2  # all steps of a packed sequence in one dimension
    steps = x.shape[:1] if packed else (x.shape[1], x.shape[0]) if batch_first else x.shape[:2]
    output = x.new_empty((*steps, (proj_size or hidden_size) * directions))
    kept = (
        int(_RESERVED[mode] * math.prod(steps) * num_layers * directions * hidden_size) * x.element_size()
        if train
        else 0
    )
    cell = torch.empty(0, device="meta") if cx is None else torch.empty_like(cx)
    output = output.transpose(0, 1) if batch_first and not packed else output
    return output, torch.empty_like(hx), cell, x.new_empty(kept, dtype=torch.uint8), x.new_empty(0)


def _rnn_backward(
    x: torch.Tensor,
    weights: list[torch.Tensor],
    _stride: int,
    _weight_buf: Any,
    hx: torch.Tensor,
    cx: torch.Tensor | None,
    *_rest: Any,
) -> tuple[Any, ...]:
    cell = torch.empty(0, device="meta") if cx is None else torch.empty_like(cx)
    return torch.empty_like(x), torch.empty_like(hx), cell, [torch.empty_like(weight) for weight in weights]


def _convolution(x: torch.Tensor, weight: torch.Tensor, *args: Any) -> torch.Tensor:
    """cuDNN answers in channels-last when its input or weight has that layout; the meta kernel forgets it."""
    output: torch.Tensor = aten.convolution.default(x, weight, *args)
    return _like_cudnn(output, x, weight)


def _convolution_backward(
    gradient: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, *args: Any
) -> tuple[torch.Tensor | None, ...]:
    first, *rest = aten.convolution_backward.default(gradient, x, weight, *args)
    return None if first is None else _like_cudnn(first, x, weight), *rest


def _like_cudnn(output: torch.Tensor, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    wanted = {4: torch.channels_last, 5: torch.channels_last_3d}.get(output.dim())
    if wanted is None or wanted not in (suggest_memory_format(x), suggest_memory_format(weight)):
        return output
    return torch.empty(output.shape, dtype=output.dtype, device="meta", memory_format=wanted)


def _layer_norm(x: torch.Tensor, *args: Any) -> tuple[torch.Tensor, ...]:
    """CUDA's kernel returns a contiguous result whatever the layout of its input; the meta kernel keeps the
    layout."""
    output, mean, rstd = aten.native_layer_norm.default(x, *args)
    return torch.empty(output.shape, dtype=output.dtype, device="meta"), mean, rstd


def _layer_norm_backward(gradient: torch.Tensor, *args: Any) -> tuple[torch.Tensor | None, ...]:
    output, *rest = aten.native_layer_norm_backward.default(gradient, *args)
    return None if output is None else torch.empty(output.shape, dtype=output.dtype, device="meta"), *rest


def _grouped_mm(
    a: torch.Tensor, b: torch.Tensor, offs: torch.Tensor | None = None, *_rest: Any, **_more: Any
) -> torch.Tensor:
    """One matrix product per expert, for any dtype: rows (or columns, or the summed dimension) are cut at
    ``offs``."""
    if a.dim() == b.dim() == 2:
        assert offs is not None
        return a.new_empty((offs.shape[0], a.shape[0], b.shape[1]))
    if a.dim() == b.dim() == 3:
        return a.new_empty((a.shape[0], a.shape[1], b.shape[2]))
    return a.new_empty((a.shape[-2], b.shape[-1]))


def _scaled_mm(
    a: torch.Tensor, b: torch.Tensor, *_rest: Any, out_dtype: torch.dtype | None = None, **_more: Any
) -> torch.Tensor:
    """In fp8 with scales of any kind; the meta kernel knows some."""
    out_dtype = out_dtype or next((one for one in _rest if isinstance(one, torch.dtype)), a.dtype)
    return a.new_empty((a.shape[0], b.shape[1]), dtype=out_dtype)


def _ctc_loss(
    log_probs: torch.Tensor, targets: torch.Tensor, _inputs: Any, lengths: Any, *_rest: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """The loss of each sample, and the log-probabilities of every place between its labels at every step."""
    steps, batch = (
        (log_probs.shape[0], log_probs.shape[1]) if log_probs.dim() == 3 else (log_probs.shape[0], 1)
    )
    known = not isinstance(lengths, torch.Tensor) and len(lengths) > 0
    labels = max(lengths) if known else targets.shape[-1] // (batch if targets.dim() == 1 else 1)
    return log_probs.new_empty(batch), log_probs.new_empty((batch, steps, 2 * labels + 1))


def _ctc_loss_backward(_gradient: torch.Tensor, log_probs: torch.Tensor, *_rest: Any) -> torch.Tensor:
    return torch.empty_like(log_probs)


def _masked_fill(x: torch.Tensor, mask: torch.Tensor, _value: torch.Tensor) -> torch.Tensor:
    """The value may be a number on the host, which the meta kernel refuses."""
    shape = torch.broadcast_shapes(x.shape, mask.shape)
    return torch.empty_like(x) if x.shape == shape else x.new_empty(shape)


def _rms_norm(
    x: torch.Tensor, shape: list[int], _weight: torch.Tensor | None, _eps: float | None
) -> tuple[torch.Tensor, torch.Tensor]:
    rows = (*x.shape[: x.dim() - len(shape)], *[1] * len(shape))
    return torch.empty(x.shape, dtype=x.dtype, device="meta"), x.new_empty(rows, dtype=torch.float32)


def _rms_norm_backward(
    _gradient: torch.Tensor, x: torch.Tensor, _shape: list[int], _rstd: torch.Tensor,
    weight: torch.Tensor | None, wanted: list[bool],
) -> tuple[torch.Tensor | None, torch.Tensor | None]:  # fmt: skip
    of_x = torch.empty(x.shape, dtype=x.dtype, device="meta") if wanted[0] else None
    return of_x, torch.empty_like(weight) if wanted[1] and weight is not None else None


def _like_first(x: torch.Tensor, *_rest: Any, **_more: Any) -> torch.Tensor:
    return torch.empty_like(x)


def _like_second(_first: torch.Tensor, x: torch.Tensor, *_rest: Any, **_more: Any) -> torch.Tensor:
    return torch.empty_like(x)


def _with_mask(x: torch.Tensor, *_rest: Any, **_more: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """What is rounded, and which numbers were within the range."""
    return torch.empty_like(x), torch.empty_like(x, dtype=torch.bool)


def _learnable_backward(
    _gradient: torch.Tensor, x: torch.Tensor, scale: torch.Tensor, zero: torch.Tensor, *_rest: Any
) -> tuple[torch.Tensor, ...]:
    return torch.empty_like(x), torch.empty_like(scale), torch.empty_like(zero, dtype=scale.dtype)


def _least_squares(
    a: torch.Tensor, b: torch.Tensor, _rcond: float | None = None, **_more: Any
) -> tuple[torch.Tensor, ...]:
    """As its only driver on CUDA has it, which gives neither rank nor singular values."""
    of_vectors = b.dim() == a.dim() - 1
    rows = torch.broadcast_shapes(a.shape[:-2], b.shape[: -1 if of_vectors else -2])
    solution = b.new_empty((*rows, a.shape[-1], *(() if of_vectors else b.shape[-1:])))
    residuals = b.new_empty((*rows, *b.shape[-1:]) if a.shape[-2] > a.shape[-1] and not of_vectors else 0)
    return solution, residuals, b.new_empty(0, dtype=torch.long), b.new_empty(0)


_OF_THE_FIRST = """
_standard_gamma_grad _sample_dirichlet _dirichlet_grad binomial _fake_quantize_learnable_per_tensor_affine
_fake_quantize_learnable_per_channel_affine
""".split()
_OF_THE_SECOND = """
multi_margin_loss_backward multilabel_margin_loss_backward fractional_max_pool3d_backward
""".split()
_MASKED = """
fake_quantize_per_tensor_affine_cachemask _fake_quantize_per_tensor_affine_cachemask_tensor_qparams
fake_quantize_per_channel_affine_cachemask
""".split()
_LEARNABLE = """
_fake_quantize_learnable_per_tensor_affine_backward _fake_quantize_learnable_per_channel_affine_backward
""".split()
"""Operators that torch has kernels for on a GPU and none on meta, by the shapes of their outputs."""

CUDA_OUTPUTS: Mapping[Any, Callable[..., Any]] = {
    **({aten._grouped_mm.default: _grouped_mm} if hasattr(aten, "_grouped_mm") else {}),
    aten._scaled_mm.default: _scaled_mm,
    aten.convolution.default: _convolution,
    aten.convolution_backward.default: _convolution_backward,
    aten.native_layer_norm.default: _layer_norm,
    aten.native_layer_norm_backward.default: _layer_norm_backward,
    **(
        {
            aten._fused_rms_norm.default: _rms_norm,
            aten._fused_rms_norm_backward.default: _rms_norm_backward,
        }
        if hasattr(aten, "_fused_rms_norm_backward")
        else {}
    ),
    aten._ctc_loss.default: _ctc_loss,
    aten._ctc_loss.Tensor: _ctc_loss,
    aten._ctc_loss_backward.default: _ctc_loss_backward,
    aten._ctc_loss_backward.Tensor: _ctc_loss_backward,
    aten.masked_fill.Tensor: _masked_fill,
    aten._cudnn_rnn.default: _rnn,
    aten._cudnn_rnn_backward.default: _rnn_backward,
    aten.linalg_lstsq.default: _least_squares,
    **{
        getattr(aten, name).default: shapes
        for names, shapes in (
            (_OF_THE_FIRST, _like_first),
            (_OF_THE_SECOND, _like_second),
            (_MASKED, _with_mask),
            (_LEARNABLE, _learnable_backward),
        )
        for name in names
    },
}
