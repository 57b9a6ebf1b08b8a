"""Solves the programmes by which round-based policies divide the time of kinds of devices among jobs.

Many divisions are often optimal, and which of them a solver ends at, to the last digit, decides between jobs
that are alike. Gavel solves with ECOS; so it is done here where ECOS is installed (``foretrain[gavel]``), and
otherwise by our own play of its method, which ends at the same digits, if later among hundreds of jobs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import numpy as np

from foretrain.errors import InputError
from foretrain.scheduling.result import Column
from foretrain.scheduling.rounds import conic
from foretrain.scheduling.rounds.cones import Matrix

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
    solution = _Programme(worth.shape, gpus, counts, above=1).with_least(worth).solved()
    return _shares(solution[1:], worth.shape)


def least_worst_ratio(
    rates: Column, left: Column, since_s: Column, alone_s: Column, gpus: Column, counts: Column
) -> Column:
    """Shares x for which the largest ``(since_s + left / sum(rates * x)) / alone_s`` of a job is smallest."""
    solution = (
        _Programme(rates.shape, gpus, counts, above=1, below=len(left))
        .with_ratios(rates, left, since_s, alone_s)
        .solved()
    )
    return _shares(solution[1 : 1 + rates.size], rates.shape)


def soonest(rates: Column, left: Column, gpus: Column, counts: Column) -> Column:
    """Shares x for which all jobs end within (nearly) the least time possible."""
    solution, low_s, high_s, reached_s = None, _LEAST_S, _MOST_S, _MOST_S
    least_s = 0.0 if has_ecos() else _least_s(rates, left, gpus, counts)
    while solution is None:
        while _SLACK * low_s < high_s:
            middle_s = (low_s + high_s) / 2
            tried = None
            if middle_s >= least_s:
                tried = _Programme(rates.shape, gpus, counts).with_floor(rates, left / middle_s)
                tried = tried if not has_ecos() or tried.solve() is not None else None
            solution, low_s, high_s = (
                (solution, middle_s, high_s) if tried is None else (tried, low_s, middle_s)
            )
        low_s, reached_s = reached_s, 10 * reached_s
        high_s = reached_s
    return _shares(solution.solved(), rates.shape)


def _least_s(rates: Column, left: Column, gpus: Column, counts: Column) -> float:
    """The least time in which all jobs can end."""
    worth = rates / left[:, None]
    shares = fairest(worth, gpus, counts)
    return 1.0 / float((worth * shares).sum(axis=1).min())


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

    def solved(self) -> Column:
        """The variables of a programme that has a solution."""
        solution = self.solve()
        if solution is None:
            raise InputError(f"policy: no division of time among {self._jobs:,} jobs was found")
        return solution

    def solve(self) -> Column | None:
        """The variables; None where there is no solution."""
        rows, columns, values = (
            np.concatenate([np.asarray(entry[part]) for entry in self._entries]) for part in range(3)
        )
        shape = (len(self._bounds), self._size)
        limits = Matrix(rows.astype(np.int64), columns.astype(np.int64), values.astype(np.float64), shape)
        cost, bounds = np.zeros(self._size), np.array(self._bounds)
        cost[: self._above] = 1.0
        linear = shape[0] - 3 * self._cones
        if has_ecos():
            solution = _by_ecos(cost, limits, bounds, {"l": linear, "q": [3] * self._cones})
            flag = solution["info"]["exitFlag"]
            if flag == 0 or (self._above and flag == 10):
                return np.asarray(solution["x"], dtype=np.float64)
            if not self._above:
                return None
        return conic.solve(cost, limits, bounds, linear=linear, threes=self._cones)


def _by_ecos(cost: Column, limits: Matrix, bounds: Column, cones: Mapping[str, object]) -> Any:
    from scipy.sparse import csc_matrix

    sparse = csc_matrix((limits.values, (limits.rows, limits.columns)), shape=limits.shape)
    sparse.sort_indices()
    return import_module("ecos").solve(cost, sparse, bounds, cones, verbose=False)


def _shares(values: Column, shape: tuple[int, ...]) -> Column:
    return values.reshape(shape, order="F").clip(0.0, 1.0)
