"""Lets an embedding and a loss work with one rank's part of the vocabulary."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from foretrain.capture.parallel.collectives import vocabulary_cross_entropy


class VocabularyLoss(TorchFunctionMode):
    """While it is open, cross-entropy of so many logits is that of a vocabulary that is cut."""

    def __init__(self, widths: set[int]) -> None:
        super().__init__()
        self._widths = widths
        self.calls = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is nn.functional.cross_entropy:
            logits = args[0] if args else kwargs["input"]
            target = args[1] if len(args) > 1 else kwargs["target"]
            if logits.dim() == 2 and logits.shape[1] in self._widths and not target.is_floating_point():
                self.calls += 1
                return vocabulary_cross_entropy(logits, target)
        return func(*args, **kwargs)


def mask_others(embedding: nn.Module, rows: int) -> None:
    """Look up the tokens that the rank has; the others' rows are zero."""
    embed = embedding.forward

    def forward(ids: torch.Tensor) -> torch.Tensor:
        elsewhere = (ids < 0) | (ids >= rows)
        found: torch.Tensor = embed(ids.masked_fill(elsewhere, 0))
        return found.masked_fill_(elsewhere.unsqueeze(-1), 0.0)

    embedding.forward = forward
