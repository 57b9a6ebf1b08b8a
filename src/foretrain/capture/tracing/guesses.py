"""Guesses data that nobody knows where the shapes of a model depend on it.

Random numbers are drawn, the same ones in every trace. The options of a choice (argmax, topk) come in turn. A
comparison for equality fails, one of size holds for every second element or, where a check asks for all, for
all, and a mask of unknown origin selects everything.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch

aten = torch.ops.aten
LARGEST = 2**22
"""Elements beyond which a value is not kept."""
_LARGEST_NO = 2**28
"""Elements beyond which nobody is told that none of them (pixels of a batch) is like another."""

BALANCED = "choices that depend on data (the routing to experts) are taken as balanced"
UNEQUAL = "comparisons of unknown data for equality are taken to fail"
COMPARED = "of comparisons of unknown data by size every second one is taken to hold"
CHECKED = "checks of values (finite, ordered) in the model's code are taken as passed"
MASKED = "a mask whose values are not known selects everything"
DISTINCT = "integers whose values are not known are taken as different from each other"


def guess(func: Any, args: Any, kwargs: Any, output: Any) -> tuple[torch.Tensor, torch.Tensor, str] | None:
    """The output whose value can be assumed although the operands are unknown, that value, and the
    assumption."""
    if func in _CHOICES:
        return _chosen(func, args, kwargs, output)
    name = func._schema.name.partition("::")[2]
    if not isinstance(output, torch.Tensor) or output.dtype != torch.bool:
        return None
    if name in _EQUALITIES:
        equal = _equal(name, args, output)
        return None if equal is None else (output, equal, UNEQUAL)
    if name in _SIZES and output.dim() and output.numel() <= LARGEST:
        return output, _in_turn(output.numel(), 2).eq(0).view(output.shape), COMPARED
    return None


def selected(func: Any, args: Any, kwargs: Any) -> tuple[Any, str] | None:
    """What an operator whose output shape depends on data gives where the data is not known, on the CPU (on
    meta where it is large), and the assumption."""
    x, size = args[0], args[0].numel()
    if func is aten.nonzero.default:
        return _at(size, lambda: torch.ones(x.shape).nonzero(), (size, x.dim())), MASKED
    if func is aten.masked_select.default:
        shape = torch.broadcast_shapes(x.shape, args[1].shape)
        return torch.empty(shape.numel(), dtype=x.dtype, device="meta"), MASKED
    if func is aten.bincount.default:
        bins = args[2] if len(args) > 2 else kwargs.get("minlength", 0)
        return (
            (_in_turn(size, bins).bincount(minlength=bins), BALANCED)
            if 0 < size <= LARGEST and bins
            else None
        )
    if func is aten.repeat_interleave.Tensor:
        whole = kwargs.get("output_size")
        return (
            None
            if whole is None
            else (_at(whole, lambda: torch.arange(whole) * size // whole, (whole,)), BALANCED)
        )
    if func in _UNIQUE:
        by_rows = func is aten.unique_dim.default
        size = x.shape[args[1]] if by_rows else size
        kept = torch.empty(x.shape if by_rows else (size,), dtype=x.dtype, device="meta")
        where = _at(size, lambda: torch.arange(size), (size,))
        counts = _at(size, lambda: torch.ones(size, dtype=torch.long), (size,))
        return (kept, where if by_rows else where.view(x.shape), counts), DISTINCT
    return None


def _at(elements: int, make: Callable[[], torch.Tensor], shape: tuple[int, ...]) -> torch.Tensor:
    """Integers with their values where they are few enough to keep."""
    return make() if elements <= LARGEST else torch.empty(shape, dtype=torch.long, device="meta")


def _in_turn(elements: int, options: int) -> torch.Tensor:
    return torch.arange(elements).remainder(options)


_UNIQUE = {aten._unique2.default, aten.unique_dim.default, aten.unique_consecutive.default}

_CHOICES = {
    aten.argmax.default: None,
    aten.argmin.default: None,
    aten.topk.default: 1,
    aten.max.dim: 1,
    aten.min.dim: 1,
    aten.sort.default: 1,
    aten.sort.stable: 1,
    aten.argsort.default: None,
    aten.multinomial.default: None,
}
"""Operators that give positions along a dimension, and which of their outputs they are."""


def _chosen(func: Any, args: Any, kwargs: Any, output: Any) -> tuple[torch.Tensor, torch.Tensor, str] | None:
    """Each option in turn; of a sort, every option once."""
    place = _CHOICES[func]
    chosen = output if place is None else output[place]
    names = [argument.name for argument in func._schema.arguments]
    dim = -1
    if "dim" in names:
        position = names.index("dim")
        dim = args[position] if len(args) > position else kwargs.get("dim", -1)
        if func in (aten.argmax.default, aten.argmin.default) and len(args) <= position:
            dim = kwargs.get("dim")
    if dim is None or not 0 < chosen.numel() <= LARGEST or not args[0].dim():
        return None
    options = args[0].shape[dim]
    if func in (aten.sort.default, aten.sort.stable, aten.argsort.default):
        along = [options if axis == dim % chosen.dim() else 1 for axis in range(chosen.dim())]
        return chosen, torch.arange(options).view(along).expand(chosen.shape), BALANCED
    return chosen, _in_turn(chosen.numel(), options).view(chosen.shape), BALANCED


_EQUALITIES = {"eq": False, "ne": True, "isnan": False, "isinf": False}
_SIZES = ("lt", "le", "gt", "ge")
"""Which of two single numbers is the larger is not guessed."""


def _equal(name: str, args: Any, output: torch.Tensor) -> torch.Tensor | None:
    """A value is equal to itself and to no other."""
    itself = len(args) > 1 and args[1] is args[0]
    return everywhere(_EQUALITIES[name] is not itself, output.shape)


def everywhere(answer: bool, shape: torch.Size) -> torch.Tensor | None:
    """The same answer for every element; beyond what is kept, a no without memory, which selects nothing."""
    if shape.numel() <= LARGEST:
        return torch.full(shape, answer)
    return None if answer or shape.numel() > _LARGEST_NO else torch.tensor(False).expand(shape)


@contextlib.contextmanager
def draws_kept() -> Iterator[None]:
    """Random numbers of torch, Python and numpy go on afterwards as they were."""
    python, arrays = random.getstate(), np.random.get_state()
    with torch.random.fork_rng(devices=[]):
        try:
            yield
        finally:
            random.setstate(python)
            np.random.set_state(arrays)


@contextlib.contextmanager
def same_draws() -> Iterator[None]:
    """Random numbers are the same ones each time, and go on afterwards as they were."""
    with draws_kept():
        torch.manual_seed(_SEED)
        random.seed(_SEED)
        np.random.seed(_SEED)
        yield


_SEED = 0
