"""Graphs: what is saved is what is loaded, sizes are those of memory, and a broken file is refused by
name."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zstandard
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from foretrain.errors import InputError
from foretrain.graph import CATEGORIES, FORMAT, ITEM_BYTES, PHASES, Buffer, Op, Operator, OpGraph, TensorSpec

SHAPES = st.lists(st.integers(0, 9), max_size=4).map(tuple)


@st.composite
def specs(draw: st.DrawFn) -> TensorSpec:
    shape = draw(SHAPES)
    strides = draw(st.none() | st.tuples(*[st.integers(0, 99) for _ in shape]))
    return TensorSpec(shape, draw(st.sampled_from(sorted(ITEM_BYTES))), strides)


SPECS = st.lists(specs(), max_size=3).map(tuple)
COUNTS = st.integers(0, 2**60)
ARGS = st.dictionaries(
    st.text(max_size=5),
    st.integers() | st.booleans() | st.none() | st.text(max_size=5) | st.lists(st.text(max_size=3)),
)
OPERATORS = st.builds(
    Operator,
    st.text(max_size=8),
    st.text(max_size=8),
    SPECS,
    SPECS,
    ARGS,
    COUNTS,
    COUNTS,
    COUNTS,
    st.booleans(),
)


@st.composite
def graphs(draw: st.DrawFn) -> OpGraph:
    operators = draw(st.lists(OPERATORS, min_size=1, max_size=4))
    numbers = st.lists(st.integers(0, 5), max_size=3).map(tuple)
    op = st.builds(
        Op,
        st.sampled_from(operators),
        st.sampled_from(PHASES),
        st.sampled_from(["", "layer1.conv", "head"]),
        numbers,
        numbers,
    )
    buffers = st.builds(Buffer, COUNTS, st.sampled_from(CATEGORIES), st.integers(-1, 8), st.integers(0, 9))
    return OpGraph(
        ops=tuple(draw(st.lists(op, max_size=8))),
        buffers=tuple(draw(st.lists(buffers, min_size=6, max_size=6))),
        samples=draw(st.integers(1, 512)),
        tokens=draw(st.integers(0, 10**6)),
        parameters=draw(COUNTS),
        accumulates=draw(st.booleans()),
        info=draw(
            st.dictionaries(
                st.text(max_size=5),
                st.text(max_size=5) | st.dictionaries(st.text(max_size=3), st.text(max_size=3)),
            )
        ),
    )


def contents(graph: OpGraph) -> tuple[Any, ...]:
    """Everything in a graph as plain values."""
    operators = [tuple(getattr(o, name) for name in Operator.__slots__) for o in graph.operators]
    ops = [
        (kind, op.phase, op.layer, op.reads, op.writes)
        for kind, op in zip(graph.operator_index.tolist(), graph.ops, strict=True)
    ]
    return (
        operators,
        ops,
        graph.buffers,
        graph.samples,
        graph.tokens,
        graph.parameters,
        graph.accumulates,
        graph.info,
    )


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(graphs())
def test_a_graph_survives_the_disk(tmp_path: Path, graph: OpGraph) -> None:
    graph.save(tmp_path / "graph.json.zst")
    assert contents(OpGraph.load(tmp_path / "graph.json.zst")) == contents(graph)


@given(graphs())
def test_columns_and_totals_agree_with_the_ops(graph: OpGraph) -> None:
    for attribute in ("flops", "bytes", "launches"):
        values = [float(getattr(op.operator, attribute)) for op in graph.ops]
        np.testing.assert_array_equal(graph.column(attribute), np.array(values))
        parts = [graph.total(attribute, phase) for phase in PHASES]
        assert sum(parts) == pytest.approx(graph.total(attribute)) == pytest.approx(sum(values))


@given(graphs())
def test_producers_are_the_last_earlier_writers_of_what_is_read(graph: OpGraph) -> None:
    for index, op in enumerate(graph.ops):
        expected = set()
        for buffer in op.reads:
            writers = [i for i in range(index) if buffer in graph.ops[i].writes]
            expected.update(writers[-1:])
        assert graph.producers(index) == tuple(sorted(expected))


def test_distinct_operators_are_listed_once_in_order_of_first_use() -> None:
    first, second = (Operator(name, "", (), (), {}, 0, 0, 0, True) for name in ("b", "a"))
    graph = OpGraph(
        ops=tuple(Op(operator, "forward", "", (), ()) for operator in (first, second, first)),
        buffers=(),
        samples=1,
    )
    assert graph.operators == (first, second)
    assert graph.operator_index.tolist() == [0, 1, 0]


def test_an_empty_graph_has_empty_columns() -> None:
    graph = OpGraph(ops=(), buffers=(), samples=1)
    assert graph.total("flops") == 0
    assert graph.operators == ()


# Tensors


@given(SHAPES, st.sampled_from(sorted(ITEM_BYTES)))
def test_a_contiguous_tensor_has_its_elements_times_their_size(shape: tuple[int, ...], dtype: str) -> None:
    assert TensorSpec(shape, dtype).size_bytes == int(np.prod(shape, dtype=np.int64)) * ITEM_BYTES[dtype]


@pytest.mark.parametrize(
    ("shape", "strides", "size"),
    [
        ((4, 5), (5, 1), 80),
        ((4, 5), (1, 4), 80),
        ((4, 5), (0, 1), 20),
        ((4, 5), (0, 0), 4),
        ((0, 5), (0, 1), 0),
        ((1, 5), (0, 1), 20),
    ],
)
def test_an_expanded_dimension_counts_once(
    shape: tuple[int, ...], strides: tuple[int, ...], size: int
) -> None:
    assert TensorSpec(shape, "float32", strides).size_bytes == size


@given(specs())
def test_an_expanded_tensor_is_never_larger_than_a_contiguous_one(spec: TensorSpec) -> None:
    assert spec.size_bytes <= TensorSpec(spec.shape, spec.dtype).size_bytes


def test_channels_last_is_seen_from_the_strides() -> None:
    assert TensorSpec((2, 8, 4, 4), "float32", (128, 1, 32, 8)).channels_last
    assert not TensorSpec((2, 8, 4, 4), "float32").channels_last
    assert not TensorSpec((2, 1, 4, 4), "float32", (16, 1, 4, 1)).channels_last
    assert not TensorSpec((8, 4), "float32", (4, 1)).channels_last


def test_an_operator_finds_its_tensors_by_argument_name() -> None:
    a, b = TensorSpec((1,), "float32"), TensorSpec((2,), "float32")
    operator = Operator(
        "cat", "", (a, b), (), {"self": "%0", "tensors": ["%1", "%0"], "dim": 0}, 0, 3, 4, True
    )
    assert operator.tensor("self") is a
    assert operator.tensor("dim") is None
    assert operator.tensor("absent") is None
    assert operator.tensors("tensors") == [b, a]
    assert operator.tensors("absent") == []
    assert operator.bytes == 7


# Files


def write(path: Path, data: object) -> None:
    path.write_bytes(zstandard.ZstdCompressor().compress(json.dumps(data).encode()))


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"not compressed",
        zstandard.ZstdCompressor().compress(b"{"),
        zstandard.ZstdCompressor().compress(b"\xff"),
    ],
)
def test_a_file_of_something_else_is_refused_by_name(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "bad.json.zst"
    path.write_bytes(content)
    with pytest.raises(InputError, match=r"bad\.json\.zst: not a foretrain graph file"):
        OpGraph.load(path)


def test_a_graph_with_a_part_missing_is_refused(tmp_path: Path) -> None:
    write(tmp_path / "bad.json.zst", {"format": FORMAT, "specs": []})
    with pytest.raises(InputError, match="not a foretrain graph file"):
        OpGraph.load(tmp_path / "bad.json.zst")


def test_a_file_that_holds_no_table_is_refused(tmp_path: Path) -> None:
    write(tmp_path / "bad.json.zst", [1, 2])
    with pytest.raises(InputError, match="not a foretrain graph file"):
        OpGraph.load(tmp_path / "bad.json.zst")


def test_a_cut_off_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "cut.json.zst"
    OpGraph(ops=(), buffers=(), samples=1, info={"text": "x" * 500}).save(path)
    path.write_bytes(path.read_bytes()[:-10])
    with pytest.raises(InputError, match=r"cut\.json\.zst: not a foretrain graph file"):
        OpGraph.load(path)


def test_another_format_says_what_to_do(tmp_path: Path) -> None:
    write(tmp_path / "old.json.zst", {"format": "foretrain-graph/0"})
    with pytest.raises(
        InputError, match="format 'foretrain-graph/0' is not 'foretrain-graph/1'; capture the model again"
    ):
        OpGraph.load(tmp_path / "old.json.zst")


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"none\.json\.zst: cannot be read"):
        OpGraph.load(tmp_path / "none.json.zst")


def test_a_save_that_fails_leaves_the_old_file_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "deep" / "graph.json.zst"
    OpGraph(ops=(), buffers=(), samples=1).save(path)

    def fail(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Path, "replace", fail)
    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(KeyboardInterrupt):
        OpGraph(ops=(), buffers=(), samples=2).save(path)
    assert OpGraph.load(path).samples == 1
    assert list(path.parent.iterdir()) == [path]
