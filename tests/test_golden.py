"""Forecasts that are frozen: whatever changes them is a commit of its own that says so."""

from __future__ import annotations

import functools

import pytest

import golden
from foretrain.job import Job

TOLERANCE = 1e-9
"""Sums in another order differ in their last digits; nothing else may."""


@functools.cache
def _jobs() -> dict[str, Job]:
    return golden.jobs()


@pytest.mark.parametrize(("predictor", "name"), list(golden.cases()))
def test_forecasts_are_as_they_were(predictor: str, name: str) -> None:
    now = golden.figures(predictor, _jobs()[name])
    assert golden.differences(golden.frozen()[f"{predictor}: {name}"], now, TOLERANCE) == {}
