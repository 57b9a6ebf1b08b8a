"""Runs code that is written for whole layers on a rank's part of them: ``q.view(B, T, heads, dim)`` with the
heads of the whole model.

Outputs of column layers, and what is made of them, carry the ratio of whole to part until a row layer ends
it. Sizes that a view, a split or an expansion of such a tensor is given are those of the whole; the one that
heads or features are counted by is divided.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterable, Sequence
from types import FrameType
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from foretrain.capture.tracing.nested import tensors_in

_RATIO = "_whole_over_part"


def cut(ratio: int) -> Callable[[torch.Tensor], torch.Tensor]:
    """Marks the output of a column layer."""

    def mark(x: torch.Tensor) -> torch.Tensor:
        setattr(x, _RATIO, ratio)
        return x

    return mark


def uncut(x: torch.Tensor) -> torch.Tensor:
    """Ends a mark at the output of a row layer."""
    setattr(x, _RATIO, 1)
    return x


def head_counts(module: nn.Module) -> set[int]:
    """Numbers of heads that a module, or a configuration that it keeps, goes by."""
    counts: set[int] = set()
    for child in module.modules():
        for name, value in vars(child).items():
            own = value if isinstance(value, dict) else getattr(value, "__dict__", {})
            held = own if name in _CONFIGS else {name: value}
            counts |= {size for key, size in held.items() if type(size) is int and _counts_heads(key)}
    return counts


_CONFIGS = ("config", "cfg", "args", "params", "hparams", "opt")


def _counts_heads(name: str) -> bool:
    plain = name.lower()
    return plain in ("h", "nh") or ("head" in plain and not any(word in plain for word in ("dim", "size")))


class WholeSizes(TorchFunctionMode):
    """While this is open, shapes of marked tensors that are given for the whole are those of the part."""

    def __init__(self, heads: Iterable[int]) -> None:
        super().__init__()
        self._heads = frozenset(heads)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        ratio = max((getattr(one, _RATIO, 1) for one in tensors_in((args, kwargs))), default=1)
        if ratio == 1:
            return func(*args, **kwargs)
        change = _CHANGES.get(func)
        if change is not None:
            args, kwargs = change(self, ratio, args, kwargs)
        output = func(*args, **kwargs)
        for one in tensors_in(output):
            setattr(one, _RATIO, ratio)
        return output

    # Sizes

    def view(self, ratio: int, args: Any, kwargs: Any) -> tuple[Any, Any]:
        x = args[0]
        sizes = args[1:] or tuple(kwargs.values())
        sizes = tuple(sizes[0]) if len(sizes) == 1 and isinstance(sizes[0], Sequence) else sizes
        if not all(isinstance(size, int) for size in sizes):
            return args, kwargs  # a view as another dtype
        whole = _without_blank(sizes, x.numel() * ratio)
        if whole is None:
            return args, kwargs
        if _called_by("einops") and -1 not in sizes and math.prod(whole) == x.numel():
            return (x, self._of_library(whole, ratio, x.dim())), {}
        return (x, self._part(whole, x.numel(), _prefixes(x.shape))), {}

    def unflatten(self, ratio: int, args: Any, kwargs: Any) -> tuple[Any, Any]:
        x, dim, sizes = (*args, *kwargs.values())[:3]
        width = x.shape[dim]
        whole = _without_blank(tuple(sizes), width * ratio)
        return (args, kwargs) if whole is None else ((x, dim, self._part(whole, width, {1})), {})

    def _part(self, whole: tuple[int, ...], elements: int, prefixes: set[int]) -> tuple[int, ...]:
        """The sizes with one of them divided, so that they hold ``elements``: a number of heads if there is
        one, else the first that was not there before."""
        product = math.prod(whole)
        if not elements or product % elements or product == elements:
            return whole
        ratio, before = product // elements, 1
        new: list[int] = []
        for place, size in enumerate(whole):
            before *= size
            if new or (before not in prefixes and size != 1):
                new.append(place)
        places = [place for place in new if whole[place] % ratio == 0]
        if not places:
            return whole
        place = next((place for place in places if whole[place] in self._heads), places[0])
        return (*whole[:place], whole[place] // ratio, *whole[place + 1 :])

    def _of_library(self, sizes: tuple[int, ...], ratio: int, dims: int) -> tuple[int, ...]:
        """Sizes that einops made of the part's width and the whole's heads: the width of a head is too
        small."""
        for place, size in enumerate(sizes[:-1]):
            if len(sizes) > dims and size in self._heads and size % ratio == 0:
                return (*sizes[:place], size // ratio, *sizes[place + 1 : -1], sizes[-1] * ratio)
        return sizes

    def expand(self, ratio: int, args: Any, kwargs: Any) -> tuple[Any, Any]:
        x, *sizes = args
        sizes = list(sizes[0]) if len(sizes) == 1 and isinstance(sizes[0], Sequence) else sizes
        first = len(sizes) - x.dim()
        part = [
            x.shape[place - first]
            if place >= first and size == x.shape[place - first] * ratio > ratio
            else size
            for place, size in enumerate(sizes)
        ]
        return (x, *part), kwargs

    def split(self, ratio: int, args: Any, kwargs: Any) -> tuple[Any, Any]:
        x, sizes, *rest = (*args, *kwargs.values()) if len(args) < 2 else args
        dim = rest[0] if rest else kwargs.get("dim", 0)
        width = x.shape[dim]
        if isinstance(sizes, int):
            whole = width % sizes or width < 2 * sizes
            part: Any = sizes // ratio if whole and sizes % ratio == 0 else sizes
        else:
            part = _shares(list(sizes), width, ratio)
        return (x, part, dim), {}


def _shares(sizes: list[int], width: int, ratio: int) -> list[int]:
    """Queries, keys and values of the part; keys and values have the rest where they are copied."""
    total = sum(sizes)
    if total == width:
        return sizes
    if total == width * ratio and all(size % ratio == 0 for size in sizes):
        return [size // ratio for size in sizes]
    first, others = sizes[0] // ratio, len(sizes) - 1
    fits = others and len(set(sizes[1:])) == 1 and (width - first) % others == 0
    return [first, *[(width - first) // others] * others] if fits else sizes


def _without_blank(sizes: tuple[int, ...], elements: int) -> tuple[int, ...] | None:
    """The sizes with -1 filled in; None where that is not possible."""
    if -1 not in sizes:
        return sizes
    known = math.prod(size for size in sizes if size != -1)
    if not known or elements % known:
        return None
    return tuple(elements // known if size == -1 else size for size in sizes)


def _prefixes(shape: Iterable[int]) -> set[int]:
    product, prefixes = 1, {1}
    for size in shape:
        product *= size
        prefixes.add(product)
    return prefixes


def _called_by(package: str) -> bool:
    """Whether a library is among the callers; looked for only where it is loaded."""
    frame: FrameType | None = sys._getframe(2) if package in sys.modules else None
    for _ in range(_DEEPEST):
        if frame is None:
            return False
        if str(frame.f_globals.get("__name__", "")).partition(".")[0] == package:
            return True
        frame = frame.f_back
    return False


_DEEPEST = 8

_CHANGES: dict[Any, Callable[[WholeSizes, int, Any, Any], tuple[Any, Any]]] = {
    torch.Tensor.view: WholeSizes.view,
    torch.Tensor.reshape: WholeSizes.view,
    torch.reshape: WholeSizes.view,
    torch.Tensor.unflatten: WholeSizes.unflatten,
    torch.unflatten: WholeSizes.unflatten,
    torch.Tensor.expand: WholeSizes.expand,
    torch.Tensor.split: WholeSizes.split,
    torch.split: WholeSizes.split,
}
