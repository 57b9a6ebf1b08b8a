"""Changes what a module is called with, returns and keeps, around its ``forward``: its operators stay those
of the module."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

Change = Callable[[torch.Tensor], torch.Tensor]


def before(module: nn.Module, change: Change) -> None:
    """Change the tensor that a module is called with, the first if there are several."""
    forward = module.forward

    @functools.wraps(forward)
    def changed(*args: Any, **kwargs: Any) -> Any:
        first, call = _first_argument(forward, args, kwargs)
        return call(change(first))

    module.forward = changed


def after(module: nn.Module, change: Change) -> None:
    """Change the tensor that a module returns."""
    forward = module.forward

    @functools.wraps(forward)
    def changed(*args: Any, **kwargs: Any) -> Any:
        return change(forward(*args, **kwargs))

    module.forward = changed


def at_exit(module: nn.Module, change: Change) -> None:
    """Change the (first) tensor that a module returns, outside of the module."""

    def changed(_module: nn.Module, _args: Any, output: Any) -> Any:
        return (
            change(output)
            if isinstance(output, torch.Tensor)
            else type(output)((change(output[0]), *output[1:]))
        )

    module.register_forward_hook(changed)


def keeping_parts(
    module: nn.Module, layers: Iterable[nn.Module], gather: Change, gather_again: Change
) -> None:
    """Gather what a module is called with; its ``layers`` keep the part for the backward pass, where it is
    gathered again."""
    forward = module.forward
    running: list[_GatheredPart] = []

    @functools.wraps(forward)
    def changed(*args: Any, **kwargs: Any) -> Any:
        part, call = _first_argument(forward, args, kwargs)
        whole = gather(part)
        running.append(_GatheredPart(part, whole, gather_again))
        try:
            return call(whole)
        finally:
            running.pop()

    module.forward = changed
    for layer in layers:
        _keep_part(layer, running)


def _keep_part(layer: nn.Module, running: list[_GatheredPart]) -> None:
    forward = layer.forward

    @functools.wraps(forward)
    def changed(x: torch.Tensor) -> Any:
        with torch.autograd.graph.saved_tensors_hooks(running[-1].pack, running[-1].unpack):
            return forward(x)

    layer.forward = changed


def _first_argument(
    forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[torch.Tensor, Callable[[torch.Tensor], Any]]:
    """The first tensor of a call, and the call with another one in its place."""
    if args:
        return args[0], lambda changed: forward(changed, *args[1:], **kwargs)
    name = next(name for name, value in kwargs.items() if isinstance(value, torch.Tensor))
    return kwargs[name], lambda changed: forward(**{**kwargs, name: changed})


class _GatheredPart:
    """Stands for the gathered tensor among those that autograd keeps; layers that share it gather it once."""

    def __init__(self, part: torch.Tensor, whole: torch.Tensor, gather: Change) -> None:
        self._part, self._gather = part, gather
        self._address = whole.untyped_storage()._cdata
        self._uses = 0
        self._whole: torch.Tensor | None = None

    def pack(self, tensor: torch.Tensor) -> torch.Tensor | torch.Size:
        if tensor.untyped_storage()._cdata != self._address:
            return tensor
        self._uses += 1
        return tensor.shape

    def unpack(self, kept: torch.Tensor | torch.Size) -> torch.Tensor:
        if isinstance(kept, torch.Tensor):
            return kept
        if self._whole is None:
            self._whole = self._gather(self._part)
        whole = self._whole
        self._uses -= 1
        if not self._uses:
            self._whole = None
        return whole.view(kept)


class Shared:
    """One change for all layers of a module that are called with the same tensor."""

    def __init__(self, change: Change) -> None:
        self._change = change
        self._last: tuple[torch.Tensor, torch.Tensor] | None = None

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        if self._last is None or self._last[0] is not x:
            self._last = x, self._change(x)
        return self._last[1]

    def within(self, module: nn.Module) -> None:
        """The tensor is forgotten when the module's forward ends."""
        forward = module.forward

        @functools.wraps(forward)
        def changed(*args: Any, **kwargs: Any) -> Any:
            try:
                return forward(*args, **kwargs)
            finally:
                self._last = None

        module.forward = changed
