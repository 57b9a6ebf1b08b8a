"""Imports torchvision, with stand-ins for its compiled operators where these do not load, so that a model
that uses them can be traced."""

from __future__ import annotations

import contextlib
import functools
import importlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from foretrain.capture.tracing.constants import SHAPED_BY_DATA

_SCHEMAS = """
nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor
qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor
roi_align(Tensor input, Tensor rois, float spatial_scale, SymInt pooled_height, SymInt pooled_width, \
int sampling_ratio, bool aligned) -> Tensor
_roi_align_backward(Tensor grad, Tensor rois, float spatial_scale, SymInt pooled_height, \
SymInt pooled_width, SymInt batch_size, SymInt channels, SymInt height, SymInt width, int sampling_ratio, \
bool aligned) -> Tensor
qroi_align(Tensor input, Tensor rois, float input_scale, int input_zero_point, float rois_scale, \
int rois_zero_point, float spatial_scale, SymInt pooled_height, SymInt pooled_width, int sampling_ratio, \
bool aligned) -> Tensor
roi_pool(Tensor input, Tensor rois, float spatial_scale, SymInt pooled_height, SymInt pooled_width) \
-> (Tensor, Tensor)
_roi_pool_backward(Tensor grad, Tensor rois, Tensor argmax, float spatial_scale, SymInt pooled_height, \
SymInt pooled_width, SymInt batch_size, SymInt channels, SymInt height, SymInt width) -> Tensor
ps_roi_align(Tensor input, Tensor rois, float spatial_scale, SymInt pooled_height, SymInt pooled_width, \
int sampling_ratio) -> (Tensor, Tensor)
_ps_roi_align_backward(Tensor grad, Tensor rois, Tensor channel_mapping, float spatial_scale, \
SymInt pooled_height, SymInt pooled_width, int sampling_ratio, SymInt batch_size, SymInt channels, \
SymInt height, SymInt width) -> Tensor
ps_roi_pool(Tensor input, Tensor rois, float spatial_scale, SymInt pooled_height, SymInt pooled_width) \
-> (Tensor, Tensor)
_ps_roi_pool_backward(Tensor grad, Tensor rois, Tensor channel_mapping, float spatial_scale, \
SymInt pooled_height, SymInt pooled_width, SymInt batch_size, SymInt channels, SymInt height, SymInt width) \
-> Tensor
deform_conv2d(Tensor input, Tensor weight, Tensor offset, Tensor mask, Tensor bias, SymInt stride_h, \
SymInt stride_w, SymInt pad_h, SymInt pad_w, SymInt dilation_h, SymInt dilation_w, SymInt groups, \
SymInt offset_groups, bool use_mask) -> Tensor
_deform_conv2d_backward(Tensor grad, Tensor input, Tensor weight, Tensor offset, Tensor mask, Tensor bias, \
SymInt stride_h, SymInt stride_w, SymInt pad_h, SymInt pad_w, SymInt dilation_h, SymInt dilation_w, \
SymInt groups, SymInt offset_groups, bool use_mask) -> (Tensor, Tensor, Tensor, Tensor, Tensor)
_cuda_version() -> int
""".strip().splitlines()
"""What torchvision's compiled library defines, as far as its Python code asks for it."""

_IN_FLOAT = ("nms", "roi_align", "roi_pool", "ps_roi_align", "ps_roi_pool", "deform_conv2d")
"""What autocast runs in float32."""

_KEPT: list[torch.library.Library] = []


def import_with_operators(name: str) -> Any:
    """Import torchvision, or a library on top of it, once more after its operators turned out missing."""
    for partial in [module for module in sys.modules if module.split(".")[0] in (name, "torchvision")]:
        del sys.modules[partial]
    with _stand_ins():
        return importlib.import_module(name)


@contextlib.contextmanager
def _stand_ins() -> Iterator[None]:
    """A compiled library of torchvision that does not load counts as loaded: its operators have schemas, and
    torchvision itself registers how they work on meta and what their gradients are."""
    load = torch.ops.load_library

    def load_or_define(path: Any) -> None:
        try:
            load(path)  # type: ignore[no-untyped-call]
        except OSError:
            if not Path(path).name.startswith("_C"):
                raise
            if not _KEPT:
                _define()

    torch.ops.load_library = load_or_define  # type: ignore[method-assign]
    try:
        yield
    finally:
        torch.ops.load_library = load  # type: ignore[method-assign]


def _define() -> None:
    library = torch.library.Library("torchvision", "DEF")
    for schema in _SCHEMAS:
        library.define(schema)
    library.impl("_cuda_version", lambda: -1, "CompositeImplicitAutograd")
    _KEPT.append(library)


@functools.cache
def follow_operators() -> None:
    """Trace torchvision's operators as CUDA runs them: in float32 under autocast; a suppression of boxes is a
    question to the data."""
    namespace = torch.ops.torchvision
    if not hasattr(namespace, "nms"):
        return
    SHAPED_BY_DATA.add(namespace.nms.default)
    library = torch.library.Library("torchvision", "IMPL")
    for name in _IN_FLOAT:
        if hasattr(namespace, name):
            library.impl(name, _in_float(getattr(namespace, name).default), "AutocastHPU")
    _KEPT.append(library)


def _in_float(overload: Any) -> Callable[..., Any]:
    """The kernel of an operator that converts to float32 and back, for the key that stands for autocast."""
    casts = torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, "AutocastHPU"))  # noqa: B009

    def wide(value: Any) -> Any:
        return value.float() if isinstance(value, torch.Tensor) and value.is_floating_point() else value

    def kernel(*args: Any) -> Any:
        with torch._C._ExcludeDispatchKeyGuard(casts):
            output = overload(*map(wide, args))
        if isinstance(output, tuple):
            return tuple(part.to(args[0].dtype) for part in output)
        return output.to(args[0].dtype) if output.is_floating_point() else output

    return kernel
