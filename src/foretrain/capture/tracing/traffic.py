"""Bytes that an operator must read and write, from its tensor specs; free of torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from foretrain.graph import ITEM_BYTES, TensorSpec

_NO_LAUNCH = frozenset(
    {
        "empty",
        "empty_like",
        "empty_strided",
        "new_empty",
        "new_empty_strided",
        "lift_fresh",
        "detach_",
        "resize_",
        "set_",
        "_local_scalar_dense",
    }
)
"""Calls that only allocate or describe. Views launch nothing either, but they show by writing no buffer."""

_GATHERS = frozenset(
    {"embedding", "index_select", "gather", "index", "take", "_embedding_bag", "slice_backward"}
)
"""Read only the selected rows of their first operand, however large it is."""


def launches(name: str) -> bool:
    return name not in _NO_LAUNCH


def bytes_moved(
    name: str,
    args: Mapping[str, Any],
    inputs: tuple[TensorSpec, ...],
    outputs: tuple[TensorSpec, ...],
    written: tuple[TensorSpec, ...],
) -> tuple[int, int]:
    """Bytes (read, written) of one call: each operand once, each result once."""
    write = (
        sum(spec.size_bytes for spec in outputs) if not written else sum(spec.size_bytes for spec in written)
    )
    if name in _GATHERS and inputs:
        rest = sum(spec.size_bytes for spec in inputs[1:])
        return rest + write, write
    if name == "embedding_dense_backward":
        return sum(spec.size_bytes for spec in inputs), write + inputs[0].numel * ITEM_BYTES[inputs[0].dtype]
    return sum(spec.size_bytes for spec in inputs), write
