"""Writes graphs as compressed JSON, and reads them back."""

from __future__ import annotations

import contextlib
import gc
import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from foretrain.errors import InputError
from foretrain.files import write_atomically
from foretrain.graph.ir import CATEGORIES, PHASES, Buffer, Op, Operator, OpGraph, Stack, TensorSpec, Weight

T = TypeVar("T")

FORMAT = "foretrain-graph/1"


@contextlib.contextmanager
def paused_collector() -> Iterator[None]:
    """Collect no garbage meanwhile: among thousands of new objects that stay, it would look in vain."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def write_compressed(path: Path, content: Mapping[str, Any]) -> None:
    """Write plain data as compressed JSON; a reader never sees half a file."""
    import zstandard

    text = json.dumps(content, separators=(",", ":")).encode()
    write_atomically(path, zstandard.ZstdCompressor(level=6).compress(text))


def read_compressed(path: Path, expected_format: str, build: Callable[[Mapping[str, Any]], T]) -> T:
    """Read data that ``write_compressed`` wrote, and make of it what ``build`` does."""
    import zstandard

    try:
        with paused_collector():
            data = json.loads(zstandard.ZstdDecompressor().decompress(path.read_bytes()))
            if data["format"] != expected_format:
                raise InputError(
                    f"{path}: format {data['format']!r} is not {expected_format!r}; capture the model again"
                )
            return build(data)
    except KeyError as error:
        raise InputError(f"{path}: not a foretrain graph file (it has no {error.args[0]})") from error
    except OSError as error:
        raise InputError(f"{path}: cannot be read ({error.strerror})") from error
    except (zstandard.ZstdError, ValueError, IndexError, TypeError, RecursionError) as error:
        raise InputError(f"{path}: not a foretrain graph file ({error})") from error


def digest(graph: OpGraph) -> str:
    """Hash everything that a graph holds."""
    return hashlib.sha256(json.dumps(to_json(graph), sort_keys=True).encode()).hexdigest()


def to_json(graph: OpGraph) -> dict[str, Any]:
    """Write a graph as tables of distinct specs, operators and layer names; ops and buffers refer to them by
    number."""
    specs: dict[TensorSpec, int] = {}
    layers: dict[str, int] = {}
    operators = [
        [
            o.name,
            o.overload,
            _numbers(o.inputs, specs),
            _numbers(o.outputs, specs),
            o.args,
            o.flops,
            o.bytes_read,
            o.bytes_written,
            o.launches,
        ]
        for o in graph.operators
    ]
    ops = [
        [
            *(kind, PHASES.index(op.phase), layers.setdefault(op.layer, len(layers)), op.reads, op.writes),
            *((int(op.recomputed), op.hooks) if op.recomputed or op.hooks else ()),
        ]
        for kind, op in zip(graph.operator_index.tolist(), graph.ops, strict=True)
    ]
    return {
        "format": FORMAT,
        "samples": graph.samples,
        "tokens": graph.tokens,
        "parameters": graph.parameters,
        "accumulates": graph.accumulates,
        "info": dict(graph.info),
        "specs": [[spec.shape, spec.dtype, spec.strides] for spec in specs],
        "layers": list(layers),
        "operators": operators,
        "ops": ops,
        "buffers": [[b.size_bytes, CATEGORIES.index(b.category), b.born, b.dies] for b in graph.buffers],
        **(
            {"weights": [[w.name, w.elements, w.dtype, w.trainable, w.expert] for w in graph.weights]}
            if graph.weights
            else {}
        ),
        **(
            {"stack": [graph.stack.path, graph.stack.layers, graph.stack.traced, graph.stack.stands_for]}
            if graph.stack
            else {}
        ),
    }


def _numbers(items: Iterable[TensorSpec], table: dict[TensorSpec, int]) -> list[int]:
    return [table.setdefault(item, len(table)) for item in items]


def from_json(data: Mapping[str, Any]) -> OpGraph:
    """Make the graph that ``to_json`` described."""
    specs = [
        TensorSpec(tuple(shape), dtype, None if strides is None else tuple(strides))
        for shape, dtype, strides in data["specs"]
    ]
    return assemble(data, [operator_from(row, specs) for row in data["operators"]], data["buffers"])


def checked(graph: OpGraph, path: Path) -> OpGraph:
    """Refuse a graph that a user gave as a file, where it holds what no capture writes."""
    why, known = "", len(graph.buffers)
    for name, least in (("samples", 1), ("tokens", 0), ("parameters", 0)):
        value = getattr(graph, name)
        if not isinstance(value, int) or value < least:
            why = f"{name}: {value!r} is not a whole number of at least {least}"
    if not graph.ops:
        why = "it has no operators"
    elif any(not 0 <= number < known for op in graph.ops for number in (*op.reads, *op.writes)):
        why = f"an operator uses a buffer that is not one of its {known}"
    elif any(not -1 <= one.born <= one.dies <= len(graph.ops) for one in graph.buffers):
        why = "a buffer lives outside of its operators"
    if why:
        raise InputError(f"{path}: not a foretrain graph file ({why})")
    return graph


def operator_from(row: Sequence[Any], specs: Sequence[TensorSpec]) -> Operator:
    """Make an operator of its row in the data of a graph."""
    name, overload, inputs, outputs, args, flops, read, written, launches = row
    taken, given = tuple([specs[i] for i in inputs]), tuple([specs[i] for i in outputs])
    return Operator(name, overload, taken, given, args, flops, read, written, launches)


def assemble(
    data: Mapping[str, Any], operators: Sequence[Operator], buffers: Iterable[Sequence[int]]
) -> OpGraph:
    """Make a graph of these operators and buffers; all else is taken from the data of a graph."""
    layers: Sequence[str] = data["layers"]
    ops = [
        Op(operators[kind], PHASES[phase], layers[layer], tuple(reads), tuple(writes), *_again(*rest))
        for kind, phase, layer, reads, writes, *rest in data["ops"]
    ]
    return OpGraph(
        ops=tuple(ops),
        buffers=tuple([Buffer(size, CATEGORIES[kind], born, dies) for size, kind, born, dies in buffers]),
        samples=data["samples"],
        tokens=data["tokens"],
        parameters=data["parameters"],
        accumulates=data["accumulates"],
        info=data["info"],
        weights=tuple(Weight(*fields) for fields in data.get("weights", ())),
        stack=_stack(data["stack"]) if "stack" in data else None,
    )


def _again(recomputed: int = 0, hooks: int = 0) -> tuple[bool, int]:
    return bool(recomputed), hooks


def _stack(fields: Sequence[Any]) -> Stack:
    path, layers, traced, stands_for = fields
    return Stack(path, layers, traced, tuple(stands_for))
