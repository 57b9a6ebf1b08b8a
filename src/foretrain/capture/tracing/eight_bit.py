"""Runs AdamW with states of 8 bits (Dettmers et al. 2022), tensor by tensor as bitsandbytes does."""

from __future__ import annotations

import functools
import math
from typing import Any

import torch

from foretrain.errors import CaptureError

LEAST = 4096
"""Elements from which on a tensor has states of 8 bits; smaller ones keep them in fp32."""
_BLOCK = 256
"""Elements that share a scale."""

_SCHEMAS = {
    "adamw_8bit": "(Tensor(a!) weight, Tensor gradient, Tensor(b!) first, Tensor(c!) second, "
    "Tensor(d!) scale_1, Tensor(e!) scale_2, Tensor code_1, Tensor code_2) -> ()",
    "adamw_32bit": "(Tensor(a!) weight, Tensor gradient, Tensor(b!) first, Tensor(c!) second) -> ()",
}


def _on_meta(*_tensors: torch.Tensor) -> None:
    return None


def _8bit_on_cuda(
    weight: Any, gradient: Any, first: Any, second: Any, scale_1: Any, scale_2: Any, code_1: Any, code_2: Any
) -> None:
    bitsandbytes_kernels().optimizer_update_8bit_blockwise.default(
        "adam", gradient, weight, first, second, 0.9, 0.999, 0.0, 0.0, 1e-8, 1, 1e-3, code_1, code_2, scale_1,
        scale_2, 0.01, 1.0, False,
    )  # fmt: skip


def _32bit_on_cuda(weight: Any, gradient: Any, first: Any, second: Any) -> None:
    bitsandbytes_kernels().optimizer_update_32bit.default(
        "adam", gradient, weight, first, second, None, 0.0, 0.0, 0.9, 0.999, 0.0, 0.0, 1e-8, 0.01, 1, 1e-3,
        1.0, False,
    )  # fmt: skip


def bitsandbytes() -> Any:
    """The library, where it is needed and installed."""
    try:
        import bitsandbytes as found  # type: ignore[import-not-found]
    except ImportError as error:
        what = "4- and 8-bit weights and states need bitsandbytes"
        raise CaptureError(f"training: {what}, which is not installed") from error
    return found


@functools.cache
def bitsandbytes_kernels() -> Any:
    """Its operators on a GPU."""
    bitsandbytes()
    return torch.ops.bitsandbytes


@functools.cache
def updates() -> dict[str, Any]:
    """The operators by name, which the tracer records."""
    library = torch.library.Library("foretrain", "FRAGMENT")
    for name, schema in _SCHEMAS.items():
        library.define(name + schema)
        library.impl(name, _on_meta, "Meta")
        library.impl(name, _8bit_on_cuda if name == "adamw_8bit" else _32bit_on_cuda, "CUDA")
    return {"": library, **{name: getattr(torch.ops.foretrain, name).default for name in _SCHEMAS}}


class EightBitAdamW(torch.optim.Optimizer):
    """The step on meta: a kernel for each tensor, and the host waits after each."""

    def __init__(self, parameters: list[torch.nn.Parameter]) -> None:
        super().__init__(parameters, {})
        self._code = [torch.empty(_BLOCK, device=parameters[0].device) for _ in range(2)]
        self._done = torch.empty((), device=parameters[0].device)

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for parameter in (one for group in self.param_groups for one in group["params"]):
            if parameter.grad is not None:
                self._update(parameter)

    def _update(self, parameter: torch.nn.Parameter) -> None:
        low, state = parameter.numel() >= LEAST, self.state[parameter]
        if not state:
            dtype = torch.uint8 if low else torch.float32
            state |= {name: torch.zeros_like(parameter, dtype=dtype) for name in ("first", "second")}
            blocks, device = math.ceil(parameter.numel() / _BLOCK), parameter.device
            if low:
                state |= {name: torch.zeros(blocks, device=device) for name in ("scale_1", "scale_2")}
        code = self._code if low else ()
        updates()["adamw_8bit" if low else "adamw_32bit"](parameter, parameter.grad, *state.values(), *code)
        self._done.item()  # waits for the device
