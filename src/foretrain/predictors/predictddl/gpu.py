"""Gives the step times of GPUs from what device and host do in each part of a step, with fitted parameters.

A step is cut into parts of like many calls. On the device an operator takes the longer of its arithmetic and
its traffic at usual shares of the peak rates, and a while for each kernel, times ``exp(weights . traits)``:
the weights of its kind are fitted, its traits are sizes and what else kernels go by. The host takes a time
for each call. The parts are then played: the device starts none before the host, which runs ahead of it, and
ends none before the host has issued it.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from foretrain.cluster import Device
from foretrain.costs.kernels import kernel_count
from foretrain.costs.roofline import arithmetic
from foretrain.graph import PHASES, Operator, OpGraph
from foretrain.graph.opset import traits
from foretrain.predictors.predictddl.families import CONVOLUTIONS, family_of

Array = npt.NDArray[np.float64]
Places = npt.NDArray[np.int64]

PARTS = 10
"""Parts that forward and backward pass are cut into; the optimizer is one more."""

_COMPUTING = (*CONVOLUTIONS, "product", "batched product", "attention", "recurrence")
_MOVING = (
    *("channel norm", "row norm", "softmax", "pooling", "element-wise", "sums", "copies", "indexing"),
    *("optimizer", "other"),
)
GPU_KINDS = (*_COMPUTING, *_MOVING)
_MOVED_BY_KIND = {
    "channel norm": "channel norm",
    "row norm": "row norm",
    "softmax": "softmax",
    "pooling": "pooling",
    **dict.fromkeys(("activation", "pointwise", "fill", "fused"), "element-wise"),
    **dict.fromkeys(("sum", "reduction", "row loss", "pixel loss", "loss", "vector norm", "scan"), "sums"),
    **dict.fromkeys(("copy", "window", "resampling", "interpolation"), "copies"),
    **dict.fromkeys(("embedding", "gather", "scatter", "sort", "selection", "routing"), "indexing"),
}
TRAITS = (
    *("any", "log size", "log intensity", "log width in", "log width out", "log window"),
    *("half", "backward", "half backward", "unaligned", "channels last"),
)
"""What the time of an operator beside its roofline may go by; widths are channels, or sides of a product."""
HOST_TERMS = (
    *(f"forward: {name}" for name in ("computing", "norms", "others", "views")),
    *(f"backward: {name}" for name in ("computing", "others")),
    *("optimizer: calls", "optimizer: tensors", "casting: computing", "step"),
)
"""Calls of the host; casting are calls of the forward pass under autocast, a step is 1."""
_COMPUTES, _MOVES, _KERNEL_S = 0.6, 0.8, 2e-6
"""Shares of the peak rates, and the least time of a kernel, of an operator without anything fitted."""
_HALF = ("bf16", "fp16", "fp8", "fp4")
_USUAL_S, _USUAL_WIDTH, _TILE = 30e-6, 128, 8
"""Sizes of operators at which traits are 0; tensor cores want sides that are multiples of a tile."""
_FARTHEST_TRAIT = 4.0
GUESSED_HOST = np.array([40e-6, 40e-6, 20e-6, 4e-6, 40e-6, 20e-6, 60e-6, 1e-6, 15e-6, 3e-4])
"""Seconds of each call, as ``HOST_TERMS`` names them."""


# What is done


@dataclass(frozen=True, eq=False, kw_only=True)
class DeviceWork:
    """Says what a worker's device and host do in a step; a row for each distinct operator of a part."""

    part: Places
    kind: Places
    """The place in ``GPU_KINDS``."""
    traits: Array
    """As ``TRAITS`` names them."""
    seconds: Array
    """Of all calls in the part, by the roofline."""
    host: Array
    """Calls by part, as ``HOST_TERMS`` names them."""
    kernels: float

    def times(self, repeats: int) -> DeviceWork:
        """Repeat forward and backward pass so many times, and the optimizer once."""
        if repeats == 1:
            return self
        host = self.host.copy()
        host[:-1] *= repeats
        seconds = self.seconds * np.where(self.part < PARTS, repeats, 1)
        return DeviceWork(
            part=self.part, kind=self.kind, traits=self.traits, seconds=seconds, host=host,
            kernels=self.kernels * repeats,
        )  # fmt: skip


_known: weakref.WeakKeyDictionary[OpGraph, dict[str, DeviceWork]] = weakref.WeakKeyDictionary()


def device_work(graph: OpGraph, device: Device) -> DeviceWork:
    """Summed up once for each graph and device."""
    of_graph = _known.setdefault(graph, {})
    if device.name not in of_graph:
        of_graph[device.name] = _summed(graph, device)
    return of_graph[device.name]


def _summed(graph: OpGraph, device: Device) -> DeviceWork:
    precision = str(graph.info.get("precision", "fp32"))
    index, launches = graph.operator_index, graph.column("launches") > 0
    part = _parts(graph, launches)
    places, counts = np.unique(
        np.column_stack([part, index])[launches], axis=0, return_counts=True
    ) if launches.any() else (np.zeros((0, 2), dtype=np.int64), np.zeros(0))  # fmt: skip
    kinds = [_kind(operator) for operator in graph.operators]
    described = [
        _seconds_and_traits(operator, kind, device, precision)
        for operator, kind in zip(graph.operators, kinds, strict=True)
    ]
    chosen = places[:, 1]
    kernels = np.array([kernel_count(operator) for operator in graph.operators], dtype=np.float64)
    return DeviceWork(
        part=places[:, 0],
        kind=np.array([GPU_KINDS.index(kind) for kind in kinds], dtype=np.int64)[chosen],
        traits=np.array([one[1] for one in described]).reshape(-1, len(TRAITS))[chosen],
        seconds=np.array([one[0] for one in described])[chosen] * counts,
        host=_calls(graph, np.array(kinds), part, launches, casting=precision.startswith("amp")),
        kernels=float(kernels[index].sum()),
    )


def _parts(graph: OpGraph, launches: npt.NDArray[np.bool_]) -> Places:
    """Say, for each call, the part that it is in: like many calls in each, the optimizer in the last."""
    optimizer = graph.phase_index == PHASES.index("optimizer")
    order = np.cumsum(launches & ~optimizer)
    total = max(int(order[-1]) if len(order) else 1, 1)
    return np.where(optimizer, PARTS, np.minimum((order - 1).clip(0) * PARTS // total, PARTS - 1))


def _calls(
    graph: OpGraph,
    kinds: npt.NDArray[np.str_],
    part: Places,
    launches: npt.NDArray[np.bool_],
    *,
    casting: bool,
) -> Array:
    index = graph.operator_index
    computing, norms = (
        np.isin(kinds, families)[index] for families in (_COMPUTING, ("channel norm", "row norm"))
    )
    forward, backward, optimizer = (
        graph.phase_index == PHASES.index(name) for name in ("forward", "backward", "optimizer")
    )
    tensors = np.array([len(operator.inputs) for operator in graph.operators], dtype=np.float64)[index]
    calls = {
        "forward: computing": forward & launches & computing,
        "forward: norms": forward & launches & norms,
        "forward: others": forward & launches & ~computing & ~norms,
        "forward: views": forward & ~launches,
        "backward: computing": backward & launches & computing,
        "backward: others": backward & launches & ~computing,
        "optimizer: calls": optimizer,
        "optimizer: tensors": optimizer * tensors,
        "casting: computing": casting * (forward & launches & computing),
    }
    rows = np.zeros((PARTS + 1, len(HOST_TERMS)))
    for name, amounts in calls.items():
        column = np.bincount(part, np.asarray(amounts, dtype=np.float64), PARTS + 1)
        rows[:, HOST_TERMS.index(name)] = column
    rows[0, HOST_TERMS.index("step")] = 1.0
    return rows


def _seconds_and_traits(
    operator: Operator, kind: str, device: Device, precision: str
) -> tuple[float, list[float]]:
    """Time one call by the roofline, and compute the figures that ``TRAITS`` names."""
    form = arithmetic(operator, precision)
    computing_s = operator.flops / device.peak_flops("fp8" if form == "fp4" else form) / _COMPUTES
    moving_s = operator.bytes / device.memory_bytes_per_s / _MOVES
    seconds = max(computing_s, moving_s) + _KERNEL_S * max(kernel_count(operator), 1)
    half, backward = float(form in _HALF), float(traits(operator.name).backward)
    widths = _widths(operator, kind)
    window = 0.0
    if kind in CONVOLUTIONS and (weight := operator.tensor("weight")) is not None:
        window = math.log(max(math.prod(weight.shape[2:]), 1))
    intensity = 0.0
    if kind in _COMPUTING:
        intensity = math.log(max(computing_s, 1e-9) / max(moving_s, 1e-9))
    raw_traits = (
        *(math.log(seconds / _USUAL_S), intensity),
        *(math.log(max(width, 1) / _USUAL_WIDTH) for width in widths),
        window,
    )
    flags = (
        *(half, backward, half * backward),
        float(half > 0 and any(width % _TILE for width in widths)),
        float(any(spec.channels_last for spec in operator.inputs)),
    )
    clipped = (min(max(one, -_FARTHEST_TRAIT), _FARTHEST_TRAIT) for one in raw_traits)
    return seconds, [1.0, *clipped, *flags]


def _widths(operator: Operator, kind: str) -> tuple[int, int]:
    """Channels in and out of a convolution, the inner and the smaller outer side of a product, the last
    dimension of others."""
    if kind in CONVOLUTIONS and (weight := operator.tensor("weight")) is not None:
        return weight.shape[1], weight.shape[0]
    shapes = [spec.shape for spec in (*operator.inputs, *operator.outputs) if spec.shape]
    if kind in ("product", "batched product") and operator.outputs and operator.outputs[0].shape:
        sides = operator.outputs[0].shape[-2:]
        inner = operator.flops / (2 * max(operator.outputs[0].numel, 1))
        return max(int(inner), 1), max(min(sides), 1)
    largest = max(shapes, key=math.prod, default=(1,))
    return largest[-1], largest[1] if len(largest) > 1 else 1


def _kind(operator: Operator) -> str:
    """Name the kind of an operator, one of ``GPU_KINDS``."""
    of = traits(operator.name)
    if of.kind == "convolution":
        return family_of(operator)
    if of.kind in ("batched product", "attention", "recurrence"):
        return of.kind
    if of.multi_tensor:
        return "optimizer"
    if operator.flops:
        return "product"
    return _MOVED_BY_KIND.get(of.kind, "other")


# The law


class StackedWork:
    """The work of several runs side by side."""

    def __init__(self, works: Sequence[DeviceWork]) -> None:
        self.runs = len(works)
        self.host = np.array([work.host for work in works])
        parts = PARTS + 1
        self.place = np.concatenate([work.part + parts * run for run, work in enumerate(works)])
        self.kind = np.concatenate([work.kind for work in works])
        self.traits = np.concatenate([work.traits for work in works])
        self.seconds = np.concatenate([work.seconds for work in works])

    def device(self, weights: Array, *, slopes: bool) -> tuple[Array, Array]:
        """Seconds of each run and part (by weights of kinds and traits), and their slopes."""
        shape = (self.runs, PARTS + 1)
        seconds = self.seconds * np.exp(np.einsum("ij,ij->i", self.traits, weights[self.kind]))
        total = np.bincount(self.place, seconds, shape[0] * shape[1]).astype(np.float64).reshape(shape)
        if not slopes:
            return total, np.zeros((*shape, 0))
        kinds, count = len(GPU_KINDS), len(TRAITS)
        by_weight = np.zeros((*shape, kinds, count))
        cells = self.place * kinds + self.kind
        for trait in range(count):
            column = np.bincount(cells, seconds * self.traits[:, trait], shape[0] * shape[1] * kinds)
            by_weight[..., trait] = column.reshape(*shape, kinds)
        return total, by_weight.reshape(*shape, kinds * count)


class PlayedTimes(NamedTuple):
    """Seconds of each run, and how they change with the parameters of device and host (one after the
    other)."""

    seconds: Array
    slopes: Array


def play(device_s: Array, host: Array, by_device: Array) -> tuple[PlayedTimes, PlayedTimes, PlayedTimes]:
    """A step that starts with both idle, one of many without a pause, and the device alone.

    ``device_s`` are the seconds of each run and part and ``by_device`` their slopes, ``host`` the seconds of
    each run, part and term.
    """
    runs, parts, terms = by_device.shape
    host_s = host.sum(axis=2)
    issued, done = np.zeros(runs), np.zeros(runs)
    by_host = np.zeros((runs, terms + host.shape[2]))
    by_both = np.zeros_like(by_host)
    for part in range(parts):
        slopes = np.where((issued > done)[:, None], by_host, by_both)
        slopes[:, :terms] += by_device[:, part]
        ended = np.maximum(done, issued) + device_s[:, part]
        issued = issued + host_s[:, part]
        by_host[:, terms:] += host[:, part]
        by_both = np.where((issued > ended)[:, None], by_host, slopes)
        done = np.maximum(ended, issued)
    busy_s, of_device = device_s.sum(axis=1), np.zeros_like(by_host)
    of_device[:, :terms] = by_device.sum(axis=1)
    many = PlayedTimes(np.maximum(issued, busy_s), np.where((issued > busy_s)[:, None], by_host, of_device))
    return PlayedTimes(done, by_both), many, PlayedTimes(busy_s, of_device)


# Columns

GPU_COLUMNS = (
    *(f"share of {name}" for name in GPU_KINDS),
    *("log device beside host", "log device", "log host", "log kernel"),
    *("half", "width in", "width out"),
)


def gpu_columns(work: DeviceWork) -> Array:
    """Compute the figures that ``GPU_COLUMNS`` names: of what the step is made, with nothing fitted."""
    device_s, host_s = float(work.seconds.sum()) + 1e-9, float((work.host @ GUESSED_HOST).sum())
    shares = np.bincount(work.kind, work.seconds, len(GPU_KINDS)) / device_s
    means = (work.seconds @ work.traits / device_s)[
        [TRAITS.index(name) for name in ("half", "log width in", "log width out")]
    ]
    logs = np.log(np.array([device_s, host_s, device_s / max(work.kernels, 1.0)]) * 1e6)
    return np.concatenate([shares, [logs[0] - logs[1]], logs, means])
