"""Turns a captured step into the graph of primitives that the embedding sees."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from foretrain.graph import Op, Operator, OpGraph
from foretrain.graph.opset import NORMS, traits
from foretrain.predictors.predictddl.families import COMPUTING, family_of

Array = npt.NDArray[np.float64]

NORMALISATIONS = ("batch normalisation", "layer normalisation")
KINDS = (
    "input", *COMPUTING, *NORMALISATIONS, "activation", "pooling", "global average", "sum", "scale", "concat",
    "attention", "embedding", "recurrence", "other",
)  # fmt: skip
SHAPES = (
    *("log channels out", "log channels in", "log positions", "kernel"),
    *("log parameters", "log FLOPs per sample", "log bytes per sample"),
)
FOLDED = frozenset({"activation", "other"})
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
_CELLS = ("_thnn_fused_lstm_cell", "_thnn_fused_gru_cell")


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
    """Name the kind of an operator of the forward pass, one of ``KINDS``."""
    of, name = traits(operator.name), operator.name.removesuffix("_")
    if name in _NAMED:
        return _NAMED[name]
    if of.kind in ("attention", "batched product"):
        return "attention"
    if of.kind in ("recurrence", "state space") or name in _CELLS:
        return "recurrence"
    if of.kind in NORMS:
        return NORMALISATIONS[of.kind != "channel norm"]
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
    """Holds what the columns of ``SHAPES`` are divided by, so that those of usual layers are about 1."""

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
    """Compute the row that ``SHAPES`` names, of about unit size."""
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
    """Compute the figures that ``TARGETS`` names: what the embedding is to know of an architecture, per
    sample."""
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


_SIZE_BOUNDS = (1e4, 1e5, 1e6, 1e7)
"""Bytes per sample between which operators count as of like size."""


def histogram(graph: Primitives) -> Array:
    """Logarithms of how many operators of each of ``KINDS`` there are, and how many nodes of each size."""
    size = np.expm1(graph.shapes[:, -1] * _UNITS.bytes)
    sizes = np.bincount(np.digitize(size, _SIZE_BOUNDS), minlength=len(_SIZE_BOUNDS) + 1)
    return np.asarray(np.log1p(np.concatenate([graph.kinds.sum(axis=0), sizes])))


def roofline_s(graph: Primitives, flops_per_byte: float, call: float, rates: Array) -> float:
    """The time of the graph in that of moving a byte: the longer of arithmetic and traffic, slower by its
    kind's rate, and so much for each node."""
    flops, size = (
        np.expm1(graph.shapes[:, -2] * _UNITS.flops),
        np.expm1(graph.shapes[:, -1] * _UNITS.bytes),
    )
    main = graph.kinds.argmax(axis=1)
    return float((np.maximum(flops / flops_per_byte, size) * rates[main] + call).sum())
