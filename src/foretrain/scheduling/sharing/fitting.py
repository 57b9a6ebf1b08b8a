"""Fits the manners of jobs to speeds of pairs that were measured on one GPU."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from foretrain.errors import ForetrainError, InputError
from foretrain.scheduling.sharing.interference import Manners

_TYPICAL = Manners(needs=0.8, bears=1.0, pressure=1.0)
_PULL = 0.05
"""How strongly each figure, as a logarithm, is drawn to its prior, in errors of one pair."""
_OUTLIER = 0.1
"""Relative error beyond which a pair counts less and less."""
_BEYOND = 1e-3
"""Slope where the host hides all waiting, so that the fit sees which way leads out."""


class PairSpeed(NamedTuple):
    """A job beside another: its speed over that alone."""

    job: str
    beside: str
    speed: float


def fit_manners(
    pairs: Sequence[PairSpeed],
    *,
    known: Mapping[str, Manners] | None = None,
    prior: Mapping[str, Manners] | None = None,
) -> dict[str, Manners]:
    """Figures of every job in the pairs. Those that are ``known`` stay; the others are drawn to their
    ``prior``, by default a job that wants the device most of the time."""
    try:
        from scipy.optimize import least_squares
    except ImportError as error:
        raise ForetrainError("fit: scipy is not installed; install foretrain[learn]") from error
    if not pairs or any(not 0 < pair.speed < math.inf for pair in pairs):
        raise InputError("pairs: needed are speeds beside another job over speeds alone, above 0")
    known = dict(known or {})
    names = sorted({name for pair in pairs for name in pair[:2]} - known.keys())
    start = np.array([_logs((prior or {}).get(name, _TYPICAL)) for name in names]).reshape(-1)
    fixed = np.array([_logs(known[name]) for name in sorted(known)]).reshape(-1)
    place = {name: row for row, name in enumerate([*names, *sorted(known)])}
    job = np.array([place[pair.job] for pair in pairs])
    beside = np.array([place[pair.beside] for pair in pairs])
    measured = np.log(np.minimum([pair.speed for pair in pairs], 1.0))

    def residuals(x: np.ndarray) -> np.ndarray:
        needs, bears, pressure = np.concatenate([x, fixed]).reshape(-1, 3).T
        time = 1 / (1 + np.exp(-needs[job])) + np.exp(bears[job] + pressure[beside])
        longer = np.where(time > 1, time, 1 + _BEYOND * (time - 1))
        return np.concatenate([-np.log(longer) - measured, _PULL * (x - start)])

    solution = least_squares(
        residuals,
        start,
        loss="soft_l1",
        f_scale=_OUTLIER,
        max_nfev=80,
        jac_sparsity=_sparsity(job, beside, names),
    )
    return known | {name: _manners(row) for name, row in zip(names, solution.x.reshape(-1, 3), strict=True)}


def _sparsity(job: np.ndarray, beside: np.ndarray, names: Sequence[str]) -> object:
    """Which figures each pair tells of."""
    from scipy.sparse import lil_matrix

    free = 3 * len(names)
    pattern = lil_matrix((len(job) + free, free))
    for row, (one, other) in enumerate(zip(job.tolist(), beside.tolist(), strict=True)):
        columns = [
            *([3 * one, 3 * one + 1] if one < len(names) else []),
            *([3 * other + 2] if other < len(names) else []),
        ]
        for column in columns:
            pattern[row, column] = 1
    for column in range(free):
        pattern[len(job) + column, column] = 1
    return pattern


def _logs(manners: Manners) -> tuple[float, float, float]:
    needs = min(max(manners.needs, 1e-3), 1 - 1e-3)
    bears, pressure = max(manners.bears, 1e-3), max(manners.pressure, 1e-3)
    return math.log(needs / (1 - needs)), math.log(bears), math.log(pressure)


def _manners(row: np.ndarray) -> Manners:
    needs, bears, pressure = row.tolist()
    return Manners(needs=1 / (1 + math.exp(-needs)), bears=math.exp(bears), pressure=math.exp(pressure))
