"""Joins chains of ONNX steps that torch runs as one kernel."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from foretrain.capture.sources.onnx.graph import OnnxPlan, OnnxStep, Ref
from foretrain.capture.sources.onnx.layers import gelu, layer_norm, linear, swish
from foretrain.capture.sources.onnx.ops import Function, OnnxOperator


@dataclass(kw_only=True, slots=True)
class _Chains:
    """Who makes which value and how often it is used."""

    plan: OnnxPlan
    makers: dict[str, OnnxStep]
    uses: Counter[str]

    def maker(self, value: Any, kind: str, *, uses: int = 1) -> OnnxStep | None:
        """The step of this kind that makes a value with exactly this many uses."""
        step = self.makers.get(value.name) if isinstance(value, Ref) else None
        return step if step is not None and step.kind == kind and self.uses[value.name] == uses else None

    def rank(self, value: Any) -> int:
        return self.plan.tensors[value.name].ndim if isinstance(value, Ref) else -1


# What a pattern found: the function, its arguments and attributes, and the steps that are no longer needed.
_Match = tuple[Function, tuple[Any, ...], dict[str, Any], tuple[OnnxStep, ...]]
_Pattern = Callable[[OnnxStep, _Chains], _Match | None]


def _is(value: Any, number: float) -> bool:
    return isinstance(value, int | float) and math.isclose(value, number, rel_tol=1e-4)


def _either_way(step: OnnxStep) -> tuple[tuple[Any, Any], ...]:
    first, second = step.arguments
    return (first, second), (second, first)


def _linear(step: OnnxStep, chains: _Chains) -> _Match | None:
    """MatMul(x, matrix) + vector."""
    if step.kind != "Add":
        return None
    for product, bias in _either_way(step):
        matmul = chains.maker(product, "MatMul")
        if (
            matmul
            and chains.rank(bias) == 1
            and chains.rank(matmul.arguments[1]) == 2
            and _fits(matmul, bias, chains)
        ):
            return linear, (*matmul.arguments, bias), {}, (matmul,)
    return None


def _fits(matmul: OnnxStep, bias: Ref, chains: _Chains) -> bool:
    tensors = chains.plan.tensors
    return tensors[bias.name].shape[0] == tensors[matmul.arguments[1].name].shape[1]


def _silu(step: OnnxStep, chains: _Chains) -> _Match | None:
    """x * Sigmoid(x)."""
    if step.kind != "Mul":
        return None
    for x, gate in _either_way(step):
        sigmoid = chains.maker(gate, "Sigmoid")
        if sigmoid and sigmoid.arguments[0] == x:
            return swish, (x,), {}, (sigmoid,)
    return None


def _factors(step: OnnxStep, chains: _Chains) -> tuple[list[Any], list[OnnxStep]]:
    """The factors of a product of products, and the inner steps it is made of."""
    factors, inner = [], []
    for argument in step.arguments:
        part = chains.maker(argument, "Mul")
        if part is None:
            factors.append(argument)
            continue
        more, steps = _factors(part, chains)
        factors += more
        inner += [part, *steps]
    return factors, inner


def _gelu(step: OnnxStep, chains: _Chains) -> _Match | None:
    """0.5 * x * (1 + Erf(x / sqrt(2))), multiplied in any order."""
    if step.kind != "Mul":
        return None
    factors, inner = _factors(step, chains)
    tensors = [factor for factor in factors if isinstance(factor, Ref)]
    if len(factors) != 3 or len(tensors) != 2 or not any(_is(factor, 0.5) for factor in factors):
        return None
    for x, gate in (tensors, tensors[::-1]):
        steps = _erf_gate(x, gate, chains)
        if steps:
            return gelu, (x,), {}, (*inner, *steps)
    return None


def _erf_gate(x: Ref, gate: Ref, chains: _Chains) -> tuple[OnnxStep, ...]:
    add = chains.maker(gate, "Add")
    if add is None:
        return ()
    for curve, one in _either_way(add):
        erf = chains.maker(curve, "Erf")
        if erf is None or not _is(one, 1.0):
            continue
        divided = chains.maker(erf.arguments[0], "Div")
        scaled = chains.maker(erf.arguments[0], "Mul")
        if divided and divided.arguments[0] == x and _is(divided.arguments[1], math.sqrt(2)):
            return add, erf, divided
        if scaled and any(a == x and _is(b, math.sqrt(0.5)) for a, b in _either_way(scaled)):
            return add, erf, scaled
    return ()


def _layer_norm(step: OnnxStep, chains: _Chains) -> _Match | None:
    """(x - mean) / Sqrt(variance + epsilon) * scale + bias over the last dimension, as opsets before 17 write
    it."""
    if step.kind != "Add":
        return None
    for scaled, bias in _either_way(step):
        mul = chains.maker(scaled, "Mul")
        if mul is None or chains.rank(bias) != 1:
            continue
        for normed, scale in _either_way(mul):
            found = _normed(normed, chains) if chains.rank(scale) == 1 else None
            if found is not None:
                x, epsilon, steps = found
                return layer_norm, (x, scale, bias), {"epsilon": epsilon}, (mul, *steps)
    return None


def _normed(value: Any, chains: _Chains) -> tuple[Ref, float, tuple[OnnxStep, ...]] | None:
    div = chains.maker(value, "Div")
    sqrt = div and chains.maker(div.arguments[1], "Sqrt")
    add = sqrt and chains.maker(sqrt.arguments[0], "Add")
    variance = add and chains.maker(add.arguments[0], "ReduceMean")
    square = variance and chains.maker(variance.arguments[0], "Pow")
    if not (div and sqrt and add and variance and square):
        return None
    centred = _centred(square, div, chains)
    epsilon = add.arguments[1]
    if centred is None or not isinstance(epsilon, float) or not _over_last(variance, chains):
        return None
    x, steps = centred
    return x, epsilon, (div, sqrt, add, variance, square, *steps)


def _centred(square: OnnxStep, div: OnnxStep, chains: _Chains) -> tuple[Ref, tuple[OnnxStep, ...]] | None:
    """The x of ``x - mean`` that is squared and divided, where that is all that is done with it."""
    difference, exponent = square.arguments
    sub = chains.maker(difference, "Sub", uses=2)
    mean = sub and chains.maker(sub.arguments[1], "ReduceMean")
    if not (sub and mean) or div.arguments[0] != difference or not _is(exponent, 2.0):
        return None
    x = sub.arguments[0]
    return (x, (sub, mean)) if mean.arguments[0] == x and _over_last(mean, chains) else None


def _over_last(mean: OnnxStep, chains: _Chains) -> bool:
    axes = mean.arguments[1] if len(mean.arguments) > 1 else mean.attributes.get("axes")
    rank = chains.rank(mean.arguments[0])
    return axes is not None and [axis % rank for axis in axes] == [rank - 1]


_PATTERNS: tuple[_Pattern, ...] = (_linear, _silu, _gelu, _layer_norm)


def fuse(plan: OnnxPlan) -> OnnxPlan:
    """The plan with every chain that matches a pattern replaced by one step, at the place of its last one."""
    uses = Counter(name for step in plan.steps for name in step.needs)
    uses.update(plan.outputs)
    chains = _Chains(
        plan=plan, makers={name: step for step in plan.steps for name in step.outputs}, uses=uses
    )
    replaced: dict[str, OnnxStep] = {}
    dropped: set[str] = set()
    for step in plan.steps:
        match = next(filter(None, (pattern(step, chains) for pattern in _PATTERNS)), None)
        if match is not None:
            function, arguments, attributes, inner = match
            replaced[step.outputs[0]] = _fused(step, function, arguments, attributes)
            dropped.update(part.outputs[0] for part in inner)
    steps = [replaced.get(step.outputs[0], step) for step in plan.steps if step.outputs[0] not in dropped]
    return replace(plan, steps=steps)


def _fused(
    step: OnnxStep, function: Function, arguments: tuple[Any, ...], attributes: dict[str, Any]
) -> OnnxStep:
    operator = OnnxOperator(function=function, since=1, reads=(), scalars=(), context=())
    kind = function.__name__
    return replace(step, kind=kind, operator=operator, arguments=arguments, attributes=attributes)
