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
from foretrain.predictors.blackbox import QUANTITIES, estimate_around, forecast_around, size_of
from foretrain.predictors.conformal import Factors
from foretrain.predictors.ray_models.columns import Array, Encoding, Table, has_graphs
from foretrain.predictors.ray_models.scaling import Check, ScaleModel, check
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
        step_s = self._forecast_s(job) if known.physics else None
        step, spread, notes = _told(known, job, step_s)
        forecast = forecast_around(job, self.name, step, spread, notes)
        return _with_whole(forecast, known, step_s) if "whole" in known.models else forecast

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


def _told(known: ScaledWorkload, job: Job, step_s: float | None) -> tuple[float, Factors, list[str]]:
    """Seconds of a step, by the steps that were measured or else by the epochs, with the interval and what to
    know about it."""
    training = job.workload.training
    kind: Kind = "step" if "step" in known.models else "whole"
    steps = 1.0 if kind == "step" else float(training.steps_per_epoch or training.total_steps or 1)
    model = known.models[kind]
    table = _table(known, job, steps, step_s)
    notes = [f"learned from {len(model.table)} runs of {known.label}"]
    beyond = model.beyond_in(table)
    if beyond:
        notes.append(f"beyond those runs in {', '.join(beyond)}")
    return float(np.exp(model.log_times(table)[0])) / steps, model.spread(table), notes


def _table(known: ScaledWorkload, job: Job, steps: float, step_s: float | None) -> Table:
    return known.encoding.table([job], [steps], None if step_s is None else [step_s])


def _with_whole(forecast: Forecast, known: ScaledWorkload, step_s: float | None) -> Forecast:
    """The forecast with epoch, total and cost by the epochs that were measured, which hold more than their
    steps."""
    job, model, training = forecast.job, known.models["whole"], forecast.job.workload.training
    quantities, whole = dict(forecast.quantities), None
    epoch_steps, total_steps = training.steps_per_epoch, training.total_steps
    if epoch_steps:
        quantities["epoch_time_s"] = _estimate(model, _table(known, job, epoch_steps, step_s))
    if total_steps:
        if epoch_steps:
            whole = of_steps(job, quantities["epoch_time_s"] * (total_steps / epoch_steps), size_of(job))
            quantities["total_time_s"] = whole.time_s
        else:
            quantities["total_time_s"] = _estimate(model, _table(known, job, total_steps, step_s))
    return dataclasses.replace(forecast, quantities=quantities, duration=whole)


def _estimate(model: ScaleModel, table: Table) -> Estimate:
    return estimate_around(float(np.exp(model.log_times(table)[0])), model.spread(table))
