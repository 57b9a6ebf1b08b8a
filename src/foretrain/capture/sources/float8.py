"""Puts linear layers into fp8: the casts, scales and products that libraries of fp8 training run in their
place.

Two ways are known. torchao's (`Float8Linear`, 0.13): operators of torch, one after the other; operands are
cast when a product needs them, so that the backward pass casts again what it keeps in bf16. Transformer
Engine's (2.x): one kernel casts a tensor, writes it a second time transposed and takes its largest value;
what the backward pass needs is kept in fp8. Kernels of the latter are operators of the namespace ``te``,
which cannot be run here.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from foretrain.workload import TORCHAO, Fp8

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
_MULTIPLE = 16
"""What both sizes of a layer are multiples of; others stay in bf16, as cuBLAS has no fp8 product for them."""
_HEADS = frozenset("lm_head output head fc classifier score embed_out output_projection".split())
"""What models call the layer of their logits, which stays in bf16."""
_SMALLEST = 1e-12
"""Below which a largest value is not divided by."""


def into_fp8(module: nn.Module, recipe: Fp8) -> int:
    """Change the linear layers of a module in place, but for that of its logits and those whose sizes do not
    allow it; how many were changed."""
    heads = set(map(id, _logit_layers(module)))
    kinds = (nn.Linear,) if recipe in TORCHAO else (nn.Linear, nn.Module)
    layers = [
        layer
        for layer in module.modules()
        if isinstance(layer, kinds) and _fits(layer) and id(layer) not in heads
    ]
    for layer in layers:
        layer.__class__ = _Float8Linear if isinstance(layer, nn.Linear) else Conv1D
        layer.fp8 = recipe  # type: ignore[assignment]
    return len(layers)


def _logit_layers(module: nn.Module) -> Iterator[nn.Module]:
    for name in ("get_output_embeddings", "get_classifier"):
        with_head = getattr(module, name, None)
        if callable(with_head):
            try:
                found = with_head()
            except (AttributeError, NotImplementedError):
                continue
            if isinstance(found, nn.Module):
                yield from found.modules()
    for path, child in module.named_modules():
        if path.rpartition(".")[2] in _HEADS and not any(part.isdigit() for part in path.split(".")):
            yield from child.modules()


def _fits(layer: nn.Module) -> bool:
    plain = isinstance(layer, nn.Linear) and type(layer).forward is nn.Linear.forward
    if not plain and type(layer).__name__ != "Conv1D":
        return False
    weight = layer._parameters.get("weight")
    return weight is not None and weight.dim() == 2 and not any(size % _MULTIPLE for size in weight.shape)


class _Float8Linear(nn.Linear):
    fp8: Fp8

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return _linear(x, self.weight, self.bias, self.fp8)


class Conv1D(nn.Module):
    """GPT-2's layer, whose weight is transposed; by its name tensor parallelism knows it."""

    fp8: Fp8

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight, bias = self._parameters["weight"], self._parameters.get("bias")
        assert weight is not None
        return _linear(x, weight, bias, self.fp8, by_inputs=True)


def _linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    recipe: Fp8,
    *,
    by_inputs: bool = False,
) -> torch.Tensor:
    """A weight has a row for each output, or ``by_inputs`` one for each input."""
    rows = x.reshape(-1, x.shape[-1])
    if recipe in TORCHAO:
        y = _SeparateCasts.apply(rows, weight, recipe)  # type: ignore[no-untyped-call]
        y = y if bias is None else y + bias
    else:
        y = _FusedCasts.apply(rows, weight, bias, recipe, by_inputs)  # type: ignore[no-untyped-call]
    return y.reshape(*x.shape[:-1], y.shape[-1])  # type: ignore[no-any-return]


# torchao


class _SeparateCasts(torch.autograd.Function):
    """Scales from the largest value at hand: of a whole tensor, or of each row of the left and each column of
    the right operand."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, recipe: Fp8) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        ctx.recipe = recipe
        by_rows = recipe != "tensorwise"
        left, right = _cast(x, E4M3, 1 if by_rows else None), _cast(weight.t(), E4M3, 0 if by_rows else None)
        return _product(left, right, fast=True)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        x, weight = ctx.saved_tensors
        recipe: Fp8 = ctx.recipe
        (gradient,), form = gradients, E5M2 if recipe == "tensorwise" else E4M3
        rows, columns = (None, None) if recipe == "tensorwise" else (1, 0)
        to_x = to_weight = None
        if ctx.needs_input_grad[0]:
            dim = None if recipe == "rowwise-gw-hp" else rows
            left, right = _cast(gradient, form, rows), _transposed(_cast(weight.t(), E4M3, dim))
            to_x = _product(left, right)
        if ctx.needs_input_grad[1]:
            if recipe == "rowwise-gw-hp":
                to_weight = gradient.t() @ x
            else:
                left, right = _transposed(_cast(gradient, form, columns)), _cast(x, E4M3, columns)
                to_weight = _product(left, right)
        return to_x, to_weight, None


Scaled = tuple[torch.Tensor, torch.Tensor]
"""Numbers in fp8, and what they were multiplied by."""


def _cast(x: torch.Tensor, dtype: torch.dtype, dim: int | None) -> Scaled:
    """With a scale for all of it, or one for what lies along a dimension, rounded to a power of two then."""
    size = x.abs()
    largest = size.max() if dim is None else size.amax(dim, keepdim=True)
    del size
    limit = torch.finfo(dtype).max
    scale = (limit / largest.to(torch.float64).clamp(min=_SMALLEST)).to(torch.float32)
    if dim is not None:
        scale = scale.log2().floor().exp2()
    return (x.to(torch.float32) * scale).clamp(-limit, limit).to(dtype), scale


def _transposed(scaled: Scaled) -> Scaled:
    numbers, scale = scaled
    return numbers.t(), scale.t() if scale.dim() else scale


def _product(left: Scaled, right: Scaled, *, fast: bool = False) -> torch.Tensor:
    """cuBLAS wants rows of the left and columns of the right operand side by side: what lies otherwise is
    copied."""
    (a, by_a), (b, by_b) = left, right
    a = a.contiguous()
    if b.stride(1) == 1 and b.stride(0) != 1:
        b = b.t().contiguous().t()
    if by_a.dim() and not by_b.dim():
        by_b = by_b.reshape(1, 1).repeat(1, b.shape[1])
    return torch._scaled_mm(
        a, b, by_a.reciprocal(), by_b.reciprocal(), out_dtype=torch.bfloat16, use_fast_accum=fast
    )


# Transformer Engine


class _FusedCasts(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        recipe: Fp8,
        by_inputs: bool,
    ) -> torch.Tensor:
        rows, columns, scale, column_scale = _quantize(x, E4M3, recipe)
        of_weight, weight_columns, weight_scale, weight_column_scale = _quantize(
            weight, E4M3, recipe, square=True
        )
        if by_inputs:
            of_weight, weight_columns = weight_columns, of_weight
            weight_scale, weight_column_scale = weight_column_scale, weight_scale
        trained = ctx.needs_input_grad[1]  # of a frozen weight there is no gradient that needs the input
        of_input = (columns, column_scale) if trained else (None, None)
        ctx.save_for_backward(*of_input, weight_columns, weight_column_scale)
        ctx.recipe, ctx.by_inputs = recipe, by_inputs
        fast = recipe not in _BLOCKS
        return _scaled_mm(rows, of_weight.t(), scale, weight_scale.t(), bias, fast=fast)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        columns, column_scale, weight_columns, weight_column_scale = ctx.saved_tensors
        recipe: Fp8 = ctx.recipe
        needs_x, needs_weight, needs_bias, *_ = ctx.needs_input_grad
        form = E5M2 if recipe in ("delayed", "current") else E4M3
        of_rows, of_columns, scale, own_scale = _quantize(gradients[0], form, recipe)
        to_x = _scaled_mm(of_rows, weight_columns.t(), scale, weight_column_scale.t()) if needs_x else None
        to_weight = None
        if needs_weight:
            left, right = (of_columns, own_scale), (columns, column_scale)
            (a, by_a), (b, by_b) = (right, left) if ctx.by_inputs else (left, right)
            to_weight = _scaled_mm(a, b.t(), by_a, by_b.t())
        to_bias = gradients[0].sum(0) if needs_bias else None
        return to_x, to_weight, to_bias, None, None


def _scaled_mm(
    a: torch.Tensor,
    b: torch.Tensor,
    by_a: torch.Tensor,
    by_b: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    fast: bool = False,
) -> torch.Tensor:
    return torch._scaled_mm(a, b, by_a, by_b, bias, out_dtype=torch.bfloat16, use_fast_accum=fast)


def _quantize(
    x: torch.Tensor, dtype: torch.dtype, recipe: Fp8, *, square: bool = False
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """A tensor and its transpose in fp8, with their scales; weights have theirs by ``square`` blocks. Of
    current scaling the largest value comes from a kernel before; delayed scaling has that of earlier
    steps."""
    _library()
    x = x.contiguous()
    with torch._C._AutoDispatchBelowAutograd():
        largest = torch.ops.te.amax(x) if recipe == "current" else None
        square = square and recipe == "blockwise"
        return torch.ops.te.cast_transpose(x, largest, dtype, _BLOCKS.get(recipe, 0), square)  # type: ignore[no-any-return]


_BLOCKS: dict[Fp8, int] = {"blockwise": 128, "mxfp8": 32, "nvfp4": 16}
"""Numbers along a row that share a scale, where not all of a tensor do."""


def _cast_transpose(
    x: torch.Tensor, largest: torch.Tensor | None, dtype: torch.dtype, block: int, square: bool
) -> tuple[torch.Tensor, ...]:
    """Scales as cuBLAS wants them: those of a column side by side, of square blocks those of a row."""
    m, k = x.shape
    numbers = (x.new_empty((m, k), dtype=dtype), x.new_empty((k, m), dtype=dtype))
    if not block:
        return *numbers, *(x.new_empty((), dtype=torch.float32) for _ in range(2))
    form = torch.float32 if block == 128 else torch.uint8
    if square:
        shapes = ((-(-m // block), -(-k // block)), (-(-k // block), -(-m // block)))
        return *numbers, *(x.new_empty(shape, dtype=form) for shape in shapes)
    shapes = ((m, -(-k // block)), (k, -(-m // block)))
    return *numbers, *(x.new_empty_strided(shape, (1, shape[0]), dtype=form) for shape in shapes)


@functools.cache
def _library() -> torch.library.Library:
    library = torch.library.Library("te", "DEF")
    library.define("amax(Tensor x) -> Tensor")
    library.impl("amax", lambda x: x.new_empty((), dtype=torch.float32), "Meta")
    library.define(
        "cast_transpose(Tensor x, Tensor? largest, ScalarType dtype, int block, bool square)"
        " -> (Tensor, Tensor, Tensor, Tensor)"
    )
    library.impl("cast_transpose", _cast_transpose, "Meta")
    return library
