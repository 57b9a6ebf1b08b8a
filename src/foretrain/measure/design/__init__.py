"""Chooses which candidates are worth measuring within a budget, by their features and costs."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from foretrain.errors import InputError, invalid, unknown
from foretrain.measure.candidates import Array, Candidates
from foretrain.measure.design.a_optimal import a_optimal
from foretrain.measure.design.controls import cheap_random_design, grid_design, random_design
from foretrain.measure.design.criteria import (
    RIDGE,
    Indices,
    beside,
    information,
    log_det,
    sizes_of,
    trace_inverse,
)
from foretrain.measure.design.d_optimal import d_optimal, half_d_optimal
from foretrain.units import format_seconds


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Design:
    """Says what to measure: rows of the candidates, in the order of measuring, and how much they tell."""

    method: str
    chosen: Indices
    cost_s: float
    log_det: float
    """log det of the information matrix: higher is better."""
    trace_inverse: float
    """Trace of its inverse, features in units of their mean size: the sum of the coefficients' variances,
    lower is better."""
    determined: int
    """The rank of the chosen rows: how many coefficients (or combinations of them) they determine."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Gain:
    """A design beside random ones of the same budget."""

    d_efficiency: float
    """``(det M / det M_random)^(1/p)``, the geometric mean: how many times the random choice had to be
    repeated to know as much."""
    a_efficiency: float
    """``trace M_random^-1 / trace M^-1``, the median: how many times lower the coefficients' variance is."""
    random_log_det: float
    random_trace_inverse: float
    random_determined: float
    """Coefficients that a random design determines, on average; below their number, the ratios above depend
    on the ridge."""
    seeds: int


class Method(Protocol):
    """Chooses rows within a budget of time, by their features and costs."""

    def __call__(
        self, features: Array, cost: Array, budget: float, *, ridge: float = RIDGE, seed: int = 0
    ) -> Indices: ...


METHODS: Mapping[str, Method] = {
    "a-optimal": a_optimal,
    "cheap-random": cheap_random_design,
    "d-optimal": d_optimal,
    "grid": grid_design,
    "half-d-optimal": half_d_optimal,
    "random": random_design,
}
_INFORMED = ("d-optimal", "half-d-optimal")
"""Methods that choose by information, and so by what is known before."""


def design(
    method: str,
    candidates: Candidates,
    *,
    budget_s: float | None = None,
    count: int | None = None,
    known: Array | None = None,
    ridge: float = RIDGE,
    seed: int = 0,
) -> Design:
    """Choose what to measure within a total cost, or a number of candidates whatever their cost.

    ``known`` are features of what was measured before, which the choice adds to.
    """
    if method not in METHODS:
        raise unknown("method", method, METHODS)
    cost, budget = _limit(candidates, budget_s, count)
    features, prior = candidates.features, ridge
    if known is not None and method == "a-optimal":
        raise InputError("method: a-optimal knows nothing of what was measured before; d-optimal does")
    if known is not None and method in _INFORMED:
        features, prior = beside(features, information(known, ridge)), 1.0
    chosen = METHODS[method](features, cost, budget, ridge=prior, seed=seed)
    rows = candidates.features[chosen]
    rows = rows if known is None else np.vstack([known, rows])
    return Design(
        method=method,
        chosen=chosen,
        cost_s=math.fsum(candidates.cost_s[chosen]),
        log_det=log_det(rows, ridge),
        trace_inverse=trace_inverse(rows / sizes_of(candidates.features), ridge),
        determined=int(np.linalg.matrix_rank(rows.T @ rows, hermitian=True)),
    )


def gain(
    chosen: Design,
    candidates: Candidates,
    *,
    budget_s: float | None = None,
    count: int | None = None,
    known: Array | None = None,
    seeds: int = 10,
) -> Gain:
    """Compare a design with random ones of the same budget."""
    options: dict[str, Any] = {"budget_s": budget_s, "count": count, "known": known}
    controls = [design("random", candidates, **options, seed=seed) for seed in range(seeds)]
    random_log_det = float(np.mean([control.log_det for control in controls]))
    random_trace = float(np.median([control.trace_inverse for control in controls]))
    return Gain(
        d_efficiency=float(np.exp((chosen.log_det - random_log_det) / candidates.features.shape[1])),
        a_efficiency=random_trace / chosen.trace_inverse,
        random_log_det=random_log_det,
        random_trace_inverse=random_trace,
        random_determined=float(np.mean([control.determined for control in controls])),
        seeds=seeds,
    )


def _limit(candidates: Candidates, budget_s: float | None, count: int | None) -> tuple[Array, float]:
    """Say what each candidate takes of the budget, and the budget: seconds, or one each of a number."""
    if (budget_s is None) == (count is None):
        raise InputError("design: give a budget or a count, and only one of them")
    rows = len(candidates.cost_s)
    if count is not None:
        if not 1 <= count <= rows:
            raise invalid("count", count, f"between 1 and the {rows:,} candidates")
        return np.ones(rows), float(count)
    assert budget_s is not None
    cheapest = float(candidates.cost_s.min())
    if not budget_s >= cheapest:
        needs = f"the cheapest candidate, which takes {format_seconds(cheapest)}"
        raise InputError(f"budget: {format_seconds(budget_s)} is below {needs}")
    return candidates.cost_s, budget_s
