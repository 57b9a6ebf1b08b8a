"""Counts the bytes that an operator must read and write, from its tensor specs; free of torch."""

from __future__ import annotations

from foretrain.graph import ITEM_BYTES, TensorSpec
from foretrain.graph.opset import traits


def launches(name: str) -> bool:
    """Not where a call only allocates or waits. Views launch nothing either, but show by writing no
    buffer."""
    return traits(name).kind not in ("allocation", "wait")


_TOUCHED = 16
"""Elements of a map that one element of a pooled region reads: four samples of four neighbours."""


def bytes_moved(
    name: str,
    inputs: tuple[TensorSpec, ...],
    outputs: tuple[TensorSpec, ...],
    written: tuple[TensorSpec, ...],
) -> tuple[int, int]:
    """Bytes (read, written) of one call: each operand once, each result once."""
    write = sum(spec.size_bytes for spec in written or outputs)
    of = traits(name)
    selects = of.kind == "gather" or (of.kind == "embedding" and not of.backward)
    if inputs and (
        selects or name == "slice_backward"
    ):  # only what is selected of the first operand, however large it is
        rest = sum(spec.size_bytes for spec in inputs[1:])
        return rest + write, write
    if name == "index_add_" and inputs[-1].numel < inputs[0].numel:
        touched = inputs[-1].size_bytes  # in place, only rows that something is added to
        return sum(spec.size_bytes for spec in inputs[1:]) + touched, touched
    if name == "torchvision.nms":  # a bit for each pair of boxes is written, then read
        pairs = inputs[0].shape[0] ** 2 // 8
        return sum(spec.size_bytes for spec in inputs) + pairs, write + pairs
    if name in ("torchvision.roi_align", "torchvision.roi_pool"):  # of a large map only what lies in a region
        touched = outputs[0].size_bytes * _TOUCHED
        return min(inputs[0].size_bytes, touched) + inputs[1].size_bytes, write
    if name == "embedding_dense_backward":
        return sum(spec.size_bytes for spec in inputs), write + inputs[0].numel * ITEM_BYTES[inputs[0].dtype]
    return sum(spec.size_bytes for spec in inputs), write
