"""Deals experts out to the ranks of expert parallelism: a rank keeps its part of every layer's, and tokens
travel to them and back."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from foretrain.capture.parallel.narrowing import Narrowing
from foretrain.capture.parallel.permutation import LIBRARY_CODE, Routing, is_known, run_code, run_experts
from foretrain.errors import InputError, UnsupportedJob
from foretrain.job import Job


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


def route_in_low_precision(module: nn.Module) -> None:
    """Have routers multiply in the precision of the model and go on in fp32 behind the product, as frameworks
    do; DeepSeek's own code casts tokens and weights to fp32 before it."""
    for router in module.modules():
        weight = dict(router.named_parameters(recurse=False)).get("weight")
        if weight is not None and weight.dim() == 2 and hasattr(router, "e_score_correction_bias"):
            router.forward = functools.partial(_with_low_precision, router.forward)


def _with_low_precision(forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    with _LowPrecisionProduct():
        return forward(*args, **kwargs)


class _LowPrecisionProduct(TorchFunctionMode):
    """Casts to fp32 in front of a linear layer follow it instead."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        casts = func in (torch.Tensor.type, torch.Tensor.to) and args[1:] == (torch.float32,)
        if casts and args[0].dim() == 2:
            return args[0]
        result = func(*args, **(kwargs or {}))
        return result.float() if func is nn.functional.linear else result


def split_experts(module: nn.Module, job: Job) -> frozenset[int] | None:
    """Have the experts of a model run as the framework does, and give a rank its part of them; the ids of the
    parameters whose replicas are others than those of dense layers. None where the tensor team cuts experts
    as it does other layers."""
    plan, width = job.plan, job.expert_tensor
    holders = expert_modules(module)
    for name in ("expert", "expert_tensor", "expert_capacity", "expert_imbalance", "dispatcher"):
        if not holders and getattr(plan, name) not in (None, 1):
            has = f"{type(module).__name__} has no mixture of experts"
            raise InputError(f"plan.{name}: {getattr(plan, name)!r}, but {has}")
    apart = plan.expert > 1 or width != plan.tensor
    if not holders or not (apart or job.workload.training.framework not in LIBRARY_CODE):
        return None
    if apart and plan.tensor > 1 and not plan.sequence_parallel:
        raise InputError(
            f"plan.sequence_parallel: false; plan.expert = {plan.expert} "
            f"with plan.tensor = {plan.tensor} needs it, so that ranks have different tokens"
        )
    by_team = not apart and not plan.sequence_parallel
    routing, narrowing = Routing.of(job), Narrowing(module, width, "plan.expert_tensor")
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
        if width > 1 and not by_team:
            narrowing.narrow_experts(path, holder)
        cut |= _keep_part(holder, count, plan.expert)
        _set_forward(path, holder, routing)
    return None if by_team else frozenset(cut) if apart else frozenset()


def _keep_part(holder: nn.Module, count: int, degree: int) -> set[int]:
    for name, parameter in list(holder._parameters.items()):
        if degree > 1 and parameter is not None and parameter.dim() and parameter.shape[0] == count:
            part = nn.Parameter(parameter.detach()[: count // degree].clone(), parameter.requires_grad)
            holder._parameters[name] = part
    holder.num_experts = count // degree  # type: ignore[assignment]
    return {id(parameter) for parameter in holder._parameters.values()}


def _set_forward(path: str, holder: nn.Module, routing: Routing) -> None:
    """As frameworks run experts where their weights are known, else by the model's own code."""
    if is_known(holder):
        holder.forward = functools.partial(_run, holder, routing)
        return
    if routing.width > 1 or routing.fullness != 1.0 or routing.capacity is not None:
        raise UnsupportedJob(
            f"plan.expert_tensor, plan.expert_imbalance and plan.expert_capacity need experts with weights "
            f"gate_up_proj (or up_proj) and down_proj; {path} ({type(holder).__name__}) has others"
        )
    local = _experts(holder)
    if routing.ranks > 1 and local is not None:
        holder.forward = functools.partial(run_code, holder.forward, local)


def _run(
    holder: nn.Module, routing: Routing, hidden: torch.Tensor, index: torch.Tensor, weights: torch.Tensor
) -> torch.Tensor:
    """Called as transformers calls experts."""
    return run_experts(holder, routing, hidden, index, weights)
