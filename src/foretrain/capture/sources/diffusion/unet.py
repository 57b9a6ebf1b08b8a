"""Defines U-Nets: DDPM (Ho et al. 2020), ADM (Dhariwal and Nichol 2021), Stable Diffusion (Rombach et al.
2022), SDXL (Podell et al. 2023)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from foretrain.capture.sources.diffusion.layers import (
    FREQUENCIES,
    Attention,
    Denoiser,
    Embedder,
    Shapes,
    by_heads,
    joined,
    sinusoids,
)

GROUPS = 32
"""Of every group norm."""
TIME_IDS = 6
"""Sizes and crops that SDXL is told of each picture."""


class ResidualBlock(nn.Module):
    """Two convolutions, between which the time step is added; or which it scales and shifts; the picture may
    be made smaller or larger on the way."""

    def __init__(
        self, given: int, width: int, time: int, *, dropout: float, scale_shift: bool, resample: str = ""
    ) -> None:
        super().__init__()
        self.resample, self.scale_shift = resample, scale_shift
        self.norm1 = nn.GroupNorm(GROUPS, given)
        self.conv1 = nn.Conv2d(given, width, 3, padding=1)
        self.time = nn.Linear(time, 2 * width if scale_shift else width)
        self.norm2 = nn.GroupNorm(GROUPS, width)
        self.dropout = nn.Dropout(dropout)
        self.conv2 = nn.Conv2d(width, width, 3, padding=1)
        self.skip = nn.Conv2d(given, width, 1) if given != width else nn.Identity()

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        h = F.silu(self.norm1(x))
        if self.resample:
            h, x = _resampled(h, self.resample), _resampled(x, self.resample)
        h = self.conv1(h)
        condition = self.time(F.silu(time))[:, :, None, None]
        if self.scale_shift:
            scale, shift = condition.chunk(2, dim=1)
            h = self.norm2(h) * (1 + scale) + shift
        else:
            h = self.norm2(h + condition)
        h = self.conv2(self.dropout(F.silu(h)))
        out: Tensor = self.skip(x) + h
        return out


def _resampled(x: Tensor, how: str) -> Tensor:
    return F.avg_pool2d(x, 2) if how == "down" else F.interpolate(x, scale_factor=2.0, mode="nearest")


class Downsample(nn.Conv2d):
    """Halves a picture by a convolution."""

    def __init__(self, width: int) -> None:
        super().__init__(width, width, 3, stride=2, padding=1)


class Upsample(nn.Conv2d):
    """Doubles a picture, then convolves it."""

    def __init__(self, width: int) -> None:
        super().__init__(width, width, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(_resampled(x, "up"))


class ImageAttention(nn.Module):
    """Attention of all places of a picture to one another."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm = nn.GroupNorm(GROUPS, width)
        self.to_qkv = nn.Linear(width, 3 * width)
        self.to_out = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        tokens = self.norm(x).flatten(2).transpose(1, 2)
        q, k, v = (by_heads(one, self.heads) for one in self.to_qkv(tokens).chunk(3, dim=-1))
        out = self.to_out(joined(F.scaled_dot_product_attention(q, k, v)))
        attended: Tensor = x + out.transpose(1, 2).view_as(x)
        return attended


class GatedFeedForward(nn.Module):
    """A layer whose one half gates the other, by a GELU, and one back to the width."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.proj = nn.Linear(width, 8 * width)
        self.out = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        value, gate = self.proj(x).chunk(2, dim=-1)
        out: Tensor = self.out(value * F.gelu(gate))
        return out


class TextBlock(nn.Module):
    """Attention of places to one another and to the words of a prompt."""

    def __init__(self, width: int, heads: int, context: int) -> None:
        super().__init__()
        self.norm1, self.norm2, self.norm3 = (nn.LayerNorm(width) for _ in range(3))
        self.attention = Attention(width, heads, bias=False)
        self.words = Attention(width, heads, context, bias=False)
        self.feed_forward = GatedFeedForward(width)

    def forward(self, x: Tensor, context: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        x = x + self.words(self.norm2(x), context)
        out: Tensor = x + self.feed_forward(self.norm3(x))
        return out


class TextTransformer(nn.Module):
    """Blocks that look at a prompt, between projections of the picture's channels."""

    def __init__(self, width: int, heads: int, depth: int, context: int, *, convolved: bool) -> None:
        super().__init__()
        self.norm = nn.GroupNorm(GROUPS, width, eps=1e-6)
        self.convolved = convolved
        self.proj_in, self.proj_out = (
            nn.Conv2d(width, width, 1) if convolved else nn.Linear(width, width) for _ in range(2)
        )
        self.blocks = nn.ModuleList(TextBlock(width, heads, context) for _ in range(depth))

    def forward(self, x: Tensor, context: Tensor) -> Tensor:
        h = self.norm(x)
        tokens = (self.proj_in(h) if self.convolved else h).flatten(2).transpose(1, 2)
        tokens = tokens if self.convolved else self.proj_in(tokens)
        for block in self.blocks:
            tokens = block(tokens, context)
        tokens = tokens if self.convolved else self.proj_out(tokens)
        h = tokens.transpose(1, 2).reshape(x.shape)
        out: Tensor = x + (self.proj_out(h) if self.convolved else h)
        return out


class UnetStage(nn.Module):
    """A residual block and the attention behind it."""

    def __init__(self, block: nn.Module, attention: nn.Module | None) -> None:
        super().__init__()
        self.block, self.attention = block, attention

    def forward(self, x: Tensor, time: Tensor, context: Tensor | None) -> Tensor:
        x = self.block(x, time) if isinstance(self.block, ResidualBlock) else self.block(x)
        if self.attention is None:
            return x
        out: Tensor = self.attention(x) if context is None else self.attention(x, context)
        return out


@dataclass(frozen=True, slots=True, kw_only=True)
class _Parts:
    """Makes the parts of a U-Net, which differ by their channels."""

    time: int
    heads: int
    head_width: int
    context: int
    convolved: bool
    dropout: float
    scale_shift: bool
    resampling_blocks: bool

    def residual(self, given: int, out: int, resample: str = "") -> ResidualBlock:
        return ResidualBlock(
            given, out, self.time, dropout=self.dropout, scale_shift=self.scale_shift, resample=resample
        )

    def attention(self, out: int, depth: int) -> nn.Module | None:
        count = out // self.head_width if self.head_width else self.heads
        if not depth:
            return None
        if not self.context:
            return ImageAttention(out, count)
        return TextTransformer(out, count, depth, self.context, convolved=self.convolved)

    def resampled(self, out: int, direction: str) -> nn.Module:
        if self.resampling_blocks:
            return self.residual(out, out, direction)
        return Downsample(out) if direction == "down" else Upsample(out)


Levels = Sequence[tuple[int, int]]
"""Channels, and the depth of attention, of each size of picture, the largest picture first."""


def _way_down(parts: _Parts, levels: Levels, blocks: int, channels: int) -> tuple[list[UnetStage], list[int]]:
    """Stages down to the smallest picture, and the channels before and behind each, for the way up."""
    stages: list[UnetStage] = []
    kept = [channels]
    for level, (out, depth) in enumerate(levels):
        for _ in range(blocks):
            stages.append(UnetStage(parts.residual(kept[-1], out), parts.attention(out, depth)))
            kept.append(out)
        if level < len(levels) - 1:
            stages.append(UnetStage(parts.resampled(kept[-1], "down"), None))
            kept.append(kept[-1])
    return stages, kept


def _way_up(parts: _Parts, levels: Levels, blocks: int, kept: Sequence[int]) -> list[UnetStage]:
    """Stages back to the whole picture, each with what was kept at its size on the way down."""
    stages: list[UnetStage] = []
    channels, beside = kept[-1], list(kept)
    for level, (out, depth) in reversed([*enumerate(levels)]):
        for _ in range(blocks):
            block = parts.residual(channels + beside.pop(), out)
            stages.append(UnetStage(block, parts.attention(out, depth)))
            channels = out
        if level:
            stages.append(UnetStage(parts.resampled(out, "up"), None))
    return stages


class UNet(Denoiser):
    """Goes down to small pictures of many channels and up again, with what it saw on the way at hand."""

    def __init__(
        self,
        *,
        width: int,
        multiples: Sequence[int],
        blocks: int,
        depths: Sequence[int],
        middle_depth: int = 1,
        channels: int = 4,
        heads: int = 0,
        head_width: int = 0,
        context: int = 0,
        words: int = 77,
        pooled: int = 0,
        convolved: bool = False,
        classes: int = 0,
        dropout: float = 0.0,
        scale_shift: bool = False,
        resampling_blocks: bool = False,
        learns_variance: bool = False,
        compression: int = 8,
    ) -> None:
        """``depths`` are of attention, by level; 0 for none. Without ``context``, which is the width of a
        word, there is no prompt. ``pooled`` is the width of what SDXL is told beside it. ``convolved``: the
        channels are projected by convolutions around attention."""
        super().__init__()
        self.channels, self.compression, self.step = channels, compression, 2 ** (len(multiples) - 1)
        self.width, self.words, self.context, self.pooled, self.classes = (
            width,
            words,
            context,
            pooled,
            classes,
        )
        time = 4 * width
        self.time = Embedder(width, time)
        self.added = Embedder(pooled + TIME_IDS * FREQUENCIES, time) if pooled else None
        self.labels = nn.Embedding(classes, time) if classes else None
        parts = _Parts(
            time=time,
            heads=heads,
            head_width=head_width,
            context=context,
            convolved=convolved,
            dropout=dropout,
            scale_shift=scale_shift,
            resampling_blocks=resampling_blocks,
        )
        levels = [(width * multiple, depth) for multiple, depth in zip(multiples, depths, strict=True)]
        self.conv_in = nn.Conv2d(channels, levels[0][0] if resampling_blocks else width, 3, padding=1)
        down, kept = _way_down(parts, levels, blocks, self.conv_in.out_channels)
        self.down, deepest = nn.ModuleList(down), kept[-1]
        self.middle = nn.ModuleList(
            [
                UnetStage(parts.residual(deepest, deepest), parts.attention(deepest, middle_depth)),
                UnetStage(parts.residual(deepest, deepest), None),
            ]
        )
        self.up = nn.ModuleList(_way_up(parts, levels, blocks + 1, kept))
        out = levels[0][0]
        self.norm_out = nn.GroupNorm(GROUPS, out)
        self.conv_out = nn.Conv2d(out, channels * (2 if learns_variance else 1), 3, padding=1)

    def shapes(self, batch: int, height: int, width: int) -> Shapes:
        return {
            "latents": (batch, self.channels, height, width),
            "steps": (batch,),
            **({"context": (batch, self.words, self.context)} if self.context else {}),
            **({"pooled": (batch, self.pooled), "sizes": (batch, TIME_IDS)} if self.pooled else {}),
            **({"labels": (batch,)} if self.classes else {}),
        }

    def forward(
        self,
        latents: Tensor,
        steps: Tensor,
        context: Tensor | None = None,
        pooled: Tensor | None = None,
        sizes: Tensor | None = None,
        labels: Tensor | None = None,
    ) -> Tensor:
        dtype = latents.dtype
        time = self.time(sinusoids(steps, self.width).to(dtype))
        if self.added is not None and pooled is not None and sizes is not None:
            size_waves = sinusoids(sizes, FREQUENCIES).flatten(1).to(dtype)
            time = time + self.added(torch.cat([pooled, size_waves], dim=1))
        if self.labels is not None and labels is not None:
            time = time + self.labels(labels)
        x = self.conv_in(latents)
        kept = [x]
        for stage in self.down:
            x = stage(x, time, context)
            kept.append(x)
        for stage in self.middle:
            x = stage(x, time, context)
        for stage in self.up:
            resamples = isinstance(stage.block, Upsample) or bool(getattr(stage.block, "resample", False))
            x = stage(x if resamples else torch.cat([x, kept.pop()], dim=1), time, context)
        noise: Tensor = self.conv_out(F.silu(self.norm_out(x)))
        return noise
