"""Rebuilds a graph with its runs as operators: what is in memory, what is computed again, how long buffers
live."""

from __future__ import annotations

import dataclasses
import functools
from collections import defaultdict
from collections.abc import Collection, Iterator, Sequence

from foretrain.graph import Buffer, Op, Operator, OpGraph, TensorSpec
from foretrain.graph.inductor import ADD_ROWS, sums_of
from foretrain.graph.opset import traits, waits
from foretrain.graph.runs import FUSED, Unit, is_column_sum, is_norm_gradient

_KEEPS_INPUT = frozenset({"max_pool2d_with_indices_backward"})
"""What asks for an activation that its kernel does not read."""
_SMALL = 16
"""A result this much smaller than its run's operands (a norm's statistics) is kept, not computed again."""


class Rebuild:
    """Runs become operators, buffers that only they see go, and the others get their new lifetimes."""

    def __init__(self, graph: OpGraph, units: list[Unit]) -> None:
        self._old, self._units = graph, units
        self._run_of = {index: unit for unit in units if unit.is_run for index in unit.members}
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
        self._sources: dict[Unit, dict[int, TensorSpec]] = defaultdict(dict)
        """What backward runs read in order to compute activations again."""
        for run in self._runs:
            if run.phase == "forward":
                self._forget(run)
        self._operators: dict[object, Operator] = {}

    # What is in memory

    def _is_internal(self, number: int, run: Unit) -> bool:
        buffer, members = self._old.buffers[number], run.members
        if buffer.born not in members or buffer.dies >= len(self._old.ops) or buffer.category == "gradients":
            return False
        readers = self._readers[number]
        touched = [*readers, *self._writers[number]]
        return all(self._run_of.get(index) is run for index in touched) and (
            bool(readers) or buffer.dies <= max(members)
        )

    def _forget(self, run: Unit) -> None:
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
    def _first_library_use(self) -> dict[Unit, int]:
        """The first kernel of a library that reads a result of each run."""
        first: dict[Unit, int] = {}
        for run in self._runs:
            uses = [index for one in run.writes for index in self._readers[one] if index not in self._run_of]
            first[run] = min(uses, default=len(self._old.ops))
        return first

    def _is_far_apart(self, number: int, run: Unit) -> bool:
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

    def _backward_runs(self, number: int, run: Unit) -> list[Unit]:
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
        runs = list(
            dict.fromkeys(reader for reader in readers if reader is not None and reader.phase == "backward")
        )
        return runs if all(reader in runs for reader in readers) else []

    def _sources_of(self, number: int, run: Unit, wanted: Collection[int]) -> set[int]:
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
        """Find what the one op that writes an activation makes it of; the run may write that out in its
        stead."""
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
        hooks = 0  # of ops that are dropped
        for unit in self._units:
            first = self._old.ops[unit.members[0]]
            if unit.is_run:
                op = self._fused(unit)
            elif self._is_dropped(unit.members[0], first):
                hooks += first.hooks
                continue
            elif first.operator.launches:
                op = first
            else:
                reads = tuple(b for b in first.reads if b in unit.reads and b not in self._gone)
                op = dataclasses.replace(first, reads=reads)
            place.update(dict.fromkeys(unit.members, len(ops)))
            ops.append(dataclasses.replace(op, hooks=op.hooks + hooks) if hooks else op)
            hooks = 0
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
    def _spans(self) -> dict[int, list[Unit]]:
        """List, for each op that lies between the first and the last member of runs, those runs."""
        spans: dict[int, list[Unit]] = defaultdict(list)
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

    def _fused(self, run: Unit) -> Op:
        """Make one operator of a run: it reads what comes from outside and writes what is used outside."""
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
        sums = sum(is_column_sum(op.operator) or is_norm_gradient(op.operator) for op in members)
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
        recomputed, hooks = all(op.recomputed for op in members), sum(op.hooks for op in members)
        return Op(operator, run.phase, layer, tuple(inputs), tuple(outputs), recomputed, hooks)

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


def _done(graph: OpGraph, units: Sequence[Unit], place: dict[int, int]) -> list[int]:
    """Find, for each old op, the last of the new ones that has run when it has."""
    reached = [-1] * len(graph.ops)
    for unit in units:
        last = max(unit.members)
        reached[last] = max(reached[last], place.get(last, -1))
    for index in range(1, len(reached)):
        reached[index] = max(reached[index], reached[index - 1])
    return reached


def _loop(run: Unit) -> dict[str, int]:
    if run.space is None:
        return {}
    loop = {"total": run.space.total, "points": run.space.points}
    return {**loop, "sums": run.space.sums} if run.space.order == "row" and run.space.sums else loop


def _kernels(run: Unit, members: Sequence[Op], column_sums: int) -> int:
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
    largest: dict[int, TensorSpec] = {}
    for number, spec in _outside(graph, members) if inputs else _results(graph, members):
        if number not in largest or spec.size_bytes > largest[number].size_bytes:
            largest[number] = spec
    return largest


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
