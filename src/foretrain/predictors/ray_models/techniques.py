"""A recipe, a table and measured times in; a function from tables to times out: a mean, and what a regression technique adds to it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

from foretrain.predictors.ray_models.columns import Array, Indices, Table
from foretrain.predictors.ray_models.law import Law, Sum, forward_selection

Mean = Literal["none", "law", "nnls", "selected nnls", "forecast"]
MEANS: tuple[Mean, ...] = ("none", "law", "nnls", "selected nnls", "forecast")
Tell = Callable[[Array], Array]
"""Rows of features to what a technique says of them."""
Technique = Callable[[Array, Array, Mapping[str, float]], Tell]
"""Features, logarithms of times and settings in; what was learned out."""

TECHNIQUES: dict[str, Technique] = {}
_FARTHEST = 20.0
"""A logarithm that no correction exceeds, whatever a technique says far outside of its runs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """How times are told from columns.

    The technique learns the logarithm of the time over the mean: nothing (a constant per step), the scaling law, a sum of non-negative terms, or our
    own forecast of the job, which makes it physics-informed. ``terms`` are logarithms alone, or with inverses, square roots and Ernest's; ``degree`` 2 adds their products.
    """

    mean: Mean = "none"
    technique: str = "none"
    terms: Literal["logs", "rich"] = "logs"
    degree: int = 1
    select: bool = False
    """Sequential forward selection of the terms, by cross-validation."""
    settings: Mapping[str, float] = field(default_factory=dict)

    @property
    def label(self) -> str:
        parts = [
            self.technique if self.technique != "none" else "",
            f"on {self.mean}" if self.mean != "none" else "",
        ]
        extras = [
            *(["rich terms"] if self.terms == "rich" else []),
            *([f"degree {self.degree}"] if self.degree > 1 else []),
            *(["selected"] if self.select else []),
        ]
        return ", ".join([" ".join(part for part in parts if part), *extras])

    def to_dict(self) -> dict[str, Any]:
        return {**dataclasses.asdict(self), "settings": dict(self.settings)}


def technique(name: str) -> Callable[[Technique], Technique]:
    """Register a technique by name."""

    def register(function: Technique) -> Technique:
        TECHNIQUES[name] = function
        return function

    return register


def means_of(
    table: Table, times_s: Array, wanted: Sequence[Mean] = MEANS
) -> dict[Mean, Callable[[Table], Array]]:
    """The logarithm of the mean of each kind that these runs allow."""
    found: dict[Mean, Callable[[Table], Array]] = {}
    for name in wanted:
        if name == "none":
            found[name] = lambda other: np.log(other.steps)
        elif name == "law":
            found[name] = Law.fit(table, times_s).log_times
        elif name in ("nnls", "selected nnls"):
            found[name] = Sum.fit(table, times_s, select=name != "nnls").log_times
        elif table.forecast_s is not None:
            found[name] = _log_forecast
    return found


def _log_forecast(table: Table) -> Array:
    assert table.forecast_s is not None
    return np.log(table.forecast_s)


def learn(
    recipe: Recipe, table: Table, times_s: Array, mean: Callable[[Table], Array]
) -> Callable[[Table], Array]:
    """The logarithm of the time by one recipe."""
    left = np.log(times_s) - mean(table)
    if recipe.technique == "none":
        shift = float(np.median(left)) if recipe.mean in ("none", "forecast") else 0.0
        return lambda other: mean(other) + shift
    pipeline, middle = Pipeline.of(recipe, table, left), left.mean()
    rows = pipeline(table)
    if not rows.shape[1]:  # nothing differs between the runs
        return lambda other: mean(other) + middle
    tell = TECHNIQUES[recipe.technique](rows, left - middle, recipe.settings)
    return lambda other: mean(other) + middle + np.clip(tell(pipeline(other)), -_FARTHEST, _FARTHEST)


# Features


def terms(table: Table, kind: Literal["logs", "rich"]) -> Array:
    """Columns that a technique may take: logarithms and settings; or inverses, roots and Ernest's terms as well."""
    numbers = [
        np.log(table.workers),
        table.workers > 1,
        np.log(table.nodes),
        table.nodes > 1,
        np.log(table.work),
        np.log(table.traffic),
    ]
    logs = [*numbers, np.log(table.cores), np.log(table.steps), *table.levels.T]
    if kind == "logs":
        return np.column_stack(logs).astype(np.float64)
    rich = [
        1 / table.workers,
        1 / table.nodes,
        1 / table.cores,
        np.sqrt(table.workers),
        np.sqrt(table.nodes),
        np.sqrt(table.work),
    ]
    ernest = [table.work, table.work / table.cores, table.workers, np.sqrt(table.work) / table.cores]
    return np.column_stack([*logs, *rich, *ernest]).astype(np.float64)


@dataclass(frozen=True, slots=True, kw_only=True)
class Pipeline:
    """Terms of a table, scaled by those of the runs that were learned from, with products, and only those that were selected."""

    recipe: Recipe
    middle: Array
    scale: Array
    kept: tuple[int, ...]

    @classmethod
    def of(cls, recipe: Recipe, table: Table, targets: Array) -> Pipeline:
        rows = terms(table, recipe.terms)
        scale = rows.std(axis=0)
        made = cls(
            recipe=recipe, middle=rows.mean(axis=0), scale=np.where(scale > 1e-9, scale, np.inf), kept=()
        )
        count = made._all(table).shape[1]
        whole = dataclasses.replace(made, kept=tuple(range(count)))
        if not recipe.select or count < 2:
            return whole
        return dataclasses.replace(made, kept=_selected(whole(table), targets))

    def __call__(self, table: Table) -> Array:
        return self._all(table)[:, list(self.kept)]

    def _all(self, table: Table) -> Array:
        """A term that was the same in all runs says nothing, and becomes zero."""
        rows = (terms(table, self.recipe.terms) - self.middle) / self.scale
        varied = rows[:, np.isfinite(self.scale)]
        if self.recipe.degree < 2:
            return varied
        count = varied.shape[1]
        return np.column_stack(
            [varied, *(varied[:, i] * varied[:, j] for i in range(count) for j in range(i, count))]
        )


def _selected(rows: Array, targets: Array) -> tuple[int, ...]:
    parts = np.arange(len(targets)) % min(5, len(targets))
    return forward_selection(rows.shape[1], lambda chosen: _left_out(rows[:, chosen], targets, parts), most=8)


def _left_out(rows: Array, targets: Array, parts: Indices) -> float:
    misses = []
    for part in np.unique(parts):
        known = parts != part
        misses.append(
            np.abs(
                targets[~known]
                - targets[known].mean()
                - rows[~known] @ _ridge(rows[known], targets[known] - targets[known].mean(), 0.1)
            )
        )
    return float(np.concatenate(misses).mean())


# Techniques: of features and centred logarithms


def _ridge(rows: Array, targets: Array, penalty: float) -> Array:
    return np.asarray(
        np.linalg.solve(rows.T @ rows + penalty * np.eye(rows.shape[1]), rows.T @ targets), dtype=np.float64
    )


@technique("ridge")
def ridge(rows: Array, targets: Array, settings: Mapping[str, float]) -> Tell:
    weights = _ridge(rows, targets, settings.get("penalty", 1.0))
    return lambda others: others @ weights


@technique("stepwise")
def stepwise(rows: Array, targets: Array, settings: Mapping[str, float]) -> Tell:
    """Draper and Smith: a term enters at p < 0.05, and leaves again at p > 0.1."""
    chosen: list[int] = []
    for _ in range(2 * rows.shape[1]):
        chances = {
            new: _chance(rows[:, [*chosen, new]], targets)
            for new in range(rows.shape[1])
            if new not in chosen
        }
        new = min(chances, key=lambda one: chances[one][-1], default=None)
        if new is None or chances[new][-1] >= settings.get("enter", 0.05):
            break
        chosen.append(new)
        chosen = [
            one
            for one, chance in zip(chosen, _chance(rows[:, chosen], targets), strict=True)
            if chance <= settings.get("leave", 0.1)
        ]
    weights: Array = np.asarray(np.linalg.lstsq(rows[:, chosen], targets, rcond=None)[0])
    return lambda others: others[:, chosen] @ weights


def _chance(rows: Array, targets: Array) -> list[float]:
    """The p-value of each term in a least-squares fit; 1 where there are too few runs to tell."""
    from scipy.stats import t

    free = len(targets) - rows.shape[1] - 1
    if free < 1:
        return [1.0] * rows.shape[1]
    weights = np.linalg.lstsq(rows, targets, rcond=None)[0]
    variance = max(float(((targets - rows @ weights) ** 2).sum()) / free, 1e-12)
    errors = np.sqrt(np.maximum(np.diag(np.linalg.pinv(rows.T @ rows)) * variance, 1e-18))
    return [float(2 * t.sf(abs(weight) / error, free)) for weight, error in zip(weights, errors, strict=True)]


@technique("gaussian process")
def gaussian_process(rows: Array, targets: Array, settings: Mapping[str, float]) -> Tell:
    """A smooth part (Matern 5/2) and a linear one, their sizes by maximum likelihood."""
    import warnings

    from sklearn.exceptions import ConvergenceWarning
    from sklearn.gaussian_process import GaussianProcessRegressor
    from sklearn.gaussian_process.kernels import ConstantKernel, DotProduct, Matern, WhiteKernel

    kernel = ConstantKernel(0.02, (1e-4, 1.0)) * Matern(2.0, (0.5, 10.0), nu=2.5) + WhiteKernel(
        0.003, (1e-4, 0.1)
    )
    if settings.get("linear", 1.0):
        kernel += ConstantKernel(0.05, (1e-5, 10.0)) * DotProduct(0.0, "fixed")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)
        model = GaussianProcessRegressor(kernel).fit(rows, targets)
    return lambda others: np.asarray(model.predict(others), dtype=np.float64)


@technique("tree")
def tree(rows: Array, targets: Array, settings: Mapping[str, float]) -> Tell:
    from sklearn.tree import DecisionTreeRegressor

    return _fitted(
        DecisionTreeRegressor(
            max_depth=int(settings.get("depth", 6)),
            min_samples_leaf=int(settings.get("leaf", 1)),
            random_state=0,
        ),
        rows,
        targets,
    )


@technique("forest")
def forest(rows: Array, targets: Array, settings: Mapping[str, float]) -> Tell:
    from sklearn.ensemble import ExtraTreesRegressor

    leaf, count = int(settings.get("leaf", 1)), int(settings.get("trees", 50))
    return _fitted(
        ExtraTreesRegressor(n_estimators=count, min_samples_leaf=leaf, random_state=0), rows, targets
    )


@technique("boosting")
def boosting(rows: Array, targets: Array, settings: Mapping[str, float]) -> Tell:
    from sklearn.ensemble import GradientBoostingRegressor

    rate, depth, count = (
        settings.get("rate", 0.1),
        int(settings.get("depth", 3)),
        int(settings.get("trees", 60)),
    )
    return _fitted(
        GradientBoostingRegressor(n_estimators=count, learning_rate=rate, max_depth=depth, random_state=0),
        rows,
        targets,
    )


@technique("svr")
def svr(rows: Array, targets: Array, settings: Mapping[str, float]) -> Tell:
    from sklearn.svm import SVR

    return _fitted(
        SVR(
            C=settings.get("cost", 3.0),
            epsilon=settings.get("margin", 0.02),
            gamma=settings.get("gamma", 0.1),
        ),
        rows,
        targets,
    )


@technique("mlp")
def mlp(rows: Array, targets: Array, settings: Mapping[str, float]) -> Tell:
    from sklearn.neural_network import MLPRegressor

    width, penalty = int(settings.get("width", 16)), settings.get("penalty", 0.01)
    return _fitted(
        MLPRegressor(
            hidden_layer_sizes=(width, width),
            activation="tanh",
            solver="lbfgs",
            alpha=penalty,
            max_iter=300,
            random_state=0,
        ),
        rows,
        targets,
    )


def _fitted(model: Any, rows: Array, targets: Array) -> Tell:
    """A regressor of scikit-learn; that a network did not settle in its steps is no news."""
    import warnings

    from sklearn.exceptions import ConvergenceWarning

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)
        model.fit(rows, targets)
    return lambda others: np.asarray(model.predict(others), dtype=np.float64)
