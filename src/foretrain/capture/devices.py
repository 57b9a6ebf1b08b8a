"""Code that asks for a GPU gets the meta device."""

from __future__ import annotations

from typing import Any

import torch
from torch.overrides import TorchFunctionMode


class OnMeta(TorchFunctionMode):
    """Whatever asks for a GPU gets the meta device: ``.cuda()``, ``.to("cuda")``, ``device="cuda"``."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func is torch.Tensor.cuda:
            return args[0].to("meta")
        if "device" in kwargs and _is_gpu(kwargs["device"]):
            kwargs["device"] = "meta"
        if func is torch.Tensor.to and any(_is_gpu(argument) for argument in args[1:]):
            args = (args[0], *("meta" if _is_gpu(argument) else argument for argument in args[1:]))
        return func(*args, **kwargs)


def _is_gpu(value: Any) -> bool:
    if isinstance(value, torch.device):
        return value.type == "cuda"
    return isinstance(value, str) and value.split(":")[0] == "cuda"
