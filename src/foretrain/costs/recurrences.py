"""Says how cuDNN runs a recurrence as torch asks it to: in few kernels per layer, or cell by cell.

The rules are those of torch (``aten/src/ATen/native/cudnn/RNN.cpp``); counts and times are least squares over
the 418 recurrences of ``data/ops_h200_layers.parquet``, counts within 20 % and times within 30 % in the mean.
"""

from __future__ import annotations

from foretrain.costs.base import Call
from foretrain.graph.opset import traits

_GATED = (2, 3)
"""cuDNN's numbers of LSTM and GRU."""
_SMALL = {(False, True): 192, (False, False): 384, (True, True): 128, (True, False): 256}
"""The most hidden units with which a layer's weights stay in a multiprocessor, by whether the pass is
backward and the cells have gates."""
_PER_CELL = {False: 2.2, True: 2.7}
"""Kernels of a cell, forward and backward: a product, the gates, and where a product is split a fill."""
_PER_LAYER = {(False, False): 1.0, (True, False): 8.0, (False, True): 2.8, (True, True): 9.2}
"""Kernels of a layer beside its cells, by whether the pass is backward and one kernel goes over all cells."""
_REPACKED = 6.0
"""Kernels of a layer that bring bf16 weights together, which torch does not keep in one piece."""
_KERNEL_S = 11e-6
_CALL_S = {False: 140e-6, True: 450e-6}
_LAYER_S = {False: 10e-6, True: 290e-6}
"""What the host takes to issue a kernel, and beside its kernels a call and a layer, forward and backward."""


def times(call: Call) -> int:
    """Steps of the sequence."""
    args, x = call.args, call.inputs[0]
    packed = args.get("batch_sizes")  # of each time step; all steps then lie in one dimension
    steps: int = len(packed) if packed else x.shape[1 if args.get("batch_first") else 0]
    return steps


def layers(call: Call) -> int:
    """Layers, those of both directions apart."""
    return int(call.args["num_layers"]) * (2 if call.args.get("bidirectional") else 1)


def cells(call: Call) -> int:
    """Count the cells: one for each time, layer and direction."""
    return times(call) * layers(call)


def is_persistent(call: Call) -> bool:
    """Whether one kernel goes over all times of a layer, as torch asks for where its weights fit."""
    args, dtype = call.args, call.inputs[0].dtype
    if args.get("proj_size") or args.get("batch_sizes") or dtype not in ("float16", "float32"):
        return False
    small = _SMALL[traits(call.name).backward, args.get("mode") in _GATED]
    return int(args["hidden_size"]) <= small


def kernels(call: Call) -> int:
    """Count the kernels that one call launches."""
    backward, persistent = traits(call.name).backward, is_persistent(call)
    count = _PER_LAYER[backward, persistent] * layers(call)
    if not persistent:
        count += _PER_CELL[backward] * cells(call)
    if call.inputs[0].dtype == "bfloat16" and not backward:
        count += _REPACKED * layers(call)
    return max(1, round(count))


def issue_s(call: Call) -> float:
    """Seconds that the host takes to issue one call."""
    backward = traits(call.name).backward
    return _CALL_S[backward] + _LAYER_S[backward] * layers(call) + _KERNEL_S * kernels(call)
