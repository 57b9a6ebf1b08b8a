"""Defines the interface that every predictor has: fit on runs, predict a job, the quantities it can give,
and its state in a folder."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self, TypeVar

from foretrain.costs.measured import MeasuredOperator
from foretrain.errors import ForetrainError, InputError, UnsupportedJob, first_line, libraries_named
from foretrain.files import check_target, parse_json, read_text, write_atomically
from foretrain.forecast import Forecast
from foretrain.job import Job
from foretrain.run import Run

if TYPE_CHECKING:
    from foretrain.predictors.evidence import Evidence
    from foretrain.predictors.records import Records

Taken = TypeVar("Taken")

FORMAT = "foretrain-predictor/1"
FILE = "predictor.json"
"""Marks the folder of a saved predictor and says which one it is; the predictor's own files lie beside it."""
EVIDENCE = "evidence.json.zst"
"""Beside it: the runs that it learned from, and its forecasts of them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Benefit:
    """Says what learning from runs was worth: mean absolute relative errors, the one after on runs that were
    left out in turn."""

    runs: int
    error_before: float | None
    """None where it is told by runs that are left out too, and none could be."""
    error_after: float | None = None
    """None where there are too few runs to leave some out."""

    @property
    def in_vain(self) -> bool:
        """Whether runs that were left out tell that nothing was gained."""
        before, after = self.error_before, self.error_after
        return before is not None and after is not None and after >= before


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """Figures for people: whole numbers are counts, fractions are shares (0.07 is 7 %), None is what is not
    known."""

    headings: tuple[str, ...]
    rows: tuple[tuple[str | int | float | None, ...], ...]


Report = Sequence[str | Table]
"""Lines and tables, as they are to be told."""
Progress = Callable[[int, int], None]
"""Hears how many parts are done, of how many."""


def option(
    default: Any, help: str, *, name: str | None = None, least: int | None = None,
    parse: Callable[[str, str], Any] | None = None, metavar: str | None = None,
) -> Any:  # fmt: skip
    """A field of a predictor's settings that the command line offers, by its own or another name, as the text
    that ``parse`` reads."""
    facts = {"help": help, "name": name, "least": least, "parse": parse, "metavar": metavar}
    return field(default=default, metadata={OPTION: facts})


OPTION = "option"
"""Where the metadata of a settings field has what ``option`` was told."""


class Predictor(ABC):
    """Learns from runs, forecasts jobs.

    A job it cannot do raises ``UnsupportedJob``, never a silent fallback. So does a forecast that cannot be
    right: whatever ``predict`` of a subclass returns passes ``physics.possible``.
    """

    name: ClassVar[str]
    quantities: ClassVar[frozenset[str]]
    learns: ClassVar[bool] = False
    """Whether there is anything to learn, and so to save; then ``_write`` and ``_read`` are there."""

    only_known_models: ClassVar[bool] = False
    """Whether it forecasts only models that it has learned from runs of."""

    settings: ClassVar[type[Any] | None] = None
    """A frozen dataclass of what can be chosen for ``fit``, if anything can; each ``option`` in it is one of
    ``foretrain fit``."""

    quadratic_design: ClassVar[bool] = False
    """Whether squares and products of the figures in ``design_row`` belong to a design too."""

    home: ClassVar[frozenset[str]] = frozenset()
    """Names of the files of runs that what comes with foretrain has learned from: there it is scored with
    architecture families left out, elsewhere as it is."""
    scored_by: ClassVar[tuple[str, ...]] = ()
    """Splits that score a predictor which comes with nothing learned, in each file of runs by itself."""

    records_: Records | Literal["shipped"] | None = "shipped"
    """Measured runs and its forecasts of them: those kept in its folder, or those that come with foretrain;
    neither outlives a ``fit``."""
    benefits_: Mapping[str, Benefit] = MappingProxyType({})
    """Of the last ``fit``, by device, where the predictor can tell."""
    progress: Progress = staticmethod(lambda done, total: None)
    """Hears how far a ``fit`` has come, where it takes long and the predictor can tell."""
    left_out_: Sequence[str] = ()
    """Runs that the last ``fit`` could not learn from, and why."""

    def __init_subclass__(cls, **keywords: Any) -> None:
        super().__init_subclass__(**keywords)
        if "predict" in vars(cls):
            setattr(cls, "predict", _possible(vars(cls)["predict"]))  # noqa: B010
        if cls.learns and "fit" in vars(cls):
            setattr(cls, "fit", _timed_runs(vars(cls)["fit"]))  # noqa: B010
        for name in ("fit", "relearn"):
            if cls.learns and name in vars(cls):
                setattr(cls, name, _without_records(vars(cls)[name]))

    @abstractmethod
    def fit(self, runs: Iterable[Run]) -> Self:
        """Learn from measured runs; a predictor with nothing to learn returns itself unchanged."""

    def without(self, families: frozenset[str] = frozenset(), devices: frozenset[str] = frozenset()) -> Self:
        """Forget what was learned beforehand of these architecture families and devices, so that scoring on
        them is fair."""
        return self

    def configure(self, settings: Any) -> None:
        """Take settings of the class that ``settings`` names."""
        raise NotImplementedError

    def report(self, progress: Progress = lambda done, total: None) -> Report:
        """Say what there is to say of the last ``fit``."""
        return _worth(self.benefits_)

    def check(self, job: Job) -> None:  # noqa: B027
        """Refuse, with ``UnsupportedJob``, what can be refused before a model is traced for it."""

    def design_row(self, job: Job) -> Mapping[str, float]:
        """The figures of a job that what is learned depends on, by name, over which ``foretrain design``
        spreads measurements; one that a job lacks counts as 0."""
        from foretrain.predictors.job_figures import job_figures

        return job_figures(job)

    @abstractmethod
    def predict(self, job: Job) -> Forecast:
        """The forecast for one job."""

    def knows(self, forecast: Forecast) -> Evidence | None:
        """The measured runs nearest to a job that it forecast, and how far off it was on them; None where
        none are kept."""
        from foretrain.predictors.likeness import Key
        from foretrain.predictors.records import shipped

        records = shipped() if self.records_ == "shipped" else self.records_
        layout = None if forecast.step is None else forecast.step.layout
        return None if records is None else records.nearest(Key.of(forecast.job, layout), self.name)

    def save(self, folder: Path) -> None:
        """Keep what was learned; the file that makes the folder a predictor is written last."""
        if not self.learns:
            raise InputError(f"{self.name}: has nothing to learn, so there is nothing to save")
        check_target(folder, folder=True)
        (folder / EVIDENCE).unlink(missing_ok=True)
        document = {"format": FORMAT, "predictor": self.name, **self._write(folder)}
        if self.records_ is not None and self.records_ != "shipped":
            self.records_.save(folder / EVIDENCE)
        write_atomically(
            folder / FILE, json.dumps(document, indent=2, sort_keys=True, allow_nan=False) + "\n"
        )

    @classmethod
    def load(cls, folder: Path) -> Self:
        """Read what ``save`` kept."""
        document = read_saved(folder)
        if document["predictor"] != cls.name:
            raise InputError(f"{folder / FILE}: a saved {document['predictor']}, not {cls.name}")
        if not cls.learns:
            raise InputError(f"{folder / FILE}: {cls.name}: has nothing to learn, so nothing was saved")
        try:
            with libraries_named(cls.name, "learn"):
                loaded = cls._read(folder, document)
        except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
            why = f"it has no {error}" if isinstance(error, KeyError) else first_line(error)
            raise InputError(f"{folder}: not a {cls.name} of this version ({why}); fit it again") from error
        loaded.records_ = None
        if (folder / EVIDENCE).exists():
            from foretrain.predictors.records import Records

            loaded.records_ = Records.read(folder / EVIDENCE)
        return loaded

    def _write(self, folder: Path) -> Mapping[str, Any]:
        """Write the predictor's own files, each atomically; returns what else ``predictor.json`` is to
        hold."""
        raise NotImplementedError

    @classmethod
    def _read(cls, folder: Path, document: Mapping[str, Any]) -> Self:
        """A predictor from its own files and what ``predictor.json`` holds."""
        raise NotImplementedError


def _possible(predict: Callable[[Any, Job], Forecast]) -> Callable[[Any, Job], Forecast]:
    """Wrap a method so that its forecasts are checked against what is physically possible."""

    @functools.wraps(predict)
    def checked(self: Any, job: Job) -> Forecast:
        from foretrain.predictors.physics import possible

        with libraries_named(self.name, "learn"):
            forecast = predict(self, job)
        if not isinstance(forecast, Forecast):
            raise InputError(f"{self.name}: predict gave {type(forecast).__name__}; a Forecast is allowed")
        return possible(forecast)

    return checked


def _without_records(learn: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a method so that it first forgets the runs that scored what was learned before."""

    @functools.wraps(learn)
    def anew(self: Any, *given: Any, **options: Any) -> Any:
        self.records_ = None
        with libraries_named(self.name, "learn"):
            return learn(self, *given, **options)

    return anew


def _timed_runs(fit: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a method so that its runs have the time of a step wherever it follows from what they tell."""

    @functools.wraps(fit)
    def fit_timed(self: Any, runs: Iterable[Run], **options: Any) -> Any:
        timed_runs = map(timed, runs)
        return fit(self, list(timed_runs) if isinstance(runs, Sequence) else timed_runs, **options)

    return fit_timed


def timed(run: Run) -> Run:
    """A run with the time of a step, where it tells samples or tokens per second alone."""
    measured, training = run.measured, run.job.workload.training
    if "step_time_s" in measured:
        return run
    if rate := measured.get("samples_per_s"):
        step_s = training.global_batch / rate
    elif (rate := measured.get("tokens_per_s")) and training.sequence:
        step_s = training.global_batch * training.sequence / rate
    else:
        return run
    return dataclasses.replace(run, measured={**measured, "step_time_s": step_s})


class OperatorPredictor(Predictor):
    """A predictor whose operator models can be learned anew, from an operator dataset."""

    @abstractmethod
    def relearn(
        self,
        operators: Sequence[MeasuredOperator],
        runs: Iterable[Run] = (),
        *,
        sources: Sequence[Mapping[str, Any]] = (),
        tell: Callable[[str], None] = lambda _: None,
    ) -> Self:
        """Learn from operators, and from runs with phase times what the host adds to them; ``sources`` are
        kept to say where they come from."""


def _worth(benefits: Mapping[str, Benefit]) -> Report:
    if not benefits:
        return ()
    rows = tuple((device, one.runs, one.error_before, one.error_after) for device, one in benefits.items())
    vain = [
        f"{device}: no better than before; more runs, or runs of other models, may help"
        for device, one in benefits.items()
        if one.in_vain
    ]
    return (
        Table(headings=("device", "runs", "mean error before", "after, on runs left out"), rows=rows),
        *vain,
    )


def take_runs(runs: Iterable[Run], take: Callable[[Run], Taken]) -> tuple[list[Taken], tuple[str, ...]]:
    """Take each run by ``take``; returns what that made, and a line for each run that it refused, for
    ``left_out_``."""
    taken, left_out = [], []
    for run in runs:
        try:
            taken.append(take(run))
        except ForetrainError as error:
            left_out.append(f"{run.job.workload.model.label}: {' '.join(str(error).splitlines())}")
    return taken, tuple(left_out)


def unfitted(name: str) -> UnsupportedJob:
    """Refuse a job, as a predictor that comes with nothing learned and was not fitted."""
    return UnsupportedJob(
        f"{name}: has learned from no runs yet; fit it first: "
        f"foretrain fit {name} RUNS.jsonl --out DIR, then --predictor DIR"
    )


def nothing_to_learn(needs: str, left_out: Sequence[str]) -> InputError:
    """No run can be learned from: what is needed, and why the first one was left out."""
    more = f"; {len(left_out) - 1:,} more left out" if len(left_out) > 1 else ""
    return InputError(f"runs: {needs}" + (f" ({left_out[0]}{more})" if left_out else ""))


def read_saved(folder: Path) -> dict[str, Any]:
    """The ``predictor.json`` of a folder, of this version."""
    path = folder / FILE
    try:
        document = parse_json(read_text(path))
    except ValueError as error:
        raise InputError(f"{path}: not JSON ({error})") from error
    form = document.get("format") if isinstance(document, dict) else None
    if form != FORMAT:
        raise InputError(f"{path}: format {form!r} is not {FORMAT!r}; fit the predictor again")
    if not isinstance(document.get("predictor"), str):
        raise InputError(
            f"{path}: predictor: {document.get('predictor')!r} is not a name; fit the predictor again"
        )
    return dict(document)


def source_of(path: Path, **facts: Any) -> dict[str, Any]:
    """A file that is learned from, so that it can be found and known again."""
    return {"file": path.as_posix(), "sha256": _digest(path), **facts}


def find_source(source: Mapping[str, Any]) -> Path:
    """The file that was learned from: by its path from the current folder, or in ``$FORETRAIN_DATA``."""
    path, folder = Path(source["file"]), os.environ.get("FORETRAIN_DATA")
    places = [path, Path(folder, path), Path(folder, path.name)] if folder else [path]
    for place in places:
        if place.is_file() and _digest(place) == source["sha256"]:
            return place
    raise InputError(
        f"{path}: gone or changed since the predictor learned from it; set FORETRAIN_DATA to the folder that "
        "holds it"
    )


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()
