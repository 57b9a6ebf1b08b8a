"""What PredictDDL learned for one dataset type: how far a job lies from it, how wide that makes the interval,
and how it is kept."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from foretrain.errors import unknown
from foretrain.job import Job
from foretrain.predictors.blackbox import spread_of, widened
from foretrain.predictors.conformal import Factors
from foretrain.predictors.predictddl.regressors import REGRESSORS, Scaled

Array = npt.NDArray[np.float64]

_WIDEST = 3.0
"""How many times as wide an interval gets, at most, for what lies far from everything seen."""


@dataclass(frozen=True, eq=False, kw_only=True)
class Trained:
    """What was learned for one dataset type."""

    baseline: Array | None
    """As ``BASELINE`` names it; None in the paper's form."""
    model: Scaled
    chosen: str
    errors: Mapping[str, float]
    """Of the candidates, on architectures that were left out."""
    spread: Factors
    """Of what is as near to the runs as their architectures are to one another."""
    settings: Mapping[str, Sequence[str]]
    """What the runs were made with, by field."""
    seen: npt.NDArray[np.float32]
    """The rows that were learned from, for telling what lies far from them."""
    usual: float
    """How far the runs lie from those of other architectures: the median."""
    reach: float
    """The same: how far at most, in 95 % of the runs."""
    runs: int

    @classmethod
    def of(
        cls,
        model: Scaled,
        rows: Array,
        left: Array,
        groups: npt.NDArray[np.str_],
        made_with: Sequence[Mapping[str, str]],
        **more: Any,
    ) -> Trained:
        """From the rows of runs, their architectures and settings, and the logarithms that were ``left`` when
        each was held out."""
        apart = _apart(model, rows, groups)
        usual, reach = (float(np.quantile(apart, share)) for share in (0.5, 0.95))
        ratios = np.exp(left / _widening(apart, usual))
        return cls(
            model=model, spread=spread_of(ratios, np.ones(len(ratios))), settings=_joined(made_with),
            seen=rows.astype(np.float32),
            usual=usual, reach=reach, runs=len(rows), **more,
        )  # fmt: skip

    def refuses(self, job: Job) -> str | None:
        """The field that no run tells anything of."""
        if job.cluster.device.is_cpu not in {
            name.startswith("cpu") for name in self.settings["cluster.device"]
        }:
            return "cluster.device"
        return None if settings(job)["training.mode"] in self.settings["training.mode"] else "training.mode"

    def judge(self, job: Job, row: Array) -> tuple[Factors, list[str]]:
        """The interval, wider for what lies far from everything seen, and what to say of it."""
        notes, distance = [], float(_nearest(self.model, row[None], self.seen)[0])
        power = float(_widening(np.array([distance]), self.usual)[0])
        if distance > self.reach:
            times = distance / max(self.reach, 1e-9)
            notes.append(
                f"{job.workload.model.label} at this scale lies "
                f"far from everything learned, {times:.1f} times as far as 95 % of that is apart"
            )
        for name, value in settings(job).items():
            if value not in self.settings[name]:
                power *= 2
                notes.append(f"{name}: {value} was not learned from, only {', '.join(self.settings[name])}")
        power = min(power, _WIDEST)
        if notes:
            notes.append(f"for that, the interval is {power:.1f} times as wide")
        return widened(self.spread, power), notes

    def to_arrays(self) -> dict[str, npt.NDArray[Any]]:
        own = {f"regressor/{name}": array for name, array in self.model.regressor.to_arrays().items()}
        more = {} if self.baseline is None else {"baseline": self.baseline}
        return {
            **own,
            **more,
            "mean": self.model.mean,
            "deviation": self.model.deviation,
            "bounds": self.model.bounds,
            "seen": self.seen,
        }

    def to_facts(self) -> dict[str, Any]:
        """What is no array, as JSON."""
        return {
            "regressor": self.model.regressor.kind, "chosen": self.chosen, "errors": dict(self.errors),
            "factors": list(self.spread),
            "settings": dict(self.settings), "usual": self.usual, "reach": self.reach, "runs": self.runs,
        }  # fmt: skip

    @classmethod
    def read(cls, facts: Mapping[str, Any], arrays: Mapping[str, npt.NDArray[Any]]) -> Trained:
        """From what the two above gave; a KeyError names what is missing."""
        if facts["regressor"] not in REGRESSORS:
            raise unknown("regressor", facts["regressor"], REGRESSORS)
        regressor = REGRESSORS[facts["regressor"]].from_arrays(some(arrays, "regressor/"))
        return cls(
            baseline=arrays.get("baseline"), model=Scaled(mean=arrays["mean"], deviation=arrays["deviation"],
            bounds=arrays["bounds"], regressor=regressor),
            chosen=facts["chosen"], errors=facts["errors"], spread=Factors(*facts["factors"]),
            settings=facts["settings"],
            seen=arrays["seen"], usual=facts["usual"], reach=facts["reach"], runs=facts["runs"],
        )  # fmt: skip


def some(tensors: Mapping[str, npt.NDArray[Any]], start: str) -> dict[str, npt.NDArray[Any]]:
    """Those whose name starts so, without it."""
    return {name.removeprefix(start): array for name, array in tensors.items() if name.startswith(start)}


def settings(job: Job) -> dict[str, str]:
    """What runs must share with a job to tell of it, beside what the columns tell; by field."""
    training, device = job.workload.training, job.cluster.device
    of_training = {
        name: str(getattr(training, name))
        for name in ("mode", "precision", "optimizer", "channels_last", "compile", "framework")
    }
    cores = str(device.cores) if device.is_cpu else "none"
    return {
        "cluster.device": device.name,
        "cluster.cores_per_device": cores,
        **{f"training.{name}": value for name, value in of_training.items()},
    }


def _joined(several: Sequence[Mapping[str, str]]) -> dict[str, list[str]]:
    return {name: sorted({one[name] for one in several}) for name in several[0]}


def _nearest(
    model: Scaled, rows: npt.NDArray[np.floating[Any]], others: npt.NDArray[np.floating[Any]]
) -> Array:
    """The root mean square distance of each row to the nearest of others, in standard deviations of the
    columns that vary."""
    varies = np.isfinite(model.deviation)
    here, there = (((some - model.mean) / model.deviation)[:, varies] for some in (rows, others))
    squares = (here**2).sum(axis=1)[:, None] + (there**2).sum(axis=1)[None] - 2 * here @ there.T
    return np.asarray(np.sqrt(np.maximum(squares.min(axis=1), 0.0) / max(int(varies.sum()), 1)))


def _apart(model: Scaled, rows: Array, groups: npt.NDArray[np.str_]) -> Array:
    """How far each run lies from those of other architectures; of one architecture, from its first run, and
    at least 1."""
    if len(set(groups.tolist())) < 2:
        return np.maximum(_nearest(model, rows, rows[:1]), 1.0)
    apart = np.empty(len(rows))
    for one in set(groups.tolist()):
        apart[groups == one] = _nearest(model, rows[groups == one], rows[groups != one])
    return apart


def _widening(distance: Array, usual: float) -> Array:
    """How many times as far off a forecast is at a distance: about its square root, from the usual one on."""
    return np.sqrt(np.clip(distance / max(usual, 1e-9), 1.0, _WIDEST**2))
