"""Makes the predictors that are joined: each that can learn from the runs, and the usual one as it comes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from foretrain import predictors
from foretrain.errors import ForetrainError, InputError, first_line, unknown
from foretrain.forecast import Forecast
from foretrain.job import Job
from foretrain.predictors.base import Predictor
from foretrain.run import Run

SHIPPED = f"{predictors.DEFAULT} as it comes"
"""The usual predictor without anything learned from the runs."""
LEARNING = ("deletepop", "scaledl", "predictddl", "ray_models", "ernest", "cherrypick", "flops")
"""Those that forecast steps and learn from runs of trainings, the ones that know most by themselves first."""
RESOURCES = "driple"
"""It forecasts how busy device, memory and network are, and no step time, so it cannot be compared with the
others: it has no part in who speaks for a job, and gives its figures beside whoever does."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Members:
    """Predictors by name, each as it has learned, and why others could not."""

    by_name: Mapping[str, Predictor]
    refused: Mapping[str, str]

    @classmethod
    def learned(
        cls,
        names: Sequence[str],
        runs: Sequence[Run],
        *,
        families: frozenset[str] = frozenset(),
        devices: frozenset[str] = frozenset(),
        asked: Sequence[Job] | None = None,
        step: Callable[[], None] = lambda: None,
    ) -> Members:
        """Make predictors that learn from runs, after forgetting families and devices that were known before.
        Where it is known what will be ``asked``, those that know only models of their runs are left out if
        none of these is."""
        by_name = _as_they_come(names, families, devices)
        refused: dict[str, str] = {}
        models = {run.job.workload.model.key for run in runs}
        for name in names:
            predictor = _fresh(name, families, devices)
            in_vain = predictor.only_known_models and asked is not None
            if not in_vain or any(job.workload.model.key in models for job in asked or ()):
                try:
                    by_name[name] = predictor.fit(runs)
                except ForetrainError as error:
                    refused[name] = first_line(error)
            step()
        return cls(by_name=by_name, refused=refused)

    def forecast(self, name: str, job: Job) -> Forecast | None:
        """Forecast by one of them; None where it refuses the job."""
        try:
            return self.by_name[name].predict(job)
        except ForetrainError:
            return None

    def save(self, folder: Path) -> list[str]:
        """Write each to a folder of its own; returns the names of those that were written."""
        written = [name for name in self.by_name if name != SHIPPED]
        for name in written:
            self.by_name[name].save(folder / name)
        return written

    @classmethod
    def load(
        cls,
        folder: Path,
        written: Sequence[str],
        names: Sequence[str],
        families: frozenset[str],
        devices: frozenset[str],
    ) -> Members:
        """Load those that were written, of the names that were to learn."""
        loaded = {name: predictors.class_of(name).load(folder / name) for name in written}
        return cls(by_name={**_as_they_come(names, families, devices), **loaded}, refused={})


def everyone(names: Sequence[str]) -> tuple[str, ...]:
    """List those that learn, and the usual one as it comes if it is among them."""
    return (*([SHIPPED] if predictors.DEFAULT in names else []), *names)


def _as_they_come(
    names: Sequence[str], families: frozenset[str], devices: frozenset[str]
) -> dict[str, Predictor]:
    return {SHIPPED: _fresh(predictors.DEFAULT, families, devices)} if SHIPPED in everyone(names) else {}


def _fresh(name: str, families: frozenset[str], devices: frozenset[str]) -> Predictor:
    predictor = predictors.get(name)
    return predictor.without(families, devices) if families or devices else predictor


def read_names(text: str, field: str) -> tuple[str, ...]:
    """Read names with commas between them, each of a predictor that can be joined."""
    names = tuple(dict.fromkeys(word.strip() for word in text.split(",") if word.strip()))
    for name in names:
        if name not in (*LEARNING, RESOURCES):
            raise unknown(field, name, (*LEARNING, RESOURCES))
    if not set(names) - {RESOURCES}:
        raise InputError(
            f"{field}: {text!r} names none that forecasts steps; some of {', '.join(LEARNING)} are allowed"
        )
    return names
