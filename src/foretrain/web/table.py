"""Makes the table that a page carries: forecasts of a job and of the combinations around it, in a given
time."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from foretrain.catalog import Catalog
from foretrain.errors import ForetrainError, InputError, first_line
from foretrain.forecast import Forecast
from foretrain.job import Job
from foretrain.launchers.writing import launch_texts
from foretrain.predictors.base import Predictor
from foretrain.predictors.evidence import with_evidence
from foretrain.progress import tell
from foretrain.web.packing import Packer
from foretrain.web.records import record
from foretrain.web.views import Choices, View, around, plan_label

FORMAT = "foretrain-page/1"
SECONDS = 20.0
"""For the forecasts around a job, where nothing is said."""
MOST_BYTES = 4_200_000
"""Of the data that a page carries, about, so that it stays below 5 MB."""


@dataclass(kw_only=True)
class ForecastTable:
    """Forecasts by combination, packed, and why others were refused."""

    choices: Choices
    predictor: str
    packer: Packer = field(default_factory=Packer)
    records: list[dict[str, list[float]]] = field(default_factory=list)
    series: dict[str, dict[str, Any]] = field(default_factory=dict)
    """By combination without its batch: records by batch, refusals by batch, and what a batch is a multiple
    of."""
    reasons: dict[str, int] = field(default_factory=dict)
    points: int = 0
    size_bytes: int = 0
    left: int = 0
    """Combinations for which there was no time."""
    seconds: float = 0.0
    extra: dict[str, Any] = field(default_factory=dict)
    """What else the page shows: plans, resources."""

    def add(
        self,
        view: View,
        forecast: Forecast,
        predictor: Predictor | None,
        *,
        fine: bool = False,
        target: str | None = None,
    ) -> None:
        """The forecast of a combination: ``fine`` draws single calls and has launch files, as a ``target``
        does."""
        series = self._series(view)
        plan = forecast.job.plan
        series["multiple"] = (plan.data or 1) * (plan.micro_batch or 1)
        series["at"][str(view.batch)] = len(self.records)
        shown = record(forecast, predictor, fine=fine)
        if fine or target:
            shown["launch"] = launch_files(forecast.job, target)
        packed = self.packer.add(shown)
        self.records.append(packed)
        self.size_bytes += len(json.dumps(packed)) + self.packer.new_bytes
        self.points += 1

    def refuse(self, view: View, reason: str) -> None:
        """Why a combination has no forecast."""
        number = self.reasons.setdefault(reason, len(self.reasons))
        self._series(view)["refused"][str(view.batch)] = number

    def has(self, view: View) -> bool:
        series = self.series.get(view.series)
        return series is not None and (
            str(view.batch) in series["at"] or str(view.batch) in series["refused"]
        )

    def _series(self, view: View) -> dict[str, Any]:
        return self.series.setdefault(view.series, {"at": {}, "refused": {}, "multiple": 1})

    def to_dict(self, folder: Path = Path()) -> dict[str, Any]:
        """Write the table for the script of a page in a folder."""
        choices, catalog = self.choices, self.choices.catalog
        job = choices.job
        return {
            "format": FORMAT,
            "predictor": self.predictor,
            "model": _model(job, folder),
            "model_label": job.workload.model.label,
            "mode": job.workload.training.mode,
            "by_epochs": job.workload.training.steps is None,
            "choices": {
                "batch": list(choices.batches),
                "device": [_device(name, catalog) for name in choices.devices],
                "count": [{"value": count, "label": f"{count:,}"} for count in choices.counts],
                "precision": [{"value": name, "label": name} for name in choices.precisions],
                "plan": [{"value": key, "label": plan_label(plan)} for key, plan in choices.plans.items()],
            },
            "start": choices.start.to_dict(),
            "series": self.series,
            "reasons": list(self.reasons),
            "skeletons": self.packer.skeletons,
            "words": list(self.packer.words),
            "records": self.records,
            "made": {"points": self.points, "left": self.left, "seconds": round(self.seconds, 1)},
            **self.extra,
        }


def launch_files(job: Job, target: str | None) -> dict[str, str]:
    """Write what launches a job; nothing where its framework has no words for it."""
    try:
        return launch_texts(job, target)
    except InputError:
        return {}


def _model(job: Job, folder: Path) -> dict[str, Any]:
    """The model as a job file beside the page names it; one that was given as an object has no file."""
    section: dict[str, Any] = job.seen_from(folder).to_dict()["model"]
    in_hand = job.workload.model.title is not None and job.workload.model.source == "graph"
    return {name: value for name, value in section.items() if not (in_hand and name == "name")}


def _device(name: str, catalog: Catalog) -> dict[str, Any]:
    try:
        device = catalog.device(name)
    except ForetrainError:
        return {"value": name, "label": name}
    return {"value": name, "label": name, "memory_bytes": device.memory_bytes}


def forecast_table(
    forecast: Forecast,
    predictor: Predictor,
    *,
    seconds: float = SECONDS,
    catalog: Catalog | None = None,
    extra: Mapping[str, Any] | None = None,
) -> ForecastTable:
    """A job's forecast with usual changes of it around."""
    parameters = None if forecast.flops is None else forecast.flops.parameters
    choices = around(forecast.job, catalog or Catalog.load(), parameters=parameters)
    table = ForecastTable(choices=choices, predictor=predictor.name, extra=dict(extra or {}))
    table.add(choices.start, forecast, predictor, fine=True)
    fill(table, predictor, seconds)
    return table


def fill(
    table: ForecastTable, predictor: Predictor, seconds: float, *, clock: Callable[[], float] = time.monotonic
) -> None:
    """Add combinations, the most useful first, until time is up or the page is full.

    The first of its kind may need a model to be traced: it is left out where the longest such so far would
    not end in time.
    """
    wanted = [view for view in table.choices.views() if not table.has(view)]
    began_s = clock()
    traced: dict[Hashable, None] = {_traced_as(table.choices.job): None}
    longest_s, done = 0.0, 0
    for done, view in enumerate(wanted):
        table.seconds = clock() - began_s
        if table.seconds >= seconds or table.size_bytes >= MOST_BYTES:
            table.left = len(wanted) - done
            break
        tell("forecasts for the page", done, len(wanted))
        try:
            job = table.choices.job_at(view)
            kind = _traced_as(job)
            if kind not in traced and table.seconds + longest_s > seconds:
                table.left += 1
                continue
            started_s = clock()
            table.add(view, with_evidence(predictor.predict(job), predictor), predictor)
            if kind not in traced:
                longest_s = max(longest_s, clock() - started_s)
                traced[kind] = None
        except ForetrainError as error:
            table.refuse(view, first_line(error))
    table.seconds = clock() - began_s
    tell("")


def _traced_as(job: Job) -> Hashable:
    """Name what decides which trace of its model a job needs: others follow from two of their batch sizes."""
    plan, alone = job.plan, job.cluster.world_size == 1
    recomputes = plan.recompute if alone else "none"
    cut = (plan.tensor, plan.context, plan.expert)
    return job.workload.training.precision, cut, recomputes, job.micro_batch == 1
