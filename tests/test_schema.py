"""Tests the schema: each mistake in a mapping is one line that names field, value and what is allowed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from foretrain.errors import InputError
from foretrain.schema import convert, quantity, read
from foretrain.units import parse_bytes


@dataclass(frozen=True, kw_only=True)
class Inner:
    depth: int


@dataclass(frozen=True, kw_only=True)
class Thing:
    count: int
    kind: Literal["fast", "slow"] = "fast"
    ratio: float = 1.0
    active: bool = False
    label: str | None = None
    side: int | tuple[int, ...] | None = None
    pair: tuple[int, str] = (0, "")
    size: float | None = quantity(parse_bytes, default=None)
    inner: Inner | None = None
    inners: tuple[Inner, ...] = ()
    extra: Mapping[str, Any] = field(default_factory=dict)
    weights: Mapping[str, float] = field(default_factory=dict)
    derived: int = field(default=0, init=False)


def test_a_full_table_becomes_the_dataclass() -> None:
    table = {
        "count": 3,
        "kind": "slow",
        "ratio": 2,
        "active": True,
        "label": "x",
        "side": [3, 8, 8],
        "pair": [1, "a"],
        "size": "2 KiB",
        "inner": {"depth": 1},
        "inners": [{"depth": 2}, {"depth": 3}],
        "extra": {"any": [1, "two"]},
        "weights": {"w": 1},
    }
    thing = read(Thing, table, "thing")
    assert thing == Thing(
        count=3,
        kind="slow",
        ratio=2.0,
        active=True,
        label="x",
        side=(3, 8, 8),
        pair=(1, "a"),
        size=2048.0,
        inner=Inner(depth=1),
        inners=(Inner(depth=2), Inner(depth=3)),
        extra={"any": [1, "two"]},
        weights={"w": 1.0},
    )
    assert isinstance(thing.ratio, float)
    assert isinstance(thing.weights["w"], float)


def test_what_is_left_out_has_its_default() -> None:
    assert read(Thing, {"count": 1}, "") == Thing(count=1)
    assert read(Thing, {"count": 1, "size": None, "label": None}, "").size is None


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ({}, "thing.count: missing; it is required"),
        ({"count": "three"}, "thing.count: 'three' is not a whole number"),
        ({"count": 1.5}, "thing.count: 1.5 is not a whole number"),
        ({"count": True}, "thing.count: True is not a whole number"),
        ({"count": 2**63}, f"thing.count: {2**63} is not a number of at most 2^63"),
        ({"count": 1, "ratio": 10**400}, f"thing.ratio: {10**400} is not a number of at most 1.8e308"),
        ({"count": 1, "kind": "fats"}, "thing.kind: 'fats' is not one of fast, slow (did you mean fast?)"),
        ({"count": 1, "kind": True}, "thing.kind: True is not one of fast, slow"),
        ({"count": 1, "ratio": "half"}, "thing.ratio: 'half' is not a number"),
        ({"count": 1, "ratio": False}, "thing.ratio: False is not a number"),
        ({"count": 1, "active": 1}, "thing.active: 1 is not true or false"),
        ({"count": 1, "label": 5}, "thing.label: 5 is not a text"),
        ({"count": 1, "side": "wide"}, "thing.side: 'wide' is not a whole number or a list"),
        ({"count": 1, "pair": [1]}, "thing.pair: [1] is not a list of 2 values"),
        ({"count": 1, "pair": 1}, "thing.pair: 1 is not a list"),
        ({"count": 1, "pair": [1, 2]}, "thing.pair[1]: 2 is not a text"),
        ({"count": 1, "size": "big"}, 'thing.size: \'big\' is not a size such as "80 GiB" or "25 MB"'),
        ({"count": 1, "inner": 4}, "thing.inner: 4 is not a table of keys and values"),
        (
            {"count": 1, "inner": {"dept": 4}},
            "thing.inner.dept: 'dept' is not a known key; allowed are depth (did you mean depth?)",
        ),
        (
            {"count": 1, "inners": [{"depth": 1}, {"depth": "x"}]},
            "thing.inners[1].depth: 'x' is not a whole number",
        ),
        ({"count": 1, "weights": {"w": "heavy"}}, "thing.weights.w: 'heavy' is not a number"),
        ({"count": 1, "extra": [1]}, "thing.extra: [1] is not a table of keys and values"),
        ([1], "thing: [1] is not a table of keys and values"),
    ],
)
def test_every_mistake_is_one_line_with_field_value_and_what_is_allowed(table: object, message: str) -> None:
    with pytest.raises(InputError) as caught:
        read(Thing, table, "thing")
    assert str(caught.value) == message


def test_an_unknown_key_lists_the_known_ones_and_suggests_the_nearest() -> None:
    with pytest.raises(InputError) as caught:
        read(Thing, {"count": 1, "ration": 2}, "thing")
    message = str(caught.value)
    assert message.startswith("thing.ration: 'ration' is not a known key; allowed are active, count,")
    assert message.endswith("(did you mean ratio?)")
    assert "derived" not in message


def test_fields_at_the_top_have_no_prefix() -> None:
    with pytest.raises(InputError, match=r"^count: missing"):
        read(Thing, {}, "")


KEYS = st.text(st.characters(exclude_categories=("C", "Z")), max_size=8)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner, max_size=3),
    max_leaves=8,
)


@given(JSON)
def test_any_value_is_either_read_or_refused_in_one_line(value: object) -> None:
    for name in (
        "count",
        "kind",
        "ratio",
        "active",
        "label",
        "side",
        "pair",
        "size",
        "inner",
        "inners",
        "extra",
        "weights",
    ):
        try:
            thing = read(Thing, {"count": 1, name: value}, "thing")
        except InputError as error:
            assert str(error).startswith(f"thing.{name}")  # noqa: PT017
            assert "\n" not in str(error)  # noqa: PT017
        else:
            assert isinstance(thing, Thing)


@given(JSON)
def test_any_means_anything(value: object) -> None:
    assert convert(value, Any, "x") is value
