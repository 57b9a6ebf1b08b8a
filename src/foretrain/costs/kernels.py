"""Counts the kernels that a call launches: as a rule one, over lists of tensors by torch's own rules; names
what the number depends on where libraries choose it."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

from foretrain.costs import recurrences
from foretrain.costs.base import Call
from foretrain.graph import ITEM_BYTES, Operator, TensorSpec
from foretrain.graph.opset import traits

_CHUNK = 65536
_CHUNKS_PER_LAUNCH = 320
_TENSORS_PER_LAUNCH = {1: 110, 2: 64, 3: 48, 4: 36, 5: 30}
"""Of torch's ``MultiTensorApply.cuh``: elements per chunk, chunks per launch, tensors per launch by lists."""


def kernel_count(operator: Operator) -> int:
    """None for calls that launch nothing, one per gradient of a convolution, one per launch over lists of
    tensors, those of all cells of a recurrence.

    A run of element-wise operators (``fusion.py``) knows how many it is.
    """
    if not operator.launches:
        return 0
    of = traits(operator.name)
    if of.multi_tensor:
        return _multi_tensor(operator)
    if of.kind == "convolution" and of.backward:
        gradients: list[bool] = operator.args["output_mask"]
        return max(1, sum(gradients))
    if of.kind == "recurrence":
        return recurrences.kernels(operator)
    if of.kind == "fused":
        return int(operator.args["kernels"])
    return COUNTED[operator.name](operator) if operator.name in COUNTED else 1


_CTC_COPIES = 3
"""Of lengths and offsets to the device."""
_CTC_SMALL = 450
"""The size of a problem up to which one kernel collects the gradients of all labels."""
_CTC_BLANKS = 14
"""Element-wise kernels and reductions that collect those of blanks in a larger one."""


def _ctc_backward(operator: Operator) -> int:
    """Count the kernels of torch's ``LossCTC.cu``: the gradient is filled, betas and what they add up to are
    computed, padding is zeroed."""
    steps, batch, labels = operator.inputs[1].shape
    small = 2 * steps + 24 * batch // 10 + 2 * labels // 10 <= _CTC_SMALL
    return _CTC_COPIES + 4 + (0 if small else _CTC_BLANKS)


def _im2col(operator: Operator) -> int:
    """Count a kernel for each sample; an operand with gaps is copied first, as is the result."""
    x = operator.inputs[0]
    samples = x.shape[0] if len(x.shape) == 4 else 1
    return samples + (2 if x.strides is not None else 0)


COUNTED: Mapping[str, Callable[[Operator], int]] = {
    "_ctc_loss": lambda _: _CTC_COPIES + 1,
    "_ctc_loss_backward": _ctc_backward,
    "_fused_rms_norm_backward": lambda call: 1 + 2 * bool(call.args.get("output_mask", [True, True])[1]),
    "im2col": _im2col,
}
"""Operators whose number of kernels follows from how they are called: the gradient of a norm's weights is
summed up in parts first."""


def kernel_kind(name: str, inputs: Sequence[TensorSpec]) -> str:
    """Operators of one kind launch about as many kernels: those of one name and width of numbers and, among
    convolutions, of one window and layout."""
    kind = f"{name}/{ITEM_BYTES[inputs[0].dtype]}" if inputs else name
    if traits(name).kind != "convolution":
        return kind
    x, weight = inputs[-2], inputs[-1]
    return f"{kind}/{'x'.join(map(str, weight.shape[2:]))}{'/last' if x.channels_last else ''}"


KERNEL_COLUMNS = tuple(
    "tensors channels_last_0 channels_last_1 channels_last_2 strided_0 strided_1 strided_2 learning".split()
)
"""What the number of kernels depends on beside what their time does: a bias that is added apart, operands
that are brought to another layout, statistics that are computed or given."""


def kernel_figures(call: Call) -> list[float]:
    """Describe a call by the figures that ``KERNEL_COLUMNS`` names."""
    first = [*call.inputs[:3], *[None] * 3][:3]
    learning = call.args.get("training", call.args.get("train", False))
    return [
        float(len(call.inputs)),
        *(float(spec is not None and spec.channels_last) for spec in first),
        *(float(spec is not None and spec.strides is not None) for spec in first),
        float(bool(learning)),
    ]


def _multi_tensor(operator: Operator) -> int:
    lists = [
        value
        for value in operator.args.values()
        if isinstance(value, list) and value and isinstance(value[0], str)
    ]
    if not lists:
        return 1
    depth = min(len(lists), max(_TENSORS_PER_LAUNCH))
    first = [operator.inputs[int(reference[1:])] for reference in lists[0]]
    chunks = sum(math.ceil(spec.numel / _CHUNK) for spec in first)
    return max(math.ceil(len(first) / _TENSORS_PER_LAUNCH[depth]), math.ceil(chunks / _CHUNKS_PER_LAUNCH))
