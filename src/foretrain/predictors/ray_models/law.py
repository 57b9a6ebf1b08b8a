"""Fits laws of scaling to the times of one model: computing beside exchanging, and sums of growing terms."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, NamedTuple, TypeVar

import numpy as np

from foretrain.predictors.ray_models.columns import Array, ScaleTable

T = TypeVar("T")


class LawParameters(NamedTuple, Generic[T]):
    """The numbers of the law that hold for every setting, all as logarithms.

    The first eleven are times, over the typical time of a step; with ``log`` they grow with the logarithm of
    the members, with ``member`` with their number.
    """

    computing: T
    per_work: T
    inside: T
    inside_log: T
    inside_member: T
    between: T
    between_log: T
    between_inside_log: T
    between_member: T
    between_bytes: T
    start: T
    overlap: T
    cores: T
    crowding: T


class _Prior(NamedTuple):
    """A parameter before any run is seen, and how the second and third attempt of the fit move it."""

    mean: float
    deviation: float
    hidden: float = 0.0
    """Where exchange hides behind computing."""
    added: float = 0.0
    """Where exchange adds to computing."""


_PRIORS = LawParameters(
    computing=_Prior(-2.0, 2.0),
    per_work=_Prior(-0.5, 1.5),
    inside=_Prior(-3.0, 2.0, hidden=1, added=2),
    inside_log=_Prior(-4.0, 1.5, hidden=1, added=3),
    inside_member=_Prior(-5.0, 1.5),
    between=_Prior(-2.0, 2.0, hidden=1, added=2),
    between_log=_Prior(-4.0, 1.5, hidden=1, added=3),
    between_inside_log=_Prior(-4.0, 1.5, hidden=1),
    between_member=_Prior(-5.0, 1.5),
    between_bytes=_Prior(-2.5, 2.0, hidden=1, added=1),
    start=_Prior(-5.0, 1.5),
    overlap=_Prior(-1.0, 1.5, hidden=2, added=-3),
    cores=_Prior(1.5, 1.0),
    crowding=_Prior(-1.0, 1.0, added=-2),
)
"""Wide, a factor of e or more either way: they decide only what the runs do not, so that three runs give a
law and twenty give their own."""
_MEANS = np.array([prior.mean for prior in _PRIORS])
_DEVIATIONS = np.array([prior.deviation for prior in _PRIORS])
_STARTS = np.array(
    [[0.0] * len(_PRIORS), [prior.hidden for prior in _PRIORS], [prior.added for prior in _PRIORS]]
)
_LEVEL_COMPUTING, _LEVEL_EXCHANGING = 0.35, 0.7
"""How far, as standard deviations of logarithms, one setting may move either part."""
_NOISE = 0.07
"""Relative scatter of step times that the priors are weighed against; two measurements of one cell of our
campaign differ by 8 % in the median (docs/ray_models.md)."""
_MOST_OVERLAP = 10.0
"""The largest power of the norm, at which two equal parts take 7 % more than one."""
_MOST_CORE_POWER = 1.2
"""Cores divide work by at most this power of their number: a little more than in proportion."""
_CROWDING_UNIT_LOG = -2.0
"""Crowding is counted in units of e^-2, 14 % for each e-fold of the workers on a node."""
_START_UNIT = 10.0
"""The start of a training is counted in units of ten typical steps."""
_LARGEST_LOG = 30.0
"""Beyond this, a logarithm is cut before it overflows."""
_EVALUATIONS = 40
"""Steps of one attempt of the fit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Law:
    """``time = start + steps (computing^g + exchanging^g)^(1/g)``, after Pollux (Qiao et al., OSDI 2021).

    Computing is a constant and a part in proportion to the work, which cores divide in part and neighbours on
    the node slow down; exchanging is, inside a node and between nodes, a constant, a part with the logarithm
    and a part with the number of members, and the bytes that links between nodes take time for, where runs
    have links of several rates. ``g`` from 1 to 10 says how far the two overlap. Each setting multiplies both
    parts by factors of its own.
    """

    parameters: Array
    """Those of ``LawParameters``, and a factor of computing and one of exchanging for each setting."""
    typical_s: float
    typical_work: float
    several_links: bool = False
    """Whether the runs have links of several rates."""

    @classmethod
    def fit(cls, table: ScaleTable, times_s: Array) -> Law:
        from scipy.optimize import least_squares

        log_times = np.log(times_s)
        typical_s = float(np.exp((log_times - np.log(table.steps)).mean()))
        typical = {"typical_s": typical_s, "typical_work": _typical(table.work)}
        several_links = _several_links(table)
        settings = table.levels.shape[1]
        means = np.append(_MEANS, np.zeros(2 * settings))
        levels = np.repeat([_LEVEL_COMPUTING, _LEVEL_EXCHANGING], settings)
        deviations = np.append(_DEVIATIONS, levels)

        def residuals(parameters: Array) -> Array:
            law = cls(parameters=parameters, **typical, several_links=several_links)
            misses = (law.log_times(table) - log_times) / _NOISE
            return np.concatenate([misses, (parameters - means) / deviations])

        starts = means + np.column_stack([_STARTS, np.zeros((len(_STARTS), 2 * settings))])
        attempts = [least_squares(residuals, at, loss="soft_l1", max_nfev=_EVALUATIONS) for at in starts]
        best = min(attempts, key=lambda attempt: attempt.cost)
        return cls(parameters=best.x, **typical, several_links=several_links)

    def log_times(self, table: ScaleTable) -> Array:
        shared, settings = len(_PRIORS), table.levels.shape[1]
        logs = LawParameters(*self.parameters[:shared])
        shares = LawParameters(*np.exp(np.clip(self.parameters[:shared], -_LARGEST_LOG, _LARGEST_LOG)))
        computing_level, exchanging_level = np.split(self.parameters[shared:], [settings])
        per_node, nodes = table.per_node, table.nodes
        core_power = _MOST_CORE_POWER * _sigmoid(logs.cores)
        work = shares.per_work * (table.work / self.typical_work) * table.cores**-core_power
        crowding = 1 + np.exp(logs.crowding + _CROWDING_UNIT_LOG) * np.log(per_node)
        computing = (shares.computing + work) * crowding * np.exp(table.levels @ computing_level)
        inside = (per_node > 1) * (
            shares.inside + shares.inside_log * np.log(per_node) + shares.inside_member * (per_node - 1)
        )
        between = (nodes > 1) * (
            shares.between
            + shares.between_log * np.log(nodes)
            + shares.between_inside_log * np.log(per_node)
            + shares.between_member * (nodes - 1)
            + self.several_links * shares.between_bytes * (1 - 1 / nodes) / table.links
        )
        exchanging = (inside + between) * np.exp(table.levels @ exchanging_level)
        power = 1 + (_MOST_OVERLAP - 1) * _sigmoid(logs.overlap)
        larger = np.maximum(computing, exchanging)
        step = larger * ((computing / larger) ** power + (exchanging / larger) ** power) ** (1 / power)
        start = np.where(table.steps > 1, shares.start * _START_UNIT, 0.0)
        log_times: Array = np.log(self.typical_s * (start + table.steps * step))
        return log_times


def _several_links(table: ScaleTable) -> bool:
    return bool(np.ptp(table.links) > 0)


def _typical(values: Array) -> float:
    return float(np.exp(np.log(values).mean()))


def _sigmoid(value: float) -> float:
    return float(1 / (1 + np.exp(-np.clip(value, -_LARGEST_LOG, _LARGEST_LOG))))


_LEAST_S = 1e-12
"""Below any time, and above zero, whose logarithm there is none of."""
_FOLDS = 5
_MOST_TERMS = 6
"""Terms of a selected sum: Ernest has four."""
_IMPROVEMENT = 0.02
"""By how much of the error a term must lower it to be selected."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sum:
    """``time = sum of weights x terms``, no weight negative: Ernest's four terms and others that only grow.

    Fitted in relative error.
    """

    weights: Array
    kept: tuple[int, ...]
    typical_work: float
    several_links: bool = False

    @classmethod
    def fit(cls, table: ScaleTable, times_s: Array, *, select: bool) -> Sum:
        typical_work = _typical(table.work)
        several_links = _several_links(table)
        rows = _growing(table, typical_work, several_links) / times_s[:, None]
        kept = _selected(rows) if select else tuple(range(rows.shape[1]))
        return cls(
            weights=_nnls(rows[:, kept]), kept=kept, typical_work=typical_work, several_links=several_links
        )

    def log_times(self, table: ScaleTable) -> Array:
        times_s = _growing(table, self.typical_work, self.several_links)[:, self.kept] @ self.weights
        log_times: Array = np.log(np.maximum(times_s, _LEAST_S))
        return log_times


def _growing(table: ScaleTable, typical_work: float, several_links: bool) -> Array:
    workers, nodes, work = table.workers, table.nodes, table.work / typical_work
    constant, several, spread = np.ones(len(workers)), (workers > 1).astype(float), (nodes > 1).astype(float)
    computing = [constant, work, work / table.cores]
    exchanging = [np.log(workers), workers, several, np.log(nodes), nodes - 1, spread]
    gradients = [work * np.log(workers), work * spread]
    gradients += [spread * (1 - 1 / nodes) / table.links] if several_links else []
    levels = [level * factor for level in table.levels.T for factor in (constant, work, workers)]
    per_step = np.column_stack([*computing, *exchanging, *gradients, *levels]) * table.steps[:, None]
    return np.column_stack([per_step, np.where(table.steps > 1, 1.0, 0.0)])


def _nnls(rows: Array) -> Array:
    from scipy.optimize import nnls

    solution: Array = nnls(rows, np.ones(len(rows)), maxiter=50 * rows.shape[1])[0]
    return solution


def _selected(rows: Array) -> tuple[int, ...]:
    fold = np.arange(len(rows)) % min(_FOLDS, len(rows))

    def error(terms: list[int]) -> float:
        trial = rows[:, terms]
        misses = [np.abs(trial[fold == held] @ _nnls(trial[fold != held]) - 1) for held in np.unique(fold)]
        return float(np.concatenate(misses).mean())

    return forward_selection(rows.shape[1], error, start=(0,), most=_MOST_TERMS)


def forward_selection(
    count: int, error: Callable[[list[int]], float], *, start: tuple[int, ...] = (), most: int
) -> tuple[int, ...]:
    """Selects terms one by one, each that which lowers the error of left-out runs most, while one does."""
    selected, best = list(start), np.inf
    while len(selected) < min(most, count):
        errors = {term: error([*selected, term]) for term in range(count) if term not in selected}
        term = min(errors, key=lambda candidate: errors[candidate])
        if errors[term] > (1 - _IMPROVEMENT) * best:
            break
        selected.append(term)
        best = errors[term]
    return tuple(selected)
