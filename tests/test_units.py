"""Tests units: text becomes SI numbers and back, and what cannot be read is refused by name."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from foretrain import units
from foretrain.errors import InputError

Parse = Callable[..., float]


@pytest.mark.parametrize(
    ("parse", "text", "expected"),
    [
        (units.parse_bytes, "80 GiB", 80 * 2**30),
        (units.parse_bytes, "25MB", 25e6),
        (units.parse_bytes, "25 M", 25e6),
        (units.parse_bytes, "512", 512),
        (units.parse_bytes, "1.5 KiB", 1536),
        (units.parse_rate, "900 GB/s", 900e9),
        (units.parse_rate, "400 Gb/s", 50e9),
        (units.parse_rate, "400 Gbit/s", 50e9),
        (units.parse_rate, "400Gbps", 50e9),
        (units.parse_rate, "1 GiB/s", 2**30),
        (units.parse_seconds, "3h", 10800),
        (units.parse_seconds, "1d 12h", 129600),
        (units.parse_seconds, "90 min", 5400),
        (units.parse_seconds, "5 us", 5e-6),
        (units.parse_seconds, "1e3 ms", 1),
        (units.parse_price, "$4.10/h", 4.1),
        (units.parse_price, "4.10 / hour", 4.1),
        (units.parse_price, "$2", 2),
    ],
)
def test_text_becomes_an_si_number(parse: Parse, text: str, expected: float) -> None:
    assert parse(text) == pytest.approx(expected)


@given(st.floats(0, 1e18) | st.integers(0, 2**53))
def test_a_number_is_already_si(value: float) -> None:
    for parse in (units.parse_bytes, units.parse_seconds, units.parse_price):
        assert parse(value) == value
    if value == 0 or value >= units.LEAST_BARE_RATE:
        assert units.parse_rate(value) == value


@pytest.mark.parametrize(
    ("parse", "text", "example"),
    [
        (units.parse_bytes, "80 GiBs", "80 GiB"),
        (units.parse_bytes, "lots", "25 MB"),
        (units.parse_bytes, "-1 GB", "25 MB"),
        (units.parse_bytes, True, "25 MB"),
        (units.parse_rate, "900 GB", "900 GB/s"),
        (units.parse_rate, "fast", "400 Gb/s"),
        (units.parse_rate, 400, 'a rate with its unit, such as "400 Gb/s"'),
        (units.parse_seconds, "3 parsecs", "1d 12h"),
        (units.parse_seconds, "3h 5", "1d 12h"),
        (units.parse_seconds, "", "90 min"),
        (units.parse_price, "4 EUR/h", "$4.10/h"),
        (units.parse_price, False, "$4.10/h"),
    ],
)
def test_what_cannot_be_read_is_refused_by_field_value_and_example(
    parse: Parse, text: str, example: str
) -> None:
    with pytest.raises(InputError) as caught:
        parse(text, "cluster.field")
    assert str(caught.value).startswith(f"cluster.field: {text!r} is not")
    assert example in str(caught.value)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (units.format_bytes(80 * 2**30), "80 GiB"),
        (units.format_bytes(511), "511 B"),
        (units.format_bytes(1.5 * 2**20), "1.5 MiB"),
        (units.format_bytes(0), "0 B"),
        (units.format_seconds(0.00123), "1.23 ms"),
        (units.format_seconds(11520), "3 h 12 min"),
        (units.format_seconds(3 * 86400), "3 d"),
        (units.format_seconds(75), "1 min 15 s"),
        (units.format_seconds(2e-9), "2 ns"),
        (units.format_seconds(0), "0 s"),
        (units.format_seconds(math.inf), "inf"),
        (units.format_count(4.09e9, "FLOP"), "4.09 GFLOP"),
        (units.format_count(12), "12"),
        (units.format_count(0, "FLOP"), "0 FLOP"),
        (units.format_dollars(0.42), "$0.42"),
        (units.format_dollars(1234.4), "$1,234"),
        (units.format_dollars(0.0031), "$0.0031"),
        (units.format_dollars(0.0), "$0.00"),
        (units.format_dollars(1e-6), "<$0.0001"),
    ],
)
def test_numbers_become_text_for_people(text: str, expected: str) -> None:
    assert text == expected


@given(st.floats(1e-6, 999 * 86400))
def test_a_formatted_time_reads_back_within_half_its_smaller_unit(time_s: float) -> None:
    assert units.parse_seconds(units.format_seconds(time_s).replace(",", "")) == pytest.approx(
        time_s, rel=0.022
    )


@given(st.integers(1, 2**49))
def test_a_formatted_size_reads_back_to_three_digits(size_bytes: int) -> None:
    assert units.parse_bytes(units.format_bytes(size_bytes).replace(",", "")) == pytest.approx(
        size_bytes, rel=0.006
    )


@given(st.floats(0.01, 1e17), st.floats(0.01, 1e17))
def test_larger_counts_never_read_smaller(one: float, other: float) -> None:
    small, large = sorted((one, other))
    values = [units.parse_bytes(units.format_count(value, "B").replace(",", "")) for value in (small, large)]
    assert values[0] <= values[1]
