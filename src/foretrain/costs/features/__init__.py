"""Describes an operator on a device by its family, its roofline time and what its efficiency depends on."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from foretrain.cluster import Device
from foretrain.costs.base import Call
from foretrain.costs.features.convolutions import (
    BACKWARD,
    SHAPE,
    convolution,
    convolution_backward,
    depthwise,
)
from foretrain.costs.features.products import (
    ATTENTION_COLUMNS,
    PRODUCT_COLUMNS,
    SCALED_COLUMNS,
    attention,
    products,
    scaled_products,
)
from foretrain.costs.features.scene import BALANCE, COMMON, PRODUCT, Scene
from foretrain.costs.features.traffic import (
    LOOKUPS,
    NORMS,
    RECURRENCES,
    TRAFFIC,
    lookups,
    norms,
    recurrence,
    traffic,
)
from foretrain.costs.roofline import arithmetic
from foretrain.costs.serial import serial_s
from foretrain.graph.opset import KINDS, SCALED, Kind, traits

SERIAL = "serial"
"""The family of operators whose work is done in turn (``serial.py``); there are no figures to learn from."""
SCALED_PRODUCT = "scaled product"
"""The family of products in fp8 and fp4."""
STATE_SPACE = "state space"
"""The family of kernels that carry a state along a sequence; none was measured."""
_TRITON_RATE, _TRITON_BANDWIDTH = 0.4, 0.75
"""What they reach of the peak rates: small products with decays in between. With these a chunked scan of
Mamba-2 on an A100 takes as long as FlashAttention-2 (70 % of the peak, Dao 2023) at a sequence of 1,400,
and is faster from 2,048 on (Dao and Gu 2024, figure 10)."""
KERNEL_FLOOR_S = 2e-6
"""About the shortest time that a kernel takes."""


@dataclass(frozen=True, slots=True)
class Described:
    """An operator as the learned models see it."""

    family: str
    ideal_s: float
    """The roofline: the longest of arithmetic, traffic, what must run in turn, and the shortest kernel."""
    figures: list[float]
    """As ``COLUMNS[family]`` names them, without the effect of the operator's name."""
    channels_last: bool = False


def describe(call: Call, device: Device, precision: str) -> Described:
    """The family, the roofline time and the figures of one operator on one device."""
    family = family_of(call, precision)
    scene = Scene(call, device, precision, family)
    traffic_s = scene.cached_s() if family == SCALED_PRODUCT else scene.memory_s
    compute_s = scene.compute_s
    if family == STATE_SPACE:
        compute_s, traffic_s = compute_s / _TRITON_RATE, traffic_s / _TRITON_BANDWIDTH
    ideal_s, in_turn_s = max(compute_s, traffic_s, KERNEL_FLOOR_S), serial_s(call, device)
    if family == "recurrence":
        ideal_s = max(ideal_s, in_turn_s)
    elif in_turn_s > ideal_s:
        return Described(SERIAL, in_turn_s, [])
    channels_last = any(spec.channels_last for spec in call.inputs[:2])
    _, figures = _FAMILIES[family]
    common = scene.common()
    if family in _WITHOUT_BALANCE:
        common = [one for name, one in zip(COMMON, common, strict=True) if name not in BALANCE]
    return Described(family, ideal_s + scene.conversion_s, [*common, *figures(scene)], channels_last)


# Families

_FAMILY_OF: dict[Kind, str] = {
    **dict.fromkeys(KINDS, "pointwise"),
    **dict.fromkeys(("product", "batched product", "grouped product"), "product"),
    "convolution": "convolution",
    "recurrence": "recurrence",
    "attention": "attention",
    "state space": STATE_SPACE,
    **dict.fromkeys(("row norm", "channel norm"), "norm"),
    **dict.fromkeys(("softmax", "row loss", "pixel loss"), "softmax"),
    **dict.fromkeys(("sum", "reduction", "vector norm", "scan", "sort"), "reduction"),
    **dict.fromkeys(("copy", "window", "wait", "routing"), "copy"),
    **dict.fromkeys(("embedding", "gather", "scatter"), "lookup"),
    **dict.fromkeys(("pooling", "resampling", "interpolation"), "pooling"),
}
_SCALED = ("fp8", "fp4")
_WITH_GRADIENTS = ("convolution", "depthwise", "attention", "norm")
"""Families whose backward pass is one of its own."""


def of_rows_alone(args: Mapping[str, Any]) -> bool:
    """Whether the gradient of a norm is that of its rows, not of its weights: one pass over them, as the norm
    itself."""
    mask: list[bool] = args.get("output_mask", [True])
    return len(mask) > 1 and mask[0] and not any(mask[1:])


def family_of(call: Call, precision: str = "") -> str:
    """The family of operators that share a learned model; what is of no other kind counts as pointwise."""
    of = traits(call.name)
    family = "optimizer" if of.multi_tensor else _FAMILY_OF[of.kind]
    if call.name == SCALED or (of.kind == "grouped product" and arithmetic(call, precision) in _SCALED):
        return SCALED_PRODUCT
    if family == "convolution" and 1 < call.args.get("groups", 1) == call.inputs[int(of.backward)].shape[1]:
        family = "depthwise"
    if of.kind == "row norm" and of.backward and of_rows_alone(call.args):
        return family
    return f"{family}_backward" if of.backward and family in _WITH_GRADIENTS else family


# Figures

_WITHOUT_BALANCE = frozenset({SCALED_PRODUCT})
"""Families known of four devices: what a device has of bandwidth would only tell which one it is, and an H100
would be taken for a B200, whose balance is the same."""
_Figures = Callable[[Scene], list[float]]
_FAMILIES: dict[str, tuple[tuple[str, ...], _Figures]] = {
    "product": (PRODUCT_COLUMNS, products),
    SCALED_PRODUCT: (SCALED_COLUMNS, scaled_products),
    "convolution": ((*SHAPE, *PRODUCT), convolution),
    "depthwise": ((*SHAPE, *PRODUCT, "channels_last"), depthwise),
    "convolution_backward": (BACKWARD, convolution_backward),
    "attention": (ATTENTION_COLUMNS, attention),
    "attention_backward": (ATTENTION_COLUMNS, attention),
    **dict.fromkeys(
        "softmax reduction copy pooling optimizer pointwise".split(),
        (TRAFFIC, traffic),
    ),
    STATE_SPACE: (TRAFFIC, traffic),
    "lookup": (LOOKUPS, lookups),
    "recurrence": (RECURRENCES, recurrence),
    "norm": (NORMS, norms),
    "norm_backward": (NORMS, norms),
    "depthwise_backward": ((*BACKWARD, "channels_last"), depthwise),
}
FAMILIES = tuple(_FAMILIES)
COLUMNS: dict[str, tuple[str, ...]] = {
    name: (
        *(one for one in COMMON if name not in _WITHOUT_BALANCE or one not in BALANCE),
        *columns,
        "name_effect",
    )
    for name, (columns, _) in _FAMILIES.items()
}
"""Names of each family's figures; the last is the effect of the operator's name, which the fit learns."""
