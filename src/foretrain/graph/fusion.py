"""Merges element-wise runs of a graph into single kernels, as a framework or compiler does.

Operators are visited in stream order. One that may be fused joins the last run that takes it: directly behind
it, or past matrix products where both depend on each other and nothing in between does (SwiGLU's activation
waits for the other product).
"""

from __future__ import annotations

import dataclasses
import functools
from collections import defaultdict
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

from foretrain.graph import Buffer, Op, Operator, OpGraph, Phase, TensorSpec
from foretrain.graph.inductor import ADD_ROWS, Space, space_of, sums_of
from foretrain.graph.lowering import AUTOGRAD, lowered
from foretrain.graph.opset import PRODUCTS, Kind, communicates, traits, waits

FUSED = "fused"
"""The name of the operators that this pass makes; the overload is "norm", "chain" or "loss", of a compiler's
kernels "pointwise", "row" or "column"."""
GENERATED = ("pointwise", "row", "column")
"""The overloads of those that a compiler writes; their ``args`` say how many elements they go over
(``total``) and how many results a reduction has (``points``)."""

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
_KEEPS_INPUT = frozenset({"max_pool2d_with_indices_backward"})
"""What asks for an activation that its kernel does not read."""
_AVERAGES: frozenset[Kind] = frozenset({"sum", "vector norm"})
_LOSSES: frozenset[Kind] = frozenset({"loss", "row loss", "pixel loss"})
_LOSS_PARTS = frozenset({"_log_softmax", "logsumexp", "log", "exp"})
"""A forward pass that has one of these, or a loss, behind its last product ends with a loss."""
_REACH, _COMPILER_REACH = 16, 64
"""Launching operators that one may be moved past, by a framework and by a compiler."""
_SMALL = 16
"""A result this much smaller than its run's operands (a norm's statistics) is kept, not computed again."""


@dataclass(frozen=True, slots=True)
class Fusion:
    """Which runs of element-wise operators become one kernel."""

    norms: bool = False
    """Modules of element-wise operators and reductions alone: written-out norms, rotary tables."""
    chains: bool = False
    """Element-wise runs within one module and those inside it: GELU, SiLU times up, rotary embedding,
    dropout and residual add."""
    losses: bool = False
    """All between the last product of the forward and the first of the backward pass; a compiler's where
    the loss is the model's own."""
    across: bool = False
    """As torch.compile does: all that its own kernels compute, by their loops, over module borders."""
    logits: bool = False
    """The compiled model gives its logits back beside its loss."""
    processors: int = 132
    """Multiprocessors of the device that a compiler splits reductions for."""


COMPILED = Fusion(across=True)


@functools.lru_cache(maxsize=64)
def fuse(graph: OpGraph, fusion: Fusion) -> OpGraph:
    """The same step with each run as one operator named "fused"; what only its kernels see is never in
    memory.

    Activations that backward runs alone read are computed again from the operands of their forward run, where
    that saves memory. Runs never cross from one layer of ``graph.stack`` to another; without a stack they do
    so with ``across`` only.
    """
    if fusion == Fusion():
        return graph
    if fusion.across:
        graph = lowered(graph, gives_logits=fusion.logits)
    return _Rebuild(graph, _units(graph, fusion)).graph()


# What may be fused


@dataclass(slots=True, eq=False)
class _Unit:
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
    space: Space | None = None
    """The loop of a compiler's kernel."""

    def conflicts(self, other: _Unit) -> bool:
        """Whether the order of the two matters."""
        return not (
            self.writes.isdisjoint(other.reads | other.writes) and self.reads.isdisjoint(other.writes)
        )

    def takes(self, unit: _Unit) -> bool:
        if (
            self.kind != unit.kind
            or self.block != unit.block
            or (unit.closes and not unit.reads <= self.writes)
        ):
            return False
        if self.kind == "norm":
            return self.root == unit.root
        return self.kind != "chain" or self.is_akin(unit)

    def is_akin(self, unit: _Unit) -> bool:
        """Whether the module of one lies in that of the other."""
        return _inside(self.root, unit.root) or _inside(unit.root, self.root)

    def add(self, unit: _Unit) -> None:
        self.members += unit.members
        self.reads |= unit.reads
        self.writes |= unit.writes
        self.root = min(self.root, unit.root, key=len)


def _inside(path: str, module: str) -> bool:
    return path == module or path.startswith(f"{module}." if module else "")


class _Rules:
    """What each op of a graph may be fused with."""

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

    def unit(self, index: int) -> _Unit:
        op = self._graph.ops[index]
        name, launches = op.operator.name, op.operator.launches
        kind = self._kind(index, op) if launches and op.phase != "optimizer" else ""
        held_up = launches and traits(name).kind not in PRODUCTS | _MERGED
        barrier = waits(name) or (held_up and (communicates(name) or not self._fusion.across))
        space = space_of(op.operator, self._fusion.processors) if kind == "across" else None
        closes = kind == "norm" and op.phase == "backward" and name in ("add", "add_")
        return _Unit(
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
        if _column_sum(op.operator) and not norm:
            return ""  # the gradient of a bias: a kernel of its own, over what the run has written
        if loss:
            return "loss" if fusion.losses else ""
        if norm:
            return "norm" if fusion.norms else ""
        kind = traits(op.operator.name).kind
        return "chain" if fusion.chains and kind in _ELEMENTWISE and kind != "gather" else ""

    def share(self, run: _Unit, unit: _Unit) -> bool:
        """Whether both read the same tensor of full size."""
        assert unit.space is not None
        read = (self._graph.buffers[number].size_bytes for number in run.reads & unit.reads)
        return max(read, default=0) >= unit.space.total

    def is_computed_again(self, run: _Unit) -> bool:
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


def _column_sum(operator: Operator) -> bool:
    """Sums over rows and keeps the last dimension: the gradient of a weight or bias."""
    dims = operator.args.get("dim")
    if operator.name not in ("sum", "mean") or not isinstance(dims, list) or not operator.inputs:
        return False
    rank = len(operator.inputs[0].shape)
    return rank > 1 and bool(dims) and all(d % rank != rank - 1 for d in dims)


def _is_norm_gradient(operator: Operator) -> bool:
    """It sums the gradients of the norm's weight and bias over rows, beside that of its input."""
    of = traits(operator.name)
    return of.kind == "row norm" and of.backward


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
        for path, found in names.items()
        if path not in broken and len(found) > 1 and (path in averaging or {"cos", "sin"} <= found)
    }


def _loss_zone(graph: OpGraph) -> range:
    """The ops from the last forward product to the first backward one, if there is a loss among them."""
    heavy = [i for i, op in enumerate(graph.ops) if op.operator.flops and op.phase != "optimizer"]
    first = max((i for i in heavy if graph.ops[i].phase == "forward"), default=-1) + 1
    last = min((i for i in heavy if graph.ops[i].phase == "backward"), default=len(graph.ops))
    found = {graph.ops[i].operator.name for i in range(first, last)}
    has_loss = found & _LOSS_PARTS or any(traits(name).kind in _LOSSES for name in found)
    return range(first, last) if has_loss else range(0)


# Runs


def _units(graph: OpGraph, fusion: Fusion) -> list[_Unit]:
    """All ops in a new order, those of a run together."""
    rules = _Rules(graph, fusion)
    order: list[_Unit] = []
    for index in range(len(graph.ops)):
        unit = rules.unit(index)
        join = _compiled_in if unit.kind == "across" else _joined
        if not (unit.kind and join(order, unit, rules)):
            order.append(unit)
    return order


def _compiled_in(order: list[_Unit], unit: _Unit, rules: _Rules) -> bool:
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


def _joined(order: list[_Unit], unit: _Unit, rules: _Rules) -> bool:
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


def _moved_in(order: list[_Unit], position: int, unit: _Unit) -> bool:
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


def _near(order: list[_Unit], unit: _Unit, reach: int) -> list[int]:
    """Where the last launching units stand, the latest first, as far as an op may be moved."""
    near: list[int] = []
    for position in range(len(order) - 1, -1, -1):
        other = order[position]
        if other.phase != unit.phase or other.barrier or len(near) > reach:
            break
        if other.launches:
            near.append(position)
    return near


def _allocate_before(order: list[_Unit], position: int) -> None:
    """What the run writes to must be there first; an allocation takes but a shape from what it reads."""
    run = order[position]
    touched = run.reads | run.writes
    behind = order[position + 1 :]
    allocations = [unit for unit in behind if not unit.launches and not unit.writes.isdisjoint(touched)]
    for unit in allocations:
        unit.reads -= run.writes
    order[position:] = [*allocations, run, *(unit for unit in behind if unit not in allocations)]


def _move_to_end(order: list[_Unit], position: int) -> None:
    """The run, and behind it the views of what it writes."""
    run = order.pop(position)
    views = [unit for unit in order[position:] if not unit.launches and not unit.reads.isdisjoint(run.writes)]
    order[position:] = [unit for unit in order[position:] if unit not in views]
    order += [run, *views]


# The new graph


class _Rebuild:
    """Runs become operators, buffers that only they see go, and the others get their new lifetimes."""

    def __init__(self, graph: OpGraph, units: list[_Unit]) -> None:
        self._old, self._units = graph, units
        self._run_of = {index: unit for unit in units if _is_run(unit) for index in unit.members}
        self._runs = list(dict.fromkeys(self._run_of.values()))
        self._readers: dict[int, list[int]] = defaultdict(list)
        self._writers: dict[int, list[int]] = defaultdict(list)
        for index, op in enumerate(graph.ops):
            for buffer in op.writes:
                self._writers[buffer].append(index)
            if op.operator.launches or waits(op.operator.name):
                for buffer in op.reads:
                    self._readers[buffer].append(index)
        self._early: set[int] = set()
        """What the forward pass alone reads, as backward runs compute it again."""
        self._gone = {buffer for run in self._runs for buffer in run.writes if self._is_internal(buffer, run)}
        self._sources: dict[_Unit, dict[int, TensorSpec]] = defaultdict(dict)
        """What backward runs read in order to compute activations again."""
        for run in self._runs:
            if run.phase == "forward":
                self._forget(run)
        self._operators: dict[object, Operator] = {}

    # What is in memory

    def _is_internal(self, number: int, run: _Unit) -> bool:
        buffer, members = self._old.buffers[number], run.members
        if buffer.born not in members or buffer.dies >= len(self._old.ops) or buffer.category == "gradients":
            return False
        readers = self._readers[number]
        touched = [*readers, *self._writers[number]]
        return all(self._run_of.get(index) is run for index in touched) and (
            bool(readers) or buffer.dies <= max(members)
        )

    def _forget(self, run: _Unit) -> None:
        """Drop what the run keeps for backward runs alone, if holding on to its operands takes less."""
        buffers = self._old.buffers
        wanted = {number: readers for number in run.writes if (readers := self._backward_runs(number, run))}
        specs = {
            **_specs(self._old, run.members, inputs=False),
            **_specs(self._old, run.members, inputs=True),
        }
        largest = max((buffers[number].size_bytes for number in run.reads | run.writes), default=0)
        held: set[int] = set()
        for number in sorted(wanted, key=lambda one: (-buffers[one].size_bytes, one)):
            if buffers[number].size_bytes * _SMALL <= largest:
                continue
            until = max(min(reader.members) for reader in wanted[number])
            for sources in (self._sources_of(number, run, wanted), self._operands_of(number, wanted)):
                longer = {
                    one
                    for one in sources - held
                    if one in self._gone or one in self._early or buffers[one].dies < until
                }
                read_forward = any(
                    self._old.ops[index].phase == "forward" and self._run_of.get(index) is not run
                    for index in self._readers[number]
                )
                most = buffers[number].size_bytes / (_SMALL if read_forward else 1)
                if run.space and self._is_far_apart(number, run):
                    continue
                if sources and sum(buffers[one].size_bytes for one in longer) < most:
                    held |= longer
                    self._gone -= longer
                    (self._early if read_forward else self._gone).add(number)
                    for reader in wanted[number]:
                        self._sources[reader].update((one, specs[one]) for one in sorted(sources))
                    break

    @functools.cached_property
    def _first_library_use(self) -> dict[_Unit, int]:
        """The first kernel of a library that reads a result of each run."""
        first: dict[_Unit, int] = {}
        for run in self._runs:
            uses = [index for one in run.writes for index in self._readers[one] if index not in self._run_of]
            first[run] = min(uses, default=len(self._old.ops))
        return first

    def _is_far_apart(self, number: int, run: _Unit) -> bool:
        """Whether a library's kernel lies between this use of an operand and an earlier one: a compiler saves
        what it makes of it then (a stream of residuals)."""
        for index in self._writers[number]:
            for operand in self._old.ops[index].reads:
                if operand in run.writes or self._old.buffers[operand].born < 0:
                    continue
                for reader in self._readers[operand]:
                    earlier = self._run_of.get(reader)
                    used = reader if earlier is None else self._first_library_use[earlier]
                    if reader < index and earlier is not run and used < index:
                        return True
        return False

    def _backward_runs(self, number: int, run: _Unit) -> list[_Unit]:
        """The runs of the backward pass that read an activation of this run; empty if anything else does."""
        buffer = self._old.buffers[number]
        if buffer.category != "activations" or buffer.born not in run.members or number in self._gone:
            return []
        if any(index not in run.members for index in self._writers[number]):
            return []
        if any(self._old.ops[index].operator.name in _KEEPS_INPUT for index in self._readers[number]):
            return []
        readers = [
            self._run_of.get(index)
            for index in self._readers[number]
            if index not in run.members and not (run.space and self._old.ops[index].phase == "forward")
        ]
        found = list(
            dict.fromkeys(reader for reader in readers if reader is not None and reader.phase == "backward")
        )
        return found if all(reader in found for reader in readers) else []

    def _sources_of(self, number: int, run: _Unit, wanted: Collection[int]) -> set[int]:
        """The buffers in memory that an activation can be computed from; none where chance or a later
        write is in the way."""
        lost = self._gone.union(wanted)
        sources: set[int] = set()
        seen, waiting = {number}, [number]
        while waiting:
            for index in self._writers[waiting.pop()]:
                op = self._old.ops[index]
                if traits(op.operator.name).random:
                    return set()
                inner = {one for one in op.reads if one in run.writes and one in lost} - seen
                sources |= {one for one in op.reads if one not in run.writes or one not in lost}
                seen |= inner
                waiting += inner
        changed = any(
            index > min(run.members)
            and self._run_of.get(index) is not run
            and self._old.ops[index].phase != "optimizer"
            for one in sources
            for index in self._writers[one]
        )
        return set() if changed else sources

    def _operands_of(self, number: int, wanted: Collection[int]) -> set[int]:
        """What the one op that writes an activation makes it of; the run may write that out in its stead."""
        writers = [self._old.ops[index] for index in self._writers[number]]
        if len(writers) != 1 or traits(writers[0].operator.name).random:
            return set()
        operands = set(writers[0].reads)
        return (
            operands
            if operands.isdisjoint(wanted) and all(len(self._writers[one]) == 1 for one in operands)
            else set()
        )

    # Ops

    def graph(self) -> OpGraph:
        ops: list[Op] = []
        place: dict[int, int] = {}
        for unit in self._units:
            first = self._old.ops[unit.members[0]]
            if _is_run(unit):
                op = self._fused(unit)
            elif self._is_dropped(unit.members[0], first):
                continue
            elif first.operator.launches:
                op = first
            else:
                reads = tuple(b for b in first.reads if b in unit.reads and b not in self._gone)
                op = dataclasses.replace(first, reads=reads)
            place.update(dict.fromkeys(unit.members, len(ops)))
            ops.append(op)
        buffers = self._lifetimes(ops, place)
        kept = [number for number in range(len(buffers)) if number not in self._gone]
        new = {number: i for i, number in enumerate(kept)}
        return dataclasses.replace(
            self._old,
            ops=tuple(
                dataclasses.replace(
                    op, reads=tuple(new[b] for b in op.reads), writes=tuple(new[b] for b in op.writes)
                )
                for op in ops
            ),
            buffers=tuple(buffers[number] for number in kept),
        )

    @functools.cached_property
    def _spans(self) -> dict[int, list[_Unit]]:
        """For each op that lies between the first and the last member of runs, those runs."""
        spans: dict[int, list[_Unit]] = defaultdict(list)
        for run in self._runs:
            for index in range(min(run.members), max(run.members)):
                spans[index].append(run)
        return spans

    def _is_dropped(self, index: int, op: Op) -> bool:
        """A view of what is no longer in memory, or one that a run's modules take of what the run touches."""
        if op.operator.launches or waits(op.operator.name) or op.writes:
            return False
        if not self._gone.isdisjoint(op.reads):
            return True
        for run in self._spans.get(index, ()):
            layers = {self._old.ops[member].layer for member in run.members}
            if (op.layer in layers or run.kind == "across") and run.reads.union(run.writes).issuperset(
                op.reads
            ):
                return True
        return False

    def _fused(self, run: _Unit) -> Op:
        """One operator for a run: reads what comes from outside, writes what is used outside."""
        members = [self._old.ops[index] for index in run.members]
        inputs = {**_specs(self._old, run.members, inputs=True), **self._sources.get(run, {})}
        lost = self._gone | self._early if run.phase == "backward" else self._gone
        inputs = {number: spec for number, spec in inputs.items() if number not in lost}
        outputs = {
            n: spec for n, spec in _specs(self._old, run.members, inputs=False).items() if n not in self._gone
        }
        traffic = _traffic(self._old, run.members)
        read = sum(traffic.get(number, spec.size_bytes) for number, spec in inputs.items())
        held = self._old.buffers
        written = sum(min(spec.size_bytes, held[number].size_bytes) for number, spec in outputs.items())
        names = [op.operator.name for op in members]
        sums = sum(_column_sum(op.operator) or _is_norm_gradient(op.operator) for op in members)
        fields = (
            FUSED,
            run.kind if run.space is None else run.space.order or "pointwise",
            tuple(inputs.values()),
            tuple(outputs.values()),
            {"ops": names, "kernels": _kernels(run, members, sums), **_loop(run)},
            sum(op.operator.flops for op in members),
            min(read, sum(op.operator.bytes_read for op in members)),
            min(written, sum(op.operator.bytes_written for op in members)),
            True,
        )
        operator = self._operators.setdefault((fields[:4], tuple(names), fields[5:]), Operator(*fields))
        layer = min((op.layer for op in members), key=len) if run.kind == "chain" else members[0].layer
        return Op(operator, run.phase, layer, tuple(inputs), tuple(outputs))

    # Lifetimes

    def _lifetimes(self, ops: Sequence[Op], place: dict[int, int]) -> list[Buffer]:
        uses: dict[int, list[int]] = defaultdict(list)
        for index, op in enumerate(ops):
            for number in {*op.reads, *op.writes}:
                uses[number].append(index)
        done = _done(self._old, self._units, place)
        hoisted = self._ends_in_backward_run()
        resources = {number for sources in self._sources.values() for number in sources}
        result = []
        for number, buffer in enumerate(self._old.buffers):
            born = -1 if buffer.born < 0 else place.get(buffer.born, done[buffer.born])
            last = max(uses.get(number, ()), default=born)
            dies = (
                len(ops)
                if buffer.dies >= len(self._old.ops)
                else last
                if number in hoisted or number in self._early
                else max(last, done[max(buffer.dies, 0)])
            )
            held = number in resources and buffer.category == "temporaries" and born >= 0
            result.append(
                dataclasses.replace(
                    buffer,
                    born=born,
                    dies=max(born, dies),
                    category="activations"
                    if held
                    else "temporaries"
                    if number in self._early
                    else buffer.category,
                )
            )
        return result

    def _ends_in_backward_run(self) -> set[int]:
        """Buffers that autograd lets go of behind an op that is now part of a run."""
        last: dict[int, int] = {}
        for index, op in enumerate(self._old.ops):
            last.update(dict.fromkeys((*op.reads, *op.writes), index))
        return {
            number
            for number, index in last.items()
            if index in self._run_of and self._run_of[index].phase == "backward"
        }


def _done(graph: OpGraph, units: Sequence[_Unit], place: dict[int, int]) -> list[int]:
    """For each old op, the last of the new ones that has run when it has."""
    reached = [-1] * len(graph.ops)
    for unit in units:
        last = max(unit.members)
        reached[last] = max(reached[last], place.get(last, -1))
    for index in range(1, len(reached)):
        reached[index] = max(reached[index], reached[index - 1])
    return reached


def _is_run(unit: _Unit) -> bool:
    """A compiler writes its own kernel for a single op as well."""
    return len(unit.members) > 1 or unit.space is not None


def _loop(run: _Unit) -> dict[str, int]:
    if run.space is None:
        return {}
    loop = {"total": run.space.total, "points": run.space.points}
    return {**loop, "sums": run.space.sums} if run.space.order == "row" and run.space.sums else loop


def _kernels(run: _Unit, members: Sequence[Op], column_sums: int) -> int:
    """A framework's run that also sums columns does so in a second kernel, from partial sums; a compiler's
    has one for each sum and further stage of its reduction, and one that zeroes what rows are added to."""
    if run.space is None:
        return 2 if column_sums else 1
    operators = [op.operator for op in members]
    zeroes = any(operator.name == ADD_ROWS for operator in operators)
    if run.space.order == "row" and run.space.sums:
        return 1 + run.space.sums + zeroes
    return 1 + (run.space.stages - 1) * max(1, sum(map(sums_of, operators))) + zeroes


# Tensors and their buffers


def _specs(graph: OpGraph, members: Sequence[int], *, inputs: bool) -> dict[int, TensorSpec]:
    """The largest tensor by buffer, of those read from outside or of all that are written."""
    found: dict[int, TensorSpec] = {}
    for number, spec in _outside(graph, members) if inputs else _results(graph, members):
        if number not in found or spec.size_bytes > found[number].size_bytes:
            found[number] = spec
    return found


def _traffic(graph: OpGraph, members: Sequence[int]) -> dict[int, int]:
    """Bytes that a run reads of each buffer from outside: its tensors (halves, say), at most all of it."""
    total: dict[int, int] = defaultdict(int)
    for number, spec in _outside(graph, members):
        total[number] = min(total[number] + spec.size_bytes, graph.buffers[number].size_bytes)
    return total


def _outside(graph: OpGraph, members: Sequence[int]) -> Iterator[tuple[int, TensorSpec]]:
    written: set[int] = set()
    for index in members:
        op = graph.ops[index]
        yield from (
            (number, spec)
            for number, spec in _pairs(op.reads, op.operator.inputs, graph.buffers)
            if number not in written
        )
        written.update(op.writes)


def _results(graph: OpGraph, members: Sequence[int]) -> Iterator[tuple[int, TensorSpec]]:
    for index in members:
        op = graph.ops[index]
        yield from _pairs(op.writes, op.operator.outputs, graph.buffers)


def _pairs(
    numbers: Sequence[int], specs: Sequence[TensorSpec], buffers: Sequence[Buffer]
) -> Iterator[tuple[int, TensorSpec]]:
    """Tensors with their buffers, which an op names once each, in order: a tensor that does not fit the
    next one is a view of the last."""
    position = -1
    for i, spec in enumerate(specs):
        ahead = len(numbers) - 1 - position
        if ahead and (
            len(specs) - i <= ahead
            or position < 0
            or spec.size_bytes <= buffers[numbers[position + 1]].size_bytes
        ):
            position += 1
        if position >= 0:
            yield numbers[position], spec
