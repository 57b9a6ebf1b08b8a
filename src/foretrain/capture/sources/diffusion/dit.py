"""Defines diffusion transformers of one stream: DiT (Peebles and Xie 2023), conditioned on classes, and
PixArt-alpha (Chen et al. 2023), on prompts."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from foretrain.capture.sources.diffusion.layers import (
    FREQUENCIES,
    Attention,
    Denoiser,
    Embedder,
    FeedForward,
    Patches,
    Shapes,
    modulated,
    plain_norm,
    positions,
    sinusoids,
    unpatched,
)


class DiTBlock(nn.Module):
    """Attention and a feed-forward layer, both scaled, shifted and gated by the condition."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = plain_norm(width), plain_norm(width)
        self.attention = Attention(width, heads)
        self.feed_forward = FeedForward(width)
        self.modulation = nn.Sequential(nn.SiLU(), nn.Linear(width, 6 * width))

    def forward(self, x: Tensor, condition: Tensor) -> Tensor:
        shift1, scale1, gate1, shift2, scale2, gate2 = self.modulation(condition)[:, None].chunk(6, dim=-1)
        x = x + gate1 * self.attention(modulated(self.norm1(x), shift1, scale1))
        out: Tensor = x + gate2 * self.feed_forward(modulated(self.norm2(x), shift2, scale2))
        return out


class DiT(Denoiser):
    """Patches of latents, the time step and a class; predicts noise and its variance."""

    def __init__(
        self, *, width: int, depth: int, heads: int, patch: int = 2, channels: int = 4, classes: int = 1000
    ) -> None:
        super().__init__()
        self.patch, self.channels, self.compression, self.step = patch, channels, 8, patch
        self.patches = Patches(channels, patch, width)
        self.time = Embedder(FREQUENCIES, width)
        self.labels = nn.Embedding(classes + 1, width)  # and one for no class at all
        self.blocks = nn.ModuleList(DiTBlock(width, heads) for _ in range(depth))
        self.norm = plain_norm(width)
        self.modulation = nn.Sequential(nn.SiLU(), nn.Linear(width, 2 * width))
        self.out = nn.Linear(width, patch * patch * channels * 2)

    def shapes(self, batch: int, height: int, width: int) -> Shapes:
        return {"latents": (batch, self.channels, height, width), "steps": (batch,), "labels": (batch,)}

    def forward(self, latents: Tensor, steps: Tensor, labels: Tensor) -> Tensor:
        x = self.patches(latents)
        x = x + positions(x)
        condition = self.time(sinusoids(steps, FREQUENCIES).to(latents.dtype)) + self.labels(labels)
        for block in self.blocks:
            x = block(x, condition)
        shift, scale = self.modulation(condition)[:, None].chunk(2, dim=-1)
        return unpatched(self.out(modulated(self.norm(x), shift, scale)), self.patch, *latents.shape[2:])


class PixArtBlock(nn.Module):
    """As DiT's, with attention to the words of a prompt between; the condition is computed once for all
    blocks, each of which adds a table of its own."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = plain_norm(width), plain_norm(width)
        self.attention = Attention(width, heads)
        self.words = Attention(width, heads)
        self.feed_forward = FeedForward(width)
        self.table = nn.Parameter(torch.zeros(6, width))

    def forward(self, x: Tensor, context: Tensor, condition: Tensor) -> Tensor:
        shift1, scale1, gate1, shift2, scale2, gate2 = (self.table + condition).chunk(6, dim=1)
        x = x + gate1 * self.attention(modulated(self.norm1(x), shift1, scale1))
        x = x + self.words(x, context)
        out: Tensor = x + gate2 * self.feed_forward(modulated(self.norm2(x), shift2, scale2))
        return out


class PixArt(Denoiser):
    """Patches of latents, the time step and a prompt; predicts noise and its variance."""

    def __init__(
        self,
        *,
        width: int = 1152,
        depth: int = 28,
        heads: int = 16,
        patch: int = 2,
        channels: int = 4,
        context: int = 4096,
        words: int = 120,
        sizes: bool = False,
    ) -> None:
        """``sizes``: the model is told the size and shape of each picture."""
        super().__init__()
        self.patch, self.channels, self.compression, self.step = patch, channels, 8, patch
        self.context, self.words = context, words
        self.patches = Patches(channels, patch, width)
        self.time = Embedder(FREQUENCIES, width)
        self.height_and_width = Embedder(FREQUENCIES, width // 3) if sizes else None
        self.ratio = Embedder(FREQUENCIES, width // 3) if sizes else None
        self.modulation = nn.Sequential(nn.SiLU(), nn.Linear(width, 6 * width))
        self.prompt = Embedder(context, width, lambda: nn.GELU(approximate="tanh"))  # type: ignore[arg-type]
        self.blocks = nn.ModuleList(PixArtBlock(width, heads) for _ in range(depth))
        self.norm = plain_norm(width)
        self.table = nn.Parameter(torch.zeros(2, width))
        self.out = nn.Linear(width, patch * patch * channels * 2)

    def shapes(self, batch: int, height: int, width: int) -> Shapes:
        picture_shape = {"picture": (batch, 3)} if self.ratio is not None else {}
        return {
            "latents": (batch, self.channels, height, width),
            "steps": (batch,),
            "context": (batch, self.words, self.context),
            **picture_shape,
        }

    def forward(
        self, latents: Tensor, steps: Tensor, context: Tensor, picture: Tensor | None = None
    ) -> Tensor:
        x = self.patches(latents)
        x = x + positions(x)
        time = self.time(sinusoids(steps, FREQUENCIES).to(latents.dtype))
        if self.height_and_width is not None and self.ratio is not None and picture is not None:
            picture_waves = sinusoids(picture, FREQUENCIES).to(latents.dtype)
            sizes = self.height_and_width(picture_waves[:, :2]).flatten(1)
            time = time + torch.cat([sizes, self.ratio(picture_waves[:, 2])], dim=1)
        condition = self.modulation(time).unflatten(1, (6, -1))
        prompt = self.prompt(context)
        for block in self.blocks:
            x = block(x, prompt, condition)
        shift, scale = (self.table + time[:, None]).chunk(2, dim=1)
        return unpatched(self.out(modulated(self.norm(x), shift, scale)), self.patch, *latents.shape[2:])
