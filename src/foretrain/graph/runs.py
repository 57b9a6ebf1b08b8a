"""Names a run of operators that become one kernel, and what stays by itself."""

from __future__ import annotations

from dataclasses import dataclass

from foretrain.graph import Operator, Phase
from foretrain.graph.inductor import LoopSpace
from foretrain.graph.opset import traits

FUSED = "fused"
"""The name of the operators that this pass makes; the overload is "norm", "chain" or "loss", of a compiler's
kernels "pointwise", "row" or "column"."""
GENERATED = ("pointwise", "row", "column")
"""The overloads of those that a compiler writes; their ``args`` say how many elements they go over
(``total``) and how many results a reduction has (``points``)."""


@dataclass(slots=True, eq=False)
class Unit:
    """One op, or a run of them, at one place in the stream."""

    members: list[int]
    kind: str
    """"norm", "chain", "loss" or "across"; empty for an op that stays by itself."""
    root: str
    """The module that all members lie in."""
    block: str
    """The repeated layer that they belong to."""
    phase: Phase
    launches: bool
    barrier: bool
    reads: set[int]
    writes: set[int]
    closes: bool = False
    """Ends a run unless all it reads comes from it: sums of gradients that autograd makes behind a norm."""
    space: LoopSpace | None = None
    """The loop of a compiler's kernel."""

    def conflicts(self, other: Unit) -> bool:
        """Whether the order of the two matters."""
        return not (
            self.writes.isdisjoint(other.reads | other.writes) and self.reads.isdisjoint(other.writes)
        )

    def takes(self, unit: Unit) -> bool:
        if (
            self.kind != unit.kind
            or self.block != unit.block
            or (unit.closes and not unit.reads <= self.writes)
        ):
            return False
        if self.kind == "norm":
            return self.root == unit.root
        return self.kind != "chain" or self.is_akin(unit)

    def is_akin(self, unit: Unit) -> bool:
        """Whether the module of one lies in that of the other."""
        return is_inside(self.root, unit.root) or is_inside(unit.root, self.root)

    def add(self, unit: Unit) -> None:
        self.members += unit.members
        self.reads |= unit.reads
        self.writes |= unit.writes
        self.root = min(self.root, unit.root, key=len)

    @property
    def is_run(self) -> bool:
        """A compiler writes its own kernel for a single op as well."""
        return len(self.members) > 1 or self.space is not None


def is_inside(path: str, module: str) -> bool:
    return path == module or path.startswith(f"{module}." if module else "")


def is_column_sum(operator: Operator) -> bool:
    """Sums over rows and keeps the last dimension: the gradient of a weight or bias."""
    dims = operator.args.get("dim")
    if operator.name not in ("sum", "mean") or not isinstance(dims, list) or not operator.inputs:
        return False
    rank = len(operator.inputs[0].shape)
    return rank > 1 and bool(dims) and all(d % rank != rank - 1 for d in dims)


def is_norm_gradient(operator: Operator) -> bool:
    """Tell whether an operator sums the gradients of a norm's weight and bias over rows, beside that of its
    input."""
    of = traits(operator.name)
    return of.kind == "row norm" and of.backward
