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


def library_workspace(device: Device) -> int:
    """Give the memory that cuBLAS gets from torch for each thread that multiplies: that of the forward and
    that of the backward pass.

    Its size is torch's default: 32 MiB on compute capability 9, 8 MiB and 128 KiB on other NVIDIA devices.
    """
    if device.vendor != "nvidia":
        return 0
    return _HOPPER_BYTES if (device.capability or "").startswith("9") else _OTHER_BYTES


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
    from it; channels are padded to 8 for 16-bit operands.

    Depthwise convolutions and small kernels over few channels run other kernels, on NCHW itself; so do many
    of 1x1, which are matrix products.
    """
    backward = traits(operator.name).backward
    x, weight = operator.inputs[int(backward)], operator.inputs[1 + int(backward)]
    y = operator.inputs[0] if backward else operator.outputs[0]
    groups, channels, kernel = operator.args.get("groups", 1), x.shape[1], math.prod(weight.shape[2:])
    if x.channels_last or (groups > 1 and groups == channels) or not _has_matrix_units(x, device):
        return 0.0
    if kernel == 1 and groups == 1 and max(operator.args["stride"]) == 1:
        return _pointwise(x, y, weight, backward=backward)
    if channels < _FEW_CHANNELS and kernel < _STEM_KERNEL and (channels == 1 or not backward):
        return 0.0
    if (channels % 4 or weight.shape[0] % 4) and channels >= _FEW_CHANNELS and not backward:
        return 0.0
    half = ITEM_BYTES[x.dtype] == 2
    padding = -(-channels // 8) * 8 / channels if half and groups == 1 else 1.0
    partial = _partial_sums(weight, groups, device) if backward else 0.0
    kernels = weight.size_bytes if kernel > 1 else 0.0  # one of 1x1 is the same in either layout
    return padding * (x.size_bytes + kernels) + y.size_bytes + partial + _BOOKKEEPING


_FEW_CHANNELS = 4
_STEM_KERNEL = 49
"""Values of a kernel, 7 x 7, from which images of three channels are converted."""
_LARGE_WEIGHT = 1 << 19
"""Values of a 1x1 kernel from which operands are converted whose images are no whole vectors."""


def _partial_sums(weight: TensorSpec, groups: int, device: Device) -> float:
    """The gradient of a weight in fp32, once for each part of the pixels: as many as fill the device with
    tiles of 128 x 256, and few where there is one value for each pair of channels."""
    rows, columns = weight.shape[0] // groups, math.prod(weight.shape[1:])
    tiles = -(-rows // 128) * -(-columns // 256) * groups
    parts = device.processors // tiles
    return 4.0 * weight.numel * (min(parts, 3) if math.prod(weight.shape[2:]) == 1 else parts)


_BOOKKEEPING = 256
"""Bytes of a workspace beside the operands; they decide whether it fits where an operand was."""
_CONVERTED_IN_FP32 = 0.6
"""Share of the operands of a 1x1 convolution in fp32 that its two gradients convert."""


def _pointwise(x: TensorSpec, y: TensorSpec, weight: TensorSpec, *, backward: bool) -> float:
    """A 1x1 convolution multiplies each image as it lies where its pixels are whole vectors of 8 values; the
    gradient of the weight is then summed over the images in fp32. In fp32, of the two gradients about half
    are converted."""
    pixels, converted = math.prod(x.shape[2:]), float(x.size_bytes + y.size_bytes)
    if pixels == 1:
        return 0.0
    if ITEM_BYTES[x.dtype] != 2:
        return _CONVERTED_IN_FP32 * (converted + weight.size_bytes) if backward else 0.0
    if pixels % 8 == 0:
        return min(converted, 4.0 * x.shape[0] * weight.numel) if backward else 0.0
    return converted + _BOOKKEEPING if backward or weight.numel >= _LARGE_WEIGHT else 0.0


def _has_matrix_units(x: TensorSpec, device: Device) -> bool:
    return (device.tf32 if x.dtype == "float32" else device.fp16) is not None


@register("sum")
def column_sum(operator: Operator, device: Device) -> float:
    """Summing the rows of a matrix (the gradient of a bias): what torch's blocks keep for one another where
    several share a column, which they do when each thread would have many values to add.

    As in torch's reductions: threads of a block take up to four columns each and rows by turns; blocks are
    added until they fill the device or have few rows.
    """
    x, columns = operator.inputs[0], operator.outputs[0].numel
    dims, rank = [d % len(x.shape) for d in operator.args.get("dim") or ()], len(x.shape)
    if x.strides is not None or not dims or rank - 1 in dims or x.dtype == "bool":
        return 0.0
    run = math.prod(x.shape[max(dims) + 1 :])
    vector = next(size for size in (4, 2, 1) if run % size == 0)
    threads = _BLOCK_THREADS // vector
    width, height = (
        min(threads, 1 << (max(1, n).bit_length() - 1)) for n in (columns // vector, x.numel // columns)
    )
    height = min(height, threads // min(width, _WARP))
    width = min(width, threads // height)
    values = x.numel // columns
    if values < min(16 * height, _MOST_VALUES):
        return 0.0
    values = -(-values // height)
    filled = device.processors * (_threads_per_sm(device) // (width * height))
    blocks = -(-columns // (vector * width))
    if values < _MOST_VALUES or blocks > filled:
        return 0.0
    sharing = max(min(-(-filled // blocks), -(-values // 16)), -(-values // _MOST_VALUES))
    return 4.0 * columns * sharing * width * vector if sharing > 1 else 0.0


_BLOCK_THREADS, _WARP = 512, 32
_MOST_VALUES = 256
"""That a thread adds up before blocks share a column."""


_THREADS_PER_SM = {"7.5": 1024, "8.6": 1536, "8.9": 1536, "12.0": 1536}
"""That are resident at once, by compute capability."""
_USUAL_THREADS_PER_SM = 2048


def _threads_per_sm(device: Device) -> int:
    return _THREADS_PER_SM.get(device.capability or "", _USUAL_THREADS_PER_SM)


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
    """Count the copies of operands with gaps, as these kernels want contiguous ones."""
    return sum(
        spec.numel * ITEM_BYTES[spec.dtype] for spec in operator.inputs[:2] if spec.strides is not None
    )


@register("_scaled_dot_product_flash_attention_backward", "_scaled_dot_product_cudnn_attention_backward")
def flash_backward(operator: Operator, device: Device) -> float:
    """The gradient of the query is summed up in fp32, beside a product for each row of the scores."""
    query = operator.inputs[1]
    return 4.0 * (query.numel + query.numel / query.shape[-1])


@register("_scaled_dot_product_efficient_attention_backward")
def efficient_backward(operator: Operator, device: Device) -> float:
    """Partial gradients in fp32, of query and of key and value."""
    return 8.0 * operator.inputs[1].numel


@register("embedding_dense_backward")
def embedding_backward(operator: Operator, device: Device) -> float:
    """Long inputs are sorted and summed in segments, in fp32."""
    gradient, tokens = operator.inputs[0], operator.inputs[1].numel
    rows = _ROWS_PER_TOKEN * tokens if tokens > _MOST_UNSORTED else 0.0
    return 4.0 * rows * gradient.shape[-1]


_MOST_UNSORTED = 3072
"""Tokens up to which the gradient of an embedding is not sorted."""
_ROWS_PER_TOKEN = 1.1
"""Segments are at most eleven rows for ten tokens."""


@register("_cudnn_rnn", "_cudnn_rnn_backward")
def recurrence(operator: Operator, device: Device) -> float:
    """About six values per hidden unit, step and layer."""
    x, args = operator.inputs[0], operator.args
    units: int = args["hidden_size"] * args["num_layers"] * (2 if args.get("bidirectional") else 1)
    return 6.0 * math.prod(x.shape[:-1]) * units * ITEM_BYTES[x.dtype]
