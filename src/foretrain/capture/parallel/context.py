"""Context parallelism: a rank has its part of every sequence, and its queries meet the keys and values of all
ranks.

Keys and values are all-gathered before attention and their gradients reduce-scattered, as in Megatron's and
Llama 3's context parallelism. Causal attention is taken as balanced: ranks get parts from both ends of the
sequence.
"""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
from torch import nn

from foretrain.capture.parallel.collectives import gather
from foretrain.capture.tracing.cuda_kernels import keys_from
from foretrain.errors import UnsupportedJob

_WRITTEN_OUT = "eager_attention_forward"
"""The function of a model's file in transformers that computes attention by single operators."""


class ContextParallel:
    """Gathers what torch's attention is called with, over ``degree`` ranks."""

    def __init__(self, degree: int) -> None:
        self._degree = degree
        self._calls = 0
        self._masks: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    @contextlib.contextmanager
    def attention(self, module: nn.Module) -> Iterator[None]:
        """While this is open, attention of the module sees the keys and values of all ranks: torch's, or that
        which transformers writes out for a model (sinks, soft caps)."""
        if self._degree == 1:
            yield
            return
        with keys_from(self._gathered), contextlib.ExitStack() as written_out:
            for code in {sys.modules[type(child).__module__] for child in module.modules()}:
                if hasattr(code, _WRITTEN_OUT):
                    own = functools.partial(self._by_hand, getattr(code, _WRITTEN_OUT))
                    written_out.enter_context(mock.patch.object(code, _WRITTEN_OUT, own))
            try:
                yield
            finally:
                self._masks.clear()

    def _by_hand(
        self,
        attend: Any,
        module: nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        mask: torch.Tensor | None,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        return attend(module, query, *self._gathered(key, value, mask), *args, **kwargs)

    def _gathered(
        self, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        self._calls += 1
        length = key.shape[-2]
        key, value = (gather(t, t.dim() - 2, self._degree, "context") for t in (key, value))
        return key, value, mask if mask is None or mask.shape[-1] != length else self._widened(mask)

    def _widened(self, mask: torch.Tensor) -> torch.Tensor:
        """The mask of the rank's queries against all keys; layers share it."""
        if id(mask) not in self._masks:
            self._masks[id(mask)] = mask, torch.cat([mask] * self._degree, dim=-1)
        return self._masks[id(mask)][1]

    def check(self, model: str) -> None:
        """Whether there was an attention to gather for."""
        if self._degree > 1 and not self._calls:
            raise UnsupportedJob(
                f"plan.context: {self._degree} needs an attention "
                f"that goes through torch's scaled_dot_product_attention; that of {model} does not"
            )
