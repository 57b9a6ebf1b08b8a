"""Builds the call of an operator with real tensors on a device."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from foretrain.capture.sources.quantised import dequantizers
from foretrain.capture.tracing.eight_bit import updates
from foretrain.errors import InputError
from foretrain.graph import TensorSpec
from foretrain.graph.opset import traits
from foretrain.measure.instances import Instance

aten = torch.ops.aten
Call = Callable[[], Any]


def build_call(instance: Instance, device: str) -> Call:
    """Make a function that runs the operator once, on tensors of the instance's shapes, dtypes and
    strides."""
    builder = _BUILDERS.get(instance.name)
    if builder is not None:
        return builder(instance, device)
    return call_of(instance, make_tensors(instance, device), device)


def call_of(instance: Instance, tensors: Sequence[torch.Tensor], device: str) -> Call:
    """Make a function that runs the operator once on these tensors."""
    namespace, _, name = instance.name.rpartition(".")
    if namespace == "torchvision":
        import torchvision  # noqa: F401  its operators are there once it is imported
    overload = getattr(getattr(getattr(torch.ops, namespace or "aten"), name, None), instance.overload, None)
    if overload is None:
        raise InputError(
            f"operator: {instance.name}.{instance.overload} does not exist in torch {torch.__version__}"
        )
    args, kwargs = _arguments(overload, instance, tensors, device)
    return lambda: overload(*args, **kwargs)


def make_tensors(instance: Instance, device: str, most: int | None = None) -> list[torch.Tensor]:
    """Make the inputs, or the first so many."""
    limit = _index_limit(instance)
    return [_tensor(spec, device, limit) for spec in instance.inputs[:most]]


def _tensor(spec: TensorSpec, device: str, limit: int) -> torch.Tensor:
    """Fill a tensor in the layout of the spec with random numbers; an expanded dimension is made once and
    expanded."""
    dtype = getattr(torch, spec.dtype)
    if spec.strides is None:
        return _fill(torch.empty(spec.shape, dtype=dtype, device=device), limit)
    sizes = [size if stride else min(size, 1) for size, stride in zip(spec.shape, spec.strides, strict=True)]
    return _fill(torch.empty_strided(sizes, spec.strides, dtype=dtype, device=device), limit).expand(
        spec.shape
    )


def _fill(tensor: torch.Tensor, limit: int) -> torch.Tensor:
    if tensor.is_floating_point() or tensor.is_complex():
        if tensor.element_size() > 1:
            return tensor.normal_()
        return tensor.copy_(torch.randn(tensor.shape, dtype=torch.bfloat16, device=tensor.device))
    return tensor.random_(0, 2 if tensor.dtype == torch.bool else max(limit, 1))


def _index_limit(instance: Instance) -> int:
    """Bound integer inputs, which are indices: below the length of what they index, else zero, which is valid
    anywhere."""
    if instance.name == "embedding_dense_backward":
        return int(instance.args["num_weights"])
    of = traits(instance.name)
    if of.kind == "row loss":
        scores = instance.inputs[int(of.backward)]
        return scores.shape[1] if len(scores.shape) > 1 else scores.shape[0]
    if instance.name.startswith(("max_pool3d", "adaptive_max_pool")) and of.backward:
        return math.prod(instance.inputs[1].shape[2:])  # places in a plane, whose gradients are added up
    if of.kind not in ("embedding", "gather", "scatter") or not instance.inputs[0].shape:
        return 1
    indexed = instance.inputs[0].shape
    if isinstance(places := instance.args.get("indices"), list):  # a tensor for some of the dimensions
        return min(size for size, place in zip(indexed, places, strict=False) if place is not None)
    return indexed[int(instance.args.get("dim", 0))]


def _arguments(
    overload: Any, instance: Instance, tensors: Sequence[torch.Tensor], device: str
) -> tuple[list[Any], dict[str, Any]]:
    args: list[Any] = []
    kwargs: dict[str, Any] = {}
    for argument in overload._schema.arguments:
        value = _real(instance.args.get(argument.name), tensors, device)
        if argument.name == "device" and argument.name in instance.args:
            value = torch.device(device)
        if argument.kwarg_only:
            if argument.name in instance.args:
                kwargs[argument.name] = value
        else:
            args.append(value if argument.name in instance.args else argument.default_value)
    return args, kwargs


def _real(value: Any, tensors: Sequence[torch.Tensor], device: str) -> Any:
    if isinstance(value, list):
        return [_real(item, tensors, device) for item in value]
    if isinstance(value, str) and value.startswith("%"):
        return tensors[int(value[1:])]
    if isinstance(value, str) and value.startswith("torch."):
        return getattr(torch, value.removeprefix("torch."))
    return torch.device(device) if value == "meta" else value


# Calls that are made another way than their schema says

Builder = Callable[[Instance, str], Call]
_BUILDERS: dict[str, Builder] = {}


def builds(*names: str) -> Callable[[Builder], Builder]:
    """Register a builder for the operators of these names."""

    def decorate(builder: Builder) -> Builder:
        _BUILDERS.update(dict.fromkeys(names, builder))
        return builder

    return decorate


def _argument(instance: Instance, tensors: Sequence[torch.Tensor], name: str) -> Any:
    return _real(instance.args[name], tensors, "") if name in instance.args else None


@builds("native_batch_norm", "cudnn_batch_norm")
def _batch_norm(instance: Instance, device: str) -> Call:
    tensors = make_tensors(instance, device)
    names = ("input", "weight", "bias", "running_mean", "running_var", "training", "momentum", "eps")
    args = [_argument(instance, tensors, name) for name in names]
    args[5] = True if args[5] is None else args[5]
    operator = (
        aten.cudnn_batch_norm.default
        if instance.name == "cudnn_batch_norm" and device != "cpu"
        else aten.native_batch_norm.default
    )
    return lambda: operator(*args)


@builds("native_batch_norm_backward", "cudnn_batch_norm_backward")
def _batch_norm_backward(instance: Instance, device: str) -> Call:
    tensors = make_tensors(instance, device)
    names = ("grad_out", "input", "weight", "running_mean", "running_var", "save_mean", "save_invstd")
    grad, x, weight, mean, var, saved_mean, saved_invstd = (
        _argument(instance, tensors, name) for name in names
    )
    epsilon = instance.args.get("eps", 1e-5)
    if instance.name == "cudnn_batch_norm_backward" and device != "cpu":
        reserve = torch.empty(0, dtype=torch.uint8, device=device)
        return lambda: aten.cudnn_batch_norm_backward.default(
            x, grad, weight, mean, var, saved_mean, saved_invstd, epsilon, reserve
        )
    mask = instance.args.get("output_mask", [True, True, True])
    return lambda: aten.native_batch_norm_backward.default(
        grad, x, weight, mean, var, saved_mean, saved_invstd, True, epsilon, mask
    )


_ATTENTION = (
    "_scaled_dot_product_flash_attention",
    "_scaled_dot_product_efficient_attention",
    "_scaled_dot_product_cudnn_attention",
)


@builds(*_ATTENTION)
def _attention(instance: Instance, device: str) -> Call:
    """Call attention as torch would choose on this device: cuDNN, flash or memory-efficient."""
    tensors = make_tensors(instance, device)
    query, key, value = tensors[:3]
    options = _attention_options(instance, tensors)
    grads = instance.args.get("compute_log_sumexp", True)
    if grads:
        query = query.requires_grad_()

    def call() -> Any:
        with torch.enable_grad():
            return torch.nn.functional.scaled_dot_product_attention(query, key, value, **options)

    return call


def _attention_options(instance: Instance, tensors: Sequence[torch.Tensor]) -> dict[str, Any]:
    mask = _argument(instance, tensors, "attn_bias")
    grouped = instance.inputs[-1 if len(instance.inputs) < 3 else 1].shape[1] != instance.inputs[0].shape[1]
    return {**_plain_options(instance), "attn_mask": mask, "enable_gqa": grouped}


def _plain_options(instance: Instance) -> dict[str, Any]:
    return {
        "dropout_p": instance.args.get("dropout_p", 0.0),
        "is_causal": bool(instance.args.get("is_causal", False)),
        "scale": instance.args.get("scale"),
    }


@builds(*(f"{name}_backward" for name in _ATTENTION))
def _attention_backward(instance: Instance, device: str) -> Call:
    """Go through autograd: the forward pass runs once, its backward pass again and again."""
    gradient_spec, *rest = instance.inputs
    tensors = [_tensor(spec, device, 1) for spec in rest]
    query, key, value = (tensor.requires_grad_() for tensor in tensors[:3])
    bias = instance.args.get("attn_bias")
    mask = tensors[int(bias[1:]) - 1] if isinstance(bias, str) else None
    wanted = [query, key, value]
    if mask is not None and (instance.args.get("grad_input_mask") or [False])[-1]:
        wanted.append(mask.requires_grad_())
    options = {**_plain_options(instance), "attn_mask": mask, "enable_gqa": key.shape[1] != query.shape[1]}
    with torch.enable_grad():
        output = torch.nn.functional.scaled_dot_product_attention(query, key, value, **options)
    gradient = _tensor(gradient_spec, device, 1)
    return lambda: torch.autograd.grad(output, wanted, gradient, retain_graph=True)


@builds("dequantize_4bit", "dequantize_blockwise", "adamw_8bit", "adamw_32bit")
def _low_bits(instance: Instance, device: str) -> Call:
    """Call bitsandbytes, where the device is a GPU."""
    scales, weights = dequantizers()
    operator = {"dequantize_4bit": weights, "dequantize_blockwise": scales, **updates()}[instance.name]
    args, kwargs = _arguments(operator, instance, make_tensors(instance, device), device)
    return lambda: operator(*args, **kwargs)
