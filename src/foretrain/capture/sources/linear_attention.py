"""Lets layers of linear attention run the kernels that users have installed for them: the chunked gated delta
rule of ``fla`` (Yang et al. 2024), as in Qwen3-Next and Qwen3.5.

The library falls back to plain torch where they are missing, with a loop over the positions of a chunk. Each
kernel is an operator of the namespace ``fla`` with its operands and results (fla 0.3,
``gated_delta_rule/chunk.py``), which cannot be run. Kept for the backward pass are queries, keys, values, the
gates and the inverse of each chunk; states and what follows from them are computed again.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from foretrain.capture.sources.standing_in import convolved, defined, has_function, while_running
from foretrain.graph.flops import DELTA_CHUNK

NOTE = "linear attention runs the kernels of fla and causal_conv1d, as where those are installed"
_FUNCTION = "torch_chunk_gated_delta_rule"


def with_delta_rule_kernels(module: nn.Module) -> list[str]:
    """Let every such layer of a module call stand-ins for the kernels; what a forecast should say of it."""
    mixers = [child for child in module.modules() if is_delta_rule(child) and has_function(child, _FUNCTION)]
    for mixer in mixers:
        while_running(mixer, {"causal_conv1d_fn": convolved, _FUNCTION: _delta_rule})
    return [NOTE] if mixers else []


def is_delta_rule(module: nn.Module) -> bool:
    """Whether it is a layer of the gated delta rule: decay rates, a convolution, and heads of keys and
    values."""
    has_parts = "A_log" in module._parameters and {"conv1d", "out_proj"} <= module._modules.keys()
    return has_parts and hasattr(module, "head_k_dim") and hasattr(module, "num_v_heads")


def _delta_rule(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    *,
    output_final_state: bool = False,
    **_: Any,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    out = _DeltaRule.apply(query, key, value, g, beta)  # type: ignore[no-untyped-call]
    state = (value.shape[0], value.shape[2], key.shape[-1], value.shape[-1])
    last = value.new_empty(state) if output_final_state else None
    return out, last


def _call(name: str, *args: Any) -> Any:
    _library()
    with torch._C._AutoDispatchBelowAutograd():
        return getattr(torch.ops.fla, name)(*args)


class _DeltaRule(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        g: torch.Tensor,
        beta: torch.Tensor,
    ) -> torch.Tensor:
        q, k = _call("l2norm", q), _call("l2norm", k)
        inverse = _call("solve", _call("keys_by_keys", k, beta, g), k)
        ctx.save_for_backward(q, k, v, g, beta, inverse)
        w, u = _call("representation", k, v, inverse)
        states, new = _call("chunk_states", k, w, u)
        return _call("chunk_outputs", q, k, new, states)  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        q, k, v, g, beta, inverse = ctx.saved_tensors
        (gradient,) = gradients
        w, u = _call("representation", k, v, inverse)
        states, new = _call("chunk_states", k, w, u)
        dv = _call("chunk_values_backward", q, k, gradient)
        to_states, dv = _call("chunk_states_backward", q, k, w, gradient, dv)
        dq, dk, dw = _call("chunk_outputs_backward", q, k, new, states, gradient, to_states)
        dk, dv = _call("representation_backward", k, v, inverse, dw, dv, dk)
        dq, dk = _call("l2norm_backward", dq, q), _call("l2norm_backward", dk, k)
        return dq, dk, dv, torch.empty_like(g), torch.empty_like(beta)


def _like(*tensors: torch.Tensor) -> Any:
    made = tuple(one.new_empty(one.shape) for one in tensors)
    return made if len(made) > 1 else made[0]


def _keys_by_keys(k: torch.Tensor, _beta: Any, g: torch.Tensor) -> torch.Tensor:
    return k.new_empty((*g.shape, DELTA_CHUNK), dtype=torch.float32)


def _states(k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    batch, length, heads, width = v.shape
    return k.new_empty((batch, -(-length // DELTA_CHUNK), heads, k.shape[-1], width))


_KERNELS: dict[str, tuple[str, Callable[..., Any]]] = {
    "l2norm(Tensor x)": ("Tensor", _like),
    "l2norm_backward(Tensor gradient, Tensor x)": ("Tensor", lambda gradient, _x: _like(gradient)),
    "keys_by_keys(Tensor k, Tensor beta, Tensor g)": ("Tensor", _keys_by_keys),
    "solve(Tensor a, Tensor k)": ("Tensor", lambda a, k: a.new_empty(a.shape, dtype=k.dtype)),
    "representation(Tensor k, Tensor v, Tensor inverse)": (
        "(Tensor, Tensor)",
        lambda k, v, _inverse: _like(k, v),
    ),
    "chunk_states(Tensor k, Tensor w, Tensor u)": (
        "(Tensor, Tensor)",
        lambda k, _w, u: (_states(k, u), _like(u)),
    ),
    "chunk_outputs(Tensor q, Tensor k, Tensor v, Tensor states)": ("Tensor", lambda _q, _k, v, _s: _like(v)),
    "chunk_values_backward(Tensor q, Tensor k, Tensor gradient)": (
        "Tensor",
        lambda _q, _k, gradient: _like(gradient),
    ),
    "chunk_states_backward(Tensor q, Tensor k, Tensor w, Tensor gradient, Tensor dv)": (
        "(Tensor, Tensor)",
        lambda _q, k, _w, gradient, dv: (_states(k, gradient), _like(dv)),
    ),
    "chunk_outputs_backward(Tensor q, Tensor k, Tensor v, Tensor states, Tensor gradient, Tensor dstates)": (
        "(Tensor, Tensor, Tensor)",
        lambda q, k, *_: _like(q, k, k),
    ),
    "representation_backward(Tensor k, Tensor v, Tensor inverse, Tensor dw, Tensor du, Tensor dk)": (
        "(Tensor, Tensor)",
        lambda k, v, *_: _like(k, v),
    ),
}


@functools.cache
def _library() -> torch.library.Library:
    return defined("fla", _KERNELS)
