"""Says what PredictDDL sees of a job and its captured step: columns with names, and a graph of primitives."""

from __future__ import annotations

import math
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from foretrain.costs.roofline import arithmetic
from foretrain.graph import PHASES, Op, Operator, OpGraph
from foretrain.graph.opset import NORMS, traits
from foretrain.job import Job

Array = npt.NDArray[np.float64]

# Dataset types

_USUAL_IMAGE = (3, 224, 224)
_TYPES = {((3, 32, 32), 10): "cifar10", ((3, 64, 64), 200): "tiny-imagenet"}


def dataset_type(job: Job) -> str:
    """What a predictor is trained for: the kind of data, as far as the job tells it.

    ImageNet is any image size with 1000 classes, and what image models take by default; other sizes are named
    by themselves.
    """
    training, model = job.workload.training, job.workload.model
    shape, classes = training.image_shape, training.classes or model.args.get("num_classes")
    if training.sequence is not None:
        return "text"
    if shape is None and model.source in ("timm", "torchvision"):
        shape = _USUAL_IMAGE
    if shape is None:
        return "own inputs"
    if classes == 1000 or (classes is None and min(shape[1:]) >= 128):
        return "imagenet"
    return _TYPES.get((shape, classes or 0), f"{shape[1]}x{shape[2]} with {classes or 'unknown'} classes")


# Families of operators

CONVOLUTIONS = ("convolution", "pointwise convolution", "grouped convolution", "depthwise convolution")
COMPUTING = (*CONVOLUTIONS, "product")
MOVING = ("normalisation", "pooling", "optimizer", "other")
FAMILIES = (*COMPUTING, *MOVING)
FAMILY_COLUMNS = (
    *(f"{name}: log arithmetic" for name in COMPUTING),
    *(f"{name}: log traffic" for name in FAMILIES),
    *(f"log {name}" for name in ("calls", "parameters", "arithmetic", "traffic", "activations")),
)


@dataclass(frozen=True, eq=False, kw_only=True)
class OperatorWork:
    """What a worker does in a step: seconds at the device's peak rates, by family."""

    arithmetic_s: Array
    """Of ``FAMILIES``."""
    traffic_s: Array
    calls: float
    convolutions: float
    """Calls among them."""
    parameters: float
    activations_bytes: float

    @property
    def columns(self) -> Array:
        """As ``FAMILY_COLUMNS`` names them."""
        sums = (
            self.calls,
            self.parameters,
            self.arithmetic_s.sum() * 1e6,
            self.traffic_s.sum() * 1e6,
            self.activations_bytes,
        )
        seconds = np.concatenate([self.arithmetic_s[: len(COMPUTING)], self.traffic_s])
        return np.concatenate([np.log1p(seconds * 1e6), np.log1p(sums)])


def work_of(job: Job, graph: OpGraph) -> OperatorWork:
    """The operators of a step at the rates of the job's device, summed up by family."""
    device = job.cluster.device
    repeated, once = _sums(graph)
    flops, size, calls = (job.accumulation * one + other for one, other in zip(repeated, once, strict=True))
    rates = np.array([device.peak_flops(form) for form in _FORMATS])
    held = sum(buffer.size_bytes for buffer in graph.buffers if buffer.category == "activations")
    return OperatorWork(
        arithmetic_s=(flops.reshape(len(_FORMATS), -1) / rates[:, None]).sum(axis=0),
        traffic_s=size / device.memory_bytes_per_s,
        calls=float(calls.sum()),
        convolutions=float(calls[: len(CONVOLUTIONS)].sum()),
        parameters=float(max(graph.parameters, 1)),
        activations_bytes=float(held),
    )


_FORMATS = ("fp64", "fp32", "tf32", "bf16", "fp16", "fp8")
_Sums = tuple[tuple[Array, ...], tuple[Array, ...]]
_known_sums: weakref.WeakKeyDictionary[OpGraph, _Sums] = weakref.WeakKeyDictionary()


def _sums(graph: OpGraph) -> _Sums:
    """FLOPs (by number format and family), bytes and calls (by family): of forward and backward, which
    repeat with every micro-batch, and of the optimizer."""
    if graph not in _known_sums:
        _known_sums[graph] = _summed(graph)
    return _known_sums[graph]


def _summed(graph: OpGraph) -> _Sums:
    precision = str(graph.info.get("precision", "fp32"))
    kinds, forms = (
        np.array(places, dtype=np.int64)[graph.operator_index]
        for places in (
            [FAMILIES.index(family_of(operator)) for operator in graph.operators],
            [_FORMATS.index(arithmetic(operator, precision)) for operator in graph.operators],
        )
    )
    launched, optimizer = graph.column("launches"), graph.phase_index == PHASES.index("optimizer")

    def sums(places: npt.NDArray[np.int64], column: Array, count: int) -> Array:
        return np.bincount(places, column, count).astype(np.float64)

    def parts(share: Array) -> tuple[Array, ...]:
        flops = sums(
            forms * len(FAMILIES) + kinds, graph.column("flops") * share, len(_FORMATS) * len(FAMILIES)
        )
        return flops, *(
            sums(kinds, column, len(FAMILIES)) for column in (graph.column("bytes") * share, share)
        )

    return parts(launched * ~optimizer), parts(launched * optimizer)


def family_of(operator: Operator) -> str:
    """One of ``FAMILIES``."""
    of = traits(operator.name)
    if of.kind == "convolution":
        return _convolution(operator)
    if operator.flops:
        return "product"
    if of.kind in NORMS:
        return "normalisation"
    if of.multi_tensor:
        return "optimizer"
    return "pooling" if of.kind == "pooling" else "other"


def _convolution(operator: Operator) -> str:
    weight = operator.tensor("weight")
    if weight is None:
        return "convolution"
    if weight.shape[1] == 1 < weight.shape[0]:
        return "depthwise convolution"
    if (operator.args.get("groups") or 1) > 1:
        return "grouped convolution"
    return "pointwise convolution" if all(side == 1 for side in weight.shape[2:]) else "convolution"


# Clusters

CLUSTER_COLUMNS = (
    *("log workers", "workers", "several workers", "log nodes"),
    *("parameter servers", "parameter servers x log workers"),
    *(
        "log cores",
        "log memory",
        "log FLOP/s",
        "log memory bandwidth",
        "log link bandwidth",
        "log batch per worker",
    ),
    *("log parameters x log workers", "log parameters x servers"),
)
IN_LAW = tuple(CLUSTER_COLUMNS.index(name) for name in ("log nodes", "log cores", "log link bandwidth"))
"""Columns that the baseline has as laws of its own, and few runs vary."""
_MANY_WORKERS = 16
"""The unit of the column "workers"."""


def cluster_columns(job: Job, parameters: float) -> Array:
    """As ``CLUSTER_COLUMNS`` names them: what PredictDDL knows of the cluster, the batch, and how they
    meet the model's size."""
    cluster, device = job.cluster, job.cluster.device
    workers, servers = cluster.world_size, float(bool(job.plan.servers))
    link = cluster.inter_node if job.over_network else cluster.intra_node
    log_workers, log_parameters = math.log(workers), math.log(parameters)
    training = job.workload.training
    figures = (
        device.cores,
        device.memory_bytes,
        device.peak_flops(training.precision.removeprefix("amp-")),
        device.memory_bytes_per_s,
        link.bandwidth_bytes_per_s,
        training.global_batch / workers,
    )
    return np.array(
        [
            *(log_workers, workers / _MANY_WORKERS, float(workers > 1), math.log(cluster.nodes)),
            *(servers, servers * log_workers),
            *(math.log(figure) for figure in figures),
            *(log_parameters * log_workers, log_parameters * servers),
        ]
    )


# Primitives

KINDS = (
    "input", *COMPUTING, "normalisation", "activation", "pooling", "global average", "sum", "scale", "concat",
    "attention", "embedding", "other",
)  # fmt: skip
SHAPES = (
    *("log channels out", "log channels in", "log positions", "kernel"),
    *("log parameters", "log FLOPs per sample", "log bytes per sample"),
)
FOLDED = frozenset({"normalisation", "activation", "other"})
"""Kinds that join the node they follow: what they are is counted there."""
_NAMED = {
    **dict.fromkeys(("add", "sub"), "sum"),
    "mul": "scale",
    "cat": "concat",
    **dict.fromkeys(("mean", "_adaptive_avg_pool2d"), "global average"),
    "embedding": "embedding",
    "_softmax": "attention",
    **dict.fromkeys(("clone", "native_dropout", "bernoulli", "div"), "activation"),
}
"""Kinds of single operators: what stochastic depth and dropout are made of counts as an activation."""


@dataclass(frozen=True, eq=False, kw_only=True)
class Primitives:
    """The forward pass as PredictDDL's embedding sees it, in topological order."""

    kinds: Array
    """A row per node: how many operators of each of ``KINDS`` it holds."""
    shapes: Array
    """A row per node, as ``SHAPES`` names it; of the sums over its operators."""
    edges: npt.NDArray[np.int64]
    """Two rows: from, to; from < to."""


def primitives(graph: OpGraph) -> Primitives:
    """The launched operators of the forward pass; what follows a node without another input joins it."""
    node_of: dict[int, int] = {}
    nodes: list[list[Op]] = []
    edges: set[tuple[int, int]] = set()
    for i, op in enumerate(graph.ops):
        if op.phase != "forward":
            break
        sources = sorted({node_of[one] for one in graph.producers(i) if one in node_of})
        if not op.operator.launches or not _is_large(op.operator):
            if sources:
                node_of[i] = sources[-1]
            continue
        if len(sources) == 1 and kind_of(op.operator) in FOLDED:
            node_of[i] = sources[0]
            nodes[sources[0]].append(op)
            continue
        node_of[i] = len(nodes)
        edges.update((source, len(nodes)) for source in sources)
        nodes.append([op])
    ends = np.array(sorted(edges), dtype=np.int64).reshape(-1, 2).T
    kinds = np.zeros((len(nodes), len(KINDS)))
    for number, ops in enumerate(nodes):
        for op in ops:
            kinds[number, KINDS.index(kind_of(op.operator))] += 1
    shapes = np.array([_shape(ops, graph.samples) for ops in nodes]).reshape(-1, len(SHAPES))
    return Primitives(kinds=kinds, shapes=shapes, edges=np.ascontiguousarray(ends))


def kind_of(operator: Operator) -> str:
    """One of ``KINDS``, of an operator of the forward pass."""
    of, name = traits(operator.name), operator.name.removesuffix("_")
    if name in _NAMED:
        return _NAMED[name]
    if of.kind in ("attention", "batched product"):
        return "attention"
    if of.kind == "activation" and not of.backward:
        return "activation"
    family = family_of(operator)
    return family if family in KINDS else "other"


def _is_large(operator: Operator) -> bool:
    """Counters of batches and other single numbers are no nodes."""
    return any(spec.numel > 1 for spec in operator.outputs)


def _shape(ops: Sequence[Op], samples: int) -> list[float]:
    """Sizes per sample: the first operator gives the shape, all of them the sums."""
    first = ops[0].operator
    output = first.outputs[0].shape
    weight = first.tensor("weight") or first.tensor("mat2")
    parameters = weight.numel if weight is not None else 0
    widths = weight.shape if weight is not None and len(weight.shape) > 1 else output
    channels_in = widths[1] if len(widths) > 1 else 1
    channels, positions = (
        (output[1], math.prod(output[2:])) if len(output) > 2 else (output[-1] if output else 1, 1)
    )
    kernel = math.sqrt(math.prod(weight.shape[2:])) if weight is not None else 0.0
    flops, size = (sum(getattr(op.operator, name) for op in ops) / samples for name in ("flops", "bytes"))
    return shape_row(channels, channels_in, positions, kernel, parameters, flops, size)


class _Units(NamedTuple):
    """What the columns of ``SHAPES`` are divided by, so that those of usual layers are about 1."""

    width: float = 5
    kernel: float = 3
    parameters: float = 10
    flops: float = 15
    bytes: float = 12


_UNITS = _Units()


def shape_row(
    channels: float,
    channels_in: float,
    positions: float,
    kernel: float,
    parameters: float,
    flops: float,
    size: float,
) -> list[float]:
    """As ``SHAPES`` names it, of about unit size."""
    return [
        *(math.log1p(one) / _UNITS.width for one in (channels, channels_in, positions)),
        kernel / _UNITS.kernel,
        math.log1p(parameters) / _UNITS.parameters,
        math.log1p(flops) / _UNITS.flops,
        math.log1p(size) / _UNITS.bytes,
    ]


TARGETS = (
    *(f"{name}: log FLOPs" for name in COMPUTING),
    *(f"{kind}: log bytes" for kind in KINDS),
    *(f"{kind}: log step time" for kind in KINDS),
    *(f"log {name}" for name in ("FLOPs", "bytes", "activations", "parameters", "nodes")),
)
_FLOPS_PER_BYTE = 20.0
"""Of a device of middling balance, whose roofline stands for the step time in ``TARGETS``; its unit is the
time to move a byte."""


def cost_targets(graph: Primitives) -> Array:
    """As ``TARGETS`` names them: what the embedding is to know of an architecture, per sample."""
    channels, _, positions, _, parameters, flops, size = graph.shapes.T
    flops, size = np.expm1(flops * _UNITS.flops), np.expm1(size * _UNITS.bytes)
    outputs = np.expm1(channels * _UNITS.width) * np.expm1(positions * _UNITS.width)
    main = graph.kinds.argmax(axis=1)
    times = np.maximum(flops / _FLOPS_PER_BYTE, size)
    by_kind_flops, by_kind_bytes, by_kind_time = (
        np.bincount(main, weights=column, minlength=len(KINDS)) for column in (flops, size, times)
    )
    computing = [by_kind_flops[KINDS.index(name)] for name in COMPUTING]
    sums = (flops.sum(), size.sum(), outputs.sum(), np.expm1(parameters * _UNITS.parameters).sum())
    return np.log1p([*computing, *by_kind_bytes, *by_kind_time, *sums, len(graph.kinds)])
