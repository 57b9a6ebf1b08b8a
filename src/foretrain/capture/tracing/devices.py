"""Keeps code that asks for a GPU, or to leave one, on the meta device."""

from __future__ import annotations

from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from foretrain.capture.tracing.constants import Constants
from foretrain.capture.tracing.nested import map_tensors, tensors_in
from foretrain.tracebacks import asking_file, is_own_code


class OnMeta(TorchFunctionMode):
    """``.cuda()``, ``.to("cuda")`` and ``device="cuda"`` mean meta; ``.cpu()`` of a meta tensor, which has no
    data, leaves it there. A tensor made of numbers on meta keeps them in ``constants``. A user's own code
    that asks a tensor on meta where it is hears of a GPU."""

    default: str | None = None
    """Where tensors are made that are told no device."""

    def __init__(self, constants: Constants | None = None) -> None:
        super().__init__()
        self._constants = constants or Constants()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func is torch.Tensor.cuda:
            return args[0].to("meta")
        if func is torch.Tensor.cpu and args[0].is_meta:
            return args[0]
        if func in _PLACES and args[0].is_meta and is_own_code(asking_file()):
            return _PLACES[func]
        leaving = func is torch.Tensor.to and args[0].is_meta
        if "device" in kwargs:
            kwargs["device"] = _stays(kwargs["device"], leaving)
        if func is torch.Tensor.to:
            args = (args[0], *(_stays(one, leaving) for one in args[1:]))
        if func in _OF_NUMBERS and is_of(kwargs.get("device") or self.default, "meta"):
            return self._of_numbers(func, args, kwargs)
        return func(*args, **kwargs)

    def _of_numbers(self, func: Any, args: Any, kwargs: dict[str, Any]) -> torch.Tensor:
        wants_gradient = kwargs.pop("requires_grad", False)
        if is_meta_in(args):
            args = map_tensors(self._answered, args)
        real = func(*args, **{**kwargs, "device": None if is_meta_in(args) else "cpu"})
        if real.is_meta:
            return real.requires_grad_(wants_gradient) if wants_gradient else real  # type: ignore[no-any-return]
        tensor = torch.empty_strided(real.shape, real.stride(), dtype=real.dtype, device="meta")
        self._constants.learn(tensor, real)
        return tensor.requires_grad_(wants_gradient)

    def _answered(self, tensor: torch.Tensor) -> torch.Tensor:
        value = self._constants.answer(tensor)
        return tensor if value is None else value


class Unfilled(OnMeta):
    """As ``OnMeta``, beside a default device of meta; filling a weight, which is what constructors do most,
    leaves it as it is."""

    default = "meta"

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        weight = _first(args, kwargs) if func in _INITIAL else None
        if isinstance(weight, torch.nn.Parameter) and weight.is_meta:
            self._constants.forget(weight)
            return weight
        if func in _FILLS and args and args[0].is_meta:
            if isinstance(args[0], torch.nn.Parameter) or func in _RANDOM:
                self._constants.forget(args[0])
                return args[0]
            if func not in _SETS and self._constants.value(args[0]) is None:
                return args[0]
        return super().__torch_function__(func, types, args, kwargs)


def _first(args: Any, kwargs: Any) -> Any:
    return args[0] if args else next(iter((kwargs or {}).values()), None)


_PLACES: dict[Any, Any] = {
    torch.Tensor.is_cuda.__get__: True,  # type: ignore[attr-defined]
    torch.Tensor.device.__get__: torch.device("cuda", 0),
    torch.Tensor.get_device: 0,
}
"""What a tensor says of its device on a GPU."""

_INITIAL = {torch.nn.init.kaiming_uniform_, torch.nn.init.uniform_, torch.nn.init.normal_}
_OF_NUMBERS = {torch.tensor, torch.as_tensor, torch.asarray}
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


def is_meta_in(values: Any) -> bool:
    return any(tensor.is_meta for tensor in tensors_in(values))


def _stays(device: Any, leaving: bool) -> Any:
    return "meta" if is_of(device, "cuda") or (leaving and is_of(device, "cpu")) else device
