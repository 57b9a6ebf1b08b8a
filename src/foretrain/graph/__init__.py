"""Holds one training step as data: the graph, FLOPs of its operators, and rewrites to what a compiler or
framework runs."""

from foretrain.graph.ir import (
    CATEGORIES,
    ITEM_BYTES,
    PHASES,
    Buffer,
    Category,
    Op,
    Operator,
    OpGraph,
    Phase,
    Stack,
    TensorSpec,
    Weight,
)
from foretrain.graph.storage import FORMAT

__all__ = [
    "CATEGORIES",
    "FORMAT",
    "ITEM_BYTES",
    "PHASES",
    "Buffer",
    "Category",
    "Op",
    "OpGraph",
    "Operator",
    "Phase",
    "Stack",
    "TensorSpec",
    "Weight",
]
