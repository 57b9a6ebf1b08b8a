"""Counts the memory that kernels take beside tensors: cuBLAS per thread, cuDNN and others per call.

The rules below were read off the allocator, call by call, while 97 models trained on an H200 (torch 2.11,
cuDNN 9.19).
"""

from __future__ import annotations

import math
from collections.abc import Callable

from foretrain.cluster import Device
from foretrain.graph import ITEM_BYTES, Operator, TensorSpec
from foretrain.graph.opset import traits

_HOPPER_BYTES = 32 << 20
_OTHER_BYTES = (8 << 20) + (128 << 10)


def library_workspaces(device: Device, mode: str = "train") -> tuple[int, ...]:
    """torch gives cuBLAS a workspace for the thread of the forward and one for that of the backward pass.

    Its size is torch's default: 32 MiB on compute capability 9, 8 MiB and 128 KiB on other NVIDIA devices.
    """
    if device.vendor != "nvidia":
        return ()
    size = _HOPPER_BYTES if (device.capability or "").startswith("9") else _OTHER_BYTES
    return (size,) if mode == "infer" else (size, size)


Rule = Callable[[Operator, Device], float]
RULES: dict[str, Rule] = {}


def operator_workspace(operator: Operator, device: Device) -> int:
    """Bytes that one call needs while it runs, beside its inputs and outputs."""
    rule = RULES.get(operator.name)
    return int(rule(operator, device)) if rule is not None and operator.launches and not device.is_cpu else 0


def register(*names: str) -> Callable[[Rule], Rule]:
    def decorate(rule: Rule) -> Rule:
        RULES.update(dict.fromkeys(names, rule))
        return rule

    return decorate


@register("convolution", "convolution_backward")
def convolution(operator: Operator, device: Device) -> float:
    """cuDNN's matrix-unit kernels read NHWC: operands in NCHW are converted into the workspace, results back
    from it.

    Depthwise and 3-channel forward convolutions run other kernels, on NCHW itself; so does a 1x1 forward
    convolution, which is a matrix product, while of its two gradients about half are converted.
    """
    backward = traits(operator.name).backward
    x, weight = operator.inputs[int(backward)], operator.inputs[1 + int(backward)]
    y = operator.inputs[0] if backward else operator.outputs[0]
    groups, channels = operator.args.get("groups", 1), x.shape[1]
    if x.channels_last or (groups > 1 and groups == channels) or not _has_matrix_units(x, device):
        return 0.0
    converted = x.size_bytes + y.size_bytes + weight.size_bytes
    if channels % 4 or weight.shape[0] % 4:
        return converted if backward else 0.0
    if math.prod(weight.shape[2:]) == 1 and max(operator.args["stride"]) == 1:
        return 0.6 * converted if backward else 0.0
    return converted


def _has_matrix_units(x: TensorSpec, device: Device) -> bool:
    return (device.tf32 if x.dtype == "float32" else device.fp16) is not None


@register("sum")
def column_sum(operator: Operator, device: Device) -> float:
    """Summing the rows of a matrix (the gradient of a bias): partial sums of blocks, up to a MiB per
    multiprocessor."""
    x, total = operator.inputs[0], operator.outputs[0].numel
    dims = operator.args.get("dim")
    if (
        x.strides is not None
        or not dims
        or x.dtype == "bool"
        or total < 32
        or (len(x.shape) - 1) in [d % len(x.shape) for d in dims]
    ):
        return 0.0
    return min(8.0 * x.numel, max((device.sms or 100) * float(1 << 20), 2048.0 * total))


@register("_softmax_backward_data")
def softmax_backward(operator: Operator, device: Device) -> float:
    """The product of gradient and output is written out first."""
    return operator.outputs[0].size_bytes


@register("_safe_softmax")
def safe_softmax(operator: Operator, device: Device) -> float:
    """A mask of the rows that are all minus infinity."""
    return operator.inputs[0].numel


@register(
    "native_layer_norm",
    "native_layer_norm_backward",
    "_fused_rms_norm",
    "_fused_rms_norm_backward",
    "_softmax",
)
def contiguous_copies(operator: Operator, device: Device) -> float:
    """These kernels want contiguous operands and copy those that are not."""
    return sum(
        spec.numel * ITEM_BYTES[spec.dtype] for spec in operator.inputs[:2] if spec.strides is not None
    )


@register("_scaled_dot_product_flash_attention_backward", "_scaled_dot_product_cudnn_attention_backward")
def flash_backward(operator: Operator, device: Device) -> float:
    """The gradient of the query is summed up in fp32."""
    return 4.0 * operator.inputs[1].numel


@register("_scaled_dot_product_efficient_attention_backward")
def efficient_backward(operator: Operator, device: Device) -> float:
    """Partial gradients in fp32, of query and of key and value."""
    return 8.0 * operator.inputs[1].numel


@register("embedding_dense_backward")
def embedding_backward(operator: Operator, device: Device) -> float:
    """Long inputs are sorted and summed in segments, of at most eleven rows for ten tokens."""
    gradient, tokens = operator.inputs[0], operator.inputs[1].numel
    return 4.4 * tokens * gradient.shape[-1] if tokens > 3072 else 0.0


@register("_cudnn_rnn", "_cudnn_rnn_backward")
def recurrence(operator: Operator, device: Device) -> float:
    """About six values per hidden unit, step and layer."""
    x, args = operator.inputs[0], operator.args
    units: int = args["hidden_size"] * args["num_layers"] * (2 if args.get("bidirectional") else 1)
    return 6.0 * math.prod(x.shape[:-1]) * units * ITEM_BYTES[x.dtype]
