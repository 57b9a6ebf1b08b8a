"""Traces sparse gradients, those of tables with ``sparse=True``: rows for the tokens of a batch alone.

On meta such a gradient is a sparse tensor as elsewhere: positions and rows, each with a storage of its own.
What torch computes with it is dispatched as the operators on positions and rows that its CUDA kernels are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from foretrain.capture.tracing.constants import Constants
from foretrain.errors import CaptureError

aten = torch.ops.aten
Dispatch = Callable[..., Any]
"""Runs an operator on plain tensors, and records it."""


def is_sparse(tensor: torch.Tensor) -> bool:
    return tensor.layout is torch.sparse_coo


def stored(tensor: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """The plain tensors that hold the data of a tensor."""
    return (tensor._indices(), tensor._values()) if is_sparse(tensor) else (tensor,)


def is_sparse_call(func: Any, args: Any, inputs: list[torch.Tensor]) -> bool:
    """Whether a call makes a sparse tensor or works on one."""
    if func is _BAG_BACKWARD:
        return bool(args[_BAG_SPARSE])
    return func is _MAKE or any(is_sparse(tensor) for tensor in inputs)


class SparseCalls:
    """Runs calls of sparse tensors; the kernels they launch go through ``dispatch``. Positions that are known
    stay so inside of a sparse tensor."""

    def __init__(self, constants: Constants, dispatch: Dispatch) -> None:
        self._constants, self._dispatch = constants, dispatch
        self._positions: dict[int, torch.Tensor] = {}  # by the address of their storage

    def run(self, func: Any, args: Any, kwargs: Any) -> Any:
        if func is _MAKE and (value := self._constants.value(args[3])) is not None:
            self._positions[args[3].untyped_storage()._cdata] = value
        if func in _ACCESSORS:
            output = func(*args, **kwargs)
            if func is aten._indices.default:
                value = self._positions.get(output.untyped_storage()._cdata)
                if value is not None and value.numel() == output.numel():
                    self._constants.know(output, value.view(output.shape))
            return output
        if func is _BAG_BACKWARD:
            return self._bag_backward(args)
        return self._compute(func, args, kwargs)

    def _compute(self, func: Any, args: Any, kwargs: Any) -> Any:
        name, run = func._schema.name.partition("::")[2], self._dispatch
        first = args[0]
        if name in ("clone", "_to_copy") and is_sparse(first):
            indices, values = self._parts(first)
            if name == "clone" and _is_stolen(indices, values):
                return self._sparse(indices, values, first.shape)
            plain = {key: value for key, value in kwargs.items() if key in ("dtype", "memory_format")}
            indices = run(aten.clone.default, indices) if name == "clone" else indices
            return self._sparse(indices, run(func, values, **plain), first.shape)
        if name == "add" and is_sparse(first) and isinstance(args[1], torch.Tensor) and is_sparse(args[1]):
            (indices, values), (others, rows) = self._parts(first), self._parts(args[1])
            indices = run(aten.cat.default, [indices, others], 1)
            return self._sparse(indices, run(aten.cat.default, [values, rows]), first.shape)
        if name in ("add", "add_") and not is_sparse(first):
            dense = first if name == "add_" else run(aten.clone.default, first)
            indices, values = self._parts(args[1])
            position = run(aten.view.default, indices, [-1])
            return run(aten.index_add_.default, dense, 0, position, values, alpha=kwargs.get("alpha", 1))
        raise CaptureError(f"sparse gradients: {name} of a sparse tensor cannot be traced; use sparse=False")

    def _parts(self, tensor: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.run(aten._indices.default, (tensor,), {}), tensor._values()

    def _sparse(self, indices: torch.Tensor, values: torch.Tensor, shape: Any) -> Any:
        size, dims = list(shape), indices.shape[0]
        kind = {"dtype": values.dtype, "layout": torch.sparse_coo, "device": values.device}
        return self.run(_MAKE, (dims, len(size) - dims, size, indices, values), kind)

    def _bag_backward(self, args: Any) -> Any:
        """Each looked-up row gets the gradient of its bag."""
        run = self._dispatch
        names = [argument.name for argument in _BAG_BACKWARD._schema.arguments]
        given = dict(zip(names, args, strict=False))
        indices, bags, size = given["indices"], given["offset2bag"], given["bag_size"]
        rows = run(aten.index_select.default, given["grad"], 0, bags)
        if given["mode"] == 1:  # the mean of a bag
            lengths = run(aten._to_copy.default, size, dtype=rows.dtype)
            shares = run(aten.index_select.default, run(aten.reciprocal.default, lengths), 0, bags)
            rows = run(aten.mul_.Tensor, rows, shares.unsqueeze(1))
        if (weights := given.get("per_sample_weights")) is not None:
            rows = run(aten.mul_.Tensor, rows, weights.unsqueeze(1))
        if given.get("padding_idx", -1) >= 0:
            kept = run(aten.ne.Scalar, indices, given["padding_idx"])
            rows = run(aten.index.Tensor, rows, [kept])
            indices = run(aten.index.Tensor, indices, [kept])
        position = run(aten.view.default, indices, [1, -1])
        return self._sparse(position, rows, (given["num_weights"], rows.shape[-1]))


def _is_stolen(indices: torch.Tensor, values: torch.Tensor) -> bool:
    """Whether a parameter takes a gradient as it is; torch copies it here because the trace holds it too."""
    node = torch._C._current_autograd_node()
    is_last = node is not None and node.name() == "torch::autograd::AccumulateGrad"
    return is_last and indices.is_contiguous() and values.is_contiguous()


_MAKE = aten._sparse_coo_tensor_with_dims_and_tensors.default
_BAG_BACKWARD = aten._embedding_bag_backward.default
_BAG_SPARSE = [argument.name for argument in _BAG_BACKWARD._schema.arguments].index("sparse")
_ACCESSORS = {
    _MAKE,
    aten._indices.default,
    aten._values.default,
    aten.detach.default,
    aten._coalesced_.default,
    aten.is_coalesced.default,
    aten._nnz.default,
    aten.sparse_dim.default,
    aten.dense_dim.default,
}


# Optimizers


def tables_of(module: nn.Module) -> list[nn.Parameter]:
    """The trained tables of a module whose gradients are sparse."""
    tables: dict[int, nn.Parameter] = {}
    for child in module.modules():
        if isinstance(child, nn.Embedding | nn.EmbeddingBag) and child.sparse:
            table = child._parameters.get("weight")
            if table is not None and table.requires_grad:
                tables[id(table)] = table
    return list(tables.values())


class RowUpdate:
    """The optimizer of tables with sparse gradients, the one of torch that stands in where ``name`` takes
    none."""

    def __init__(self, name: str, tables: list[nn.Parameter]) -> None:
        self._name = name
        self.tables = tables
        moments = {"sgd": 0, "sgd-plain": 0, "adagrad": 1}.get(name, 2)
        self._state = {id(table): [torch.zeros_like(table) for _ in range(moments)] for table in tables}

    def state_tensors(self) -> Iterator[torch.Tensor]:
        for state in self._state.values():
            yield from state

    @property
    def note(self) -> str | None:
        """What the forecast should say."""
        if self._name in ("sgd-plain", "adagrad", "sparse-adam"):
            return None
        instead = "SGD without momentum" if self._name == "sgd" else "SparseAdam"
        return f"tables with sparse gradients are updated by {instead}, beside {self._name}"

    def step(self) -> None:
        for table in self.tables:
            gradient = table.grad
            if gradient is None or not is_sparse(gradient):
                continue
            indices, rows = gradient._indices().view(-1), gradient._values()
            if self._name in ("sgd", "sgd-plain"):
                table.index_add_(0, indices, rows, alpha=-0.01)
                continue
            indices, rows = _coalesced(indices, rows)
            moments = self._state[id(table)]
            table.index_add_(0, indices, (_adagrad if len(moments) == 1 else _adam)(indices, rows, *moments))


def _coalesced(indices: torch.Tensor, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows of equal positions summed: the positions are sorted, and the host learns how many are left."""
    ordered, _ = indices.sort()
    kept, places = torch.unique_consecutive(ordered, return_inverse=True)
    return kept, rows.new_empty((kept.shape[0], rows.shape[1])).index_add_(0, places, rows)


def _adam(
    indices: torch.Tensor, rows: torch.Tensor, average: torch.Tensor, square: torch.Tensor
) -> torch.Tensor:
    """One step of torch's SparseAdam: moments are read, moved and written at the rows of the batch."""
    old = average.index_select(0, indices)
    moved = rows.sub(old).mul_(0.1)
    average.index_add_(0, indices, moved)
    old_square = square.index_select(0, indices)
    moved_square = rows.pow(2).sub_(old_square).mul_(0.001)
    square.index_add_(0, indices, moved_square)
    numerator = moved.add_(old)
    moved_square.add_(old_square)
    return numerator.div_(moved_square.sqrt_().add_(1e-8)).mul(-0.001)


def _adagrad(indices: torch.Tensor, rows: torch.Tensor, total: torch.Tensor) -> torch.Tensor:
    total.index_add_(0, indices, rows.pow(2))
    return rows.div(total.index_select(0, indices).sqrt_().add_(1e-10)).mul(-0.01)
