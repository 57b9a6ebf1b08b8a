"""Searches recipes of performance models by the errors that they make on runs left out."""

from __future__ import annotations

import hashlib
import itertools
import json
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from foretrain.errors import InputError
from foretrain.fanout import Crew
from foretrain.predictors.base import option
from foretrain.predictors.ray_models.columns import NUMBERS, Array, Indices, ScaleTable
from foretrain.predictors.ray_models.techniques import (
    LEARNED_MEANS,
    MEANS,
    TECHNIQUES,
    Mean,
    Recipe,
    learn,
    means_of,
    single_threaded,
)
from foretrain.predictors.reach import Along, beyond_parts
from foretrain.progress import tell
from foretrain.splits import Part
from foretrain.units import parse_seconds

if TYPE_CHECKING:
    import optuna

_PARTS = 5
_FEWEST = 3
"""Runs below which nothing is learned."""
_HOPELESS = 1e6
BATCH = 8
"""Recipes that a search tries at a time. It does not depend on how many processes there are, so that the
outcome does not either."""

_TRIAL = "trial"
"""What a study says of a trial beside its value."""

STARTERS: tuple[Recipe, ...] = (
    Recipe(mean="law"),
    Recipe(mean="law", technique="gaussian process", settings={"linear": 0.0}),
    Recipe(mean="law", technique="ridge", settings={"penalty": 3.0}),
    Recipe(mean="forecast"),
    Recipe(mean="forecast", technique="ridge", settings={"penalty": 1.0}),
    Recipe(mean="forecast", technique="ridge", settings={"penalty": 10.0}),
    Recipe(mean="forecast", technique="gaussian process"),
    Recipe(technique="gaussian process"),
    Recipe(technique="ridge", degree=2, settings={"penalty": 0.3}),
    Recipe(mean="nnls"),
    Recipe(mean="selected nnls"),
    Recipe(technique="stepwise", terms="rich"),
    Recipe(technique="ridge", terms="rich", select=True, settings={"penalty": 0.1}),
    Recipe(technique="svr"),
    Recipe(technique="tree"),
    Recipe(technique="forest"),
    Recipe(mean="law", technique="boosting", settings={"trees": 40}),
    Recipe(technique="mlp"),
)
"""Tried first, whatever the budget: every technique once, and those that did best on other runs in several
ways."""
FEW: tuple[Recipe, ...] = (STARTERS[1], STARTERS[4], STARTERS[7])
"""What is averaged, without a search, where runs are too few to choose by."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """One recipe: logarithms of forecasts over measured times of the runs that were left out, inside and
    beyond."""

    recipe: Recipe
    inside: Array
    beyond: Array

    @property
    def inside_error(self) -> float:
        return _error(self.inside)

    @property
    def beyond_error(self) -> float:
        """Give the error beyond; where nothing can be left out beyond, the error inside."""
        return _error(self.beyond) if len(self.beyond) else self.inside_error

    def to_dict(self) -> dict[str, Any]:
        misses = {"inside": self.inside.tolist(), "beyond": self.beyond.tolist()}
        return {"recipe": self.recipe.to_dict(), **misses}

    @classmethod
    def from_dict(cls, document: Mapping[str, Any]) -> Trial:
        misses = {name: np.array(document[name], dtype=np.float64) for name in ("inside", "beyond")}
        return cls(recipe=Recipe(**document["recipe"]), **misses)


def _error(misses: Array) -> float:
    error = float(np.abs(np.expm1(np.clip(misses, -20, 20))).mean()) if len(misses) else math.inf
    return error if math.isfinite(error) else math.inf


# Trying recipes


@single_threaded()
def try_recipes(shared: tuple[ScaleTable, Array], recipes: Sequence[Recipe]) -> list[Trial]:
    """Try each recipe on the same parts of the runs; what recipes have in common is learned once per part."""
    table, times_s = shared
    able = [recipe for recipe in recipes if recipe.mean != "forecast" or table.forecast_s is not None]
    if not able:
        return []
    wanted = tuple(mean for mean in MEANS if any(recipe.mean == mean for recipe in able))
    sides = (parts_inside(table), [part for _, part in parts_beyond(table)])
    what = f"{able[0].label}{' and others' if len(able) > 1 else ''} with runs left out"
    count, total = itertools.count(), sum(map(len, sides))

    def missed(part: Part) -> Array:
        tell(what, next(count), total)
        return misses_of(able, wanted, table, times_s, part)

    misses = [[missed(part) for part in parts] for parts in sides]
    joined = [np.concatenate(parts, axis=1) if parts else np.zeros((len(able), 0)) for parts in misses]
    return [Trial(recipe=recipe, inside=joined[0][i], beyond=joined[1][i]) for i, recipe in enumerate(able)]


def misses_of(
    recipes: Sequence[Recipe], wanted: Sequence[Mean], table: ScaleTable, times_s: Array, part: Part
) -> Array:
    """Logarithms of forecasts over measured times, by recipe, of the runs of a part that are forecast."""
    train, test = part
    known, known_s, asked = table.take(train), times_s[train], table.take(test)
    means = means_of(known, known_s, wanted)
    forecasts = np.array([learn(recipe, known, known_s, means[recipe.mean])(asked) for recipe in recipes])
    misses: Array = forecasts - np.log(times_s[test])
    return misses


def parts_inside(table: ScaleTable) -> list[Part]:
    """Parts of the runs in turn; runs that are alike are left out together; none where all are."""
    columns = np.column_stack([*(table.number(name) for name in NUMBERS), table.levels])
    _, alike = np.unique(columns, axis=0, return_inverse=True)
    return in_turn(alike.reshape(-1))


def in_turn(labels: Indices) -> list[Part]:
    """A fifth of the labels after the other."""
    order = np.random.default_rng(0).permutation(int(labels.max()) + 1)
    parts = order[labels] % min(_PARTS, len(order))
    splits = [(np.flatnonzero(parts != part), np.flatnonzero(parts == part)) for part in np.unique(parts)]
    return [part for part in splits if len(part[0]) >= _FEWEST]


def parts_beyond(table: ScaleTable) -> list[Along]:
    """Leave out, for each dimension with three values or more, the largest third of them."""
    return [(name, part) for name, part in beyond_parts(table.scales) if len(part[0]) >= _FEWEST]


# Searching


@dataclass(frozen=True, slots=True, kw_only=True)
class Budget:
    """Says how long to search, and where: the recipes to begin with, how many beyond them, seconds,
    processes, a Ray cluster, and a file to resume from."""

    starters: tuple[Recipe, ...] = STARTERS
    trials: int = option(0, "Recipes to try beyond the usual ones.", least=0)
    seconds: float = option(
        math.inf, "How long to try them, such as 2min.", name="budget", parse=parse_seconds
    )
    study: Path | None = option(  # noqa: RUF009
        None, "Where the search is kept, to go on from after an interruption.", metavar="FILE"
    )
    processes: int = option(1, "Processes of this machine to spread the work over.", least=1)
    ray: str | None = option(
        None, "Spread the work over a Ray cluster, as predict --jobs does.", metavar="[ADDRESS]"
    )

    def __post_init__(self) -> None:
        if self.trials < 0:
            raise InputError(f"trials: {self.trials} is not 0 or more")


def search(
    table: ScaleTable,
    times_s: Array,
    budget: Budget,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> list[Trial]:
    """The starters, and then what Optuna's sampler proposes in the light of them, a batch at a time."""
    first = len(budget.starters)
    total = first + budget.trials
    progress(0, total)
    with Crew(try_recipes, shared=(table, times_s), processes=budget.processes, ray=budget.ray) as crew:
        trials: list[Trial] = []
        for batch in crew.run(_dealt(budget.starters)):
            trials += batch
            progress(min(len(trials), first), total)
        if budget.trials:
            study = _study(table, times_s, budget.study)
            trials += _proposed(crew, study, table, budget, lambda done, _: progress(first + done, total))
    return list({json.dumps(trial.recipe.to_dict(), sort_keys=True): trial for trial in trials}.values())


def _dealt(recipes: Sequence[Recipe]) -> list[list[Recipe]]:
    """Deal recipes out one by one, but for those that share a mean that is learned; several hands work at the
    same time."""
    by_mean = {mean: [recipe for recipe in recipes if recipe.mean == mean] for mean in MEANS}
    return [
        batch
        for mean, of_mean in by_mean.items()
        for batch in ([of_mean] if mean in LEARNED_MEANS else [[recipe] for recipe in of_mean])
        if batch
    ]


def _proposed(
    crew: Crew[list[Trial]],
    study: optuna.Study,
    table: ScaleTable,
    budget: Budget,
    progress: Callable[[int, int], None],
) -> list[Trial]:
    """Try what the sampler proposes, until trials or time are spent, after what a study has from before.

    A batch is told as a whole, and the sampler begins anew with the number of trials before it: what it
    proposes follows from them alone, whether there was an interruption or not.
    """
    begun = time.monotonic()
    means = tuple(mean for mean in MEANS if mean != "forecast" or table.forecast_s is not None)
    trials = _finished(study)
    while len(trials) < budget.trials and time.monotonic() - begun < budget.seconds:
        study.sampler = _sampler(len(trials))
        asked = [study.ask() for _ in range(min(BATCH, budget.trials - len(trials)))]
        recipes = [propose(one, means) for one in asked]
        tried = [trial for (trial,) in crew.run([[recipe] for recipe in recipes])]
        for one, trial in zip(asked, tried, strict=True):
            one.set_user_attr(_TRIAL, trial.to_dict())
            study.tell(one, min(trial.inside_error, _HOPELESS) + min(trial.beyond_error, _HOPELESS))
        trials += tried
        progress(len(trials), budget.trials)
    return trials


def _finished(study: optuna.Study) -> list[Trial]:
    """Read what an interrupted search has tried; what it was about to try counts for nothing."""
    from optuna.trial import TrialState

    for one in study.get_trials(deepcopy=False, states=(TrialState.RUNNING,)):
        study.tell(one.number, state=TrialState.FAIL)
    completed = study.get_trials(deepcopy=False, states=(TrialState.COMPLETE,))
    return [Trial.from_dict(one.user_attrs[_TRIAL]) for one in completed if _TRIAL in one.user_attrs]


def _sampler(seed: int) -> optuna.samplers.TPESampler:
    import optuna

    return optuna.samplers.TPESampler(seed=seed, n_startup_trials=2 * BATCH, constant_liar=True)


def _study(table: ScaleTable, times_s: Array, path: Path | None) -> optuna.Study:
    """A study of these runs: in memory, or in a file from which an interrupted search goes on."""
    import optuna

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    name = hashlib.sha256(json.dumps([table.to_dict(), times_s.tolist()]).encode()).hexdigest()[:16]
    if path is None:
        return optuna.create_study(study_name=name)
    from optuna.storages import JournalStorage
    from optuna.storages.journal import JournalFileBackend

    path.parent.mkdir(parents=True, exist_ok=True)
    return optuna.create_study(
        study_name=name,
        storage=JournalStorage(JournalFileBackend(str(path))),
        load_if_exists=True,
    )


def propose(trial: optuna.Trial, means: Sequence[Mean] = MEANS) -> Recipe:
    """A recipe of the whole space."""
    technique = trial.suggest_categorical("technique", ["none", *TECHNIQUES])
    mean: Any = trial.suggest_categorical("mean", list(means))
    if technique == "none":
        return Recipe(mean=mean)
    terms: Any = trial.suggest_categorical("terms", ["logs", "rich"])
    linear = technique in ("ridge", "stepwise")
    degree = trial.suggest_int("degree", 1, 2) if linear else 1
    select = trial.suggest_categorical("select", [False, True]) if linear else False
    return Recipe(
        mean=mean,
        technique=technique,
        terms=terms,
        degree=degree,
        select=select,
        settings=_settings(trial, technique),
    )


_RANGES: Mapping[str, Mapping[str, tuple[float, float]]] = {
    "ridge": {"penalty": (0.03, 30.0)},
    "svr": {"cost": (0.1, 100.0), "margin": (0.005, 0.1), "gamma": (0.01, 1.0)},
    "mlp": {"penalty": (1e-3, 3.0)},
    "boosting": {"rate": (0.03, 0.3)},
}
_CHOICES: Mapping[str, Mapping[str, Sequence[float]]] = {
    "gaussian process": {"linear": (0.0, 1.0)},
    "tree": {"depth": (2.0, 4.0, 6.0), "leaf": (1.0, 2.0, 3.0)},
    "forest": {"leaf": (1.0, 2.0, 3.0)},
    "boosting": {"depth": (1.0, 2.0, 3.0), "trees": (30.0, 60.0, 120.0)},
    "mlp": {"width": (8.0, 16.0, 32.0)},
}


def _settings(trial: optuna.Trial, technique: str) -> dict[str, float]:
    ranges = {
        name: trial.suggest_float(f"{technique} {name}", *bounds, log=True)
        for name, bounds in _RANGES.get(technique, {}).items()
    }
    choices = {
        name: trial.suggest_categorical(f"{technique} {name}", list(values))
        for name, values in _CHOICES.get(technique, {}).items()
    }
    return {**ranges, **choices}
