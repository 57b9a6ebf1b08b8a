"""Expert parallelism: a rank keeps its part of every layer's experts, and tokens travel to their experts and
back by all-to-all.

Routing is taken as balanced: a rank gets as many rows as it sends, tokens x top-k.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from foretrain.capture.parallel.collectives import exchange
from foretrain.errors import InputError, UnsupportedJob
from foretrain.plan import Plan


def expert_modules(module: nn.Module) -> dict[str, nn.Module]:
    """The modules that hold all experts of a layer in parameters with one row block per expert, by path."""
    return {path: child for path, child in module.named_modules() if _experts(child) is not None}


def _experts(module: nn.Module) -> int | None:
    """How many experts a module holds; None where it is not a holder of experts."""
    blocks = {
        parameter.shape[0]
        for parameter in module._parameters.values()
        if parameter is not None and parameter.dim() == 3
    }
    count = getattr(module, "num_experts", None)
    return count if isinstance(count, int) and blocks == {count} else None


def takes_routes(module: nn.Module) -> bool:
    """Called with (tokens, chosen experts, their weights), as transformers does; not with every expert's
    tokens."""
    return len(inspect.signature(module.forward).parameters) >= 3


def route_tokens(module: nn.Module) -> None:
    """Let tokens meet the experts that they chose where a model runs every expert on every token (Llama 4 in
    transformers)."""
    for block in module.modules():
        experts = getattr(block, "experts", None)
        if (
            isinstance(experts, nn.Module)
            and _experts(experts) is not None
            and not takes_routes(experts)
            and hasattr(block, "router")
        ):
            _route(block, experts)


def _route(block: Any, experts: Any) -> None:
    from transformers.integrations.moe import grouped_mm_experts_forward

    def gate(both: torch.Tensor) -> torch.Tensor:
        first, second = both.chunk(2, dim=-1)
        return second * experts.act_fn(first)  # type: ignore[no-any-return]

    def forward(hidden_states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        tokens = hidden_states.reshape(-1, hidden_states.shape[-1])
        _, logits = block.router(tokens)
        weights, index = torch.topk(logits, block.top_k, dim=1)
        shared = block.shared_expert(tokens)
        return shared.add_(experts(tokens, index, weights.sigmoid())), logits

    experts.has_gate, experts.is_transposed, experts._apply_gate = True, True, gate
    experts.has_bias = experts.has_post_expert_norm = experts._is_expert_parallel = False
    experts.forward = functools.partial(grouped_mm_experts_forward, experts)
    block.forward = forward


def split_experts(module: nn.Module, plan: Plan) -> frozenset[int]:
    """Cut the experts of a model over the expert group; the ids of the parameters that were cut."""
    if plan.expert == 1:
        return frozenset()
    holders = expert_modules(module)
    if not holders:
        raise InputError(f"plan.expert: {plan.expert}, but {type(module).__name__} has no mixture of experts")
    if plan.tensor > 1 and not plan.sequence_parallel:
        raise InputError(
            f"plan.sequence_parallel: false; plan.expert = {plan.expert} "
            f"with plan.tensor = {plan.tensor} needs it, so that ranks have different tokens"
        )
    cut: set[int] = set()
    for path, holder in holders.items():
        if not takes_routes(holder):
            raise UnsupportedJob(
                f"plan.expert: {path} ({type(holder).__name__}) "
                "is not called with the experts that tokens chose"
            )
        count = _experts(holder)
        assert count is not None
        if count % plan.expert:
            raise InputError(f"plan.expert: {plan.expert} does not divide the {count} experts of {path}")
        cut |= _keep_part(holder, count, plan.expert)
    return frozenset(cut)


def _keep_part(holder: nn.Module, count: int, degree: int) -> set[int]:
    cut = set()
    for name, parameter in list(holder._parameters.items()):
        if parameter is not None and parameter.dim() and parameter.shape[0] == count:
            part = nn.Parameter(parameter.detach()[: count // degree].clone(), parameter.requires_grad)
            holder._parameters[name] = part
            cut.add(id(part))
    holder.num_experts = count // degree  # type: ignore[assignment]
    holder.forward = _dispatched(holder.forward, count // degree)
    return cut


def _dispatched(compute: Callable[..., torch.Tensor], local: int) -> Callable[..., torch.Tensor]:
    """Sort rows by the rank of their expert, exchange, compute those that came, exchange back, and sum each
    token's rows."""

    def forward(
        hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor, *rest: Any
    ) -> torch.Tensor:
        tokens, choices = top_k_index.shape
        chosen, order = torch.sort(top_k_index.reshape(-1))
        rows = exchange(hidden_states[order // choices], "expert")
        weights = top_k_weights.reshape(-1)[order].unsqueeze(-1)
        rows = compute(rows, (chosen % local).unsqueeze(-1), weights, *rest)
        rows = exchange(rows, "expert")
        back = torch.empty_like(order)
        back[order] = torch.arange(order.shape[0], device=order.device)
        return rows[back].view(tokens, choices, -1).sum(dim=1)

    return forward
