"""Chooses by left-out runs which predictors speak for a job, and with what weights."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Self, get_args

import numpy as np
import numpy.typing as npt

from foretrain.predictors.joined.relations import Relation
from foretrain.predictors.likeness import FIELDS, SIZES, Key
from foretrain.predictors.records import shipped

Array = npt.NDArray[np.float64]
Mask = npt.NDArray[np.bool_]

Weighting = Literal["best", "weighted", "near", "corrected"]
WEIGHTINGS: tuple[Weighting, ...] = get_args(Weighting)
WORDS: Mapping[Weighting, str] = {
    "best": "the best one",
    "weighted": "a mean, weighted by error",
    "near": "a mean, weighted by error on near runs",
    "corrected": "the same, corrected by how far off each is on near runs",
}

_FEWEST_OF_KIND = 8
"""Left-out runs of one relation and device from which on they alone choose."""
_MOST_MISS = 1.5
"""An error counts no more than this, so that one forecast that is far off does not decide."""
_WORST = 1.7
"""Errors over that of the best beyond which a predictor has no weight in a mean."""
_LEAST_ERROR = 0.01
_NEAR = 0.06
"""The distance, of ``evidence``, at which a left-out run counts e times less than a run of the same job."""
_PRIOR_ERROR, _PRIOR_SHIFT = 3.0, 3.0
"""Left-out runs that a predictor's error in the kind, and no correction, count as."""
_UNSURE, _UNKNOWN = 0.5, 0.5
"""Of its standard error over parts, how much counts on top of a predictor's mean error, so that one is not
taken for the best for luck in a few; and that error over the mean where one part alone tells."""
_BETTER = 0.03
"""By how much of its error the best one must be beaten before several speak."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Mix:
    """Says who speaks for a job: weights that add up to 1, and by how many e-folds each forecasts too
    much."""

    weights: Mapping[str, float]
    shifts: Mapping[str, float]


@dataclass(frozen=True, eq=False, kw_only=True)
class LeftOut:
    """Forecasts of runs that were left out: the logarithm of forecast over measured time, not a number where
    a predictor refused, with a row for each run and a column for each predictor."""

    members: tuple[str, ...]
    keys: tuple[Key, ...]
    relations: tuple[Relation, ...]
    devices: tuple[str, ...]
    parts: tuple[int, ...]
    """Runs that were left out together."""
    positions: tuple[int, ...]
    """Of the run among those learned from."""
    steps: tuple[int, ...]
    """The position of the first run of the same step: repeats share it."""
    misses: Array

    def __len__(self) -> int:
        return len(self.keys)

    def where(self, relation: Relation, device: str, among: Mask) -> Mask:
        """Select the left-out runs that tell of a kind of job: of its relation and device, or of its
        relation, as there are enough."""
        alike = np.array([one == relation for one in self.relations], dtype=bool) & among
        same = alike & np.array([one == device for one in self.devices], dtype=bool)
        return same if same.sum() >= _FEWEST_OF_KIND else alike

    def distances(self, key: Key) -> Array:
        """Give the distance of a job to each run, by the weights of ``likeness``."""
        weights = shipped().weights
        away = np.zeros(len(self))
        for name in FIELDS:
            away += weights[name] * np.array([one.fields[name] != key.fields[name] for one in self.keys])
        for name in SIZES:
            if name in key.sizes:
                size = key.sizes[name]
                away += weights[name] * np.array(
                    [abs(math.log(one.sizes[name] / size)) if name in one.sizes else 0.0 for one in self.keys]
                )
        return away

    def mix(self, weighting: Weighting, kind: Mask, distances: Array, available: Sequence[str]) -> Mix | None:
        """Choose who speaks, of those that are available, by the left-out runs of a kind; None where none
        tells."""
        columns = [self.members.index(name) for name in available]
        if not kind.any() or not columns:
            return None
        misses = self.misses[kind][:, columns]
        is_forecast = np.isfinite(misses)
        errors = errors_of(misses)
        nearness = np.exp(-distances[kind] / _NEAR)[:, None] * is_forecast
        parts = np.array(self.parts)[kind]
        overall = np.array(
            [_expected(*column, parts) for column in zip(errors.T, is_forecast.T, strict=True)]
        )
        overall = np.where(is_forecast.sum(axis=0) >= max(1, _least_forecast(kind)), overall, np.inf)
        if not np.isfinite(overall).any():
            return None
        shifts = np.zeros(len(columns))
        if weighting in ("near", "corrected"):
            if weighting == "corrected":
                shifts = np.nansum(nearness * np.where(is_forecast, misses, 0.0), axis=0) / (
                    nearness.sum(axis=0) + _PRIOR_SHIFT
                )
                errors = errors_of(misses - shifts)
            near = (nearness * np.where(is_forecast, errors, 0.0)).sum(axis=0) + _PRIOR_ERROR * np.where(
                np.isfinite(overall), overall, 0.0
            )
            expected = np.where(np.isfinite(overall), near / (nearness.sum(axis=0) + _PRIOR_ERROR), np.inf)
        else:
            expected = overall
        weights = np.zeros(len(columns))
        if weighting == "best":
            weights[int(np.argmin(expected))] = 1.0
        else:
            kept = expected <= _WORST * max(float(expected.min()), _LEAST_ERROR)
            weights[kept] = 1 / np.maximum(expected[kept], _LEAST_ERROR) ** 2
            weights /= weights.sum()
        return Mix(
            weights={name: float(w) for name, w in zip(available, weights, strict=True) if w > 0},
            shifts={name: float(b) for name, b in zip(available, shifts, strict=True) if b},
        )

    def missed(self, weighting: Weighting) -> Array:
        """Compute the miss of each left-out run by weights that were found without it, its repeats and those
        left out with it."""
        misses = np.full(len(self), np.nan)
        for i in range(len(self)):
            mix = self.mix_without(weighting, i)
            if mix is not None:
                own = dict(zip(self.members, self.misses[i], strict=True))
                misses[i] = sum(
                    weight * (own[name] - mix.shifts.get(name, 0.0)) for name, weight in mix.weights.items()
                )
        return misses

    def without(self, i: int) -> Mask:
        """Select all but one run, its repeats and those left out with it."""
        parts, steps = np.array(self.parts), np.array(self.steps)
        among: Mask = (parts != parts[i]) & (steps != steps[i])
        return among

    def mix_without(self, weighting: Weighting, i: int) -> Mix | None:
        """Choose who speaks for a left-out run, of those that forecast it, by the others."""
        among = self.without(i)
        kind = self.where(self.relations[i], self.devices[i], among)
        kind = kind if kind.any() else among  # nobody else was left out so: what is known of other kinds
        is_forecast = np.isfinite(self.misses[i])
        available = [name for name, has in zip(self.members, is_forecast, strict=True) if has]
        return self.mix(weighting, kind, self.distances(self.keys[i]), available)

    def to_dict(self) -> dict[str, Any]:
        return {
            "members": list(self.members),
            "keys": [{"fields": dict(key.fields), "sizes": dict(key.sizes)} for key in self.keys],
            "relations": list(self.relations),
            "devices": list(self.devices),
            "parts": list(self.parts),
            "positions": list(self.positions),
            "steps": list(self.steps),
            "misses": [[float(miss) if math.isfinite(miss) else None for miss in row] for row in self.misses],
        }

    @classmethod
    def from_dict(cls, document: Mapping[str, Any]) -> Self:
        columns = {name: tuple(document[name]) for name in ("members", "relations", "devices")}
        numbers = {name: tuple(document[name]) for name in ("parts", "positions")}
        numbers["steps"] = tuple(document.get("steps", numbers["positions"]))
        misses = np.array(document["misses"], dtype=np.float64).reshape(-1, len(columns["members"]))
        keys = tuple(Key(fields=key["fields"], sizes=key["sizes"]) for key in document["keys"])
        return cls(**columns, **numbers, keys=keys, misses=misses)


def _least_forecast(kind: Mask) -> int:
    """Count the left-out runs that a predictor must have forecast to be chosen: a third of the kind."""
    return int(kind.sum()) // 3


def _expected(errors: Array, is_forecast: Mask, parts: npt.NDArray[np.int64]) -> float:
    """Give the mean error of a predictor, and more the less the parts agree; those of a part err together."""
    errors, parts = errors[is_forecast], parts[is_forecast]
    if not len(errors):
        return math.inf
    mean = float(errors.mean())
    sums = np.array([(errors[parts == part] - mean).sum() for part in np.unique(parts)])
    count = len(sums)
    if count < 2:
        return mean * (1 + _UNSURE * _UNKNOWN)
    return mean + _UNSURE * math.sqrt(count / (count - 1) * float((sums**2).sum())) / len(errors)


def errors_of(misses: Array) -> Array:
    """Turn misses into relative errors, none above what counts."""
    with np.errstate(over="ignore", invalid="ignore"):
        return np.asarray(np.minimum(np.abs(np.expm1(misses)), _MOST_MISS), dtype=np.float64)


def chosen_weightings(left_out: LeftOut) -> tuple[dict[Relation, Weighting], Array]:
    """Choose the weighting that does best in each relation, and say what it misses of every left-out run, the
    weighting itself chosen without the runs that were left out together and their repeats."""
    by_weighting = {weighting: left_out.missed(weighting) for weighting in WEIGHTINGS}
    relations = np.array(left_out.relations)
    parts, steps = np.array(left_out.parts), np.array(left_out.steps)
    weightings: dict[Relation, Weighting] = {}
    misses = np.full(len(left_out), np.nan)
    for relation in dict.fromkeys(left_out.relations):
        of_relation = relations == relation
        weightings[relation] = _best_weighting(by_weighting, of_relation, parts)
        for part in np.unique(parts[of_relation]):
            held_out = of_relation & (parts == part)
            others = of_relation & (parts != part) & ~np.isin(steps, steps[held_out])
            misses[held_out] = by_weighting[_best_weighting(by_weighting, others, parts)][held_out]
    return weightings, misses


def _best_weighting(
    by_weighting: Mapping[Weighting, Array], among: Mask, parts: npt.NDArray[np.int64]
) -> Weighting:
    """Take the best one alone, unless another beats it by enough of its error, and in part after part."""
    errors = {weighting: errors_of(misses[among]) for weighting, misses in by_weighting.items()}
    best = min(WEIGHTINGS, key=lambda weighting: _mean(errors[weighting]))
    enough = _mean(errors[best]) < (1 - _BETTER) * _mean(errors["best"])
    return best if enough and _steady(errors["best"] - errors[best], parts[among]) else "best"


def _steady(gains: Array, parts: npt.NDArray[np.int64]) -> bool:
    """Whether a gain holds over the parts in which runs were left out: its mean is above its standard error,
    each part counting once, as runs that were left out together err together."""
    known = np.isfinite(gains)
    each = np.array([gains[known & (parts == part)].mean() for part in np.unique(parts[known])])
    return len(each) > 1 and bool(each.mean() > each.std(ddof=1) / math.sqrt(len(each)))


def _mean(values: Array) -> float:
    known = values[np.isfinite(values)]
    return float(known.mean()) if len(known) else math.inf
