"""Implements the ONNX operators that are layers: products, activations, norms, attention, recurrences."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from foretrain.capture.sources.onnx.ops import Number, register

# --- products
# ---------------------------------------------------------------------------------------------------------


@register("MatMul")
def matmul(x: Tensor, y: Tensor) -> Tensor:
    return torch.matmul(x, y)


@register("Gemm")
def gemm(
    x: Tensor,
    y: Tensor,
    bias: Tensor | None = None,
    *,
    alpha: float = 1.0,
    beta: float = 1.0,
    transA: int = 0,  # noqa: N803
    transB: int = 0,  # noqa: N803
) -> Tensor:
    x, weight = (x.t() if transA else x), (y if transB else y.t())
    if alpha == 1.0 and (
        bias is None or (beta == 1.0 and bias.ndim == 1 and bias.shape[0] == weight.shape[0])
    ):
        return F.linear(x, weight, bias)
    if bias is None:
        return alpha * torch.mm(x, weight.t())
    return torch.addmm(bias, x, weight.t(), beta=beta, alpha=alpha)


def linear(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """A MatMul with a matrix and the Add of a vector after it: one addmm."""
    return F.linear(x, weight.t(), bias)


# --- activations
# ------------------------------------------------------------------------------------------------------


@register("Gelu")
def gelu(x: Tensor, *, approximate: str = "none") -> Tensor:
    return F.gelu(x, approximate=approximate)


@register("Swish")
def swish(x: Tensor, *, alpha: float = 1.0) -> Tensor:
    return F.silu(x) if alpha == 1.0 else x * torch.sigmoid(alpha * x)


@register("HardSigmoid")
def hard_sigmoid(x: Tensor, *, alpha: float = 0.2, beta: float = 0.5) -> Tensor:
    if math.isclose(alpha, 1 / 6, rel_tol=1e-4) and beta == 0.5:
        return F.hardsigmoid(x)
    return torch.clamp(alpha * x + beta, 0.0, 1.0)


@register("LeakyRelu")
def leaky_relu(x: Tensor, *, alpha: float = 0.01) -> Tensor:
    return F.leaky_relu(x, alpha)


@register("PRelu")
def p_relu(x: Tensor, slope: Tensor) -> Tensor:
    per_channel = slope.ndim == x.ndim - 1 and slope.shape[0] == slope.numel() == x.shape[1]
    if slope.numel() == 1 or per_channel:
        return F.prelu(x, slope.reshape(-1))
    return torch.where(x < 0, slope * x, x)


@register("Elu")
def elu(x: Tensor, *, alpha: float = 1.0) -> Tensor:
    return F.elu(x, alpha)


@register("Celu")
def celu(x: Tensor, *, alpha: float = 1.0) -> Tensor:
    return F.celu(x, alpha)


@register("Selu")
def selu(x: Tensor, *, alpha: float = 1.67326, gamma: float = 1.0507) -> Tensor:
    if math.isclose(alpha, 1.67326, rel_tol=1e-4) and math.isclose(gamma, 1.0507, rel_tol=1e-4):
        return F.selu(x)
    return gamma * F.elu(x, alpha)


@register("Softmax", since=13)
def softmax(x: Tensor, *, axis: int = -1) -> Tensor:
    return F.softmax(x, axis)


@register("LogSoftmax", since=13)
def log_softmax(x: Tensor, *, axis: int = -1) -> Tensor:
    return F.log_softmax(x, axis)


@register("Softmax")
def softmax_flat(x: Tensor, *, axis: int = 1) -> Tensor:
    """Before opset 13 everything from ``axis`` on is one dimension."""
    return F.softmax(x.flatten(axis), -1).reshape(x.shape)


@register("LogSoftmax")
def log_softmax_flat(x: Tensor, *, axis: int = 1) -> Tensor:
    return F.log_softmax(x.flatten(axis), -1).reshape(x.shape)


@register("Dropout", reads=(1, 2), context=("training",))
def dropout(
    x: Tensor,
    rate: Number | None = None,
    mode: bool | None = None,
    *,
    training: bool,
    ratio: float = 0.5,
    is_test: int = 0,
    seed: int = 0,
) -> Tensor:
    return F.dropout(x, float(ratio if rate is None else rate), training)


# --- normalisation
# ----------------------------------------------------------------------------------------------------


@register("BatchNormalization", context=("training",))
def batch_norm(
    x: Tensor,
    scale: Tensor,
    bias: Tensor,
    mean: Tensor,
    variance: Tensor,
    *,
    training: bool,
    epsilon: float = 1e-5,
    momentum: float = 0.9,
    is_test: int = 0,
    spatial: int = 1,
    training_mode: int = 0,
) -> Tensor:
    statistics = mean.detach(), variance.detach()  # which a file may share with a bias of zeros
    return F.batch_norm(x, *statistics, scale, bias, training, 1.0 - momentum, epsilon)


def _affine(parameter: Tensor | None, shape: torch.Size) -> Tensor | None:
    return parameter if parameter is None or parameter.shape == shape else parameter.expand(shape)


@register("LayerNormalization")
def layer_norm(
    x: Tensor,
    scale: Tensor,
    bias: Tensor | None = None,
    *,
    axis: int = -1,
    epsilon: float = 1e-5,
    stash_type: int = 1,
) -> Tensor:
    shape = x.shape[axis:]
    return F.layer_norm(x, shape, _affine(scale, shape), _affine(bias, shape), epsilon)


@register("RMSNormalization", "SimplifiedLayerNormalization")
def rms_norm(
    x: Tensor, scale: Tensor, *, axis: int = -1, epsilon: float = 1e-5, stash_type: int = 1
) -> Tensor:
    shape = x.shape[axis:]
    return F.rms_norm(x, shape, _affine(scale, shape), epsilon)


@register("GroupNormalization", since=21)
def group_norm(
    x: Tensor, scale: Tensor, bias: Tensor, *, num_groups: int, epsilon: float = 1e-5, stash_type: int = 1
) -> Tensor:
    return F.group_norm(x, num_groups, scale, bias, epsilon)


@register("GroupNormalization")
def group_norm_by_group(
    x: Tensor, scale: Tensor, bias: Tensor, *, num_groups: int, epsilon: float = 1e-5
) -> Tensor:
    """Before opset 21 there is one scale and one bias per group."""
    each = x.shape[1] // num_groups
    return F.group_norm(x, num_groups, scale.repeat_interleave(each), bias.repeat_interleave(each), epsilon)


@register("InstanceNormalization")
def instance_norm(x: Tensor, scale: Tensor, bias: Tensor, *, epsilon: float = 1e-5) -> Tensor:
    return F.instance_norm(x, weight=scale, bias=bias, eps=epsilon)


@register("LRN")
def local_response_norm(
    x: Tensor, *, size: int, alpha: float = 1e-4, beta: float = 0.75, bias: float = 1.0
) -> Tensor:
    return F.local_response_norm(x, size, alpha, beta, bias)


@register("LpNormalization")
def lp_norm(x: Tensor, *, axis: int = -1, p: int = 2) -> Tensor:
    return F.normalize(x, float(p), axis)


# --- attention
# --------------------------------------------------------------------------------------------------------


def _heads(x: Tensor, count: int | None) -> Tensor:
    return x if x.ndim == 4 or count is None else x.reshape(*x.shape[:2], count, -1).transpose(1, 2)


def _causal_mask(queries: int, keys: int, mask: Tensor) -> Tensor:
    """A given mask that also hides the keys after each query."""
    allowed = torch.ones(queries, keys, dtype=torch.bool, device=mask.device).tril()
    return mask & allowed if mask.dtype == torch.bool else mask.masked_fill(~allowed, -math.inf)


@register("Attention", since=23)
def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None = None,
    past_key: Tensor | None = None,
    past_value: Tensor | None = None,
    *,
    is_causal: int = 0,
    q_num_heads: int | None = None,
    kv_num_heads: int | None = None,
    scale: float | None = None,
    softcap: float = 0.0,
    softmax_precision: int | None = None,
    qk_matmul_output_mode: int = 0,
) -> tuple[Tensor, Tensor, Tensor]:
    if softcap:
        raise NotImplementedError("softcap")
    q, k, v = _heads(query, q_num_heads), _heads(key, kv_num_heads), _heads(value, kv_num_heads)
    if past_key is not None and past_value is not None:
        k, v = torch.cat((past_key, k), 2), torch.cat((past_value, v), 2)
    if is_causal and mask is not None:
        mask = _causal_mask(q.shape[2], k.shape[2], mask)
    causal, grouped = bool(is_causal) and mask is None, q.shape[1] != k.shape[1]
    out = F.scaled_dot_product_attention(q, k, v, mask, is_causal=causal, scale=scale, enable_gqa=grouped)
    return (out if query.ndim == 4 else out.transpose(1, 2).flatten(2)), k, v


# --- recurrences
# ------------------------------------------------------------------------------------------------------


def _reorder(stacked: Tensor, order: Sequence[int]) -> Tensor:
    gates = stacked.chunk(len(order))
    return torch.cat([gates[i] for i in order])


def _flat_weights(w: Tensor, r: Tensor, b: Tensor | None, order: Sequence[int]) -> list[Tensor]:
    """The weights of both directions in torch's order of gates: input, hidden, then their biases."""
    flat: list[Tensor] = []
    for direction in range(w.shape[0]):
        parts = [w[direction], r[direction], *(b[direction].chunk(2) if b is not None else ())]
        flat.extend(_reorder(part, order) if len(order) > 1 else part for part in parts)
    return flat


def _check_recurrence(
    lengths: Tensor | None, direction: str, layout: int, activations: list[str] | None
) -> None:
    refused = {
        "sequence_lens": lengths is not None,
        "direction=reverse": direction == "reverse",
        "layout=1": layout == 1,
        "activations other than the default": not {name.lower() for name in activations or ()}
        <= {"sigmoid", "tanh"},
    }
    if found := [name for name, present in refused.items() if present]:
        raise NotImplementedError(", ".join(found))


def _recurrence(
    kernel: Callable[..., Any],
    x: Tensor,
    states: Sequence[Tensor | None],
    hidden: int,
    flat: list[Tensor],
    directions: int,
) -> tuple[Tensor, ...]:
    initial = [x.new_zeros(directions, x.shape[1], hidden) if state is None else state for state in states]
    biased = len(flat) == 4 * directions
    hx = initial if len(initial) > 1 else initial[0]
    out, *last = kernel(x, hx, flat, biased, 1, 0.0, False, directions == 2, False)
    return out.unflatten(-1, (directions, hidden)).transpose(1, 2), *last


@register("LSTM")
def lstm(
    x: Tensor,
    w: Tensor,
    r: Tensor,
    b: Tensor | None = None,
    lengths: Tensor | None = None,
    initial_h: Tensor | None = None,
    initial_c: Tensor | None = None,
    peepholes: Tensor | None = None,
    *,
    hidden_size: int,
    direction: str = "forward",
    layout: int = 0,
    activations: list[str] | None = None,
) -> tuple[Tensor, ...]:
    _check_recurrence(lengths, direction, layout, activations)
    if peepholes is not None:
        raise NotImplementedError("peepholes")
    flat = _flat_weights(w, r, b, (0, 2, 3, 1))
    return _recurrence(torch.lstm, x, (initial_h, initial_c), hidden_size, flat, w.shape[0])


@register("GRU")
def gru(
    x: Tensor,
    w: Tensor,
    r: Tensor,
    b: Tensor | None = None,
    lengths: Tensor | None = None,
    initial_h: Tensor | None = None,
    *,
    hidden_size: int,
    direction: str = "forward",
    layout: int = 0,
    linear_before_reset: int = 0,
    activations: list[str] | None = None,
) -> tuple[Tensor, ...]:
    _check_recurrence(lengths, direction, layout, activations)
    if not linear_before_reset:
        raise NotImplementedError("linear_before_reset=0")
    return _recurrence(torch.gru, x, (initial_h,), hidden_size, _flat_weights(w, r, b, (1, 0, 2)), w.shape[0])


@register("RNN")
def rnn(
    x: Tensor,
    w: Tensor,
    r: Tensor,
    b: Tensor | None = None,
    lengths: Tensor | None = None,
    initial_h: Tensor | None = None,
    *,
    hidden_size: int,
    direction: str = "forward",
    layout: int = 0,
    activations: list[str] | None = None,
) -> tuple[Tensor, ...]:
    _check_recurrence(lengths, direction, layout, activations)
    return _recurrence(torch.rnn_tanh, x, (initial_h,), hidden_size, _flat_weights(w, r, b, (0,)), w.shape[0])
