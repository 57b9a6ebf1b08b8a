"""Runs linear layers whose weights are kept in 4 bits and brought back for each product, by bitsandbytes."""

from __future__ import annotations

import functools
import math
from typing import Any

import torch
from torch import nn

from foretrain.capture.tracing.eight_bit import bitsandbytes_kernels

NAMESPACE = "foretrain"
BLOCK = 64
"""Weights that share a scale."""
_SCALES = 256
"""Scales that are quantised together, to 8 bits."""
_CODE = 256
"""Values of 8 bits."""
_LEVELS = (
    -1.0, -0.6961928, -0.5250731, -0.3949175, -0.2844414, -0.1847734, -0.0910500, 0.0,
    0.0795803, 0.1609302, 0.2461123, 0.3379152, 0.4407098, 0.5626170, 0.7229568, 1.0,
)  # fmt: skip
"""NormalFloat: quantiles of a normal distribution between -1 and 1 (Dettmers et al. 2023, appendix E)."""

_SCHEMAS = (
    "dequantize_blockwise(Tensor x, Tensor scales, Tensor code, int block) -> Tensor",
    "dequantize_4bit(Tensor x, Tensor scales, int block, int[] shape, ScalarType dtype) -> Tensor",
)


def _blockwise_on_meta(x: torch.Tensor, _scales: Any, _code: Any, _block: int) -> torch.Tensor:
    return torch.empty(x.shape, dtype=torch.float32, device=x.device)


def _4bit_on_meta(
    x: torch.Tensor, _scales: Any, _block: int, shape: list[int], dtype: torch.dtype
) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device=x.device)


def _blockwise_on_cpu(x: torch.Tensor, scales: torch.Tensor, code: torch.Tensor, block: int) -> torch.Tensor:
    return code[x.long()] * scales.repeat_interleave(block)[: x.numel()]


def _4bit_on_cpu(
    x: torch.Tensor, scales: torch.Tensor, block: int, shape: list[int], dtype: torch.dtype
) -> torch.Tensor:
    pairs = torch.stack([x.flatten() >> 4, x.flatten() & 15], dim=1).flatten()[: math.prod(shape)].long()
    levels = torch.tensor(_LEVELS)[pairs] * scales.repeat_interleave(block)[: len(pairs)]
    return levels.reshape(shape).to(dtype)


def _blockwise_on_cuda(x: torch.Tensor, scales: torch.Tensor, code: torch.Tensor, block: int) -> torch.Tensor:
    return bitsandbytes_kernels().dequantize_blockwise.default(x, scales, code, block, torch.float32)  # type: ignore[no-any-return]


def _4bit_on_cuda(
    x: torch.Tensor, scales: torch.Tensor, block: int, shape: list[int], dtype: torch.dtype
) -> torch.Tensor:
    return bitsandbytes_kernels().dequantize_4bit.default(x, scales, block, "nf4", shape, dtype)  # type: ignore[no-any-return]


@functools.cache
def dequantizers() -> tuple[Any, Any]:
    """Brings scales back from 8 bits, and weights from 4: operators that the tracer records under these
    names."""
    library = torch.library.Library(NAMESPACE, "FRAGMENT")
    kernels = {
        "Meta": (_blockwise_on_meta, _4bit_on_meta),
        "CPU": (_blockwise_on_cpu, _4bit_on_cpu),
        "CUDA": (_blockwise_on_cuda, _4bit_on_cuda),
    }
    names = []
    for number, schema in enumerate(_SCHEMAS):
        names.append(library.define(schema))
        for device, both in kernels.items():
            library.impl(names[-1], both[number], device)
    _kept.append(library)
    found = torch.ops.foretrain
    return found.dequantize_blockwise.default, found.dequantize_4bit.default


_kept: list[torch.library.Library] = []
"""Their operators are gone with them."""


class QuantisedLinear(nn.Module):
    """A frozen linear layer in 4 bits a weight, a scale of 8 bits for each block, and one of 32 for each 256
    of these. What it holds is random: its sizes and kernels count."""

    def __init__(self, linear: nn.Module, rows: int, columns: int, compute: torch.dtype | None) -> None:
        """``compute`` is what weights are brought back to; without it, what the layer is called with."""
        super().__init__()
        self.in_features, self.out_features, self.compute = columns, rows, compute
        device: torch.device = linear.weight.device  # type: ignore[assignment]
        blocks = math.ceil(rows * columns / BLOCK)
        uint8: dict[str, Any] = {"dtype": torch.uint8, "device": device}
        packed = torch.empty((math.ceil(rows * columns / 2), 1), **uint8)
        scales = torch.empty(blocks, **uint8)
        for drawn in () if packed.is_meta else (packed, scales):
            drawn.random_()
        self.weight = nn.Parameter(packed, requires_grad=False)
        self.bias = linear.bias
        self.register_buffer("scales", scales)
        large = torch.full((math.ceil(blocks / _SCALES),), columns**-0.5, device=device)
        self.register_buffer("scales_of_scales", large)
        self.register_buffer("code", torch.linspace(0.5, 1.0, _CODE, device=device))
        self.register_buffer("offset", torch.zeros((), device=device))

    @property
    def packed_away(self) -> int:
        """Weights beyond the elements that hold them."""
        return self.in_features * self.out_features - self.weight.numel()

    def _apply(self, fn: Any, recurse: bool = True) -> QuantisedLinear:
        """Moves with its module; scales stay in fp32 whatever that is cast to."""
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        for name in ("scales_of_scales", "code", "offset"):
            setattr(self, name, getattr(self, name).float())
        return self

    def dequantised(self, dtype: torch.dtype) -> torch.Tensor:
        blockwise, to_weights = dequantizers()
        scales = blockwise(self.scales, self.scales_of_scales, self.code, _SCALES)
        scales = scales + self.offset
        shape = [self.out_features, self.in_features]
        return to_weights(self.weight, scales, BLOCK, shape, dtype)  # type: ignore[no-any-return]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        dtype = x.dtype
        x = x if self.compute is None else x.to(self.compute)
        bias = None if self.bias is None else self.bias.to(x.dtype)
        result: torch.Tensor = _Product.apply(x, bias, self)  # type: ignore[no-untyped-call]
        return result.to(dtype)


class _Product(torch.autograd.Function):
    """Weights are there while a product needs them, forward and again backward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, bias: torch.Tensor | None, layer: QuantisedLinear) -> torch.Tensor:
        ctx.layer = layer
        return nn.functional.linear(x, layer.dequantised(x.dtype), bias)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, None, None]:
        if not ctx.needs_input_grad[0]:
            return None, None, None
        return torch.matmul(gradient, ctx.layer.dequantised(gradient.dtype)), None, None


def packed_away(module: nn.Module) -> int:
    """Weights of a module beyond the elements that it holds, two in each of 4-bit layers."""
    return sum(child.packed_away for child in module.modules() if isinstance(child, QuantisedLinear))
