"""Solves linear programmes for the centre of their optima, which treats like jobs alike; a vertex may not."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Column = npt.NDArray[np.float64]

_MOST_STEPS = 200
_GAP = 1e-9
"""Of prices times slacks, and of the balance, at which the centre is reached."""
_REGULAR = 1e-13
"""Share of the largest diagonal entry that keeps the system regular."""
_SLOWEST = 0.3
"""Least share of the gap that a step leaves: a faster descent would leave the central path and end beside the
centre."""
_INSIDE = 0.99
"""Share of the way to the nearest bound that a step goes."""


def centre_of_optimum(cost: Column, limits: Column, bounds: Column, start: Column) -> Column:
    """Where ``cost @ z`` is least subject to ``limits @ z <= bounds``, from a ``start`` strictly inside.

    Mehrotra's predictor-corrector method. Where many points are optimal, the central path leads to their
    analytic centre.

    >>> square, bounds = np.array([[1.0, 0], [-1, 0], [0, 1], [0, -1]]), np.array([1.0, 0, 1, 0])
    >>> centre_of_optimum(np.array([1.0, 0.0]), square, bounds, np.array([0.4, 0.2])).round(2)
    array([0. , 0.5])
    """
    point, slack = start.copy(), bounds - limits @ start
    price = 1.0 / slack
    single = np.count_nonzero(limits, axis=1) == 1
    several, at = limits[~single], np.abs(limits[single]).argmax(axis=1)
    squares = (limits[single] ** 2).sum(axis=1)
    for _ in range(_MOST_STEPS):
        gap = float(price @ slack) / len(slack)
        unbalanced = cost + limits.T @ price
        if gap < _GAP and np.abs(unbalanced).max() < _GAP:
            break
        weights = price / slack
        system = several.T @ (weights[~single][:, None] * several)
        diagonal = system.diagonal() + np.bincount(at, weights[single] * squares, len(point))
        system[np.diag_indices_from(system)] = diagonal + _REGULAR * max(1.0, float(diagonal.max()))
        guess = _step(system, limits, slack, price, unbalanced, -price * slack)
        reach = min(_reach(slack, guess[1]), _reach(price, guess[2]))
        after = float((price + reach * guess[2]) @ (slack + reach * guess[1])) / len(slack)
        aim = max((after / gap) ** 3, _SLOWEST) * gap
        move, ease, raised = _step(
            system, limits, slack, price, unbalanced, aim - price * slack - guess[1] * guess[2]
        )
        reach = min(1.0, _INSIDE * min(_reach(slack, ease), _reach(price, raised)))
        point, slack, price = point + reach * move, slack + reach * ease, price + reach * raised
    return point


def _step(
    system: Column, limits: Column, slack: Column, price: Column, unbalanced: Column, complementary: Column
) -> tuple[Column, Column, Column]:
    """The Newton step of point, slacks and prices that changes ``price * slack`` by ``complementary``."""
    target = -unbalanced - limits.T @ (complementary / slack)
    move: Column = np.asarray(np.linalg.solve(system, target), dtype=np.float64)
    ease = -limits @ move
    return move, ease, (complementary - price * ease) / slack


def _reach(values: Column, change: Column) -> float:
    """How far along ``change`` the values stay positive, at most one and a bit."""
    falling = change < 0
    return float(np.min(-values[falling] / change[falling], initial=1.0 / _INSIDE))
