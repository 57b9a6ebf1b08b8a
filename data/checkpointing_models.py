"""Decoders that checkpoint their activations by themselves, in the ways that torch has for it."""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    checkpoint_sequential,
    create_selective_checkpoint_contexts,
)

VOCABULARY = 32_000


class Block(nn.Module):
    """Attention and a gated MLP, each behind a norm."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm, self.second_norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)
        self.gate, self.up = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, 3 * width, bias=False)
        self.down = nn.Linear(3 * width, width, bias=False)

    def attention(self, x: Tensor) -> Tensor:
        query, key, value = (
            part.unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for part in self.qkv(self.norm(x)).chunk(3, -1)
        )
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        result: Tensor = self.out(mixed.transpose(1, 2).flatten(2))
        return result

    def mlp(self, x: Tensor) -> Tensor:
        x = self.second_norm(x)
        result: Tensor = self.down(F.silu(self.gate(x)) * self.up(x))
        return result

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(x)
        return x + self.mlp(x)


def _products_and_attention(_context: Any, func: Any, *_args: Any, **_kwargs: Any) -> CheckpointPolicy:
    kept = ("mm", "_scaled_dot_product_flash_attention", "_scaled_dot_product_cudnn_attention",
            "_scaled_dot_product_efficient_attention")  # fmt: skip
    name = func.__name__.partition(".")[0]
    return CheckpointPolicy.MUST_SAVE if name in kept else CheckpointPolicy.PREFER_RECOMPUTE


class Decoder(nn.Module):
    """A causal language model with its own way of checkpointing."""

    def __init__(self, way: str, layers: int, width: int, heads: int) -> None:
        super().__init__()
        self.way = way
        self.embedding = nn.Embedding(VOCABULARY, width)
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(layers)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, VOCABULARY, bias=False)

    def forward(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        x = self.embedding(tokens)
        if self.way == "sequential":
            x = checkpoint_sequential(self.blocks, 4, x, use_reentrant=False)
        for block in self.blocks if self.way != "sequential" else ():
            x = self._run(block, x)
        return self.head(self.norm(x)), tokens

    def _run(self, block: Block, x: Tensor) -> Any:
        if self.way == "reentrant":
            return checkpoint(block, x, use_reentrant=True)
        if self.way == "mlp":
            x = x + block.attention(x)
            return x + checkpoint(block.mlp, x, use_reentrant=False)
        if self.way == "policy":
            contexts = functools.partial(create_selective_checkpoint_contexts, _products_and_attention)
            return checkpoint(block, x, use_reentrant=False, context_fn=contexts)
        return block(x)


def decoder(batch: int, way: str = "policy", layers: int = 16, width: int = 1536, heads: int = 12) -> Any:
    """The decoder, its tokens, and the loss of predicting the next one."""
    return Decoder(way, layers, width, heads), (torch.randint(VOCABULARY, (batch, 2048)),), _next_token


def _next_token(output: tuple[Tensor, Tensor]) -> Tensor:
    logits, tokens = output
    return F.cross_entropy(logits[:, :-1].flatten(0, 1).float(), tokens[:, 1:].flatten())
