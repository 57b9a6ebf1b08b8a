"""Runs of one model at several scales in; laws of their times out: one of computing and exchanging, fitted with priors, and sums of growing terms."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from foretrain.predictors.ray_models.columns import Array, Table

_NOISE = 0.07
"""Relative scatter of step times that the priors are weighed against."""
_MEANS = np.array([-2.0, -0.5, -3.0, -4.0, -5.0, -2.0, -4.0, -4.0, -5.0, -5.0, -1.0, 1.5, -1.0])
_DEVIATIONS = np.array([2.0, 1.5, 2.0, 1.5, 1.5, 2.0, 1.5, 1.5, 1.5, 1.5, 1.5, 1.0, 1.0])
"""Priors of the thirteen numbers, as logarithms of shares of a typical time (the last three: overlap, cores, crowding). They are wide: they
decide only what the runs do not, so that three runs give a law and twenty give their own."""
_STARTS = np.array([
    [0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0],
    [0, 0, 1, 1, 0, 1, 1, 1, 0, 0, 2, 0, 0],
    [0, 0, 2, 3, 0, 2, 3, 0, 0, 0, -3, 0, -2],
], dtype=np.float64)  # fmt: skip
"""Where the fit begins, from the priors: as they are; with exchange that hides behind computing; with exchange that adds to it."""
_LEVEL_COMPUTING, _LEVEL_EXCHANGING = 0.35, 0.7
"""How far, as a logarithm, one setting may move either part."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Law:
    """``time = start + steps (computing^g + exchanging^g)^(1/g)``, after the throughput model of Pollux (Qiao et al., OSDI 2021).

    Computing is a constant and a part in proportion to the work, which cores divide in part and neighbours on the node slow down; exchanging is, inside
    a node and between nodes, a constant, a part with the logarithm and a part with the number of members. ``g`` from 1 to 10 says how far the two overlap. Each
    setting multiplies both parts by factors of its own.
    """

    numbers: Array
    typical_s: float
    typical_work: float

    @classmethod
    def fit(cls, table: Table, times_s: Array) -> Law:
        from scipy.optimize import least_squares

        logs = np.log(times_s)
        typical_s, typical_work = (
            float(np.exp((logs - np.log(table.steps)).mean())),
            float(np.exp(np.log(table.work).mean())),
        )
        count = table.levels.shape[1]
        means = np.concatenate([_MEANS, np.zeros(2 * count)])
        deviations = np.concatenate(
            [_DEVIATIONS, np.full(count, _LEVEL_COMPUTING), np.full(count, _LEVEL_EXCHANGING)]
        )

        def misses(numbers: Array) -> Array:
            told = cls(numbers=numbers, typical_s=typical_s, typical_work=typical_work).log_times(table)
            return np.concatenate([(told - logs) / _NOISE, (numbers - means) / deviations])

        starts = means + np.column_stack([_STARTS, np.zeros((len(_STARTS), 2 * count))])
        found = [least_squares(misses, start, loss="soft_l1", max_nfev=40) for start in starts]
        best = min(found, key=lambda one: one.cost)
        return cls(numbers=best.x, typical_s=typical_s, typical_work=typical_work)

    def log_times(self, table: Table) -> Array:
        shares = np.exp(np.clip(self.numbers[:10], -30, 30))
        overlap, cores, crowding = self.numbers[10:13]
        count = table.levels.shape[1]
        computing_level, exchanging_level = self.numbers[13 : 13 + count], self.numbers[13 + count :]
        near, far = table.per_node, table.nodes
        scaled = shares[1] * (table.work / self.typical_work) * table.cores ** (-1.2 * _sigmoid(cores))
        computing = (
            (shares[0] + scaled)
            * (1 + np.exp(crowding - 2) * np.log(near))
            * np.exp(table.levels @ computing_level)
        )
        inside = (near > 1) * (shares[2] + shares[3] * np.log(near) + shares[4] * (near - 1))
        between = (far > 1) * (
            shares[5] + shares[6] * np.log(far) + shares[7] * np.log(near) + shares[8] * (far - 1)
        )
        exchanging = (inside + between) * np.exp(table.levels @ exchanging_level)
        power = 1 + 9 * _sigmoid(overlap)
        larger = np.maximum(computing, exchanging)
        step = larger * ((computing / larger) ** power + (exchanging / larger) ** power) ** (1 / power)
        start = np.where(table.steps > 1, shares[9] * 10, 0.0)
        told: Array = np.log(self.typical_s * (start + table.steps * step))
        return told


def _sigmoid(value: float) -> float:
    return float(1 / (1 + np.exp(-np.clip(value, -30, 30))))


@dataclass(frozen=True, slots=True, kw_only=True)
class Sum:
    """``time = sum of weights x terms``, no weight negative, fitted in relative error: Ernest's four terms and others that only grow."""

    weights: Array
    kept: tuple[int, ...]
    typical_work: float

    @classmethod
    def fit(cls, table: Table, times_s: Array, *, select: bool) -> Sum:
        typical = float(np.exp(np.log(table.work).mean()))
        rows = _growing(table, typical) / times_s[:, None]
        kept = _selected(rows) if select else tuple(range(rows.shape[1]))
        return cls(weights=_nnls(rows[:, kept]), kept=kept, typical_work=typical)

    def log_times(self, table: Table) -> Array:
        times_s = _growing(table, self.typical_work)[:, self.kept] @ self.weights
        told: Array = np.log(np.maximum(times_s, 1e-12))
        return told


def _growing(table: Table, typical_work: float) -> Array:
    workers, nodes, batch = table.workers, table.nodes, table.work / typical_work
    several, spread, one = (workers > 1).astype(float), (nodes > 1).astype(float), np.ones(len(workers))
    rows = [
        one, batch, batch / table.cores, np.log(workers), workers, several, np.log(nodes), nodes - 1, spread, batch * np.log(workers), batch * spread,
        *(level * factor for level in table.levels.T for factor in (one, batch, workers)),
    ]  # fmt: skip
    per_step = np.column_stack(rows) * table.steps[:, None]
    return np.column_stack([per_step, np.where(table.steps > 1, 1.0, 0.0)])


def _nnls(rows: Array) -> Array:
    from scipy.optimize import nnls

    solution: Array = nnls(rows, np.ones(len(rows)), maxiter=50 * rows.shape[1])[0]
    return solution


def _selected(rows: Array) -> tuple[int, ...]:
    parts = np.arange(len(rows)) % min(5, len(rows))

    def error(chosen: list[int]) -> float:
        trial = rows[:, chosen]
        misses = [np.abs(trial[parts == part] @ _nnls(trial[parts != part]) - 1) for part in np.unique(parts)]
        return float(np.concatenate(misses).mean())

    return forward_selection(rows.shape[1], error, start=(0,), most=6)


def forward_selection(
    count: int, error: Callable[[list[int]], float], *, start: tuple[int, ...] = (), most: int
) -> tuple[int, ...]:
    """Of so many terms, one after the other that which lowers the error of left-out runs most, until none lowers it by two percent."""
    chosen, best = list(start), np.inf
    while len(chosen) < min(most, count):
        errors = {new: error([*chosen, new]) for new in range(count) if new not in chosen}
        new = min(errors, key=lambda one: errors[one])
        if errors[new] > 0.98 * best:
            break
        chosen.append(new)
        best = errors[new]
    return tuple(chosen)
