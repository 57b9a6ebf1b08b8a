"""Plays attention under context parallelism: what of keys and values comes beside it, and putting its results
together piece by piece."""

from __future__ import annotations

import numpy as np

from foretrain.graph import Operator
from foretrain.graph.opset import is_attention
from foretrain.step.calls import COPY_SHARE
from foretrain.step.layout import Layout, memory_rate
from foretrain.step.spans import Column, Index

_FUSED_BYTES = (10.0, 10.0)
"""Memory traffic for each number of a rank's queries and each further rank, forward and backward: one kernel
reads and writes the sum in fp32 and reads a piece (Transformer Engine's correction; its sum of gradients)."""
_PLAIN_BYTES = (38.0, 100.0)
"""The same by torch's own operators: four of them forward, and gradients of keys and values that travel;
backward from ``data/h200_fsdp.jsonl``, context 4."""


def with_context(layout: Layout, calls: Index, busy_s: Column) -> Column:
    """Device seconds of a pass in which the rank's queries meet the keys of all.

    A ring's pieces travel while attention is over those that are there: all but the first. Frameworks that go
    from piece to piece put the results together in between; torch does so even where all was gathered.
    """
    job, graph = layout.job, layout.graph
    by = job.plan.exchange_of_context(job.workload.training.framework)
    if by == "alltoall":
        return busy_s
    ranks, seconds = job.plan.context, busy_s.copy()
    own = [graph.ops[i].operator for i in calls.tolist()]
    attends = [i for i, operator in enumerate(own) if operator.flops and is_attention(operator.name)]
    moves = [i for i, operator in enumerate(own) if operator.overload == "context"]
    if not attends:
        return seconds
    if by == "ring" and moves:
        moved, beside = seconds[moves].sum(), seconds[attends].sum() * (ranks - 1) / ranks
        seconds[moves] *= 1.0 - min(1.0, beside / moved) if moved else 1.0
    fused = job.workload.training.framework in _FUSES
    if by == "ring" or not fused:
        forward, backward = _FUSED_BYTES if fused else _PLAIN_BYTES
        for i in attends:
            each = backward if own[i].name.endswith("_backward") else forward
            moved = each * _query_elements(own[i]) * (ranks - 1)
            seconds[i] += moved / (COPY_SHARE * memory_rate(layout)) * layout.tuning.traffic
    return seconds


_FUSES = ("megatron", "internevo", "automodel")
"""Frameworks whose attention puts pieces together in kernels of its own."""


def _query_elements(operator: Operator) -> int:
    """Count the elements of the rank's queries, or their gradients: of four dimensions, what has the most
    heads is not keys."""
    shaped = [spec for spec in operator.inputs if len(spec.shape) == 4]
    return int(
        min(np.prod(spec.shape) for spec in shaped if spec.shape[1] == max(s.shape[1] for s in shaped))
    )
