"""Reduces an ONNX graph to the steps that need data; work on shapes is done here, once."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from foretrain.capture.sources.onnx import layers, shapes, windows  # noqa: F401  (they register their operators)
from foretrain.capture.sources.onnx.ops import OnnxOperator, find
from foretrain.errors import CaptureError

# Constants with more elements are no arithmetic on shapes: they are handled as data.
LARGEST_KNOWN = 2**20

_STANDARD_DOMAINS = ("", "ai.onnx")
_EXTENSION_DOMAIN = "com.microsoft"
_LATEST = 1 << 30


@dataclass(frozen=True, kw_only=True, slots=True)
class OnnxNode:
    """One operator of the file.

    An attribute that is a subgraph is a ``Graph``; an absent optional input is ``""``.
    """

    kind: str
    domain: str
    name: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    attributes: dict[str, Any]

    def __str__(self) -> str:
        return (
            f"node {self.name!r} ({self.kind})"
            if self.name
            else f"a {self.kind} node (its output: {self.outputs[0]!r})"
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Graph:
    """A graph in plain terms: ``tensors`` holds known constants on the CPU and all other weights on meta."""

    nodes: tuple[OnnxNode, ...]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    tensors: dict[str, Tensor]
    trained: frozenset[str]
    opset: int

    def all_nodes(self) -> Iterable[OnnxNode]:
        """The nodes of this graph and of the subgraphs in it."""
        for node in self.nodes:
            yield node
            for value in node.attributes.values():
                if isinstance(value, Graph):
                    yield from value.all_nodes()


@dataclass(frozen=True, slots=True)
class Ref:
    """An argument that is a tensor: an input, a weight, or what an earlier step put out."""

    name: str


@dataclass(frozen=True, kw_only=True, slots=True)
class OnnxStep:
    """One call of the finished module: arguments are ``Ref``s, numbers, lists of numbers, or None."""

    label: str
    kind: str
    operator: OnnxOperator
    arguments: tuple[Any, ...]
    attributes: dict[str, Any]
    outputs: tuple[str, ...]

    @property
    def needs(self) -> tuple[str, ...]:
        return tuple(argument.name for argument in self.arguments if isinstance(argument, Ref))


@dataclass(frozen=True, kw_only=True, slots=True)
class OnnxPlan:
    """The steps in order; ``tensors`` has each value's shape and type, with data where it is a constant."""

    steps: list[OnnxStep]
    outputs: tuple[str, ...]
    tensors: dict[str, Tensor]


def operator_of(node: OnnxNode, opset: int) -> OnnxOperator | None:
    if node.domain in _STANDARD_DOMAINS:
        return find(node.kind, opset)
    return find(node.kind, _LATEST) if node.domain == _EXTENSION_DOMAIN else None


def check_supported(graph: Graph) -> None:
    """Refuse a graph with unknown operators, all of them in one message."""
    missing: Counter[str] = Counter()
    for node in graph.all_nodes():
        if node.kind != "If" and operator_of(node, graph.opset) is None:
            name = node.kind if node.domain in _STANDARD_DOMAINS else f"{node.domain}::{node.kind}"
            missing[name] += 1
    if missing:
        listed = ", ".join(f"{name} ({count})" for name, count in sorted(missing.items()))
        raise CaptureError(f"unsupported ONNX operators at opset {graph.opset} (with their count): {listed}")


def value_names(nodes: Sequence[OnnxNode], opset: int) -> set[str]:
    """Every name whose value, not only its shape, decides about shapes."""
    producers = {name: node for node in nodes for name in node.outputs}
    wanted: set[str] = set()
    stack = [name for node in nodes for name in _read_inputs(node, opset)]
    while stack:
        name = stack.pop()
        if not name or name in wanted:
            continue
        wanted.add(name)
        producer = producers.get(name)
        if producer is not None and producer.kind not in ("Shape", "Size"):
            stack.extend(producer.inputs)
    return wanted


def _read_inputs(node: OnnxNode, opset: int) -> list[str]:
    operator = operator_of(node, opset)
    if operator is None:
        return list(node.inputs) if node.kind == "If" else []
    return [node.inputs[i] for i in operator.reads if i < len(node.inputs)]


def specialise(graph: Graph, inputs: Mapping[str, Tensor]) -> OnnxPlan:
    """Run the graph once on meta tensors: what is known becomes a constant, the rest becomes steps."""
    run = _Run(opset=graph.opset, values={**graph.tensors, **inputs})
    with torch.no_grad():
        run.visit_all(graph.nodes)
    return OnnxPlan(steps=run.steps, outputs=graph.outputs, tensors=run.values)


@dataclass(kw_only=True, slots=True)
class _Run:
    opset: int
    values: dict[str, Tensor]
    steps: list[OnnxStep] = field(default_factory=list)

    def visit_all(self, nodes: Iterable[OnnxNode]) -> None:
        for node in nodes:
            try:
                self._visit(node)
            except (RuntimeError, TypeError, ValueError, IndexError, KeyError, NotImplementedError) as error:
                raise CaptureError(f"{node}: {self._reason(node, error)}") from error

    def _visit(self, node: OnnxNode) -> None:
        if node.kind == "If":
            self._branch(node)
            return
        operator = operator_of(node, self.opset)
        assert operator is not None, "check_supported comes first"
        tensors = [self._value(name) for name in node.inputs]
        arguments = self._arguments(node, operator, tensors)
        step = OnnxStep(
            label=node.name,
            kind=node.kind,
            operator=operator,
            arguments=arguments,
            attributes=node.attributes,
            outputs=node.outputs,
        )
        on_meta = self._is_data(operator, tensors)
        results = call(step, [self._operand(argument, on_meta) for argument in arguments], training=False)
        self.values.update(zip((name or "" for name in node.outputs), results, strict=False))
        if any(result.is_meta for result in results):
            self.steps.append(step)

    def _value(self, name: str) -> Tensor | None:
        if name and name not in self.values:
            raise ValueError(f"the input {name!r} is not put out by any node that could be run")
        return self.values[name] if name else None

    @staticmethod
    def _is_data(operator: OnnxOperator, tensors: Sequence[Tensor | None]) -> bool:
        operands = [x for i, x in enumerate(tensors) if x is not None and i not in operator.reads]
        return any(x.is_meta or x.numel() > LARGEST_KNOWN for x in operands)

    def _arguments(
        self, node: OnnxNode, operator: OnnxOperator, tensors: Sequence[Tensor | None]
    ) -> tuple[Any, ...]:
        on_meta = self._is_data(operator, tensors)
        arguments: list[Any] = []
        for i, (name, tensor) in enumerate(zip(node.inputs, tensors, strict=True)):
            if tensor is None:
                arguments.append(None)
            elif not tensor.is_meta and (
                i in operator.reads or (on_meta and i in operator.scalars and tensor.ndim == 0)
            ):
                arguments.append(tensor.tolist())
            else:
                arguments.append(Ref(name))
        return tuple(arguments)

    def _operand(self, argument: Any, on_meta: bool) -> Any:
        if not isinstance(argument, Ref):
            return argument
        value = self.values[argument.name]
        return value.to("meta") if on_meta else value

    def _branch(self, node: OnnxNode) -> None:
        condition = self._value(node.inputs[0])
        if condition is None or condition.is_meta:
            raise NotImplementedError("its condition depends on the data")
        branch: Graph = node.attributes["then_branch" if bool(condition) else "else_branch"]
        self.values.update(branch.tensors)
        self.visit_all(branch.nodes)
        for inner, outer in zip(branch.outputs, node.outputs, strict=True):
            link = OnnxNode(
                kind="Identity", domain="", name=node.name, inputs=(inner,), outputs=(outer,), attributes={}
            )
            self._visit(link)

    def _reason(self, node: OnnxNode, error: Exception) -> str:
        unknown = [
            name
            for name in _read_inputs(node, self.opset)
            if name in self.values and self.values[name].is_meta
        ]
        if unknown:
            names = ", ".join(unknown)
            return f"the shape of its output depends on the values of {names}, known only when data is there"
        said = str(error).splitlines()[:1]
        return f"{type(error).__name__}: {said[0]}" if said else type(error).__name__


def call(step: OnnxStep, operands: Sequence[Any], *, training: bool) -> tuple[Tensor, ...]:
    """Call a step's function on its resolved arguments."""
    context = {"training": training, "outputs": len(step.outputs)}
    added = {name: context[name] for name in step.operator.context}
    result = step.operator.function(*operands, **step.attributes, **added)
    return (result,) if isinstance(result, Tensor) else tuple(result)
