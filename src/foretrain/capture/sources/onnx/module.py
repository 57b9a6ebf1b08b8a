"""Loads an ONNX file as an ``nn.Module`` on the meta device that runs its graph with torch functions."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import onnx
import onnx.inliner
import torch
from google.protobuf.message import DecodeError  # type: ignore[import-untyped]
from onnx.external_data_helper import load_external_data_for_tensor, uses_external_data
from torch import Tensor, nn

from foretrain.capture.sources.onnx.fusion import fuse
from foretrain.capture.sources.onnx.graph import (
    Graph,
    OnnxNode,
    OnnxPlan,
    Ref,
    call,
    check_supported,
    specialise,
    value_names,
)
from foretrain.capture.sources.onnx.inputs import InputShapes, input_shapes
from foretrain.capture.sources.onnx.ops import DTYPES
from foretrain.errors import CaptureError, invalid

# Operators that hold weights: what feeds them is trained, even where a converter wrote it as a Constant node.
_WEIGHTED = frozenset(
    {
        "BatchNormalization",
        "Conv",
        "ConvTranspose",
        "GRU",
        "Gather",
        "Gemm",
        "GroupNormalization",
        "InstanceNormalization",
        "LSTM",
        "LayerNormalization",
        "MatMul",
        "PRelu",
        "RMSNormalization",
        "RNN",
        "SimplifiedLayerNormalization",
    }
)
_CONSTANT_TYPES = {
    "value_float": onnx.TensorProto.FLOAT,
    "value_floats": onnx.TensorProto.FLOAT,
    "value_int": onnx.TensorProto.INT64,
    "value_ints": onnx.TensorProto.INT64,
}
_LISTS = (onnx.AttributeProto.INTS, onnx.AttributeProto.FLOATS)


def load_onnx(path: Path, *, batch: int | None = None) -> tuple[nn.Module, tuple[Tensor, ...]]:
    """The model of an ONNX file and inputs to trace it with, for one batch size.

    The shapes of the inputs are built into the module: load the file again for another batch size.
    """
    return build(path, batch=batch, keep_data=False)


def build(path: Path, *, batch: int | None = None, keep_data: bool) -> tuple[OnnxModule, tuple[Tensor, ...]]:
    """What ``load_onnx`` gives, or with ``keep_data`` the module on the CPU with the weights of the file."""
    if batch is not None and batch < 1:
        raise invalid("batch", batch, "a whole number of at least 1")
    try:
        source = _Source.open(path)
        graph = source.graph()
        check_supported(graph)
        shapes = input_shapes({name: _dims(source.input(name)) for name in graph.inputs}, batch)
        inputs = {name: source.example(name, shape) for name, shape in shapes.shapes.items()}
        plan = _plan(source, graph, inputs, shapes)
    except CaptureError as error:
        raise CaptureError(f"{path}: {error}") from error
    return OnnxModule(fuse(plan), graph, source.data() if keep_data else None), tuple(inputs.values())


def _plan(source: _Source, graph: Graph, inputs: dict[str, Tensor], shapes: InputShapes) -> OnnxPlan:
    """The steps for these inputs; where a fixed batch was replaced, whatever fails is because of that."""
    try:
        plan = specialise(graph, inputs)
        for value in source.model.graph.output if shapes.overridden else ():
            if _dims(value)[:1] == [1] and plan.tensors[value.name].shape[:1] == (1,):
                raise CaptureError(f"output {value.name!r} has still a first dimension of 1")
    except CaptureError as error:
        if not shapes.overridden:
            raise
        raise CaptureError(
            f"the file is exported with a fixed batch of 1 and does not run with another one ({error}); "
            "export it with a dynamic batch dimension, or ask for batch 1"
        ) from error
    return plan


class OnnxModule(nn.Module):
    """Runs the steps of a plan; weights and constants are parameters and buffers named after the file's
    tensors."""

    def __init__(self, plan: OnnxPlan, graph: Graph, data: dict[str, Tensor] | None) -> None:
        """With ``data`` the tensors hold values, else they are on meta."""
        super().__init__()
        self._steps = plan.steps
        self._inputs, self._outputs = graph.inputs, plan.outputs
        self._attributes: dict[str, str] = {}
        made = {name for step in plan.steps for name in step.outputs} | set(graph.inputs)
        for name in dict.fromkeys([name for step in plan.steps for name in step.needs] + list(plan.outputs)):
            if name not in made:
                tensor = plan.tensors[name]
                value = tensor.to("meta") if data is None else data.get(name, tensor)
                self._hold(name, value, trained=name in graph.trained)
        self._endings = self._last_uses()

    def _hold(self, name: str, value: Tensor, *, trained: bool) -> None:
        attribute = self._attribute_for(name)
        self._attributes[name] = attribute
        if trained:
            self.register_parameter(attribute, nn.Parameter(value))
        else:
            self.register_buffer(attribute, value)

    def _attribute_for(self, name: str) -> str:
        stem = re.sub(r"\W+", "_", name).strip("_") or "weight"
        attribute, number = stem, 1
        while hasattr(self, attribute):
            number += 1
            attribute = f"{stem}_{number}"
        return attribute

    def _last_uses(self) -> list[tuple[str, ...]]:
        """For each step, the values that no later step needs, so that they can be let go of."""
        needed_later = set(self._outputs) | set(self._attributes)
        endings: list[tuple[str, ...]] = []
        for step in reversed(self._steps):
            ending = [
                name for name in dict.fromkeys((*step.needs, *step.outputs)) if name not in needed_later
            ]
            needed_later.update(ending)
            endings.append(tuple(ending))
        return endings[::-1]

    def forward(self, *inputs: Tensor) -> Tensor | tuple[Tensor, ...]:
        values = dict(zip(self._inputs, inputs, strict=True))
        for step, ending in zip(self._steps, self._endings, strict=True):
            operands = [self._find(a.name, values) if isinstance(a, Ref) else a for a in step.arguments]
            values.update(zip(step.outputs, call(step, operands, training=self.training), strict=False))
            del operands
            for name in ending:
                values.pop(name, None)
        outputs = tuple(self._find(name, values) for name in self._outputs)
        return outputs[0] if len(outputs) == 1 else outputs

    def _find(self, name: str, values: dict[str, Tensor]) -> Tensor:
        attribute = self._attributes.get(name)
        return values[name] if attribute is None else getattr(self, attribute)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Source:
    """An opened file."""

    path: Path
    model: Any
    opset: int

    @classmethod
    def open(cls, path: Path) -> _Source:
        try:
            model = onnx.load(str(path), load_external_data=False)
        except (OSError, DecodeError) as error:
            raise CaptureError(f"cannot be read as an ONNX file: {error}") from error
        if not model.graph.node:
            raise CaptureError("holds no ONNX graph")
        if model.functions:
            model = onnx.inliner.inline_local_functions(model)
        opset = max(
            (entry.version for entry in model.opset_import if entry.domain in ("", "ai.onnx")), default=1
        )
        return cls(path=path, model=model, opset=opset)

    def graph(self) -> Graph:
        """The main graph, with the values of constants that may decide about shapes, and meta tensors for
        others."""
        return self._graph(self.model.graph)

    def data(self) -> dict[str, Tensor]:
        """The values of all weights."""
        return {name: self._tensor(tensor) for name, tensor in _all_constants(self.model.graph).items()}

    def input(self, name: str) -> Any:
        return next(value for value in self.model.graph.input if value.name == name)

    def example(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """A meta tensor for this input; integers are token ids, 64 bits wide."""
        dtype = _dtype(self.input(name).type.tensor_type.elem_type, name)
        return torch.empty(shape, dtype=torch.int64 if dtype == torch.int32 else dtype, device="meta")

    def _graph(self, proto: Any) -> Graph:
        nodes = tuple(self._node(node) for node in proto.node if node.op_type != "Constant")
        constants = _constants(proto)
        weights = {name for node in nodes if node.kind in _WEIGHTED for name in node.inputs}
        weights |= {
            tensor.name for tensor in proto.initializer if tensor.name in weights or not self._is_mask(tensor)
        }
        known = value_names(nodes, self.opset) | (constants.keys() - weights)
        tensors = {name: self._constant(tensor, known=name in known) for name, tensor in constants.items()}
        return Graph(
            nodes=nodes,
            inputs=tuple(value.name for value in proto.input if value.name not in constants),
            outputs=tuple(value.name for value in proto.output),
            tensors=tensors,
            trained=_trained(nodes, {name: tensors[name] for name in weights & tensors.keys()}),
            opset=self.opset,
        )

    def _node(self, node: Any) -> OnnxNode:
        return OnnxNode(
            kind=node.op_type,
            domain=node.domain,
            name=node.name,
            inputs=tuple(node.input),
            outputs=tuple(node.output),
            attributes={attribute.name: self._attribute(attribute) for attribute in node.attribute},
        )

    def _attribute(self, attribute: Any) -> Any:
        value = onnx.helper.get_attribute_value(attribute)
        if isinstance(value, bytes):
            return value.decode()
        if isinstance(value, onnx.GraphProto):
            return self._graph(value)
        if isinstance(value, onnx.TensorProto):
            return self._tensor(value)
        if attribute.type == onnx.AttributeProto.STRINGS:
            return [item.decode() for item in value]
        return list(value) if attribute.type in _LISTS else value

    def _constant(self, tensor: Any, *, known: bool) -> Tensor:
        """With its values where they are known and there, else on meta; integers and scalars are always
        known."""
        meta = torch.empty(tuple(tensor.dims), dtype=_dtype(tensor.data_type, tensor.name), device="meta")
        known = known or not meta.is_floating_point() or meta.ndim == 0 or meta.numel() == 0
        return self._tensor(tensor) if known and self._has_data(tensor) else meta

    def _has_data(self, tensor: Any) -> bool:
        if not uses_external_data(tensor):
            return True
        location: str = next(entry.value for entry in tensor.external_data if entry.key == "location")
        return (self.path.parent / location).exists()

    def _is_mask(self, tensor: Any) -> bool:
        """Whether a matrix has just two values, as a mask of attention has that an exporter worked out."""
        if len(tensor.dims) < 2 or not self._has_data(tensor):
            return False
        values = self._tensor(tensor)
        low, high = values.min(), values.max()
        return bool(low != high) and bool(((values == low) | (values == high)).all())

    def _tensor(self, proto: Any) -> Tensor:
        tensor = onnx.TensorProto()
        tensor.CopyFrom(proto)
        if uses_external_data(tensor):
            load_external_data_for_tensor(tensor, str(self.path.parent))
        dtype = _dtype(tensor.data_type, tensor.name)
        array = onnx.numpy_helper.to_array(tensor)
        native = array.dtype.kind in "biufc" and array.dtype.isbuiltin
        return torch.from_numpy((array if native else array.astype("float32")).copy()).to(dtype)


def _trained(nodes: tuple[OnnxNode, ...], weights: dict[str, Tensor]) -> frozenset[str]:
    """The float weights of a graph and its subgraphs, less running statistics and what is a known
    constant."""
    statistics = {name for node in nodes if node.kind == "BatchNormalization" for name in node.inputs[3:5]}
    own = {name for name, tensor in weights.items() if tensor.is_meta and tensor.is_floating_point()}
    inner = (
        value.trained for node in nodes for value in node.attributes.values() if isinstance(value, Graph)
    )
    return frozenset(own - statistics).union(*inner)


def _constants(proto: Any) -> dict[str, Any]:
    """The initializers of a graph and its Constant nodes, which are the same thing written otherwise."""
    nodes = {node.output[0]: _constant_of(node) for node in proto.node if node.op_type == "Constant"}
    return {tensor.name: tensor for tensor in proto.initializer} | nodes


def _all_constants(proto: Any) -> dict[str, Any]:
    constants = _constants(proto)
    for node in proto.node:
        for attribute in node.attribute:
            if attribute.type == onnx.AttributeProto.GRAPH:
                constants |= _all_constants(attribute.g)
    return constants


def _constant_of(node: Any) -> Any:
    attribute = node.attribute[0]
    value = onnx.helper.get_attribute_value(attribute)
    if attribute.name == "value":
        return value
    if attribute.name not in _CONSTANT_TYPES:
        raise CaptureError(f"Constant node {node.name!r}: {attribute.name} is not a tensor of numbers")
    values, dims = (list(value), [len(value)]) if attribute.type in _LISTS else ([value], [])
    return onnx.helper.make_tensor(node.output[0], _CONSTANT_TYPES[attribute.name], dims, values)


def _dtype(code: int, name: str) -> torch.dtype:
    if code not in DTYPES:
        raise CaptureError(
            f"tensor {name!r}: the type {onnx.TensorProto.DataType.Name(code)} has no torch equivalent"
        )
    return DTYPES[code]


def _dims(value: Any) -> list[int | str]:
    if not value.type.HasField("tensor_type"):
        raise CaptureError(f"{value.name!r} is not a tensor")
    return [dim.dim_value if dim.dim_value > 0 else dim.dim_param for dim in value.type.tensor_type.shape.dim]
