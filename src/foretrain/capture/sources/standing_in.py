"""Calls stand-ins for kernels that users have installed and this machine has not: operators that the tracer
records, with operands and results, and that cannot be run."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn


def has_function(layer: nn.Module, name: str) -> bool:
    """Whether the library calls kernels of a layer by a function of its own (transformers since 5.20)."""
    return hasattr(sys.modules[type(layer).__module__], name)


def while_running(layer: Any, stand_ins: Mapping[str, Callable[..., Any]]) -> None:
    """While a layer runs, these functions of its library are the stand-ins."""
    forward, library = layer.forward, vars(sys.modules[type(layer).__module__])
    replaced = {name: one for name, one in stand_ins.items() if name in library}

    @functools.wraps(forward)
    def changed(*args: Any, **kwargs: Any) -> Any:
        before = {name: library[name] for name in replaced}
        library.update(replaced)
        try:
            return forward(*args, **kwargs)
        finally:
            library.update(before)

    layer.forward = changed


def defined(namespace: str, kernels: Mapping[str, tuple[str, Callable[..., Any]]]) -> torch.library.Library:
    """Operators by their schemas, with what they return and how its shapes follow."""
    library = torch.library.Library(namespace, "FRAGMENT")
    for schema, (results, kernel) in kernels.items():
        library.define(f"{schema} -> {results}")
        library.impl(schema.partition("(")[0], kernel, "Meta")
    return library


# The convolution of each channel with the positions before (``causal_conv1d``)


def convolved(
    hidden_states: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None, *_: Any, **__: Any
) -> torch.Tensor:
    """Causal, along the sequence, each channel by itself, with its activation."""
    return _Convolution.apply(hidden_states, weight, bias)  # type: ignore[no-any-return, no-untyped-call]


class _Convolution(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        ctx.save_for_backward(x, weight, bias)
        return run_convolution(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        x, weight, bias = ctx.saved_tensors
        dx, dweight = run_convolution_backward(gradients[0], x, weight, bias)
        return dx, dweight, None if bias is None else torch.empty_like(bias)


def run_convolution(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """The kernel alone."""
    _convolutions()
    with torch._C._AutoDispatchBelowAutograd():
        return torch.ops.mamba.causal_conv1d(x, weight, bias)  # type: ignore[no-any-return]


def run_convolution_backward(
    gradient: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """The gradients of what it reads and of its weight."""
    _convolutions()
    with torch._C._AutoDispatchBelowAutograd():
        return torch.ops.mamba.causal_conv1d_backward(gradient, x, weight, bias)  # type: ignore[no-any-return]


@functools.cache
def _convolutions() -> torch.library.Library:
    return defined(
        "mamba",
        {
            "causal_conv1d(Tensor x, Tensor weight, Tensor? bias)": (
                "Tensor",
                lambda x, _weight, _bias: x.new_empty(x.shape),
            ),
            "causal_conv1d_backward(Tensor gradient, Tensor x, Tensor weight, Tensor? bias)": (
                "(Tensor, Tensor)",
                lambda _gradient, x, weight, _bias: (x.new_empty(x.shape), weight.new_empty(weight.shape)),
            ),
        },
    )
