"""Forecasts the times of one model at other scales, with intervals, and checks how well."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from foretrain.fanout import fan_out
from foretrain.predictors.blackbox import UNSURE
from foretrain.predictors.conformal import Factors, factors
from foretrain.predictors.ray_models.columns import NUMBERS, Array, ScaleTable
from foretrain.predictors.ray_models.search import (
    FEW,
    Budget,
    Trial,
    in_turn,
    misses_of,
    parts_beyond,
    parts_inside,
    search,
)
from foretrain.predictors.ray_models.techniques import MEANS, Recipe, learn, means_of, single_threaded
from foretrain.predictors.reach import Along, LeftOutAlong, Reach, aways, inner_parts
from foretrain.predictors.seen import Away, Numbers, row_of
from foretrain.splits import Part, extrapolation, interpolation

_MOST_RECIPES = 5
"""Recipes that are averaged: the best few are nearly equal, and err in different ways."""
_WORST_MERIT, _LEAST_MERIT = 2.0, 1e-4
"""Errors, over that of the best recipe, beyond which one is not averaged; and below which all are as good."""
_OTHER_SIDE = 0.3
"""How much the error on the other side (beyond for inside, inside for beyond) counts: left-out runs are few,
and each side tells of the other."""
_UNSTEADY = 1.25
"""How much better a recipe without a law must look: a tree or a network that follows few runs well may follow
their noise."""
_CHOOSE_FROM = 6
"""Runs from which on recipes are chosen by the runs themselves."""
MOST_START = 0.5
"""Of a measured training, however short: what its start-up takes at most."""
_LEAST_DEVIATION = 1e-3
"""Of an interval's logarithm, however well the few runs agree."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Blend:
    """The recipes that are averaged with their weights, and the interval around what they say."""

    recipes: tuple[Recipe, ...]
    weights: tuple[float, ...]
    spread: Factors

    def to_dict(self) -> dict[str, Any]:
        return {
            "recipes": [recipe.to_dict() for recipe in self.recipes],
            "weights": list(self.weights),
            "spread": list(self.spread),
        }

    @classmethod
    def from_dict(cls, document: Mapping[str, Any]) -> Blend:
        recipes = tuple(Recipe(**recipe) for recipe in document["recipes"])
        return cls(recipes=recipes, weights=tuple(document["weights"]), spread=Factors(*document["spread"]))


class ScaleModel:
    """Times of one model over its scales.

    Inside of what was measured and beyond it, different recipes speak: those that did best there. The
    interval is that of the inside, and grows with the distance from the runs by ``reach``.
    """

    @single_threaded()
    def __init__(self, table: ScaleTable, times_s: Array, inside: Blend, beyond: Blend, reach: Reach) -> None:
        self.table, self.times_s, self.inside, self.beyond = table, times_s, inside, beyond
        self.reach, self.numbers = reach, Numbers.of(table.scales)
        means = {recipe.mean for recipe in (*inside.recipes, *beyond.recipes)}
        fitted_means = means_of(table, times_s, [mean for mean in MEANS if mean in means])
        self._tells = {
            name: [learn(recipe, table, times_s, fitted_means[recipe.mean]) for recipe in choice.recipes]
            for name, choice in (("inside", inside), ("beyond", beyond))
        }

    @classmethod
    @single_threaded()
    def fit(
        cls,
        table: ScaleTable,
        times_s: Array,
        budget: Budget,
        progress: Callable[[int, int], None] = lambda done, total: None,
    ) -> ScaleModel:
        """Choose recipes on these runs alone, and learn them."""
        if len(table) < _CHOOSE_FROM or not parts_inside(table):
            few = _few(table, times_s)
            return cls(table, times_s, few, few, Reach())
        trials = search(table, times_s, budget, progress)
        inside_errors = [(trial.inside_error, trial.beyond_error) for trial in trials]
        inside, _ = _choose(trials, inside_errors, [trial.inside for trial in trials])
        beyond_errors = [(beyond, inside) for inside, beyond in inside_errors]
        misses = [trial.beyond if len(trial.beyond) else trial.inside for trial in trials]
        outside, missed = _choose(trials, beyond_errors, misses)
        left_out = _left_out(table, parts_beyond(table), missed, inside.spread)
        inner = [part for part in inner_parts(table.scales) if len(part[1][0]) >= _CHOOSE_FROM // 2]
        gaps = [_missed(inside, table, times_s, part) for _, part in inner]
        left_out += _left_out(table, inner, np.concatenate(gaps) if gaps else np.zeros(0), inside.spread)
        return cls(table, times_s, inside, outside, Reach.of(left_out))

    def log_times(self, table: ScaleTable) -> Array:
        inside, beyond = (
            np.average([tell(table) for tell in self._tells[name]], axis=0, weights=choice.weights)
            for name, choice in (("inside", self.inside), ("beyond", self.beyond))
        )
        log_times: Array = np.where(self.is_beyond(table), beyond, inside)
        return log_times

    def tell(
        self,
        table: ScaleTable,
        data: Collection[str] = (),
        *,
        start_s: float = 0.0,
        other: tuple[float, Factors] | None = None,
    ) -> tuple[float, Factors]:
        """Seconds of the one row of a table, and the interval; ``data`` are numbers of the size of the data.

        Where all runs have as many steps, nothing tells a start from them: more of them take more in
        proportion, but for ``start_s``. ``other`` stands for what the recipes say, and their interval.
        """
        time_s, inner = other or (math.nan, self.inside.spread)
        if other is None and self.numbers.varied("steps"):
            time_s = float(np.exp(self.log_times(table)[0]))
        elif other is None:
            known, steps = self.numbers.values["steps"][0], float(table.steps[0])
            whole_s = float(np.exp(self.log_times(_scaled(table, known))[0]))
            start_s = min(start_s, MOST_START * whole_s)
            time_s = start_s + (whole_s - start_s) * steps / known
        return time_s, self.reach.grown(inner, self.away(table), self.numbers, data=data)

    def is_beyond(self, table: ScaleTable) -> npt.NDArray[np.bool_]:
        """Whether a row lies outside of the runs in any number."""
        return np.array([bool(self.numbers.away(row_of(table.scales, i)).beyond) for i in range(len(table))])

    def away(self, table: ScaleTable) -> Away:
        """Say how far the one row of a table is from the runs."""
        return self.numbers.away(row_of(table.scales, 0))

    def to_dict(self) -> dict[str, Any]:
        choices = {"inside": self.inside.to_dict(), "beyond": self.beyond.to_dict()}
        learned = {**choices, "reach": self.reach.to_dict()}
        return {"table": self.table.to_dict(), "times_s": self.times_s.tolist(), **learned}

    @classmethod
    def from_dict(cls, document: Mapping[str, Any]) -> ScaleModel:
        """Learned again from the same runs by the same recipes, which gives the same model."""
        inside, beyond = (Blend.from_dict(document[name]) for name in ("inside", "beyond"))
        times_s = np.array(document["times_s"], dtype=np.float64)
        table, reach = ScaleTable.from_dict(document["table"]), Reach(**document["reach"])
        return cls(table, times_s, inside, beyond, reach)


def _scaled(table: ScaleTable, steps: float) -> ScaleTable:
    """Scale a table to so many steps."""
    forecast_s = None if table.forecast_s is None else table.forecast_s * (steps / table.steps)
    return dataclasses.replace(table, steps=np.full(len(table), steps), forecast_s=forecast_s)


def _few(table: ScaleTable, times_s: Array) -> Blend:
    """Choose what is averaged where nothing can be chosen. The interval around repeats of one configuration
    is that of repeats that are left out."""
    forecast = table.forecast_s is not None
    recipes = tuple(recipe for recipe in FEW if recipe.mean != "forecast" or forecast)
    blend = Blend(recipes=recipes, weights=(1 / len(recipes),) * len(recipes), spread=UNSURE)
    if len(table) < _CHOOSE_FROM:
        return blend
    parts = in_turn(np.arange(len(table)))
    misses = np.concatenate([_missed(blend, table, times_s, part) for part in parts])
    return dataclasses.replace(blend, spread=spread_of_misses(misses))


def _choose(
    trials: Sequence[Trial], errors: Sequence[tuple[float, float]], misses: Sequence[Array]
) -> tuple[Blend, Array]:
    """The best recipes on this side and the other, one of each mean and technique, weighed by their merit;
    and the misses of their average."""
    recipes = [trial.recipe for trial in trials]
    merits = sorted((_merit(recipe, *errors[i]), i) for i, recipe in enumerate(recipes))
    different = {(recipes[i].mean, recipes[i].technique): (merit, i) for merit, i in reversed(merits)}
    ranked = sorted(different.values())[:_MOST_RECIPES]
    kept = [(merit, i) for merit, i in ranked if merit <= _WORST_MERIT * ranked[0][0]]
    weights = np.array([1 / max(merit, _LEAST_MERIT) ** 2 for merit, _ in kept])
    weights /= weights.sum()
    blend = np.average([misses[i] for _, i in kept], axis=0, weights=weights)
    chosen = tuple(recipes[i] for _, i in kept)
    return Blend(recipes=chosen, weights=tuple(weights.tolist()), spread=spread_of_misses(blend)), blend


def _merit(recipe: Recipe, own_side: float, other_side: float) -> float:
    steady = recipe.mean != "none" or recipe.technique == "gaussian process"
    return ((1 - _OTHER_SIDE) * own_side + _OTHER_SIDE * other_side) * (1.0 if steady else _UNSTEADY)


def spread_of_misses(misses: Array) -> Factors:
    """Compute intervals around a forecast from logarithms of forecasts over measured times.

    By ranks where there are many, by Student's t where there are few.
    """
    from scipy.stats import t

    if len(misses) < 3:
        return UNSURE
    ranked = factors(np.exp(-misses).tolist())
    if ranked is not None:
        return ranked
    degrees = len(misses) - 1
    deviation = max(float(np.sqrt((misses**2).mean())) * math.sqrt(1 + 1 / len(misses)), _LEAST_DEVIATION)
    narrow, wide = (float(np.exp(t.ppf(share, degrees) * deviation)) for share in (0.9, 0.975))
    return Factors(1 / wide, 1 / narrow, narrow, wide)


def _missed(blend: Blend, table: ScaleTable, times_s: Array, part: Part) -> Array:
    """Say what the average of a blend misses in a part of the runs, learned from the others."""
    wanted = [mean for mean in MEANS if any(recipe.mean == mean for recipe in blend.recipes)]
    misses = misses_of(blend.recipes, wanted, table, times_s, part)
    return np.asarray(np.average(misses, axis=0, weights=blend.weights), dtype=np.float64)


def _left_out(
    table: ScaleTable, parts: Sequence[Along], misses: Array, spread: Factors
) -> list[LeftOutAlong]:
    """Put left-out runs beside their distances; the misses, logarithms of forecasts over measured times, are
    of the parts in turn."""
    places = [(along, away) for along, part in parts for away in aways(table.scales, part)]
    return [
        LeftOutAlong.of(along, away, -float(miss), spread)
        for (along, away), miss in zip(places, misses if places else (), strict=True)
    ]


# How well


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """Mean absolute relative errors of runs that were neither learned from nor chosen by, beside Ernest's."""

    dimension: str
    kind: str
    runs: int
    error: float
    ernest_error: float


def check(
    table: ScaleTable,
    times_s: Array,
    budget: Budget,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> list[Check]:
    """Check a blend in numbers of three values or more: inner ones from the others, the largest third from
    those below."""
    dimensions = [name for name in NUMBERS if name != "traffic" and len(np.unique(table.number(name))) > 2]
    splits = [
        (name, kind, part)
        for name in dimensions
        for kind, split in _KINDS.items()
        for part in split(table.number(name))
        if len(part[0]) >= _CHOOSE_FROM
    ]
    shared = (table, times_s, Budget(starters=budget.starters))
    parts = [part for _, _, part in splits]
    pairs_of: dict[tuple[str, str], list[tuple[Array, Array]]] = {}
    errors = fan_out(
        _errors, parts, shared=shared, processes=budget.processes, ray=budget.ray, progress=progress
    )
    for (name, kind, _), pair in zip(splits, errors, strict=True):
        pairs_of.setdefault((name, kind), []).append(pair)
    return [_check(name, kind, pairs) for (name, kind), pairs in pairs_of.items()]


_KINDS: Mapping[str, Callable[[Array], list[Part]]] = {
    "interpolation": interpolation,
    "extrapolation": extrapolation,
}


def _check(name: str, kind: str, pairs: Sequence[tuple[Array, Array]]) -> Check:
    errors, ernest_errors = (np.concatenate([pair[i] for pair in pairs]) for i in (0, 1))
    error, ernest_error = float(errors.mean()), float(ernest_errors.mean())
    return Check(dimension=name, kind=kind, runs=len(errors), error=error, ernest_error=ernest_error)


def _errors(shared: tuple[ScaleTable, Array, Budget], part: Part) -> tuple[Array, Array]:
    """Relative errors, ours and Ernest's, of the runs of one part."""
    (table, times_s, budget), (train, test) = shared, part
    known, unseen = table.take(train), table.take(test)
    forecasts_s = np.exp(ScaleModel.fit(known, times_s[train], budget).log_times(unseen))
    ernest_s = ernest_times_s(known, times_s[train], unseen)
    return np.abs(forecasts_s / times_s[test] - 1), np.abs(ernest_s / times_s[test] - 1)


def ernest_times_s(known: ScaleTable, times_s: Array, unseen: ScaleTable) -> Array:
    """Ernest's four terms, with a law of its own for each combination of settings that has runs."""
    from scipy.optimize import nnls

    times = np.empty(len(unseen))
    for levels in np.unique(unseen.levels, axis=0):
        rows, alike = (unseen.levels == levels).all(axis=1), (known.levels == levels).all(axis=1)
        alike = alike if alike.any() else np.ones(len(known), dtype=bool)
        weights, _ = nnls(_ernest(known.take(alike)) / times_s[alike][:, None], np.ones(int(alike.sum())))
        times[rows] = np.maximum(_ernest(unseen.take(rows)) @ weights, 1e-9)
    return times


def _ernest(table: ScaleTable) -> Array:
    return np.column_stack(
        [np.ones(len(table)), table.work * table.steps, np.log(table.workers), table.workers]
    )
