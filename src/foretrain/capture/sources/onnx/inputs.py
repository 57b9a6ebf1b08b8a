"""Finds the shapes to trace an ONNX graph with, from its declared dimensions and the batch."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from foretrain.errors import CaptureError

# A dimension is its size, its name, or "" where it has neither.
Dims = Sequence[int | str]

_BATCH_NAME = re.compile(r"batch|^(n|b|bs|bsz)$", re.IGNORECASE)


@dataclass(frozen=True, kw_only=True, slots=True)
class InputShapes:
    """A shape for each input; ``overridden`` where a fixed batch of 1 was replaced by the one asked for."""

    shapes: dict[str, tuple[int, ...]]
    overridden: bool


def input_shapes(inputs: Mapping[str, Dims], batch: int | None) -> InputShapes:
    """Dynamic batch dimensions get the batch asked for, or 1; a fixed batch of 1 is replaced where none is
    dynamic."""
    shapes = {
        name: tuple(_size(name, i, dim, batch or 1) for i, dim in enumerate(dims))
        for name, dims in inputs.items()
    }
    dynamic = any(isinstance(dim, str) for dims in inputs.values() for dim in dims)
    firsts = {shape[0] for shape in shapes.values() if shape}
    if batch is None or dynamic or batch in firsts:
        return InputShapes(shapes=shapes, overridden=False)
    if 1 not in firsts:
        fixed = ", ".join(str(size) for size in sorted(firsts)) or "none"
        raise CaptureError(
            f"batch {batch} was asked for, but the inputs have a fixed first dimension ({fixed}); "
            "ask for that one on each device (a global batch is that of all devices and micro-batches "
            "together), or export the file with a dynamic batch dimension"
        )
    replaced = {name: (batch, *shape[1:]) if shape[:1] == (1,) else shape for name, shape in shapes.items()}
    return InputShapes(shapes=replaced, overridden=True)


def _size(name: str, position: int, dim: int | str, batch: int) -> int:
    if isinstance(dim, int):
        return dim
    if position == 0 or _BATCH_NAME.search(dim):
        return batch
    called = f" ({dim!r})" if dim else ""
    raise CaptureError(
        f"input {name!r}: dimension {position}{called} has no "
        "fixed size; export the file with a fixed size there, or "
        "set one with onnx.tools.update_model_dims.update_inputs_outputs_dims"
    )
