"""Times operators that leave most of the device idle, as one step of their work must wait for another.

The constants are latencies of dependent loads and of small kernels, read off ``data/ops_h200.parquet``; they
differ little between devices.
"""

from __future__ import annotations

import math

from foretrain.cluster import Device
from foretrain.costs import recurrences
from foretrain.costs.base import Call
from foretrain.graph.opset import traits

_PLANE_S = 0.3e-6
"""Of bilinear upsampling, for each channel of each sample: a thread per output pixel walks all of them."""
_THREADS_PER_SM = 2048
_SCATTER_S = 60e-6
"""Of adding at indices: sorting them, and a few small kernels."""
_EQUAL_INDEX_S = 0.19e-6
"""For each index, as equal ones are summed in turn, where a row is one element wide."""
_RECURRENT_STEP_S = {False: 4e-6, True: 8e-6}
"""Of each time step, layer and direction of cuDNN's recurrences, forward and backward."""
_RECURRENT_SHARE = 0.5
"""Of the fp32 rate: recurrences run on few multiprocessors."""

_SUPPRESSED_BOX_S = 0.2e-6
"""Of each box of a non-maximum suppression, which waits for those that score better: as ``_EQUAL_INDEX_S``, a
dependent load; not measured."""


def serial_s(call: Call, device: Device) -> float:
    """Seconds that work in turn takes at the least; 0 for all other operators."""
    name, of = call.name.removesuffix("_"), traits(call.name)
    if name == "upsample_bilinear2d" and not call.inputs[0].channels_last:
        return _bilinear_s(call, device)
    if name == "index_put" and call.args.get("accumulate"):
        return _scatter_s(call)
    if name == "torchvision.nms":
        return _SUPPRESSED_BOX_S * call.inputs[0].shape[0]
    if of.kind == "recurrence":
        latency_s = _RECURRENT_STEP_S[of.backward] * recurrences.cells(call)
        return latency_s + call.flops / (_RECURRENT_SHARE * device.peak_flops("fp32"))
    return 0.0


def _bilinear_s(call: Call, device: Device) -> float:
    samples, channels, *image = call.inputs[0].shape
    pixels = math.prod(call.args.get("output_size") or image)
    waves = pixels / (_THREADS_PER_SM * (device.sms or 100))
    return _PLANE_S * samples * channels * max(1.0, waves)


def _scatter_s(call: Call) -> float:
    indices = max((spec.numel for spec in call.inputs if spec.dtype == "int64"), default=0)
    columns: int = max(1, call.inputs[-1].numel // max(1, indices))
    return _SCATTER_S + _EQUAL_INDEX_S * indices / columns
