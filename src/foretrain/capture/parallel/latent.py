"""Runs multi-head latent attention as Megatron does: one kernel rotates the part of queries that has
positions in place, another makes keys and values of what the up-projection gives (``apply_rope_fusion``).

They are operators of the namespace ``mla``, which cannot be run here. Nothing is absorbed into the
projections: training multiplies them out.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import nn
from torch.nn.functional import scaled_dot_product_attention

_PARTS = ("kv_a_proj_with_mqa", "kv_b_proj", "o_proj", "expand_kv", "qk_nope_head_dim", "qk_rope_head_dim")
"""What attention of DeepSeek's kind has in transformers."""


def fuse_rotations(module: nn.Module) -> None:
    """Change latent attention of a model in place."""
    for child in module.modules():
        latent = all(hasattr(child, name) for name in _PARTS) and not hasattr(child, "indexer")
        if latent and getattr(child.config, "_attn_implementation", None) != "eager":
            child.forward = functools.partial(_attend, child)


def _attend(
    self: Any, hidden_states: torch.Tensor, position_embeddings: Any, *_args: Any, **_kwargs: Any
) -> tuple[torch.Tensor, None]:
    _library()
    shape, table = (*hidden_states.shape[:-1], -1), position_embeddings[0]
    if self.q_lora_rank is None:
        query = self.q_proj(hidden_states)
    else:
        query = self.q_b_proj(self.q_a_layernorm(self.q_a_proj(hidden_states)))
    query = _Rotate.apply(query.view(*shape, self.qk_head_dim), table, self.qk_nope_head_dim)  # type: ignore[no-untyped-call]
    latent, turned = torch.split(
        self.kv_a_proj_with_mqa(hidden_states), [self.kv_lora_rank, self.qk_rope_head_dim], dim=-1
    )
    both = self.kv_b_proj(self.kv_a_layernorm(latent)).view(*shape, self.qk_nope_head_dim + self.v_head_dim)
    key, value = _Keys.apply(both, turned, table, self.v_head_dim)  # type: ignore[no-untyped-call]
    query, key, value = (one.transpose(1, 2) for one in (query, key, value))
    output = scaled_dot_product_attention(query, key, value, is_causal=True, scale=self.scaling)
    return self.o_proj(output.transpose(1, 2).reshape(shape)), None


class _Rotate(torch.autograd.Function):
    """In place, so that only what has positions is read and written."""

    @staticmethod
    def forward(ctx: Any, query: torch.Tensor, table: torch.Tensor, plain: int) -> torch.Tensor:
        ctx.save_for_backward(table)
        ctx.plain = plain
        _mla("rotate", query.detach()[..., plain:], table)
        return query.view_as(query)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        (table,) = ctx.saved_tensors
        _mla("rotate", gradients[0][..., ctx.plain :], table)
        return gradients[0], None, None


class _Keys(torch.autograd.Function):
    """The shared part of keys goes to every head; its gradient is the sum over them."""

    @staticmethod
    def forward(
        ctx: Any, both: torch.Tensor, turned: torch.Tensor, table: torch.Tensor, width: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        ctx.save_for_backward(table)
        return _mla("keys", both, turned, table, width)  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        (table,) = ctx.saved_tensors
        to_key, to_value = gradients
        positioned = table.shape[-1]
        return *_mla("keys_backward", to_key, to_value, table, positioned), None, None


def _mla(name: str, *args: Any) -> Any:
    with torch._C._AutoDispatchBelowAutograd():
        return getattr(torch.ops.mla, name)(*args)


def _keys(
    both: torch.Tensor, turned: torch.Tensor, _table: torch.Tensor, width: int
) -> tuple[torch.Tensor, torch.Tensor]:
    plain = both.shape[-1] - width
    key = both.new_empty(*both.shape[:-1], plain + turned.shape[-1])
    return key, both.new_empty(*both.shape[:-1], width)


def _keys_backward(
    key: torch.Tensor, value: torch.Tensor, _table: torch.Tensor, positioned: int
) -> tuple[torch.Tensor, torch.Tensor]:
    both = key.new_empty(*key.shape[:-1], key.shape[-1] - positioned + value.shape[-1])
    return both, key.new_empty(*key.shape[:-2], positioned)


@functools.cache
def _library() -> torch.library.Library:
    library = torch.library.Library("mla", "DEF")
    for schema, kernel in (
        ("rotate(Tensor(a!) x, Tensor table) -> ()", lambda x, table: None),
        ("keys(Tensor both, Tensor turned, Tensor table, int width) -> (Tensor, Tensor)", _keys),
        (
            "keys_backward(Tensor key, Tensor value, Tensor table, int positioned) -> (Tensor, Tensor)",
            _keys_backward,
        ),
    ):
        library.define(schema)
        library.impl(schema.partition("(")[0], kernel, "Meta")
    return library
