"""Reads the sizes of a convolution from its call, and what a library copies for it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from foretrain.costs.base import Call
from foretrain.graph import TensorSpec
from foretrain.graph.opset import traits


@dataclass(frozen=True, slots=True)
class Convolution:
    """The sizes of a convolution; ``c`` and ``k`` are the channels of one group."""

    n: int
    c: int
    k: int
    groups: int
    inside: int
    outside: int
    window: int
    stride: int
    rank: int
    """Dimensions of an image, a video or a signal."""
    transposed: bool
    channels_last: bool
    dilated: bool
    gradients: int
    biased: bool
    """A bias is added in a kernel of its own."""
    repacked: int
    """Elements of operands that are copied first, as they have gaps or another layout than the result."""

    @property
    def moved(self) -> tuple[int, int, int]:
        """Elements of the input, the output and the weight."""
        n, groups = self.n, self.groups
        return (
            n * groups * self.c * self.inside,
            n * groups * self.k * self.outside,
            groups * self.c * self.k * self.window,
        )

    @property
    def plain_product(self) -> bool:
        return self.window == 1 and self.stride == 1

    @property
    def own_kernels(self) -> bool:
        """Whether either layout has kernels of its own, on every device."""
        return self.plain_product or self.groups > 1 or self.rank != 2

    @property
    def added(self) -> int:
        """Elements that a kernel of its own reads and writes again: where a bias is added, and the gradient
        of the weight that each sample has, as numbers of twice the width."""
        whole = self.n * self.groups * self.k * self.outside if self.biased else 0
        by_sample = self.plain_product and self.gradients and not self.channels_last
        return whole + (2 * self.n * self.groups * self.c * self.k if by_sample else 0)

    @property
    def convertible(self) -> int:
        """Elements that cuDNN brings to NHWC for its matrix units, where they are in NCHW.

        A 1x1 convolution is a plain product of each sample and needs no conversion.
        """
        if self.plain_product or self.c * self.groups < 4:
            return 0
        return sum(self.moved) * max(1, self.gradients)


def convolution_sizes(call: Call) -> Convolution:
    """Sizes of a convolution, or of its backward pass, from the tensors and arguments of its call."""
    backward = traits(call.name).backward
    x, weight = call.inputs[int(backward)], call.inputs[1 + int(backward)]
    args = call.args
    groups: int = args.get("groups", 1)
    window = weight.shape[2:]
    strides, pads, dilations = (_each(args, name, x) for name in ("stride", "padding", "dilation"))
    if backward:
        outside = call.inputs[0].shape[2:]
    else:
        outside = tuple(
            max(1, (size + 2 * pad - dilation * (kernel - 1) - 1) // stride + 1)
            for size, kernel, stride, pad, dilation in zip(
                x.shape[2:], window, strides, pads, dilations, strict=True
            )
        )
    channels, filters = weight.shape[1] * groups, weight.shape[0]
    channels_last = x.channels_last or weight.channels_last
    if args.get("transposed"):
        channels, filters, outside = weight.shape[0], weight.shape[1] * groups, x.shape[2:]
    operands = call.inputs[: 2 + int(backward)]
    return Convolution(
        n=x.shape[0],
        c=max(1, channels // groups),
        k=max(1, filters // groups),
        groups=groups,
        inside=max(1, math.prod(x.shape[2:])),
        outside=max(1, math.prod(outside)),
        window=math.prod(window),
        stride=max(strides),
        rank=len(window),
        transposed=bool(args.get("transposed")),
        channels_last=channels_last,
        dilated=max(dilations) > 1,
        gradients=sum(args["output_mask"][:2]) if backward else 0,
        biased=not backward and isinstance(args.get("bias"), str),
        repacked=sum(spec.numel for spec in operands if not _in_layout(spec, channels_last)),
    )


def _in_layout(spec: TensorSpec, channels_last: bool) -> bool:
    """Tell whether a tensor lies without gaps in the layout, where there is a choice: one channel or one
    pixel is in both."""
    either = len(spec.shape) < 4 or spec.shape[1] == 1 or math.prod(spec.shape[2:]) == 1
    return dense(spec) and (either or spec.channels_last == channels_last)


def _each(args: Mapping[str, Any], name: str, x: TensorSpec) -> Sequence[int]:
    """A value per dimension; torch repeats a single one."""
    values: list[int] = args.get(name) or [0 if name == "padding" else 1]
    return values * (len(x.shape) - 2) if len(values) == 1 else values


def dense(spec: TensorSpec) -> bool:
    """Tell whether a tensor lies without gaps or repeats in memory, in whatever order of dimensions."""
    if spec.strides is None:
        return True
    expected = 1
    for stride, size in sorted(zip(spec.strides, spec.shape, strict=True)):
        if size > 1:
            if stride != expected:
                return False
            expected *= size
    return True
