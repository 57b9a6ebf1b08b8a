"""Makes tracing on the meta device take the decisions that torch takes for CUDA tensors.

torch decides in the dispatcher, by device: autocast's cast lists, fused attention, cuDNN recurrences, fused
dropout. Meta tensors take none of these ways. Two dispatch keys that no backend here uses, ``AutocastHPU``
and ``AutocastIPU``, are therefore given Python kernels and switched on while a model is traced: the upper one
casts as autocast does, the lower one picks the kernels that CUDA would. Because this happens in the
dispatcher, calls that torch makes inside its own composite functions are seen as well.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch

from foretrain.capture.tracing.cuda_kernels import CUDA_KERNELS, KERNELS

aten = torch.ops.aten
_CASTS: Any = getattr(torch._C.DispatchKey, "AutocastHPU")  # noqa: B009 (the stubs do not know it)

# The cast lists of torch's autocast for CUDA.
_TO_LOW = """
_convolution _convolution.deprecated conv1d conv2d conv3d conv_tbc conv_transpose1d conv_transpose2d.input
conv_transpose3d.input convolution prelu addmm addmv addr matmul einsum mm mv linalg_vecdot linear addbmm
baddbmm bmm
chain_matmul linalg_multi_dot _thnn_fused_lstm_cell _thnn_fused_gru_cell lstm_cell gru_cell rnn_tanh_cell
rnn_relu_cell
scaled_dot_product_attention
""".split()
_TO_HALF = [
    f"{kind}.{form}" for kind in ("lstm", "gru", "rnn_tanh", "rnn_relu") for form in ("input", "data")
]  # cuDNN recurrences run in fp16 under either autocast
_TO_FLOAT = """
acos asin cosh erfinv exp expm1 log log10 log2 log1p reciprocal rsqrt sinh tan pow.Tensor_Scalar
pow.Tensor_Tensor pow.Scalar
softplus layer_norm native_layer_norm group_norm rms_norm frobenius_norm.dim norm.Scalar norm.ScalarOpt_dim
nuclear_norm nuclear_norm.dim cosine_similarity
poisson_nll_loss cosine_embedding_loss nll_loss nll_loss2d hinge_embedding_loss kl_div l1_loss
smooth_l1_loss huber_loss
mse_loss margin_ranking_loss multilabel_margin_loss soft_margin_loss triplet_margin_loss multi_margin_loss
binary_cross_entropy_with_logits dist pdist cdist renorm logsumexp upsample_nearest1d
_upsample_nearest_exact1d
upsample_nearest2d _upsample_nearest_exact2d upsample_nearest3d _upsample_nearest_exact3d upsample_linear1d
upsample_bilinear2d
_upsample_bilinear2d_aa upsample_trilinear3d upsample_bicubic2d _upsample_bicubic2d_aa
""".split()
_DTYPE_FLOAT = """
prod prod.dim_int softmax.int log_softmax.int cumprod cumsum linalg_vector_norm linalg_matrix_norm
linalg_matrix_norm.str_ord
sum sum.dim_IntList
""".split()
_PROMOTE = [
    "addcdiv",
    "addcmul",
    "atan2",
    "bilinear",
    "cross",
    "dot",
    "vdot",
    "grid_sampler",
    "index_put",
    "tensordot",
    "scatter_add",
]

_low_dtype: torch.dtype | None = None
_weight_casts: dict[int, torch.Tensor] = {}


@contextlib.contextmanager
def cuda_behaviour(low_dtype: torch.dtype | None = None) -> Iterator[None]:
    """Dispatch as CUDA would; with ``low_dtype``, under an autocast region to that dtype (weight casts cached
    until it ends)."""
    _register()
    _switch(KERNELS, True)
    _cast_to(low_dtype)
    with _nested_regions():
        try:
            yield
        finally:
            _switch(KERNELS, False)
            _cast_to(None)
            _weight_casts.clear()


def forget_casts() -> None:
    """What autocast keeps of weights ends with its region."""
    _weight_casts.clear()


def casting_to() -> torch.dtype | None:
    """What the autocast region that is open casts to."""
    return _low_dtype


@contextlib.contextmanager
def casting(low_dtype: torch.dtype | None) -> Iterator[None]:
    """An autocast region to a dtype, or a stretch without one."""
    before = _cast_to(low_dtype)
    try:
        yield
    finally:
        _cast_to(before)


def _switch(key: Any, on: bool) -> None:
    torch._C._dispatch_tls_set_dispatch_key_excluded(key, not on)
    torch._C._dispatch_tls_set_dispatch_key_included(key, on)


def _cast_to(low_dtype: torch.dtype | None) -> torch.dtype | None:
    """Begin casting to a dtype, or end it with None; returns what was in force before."""
    global _low_dtype
    before, _low_dtype = _low_dtype, low_dtype
    _switch(_CASTS, low_dtype is not None)
    return before


@contextlib.contextmanager
def _nested_regions() -> Iterator[None]:
    """``torch.autocast("cuda", ...)`` inside a model opens a region of ours; so does the device type of its
    tensors, meta."""
    original = {name: getattr(torch.autocast, name) for name in ("__init__", "__enter__", "__exit__")}

    def init(
        self: Any,
        device_type: str,
        dtype: torch.dtype | None = None,
        enabled: bool = True,
        cache_enabled: bool | None = None,
    ) -> None:
        self.ours = (dtype or _low_dtype or torch.float16) if enabled else None
        self.is_ours = device_type in ("cuda", "meta")
        if not self.is_ours:
            original["__init__"](self, device_type, dtype, enabled, cache_enabled)

    def enter(self: Any) -> Any:
        if not self.is_ours:
            return original["__enter__"](self)
        self.before = _cast_to(self.ours)
        return self

    def leave(self: Any, *error: Any) -> Any:
        if not self.is_ours:
            return original["__exit__"](self, *error)
        _cast_to(self.before)
        if self.before is None:
            _weight_casts.clear()
        return False

    replacements: tuple[Callable[..., Any], ...] = (init, enter, leave)
    for name, method in zip(original, replacements, strict=True):
        setattr(torch.autocast, name, method)
    try:
        yield
    finally:
        for name, method in original.items():
            setattr(torch.autocast, name, method)


@functools.cache
def _register() -> tuple[torch.library.Library, ...]:
    """Give the two keys their kernels, once per process; every other operator falls through them."""
    fallbacks = torch.library.Library("_", "IMPL")
    fallbacks.fallback(torch.library.fallthrough_kernel, "AutocastHPU")
    fallbacks.fallback(torch.library.fallthrough_kernel, "AutocastIPU")
    library = torch.library.Library("aten", "IMPL")
    lists = (
        (_TO_LOW, _cast_low),
        (_TO_HALF, _cast_half),
        (_TO_FLOAT, _cast_float),
        (_DTYPE_FLOAT, _ask_float),
        (_PROMOTE, _cast_widest),
    )
    for names, adapt in lists:
        for name in names:
            if (overload := _overload(name)) is not None:
                library.impl(name, _autocast_kernel(overload, adapt), "AutocastHPU")
    for name, kernel in CUDA_KERNELS.items():
        library.impl(name, kernel, "AutocastIPU")
    return fallbacks, library


def _overload(name: str) -> Any:
    packet, _, overload = name.partition(".")
    return getattr(getattr(aten, packet, None), overload or "default", None)


# Casts


def _autocast_kernel(
    overload: Any, adapt: Callable[[Any, list[Any], dict[str, Any]], None]
) -> Callable[..., Any]:
    def kernel(*args: Any, **kwargs: Any) -> Any:
        with torch._C._ExcludeDispatchKeyGuard(torch._C.DispatchKeySet(_CASTS)):
            positional = list(args)
            adapt(overload, positional, kwargs)
            return overload(*positional, **kwargs)

    return kernel


def _eligible(value: Any) -> bool:
    return (
        isinstance(value, torch.Tensor)
        and value.is_meta
        and value.is_floating_point()
        and value.dtype != torch.float64
    )


def _cast(value: Any, dtype: torch.dtype) -> Any:
    if isinstance(value, list | tuple):
        return type(value)(_cast(item, dtype) for item in value)
    if not _eligible(value) or value.dtype == dtype:
        return value
    if (
        dtype == _low_dtype
        and value.dtype == torch.float32
        and value.requires_grad
        and value.is_leaf
        and not value._is_view()
    ):
        if id(value) not in _weight_casts:
            _weight_casts[id(value)] = value.to(dtype)
        return _weight_casts[id(value)]
    return value.to(dtype)


def _cast_all(args: list[Any], kwargs: dict[str, Any], dtype: torch.dtype) -> None:
    args[:] = [_cast(value, dtype) for value in args]
    kwargs.update({name: _cast(value, dtype) for name, value in kwargs.items()})


def _cast_low(_overload: Any, args: list[Any], kwargs: dict[str, Any]) -> None:
    assert _low_dtype is not None
    _cast_all(args, kwargs, _low_dtype)


def _cast_half(_overload: Any, args: list[Any], kwargs: dict[str, Any]) -> None:
    _cast_all(args, kwargs, torch.float16)


def _cast_float(_overload: Any, args: list[Any], kwargs: dict[str, Any]) -> None:
    _cast_all(args, kwargs, torch.float32)


def _cast_widest(_overload: Any, args: list[Any], kwargs: dict[str, Any]) -> None:
    flat = [
        item
        for value in (*args, *kwargs.values())
        for item in (value if isinstance(value, list | tuple) else (value,))
    ]
    if any(_eligible(item) and item.dtype == torch.float32 for item in flat):
        _cast_all(args, kwargs, torch.float32)


def _ask_float(overload: Any, args: list[Any], kwargs: dict[str, Any]) -> None:
    """Ask the operator itself for a float32 result, unless the caller asked for a dtype."""
    names = [argument.name for argument in overload._schema.arguments]
    position = names.index("dtype")
    given = args[position] if position < len(args) else kwargs.get("dtype")
    if _eligible(args[0]) and given is None:
        if position < len(args):
            args[position] = torch.float32
        else:
            kwargs["dtype"] = torch.float32
