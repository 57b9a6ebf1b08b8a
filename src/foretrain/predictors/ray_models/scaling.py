"""A table of runs of one model and their times in; a model that forecasts other scales, with intervals and a check of how well, out."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from foretrain.fanout import fan_out
from foretrain.predictors.blackbox import UNSURE
from foretrain.predictors.conformal import Factors, factors
from foretrain.predictors.ray_models.columns import NUMBERS, Array, Table
from foretrain.predictors.ray_models.search import FEW, Budget, Trial, search
from foretrain.predictors.ray_models.techniques import MEANS, Recipe, learn, means_of
from foretrain.splits import Part, extrapolation, interpolation

_BLEND = 5
"""Recipes that are averaged: the best few are nearly equal, and err in different ways."""
_OTHER_SIDE = 0.3
"""How much the error on the other side (beyond for inside, inside for beyond) counts: left-out runs are few, and each side tells of the other."""
_UNSTEADY = 1.25
"""How much better a recipe without a law must look: a tree or a network that follows few runs well may follow their noise."""
_CHOOSE_FROM = 6
"""Runs from which on recipes are chosen by the runs themselves."""
_MARGIN = 1.01


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
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
    def from_dict(cls, document: Mapping[str, Any]) -> Choice:
        recipes = tuple(Recipe(**recipe) for recipe in document["recipes"])
        return cls(recipes=recipes, weights=tuple(document["weights"]), spread=Factors(*document["spread"]))


class ScaleModel:
    """Times of one model over its scales. Inside of what was measured and beyond it, different recipes speak: those that did best there."""

    def __init__(self, table: Table, times_s: Array, inside: Choice, beyond: Choice) -> None:
        self.table, self.times_s, self.inside, self.beyond = table, times_s, inside, beyond
        means = {recipe.mean for recipe in (*inside.recipes, *beyond.recipes)}
        found = means_of(table, times_s, [mean for mean in MEANS if mean in means])
        self._tells = {
            name: [learn(recipe, table, times_s, found[recipe.mean]) for recipe in choice.recipes]
            for name, choice in (("inside", inside), ("beyond", beyond))
        }

    @classmethod
    def fit(
        cls,
        table: Table,
        times_s: Array,
        budget: Budget,
        progress: Callable[[int, int], None] = lambda done, total: None,
    ) -> ScaleModel:
        """Choose recipes on these runs alone, and learn them."""
        if len(table) < _CHOOSE_FROM:
            able = tuple(
                recipe for recipe in FEW if recipe.mean != "forecast" or table.forecast_s is not None
            )
            few = Choice(recipes=able, weights=(1 / len(able),) * len(able), spread=UNSURE)
            return cls(table, times_s, few, few)
        trials = search(table, times_s, budget, progress)
        inside = _choose(
            trials, lambda trial: (trial.inside_error, trial.beyond_error), lambda trial: trial.inside
        )
        beyond = _choose(
            trials,
            lambda trial: (trial.beyond_error, trial.inside_error),
            lambda trial: trial.beyond if len(trial.beyond) else trial.inside,
        )
        return cls(table, times_s, inside, _at_least(beyond, inside))

    def log_times(self, table: Table) -> Array:
        inside, beyond = (
            np.average([tell(table) for tell in self._tells[name]], axis=0, weights=choice.weights)
            for name, choice in (("inside", self.inside), ("beyond", self.beyond))
        )
        told: Array = np.where(self.is_beyond(table), beyond, inside)
        return told

    def spread(self, table: Table) -> Factors:
        """The interval around the time of the one row of a table."""
        return (self.beyond if self.is_beyond(table)[0] else self.inside).spread

    def is_beyond(self, table: Table) -> npt.NDArray[np.bool_]:
        """Whether a row lies outside of the runs in any number."""
        beyond = np.zeros(len(table), dtype=bool)
        for name in NUMBERS:
            beyond |= self._beyond_in(table, name)
        return beyond

    def beyond_in(self, table: Table) -> list[str]:
        """The numbers in which the one row of a table lies outside."""
        return [name for name in NUMBERS if name != "traffic" and self._beyond_in(table, name)[0]]

    def _beyond_in(self, table: Table, name: str) -> npt.NDArray[np.bool_]:
        known, asked = self.table.number(name), table.number(name)
        return np.asarray((asked > known.max() * _MARGIN) | (asked < known.min() / _MARGIN))

    def to_dict(self) -> dict[str, Any]:
        choices = {"inside": self.inside.to_dict(), "beyond": self.beyond.to_dict()}
        return {"table": self.table.to_dict(), "times_s": self.times_s.tolist(), **choices}

    @classmethod
    def from_dict(cls, document: Mapping[str, Any]) -> ScaleModel:
        """Learned again from the same runs by the same recipes, which gives the same model."""
        choices = [Choice.from_dict(document[name]) for name in ("inside", "beyond")]
        return cls(
            Table.from_dict(document["table"]), np.array(document["times_s"], dtype=np.float64), *choices
        )


def _choose(
    trials: Sequence[Trial], errors: Callable[[Trial], tuple[float, float]], misses: Callable[[Trial], Array]
) -> Choice:
    """The best recipes by their errors on this side and on the other, one of each mean and technique, weighed by how good they are."""
    merits = sorted((_merit(trial.recipe, *errors(trial)), i) for i, trial in enumerate(trials))
    different = {
        (trials[i].recipe.mean, trials[i].recipe.technique): (merit, i) for merit, i in reversed(merits)
    }
    scored = sorted(different.values())[:_BLEND]
    kept = [(merit, trials[i]) for merit, i in scored if merit <= 2 * scored[0][0]]
    weights = np.array([1 / max(merit, 1e-4) ** 2 for merit, _ in kept])
    weights /= weights.sum()
    blend = np.average([misses(trial) for _, trial in kept], axis=0, weights=weights)
    return Choice(
        recipes=tuple(trial.recipe for _, trial in kept),
        weights=tuple(weights.tolist()),
        spread=_spread(blend),
    )


def _merit(recipe: Recipe, here: float, there: float) -> float:
    steady = recipe.mean != "none" or recipe.technique == "gaussian process"
    return ((1 - _OTHER_SIDE) * here + _OTHER_SIDE * there) * (1.0 if steady else _UNSTEADY)


def _spread(misses: Array) -> Factors:
    """Around a forecast, from logarithms of forecasts over measured times: ranks where there are many, Student's t where there are few."""
    from scipy.stats import t

    if len(misses) < 3:
        return UNSURE
    found = factors(np.exp(-misses).tolist())
    if found is not None:
        return found
    free = len(misses) - 1
    deviation = max(float(np.sqrt((misses**2).mean())) * math.sqrt(1 + 1 / len(misses)), 1e-3)
    narrow, wide = (float(np.exp(t.ppf(share, free) * deviation)) for share in (0.9, 0.975))
    return Factors(1 / wide, 1 / narrow, narrow, wide)


def _at_least(choice: Choice, other: Choice) -> Choice:
    """Beyond the runs, an interval that is nowhere narrower than inside."""
    one, two = choice.spread, other.spread
    low, high = (
        (min(one.low_95, two.low_95), min(one.low, two.low)),
        (max(one.high, two.high), max(one.high_95, two.high_95)),
    )
    return Choice(recipes=choice.recipes, weights=choice.weights, spread=Factors(*low, *high))


# How well


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """Mean absolute relative errors of runs that were neither learned from nor chosen by; Ernest's beside it."""

    dimension: str
    kind: str
    runs: int
    error: float
    ernest_error: float


def check(
    table: Table,
    times_s: Array,
    budget: Budget,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> list[Check]:
    """In every number with three values or more: inner values from the others, and the largest third from what is below."""
    several = [name for name in NUMBERS if name != "traffic" and len(np.unique(table.number(name))) > 2]
    wanted = [
        (name, kind, part)
        for name in several
        for kind, split in _KINDS.items()
        for part in split(table.number(name))
        if len(part[0]) >= _CHOOSE_FROM
    ]
    shared = (table, times_s, Budget(starters=budget.starters))
    parts = [part for _, _, part in wanted]
    found: dict[tuple[str, str], list[tuple[Array, Array]]] = {}
    errors = fan_out(
        _errors, parts, shared=shared, processes=budget.processes, ray=budget.ray, progress=progress
    )
    for (name, kind, _), pair in zip(wanted, errors, strict=True):
        found.setdefault((name, kind), []).append(pair)
    return [_check(name, kind, pairs) for (name, kind), pairs in found.items()]


_KINDS: Mapping[str, Callable[[Array], list[Part]]] = {
    "interpolation": interpolation,
    "extrapolation": extrapolation,
}


def _check(name: str, kind: str, pairs: Sequence[tuple[Array, Array]]) -> Check:
    own, ernest = (np.concatenate([pair[i] for pair in pairs]) for i in (0, 1))
    return Check(
        dimension=name, kind=kind, runs=len(own), error=float(own.mean()), ernest_error=float(ernest.mean())
    )


def _errors(shared: tuple[Table, Array, Budget], part: Part) -> tuple[Array, Array]:
    """Relative errors, ours and Ernest's, of the runs of one part."""
    (table, times_s, budget), (train, test) = shared, part
    known, asked = table.take(train), table.take(test)
    own = ScaleModel.fit(known, times_s[train], budget).log_times(asked)
    ernest = ernest_times_s(known, times_s[train], asked)
    return np.abs(np.exp(own) / times_s[test] - 1), np.abs(ernest / times_s[test] - 1)


def ernest_times_s(known: Table, times_s: Array, asked: Table) -> Array:
    """Ernest's four terms, with a law of its own for each combination of settings that has runs."""
    from scipy.optimize import nnls

    told = np.empty(len(asked))
    for levels in np.unique(asked.levels, axis=0):
        rows, mine = (asked.levels == levels).all(axis=1), (known.levels == levels).all(axis=1)
        mine = mine if mine.any() else np.ones(len(known), dtype=bool)
        weights, _ = nnls(_ernest(known.take(mine)) / times_s[mine][:, None], np.ones(int(mine.sum())))
        told[rows] = np.maximum(_ernest(asked.take(rows)) @ weights, 1e-9)
    return told


def _ernest(table: Table) -> Array:
    return np.column_stack(
        [np.ones(len(table)), table.work * table.steps, np.log(table.workers), table.workers]
    )
