"""Times operators that leave most of the device idle, as one step of their work must wait for another.

The constants are latencies of dependent loads and of small kernels, read off ``data/ops_h200.parquet`` and
``data/ops_h200_layers.parquet``; they differ little between devices.
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
"""For each of the indices that are equal, as they are summed in turn."""
_RECURRENT = {
    (False, False): (4.8e-6, 6e-6, 1.4),
    (True, False): (6e-6, 17e-6, 0.6),
    (False, True): (0.36e-6, 9e-6, 0.18),
    (True, True): (0.63e-6, 23e-6, 0.12),
}
"""Seconds of a cell and a layer of cuDNN's recurrences, and the share of the device's fp32 rate at which they
compute, by whether the pass is backward and one kernel goes over all cells; least squares over
``data/ops_h200_layers.parquet``, within 20 to 40 %."""
_BICUBIC_S = {False: 0.5e-6, True: 2.3e-6}
"""As ``_PLANE_S``, of bicubic upsampling and its gradient, which is added up."""
_HALF_ADDED = 8.0
"""How much longer numbers of two bytes take to be added up, by comparing and swapping."""
_LABELLED_S = {False: 0.6e-6, True: 1.3e-6}
"""Of each time step of a CTC loss and its gradient, which goes over them once more."""
_POOLED_S = {"adaptive_max_pool2d": 0.12e-6, "_adaptive_avg_pool2d": 2e-6}
"""Of each element of a region, which one thread goes over; of averages in channels-last layout alone."""

_SUPPRESSION_S = 24e-6
"""Of a non-maximum suppression: sorting the boxes, and a few small kernels."""
_SUPPRESSED_BOX_S = 0.35e-6
"""Of each of its boxes, which waits for those that score better."""


def serial_s(call: Call, device: Device) -> float:
    """Seconds that work in turn takes at the least; 0 for all other operators."""
    name, of = call.name.removesuffix("_"), traits(call.name)
    if name == "upsample_bilinear2d" and not call.inputs[0].channels_last:
        return _bilinear_s(call, device)
    if name == "index_put" and call.args.get("accumulate"):
        return _scatter_s(call)
    if name == "torchvision.nms":
        return _SUPPRESSION_S + _SUPPRESSED_BOX_S * call.inputs[0].shape[0]
    if name.removesuffix("_backward") == "upsample_bicubic2d":
        half = _HALF_ADDED if of.backward and call.inputs[0].dtype != "float32" else 1.0
        samples, channels = call.inputs[0].shape[:2]
        return float(_BICUBIC_S[of.backward] * half * samples * channels)
    if name in _POOLED_S and (name == "adaptive_max_pool2d" or call.inputs[0].channels_last):
        sides, kept = call.inputs[0].shape[2:], call.args.get("output_size") or ()
        region = math.prod(math.ceil(side / max(1, left)) for side, left in zip(sides, kept, strict=False))
        return _POOLED_S[name] * float(region)
    if name.startswith("_ctc_loss"):
        return _LABELLED_S[of.backward] * call.inputs[int(of.backward)].shape[0]
    if of.kind == "recurrence":
        cell_s, layer_s, share = _RECURRENT[of.backward, recurrences.is_persistent(call)]
        computing_s = call.flops / (share * device.peak_flops("fp32"))
        return cell_s * recurrences.cells(call) + layer_s * recurrences.layers(call) + computing_s
    return 0.0


def _bilinear_s(call: Call, device: Device) -> float:
    samples, channels, *image = call.inputs[0].shape
    pixels = math.prod(call.args.get("output_size") or image)
    waves = pixels / (_THREADS_PER_SM * device.processors)
    return _PLANE_S * samples * channels * max(1.0, waves)


def _scatter_s(call: Call) -> float:
    """Time a scatter as if every row were met as often."""
    indices = max((spec.numel for spec in call.inputs[1:] if spec.dtype == "int64"), default=0)
    places = call.args.get("indices") or [None]
    sizes = [size for size, place in zip(call.inputs[0].shape, places, strict=False) if place is not None]
    return _SCATTER_S + _EQUAL_INDEX_S * indices / max(1, math.prod(sizes or call.inputs[0].shape[:1]))
