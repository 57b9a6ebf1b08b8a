"""Keeps a running script on the meta device: its weights and what it sends to a GPU; data stays real until it
meets them."""

from __future__ import annotations

import sys
from types import FrameType
from typing import Any

import numpy as np
import torch
from torch.utils._device import _device_constructors
from torch.utils.weak import WeakTensorKeyDictionary

from foretrain.capture.tracing.constants import Constants, together
from foretrain.capture.tracing.devices import OnMeta, is_of
from foretrain.capture.tracing.nested import map_tensors, tensors_in

_READ = {torch.Tensor.numpy, torch.Tensor.tolist, torch.Tensor.__array__, torch.Tensor.__format__}
_MAY_REQUIRE_GRAD = {torch.Tensor.requires_grad_, torch.Tensor.requires_grad.__set__}  # type: ignore[attr-defined]


class InScript(OnMeta):
    """As ``OnMeta``; what modules make in their constructors is on meta, and so is a leaf whose gradient is
    wanted. Questions to a tensor are answered with its values where they are known, else with ones."""

    def __init__(self, constants: Constants) -> None:
        super().__init__(constants)
        self._leaves: Any = WeakTensorKeyDictionary()
        self._constructors = _device_constructors()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func in self._constructors:
            self._place(kwargs)
        elif func is torch.Tensor.pin_memory:
            return args[0]
        elif func in _MAY_REQUIRE_GRAD and _is_real_leaf(args) and (len(args) < 2 or args[1]):
            return self._leaf(args[0])
        if len(self._leaves):
            args, kwargs = map_tensors(self._as_leaf, args), map_tensors(self._as_leaf, kwargs)
        if func in _READ and args[0].is_meta:
            return self._read(func, args, kwargs)
        if _leaves_device(func, args, kwargs) and (value := self._constants.answer(args[0])) is not None:
            return value.clone()
        args, kwargs = together(self._constants, func, args, kwargs)
        if kwargs.get("generator") is not None and any(one.is_meta for one in tensors_in((args, kwargs))):
            kwargs["generator"] = None
        return super().__torch_function__(func, types, args, kwargs)

    def _place(self, kwargs: dict[str, Any]) -> None:
        wanted = kwargs.get("device")
        on_meta = kwargs.get("requires_grad") or torch.get_default_device().type == "meta"
        if is_of(wanted, "cuda") or (wanted is None and (on_meta or _in_constructor())):
            kwargs["device"] = "meta"
        if is_of(kwargs.get("device"), "meta"):
            kwargs.pop("generator", None)
            kwargs.pop("pin_memory", None)
        elif "pin_memory" in kwargs:
            kwargs["pin_memory"] = False

    def _leaf(self, tensor: torch.Tensor) -> torch.Tensor:
        """A leaf on meta that stands for a real tensor from now on."""
        if tensor not in self._leaves:
            twin = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")
            self._leaves[tensor] = twin.requires_grad_()
        leaf: torch.Tensor = self._leaves[tensor]
        return leaf

    def _as_leaf(self, tensor: torch.Tensor) -> torch.Tensor:
        leaf: torch.Tensor | None = None if tensor.is_meta else self._leaves.get(tensor)
        return tensor if leaf is None else leaf

    def _read(self, func: Any, args: Any, kwargs: Any) -> Any:
        tensor = args[0]
        value = self._constants.answer(tensor)
        if value is None:
            value = torch.from_numpy(np.ones(tuple(tensor.shape))).to(tensor.dtype)
        return func(value, *args[1:], **kwargs)


def _leaves_device(func: Any, args: Any, kwargs: Any) -> bool:
    """Whether a tensor on meta is asked for on the CPU."""
    if func is torch.Tensor.cpu:
        return bool(args[0].is_meta)
    wanted = (*args[1:2], kwargs.get("device"))
    return func is torch.Tensor.to and args[0].is_meta and any(is_of(one, "cpu") for one in wanted)


def _is_real_leaf(args: Any) -> bool:
    tensor = args[0]
    return bool(isinstance(tensor, torch.Tensor) and not tensor.is_meta and tensor.is_leaf)


def _in_constructor() -> bool:
    """Whether a module is being built."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None:
        if frame.f_code.co_name == "__init__" and isinstance(frame.f_locals.get("self"), torch.nn.Module):
            return True
        frame = frame.f_back
    return False
