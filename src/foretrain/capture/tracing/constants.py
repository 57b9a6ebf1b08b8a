"""Computes values of meta tensors that do not depend on weights (masks, positions, token ids) for real,
beside the trace.

A model may ask such a tensor a question (``if mask.all():``). The answer then is the true one, not an error.
What depends on weights or on chance is guessed (``guesses.py``) where shapes depend on it, and said to be.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map
from torch.utils.weak import WeakTensorKeyDictionary

from foretrain.capture.tracing.guesses import (
    CHECKED,
    COMPARED,
    LARGEST,
    MASKED,
    everywhere,
    guess,
    selected,
)
from foretrain.capture.tracing.nested import tensors_in
from foretrain.errors import CaptureError
from foretrain.tracebacks import asking_file

aten = torch.ops.aten
_MOST_ANSWERS = 50_000
"""Answers that rest on guessed or drawn data, in one trace; a loop that waits for another would never end."""
_LARGEST_ASSUMED = 2**28
"""Elements beyond which a value is not kept where outputs are assumed: scores of all anchors of a batch."""

_MOST_VALUES = 10**9
"""Weights and inputs that are given values at most."""

_FACTORIES = {
    op
    for packet in ("arange", "ones", "zeros", "full", "eye", "linspace", "scalar_tensor", "ones_like",
    "zeros_like", "full_like",
                   "new_ones", "new_zeros", "new_full", "tril_indices", "triu_indices", "rand", "randn",
                   "randint", "randperm", "rand_like", "randn_like", "randint_like")
    for op in (getattr(getattr(aten, packet), overload) for overload in getattr(aten, packet).overloads())
}  # fmt: skip


_WITH_LENGTHS = frozenset(
    "_pack_padded_sequence _pack_padded_sequence_backward _pad_packed_sequence lstm gru rnn_tanh "
    "rnn_relu".split()
)
"""Take lengths on the CPU beside data on a device."""

_LEAVE_KNOWN = {aten._amp_foreach_non_finite_check_and_unscale_.default}
"""Gradients are taken to be finite: what a gradient scaler looks at stays as it was."""

_ABOUT_NUMBERS = {
    aten.isnan.default: False,
    aten.isinf.default: False,
    aten.isfinite.default: True,
    aten.all.default: True,
    aten.all.dim: True,
    aten._is_all_true.default: True,
}
"""Questions whether numbers are as they should be, which nobody asks who expects another answer."""

_FINDS_FAULTS = {aten.any.default, aten._is_any_true.default}
"""Ask, in a library's code, whether some of the numbers are not as they should be."""

_CHECKS = {*_FINDS_FAULTS, aten.all.default, aten._is_all_true.default}
_TORCH_CHECKS = tuple(str(Path("torch", *part)) for part in (("distributions",), ("nn", "functional.py")))
"""Code of torch that asks whether what it was given is as it should be, and nothing else of data."""

_SETS = {aten.zero_.default, aten.fill_.Scalar}
"""Write every element of a tensor, whatever stood there."""


def _plain_attention(
    query: Any, key: Any, value: Any, *args: Any, scale: float | None = None, **_kwargs: Any
) -> Any:
    """Attention as the CPU computes it: the mask is the fourth argument where it is a tensor."""
    mask = next((one for one in args[:1] if isinstance(one, torch.Tensor)), None)
    causal = next((one for one in reversed(args) if isinstance(one, bool)), False) and mask is None
    return (aten.scaled_dot_product_attention(query, key, value, mask, 0.0, causal, scale=scale),)


_ON_CPU = {
    aten._scaled_dot_product_flash_attention.default: _plain_attention,
    aten._scaled_dot_product_efficient_attention.default: _plain_attention,
}
"""What the CPU computes in the place of kernels that it does not have."""

SHAPED_BY_DATA = {
    getattr(getattr(aten, packet), overload)
    for packet, overload in (("nonzero", "default"), ("masked_select", "default"), ("bincount", "default"),
                             ("repeat_interleave", "Tensor"), ("_unique2", "default"),
                             ("unique_consecutive", "default"), ("unique_dim", "default"))
}  # fmt: skip
"""Operators whose output shape is a question to the data."""

_following: list[Constants] = []


def assume(tensor: torch.Tensor, value: torch.Tensor) -> None:
    """Let the trace that runs take a tensor on meta to have this value; a real tensor keeps its own."""
    if tensor.is_meta and _following:
        _following[-1].assume(tensor, value)


def known_value(tensor: torch.Tensor) -> torch.Tensor | None:
    """What the trace that runs knows of a tensor on meta; a real tensor itself."""
    return _following[-1].value(tensor) if _following else None


class Constants:
    """Real values of some of the meta tensors of a trace.

    With ``everything``, weights and inputs get random values where they have none, and all that the forward
    pass computes is computed for real: for models whose way depends on data.

    With ``of_library``, the code is that of a library that is known to work: it finds nothing wrong with its
    data, tensors that depend on weights are not the same, and whole numbers are written before they are read.
    """

    def __init__(self, *, everything: bool = False, of_library: bool = False) -> None:
        self.everything = everything
        self.of_library = of_library
        self._random = torch.Generator().manual_seed(0)
        self._values: Any = WeakTensorKeyDictionary()
        self._twins: Any = WeakTensorKeyDictionary()
        self._spoilt: set[int] = set()
        self._guesses: Any = WeakTensorKeyDictionary()
        self._answers = 0
        self._largest = LARGEST
        self.assumptions: list[str] = []

    @contextlib.contextmanager
    def followed(self) -> Iterator[None]:
        """Within, ``assume`` tells these constants."""
        _following.append(self)
        try:
            yield
        finally:
            _following.remove(self)

    def assume(self, tensor: torch.Tensor, value: torch.Tensor) -> None:
        """Know a value that depends on weights, as whoever built the model says what it is like."""
        if value.shape != tensor.shape:
            raise CaptureError(f"assumed values: {list(value.shape)} for a tensor of {list(tensor.shape)}")
        self._largest = _LARGEST_ASSUMED
        self.know(tensor, value.to(tensor.dtype))

    def know(self, tensor: torch.Tensor, value: torch.Tensor) -> None:
        """``tensor`` (on meta) has this value."""
        self._spoilt.discard(tensor.untyped_storage()._cdata)
        self._values[tensor] = value

    def forget(self, tensor: torch.Tensor) -> None:
        """Something unknown was written into ``tensor``."""
        self._spoilt.add(tensor.untyped_storage()._cdata)

    def moved(self, tensor: torch.Tensor) -> torch.Tensor:
        """A real tensor's twin on meta, the same one each time; its values stay known."""
        twin: torch.Tensor | None = self._twins.get(tensor)
        if twin is None:
            twin = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")
            self._twins[tensor] = twin
            self.learn(twin, tensor)
        return twin

    def draw(self, tensors: Iterable[torch.Tensor]) -> None:
        """Give tensors random values: matrices such that what they make of random numbers stays of their
        size."""
        unknown = [one for one in tensors if self.value(one) is None and one.is_floating_point()]
        if sum(tensor.numel() for tensor in unknown) > _MOST_VALUES:
            raise CaptureError(f"model: its values are too many to follow (more than {_MOST_VALUES:.0g})")
        for tensor in unknown:
            width = max(1, tensor.numel() // max(1, tensor.shape[0])) if tensor.dim() > 1 else 1
            value = torch.randn(tensor.shape, generator=self._random) / width**0.5
            self.know(tensor, value.to(tensor.dtype))

    def learn(self, tensor: torch.Tensor, real: torch.Tensor) -> None:
        """``tensor`` has the values that ``real`` has now."""
        if not real.is_meta and (self.everything or real.numel() <= LARGEST):
            self.know(tensor, real.detach().to("cpu", copy=True))

    def value(self, tensor: torch.Tensor) -> torch.Tensor | None:
        if not tensor.is_meta:
            return tensor
        value: torch.Tensor | None = self._values.get(tensor)
        return None if value is None or tensor.untyped_storage()._cdata in self._spoilt else value

    def answer(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """The value of a tensor that the model wants to see."""
        value = self.value(tensor)
        if value is not None and (self._rest_on([tensor]) is not None or self.everything):
            self._answers += 1
            if self._answers > _MOST_ANSWERS:
                raise CaptureError("control flow that depends on data cannot be traced (a loop does not end)")
        return value

    def are_equal(self, one: torch.Tensor, other: torch.Tensor) -> bool | None:
        """Whether two tensors are the same; None where nobody can tell."""
        if (first := self.answer(one)) is None or (second := self.answer(other)) is None:
            return False if self.of_library else None
        return torch.equal(first, second)

    def listed(self, key: Any) -> Any:
        """An index with its lists of whole numbers as tensors that have values."""
        if isinstance(key, list):
            return self.listed((key,))
        if not isinstance(key, tuple):
            return key
        return tuple(
            self._known_on_meta(torch.tensor(one, device="cpu"))
            if isinstance(one, list) and one and all(type(item) is int for item in one)
            else one
            for one in key
        )

    def shaped(self, func: Any, args: Any, kwargs: Any) -> Any:
        """The outputs, on meta, of an operator whose output shape depends on data; None when the data is not
        known."""
        if func._schema.name == "torchvision::nms":
            return self._without_suppression(args[1])
        operands = list(tensors_in((args, kwargs)))
        if func is aten.masked_select.default and (mask := self.answer(args[1])) is not None:
            mask = mask.expand(torch.broadcast_shapes(args[0].shape, mask.shape))
            return args[0].new_empty(int(mask.sum()))
        if any(self.value(tensor) is None for tensor in operands):
            if (guessed := selected(func, args, kwargs)) is None:
                return None
            values, note = guessed
            self._assume(note)
            return tree_map(lambda value: self._known_on_meta(value, note), values)
        assumption = self._rest_on(operands)
        values = func(
            *tree_map(self._real, args), **{name: self._real(value) for name, value in kwargs.items()}
        )
        return tree_map(lambda value: self._known_on_meta(value, assumption), values)

    def _without_suppression(self, scores: torch.Tensor) -> torch.Tensor:
        """All boxes, the best first: how many overlap is a question to a trained model."""
        self._assume("non-maximum suppression is taken to keep every box")
        known = self.value(scores)
        if known is None:
            return torch.empty(scores.shape, dtype=torch.long, device="meta")
        order: torch.Tensor = self._known_on_meta(known.argsort(descending=True, stable=True))
        return order

    def without_masks(self, func: Any, args: Any) -> Any:
        """The arguments of an indexing call with boolean masks written as the positions they select; one that
        writes the same number everywhere needs no positions of a mask that is not known."""
        if func not in (aten.index.Tensor, aten.index_put.default, aten.index_put_.default):
            return args
        if not args[0].is_meta or not any(_is_mask(index) for index in args[1]):
            return args
        indices: list[Any] = []
        for index in args[1]:
            if not _is_mask(index):
                indices.append(index)
                continue
            if func is not aten.index.Tensor and args[2].numel() == 1 and self._guessed(index):
                return args
            mask = self.answer(index)
            if mask is None:
                self._assume(MASKED)
            places = (
                mask.nonzero(as_tuple=True)
                if mask is not None
                else (torch.empty(index.numel(), dtype=torch.long, device="meta"),) * index.dim()
            )
            indices += [self._known_on_meta(one, self._guesses.get(index)) for one in places]
        return (args[0], indices, *args[2:])

    def _guessed(self, tensor: torch.Tensor) -> bool:
        return self.value(tensor) is None or self._guesses.get(tensor) is not None

    def _known_on_meta(self, value: Any, assumption: str | None = None) -> Any:
        if not isinstance(value, torch.Tensor) or value.is_meta:
            return value
        tensor = torch.empty_like(value, device="meta")
        self._learn(tensor, value, assumption)
        return tensor

    def _learn(self, tensor: torch.Tensor, value: torch.Tensor, assumption: str | None) -> None:
        self.know(tensor, value)
        if assumption is not None:
            self._guesses[tensor] = assumption

    def _rest_on(self, tensors: list[torch.Tensor]) -> str | None:
        """What an answer made of these tensors assumes, which is noted."""
        assumption = self._assumed(tensors)
        if assumption is not None:
            self._assume(assumption)
        return assumption

    def _assumed(self, tensors: list[torch.Tensor]) -> str | None:
        return next((note for one in tensors if (note := self._guesses.get(one)) is not None), None)

    def _assume(self, note: str) -> None:
        if note not in self.assumptions:
            self.assumptions.append(note)

    def follow(self, func: Any, args: Any, kwargs: Any, output: Any) -> None:
        """Compute the same call on values where every operand has one; forget what unknown data was written
        into."""
        operands = list(tensors_in((args, kwargs)))
        known = [self.value(tensor) for tensor in operands]
        outputs = [tensor for tensor in tensors_in(output) if tensor.is_meta]
        if self._passes_check(func, operands, outputs):
            return
        makes = func in _FACTORIES or (func in _SETS and _fills_its_storage(args[0]))
        if not makes and (not known or any(value is None for value in known)):
            self._forget_written(func, args, outputs)
            if "empty" in func._schema.name and self.of_library:
                self._know_empty(outputs)
            elif self._largest == LARGEST:  # where a model's outputs are assumed, nothing else is guessed
                guessed = guess(func, args, kwargs, output)
                if guessed is not None and guessed[0].is_meta:
                    self._learn(*guessed)
            return
        if not outputs or not self._may_be_computed(func, outputs):
            self._forget_written(func, args, outputs)
            return
        if func is aten.view.default and self._are_few(outputs):  # a value may lie otherwise than its tensor
            func = aten.reshape.default
        try:
            values = _ON_CPU.get(func, func)(
                *tree_map(self._real, args), **{name: self._real(value) for name, value in kwargs.items()}
            )
        except (RuntimeError, NotImplementedError, TypeError, IndexError, ValueError):
            self._forget_written(func, args, outputs)
            return
        assumption = self._assumed(operands)
        for tensor, value in zip(outputs, tensors_in(values), strict=False):
            self._learn(tensor, value, assumption)

    def _passes_check(self, func: Any, operands: list[torch.Tensor], outputs: list[torch.Tensor]) -> bool:
        """Whether the call asks if numbers are as they should be, of data nobody knows: then they are."""
        by_torch = func in _CHECKS and any(map(self._guessed, operands)) and _is_of_torch(asking_file())
        finds_faults = (self.of_library or by_torch) and func in _FINDS_FAULTS
        if not finds_faults and func not in _ABOUT_NUMBERS:
            return False
        guessed = by_torch or self._assumed(operands) in (COMPARED, CHECKED)
        if not guessed and all(self.value(tensor) is not None for tensor in operands):
            return False
        for tensor in outputs:
            if (passed := everywhere(_ABOUT_NUMBERS.get(func, False), tensor.shape)) is not None:
                self._learn(tensor, passed, CHECKED if guessed or finds_faults else None)
        return True

    def _know_empty(self, outputs: list[torch.Tensor]) -> None:
        for tensor in outputs:
            if not tensor.is_floating_point() and not tensor.is_complex() and tensor.numel() <= LARGEST:
                self.know(tensor, torch.zeros(tensor.shape, dtype=tensor.dtype))

    def _may_be_computed(self, func: Any, outputs: list[torch.Tensor]) -> bool:
        free = self._are_few(outputs) or _is_view(func)
        return free and "empty" not in func._schema.name  # memory that nobody wrote

    def _are_few(self, outputs: list[torch.Tensor]) -> bool:
        return self.everything or sum(tensor.numel() for tensor in outputs) <= self._largest

    def _forget_written(self, func: Any, args: Any, outputs: list[torch.Tensor]) -> None:
        """What an operator wrote and nobody knows."""
        if func._schema.is_mutable and func not in _LEAVE_KNOWN:
            written = (
                value
                for argument, value in zip(func._schema.arguments, args, strict=False)
                if argument.is_write
            )
            for tensor in (*outputs, *tensors_in(tuple(written))):
                self.forget(tensor)

    def _real(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            known = self.value(value)
            return torch.zeros(value.shape, dtype=value.dtype) if known is None else known
        return torch.device("cpu") if isinstance(value, torch.device) else value


_MANY_ZEROS = 2**18
"""Zeros beyond which one stands for all; of a weight, mostly. Written into in part, they are unknown."""


class Answering(TorchDispatchMode):
    """Follows constants while a model is built, so that a constructor may compute with real numbers
    (``linspace(...)[i].item()``)."""

    def __init__(self, constants: Constants) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._constants = constants

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is aten._local_scalar_dense.default and (value := self._constants.value(args[0])) is not None:
            return value.item()
        if func is aten.empty.memory_format:
            weight = func(*args, **kwargs)
            if weight.is_floating_point():  # of which nothing is known yet
                return weight
        args, kwargs = together(self._constants, func, args, kwargs)
        output = func(*args, **kwargs)
        if func is aten.zeros.default and output.is_floating_point() and output.numel() > _MANY_ZEROS:
            self._constants.know(output, torch.zeros((), dtype=output.dtype).expand(output.shape))
            return output
        self._constants.follow(func, args, kwargs, output)
        return output


def together(constants: Constants, func: Any, args: Any, kwargs: Any) -> tuple[Any, Any]:
    """The arguments of a call on one device: real tensors that meet some on meta move there.

    A number on the CPU goes with tensors of any device, as it does with those of a GPU. What is copied to the
    host and known arrives there.
    """
    if (
        func is aten.copy_.default
        and args[1].is_meta
        and not args[0].is_meta
        and (value := constants.answer(args[1])) is not None
    ):
        return (args[0], value, *args[2:]), kwargs
    tensors = list(tensors_in((args, kwargs)))
    strays = [tensor for tensor in tensors if tensor.dim() and not tensor.is_meta]
    if not strays or not any(tensor.is_meta for tensor in tensors) or _takes_lengths(func):
        return args, kwargs

    def move(value: Any) -> Any:
        stray = isinstance(value, torch.Tensor) and value.dim() and not value.is_meta
        return constants.moved(value) if stray else value

    return tree_map(move, args), tree_map(move, kwargs)


def _is_of_torch(file: str) -> bool:
    return any(part in file for part in _TORCH_CHECKS)


def _takes_lengths(func: Any) -> bool:
    return getattr(func, "__name__", "").partition(".")[0] in _WITH_LENGTHS


def _is_view(func: Any) -> bool:
    """Whether the output shares the memory of an input, so that its values cost nothing."""
    shared = any(argument.alias_info is not None for argument in func._schema.arguments)
    return shared and not func._schema.is_mutable


def _fills_its_storage(tensor: torch.Tensor) -> bool:
    return tensor.numel() * tensor.element_size() == tensor.untyped_storage().nbytes()


def _is_mask(index: Any) -> bool:
    return isinstance(index, torch.Tensor) and index.dtype == torch.bool
