"""Defines collectives as operators that the tracer records: each has the name of the collective, and its
group as overload.

A communication of a parallel layer is a pair, one collective forward and one backward (Shoeybi et al. 2019,
Korthikanti et al. 2022).
"""

from __future__ import annotations

import functools
from typing import Any, Literal, get_args

import torch

Group = Literal["tensor", "context", "expert", "expert_tensor"]
NAMESPACE = "foretrain"

_SCHEMAS = {
    "all_reduce": "(Tensor(a!) x) -> Tensor",
    "all_gather": "(Tensor x, int dim, int size) -> Tensor",
    "reduce_scatter": "(Tensor x, int dim, int size) -> Tensor",
    "all_to_all": "(Tensor x, int rows) -> Tensor",
}


def _all_reduce(x: torch.Tensor) -> torch.Tensor:
    """The same storage as another tensor, which autograd does not take for a view."""
    return torch.empty(0, dtype=x.dtype, device="meta").set_(
        x.untyped_storage(), x.storage_offset(), x.shape, x.stride()
    )


def _all_gather(x: torch.Tensor, dim: int, size: int) -> torch.Tensor:
    return x.new_empty((*x.shape[:dim], x.shape[dim] * size, *x.shape[dim + 1 :]))


def _reduce_scatter(x: torch.Tensor, dim: int, size: int) -> torch.Tensor:
    return x.new_empty((*x.shape[:dim], x.shape[dim] // size, *x.shape[dim + 1 :]))


def _all_to_all(x: torch.Tensor, rows: int) -> torch.Tensor:
    return x.new_empty((rows, *x.shape[1:]))


@functools.cache
def _library() -> torch.library.Library:
    library = torch.library.Library(NAMESPACE, "DEF")
    kernels = {
        "all_reduce": _all_reduce,
        "all_gather": _all_gather,
        "reduce_scatter": _reduce_scatter,
        "all_to_all": _all_to_all,
    }
    for name, schema in _SCHEMAS.items():
        for group in get_args(Group):
            library.define(f"{name}.{group}{schema}")
            library.impl(f"{name}.{group}", kernels[name], "Meta")
    return library


def _call(name: str, group: Group, *args: Any) -> torch.Tensor:
    _library()
    with torch._C._AutoDispatchBelowAutograd():
        return getattr(getattr(torch.ops.foretrain, name), group)(*args)  # type: ignore[no-any-return]


def all_reduce(x: torch.Tensor, group: Group) -> torch.Tensor:
    """In place, as NCCL does it; not differentiable."""
    return _call("all_reduce", group, x)


def all_gather(x: torch.Tensor, dim: int, size: int, group: Group) -> torch.Tensor:
    return _call("all_gather", group, x, dim, size)


def reduce_scatter(x: torch.Tensor, dim: int, size: int, group: Group) -> torch.Tensor:
    return _call("reduce_scatter", group, x, dim, size)


class _Copy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: Group) -> torch.Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return all_reduce(gradient, ctx.group), None


class _Reduce(torch.autograd.Function):
    @staticmethod
    def forward(_ctx: Any, x: torch.Tensor, group: Group) -> torch.Tensor:
        return all_reduce(x, group)

    @staticmethod
    def backward(_ctx: Any, gradient: torch.Tensor) -> Any:
        return gradient, None


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, dim: int, size: int, group: Group) -> torch.Tensor:
        ctx.arguments = dim, size, group
        return all_gather(x, dim, size, group)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return reduce_scatter(gradient, *ctx.arguments), None, None, None


class _GatherResults(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, size: int, group: Group) -> torch.Tensor:
        ctx.size = size
        return all_gather(x, x.dim() - 1, size, group)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return gradient.narrow(-1, 0, gradient.shape[-1] // ctx.size).contiguous(), None, None


class _Scatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, dim: int, size: int, group: Group) -> torch.Tensor:
        ctx.arguments = dim, size, group
        return reduce_scatter(x, dim, size, group)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return all_gather(gradient, *ctx.arguments), None, None, None


class _Slice(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, dim: int, size: int, group: Group) -> torch.Tensor:
        ctx.arguments = dim, size, group
        return x.narrow(dim, 0, x.shape[dim] // size).contiguous()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return all_gather(gradient, *ctx.arguments), None, None, None


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: Group, rows: int) -> torch.Tensor:
        ctx.arguments = group, x.shape[0]
        return _call("all_to_all", group, x, rows)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        group, rows = ctx.arguments
        return _call("all_to_all", group, gradient, rows), None, None


def copy_to(x: torch.Tensor, group: Group) -> torch.Tensor:
    """Nothing forward, all-reduce of the gradient: the input of a column layer."""
    return _Copy.apply(x, group)  # type: ignore[no-any-return, no-untyped-call]


def reduce_from(x: torch.Tensor, group: Group) -> torch.Tensor:
    """All-reduce forward, nothing backward: the output of a row layer."""
    return _Reduce.apply(x, group)  # type: ignore[no-any-return, no-untyped-call]


def gather(x: torch.Tensor, dim: int, size: int, group: Group) -> torch.Tensor:
    """All-gather forward, reduce-scatter of the gradient."""
    return _Gather.apply(x, dim, size, group)  # type: ignore[no-any-return, no-untyped-call]


def gather_results(x: torch.Tensor, size: int, group: Group) -> torch.Tensor:
    """All-gather of the outputs of a column layer; backward the rank's part of the gradient, without
    communication."""
    return _GatherResults.apply(x, size, group)  # type: ignore[no-any-return, no-untyped-call]


def scatter(x: torch.Tensor, dim: int, size: int, group: Group) -> torch.Tensor:
    """Reduce-scatter forward, all-gather of the gradient."""
    return _Scatter.apply(x, dim, size, group)  # type: ignore[no-any-return, no-untyped-call]


def take_slice(x: torch.Tensor, dim: int, size: int, group: Group) -> torch.Tensor:
    """The rank's part of a tensor that every rank has; all-gather of the gradient."""
    return _Slice.apply(x, dim, size, group)  # type: ignore[no-any-return, no-untyped-call]


def exchange(x: torch.Tensor, group: Group, rows: int) -> torch.Tensor:
    """All-to-all forward and backward: the rank sends its rows, and gets so many."""
    return _Exchange.apply(x, group, rows)  # type: ignore[no-any-return, no-untyped-call]


class _VocabularyCrossEntropy(torch.autograd.Function):
    """Cross-entropy of logits whose vocabulary is split over the tensor group, as Megatron computes it: only
    three
    all-reduces of one number per token. The logits become the softmax in place, which is kept for the
    backward pass.
    """

    @staticmethod
    def forward(ctx: Any, logits: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        logits = logits.detach()
        highest = all_reduce(logits.amax(dim=-1), "tensor")
        logits.sub_(highest.unsqueeze(-1))
        elsewhere = (target < 0) | (target >= logits.shape[-1])
        local = target.masked_fill(elsewhere, 0)
        predicted = logits.gather(1, local.unsqueeze(-1)).squeeze(-1).masked_fill_(elsewhere, 0.0)
        all_reduce(predicted, "tensor")
        logits.exp_()
        total = all_reduce(logits.sum(dim=-1), "tensor")
        loss = torch.log(total) - predicted
        logits.div_(total.unsqueeze(-1))
        ctx.save_for_backward(logits, elsewhere, local)
        return loss

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        softmax, elsewhere, local = ctx.saved_tensors
        hit = elsewhere.to(softmax.dtype).sub_(1.0)
        softmax.scatter_add_(1, local.unsqueeze(-1), hit.unsqueeze(-1))
        return softmax.mul_(gradient.unsqueeze(-1)), None


def vocabulary_cross_entropy(logits: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """The mean loss of logits (tokens x local vocabulary) against token ids."""
    return _VocabularyCrossEntropy.apply(logits, target).mean()  # type: ignore[no-any-return, no-untyped-call]
