"""Puts one operator on one device: the quantities that figures of several families share."""

from __future__ import annotations

import math

from foretrain.cluster import Device
from foretrain.costs.base import Call
from foretrain.costs.features.sizes import convolution_sizes
from foretrain.costs.roofline import arithmetic
from foretrain.graph import ITEM_BYTES
from foretrain.graph.opset import traits

_LOG_OF_NOTHING = -20.0
LEAST_S = 1e-10
"""Shorter times of arithmetic or memory count as this, so that they have a logarithm."""
_MICROSECOND = 1e-6
_USUAL_L2_BYTES = 4 << 20
"""Of a device whose L2 cache is not known (assumed)."""


def log(value: float) -> float:
    return math.log2(value) if value > 0 else _LOG_OF_NOTHING


def log_us(time_s: float) -> float:
    """Take the logarithm of a time in microseconds."""
    return log(max(time_s, LEAST_S) / _MICROSECOND)


def alignment(value: int) -> float:
    """The power of two, up to 64, that divides a size."""
    return float(min((value & -value).bit_length() - 1, 6)) if value else 6.0


def _touched_bytes(call: Call) -> int:
    """The traffic; of a loss that picks a class from each row, only what is picked."""
    of = traits(call.name)
    if of.kind == "row loss" and not of.backward and len(call.inputs) > 1:
        rows: int = call.inputs[1].numel
        return min(call.bytes, rows * _SECTOR_BYTES)
    if call.name.startswith("_embedding_bag") and len(call.inputs) > 1:  # a row for each index, not bag
        table, indices = call.inputs[:2]
        return call.bytes + indices.numel * table.shape[-1] * ITEM_BYTES[table.dtype]
    return call.bytes


_SECTOR_BYTES = 64
"""Least traffic for one element that lies alone, and its index."""


class Scene:
    """One operator on one device, with the quantities that several figures share."""

    def __init__(self, call: Call, device: Device, precision: str, family: str) -> None:
        self.call, self.device = call, device
        self.kind = "fp32" if family.startswith("depthwise") else arithmetic(call, precision)
        if self.kind != "fp32" and device.peak_flops(self.kind) == device.peak_flops("fp32"):
            self.kind = "fp32"
        self.peak = device.peak_flops(self.kind) * device.sustained
        self.bandwidth = device.memory_bytes_per_s * device.sustained_memory
        self.sms = float(device.processors)
        self.compute_s = call.flops / self.peak
        self.bytes = _touched_bytes(call)
        self.memory_s = self.bytes / self.bandwidth
        self.item = ITEM_BYTES[call.inputs[0].dtype] if call.inputs else 4
        self.convolution = convolution_sizes(call) if traits(call.name).kind == "convolution" else None
        self.conversion_s = 0.0
        if (conv := self.convolution) is not None:
            on_units = family.startswith("convolution") and self.kind != "fp32"
            converted = conv.convertible if on_units and not conv.channels_last else 0
            for elements in (converted, conv.repacked, conv.added):
                self.conversion_s += 2 * elements * self.item / self.bandwidth

    def cached_s(self) -> float:
        """The traffic where operands lie in the L2 cache as far as they fit, as those of published products
        do, which were timed again and again."""
        cached = min(self.call.bytes, _L2_SHARE * (self.device.l2_bytes or 0.0))
        from_l2 = self.sms * (self.device.clock_hz or 0.0) * _L2_BYTES_PER_CLOCK
        return (self.call.bytes - cached) / self.bandwidth + cached / max(self.bandwidth, from_l2)

    def common(self) -> list[float]:
        device = self.device
        return [
            log_us(self.compute_s),
            log_us(self.memory_s),
            log(max(self.compute_s, LEAST_S) / max(self.memory_s, LEAST_S)),
            log(max(self.bytes, 1) / (device.l2_bytes or _USUAL_L2_BYTES)),
            float(self.item),
            _KINDS.get(self.kind, 0.0),
            log(self.peak / self.bandwidth),
            log(self.bandwidth / self.sms / 1e9),
            log(self.sms),
            float(device.capability or 0.0),
            float(bool(self.call.inputs) and self.call.inputs[0].dtype == "float16"),
        ]

    def waves(self, rows: int, columns: int, batch: int, tile: tuple[int, int]) -> tuple[float, float]:
        """Count how often a product's tiles fill the device, and how full the last wave and tiles are."""
        tiles = max(1, batch * math.ceil(rows / tile[0]) * math.ceil(columns / tile[1]))
        waves = tiles / self.sms
        used = rows * columns * batch / (tiles * tile[0] * tile[1])
        return waves, used * waves / math.ceil(waves)

    def product(self, m: int, n: int, k: int, batch: int) -> list[float]:
        """A matrix product of these sizes, by tiles of three sizes."""
        sizes = (m, n, k, batch, min(m, n), k * k / max(1, m * n))
        tiled = [self.waves(m, n, batch, tile) for tile in ((64, 64), (128, 128), (256, 128))]
        return [*map(log, sizes), *(figure for waves, fill in tiled for figure in (log(waves), fill))]


_L2_SHARE, _L2_BYTES_PER_CLOCK = 0.6, 24.0
"""Of the L2 cache that operands find, and what a multiprocessor reads from it: about 6 TB/s on an H100."""
_KINDS = {"fp64": -1.0, "fp32": 0.0, "tf32": 1.0, "bf16": 2.0, "fp16": 2.0, "fp8": 3.0, "fp4": 4.0}
COMMON = tuple("compute memory balance l2 item kind ridge bandwidth_per_sm sms capability fp16".split())
"""Names of the figures that operators of all families have."""
BALANCE = ("ridge", "bandwidth_per_sm")
"""Those of them that tell devices apart by their bandwidth."""
PRODUCT = tuple("m n k batch least depth waves64 fill64 waves128 fill128 waves256 fill256".split())
