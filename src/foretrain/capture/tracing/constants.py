"""Values of meta tensors that do not depend on weights: masks, positions and token ids are computed for real
beside the trace.

A model may ask such a tensor a question (``if mask.all():``). The answer then is the true one, not an error.
The choices of a router (argmax, topk) do depend on weights: they are taken as balanced, each option as often
as any other.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map
from torch.utils.weak import WeakTensorKeyDictionary

aten = torch.ops.aten
_LARGEST = 2**22
"""Elements beyond which a value is not kept."""

_FACTORIES = {
    op
    for packet in ("arange", "ones", "zeros", "full", "eye", "linspace", "scalar_tensor", "ones_like",
    "zeros_like", "full_like",
                   "new_ones", "new_zeros", "new_full", "tril_indices", "triu_indices")
    for op in (getattr(getattr(aten, packet), overload) for overload in getattr(aten, packet).overloads())
}  # fmt: skip


_SELECTING = {aten.nonzero.default, aten.masked_select.default}
_MASKS_SELECT = "masks that depend on data are taken to select everything"
_CHECKS = {"aten::all": True, "aten::any": False, "aten::_is_all_true": True, "aten::_is_any_true": False}
"""What a check of values gives that finds nothing wrong."""

_CHECKS_PASS = "checks of values (finite, ordered) in the model's code are taken as passed"

SHAPED_BY_DATA = {
    getattr(getattr(aten, packet), overload)
    for packet, overload in (("nonzero", "default"), ("masked_select", "default"), ("bincount", "default"),
                             ("repeat_interleave", "Tensor"), ("_unique2", "default"),
                             ("unique_consecutive", "default"), ("unique_dim", "default"))
}  # fmt: skip
"""Operators whose output shape is a question to the data."""


class Constants:
    """Real values of some of the meta tensors of a trace.

    With ``guesses``, questions of a library's own code that do not shape its work are answered too: its
    checks pass, masks that depend on data select everything, memory is written before it is read. What is
    assumed is named.
    """

    def __init__(self, guesses: bool = False) -> None:
        self.guesses = guesses
        self._values: Any = WeakTensorKeyDictionary()
        self._spoilt: set[int] = set()
        self._guessed = False
        self._checks: Any = WeakTensorKeyDictionary()
        self._drawn: Any = WeakTensorKeyDictionary()
        self.assumptions: list[str] = []

    def know(self, tensor: torch.Tensor, value: torch.Tensor) -> None:
        """``tensor`` (on meta) has this value."""
        self._spoilt.discard(tensor.untyped_storage()._cdata)
        self._values[tensor] = value

    def draw(self, tensor: torch.Tensor) -> None:
        """``tensor`` (on meta) holds numbers of which none is exactly a given one: pixels, say."""
        self._drawn[tensor] = True

    def know_data(self, func: Any, args: Any, kwargs: Any, output: torch.Tensor) -> None:
        """``output`` (on meta) was made of Python's numbers, or of tensors that have values."""
        if all(self.value(tensor) is not None for tensor in tensors_in(args)):
            self.know(output, func(*tree_map(self._real, args), **{**kwargs, "device": "cpu"}))

    def value(self, tensor: torch.Tensor) -> torch.Tensor | None:
        if not tensor.is_meta:
            return tensor
        value: torch.Tensor | None = self._values.get(tensor)
        return None if value is None or tensor.untyped_storage()._cdata in self._spoilt else value

    def answer(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """The value of a tensor that the model wants to see."""
        value = self.value(tensor)
        if value is not None and tensor.is_meta and self._guessed:
            self._assume_balance()
        if value is None and (value := self._checks.get(tensor)) is not None:
            self._assume(_CHECKS_PASS)
        return value

    def are_equal(self, one: torch.Tensor, other: torch.Tensor) -> bool | None:
        """Whether two tensors are the same; those that depend on weights are not, if anything is guessed."""
        first, second = self.answer(one), self.answer(other)
        if first is None or second is None:
            return False if self.guesses else None
        return torch.equal(first, second)

    def shaped(self, func: Any, args: Any, kwargs: Any) -> Any:
        """The outputs, on meta, of an operator whose output shape depends on data; None when the data is not
        known."""
        if func in _SELECTING:
            self._select_all(args[-1])
        if func is aten.masked_select.default and self.value(args[0]) is None:
            mask = self.value(args[1])
            return None if mask is None else args[0].new_empty(int(mask.expand_as(args[0]).sum()))
        if any(self.value(tensor) is None for tensor in tensors_in((args, kwargs))):
            return None
        if self._guessed:
            self._assume_balance()
        values = func(
            *tree_map(self._real, args), **{name: self._real(value) for name, value in kwargs.items()}
        )
        return tree_map(self._known_on_meta, values)

    def without_masks(self, func: Any, args: Any) -> Any:
        """The arguments of an indexing call with known boolean masks written as the positions they select."""
        if func not in (aten.index.Tensor, aten.index_put.default, aten.index_put_.default):
            return args
        indices: list[Any] = []
        for index in args[1]:
            if isinstance(index, torch.Tensor):
                self._select_all(index)
            mask = (
                self.answer(index) if isinstance(index, torch.Tensor) and index.dtype == torch.bool else None
            )
            indices += (
                [index] if mask is None else [self._known_on_meta(one) for one in mask.nonzero(as_tuple=True)]
            )
        return (args[0], indices, *args[2:])

    def _select_all(self, mask: torch.Tensor) -> None:
        """Take a mask that depends on data to select everything."""
        unknown = mask.dtype == torch.bool and self.value(mask) is None
        if self.guesses and unknown and mask.numel() <= _LARGEST:
            self._assume(_MASKS_SELECT)
            self.know(mask, torch.ones(mask.shape, dtype=torch.bool))

    def listed(self, key: Any) -> Any:
        """An index with its lists of whole numbers as tensors that have values."""
        if not isinstance(key, tuple):
            return key
        return tuple(
            self._known_on_meta(torch.tensor(one, device="cpu"))
            if isinstance(one, list) and one and all(type(item) is int for item in one)
            else one
            for one in key
        )

    def _known_on_meta(self, value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        tensor = torch.empty_like(value, device="meta")
        self.know(tensor, value)
        return tensor

    def _assume_balance(self) -> None:
        self._assume("choices that depend on data (the routing to experts) are taken as balanced")

    def _assume(self, note: str) -> None:
        if note not in self.assumptions:
            self.assumptions.append(note)

    def follow(self, func: Any, args: Any, kwargs: Any, output: Any) -> None:
        """Compute the same call on values where every operand has one; forget what unknown data was written
        into."""
        known = [self.value(tensor) for tensor in tensors_in((args, kwargs))]
        outputs = [tensor for tensor in tensors_in(output) if tensor.is_meta]
        if self.guesses and "empty" in func._schema.name and not known:
            self._know_empty(outputs)
            return
        if func not in _FACTORIES and (not known or any(value is None for value in known)):
            if func._schema.is_mutable:
                written = (
                    value
                    for argument, value in zip(func._schema.arguments, args, strict=False)
                    if argument.is_write
                )
                self._spoilt.update(
                    tensor.untyped_storage()._cdata for tensor in (*outputs, *tensors_in(tuple(written)))
                )
            self._guess(func, args, kwargs, output)
            if self.guesses and args and isinstance(args[0], torch.Tensor) and args[0] in self._drawn:
                self._follow_drawn(func, outputs)
            return
        if not outputs or not _repeatable(func):
            return
        if sum(tensor.numel() for tensor in outputs) > _LARGEST and not _is_view(func):
            return
        try:
            values = func(
                *tree_map(self._real, args), **{name: self._real(value) for name, value in kwargs.items()}
            )
        except (RuntimeError, NotImplementedError, TypeError, IndexError, ValueError):
            return
        for tensor, value in zip(outputs, tensors_in(values), strict=False):
            self.know(tensor, value)

    def _follow_drawn(self, func: Any, outputs: list[torch.Tensor]) -> None:
        for tensor in outputs:
            if _is_view(func):
                self.draw(tensor)
            elif func is aten.eq.Scalar:
                self.know(tensor, torch.zeros((), dtype=torch.bool).expand(tensor.shape))

    def _know_empty(self, outputs: list[torch.Tensor]) -> None:
        """Whole numbers that are about to be written: nobody reads them before."""
        for tensor in outputs:
            if not tensor.is_floating_point() and not tensor.is_complex() and tensor.numel() <= _LARGEST:
                self.know(tensor, torch.zeros(tensor.shape, dtype=tensor.dtype))

    def _guess(self, func: Any, args: Any, kwargs: Any, output: Any) -> None:
        """Which of several options unknown data selects: each in turn; whether it passes a check: it does."""
        if self.guesses and func._schema.name in _CHECKS and output.numel() == 1:
            self._checks[output] = torch.full(output.shape, _CHECKS[func._schema.name])
        if func is aten.argmax.default:
            chosen, dim = output, args[1] if len(args) > 1 else kwargs.get("dim")
        elif func is aten.topk.default:
            chosen, dim = output[1], args[2] if len(args) > 2 else kwargs.get("dim", -1)
        else:
            return
        if dim is not None and chosen.is_meta and 0 < chosen.numel() <= _LARGEST:
            self._guessed = True
            self.know(chosen, torch.arange(chosen.numel()).remainder(args[0].shape[dim]).view(chosen.shape))

    def _real(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            known = self.value(value)
            return torch.empty(value.shape, dtype=value.dtype) if known is None else known
        return torch.device("cpu") if isinstance(value, torch.device) else value


class Answering(TorchDispatchMode):
    """Follows constants while a model is built, so that a constructor may compute with real numbers
    (``linspace(...)[i].item()``)."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.constants = Constants()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is aten._local_scalar_dense.default and (value := self.constants.value(args[0])) is not None:
            return value.item()
        output = func(*args, **kwargs)
        self.constants.follow(func, args, kwargs, output)
        return output


def _is_view(func: Any) -> bool:
    """Whether the output shares the memory of an input, so that its values cost nothing."""
    aliases = [value.alias_info for value in func._schema.arguments if value.alias_info is not None]
    return bool(aliases) and not func._schema.is_mutable


def _repeatable(func: Any) -> bool:
    """Neither random nor memory that nobody wrote (``empty``, ``new_empty``)."""
    return torch.Tag.nondeterministic_seeded not in func.tags and "empty" not in func._schema.name


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """The tensors in a nesting of lists, tuples and mappings."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for item in value:
            yield from tensors_in(item)
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from tensors_in(item)
