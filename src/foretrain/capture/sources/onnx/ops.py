"""Registers ONNX operators as torch functions, with arithmetic and reductions."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

Function = Callable[..., Any]
Number = int | float
_Registered = TypeVar("_Registered", bound=Function)

# TensorProto.DataType, the numbers that Cast and its kin carry.
DTYPES = {
    1: torch.float32,
    2: torch.uint8,
    3: torch.int8,
    4: torch.uint16,
    5: torch.int16,
    6: torch.int32,
    7: torch.int64,
    9: torch.bool,
    10: torch.float16,
    11: torch.float64,
    12: torch.uint32,
    13: torch.uint64,
    14: torch.complex64,
    15: torch.complex128,
    16: torch.bfloat16,
    17: torch.float8_e4m3fn,
    18: torch.float8_e4m3fnuz,
    19: torch.float8_e5m2,
    20: torch.float8_e5m2fnuz,
}


@dataclass(frozen=True, kw_only=True, slots=True)
class OnnxOperator:
    """How to call one ONNX operator: inputs positionally, attributes by keyword.

    ``reads`` are the input positions whose values are needed, handed over as Python numbers or lists;
    ``scalars`` are those handed over as numbers where they are constants without dimensions; ``context``
    names what the caller adds: ``training`` (is the module in training mode) or ``outputs`` (how many the
    node has).
    """

    function: Function
    since: int
    reads: tuple[int, ...]
    scalars: tuple[int, ...]
    context: tuple[str, ...]


_REGISTRY: dict[str, list[OnnxOperator]] = {}


def register(
    *names: str,
    since: int = 1,
    reads: tuple[int, ...] = (),
    scalars: tuple[int, ...] = (),
    context: tuple[str, ...] = (),
) -> Callable[[_Registered], _Registered]:
    """Make the decorated function the implementation of these operators from opset ``since`` on."""

    def add(function: _Registered) -> _Registered:
        entry = OnnxOperator(function=function, since=since, reads=reads, scalars=scalars, context=context)
        for name in names:
            _REGISTRY.setdefault(name, []).append(entry)
        return function

    return add


def find(name: str, opset: int) -> OnnxOperator | None:
    """The newest implementation of an operator that is not newer than the file's opset."""
    usable = [entry for entry in _REGISTRY.get(name, ()) if entry.since <= opset]
    return max(usable, key=lambda entry: entry.since, default=None)


_PLAIN: dict[str, Function] = {
    "Abs": torch.abs,
    "Acos": torch.acos,
    "Asin": torch.asin,
    "Atan": torch.atan,
    "BitwiseAnd": torch.bitwise_and,
    "BitwiseNot": torch.bitwise_not,
    "BitwiseOr": torch.bitwise_or,
    "BitwiseXor": torch.bitwise_xor,
    "Ceil": torch.ceil,
    "Cos": torch.cos,
    "Cosh": torch.cosh,
    "Equal": torch.eq,
    "Erf": torch.erf,
    "Exp": torch.exp,
    "Floor": torch.floor,
    "Greater": torch.gt,
    "GreaterOrEqual": torch.ge,
    "HardSwish": F.hardswish,
    "IsNaN": torch.isnan,
    "Less": torch.lt,
    "LessOrEqual": torch.le,
    "Log": torch.log,
    "Mish": F.mish,
    "Neg": torch.neg,
    "Not": torch.logical_not,
    "And": torch.logical_and,
    "Or": torch.logical_or,
    "Xor": torch.logical_xor,
    "Reciprocal": torch.reciprocal,
    "Relu": F.relu,
    "Round": torch.round,
    "Sigmoid": torch.sigmoid,
    "Sign": torch.sign,
    "Sin": torch.sin,
    "Sinh": torch.sinh,
    "Softplus": F.softplus,
    "Softsign": F.softsign,
    "Sqrt": torch.sqrt,
    "Tan": torch.tan,
    "Tanh": torch.tanh,
    "Where": torch.where,
}
for _name, _function in _PLAIN.items():
    register(_name)(_function)

register("Add", scalars=(0, 1))(operator.add)
register("Sub", scalars=(0, 1))(operator.sub)
register("Mul", scalars=(0, 1))(operator.mul)


@register("Div", scalars=(1,))
def div(x: Tensor, y: Tensor | Number) -> Tensor:
    return torch.div(x, y) if x.is_floating_point() else torch.div(x, y, rounding_mode="trunc")


@register("Pow", scalars=(1,))
def power(x: Tensor, exponent: Tensor | Number) -> Tensor:
    return torch.pow(x, exponent).to(x.dtype)


@register("Mod")
def mod(x: Tensor, y: Tensor, *, fmod: int = 0) -> Tensor:
    return torch.fmod(x, y) if fmod else torch.remainder(x, y)


@register("IsInf")
def is_inf(x: Tensor, *, detect_negative: int = 1, detect_positive: int = 1) -> Tensor:
    if detect_negative and detect_positive:
        return torch.isinf(x)
    return torch.isposinf(x) if detect_positive else torch.isneginf(x)


@register("Max")
def maximum(*xs: Tensor) -> Tensor:
    return functools.reduce(torch.maximum, xs)


@register("Min")
def minimum(*xs: Tensor) -> Tensor:
    return functools.reduce(torch.minimum, xs)


@register("Sum")
def add_all(*xs: Tensor) -> Tensor:
    return functools.reduce(torch.add, xs)


@register("Mean")
def mean_of_all(*xs: Tensor) -> Tensor:
    return add_all(*xs) / len(xs)


@register("Clip", scalars=(1, 2))
def clip(
    x: Tensor,
    low: Tensor | Number | None = None,
    high: Tensor | Number | None = None,
    *,
    min: float | None = None,
    max: float | None = None,
) -> Tensor:
    low, high = (min if low is None else low), (max if high is None else high)
    return x if low is None and high is None else torch.clamp(x, low, high)  # type: ignore[arg-type]


# --- reductions
# -------------------------------------------------------------------------------------------------------


def _axes(x: Tensor, axes: Sequence[int] | None, noop: int) -> tuple[int, ...]:
    if axes:
        return tuple(axis % x.ndim for axis in axes)
    return () if noop else tuple(range(x.ndim))


def _product(x: Tensor, axes: tuple[int, ...], keep: bool) -> Tensor:
    for axis in sorted(axes, reverse=True):
        x = x.prod(axis, keepdim=keep)
    return x


_REDUCTIONS: dict[str, Callable[[Tensor, tuple[int, ...], bool], Tensor]] = {
    "ReduceL1": lambda x, axes, keep: torch.linalg.vector_norm(x, 1, axes, keep),
    "ReduceL2": lambda x, axes, keep: torch.linalg.vector_norm(x, 2, axes, keep),
    "ReduceLogSum": lambda x, axes, keep: x.sum(axes, keep).log(),
    "ReduceLogSumExp": lambda x, axes, keep: x.logsumexp(axes, keep),
    "ReduceMax": lambda x, axes, keep: x.amax(axes, keep),
    "ReduceMean": lambda x, axes, keep: x.mean(axes, keep),
    "ReduceMin": lambda x, axes, keep: x.amin(axes, keep),
    "ReduceProd": _product,
    "ReduceSum": lambda x, axes, keep: x.sum(axes, keep, dtype=x.dtype),
    "ReduceSumSquare": lambda x, axes, keep: x.square().sum(axes, keep),
}


def _reducer(reduction: Callable[[Tensor, tuple[int, ...], bool], Tensor]) -> Function:
    """Axes are an attribute in old opsets and an input in new ones; both are understood."""

    def reduce(
        x: Tensor,
        axes_input: list[int] | None = None,
        *,
        axes: list[int] | None = None,
        keepdims: int = 1,
        noop_with_empty_axes: int = 0,
    ) -> Tensor:
        over = _axes(x, axes if axes_input is None else axes_input, noop_with_empty_axes)
        return reduction(x, over, bool(keepdims)) if over else x

    return reduce


for _name, _reduction in _REDUCTIONS.items():
    register(_name, reads=(1,))(_reducer(_reduction))


@register("ArgMax")
def arg_max(x: Tensor, *, axis: int = 0, keepdims: int = 1, select_last_index: int = 0) -> Tensor:
    return x.argmax(axis, bool(keepdims))


@register("ArgMin")
def arg_min(x: Tensor, *, axis: int = 0, keepdims: int = 1, select_last_index: int = 0) -> Tensor:
    return x.argmin(axis, bool(keepdims))


@register("TopK", reads=(1,))
def top_k(
    x: Tensor,
    count: list[int] | None = None,
    *,
    k: int = 1,
    axis: int = -1,
    largest: int = 1,
    sorted: int = 1,
) -> tuple[Tensor, Tensor]:
    values, indices = x.topk(count[0] if count else k, axis, bool(largest), bool(sorted))
    return values, indices


@register("CumSum", reads=(1,))
def cum_sum(x: Tensor, axis: int | list[int], *, exclusive: int = 0, reverse: int = 0) -> Tensor:
    along = axis[0] if isinstance(axis, list) else axis
    flipped = x.flip(along) if reverse else x
    total = flipped.cumsum(along, dtype=x.dtype)
    total = total - flipped if exclusive else total
    return total.flip(along) if reverse else total
