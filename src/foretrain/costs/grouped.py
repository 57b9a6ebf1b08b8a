"""Costs what products of experts take beside the even one that was measured: rows by chance, casts, and a
call for each expert."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from foretrain.cluster import Device
from foretrain.costs.base import Column
from foretrain.costs.features.products import grouped_sizes
from foretrain.graph import Operator
from foretrain.graph.opset import traits

_TILE_ROWS = 128
_WASTED_ROWS = 90.0
"""Of each expert, rows of tiles that stay empty where experts have uneven numbers: half of a tile of 128 to
256 rows. From products on an H200 (``data/studies/h200_experts.jsonl``): 89 where experts have 256 or 512
rows, 118 where they have 1,024, whether the fullest has 1.5 or 2 times the mean. Gradients of weights, whose
tiles lie across rows, lose nothing."""
_CAST_BYTES = {"delayed": 4.0, "current": 6.0, "blockwise": 4.0, "mxfp8": 4.0, "nvfp4": 3.2}
"""Traffic for each number of bf16 rows that products in fp8 take: read, and written for the product and
transposed for the weights' gradient; read once more for the largest value of scales that follow the data."""
_OTHER_CAST_BYTES = 6.0
"""Of torchao's: rows and columns are cast apart."""
_COPY_SHARE = 0.85
_LAUNCH_S = 5e-6
"""Host time of a kernel that a library launches in a loop of its own."""
_CAST_KERNELS = {"current": 3, "delayed": 1, "blockwise": 1, "mxfp8": 1, "nvfp4": 1}
"""Kernels that cast the rows of an expert: scales that follow the data take the largest value first, and a
kernel makes a scale of it."""
_SCALE_KERNELS = {"mxfp8": 2, "nvfp4": 2}
"""Kernels before each product that lay out the scales of its operands as the tensor cores of Blackwell read
them."""
_NEW_ROWS_S = 35e-6
"""Host time of a product of cuBLAS with a number of rows that it has not met: Transformer Engine describes
each product anew and asks for an algorithm, and rows that fall to experts by chance are never the same twice.
From NVIDIA's public step of Qwen3 30B on 8 B200 (16 experts on a rank, one sequence at a time), which waits
for its host; runs of the same models with a capacity, where rows are always as many, do not show it."""
_REPEATS_ROWS = ("moe.permute", "moe.unpermute_backward")
"""Kernels that write a token several times, and read it as often: on an H200 at 4.6 TB/s in all."""
_BIAS_BYTES, _BIAS_BACK_BYTES = 28, 35
"""Traffic for each number to which an expert's bias is added behind its last product, where rows have their
weight already: Megatron Core and Automodel join ``rows + bias * weight`` of every expert, in fp32 as the
weights are, and cast the whole; and back, with the gradients of bias and weight as products and sums."""


def moved_bytes(operators: Sequence[Operator]) -> Column:
    """The traffic of each operator, and of kernels on the rows of experts what they really move."""
    weighs = any(operator.name == "moe.gate" for operator in operators)
    biased = {
        operator.outputs[0].shape for operator in operators if weighs and operator.name == "moe.add_bias"
    }
    moved = np.array([operator.bytes for operator in operators], dtype=np.float64)
    for i, operator in enumerate(operators):
        if operator.name in _REPEATS_ROWS:
            moved[i] = max(operator.bytes, 2 * operator.bytes_written)
        elif operator.name == "moe.add_bias" and weighs:
            moved[i] = _BIAS_BYTES * operator.outputs[0].numel
        elif operator.name == "moe.sum_rows" and operator.inputs[0].shape in biased:
            moved[i] = _BIAS_BACK_BYTES * operator.inputs[0].numel
    return moved


def meets_weights(operator: Operator) -> bool:
    """Whether it is a product of rows with the weights of their experts, or with those transposed."""
    return traits(operator.name).kind == "grouped product" and len(operator.inputs[1].shape) == 3


def uneven_factors(operators: Sequence[Operator]) -> Column:
    """Give how much longer products take whose rows are spread over experts by chance than with as many for
    each."""
    factors = np.ones(len(operators))
    for i, operator in enumerate(operators):
        if meets_weights(operator):
            rows = max(1, grouped_sizes(operator)[0])
            empty = -rows % _TILE_ROWS
            factors[i] = (rows + max(_WASTED_ROWS, empty)) / (rows + empty)
    return factors


def casts_s(operators: Sequence[Operator], device: Device, recipe: str) -> Column:
    """Casting the rows of experts to fp8, once for the product with weights and for their gradient."""
    rate = _COPY_SHARE * device.memory_bytes_per_s / _CAST_BYTES.get(recipe, _OTHER_CAST_BYTES)
    return np.array(
        [
            one.inputs[0].numel / rate if meets_weights(one) and one.inputs[0].dtype == "bfloat16" else 0.0
            for one in operators
        ]
    )


def issue_s(operators: Sequence[Operator], recipe: str | None, *, by_chance: bool) -> Column:
    """Host seconds of calls in which each expert has kernels of its own, as in Transformer Engine's grouped
    layers: a product of cuBLAS, in fp8 (with a recipe) behind the casts of its rows."""
    product_s = _NEW_ROWS_S if by_chance else _LAUNCH_S
    seconds = np.zeros(len(operators))
    for i, operator in enumerate(operators):
        if traits(operator.name).kind == "grouped product":
            casts = _CAST_KERNELS.get(recipe or "", 0) if meets_weights(operator) else 0
            kernels = casts + _SCALE_KERNELS.get(recipe or "", 0)
            seconds[i] = (product_s + _LAUNCH_S * kernels) * grouped_sizes(operator)[3]
    return seconds
