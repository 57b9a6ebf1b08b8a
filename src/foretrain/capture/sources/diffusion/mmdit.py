"""Defines diffusion transformers of two streams, of words and of patches, which meet in attention: Stable
Diffusion 3 (Esser et al. 2024) and FLUX.1 (Black Forest Labs 2024)."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from foretrain.capture.sources.diffusion.layers import (
    FREQUENCIES,
    SLOWEST,
    Denoiser,
    Embedder,
    FeedForward,
    Patches,
    Shapes,
    by_heads,
    joined,
    modulated,
    plain_norm,
    positions,
    sinusoids,
    unpatched,
)


class TokenStream(nn.Module):
    """One of the two streams of a block: its own weights before and after the attention that both share."""

    def __init__(self, width: int, heads: int, *, norms: bool, ends: bool = False) -> None:
        """``norms``: queries and keys are normalised. ``ends``: nobody reads the stream behind the block."""
        super().__init__()
        self.heads, self.ends = heads, ends
        self.modulation = nn.Sequential(nn.SiLU(), nn.Linear(width, (2 if ends else 6) * width))
        self.norm1 = plain_norm(width)
        self.to_qkv = nn.Linear(width, 3 * width)
        self.norm_q = nn.RMSNorm(width // heads, eps=1e-6) if norms else nn.Identity()
        self.norm_k = nn.RMSNorm(width // heads, eps=1e-6) if norms else nn.Identity()
        if not ends:
            self.to_out = nn.Linear(width, width)
            self.norm2 = plain_norm(width)
            self.feed_forward = FeedForward(width)

    def before(self, x: Tensor, condition: Tensor) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
        """Queries, keys and values, and the modulation of what follows."""
        shift, scale, *rest = self.modulation(condition)[:, None].chunk(2 if self.ends else 6, dim=-1)
        q, k, v = (
            by_heads(one, self.heads)
            for one in self.to_qkv(modulated(self.norm1(x), shift, scale)).chunk(3, dim=-1)
        )
        return (self.norm_q(q), self.norm_k(k), v), tuple(rest)

    def after(self, x: Tensor, attended: Tensor, rest: tuple[Tensor, ...]) -> Tensor:
        """The stream behind the attention."""
        if self.ends:
            return x
        gate1, shift2, scale2, gate2 = rest
        x = x + gate1 * self.to_out(attended)
        out: Tensor = x + gate2 * self.feed_forward(modulated(self.norm2(x), shift2, scale2))
        return out


class JointBlock(nn.Module):
    """Words and patches attend to each other; where ``places`` are given, by their angles."""

    def __init__(self, width: int, heads: int, *, norms: bool, last: bool = False) -> None:
        super().__init__()
        self.image = TokenStream(width, heads, norms=norms)
        self.words = TokenStream(width, heads, norms=norms, ends=last)

    def forward(
        self, x: Tensor, words: Tensor, condition: Tensor, places: tuple[Tensor, Tensor] | None = None
    ) -> tuple[Tensor, Tensor]:
        of_words, rest_of_words = self.words.before(words, condition)
        of_image, rest_of_image = self.image.before(x, condition)
        q, k, v = (torch.cat(pair, dim=2) for pair in zip(of_words, of_image, strict=True))
        if places is not None:
            q, k = rotated(q, *places), rotated(k, *places)
        attended = joined(F.scaled_dot_product_attention(q, k, v))
        count = words.shape[1]
        words = self.words.after(words, attended[:, :count], rest_of_words)
        return self.image.after(x, attended[:, count:], rest_of_image), words


class Ending(nn.Module):
    """The last norm, modulated, and the layer that predicts patches."""

    def __init__(self, width: int, out: int) -> None:
        super().__init__()
        self.modulation = nn.Sequential(nn.SiLU(), nn.Linear(width, 2 * width))
        self.norm = plain_norm(width)
        self.out = nn.Linear(width, out)

    def forward(self, x: Tensor, condition: Tensor) -> Tensor:
        shift, scale = self.modulation(condition)[:, None].chunk(2, dim=-1)
        patches: Tensor = self.out(modulated(self.norm(x), shift, scale))
        return patches


class MMDiT(Denoiser):
    """Stable Diffusion 3: joint blocks throughout."""

    def __init__(
        self,
        *,
        depth: int,
        head_width: int = 64,
        heads: int = 0,
        norms: bool = False,
        patch: int = 2,
        channels: int = 16,
        context: int = 4096,
        words: int = 154,
        pooled: int = 2048,
    ) -> None:
        """As many heads as blocks, unless given; words of two encoders, of 77 each."""
        super().__init__()
        heads = heads or depth
        width = heads * head_width
        self.patch, self.channels, self.compression, self.step = patch, channels, 8, patch
        self.context_width, self.count, self.pooled_width = context, words, pooled
        self.patches = Patches(channels, patch, width)
        self.time, self.pooled = Embedder(FREQUENCIES, width), Embedder(pooled, width)
        self.context = nn.Linear(context, width)
        self.blocks = nn.ModuleList(
            JointBlock(width, heads, norms=norms, last=number == depth - 1) for number in range(depth)
        )
        self.end = Ending(width, patch * patch * channels)

    def shapes(self, batch: int, height: int, width: int) -> Shapes:
        return {
            "latents": (batch, self.channels, height, width),
            "steps": (batch,),
            "context": (batch, self.count, self.context_width),
            "pooled": (batch, self.pooled_width),
        }

    def forward(self, latents: Tensor, steps: Tensor, context: Tensor, pooled: Tensor) -> Tensor:
        x = self.patches(latents)
        x = x + positions(x)
        condition = self.time(sinusoids(steps, FREQUENCIES).to(latents.dtype)) + self.pooled(pooled)
        words = self.context(context)
        for block in self.blocks:
            x, words = block(x, words, condition)
        return unpatched(self.end(x, condition), self.patch, *latents.shape[2:])


class SingleBlock(nn.Module):
    """Words and patches as one sequence; attention and feed-forward layer side by side."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads, self.width = heads, width
        self.modulation = nn.Sequential(nn.SiLU(), nn.Linear(width, 3 * width))
        self.norm = plain_norm(width)
        self.linear1 = nn.Linear(width, 7 * width)
        self.norm_q, self.norm_k = (nn.RMSNorm(width // heads, eps=1e-6) for _ in range(2))
        self.activation = nn.GELU(approximate="tanh")
        self.linear2 = nn.Linear(5 * width, width)

    def forward(self, x: Tensor, condition: Tensor, places: tuple[Tensor, Tensor]) -> Tensor:
        shift, scale, gate = self.modulation(condition)[:, None].chunk(3, dim=-1)
        h = self.linear1(modulated(self.norm(x), shift, scale))
        q, k, v, fed = h.split([self.width, self.width, self.width, 4 * self.width], dim=-1)
        q, k, v = (by_heads(one, self.heads) for one in (q, k, v))
        q, k = rotated(self.norm_q(q), *places), rotated(self.norm_k(k), *places)
        attended = joined(F.scaled_dot_product_attention(q, k, v))
        out: Tensor = x + gate * self.linear2(torch.cat([attended, self.activation(fed)], dim=-1))
        return out


class Flux(Denoiser):
    """FLUX.1: joint blocks, then blocks of one sequence; places are told by rotations."""

    def __init__(
        self,
        *,
        width: int = 3072,
        heads: int = 24,
        depth: int = 19,
        single_depth: int = 38,
        axes: tuple[int, ...] = (16, 56, 56),
        channels: int = 16,
        context: int = 4096,
        words: int = 512,
        pooled: int = 768,
        guided: bool = True,
    ) -> None:
        """``axes``: how much of a head's width tells the number, the row and the column of a token.
        ``guided``: the network is told how closely to follow the prompt."""
        super().__init__()
        self.channels, self.compression, self.step, self.axes = channels, 8, 2, tuple(axes)
        self.context_width, self.count, self.pooled_width = context, words, pooled
        self.patches = nn.Linear(4 * channels, width)
        self.time, self.pooled = Embedder(FREQUENCIES, width), Embedder(pooled, width)
        self.guidance = Embedder(FREQUENCIES, width) if guided else None
        self.context = nn.Linear(context, width)
        joint = (JointBlock(width, heads, norms=True) for _ in range(depth))
        single = (SingleBlock(width, heads) for _ in range(single_depth))
        self.blocks = nn.ModuleList([*joint, *single])
        self.end = Ending(width, 4 * channels)

    def shapes(self, batch: int, height: int, width: int) -> Shapes:
        return {
            "latents": (batch, self.channels, height, width),
            "steps": (batch,),
            "context": (batch, self.count, self.context_width),
            "pooled": (batch, self.pooled_width),
            **({"guidance": (batch,)} if self.guidance is not None else {}),
        }

    def forward(
        self,
        latents: Tensor,
        steps: Tensor,
        context: Tensor,
        pooled: Tensor,
        guidance: Tensor | None = None,
    ) -> Tensor:
        dtype = latents.dtype
        height, width = latents.shape[2:]
        x = self.patches(F.pixel_unshuffle(latents, 2).flatten(2).transpose(1, 2))
        words = self.context(context)
        condition = self.time(sinusoids(steps, FREQUENCIES).to(dtype)) + self.pooled(pooled)
        if self.guidance is not None and guidance is not None:
            condition = condition + self.guidance(sinusoids(guidance, FREQUENCIES).to(dtype))
        places = self._places(words.shape[1], height // 2, width // 2, latents.device)
        joined_up = False
        for block in self.blocks:
            if isinstance(block, JointBlock):
                x, words = block(x, words, condition, places)
            else:
                x = block(x if joined_up else torch.cat([words, x], dim=1), condition, places)
                joined_up = True
        return unpatched(self.end(x[:, -(height * width // 4) :], condition), 2, height, width)

    def _places(self, words: int, rows: int, columns: int, device: torch.device) -> tuple[Tensor, Tensor]:
        """Cosines and sines by which each token's head is rotated; words are all at the first place."""
        row = torch.arange(rows, device=device)[:, None].expand(rows, columns).flatten()
        column = torch.arange(columns, device=device)[None].expand(rows, columns).flatten()
        ids = F.pad(torch.stack([torch.zeros_like(row), row, column]), (words, 0)).float()
        angles = torch.cat([_angles(one, width) for one, width in zip(ids, self.axes, strict=True)], dim=-1)
        return angles.cos(), angles.sin()


def _angles(places: Tensor, width: int) -> Tensor:
    powers = torch.arange(0, width, 2, dtype=torch.float32, device=places.device) / width
    return places[:, None] / SLOWEST**powers


def rotated(x: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
    """Pairs of elements of each head turned by the angles of their token (Su et al. 2021)."""
    first, second = x.float().unflatten(-1, (-1, 2)).unbind(-1)
    turned = torch.stack([first * cosines - second * sines, first * sines + second * cosines], dim=-1)
    return turned.flatten(-2).to(x.dtype)
