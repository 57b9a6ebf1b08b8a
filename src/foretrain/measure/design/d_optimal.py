"""Chooses the rows that tell most by the determinant of the information matrix: D-optimal designs."""

from __future__ import annotations

import math
from collections.abc import Iterable

import numpy as np

from foretrain.measure.candidates import Array
from foretrain.measure.design.controls import random_design
from foretrain.measure.design.criteria import RIDGE, Indices, information, inverse_of, leverage_of, log_det

_POOL, _BATCH, _BLOCK = 1024, 64, 128
"""Rows that greedy choice looks at closely, those that it takes before it looks at all again, and chosen rows
that are offered replacements at a time."""
_SWEEPS = 20
"""Times that all chosen rows are offered replacements, at most."""
_GAIN = 1e-9
"""Improvements below this are rounding."""
_DRIFT = 1e-6
"""Relative error of updated leverages from which on they are computed anew."""
_SINGULAR = 1e-12


def d_optimal(features: Array, cost: Array, budget: float, *, ridge: float = RIDGE, seed: int = 0) -> Indices:
    """Maximise ``log det(X_S^T X_S + ridge I)`` within the budget.

    The start is the best of three: greedy by gain per cost, greedy by gain, and random (for budgets where
    greedy choices block better ones). Then exchanges after Fedorov (1972) until none improves, in the order
    of Cook and Nachtsheim (1980). Of equals the cheapest is taken, then the seed decides. The rows come in
    greedy order, so that a campaign that is cut off has measured what tells most.
    """
    order = np.lexsort((np.random.default_rng(seed).random(len(cost)), cost))
    x, price = features[order], cost[order]
    starts = [
        greedy(x, price, budget, ridge=ridge),
        np.argsort(order)[random_design(features, cost, budget, seed=seed)],
    ]
    if price.min() < price.max():
        starts.append(greedy(x, price, budget, ridge=ridge, per_cost=False))
    start = max(starts, key=lambda rows: log_det(x[rows], ridge))
    chosen = exchange(x, price, budget, start, ridge=ridge)
    first = greedy(x[chosen], price[chosen], math.inf, ridge=ridge)
    return order[chosen[first]]


def greedy(
    features: Array,
    cost: Array,
    budget: float,
    *,
    ridge: float = RIDGE,
    per_cost: bool = True,
    start: Iterable[int] = (),
) -> Indices:
    """Add the row with the largest gain ``log(1 + x^T M^-1 x)`` (per cost) until the budget is spent.

    Gains only shrink as rows are added (Minoux 1978), so rows outside the pool of the best need no update
    before a gain in the pool falls below theirs; inside it ``M^-1`` and the gains follow by the
    Sherman-Morrison formula.
    """
    chosen = list(start)
    free = np.ones(len(cost), dtype=bool)
    free[chosen] = False
    left = budget - math.fsum(cost[chosen])
    price = cost if per_cost else np.ones_like(cost)
    while True:
        inverse = inverse_of(information(features[chosen], ridge))
        leverage = np.maximum(leverage_of(features, inverse), 0)
        value = np.where(free & (cost <= left), np.log1p(leverage) / price, -1.0)
        pool, bound = _best(value, _POOL)
        picked = _greedy_in_pool(features[pool], cost[pool], price[pool], left, inverse, bound)
        if not picked:
            return np.array(chosen, dtype=np.intp)
        rows = pool[picked]
        chosen.extend(rows.tolist())
        free[rows] = False
        left -= math.fsum(cost[rows])


def _best(value: Array, size: int) -> tuple[Indices, float]:
    """The rows of the largest values that are not negative, and the largest value that is left out."""
    if len(value) <= size:
        return np.flatnonzero(value >= 0), -1.0
    split = np.argpartition(-value, size)
    pool = np.sort(split[:size])
    return pool[value[pool] >= 0], float(value[split[size]])


def _greedy_in_pool(
    x: Array, cost: Array, price: Array, left: float, inverse: Array, bound: float
) -> list[int]:
    """Greedy choice among a few rows while their best is the best of all and updates keep their digits."""
    leverage = np.maximum(leverage_of(x, inverse), 0)
    free = np.ones(len(cost), dtype=bool)
    picked: list[int] = []
    while len(picked) < _BATCH and len(x):
        value = np.where(free & (cost <= left), np.log1p(np.maximum(leverage, 0)) / price, -1.0)
        best = int(value.argmax())
        if value[best] < 0 or (picked and value[best] < bound):
            break
        direction = inverse @ x[best]
        actual = max(float(x[best] @ direction), 0.0)
        if picked and abs(actual - leverage[best]) > _DRIFT * (1 + actual):
            break
        inverse = inverse - np.outer(direction, direction) / (1 + actual)
        leverage -= (x @ direction) ** 2 / (1 + actual)
        free[best] = False
        left -= float(cost[best])
        picked.append(best)
    return picked


def exchange(
    features: Array, cost: Array, budget: float, chosen: Indices, *, ridge: float = RIDGE
) -> Indices:
    """Swap chosen rows for better ones within the budget, and spend what that leaves, while that improves."""
    value = log_det(features[chosen], ridge)
    for _ in range(_SWEEPS):
        swapped = _sweep(features, cost, budget, chosen, ridge)
        filled = greedy(features, cost, budget, ridge=ridge, start=swapped.tolist())
        better = log_det(features[filled], ridge)
        if better <= value + _GAIN:
            break
        chosen, value = filled, better
    return chosen


def _sweep(features: Array, cost: Array, budget: float, chosen: Indices, ridge: float) -> Indices:
    """Offer every chosen row, the least informative first, its best replacement."""
    chosen = chosen.copy()
    left = budget - math.fsum(cost[chosen])
    inverse = inverse_of(information(features[chosen], ridge))
    leverage = leverage_of(features, inverse)
    order = np.argsort(leverage[chosen], kind="stable")
    for places in np.array_split(order, math.ceil(len(order) / _BLOCK)):
        swaps = 0
        for place, new in _proposals(features, cost, chosen, places, inverse, leverage, left):
            spare = left + cost[chosen[place]] - cost[new]
            if spare < 0 or new in chosen:
                continue
            ratio, swapped = _swap(inverse, features[chosen[place]], features[new])
            if ratio > 1 + _GAIN:
                inverse, left, chosen[place] = swapped, spare, new
                swaps += 1
        if swaps:
            inverse = inverse_of(information(features[chosen], ridge))
            leverage = leverage_of(features, inverse)
    return chosen


def _proposals(
    features: Array,
    cost: Array,
    chosen: Indices,
    places: Indices,
    inverse: Array,
    leverage: Array,
    left: float,
) -> list[tuple[int, int]]:
    """The best replacement of each place, best first, by Fedorov's delta.

    The determinant changes by ``(1 + d_j)(1 - d_i) + d_ij^2``. As ``d_ij^2 <= d_i d_j``, only rows with ``d_j
    > d_i`` can improve the design.
    """
    old = chosen[places]
    open_ = leverage > leverage[old].min()
    open_ &= cost <= cost[old].max() + left
    open_[chosen] = False
    new = np.flatnonzero(open_)
    if not len(new):
        return []
    can_improve = leverage[old] < leverage[new].max()
    old, places = old[can_improve], places[can_improve]
    ratio = (features[old] @ inverse) @ features[new].T
    np.square(ratio, out=ratio)
    ratio += np.multiply.outer(1 - leverage[old], 1 + leverage[new])
    ratio[cost[new] > cost[old][:, None] + left] = 0
    best = ratio.argmax(axis=1)
    gains = ratio[np.arange(len(old)), best]
    order = np.argsort(-gains, kind="stable")
    return [(int(places[row]), int(new[best[row]])) for row in order if gains[row] > 1 + _GAIN]


def _swap(inverse: Array, old: Array, new: Array) -> tuple[float, Array]:
    """The factor of the determinant when a row is replaced, and the new inverse, by Sherman and Morrison."""
    taken = inverse @ old
    without = 1 - old @ taken
    if without < _SINGULAR:
        return 0.0, inverse
    inverse = inverse + np.outer(taken, taken) / without
    added = inverse @ new
    with_ = 1 + new @ added
    return float(without * with_), inverse - np.outer(added, added) / with_


def half_d_optimal(
    features: Array, cost: Array, budget: float, *, ridge: float = RIDGE, seed: int = 0
) -> Indices:
    """Half of the budget D-optimal and the rest random, in turns.

    Corners fix the coefficients of a law; the inside is for what a regressor finds that no law says.
    """
    corners = np.array([], dtype=np.intp)
    if budget / 2 >= cost.min():
        corners = d_optimal(features, cost, budget / 2, ridge=ridge, seed=seed)
    rest = np.setdiff1d(np.arange(len(cost)), corners)
    if not len(rest):
        return corners
    inside = random_design(features[rest], cost[rest], budget - math.fsum(cost[corners]), seed=seed)
    places = [2 * np.arange(len(corners)), 2 * np.arange(len(inside)) + 1]
    both: Indices = np.concatenate([corners, rest[inside]])
    return both[np.argsort(np.concatenate(places), kind="stable")]
