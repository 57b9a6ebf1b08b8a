"""Costs operators on CPU cores: the roofline of one core times a factor by family, and a time per call."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from foretrain.cluster import Device
from foretrain.costs.base import Column
from foretrain.costs.roofline import Roofline
from foretrain.graph import Operator
from foretrain.graph.opset import NORMS, traits

_FACTORS = {
    "convolution": 1.4,
    "depthwise": 96.0,
    "norm": 127.0,
    "optimizer": 99.0,
    "product": 1.3,
    "traffic": 83.0,
}
"""On the roofline, whose memory rate is that of all cores together. These and the figures below are fitted
to the steps of ``data/cpu16_campaign.jsonl.zst`` (products, which are few there, apart)."""
_CALL_S = 107e-6
"""Of each call: Python and the dispatcher."""
_SEVERAL = 1.4
"""How much faster a worker of several cores is beside their number: the threads of autograd and of the
network have cores of their own."""
_CROWDED = 0.025
"""What each further busy core of the machine adds to all times, as they share its memory."""
_ONE_CORE = Roofline(kernel_floor_s=0.0)


def cpu_time_s(operators: Sequence[Operator], device: Device, precision: str) -> Column:
    """Seconds of each operator."""
    work = _ONE_CORE.device_time_s(operators, device, precision)
    factors = np.array([_FACTORS[_family(operator)] for operator in operators])
    launches = np.array([operator.launches for operator in operators], dtype=np.float64)
    # the factors on traffic are of one core
    shared = np.array([1.0 if operator.flops else device.cores for operator in operators])
    times = work * factors / shared + _CALL_S * launches
    return np.asarray(times / (_SEVERAL if device.cores > 1 else 1.0))


def crowding(busy_cores: float) -> float:
    """The factor on all times when so many cores of a machine work at once."""
    return 1.0 + _CROWDED * (busy_cores - 1)


def _family(operator: Operator) -> str:
    of = traits(operator.name)
    if of.kind == "convolution":
        shape = weight.shape if (weight := operator.tensor("weight")) is not None else ()
        return "depthwise" if len(shape) > 2 and shape[1] == 1 < shape[0] else "convolution"
    if operator.flops:
        return "product"
    if of.kind in NORMS:
        return "norm"
    return "optimizer" if of.multi_tensor else "traffic"
