"""Context parallelism: a rank has its part of every sequence, and its queries meet the keys and values of all
ranks.

Keys and values are all-gathered before attention and their gradients reduce-scattered, as in Megatron's and
Llama 3's context parallelism. Causal attention is taken as balanced: ranks get parts from both ends of the
sequence.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch import nn

from foretrain.capture.parallel.collectives import exchange, gather
from foretrain.capture.parallel.wrapping import after, before
from foretrain.capture.sources.linear_attention import is_delta_rule
from foretrain.capture.sources.state_space import is_chunked, is_state_space
from foretrain.capture.tracing.cuda_kernels import keys_from
from foretrain.errors import UnsupportedJob


class ContextParallel:
    """Gathers what torch's attention is called with, over ``degree`` ranks."""

    def __init__(self, degree: int) -> None:
        self._degree = degree
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
                    after(layer, lambda x: exchange(x, "context"))
            before(mixer.out_proj, lambda x: exchange(x, "context"))

    @contextlib.contextmanager
    def attention(self) -> Iterator[None]:
        if self._degree == 1:
            yield
            return
        with keys_from(self._gathered):
            try:
                yield
            finally:
                self._masks.clear()

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
