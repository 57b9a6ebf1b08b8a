"""Remembers outputs of operators on the meta device, whose kernels are slow Python, to allocate them at
once."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

_MOST_CALLS = 30_000
"""Calls that are remembered, in the process; about 30 MB."""

_Layout = tuple[torch.Size, tuple[int, ...], torch.dtype]
_Output = tuple[type, tuple[_Layout | None, ...]]
_calls: dict[Any, _Output | None] = {}
_IN_PLACE: _Output = (type(None), ())
"""What is remembered of a call that writes into its first argument and returns it."""


def remembered(
    compute: Callable[..., Any],
    func: Any,
    args: Any,
    kwargs: Any,
    named: dict[str, Any],
    inputs: list[torch.Tensor],
) -> Any:
    """``compute(*args, **kwargs)``, or its like on meta where the same call of ``func`` was computed before.

    ``named`` are all arguments as plain values, ``inputs`` the tensors among them. Views of inputs are
    computed each time; an operator that returns nothing has nothing to compute.
    """
    kind = _kind(func)
    watched = torch._C._len_torch_dispatch_stack() > 0  # by a mode of the caller's own
    if kind == "views" or watched or not all(map(_is_plain, inputs)):
        return compute(*args, **kwargs)
    if kind == "returns nothing" and inputs:
        return None
    layouts = tuple(map(_layout, inputs))
    key = (func, layouts, repr(named), torch.get_default_dtype())
    call = _calls.get(key)
    if call is _IN_PLACE:
        return args[0]
    if call is not None:
        return _allocate(*call)
    storage = inputs[0].untyped_storage()._cdata if inputs else 0
    output = compute(*args, **kwargs)
    if key not in _calls:
        if len(_calls) >= _MOST_CALLS:
            _calls.clear()
        if kind == "in place":
            same = (
                output is args[0]
                and output is inputs[0]
                and (_layout(output), output.untyped_storage()._cdata) == (layouts[0], storage)
            )
            _calls[key] = _IN_PLACE if same else None
        else:
            _calls[key] = _fresh(output, inputs)
    return output


def _layout(tensor: torch.Tensor) -> _Layout:
    return tensor.shape, tensor.stride(), tensor.dtype


def _is_plain(tensor: torch.Tensor) -> bool:
    return tensor.is_meta and not tensor.dtype.is_complex


@functools.cache
def _kind(func: Any) -> str:
    """What an operator returns by its schema: new tensors, its first argument, nothing, or views of its
    inputs."""
    arguments, returns = func._schema.arguments, func._schema.returns
    aliases = [value.alias_info for value in (*arguments, *returns) if value.alias_info is not None]
    if not aliases:
        return "new"
    if not returns:
        return "returns nothing"
    first = arguments[0].alias_info
    is_in_place = len(returns) == 1 and len(aliases) == 2 and first is not None and first.is_write
    return "in place" if is_in_place else "views"


def _fresh(output: Any, inputs: list[torch.Tensor]) -> _Output | None:
    """How to make the like of an output; None where it is not made of new tensors on meta alone."""
    parts = output if type(output) in (tuple, list) else (output,)
    tensors = [part for part in parts if part is not None]
    if not tensors or not all(isinstance(part, torch.Tensor) and _is_fresh(part) for part in tensors):
        return None
    storages = {tensor.untyped_storage()._cdata for tensor in tensors}
    if len(storages) < len(tensors) or any(tensor.untyped_storage()._cdata in storages for tensor in inputs):
        return None
    return type(output), tuple(None if part is None else _layout(part) for part in parts)


def _is_fresh(tensor: torch.Tensor) -> bool:
    """It fills its storage, as a tensor of its own does."""
    plain = type(tensor) is torch.Tensor and _is_plain(tensor)
    return plain and tensor.untyped_storage().nbytes() == _like(_layout(tensor)).untyped_storage().nbytes()


def _allocate(kind: type, layouts: tuple[_Layout | None, ...]) -> Any:
    made = [None if layout is None else _like(layout) for layout in layouts]
    return made[0] if kind is torch.Tensor else kind(made)


def _like(layout: _Layout) -> torch.Tensor:
    shape, strides, dtype = layout
    return torch.empty_strided(shape, strides, dtype=dtype, device="meta")


def describe(func: Any, args: Any, kwargs: Any, inputs: list[torch.Tensor]) -> dict[str, Any]:
    """Arguments by name, as plain values; tensors are collected in ``inputs`` and written as "%number"."""
    described = {
        argument.name: _plain(value, inputs)
        for argument, value in zip(func._schema.arguments, args, strict=False)
    }
    described.update({name: _plain(value, inputs) for name, value in kwargs.items()})
    return {name: value for name, value in described.items() if value is not None}


def _plain(value: Any, inputs: list[torch.Tensor]) -> Any:
    if isinstance(value, torch.Tensor):
        inputs.append(value)
        return f"%{len(inputs) - 1}"
    if isinstance(value, list | tuple):
        return [_plain(item, inputs) for item in value]
    return value if value is None or isinstance(value, bool | int | float | str) else str(value)
