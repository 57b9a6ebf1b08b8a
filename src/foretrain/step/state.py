"""Sizes what a training keeps for its parameters, and so writes into a checkpoint."""

from __future__ import annotations

import functools

import numpy as np

from foretrain.duration import ModelSize
from foretrain.graph import ITEM_BYTES, PHASES, OpGraph
from foretrain.job import Job
from foretrain.step.passes import traced_blocks


@functools.lru_cache(maxsize=256)
def bytes_per_parameter(graph: OpGraph) -> tuple[float, float]:
    """Give the bytes of gradients, as the optimizer finds them, and of its state: of a trainable parameter on
    average."""
    update = np.flatnonzero(graph.phase_index == PHASES.index("optimizer"))
    traced = sum(w.elements for block in traced_blocks(graph) for w in block.weights if w.trainable)
    if not len(update) or not traced:
        return 0.0, 0.0
    first = int(update[0])
    gradients, state = (
        sum(b.size_bytes for b in graph.buffers if b.category == name and b.born < first <= b.dies)
        for name in ("gradients", "optimizer_state")
    )
    return gradients / traced, state / traced


def model_size(job: Job, graph: OpGraph) -> ModelSize:
    """Size the whole model, by what a rank has of it."""
    return _model_size(graph, job.plan.tensor, job.plan.expert * job.expert_tensor)


@functools.lru_cache(maxsize=256)
def _model_size(graph: OpGraph, tensor: int, experts: int) -> ModelSize:
    state = bytes_per_parameter(graph)[1]
    held = sum(
        weight.elements
        * (ITEM_BYTES[weight.dtype] + (state if weight.trainable else 0.0))
        * (experts if weight.expert else tensor)
        for weight in graph.weights
    )
    calls = sum(op.operator.launches for op in graph.ops if op.phase != "optimizer")
    return ModelSize(
        operators=len(graph.operators), checkpoint_bytes=held, calls=None if graph.stack else calls
    )
