"""Scores predictors on files of measured runs: errors per quantity and file, steps that the host bounds apart
from those that the device does, and every run behind them."""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from foretrain.catalog import Catalog
from foretrain.cluster import Cluster
from foretrain.errors import ForetrainError, InputError, first_line, invalid
from foretrain.evaluate.folds import DIMENSIONS, SPLITS, Fold, job_key, split_runs, thinned
from foretrain.evaluate.forecasts import Answer, Asked, answer_all
from foretrain.evaluate.results import (
    BOUNDS,
    Bound,
    Comparison,
    Evaluation,
    Failure,
    PredictorScore,
    Reason,
    Unsupported,
)
from foretrain.evaluate.scores import Scores
from foretrain.fanout import Progress
from foretrain.files import parse_json, text_lines
from foretrain.predictors import DEFAULT, get
from foretrain.predictors.base import Predictor
from foretrain.quantities import QUANTITIES
from foretrain.run import Run
from foretrain.step.assembly import HOST_BOUND

__all__ = [
    "BOUNDS",
    "DIMENSIONS",
    "SPLITS",
    "Bound",
    "Comparison",
    "Evaluation",
    "Failure",
    "Fold",
    "PredictorScore",
    "Reason",
    "Scores",
    "Unsupported",
    "bound_of",
    "evaluate",
    "job_key",
    "leaderboard",
    "scores_of",
    "split_runs",
]  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class _Case:
    runs_file: str
    line: int
    run: Run


def evaluate(
    paths: Sequence[Path],
    *,
    predictors: Sequence[str | Path | Predictor] = (DEFAULT,),
    split: str | None = None,
    seed: int = 0,
    folds: int = 5,
    train_runs: int | None = None,
    most: int | None = None,
    host: str | None = None,
    catalog: Catalog | None = None,
    processes: int = 1,
    ray: str | None = None,
    progress: Progress = lambda done, total: None,
    learning: Progress = lambda done, total: None,
) -> Evaluation:
    """Score predictors on runs: as they are, or with a ``split`` learned anew on each fold's other runs.

    Folds are drawn over the runs of all files together, so that what is held out is held out everywhere.
    ``train_runs`` is how many runs of each model are learned from at most, drawn at random; ``most`` how many
    runs of each file are read at all, evenly from the first to the last. ``host`` is that of the machine that
    runs on GPUs were measured on (a profile or a name). Forecasts are made here, in so many ``processes``, or
    on the Ray cluster at ``ray`` (see ``fan_out``), with the same outcome. ``progress`` hears how many of all
    forecasts are done, ``learning`` how many fits.
    """
    cases, unread = _read(paths, catalog or Catalog.load(), host, most)
    runs = [case.run for case in cases]
    parts = (
        [Fold(train=None, test=tuple(range(len(runs))))]
        if split is None
        else split_runs(runs, split, seed=seed, folds=folds)
    )
    if train_runs is not None:
        parts = [thinned(fold, runs, train_runs, seed) for fold in parts]
    names = [None if isinstance(one, Predictor) else str(one) for one in predictors]
    given = [one if isinstance(one, Predictor) else get(one) for one in predictors]
    asked = [
        Asked(predictor=one, name=name, fold=fold)
        for one, name in zip(given, names, strict=True)
        for fold in parts
    ]
    answers = answer_all(asked, runs, processes=processes, ray=ray, progress=progress, learning=learning)
    tables = []
    for number, (one, name) in enumerate(zip(given, names, strict=True)):
        own = answers[number * len(parts) : (number + 1) * len(parts)]
        by_run = {i: answer for fold in own for i, answer in fold.items()}
        tables.append(_compare(name or one.name, cases, dict(sorted(by_run.items())), split))
    joined: dict[str, Any] = {
        field.name: tuple(row for table in tables for row in getattr(table, field.name))
        for field in dataclasses.fields(Evaluation)
    }
    return Evaluation(**{**joined, "failures": (*unread, *joined["failures"])})


def leaderboard(evaluation: Evaluation, quantity: str) -> list[PredictorScore]:
    """The results of one quantity, the smallest mean error first; those without a single error come last."""
    results = [result for result in evaluation.results if result.quantity == quantity]
    return sorted(results, key=lambda result: math.inf if result.mape is None else result.mape)


def _read(
    paths: Sequence[Path], catalog: Catalog, host: str | None, most: int | None
) -> tuple[list[_Case], list[Failure]]:
    """The runs of files, and the lines that are none. A file without a single run cannot be read."""
    if not paths:
        raise InputError("runs: no file given; name at least one")
    if most is not None and most < 1:
        raise invalid("most", most, "1 or more")
    cases: list[_Case] = []
    failures: list[Failure] = []
    for path in dict.fromkeys(paths):
        known, unread = len(cases), len(failures)
        for line, text in _spread(list(text_lines(path)), most):
            try:
                run = Run.read(parse_json(text), catalog=catalog, base=path.parent)
                cases.append(_Case(runs_file=str(path), line=line, run=_on(host, run, catalog)))
            except Exception as error:
                failures.append(Failure(runs_file=str(path), line=line, predictor=None, reason=_why(error)))
        if len(cases) == known and len(failures) == unread:
            raise InputError(f"{path}: empty; a runs file has one run per line")
        if len(cases) == known:
            raise InputError(f"{path}:{failures[unread].line}: {failures[unread].reason}")
    return cases, failures


def _spread(lines: list[tuple[int, str]], most: int | None) -> list[tuple[int, str]]:
    """Take so many of all lines, evenly from the first to the last."""
    if most is None or len(lines) <= most:
        return lines
    return [lines[place] for place in np.linspace(0, len(lines) - 1, most).round().astype(int)]


def _on(host: str | None, run: Run, catalog: Catalog) -> Run:
    """A run on GPUs beside the host that is given."""
    cluster = run.job.cluster
    if host is None or any(group.device.is_cpu for group in cluster.groups):
        return run
    given = Cluster.read({**cluster.to_dict(), "host": host}, catalog)
    return dataclasses.replace(run, job=dataclasses.replace(run.job, cluster=given))


def _why(error: Exception) -> str:
    """Why a line is no run."""
    if isinstance(error, ForetrainError):
        return str(error)
    if isinstance(error, ValueError):
        return f"not JSON ({error})"
    return f"not a run ({type(error).__name__}: {first_line(error)})"


def _compare(
    predictor: str, cases: Sequence[_Case], answers: Mapping[int, Answer], split: str | None
) -> Evaluation:
    rows: list[Comparison] = []
    missing: list[Unsupported] = []
    failures: list[Failure] = []
    tested: Counter[tuple[str, str]] = Counter()
    failed: Counter[tuple[str, str]] = Counter()
    for i, answer in answers.items():
        case = cases[i]
        asked = [name for name in QUANTITIES if name in case.run.measured]
        tested.update((case.runs_file, name) for name in asked)
        where: dict[str, Any] = {"runs_file": case.runs_file, "line": case.line, "predictor": predictor}
        if answer.failed:
            failed.update((case.runs_file, name) for name in asked)
            failures.append(Failure(**where, reason=answer.reason))
            continue
        compared, reasons = _compare_run(predictor, case, asked, answer)
        rows += compared
        missing += [Unsupported(**where, reason=reason) for reason in reasons]
    results = tuple(
        _result(predictor, file, name, split, rows, tested[file, name], failed[file, name])
        for file in dict.fromkeys(file for file, _ in tested)
        for name in QUANTITIES
        if (file, name) in tested
    )
    return Evaluation(
        results=results,
        by_bound=tuple(_apart(results, rows)),
        runs=tuple(rows),
        unsupported=tuple(missing),
        failures=tuple(failures),
    )


def _apart(results: Sequence[PredictorScore], rows: Sequence[Comparison]) -> Iterator[PredictorScore]:
    """Step times by what bounds them, where it is known."""
    for one in results:
        for bound in BOUNDS:
            own = [row for row in rows if row.bound == bound]
            count = sum(row.quantity == one.quantity and row.runs_file == one.runs_file for row in own)
            if one.quantity == "step_time_s" and count:
                yield _result(one.predictor, one.runs_file, one.quantity, one.split, own, count, 0, bound)


def bound_of(run: Run, forecast: str = "") -> Bound | None:
    """Say what bounds the step of a run: the host where one GPU was busy in too little of it; where that was
    not measured, what the forecast says, None where that is something else."""
    devices = [group.device for group in run.job.cluster.groups]
    if any(device.is_cpu for device in devices):
        return None
    busy_s, step_s = (run.measured.get(name) for name in ("device_busy_s", "step_time_s"))
    if busy_s is not None and step_s and run.job.cluster.world_size == 1:
        return "host" if busy_s < HOST_BOUND * step_s else "device"
    return next((bound for bound in BOUNDS if forecast.startswith(f"the {bound}")), None)


def _compare_run(
    predictor: str, case: _Case, asked: Sequence[str], answer: Answer
) -> tuple[list[Comparison], list[str]]:
    """The comparisons that can be made for one run, and the reasons for those that cannot."""
    if answer.quantities is None:
        return [], [answer.reason]
    rows, reasons, bound = [], [], bound_of(case.run, answer.bound)
    for name in asked:
        measured, estimate = case.run.measured[name], answer.quantities.get(name)
        if not 0 < measured < math.inf:
            reasons.append(f"{name}: measured {measured:g}, so there is no relative error")
        elif estimate is None:
            reasons.append(f"{name}: {predictor} gives none for this job")
        elif not math.isfinite(estimate.median):
            reasons.append(f"{name}: {predictor} gives {estimate.median}")
        else:
            rows.append(Comparison(
                runs_file=case.runs_file, line=case.line, predictor=predictor, quantity=name,
                measured=measured,
                predicted=estimate.median, low=estimate.low, high=estimate.high,
                error=(estimate.median - measured) / measured, bound=bound,
            ))  # fmt: skip
    return rows, reasons


def scores_of(rows: Sequence[Comparison]) -> Scores:
    """Score the forecasts of one or more comparisons, all together."""
    measured, predicted, low, high = (
        [getattr(row, name) for row in rows] for name in ("measured", "predicted", "low", "high")
    )
    return Scores.of(measured, predicted, low, high)


def _result(
    predictor: str,
    file: str,
    quantity: str,
    split: str | None,
    rows: Sequence[Comparison],
    tested: int,
    failed: int,
    bound: Bound | None = None,
) -> PredictorScore:
    compared = [row for row in rows if row.quantity == quantity and row.runs_file == file]
    figures: dict[str, Any] = dict.fromkeys(
        ("mape", "median_ape", "p90_ape", "bias", "coverage", "mre", "rmse")
    )
    if compared:
        scores = scores_of(compared)
        figures = {name: getattr(scores, name) for name in figures}
    return PredictorScore(
        predictor=predictor,
        quantity=quantity,
        runs_file=file,
        split=split,
        n=len(compared),
        unsupported=tested - len(compared),
        failed=failed,
        bound=bound,
        **figures,
    )
