"""Learns which predictor is right for which kind of job on a cluster, from its runs, and forecasts by it."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Self, final

import numpy as np

from foretrain.errors import InputError, UnsupportedJob
from foretrain.estimate import SHARES
from foretrain.forecast import Factors, Forecast
from foretrain.job import Job
from foretrain.predictors.base import Predictor, Report, Table, option, unfitted
from foretrain.predictors.blackbox import forecast_around
from foretrain.predictors.conformal import factors
from foretrain.predictors.driple.features import TARGETS
from foretrain.predictors.driple.predictor import DriplePredictor
from foretrain.predictors.evidence import Outcome
from foretrain.predictors.joined import relations
from foretrain.predictors.joined.choosing import (
    WORDS,
    Array,
    LeftOut,
    Mask,
    Mix,
    Weighting,
    chosen_weightings,
    errors_of,
)
from foretrain.predictors.joined.figures import learn_figures, with_figures
from foretrain.predictors.joined.members import LEARNING, RESOURCES, SHIPPED, Members, read_names
from foretrain.predictors.joined.relations import Known, Relation, device_of
from foretrain.predictors.joined.trying import STEP, try_out
from foretrain.predictors.likeness import Key, describe
from foretrain.predictors.ray_models.scaling import spread_of_misses
from foretrain.predictors.records import Record, Records, shipped
from foretrain.run import Run
from foretrain.step.assembly import MEMORY_QUANTITIES
from foretrain.step.assembly import QUANTITIES as ALL_QUANTITIES
from foretrain.units import counted

_FEWEST = 8
"""Runs from which on some are left out, to choose by them."""
_ENOUGH = 20
"""Left-out misses from which on intervals go by their ranks."""
_HOLDS = 0.7
"""The share of left-out runs that an interval of 80 % must hold for a predictor to keep its own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Joining:
    """Says what is joined, and how it is tried."""

    predictors: tuple[str, ...] = option(
        (*LEARNING, RESOURCES), "The predictors that are joined, with commas.",
        parse=read_names, metavar="NAMES",
    )  # fmt: skip
    folds: int = option(4, "Parts of the runs that are left out in turn.", least=2)
    most: int = option(240, "Runs that are left out at most, evenly from first to last.", least=_FEWEST)


@final
class JoinedPredictor(Predictor):
    """Fits every predictor that can learn from the runs and scores each on runs that were left out: at scales
    inside and beyond the others', of families and on devices that the others do not have. A job is forecast
    by whoever did best on its kind, or by several, weighted by their error on near left-out runs, where that
    does better on runs that had no part in the choice.
    """

    name: ClassVar[str] = "joined"
    scored_by: ClassVar[tuple[str, ...]] = ("random",)
    quantities: ClassVar[frozenset[str]] = ALL_QUANTITIES | frozenset(TARGETS)
    learns: ClassVar[bool] = True
    settings: ClassVar[type[Any] | None] = Joining

    def __init__(self, *, joining: Joining | None = None) -> None:
        self.joining = joining or Joining()
        self.members_: Members | None = None
        self.known_: Known | None = None
        self.tried_: LeftOut | None = None
        self.weightings_: dict[Relation, Weighting] = {}
        self.missed_: Array = np.zeros(0)
        self.held_: Mapping[str, float] = {}
        self.figures_: DriplePredictor | None = None
        self._figures_report: Report = ()
        self._families: frozenset[str] = frozenset()
        self._devices: frozenset[str] = frozenset()

    def configure(self, settings: Joining) -> None:
        self.joining = settings

    # Learning

    def fit(self, runs: Iterable[Run]) -> Self:
        given = list(runs)
        timed = [run for run in given if 0 < run.measured.get(STEP, 0.0) < math.inf]
        self.left_out_ = tuple(
            f"{run.job.workload.model.label}: no {STEP}" for run in given if STEP not in run.measured
        )
        if not timed:
            raise InputError(f"runs: none has a {STEP}, which predictors are compared by")
        steps = tuple(name for name in self.joining.predictors if name != RESOURCES)
        names = steps if len(timed) >= _FEWEST else steps[:1]
        tried_runs = timed[:: -(-len(timed) // self.joining.most)]
        tried = relations.parts(tried_runs, self.joining.folds) if len(timed) >= _FEWEST else []
        of_resources = RESOURCES in self.joining.predictors
        total, done = (len(tried) + 1) * len(names) + of_resources, 0

        def step() -> None:
            nonlocal done
            done += 1
            self.progress(done, total)

        self.tried_, held = try_out(
            tried_runs, tried, names, families=self._families, devices=self._devices, step=step
        )
        columns = {
            name: column[np.isfinite(column)]
            for name, column in zip(self.tried_.members, held.T, strict=True)
        }
        self.held_ = {name: float(column.mean()) for name, column in columns.items() if len(column)}
        self.members_ = Members.learned(
            names, timed, families=self._families, devices=self._devices, step=step
        )
        if not self.members_.by_name.keys() - {SHIPPED}:
            why = "; ".join(f"{name}: {text}" for name, text in self.members_.refused.items())
            raise InputError(f"runs: no predictor can learn from them ({why})")
        self.known_ = Known.of([run.job for run in timed])
        self.weightings_, self.missed_ = chosen_weightings(self.tried_)
        self.records_ = self._records(tried_runs, held)
        self.figures_, self._figures_report = None, ()
        if of_resources:
            self.figures_, self._figures_report = learn_figures(given, self._families, self._devices)
            step()
        return self

    def _records(self, runs: Sequence[Run], held: Array) -> Records | None:
        """Keep the left-out runs and what was missed of them as evidence; ``held`` says of each which
        predictors' intervals held it."""
        assert self.tried_ is not None
        records, seen = [], set()
        for i, miss in enumerate(self.missed_):
            position = self.tried_.positions[i]
            if not math.isfinite(miss) or position in seen:
                continue
            seen.add(position)
            run, key = runs[position], self.tried_.keys[i]
            records.append(
                Record(
                    source="left out in turn", about=describe(run.job), low=key, high=key,
                    outcomes={self.name: Outcome(error=math.expm1(miss), inside=self._inside(i, held[i]))},
                    measured={STEP: run.measured[STEP]},
                )
            )  # fmt: skip
        facts = {"quantities": {self.name: STEP}, "left_out": {self.name: ["left out in turn"]}}
        return Records.of(records, shipped().document, **facts) if records else None

    def _inside(self, i: int, held: Array) -> float:
        """Whether the least interval that a left-out run would have been given holds it: that of the one
        predictor that spoke for it where it keeps its own, or what was missed of the others."""
        assert self.tried_ is not None
        kind = self.tried_.where(self.tried_.relations[i], self.tried_.devices[i], self.tried_.without(i))
        best, miss = self.tried_.mix_without("best", i), self.missed_[i]
        for name in best.weights if best is not None else ():
            column = self.tried_.members.index(name)
            if self.tried_.misses[i, column] == miss and self._keeps_its_own(name, kind):
                return float(held[column])
        spread = self._spread(kind)
        return float(spread.low <= math.exp(-miss) <= spread.high)

    def _keeps_its_own(self, name: str, kind: Mask) -> bool:
        """Whether a predictor that speaks alone keeps its own interval."""
        return self.held_.get(name, 1.0) >= _HOLDS or int(kind.sum()) < _ENOUGH

    def without(self, families: frozenset[str] = frozenset(), devices: frozenset[str] = frozenset()) -> Self:
        self.members_, self.known_, self.tried_ = None, None, None
        self.weightings_, self.missed_, self.held_ = {}, np.zeros(0), {}
        self.figures_, self._figures_report = None, ()
        self._families |= families
        self._devices |= devices
        return self

    # Forecasting

    def predict(self, job: Job) -> Forecast:
        forecast = self._of_step(job)
        return forecast if self.figures_ is None else with_figures(forecast, self.figures_)

    def _of_step(self, job: Job) -> Forecast:
        """Forecast by whoever speaks for a job, and say what no run has of it."""
        forecast = self._spoken(job)
        assert self.known_ is not None
        first, *others = forecast.assumptions
        notes = [note for note in self.known_.notes(job) if note not in others]
        return dataclasses.replace(forecast, assumptions=(first, *notes, *others))

    def _spoken(self, job: Job) -> Forecast:
        """Forecast by whoever speaks for a job; no left-out run tells of settings that no run has."""
        if self.members_ is None or self.known_ is None or self.tried_ is None:
            raise unfitted(self.name)
        relation, device = self.known_.relation(job), device_of(job)
        if self.known_.news(job):
            return self._untried(job, relation)
        kind = self._kind(relation, device)
        forecasts: dict[str, Forecast] = {}
        known = np.isfinite(self.missed_[kind]).any()
        mix = self._mix(job, relation, kind, forecasts) if known else None
        if mix is None:
            return self._untried(job, relation)
        if len(mix.weights) == 1 and not mix.shifts:
            (name,) = mix.weights
            return self._single(forecasts[name], name, relation, kind)
        return self._several(job, mix, forecasts, relation, kind)

    def _mix(self, job: Job, relation: Relation, kind: Mask, forecasts: dict[str, Forecast]) -> Mix | None:
        """Choose first of those that forecast the job; their forecasts go to ``forecasts``."""
        assert self.members_ is not None
        assert self.tried_ is not None
        available = [name for name in self.tried_.members if name in self.members_.by_name]
        distances = self.tried_.distances(Key.of(job))
        while mix := self.tried_.mix(self.weightings_.get(relation, "best"), kind, distances, available):
            for name in mix.weights.keys() - forecasts.keys():
                forecast = self.members_.forecast(name, job)
                if forecast is not None and STEP in forecast.quantities:
                    forecasts[name] = forecast
            if mix.weights.keys() <= forecasts.keys():
                return mix
            available = [name for name in available if name in forecasts or name not in mix.weights]
        return None

    def _single(self, forecast: Forecast, name: str, relation: Relation, kind: Mask) -> Forecast:
        """Give the forecast of one predictor; its interval is no narrower than that of left-out runs where
        its own held too few."""
        note = self._note(forecast.job, relation, kind, f"by {name}")
        named = dataclasses.replace(forecast, predictor=self.name, assumptions=(note, *forecast.assumptions))
        if self._keeps_its_own(name, kind):
            return named
        median, own = forecast[STEP].median, Factors.of(forecast[STEP])
        around = forecast_around(forecast.job, self.name, median, self._spread(kind).widest(own))
        quantities = {**forecast.quantities, **around.quantities}
        return dataclasses.replace(named, quantities=quantities, duration=around.duration)

    def _several(
        self, job: Job, mix: Mix, forecasts: Mapping[str, Forecast], relation: Relation, kind: Mask
    ) -> Forecast:
        logs = [
            weight * (math.log(forecasts[name][STEP].median) - mix.shifts.get(name, 0.0))
            for name, weight in mix.weights.items()
        ]
        heaviest = sorted(mix.weights, key=lambda name: -mix.weights[name])
        words = ", ".join(f"{name} {mix.weights[name]:.0%}" for name in heaviest)
        corrected = " and corrected by how far off each is on near runs" if mix.shifts else ""
        note = self._note(job, relation, kind, f"by {words}, weighted by error on left-out runs{corrected}")
        own = _mean_of([(weight, Factors.of(forecasts[name][STEP])) for name, weight in mix.weights.items()])
        spread = self._spread(kind).widest(own)
        forecast = forecast_around(job, self.name, math.exp(sum(logs)), spread, [note])
        with_memory = [name for name in heaviest if forecasts[name].quantities.keys() >= MEMORY_QUANTITIES]
        if not with_memory:
            return forecast
        kept = {name: forecasts[with_memory[0]][name] for name in MEMORY_QUANTITIES}
        return dataclasses.replace(forecast, quantities={**forecast.quantities, **kept})

    def _untried(self, job: Job, relation: Relation) -> Forecast:
        """Forecast where no left-out run tells: by the usual predictor, as it has learned where the device is
        that of runs, or whoever forecasts the job."""
        assert self.members_ is not None
        names = list(self.members_.by_name)
        first = [name for name in names if name != SHIPPED][:1] if relation != "new device" else []
        refusals = []
        for name in dict.fromkeys([*first, *names]):
            try:
                forecast = self.members_.by_name[name].predict(job)
            except UnsupportedJob as error:
                refusals.append(str(error))
                continue
            note = f"by {name}; {relations.WORDS[relation]}: no left-out run tells how well"
            return dataclasses.replace(
                forecast, predictor=self.name, assumptions=(note, *forecast.assumptions)
            )
        raise UnsupportedJob(f"joined: every predictor refuses this job ({refusals[0]})")

    def _note(self, job: Job, relation: Relation, kind: Mask, whom: str) -> str:
        """Say who speaks, and how far off that was; of which devices, where they are not the job's."""
        assert self.tried_ is not None
        known = kind & np.isfinite(self.missed_)
        errors = errors_of(self.missed_[known])
        devices = {device for device, is_known in zip(self.tried_.devices, known, strict=True) if is_known}
        where = "" if devices == {device_of(job)} else f", on {', '.join(sorted(devices))}"
        count = counted(len(errors), "left-out run")
        score = f"mean error {errors.mean():.0%} on {count} like that{where}"
        return f"{whom}; {relations.WORDS[relation]}: {score}"

    # Kinds of jobs

    def _kinds(self) -> dict[tuple[Relation, str], None]:
        assert self.tried_ is not None
        return dict.fromkeys(zip(self.tried_.relations, self.tried_.devices, strict=True))

    def _kind(self, relation: Relation, device: str) -> Mask:
        assert self.tried_ is not None
        return self.tried_.where(relation, device, np.ones(len(self.tried_), dtype=bool))

    def _spread(self, kind: Mask) -> Factors:
        """Say how far measured runs lie around a forecast of this kind, by what was missed of left-out
        runs."""
        misses = self.missed_[kind]
        misses = misses[np.isfinite(misses)]
        ranked = factors(np.exp(-misses).tolist()) if len(misses) >= _ENOUGH else None
        return ranked or spread_of_misses(misses)

    def report(self, progress: Any = lambda done, total: None) -> Report:
        """Say by kind of job who forecasts it, and how well on left-out runs, beside the best one alone."""
        if self.tried_ is None or not len(self.tried_):
            nothing = f"fewer than {_FEWEST} runs, or repeats alone: none was left out, so nothing was chosen"
            return [nothing, *self._figures_report]
        best = self.tried_.missed("best")
        rows = []
        for relation, device in self._kinds():
            kind = self._kind(relation, device)
            weighting = self.weightings_[relation]
            leaders = self.tried_.mix("best", kind, np.zeros(len(self.tried_)), self.tried_.members)
            rows.append(
                (
                    device, relation, int(kind.sum()), next(iter(leaders.weights)) if leaders else None,
                    _error(best[kind]), WORDS[weighting], _error(self.missed_[kind]),
                )
            )  # fmt: skip
        headings = ("device", "kind of job", "left out", "best one", "its error", "used", "mean error")
        refused = {} if self.members_ is None else self.members_.refused
        not_joined = [f"not joined: {name}: {why}" for name, why in refused.items()]
        return [Table(headings=headings, rows=tuple(rows)), *not_joined, *self._figures_report]

    # Keeping

    def _write(self, folder: Path) -> Mapping[str, Any]:
        if self.members_ is None or self.known_ is None or self.tried_ is None:
            raise InputError("joined: has learned from no runs yet, so there is nothing to save")
        if self.figures_ is not None:
            self.figures_.save(folder / "members" / RESOURCES)
        return {
            "joining": dataclasses.asdict(self.joining),
            "figures": self.figures_ is not None,
            "members": self.members_.save(folder / "members"),
            "known": self.known_.to_dict(),
            "tried": self.tried_.to_dict(),
            "ways": dict(self.weightings_),
            "missed": [float(miss) if math.isfinite(miss) else None for miss in self.missed_],
            "held": dict(self.held_),
            "forgotten": {"families": sorted(self._families), "devices": sorted(self._devices)},
        }

    @classmethod
    def _read(cls, folder: Path, document: Mapping[str, Any]) -> Self:
        joining = document.get("joining", {})
        if joining:
            joining = {**joining, "predictors": tuple(joining["predictors"])}
        loaded = cls(joining=Joining(**joining))
        loaded._families = frozenset(document["forgotten"]["families"])
        loaded._devices = frozenset(document["forgotten"]["devices"])
        loaded.known_, loaded.tried_ = (
            Known.from_dict(document["known"]),
            LeftOut.from_dict(document["tried"]),
        )
        names = [name for name in loaded.tried_.members if name != SHIPPED]
        loaded.members_ = Members.load(
            folder / "members", document["members"], names, loaded._families, loaded._devices
        )
        if document.get("figures"):
            loaded.figures_ = DriplePredictor.load(folder / "members" / RESOURCES)
        loaded.weightings_, loaded.held_ = dict(document["ways"]), document["held"]
        loaded.missed_ = np.array(document["missed"], dtype=np.float64)
        return loaded


def _mean_of(spreads: Sequence[tuple[float, Factors]]) -> Factors:
    """Compute the interval around a weighted mean of forecasts that are off together, each by as much as it
    says."""
    return Factors(
        *(math.exp(sum(weight * math.log(own[i]) for weight, own in spreads)) for i in range(len(SHARES)))
    )


def _error(misses: Array) -> float | None:
    known = misses[np.isfinite(misses)]
    return float(errors_of(known).mean()) if len(known) else None
