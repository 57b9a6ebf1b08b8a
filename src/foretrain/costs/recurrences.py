"""Says how cuDNN runs a recurrence as torch asks it to: in one kernel per layer, or cell by cell.

The rules are those of torch's ``aten/src/ATen/native/cudnn/RNN.cpp``; the counts and times were read off
``data/ops_h200_layers.parquet``.
"""

from __future__ import annotations

from foretrain.costs.base import Call
from foretrain.graph.opset import traits

_LSTM, _GRU = 2, 3
_SMALL_HIDDEN = {  # by whether it is a backward pass, and cells with gates
    (False, True): 192, (False, False): 384, (True, True): 128, (True, False): 256,
}  # fmt: skip
"""The most hidden units with which all weights of a layer stay in a multiprocessor."""


def cells(call: Call) -> int:
    """Steps that must be computed: of each time, layer and direction."""
    return times(call) * layers(call)


def times(call: Call) -> int:
    args, x = call.args, call.inputs[0]
    packed = args.get("batch_sizes")  # of each time step; all steps then lie in one dimension
    return len(packed) if packed else x.shape[1 if args.get("batch_first") else 0]


def layers(call: Call) -> int:
    """Layers, those of both directions apart."""
    return int(call.args["num_layers"]) * (2 if call.args.get("bidirectional") else 1)


def is_persistent(call: Call) -> bool:
    """Whether one kernel goes over all times of a layer, instead of some for each cell."""
    args, x, backward = call.args, call.inputs[0], traits(call.name).backward
    if args.get("proj_size") or args.get("batch_sizes") or x.dtype == "float64":
        return False
    hidden = int(args["hidden_size"])
    if hidden <= _SMALL_HIDDEN[backward, args["mode"] in (_LSTM, _GRU)]:
        return True
    samples = x.shape[0 if args.get("batch_first") else 1]
    aligned = hidden <= 1024 and hidden % 128 == 0 and x.shape[-1] % 128 == 0
    return bool(
        x.dtype == "float16" and layers(call) == 1 and aligned and samples % 8 == 0 and samples <= 128
    )
