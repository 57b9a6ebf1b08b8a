"""Chooses the regressor of step times that does best on architectures it has not seen, as PredictDDL does."""

from __future__ import annotations

import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Self, final

import numpy as np
import numpy.typing as npt

from foretrain.costs.trees import Forest, grow
from foretrain.predictors.blackbox import sklearn
from foretrain.predictors.predictddl.baseline import GPU, Physics, baseline, fit_baseline

Array = npt.NDArray[np.float64]
Arrays = Mapping[str, npt.NDArray[Any]]

_CLIP = 3.0
"""Standard deviations beyond which a column says no more: nothing is extrapolated far."""

_MARGIN = float(np.log(2.0))
"""How far beyond what it learned from a regressor may go: a factor of two."""
_MOST_ASKED = 20
"""How many times as many runs as it learned from a candidate is tried on."""
_TUBE = 0.03
"""Misses of a logarithm that support vectors do not mind."""


# Regressors: columns of mean 0 and variance 1 to a number


class Regressor(ABC):
    """Learns a number from columns; what it learned is arrays, and it answers with numpy alone."""

    kind: ClassVar[str]

    @abstractmethod
    def fit(self, rows: Array, targets: Array) -> Self: ...

    @abstractmethod
    def predict(self, rows: Array) -> Array: ...

    @abstractmethod
    def to_arrays(self) -> Arrays: ...

    @classmethod
    @abstractmethod
    def from_arrays(cls, arrays: Arrays) -> Self: ...


@final
class Constant(Regressor):
    """The mean: the control that says whether the columns tell anything."""

    kind: ClassVar[str] = "constant"

    def __init__(self) -> None:
        self.value_ = 0.0

    def fit(self, rows: Array, targets: Array) -> Self:
        self.value_ = float(np.median(targets))
        return self

    def predict(self, rows: Array) -> Array:
        return np.full(len(rows), self.value_)

    def to_arrays(self) -> Arrays:
        return {"value": np.array([self.value_])}

    @classmethod
    def from_arrays(cls, arrays: Arrays) -> Self:
        regressor = cls()
        regressor.value_ = float(arrays["value"][0])
        return regressor


@final
class LogLinear(Regressor):
    """Ridge regression."""

    kind: ClassVar[str] = "log-linear"

    def __init__(self, ridge: float = 1.0) -> None:
        self.ridge = ridge

    def fit(self, rows: Array, targets: Array) -> Self:
        self.middle_ = float(targets.mean())
        square = rows.T @ rows + self.ridge * np.eye(rows.shape[1])
        weights = np.linalg.solve(square, rows.T @ (targets - self.middle_))
        self.weights_ = np.asarray(weights, dtype=np.float64)
        return self

    def predict(self, rows: Array) -> Array:
        return np.asarray(self.middle_ + rows @ self.weights_)

    def to_arrays(self) -> Arrays:
        return {"middle": np.array([self.middle_]), "weights": self.weights_}

    @classmethod
    def from_arrays(cls, arrays: Arrays) -> Self:
        regressor = cls()
        regressor.middle_, regressor.weights_ = float(arrays["middle"][0]), arrays["weights"]
        return regressor


class _Kernel(Regressor):
    """A weighted sum of the likeness to rows that were learned from."""

    def __init__(self) -> None:
        self.rows_: Array = np.empty((0, 0))
        self.weights_: Array = np.empty(0)
        self.middle_ = 0.0

    @abstractmethod
    def likeness(self, rows: Array, others: Array) -> Array: ...

    def predict(self, rows: Array) -> Array:
        return np.asarray(self.middle_ + self.likeness(rows, self.rows_) @ self.weights_)

    def _restore(self, arrays: Arrays) -> None:
        self.rows_, self.weights_, self.middle_ = (
            arrays["rows"],
            arrays["weights"],
            float(arrays["middle"][0]),
        )


@final
class Polynomial(_Kernel):
    """Second-order polynomial with a ridge, in its dual form."""

    kind: ClassVar[str] = "polynomial"

    def __init__(self, ridge: float = 1.0) -> None:
        super().__init__()
        self.ridge = ridge

    def likeness(self, rows: Array, others: Array) -> Array:
        return np.asarray((1.0 + rows @ others.T / max(rows.shape[1], 1)) ** 2)

    def fit(self, rows: Array, targets: Array) -> Self:
        self.rows_, self.middle_ = rows, float(targets.mean())
        square = self.likeness(rows, rows) + self.ridge * np.eye(len(rows))
        self.weights_ = np.asarray(np.linalg.solve(square, targets - self.middle_), dtype=np.float64)
        return self

    def to_arrays(self) -> Arrays:
        return {"rows": self.rows_, "weights": self.weights_, "middle": np.array([self.middle_])}

    @classmethod
    def from_arrays(cls, arrays: Arrays) -> Self:
        regressor = cls()
        regressor._restore(arrays)
        return regressor


@final
class SupportVectors(_Kernel):
    """Support-vector regression with a Gaussian kernel, ``exp(-breadth |x - y|^2 / columns)``."""

    kind: ClassVar[str] = "svr"

    def __init__(self, cost: float = 3.0, breadth: float = 0.5) -> None:
        super().__init__()
        self.cost, self.breadth = cost, breadth

    def likeness(self, rows: Array, others: Array) -> Array:
        squares = (rows**2).sum(axis=1)[:, None] + (others**2).sum(axis=1)[None] - 2 * rows @ others.T
        return np.asarray(np.exp(-self.breadth / max(rows.shape[1], 1) * np.maximum(squares, 0)))

    def fit(self, rows: Array, targets: Array) -> Self:
        breadth = self.breadth / max(rows.shape[1], 1)
        model = sklearn("svm", "predictddl").SVR(C=self.cost, epsilon=_TUBE, gamma=breadth).fit(rows, targets)
        self.rows_, self.weights_ = np.asarray(model.support_vectors_), np.asarray(model.dual_coef_[0])
        self.middle_ = float(model.intercept_[0])
        return self

    def to_arrays(self) -> Arrays:
        middle = np.array([self.middle_, self.breadth])
        return {"rows": self.rows_, "weights": self.weights_, "middle": middle}

    @classmethod
    def from_arrays(cls, arrays: Arrays) -> Self:
        regressor = cls(breadth=float(arrays["middle"][1]))
        regressor._restore(arrays)
        return regressor


@final
class Perceptron(Regressor):
    """A network with one hidden layer of 32 and a decay of 3."""

    kind: ClassVar[str] = "mlp"

    def fit(self, rows: Array, targets: Array) -> Self:
        network = sklearn("neural_network", "predictddl").MLPRegressor(
            hidden_layer_sizes=(32,), alpha=3.0, solver="lbfgs", max_iter=150, random_state=0
        )
        unsettled = sklearn("exceptions", "predictddl").ConvergenceWarning
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", unsettled)  # stopping early is part of the method
            network.fit(rows, targets)
        (self.enter_, self.leave_), (self.lift_, self.end_) = network.coefs_, network.intercepts_
        return self

    def predict(self, rows: Array) -> Array:
        return np.asarray((np.maximum(rows @ self.enter_ + self.lift_, 0) @ self.leave_ + self.end_)[:, 0])

    def to_arrays(self) -> Arrays:
        return {"enter": self.enter_, "leave": self.leave_, "lift": self.lift_, "end": self.end_}

    @classmethod
    def from_arrays(cls, arrays: Arrays) -> Self:
        regressor = cls()
        regressor.enter_, regressor.leave_, regressor.lift_, regressor.end_ = (
            arrays[name] for name in ("enter", "leave", "lift", "end")
        )
        return regressor


@final
class Boosting(Regressor):
    """Gradient-boosted trees."""

    kind: ClassVar[str] = "boosting"

    def fit(self, rows: Array, targets: Array) -> Self:
        settings = {
            "num_leaves": 8,
            "learning_rate": 0.06,
            "min_data_in_leaf": min(10, max(1, len(rows) // 4)),
            "lambda_l2": 1.0,
        }
        self.middle_ = float(targets.mean())
        self.forest_ = grow(
            rows, targets - self.middle_, np.ones(len(rows)), trees=200, feature_fraction=0.5, **settings
        )
        return self

    def predict(self, rows: Array) -> Array:
        return np.asarray(self.middle_ + self.forest_.predict(rows))

    def to_arrays(self) -> Arrays:
        return {"middle": np.array([self.middle_]), **self.forest_.to_columns()}

    @classmethod
    def from_arrays(cls, arrays: Arrays) -> Self:
        regressor = cls()
        regressor.middle_, regressor.forest_ = float(arrays["middle"][0]), Forest.from_columns(arrays)
        return regressor


REGRESSORS: Mapping[str, type[Regressor]] = {
    one.kind: one for one in (Constant, LogLinear, Polynomial, SupportVectors, Perceptron, Boosting)
}
CANDIDATES: Mapping[str, Callable[[], Regressor]] = {
    "constant": Constant,
    "log-linear, ridge 3": lambda: LogLinear(3.0),
    "log-linear, ridge 30": lambda: LogLinear(30.0),
    "polynomial, ridge 0.3": lambda: Polynomial(0.3),
    "polynomial, ridge 3": lambda: Polynomial(3.0),
    "svr, cost 0.3": lambda: SupportVectors(0.3),
    "svr, cost 3": lambda: SupportVectors(3.0),
    "svr, cost 30": lambda: SupportVectors(30.0),
    "mlp": Perceptron,
    "boosting": Boosting,
}


@dataclass(frozen=True, eq=False, kw_only=True)
class Scaled:
    """A regressor behind the scaling of its columns."""

    mean: Array
    deviation: Array
    bounds: Array
    """The least and the most that it says: what was learned from, and half or twice that."""
    regressor: Regressor

    @classmethod
    def learn(cls, regressor: Regressor, rows: Array, targets: Array) -> Scaled:
        deviation = rows.std(axis=0)
        deviation[deviation < 1e-9] = np.inf  # a column that never varied tells nothing
        bounds = np.array([targets.min() - _MARGIN, targets.max() + _MARGIN])
        model = cls(mean=rows.mean(axis=0), deviation=deviation, bounds=bounds, regressor=regressor)
        model.regressor.fit(model.scaled(rows), targets)
        return model

    def scaled(self, rows: Array) -> Array:
        return np.clip((rows - self.mean) / self.deviation, -_CLIP, _CLIP)

    def predict(self, rows: Array) -> Array:
        return np.clip(self.regressor.predict(self.scaled(rows)), *self.bounds)


# Choosing


@dataclass(frozen=True, eq=False, kw_only=True)
class Problem:
    """Runs as the engine sees them: columns, logarithms of step times, architectures and dataset types."""

    rows: Array
    terms: Physics | None
    """What a baseline is fitted to; None for the paper's form, which regresses the step time itself."""
    targets: Array
    groups: Sequence[str]
    types: Sequence[str]
    steps: Sequence[str]
    """What repeats of a step have in common."""
    machines: int = 0
    """How many have a parameter of the baseline."""
    busy: Array | None = None
    """Logarithms of the time that GPUs were busy; not a number where it was not measured."""

    def baselines(self, inside: npt.NDArray[np.bool_]) -> dict[str, Array]:
        """The parameters of each type, from the runs ``inside``; on GPUs all types share them, as kinds of
        operators and their sizes tell what differs."""
        if self.terms is None:
            return {}
        shared = self._fit(inside)
        if self.terms.law is GPU:
            return dict.fromkeys(self.types, shared)
        of_type = {kind: inside & (np.array(self.types) == kind) for kind in dict.fromkeys(self.types)}
        return {kind: self._fit(rows, shared) for kind, rows in of_type.items() if rows.any()}

    def _fit(self, rows: npt.NDArray[np.bool_], near: Array | None = None) -> Array:
        assert self.terms is not None
        busy = None if self.busy is None else self.busy[rows]
        return fit_baseline(self.terms[rows], self.targets[rows], near, machines=self.machines, busy=busy)

    def based(self, baselines: Mapping[str, Array]) -> Array:
        """The baseline of every run whose type has one; 0 in the paper's form."""
        log_times = np.zeros(len(self.targets))
        for kind, logs in baselines.items():
            rows = np.array(self.types) == kind
            assert self.terms is not None
            log_times[rows] = baseline(logs, self.terms[rows])
        return log_times


@dataclass(frozen=True, eq=False, kw_only=True)
class Choice:
    """Says what cross-validation chose for a dataset type, and how each candidate did on unseen
    architectures."""

    name: str
    errors: Mapping[str, float]
    """Mean absolute relative error by candidate; none where no run could be held out."""
    held_out: Array
    """The chosen one's logarithm of each run's step time, learned without its group; not a number where no
    other group has runs of its type."""


def choose(
    problem: Problem, candidates: Sequence[str] = tuple(CANDIDATES), folds: int = 5
) -> dict[str, Choice]:
    """Group k-fold cross-validation over architectures; the baseline is fitted anew in each fold."""
    fold_of, types = _folds(problem, folds), np.array(problem.types)
    held_out = {name: np.full(len(types), np.nan) for name in candidates}
    for fold in np.unique(fold_of):
        if (fold_of == fold).all():  # repeats of one step alone: nothing would be learned from
            continue
        base = problem.based(problem.baselines(fold_of != fold))
        for kind in dict.fromkeys(problem.types):
            inside, outside = (fold_of != fold) & (types == kind), (fold_of == fold) & (types == kind)
            if not outside.any() or inside.sum() * _MOST_ASKED < outside.sum() or not inside.any():
                continue
            for name in candidates:
                residuals = (problem.targets - base)[inside]
                model = Scaled.learn(CANDIDATES[name](), problem.rows[inside], residuals)
                held_out[name][outside] = base[outside] + model.predict(problem.rows[outside])
    return {kind: _best(held_out, problem.targets, types == kind) for kind in dict.fromkeys(problem.types)}


def _best(held_out: Mapping[str, Array], targets: Array, rows: npt.NDArray[np.bool_]) -> Choice:
    """The candidate with the smallest error; the first one, without errors, where no run could be held
    out."""
    errors = {name: np.abs(np.expm1(np.clip(logs - targets, -5, 5)))[rows] for name, logs in held_out.items()}
    means = {name: float(np.nanmean(error)) for name, error in errors.items() if np.isfinite(error).any()}
    best = min(means or held_out, key=lambda name: means.get(name, 0.0))
    return Choice(name=best, errors=means, held_out=held_out[best][rows])


def _folds(problem: Problem, folds: int) -> npt.NDArray[np.int64]:
    """Groups dealt out to folds, the large ones first; single steps where there is one group alone."""
    labels = list(problem.groups if len(set(problem.groups)) > 1 else problem.steps)
    sizes = {label: labels.count(label) for label in dict.fromkeys(labels)}
    filled, where = [0] * min(folds, max(len(sizes), 1)), {}
    for label in sorted(sizes, key=lambda name: (-sizes[name], name)):
        where[label] = int(np.argmin(filled))
        filled[where[label]] += sizes[label]
    return np.array([where[label] for label in labels], dtype=np.int64)
