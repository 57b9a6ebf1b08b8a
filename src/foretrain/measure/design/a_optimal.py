"""Chooses the rows that tell most by the trace of the inverse information matrix, after Ernest: A-optimal
designs."""

from __future__ import annotations

import math

import numpy as np

from foretrain.measure.candidates import Array
from foretrain.measure.design.controls import fill
from foretrain.measure.design.criteria import RIDGE, Indices, information, inverse_of, sizes_of

_REMEMBERED, _ARMIJO, _LEAST_PART = 10, 1e-4, 1e-10
"""Of the line search: values that a step may exceed, its least descent, and where it ends."""


_LEAST_WEIGHT = 0.3
"""Of a row that is taken, in the problem that Ernest solves."""


def a_optimal(features: Array, cost: Array, budget: float, *, ridge: float = RIDGE, seed: int = 0) -> Indices:
    """Choose rows as Ernest does (Venkataraman et al., NSDI 2016): by their weights in its problem.

    Those above ``_LEAST_WEIGHT`` are taken by falling weight for as long as they fit into the budget; rows of
    lower weight follow only while there are fewer rows than features."""
    weights = a_weights(features, cost, budget, ridge=ridge)
    ties = np.random.default_rng(seed).random(len(cost))
    order = np.lexsort((ties, -np.round(weights, 6)))
    kept = order[weights[order] > _LEAST_WEIGHT]
    chosen = fill(kept, cost, budget)
    lacking = max(1, features.shape[1]) - len(chosen)
    if lacking > 0:
        more = fill(order[weights[order] <= _LEAST_WEIGHT], cost, budget - math.fsum(cost[chosen]))
        chosen = np.concatenate([chosen, more[:lacking]])
    return chosen


def a_weights(
    features: Array,
    cost: Array,
    budget: float,
    *,
    ridge: float = RIDGE,
    tolerance: float = 1e-3,
    iterations: int = 400,
) -> Array:
    """Minimise ``trace (sum_i w_i x_i x_i^T)^-1`` subject to ``0 <= w <= 1`` and ``cost . w <= budget``.

    Spectral projected gradient (Birgin, Martinez and Raydan 2000), until the Frank-Wolfe gap bounds the
    distance to the optimum by ``tolerance``.
    """
    x = features / sizes_of(features)
    weights = np.full(len(cost), min(1.0, budget / math.fsum(cost)))
    value, slope = _a_objective(x, weights, ridge)
    recent = [value]
    step = 1 / max(float(np.abs(slope).max()), 1e-300)
    for _ in range(iterations):
        if slope @ weights - slope @ _knapsack(-slope, cost, budget) <= tolerance * value:
            break
        move = _project(weights - step * slope, cost, budget) - weights
        descent = float(slope @ move)
        part = 1.0
        while True:
            trial = _a_objective(x, weights + part * move, ridge)
            enough = max(recent[-_REMEMBERED:]) + _ARMIJO * part * descent
            if not (trial[0] > enough and part > _LEAST_PART):
                break
            part /= 2
        curvature = part * float(move @ (trial[1] - slope))
        length = part**2 * float(move @ move)
        step = float(np.clip(length / curvature, 1e-12, 1e12)) if curvature > 0 else 2 * step
        weights = weights + part * move
        value, slope = trial
        recent.append(value)
    inside: Array = np.clip(weights, 0, 1)
    return inside


def _a_objective(x: Array, weights: Array, ridge: float) -> tuple[float, Array]:
    """``trace M^-1`` and its gradient ``-|M^-1 x_i|^2``."""
    inverse = inverse_of(information(x * np.sqrt(np.maximum(weights, 0))[:, None], ridge))
    return float(np.trace(inverse)), -((x @ inverse) ** 2).sum(axis=1)


def _project(weights: Array, cost: Array, budget: float) -> Array:
    """The nearest w with ``0 <= w <= 1`` and ``cost . w <= budget``: ``clip(w - m cost)``, m by bisection."""
    inside = np.clip(weights, 0, 1)
    if cost @ inside <= budget:
        return inside
    low, high = 0.0, float((weights / cost).max())
    for _ in range(60):
        middle = (low + high) / 2
        over = cost @ np.clip(weights - middle * cost, 0, 1) > budget
        low, high = (middle, high) if over else (low, middle)
    return np.clip(weights - high * cost, 0, 1)


def _knapsack(value: Array, cost: Array, budget: float) -> Array:
    """The fractional knapsack: the weights in 0..1 of the largest value within the budget."""
    order = np.argsort(-value / cost, kind="stable")
    before = np.concatenate([[0.0], np.cumsum(cost[order])[:-1]])
    weights = np.empty_like(cost)
    weights[order] = np.clip((budget - before) / cost[order], 0, 1)
    return weights
