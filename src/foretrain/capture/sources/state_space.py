"""Lets state-space layers of transformers run the kernels that users have installed for them, those of
``mamba_ssm``.

The library falls back to plain torch where they are missing, which is many times slower and holds scores of
every chunk. Here each kernel is an operator of the namespace ``mamba`` with its operands and results
(mamba_ssm 2.2, ``ssd_combined.py``: five forward, fourteen backward), which cannot be run. Mamba-2 is a
chunked scan (Dao and Gu 2024); its fused form keeps what the first projection gave and the scan's result, and
runs the convolution again in the backward pass. Mamba (Gu and Dao 2023) is one kernel along the sequence.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from foretrain.capture.sources.standing_in import (
    convolved,
    defined,
    has_function,
    run_convolution,
    run_convolution_backward,
    while_running,
)

NAMESPACE = "mamba"
NOTE = "state-space layers run the kernels of mamba_ssm and causal_conv1d, as where those are installed"
_STEPS_PER_STATE = 2048
"""Positions after which Mamba's scan writes its state down for the backward pass."""


def with_state_space_kernels(module: nn.Module) -> list[str]:
    """Let every state-space layer of a module call stand-ins for the kernels; what a forecast should say."""
    if getattr(getattr(module, "config", None), "use_mamba_kernels", True) is False:
        return []
    mixers = [child for child in module.modules() if is_state_space(child) and _calls_kernels(child)]
    for mixer in mixers:
        while_running(
            mixer,
            {
                "causal_conv1d_fn": convolved,
                "mamba_selective_scan": _scanned,
                "mamba2_chunk_scan": _chunk_scanned,
                "mamba2_split_conv1d_scan_combined": functools.partial(_all_in_one, mixer),
            },
        )
    return [NOTE] if mixers else []


def is_state_space(module: nn.Module) -> bool:
    """Whether it is a layer of Mamba or Mamba-2: decay rates, a convolution, and projections around them."""
    parts = ("conv1d", "in_proj", "out_proj")
    return "A_log" in module._parameters and all(name in module._modules for name in parts)


def is_chunked(mixer: nn.Module) -> bool:
    """Whether its state is one of Mamba-2, by heads."""
    return "dt_bias" in mixer._parameters


def _calls_kernels(mixer: nn.Module) -> bool:
    return has_function(mixer, "mamba2_chunk_scan" if is_chunked(mixer) else "mamba_selective_scan")


# As the library calls them


def _scanned(
    x: torch.Tensor, dt: torch.Tensor, a: torch.Tensor, b: torch.Tensor, c: torch.Tensor, **given: Any
) -> Any:
    others = (given.get(name) for name in ("D", "z", "delta_bias"))
    out = _Scan.apply(x, dt, a, b, c, *others)  # type: ignore[no-untyped-call]
    batch, width = x.shape[:2]
    return (out, a.new_empty(batch, width, a.shape[-1])) if given.get("return_last_state") else out


def _chunk_scanned(
    x: torch.Tensor, dt: torch.Tensor, a: torch.Tensor, b: torch.Tensor, c: torch.Tensor, **given: Any
) -> Any:
    others = (given.get(name) for name in ("D", "dt_bias", "chunk_size"))
    out, last = _ChunkScan.apply(x, dt, a, b, c, *others)  # type: ignore[no-untyped-call]
    out = out if given.get("z") is None else out * nn.functional.silu(given["z"])
    return (out, last) if given.get("return_final_states") else out


def _all_in_one(
    mixer: Any,
    zxbcdt: torch.Tensor,
    weight: torch.Tensor,
    conv_bias: torch.Tensor | None,
    dt_bias: torch.Tensor,
    a: torch.Tensor,
    **given: Any,
) -> torch.Tensor:
    """With the layer's own last projection, so that whatever is done around it is done."""
    sizes = (a.shape[0], given["headdim"], given["ngroups"], given["chunk_size"])
    others = (given["D"], given["rmsnorm_weight"], sizes)
    out = _SplitScan.apply(zxbcdt, weight, conv_bias, dt_bias, a, *others)  # type: ignore[no-untyped-call]
    return mixer.out_proj(out)  # type: ignore[no-any-return]


# Kernels, with their gradients


def _call(name: str, *args: Any) -> Any:
    _library()
    with torch._C._AutoDispatchBelowAutograd():
        return getattr(torch.ops.mamba, name)(*args)


class _Scan(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        u: torch.Tensor,
        dt: torch.Tensor,
        a: torch.Tensor,
        b: torch.Tensor,
        c: torch.Tensor,
        d: torch.Tensor | None,
        z: torch.Tensor | None,
        bias: torch.Tensor | None,
    ) -> torch.Tensor:
        out, states = _call("selective_scan", a, u, dt, b, c, z)
        ctx.save_for_backward(u, dt, a, b, c, d, z, bias, states, None if z is None else out)
        return out  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        u, dt, a, b, c, d, z, bias, states, _ = ctx.saved_tensors
        wide = _call("selective_scan_backward", a, u, dt, b, c, z, gradients[0], states)
        du, ddt, db, dc = wide[:4]
        small = [None if one is None else _like(one) for one in (d, bias)]
        return du, ddt, _like(a), db, dc, small[0], wide[4] if z is not None else None, small[1]


class _ChunkScan(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        dt: torch.Tensor,
        a: torch.Tensor,
        b: torch.Tensor,
        c: torch.Tensor,
        d: torch.Tensor | None,
        bias: torch.Tensor | None,
        chunk: int,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        ctx.save_for_backward(x, dt, a, b, c, d, bias)
        ctx.chunk = chunk
        return _chunk_scan(x, dt, a, b, c, d, bias, chunk)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        x, dt, a, b, c, d, bias = ctx.saved_tensors
        dx, ddt, db, dc = _chunk_scan_backward(gradients[0], x, dt, a, b, c, bias, ctx.chunk)
        small = [None if one is None else _like(one) for one in (d, bias)]
        return dx, ddt, _like(a), db, dc, *small, None


class _SplitScan(torch.autograd.Function):
    """Convolution, chunked scan and gated norm of what one projection gave."""

    @staticmethod
    def forward(
        ctx: Any,
        zxbcdt: torch.Tensor,
        weight: torch.Tensor,
        conv_bias: torch.Tensor | None,
        bias: torch.Tensor,
        a: torch.Tensor,
        d: torch.Tensor,
        norm: torch.Tensor | None,
        sizes: tuple[int, int, int, int],
    ) -> torch.Tensor:
        z, joined, dt = _split(zxbcdt, sizes, weight.shape[0])
        x, b, c = _heads(run_convolution(joined.transpose(1, 2), weight, conv_bias), sizes)
        scanned, _ = _chunk_scan(x, dt, a, b, c, d, bias, sizes[-1])
        out, scale = _call("gated_norm", scanned.flatten(2), z, norm)
        ctx.save_for_backward(zxbcdt, weight, conv_bias, bias, a, d, norm, scanned, scale)
        ctx.sizes = sizes
        return out  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        zxbcdt, weight, conv_bias, bias, a, d, norm, scanned, scale = ctx.saved_tensors
        z, joined, dt = _split(zxbcdt, ctx.sizes, weight.shape[0])
        x, b, c = _heads(run_convolution(joined.transpose(1, 2), weight, conv_bias), ctx.sizes)
        to_scan, _ = _call("gated_norm_backward", gradients[0], scanned.flatten(2), z, norm, scale)
        to_x, _, _, _ = _chunk_scan_backward(
            to_scan.unflatten(2, x.shape[2:]), x, dt, a, b, c, bias, ctx.sizes[-1]
        )
        del to_x
        run_convolution_backward(joined.transpose(1, 2), joined.transpose(1, 2), weight, conv_bias)
        small = [None if one is None else _like(one) for one in (weight, conv_bias, bias, a, d, norm)]
        return _like(zxbcdt), *small, None


def _split(zxbcdt: torch.Tensor, sizes: tuple[int, int, int, int], channels: int) -> tuple[torch.Tensor, ...]:
    heads, width = sizes[:2]
    return zxbcdt.split([heads * width, channels, heads], dim=-1)  # type: ignore[no-any-return]


def _heads(convolved: torch.Tensor, sizes: tuple[int, int, int, int]) -> tuple[torch.Tensor, ...]:
    """What the heads read, and what goes into and out of the state, by groups of heads."""
    heads, width, groups, _ = sizes
    state = (convolved.shape[1] - heads * width) // 2
    x, b, c = convolved.transpose(1, 2).split([heads * width, state, state], dim=-1)
    return x.unflatten(-1, (heads, width)), b.unflatten(-1, (groups, -1)), c.unflatten(-1, (groups, -1))


def _chunk_scan(
    x: torch.Tensor,
    dt: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    c: torch.Tensor,
    d: torch.Tensor | None,
    bias: torch.Tensor | None,
    chunk: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    decay, steps = _call("chunk_cumsum", dt, a, bias, chunk)
    states = _call("chunk_state", x, b, steps, decay)
    states, last = _call("state_passing", states, decay, x)
    scores = _call("bmm_chunk", c, b, chunk)
    return _call("chunk_scan", x, scores, steps, decay, c, states, d), last


def _chunk_scan_backward(
    gradient: torch.Tensor,
    x: torch.Tensor,
    dt: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    c: torch.Tensor,
    bias: torch.Tensor | None,
    chunk: int,
) -> tuple[torch.Tensor, ...]:
    """States and scores are computed again."""
    decay, steps = _call("chunk_cumsum", dt, a, bias, chunk)
    scores = _call("bmm_chunk", c, b, chunk)
    states, _ = _call("state_passing", _call("chunk_state", x, b, steps, decay), decay, x)
    to_states = _call("chunk_state", gradient, c, steps, decay)
    to_states, _ = _call("state_passing", to_states, decay, x)
    dx = _call("chunk_scan", x, scores, steps, decay, b, to_states, gradient)
    db = _call("chunk_state_backward", x, to_states, steps, decay, b)
    dc = _call("chunk_state_backward", gradient, states, steps, decay, c)
    to_scores = _call("chunk_scores_backward", x, gradient, steps, decay, scores)
    db, dc = _call("bmm_chunk_backward", c, to_scores, db), _call("bmm_chunk_backward", b, to_scores, dc)
    _call("chunk_decay_backward", x, gradient, steps, decay, scores)
    _call("chunk_cumsum", dt, a, bias, chunk)
    return dx, _like(dt), db, dc


def _like(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(tensor)


# What they give


def _chunks(length: int, chunk: int) -> int:
    return -(-length // chunk)


def _chunk_cumsum(dt: torch.Tensor, _a: Any, _bias: Any, chunk: int) -> tuple[torch.Tensor, torch.Tensor]:
    batch, length, heads = dt.shape
    shape = (batch, heads, _chunks(length, chunk), chunk)
    return dt.new_empty(shape, dtype=torch.float32), dt.new_empty(shape, dtype=torch.float32)


def _chunk_state(x: torch.Tensor, b: torch.Tensor, _steps: Any, decay: torch.Tensor) -> torch.Tensor:
    batch, _, heads, width = x.shape
    return x.new_empty((batch, decay.shape[2], heads, width, b.shape[-1]), dtype=torch.float32)


def _state_passing(states: torch.Tensor, _decay: Any, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return states.new_empty(states.shape, dtype=x.dtype), states.new_empty(states[:, 0].shape)


def _bmm_chunk(c: torch.Tensor, _b: Any, chunk: int) -> torch.Tensor:
    batch, length, groups, _ = c.shape
    return c.new_empty((batch, _chunks(length, chunk), groups, chunk, chunk), dtype=torch.float32)


def _scores_backward(
    x: torch.Tensor, _gradient: Any, _steps: Any, _decay: Any, scores: torch.Tensor
) -> torch.Tensor:
    return scores.new_empty(scores.shape)


def _selective_scan(
    a: torch.Tensor, u: torch.Tensor, _dt: Any, _b: Any, _c: Any, _z: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    batch, width, length = u.shape
    states = (batch, width, _chunks(length, _STEPS_PER_STATE), 2 * a.shape[-1])
    return u.new_empty(u.shape), u.new_empty(states, dtype=torch.float32)


def _selective_scan_backward(
    _a: Any,
    u: torch.Tensor,
    dt: torch.Tensor,
    b: torch.Tensor,
    c: torch.Tensor,
    z: torch.Tensor | None,
    _gradient: Any,
    _states: Any,
) -> tuple[torch.Tensor, ...]:
    wide = (u, dt, b, c, u if z is None else z)
    return tuple(one.new_empty(one.shape) for one in wide)


def _gated_norm(x: torch.Tensor, _z: Any, _weight: Any) -> tuple[torch.Tensor, torch.Tensor]:
    return x.new_empty(x.shape), x.new_empty(x.shape[:2], dtype=torch.float32)


_KERNELS: dict[str, tuple[str, Callable[..., Any]]] = {
    "selective_scan(Tensor a, Tensor u, Tensor dt, Tensor b, Tensor c, Tensor? z)": (
        "(Tensor, Tensor)",
        _selective_scan,
    ),
    "selective_scan_backward(Tensor a, Tensor u, Tensor dt, Tensor b, Tensor c, Tensor? z, Tensor gradient,"
    " Tensor states)": ("(Tensor, Tensor, Tensor, Tensor, Tensor)", _selective_scan_backward),
    "chunk_cumsum(Tensor dt, Tensor a, Tensor? bias, int chunk)": ("(Tensor, Tensor)", _chunk_cumsum),
    "chunk_state(Tensor x, Tensor b, Tensor steps, Tensor decay)": ("Tensor", _chunk_state),
    "state_passing(Tensor states, Tensor decay, Tensor x)": ("(Tensor, Tensor)", _state_passing),
    "bmm_chunk(Tensor c, Tensor b, int chunk)": ("Tensor", _bmm_chunk),
    "chunk_scan(Tensor x, Tensor scores, Tensor steps, Tensor decay, Tensor c, Tensor states, Tensor? d)": (
        "Tensor",
        lambda x, *_: x.new_empty(x.shape),
    ),
    "chunk_state_backward(Tensor x, Tensor states, Tensor steps, Tensor decay, Tensor b)": (
        "Tensor",
        lambda _x, _states, _steps, _decay, b: b.new_empty(b.shape),
    ),
    "chunk_scores_backward(Tensor x, Tensor gradient, Tensor steps, Tensor decay, Tensor scores)": (
        "Tensor",
        _scores_backward,
    ),
    "chunk_decay_backward(Tensor x, Tensor gradient, Tensor steps, Tensor decay, Tensor scores)": (
        "Tensor",
        lambda _x, _gradient, _steps, decay, _scores: decay.new_empty(decay.shape),
    ),
    "bmm_chunk_backward(Tensor b, Tensor gradient, Tensor added)": (
        "Tensor",
        lambda b, _gradient, _added: b.new_empty(b.shape),
    ),
    "gated_norm(Tensor x, Tensor z, Tensor? weight)": ("(Tensor, Tensor)", _gated_norm),
    "gated_norm_backward(Tensor gradient, Tensor x, Tensor z, Tensor? weight, Tensor scale)": (
        "(Tensor, Tensor)",
        lambda gradient, x, z, _w, _s: (x.new_empty(x.shape), z.new_empty(z.shape)),
    ),
}


@functools.cache
def _library() -> torch.library.Library:
    return defined(NAMESPACE, _KERNELS)
