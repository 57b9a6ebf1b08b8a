"""Holds what PredictDDL learned for one dataset type: how far a job lies from it, how wide that makes the
interval, and how it is kept."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from foretrain.errors import unknown
from foretrain.job import Job
from foretrain.predictors.blackbox import spread_of
from foretrain.predictors.conformal import Factors
from foretrain.predictors.machines import MACHINE_DEVIATION, machine_of
from foretrain.predictors.predictddl.features import dataset_type
from foretrain.predictors.predictddl.regressors import REGRESSORS, Scaled
from foretrain.units import format_count

Array = npt.NDArray[np.float64]

_WIDEST = 3.0
"""How many times as wide an interval gets, at most, for what lies far from everything seen."""
_FOLD_DEVIATION, _FIRST_FOLD_DEVIATION = 0.15, 0.25
"""What each e-fold beyond what was learned from adds to a forecast's logarithm, as a standard deviation:
where a quantity varied among the runs, and where it never did."""
_OVER_NETWORK = ", over a network"
_GUESSED_MACHINES = 2
"""Machines that the guess of how far they lie apart counts as."""
_GUESSED_RUNS = 4
"""Runs that the guess that a machine is no more noisy than the others counts as."""
_DEVIATIONS = (-1.96, -1.28, 1.28, 1.96)
"""At which the ends of ``Factors`` lie."""
_COLUMN_UNIT = 1.0
"""The distance of two jobs in a column that never varied among the runs, for each unit (columns are
logarithms and shares)."""


@dataclass(frozen=True, eq=False, kw_only=True)
class Trained:
    """Holds what was learned for one dataset type."""

    baseline: Array | None
    """The parameters of its law, and a value for each of ``machines``; None in the paper's form."""
    model: Scaled
    chosen: str
    errors: Mapping[str, float]
    """Of the candidates, on architectures that were left out."""
    spread: Factors
    """Of what is as near to the runs as their architectures are to one another."""
    types: Sequence[str]
    """The dataset types of the runs."""
    settings: Mapping[str, Sequence[str]]
    """What the runs were made with, by field."""
    ranges: Mapping[str, Sequence[float]]
    """The least and the most that the runs had, by field."""
    machines: Sequence[str]
    """Those that the baseline knows."""
    noise: Mapping[str, float]
    """By machine that runs were made on (none: ''), and of those over a network once more: how far off
    forecasts of its runs are, beside all."""
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
        jobs: Sequence[Job],
        **more: Any,
    ) -> Trained:
        """Make it from the rows of runs, their architectures and jobs, and the logarithms that were ``left``
        when each was held out (not a number where none could be)."""
        apart = _apart(model, rows, groups)
        usual, reach = (float(np.quantile(apart, share)) for share in (0.5, 0.95))
        is_left_out = np.isfinite(left)
        left = left[is_left_out] / _widening(apart[is_left_out], usual)
        hosts, places = (np.array([of(job) for job in jobs]) for of in (machine_of, _place))
        noise = dict.fromkeys(hosts.tolist(), 1.0) | _noise(left, hosts[is_left_out])
        noise |= {
            place: size for place, size in _noise(left, places[is_left_out]).items() if place not in noise
        }
        ratios = np.exp(left / np.array([noise[place] for place in places[is_left_out].tolist()]))
        return cls(
            model=model, spread=spread_of(ratios, np.ones(len(ratios))),
            types=sorted({dataset_type(job) for job in jobs}),
            settings=_joined([settings(job) for job in jobs]), ranges=_ranges(jobs), noise=noise,
            seen=rows.astype(np.float32),
            usual=usual, reach=reach, runs=len(rows), **more,
        )  # fmt: skip

    def refuses(self, job: Job) -> str | None:
        """The field that no run tells anything of."""
        asked = settings(job)
        return next(
            (name for name in _DECISIVE if name in asked and asked[name] not in self.settings.get(name, ())),
            None,
        )

    def judge(self, job: Job, row: Array) -> tuple[Factors, list[str]]:
        """The interval, wider for what lies far from everything seen, and what to say of it."""
        notes, distance = [], float(_nearest(self.model, row[None], self.seen)[0])
        power = float(_widening(np.array([distance]), self.usual)[0])
        if (kind := dataset_type(job)) not in self.types:
            power *= 2 if len(self.types) == 1 else 1  # of several, each was forecast from the others
            types = ", ".join(self.types)
            notes.append(f"training: dataset type {kind!r} was not learned from, only {types}")
        if distance > self.reach:
            times = distance / max(self.reach, 1e-9)
            notes.append(
                f"{job.workload.model.label} at this scale lies "
                f"far from everything learned, {times:.1f} times as far as 95 % of that is apart"
            )
        for name, value in settings(job).items():
            if value not in self.settings.get(name, ()):
                power *= 2
                notes.append(f"{name}: {value} was not learned from, only {', '.join(self.settings[name])}")
        deviations = []
        for name, size in scales(job).items():
            deviation, note = self._beyond(name, size)
            deviations.append(deviation)
            notes += note
        host = machine_of(job)
        if host not in self.noise:
            deviations.append(self.machine_deviation)
            learned = "; ".join(name or "a machine that is not told" for name in self._hosts)
            notes.append(
                f"cluster.host: {host or 'not given'}, and runs were made on {learned}; machines differ by "
                f"{math.expm1(self.machine_deviation):.0%} or so"
            )
        usual = float(np.mean([self.noise[name] for name in self._hosts]))
        near = self.spread.power(self.noise.get(_place(job), self.noise.get(host, usual)))
        beyond = Factors(*(math.exp(at * math.hypot(*deviations)) for at in _DEVIATIONS))
        spread = near.power(min(power, _WIDEST)).joined(beyond)
        if notes:
            times = math.log(spread.high / spread.low) / max(math.log(near.high / near.low), 1e-9)
            notes.append(f"for that, the interval is {times:.1f} times as wide")
        return spread, notes

    @property
    def _hosts(self) -> list[str]:
        """The machines that runs were made on."""
        return sorted(name for name in self.noise if not name.endswith(_OVER_NETWORK))

    @property
    def machine_deviation(self) -> float:
        """Give the deviation of the logarithms of step times on a machine that no run was made on, around
        those of the mean machine."""
        logs = (
            np.zeros(1) if self.baseline is None else self.baseline[len(self.baseline) - len(self.machines) :]
        )
        known = max(len(self._hosts), 1)
        square = _GUESSED_MACHINES * MACHINE_DEVIATION**2 + float((logs**2).sum())
        return math.sqrt(square / (_GUESSED_MACHINES + known) * (1 + 1 / known))

    def _beyond(self, name: str, value: float) -> tuple[float, list[str]]:
        """Say what a value outside of what was learned from adds to the deviation, and the words for it."""
        if name not in self.ranges:
            unlearned = (
                0.0 if name == "cluster.inter_node" else _FIRST_FOLD_DEVIATION
            )  # nodes, or those of servers, count already
            such = "over such a link" if name.endswith("_node") else "with any"
            return unlearned, [f"{name}: {_words(name, value)}, and no run was made {such}"]
        low, high = self.ranges[name]
        folds = max(math.log(value / high), math.log(low / value), 0.0)
        if folds < 1e-9:
            return 0.0, []
        seen = _words(name, low) if low == high else f"{_words(name, low)} to {_words(name, high)}"
        each = _FIRST_FOLD_DEVIATION if low == high else _FOLD_DEVIATION
        return each * folds, [f"{name}: {_words(name, value)} was not learned from, only {seen}"]

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
        """Write what is no array, as JSON."""
        return {
            "regressor": self.model.regressor.kind, "chosen": self.chosen, "errors": dict(self.errors),
            "factors": list(self.spread),
            "types": list(self.types),
            "settings": dict(self.settings), "ranges": dict(self.ranges), "machines": list(self.machines),
            "noise": dict(self.noise), "usual": self.usual, "reach": self.reach, "runs": self.runs,
        }  # fmt: skip

    @classmethod
    def read(cls, facts: Mapping[str, Any], arrays: Mapping[str, npt.NDArray[Any]]) -> Trained:
        """Read what the two above gave; a KeyError names what is missing."""
        if facts["regressor"] not in REGRESSORS:
            raise unknown("regressor", facts["regressor"], REGRESSORS)
        regressor = REGRESSORS[facts["regressor"]].from_arrays(starting_with(arrays, "regressor/"))
        return cls(
            baseline=arrays.get("baseline"), model=Scaled(mean=arrays["mean"], deviation=arrays["deviation"],
            bounds=arrays["bounds"], regressor=regressor),
            chosen=facts["chosen"], errors=facts["errors"], spread=Factors(*facts["factors"]),
            types=facts["types"], settings=facts["settings"], ranges=facts["ranges"],
            machines=facts["machines"], noise=facts["noise"],
            seen=arrays["seen"], usual=facts["usual"], reach=facts["reach"], runs=facts["runs"],
        )  # fmt: skip


def starting_with(tensors: Mapping[str, npt.NDArray[Any]], start: str) -> dict[str, npt.NDArray[Any]]:
    """Keep the arrays whose name starts so, and take the start off."""
    return {name.removeprefix(start): array for name, array in tensors.items() if name.startswith(start)}


_DECISIVE = ("training.mode", "training.adapter")
"""What changes a step so much that runs without it tell nothing."""


def settings(job: Job) -> dict[str, str]:
    """Name what runs must share with a job to tell of it, beside what the columns tell; by field."""
    training, device = job.workload.training, job.cluster.device
    of_training = {
        name: str(getattr(training, name))
        for name in ("mode", "precision", "optimizer", "channels_last", "compile", "framework")
    }
    return {
        "cluster.device": device.name,
        "cluster.inter_node.kind": job.cluster.inter_node.kind if job.over_network else "ethernet",
        "plan.asynchronous": str(job.plan.asynchronous),
        **{f"training.{name}": one for name, one in of_training.items()},
        **({} if training.adapter is None else {"training.adapter": training.adapter.words}),
    }


def scales(job: Job) -> dict[str, float]:
    """Name what a job has more or less of than runs, by field: the law is carried on beyond them."""
    cluster = job.cluster
    sizes: dict[str, float] = {"workers": cluster.world_size, "cluster.nodes": cluster.nodes}
    if cluster.device.is_cpu:
        sizes["cluster.cores_per_device"] = cluster.device.cores
    if cluster.servers is not None:
        sizes["cluster.servers.nodes"] = cluster.servers.nodes
    if job.over_network:
        sizes["cluster.inter_node"] = cluster.inter_node.bandwidth_bytes_per_s
    if cluster.devices_per_node > 1:
        sizes["cluster.intra_node"] = cluster.intra_node.bandwidth_bytes_per_s
    return sizes


def _words(name: str, value: float) -> str:
    return format_count(8 * value, "b/s") if name.endswith("_node") else f"{value:g}"


def _ranges(jobs: Sequence[Job]) -> dict[str, list[float]]:
    range_of: dict[str, list[float]] = {}
    for job in jobs:
        for name, value in scales(job).items():
            low, high = range_of.get(name, (value, value))
            range_of[name] = [min(low, value), max(high, value)]
    return range_of


def _place(job: Job) -> str:
    """The machine, and whether workers exchange over a network: other processes take their turn in both."""
    return machine_of(job) + (_OVER_NETWORK if job.over_network else "")


def _noise(left: Array, hosts: npt.NDArray[np.str_]) -> dict[str, float]:
    """Say how far off the forecasts of each machine's runs are, beside those of all; few runs tell little."""
    whole = max(float(np.abs(left).mean()), 1e-9) if len(left) else 1.0
    sizes = {host: np.abs(left[hosts == host]) / whole for host in sorted(set(hosts.tolist()))}
    return {
        host: float((_GUESSED_RUNS + size.sum()) / (_GUESSED_RUNS + len(size)))
        for host, size in sizes.items()
    }


def _joined(several: Sequence[Mapping[str, str]]) -> dict[str, list[str]]:
    names = dict.fromkeys(name for one in several for name in one)
    return {name: sorted({one[name] for one in several if name in one}) for name in names}


def _nearest(
    model: Scaled, rows: npt.NDArray[np.floating[Any]], others: npt.NDArray[np.floating[Any]]
) -> Array:
    """The root mean square distance of each row to the nearest of others, in standard deviations of the
    columns; what never varied counts in units of its own, and only where it differs."""
    varies = np.isfinite(model.deviation)
    units = np.where(varies, model.deviation, _COLUMN_UNIT)
    scaled_rows, scaled_others = ((figures - model.mean) / units for figures in (rows, others))
    squares = (
        (scaled_rows**2).sum(axis=1)[:, None]
        + (scaled_others**2).sum(axis=1)[None]
        - 2 * scaled_rows @ scaled_others.T
    )
    return np.asarray(np.sqrt(np.maximum(squares.min(axis=1), 0.0) / max(int(varies.sum()), 1)))


def _apart(model: Scaled, rows: Array, groups: npt.NDArray[np.str_]) -> Array:
    """Say how far each run lies from those of other architectures; of one architecture, from its first run,
    and at least 1."""
    if len(set(groups.tolist())) < 2:
        return np.maximum(_nearest(model, rows, rows[:1]), 1.0)
    apart = np.empty(len(rows))
    for one in set(groups.tolist()):
        apart[groups == one] = _nearest(model, rows[groups == one], rows[groups != one])
    return apart


def _widening(distance: Array, usual: float) -> Array:
    """Say how many times as far off a forecast is at a distance: about its square root, from the usual one
    on."""
    return np.sqrt(np.clip(distance / max(usual, 1e-9), 1.0, _WIDEST**2))
