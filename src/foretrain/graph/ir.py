"""Holds one training step as data: distinct operators, the stream of their calls, and the buffers they read
and write."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
import numpy.typing as npt

Phase = Literal["forward", "backward", "optimizer"]
Category = Literal["weights", "gradients", "optimizer_state", "inputs", "activations", "temporaries"]
PHASES: tuple[Phase, ...] = get_args(Phase)
CATEGORIES: tuple[Category, ...] = get_args(Category)

ITEM_BYTES: dict[str, int] = {
    "float64": 8, "float32": 4, "float16": 2, "bfloat16": 2,
    "float8_e4m3fn": 1, "float8_e5m2": 1, "float8_e8m0fnu": 1, "float4_e2m1fn_x2": 1,
    "complex64": 8, "complex128": 16,
    "int64": 8, "int32": 4, "int16": 2, "int8": 1, "uint8": 1, "bool": 1,
    "uint16": 2, "uint32": 4, "uint64": 8,
}  # fmt: skip
PACKED = "float4_e2m1fn_x2"
"""Two numbers in a byte: shapes count the bytes."""


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """The shape, dtype and layout of a tensor; ``strides`` only where it is not contiguous."""

    shape: tuple[int, ...]
    dtype: str
    strides: tuple[int, ...] | None = None

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def size_bytes(self) -> int:
        """Bytes that one pass over the tensor touches: an expanded dimension (stride 0) counts once."""
        if self.strides is None or 0 not in self.strides:
            return self.numel * ITEM_BYTES[self.dtype]
        kept = (size for size, stride in zip(self.shape, self.strides, strict=True) if stride or not size)
        return math.prod(kept) * ITEM_BYTES[self.dtype]

    @property
    def channels_last(self) -> bool:
        """A 4- or 5-dimensional tensor whose second dimension varies fastest."""
        return (
            self.strides is not None
            and len(self.shape) in (4, 5)
            and self.strides[1] == 1
            and self.shape[1] > 1
        )


@dataclass(frozen=True, slots=True, eq=False)
class Operator:
    """One distinct call: name, tensor specs and the other arguments. Many ops of a graph share one operator.

    ``args`` maps argument names to plain values; the string "%2" stands for the third input tensor.
    ``launches`` is false for views, allocations and other calls that put no work on the device.
    """

    name: str
    overload: str
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    args: Mapping[str, Any]
    flops: int
    bytes_read: int
    bytes_written: int
    launches: bool

    @property
    def bytes(self) -> int:
        """Least memory traffic: every operand read once and every result written once."""
        return self.bytes_read + self.bytes_written

    def on(self, inputs: tuple[TensorSpec, ...], outputs: tuple[TensorSpec, ...]) -> Operator:
        """Copy the operator to other tensors, each read or written once."""
        return dataclasses.replace(
            self,
            inputs=inputs,
            outputs=outputs,
            bytes_read=sum(spec.size_bytes for spec in inputs),
            bytes_written=sum(spec.size_bytes for spec in outputs),
        )

    def tensor(self, argument: str) -> TensorSpec | None:
        """The spec of the tensor passed as ``argument``, or None when it was not passed."""
        reference = self.args.get(argument)
        return (
            self.inputs[int(reference[1:])]
            if isinstance(reference, str) and reference.startswith("%")
            else None
        )

    def tensors(self, argument: str) -> list[TensorSpec]:
        """The specs of a list argument (``_foreach_add_``'s ``self``, ``cat``'s ``tensors``)."""
        return [
            self.inputs[int(ref[1:])]
            for ref in self.args.get(argument, ())
            if isinstance(ref, str) and ref.startswith("%")
        ]


@dataclass(frozen=True, slots=True, eq=False)
class Op:
    """One call in the stream of a step: what runs, in which phase and layer, and the buffers it touches."""

    operator: Operator
    phase: Phase
    layer: str
    reads: tuple[int, ...]
    writes: tuple[int, ...]
    recomputed: bool = False
    """It runs in the backward pass for the second time, as what it gave was not kept."""
    hooks: int = 0
    """Python functions of checkpoints that the host runs before it."""


@dataclass(frozen=True, slots=True)
class Buffer:
    """One allocation: present while ``born <= op index <= dies``; dies ``len(ops)`` outlives the step.

    Born -1 exists before the step and, as steps repeat, before the next one too: it counts as held
    throughout. What dies beyond ``len(ops)`` is left to the next step: ``len(ops) + 1 + k`` is released after
    its call ``k``.
    """

    size_bytes: int
    category: Category
    born: int
    dies: int


@dataclass(frozen=True, slots=True)
class Weight:
    """One distinct parameter of the module that a rank runs; ``elements`` is what the rank holds of it."""

    name: str
    elements: int
    dtype: str
    trainable: bool = True
    expert: bool = False
    """It belongs to experts that are split over the expert group."""


@dataclass(frozen=True, slots=True)
class Stack:
    """A list of repeated blocks of which only the first ``traced`` are in the graph; each other one equals
    one of these.

    >>> Stack("model.layers", 5, 3, (0, 1, 1, 1, 2)).copies(1)
    3
    """

    path: str
    layers: int
    traced: int
    stands_for: tuple[int, ...]
    """For each of the ``layers``, the traced one that is its equal."""

    def copies(self, traced: int) -> int:
        """Count the layers of the model that a traced one stands for."""
        return self.stands_for.count(traced)

    def layer_of(self, path: str) -> int | None:
        """The traced layer that a module path lies in; None outside the stack."""
        start = f"{self.path}."
        if not path.startswith(start):
            return None
        number = path[len(start) :].partition(".")[0]
        return int(number) if number.isdigit() else None


@dataclass(frozen=True, eq=False)
class OpGraph:
    """One step (or one micro-batch and the optimizer) in execution order.

    >>> spec = TensorSpec((2, 2), "float32")
    >>> relu = Operator("relu", "default", (spec,), (spec,), {"self": "%0"}, 0, 16, 16, True)
    >>> graph = OpGraph(ops=(Op(relu, "forward", "", (0,), (1,)),),
    ...                 buffers=(Buffer(16, "inputs", -1, 1), Buffer(16, "temporaries", 0, 0)), samples=2)
    >>> graph.producers(0)
    ()
    """

    ops: tuple[Op, ...]
    buffers: tuple[Buffer, ...]
    samples: int
    """Samples in the captured (micro-)batch."""
    tokens: int = 0
    """Tokens in it, for language models; 0 elsewhere."""
    parameters: int = 0
    """Trainable and frozen parameters of the model, each shared one counted once."""
    accumulates: bool = False
    """Gradients exist before the step and are added to: one of several micro-batches."""
    info: Mapping[str, Any] = field(default_factory=dict)
    """Where the graph came from: model, precision, library versions."""
    weights: tuple[Weight, ...] = ()
    """The parameters of the whole module that the rank runs, in registration order; empty where they were not
    asked for."""
    stack: Stack | None = None
    """Set where the graph holds the distinct layers of a deep model only."""

    @functools.cached_property
    def adds_to_gradients(self) -> npt.NDArray[np.int64]:
        """The ops of the backward pass that add to gradients of earlier micro-batches."""
        held = {
            number
            for number, buffer in enumerate(self.buffers)
            if buffer.category == "gradients" and buffer.born < 0
        }
        adds = [
            i
            for i, op in enumerate(self.ops)
            if op.phase == "backward" and op.operator.name == "add_" and not held.isdisjoint(op.writes)
        ]
        return np.array(adds, dtype=np.int64)

    @functools.cached_property
    def operators(self) -> tuple[Operator, ...]:
        """The distinct operators, in order of first use."""
        return tuple({id(op.operator): op.operator for op in self.ops}.values())

    @functools.cached_property
    def operator_index(self) -> npt.NDArray[np.int64]:
        """For each op, the position of its operator in ``operators``."""
        position = {id(operator): i for i, operator in enumerate(self.operators)}
        return np.fromiter(
            (position[id(op.operator)] for op in self.ops), dtype=np.int64, count=len(self.ops)
        )

    @functools.cached_property
    def operator_names(self) -> tuple[tuple[str, ...], npt.NDArray[np.int64]]:
        """The distinct names of operators, and for each op the position of its own."""
        return _coded([op.operator.name for op in self.ops])

    @functools.cached_property
    def layers(self) -> tuple[tuple[str, ...], npt.NDArray[np.int64]]:
        """The distinct layers, and for each op the position of its own."""
        return _coded([op.layer for op in self.ops])

    @functools.cached_property
    def phase_index(self) -> npt.NDArray[np.int64]:
        """For each op, the position of its phase in ``PHASES``."""
        position = {phase: i for i, phase in enumerate(PHASES)}
        return np.fromiter((position[op.phase] for op in self.ops), dtype=np.int64, count=len(self.ops))

    @functools.cached_property
    def recomputed(self) -> npt.NDArray[np.bool_]:
        """For each op, whether it runs for the second time."""
        return np.fromiter((op.recomputed for op in self.ops), dtype=np.bool_, count=len(self.ops))

    @functools.cached_property
    def recomputes(self) -> bool:
        """Whether it holds what the model computes again."""
        return bool(self.recomputed.any())

    def column(self, attribute: str) -> npt.NDArray[np.float64]:
        """A numeric attribute of every op's operator (``flops``, ``bytes``, ``launches``) as one array, which
        is kept and cannot be written."""
        known = self._columns
        if attribute not in known:
            per_operator = np.array(
                [getattr(operator, attribute) for operator in self.operators], dtype=np.float64
            )
            column = per_operator[self.operator_index] if len(per_operator) else per_operator
            column.setflags(write=False)
            known[attribute] = column
        return known[attribute]

    @functools.cached_property
    def _columns(self) -> dict[str, npt.NDArray[np.float64]]:
        return {}

    @functools.cached_property
    def _producers(self) -> tuple[tuple[int, ...], ...]:
        last_writer: dict[int, int] = {}
        result = []
        for i, op in enumerate(self.ops):
            result.append(
                tuple(sorted({last_writer[buffer] for buffer in op.reads if buffer in last_writer}))
            )
            last_writer.update(dict.fromkeys(op.writes, i))
        return tuple(result)

    def producers(self, index: int) -> tuple[int, ...]:
        """The earlier ops whose results op ``index`` reads."""
        return self._producers[index]

    def total(self, attribute: str, phase: Phase | None = None) -> float:
        """Sum of a numeric operator attribute over the step, or over one phase of it."""
        values = self.column(attribute)
        return float(values.sum() if phase is None else values[self.phase_index == PHASES.index(phase)].sum())

    def digest(self) -> str:
        """A hash of everything the graph holds."""
        from foretrain.graph import storage

        return storage.digest(self)

    def save(self, path: Path) -> None:
        """Write the graph, compressed; a reader never sees half a file."""
        from foretrain.graph import storage

        storage.write_compressed(path, storage.to_json(self))

    @classmethod
    def load(cls, path: Path) -> OpGraph:
        """Read a graph that ``save`` wrote."""
        from foretrain.graph import storage

        return storage.read_compressed(path, storage.FORMAT, storage.from_json)


def _coded(names: Sequence[str]) -> tuple[tuple[str, ...], npt.NDArray[np.int64]]:
    codes = {name: code for code, name in enumerate(dict.fromkeys(names))}
    return tuple(codes), np.array([codes[name] for name in names], dtype=np.int64)
