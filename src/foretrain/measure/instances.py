"""Graphs in; the distinct operators worth measuring out, most valuable first, as lines that another machine can replay."""

from __future__ import annotations

import dataclasses
import json
import random
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from foretrain.costs.measured import matmul_precision, operator_key
from foretrain.files import write_atomically
from foretrain.graph import OpGraph, TensorSpec
from foretrain.graph.fusion import FUSED
from foretrain.job import read_lines


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
        return {
            **{field.name: getattr(self, field.name) for field in dataclasses.fields(self)},
            "inputs": inputs,
            "args": dict(self.args),
        }

    @classmethod
    def read(cls, data: Mapping[str, Any]) -> Instance:
        inputs = tuple(
            TensorSpec(tuple(shape), dtype, None if strides is None else tuple(strides))
            for shape, dtype, strides in data["inputs"]
        )
        rest = {
            field.name: data[field.name]
            for field in dataclasses.fields(cls)
            if field.name in data and field.name != "inputs"
        }
        return cls(inputs=inputs, **rest)


def collect(graphs: Iterable[tuple[OpGraph, str]]) -> list[Instance]:
    """The distinct launching operators of graphs (each with the precision of its job)."""
    found: dict[str, Instance] = {}
    for graph, precision in graphs:
        phases = {id(op.operator): op.phase for op in reversed(graph.ops)}
        counts: dict[int, int] = {}
        for op in graph.ops:
            counts[id(op.operator)] = counts.get(id(op.operator), 0) + 1
        for operator in graph.operators:
            if operator.launches and operator.name != FUSED:
                instance = Instance(
                    name=operator.name, overload=operator.overload, inputs=operator.inputs, args=operator.args, phase=phases[id(operator)],
                    precision=matmul_precision(operator, precision), flops=operator.flops, bytes=operator.bytes, uses=counts[id(operator)],
                )  # fmt: skip
                known = found.get(instance.key)
                found[instance.key] = (
                    instance if known is None else dataclasses.replace(known, uses=known.uses + instance.uses)
                )
    return list(found.values())


def by_value(instances: Iterable[Instance], seed: int = 0) -> list[Instance]:
    """So ordered that a run cut off early is still useful: kinds of operators take turns, each with its most used and largest first."""
    kinds: dict[str, list[Instance]] = {}
    for instance in instances:
        kinds.setdefault(instance.name, []).append(instance)
    shuffle = random.Random(seed)
    placed = []
    for members in kinds.values():
        shuffle.shuffle(members)
        members.sort(key=lambda one: -one.uses * (one.bytes + one.flops / 100))
        step = 1 / len(members)
        placed += [((rank + 0.5) * step, member) for rank, member in enumerate(members)]
    return [member for _, member in sorted(placed, key=lambda item: item[0])]


def save_instances(path: Path, instances: Iterable[Instance]) -> None:
    write_atomically(
        path, "".join(json.dumps(instance.to_dict(), separators=(",", ":")) + "\n" for instance in instances)
    )


def load_instances(path: Path) -> Iterator[Instance]:
    for _, data in read_lines(path):
        yield Instance.read(data)
