"""Collects the distinct operators of graphs for measuring, most valuable first, to replay on any machine."""

from __future__ import annotations

import dataclasses
import json
import math
import random
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from foretrain.costs.measured import matmul_precision, operator_key
from foretrain.errors import InputError, first_line
from foretrain.files import read_lines, write_atomically
from foretrain.graph import PHASES, OpGraph, TensorSpec
from foretrain.graph.ir import ITEM_BYTES
from foretrain.graph.runs import FUSED

_SAME = ("name", "overload", "inputs", "args", "flops", "bytes")
"""Fields that an instance takes from its operator."""
NEEDED = ("name", "overload", "inputs", "args", "phase")
"""Fields without which an operator cannot be replayed."""
_FLOPS_PER_BYTE = 100
"""Arithmetic that is worth as much as a byte moved, when operators are ordered by size."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Instance:
    """One operator to measure: how to call it, where it was seen, and what knowing it is worth."""

    name: str
    overload: str
    inputs: tuple[TensorSpec, ...]
    args: Mapping[str, Any]
    phase: str
    precision: str = ""
    """"tf32" where matrix products may round their inputs; otherwise the dtypes say it."""
    flops: int = 0
    bytes: int = 0
    uses: int = 1
    """How often it occurs in the graphs it was collected from."""

    @property
    def key(self) -> str:
        """A hash of what is called, for looking measurements up."""
        return operator_key(self.name, self.inputs, self.args, self.precision)

    def to_dict(self) -> dict[str, Any]:
        inputs = [[spec.shape, spec.dtype, spec.strides] for spec in self.inputs]
        fields = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        return {**fields, "inputs": inputs, "args": dict(self.args)}

    @classmethod
    def read(cls, data: Mapping[str, Any]) -> Instance:
        """An operator from its line; a ``ValueError`` says what of it is wrong."""
        known = {field.name for field in dataclasses.fields(cls)}
        fields = {name: value for name, value in data.items() if name in known}
        for name in ("name", "overload", "phase", "precision"):
            if not isinstance(fields.get(name, ""), str):
                raise ValueError(f"{name}: {fields[name]!r} is not a text")
        for name in ("flops", "bytes", "uses"):
            if not isinstance(fields.get(name, 0), int | float) or not 0 <= fields.get(name, 0) < math.inf:
                raise ValueError(f"{name}: {fields[name]!r} is not a number of at least 0")
        if not isinstance(fields["args"], Mapping):
            raise ValueError(f"args: {fields['args']!r} is not a table of keys and values")
        if fields["phase"] not in PHASES:
            raise ValueError(f"phase: {fields['phase']!r} is not one of {', '.join(PHASES)}")
        if not isinstance(fields["inputs"], list):
            raise ValueError(f"inputs: {fields['inputs']!r} is not a list")
        return cls(**{**fields, "inputs": tuple(map(_input, fields["inputs"]))})


def _input(row: Any) -> TensorSpec:
    """A tensor as [shape, dtype, strides]."""

    def whole(values: Any) -> bool:
        return isinstance(values, list | tuple) and all(
            isinstance(value, int) and value >= 0 for value in values
        )

    if not isinstance(row, list | tuple) or len(row) != 3 or not whole(row[0]) or row[1] not in ITEM_BYTES:
        raise ValueError(
            f"inputs: {row!r} is not [shape, dtype, strides] with whole numbers and a known dtype"
        )
    if row[2] is not None and not (whole(row[2]) and len(row[2]) == len(row[0])):
        raise ValueError(f"inputs: strides {row[2]!r} are not {len(row[0])} whole numbers")
    return TensorSpec(tuple(row[0]), row[1], None if row[2] is None else tuple(row[2]))


FIELDS = tuple(field.name for field in dataclasses.fields(Instance))


def collect(graphs: Iterable[tuple[OpGraph, str]]) -> list[Instance]:
    """The distinct launching operators of graphs (each with the precision of its job)."""
    collected: dict[str, Instance] = {}
    for graph, precision in graphs:
        phases = {id(op.operator): op.phase for op in reversed(graph.ops)}
        counts = Counter(id(op.operator) for op in graph.ops)
        for operator in graph.operators:
            if operator.launches and operator.name != FUSED:
                instance = Instance(
                    **{name: getattr(operator, name) for name in _SAME},
                    phase=phases[id(operator)],
                    precision=matmul_precision(operator, precision),
                    uses=counts[id(operator)],
                )
                if (known := collected.get(instance.key)) is not None:
                    instance = dataclasses.replace(known, uses=known.uses + instance.uses)
                collected[instance.key] = instance
    return list(collected.values())


def by_value(instances: Iterable[Instance]) -> list[Instance]:
    """Kinds of operators take turns, the most used and largest first: useful however early it is cut off."""
    kinds: dict[str, list[Instance]] = {}
    for instance in instances:
        kinds.setdefault(instance.name, []).append(instance)
    shuffle = random.Random(0)
    placed = []
    for members in kinds.values():
        shuffle.shuffle(members)
        members.sort(key=lambda member: -member.uses * (member.bytes + member.flops / _FLOPS_PER_BYTE))
        step = 1 / len(members)
        placed += [((rank + 0.5) * step, member) for rank, member in enumerate(members)]
    return [member for _, member in sorted(placed, key=lambda item: item[0])]


def save_instances(path: Path, instances: Iterable[Instance]) -> None:
    facts = {"source": "foretrain measure ops --collect-only"}
    lines = (json.dumps({**instance.to_dict(), **facts}, separators=(",", ":")) for instance in instances)
    write_atomically(path, "".join(f"{line}\n" for line in lines))


def load_instances(path: Path) -> Iterator[Instance]:
    """The operators of a list, in its order."""
    for number, data in read_lines(path):
        try:
            yield Instance.read(data)
        except (KeyError, TypeError, ValueError) as error:
            needs = ", ".join(name for name in NEEDED if not isinstance(data, Mapping) or name not in data)
            why = f"it lacks {needs}" if needs else first_line(error)
            raise InputError(f"{path}:{number}: not an operator that can be replayed: {why}") from error
