"""Sorts operators into few families, by what they do."""

from __future__ import annotations

from foretrain.graph import Operator
from foretrain.graph.opset import NORMS, traits

CONVOLUTIONS = ("convolution", "pointwise convolution", "grouped convolution", "depthwise convolution")
COMPUTING = (*CONVOLUTIONS, "product")
MOVING = ("normalisation", "pooling", "optimizer", "other")
FAMILIES = (*COMPUTING, *MOVING)


def family_of(operator: Operator) -> str:
    """Name the family of an operator, one of ``FAMILIES``."""
    of = traits(operator.name)
    if of.kind == "convolution":
        return _convolution(operator)
    if operator.flops:
        return "product"
    if of.kind in NORMS:
        return "normalisation"
    if of.multi_tensor:
        return "optimizer"
    return "pooling" if of.kind == "pooling" else "other"


def _convolution(operator: Operator) -> str:
    weight = operator.tensor("weight")
    if weight is None:
        return "convolution"
    if weight.shape[1] == 1 < weight.shape[0]:
        return "depthwise convolution"
    if (operator.args.get("groups") or 1) > 1:
        return "grouped convolution"
    return "pointwise convolution" if all(side == 1 for side in weight.shape[2:]) else "convolution"
