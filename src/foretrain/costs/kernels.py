"""Counts the kernels that a call launches: as a rule one, over lists of tensors by torch's own rules."""

from __future__ import annotations

import math
from collections.abc import Sequence

from foretrain.graph import ITEM_BYTES, Operator, TensorSpec
from foretrain.graph.opset import traits

_CHUNK = 65536
_CHUNKS_PER_LAUNCH = 320
_TENSORS_PER_LAUNCH = {1: 110, 2: 64, 3: 48, 4: 36, 5: 30}
"""Of torch's ``MultiTensorApply.cuh``: elements per chunk, chunks per launch, tensors per launch by lists."""


def kernel_count(operator: Operator) -> int:
    """None for calls that launch nothing, one per gradient of a convolution, one per launch over lists of
    tensors.

    A run of element-wise operators (``fusion.py``) knows how many it is.
    """
    if not operator.launches:
        return 0
    of = traits(operator.name)
    if of.multi_tensor:
        return _multi_tensor(operator)
    if of.kind == "convolution" and of.backward:
        gradients: list[bool] = operator.args["output_mask"]
        return max(1, sum(gradients))
    if of.kind == "fused":
        return int(operator.args["kernels"])
    return 1


def kernel_kind(name: str, inputs: Sequence[TensorSpec]) -> str:
    """Operators of one kind launch about as many kernels: those of one name and width of numbers and, among
    convolutions, of one window and layout."""
    kind = f"{name}/{ITEM_BYTES[inputs[0].dtype]}" if inputs else name
    if traits(name).kind != "convolution":
        return kind
    x, weight = inputs[-2], inputs[-1]
    return f"{kind}/{'x'.join(map(str, weight.shape[2:]))}{'/last' if x.channels_last else ''}"


def _multi_tensor(operator: Operator) -> int:
    lists = [
        value
        for value in operator.args.values()
        if isinstance(value, list) and value and isinstance(value[0], str)
    ]
    if not lists:
        return 1
    depth = min(len(lists), max(_TENSORS_PER_LAUNCH))
    first = [operator.inputs[int(reference[1:])] for reference in lists[0]]
    chunks = sum(math.ceil(spec.numel / _CHUNK) for spec in first)
    return max(math.ceil(len(first) / _TENSORS_PER_LAUNCH[depth]), math.ceil(chunks / _CHUNKS_PER_LAUNCH))
