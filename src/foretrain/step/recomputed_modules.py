"""Finds the calls of a layer that belong to parts which a plan has computed again
(``plan.recompute_modules``), by the paths of the model's modules."""

from __future__ import annotations

import functools
from collections.abc import Collection, Sequence

import numpy as np

from foretrain.errors import InputError
from foretrain.graph import Op, OpGraph
from foretrain.graph.opset import is_product, traits
from foretrain.plan import Plan, RecomputedModule
from foretrain.step.partition import Index, Piece, blocks

WITHOUT_OUTPUT: frozenset[RecomputedModule] = frozenset({"norms", "expert_activation", "mla_up"})
"""Parts whose results are not kept either: Megatron makes them anew before they are read."""
_MLP = ("mlp", "feed_forward", "ffn", "block_sparse_moe", "moe")


@functools.lru_cache(maxsize=1024)
def calls_of(graph: OpGraph, piece: Piece, modules: tuple[str, ...]) -> Index:
    """The calls of a block's forward pass that belong to any of the parts."""
    forward = piece.forward.tolist()
    has_experts = any(_is_expert(graph.ops[i]) for i in forward)
    attends = set(attention_calls(graph, piece.forward).tolist())
    acts = set(_between_products(graph, [i for i in forward if _is_expert(graph.ops[i])]))
    ups = set(_latent_to_heads(graph, forward, attends))
    inside = {"attention": attends, "expert_activation": acts, "mla_up": ups}
    chosen = [
        i
        for i in forward
        if any(
            i in inside[one] if one in inside else _belongs(graph.ops[i], one, has_experts=has_experts)
            for one in modules
        )
    ]
    return np.array(chosen, dtype=np.int64)


def attention_calls(graph: OpGraph, calls: Index) -> Index:
    """The calls between the projections of attention: one kernel, or all from the first product with keys to
    the last with values. A softmax alone is that of a loss."""
    chosen = [i for i in calls.tolist() if _kind(graph.ops[i]) in ("attention", "batched product")]
    if not chosen:
        return calls[:0]
    modules = {graph.ops[i].layer for i in chosen}
    between = [i for i in calls.tolist() if min(chosen) <= i <= max(chosen) and graph.ops[i].layer in modules]
    return np.array(between, dtype=np.int64)


def _latent_to_heads(graph: OpGraph, calls: Sequence[int], attends: Collection[int]) -> list[int]:
    """The up-projections of multi-latent attention, and what makes queries, keys and values of their results:
    rotary positions and joining, as Megatron computes all of it again."""
    ups = [i for i in calls if graph.ops[i].layer.rpartition(".")[2] in ("q_b_proj", "kv_b_proj")]
    if not ups:
        return ups
    homes, end = {graph.ops[i].layer.rpartition(".")[0] for i in ups}, min(attends, default=ups[-1])
    return [*ups, *(i for i in calls if ups[0] < i < end and graph.ops[i].layer in homes)]


def check_modules(plan: Plan, graph: OpGraph) -> None:
    """Refuse parts that the model's layers do not have."""
    pieces = {id(block.piece): block.piece for block in blocks(graph) if block.is_layer}.values()
    for module in plan.recompute_modules:
        if not any(len(calls_of(graph, piece, (module,))) for piece in pieces):
            raise InputError(f"plan.recompute_modules: the layers of this model have no {module!r}")


def _between_products(graph: OpGraph, calls: Sequence[int]) -> list[int]:
    """List the calls between the first and the last product that are none."""
    products = [i for i in calls if is_product(graph.ops[i].operator.name)]
    return [i for i in calls if products and products[0] < i < products[-1] and i not in products]


def _belongs(op: Op, module: str, *, has_experts: bool) -> bool:
    names = op.layer.split(".")
    in_mlp = any(name in _MLP for name in names) or _is_expert(op)
    shared = any("shared_expert" in name for name in names)
    return {
        "norms": "norm" in names[-1],
        "mlp": in_mlp and not has_experts,
        "experts": in_mlp and has_experts and not shared,
        "shared_experts": shared,
    }[module]


def _kind(op: Op) -> str:
    return str(traits(op.operator.name).kind)


def _is_expert(op: Op) -> bool:
    return any("experts" in name for name in op.layer.split(".")) and "shared" not in op.layer
