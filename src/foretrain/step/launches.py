"""Takes host time off calls that CUDA graphs launch."""

from __future__ import annotations

import numpy as np

from foretrain.costs.base import Column
from foretrain.graph import PHASES, OpGraph
from foretrain.step.partition import blocks
from foretrain.workload import Graphs

_CALLS = 3
"""Calls that the host issues for a graphed layer: a copy of its input, its autograd function, the launch.
A launch itself takes 2.5 us and about 1 ns for each kernel in it (NVIDIA, "Constant-time launch for
straight-line CUDA graphs", 2024), which is no more than any call."""


def launched(host_s: Column, graph: OpGraph, graphs: Graphs) -> Column:
    """Host time of every call: nothing in a graph of whole passes; of a layer, its first call stands for the
    launch. The optimizer runs as ever."""
    if graphs == "none":
        return host_s
    left = np.array(host_s)
    if graphs == "step":
        left[graph.phase_index != PHASES.index("optimizer")] = 0.0
        return left
    for block in blocks(graph):
        for calls in (block.piece.forward, block.piece.backward):
            if block.is_layer and len(calls) > _CALLS:
                left[calls] = 0.0
                left[calls[0]] = _CALLS * float(np.mean(host_s[calls]))
    return left
