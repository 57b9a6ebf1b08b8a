"""Merges attention that a model writes out (product, softmax, product) into the one kernel of a framework."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from foretrain.graph import Buffer, Op, Operator, OpGraph, TensorSpec
from foretrain.graph.flops import flops
from foretrain.graph.opset import traits
from foretrain.graph.runs import FUSED

FORWARD = "_scaled_dot_product_flash_attention"
BACKWARD = "_scaled_dot_product_flash_attention_backward"
_FP32 = 4


@dataclass(frozen=True, slots=True)
class _Attention:
    """The calls of one attention that read or write its scores, and the tensors that go in and out."""

    forward: tuple[int, ...]
    backward: tuple[int, ...]
    query: TensorSpec
    key: TensorSpec
    value: TensorSpec

    def around_softmax(self, graph: OpGraph) -> _Attention:
        """Keep what a fused softmax does: scaling, mask and softmax, neither products nor dropout."""
        forward, backward = (
            tuple(i for i in calls if not _is_beside_softmax(graph.ops[i].operator.name))
            for calls in (self.forward, self.backward)
        )
        return replace(self, forward=forward, backward=backward)

    @property
    def scores(self) -> TensorSpec:
        return replace(self.query, shape=(*self.query.shape[:-1], self.key.shape[-2]))


@functools.lru_cache(maxsize=128)
def with_fused_softmax(graph: OpGraph) -> OpGraph:
    """The graph with scaling, mask and softmax of each written-out attention merged."""
    attentions = [
        attention for layer in _layers_with_softmax(graph) if (attention := _find(graph, layer)) is not None
    ]
    between = [attention.around_softmax(graph) for attention in attentions]
    return _merge(graph, between, causal=False, softmax=True) if attentions else graph


@functools.lru_cache(maxsize=128)
def with_flash_attention(graph: OpGraph, *, causal: bool) -> OpGraph:
    """The graph with every written-out attention merged, its scores never kept, and attention of torch's
    memory-efficient kernels, which it takes where keys are wider than values (MLA), by the framework's."""
    graph = _without_efficient_kernels(graph)
    attentions = [
        attention for layer in _layers_with_softmax(graph) if (attention := _find(graph, layer)) is not None
    ]
    return _with_windows(_merge(graph, attentions, causal=causal) if attentions else graph)


def _with_windows(graph: OpGraph) -> OpGraph:
    """Attention over a window of keys, which kernels of frameworks know of, says so in place of a mask."""
    windows: Mapping[str, int] = graph.info.get("windows", {})
    if not windows:
        return graph
    changed: dict[tuple[int, int], Operator] = {}

    def of(op: Op) -> Op:
        if op.layer not in windows or traits(op.operator.name).kind != "attention":
            return op
        args = {name: value for name, value in op.operator.args.items() if name != "attn_bias"}
        windowed = replace(op.operator, args={**args, "window": windows[op.layer]})
        return replace(op, operator=changed.setdefault((id(op.operator), windows[op.layer]), windowed))

    return replace(graph, ops=tuple(map(of, graph.ops)))


_EFFICIENT = "_scaled_dot_product_efficient_attention"


def _without_efficient_kernels(graph: OpGraph) -> OpGraph:
    if not any(operator.name.startswith(_EFFICIENT) for operator in graph.operators):
        return graph
    renamed = {
        operator: replace(operator, name=operator.name.replace(_EFFICIENT, FORWARD))
        for operator in graph.operators
        if operator.name.startswith(_EFFICIENT)
    }
    ops = (replace(op, operator=renamed.get(op.operator, op.operator)) for op in graph.ops)
    return replace(graph, ops=tuple(ops))


def _layers_with_softmax(graph: OpGraph) -> Iterable[str]:
    return dict.fromkeys(
        op.layer for op in graph.ops if op.phase == "forward" and op.operator.name == "_softmax"
    )


def _is_product(name: str) -> bool:
    return traits(name).kind == "batched product"


def _is_beside_softmax(name: str) -> bool:
    return _is_product(name) or name in ("native_dropout", "native_dropout_backward")


def _find(graph: OpGraph, layer: str) -> _Attention | None:
    """Find a layer's attention by the size of its scores: all its calls that touch a tensor of that size
    belong to it."""
    own = [i for i, op in enumerate(graph.ops) if op.layer == layer and op.phase != "optimizer"]
    scores = _score_sizes(graph, own)
    touching = [
        i
        for i in own
        if any(
            spec.numel in scores for spec in (*graph.ops[i].operator.inputs, *graph.ops[i].operator.outputs)
        )
    ]
    forward = tuple(i for i in touching if graph.ops[i].phase == "forward")
    backward = tuple(i for i in touching if graph.ops[i].phase == "backward")
    products = [graph.ops[i].operator for i in forward if _is_product(graph.ops[i].operator.name)]
    if len(products) != 2:
        return None
    (query, key), (_, value) = (operator.inputs[-2:] for operator in products)
    heads, length, size = query.shape
    samples = graph.samples if heads % graph.samples == 0 else 1

    def shaped(tokens: int, width: int) -> TensorSpec:
        return TensorSpec((samples, heads // samples, tokens, width), query.dtype)

    return _Attention(
        forward,
        backward,
        shaped(length, size),
        shaped(key.shape[-1], size),
        shaped(key.shape[-1], value.shape[-1]),
    )


def _score_sizes(graph: OpGraph, own: Sequence[int]) -> set[int]:
    """Read the sizes of the scores as the product makes and as the softmax takes them: with a sink, a column
    more."""
    from_product = 0
    for i in own:
        operator = graph.ops[i].operator
        if _is_product(operator.name):
            from_product = operator.outputs[0].numel
        if operator.name == "_softmax":
            return {from_product, operator.outputs[0].numel}
    return set()


def _merge(
    graph: OpGraph, attentions: Sequence[_Attention], *, causal: bool, softmax: bool = False
) -> OpGraph:
    gone = {i for attention in attentions for i in (*attention.forward, *attention.backward)}
    inserted: dict[int, Op] = {}
    sums: list[tuple[int, int, int]] = []  # of the logarithms that attention keeps: born, dies, bytes
    for attention in attentions:
        for calls, make in ((attention.forward, _forward), (attention.backward, _backward)):
            if calls:
                operator = _softmax(attention, len(calls)) if softmax else make(attention, causal)
                inserted[calls[-1]] = _in_place_of(graph, calls, operator)
        if attention.backward and not softmax:
            rows = attention.query.numel // attention.query.shape[-1]
            sums.append((attention.forward[-1], attention.backward[-1], rows * _FP32))
    place: dict[int, int] = {}
    ops: list[Op] = []
    for i, op in enumerate(graph.ops):
        place[i] = len(ops) - (1 if i in gone and i not in inserted else 0)
        if i in inserted:
            ops.append(inserted[i])
        elif i not in gone:
            ops.append(op)
    place[-1], place[len(graph.ops)] = -1, len(ops)
    until: dict[int, int] = {}
    for i, op in inserted.items():
        for buffer in op.reads:
            until[buffer] = max(until.get(buffer, -1), place[i])
    buffers = [
        replace(
            buffer,
            born=max(place[buffer.born], -1),
            dies=max(place[buffer.dies], until.get(i, -1)),
            size_bytes=0 if _vanishes(i, buffer, graph, gone) else buffer.size_bytes,
        )
        for i, buffer in enumerate(graph.buffers)
    ]
    buffers += [Buffer(size, "activations", place[born], place[dies]) for born, dies, size in sums]
    return replace(graph, ops=tuple(ops), buffers=tuple(buffers))


def _vanishes(number: int, buffer: Buffer, graph: OpGraph, gone: set[int]) -> bool:
    """Whether only merged calls ever touch the buffer."""
    return buffer.born in gone and number not in _touched_outside(graph, frozenset(gone))


@functools.lru_cache(maxsize=4)
def _touched_outside(graph: OpGraph, gone: frozenset[int]) -> frozenset[int]:
    return frozenset(b for i, op in enumerate(graph.ops) if i not in gone for b in (*op.reads, *op.writes))


def _in_place_of(graph: OpGraph, calls: Sequence[int], operator: Operator) -> Op:
    ops = [graph.ops[i] for i in calls]
    outside = _touched_outside(graph, frozenset(calls))
    written = tuple(dict.fromkeys(b for op in ops for b in op.writes if b in outside))
    used = (b for op in ops if op.operator.launches for b in op.reads)  # views read nothing
    read = tuple(dict.fromkeys(b for b in used if b in outside and b not in written))
    hooks = sum(op.hooks for op in ops)
    return Op(operator, ops[0].phase, ops[0].layer, read, written, ops[0].recomputed, hooks)


def _forward(attention: _Attention, causal: bool) -> Operator:
    inputs = (attention.query, attention.key, attention.value)
    return _operator(
        FORWARD,
        inputs,
        (_output(attention),),
        {"query": "%0", "key": "%1", "value": "%2", "is_causal": causal},
    )


def _backward(attention: _Attention, causal: bool) -> Operator:
    out = _output(attention)
    inputs = (out, attention.query, attention.key, attention.value, out)
    args = {"grad_out": "%0", "query": "%1", "key": "%2", "value": "%3", "out": "%4", "is_causal": causal}
    return _operator(BACKWARD, inputs, inputs[1:4], args)


def _softmax(attention: _Attention, merged: int) -> Operator:
    """Make one kernel that reads scores (or their gradients and the probabilities) and writes as many."""
    scores = attention.scores
    inputs = (scores, scores) if merged > 2 else (scores,)
    return _operator(FUSED, inputs, (scores,), {"ops": ["_softmax"], "kernels": 1})


def _output(attention: _Attention) -> TensorSpec:
    return replace(attention.query, shape=(*attention.query.shape[:-1], attention.value.shape[-1]))


def _operator(
    name: str, inputs: tuple[TensorSpec, ...], outputs: tuple[TensorSpec, ...], args: dict[str, object]
) -> Operator:
    read, written = (sum(spec.size_bytes for spec in specs) for specs in (inputs, outputs))
    return Operator(
        name,
        "default",
        inputs,
        outputs,
        args,
        flops(name, args, inputs, outputs),
        read,
        written,
        launches=True,
    )
