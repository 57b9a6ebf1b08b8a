"""Chooses rows without a model: at random, cheap ones sooner, or from the cells of a grid."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from foretrain.measure.candidates import Array
from foretrain.measure.design.criteria import RIDGE, Indices


def random_design(
    features: Array, cost: Array, budget: float, *, ridge: float = RIDGE, seed: int = 0
) -> Indices:
    """Rows in random order for as long as they fit into the budget."""
    return fill(np.random.default_rng(seed).permutation(len(cost)), cost, budget)


def cheap_random_design(
    features: Array, cost: Array, budget: float, *, ridge: float = RIDGE, seed: int = 0
) -> Indices:
    """Rows in random order, cheap ones sooner: chances go by 1 / cost (Efraimidis and Spirakis 2006)."""
    return fill(np.argsort(np.random.default_rng(seed).exponential(size=len(cost)) * cost), cost, budget)


def grid_design(
    features: Array, cost: Array, budget: float, *, ridge: float = RIDGE, seed: int = 0
) -> Indices:
    """Take a row in turn of every cell of a grid over the features' values, fine enough for the budget."""
    ranks = [np.unique(column, return_inverse=True)[1] for column in features.T]
    ties = np.random.default_rng(seed).permutation(len(cost))
    for bins in (2**power for power in range(1, 32)):
        cells = np.zeros(len(cost), dtype=np.int64)
        for rank in ranks:
            level = rank * bins // (rank.max() + 1)
            cells = np.unique(cells * bins + level, return_inverse=True)[1]
        order = _round_robin(cells[ties])
        chosen = fill(ties[order], cost, budget)
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


def fill(order: Indices, cost: Array, budget: float) -> Indices:
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
