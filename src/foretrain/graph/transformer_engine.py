"""Rewrites a graph to what Transformer Engine does beside casting tensors to fp8: weights stay cast for all
micro-batches of a step, tensor parallelism gathers what is cast already, and numbers may have four bits."""

from __future__ import annotations

import dataclasses
import functools

from foretrain.graph.editing import Edit
from foretrain.graph.ir import PACKED, Op, Operator, OpGraph, TensorSpec
from foretrain.graph.opset import SCALED

_FP8 = "float8_e4m3fn"
_CAST, _CAST_RESULTS = "te.cast_transpose", 4
"""Numbers as they lie and transposed, and the scales of both."""
_LARGEST = "te.amax"


@functools.lru_cache(maxsize=64)
def with_kept_casts(graph: OpGraph) -> OpGraph:
    """A later one of several micro-batches, where Transformer Engine has the weights in fp8 from the first:
    they are there before the step, and stay."""
    edit = Edit(graph)
    kept: set[int] = set()
    for i, op in enumerate(graph.ops):
        if op.operator.name.startswith("te.") and all(
            buffer in kept or graph.buffers[buffer].category == "weights" for buffer in op.reads
        ):
            edit.drop(i)
            kept.update(op.writes)
    for buffer in kept:
        edit.keep_buffer(buffer)
    return edit.graph()


@functools.lru_cache(maxsize=64)
def with_gathers_in_fp8(graph: OpGraph) -> OpGraph:
    """Cast before it is gathered what tensor teams gather for products in fp8 alone; of an input, each rank
    keeps its own part, and gathers it again for the gradient of the weight."""
    edit = Edit(graph)
    for i, op in enumerate(graph.ops):
        if op.operator.name != "all_gather" or op.operator.overload != "tensor" or len(op.writes) != 1:
            continue
        readers = edit.readers(op.writes[0])
        casts = [reader for reader in readers if graph.ops[reader].operator.name == _CAST]
        if not casts or any(graph.ops[reader].operator.name not in (_CAST, _LARGEST) for reader in readers):
            continue
        gather = _gather(op.operator)
        edit.change_buffer(op.writes[0], gather.outputs[0].size_bytes, "temporaries")
        edit.replace(i, dataclasses.replace(op, operator=gather))
        for reader in readers:
            if graph.ops[reader].operator.name == _LARGEST:
                edit.replace(reader, _of_part(graph.ops[reader], op))
        for cast in casts:
            if op.phase == "forward":
                _gather_again(edit, cast, gather)
    return edit.graph()


def _of_part(largest: Op, gather: Op) -> Op:
    """The largest value of what a rank has before a gather; ranks compare theirs, a number each."""
    inputs = gather.operator.inputs
    read = sum(spec.size_bytes for spec in inputs)
    return dataclasses.replace(
        largest,
        operator=dataclasses.replace(largest.operator, inputs=inputs, bytes_read=read),
        reads=gather.reads,
    )


@functools.lru_cache(maxsize=64)
def without_transposed_copies(graph: OpGraph) -> OpGraph:
    """Leave out transposed copies, on devices whose products in fp8 take operands as they lie: from Blackwell
    on, where one scale is for all of a tensor."""
    edit = Edit(graph)
    for i, op in enumerate(graph.ops):
        if op.operator.name != _CAST or len(op.operator.outputs) != _CAST_RESULTS:
            continue
        numbers, transposed, *scales = op.writes
        single = dataclasses.replace(
            op.operator,
            outputs=(op.operator.outputs[0], *op.operator.outputs[2:]),
            bytes_written=op.operator.bytes_written - op.operator.outputs[1].size_bytes,
        )
        edit.replace(i, dataclasses.replace(op, operator=single, writes=(numbers, *scales)))
        edit.unite(numbers, transposed)
    return edit.graph()


@functools.lru_cache(maxsize=64)
def with_four_bits(graph: OpGraph) -> OpGraph:
    """Put two numbers in a byte where the step has one (NVFP4)."""
    edit = Edit(graph)
    operators: dict[int, Operator] = {}
    for i, op in enumerate(graph.ops):
        if op.operator.name != SCALED and not op.operator.name.startswith("te."):
            continue
        packed = operators.setdefault(id(op.operator), _packed(op.operator))
        edit.replace(i, dataclasses.replace(op, operator=packed))
        for number, spec, before in zip(op.writes, packed.outputs, op.operator.outputs, strict=False):
            if spec != before:
                edit.halve_buffer(number)
    return edit.graph()


def _packed(operator: Operator) -> Operator:
    inputs = tuple(_two_in_a_byte(spec, first=i != 1) for i, spec in enumerate(operator.inputs))
    outputs = tuple(_two_in_a_byte(spec) for spec in operator.outputs)
    return operator.on(inputs, outputs)


def _two_in_a_byte(spec: TensorSpec, *, first: bool = True) -> TensorSpec:
    """A matrix in fp8 as one of pairs along its rows, or, as the second operand, along its columns."""
    if not spec.dtype.startswith("float8") or len(spec.shape) != 2:
        return spec
    rows, columns = spec.shape
    shape = (rows, columns // 2) if first else (rows // 2, columns)
    return TensorSpec(shape, PACKED, None if first else (1, rows // 2))


def _gather(operator: Operator) -> Operator:
    """Gather in fp8 instead."""
    inputs, outputs = (
        tuple(TensorSpec(spec.shape, _FP8) for spec in specs) for specs in (operator.inputs, operator.outputs)
    )
    return operator.on(inputs, outputs)


def _gather_again(edit: Edit, cast: int, gather: Operator) -> None:
    """Make an input anew before its first use in the backward pass, from what ranks kept, and transpose it
    where its cast did that too."""
    op = edit.old.ops[cast]
    transposes = len(op.operator.outputs) == _CAST_RESULTS
    kept = op.writes[1] if transposes else op.writes[0]
    later = [i for i in edit.readers(kept, views=True) if edit.old.ops[i].phase == "backward"]
    if not later:
        return
    whole, layer = edit.old.buffers[kept].size_bytes, edit.old.ops[later[0]].layer
    part = edit.add_buffer(gather.inputs[0].size_bytes, "activations")
    gathered = edit.add_buffer(whole, "temporaries")
    edit.change_buffer(kept, whole, "temporaries")
    rest = op.writes[2:] if transposes else op.writes[1:]
    edit.replace(cast, dataclasses.replace(op, writes=(op.writes[0], part, *rest)))
    edit.insert(later[0], Op(gather, "backward", layer, (part,), (gathered,)))
    if transposes:
        edit.insert(later[0], Op(_transposing(op.operator), "backward", layer, (gathered,), (kept,)))
        return
    for i in later:
        reader = edit.old.ops[i]
        reads = tuple(gathered if number == kept else number for number in reader.reads)
        edit.replace(i, dataclasses.replace(reader, reads=reads))


def _transposing(cast: Operator) -> Operator:
    """A transposition of what a cast has written."""
    source, result = cast.outputs[:2]
    return dataclasses.replace(
        cast,
        inputs=(source,),
        outputs=(result,),
        args={},
        bytes_read=source.size_bytes,
        bytes_written=result.size_bytes,
    )
