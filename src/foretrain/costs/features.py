"""Describes an operator on a device by its family, its roofline time and what its efficiency depends on."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from foretrain.cluster import Device
from foretrain.costs import recurrences
from foretrain.costs.base import Call
from foretrain.costs.roofline import SCALED, arithmetic
from foretrain.costs.serial import serial_s
from foretrain.graph import ITEM_BYTES, TensorSpec
from foretrain.graph.ir import PACKED
from foretrain.graph.opset import KINDS, Kind, traits

SERIAL = "serial"
"""The family of operators whose work is done in turn (``serial.py``); there are no figures to learn from."""
SCALED_PRODUCT = "scaled product"
"""The family of products in fp8 and fp4."""
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
    family = family_of(call)
    scene = _Scene(call, device, precision, family)
    traffic_s = scene.cached_s() if family == SCALED_PRODUCT else scene.memory_s
    ideal_s, in_turn_s = max(scene.compute_s, traffic_s, KERNEL_FLOOR_S), serial_s(call, device)
    if family == "recurrence":
        ideal_s = max(ideal_s, in_turn_s)
    elif in_turn_s > ideal_s:
        return Described(SERIAL, in_turn_s, [])
    channels_last = any(spec.channels_last for spec in call.inputs[:2])
    _, figures = _FAMILIES[family]
    common = scene.common()
    if family in _WITHOUT_BALANCE:
        common = [one for name, one in zip(_COMMON, common, strict=True) if name not in _BALANCE]
    return Described(family, ideal_s + scene.conversion_s, [*common, *figures(scene)], channels_last)


# Families

_FAMILY_OF: dict[Kind, str] = {
    **dict.fromkeys(KINDS, "pointwise"),
    **dict.fromkeys(("product", "batched product"), "product"),
    "convolution": "convolution",
    "recurrence": "recurrence",
    "attention": "attention",
    **dict.fromkeys(("row norm", "channel norm"), "norm"),
    **dict.fromkeys(("softmax", "row loss", "pixel loss"), "softmax"),
    **dict.fromkeys(("sum", "reduction", "vector norm", "scan", "sort"), "reduction"),
    **dict.fromkeys(("copy", "window", "wait"), "copy"),
    **dict.fromkeys(("embedding", "gather", "scatter"), "lookup"),
    **dict.fromkeys(("pooling", "resampling", "interpolation"), "pooling"),
}
_WITH_GRADIENTS = ("convolution", "depthwise", "attention", "norm")
"""Families whose backward pass is one of its own."""


def family_of(call: Call) -> str:
    """The family of operators that share a learned model; what is of no other kind counts as pointwise."""
    of = traits(call.name)
    family = "optimizer" if of.multi_tensor else _FAMILY_OF[of.kind]
    if call.name == SCALED:
        return SCALED_PRODUCT
    if family == "convolution" and 1 < call.args.get("groups", 1) == call.inputs[int(of.backward)].shape[1]:
        family = "depthwise"
    return f"{family}_backward" if of.backward and family in _WITH_GRADIENTS else family


# Figures


def _log(value: float) -> float:
    return math.log2(value) if value > 0 else -20.0


def _alignment(value: int) -> float:
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


class _Scene:
    """One operator on one device, with the quantities that several figures share."""

    def __init__(self, call: Call, device: Device, precision: str, family: str) -> None:
        self.call, self.device = call, device
        self.kind = "fp32" if family.startswith("depthwise") else arithmetic(call, precision)
        if self.kind != "fp32" and device.peak_flops(self.kind) == device.peak_flops("fp32"):
            self.kind = "fp32"
        self.peak = device.peak_flops(self.kind) * device.sustained
        self.bandwidth = device.memory_bytes_per_s * device.sustained_memory
        self.sms = float(device.sms or 100)
        self.compute_s = call.flops / self.peak
        self.bytes = _touched_bytes(call)
        self.memory_s = self.bytes / self.bandwidth
        self.item = ITEM_BYTES[call.inputs[0].dtype] if call.inputs else 4
        self.convolution = _sizes(call) if traits(call.name).kind == "convolution" else None
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
        device, compute_s, memory_s = self.device, max(self.compute_s, 1e-10), max(self.memory_s, 1e-10)
        return [
            _log(compute_s / 1e-6),
            _log(memory_s / 1e-6),
            _log(compute_s / memory_s),
            _log(max(self.bytes, 1) / (device.l2_bytes or 4 << 20)),
            float(self.item),
            _KINDS.get(self.kind, 0.0),
            _log(self.peak / self.bandwidth),
            _log(self.bandwidth / self.sms / 1e9),
            _log(self.sms),
            float(device.capability or 0.0),
            float(bool(self.call.inputs) and self.call.inputs[0].dtype == "float16"),
        ]

    def waves(self, rows: int, columns: int, batch: int, tile: tuple[int, int]) -> tuple[float, float]:
        """How often a product's tiles fill the device, and how full the last wave and tiles are."""
        tiles = max(1, batch * math.ceil(rows / tile[0]) * math.ceil(columns / tile[1]))
        waves = tiles / self.sms
        used = rows * columns * batch / (tiles * tile[0] * tile[1])
        return waves, used * waves / math.ceil(waves)

    def product(self, m: int, n: int, k: int, batch: int) -> list[float]:
        """A matrix product of these sizes, by tiles of three sizes."""
        sizes = (m, n, k, batch, min(m, n), k * k / max(1, m * n))
        tiled = [self.waves(m, n, batch, tile) for tile in ((64, 64), (128, 128), (256, 128))]
        return [*map(_log, sizes), *(figure for waves, fill in tiled for figure in (_log(waves), fill))]


_L2_SHARE, _L2_BYTES_PER_CLOCK = 0.6, 24.0
"""Of the L2 cache that operands find, and what a multiprocessor reads from it: about 6 TB/s on an H100."""
_KINDS = {"fp64": -1.0, "fp32": 0.0, "tf32": 1.0, "bf16": 2.0, "fp16": 2.0, "fp8": 3.0, "fp4": 4.0}
_COMMON = tuple("compute memory balance l2 item kind ridge bandwidth_per_sm sms capability fp16".split())
_WITHOUT_BALANCE = frozenset({SCALED_PRODUCT})
"""Families known of four devices: what a device has of bandwidth would only tell which one it is, and an H100
would be taken for a B200, whose balance is the same."""

_BALANCE = ("ridge", "bandwidth_per_sm")
_PRODUCT = tuple("m n k batch least depth waves64 fill64 waves128 fill128 waves256 fill256".split())


def _transposed(spec: TensorSpec) -> bool:
    return spec.strides is not None and len(spec.shape) >= 2 and spec.strides[-2] == 1 and spec.shape[-2] > 1


def _products(scene: _Scene) -> list[float]:
    """mm, addmm, bmm, baddbmm: the last two inputs are the matrices."""
    inputs = scene.call.inputs
    a, b = inputs[-2], inputs[-1]
    batched = len(a.shape) == 3
    m, k, n = a.shape[-2], a.shape[-1], b.shape[-1]
    marks = (_transposed(a), _transposed(b), len(inputs) > 2, batched)
    return [
        *scene.product(m, n, k, a.shape[0] if batched else 1),
        *map(float, marks),
        *map(_alignment, (m, n, k)),
    ]


_PRODUCT_COLUMNS = (*_PRODUCT, *"transposed_a transposed_b bias batched align_m align_n align_k".split())


def _scaled_products(scene: _Scene) -> list[float]:
    """_scaled_mm: two matrices in fp8 or fp4, then their scales."""
    call = scene.call
    a, b = call.inputs[:2]
    m, k, n = a.shape[0], b.shape[0] * (2 if b.dtype == PACKED else 1), b.shape[1]
    cached_s = max(scene.cached_s(), 1e-10)
    return [
        *scene.product(m, n, k, 1),
        _log(cached_s / 1e-6),
        _log(max(scene.compute_s, 1e-10) / cached_s),
        *map(_alignment, (m, n, k)),
        _scaling(call),
        float(ITEM_BYTES[a.dtype] > 1),
        float(bool(call.args.get("use_fast_accum"))),
        float(_LIBRARIES.index(call.args.get("library", "cublas"))),
    ]


def _scaling(call: Call) -> float:
    """How finely a product is scaled: by tensor, by row, by 128 numbers, by 32 or 16."""
    a, scale = call.inputs[0], call.inputs[2] if len(call.inputs) > 2 else None
    if scale is None or scale.numel <= 1:
        return 1.0
    if scale.numel <= a.shape[0]:
        return 2.0
    return 3.0 if scale.numel * 32 < a.numel else 4.0


_LIBRARIES = ("cublas", "cutlass", "deepgemm", "cutedsl")
"""Whose kernel a scaled product is: in ``args`` where it is not torch's own."""
_SCALED_COLUMNS = (
    *_PRODUCT,
    *"cached cached_balance align_m align_n align_k scaling casts fast library".split(),
)


@dataclass(frozen=True, slots=True)
class _Convolution:
    """The sizes of a convolution; ``c`` and ``k`` are the channels of one group."""

    n: int
    c: int
    k: int
    groups: int
    inside: int
    outside: int
    window: int
    stride: int
    rank: int
    """Dimensions of an image, a video or a signal."""
    transposed: bool
    channels_last: bool
    dilated: bool
    gradients: int
    biased: bool
    """A bias is added in a kernel of its own."""
    repacked: int
    """Elements of operands that are copied first, as they have gaps or another layout than the result."""

    @property
    def moved(self) -> tuple[int, int, int]:
        """Elements of the input, the output and the weight."""
        n, groups = self.n, self.groups
        return (
            n * groups * self.c * self.inside,
            n * groups * self.k * self.outside,
            groups * self.c * self.k * self.window,
        )

    @property
    def plain_product(self) -> bool:
        return self.window == 1 and self.stride == 1

    @property
    def own_kernels(self) -> bool:
        """Whether either layout has kernels of its own, on every device."""
        return self.plain_product or self.groups > 1 or self.rank != 2

    @property
    def added(self) -> int:
        """Elements that a kernel of its own reads and writes again: where a bias is added, and the gradient
        of the weight that each sample has, as numbers of twice the width."""
        whole = self.n * self.groups * self.k * self.outside if self.biased else 0
        by_sample = self.plain_product and self.gradients and not self.channels_last
        return whole + (2 * self.n * self.groups * self.c * self.k if by_sample else 0)

    @property
    def convertible(self) -> int:
        """Elements that cuDNN brings to NHWC for its matrix units, where they are in NCHW.

        A 1x1 convolution is a plain product of each sample and needs no conversion.
        """
        if self.plain_product or self.c * self.groups < 4:
            return 0
        return sum(self.moved) * max(1, self.gradients)


def _sizes(call: Call) -> _Convolution:
    backward = traits(call.name).backward
    x, weight = call.inputs[int(backward)], call.inputs[1 + int(backward)]
    args = call.args
    groups: int = args.get("groups", 1)
    window = weight.shape[2:]
    strides, pads, dilations = (_each(args, name, x) for name in ("stride", "padding", "dilation"))
    if backward:
        outside = call.inputs[0].shape[2:]
    else:
        outside = tuple(
            max(1, (size + 2 * pad - dilation * (kernel - 1) - 1) // stride + 1)
            for size, kernel, stride, pad, dilation in zip(
                x.shape[2:], window, strides, pads, dilations, strict=True
            )
        )
    channels, filters = weight.shape[1] * groups, weight.shape[0]
    channels_last = x.channels_last or weight.channels_last
    if args.get("transposed"):
        channels, filters, outside = weight.shape[0], weight.shape[1] * groups, x.shape[2:]
    operands = call.inputs[: 2 + int(backward)]
    return _Convolution(
        n=x.shape[0],
        c=max(1, channels // groups),
        k=max(1, filters // groups),
        groups=groups,
        inside=max(1, math.prod(x.shape[2:])),
        outside=max(1, math.prod(outside)),
        window=math.prod(window),
        stride=max(strides),
        rank=len(window),
        transposed=bool(args.get("transposed")),
        channels_last=channels_last,
        dilated=max(dilations) > 1,
        gradients=sum(args["output_mask"][:2]) if backward else 0,
        biased=not backward and isinstance(args.get("bias"), str),
        repacked=sum(spec.numel for spec in operands if not _in_layout(spec, channels_last)),
    )


def _in_layout(spec: TensorSpec, channels_last: bool) -> bool:
    """Without gaps, and in the layout where there is a choice: one channel or one pixel is in both."""
    either = len(spec.shape) < 4 or spec.shape[1] == 1 or math.prod(spec.shape[2:]) == 1
    return _dense(spec) and (either or spec.channels_last == channels_last)


def _each(args: Mapping[str, Any], name: str, x: TensorSpec) -> Sequence[int]:
    """A value per dimension; torch repeats a single one."""
    values: list[int] = args.get(name) or [0 if name == "padding" else 1]
    return values * (len(x.shape) - 2) if len(values) == 1 else values


def _shape(scene: _Scene, conv: _Convolution) -> list[float]:
    """Sizes, layout, and how long each operand takes to be moved.

    A 1x1 convolution is one product over all samples where the channels lie side by side, else one for each,
    and groups and videos have kernels of their own in either layout.
    """
    per_us = scene.bandwidth / scene.item * 1e-6
    return [
        *(_log(elements / per_us) for elements in conv.moved),
        _log(1 + conv.convertible / per_us),
        *map(_log, (conv.c, conv.k, conv.groups, conv.inside, conv.window)),
        float(conv.stride),
        float(conv.dilated),
        *map(_alignment, (conv.c, conv.k, conv.inside)),
        _log(1 + conv.repacked / per_us),
        _log(1 + conv.added / per_us),
        _log(max(scene.compute_s, scene.memory_s) / conv.groups / 1e-6),
        _log(conv.n),
        float(conv.channels_last and conv.own_kernels),
        float(conv.channels_last and not conv.own_kernels),
        float(conv.rank),
        _log(conv.k / conv.c),
        float(conv.transposed),
    ]


_SHAPE = tuple(
    "input_us output_us weight_us convertible_us channels filters groups inside window stride dilated "
    "align_channels align_filters align_inside repacked_us added_us group_us samples "
    "last dense_last rank widening transposed".split()
)
ONE_DEVICE = frozenset({"dense_last"})
"""Figures that hold on the device alone that they were measured on: what dense convolutions gain in NHWC is
another thing on each generation."""


def _convolution(scene: _Scene) -> list[float]:
    conv = scene.convolution
    assert conv is not None
    return [
        *_shape(scene, conv),
        *scene.product(conv.n * conv.outside, conv.k, conv.c * conv.window, conv.groups),
    ]


def _convolution_backward(scene: _Scene) -> list[float]:
    conv = scene.convolution
    assert conv is not None
    mask: list[bool] = scene.call.args["output_mask"]
    return [
        *_shape(scene, conv),
        *(float(wanted) for wanted in mask),
        *scene.product(conv.n * conv.inside, conv.c, conv.k * conv.window, conv.groups),
        *scene.product(conv.k, conv.c * conv.window, conv.n * conv.outside, conv.groups),
    ]


_BACKWARD = (
    *_SHAPE,
    *("to_input", "to_weight", "to_bias"),
    *(f"input_{name}" for name in _PRODUCT),
    *(f"weight_{name}" for name in _PRODUCT),
)


def _depthwise(scene: _Scene) -> list[float]:
    """With the layout: the kernels of either have nothing in common."""
    conv = scene.convolution
    assert conv is not None
    return [
        *(_convolution_backward if traits(scene.call.name).backward else _convolution)(scene),
        float(conv.channels_last),
    ]


def _attention(scene: _Scene) -> list[float]:
    call, of = scene.call, traits(scene.call.name)
    first = int(of.backward)
    query, key = call.inputs[first], call.inputs[first + 1]
    batch, heads, rows, width = query.shape[0], query.shape[1], query.shape[-2], query.shape[-1]
    waves, fill = scene.waves(rows, 128, batch * heads, (128, 128))
    return [
        *map(_log, (batch * heads, rows, key.shape[-2], width, heads / key.shape[1])),
        _alignment(width),
        float(bool(call.args.get("is_causal"))),
        float(call.args.get("attn_bias") is not None),
        float(of.library == "efficient"),
        float(of.library == "cudnn"),
        _log(waves),
        fill,
        float(query.strides is not None),
        float(bool(call.args.get("dropout_p"))),
    ]


_ATTENTION = tuple(
    "heads rows keys width shared_heads align_width causal biased efficient cudnn waves fill strided "
    "dropout".split()
)


def _traffic(scene: _Scene) -> list[float]:
    """Operators that move bytes: how many, in what layout, and over which part of the shape they work."""
    call = scene.call
    if not call.inputs:
        return [_log(call.bytes), *[0.0] * (len(_TRAFFIC) - 1)]
    big = max(call.inputs[:8], key=lambda spec: spec.numel)
    numel = max(1, big.numel)
    written = max(call.bytes - sum(spec.size_bytes for spec in call.inputs), 1)
    dims = call.args.get("dim", call.args.get("normalized_shape"))
    fastest = _fastest(big)
    inner, reduced = _reduction(big, dims, fastest)
    window = call.args.get("kernel_size") or [1]
    return [
        _log(numel / (scene.sms * 2048)),
        _log(written / scene.item / numel),
        float(min(len(call.inputs), 6)),
        _log(len(call.inputs)),
        float(sum(not _dense(spec) for spec in call.inputs[:3])),
        float(_relayouts(call, big)),
        float(any(spec.strides is not None and 0 in spec.strides for spec in call.inputs[:3])),
        float(len({spec.dtype for spec in call.inputs[:4]}) > 1 or _casts(call)),
        _log(call.bytes / numel),
        float(len(big.shape)),
        _log(big.shape[fastest] if big.shape else 1),
        _log(math.prod(big.shape[2:]) if len(big.shape) > 2 else 1),
        _log(big.shape[1] if len(big.shape) > 1 else 1),
        _log(big.shape[0] if big.shape else 1),
        inner,
        _log(reduced),
        _log(numel / reduced / scene.sms),
        _log(_run(big)),
        _log(math.prod(window)),
        _alignment(big.shape[fastest] if big.shape else 1),
        float(big.channels_last),
    ]


_TRAFFIC = tuple(
    "width written inputs log_inputs strided relayout expanded mixed bytes_per_element rank fastest inside "
    "second first inner reduced kept_per_sm run window align_fastest channels_last".split()
)


def _recurrences(scene: _Scene) -> list[float]:
    call, args, x = scene.call, scene.call.args, scene.call.inputs[0]
    packed = args.get("batch_sizes") or ()
    samples = packed[0] if packed else x.shape[0 if args.get("batch_first") else 1]
    sizes = (recurrences.times(call), recurrences.layers(call), samples, args["hidden_size"], x.shape[-1])
    return [
        *map(_log, sizes),
        float(args.get("mode", 0)),
        float(bool(args.get("bidirectional"))),
        float(bool(packed)),
        float(recurrences.is_persistent(call)),
        float(traits(call.name).backward),
    ]


_RECURRENCES = tuple("times layers samples hidden width mode both packed persistent backward".split())


def _lookups(scene: _Scene) -> list[float]:
    """With how many rows are looked up, and how wide one is: a block of threads for each."""
    indices = max((spec.numel for spec in scene.call.inputs if spec.dtype in ("int64", "int32")), default=1)
    table = scene.call.inputs[0].shape if scene.call.inputs else ()
    return [
        *_traffic(scene),
        _log(indices / scene.sms),
        _log(table[-1] if table else 1),
        _log(table[0] if table else 1),
    ]


_LOOKUPS = (*_TRAFFIC, *"indices row_width rows".split())


def _norms(scene: _Scene) -> list[float]:
    """Rows that are brought to mean 0 each: of a channel, a group of them, or the last dimensions."""
    args, of = scene.call.args, traits(scene.call.name)
    x = max(scene.call.inputs, key=lambda spec: spec.numel, default=TensorSpec((1,), "float32"))
    if of.kind == "row norm":
        rows = x.numel // max(1, math.prod(args.get("normalized_shape") or x.shape[-1:]))
    elif "group" in args:
        rows = int(args["N"]) * int(args["group"])
    else:
        rows = x.shape[1] if len(x.shape) > 1 else x.numel
    return [
        *_traffic(scene),
        _log(x.numel / max(1, rows)),
        _log(rows / scene.sms),
        float(args.get("training", args.get("train", True)) is False),
        float(sum(args.get("output_mask") or ())),
    ]


_NORMS = (*_TRAFFIC, *"row rows_per_sm inference gradients".split())


def _dense(spec: TensorSpec) -> bool:
    """Without gaps or repeats in memory, in whatever order of dimensions."""
    if spec.strides is None:
        return True
    expected = 1
    for stride, size in sorted(zip(spec.strides, spec.shape, strict=True)):
        if size > 1:
            if stride != expected:
                return False
            expected *= size
    return True


def _relayouts(call: Call, big: TensorSpec) -> bool:
    """Whether operands of full size differ in layout, or the result is to have another one."""
    wanted = call.args.get("memory_format")
    if isinstance(wanted, str) and ("channels_last" in wanted or "contiguous" in wanted):
        return big.channels_last != ("channels_last" in wanted) and len(big.shape) in (4, 5)
    return len({spec.strides for spec in call.inputs[:4] if spec.shape == big.shape}) > 1


def _casts(call: Call) -> bool:
    wanted = call.args.get("dtype")
    return isinstance(wanted, str) and wanted.removeprefix("torch.") != call.inputs[0].dtype


def _fastest(spec: TensorSpec) -> int:
    """The dimension along which neighbours lie side by side in memory."""
    rank = len(spec.shape)
    if spec.strides is None:
        return rank - 1
    return next((d for d in reversed(range(rank)) if spec.strides[d] == 1 and spec.shape[d] > 1), rank - 1)


def _reduction(spec: TensorSpec, dims: object, fastest: int) -> tuple[float, int]:
    """Whether the fastest dimension is among those that are worked over, and how many elements they hold."""
    rank = len(spec.shape)
    if not rank:
        return 0.0, 1
    if not isinstance(dims, list):
        dims = [dims] if isinstance(dims, int) and not isinstance(dims, bool) else []
    chosen = {d % rank for d in dims if isinstance(d, int) and -rank <= d < rank}
    return float(fastest in chosen), max(1, math.prod(spec.shape[d] for d in chosen))


def _run(spec: TensorSpec) -> int:
    """Elements in a row in memory along the fastest dimensions; the whole tensor where it has no gaps."""
    if spec.strides is None or not spec.shape or _dense(spec):
        return max(1, spec.numel)
    run = 1
    for stride, size in sorted(zip(spec.strides, spec.shape, strict=True)):
        if size > 1:
            if stride != run:
                break
            run *= size
    return max(1, run)


_Figures = Callable[[_Scene], list[float]]
_FAMILIES: dict[str, tuple[tuple[str, ...], _Figures]] = {
    "product": (_PRODUCT_COLUMNS, _products),
    SCALED_PRODUCT: (_SCALED_COLUMNS, _scaled_products),
    "convolution": ((*_SHAPE, *_PRODUCT), _convolution),
    "depthwise": ((*_SHAPE, *_PRODUCT, "channels_last"), _depthwise),
    "convolution_backward": (_BACKWARD, _convolution_backward),
    "attention": (_ATTENTION, _attention),
    "attention_backward": (_ATTENTION, _attention),
    **dict.fromkeys(
        "softmax reduction copy pooling optimizer pointwise".split(),
        (_TRAFFIC, _traffic),
    ),
    "lookup": (_LOOKUPS, _lookups),
    "recurrence": (_RECURRENCES, _recurrences),
    "norm": (_NORMS, _norms),
    "norm_backward": (_NORMS, _norms),
    "depthwise_backward": ((*_BACKWARD, "channels_last"), _depthwise),
}
FAMILIES = tuple(_FAMILIES)
COLUMNS: dict[str, tuple[str, ...]] = {
    name: (
        *(one for one in _COMMON if name not in _WITHOUT_BALANCE or one not in _BALANCE),
        *columns,
        "name_effect",
    )
    for name, (columns, _) in _FAMILIES.items()
}
"""Names of each family's figures; the last is the effect of the operator's name, which the fit learns."""
