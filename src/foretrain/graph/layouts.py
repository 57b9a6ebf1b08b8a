"""Says whether torch's compiler brings images to channels last, as Inductor's ``decide_layout_opt`` does."""

from __future__ import annotations

from foretrain.graph import Operator, OpGraph

_NODES_PER_CONVOLUTION = 300
_SMALL_CHANNELS = 64


def prefers_channels_last(graph: OpGraph) -> bool:
    """Whether the compiler brings all images of a step to channels last.

    Not where convolutions are few among many calls. In training also not where one is grouped (but depthwise)
    or leads from many channels to half as many or fewer, or where all are of few channels; in inference these
    count by their FLOPs.
    """
    forward = [op.operator for op in graph.ops if op.phase == "forward"]
    convolutions = [
        operator
        for operator in forward
        if operator.name == "convolution" and len(operator.inputs) > 1 and len(operator.inputs[1].shape) == 4
    ]
    if not convolutions or len(forward) >= _NODES_PER_CONVOLUTION * len(convolutions):
        return False
    kinds = [_convolution_kind(operator) for operator in convolutions]
    if any(op.phase == "backward" for op in graph.ops):
        return not {"grouped", "narrowing"} & set(kinds) and set(kinds) != {"small"}
    flops = [operator.flops for operator in convolutions]
    slower = sum(of * _CHANNELS_LAST_TIME[kind] for of, kind in zip(flops, kinds, strict=True))
    return slower <= sum(flops)


_CHANNELS_LAST_TIME = {"grouped": 1.358, "small": 0.783, "narrowing": 0.725, "": 0.823}
"""Time of a convolution in channels last beside that in the other layout, as the compiler takes it to be."""


def _convolution_kind(operator: Operator) -> str:
    weight = operator.inputs[1]
    if operator.args.get("groups", 1) > 1 and weight.shape[1] > 1:
        return "grouped"
    if weight.shape[0] * 2 <= weight.shape[1] and weight.shape[2] > 1:
        return "narrowing"
    return "small" if max(weight.shape[:2]) <= _SMALL_CHANNELS else ""
