"""Tells how much of the collectives of tensor parallelism runs beside matrix products.

A layer that is cut by columns has its input gathered and the gradient of that input summed up; one that is
cut by rows has its output summed up and the gradient of that output gathered. Which products a collective
belongs to shows in their sizes: those that take or make the whole tensor that it moves.

``behind``: Megatron and nanotron gather the input of a column-parallel layer again beside the product for its
gradient, and sum that gradient up beside the products for weights. ``piecewise``: as Transformer Engine's
user buffers (Megatron's --tp-comm-overlap) and torch's asynchronous tensor parallelism do, all others as
well run piece by piece beside the products that they feed or follow.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np

from foretrain.graph import Operator, OpGraph, TensorSpec
from foretrain.graph.opset import communicates, is_product
from foretrain.step.frameworks import TensorOverlap
from foretrain.step.spans import Column, Index

_HIDDEN_SHARE = 0.8
"""Of a collective that runs beside a product of the same length. Sums that are handed out in four pieces
leave the last one exposed, and those beside products for weights take 2 to 24 of 132 processors (NeMo's
settings of user buffers for H100); what is gathered in a ring by copy engines costs the product next to
nothing."""


@dataclass(slots=True)
class _Stretch:
    """The products between two collectives of tensor parallelism: their operators and device times."""

    products: list[tuple[Operator, float]] = field(default_factory=list)

    def taking(self, elements: int) -> float:
        """Time of those that read a tensor of so many elements."""
        return sum(time for product, time in self.products if _has(product.inputs, elements))

    def making(self, elements: int) -> float:
        """Time of those that write one."""
        return sum(time for product, time in self.products if _has(product.outputs, elements))


def hidden_s(
    graph: OpGraph, calls: Index, device_s: Column, overlap: TensorOverlap, *, backward: bool
) -> Column:
    """Give, of each call, the time that it runs beside products of the same pass."""
    hidden = np.zeros(len(calls))
    if overlap == "none" or (overlap == "behind" and not backward):
        return hidden
    stretches, collectives = [_Stretch()], []
    for position, i in enumerate(calls.tolist()):
        operator = graph.ops[i].operator
        if communicates(operator.name) and operator.overload == "tensor":
            collectives.append((position, operator))
            stretches.append(_Stretch())
        elif is_product(operator.name):
            stretches[-1].products.append((operator, float(device_s[position])))
    moved = [operator for _, operator in collectives]
    for k, (position, _) in enumerate(collectives):
        room = _backward_s(moved, stretches, k, overlap) if backward else _forward_s(moved, stretches, k)
        hidden[position] = _HIDDEN_SHARE * min(float(device_s[position]), room)
    return hidden


def _forward_s(moved: Sequence[Operator], stretches: Sequence[_Stretch], k: int) -> float:
    """Time the products beside collective ``k``: those that take what is gathered, or make what is summed up
    and handed out in parts."""
    elements = _elements(moved[k])
    if moved[k].name == "all_gather":
        return stretches[k + 1].taking(elements)
    return stretches[k].making(elements) if moved[k].name == "reduce_scatter" else 0.0


def _backward_s(
    moved: Sequence[Operator], stretches: Sequence[_Stretch], k: int, overlap: TensorOverlap
) -> float:
    """Time the products beside collective ``k``. Of a layer cut by columns: those for the gradient of its
    input, or those for weights, which take as long. Its input is gathered before or after them. Of a layer
    cut by rows: that for the gradient of its input, half of those that take what is gathered."""
    elements, before, after = _elements(moved[k]), stretches[k], stretches[k + 1]
    if moved[k].name != "all_gather":
        gathered = k > 0 and moved[k - 1].name == "all_gather"
        return before.making(elements) or (stretches[k - 1].making(elements) if gathered else 0.0)
    summed = k + 1 < len(moved) and moved[k + 1].name != "all_gather"
    of_columns = summed and (after.making(elements) or before.making(elements))
    return of_columns or (after.taking(elements) / 2 if overlap == "piecewise" else 0.0)


def _elements(collective: Operator) -> int:
    """Count the elements of the whole tensor that a collective gathers or sums up."""
    return sum(
        spec.numel for spec in (collective.outputs if collective.name == "all_gather" else collective.inputs)
    )


def _has(specs: Iterable[TensorSpec], elements: int) -> bool:
    return any(spec.numel == elements for spec in specs)
