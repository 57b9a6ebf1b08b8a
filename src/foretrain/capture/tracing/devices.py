"""Code that asks for a GPU, or to leave one, stays on the meta device."""

from __future__ import annotations

from typing import Any

import torch
from torch.overrides import TorchFunctionMode


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
            _is(kwargs["device"], "cuda") or (leaving and _is(kwargs["device"], "cpu"))
        ):
            kwargs["device"] = "meta"
        if moves:
            args = (
                args[0],
                *("meta" if _is(one, "cuda") or (leaving and _is(one, "cpu")) else one for one in args[1:]),
            )
        return func(*args, **kwargs)


class Unfilled(OnMeta):
    """As ``OnMeta``; filling a meta tensor, which is what constructors do most, leaves it as it is."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _FILLS and args and args[0].is_meta:
            return args[0]
        return super().__torch_function__(func, types, args, kwargs)


_FILLS = {
    torch.Tensor.normal_,
    torch.Tensor.uniform_,
    torch.Tensor.zero_,
    torch.Tensor.fill_,
    torch.Tensor.clamp_,
    torch.Tensor.erfinv_,
    torch.Tensor.mul_,
    torch.Tensor.add_,
}


def _is(value: Any, kind: str) -> bool:
    if isinstance(value, torch.device):
        return value.type == kind
    return isinstance(value, str) and value.split(":")[0] == kind
