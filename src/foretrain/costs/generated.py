"""Costs the kernels that torch's compiler writes: by the bytes they move, the instructions of each element
and how far a reduction can be spread over the device.

The figures are read off 863 kernels of 8 compiled trainings on an H200
(``data/studies/h200_compiled_kernels.jsonl``).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from foretrain.cluster import Device
from foretrain.graph import Operator
from foretrain.graph.opset import Kind, traits
from foretrain.graph.runs import FUSED, GENERATED

_LAUNCH_S = {"pointwise": 1.2e-6, "row": 1.6e-6, "column": 1.6e-6}
"""Of a kernel that does next to nothing."""
_STAGE_S = 1.7e-6
"""Of each further kernel of a reduction, which adds up partial results."""
_LIBRARY_SUM_S = 10e-6
"""Of a sum over the parts that a kernel along rows has left."""
_MEMORY_SHARE = {"pointwise": 0.90, "row": 0.80, "column": 0.80}
"""Of the memory's rate."""
_RAMP_BYTES = 5e6
"""That come at half the rate, before all multiprocessors are at work."""
_ROUND_S, _ROUND_ELEMENTS, _PERSISTENT = 2.0e-6, 2048, 1024
"""A row longer than ``_PERSISTENT`` is read in rounds of so many elements, one behind the other."""
_BLOCKS_PER_PROCESSOR = 4
"""Rows that a multiprocessor works on at once."""
_TURNED_SHARE = 0.22
"""Of the memory's rate, where an image of few channels is brought to channels last."""
_FEW_CHANNELS = 4

_INSTRUCTIONS: dict[str, float] = {
    "native_dropout": 200.0, "bernoulli": 200.0, "rand_like": 200.0,
    "tanh": 40.0, "gelu": 40.0, "gelu_backward": 70.0, "erf": 30.0, "pow": 6.0, "sin": 30.0, "cos": 30.0,
    "silu": 20.0, "silu_backward": 30.0, "sigmoid": 18.0, "exp": 12.0, "log": 15.0,
    "_softmax": 30.0, "_log_softmax": 30.0, "_softmax_backward_data": 15.0,
    "_log_softmax_backward_data": 30.0,
    "addcmul": 40.0, "var_mean": 33.0, "native_layer_norm": 25.0, "native_layer_norm_backward": 15.0,
    "max_pool2d_with_indices": 230.0, "max_pool2d_with_indices_backward": 230.0,
}  # fmt: skip
"""Per element of an operator; in-place forms alike."""
_USUAL: dict[Kind, float] = {"view": 0.0, "copy": 2.0, "fill": 1.0}
_OTHER = 3.0


def is_generated(operator: Operator) -> bool:
    return operator.name == FUSED and operator.overload in GENERATED


def generated_time_s(operator: Operator, device: Device) -> float:
    """Seconds of all kernels of one call."""
    kind, args, processors = operator.overload, operator.args, device.processors
    bandwidth = device.memory_bytes_per_s * device.sustained_memory
    total, points = int(args["total"]), max(1, int(args["points"]))
    share = _TURNED_SHARE if _turns_few_channels(operator) else _MEMORY_SHARE[kind]
    memory_s = (operator.bytes + min(operator.bytes, _RAMP_BYTES)) / (share * bandwidth)
    instructions_s = 2 * total * _instructions(args["ops"]) / device.peak_flops("fp32")
    rounds_s = _rounds_s(total, points, processors) if kind == "row" else 0.0
    sums = int(args.get("sums", 0))
    further_s = _STAGE_S * (int(args["kernels"]) - 1 - sums) + _LIBRARY_SUM_S * sums
    return _LAUNCH_S[kind] + max(memory_s, instructions_s, rounds_s) + further_s


def _rounds_s(total: int, points: int, processors: int) -> float:
    """Long rows are read piece by piece; few of them are split until every multiprocessor has some."""
    at_once = _BLOCKS_PER_PROCESSOR * processors
    rows = max(points, at_once)
    length = total / rows
    if length <= _PERSISTENT:
        return 0.0
    return _ROUND_S * math.ceil(length / _ROUND_ELEMENTS) * rows / at_once


def _instructions(names: Sequence[str]) -> float:
    return sum(
        _INSTRUCTIONS.get(name.removesuffix("_"), _USUAL.get(traits(name).kind, _OTHER)) for name in names
    )


def _turns_few_channels(operator: Operator) -> bool:
    """Whether it brings an image of few channels from one layout to the other."""
    if len(operator.inputs) != 1 or len(operator.outputs) != 1:
        return False
    x, y = operator.inputs[0], operator.outputs[0]
    return len(x.shape) == 4 and 1 < x.shape[1] <= _FEW_CHANNELS and x.channels_last != y.channels_last
