"""Code that asks for a GPU, or to leave one, stays on the meta device."""

from __future__ import annotations

from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from foretrain.capture.tracing.constants import Constants


class OnMeta(TorchFunctionMode):
    """``.cuda()``, ``.to("cuda")`` and ``device="cuda"`` mean meta; ``.cpu()`` of a meta tensor, which has no
    data, leaves it there."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func is torch.Tensor.cuda:
            return args[0].to("meta")
        if func is torch.Tensor.cpu and args[0].is_meta:
            return args[0]
        moves = func is torch.Tensor.to
        leaving = moves and args[0].is_meta
        if "device" in kwargs and (
            is_of(kwargs["device"], "cuda") or (leaving and is_of(kwargs["device"], "cpu"))
        ):
            kwargs["device"] = "meta"
        if moves:
            args = (
                args[0],
                *(
                    "meta" if is_of(one, "cuda") or (leaving and is_of(one, "cpu")) else one
                    for one in args[1:]
                ),
            )
        return func(*args, **kwargs)


class Unfilled(OnMeta):
    """As ``OnMeta``; filling a weight, which is what constructors do most, leaves it as it is."""

    def __init__(self, constants: Constants) -> None:
        super().__init__()
        self._constants = constants

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _FILLS and args and args[0].is_meta:
            if isinstance(args[0], torch.nn.Parameter) or func in _RANDOM:
                self._constants.forget(args[0])
                return args[0]
            if func not in _SETS and self._constants.value(args[0]) is None:
                return args[0]
        return super().__torch_function__(func, types, args, kwargs)


_RANDOM = {torch.Tensor.normal_, torch.Tensor.uniform_, torch.Tensor.erfinv_}
_SETS = {torch.Tensor.zero_, torch.Tensor.fill_}
_FILLS = {*_RANDOM, *_SETS, torch.Tensor.clamp_, torch.Tensor.mul_, torch.Tensor.add_}


def is_of(value: Any, kind: str) -> bool:
    """Whether a device, or the name of one, is of this kind."""
    if isinstance(value, int) and not isinstance(value, bool):
        return kind == "cuda"
    if isinstance(value, torch.device):
        return value.type == kind
    return isinstance(value, str) and value.split(":")[0] == kind
