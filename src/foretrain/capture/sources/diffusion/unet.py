"""Defines U-Nets: DDPM (Ho et al. 2020), ADM (Dhariwal and Nichol 2021), Stable Diffusion (Rombach et al.
2022), SDXL (Podell et al. 2023)."""

from __future__ import annotations

from collections.abc import Sequence

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

        def residual(given: int, out: int, resample: str = "") -> ResidualBlock:
            return ResidualBlock(
                given, out, time, dropout=dropout, scale_shift=scale_shift, resample=resample
            )

        def attention(out: int, depth: int) -> nn.Module | None:
            count = out // head_width if head_width else heads
            if not depth:
                return None
            if not context:
                return ImageAttention(out, count)
            return TextTransformer(out, count, depth, context, convolved=convolved)

        def resampled(out: int, direction: str) -> nn.Module:
            if resampling_blocks:
                return residual(out, out, direction)
            return Downsample(out) if direction == "down" else Upsample(out)

        self.conv_in = nn.Conv2d(channels, width * multiples[0] if resampling_blocks else width, 3, padding=1)
        now = self.conv_in.out_channels
        kept = [now]
        down: list[UnetStage] = []
        for level, multiple in enumerate(multiples):
            for _ in range(blocks):
                down.append(
                    UnetStage(residual(now, width * multiple), attention(width * multiple, depths[level]))
                )
                now = width * multiple
                kept.append(now)
            if level < len(multiples) - 1:
                down.append(UnetStage(resampled(now, "down"), None))
                kept.append(now)
        self.down = nn.ModuleList(down)
        self.middle = nn.ModuleList(
            [UnetStage(residual(now, now), attention(now, middle_depth)), UnetStage(residual(now, now), None)]
        )
        up: list[UnetStage] = []
        for level, multiple in reversed([*enumerate(multiples)]):
            for _ in range(blocks + 1):
                block = residual(now + kept.pop(), width * multiple)
                up.append(UnetStage(block, attention(width * multiple, depths[level])))
                now = width * multiple
            if level:
                up.append(UnetStage(resampled(now, "up"), None))
        self.up = nn.ModuleList(up)
        self.norm_out = nn.GroupNorm(GROUPS, now)
        self.conv_out = nn.Conv2d(now, channels * (2 if learns_variance else 1), 3, padding=1)

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
