"""Chooses which candidates are worth measuring within a budget, by their features and costs.

A linear model ``y = X b + noise`` that is fitted on the chosen rows S has the information matrix ``M = X_S^T
X_S`` (+ ridge I), and its coefficients the covariance ``M^-1``. D-optimal designs maximise ``log det M``,
A-optimal ones minimise ``trace M^-1``.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from foretrain.errors import InputError, invalid, unknown
from foretrain.measure.candidates import Array, Candidates
from foretrain.units import format_seconds

Indices = npt.NDArray[np.intp]

RIDGE = 1e-6
"""Added to the diagonal of the information matrix, so that fewer rows than coefficients can be compared;
small beside unit features."""

_POOL, _BATCH, _BLOCK = 1024, 64, 128
"""Rows that greedy choice looks at closely, those that it takes before it looks at all again, and chosen rows
that are offered replacements at a time."""
_GAIN = 1e-9
"""Improvements below this are rounding."""
_DRIFT = 1e-6
"""Relative error of updated leverages from which on they are computed anew."""
_SINGULAR = 1e-12


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Design:
    """What to measure: rows of the candidates, in the order of measuring, and how much they tell."""

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
    def __call__(
        self, features: Array, cost: Array, budget: float, *, ridge: float = RIDGE, seed: int = 0
    ) -> Indices: ...


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
        features, prior = _beside(features, information(known, ridge)), 1.0
    chosen = METHODS[method](features, cost, budget, ridge=prior, seed=seed)
    rows = candidates.features[chosen]
    rows = rows if known is None else np.vstack([known, rows])
    return Design(
        method=method,
        chosen=chosen,
        cost_s=math.fsum(candidates.cost_s[chosen]),
        log_det=log_det(rows, ridge),
        trace_inverse=trace_inverse(rows / _sizes(candidates.features), ridge),
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
    """What each candidate takes of the budget, and the budget: seconds, or one each of a number."""
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


# Criteria


def information(rows: Array, ridge: float = RIDGE) -> Array:
    """``X^T X + ridge I``."""
    matrix: Array = rows.T @ rows
    matrix.flat[:: len(matrix) + 1] += ridge
    return matrix


def log_det(rows: Array, ridge: float = RIDGE) -> float:
    """``log det(X^T X + ridge I)``."""
    return float(np.linalg.slogdet(information(rows, ridge))[1])


def trace_inverse(rows: Array, ridge: float = RIDGE) -> float:
    """``trace (X^T X + ridge I)^-1``."""
    return float((1 / np.maximum(np.linalg.eigvalsh(information(rows, ridge)), ridge)).sum())


def _beside(features: Array, prior: Array) -> Array:
    """Coordinates in which the prior information P is I: as ``det(X^T X + P) = det(P) det(Z^T Z + I)`` for
    ``Z = X L^-T`` and ``P = L L^T``, a design beside what is known is one with a ridge of 1."""
    whitened: Array = np.linalg.solve(np.linalg.cholesky(prior), features.T).T
    return whitened


def _inverse(matrix: Array) -> Array:
    return np.linalg.inv(matrix).astype(np.float64, copy=False)


def _leverage(features: Array, inverse: Array) -> Array:
    """``x_i^T M^-1 x_i`` of every row: the variance of the model's prediction there."""
    leverage: Array = np.einsum("ij,ij->i", features @ inverse, features)
    return leverage


def _sizes(features: Array) -> Array:
    """The mean absolute value of every feature, by which Ernest divides them."""
    sizes = np.abs(features).mean(axis=0)
    return np.where(sizes > 0, sizes, 1.0)


# D-optimal


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
        inverse = _inverse(information(features[chosen], ridge))
        leverage = np.maximum(_leverage(features, inverse), 0)
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
    leverage = np.maximum(_leverage(x, inverse), 0)
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
    features: Array, cost: Array, budget: float, chosen: Indices, *, ridge: float = RIDGE, sweeps: int = 20
) -> Indices:
    """Swap chosen rows for better ones within the budget, and spend what that leaves, while that improves."""
    value = log_det(features[chosen], ridge)
    for _ in range(sweeps):
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
    inverse = _inverse(information(features[chosen], ridge))
    leverage = _leverage(features, inverse)
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
            inverse = _inverse(information(features[chosen], ridge))
            leverage = _leverage(features, inverse)
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


# A-optimal

_REMEMBERED, _ARMIJO, _LEAST_PART = 10, 1e-4, 1e-10
"""Of the line search: values that a step may exceed, its least descent, and where it ends."""


def a_optimal(
    features: Array, cost: Array, budget: float, *, keep: float = 0.3, ridge: float = RIDGE, seed: int = 0
) -> Indices:
    """Ernest's design (Venkataraman et al., NSDI 2016): rows whose weight in its problem is above ``keep``.

    They are taken by falling weight for as long as they fit into the budget; rows of lower weight follow only
    while there are fewer rows than features.
    """
    weights = a_weights(features, cost, budget, ridge=ridge)
    ties = np.random.default_rng(seed).random(len(cost))
    order = np.lexsort((ties, -np.round(weights, 6)))
    kept = order[weights[order] > keep]
    chosen = _fill(kept, cost, budget)
    lacking = max(1, features.shape[1]) - len(chosen)
    if lacking > 0:
        more = _fill(order[weights[order] <= keep], cost, budget - math.fsum(cost[chosen]))
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
    x = features / _sizes(features)
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
    inverse = _inverse(information(x * np.sqrt(np.maximum(weights, 0))[:, None], ridge))
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


# Controls


def random_design(
    features: Array, cost: Array, budget: float, *, ridge: float = RIDGE, seed: int = 0
) -> Indices:
    """Rows in random order for as long as they fit into the budget."""
    return _fill(np.random.default_rng(seed).permutation(len(cost)), cost, budget)


def cheap_random_design(
    features: Array, cost: Array, budget: float, *, ridge: float = RIDGE, seed: int = 0
) -> Indices:
    """Rows in random order, cheap ones sooner: chances go by 1 / cost (Efraimidis and Spirakis 2006)."""
    return _fill(np.argsort(np.random.default_rng(seed).exponential(size=len(cost)) * cost), cost, budget)


def grid_design(
    features: Array, cost: Array, budget: float, *, ridge: float = RIDGE, seed: int = 0
) -> Indices:
    """One row in turn of every cell of a grid over the features' values, fine enough for the budget."""
    ranks = [np.unique(column, return_inverse=True)[1] for column in features.T]
    ties = np.random.default_rng(seed).permutation(len(cost))
    for bins in (2**power for power in range(1, 32)):
        cells = np.zeros(len(cost), dtype=np.int64)
        for rank in ranks:
            level = rank * bins // (rank.max() + 1)
            cells = np.unique(cells * bins + level, return_inverse=True)[1]
        order = _round_robin(cells[ties])
        chosen = _fill(ties[order], cost, budget)
        if len(chosen) <= cells.max() + 1 or bins > max(rank.max() for rank in ranks):
            return chosen
    raise AssertionError("a grid of 2^31 bins separates all values")


def _round_robin(cells: npt.NDArray[np.int64]) -> Indices:
    """The first row of every cell, then the second, and so on; rows of one round in the order given."""
    order = np.argsort(cells, kind="stable")
    starts = np.searchsorted(cells[order], cells[order])
    turn = np.empty(len(cells), dtype=np.intp)
    turn[order] = np.arange(len(cells)) - starts
    return np.argsort(turn, kind="stable")


def _fill(order: Indices, cost: Array, budget: float) -> Indices:
    """The rows in this order, without those that do not fit into what is left of the budget."""
    left, cheapest = budget, float(cost.min())
    chosen = []
    for row, price in zip(order.tolist(), cost[order].tolist(), strict=True):
        if left < cheapest:
            break
        if price <= left:
            chosen.append(row)
            left -= price
    return np.array(chosen, dtype=np.intp)


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
