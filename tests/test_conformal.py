"""Intervals from held-out comparisons: they hold the share that they say."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from foretrain.predictors.conformal import Factors, factors, shipped


def test_too_few_comparisons_give_none() -> None:
    assert factors([1.0] * 19) is None


@given(st.lists(st.floats(0.01, 100), min_size=20, max_size=200))
def test_bounds_are_in_order_around_one(ratios: list[float]) -> None:
    found = factors(ratios)
    assert found is not None
    assert found.low_95 <= found.low <= 1 <= found.high <= found.high_95


@pytest.mark.parametrize("count", [25, 100, 400])
def test_the_next_value_is_inside_as_often_as_said(count: int) -> None:
    """Over many draws of past and next values, whatever their distribution."""
    draw = np.random.default_rng(0)
    inside = []
    for _ in range(2000):
        *past, following = draw.lognormal(0.0, 0.3, count + 1)
        found = factors(past)
        assert found is not None
        inside.append((found.low <= following <= found.high, found.low_95 <= following <= found.high_95))
    narrow, wide = np.mean(inside, axis=0)
    assert 0.78 <= narrow <= 0.90
    assert 0.91 <= wide <= 1.0


def test_the_package_has_intervals_for_every_case() -> None:
    cases = shipped()
    assert cases.keys() == {
        "device-bound",
        "host-bound",
        "calibrated",
        "data sheet",
        "many devices",
        "many devices, calibrated",
    }
    for case in cases.values():
        assert case
        assert all(isinstance(value, Factors) and value.low <= 1 <= value.high for value in case.values())
