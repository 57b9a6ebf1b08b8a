"""Ray performance models: forecasts a training at other scales of data, workers and cores from its runs."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal, Self, final

import numpy as np

from foretrain import predictors
from foretrain.duration import of_steps
from foretrain.errors import ForetrainError, InputError, UnsupportedJob
from foretrain.forecast import Estimate, Forecast
from foretrain.job import Job, Run
from foretrain.predictors.base import Predictor, Progress, Report
from foretrain.predictors.base import Table as Figures
from foretrain.predictors.blackbox import (
    LINKS,
    QUANTITIES,
    Reach,
    estimate_around,
    forecast_around,
    joined,
    notes_of,
    number_row,
    size_of,
)
from foretrain.predictors.conformal import Factors
from foretrain.predictors.ray_models.columns import NUMBERS, Array, Encoding, Table, has_graphs
from foretrain.predictors.ray_models.scaling import Check, ScaleModel, check, spread_of_misses
from foretrain.predictors.ray_models.search import Budget

Kind = Literal["step", "whole"]
_FEWEST = 3
_PHYSICS = "physics"
"""The folder beside ``predictor.json`` with the physics, when it has forgotten something."""
_TOLD = 5
"""Models up to which each is told of, and checked."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ScaledWorkload:
    """What was learned of one model: of its steps, and of its epochs (or whole trainings) where runs have
    them."""

    label: str
    encoding: Encoding
    physics: bool
    models: Mapping[Kind, ScaleModel]


@final
class RayModelsPredictor(Predictor):
    """Regressors over dataset size, workers and resources (Filippini and Ardagna, SEAA 2023), chosen by
    nested validation.

    Each model that has three runs or more gets a regression of its own, over workers, nodes, cores, the work
    of a step and the number of steps, and over the settings in which its runs differ. ``physics`` names the
    predictor whose forecast some recipes correct (None: none does).
    """

    name: ClassVar[str] = "ray_models"
    quantities: ClassVar[frozenset[str]] = QUANTITIES
    learns: ClassVar[bool] = True
    settings: ClassVar[type[Any] | None] = Budget

    def __init__(
        self, *, physics: str | None = predictors.DEFAULT, budget: Budget | None = None,
        progress: Callable[[int, int], None] = lambda done, total: None,
    ) -> None:  # fmt: skip
        self.physics = physics
        self.budget = budget or Budget()
        self.progress = progress
        self.workloads_: dict[str, ScaledWorkload] = {}
        self._physics: Predictor | None = None
        self._own_physics = False

    def configure(self, settings: Budget) -> None:
        self.budget = settings

    def fit(self, runs: Iterable[Run]) -> Self:
        by_model: dict[str, list[Run]] = {}
        left_out = []
        for run in runs:
            try:
                _check(run.job)
                if _measured(run, "step") is None and _measured(run, "whole") is None:
                    raise UnsupportedJob("no step_time_s, epoch_time_s or total_time_s")
                by_model.setdefault(run.job.workload.model.key, []).append(run)
            except UnsupportedJob as error:
                left_out.append(f"{run.job.workload.model.label}: {error}")
        self.workloads_ = {}
        for key, mine in by_model.items():
            if len(mine) < _FEWEST:
                left_out += [
                    f"{run.job.workload.model.label}: only {len(mine)} runs of it; {_FEWEST} are needed"
                    for run in mine
                ]
            else:
                self.workloads_[key] = self._learn(mine)
        self.left_out_ = tuple(left_out)
        if not self.workloads_:
            raise InputError(
                f"runs: no model has {_FEWEST} runs with a time; "
                "ray_models learns each model from runs of its own"
            )
        return self

    def predict(self, job: Job) -> Forecast:
        _check(job)
        if not self.workloads_:
            raise UnsupportedJob("ray_models: has learned from no runs yet; fit it first")
        known = self.workloads_.get(job.workload.model.key)
        if known is None:
            have = ", ".join(sorted({workload.label for workload in self.workloads_.values()})[:8])
            raise UnsupportedJob(
                f"model: no run of {job.workload.model.label!r}; ray_models has learned {have}"
            )
        seen = known.encoding.seen
        seen.check(job, self.name, but=LINKS if known.physics else ())
        unseen = [name for name in LINKS if not seen.has(job, name)]
        physics = self._predictor().predict(job)["step_time_s"] if known.physics else None
        asked = _Asked(known=known, job=job, physics=physics, corrected=bool(unseen))
        told_by = f"told by the forecast of {self._predictor().name}, which the runs correct"
        notes = [seen.unseen_note(job, name, told_by) for name in unseen]
        step, spread = asked.step()
        forecast = forecast_around(job, self.name, step, spread, [*asked.notes(), *notes])
        return asked.with_whole(forecast) if "whole" in known.models else forecast

    def design_row(self, job: Job) -> Mapping[str, float]:
        """Of one model alone: its numbers as logarithms, and a 1 for each setting."""
        _check(job)
        encoding = Encoding.of([job], graphs=self.physics is not None and has_graphs([job]))
        table = encoding.table([job], [float(job.workload.training.steps_per_epoch or 1)])
        row = {f"log {name}": math.log(float(table.number(name)[0])) for name in NUMBERS}
        row |= {
            f"{name} = {value}": 1.0 for name, values in encoding.seen.settings.items() for value in values
        }
        return {f"{job.workload.model.key}: {name}": figure for name, figure in {"1": 1.0, **row}.items()}

    def checks(
        self, progress: Callable[[int, int], None] = lambda done, total: None
    ) -> dict[str, list[Check]]:
        """By model, how well its other runs forecast each, with the choice of recipes made without it."""
        found: dict[str, list[Check]] = {}
        for workload in self.workloads_.values():
            for kind, model in workload.models.items():
                label = workload.label if kind == "step" else f"{workload.label}, whole epochs"
                found[label] = check(model.table, model.times_s, self.budget, progress)
        return {label: rows for label, rows in found.items() if rows}

    def report(self, progress: Progress = lambda done, total: None) -> Report:
        """Which recipes won, and how well they do on runs that neither taught nor chose them."""
        told: list[str | Figures] = [
            f"{workload.label}, {kind}, {where} the runs: "
            f"{' + '.join(recipe.label for recipe in choice.recipes)}"
            for workload in list(self.workloads_.values())[:_TOLD]
            for kind, model in workload.models.items()
            for where, choice in (("inside", model.inside), ("beyond", model.beyond))
        ]
        if len(self.workloads_) > _TOLD:
            count = f"{len(self.workloads_):,} models"
            return [*told, f"{count}; foretrain evaluate --split interpolate:workers says how well they do"]
        rows = tuple(
            (label, one.dimension, one.kind, one.runs, one.error, one.ernest_error)
            for label, checks in self.checks(progress).items()
            for one in checks
        )
        headings = ("model", "along", "kind", "runs", "mean error", "Ernest")
        return [*told, *([Figures(headings=headings, rows=rows)] if rows else [])]

    def without(self, families: frozenset[str] = frozenset(), devices: frozenset[str] = frozenset()) -> Self:
        self.workloads_ = {}
        if self.physics is not None:
            self._physics, self._own_physics = self._predictor().without(families, devices), True
        return self

    def _learn(self, runs: Sequence[Run]) -> ScaledWorkload:
        encoding, tables = self.tables(runs)
        models = {
            kind: ScaleModel.fit(table, times_s, self.budget, self.progress)
            for kind, (table, times_s) in tables.items()
        }
        physics = any(table.forecast_s is not None for table, _ in tables.values())
        return ScaledWorkload(
            label=runs[0].job.workload.model.label, encoding=encoding, physics=physics, models=models
        )

    def tables(self, runs: Sequence[Run]) -> tuple[Encoding, dict[Kind, tuple[Table, Array]]]:
        """The runs of one model as columns and times: of steps, and of epochs or whole trainings, where there
        are enough."""
        jobs = [run.job for run in runs]
        graphs = self.physics is not None and has_graphs(jobs)
        encoding = Encoding.of(jobs, graphs=graphs)
        forecasts_s = self._forecasts_s(jobs) if graphs else None
        tables: dict[Kind, tuple[Table, Array]] = {}
        kinds: tuple[Kind, ...] = ("step", "whole")
        for kind in kinds:
            rows = [(i, *found) for i, run in enumerate(runs) if (found := _measured(run, kind))]
            if len(rows) >= _FEWEST:
                given = None if forecasts_s is None else [forecasts_s[i] for i, _, _ in rows]
                table = encoding.table([jobs[i] for i, _, _ in rows], [steps for _, steps, _ in rows], given)
                tables[kind] = table, np.array([time_s for _, _, time_s in rows])
        if not tables:
            raise InputError(
                f"{jobs[0].workload.model.label}: neither {_FEWEST} "
                f"step times nor {_FEWEST} epoch times in its {len(runs)} runs"
            )
        return encoding, tables

    def _forecasts_s(self, jobs: Sequence[Job]) -> list[float] | None:
        """What the physics says of a step of each job; None where it cannot say it of all, and the regression
        goes on without."""
        try:
            return [self._forecast_s(job) for job in jobs]
        except ForetrainError:
            return None

    def _forecast_s(self, job: Job) -> float:
        return self._predictor().predict(job)["step_time_s"].median

    def _predictor(self) -> Predictor:
        if self._physics is None:
            self._physics = predictors.get(self.physics or predictors.DEFAULT)
        return self._physics

    def _write(self, folder: Path) -> Mapping[str, Any]:
        if not self.workloads_:
            raise InputError("ray_models: has learned from no runs yet, so there is nothing to save")
        kept = {
            key: {
                "label": workload.label, "physics": workload.physics, "encoding": workload.encoding.to_dict(),
                "models": {kind: model.to_dict() for kind, model in workload.models.items()},
            }
            for key, workload in self.workloads_.items()
        }  # fmt: skip
        own = self._own_physics and self._predictor().learns
        if own:
            self._predictor().save(folder / _PHYSICS)
        return {"physics": self.physics, "own_physics": own, "workloads": kept}

    @classmethod
    def _read(cls, folder: Path, document: Mapping[str, Any]) -> Self:
        if any("seen" not in kept["encoding"] for kept in document["workloads"].values()):
            raise InputError(f"{folder}: does not say what its runs have; fit it again")
        made = cls(physics=document["physics"])
        if document.get("own_physics", False):
            made._physics, made._own_physics = predictors.get(folder / _PHYSICS), True
        made.workloads_ = {
            key: ScaledWorkload(
                label=kept["label"], physics=kept["physics"], encoding=Encoding.from_dict(kept["encoding"]),
                models={kind: ScaleModel.from_dict(model) for kind, model in kept["models"].items()},
            )
            for key, kept in document["workloads"].items()
        }  # fmt: skip
        return made


def _check(job: Job) -> None:
    if len({group.device.name for group in job.cluster.groups}) > 1:
        raise UnsupportedJob("cluster.groups: several devices; ray_models forecasts clusters of one")


def _measured(run: Run, kind: Kind) -> tuple[float, float] | None:
    """Steps and seconds: of one step, of an epoch, or of the whole training where no epoch was timed."""
    training = run.job.workload.training
    steps = (
        {"step_time_s": 1}
        if kind == "step"
        else {"epoch_time_s": training.steps_per_epoch, "total_time_s": training.total_steps}
    )
    for name, count in steps.items():
        if count and 0 < run.measured.get(name, 0.0) < math.inf:
            return float(count), run.measured[name]
    return None


_OUTSIDE = ("micro-batches", "parameter servers", "nodes of servers", "samples")
"""Numbers of a job that are no columns of its own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Asked:
    """A job, and what was learned of its model."""

    known: ScaledWorkload
    job: Job
    physics: Estimate | None
    """The forecast of a step, where the model's recipes correct one."""
    corrected: bool
    """Whether only that forecast knows what there is to exchange over: then the runs tell by how much it is
    wrong, and nothing else."""

    def step(self) -> tuple[float, Factors]:
        """Seconds of a step, by the steps that were measured or else by the epochs, and the interval."""
        training = self.job.workload.training
        kind: Kind = "step" if "step" in self.known.models else "whole"
        steps = 1.0 if kind == "step" else float(training.steps_per_epoch or training.total_steps or 1)
        time_s, spread = self._time_s(kind, steps)
        return time_s / steps, spread

    def with_whole(self, forecast: Forecast) -> Forecast:
        """The forecast with epoch, total and cost by the epochs that were measured, which hold more than
        their steps."""
        training = self.job.workload.training
        quantities, whole = dict(forecast.quantities), None
        epoch_steps, total_steps = training.steps_per_epoch, training.total_steps
        if epoch_steps:
            quantities["epoch_time_s"] = estimate_around(*self._time_s("whole", epoch_steps))
        if total_steps:
            if epoch_steps:
                steps_s = quantities["epoch_time_s"] * (total_steps / epoch_steps)
                whole = of_steps(self.job, steps_s, size_of(self.job))
                quantities["total_time_s"] = whole.time_s
            else:
                quantities["total_time_s"] = estimate_around(*self._time_s("whole", total_steps))
        return dataclasses.replace(forecast, quantities=quantities, duration=whole)

    def notes(self) -> list[str]:
        kind: Kind = "step" if "step" in self.known.models else "whole"
        model, row, numbers = self.known.models[kind], number_row(self.job), self.known.encoding.seen.numbers
        notes = [f"learned from {len(model.table)} runs of {self.known.label}"]
        away = numbers.away(row)
        notes += notes_of(numbers, away, row)
        table = self._table(1.0)
        if "work" in model.away(table).beyond and "batch of a worker" not in away.beyond:
            notes.append("beyond the runs in work of a step: the size of its inputs")
        training = self.job.workload.training
        if "whole" not in self.known.models and (training.samples or training.steps):
            notes.append("no run timed an epoch: its time is that of its steps")
        return notes

    def _time_s(self, kind: Kind, steps: float) -> tuple[float, Factors]:
        """Seconds of so many steps, and the interval."""
        model, numbers = self.known.models[kind], self.known.encoding.seen.numbers
        only_steps = None if model.numbers.varied("steps") else model.numbers.values["steps"][0]
        table = self._table(steps)
        if self.corrected:
            log_time, inner = _corrected(model, table, self.physics)
        elif only_steps is not None:  # nothing tells a start from steps: more of them take more in proportion
            log_time = float(model.log_times(self._table(only_steps))[0] + np.log(steps / only_steps))
            inner = model.inside.spread
        else:
            log_time, inner = float(model.log_times(table)[0]), model.inside.spread
        data = ("steps",) if "step" in self.known.models else ()
        spread = model.reach.grown(inner, model.away(table), model.numbers, data=data)
        row = number_row(self.job)
        away = numbers.away({name: row[name] for name in _OUTSIDE if kind == "step" or name != "samples"})
        return float(np.exp(log_time)), Reach().grown(spread, away, numbers)

    def _table(self, steps: float) -> Table:
        told = None if self.physics is None else [self.physics.median]
        return self.known.encoding.table([self.job], [steps], told)


def _corrected(model: ScaleModel, table: Table, physics: Estimate | None) -> tuple[float, Factors]:
    """The logarithm of the forecast's time, times what runs take in the median of theirs; both are unsure."""
    assert physics is not None
    assert table.forecast_s is not None
    assert model.table.forecast_s is not None
    misses = np.log(model.table.forecast_s / model.times_s)
    middle = float(np.median(misses))
    outer = physics.low_95 or physics.low, physics.high_95 or physics.high
    own = Factors(*(bound / physics.median for bound in (outer[0], physics.low, physics.high, outer[1])))
    return float(np.log(table.forecast_s[0])) - middle, joined(spread_of_misses(misses - middle), own)
