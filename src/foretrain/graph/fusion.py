"""Merges element-wise runs of a graph into single kernels, as a framework or compiler does.

Operators are visited in stream order. One that may be fused joins the last run that takes it: directly behind
it, or past matrix products where both depend on each other and nothing in between does (SwiGLU's activation
waits for the other product).
"""

from __future__ import annotations

import dataclasses
import functools
from collections import defaultdict
from collections.abc import Collection
from dataclasses import dataclass

from foretrain.graph import Op, Operator, OpGraph
from foretrain.graph.inductor import ADD_ROWS, space_of
from foretrain.graph.lowering import AUTOGRAD, lowered
from foretrain.graph.opset import PRODUCTS, Kind, communicates, traits, waits
from foretrain.graph.rebuilding import Rebuild
from foretrain.graph.runs import Unit, is_column_sum

_REDUCTIONS: frozenset[Kind] = frozenset(
    {"sum", "reduction", "vector norm", "row norm", "softmax", "row loss"}
)
"""Kinds that work over the rows of a tensor, as one kernel with what is element-wise around them."""
_ELEMENTWISE: frozenset[Kind] = frozenset(
    {"activation", "pointwise", "loss", "fill", "copy", "gather", "fused", "view"}
)
_MERGED = _ELEMENTWISE | _REDUCTIONS
_WRITTEN: frozenset[Kind] = _MERGED | {"embedding", "pooling", "resampling"}
"""Kinds that a compiler writes kernels for itself."""
_AVERAGES: frozenset[Kind] = frozenset({"sum", "vector norm"})
_LOSSES: frozenset[Kind] = frozenset({"loss", "row loss", "pixel loss"})
_LOSS_PARTS = frozenset({"_log_softmax", "logsumexp", "log", "exp"})
"""A forward pass that has one of these, or a loss, behind its last product ends with a loss."""
_REACH, _COMPILER_REACH = 16, 64
"""Launching operators that one may be moved past, by a framework and by a compiler."""


@dataclass(frozen=True, slots=True)
class Fusion:
    """Says which runs of element-wise operators become one kernel."""

    norms: bool = False
    """Modules of element-wise operators and reductions alone: written-out norms, rotary tables."""
    chains: bool = False
    """Element-wise runs within one module and those inside it: GELU, SiLU times up, rotary embedding,
    dropout and residual add."""
    losses: bool = False
    """All between the last product of the forward and the first of the backward pass; a compiler's where
    the loss is the model's own, which a graph's ``own_loss`` says too."""
    across: bool = False
    """As torch.compile does: all that its own kernels compute, by their loops, over module borders."""
    logits: bool = False
    """The compiled model gives its logits back beside its loss."""
    processors: int = 132
    """Multiprocessors of the device that a compiler splits reductions for."""


COMPILED = Fusion(across=True)


@functools.lru_cache(maxsize=64)
def fuse(graph: OpGraph, fusion: Fusion) -> OpGraph:
    """Rewrite a step with each run as one operator named "fused"; what only its kernels see is never in
    memory.

    Activations that backward runs alone read are computed again from the operands of their forward run, where
    that saves memory. Runs never cross from one layer of ``graph.stack`` to another; without a stack they do
    so with ``across`` only.
    """
    if fusion == Fusion():
        return graph
    if fusion.across:
        fusion = dataclasses.replace(fusion, losses=fusion.losses or bool(graph.info.get("own_loss")))
        graph = lowered(graph, gives_logits=fusion.logits)
    return Rebuild(graph, _units(graph, fusion)).graph()


# What may be fused


class _Rules:
    """Says what each op of a graph may be fused with."""

    def __init__(self, graph: OpGraph, fusion: Fusion) -> None:
        self._graph, self._fusion = graph, fusion
        self._norms = _norm_modules(graph)
        self._loss = _loss_zone(graph)
        self.libraries_read = {
            number
            for op in graph.ops
            if op.operator.launches and not self._is_fusible(op.operator)
            for number in op.reads
        }
        """What kernels of libraries read, so that it must be in memory."""

    def unit(self, index: int) -> Unit:
        op = self._graph.ops[index]
        name, launches = op.operator.name, op.operator.launches
        kind = self._kind(index, op) if launches and op.phase != "optimizer" else ""
        held_up = launches and traits(name).kind not in PRODUCTS | _MERGED
        barrier = waits(name) or (held_up and (communicates(name) or not self._fusion.across))
        space = space_of(op.operator, self._fusion.processors) if kind == "across" else None
        closes = kind == "norm" and op.phase == "backward" and name in ("add", "add_")
        return Unit(
            [index],
            kind,
            op.layer,
            self._block(op.layer),
            op.phase,
            launches,
            barrier,
            set(op.reads),
            set(op.writes),
            closes,
            space,
        )

    def _kind(self, index: int, op: Op) -> str:
        fusion = self._fusion
        norm, loss = op.layer in self._norms, index in self._loss
        gradients = [buffer for b in op.reads if (buffer := self._graph.buffers[b]).category == "gradients"]
        if not self._is_fusible(op.operator) or any(
            buffer.born < 0 or not fusion.across for buffer in gradients
        ):
            return ""
        if fusion.across:
            return "" if loss and not fusion.losses else "across"
        if is_column_sum(op.operator) and not norm:
            return ""  # the gradient of a bias: a kernel of its own, over what the run has written
        if loss:
            return "loss" if fusion.losses else ""
        if norm:
            return "norm" if fusion.norms else ""
        kind = traits(op.operator.name).kind
        return "chain" if fusion.chains and kind in _ELEMENTWISE and kind != "gather" else ""

    def share(self, run: Unit, unit: Unit) -> bool:
        """Whether both read the same tensor of full size."""
        assert unit.space is not None
        read = (self._graph.buffers[number].size_bytes for number in run.reads & unit.reads)
        return max(read, default=0) >= unit.space.total

    def is_computed_again(self, run: Unit) -> bool:
        """Whether a compiler computes the results of an element-wise run wherever they are used, as no other
        kernel needs them in memory."""
        held = (self._graph.buffers[number] for number in run.writes)
        return (
            run.space is not None
            and not run.space.order
            and run.writes.isdisjoint(self.libraries_read)
            and all(buffer.category == "temporaries" for buffer in held)
        )

    def _is_fusible(self, operator: Operator) -> bool:
        return _fusible(operator, _WRITTEN if self._fusion.across else _MERGED)

    def _block(self, path: str) -> str:
        stack = self._graph.stack
        if stack is not None:
            return str(stack.layer_of(path))
        if self._fusion.across:
            return ""
        parts = path.split(".")
        numbers = [i for i, part in enumerate(parts) if part.isdigit()]
        return ".".join(parts[: numbers[0] + 1]) if numbers else ""


def _fusible(operator: Operator, kinds: Collection[Kind] = _MERGED) -> bool:
    of = traits(operator.name)
    written = of.kind in kinds or (operator.name == ADD_ROWS and len(kinds) > len(_MERGED))
    return operator.launches and written and not of.multi_tensor and operator.overload != AUTOGRAD


def _norm_modules(graph: OpGraph) -> set[str]:
    """Modules that average and scale, or make sines and cosines, and do nothing else."""
    names: dict[str, set[str]] = defaultdict(set)
    averaging, broken = set(), {""}
    for op in graph.ops:
        if op.phase == "forward" and op.operator.launches:
            names[op.layer].add(op.operator.name)
            if traits(op.operator.name).kind in _AVERAGES:
                averaging.add(op.layer)
            if not _fusible(op.operator):
                broken.add(op.layer)
    return {
        path
        for path, own_names in names.items()
        if path not in broken and len(own_names) > 1 and (path in averaging or {"cos", "sin"} <= own_names)
    }


def _loss_zone(graph: OpGraph) -> range:
    """The ops from the last forward product to the first backward one, if there is a loss among them."""
    heavy = [i for i, op in enumerate(graph.ops) if op.operator.flops and op.phase != "optimizer"]
    first = max((i for i in heavy if graph.ops[i].phase == "forward"), default=-1) + 1
    last = min((i for i in heavy if graph.ops[i].phase == "backward"), default=len(graph.ops))
    between = {graph.ops[i].operator.name for i in range(first, last)}
    has_loss = between & _LOSS_PARTS or any(traits(name).kind in _LOSSES for name in between)
    return range(first, last) if has_loss else range(0)


# Runs


def _units(graph: OpGraph, fusion: Fusion) -> list[Unit]:
    """Put all ops into a new order, those of a run together."""
    rules = _Rules(graph, fusion)
    order: list[Unit] = []
    for index in range(len(graph.ops)):
        unit = rules.unit(index)
        join = _compiled_in if unit.kind == "across" else _joined
        if not (unit.kind and join(order, unit, rules)):
            order.append(unit)
    return order


def _compiled_in(order: list[Unit], unit: Unit, rules: _Rules) -> bool:
    """Add a loop to the last kernel with which it shares data, if one kernel can do both.

    A reduction over columns does not take what a library's kernel reads too: that is in memory, and other
    kernels read it in another order.
    """
    assert unit.space is not None
    near = _near(order, unit, _COMPILER_REACH)
    for position in near:
        run = order[position]
        given = run.writes & unit.reads
        if not (given or rules.share(run, unit)) or not run.takes(unit) or run.space is None:
            continue
        if unit.space.order == "column" and given & rules.libraries_read:
            continue
        space = run.space.with_(unit.space)
        if space is None and given and rules.is_computed_again(run):
            space = unit.space
        if space is not None and _moved_in(order, position, unit):
            run.space = space
            return True
    return False


def _joined(order: list[Unit], unit: Unit, rules: _Rules) -> bool:
    """Add an op to the last run that it depends on, else to one that it directly follows."""
    near = _near(order, unit, _REACH)
    linked = [position for position in near if order[position].writes & unit.reads]
    for position in [*linked, *near[:1]]:
        run = order[position]
        passed = [other for other in order[position + 1 :] if other.launches]
        if not run.takes(unit) or (position not in linked and (passed or not run.is_akin(unit))):
            continue
        if _moved_in(order, position, unit):
            return True
    return False


def _moved_in(order: list[Unit], position: int, unit: Unit) -> bool:
    """Add an op to a run where the order of what lies between them allows it: early, or the run late."""
    run = order[position]
    passed = [other for other in order[position + 1 :] if other.launches]
    early = not any(unit.conflicts(other) for other in passed)
    if not early and any(run.conflicts(other) for other in passed):
        return False
    run.add(unit)
    if early:
        _allocate_before(order, position)
    else:
        _move_to_end(order, position)
    return True


def _near(order: list[Unit], unit: Unit, reach: int) -> list[int]:
    """Find the last launching units, the latest first, as far as an op may be moved."""
    near: list[int] = []
    for position in range(len(order) - 1, -1, -1):
        other = order[position]
        if other.phase != unit.phase or other.barrier or len(near) > reach:
            break
        if other.launches:
            near.append(position)
    return near


def _allocate_before(order: list[Unit], position: int) -> None:
    """Move allocations that a run writes to before it; an allocation takes but a shape from what it reads."""
    run = order[position]
    touched = run.reads | run.writes
    behind = order[position + 1 :]
    allocations = [unit for unit in behind if not unit.launches and not unit.writes.isdisjoint(touched)]
    later = {number for unit in (run, *behind) for number in unit.writes}
    for unit in allocations:
        unit.reads -= later
    order[position:] = [*allocations, run, *(unit for unit in behind if unit not in allocations)]


def _move_to_end(order: list[Unit], position: int) -> None:
    """The run, and behind it the views of what it writes; an allocation of the same shape stays."""
    run = order.pop(position)
    behind = [unit for unit in order[position:] if not unit.launches]
    views = [unit for unit in behind if not unit.writes and not unit.reads.isdisjoint(run.writes)]
    for unit in behind:
        unit.reads -= run.writes if unit.writes else set()
    order[position:] = [unit for unit in order[position:] if unit not in views]
    order += [run, *views]
