"""Learns times from columns by a recipe: a mean, and what a regression technique adds to it."""

from __future__ import annotations

import contextlib
import dataclasses
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

from foretrain.predictors.ray_models.columns import Array, Indices, ScaleTable
from foretrain.predictors.ray_models.law import Law, Sum, forward_selection

Mean = Literal["none", "law", "nnls", "selected nnls", "forecast"]
MEANS: tuple[Mean, ...] = ("none", "law", "nnls", "selected nnls", "forecast")
LEARNED_MEANS: tuple[Mean, ...] = ("law", "nnls", "selected nnls")
"""Those that are learned from runs, which takes as long as a technique."""
Tell = Callable[[Array], Array]
"""Rows of features to what a technique says of them."""
Technique = Callable[[Array, Array, Mapping[str, float]], Tell]
"""Features, logarithms of times and settings in; what was learned out."""

TECHNIQUES: dict[str, Technique] = {}
_FARTHEST = 20.0
"""A logarithm that no correction exceeds, whatever a technique says far outside of its runs."""
_FOLDS, _MOST_TERMS, _SELECTING_PENALTY = 5, 8, 0.1
"""Of the selection of terms, by a ridge regression of scaled columns."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """Says how times are told from columns.

    The technique learns the logarithm of the time over the mean: nothing (a constant per step), the scaling
    law, a sum of non-negative terms, or our own forecast of the job, which makes it physics-informed.
    ``terms`` are logarithms alone, or with inverses, square roots and Ernest's; ``degree`` 2 adds their
    products.
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
        named = {self.technique: self.technique != "none", f"on {self.mean}": self.mean != "none"}
        extras = {
            "rich terms": self.terms == "rich",
            f"degree {self.degree}": self.degree > 1,
            "selected": self.select,
        }
        return ", ".join([" ".join(_true(named)), *_true(extras)])

    def to_dict(self) -> dict[str, Any]:
        return {**dataclasses.asdict(self), "settings": dict(self.settings)}


def _true(labels: Mapping[str, bool]) -> list[str]:
    return [label for label, holds in labels.items() if holds]


def technique(name: str) -> Callable[[Technique], Technique]:
    """Register a technique by name."""

    def register(function: Technique) -> Technique:
        TECHNIQUES[name] = function
        return function

    return register


class _Limit:
    """Counts how many are inside, of all threads of this process, and holds what the first of them
    limited."""

    lock, inside = threading.Lock(), 0
    limits: Any = None


@contextlib.contextmanager
def single_threaded() -> Iterator[None]:
    """Linear algebra in one thread: matrices of some runs are too small to be shared, and on a busy machine
    threads wait for one another far longer than they compute. The last to leave lifts the limit."""
    import scipy.linalg  # noqa: F401, what is loaded is limited
    from threadpoolctl import threadpool_limits

    with _Limit.lock:
        if _Limit.inside == 0:
            _Limit.limits = threadpool_limits(1, user_api="blas")
        _Limit.inside += 1
    try:
        yield
    finally:
        with _Limit.lock:
            _Limit.inside -= 1
            if _Limit.inside == 0:
                _Limit.limits.unregister()


def means_of(
    table: ScaleTable, times_s: Array, wanted: Sequence[Mean] = MEANS
) -> dict[Mean, Callable[[ScaleTable], Array]]:
    """The logarithm of the mean of each kind that these runs allow."""
    means: dict[Mean, Callable[[ScaleTable], Array]] = {}
    for name in wanted:
        if name == "none":
            means[name] = lambda other: np.log(other.steps)
        elif name == "law":
            means[name] = Law.fit(table, times_s).log_times
        elif name in ("nnls", "selected nnls"):
            means[name] = Sum.fit(table, times_s, select=name != "nnls").log_times
        elif table.forecast_s is not None:
            means[name] = _log_forecast
    return means


def _log_forecast(table: ScaleTable) -> Array:
    assert table.forecast_s is not None
    return np.log(table.forecast_s)


def learn(
    recipe: Recipe, table: ScaleTable, times_s: Array, mean: Callable[[ScaleTable], Array]
) -> Callable[[ScaleTable], Array]:
    """The logarithm of the time by one recipe."""
    residuals = np.log(times_s) - mean(table)
    if recipe.technique == "none":
        shift = float(np.median(residuals)) if recipe.mean in ("none", "forecast") else 0.0
        return lambda other: mean(other) + shift
    pipeline, middle = Pipeline.of(recipe, table, residuals), residuals.mean()
    rows = pipeline(table)
    if not rows.shape[1]:  # nothing differs between the runs
        return lambda other: mean(other) + middle
    tell = TECHNIQUES[recipe.technique](rows, residuals - middle, recipe.settings)
    return lambda other: mean(other) + middle + np.clip(tell(pipeline(other)), -_FARTHEST, _FARTHEST)


# Features


def terms(table: ScaleTable, kind: Literal["logs", "rich"]) -> Array:
    """Columns that a technique may take: logarithms and settings; rich: inverses, roots and Ernest's too."""
    scale = [np.log(table.workers), table.workers > 1, np.log(table.nodes), table.nodes > 1]
    columns = (table.work, table.traffic, table.cores, table.steps, table.links)
    sizes = [np.log(column) for column in columns]
    logs = [*scale, *sizes, *table.levels.T]
    if kind == "logs":
        return np.column_stack(logs).astype(np.float64)
    inverses = [1 / column for column in (table.workers, table.nodes, table.cores)]
    inverses.append((table.nodes > 1) * (1 / table.links - 1))
    roots = [np.sqrt(column) for column in (table.workers, table.nodes, table.work)]
    ernest = [table.work, table.work / table.cores, table.workers, np.sqrt(table.work) / table.cores]
    return np.column_stack([*logs, *inverses, *roots, *ernest]).astype(np.float64)


@dataclass(frozen=True, slots=True, kw_only=True)
class Pipeline:
    """The selected terms of a table and their products, scaled by those of the runs learned from."""

    recipe: Recipe
    middle: Array
    scale: Array
    kept: tuple[int, ...]

    @classmethod
    def of(cls, recipe: Recipe, table: ScaleTable, targets: Array) -> Pipeline:
        rows = terms(table, recipe.terms)
        scale = rows.std(axis=0)
        pipeline = cls(
            recipe=recipe, middle=rows.mean(axis=0), scale=np.where(scale > 1e-9, scale, np.inf), kept=()
        )
        count = pipeline._all(table).shape[1]
        whole = dataclasses.replace(pipeline, kept=tuple(range(count)))
        if not recipe.select or count < 2:
            return whole
        return dataclasses.replace(pipeline, kept=_selected(whole(table), targets))

    def __call__(self, table: ScaleTable) -> Array:
        return self._all(table)[:, list(self.kept)]

    def _all(self, table: ScaleTable) -> Array:
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
    folds = np.arange(len(targets)) % min(_FOLDS, len(targets))
    return forward_selection(
        rows.shape[1], lambda chosen: _left_out(rows[:, chosen], targets, folds), most=_MOST_TERMS
    )


def _left_out(rows: Array, targets: Array, folds: Indices) -> float:
    misses = []
    for fold in np.unique(folds):
        known = folds != fold
        mean = targets[known].mean()
        weights = _ridge(rows[known], targets[known] - mean, _SELECTING_PENALTY)
        misses.append(np.abs(targets[~known] - mean - rows[~known] @ weights))
    return float(np.concatenate(misses).mean())


# Techniques: of features and centred logarithms


def _ridge(rows: Array, targets: Array, penalty: float) -> Array:
    square = rows.T @ rows + penalty * np.eye(rows.shape[1])
    return np.asarray(np.linalg.solve(square, rows.T @ targets), dtype=np.float64)


@technique("ridge")
def ridge(rows: Array, targets: Array, settings: Mapping[str, float]) -> Tell:
    weights = _ridge(rows, targets, settings.get("penalty", 1.0))
    return lambda others: others @ weights


@technique("stepwise")
def stepwise(rows: Array, targets: Array, settings: Mapping[str, float]) -> Tell:
    """Draper and Smith: a term enters at p < 0.05, and leaves again at p > 0.1."""
    chosen: list[int] = []
    for _ in range(2 * rows.shape[1]):
        others = [term for term in range(rows.shape[1]) if term not in chosen]
        chances = {term: _chance(rows[:, [*chosen, term]], targets)[-1] for term in others}
        new = min(chances, key=lambda term: chances[term], default=None)
        if new is None or chances[new] >= settings.get("enter", 0.05):
            break
        chosen.append(new)
        leaving = np.array(_chance(rows[:, chosen], targets)) > settings.get("leave", 0.1)
        chosen = [term for term, leaves in zip(chosen, leaving, strict=True) if not leaves]
    weights: Array = np.asarray(np.linalg.lstsq(rows[:, chosen], targets, rcond=None)[0])
    return lambda others: others[:, chosen] @ weights


def _chance(rows: Array, targets: Array) -> list[float]:
    """The p-value of each term in a least-squares fit; 1 where there are too few runs to tell."""
    from scipy.stats import t

    degrees = len(targets) - rows.shape[1] - 1
    if degrees < 1:
        return [1.0] * rows.shape[1]
    weights = np.linalg.lstsq(rows, targets, rcond=None)[0]
    variance = max(float(((targets - rows @ weights) ** 2).sum()) / degrees, 1e-12)
    errors = np.sqrt(np.maximum(np.diag(np.linalg.pinv(rows.T @ rows)) * variance, 1e-18))
    return [float(chance) for chance in 2 * t.sf(np.abs(weights) / errors, degrees)]


@technique("gaussian process")
def gaussian_process(rows: Array, targets: Array, settings: Mapping[str, float]) -> Tell:
    """A smooth part (Matern 5/2) and a linear one, their sizes by maximum likelihood."""
    import warnings

    from sklearn.exceptions import ConvergenceWarning
    from sklearn.gaussian_process import GaussianProcessRegressor
    from sklearn.gaussian_process.kernels import ConstantKernel, DotProduct, Matern, WhiteKernel

    smooth = ConstantKernel(0.02, (1e-4, 1.0)) * Matern(2.0, (0.5, 10.0), nu=2.5)
    kernel = smooth + WhiteKernel(0.003, (1e-4, 0.1))
    if settings.get("linear", 1.0):
        kernel += ConstantKernel(0.05, (1e-5, 10.0)) * DotProduct(0.0, "fixed")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)
        model = GaussianProcessRegressor(kernel).fit(rows, targets)
    return lambda others: np.asarray(model.predict(others), dtype=np.float64)


@technique("tree")
def tree(rows: Array, targets: Array, settings: Mapping[str, float]) -> Tell:
    from sklearn.tree import DecisionTreeRegressor

    depth, leaf = int(settings.get("depth", 6)), int(settings.get("leaf", 1))
    model = DecisionTreeRegressor(max_depth=depth, min_samples_leaf=leaf, random_state=0)
    return _fitted(model, rows, targets)


@technique("forest")
def forest(rows: Array, targets: Array, settings: Mapping[str, float]) -> Tell:
    from sklearn.ensemble import ExtraTreesRegressor

    leaf, count = int(settings.get("leaf", 1)), int(settings.get("trees", 50))
    model = ExtraTreesRegressor(n_estimators=count, min_samples_leaf=leaf, random_state=0)
    return _fitted(model, rows, targets)


@technique("boosting")
def boosting(rows: Array, targets: Array, settings: Mapping[str, float]) -> Tell:
    from sklearn.ensemble import GradientBoostingRegressor

    rate, depth = settings.get("rate", 0.1), int(settings.get("depth", 3))
    count = int(settings.get("trees", 60))
    model = GradientBoostingRegressor(n_estimators=count, learning_rate=rate, max_depth=depth, random_state=0)
    return _fitted(model, rows, targets)


@technique("svr")
def svr(rows: Array, targets: Array, settings: Mapping[str, float]) -> Tell:
    from sklearn.svm import SVR

    cost, margin, gamma = settings.get("cost", 3.0), settings.get("margin", 0.02), settings.get("gamma", 0.1)
    return _fitted(SVR(C=cost, epsilon=margin, gamma=gamma), rows, targets)


@technique("mlp")
def mlp(rows: Array, targets: Array, settings: Mapping[str, float]) -> Tell:
    from sklearn.neural_network import MLPRegressor

    width, penalty = int(settings.get("width", 16)), settings.get("penalty", 0.01)
    layers = {"hidden_layer_sizes": (width, width), "activation": "tanh"}
    model = MLPRegressor(**layers, solver="lbfgs", alpha=penalty, max_iter=300, random_state=0)
    return _fitted(model, rows, targets)


def _fitted(model: Any, rows: Array, targets: Array) -> Tell:
    """A regressor of scikit-learn; that a network did not settle in its steps is no news."""
    import warnings

    from sklearn.exceptions import ConvergenceWarning

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)
        model.fit(rows, targets)
    return lambda others: np.asarray(model.predict(others), dtype=np.float64)
