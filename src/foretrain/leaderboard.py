"""Scores every predictor on every file of runs, at home and away, and keeps it all as one board."""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import json
import math
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from foretrain import predictors
from foretrain.architectures import family
from foretrain.catalog import Catalog
from foretrain.errors import ForetrainError, InputError, first_line
from foretrain.evaluate import Comparison, Evaluation, PredictorScore, Scores, evaluate, job_key
from foretrain.files import parse_json, read_text, text_lines, write_atomically
from foretrain.predictors.base import Predictor
from foretrain.quantities import RESOURCE_FIGURES
from foretrain.run import Run, read_runs

SPLITS: Mapping[str | None, str] = {
    None: "as shipped",
    "leave-model-out": "families left out",
    "random": "a fifth left out",
    "extrapolate:workers": "more workers",
    "extrapolate:samples": "more data",
}
"""How runs are divided, in the words of the board."""
QUANTITIES = ("step_time_s", "device_busy_s", "peak_memory_bytes", "reserved_memory_bytes", "epoch_time_s")
RESOURCES = ("device_utilization", "memory_utilization", "network_tx_bytes_per_s")
"""What predictors of resources are scored on."""
LEVELS = tuple(round(0.1 * tenth, 1) for tenth in range(1, 10))
"""Shares of the way from the median to either end of an interval at which its calibration is read off."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BoardTask:
    """Files that one predictor is scored on together, and how their runs are divided."""

    predictor: str
    paths: tuple[Path, ...]
    split: str | None

    def __str__(self) -> str:
        return f"{self.predictor} on {', '.join(map(source, self.paths))}, {SPLITS[self.split]}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """One measured value beside its forecast, with what a reader may want to group it by."""

    predictor: str
    source: str
    split: str | None
    quantity: str
    line: int
    model: str
    family: str
    device: str
    devices: int
    measured: float
    predicted: float
    low: float
    high: float
    bound: str | None

    @property
    def error(self) -> float:
        """Relative: above zero when the predictor says too much."""
        return self.predicted / self.measured - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Noise:
    """Says how far two measurements of one job lie apart: half of their distance over their mean, so what the
    best of all predictors would still be off by."""

    source: str
    quantity: str
    jobs: int
    """Jobs that were measured more than once."""
    mean: float
    median: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Board:
    """The scores, every point behind them, the noise of repeats, and what could not be scored at all."""

    results: tuple[PredictorScore, ...]
    points: tuple[Point, ...]
    noise: tuple[Noise, ...]
    missing: tuple[str, ...]

    def of(self, quantity: str) -> list[PredictorScore]:
        """The results of a quantity that have an error, whole ones before those by what bounds the step."""
        return [one for one in self.results if one.quantity == quantity and one.n]

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        return {
            "results": [dataclasses.asdict(one) for one in self.results],
            "points": [dataclasses.asdict(one) | {"error": one.error} for one in self.points],
            "noise": [dataclasses.asdict(one) for one in self.noise],
            "missing": list(self.missing),
        }


def source(path: Path | str) -> str:
    """The name of a file of runs without its endings."""
    return Path(path).name.partition(".")[0]


def tasks(names: Sequence[str], files: Sequence[Path]) -> Iterator[BoardTask]:
    """List what there is to score.

    A predictor that comes with what it learned is scored as shipped, so that a user's runs are like those of
    any file but those it learned from; on these (its home) architecture families are left out in turn. One
    that comes with nothing learns from the rest of each file, by the splits that are its business.
    """
    for name in names:
        predictor = predictors.class_of(name)
        home = tuple(path for path in files if source(path) in predictor.home)
        if home:
            yield BoardTask(predictor=name, paths=home, split="leave-model-out")
        for path in files:
            if not predictor.scored_by and path not in home:
                yield BoardTask(predictor=name, paths=(path,), split=None)
            for split in predictor.scored_by:
                yield BoardTask(predictor=name, paths=(path,), split=split)


def board(
    files: Sequence[Path],
    *,
    names: Sequence[str] = (),
    most: int | None = None,
    work: Path | None = None,
    processes: int = 1,
    starting: Callable[[BoardTask, int, int], None] = lambda task, done, total: None,
) -> Board:
    """Score predictors (all, where none is named) on files of runs.

    ``most`` runs of a file count at most, evenly from the first to the last. ``work`` keeps the outcome of
    every task, so that a board that was stopped goes on where it was; it is for one state of the program, and
    what was kept of other runs is not taken. ``starting`` hears of every task before it begins.
    """
    todo = list(tasks(names or predictors.names(), files))
    facts = {path: _facts(path) for path in dict.fromkeys(files)}
    for path, known in facts.items():
        if not known:
            if not any(text_lines(path)):
                raise InputError(f"{path}: empty; a runs file has one run per line")
            list(read_runs(path))  # says what is wrong with its first line
    results: list[PredictorScore] = []
    points: list[Point] = []
    missing: list[str] = []
    for number, task in enumerate(todo):
        starting(task, number, len(todo))
        kept = None if work is None else work / f"{_key(task, most)}.json"
        try:
            scored = _taken(kept, task) or _scored(task, most, processes)
        except ForetrainError as error:
            missing.append(f"{task}: {first_line(error)}")
            continue
        if kept is not None:
            kept.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(kept, json.dumps(scored.to_dict()))
        wanted = _wanted(predictors.class_of(task.predictor))
        results += [one for one in (*scored.results, *scored.by_bound) if one.quantity in wanted and one.n]
        rows = [row for row in scored.runs if row.quantity in wanted]
        if not rows and scored.failures:
            missing.append(f"{task}: {scored.reasons[0].reason}")
        points += [_point(row, task.split, facts[Path(row.runs_file)]) for row in rows]
    return Board(
        results=tuple(results), points=tuple(points), noise=tuple(_noise(facts)), missing=tuple(missing)
    )


def _wanted(predictor: type[Predictor]) -> tuple[str, ...]:
    return RESOURCES if predictor.quantities >= frozenset(RESOURCE_FIGURES) else QUANTITIES


def _scored(task: BoardTask, most: int | None, processes: int) -> Evaluation:
    return evaluate(task.paths, predictors=[task.predictor], split=task.split, most=most, processes=processes)


def _taken(path: Path | None, task: BoardTask) -> Evaluation | None:
    """Read what was kept of a task, its files by the names that they have now; nothing where it is not there
    or of another version."""
    if path is None or not path.exists():
        return None
    called = {each.name: str(each) for each in task.paths}
    try:
        document = parse_json(read_text(path))
        for rows in document.values():
            for row in rows:
                row["runs_file"] = called[Path(row["runs_file"]).name]
        return Evaluation.from_dict(document)
    except (ForetrainError, KeyError, TypeError, ValueError):
        return None


def _key(task: BoardTask, most: int | None) -> str:
    """Names the outcome of a task by its runs."""
    digest = hashlib.sha256(repr((task.predictor, task.split, most)).encode())
    for path in task.paths:
        digest.update(path.name.encode() + path.read_bytes())
    return f"{task.predictor}-{source(task.paths[0])}-{digest.hexdigest()[:16]}"


_Facts = Mapping[int, Run]
"""Runs of a file by their line."""


def _facts(path: Path) -> _Facts:
    """Read the runs of a file that can be read; ``evaluate`` names the others."""
    catalog = Catalog.load()
    run_of_line: dict[int, Run] = {}
    for line, text in text_lines(path):
        try:
            run_of_line[line] = Run.read(parse_json(text), catalog=catalog, base=path.parent)
        except (ForetrainError, ValueError):
            continue
    return run_of_line


def _point(row: Comparison, split: str | None, runs: _Facts) -> Point:
    job = runs[row.line].job
    return Point(
        predictor=row.predictor,
        source=source(row.runs_file),
        split=split,
        quantity=row.quantity,
        line=row.line,
        model=job.workload.model.label,
        family=family(job.workload.model),
        device=job.cluster.device.name,
        devices=job.cluster.world_size,
        measured=row.measured,
        predicted=row.predicted,
        low=row.low,
        high=row.high,
        bound=row.bound,
    )


def _noise(files: Mapping[Path, _Facts]) -> Iterator[Noise]:
    """Measure the noise of jobs that a file has more than once."""
    for path, runs in files.items():
        for quantity in QUANTITIES:
            by_job: dict[str, list[float]] = {}
            for run in runs.values():
                if run.measured.get(quantity):
                    by_job.setdefault(job_key(run.job), []).append(run.measured[quantity])
            repeated = [values for values in by_job.values() if len(values) > 1]
            apart = [
                statistics.fmean(abs(a - b) / (a + b) for a, b in itertools.combinations(values, 2))
                for values in repeated
            ]
            if apart:
                yield Noise(
                    source=source(path),
                    quantity=quantity,
                    jobs=len(apart),
                    mean=statistics.fmean(apart),
                    median=statistics.median(apart),
                )


@dataclass(frozen=True, slots=True, kw_only=True)
class PointGroup:
    """Points that have something in common, and how far off they are."""

    label: str
    n: int
    mape: float
    median_ape: float
    bias: float
    coverage: float


def groups(points: Sequence[Point], by: Callable[[Point], str]) -> list[PointGroup]:
    """Points by what they have in common, the largest group first."""
    own: dict[str, list[Point]] = {}
    for point in points:
        own.setdefault(by(point), []).append(point)
    return [_group(label, members) for label, members in sorted(own.items(), key=lambda item: -len(item[1]))]


def _group(label: str, points: Sequence[Point]) -> PointGroup:
    measured, predicted, low, high = (
        [getattr(point, name) for point in points] for name in ("measured", "predicted", "low", "high")
    )
    scores = Scores.of(measured, predicted, low, high)
    assert scores.coverage is not None
    return PointGroup(
        label=label,
        n=scores.n,
        mape=scores.mape,
        median_ape=scores.median_ape,
        bias=scores.bias,
        coverage=scores.coverage,
    )


def calibration(points: Sequence[Point]) -> list[tuple[float, float]]:
    """The share of measured values within each part of the way from the median to the ends of the 80 %
    interval: a well calibrated one holds 80 % at the whole way, and fewer the nearer to the median."""
    reach = [
        (point.measured - point.predicted) / width
        if (width := (point.high if point.measured > point.predicted else point.low) - point.predicted)
        else (0.0 if point.measured == point.predicted else float("inf"))
        for point in points
    ]
    return [(level, sum(abs(one) <= level for one in reach) / len(points)) for level in (*LEVELS, 1.0)]


def worst(points: Sequence[Point], count: int = 20) -> list[Point]:
    """The points that are farthest off by their ratio, in either direction."""
    return sorted(points, key=_distance, reverse=True)[:count]


def _distance(point: Point) -> float:
    return abs(math.log(point.predicted / point.measured)) if point.predicted > 0 else math.inf
