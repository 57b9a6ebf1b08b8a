"""Splits sequences over the ranks of context parallelism: a rank's queries meet the keys and values of all
ranks.

Keys and values are all-gathered before attention and again before its backward pass, whose results are
reduce-scattered, as in Megatron's and Llama 3's context parallelism; a ring moves as much, piece by piece
beside the attention. Or (``alltoall``) a rank gets all of the sequence for its part of the heads (Jacobs et
al. 2023, arXiv 2309.14509). Causal attention is taken as balanced: ranks get parts from both ends of the
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

from foretrain.capture.parallel.collectives import all_gather, exchange, gather
from foretrain.capture.parallel.wrapping import after, before
from foretrain.capture.sources.linear_attention import is_delta_rule
from foretrain.capture.sources.state_space import is_chunked, is_state_space
from foretrain.capture.tracing.cuda_kernels import Attend, attention_through
from foretrain.errors import InputError, UnsupportedJob
from foretrain.plan import ContextExchange

_WRITTEN_OUT = "eager_attention_forward"
"""The function of a model's file in transformers that computes attention by single operators."""


class ContextParallel:
    """Brings what torch's attention is called with to the ranks that need it, over ``degree`` ranks."""

    def __init__(self, degree: int, by: ContextExchange) -> None:
        self._degree, self._by = degree, by
        self._calls = 0
        self._masks: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def exchange_states(self, module: nn.Module) -> None:
        """Around a state-space layer or linear attention, ranks trade parts of sequences for heads and back,
        by all-to-all, as Megatron's ``MambaContextParallel``: a state goes along the whole sequence."""
        for path, mixer in module.named_modules() if self._degree > 1 else ():
            if not (is_state_space(mixer) or is_delta_rule(mixer)):
                continue
            if not is_chunked(mixer):
                raise UnsupportedJob(
                    f"plan.context: {self._degree} cuts sequences, and {path} carries a state along them "
                    "that has no heads to trade for"
                )
            self._calls += 1
            for name, layer in mixer.named_children():
                if name.startswith("in_proj"):
                    after(layer, lambda x: exchange(x, "context", x.shape[0]))
            before(mixer.out_proj, lambda x: exchange(x, "context", x.shape[0]))

    @contextlib.contextmanager
    def attention(self, module: nn.Module) -> Iterator[None]:
        """While this is open, attention of the module sees the keys and values of all ranks: torch's, or that
        which transformers writes out for a model (sinks, soft caps)."""
        if self._degree == 1:
            yield
            return
        around = self._over_heads if self._by == "alltoall" else self._over_keys
        with attention_through(around), contextlib.ExitStack() as written_out:
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
        if self._by == "alltoall":
            raise UnsupportedJob(
                "plan.context_exchange: 'alltoall' needs torch's attention; use ring or allgather"
            )
        return self._over_keys(
            lambda q, k, v, m: attend(module, q, k, v, m, *args, **kwargs), query, key, value, mask
        )

    def _over_keys(
        self,
        attend: Attend,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        mask: torch.Tensor | None,
    ) -> torch.Tensor:
        """All keys and values for the rank's queries; only its own are kept for the backward pass."""
        self._calls += 1
        dim, length = key.dim() - 2, key.shape[-2]
        whole = [gather(tensor, dim, self._degree, "context") for tensor in (key, value)]
        mask = mask if mask is None or mask.shape[-1] != length else self._widened(mask)
        parts = {full.untyped_storage()._cdata: part for full, part in zip(whole, (key, value), strict=True)}

        def pack(tensor: torch.Tensor) -> Any:
            part = parts.get(tensor.untyped_storage()._cdata)
            return tensor if part is None else (part.detach(), tensor.shape)

        def unpack(kept: Any) -> torch.Tensor:
            if isinstance(kept, torch.Tensor):
                return kept
            return all_gather(kept[0], dim, self._degree, "context").view(kept[1])

        with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
            return attend(query, whole[0], whole[1], mask)

    def _over_heads(
        self,
        attend: Attend,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        mask: torch.Tensor | None,
    ) -> torch.Tensor:
        """All of the sequence for the rank's part of the heads, and its part of the results back."""
        self._calls += 1
        if mask is not None:
            raise UnsupportedJob(
                "plan.context_exchange: 'alltoall' needs an attention without a mask; use ring or allgather"
            )
        for name, heads in (("heads", query.shape[1]), ("key heads", key.shape[1])):
            if heads % self._degree:
                raise InputError(
                    f"plan.context_exchange: 'alltoall' deals out heads, and {heads} {name} do not divide "
                    f"over plan.context = {self._degree}; use ring or allgather"
                )
        whole = [self._to_heads(tensor) for tensor in (query, key, value)]
        return self._to_tokens(attend(whole[0], whole[1], whole[2], None))

    def _to_heads(self, x: torch.Tensor) -> torch.Tensor:
        samples, heads, tokens, size = x.shape
        parts = x.view(samples, self._degree, heads // self._degree, tokens, size).transpose(0, 1)
        moved = self._exchange(parts)  # [rank, sample, head, token, feature]
        return moved.permute(1, 2, 0, 3, 4).reshape(samples, -1, self._degree * tokens, size)

    def _to_tokens(self, x: torch.Tensor) -> torch.Tensor:
        samples, heads, tokens, size = x.shape
        parts = x.view(samples, heads, self._degree, tokens // self._degree, size).permute(2, 0, 1, 3, 4)
        moved = self._exchange(parts)
        return moved.transpose(0, 1).reshape(samples, self._degree * heads, -1, size)

    def _exchange(self, parts: torch.Tensor) -> torch.Tensor:
        return exchange(parts.contiguous(), "context", self._degree)

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
