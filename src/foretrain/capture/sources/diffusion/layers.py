"""Defines what networks of several diffusion models are made of: embeddings of time, attention,
modulation."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor, nn

SLOWEST = 10_000.0
"""The longest period of a sinusoidal embedding, in steps (Vaswani et al. 2017)."""
FREQUENCIES = 256
"""Width of the sinusoids that transformers embed a time step by (Peebles and Xie 2023)."""

Shapes = Mapping[str, tuple[int, ...]]
"""Of a network's inputs, by the names of its arguments."""


class Denoiser(nn.Module):
    """A network that tells noise from a picture."""

    compression: int
    """Pixels of a side that one place of its input stands for."""
    step: int
    """Places of its input that a side must be a multiple of."""
    channels: int
    """Of the noise that it predicts."""

    def shapes(self, batch: int, height: int, width: int) -> Shapes:
        """Of its inputs for so many pictures, in places of the input."""
        raise NotImplementedError


def sinusoids(values: Tensor, width: int) -> Tensor:
    """Cosines and sines of values, of ``width`` frequencies in all."""
    half = width // 2
    powers = torch.arange(half, dtype=torch.float32, device=values.device) / half
    angles = values[..., None].float() * torch.exp(-math.log(SLOWEST) * powers)
    return torch.cat([angles.cos(), angles.sin()], dim=-1)


class Embedder(nn.Sequential):
    """Two linear layers that bring a condition to the width of the network."""

    def __init__(self, given: int, width: int, activation: type[nn.Module] = nn.SiLU) -> None:
        super().__init__(nn.Linear(given, width), activation(), nn.Linear(width, width))


class FeedForward(nn.Sequential):
    """The two layers between attentions of a transformer."""

    def __init__(self, width: int, ratio: int = 4) -> None:
        super().__init__(
            nn.Linear(width, ratio * width), nn.GELU(approximate="tanh"), nn.Linear(ratio * width, width)
        )


class Attention(nn.Module):
    """Attention of tokens to themselves, or to ``context`` tokens of another width."""

    def __init__(self, width: int, heads: int, context: int | None = None, *, bias: bool = True) -> None:
        super().__init__()
        self.heads = heads
        self.to_q = nn.Linear(width, width, bias=bias)
        self.to_k = nn.Linear(context or width, width, bias=bias)
        self.to_v = nn.Linear(context or width, width, bias=bias)
        self.to_out = nn.Linear(width, width)

    def forward(self, x: Tensor, context: Tensor | None = None) -> Tensor:
        source = x if context is None else context
        q, k, v = (by_heads(one, self.heads) for one in (self.to_q(x), self.to_k(source), self.to_v(source)))
        out: Tensor = self.to_out(joined(F.scaled_dot_product_attention(q, k, v)))
        return out


def by_heads(x: Tensor, heads: int) -> Tensor:
    """(batch, tokens, width) as (batch, heads, tokens, width of a head)."""
    return x.view(*x.shape[:2], heads, -1).transpose(1, 2)


def joined(x: Tensor) -> Tensor:
    """The opposite."""
    return x.transpose(1, 2).flatten(2)


def modulated(x: Tensor, shift: Tensor, scale: Tensor) -> Tensor:
    """A normalised tensor, moved and scaled by a condition of each sample."""
    return x * (1 + scale) + shift


def plain_norm(width: int) -> nn.LayerNorm:
    """A layer norm whose scale and shift come from a condition."""
    return nn.LayerNorm(width, eps=1e-6, elementwise_affine=False)


class Patches(nn.Module):
    """Cuts latents into patches, each a token."""

    def __init__(self, channels: int, patch: int, width: int) -> None:
        super().__init__()
        self.proj = nn.Conv2d(channels, width, kernel_size=patch, stride=patch)

    def forward(self, latents: Tensor) -> Tensor:
        tokens: Tensor = self.proj(latents).flatten(2).transpose(1, 2)
        return tokens


def positions(tokens: Tensor) -> Tensor:
    """Fixed sinusoidal embeddings of the places of tokens, which no gradient changes."""
    places = torch.arange(tokens.shape[1], device=tokens.device)
    return sinusoids(places, tokens.shape[2]).to(tokens.dtype)


def unpatched(tokens: Tensor, patch: int, height: int, width: int) -> Tensor:
    """Tokens as latents of ``height`` x ``width`` places."""
    x = tokens.view(len(tokens), height // patch, width // patch, patch, patch, -1)
    return x.permute(0, 5, 1, 3, 2, 4).flatten(4, 5).flatten(2, 3)
