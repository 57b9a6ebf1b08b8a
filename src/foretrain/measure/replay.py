"""Calls operators with real tensors on a device and measures their device and host times."""

from __future__ import annotations

import contextlib
import gc
import math
import time
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from foretrain.capture.sources.quantised import dequantizers
from foretrain.capture.tracing.eight_bit import updates
from foretrain.errors import InputError, first_line
from foretrain.graph import TensorSpec
from foretrain.graph.opset import traits
from foretrain.measure.instances import Instance

aten = torch.ops.aten
Call = Callable[[], Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """Seconds of one call. Cold: its data was flushed from the L2 cache before; warm: it ran just before."""

    cold_s: float
    warm_s: float
    host_s: float
    kernels: int
    kernel_names: tuple[str, ...] = ()


# Building the call


def build_call(instance: Instance, device: str) -> Call:
    """A function that runs the operator once, on tensors of the instance's shapes, dtypes and strides."""
    import foretrain.measure.special_calls  # noqa: F401  its builders join those below

    builder = _BUILDERS.get(instance.name)
    if builder is not None:
        return builder(instance, device)
    return call_of(instance, make_tensors(instance, device), device)


def call_of(instance: Instance, tensors: Sequence[torch.Tensor], device: str) -> Call:
    """A function that runs the operator once on these tensors."""
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
    """The inputs, or the first so many."""
    limit = _index_limit(instance)
    return [_tensor(spec, device, limit) for spec in instance.inputs[:most]]


def _tensor(spec: TensorSpec, device: str, limit: int) -> torch.Tensor:
    """Random numbers in the layout of the spec; an expanded dimension is made once and expanded."""
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
    """Integer inputs are indices: below the length of what they index, else zero, which is valid anywhere."""
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


# Timing


@contextlib.contextmanager
def _matmul_precision(instance: Instance) -> Iterator[None]:
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = instance.precision == "tf32"
    try:
        yield
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before


_HOST_CALLS, _PROFILED_CALLS = 5, 3
"""Calls that are timed by the host's clock, and that are profiled, cold and warm each: the middle one
counts."""


def time_on_cpu(instance: Instance) -> Timing:
    """Time a call by the host's clock; the cache is left as the call before it left it."""
    call = build_call(instance, "cpu")
    with torch.no_grad():
        call()
        times = _host_times_s(call, _HOST_CALLS)
    middle = sorted(times)[len(times) // 2]
    return Timing(cold_s=max(times), warm_s=middle, host_s=middle, kernels=1)


def _host_times_s(call: Call, calls: int) -> list[float]:
    """Time each of so many calls by the host's clock."""
    times = []
    for _ in range(calls):
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return times


_MANY_KERNELS_S = 5e-4
"""Of a call that issues so many kernels that a few of them fill the device's queue."""


class CudaTimer:
    """Kernel times of many calls from one profile: events would measure the gap before a small kernel."""

    def __init__(self) -> None:
        properties = torch.cuda.get_device_properties(0)
        self._flush = torch.empty(
            2 * int(properties.L2_cache_size or 64 << 20) // 4, dtype=torch.float32, device="cuda"
        )

    def host_time_s(self, call: Call) -> float:
        """Time how long the host takes to issue a call, while the device's queue is far from full."""
        times: list[float] = []
        for _ in range(_HOST_CALLS):
            if not times or times[-1] > _MANY_KERNELS_S:
                torch.cuda.synchronize()
            times += _host_times_s(call, 1)
        torch.cuda.synchronize()
        return sorted(times)[len(times) // 2]

    def time(self, instances: Sequence[Instance]) -> Iterator[tuple[Instance, Timing | str]]:
        """Time each instance, or give the reason why there is no timing."""
        host: dict[int, float] = {}
        failed: dict[int, str] = {}
        activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
        with torch.no_grad():
            for number, instance in enumerate(instances):
                try:
                    with _matmul_precision(instance):
                        call = build_call(instance, "cuda")
                        call()
                        host[number] = self.host_time_s(call)
                    del call
                except Exception as error:
                    failed[number] = _why(error)
            with torch.profiler.profile(activities=activities) as profile:
                for number, instance in enumerate(instances):
                    if number not in failed:
                        self._profiled_calls(number, instance, failed)
                torch.cuda.synchronize()
        kernels = _kernels_by_label(profile)
        for number, instance in enumerate(instances):
            yield (
                instance,
                failed[number] if number in failed else self._summary(kernels, number, host[number]),
            )

    def _profiled_calls(self, number: int, instance: Instance, failed: dict[int, str]) -> None:
        try:
            with _matmul_precision(instance):
                call = build_call(instance, "cuda")
                call()
                for repeat in range(_PROFILED_CALLS):
                    self._flush.zero_()
                    with torch.profiler.record_function(f"cold {number} {repeat}"):
                        call()
                for repeat in range(_PROFILED_CALLS):
                    with torch.profiler.record_function(f"warm {number} {repeat}"):
                        call()
        except Exception as error:
            failed[number] = _why(error)

    def _summary(
        self, kernels: dict[str, list[tuple[str, int, int]]], number: int, host_s: float
    ) -> Timing | str:
        runs = {
            kind: [kernels.get(f"{kind} {number} {repeat}", []) for repeat in range(_PROFILED_CALLS)]
            for kind in ("cold", "warm")
        }
        if not any(runs["warm"]):
            return "no kernel ran"
        times = {kind: sorted(map(busy_s, each)) for kind, each in runs.items()}
        middle = _PROFILED_CALLS // 2
        names = tuple(name[:80] for name, _, _ in runs["warm"][-1])
        return Timing(
            cold_s=times["cold"][middle],
            warm_s=times["warm"][middle],
            host_s=host_s,
            kernels=len(names),
            kernel_names=names,
        )


def _why(error: Exception) -> str:
    """The reason in one line; memory that the failed call held is given back first."""
    text = f"{type(error).__name__}: {first_line(error)}"[:200]
    error.__traceback__ = None
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    return text


def is_kernel(event: Any) -> bool:
    """Kernels, copies and fills; the profiler also puts its annotations (a label, ``Optimizer.step``) on
    the device's track."""
    return (
        "CUDA" in str(event.device_type())
        and not getattr(event, "is_user_annotation", bool)()
        and not event.name().startswith(("cold ", "warm "))
    )


def busy_s(kernels: Sequence[tuple[str, int, int]]) -> float:
    """Seconds with any of the kernels (name, start and end in ns) on the device: cuDNN runs some side by
    side."""
    busy_ns, until = 0, 0
    for _, start, end in sorted(kernels, key=lambda kernel: kernel[1]):
        busy_ns += max(0, end - max(start, until))
        until = max(until, end)
    return busy_ns * 1e-9


def _kernels_by_label(profile: Any) -> dict[str, list[tuple[str, int, int]]]:
    """The kernels that ran for each label, matched by when the host launched them."""
    labels: list[tuple[int, int, str]] = []
    launched: dict[int, int] = {}
    kernels: list[tuple[int, str, int, int]] = []
    for event in profile.profiler.kineto_results.events():
        name = event.name()
        if is_kernel(event):
            start = event.start_ns()
            kernels.append((event.correlation_id(), name, start, start + event.duration_ns()))
        elif "CUDA" in str(event.device_type()):
            continue
        elif name.startswith(("cold ", "warm ")):
            labels.append((event.start_ns(), event.start_ns() + event.duration_ns(), name))
        elif name.startswith(("cudaLaunch", "cuLaunch", "cudaMemcpy", "cudaMemset", "cudaGraphLaunch")):
            launched[event.correlation_id()] = event.start_ns()
    return _match(sorted(labels), launched, kernels)


def _match(
    labels: list[tuple[int, int, str]],
    launched: dict[int, int],
    kernels: list[tuple[int, str, int, int]],
) -> dict[str, list[tuple[str, int, int]]]:
    starts = [start for start, _, _ in labels]
    kernels_of: dict[str, list[tuple[str, int, int]]] = {}
    for correlation, name, start, end in kernels:
        when = launched.get(correlation)
        position = -1 if when is None else bisect_right(starts, when) - 1
        if position >= 0 and when is not None and when <= labels[position][1]:
            kernels_of.setdefault(labels[position][2], []).append((name, start, end))
    return kernels_of


def batch_by_memory(instances: Sequence[Instance], limit_bytes: float, most: int) -> Iterator[list[Instance]]:
    """Instances in groups that one profile holds; one that needs more than the limit is alone."""
    group: list[Instance] = []
    size = 0.0
    for instance in instances:
        need = sum(spec.size_bytes for spec in instance.inputs) + instance.bytes
        if group and (len(group) >= most or size + need > limit_bytes):
            yield group
            group, size = [], 0.0
        group.append(instance)
        size += need
    if group:
        yield group
