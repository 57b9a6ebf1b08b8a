"""Runs attention, norms, dropout and recurrences as the kernels that torch chooses for CUDA tensors."""

from __future__ import annotations

import contextlib
import unittest.mock
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch._prims_common import suggest_memory_format

from foretrain.errors import CaptureError

aten = torch.ops.aten
KERNELS: Any = getattr(torch._C.DispatchKey, "AutocastIPU")  # noqa: B009 (the stubs do not know it)
"""The dispatch key that these are kernels of, while a model is traced (``cuda.py``)."""

Attend = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None], torch.Tensor]
"""Attention of queries over keys and values, with a mask."""
Around = Callable[[Attend, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None], torch.Tensor]
"""What is made of a call of attention where other ranks have keys and values too."""

_around: Around | None = None


@contextlib.contextmanager
def attention_through(around: Around) -> Iterator[None]:
    """Calls of attention go through ``around``."""
    global _around
    before, _around = _around, around
    try:
        yield
    finally:
        _around = before


def _below(overload: Any, *args: Any, **kwargs: Any) -> Any:
    """Call an operator past the kernels of this module."""
    with torch._C._ExcludeDispatchKeyGuard(torch._C.DispatchKeySet(KERNELS)):
        return overload(*args, **kwargs)


def _dropout(x: torch.Tensor, p: float, train: bool) -> Any:
    if x.is_meta and train and 0 < p < 1:
        result = aten.native_dropout.default(x, p, True)[0]
        return result
    return _below(aten.dropout.default, x, p, train)


def _softmax(overload: Any, fused: Any) -> Callable[..., Any]:
    """CUDA's softmax reads fp16 and writes fp32 in one kernel; other dtypes are converted first."""

    def kernel(x: torch.Tensor, dim: int, dtype: torch.dtype | None = None) -> Any:
        if x.is_meta and x.dtype == torch.float16 and dtype == torch.float32:
            return fused(x, dim, True)
        return _below(overload, x, dim, dtype)

    return kernel


class _RmsNorm(torch.autograd.Function):
    """CUDA's own kernel, and that of its gradients; elsewhere torch writes the norm out."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, shape: list[int], weight: torch.Tensor | None, eps: float | None
    ) -> torch.Tensor:
        with torch._C._AutoDispatchBelowAutograd():
            output, rstd = aten._fused_rms_norm.default(x, shape, weight, eps)
        ctx.shape = shape
        ctx.save_for_backward(x, rstd, weight)
        return output  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        x, rstd, weight = ctx.saved_tensors
        wanted = [ctx.needs_input_grad[0], ctx.needs_input_grad[2]]
        with torch._C._AutoDispatchBelowAutograd():
            of_x, of_weight = aten._fused_rms_norm_backward.default(
                gradient, x, ctx.shape, rstd, weight, wanted
            )
        return of_x, None, of_weight, None


def _rms_norm(
    x: torch.Tensor, normalized_shape: list[int], weight: torch.Tensor | None = None, eps: float | None = None
) -> Any:
    """One kernel, where weights are as wide as what they scale and channels do not lie side by side."""
    same = weight is None or weight.dtype == x.dtype
    in_order = suggest_memory_format(x) == torch.contiguous_format
    if x.is_meta and same and in_order and hasattr(aten, "_fused_rms_norm_backward"):
        return _RmsNorm.apply(x, list(normalized_shape), weight, eps)  # type: ignore[no-untyped-call]
    return _below(aten.rms_norm.default, x, normalized_shape, weight, eps)


def _attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Any:
    """torch's choice between flash, memory-efficient and plain attention.

    On Hopper and later, torch runs cuDNN's attention where this says flash: the same shapes and the same
    saved tensors.
    """
    if not query.is_meta:
        plain = aten.scaled_dot_product_attention.default
        return _below(
            plain, query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
        )
    how = (query.shape[-2] == key.shape[-2], dropout_p, is_causal, scale, enable_gqa)
    if _around is not None:
        return _around(lambda q, k, v, mask: _chosen(q, k, v, mask, *how), query, key, value, attn_mask)
    return _chosen(query, key, value, attn_mask, *how)


def _chosen(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None,
    square: bool,
    dropout_p: float,
    is_causal: bool,
    scale: float | None,
    enable_gqa: bool,
) -> Any:
    """The same on the meta device; ``square`` where a rank has as many keys of its own as queries."""
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        attn_mask = torch.zeros_like(attn_mask, dtype=query.dtype).masked_fill_(
            attn_mask.logical_not(), float("-inf")
        )
    if _fits_flash(query, key, value, attn_mask, square or not is_causal):
        return _flash(query, key, value, dropout_p, is_causal, scale)
    if _fits_efficient(query, key, value, attn_mask, dropout_p):
        needs_grad = torch.is_grad_enabled() and any(t.requires_grad for t in (query, key, value))
        bias = None if attn_mask is None else _aligned(attn_mask).expand(*query.shape[:3], key.shape[2])
        efficient = aten._scaled_dot_product_efficient_attention.default
        return efficient(query, key, value, bias, needs_grad, dropout_p, is_causal, scale=scale)[0]
    plain = aten._scaled_dot_product_attention_math.default
    return plain(
        query, key, value, attn_mask, dropout_p, is_causal, None, scale=scale, enable_gqa=enable_gqa
    )[0]


def _fits_fused(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> bool:
    return (
        query.dim() == 4
        and query.shape[0] == key.shape[0]
        and query.shape[-1] == key.shape[-1]
        and all(t.stride(-1) == 1 for t in (query, key, value))
    )


def _is_half(tensor: torch.Tensor) -> bool:
    return tensor.dtype in (torch.float16, torch.bfloat16)


def _fits_flash(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None, square: bool
) -> bool:
    same_width = query.shape[-1] == value.shape[-1] <= 256
    return _fits_fused(query, key, value) and _is_half(query) and mask is None and square and same_width


def _fits_efficient(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None, dropout_p: float
) -> bool:
    """Any float dtype and a mask in rows; not fewer key than query heads, nor a learned mask together with
    dropout."""
    fits = _fits_fused(query, key, value) and query.shape[1] == key.shape[1]
    if mask is None:
        return fits
    return fits and mask.stride(-1) == 1 and not (mask.requires_grad and dropout_p > 0)


def _aligned(mask: torch.Tensor) -> torch.Tensor:
    """The memory-efficient kernel reads its mask in rows of a multiple of eight: others are padded, then
    sliced back."""
    if all(stride % 8 == 0 for stride in mask.stride()[:-1]) and mask.stride(-1) == 1:
        return mask
    width = mask.shape[-1]
    return torch.nn.functional.pad(mask, (0, 8 - width % 8))[..., :width]


def _flash(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    dropout_p: float,
    is_causal: bool,
    scale: float | None,
) -> Any:
    width = query.shape[-1]
    scale = width**-0.5 if scale is None else scale
    if width % 8:
        query, key, value = (torch.nn.functional.pad(t, (0, 8 - width % 8)) for t in (query, key, value))
    result = aten._scaled_dot_product_flash_attention.default(
        query, key, value, dropout_p, is_causal, False, scale=scale
    )[0]
    return result if result.shape[-1] == width else result[..., :width]


@contextlib.contextmanager
def served_attention() -> Iterator[None]:
    """``nn.MultiheadAttention`` takes the way that it takes on a GPU in eval mode, without gradients and
    autocast: one call for projections and attention."""
    with (
        unittest.mock.patch("torch.nn.modules.activation._check_arg_device", return_value=True),
        unittest.mock.patch("torch.overrides.has_torch_function", return_value=False),
    ):
        yield


def _served_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, embed_dim: int, num_head: int,
    qkv_weight: torch.Tensor, qkv_bias: torch.Tensor, proj_weight: torch.Tensor, proj_bias: torch.Tensor,
    mask: torch.Tensor | None = None, need_weights: bool = True, average_attn_weights: bool = True,
    mask_type: int | None = None,
) -> Any:  # fmt: skip
    """That call on CUDA: fused attention on the parts of the projection as they lie; where weights are wanted
    or there is a mask, they are brought to heads in one kernel, and attention is written out."""
    if not query.is_meta:
        plain, projections = aten._native_multi_head_attention.default, (qkv_weight, qkv_bias, proj_weight)
        return _below(
            plain, query, key, value, embed_dim, num_head, *projections, proj_bias, mask, need_weights,
            average_attn_weights, mask_type,
        )  # fmt: skip
    batch, rows, width = query.shape[0], query.shape[1], embed_dim // num_head
    fused = not need_weights and mask is None and width % 8 == 0
    projected = torch.nn.functional.linear(query, qkv_weight, qkv_bias if fused else None)
    parts = [one.view(batch, rows, num_head, width).transpose(1, 2) for one in projected.chunk(3, -1)]
    if fused:
        joined = aten.scaled_dot_product_attention.default(*parts).transpose(1, 2)
        joined = joined.reshape(batch, rows, embed_dim)
        return torch.nn.functional.linear(joined, proj_weight, proj_bias), query.new_empty(0)
    heads = torch.stack(parts).view(3, batch * num_head, rows, width)
    scores = torch.bmm(heads[0], heads[1].transpose(1, 2)).view(batch, num_head, rows, rows)
    weights = torch.softmax(scores, -1)
    joined = torch.bmm(weights.view(batch * num_head, rows, rows), heads[2])
    joined = joined.view(batch, num_head, rows, width).transpose(1, 2).reshape(batch, rows, embed_dim)
    shown = weights.sum(1).div_(num_head) if need_weights and average_attn_weights else weights
    return torch.nn.functional.linear(joined, proj_weight, proj_bias), shown


def _left_aligned(x: torch.Tensor, mask: torch.Tensor) -> Any:
    """Whether an encoder may leave padding out, in nested tensors; it computes on it here."""
    return False if x.is_meta else _below(aten._nested_tensor_from_mask_left_aligned.default, x, mask)


def _rnn(kind: str, mode: int) -> Callable[..., Any]:
    """A whole (multi-layer) recurrence as the one cuDNN call it is on CUDA; ``mode`` is cuDNN's number for
    its kind."""
    plain = getattr(aten, kind).input

    def kernel(
        x: torch.Tensor, hx: Any, params: list[torch.Tensor], has_biases: bool, num_layers: int,
        dropout: float, train: bool,
        bidirectional: bool, batch_first: bool,
    ) -> Any:  # fmt: skip
        if not x.is_meta:
            return _below(
                plain, x, hx, params, has_biases, num_layers, dropout, train, bidirectional, batch_first
            )
        return _cudnn_rnn(
            mode, x, hx, params, has_biases, num_layers, dropout, train, bidirectional, batch_first, []
        )

    return kernel


def _packed_rnn(kind: str, mode: int) -> Callable[..., Any]:
    """The same for a packed sequence: all steps in one dimension, their batch sizes beside them."""
    plain = getattr(aten, kind).data

    def kernel(
        x: torch.Tensor, batch_sizes: torch.Tensor, hx: Any, params: list[torch.Tensor], has_biases: bool,
        num_layers: int, dropout: float,
        train: bool, bidirectional: bool,
    ) -> Any:  # fmt: skip
        if not x.is_meta:
            return _below(
                plain, x, batch_sizes, hx, params, has_biases, num_layers, dropout, train, bidirectional
            )
        if batch_sizes.is_meta:
            raise CaptureError(
                f"{kind}: the lengths of its packed sequence are not known; make them on the CPU"
            )
        sizes = batch_sizes.tolist()
        return _cudnn_rnn(
            mode, x, hx, params, has_biases, num_layers, dropout, train, bidirectional, False, sizes
        )

    return kernel


def _cudnn_rnn(
    mode: int, x: torch.Tensor, hx: Any, params: list[torch.Tensor], has_biases: bool, num_layers: int,
    dropout: float, train: bool,
    bidirectional: bool, batch_first: bool, batch_sizes: list[int],
) -> tuple[torch.Tensor, ...]:  # fmt: skip
    hidden, cell = (hx[0], hx[1]) if mode == 2 else (hx, None)
    size = hidden.shape[-1] if cell is None else cell.shape[-1]
    projection = 0 if hidden.shape[-1] == size else hidden.shape[-1]
    per_layer = (4 if has_biases else 2) + (1 if projection else 0)
    output, hy, cy, _, _ = aten._cudnn_rnn.default(
        x,
        params,
        per_layer,
        None,
        hidden,
        cell,
        mode,
        size,
        projection,
        num_layers,
        batch_first,
        dropout,
        train,
        bidirectional,
        batch_sizes,
        None,
    )
    return (output, hy, cy) if mode == 2 else (output, hy)


CUDA_KERNELS: dict[str, Callable[..., Any]] = {
    "dropout": _dropout,
    "softmax.int": _softmax(aten.softmax.int, aten._softmax.default),
    "log_softmax.int": _softmax(aten.log_softmax.int, aten._log_softmax.default),
    "scaled_dot_product_attention": _attention,
    "_native_multi_head_attention": _served_attention,
    "_nested_tensor_from_mask_left_aligned": _left_aligned,
    **({"rms_norm": _rms_norm} if hasattr(aten, "rms_norm") else {}),
    **{
        f"{kind}.input": _rnn(kind, mode) for mode, kind in enumerate(("rnn_relu", "rnn_tanh", "lstm", "gru"))
    },
    **{
        f"{kind}.data": _packed_rnn(kind, mode)
        for mode, kind in enumerate(("rnn_relu", "rnn_tanh", "lstm", "gru"))
    },
}
