"""Runs the experts of a layer as training frameworks do: rows sorted by expert, exchanged, multiplied in
groups, brought back and added up.

Frameworks have kernels of their own for what moves rows and for the activation (Megatron Core with
``--moe-permute-fusion``, NeMo Automodel, torchtitan). They are operators of the namespace ``moe``, which
cannot be run here:

- ``permute``: rows of tokens, one for each expert that a token chose, with the weights of the choice
- ``sort_chunks``: rows that came from several ranks, sorted by expert, and back
- ``gate``: the activation of the first product's result, times the weight of the choice
- ``unpermute``: the sum of each token's rows
- ``row_map``, ``read_counts``: which row goes where; the host reads how many each expert has

Ranks of an expert group get as many rows as they send, times ``Routing.fullness`` on the fullest one.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from foretrain.capture.parallel.collectives import Group, all_gather, exchange, gather, scatter
from foretrain.dispatching import dispatcher, distinct
from foretrain.job import Job

LIBRARY_CODE = ("pytorch", "adaptdl", "deepspeed")
"""Frameworks that run a model's own code on its experts, where these are not cut."""
_WEIGHS_AFTERWARDS = (*LIBRARY_CODE, "torchtitan")
"""Frameworks that multiply rows by the weights of the choice as they add them up, not in the activation."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Routing:
    """How the rows of a plan travel."""

    ranks: int
    """Of an expert group."""
    width: int
    """Ranks that share each expert."""
    fullness: float
    """Rows that the fullest rank gets, over those that it sends."""
    capacity: float | None
    """Rows that are sent, over those that were chosen, where experts have a capacity."""
    dispatcher: str
    weighs_afterwards: bool
    in_turn: bool
    """Whether tokens choose neighbouring experts, one token after another."""
    local: int = 1
    """Experts of a rank."""

    @classmethod
    def of(cls, job: Job) -> Routing:
        plan, way = job.plan, dispatcher(job)
        return cls(
            ranks=plan.expert,
            width=job.expert_tensor if plan.sequence_parallel or plan.expert > 1 else 1,
            fullness=1.0 if plan.expert == 1 else plan.expert_imbalance or 1.0,
            capacity=plan.expert_capacity,
            dispatcher=way,
            weighs_afterwards=way == "alltoall" and job.workload.training.framework in _WEIGHS_AFTERWARDS,
            in_turn=plan.routing == "round-robin",
        )

    @property
    def travels(self) -> bool:
        return self.ranks > 1 or self.width > 1

    def unique(self, tokens: int, choices: int) -> int:
        """Tokens that a rank gets if each is sent once to every rank that it has experts on: choices fall by
        chance, or on neighbours, of which a token's first follows the last of the one before."""
        if self.in_turn:
            first = range(0, self.local, math.gcd(choices, self.local))
            reached = sum((start + choices - 1) // self.local + 1 for start in first) / len(first)
        else:
            reached = distinct(choices, self.ranks)
        return _count(tokens * min(reached, self.ranks) * self.fullness)


def run_experts(
    holder: Any, routing: Routing, hidden: torch.Tensor, index: torch.Tensor, weights: torch.Tensor
) -> torch.Tensor:
    """What the experts of a rank give for its tokens (tokens x width), by the experts that each chose."""
    _library()
    (tokens, choices), local = index.shape, holder.num_experts
    routing = dataclasses.replace(routing, local=local)
    rows_of, counts = _moe(
        "row_map", index, local * routing.ranks, _count(tokens * choices * (routing.capacity or 1.0))
    )
    if routing.travels and routing.capacity is None:
        counts = _moe("read_counts", _counts_of_all(routing, counts))
    ends = counts[:local].to(torch.int32)
    there, back = _WAYS[routing.dispatcher]
    x, weight = there(routing, (hidden, None if routing.weighs_afterwards else weights), rows_of, choices)
    x = _sorted(routing, _products(holder, _sorted(routing, x, local), weight, ends), local)
    return back(routing, (x, weights if routing.weighs_afterwards else None), rows_of, tokens, choices)


def _counts_of_all(routing: Routing, counts: torch.Tensor) -> torch.Tensor:
    """Rows that each expert has on each rank: gathered, in torchtitan exchanged; DeepEP and HybridEP tell one
    another in the kernels that send rows."""
    if routing.dispatcher in ("deepep", "hybridep"):
        return counts
    if routing.weighs_afterwards and routing.ranks > 1:
        return exchange(counts, "expert", counts.shape[0])
    group: Group = "expert" if routing.ranks > 1 else "expert_tensor"
    return all_gather(counts, 0, routing.ranks * routing.width, group)


def is_known(holder: Any) -> bool:
    """Whether the weights of a layer's experts are those of transformers, whose products are known."""
    return hasattr(holder, "down_proj") and (hasattr(holder, "gate_up_proj") or hasattr(holder, "up_proj"))


def run_code(
    compute: Callable[..., torch.Tensor],
    local: int,
    hidden: torch.Tensor,
    index: torch.Tensor,
    weights: torch.Tensor,
) -> torch.Tensor:
    """The same by a model's own code between the exchanges: rows sorted by rank are tokens of one choice."""
    tokens, choices = index.shape
    chosen, order = torch.sort(index.reshape(-1))
    rows = exchange(hidden[order // choices], "expert", tokens * choices)
    rows = compute(rows, (chosen % local).unsqueeze(-1), weights.reshape(-1)[order].unsqueeze(-1))
    rows = exchange(rows, "expert", tokens * choices)
    back = torch.empty_like(order)
    back[order] = torch.arange(order.shape[0], device=order.device)
    return rows[back].view(tokens, choices, -1).sum(dim=1)


def _count(rows: float) -> int:
    return max(1, round(rows))


# There and back: by all-to-all, by gathering all tokens, by kernels that exchange tokens themselves

Rows = tuple[torch.Tensor, torch.Tensor | None]
"""Tokens or rows of them, and the weights of the choices, where they travel along."""


def _each(change: Callable[[torch.Tensor], torch.Tensor], rows: Rows) -> Rows:
    x, weights = rows
    return change(x), None if weights is None else change(weights)


def _permuted(rows: Rows, rows_of: torch.Tensor) -> Rows:
    return _Permute.apply(*rows, rows_of)  # type: ignore[no-any-return, no-untyped-call]


def _summed(rows: Rows, rows_of: torch.Tensor, tokens: int) -> torch.Tensor:
    return _Unpermute.apply(*rows, rows_of, tokens)  # type: ignore[no-any-return, no-untyped-call]


def _widened(routing: Routing, rows: Rows) -> Rows:
    """The rows of all ranks that share an expert."""
    width = routing.width
    return rows if width == 1 else _each(lambda x: gather(x, 0, width, "expert_tensor"), rows)


def _narrowed(routing: Routing, x: torch.Tensor) -> torch.Tensor:
    return x if routing.width == 1 else scatter(x, 0, routing.width, "expert_tensor")


def _sorted(routing: Routing, x: torch.Tensor, local: int) -> torch.Tensor:
    """Rows that came by all-to-all come by rank; several experts of a rank want them sorted once more."""
    sorts = routing.dispatcher == "alltoall" and routing.travels and local > 1
    return _SortChunks.apply(x) if sorts else x  # type: ignore[no-untyped-call]


def _to_experts(routing: Routing, rows: Rows, rows_of: torch.Tensor, _choices: int) -> Rows:
    rows = _permuted(rows, rows_of)
    if routing.ranks > 1:
        came = _count(rows_of.shape[0] * routing.fullness)
        rows = _each(lambda x: exchange(x, "expert", came), rows)
    return _widened(routing, rows)


def _from_experts(
    routing: Routing, rows: Rows, rows_of: torch.Tensor, tokens: int, _choices: int
) -> torch.Tensor:
    x = _narrowed(routing, rows[0])
    x = exchange(x, "expert", rows_of.shape[0]) if routing.ranks > 1 else x
    return _summed((x, rows[1]), rows_of, tokens)


def _to_experts_of_all(routing: Routing, rows: Rows, rows_of: torch.Tensor, _choices: int) -> Rows:
    """Every rank gets all tokens of the group, and takes the rows of its experts."""
    rows = _widened(routing, rows)
    if routing.ranks > 1:
        rows = _each(lambda x: gather(x, 0, routing.ranks, "expert"), rows)
    came = _count(rows_of.shape[0] * routing.width * routing.fullness)
    return _permuted(rows, rows_of.new_empty(came))


def _from_experts_of_all(
    routing: Routing, rows: Rows, rows_of: torch.Tensor, tokens: int, _choices: int
) -> torch.Tensor:
    everyone = tokens * routing.ranks * routing.width
    y = _summed(rows, rows_of.new_empty(rows[0].shape[0]), everyone)
    return _narrowed(routing, scatter(y, 0, routing.ranks, "expert") if routing.ranks > 1 else y)


def _to_experts_once(routing: Routing, rows: Rows, rows_of: torch.Tensor, choices: int) -> Rows:
    """A token is sent once to each rank that it has experts on. DeepEP hands over the tokens that came, from
    which rows are made; HybridEP hands over rows."""
    if routing.ranks == 1:
        return _widened(routing, _permuted(rows, rows_of))
    came = _count(rows_of.shape[0] * routing.fullness)
    if routing.dispatcher == "hybridep":
        x, weights = rows
        flat = (x, None if weights is None else weights.reshape(-1))
        return _widened(routing, _each(lambda x: exchange(x, "expert", came), flat))
    unique = routing.unique(rows[0].shape[0], choices)
    rows = _each(lambda x: exchange(x, "expert", unique), rows)
    return _widened(routing, _permuted(rows, rows_of.new_empty(came)))


def _from_experts_once(
    routing: Routing, rows: Rows, rows_of: torch.Tensor, tokens: int, choices: int
) -> torch.Tensor:
    x = _narrowed(routing, rows[0])
    if routing.ranks == 1:
        return _summed((x, rows[1]), rows_of, tokens)
    if routing.dispatcher == "deepep":
        x = _summed((x, None), rows_of.new_empty(x.shape[0]), routing.unique(tokens, choices))
    return exchange(x, "expert", tokens)


_WAYS = {
    "alltoall": (_to_experts, _from_experts),
    "allgather": (_to_experts_of_all, _from_experts_of_all),
    "deepep": (_to_experts_once, _from_experts_once),
    "hybridep": (_to_experts_once, _from_experts_once),
}


# Experts


def _products(holder: Any, x: torch.Tensor, weight: torch.Tensor | None, ends: torch.Tensor) -> torch.Tensor:
    """Both products of every expert, and what lies between them: one kernel where it takes the weights."""
    gated, turned = bool(getattr(holder, "has_gate", True)), bool(getattr(holder, "is_transposed", False))
    first, second = "gate_up_proj" if gated else "up_proj", "down_proj"
    y, bias = _product(holder, first, x, ends, turned), getattr(holder, f"{first}_bias", None)
    if weight is not None:
        y = _Gate.apply(y, weight, bias, gated)  # type: ignore[no-untyped-call]
    else:
        y = y if bias is None else _AddBias.apply(y, bias)  # type: ignore[no-untyped-call]
        y = holder._apply_gate(y) if gated else holder.act_fn(y)
    y, bias = _product(holder, second, y, ends, turned), getattr(holder, f"{second}_bias", None)
    if getattr(holder, "has_post_expert_norm", False):
        y = holder.post_expert_norm(y)
    return y if bias is None else _AddBias.apply(y, bias)  # type: ignore[no-untyped-call]


def _product(holder: Any, name: str, x: torch.Tensor, ends: torch.Tensor, turned: bool) -> torch.Tensor:
    weight = getattr(holder, name)
    return torch._grouped_mm(x.to(weight.dtype), weight if turned else weight.transpose(-2, -1), offs=ends)


class _Permute(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, tokens: torch.Tensor, weights: torch.Tensor | None, rows_of: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        ctx.save_for_backward(rows_of)
        ctx.tokens, ctx.weights = tokens.shape[0], None if weights is None else weights.shape
        rows, row_weights = _moe("permute", tokens, weights, rows_of)
        return rows, None if weights is None else row_weights

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        (rows_of,) = ctx.saved_tensors
        to_rows, to_weights = gradients
        to_tokens = _moe("permute_backward", to_rows, to_weights, rows_of, ctx.tokens)
        return to_tokens, None if ctx.weights is None else to_weights.new_empty(ctx.weights), None


class _Unpermute(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, rows: torch.Tensor, weights: torch.Tensor | None, rows_of: torch.Tensor, tokens: int
    ) -> torch.Tensor:
        ctx.save_for_backward(*((rows_of,) if weights is None else (rows_of, rows, weights)))
        ctx.rows = rows.shape[0]
        return _moe("unpermute", rows, weights, rows_of, tokens)  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        rows_of, *kept = ctx.saved_tensors
        rows, weights = kept or (None, None)
        to_rows = _moe("unpermute_backward", gradients[0], rows, weights, rows_of, ctx.rows)
        return to_rows, None if weights is None else torch.empty_like(weights), None, None


class _SortChunks(torch.autograd.Function):
    @staticmethod
    def forward(_ctx: Any, rows: torch.Tensor) -> torch.Tensor:
        return _moe("sort_chunks", rows)  # type: ignore[no-any-return]

    @staticmethod
    def backward(_ctx: Any, *gradients: Any) -> Any:
        return _moe("sort_chunks", gradients[0])


class _Gate(torch.autograd.Function):
    """The gradient of a bias, which has a row for each expert, is the sum over its rows: a kernel of its
    own."""

    @staticmethod
    def forward(
        ctx: Any, rows: torch.Tensor, weights: torch.Tensor, bias: torch.Tensor | None, gated: bool
    ) -> torch.Tensor:
        ctx.save_for_backward(rows, weights, bias)
        return _moe("gate", rows, weights, bias, rows.shape[-1] // 2 if gated else rows.shape[-1])  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        rows, weights, bias = ctx.saved_tensors
        to_rows, to_weights = _moe("gate_backward", gradients[0], rows, weights, bias)
        return to_rows, to_weights, None if bias is None else _moe("sum_rows", to_rows, bias.shape[0]), None


class _AddBias(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        ctx.experts = bias.shape[0]
        return _moe("add_bias", rows, bias)  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return gradients[0], _moe("sum_rows", gradients[0], ctx.experts)


def _moe(name: str, *args: Any) -> Any:
    with torch._C._AutoDispatchBelowAutograd():
        return getattr(torch.ops.moe, name)(*args)


def _row_map(index: torch.Tensor, experts: int, rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    return index.new_empty(rows, dtype=torch.int32), index.new_empty(experts)


def _permute(
    tokens: torch.Tensor, weights: torch.Tensor | None, rows_of: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    rows = rows_of.shape[0]
    row_weights = tokens.new_empty(0) if weights is None else weights.new_empty(rows)
    return tokens.new_empty(rows, tokens.shape[1]), row_weights


_OPERATORS = {
    "row_map(Tensor index, int experts, int rows) -> (Tensor, Tensor)": _row_map,
    "read_counts(Tensor counts) -> Tensor": torch.empty_like,
    "permute(Tensor tokens, Tensor? weights, Tensor rows_of) -> (Tensor, Tensor)": _permute,
    "permute_backward(Tensor rows, Tensor? weights, Tensor rows_of, int tokens) -> Tensor": (
        lambda rows, weights, rows_of, tokens: rows.new_empty(tokens, rows.shape[1])
    ),
    "unpermute(Tensor rows, Tensor? weights, Tensor rows_of, int tokens) -> Tensor": (
        lambda rows, weights, rows_of, tokens: rows.new_empty(tokens, rows.shape[1])
    ),
    "unpermute_backward(Tensor tokens, Tensor? rows, Tensor? weights, Tensor rows_of, int count) -> Tensor": (
        lambda tokens, rows, weights, rows_of, count: tokens.new_empty(count, tokens.shape[1])
    ),
    "sort_chunks(Tensor rows) -> Tensor": lambda rows: rows.new_empty(rows.shape),
    "gate(Tensor rows, Tensor weights, Tensor? bias, int width) -> Tensor": (
        lambda rows, weights, bias, width: rows.new_empty(rows.shape[0], width)
    ),
    "gate_backward(Tensor gradient, Tensor rows, Tensor weights, Tensor? bias) -> (Tensor, Tensor)": (
        lambda gradient, rows, weights, bias: (rows.new_empty(rows.shape), weights.new_empty(weights.shape))
    ),
    "add_bias(Tensor rows, Tensor bias) -> Tensor": lambda rows, bias: rows.new_empty(rows.shape),
    "sum_rows(Tensor rows, int experts) -> Tensor": (
        lambda rows, experts: rows.new_empty(experts, rows.shape[1])
    ),
}  # fmt: skip


@functools.cache
def _library() -> torch.library.Library:
    library = torch.library.Library("moe", "DEF")
    for schema, kernel in _OPERATORS.items():
        library.define(schema)
        library.impl(schema.partition("(")[0], kernel, "Meta")
    return library
