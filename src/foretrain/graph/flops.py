"""Counts the floating-point operations of an operator from its shapes: formulas, registered by its name.

A multiply-add counts as two. The counts agree with ``torch.utils.flop_counter`` for every operator both know,
except that the weight gradient of a grouped convolution is divided by the number of groups here.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from foretrain.graph import TensorSpec
from foretrain.graph.ir import PACKED

Shape = Sequence[int]
Formula = Callable[[Mapping[str, Any], Sequence[Shape], Sequence[Shape]], int]
FORMULAS: dict[str, Formula] = {}


def flops(
    name: str, args: Mapping[str, Any], inputs: Sequence[TensorSpec], outputs: Sequence[TensorSpec]
) -> int:
    """FLOPs of one call; 0 for operators without a formula (their cost is memory traffic)."""
    formula = FORMULAS.get(name)
    if formula is None:
        return 0
    packed = 2 if len(inputs) > 1 and inputs[1].dtype == PACKED else 1
    return packed * formula(args, [spec.shape for spec in inputs], [spec.shape for spec in outputs])


def register(*names: str) -> Callable[[Formula], Formula]:
    """Register a formula of (args, input shapes, output shapes) for operator names."""

    def decorate(formula: Formula) -> Formula:
        FORMULAS.update(dict.fromkeys(names, formula))
        return formula

    return decorate


@register("mm", "_scaled_mm")
def mm(_args: Mapping[str, Any], inputs: Sequence[Shape], _outputs: Sequence[Shape]) -> int:
    (m, k), (_, n) = inputs[:2]
    return 2 * m * n * k


@register("addmm")
def addmm(_args: Mapping[str, Any], inputs: Sequence[Shape], _outputs: Sequence[Shape]) -> int:
    (m, k), (_, n) = inputs[1:3]
    return 2 * m * n * k


@register("bmm")
def bmm(_args: Mapping[str, Any], inputs: Sequence[Shape], _outputs: Sequence[Shape]) -> int:
    (b, m, k), (_, _, n) = inputs[:2]
    return 2 * b * m * n * k


@register("baddbmm")
def baddbmm(_args: Mapping[str, Any], inputs: Sequence[Shape], _outputs: Sequence[Shape]) -> int:
    (b, m, k), (_, _, n) = inputs[1:3]
    return 2 * b * m * n * k


@register("_grouped_mm", "_scaled_grouped_mm")
def grouped_mm(_args: Mapping[str, Any], inputs: Sequence[Shape], _outputs: Sequence[Shape]) -> int:
    """Products of a mixture of experts: where an operand is cut into groups, each row meets one expert."""
    a, b = inputs[:2]
    return 2 * math.prod(a) * b[-1] if len(b) == 3 or len(a) == 2 else 2 * a[-2] * math.prod(b)


def _convolution(positions: Shape, batch: int, weight: Shape) -> int:
    """Count the products of a filter bank that meets every output position (input position when transposed)
    once per sample."""
    return 2 * batch * math.prod(positions) * math.prod(weight)


@register("convolution")
def convolution(args: Mapping[str, Any], inputs: Sequence[Shape], outputs: Sequence[Shape]) -> int:
    x, weight = inputs[:2]
    return _convolution((x if args.get("transposed") else outputs[0])[2:], x[0], weight)


@register("convolution_backward")
def convolution_backward(args: Mapping[str, Any], inputs: Sequence[Shape], _outputs: Sequence[Shape]) -> int:
    grad, x, weight = inputs[:3]
    one_gradient = _convolution((x if args.get("transposed") else grad)[2:], x[0], weight)
    wanted: list[bool] = args["output_mask"][:2]
    return one_gradient * sum(wanted)


@register(
    "_scaled_dot_product_flash_attention",
    "_scaled_dot_product_efficient_attention",
    "_scaled_dot_product_cudnn_attention",
)
def attention(_args: Mapping[str, Any], inputs: Sequence[Shape], _outputs: Sequence[Shape]) -> int:
    (b, h, s_q, d), (_, _, s_k, _), (_, _, _, d_v) = inputs[:3]
    return 2 * b * h * s_q * s_k * (d + d_v)


@register(
    "_scaled_dot_product_flash_attention_backward",
    "_scaled_dot_product_efficient_attention_backward",
    "_scaled_dot_product_cudnn_attention_backward",
)
def attention_backward(_args: Mapping[str, Any], inputs: Sequence[Shape], _outputs: Sequence[Shape]) -> int:
    """Scores again, their gradient, and the gradients of query, key (width d each) and value (width d_v)."""
    _, (b, h, s_q, d), (_, _, s_k, _), (_, _, _, d_v) = inputs[:4]
    return 2 * b * h * s_q * s_k * (3 * d + 2 * d_v)


_GATES = {0: 1, 1: 1, 2: 4, 3: 3}
"""Matrices per layer, by cuDNN's mode: relu, tanh, LSTM, GRU."""


def _rnn_forward(args: Mapping[str, Any], x: Shape) -> int:
    directions = 2 if args.get("bidirectional") else 1
    hidden, gates = args["hidden_size"], _GATES[args["mode"]]
    steps = math.prod(x[:-1])  # a packed sequence has its steps in one dimension
    widths = [x[-1]] + [hidden * directions] * (args["num_layers"] - 1)
    return sum(2 * steps * gates * hidden * (width + hidden) * directions for width in widths)


@register("_cudnn_rnn")
def cudnn_rnn(args: Mapping[str, Any], inputs: Sequence[Shape], _outputs: Sequence[Shape]) -> int:
    return _rnn_forward(args, inputs[0])


@register("_cudnn_rnn_backward")
def cudnn_rnn_backward(args: Mapping[str, Any], inputs: Sequence[Shape], _outputs: Sequence[Shape]) -> int:
    return 2 * _rnn_forward(args, inputs[0])


@register("mamba.chunk_state", "mamba.chunk_state_backward")
def chunk_state(_args: Mapping[str, Any], inputs: Sequence[Shape], _outputs: Sequence[Shape]) -> int:
    """Count what each position of a head puts into the state of its chunk, or takes from it."""
    return 2 * math.prod(inputs[0]) * inputs[1][-1]


@register("mamba.bmm_chunk")
def bmm_chunk(_args: Mapping[str, Any], inputs: Sequence[Shape], outputs: Sequence[Shape]) -> int:
    return 2 * math.prod(outputs[0]) * inputs[0][-1]


@register("mamba.bmm_chunk_backward")
def bmm_chunk_backward(_args: Mapping[str, Any], inputs: Sequence[Shape], _outputs: Sequence[Shape]) -> int:
    return 2 * math.prod(inputs[0]) * inputs[1][-1]


@register("mamba.chunk_scan")
def chunk_scan(_args: Mapping[str, Any], inputs: Sequence[Shape], _outputs: Sequence[Shape]) -> int:
    """Scores of the earlier positions of a chunk, half of all, and the state before it."""
    x, scores, states = inputs[0], inputs[1], inputs[5]
    return math.prod(x) * (scores[-1] + 2 * states[-1])


@register("mamba.chunk_scores_backward", "mamba.chunk_decay_backward")
def chunk_scores_backward(
    _args: Mapping[str, Any], inputs: Sequence[Shape], _outputs: Sequence[Shape]
) -> int:
    return math.prod(inputs[0]) * inputs[4][-1]


@register("mamba.selective_scan")
def selective_scan(_args: Mapping[str, Any], inputs: Sequence[Shape], _outputs: Sequence[Shape]) -> int:
    """Nine operations for each number of a state (Gu and Dao 2023, appendix D), one of them an exponential,
    which takes as long as eight others."""
    a, u = inputs[:2]
    return 16 * math.prod(u) * a[-1]


@register("mamba.selective_scan_backward")
def selective_scan_backward(
    _args: Mapping[str, Any], inputs: Sequence[Shape], _outputs: Sequence[Shape]
) -> int:
    """The state again, and twice as much for the gradients."""
    a, u = inputs[:2]
    return 48 * math.prod(u) * a[-1]


@register("fla.keys_by_keys")
def keys_by_keys(_args: Mapping[str, Any], inputs: Sequence[Shape], outputs: Sequence[Shape]) -> int:
    """Count the products of keys with those at earlier positions of a chunk, half of all."""
    return math.prod(outputs[0]) * inputs[0][-1]


@register("fla.representation", "fla.representation_backward")
def representation(_args: Mapping[str, Any], inputs: Sequence[Shape], outputs: Sequence[Shape]) -> int:
    """A chunk's inverse with its keys and values; backward with the gradients of both, and of the inverse."""
    times = 2 if len(inputs) == 3 else 6
    return times * inputs[2][-1] * sum(map(math.prod, outputs))


@register("fla.chunk_states")
def chunk_states(_args: Mapping[str, Any], inputs: Sequence[Shape], _outputs: Sequence[Shape]) -> int:
    return 4 * math.prod(inputs[2]) * inputs[0][-1]


@register("fla.chunk_states_backward")
def chunk_states_backward(
    _args: Mapping[str, Any], inputs: Sequence[Shape], _outputs: Sequence[Shape]
) -> int:
    return 6 * math.prod(inputs[4]) * inputs[0][-1]


@register("fla.chunk_outputs")
def chunk_outputs(_args: Mapping[str, Any], inputs: Sequence[Shape], _outputs: Sequence[Shape]) -> int:
    """The state before a chunk, and its earlier positions, half of all."""
    q, v = inputs[0], inputs[2]
    return 2 * math.prod(q) * v[-1] + DELTA_CHUNK * (math.prod(q) + math.prod(v))


@register("fla.chunk_values_backward")
def chunk_values_backward(
    _args: Mapping[str, Any], inputs: Sequence[Shape], _outputs: Sequence[Shape]
) -> int:
    return DELTA_CHUNK * (math.prod(inputs[0]) + math.prod(inputs[2]))


@register("fla.chunk_outputs_backward")
def chunk_outputs_backward(
    _args: Mapping[str, Any], inputs: Sequence[Shape], _outputs: Sequence[Shape]
) -> int:
    q, v = inputs[0], inputs[2]
    return 6 * math.prod(q) * v[-1] + DELTA_CHUNK * (3 * math.prod(q) + math.prod(v))


DELTA_CHUNK = 64
"""Positions of a chunk of the gated delta rule."""
