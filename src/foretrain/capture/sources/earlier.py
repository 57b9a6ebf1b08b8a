"""Lets installed libraries do what an earlier version did, as far as ``library_changes`` knows it."""

from __future__ import annotations

import contextlib
import importlib
import math
import unittest.mock
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch

from foretrain.capture.sources.zoo import quiet_zoo_import
from foretrain.library_changes import ATTENTION, POSITION_BIAS, SOFTCAP, LibraryChange


@contextlib.contextmanager
def as_before(undone: Iterable[LibraryChange]) -> Iterator[None]:
    """While the block runs, libraries behave as before these changes."""
    with contextlib.ExitStack() as stack:
        for change in undone:
            stack.enter_context(_UNDO[change.name]())
        yield


@contextlib.contextmanager
def _sdpa_without_softcap() -> Iterator[None]:
    """Models with soft-capped scores run scaled_dot_product_attention, without the cap."""
    quiet_zoo_import()
    from transformers import AttentionInterface
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    def without_cap(*args: Any, softcap: float | None = None, **kwargs: Any) -> Any:
        return sdpa_attention_forward(*args, **kwargs)

    classes = list(_pretrained_classes(SOFTCAP.models or ()))
    supported = [one._supports_sdpa for one in classes]
    AttentionInterface.register("sdpa", without_cap)
    for one in classes:
        one._supports_sdpa = True
    try:
        yield
    finally:
        AttentionInterface.register("sdpa", sdpa_attention_forward)
        for one, before in zip(classes, supported, strict=True):
            one._supports_sdpa = before


@contextlib.contextmanager
def _bias_as_it_lies() -> Iterator[None]:
    """A position bias is not copied to rows before attention takes it for a mask."""
    quiet_zoo_import()
    from transformers.integrations import sdpa_attention

    make = sdpa_attention.create_position_bias_mask

    def without_copy(*args: Any, **kwargs: Any) -> Any:
        with unittest.mock.patch.object(torch.Tensor, "contiguous", lambda tensor, *_, **__: tensor):
            return make(*args, **kwargs)

    with unittest.mock.patch.object(sdpa_attention, "create_position_bias_mask", without_copy):
        yield


def _attention_written_out() -> contextlib.AbstractContextManager[Any]:
    """Attention is two products with a softmax between them, as libraries wrote it."""
    return unittest.mock.patch.object(torch.nn.functional, "scaled_dot_product_attention", _attention)


def _attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0, is_causal: bool = False, scale: float | None = None, enable_gqa: bool = False,
) -> torch.Tensor:  # fmt: skip
    if enable_gqa and (shared := query.shape[-3] // key.shape[-3]) > 1:
        key, value = key.repeat_interleave(shared, -3), value.repeat_interleave(shared, -3)
    scores = (query * (query.shape[-1] ** -0.5 if scale is None else scale)) @ key.transpose(-2, -1)
    if is_causal:
        rows, columns = scores.shape[-2:]
        attn_mask = torch.ones(rows, columns, dtype=torch.bool, device=scores.device).tril()
    if attn_mask is not None:
        masked = attn_mask.dtype == torch.bool
        scores = scores.masked_fill(~attn_mask, -math.inf) if masked else scores + attn_mask
    weights = torch.nn.functional.dropout(scores.softmax(-1), dropout_p)
    return weights @ value


def _pretrained_classes(model_types: Iterable[str]) -> Iterator[Any]:
    """The classes in which models of these types say what they support."""
    for model_type in sorted(model_types):
        module = importlib.import_module(f"transformers.models.{model_type}.modeling_{model_type}")
        yield from (one for name, one in vars(module).items() if name.endswith("PreTrainedModel")
                    and one.__module__ == module.__name__)  # fmt: skip


_UNDO: dict[str, Callable[[], contextlib.AbstractContextManager[None]]] = {
    SOFTCAP.name: _sdpa_without_softcap,
    POSITION_BIAS.name: _bias_as_it_lies,
    ATTENTION.name: _attention_written_out,
}
