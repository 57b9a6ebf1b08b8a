"""Forecasts a training on Ray at other scales of data, workers and cores, by performance models of its
runs."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal, Self, final, get_args

import numpy as np

from foretrain import predictors
from foretrain.duration import START, STEPS, DurationPart, of_steps, paced, start_up
from foretrain.errors import ForetrainError, InputError, UnsupportedJob
from foretrain.forecast import Estimate, Forecast
from foretrain.job import Job
from foretrain.predictors.base import Predictor, Progress, Report, Table, take_runs, unfitted
from foretrain.predictors.blackbox import QUANTITIES, forecast_around, size_of
from foretrain.predictors.conformal import Factors
from foretrain.predictors.ray_models.columns import NUMBERS, Array, Encoding, ScaleTable, has_graphs
from foretrain.predictors.ray_models.scaling import MOST_START, Check, ScaleModel, check, spread_of_misses
from foretrain.predictors.ray_models.search import Budget
from foretrain.predictors.reach import Reach
from foretrain.predictors.seen import LINKS, elsewhere, notes_of, number_row
from foretrain.run import Run
from foretrain.units import counted, format_count

Kind = Literal["step", "epoch", "training"]
_WHOLES: tuple[Kind, ...] = ("epoch", "training")
_FEWEST = 3
_HALVINGS = 40
_PHYSICS = "physics"
"""The folder beside ``predictor.json`` with the physics, when it has forgotten something."""
_MOST_CHECKED = 5
"""Models up to which each is told of, and checked."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ScaledWorkload:
    """Holds what was learned of one model: of its steps, and of its epochs (or whole trainings) where runs
    have them."""

    label: str
    encoding: Encoding
    physics: bool
    models: Mapping[Kind, ScaleModel]

    @property
    def whole(self) -> Kind | None:
        """Name what is more than one step, of which runs have times."""
        return next((kind for kind in _WHOLES if kind in self.models), None)


@final
class RayModelsPredictor(Predictor):
    """Regressors over dataset size, workers and resources (Filippini and Ardagna, SEAA 2023), chosen by
    nested validation.

    Each model that has three runs or more gets a regression of its own, over workers, nodes, cores, the work
    of a step and the number of steps, and over the settings in which its runs differ. ``physics`` names the
    predictor whose forecast some recipes correct (None: none does).
    """

    name: ClassVar[str] = "ray_models"
    scored_by: ClassVar[tuple[str, ...]] = ("random", "extrapolate:workers", "extrapolate:samples")
    quantities: ClassVar[frozenset[str]] = QUANTITIES
    learns: ClassVar[bool] = True
    only_known_models: ClassVar[bool] = True
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
        timed, refused = take_runs(runs, _timed)
        by_model, left_out = dict[str, list[Run]](), list(refused)
        for run in timed:
            by_model.setdefault(run.job.workload.model.key, []).append(run)
        self.workloads_ = {}
        models = sum(len(own_runs) >= _FEWEST for own_runs in by_model.values())
        for key, own_runs in by_model.items():
            if len(own_runs) < _FEWEST:
                few = f"only {counted(len(own_runs), 'run')} of it; {_FEWEST} are needed"
                left_out += [f"{run.job.workload.model.label}: {few}" for run in own_runs]
            else:
                self.workloads_[key] = self._learn(own_runs, models)
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
            raise unfitted(self.name)
        known = self.workloads_.get(job.workload.model.key)
        if known is None:
            have = ", ".join(sorted({workload.label for workload in self.workloads_.values()})[:8])
            raise UnsupportedJob(
                f"model: no run of {job.workload.model.label!r}; ray_models has learned {have}"
            )
        seen = known.encoding.seen
        unseen = known.encoding.unseen_links(job)
        seen_links = [name for name in LINKS if name not in unseen]
        seen.check(job, self.name, but=LINKS if known.physics else seen_links)
        physics = self._predictor().predict(job)["step_time_s"] if known.physics else None
        asked = _AskedJob(known=known, job=job, physics=physics, corrected=bool(unseen))
        told_by = f"told by the forecast of {self._predictor().name}, which the runs correct"
        notes = [seen.unseen_note(job, name, told_by) for name in unseen]
        step, spread = asked.step()
        forecast = forecast_around(job, self.name, step, spread, [*asked.notes(), *notes])
        return forecast if known.whole is None else asked.with_whole(known.whole, forecast)

    def design_row(self, job: Job) -> Mapping[str, float]:
        """Describe a job of one model alone: its numbers as logarithms, and a 1 for each setting."""
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
        """Check, by model, how well its other runs forecast each, with the choice of recipes made without
        it."""
        checks_of: dict[str, list[Check]] = {}
        for workload in self.workloads_.values():
            for kind, model in workload.models.items():
                label = workload.label if kind == "step" else f"{workload.label}, whole {kind}s"
                checks_of[label] = check(model.table, model.times_s, self.budget, progress)
        return {label: rows for label, rows in checks_of.items() if rows}

    def report(self, progress: Progress = lambda done, total: None) -> Report:
        """Say which recipes won, and how well they do on runs that neither taught nor chose them."""
        lines: list[str | Table] = [
            f"{workload.label}, {kind}, {where} the runs: "
            f"{' + '.join(recipe.label for recipe in choice.recipes)}"
            for workload in list(self.workloads_.values())[:_MOST_CHECKED]
            for kind, model in workload.models.items()
            for where, choice in (("inside", model.inside), ("beyond", model.beyond))
        ]
        if len(self.workloads_) > _MOST_CHECKED:
            count = f"{len(self.workloads_):,} models"
            return [*lines, f"{count}; foretrain evaluate --split interpolate:workers says how well they do"]
        rows = tuple(
            (label, one.dimension, one.kind, one.runs, one.error, one.ernest_error)
            for label, checks in self.checks(progress).items()
            for one in checks
        )
        headings = ("model", "along", "kind", "runs", "mean error", "Ernest")
        return [*lines, *([Table(headings=headings, rows=rows)] if rows else [])]

    def without(self, families: frozenset[str] = frozenset(), devices: frozenset[str] = frozenset()) -> Self:
        self.workloads_ = {}
        if self.physics is not None:
            self._physics, self._own_physics = self._predictor().without(families, devices), True
        return self

    def _learn(self, runs: Sequence[Run], of: int) -> ScaledWorkload:
        """Learn one of so many models."""
        encoding, tables = self.tables(runs)
        before, models = len(self.workloads_) * len(tables), {}
        for number, (kind, (table, times_s)) in enumerate(tables.items(), start=before):

            def tell(done: int, total: int, number: int = number) -> None:
                self.progress(number * total + done, of * len(tables) * total)

            models[kind] = ScaleModel.fit(table, times_s, self.budget, tell)
        physics = any(table.forecast_s is not None for table, _ in tables.values())
        return ScaledWorkload(
            label=runs[0].job.workload.model.label, encoding=encoding, physics=physics, models=models
        )

    def tables(self, runs: Sequence[Run]) -> tuple[Encoding, dict[Kind, tuple[ScaleTable, Array]]]:
        """The runs of one model as columns and times: of steps, and of epochs or whole trainings, whichever
        are more, where there are enough."""
        jobs = [run.job for run in runs]
        graphs = self.physics is not None and has_graphs(jobs)
        encoding = Encoding.of(jobs, graphs=graphs)
        forecasts_s = self._forecasts_s(jobs) if graphs else None
        tables: dict[Kind, tuple[ScaleTable, Array]] = {}
        rows_of = {
            kind: [(i, *measured) for i, run in enumerate(runs) if (measured := _measured(run, kind))]
            for kind in get_args(Kind)
        }
        for kind in ("step", max(_WHOLES, key=lambda whole: len(rows_of[whole]))):
            rows = rows_of[kind]
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
        """Forecast a step of each job by the physics; None where it cannot say it of all, and the regression
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
        if any("whole" in kept["models"] for kept in document["workloads"].values()):
            raise InputError(f"{folder}: does not tell epochs from whole trainings; fit it again")
        loaded = cls(physics=document["physics"])
        if document.get("own_physics", False):
            loaded._physics, loaded._own_physics = predictors.get(folder / _PHYSICS), True
        loaded.workloads_ = {
            key: ScaledWorkload(
                label=kept["label"], physics=kept["physics"], encoding=Encoding.from_dict(kept["encoding"]),
                models={kind: ScaleModel.from_dict(model) for kind, model in kept["models"].items()},
            )
            for key, kept in document["workloads"].items()
        }  # fmt: skip
        return loaded


def _check(job: Job) -> None:
    if len({group.device.name for group in job.cluster.groups}) > 1:
        raise UnsupportedJob("cluster.groups: several devices; ray_models forecasts clusters of one")


def _timed(run: Run) -> Run:
    """A run that something can be learned from."""
    _check(run.job)
    if all(_measured(run, kind) is None for kind in get_args(Kind)):
        raise UnsupportedJob("no step_time_s, epoch_time_s or total_time_s")
    return run


def _measured(run: Run, kind: Kind) -> tuple[float, float] | None:
    """Steps and seconds: of one step, of an epoch, or of the whole training where no epoch was timed."""
    training = run.job.workload.training
    epoch, total = training.steps_per_epoch, training.total_steps
    measured = {
        name: (float(count), run.measured[name])
        for name, count in (("step_time_s", 1), ("epoch_time_s", epoch), ("total_time_s", total))
        if count and 0 < run.measured.get(name, 0.0) < math.inf
    }
    if kind != "training":
        return measured.get(f"{kind}_time_s")
    if "epoch_time_s" in measured or "total_time_s" not in measured:
        return None
    steps, total_s = measured["total_time_s"]
    try:
        return steps, total_s - _beside_s(run.job, total_s)
    except ForetrainError:  # such as a model whose checkpoints have no known size
        return None


def _beside_s(job: Job, total_s: float) -> float:
    """Time what of a measured training went to neither start-up nor steps: evaluation, checkpoints,
    waiting."""
    size = size_of(job)
    left_s = total_s - min(start_up(job, size).time_s.median, MOST_START * total_s)

    def beside_s(steps_s: float) -> float:
        parts = of_steps(job, Estimate(steps_s, steps_s, steps_s), size).parts
        return sum(part.time_s.median for part in parts if part.name not in (START, STEPS))

    if not beside_s(left_s):
        return 0.0
    low_s, high_s = 0.0, left_s
    for _ in range(_HALVINGS):
        steps_s = (low_s + high_s) / 2
        low_s, high_s = (low_s, steps_s) if steps_s + beside_s(steps_s) > left_s else (steps_s, high_s)
    return left_s - high_s


def data_of(kinds: Collection[str]) -> tuple[str, ...]:
    """The columns that are sizes of the data, which steps should not depend on, where runs tell of steps."""
    return ("steps",) if "step" in kinds else ()


_OUTSIDE = ("micro-batches", "parameter servers", "nodes of servers", "samples")
"""Numbers of a job that are no columns of its own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _AskedJob:
    """A job, and what was learned of its model."""

    known: ScaledWorkload
    job: Job
    physics: Estimate | None
    """The forecast of a step, where the model's recipes correct one."""
    corrected: bool
    """Whether only that forecast knows what there is to exchange over: then the runs tell by how much it is
    wrong, and nothing else."""

    def step(self) -> tuple[float, Factors]:
        """Seconds of a step, by the steps that were measured or else by the epochs or trainings, and the
        interval."""
        if "step" in self.known.models:
            return self._time_s("step", 1.0)
        assert self.known.whole is not None
        steps, time_s, spread, _ = self._steps(self.known.whole)
        return time_s / steps, spread

    def with_whole(self, kind: Kind, forecast: Forecast) -> Forecast:
        """The forecast with epoch, total and cost by the epochs or trainings that were measured, which hold
        more than their steps."""
        training = self.job.workload.training
        quantities, whole = dict(forecast.quantities), None
        steps, time_s, spread, start = self._steps(kind)
        step_time = Estimate.around(time_s / steps, spread)
        if training.steps_per_epoch:
            quantities["epoch_time_s"] = paced(self.job, step_time) * training.steps_per_epoch
        if training.total_steps:
            steps_time = step_time * training.total_steps
            whole = of_steps(self.job, steps_time, size_of(self.job), start=start)
            quantities["total_time_s"] = whole.time_s
        return dataclasses.replace(forecast, quantities=quantities, duration=whole)

    def _steps(self, kind: Kind) -> tuple[float, float, Factors, DurationPart | None]:
        """Count the steps that runs of a kind have times of, with their seconds and interval, and the
        start-up that the times of trainings hold beside them."""
        training = self.job.workload.training
        counts = [training.steps_per_epoch, training.total_steps]
        steps = float(next((count for count in (counts if kind == "epoch" else counts[::-1]) if count), 1))
        if kind == "epoch":
            return steps, *self._time_s(kind, steps), None
        start = start_up(self.job, size_of(self.job))
        time_s, spread = self._time_s(kind, steps, start.time_s.median)
        share = min(1.0, MOST_START * time_s / start.time_s.median)
        start = dataclasses.replace(start, time_s=start.time_s * share)
        return steps, time_s - start.time_s.median, spread, start

    def notes(self) -> list[str]:
        kind: Kind = "step" if "step" in self.known.models else self.known.whole or "step"
        model, row, numbers = self.known.models[kind], number_row(self.job), self.known.encoding.seen.numbers
        notes = [f"learned from {len(model.table)} runs of {self.known.label}"]
        away = numbers.away(row)
        notes += notes_of(numbers, away, row)
        beyond = model.away(self._table(1.0)).beyond
        link = self.job.cluster.groups[0].inter_node
        if "links" in beyond and link.kind == self.known.encoding.link_kind:
            notes.append(self._link_note(model.numbers.values["links"], link.bandwidth_bytes_per_s))
        if "work" in beyond and "batch of a worker" not in away.beyond:
            notes.append("beyond the runs in work of a step: the size of its inputs")
        training = self.job.workload.training
        if self.known.whole is None and (training.samples or training.steps):
            notes.append("no run timed an epoch: its time is that of its steps")
        where = elsewhere(self.job, self.known.encoding.seen.machines)
        return notes if where is None else [*notes, where]

    def _link_note(self, known: Sequence[float], rate: float) -> str:
        """Note a rate between nodes outside of those that are known, over the typical one."""
        typical = self.known.encoding.typical_link
        assert typical is not None
        ends = dict.fromkeys((known[0] * typical, known[-1] * typical))
        asked_rate, *have = [format_count(8 * one, "b/s") for one in (rate, *ends)]
        return f"beyond the runs in the rate between nodes: {asked_rate}, they have {' to '.join(have)}"

    def _time_s(self, kind: Kind, steps: float, start_s: float = 0.0) -> tuple[float, Factors]:
        """Seconds of so many steps, and the interval; ``start_s`` of them do not grow with the steps."""
        model, numbers = self.known.models[kind], self.known.encoding.seen.numbers
        table = self._table(steps)
        other = _corrected(model, table, self.physics) if self.corrected else None
        time_s, spread = model.tell(table, data_of(self.known.models), start_s=start_s, other=other)
        row = number_row(self.job)
        away = numbers.away({name: row[name] for name in _OUTSIDE if kind == "step" or name != "samples"})
        grown, _ = self.known.encoding.seen.on_machine(self.job, Reach().grown(spread, away, numbers))
        return time_s, grown

    def _table(self, steps: float) -> ScaleTable:
        physics_s = None if self.physics is None else [self.physics.median]
        return self.known.encoding.table([self.job], [steps], physics_s)


def _corrected(model: ScaleModel, table: ScaleTable, physics: Estimate | None) -> tuple[float, Factors]:
    """The forecast's time, times what runs take in the median of theirs; both are unsure."""
    assert physics is not None
    assert table.forecast_s is not None
    assert model.table.forecast_s is not None
    misses = np.log(model.table.forecast_s / model.times_s)
    middle = float(np.median(misses))
    spread = spread_of_misses(misses - middle).joined(Factors.of(physics))
    return float(table.forecast_s[0]) * math.exp(-middle), spread
