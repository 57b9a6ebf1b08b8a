"""Derives the graph of any batch size from two traces of one model, without torch.

Where the batch changes, every number of a graph (a dimension, a stride, an argument, FLOPs, bytes, the size
of a buffer) lies on a line ``constant + per_sample * batch`` with whole coefficients, and nothing else
changes. Two traces give the lines. A curve fits two points as well; it is told from a line by what makes it:
a product grows with the square of the batch only where a tensor has two dimensions that grow, or FLOPs are
off their line.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from foretrain.graph.flops import flops
from foretrain.graph.ir import Operator, OpGraph, TensorSpec
from foretrain.graph.storage import (
    assemble,
    operator_from,
    paused_collector,
    read_compressed,
    to_json,
    write_compressed,
)

FORMAT = "foretrain-batches/1"

LEAST_BATCH = 2
"""Strides of a dimension of one element mean nothing: one sample may take another way through a model."""

_CONSTANT, _PER_SAMPLE = "constant", "per_sample"


class NotLinear(ValueError):
    """Two graphs that are not one model at two batch sizes, or a model whose graph does not grow in lines."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchFamily:
    """The graphs of one model at all batch sizes: the data of a graph with lines in the place of numbers."""

    lines: Mapping[str, Any]

    @classmethod
    def of(cls, first: OpGraph, second: OpGraph) -> BatchFamily:
        """The family of two traces of different batch sizes; raises ``NotLinear`` where there is none."""
        if first.samples == second.samples or min(first.samples, second.samples) < LEAST_BATCH:
            raise NotLinear(
                f"batches of {first.samples} and {second.samples} samples do not tell lines apart"
            )
        return cls(lines=_Lines(first, second).of_graphs())

    def at(self, batch: int) -> OpGraph:
        """The graph of this batch size, equal to a trace of it."""
        if batch < LEAST_BATCH:
            raise NotLinear(f"batch: {batch} is less than {LEAST_BATCH}")
        lines = self.lines
        with paused_collector():
            specs = [TensorSpec(*_spec_at(spec, batch)) for spec in lines["specs"]]
            operators = _shared(operator_from(_at(row, batch), specs) for row in lines["operators"])
            buffers = [
                buffer if type(buffer[0]) is int else [_at(buffer[0], batch), *buffer[1:]]
                for buffer in lines["buffers"]
            ]
            numbers = {"samples": batch, "tokens": _at(lines["tokens"], batch)}
            return assemble({**lines, **numbers}, operators, buffers)

    def save(self, path: Path) -> None:
        write_compressed(path, {**self.lines, "format": FORMAT})

    @classmethod
    def load(cls, path: Path) -> BatchFamily:
        return read_compressed(path, FORMAT, lambda lines: cls(lines=lines))


# From lines to numbers


def _at(value: Any, batch: int) -> Any:
    """A value with its lines taken at a batch size."""
    if type(value) is dict and _PER_SAMPLE in value:
        return value[_CONSTANT] + value[_PER_SAMPLE] * batch
    if type(value) is dict:
        return {name: _at(item, batch) for name, item in value.items()}
    return [_at(item, batch) for item in value] if type(value) is list else value


def _spec_at(spec: Sequence[Any], batch: int) -> tuple[tuple[int, ...], str, tuple[int, ...] | None]:
    shape, dtype, strides = spec
    return tuple(_at(shape, batch)), dtype, None if strides is None else tuple(_at(strides, batch))


def _shared(operators: Iterable[Operator]) -> list[Operator]:
    """The operators, each that equals an earlier one replaced by it; at another batch size they may
    differ."""
    first: dict[Any, Operator] = {}

    def content(operator: Operator) -> tuple[Any, ...]:
        tensors = (operator.inputs, operator.outputs, repr(operator.args))
        return (
            operator.name,
            operator.overload,
            *tensors,
            operator.bytes_read,
            operator.bytes_written,
            operator.launches,
        )

    return [first.setdefault(content(one), one) for one in operators]


# From two graphs to lines


class _Lines:
    """Compares two graphs number by number."""

    def __init__(self, first: OpGraph, second: OpGraph) -> None:
        self._first, self._second = first, second
        self._specs: dict[tuple[TensorSpec, TensorSpec], int] = {}
        self._spec_lines: list[Any] = []

    def of_graphs(self) -> dict[str, Any]:
        first, second = self._first, self._second
        _same(len(first.ops), len(second.ops), "number of operators")
        _same(len(first.buffers), len(second.buffers), "number of buffers")
        ones, others = to_json(first), to_json(second)
        for part in ("parameters", "accumulates", "layers", "weights", "stack"):
            _same(ones.get(part), others.get(part), part)
        _same({**first.info, "precision": None}, {**second.info, "precision": None}, "info")
        numbers: dict[tuple[int, int], int] = {}
        pairs = zip(first.operator_index.tolist(), second.operator_index.tolist(), strict=True)
        calls = [numbers.setdefault(pair, len(numbers)) for pair in pairs]
        return {
            **ones,
            "tokens": self._line(first.tokens, second.tokens, "tokens"),
            "operators": [
                self._operator(first.operators[one], second.operators[other]) for one, other in numbers
            ],
            "specs": self._spec_lines,
            "ops": [
                [number, *_same(one[1:], other[1:], "op")]
                for number, one, other in zip(calls, ones["ops"], others["ops"], strict=True)
            ],
            "buffers": [
                [self._line(one[0], other[0], "buffer"), *_same(one[1:], other[1:], "buffer")]
                for one, other in zip(ones["buffers"], others["buffers"], strict=True)
            ],
        }

    def _operator(self, one: Operator, other: Operator) -> list[Any]:
        _same(
            (one.name, one.overload, one.launches), (other.name, other.overload, other.launches), "operator"
        )
        inputs, outputs = (
            self._spec_numbers(one.inputs, other.inputs),
            self._spec_numbers(one.outputs, other.outputs),
        )
        args = self._line(dict(one.args), dict(other.args), one.name)
        work = [
            self._line(getattr(one, figure), getattr(other, figure), f"{one.name} {figure}")
            for figure in ("flops", "bytes_read", "bytes_written")
        ]
        if one.name == "slice" and self._grows(outputs) and not self._grows(inputs):
            raise NotLinear(
                "slice: a tensor of fixed size is cut by the batch"
            )  # where it fits, torch cuts nothing
        if one.flops != other.flops:
            self._check_flops(one.name, args, inputs, outputs, work[0])
        return [one.name, one.overload, inputs, outputs, args, *work, one.launches]

    def _check_flops(self, name: str, args: Any, inputs: list[int], outputs: list[int], line: Any) -> None:
        """FLOPs at a third batch, by their formula, are those of the line."""
        batch = self._first.samples + self._second.samples
        tensors = [
            [TensorSpec(*_spec_at(self._spec_lines[i], batch)) for i in side] for side in (inputs, outputs)
        ]
        if flops(name, _at(args, batch), *tensors) != _at(line, batch):
            raise NotLinear(f"{name}: its FLOPs are no line in the batch")

    def _grows(self, specs: list[int]) -> bool:
        return any(type(size) is dict for number in specs for size in self._spec_lines[number][0])

    def _spec_numbers(self, ones: Sequence[TensorSpec], others: Sequence[TensorSpec]) -> list[int]:
        _same(len(ones), len(others), "number of tensors")
        return [self._spec(one, other) for one, other in zip(ones, others, strict=True)]

    def _spec(self, one: TensorSpec, other: TensorSpec) -> int:
        number = self._specs.get((one, other))
        if number is None:
            number = self._specs[one, other] = len(self._spec_lines)
            self._spec_lines.append(self._spec_line(one, other))
        return number

    def _spec_line(self, one: TensorSpec, other: TensorSpec) -> list[Any]:
        _same(one.dtype, other.dtype, "dtype")
        shape = self._line(list(one.shape), list(other.shape), "shape")
        growing = [size for size in shape if type(size) is dict]
        if len(growing) > 1:
            raise NotLinear(f"shape {list(one.shape)}: two dimensions grow with the batch")
        strides = self._line(
            one.strides and list(one.strides), other.strides and list(other.strides), "strides"
        )
        growing += [stride for stride in strides or () if type(stride) is dict]
        if any(size[_CONSTANT] < 0 or size[_PER_SAMPLE] < 0 for size in growing):
            raise NotLinear(
                f"shape {list(one.shape)} becomes {list(other.shape)}: not in proportion to the batch"
            )
        return [shape, one.dtype, strides]

    def _line(self, one: Any, other: Any, field: str) -> Any:
        """Join two values to their value at any batch: themselves where they are equal, else a line of whole
        numbers."""
        if isinstance(one, dict) and isinstance(other, dict):
            _same(list(one), list(other), field)
            return {name: self._line(value, other[name], f"{field} {name}") for name, value in one.items()}
        if isinstance(one, list) and isinstance(other, list):
            _same(len(one), len(other), field)
            return [self._line(*values, field) for values in zip(one, other, strict=True)]
        if type(one) is not int or type(other) is not int or one == other:
            return _same(one, other, field)
        per_sample, rest = divmod(other - one, self._second.samples - self._first.samples)
        if rest:
            raise NotLinear(f"{field}: {one} becomes {other}, no whole number per sample")
        return {_CONSTANT: one - per_sample * self._first.samples, _PER_SAMPLE: per_sample}


def _same(one: Any, other: Any, field: str) -> Any:
    if repr(one) != repr(other):
        raise NotLinear(f"{field}: {str(one)[:60]} becomes {str(other)[:60]}")
    return one
