"""A module of one's own: foretrain calls ``build`` and traces a step of what it returns, without a GPU."""

from __future__ import annotations

import torch
from torch import nn


class TwoTowers(nn.Module):
    """Texts and users, each embedded by a network of its own."""

    def __init__(self, width: int, words: int = 50_000, users: int = 200_000) -> None:
        super().__init__()
        self.words = nn.EmbeddingBag(words, width, mode="mean")
        self.users = nn.Embedding(users, width)
        self.text = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))
        self.user = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))

    def forward(self, text: torch.Tensor, user: torch.Tensor) -> torch.Tensor:
        a, b = self.text(self.words(text)), self.user(self.users(user))
        return nn.functional.normalize(a) @ nn.functional.normalize(b).T


def build(batch: int, width: int):
    """The module, its inputs, and the loss from its output to a number."""
    inputs = (torch.randint(50_000, (batch, 64)), torch.randint(200_000, (batch,)))
    target = torch.arange(batch)
    return TwoTowers(width), inputs, lambda scores: nn.functional.cross_entropy(scores / 0.07, target)
