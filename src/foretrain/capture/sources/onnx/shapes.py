"""Implements the ONNX operators that make, type, reshape and index tensors."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from foretrain.capture.sources.onnx.ops import DTYPES, Number, register

# --- constants and types
# ----------------------------------------------------------------------------------------------


@register("Shape")
def shape_of(x: Tensor, *, start: int = 0, end: int | None = None) -> Tensor:
    return torch.tensor(x.shape[start:end], dtype=torch.int64, device="cpu")


@register("Size")
def size_of(x: Tensor) -> Tensor:
    return torch.tensor(x.numel(), dtype=torch.int64, device="cpu")


@register("ConstantOfShape", reads=(0,))
def constant_of_shape(shape: list[int], *, value: Tensor | None = None) -> Tensor:
    return (torch.zeros(1, device="cpu") if value is None else value).reshape(()).expand(shape)


@register("Range")
def arange(start: Tensor, limit: Tensor, delta: Tensor) -> Tensor:
    return torch.arange(start.item(), limit.item(), delta.item(), dtype=start.dtype, device="cpu")


@register("EyeLike")
def eye_like(x: Tensor, *, dtype: int | None = None, k: int = 0) -> Tensor:
    ones = torch.ones_like(x, dtype=DTYPES[dtype] if dtype else x.dtype)
    return ones.triu(k).tril(k)


@register("Cast")
def cast(x: Tensor, *, to: int, saturate: int = 1, round_mode: str = "up") -> Tensor:
    return x.to(DTYPES[to])


@register("CastLike")
def cast_like(x: Tensor, like: Tensor, *, saturate: int = 1, round_mode: str = "up") -> Tensor:
    return x.to(like.dtype)


@register("Identity")
def identity(x: Tensor) -> Tensor:
    return x


# --- shapes
# -----------------------------------------------------------------------------------------------------------


@register("Reshape", reads=(1,))
def reshape(
    x: Tensor, sizes: list[int] | None = None, *, shape: list[int] | None = None, allowzero: int = 0
) -> Tensor:
    target = list(sizes if sizes is not None else shape or [])
    if not allowzero:
        target = [x.shape[i] if size == 0 else size for i, size in enumerate(target)]
    return x.reshape(target)


@register("Flatten")
def flatten(x: Tensor, *, axis: int = 1) -> Tensor:
    axis = axis + x.ndim if axis < 0 else axis
    return x.reshape(math.prod(x.shape[:axis]), math.prod(x.shape[axis:]))


@register("Transpose")
def transpose(x: Tensor, *, perm: list[int] | None = None) -> Tensor:
    return x.permute(perm if perm is not None else list(range(x.ndim))[::-1])


@register("Squeeze", reads=(1,))
def squeeze(x: Tensor, axes_input: list[int] | None = None, *, axes: list[int] | None = None) -> Tensor:
    dropped = axes if axes_input is None else axes_input
    return x.squeeze() if dropped is None else x.squeeze(tuple(dropped))


@register("Unsqueeze", reads=(1,))
def unsqueeze(
    x: Tensor, axes_input: list[int] | int | None = None, *, axes: list[int] | None = None
) -> Tensor:
    added = (axes or []) if axes_input is None else axes_input
    added = [added] if isinstance(added, int) else added
    rank = x.ndim + len(added)
    for axis in sorted(axis % rank for axis in added):
        x = x.unsqueeze(axis)
    return x


@register("Concat")
def concat(*xs: Tensor, axis: int = 1) -> Tensor:
    return torch.cat(xs, axis)


@register("Split", reads=(1,), context=("outputs",))
def split(
    x: Tensor,
    sizes: list[int] | None = None,
    *,
    outputs: int,
    axis: int = 0,
    split: list[int] | None = None,
    num_outputs: int | None = None,
) -> tuple[Tensor, ...]:
    chosen = split if sizes is None else sizes
    return torch.split(x, chosen or -(-x.shape[axis] // (num_outputs or outputs)), axis)


@register("Expand", reads=(1,))
def expand(x: Tensor, shape: list[int]) -> Tensor:
    return x.expand(torch.broadcast_shapes(x.shape, tuple(shape)))


@register("Tile", reads=(1,))
def tile(x: Tensor, repeats: list[int]) -> Tensor:
    return x.repeat(repeats)


def _slice(x: Tensor, axis: int, start: int, end: int, step: int) -> Tensor:
    kept = range(*slice(start, end, step).indices(x.shape[axis]))
    if len(kept) == x.shape[axis] and step == 1:
        return x
    if step > 0:
        return x[(slice(None),) * (axis % x.ndim) + (slice(kept.start, kept.stop, step),)]
    part = _slice(x, axis, kept[-1], kept[0] + 1, -step) if kept else x.narrow(axis, 0, 0)
    return part.flip(axis)


@register("Slice")
def slice_by_attributes(
    x: Tensor, *, starts: list[int], ends: list[int], axes: list[int] | None = None
) -> Tensor:
    return slice_by_inputs(x, starts, ends, axes)


@register("Slice", since=10, reads=(1, 2, 3, 4))
def slice_by_inputs(
    x: Tensor,
    starts: list[int],
    ends: list[int],
    axes: list[int] | None = None,
    steps: list[int] | None = None,
) -> Tensor:
    axes = list(range(len(starts))) if axes is None else axes
    steps = [1] * len(starts) if steps is None else steps
    for axis, start, end, step in zip(axes, starts, ends, steps, strict=True):
        x = _slice(x, axis, start, end, step)
    return x


@register("DepthToSpace")
def depth_to_space(x: Tensor, *, blocksize: int, mode: str = "DCR") -> Tensor:
    if mode == "CRD":
        return F.pixel_shuffle(x, blocksize)
    n, c, h, w = x.shape
    blocks = x.reshape(n, blocksize, blocksize, c // blocksize**2, h, w)
    return blocks.permute(0, 3, 4, 1, 5, 2).reshape(n, -1, h * blocksize, w * blocksize)


@register("SpaceToDepth")
def space_to_depth(x: Tensor, *, blocksize: int) -> Tensor:
    n, c, h, w = x.shape
    blocks = x.reshape(n, c, h // blocksize, blocksize, w // blocksize, blocksize)
    return blocks.permute(0, 3, 5, 1, 2, 4).reshape(n, -1, h // blocksize, w // blocksize)


@register("Trilu", reads=(1,))
def trilu(x: Tensor, k: int | list[int] | None = None, *, upper: int = 1) -> Tensor:
    diagonal = (k[0] if isinstance(k, list) else k) or 0
    return x.triu(diagonal) if upper else x.tril(diagonal)


# --- indices
# ----------------------------------------------------------------------------------------------------------


@register("Gather", scalars=(1,))
def gather(x: Tensor, indices: Tensor | int, *, axis: int = 0) -> Tensor:
    if isinstance(indices, int):
        return x.select(axis, indices)
    axis %= x.ndim
    if axis == 0 and x.ndim == 2 and x.is_floating_point():
        return F.embedding(indices.long(), x)
    return x[(slice(None),) * axis + (indices.long(),)]


@register("GatherElements")
def gather_elements(x: Tensor, indices: Tensor, *, axis: int = 0) -> Tensor:
    return x.gather(axis, indices.long())


@register("GatherND")
def gather_nd(x: Tensor, indices: Tensor, *, batch_dims: int = 0) -> Tensor:
    batch = tuple(
        torch.arange(size, device=x.device).reshape([-1 if i == j else 1 for j in range(indices.ndim - 1)])
        for i, size in enumerate(x.shape[:batch_dims])
    )
    return x[batch + indices.long().unbind(-1)]


@register("ScatterND")
def scatter_nd(x: Tensor, indices: Tensor, updates: Tensor, *, reduction: str = "none") -> Tensor:
    if reduction not in ("none", "add"):
        raise NotImplementedError(f"reduction={reduction!r}")
    return x.index_put(indices.long().unbind(-1), updates, accumulate=reduction == "add")


_SCATTER = {"add": "sum", "mul": "prod", "max": "amax", "min": "amin"}


@register("ScatterElements", "Scatter")
def scatter_elements(
    x: Tensor, indices: Tensor, updates: Tensor, *, axis: int = 0, reduction: str = "none"
) -> Tensor:
    if reduction == "none":
        return x.scatter(axis, indices.long(), updates)
    return x.scatter_reduce(axis, indices.long(), updates, _SCATTER[reduction])


@register("OneHot", reads=(1,))
def one_hot(indices: Tensor, depth: Number | list[int], values: Tensor, *, axis: int = -1) -> Tensor:
    count = int(depth[0] if isinstance(depth, list) else depth)
    wanted = indices.unsqueeze(axis).remainder(count)
    classes = torch.arange(count, device=indices.device)
    shape = [1] * wanted.ndim
    shape[axis] = count
    return torch.where(wanted == classes.reshape(shape), values[1], values[0])


@register("Einsum")
def einsum(*xs: Tensor, equation: str) -> Tensor:
    return torch.einsum(equation, *xs)
