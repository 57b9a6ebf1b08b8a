"""Solves the programmes by which round-based policies divide the time of kinds of devices among jobs.
Solved by ECOS, which Gavel uses, where it is installed (``foretrain[gavel]``): many divisions are often
optimal, and which of them a solver ends at, to the last digit, decides between jobs that are alike. Otherwise
the centre of the optimal divisions is taken, rounded, so that jobs that are alike get the same.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib import import_module
from importlib.util import find_spec

import numpy as np

from foretrain.scheduling.centre import Column, centre_of_optimum

_DIGITS = 6
"""Of shares of time from our own method: its rounding must not decide between jobs that are alike; their
order of arrival does."""
_SLACK = 1.05
"""How far the longest duration may be above the least possible one (Gavel stops its search there)."""
_LEAST_S, _MOST_S = 100.0, 1e6
"""Where Gavel's search for the least total duration begins."""


def has_ecos() -> bool:
    """Whether the solver that Gavel uses is installed."""
    return find_spec("ecos") is not None


def fairest(worth: Column, gpus: Column, counts: Column) -> Column:
    """Shares x for which the least ``sum(worth * x)`` of a job is largest.

    No job gets more than the whole time, no kind of device gives more than it has.
    """
    if has_ecos():
        solution = _Programme(worth.shape, gpus, counts, above=1).with_least(worth).solve()
        if solution is not None:
            return _shares(solution[1:], worth.shape)
    return _centre(worth, gpus, counts)[0].round(_DIGITS)


def least_worst_ratio(
    rates: Column, left: Column, since_s: Column, alone_s: Column, gpus: Column, counts: Column
) -> Column:
    """Shares x for which the largest ``(since_s + left / sum(rates * x)) / alone_s`` of a job is smallest."""
    if has_ecos():
        solution = (
            _Programme(rates.shape, gpus, counts, above=1, below=len(left))
            .with_ratios(rates, left, since_s, alone_s)
            .solve()
        )
        if solution is not None:
            return _shares(solution[1 : 1 + rates.size], rates.shape)

    def needed(ratio: float) -> Column:
        worth: Column = rates * ((ratio * alone_s - since_s) / left)[:, None]
        return worth

    least = float((since_s / alone_s).max())
    most = _where_one(lambda ratio: _centre(needed(ratio), gpus, counts)[1], least, least + 1.0)
    return _centre(needed(most), gpus, counts)[0].round(_DIGITS)


def soonest(rates: Column, left: Column, gpus: Column, counts: Column) -> Column:
    """Shares x for which all jobs end within (nearly) the least time possible."""
    solution, low_s, high_s, reached_s = None, _LEAST_S, _MOST_S, _MOST_S
    least_s = 0.0 if has_ecos() else 1 / _centre(rates / left[:, None], gpus, counts)[1]
    while solution is None:
        while _SLACK * low_s < high_s:
            middle_s = (low_s + high_s) / 2
            if has_ecos():
                tried = _Programme(rates.shape, gpus, counts).with_floor(rates, left / middle_s).solve()
            else:
                tried = np.zeros(0) if middle_s >= least_s else None
            solution, low_s, high_s = (
                (solution, middle_s, high_s) if tried is None else (tried, low_s, middle_s)
            )
        low_s, reached_s = reached_s, 10 * reached_s
        last_s, high_s = high_s, reached_s
    if has_ecos():
        return _shares(solution, rates.shape)
    return _within(rates / left[:, None] * last_s, gpus, counts).round(_DIGITS)


class _Programme:
    """Least ``cost @ z`` subject to ``limits @ z <= bounds`` (and cones of three rows).

    The variables z are those above, the shares by kind of device, and those below. Rows and columns stand in
    the order in which CVXPY gives them to ECOS, so that its rounding is the same.
    """

    def __init__(
        self, shape: tuple[int, ...], gpus: Column, counts: Column, *, above: int = 0, below: int = 0
    ) -> None:
        self._jobs, self._kinds = shape
        self._above, self._size = above, above + self._jobs * self._kinds + below
        self._entries: list[tuple[Sequence[int], Sequence[int], Sequence[float]]] = []
        self._bounds: list[float] = []
        self._cones = 0
        self._gpus, self._counts = gpus, counts

    def _place(self, job: int, kind: int) -> int:
        return self._above + kind * self._jobs + job

    def _row(self, columns: Sequence[int], values: Sequence[float], bound: float) -> None:
        self._entries.append(([len(self._bounds)] * len(columns), columns, values))
        self._bounds.append(bound)

    def _of(self, job: int) -> list[int]:
        return [self._place(job, kind) for kind in range(self._kinds)]

    def _fits(self) -> _Programme:
        """Shares are not negative, kinds give what they have, jobs get the whole time at most."""
        for column in range(self._above, self._above + self._jobs * self._kinds):
            self._row([column], [-1.0], 0.0)
        for kind in range(self._kinds):
            self._row(
                [self._place(job, kind) for job in range(self._jobs)],
                self._gpus.tolist(),
                float(self._counts[kind]),
            )
        for job in range(self._jobs):
            self._row(self._of(job), [1.0] * self._kinds, 1.0)
        return self

    def with_least(self, worth: Column) -> _Programme:
        for job in range(self._jobs):
            self._row([0, *self._of(job)], [-1.0, *(-worth[job]).tolist()], 0.0)
        return self._fits()

    def with_floor(self, rates: Column, floor: Column) -> _Programme:
        self._fits()
        for job in range(self._jobs):
            self._row(self._of(job), (-rates[job]).tolist(), -float(floor[job]))
        return self

    def with_ratios(self, rates: Column, left: Column, since_s: Column, alone_s: Column) -> _Programme:
        """A further variable u of each job is at least ``1 / r`` with ``r = sum(rates * x)``.

        That is: ``(r + u, r - u, 2)`` lies in a second-order cone.
        """
        first = self._size - self._jobs
        for job in range(self._jobs):
            part = 1 / float(alone_s[job])
            self._row([0, first + job], [-1.0, float(left[job]) * part], -(float(since_s[job]) * part))
        self._fits()
        for job in range(self._jobs):
            for sign in (-1.0, 1.0):
                self._row([*self._of(job), first + job], [*(-rates[job]).tolist(), sign], 0.0)
            self._row([], [], 2.0)
        self._cones = self._jobs
        return self

    def solve(self) -> Column | None:
        """The variables; None where there is no solution."""
        from scipy.sparse import csc_matrix

        rows, columns, values = (
            np.concatenate([entry[part] for entry in self._entries]) for part in range(3)
        )
        shape = (len(self._bounds), self._size)
        limits = csc_matrix((values.astype(float), (rows.astype(int), columns.astype(int))), shape=shape)
        limits.sort_indices()
        cost = np.zeros(self._size)
        cost[: self._above] = 1.0
        dims = {"l": shape[0] - 3 * self._cones, "q": [3] * self._cones}
        solution = import_module("ecos").solve(cost, limits, np.array(self._bounds), dims, verbose=False)
        accurate = solution["info"]["exitFlag"] == 0 or (self._above and solution["info"]["exitFlag"] == 10)
        return np.asarray(solution["x"], dtype=np.float64) if accurate else None


def _shares(values: Column, shape: tuple[int, ...]) -> Column:
    return values.reshape(shape, order="F").clip(0.0, 1.0)


# Where ECOS is not installed


def _centre(worth: Column, gpus: Column, counts: Column) -> tuple[Column, float]:
    """The centre of the fairest shares, and what they give to the job that has least."""
    jobs, kinds = worth.shape
    scale = float(np.median(worth[worth > 0])) if (worth > 0).any() else 1.0
    limits, bounds, start = _fitting(gpus, counts, jobs, kinds)
    least = np.hstack([-_by_job(worth / scale), np.ones((jobs, 1))])
    limits = np.vstack([least, np.hstack([limits, np.zeros((len(limits), 1))])])
    begin = np.append(start.ravel(), 0.5 * float((worth / scale * start).sum(axis=1).min()) - 1e-3)
    cost = np.append(np.zeros(jobs * kinds), -1.0)
    solution = centre_of_optimum(cost, limits, np.concatenate([np.zeros(jobs), bounds]), begin)
    return solution[:-1].reshape(jobs, kinds).clip(0.0, 1.0), float(solution[-1]) * scale


def _within(worth: Column, gpus: Column, counts: Column) -> Column:
    """The centre of all shares that are worth at least 1 to every job."""
    jobs, kinds = worth.shape
    limits, bounds, _ = _fitting(gpus, counts, jobs, kinds)
    inside = 0.999 * _centre(worth, gpus, counts)[0] + 1e-6
    limits, bounds = np.vstack([limits, -_by_job(worth)]), np.concatenate([bounds, np.full(jobs, -1.0)])
    solution = centre_of_optimum(np.zeros(jobs * kinds), limits, bounds, inside.ravel())
    return solution.reshape(jobs, kinds).clip(0.0, 1.0)


def _by_job(values: Column) -> Column:
    """A row for each job, with its values at the places of its shares."""
    jobs, kinds = values.shape
    rows = np.zeros((jobs, jobs * kinds))
    rows[np.arange(jobs).repeat(kinds), np.arange(jobs * kinds)] = values.ravel()
    return rows


def _fitting(gpus: Column, counts: Column, jobs: int, kinds: int) -> tuple[Column, Column, Column]:
    """Limits and bounds of shares that fit the cluster, and shares strictly inside."""
    capacity = np.zeros((kinds, jobs * kinds))
    for kind in range(kinds):
        capacity[kind, kind::kinds] = gpus
    limits = np.vstack([-np.eye(jobs * kinds), capacity, _by_job(np.ones((jobs, kinds)))])
    bounds = np.concatenate([np.zeros(jobs * kinds), counts, np.ones(jobs)])
    return limits, bounds, np.tile(np.minimum(0.5 * counts / gpus.sum(), 0.5 / kinds), (jobs, 1))


def _where_one(value: Callable[[float], float], low: float, high: float) -> float:
    """Where a rising function, which is 0 at ``low``, is 1, to nine digits.

    By false position, in which the end that stays counts for less (Illinois).
    """
    below, above = -1.0, value(high) - 1
    while above < 0:
        low, below, high = high, above, low + 2 * (high - low)
        above = value(high) - 1
    for _ in range(100):
        middle = high - above * (high - low) / (above - below)
        if high - low < 1e-9 * high or not low < middle < high:
            break
        excess = value(middle) - 1
        if 0 <= excess < 1e-10:
            return middle
        if excess < 0:
            low, below, above = middle, excess, above / 2
        else:
            high, above, below = middle, excess, below / 2
    return high
