"""Finds the calls of a layer that belong to parts which a plan has computed again
(``plan.recompute_modules``), by the paths of the model's modules."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import numpy as np

from foretrain.errors import InputError
from foretrain.graph import Op, OpGraph
from foretrain.graph.opset import communicates, permutes, traits
from foretrain.plan import Plan, RecomputedModule
from foretrain.step.partition import Block, Index, blocks

WITHOUT_OUTPUT: frozenset[RecomputedModule] = frozenset({"norms", "expert_activation", "mla_up"})
"""Parts whose results are not kept either: Megatron makes them anew before they are read."""
_MULTIPLIES = ("product", "batched product", "grouped product", "attention", "convolution")
_MLP = ("mlp", "feed_forward", "ffn", "block_sparse_moe", "moe")


def calls_of(graph: OpGraph, block: Block, modules: Iterable[str]) -> Index:
    """The calls of a block's forward pass that belong to any of the parts."""
    forward = block.piece.forward.tolist()
    has_experts = any(_is_expert(graph.ops[i]) for i in forward)
    attends = any(_kind(graph.ops[i]) in ("attention", "batched product") for i in forward)
    chosen = [
        i for i in forward if any(_belongs(graph.ops[i], module, has_experts, attends) for module in modules)
    ]
    return np.array(chosen, dtype=np.int64)


def check_modules(plan: Plan, graph: OpGraph) -> None:
    """Refuse parts that the model's layers do not have."""
    layers = list({id(block.piece): block for block in blocks(graph) if block.is_layer}.values())
    for module in plan.recompute_modules:
        if not any(len(calls_of(graph, block, [module])) for block in layers):
            raise InputError(f"plan.recompute_modules: the layers of this model have no {module!r}")


def _belongs(op: Op, module: str, has_experts: bool, attends: bool) -> bool:
    names, kind = op.layer.split("."), _kind(op)
    in_mlp = any(name in _MLP for name in names) or _is_expert(op)
    shared = any("shared_expert" in name for name in names)
    tests: dict[str, Callable[[], bool]] = {
        "attention": lambda: attends and kind in ("attention", "batched product", "softmax") and not in_mlp,
        "norms": lambda: "norm" in names[-1],
        "mlp": lambda: in_mlp and not has_experts,
        "experts": lambda: in_mlp and has_experts and not shared,
        "shared_experts": lambda: shared,
        "expert_activation": lambda: _is_expert(op) and not shared and _is_elementwise(op),
        "mla_up": lambda: names[-1] in ("q_b_proj", "kv_b_proj"),
    }
    return tests[module]()


def _kind(op: Op) -> str:
    return str(traits(op.operator.name).kind)


def _is_expert(op: Op) -> bool:
    return any("experts" in name for name in op.layer.split(".")) and "shared" not in op.layer


def _is_elementwise(op: Op) -> bool:
    name = op.operator.name
    moves = (
        communicates(name) or permutes(name) or name in ("moe.permute", "moe.unpermute", "moe.sort_chunks")
    )
    return not moves and _kind(op) not in _MULTIPLIES
