"""Forecasts by Driple how busy device, memory and network will be: a graph neural network tells it from a
step's graph, and is tailored to a new setting by transfer."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self, final

import numpy as np

from foretrain.architectures import family
from foretrain.capture import capture_job
from foretrain.errors import InputError, UnsupportedJob, invalid
from foretrain.estimate import SHARES
from foretrain.forecast import Estimate, Forecast
from foretrain.job import Job
from foretrain.predictors.base import Benefit, Progress, Report, take_runs
from foretrain.predictors.blackbox import check_data_parallel
from foretrain.predictors.deletepop import DeletePopPredictor
from foretrain.predictors.driple.cases import Cases, deletepop, network_module, tailoring_module
from foretrain.predictors.driple.features import (
    NETWORK,
    NETWORK_FIGURES,
    NODE_COLUMNS,
    SETTING_COLUMNS,
    SPANS,
    TARGETS,
    WHOLE_COLUMNS,
    Array,
    exchanges,
    figures_of,
    scaled,
    setting_of,
    unscaled,
)  # fmt: skip
from foretrain.predictors.driple.transfers import TransferCheck
from foretrain.predictors.driple.whitebox import (
    Levels,
    Whitebox,
    rank_link_bytes_per_s,
)
from foretrain.predictors.neural import NeuralPredictor
from foretrain.predictors.seen import DATA_NUMBERS, NUMBERS, SETTINGS, Numbers, Seen, step_of
from foretrain.run import Run
from foretrain.units import format_count

if TYPE_CHECKING:
    from foretrain.predictors.driple.network import Kind, Network

SHIPPED = Path(__file__).parent / "fitted"
_SCHEDULES = "schedules"
"""The folder beside ``predictor.json`` with the operator models, when they are not those of the package."""
_ENOUGH = 8
"""Runs of a transfer from which on its intervals are those of its left-out runs."""
_FEW = 4
"""Families below which intervals cannot be learned; they are then as wide as this many tenths of a figure."""
_RATES = tuple(name for name, is_rate in zip(TARGETS, NETWORK, strict=True) if is_rate)
"""Figures in bytes per second, which no link carries more of than it can."""
_SPANS = tuple(name for name, is_span in zip(TARGETS, SPANS, strict=True) if is_span)
"""Figures that are shares of a window for a network, and seconds for everyone else."""
_WIDER = 1.5
"""How many times as wide intervals are for each setting that no run has, and for each e-fold beyond a number
of the runs."""
Mode = Literal["improved", "reference"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Learned:
    """Networks by setting, or by device when improved, and what they learned from."""

    networks: Mapping[str, Network]
    levels: Levels
    settings: frozenset[str]
    measured: Mapping[str, tuple[str, ...]]
    """For each device, the figures that its runs had."""
    seen: Mapping[str, Seen]
    """The settings and numbers of the runs of each network."""
    spread: Mapping[str, Array]
    """Of each network, for each figure, how far runs lay from forecasts that had not seen their family, in
    scaled units: ``SHARES``."""


@final
class DriplePredictor(NeuralPredictor[Learned]):
    """Idle time, active time and peak of four resources, and their averages, after Driple (Yang et al.,
    SIGMETRICS 2022).

    ``reference`` is the published network, one per setting, over a hundred groups of operators. ``improved``
    is one network for all settings of a device over the directed graph of layers; it corrects what the
    schedule of the step says of the resources. ``fit`` after ``load`` is a transfer: the body of the network
    stays, the last layers are tailored to the runs.
    """

    name: ClassVar[str] = "driple"
    home: ClassVar[frozenset[str]] = frozenset({"cpu16_campaign", "h200_resources"})
    quantities: ClassVar[frozenset[str]] = frozenset(TARGETS)
    shipped: ClassVar[Path] = SHIPPED

    def __init__(
        self, mode: Mode = "improved", kind: Kind = "gcn", seed: int = 0, learned: Learned | None = None,
        schedules: DeletePopPredictor | None = None,
    ) -> None:  # fmt: skip
        if mode not in ("improved", "reference"):
            raise invalid("mode", mode, "improved or reference")
        self.mode, self.kind, self.seed, self.learned_, self.schedules = mode, kind, seed, learned, schedules
        self._transfers = learned is not None
        self.transfers_: list[TransferCheck] = []
        self.fresh = learned is None and mode == "improved"

    def predict(self, job: Job) -> Forecast:
        learned, figures = self.state(), self.figures(job)
        known_spread = learned.spread[self._network_of(job)]
        whitebox = Whitebox(self._schedules(), learned.levels)
        notes, wider = self._unseen(job)
        link = rank_link_bytes_per_s(job)
        if (highest := np.nanmax(figures[NETWORK], initial=0.0)) > link:
            known = NETWORK_FIGURES & np.isfinite(figures)
            figures[known] = whitebox.figures(job)[known]
            said, carried = (format_count(rate, "B/s") for rate in (highest, link))
            notes.append(
                f"network: those of the schedule; driple's network says {said}, which is more than the "
                f"{carried} of the links of a rank"
            )
        values, spread = scaled(figures), known_spread * wider
        if wider > 1:
            spread = _no_narrower(spread, self._schedules().predict(job).quantities)
        if not exchanges(job):
            spread[NETWORK_FIGURES] = known_spread[NETWORK_FIGURES]
        quantities = {
            name: _estimate(i, values, spread[i])
            for i, name in enumerate(TARGETS)
            if math.isfinite(values[i])
        }
        if any(name in quantities for name in _SPANS):
            window_s = whitebox.window_s(job)
            quantities.update({name: quantities[name] * window_s for name in _SPANS if name in quantities})
        quantities.update({name: quantities[name].at_most(link) for name in _RATES if name in quantities})
        return Forecast(job=job, predictor=self.name, quantities=quantities, assumptions=tuple(notes))

    def _unseen(self, job: Job) -> tuple[list[str], float]:
        """Say what the runs of a job's network do not have, and how many times as wide intervals are for
        it."""
        learned = self.state()
        seen, row, new = learned.seen[self._network_of(job)], _number_row(job), setting_of(job)
        names, away = [name for name in SETTINGS if not seen.has(job, name)], seen.numbers.away(row)
        notes = [_unseen_note(seen, job, name) for name in names] + seen.notes(away, row)
        distance = len(names) + sum(away.beyond.values())
        if new not in learned.settings:
            notes.insert(0, f"driple has learned from no run of the setting {new}")
            distance = max(distance, 1.0)
        return notes, _WIDER**distance

    def figures(self, job: Job) -> Array:
        """Forecast the figures that ``TARGETS`` names, spans as shares of the window; not a number for those
        that no run of the device had."""
        check_data_parallel(job, self.name)
        learned = self.state()
        network = learned.networks.get(self._network_of(job))
        if network is None:
            raise UnsupportedJob(
                f"driple: has learned from no run of {self._network_of(job)}, "
                f"only of {', '.join(sorted(learned.networks))}"
            )
        data = Cases.of(
            [job], improved=self.mode == "improved", levels=learned.levels, schedules=self._schedules()
        )
        figures: Array = data.figures(network.figures(data.samples()))[0]
        unknown = set(TARGETS) - set(learned.measured.get(job.cluster.device.name, ()))
        figures[[name in unknown for name in TARGETS]] = math.nan
        return figures

    def _network_of(self, job: Job) -> str:
        """The network that answers for a job: its setting's in the reference, its device's else."""
        return setting_of(job) if self.mode == "reference" else job.cluster.device.name

    def fit(self, runs: Iterable[Run]) -> Self:
        """Train on runs with resource figures or averages; what was loaded is tailored to them instead."""
        known, self.left_out_ = take_runs(runs, _checked)
        if not known:
            raise InputError("runs: none has resource figures or utilisation; driple needs at least one")
        before = self.learned_.levels if self._transfers and self.learned_ else None
        levels = Whitebox(self._schedules(), before).fit(known).levels
        data = Cases.of(
            [run.job for run in known],
            [_figures(run) for run in known],
            improved=self.mode == "improved",
            levels=levels,
            schedules=self._schedules(),
        )
        kin = [family(run.job.workload.model) for run in known]
        keys = [self._network_of(run.job) for run in known]
        if self._transfers:
            networks, held_out = self._transfer(data, kin, keys, [step_of(run.job) for run in known])
        else:
            networks, held_out = self._train(data, kin, keys)
        self._keep(known, data, networks, data.figures(held_out), levels)
        return self

    def _train(
        self, data: Cases, kin: Sequence[str], keys: Sequence[str]
    ) -> tuple[dict[str, Network], Array]:
        network = network_module()
        kind = "improved" if self.mode == "improved" else self.kind
        held_out = np.full((len(kin), len(TARGETS)), np.nan)
        networks = {}
        for key, rows in _rows_by(keys).items():
            networks[key], held_out[rows] = network.train(
                data.part(rows).samples(), [kin[i] for i in rows], kind, seed=self.seed
            )
        return networks, held_out

    def _transfer(
        self, data: Cases, kin: Sequence[str], keys: Sequence[str], steps: Sequence[str]
    ) -> tuple[dict[str, Network], Array]:
        """Tailored networks; the figures of each run by one that was tailored without its family (or, where
        all are of one, without it and its repeats)."""
        tailoring, before = tailoring_module(), self.state()
        networks = dict(before.networks)
        held_out = np.full((len(kin), len(TARGETS)), np.nan)
        self.transfers_ = []
        for key, rows in _rows_by(keys).items():
            start = before.networks.get(key)
            if start is None:
                start = tailoring.silenced(next(iter(before.networks.values())))
            cases = data.part(rows)
            families = [kin[i] for i in rows]
            groups = families if len(set(families)) > 1 else [steps[i] for i in rows]
            networks[key], held_out[rows] = tailoring.transfer(start, cases.samples(), groups)
            as_it_was = cases.figures(start.figures(cases.samples()))
            self.transfers_.append(
                TransferCheck.of(key, len(rows), as_it_was, cases.figures(held_out[rows]), cases.measured)
            )
        return networks, held_out

    def _keep(
        self,
        runs: Sequence[Run],
        data: Cases,
        networks: Mapping[str, Network],
        held_out: Array,
        levels: Levels,
    ) -> None:
        before = self.learned_ if self._transfers else None
        residuals = scaled(data.measured) - scaled(held_out)
        spread: dict[str, Array] = dict(before.spread) if before else {}
        measured: dict[str, tuple[str, ...]] = dict(before.measured) if before else {}
        devices = np.array([run.job.cluster.device.name for run in runs])
        for device in sorted(set(devices.tolist())):
            present = np.isfinite(data.measured[devices == device]).any(axis=0)
            measured[device] = tuple(
                name for name, is_measured in zip(TARGETS, present, strict=True) if is_measured
            )
        settings = frozenset(setting_of(run.job) for run in runs) | (
            before.settings if before else frozenset()
        )
        seen: dict[str, Seen] = dict(before.seen) if before else {}
        for key, rows in _rows_by([self._network_of(run.job) for run in runs]).items():
            seen[key] = _seen([runs[i].job for i in rows], seen.get(key))
            if key not in spread or len(rows) >= _ENOUGH:
                spread[key] = _spread(residuals[rows])
        self.learned_ = Learned(
            networks=networks, levels=levels, settings=settings, measured=measured, seen=seen, spread=spread
        )
        busy = TARGETS.index("device_utilization")
        mean = np.nanmean(data.measured[:, busy])
        errors = [
            float(np.nanmean(np.abs(guess - data.measured[:, busy]))) for guess in (mean, held_out[:, busy])
        ]
        if before is None and all(map(math.isfinite, errors)):
            self.benefits_ = {
                "device_utilization": Benefit(runs=len(runs), error_before=errors[0], error_after=errors[1])
            }

    def report(self, progress: Progress = lambda done, total: None) -> Report:
        """Say what a transfer was worth on runs that were left out; else what learning was."""
        if not self.transfers_:
            return super().report(progress)
        return [part for check in self.transfers_ for part in check.report()]

    def without(self, families: frozenset[str] = frozenset(), devices: frozenset[str] = frozenset()) -> Self:
        """The networks are forgotten until ``fit``; the schedules are then those of operators learned without
        them."""
        self.forget()
        self._transfers = False
        self.schedules = copy.deepcopy(self._schedules()).without(families, devices)
        return self

    def _schedules(self) -> DeletePopPredictor:
        """Name the predictor that forecasts the steps whose resources the white box samples."""
        return self.schedules or deletepop()

    def _write(self, folder: Path) -> Mapping[str, Any]:
        learned = self.state()
        files = {}
        for number, (setting, network) in enumerate(sorted(learned.networks.items())):
            files[setting] = f"network-{number}.safetensors"
            network.save(folder / files[setting])
        if self.schedules is not None:
            self.schedules.save(folder / _SCHEDULES)
        return {
            "own_schedules": self.schedules is not None,
            "mode": self.mode, "kind": self.kind, "networks": files, "levels": learned.levels.to_dict(),
            "settings": sorted(learned.settings),
            "measured": {device: list(names) for device, names in learned.measured.items()},
            "seen": {key: seen.to_dict() for key, seen in learned.seen.items()},
            "spread": {key: spread.tolist() for key, spread in learned.spread.items()},
            "columns": _columns(self.mode),
        }  # fmt: skip

    @classmethod
    def _read(cls, folder: Path, document: Mapping[str, Any]) -> Self:
        if document["columns"] != _columns(document["mode"]):
            raise InputError(f"{folder}: the features are others than this version computes; fit it again")
        if "seen" not in document:
            raise InputError(f"{folder}: does not tell which settings its runs had; fit it again")
        module = network_module()
        learned = Learned(
            networks={setting: module.load(folder / file) for setting, file in document["networks"].items()},
            levels=Levels(**document["levels"]),
            settings=frozenset(document["settings"]),
            measured={device: tuple(names) for device, names in document["measured"].items()},
            seen={key: Seen.from_dict(seen) for key, seen in document["seen"].items()},
            spread={key: np.array(one, dtype=np.float64) for key, one in document["spread"].items()},
        )
        own = document.get("own_schedules", False)
        schedules = DeletePopPredictor.load(folder / _SCHEDULES) if own else None
        return cls(document["mode"], document["kind"], learned=learned, schedules=schedules)


# What was seen


def _image_side(job: Job) -> float | None:
    image = job.workload.training.image
    return math.sqrt(image[-2] * image[-1]) if isinstance(image, tuple) else image


_NUMBERS: Mapping[str, Callable[[Job], float | None]] = {
    **{name: number for name, number in NUMBERS.items() if name not in DATA_NUMBERS},
    "image side": _image_side,
    "sequence": lambda job: job.workload.training.sequence,
}
"""What may lie beyond the runs of a network."""


def _number_row(job: Job) -> dict[str, float | None]:
    return {name: number(job) for name, number in _NUMBERS.items()}


def _seen(jobs: Sequence[Job], before: Seen | None) -> Seen:
    """Add what jobs have to what others before them had."""
    rows = [_number_row(job) for job in jobs]
    seen = Seen.of(jobs, {name: np.array([row[name] for row in rows], dtype=np.float64) for name in _NUMBERS})
    if before is None:
        return seen
    settings = {
        name: (*before.settings[name], *(value for value in values if value not in before.settings[name]))
        for name, values in seen.settings.items()
    }
    numbers = {
        name: tuple(sorted({*values, *before.numbers.values[name]}))
        for name, values in seen.numbers.values.items()
    }
    return Seen(workload="", settings=settings, numbers=Numbers(values=numbers))


def _unseen_note(seen: Seen, job: Job, name: str) -> str:
    known = ", ".join(map(str, seen.settings[name]))
    which = f"which no run has ({known})" if known else "which no run has"
    return f"{name}: {SETTINGS[name](job)}, {which}, is known to the schedule alone"


def _rows_by(keys: Sequence[str]) -> dict[str, list[int]]:
    return {key: [i for i, one in enumerate(keys) if one == key] for key in sorted(set(keys))}


def _columns(mode: str) -> list[str]:
    return (
        [*NODE_COLUMNS, *WHOLE_COLUMNS, *SETTING_COLUMNS, *TARGETS] if mode == "improved" else list(TARGETS)
    )


def _checked(run: Run) -> Run:
    """A run of data parallelism with figures whose step can be captured."""
    check_data_parallel(run.job, DriplePredictor.name)
    if figures_of(run) is None:
        raise UnsupportedJob("no resource figures")
    capture_job(run.job)
    return run


def _figures(run: Run) -> Array:
    figures = figures_of(run)
    assert figures is not None
    return figures


_WIDE = (-0.8, -0.4, 0.4, 0.8)
"""Quantiles of residuals, as ``SHARES``, where too few figures were held out to tell."""


def _spread(residuals: Array) -> Array:
    """Quantiles of the residuals of each figure, zero among them; wide where too few were held out."""
    rows = []
    for column in residuals.T:
        known = column[np.isfinite(column)]
        bounds = np.quantile(known, SHARES) if len(known) >= 2 * _FEW else np.array(_WIDE)
        rows.append(
            [
                min(bounds[0], bounds[1], 0.0),
                min(bounds[1], 0.0),
                max(bounds[2], 0.0),
                max(bounds[3], bounds[2], 0.0),
            ]
        )
    return np.array(rows)


def _estimate(figure: int, values: Array, spread: Array) -> Estimate:
    ends = np.tile(np.nan_to_num(values), (5, 1))
    ends[:, figure] = values[figure] + np.array([spread[0], spread[1], 0.0, spread[2], spread[3]])
    low_95, low, median, high, high_95 = np.maximum.accumulate(unscaled(ends)[:, figure]).tolist()
    return Estimate(median, low, high, low_95, high_95)


def _no_narrower(spread: Array, others: Mapping[str, Estimate]) -> Array:
    """The spread, at least as wide as that of others in the figures that they tell."""
    wide = spread.copy()
    for i, name in enumerate(TARGETS):
        if (other := others.get(name)) is None:
            continue
        ends = np.zeros((5, len(TARGETS)))
        low_95, high_95 = (other.low if other.low_95 is None else other.low_95), other.high_95 or other.high
        ends[:, i] = low_95, other.low, other.high, high_95, other.median
        *bounds, median = scaled(ends)[:, i]
        away = np.array(bounds) - median
        wide[i] = [*np.minimum(wide[i][:2], away[:2]), *np.maximum(wide[i][2:], away[2:])]
    return wide
