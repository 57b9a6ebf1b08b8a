"""Divides the time of kinds of devices among jobs and pairs of jobs by linear programmes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from foretrain.errors import ForetrainError
from foretrain.scheduling.result import Column

_SLACK = 1e-9
_PRICE = 1e-7
"""From which on a job's price in a programme says that it cannot have more."""


class Division:
    """Shares x of the time of devices. A row of ``units`` is a job or two that share devices, by number;
    ``speeds`` has, for each unit, the work per second of each of its jobs on each kind of device."""

    def __init__(
        self, units: Sequence[Sequence[int]], speeds: Sequence[Column], gpus: Column, counts: Column
    ) -> None:
        sparse = _scipy("sparse")
        kinds = len(counts)
        self._shape, self._jobs = (len(units), kinds), len(gpus)
        places = [
            (job, unit * kinds + kind, float(speeds[unit][which, kind]), unit, kind)
            for unit, jobs in enumerate(units)
            for which, job in enumerate(jobs)
            for kind in range(kinds)
        ]
        rows, columns = [place[0] for place in places], [place[1] for place in places]
        size = (self._jobs, len(units) * kinds)
        self._throughput = sparse.csr_matrix(([place[2] for place in places], (rows, columns)), shape=size)
        whole = sparse.csr_matrix((np.ones(len(places)), (rows, columns)), shape=size)
        held = [(kind, unit * kinds + kind, gpus[units[unit][0]]) for *_, unit, kind in places]
        kept = sorted({(kind, column): value for kind, column, value in held}.items())
        devices = sparse.csr_matrix(
            ([value for _, value in kept], ([key[0] for key, _ in kept], [key[1] for key, _ in kept])),
            shape=(kinds, size[1]),
        )
        self._limits = sparse.vstack([whole, devices])
        self._room = np.concatenate([np.ones(self._jobs), counts])
        runs = np.array([(speeds[unit] > 0).all(axis=0) for unit in range(len(units))]).ravel()
        self._bounds = [(0.0, 1.0 if each else 0.0) for each in runs.tolist()]

    def fairest(self, worth: Column) -> Column:
        """Shares for which the least throughput of a job times its worth is greatest."""
        solution = self._level(worth, np.ones(self._jobs, dtype=bool), np.zeros(self._jobs))
        assert solution is not None
        return self._shares(solution.x)

    def filled(self, worth: Column) -> Column:
        """The same, and then the least of the others, and so on, until no job can have more.

        A job whose row has a price cannot have more in any best division, so at least one is settled each
        time.
        """
        settled, floor, best = np.zeros(self._jobs, dtype=bool), np.zeros(self._jobs), None
        while not settled.all():
            solution = self._level(worth, ~settled, floor)
            if solution is None:  # by rounding, what is settled is not quite possible any more
                break
            best, level = solution.x, float(solution.x[-1])
            open_jobs = np.flatnonzero(~settled)
            prices = -solution.ineqlin.marginals[: self._jobs][open_jobs]
            now = open_jobs[(prices > _PRICE) | (prices == prices.max())]
            settled[now], floor[now] = True, level
        assert best is not None
        return self._shares(best)

    def greatest(self, worth: Column, value: Column, floor: Column) -> Column | None:
        """Shares for which the sum of throughputs, each times the worth of its job and the value of the kind
        of device, is greatest, and every job has at least its floor; None where there are none."""
        units, _ = self._shape
        gain = (self._throughput.T @ worth) * np.tile(value, units)
        solution = _scipy("optimize").linprog(
            -gain,
            A_ub=_scipy("sparse").vstack([-self._throughput, self._limits]).tocsr(),
            b_ub=np.concatenate([-floor * (1 - _SLACK), self._room]),
            bounds=self._bounds,
            method="highs",
        )
        if solution.status != 0:
            return None
        shares: Column = solution.x.reshape(self._shape).clip(0.0, 1.0)
        return shares

    def reaching(self, floor: Column) -> Column | None:
        """Shares for which every job has at least so much throughput; None where there are none."""
        scale = 1 / np.maximum(floor, _SLACK)
        solution = self._level(scale, np.ones(self._jobs, dtype=bool), np.zeros(self._jobs))
        if solution is None or solution.x[-1] < 1 - _SLACK:
            return None
        return self._shares(solution.x)

    def _level(self, worth: Column, rising: npt.NDArray[np.bool_], floor: Column) -> Any:
        """The greatest level t that all rising jobs reach, while the others keep their floor."""
        sparse, columns = _scipy("sparse"), self._limits.shape[1]
        above = sparse.hstack(
            [-sparse.diags(worth) @ self._throughput, sparse.csr_matrix(rising.astype(float)[:, None])]
        )
        within = sparse.hstack([self._limits, sparse.csr_matrix((self._limits.shape[0], 1))])
        least = np.where(rising, 0.0, -floor * (1 - _SLACK))
        solution = _scipy("optimize").linprog(
            np.append(np.zeros(columns), -1.0),
            A_ub=sparse.vstack([above, within]).tocsr(),
            b_ub=np.concatenate([least, self._room]),
            bounds=[*self._bounds, (0.0, None)],
            method="highs",
        )
        return solution if solution.status == 0 else None

    def _shares(self, x: Column) -> Column:
        shares: Column = x[:-1].reshape(self._shape).clip(0.0, 1.0)
        return shares


def _scipy(part: str) -> Any:
    import importlib

    try:
        return importlib.import_module(f"scipy.{part}")
    except ImportError as error:
        raise ForetrainError("policy: scipy is not installed; install foretrain[learn]") from error
