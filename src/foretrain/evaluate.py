"""Files of measured runs and predictors in; the errors of each predictor, per quantity and file, and every run behind them out."""

from __future__ import annotations

import copy
import dataclasses
import itertools
import json
import logging
import math
import random
import statistics
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from foretrain import splits
from foretrain.architectures import family
from foretrain.errors import ForetrainError, InputError, first_line, invalid, unknown
from foretrain.forecast import Estimate
from foretrain.job import QUANTITIES, Job, Run, read_runs
from foretrain.predictors import DEFAULT, get
from foretrain.predictors.base import Predictor

_log = logging.getLogger(__name__)

SPLITS = ("random", "leave-model-out", "leave-device-out", "interpolate", "extrapolate")
DIMENSIONS: Mapping[str, Callable[[Job], float | None]] = {
    "workers": lambda job: job.cluster.world_size,
    "nodes": lambda job: job.cluster.nodes,
    "batch": lambda job: job.workload.training.global_batch / (job.plan.data or 1),
    "samples": lambda job: job.workload.training.samples,
    "cores": lambda job: job.cluster.device.cores if job.cluster.device.is_cpu else None,
}
"""What ``interpolate`` and ``extrapolate`` go along, as in ``extrapolate:workers``; the batch is that of a worker."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """How one predictor did on one quantity of one file. Errors are fractions of the measured value; None where ``n`` is 0."""

    predictor: str
    quantity: str
    runs_file: str
    split: str | None
    n: int
    """Runs with an error; with ``unsupported`` they make up every tested run that measured the quantity."""
    mape: float | None
    median_ape: float | None
    p90_ape: float | None
    bias: float | None
    """Median of the signed error: above zero when the predictor says too much."""
    coverage: float | None
    """Share of measured values inside the forecast's interval."""
    unsupported: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """One measured value beside its forecast; ``error`` is (predicted - measured) / measured."""

    runs_file: str
    line: int
    predictor: str
    quantity: str
    measured: float
    predicted: float
    low: float
    high: float
    error: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Unsupported:
    """A run, or one quantity of it, without an error figure, and why."""

    runs_file: str
    line: int
    predictor: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """The figures, and every run that they come from or that has none."""

    results: tuple[Result, ...]
    runs: tuple[Comparison, ...]
    unsupported: tuple[Unsupported, ...]

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        return {
            field.name: [dataclasses.asdict(row) for row in getattr(self, field.name)]
            for field in dataclasses.fields(self)
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Fold:
    """Positions of the runs to learn from (None: nothing is learned) and of the runs to forecast.

    A predictor that comes with knowledge forgets ``families`` and ``devices`` before it learns.
    """

    train: tuple[int, ...] | None
    test: tuple[int, ...]
    families: frozenset[str] = frozenset()
    devices: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True, kw_only=True)
class _Case:
    runs_file: str
    line: int
    run: Run


_Answer = Mapping[str, Estimate] | str
"""The forecast's quantities, or why there are none."""


def evaluate(
    paths: Sequence[Path],
    *,
    predictors: Sequence[str | Predictor] = (DEFAULT,),
    split: str | None = None,
    seed: int = 0,
    folds: int = 5,
    train_runs: int | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Evaluation:
    """Score predictors on runs: as they are, or with a ``split`` learned anew on each fold's other runs.

    Folds are drawn over the runs of all files together, so that what is held out is held out everywhere. ``train_runs`` is how many runs of
    each model are learned from at most, drawn at random. ``progress`` is told how many of all forecasts are done.
    """
    cases = _read(paths)
    runs = [case.run for case in cases]
    parts = (
        [Fold(train=None, test=tuple(range(len(runs))))]
        if split is None
        else split_runs(runs, split, seed=seed, folds=folds)
    )
    if train_runs is not None:
        parts = [_thinned(fold, runs, train_runs, seed) for fold in parts]
    total, done = len(predictors) * sum(len(fold.test) for fold in parts), itertools.count(1)
    tables = []
    for given in predictors:
        predictor = get(given) if isinstance(given, str) else given
        answers: dict[int, _Answer] = {}
        for fold in parts:
            answers.update(
                _forecast_fold(
                    predictor, runs, fold, lambda: progress(next(done), total) if progress else None
                )
            )
        label = given if isinstance(given, str) else predictor.name
        tables.append(_compare(label, cases, dict(sorted(answers.items())), split))
    return Evaluation(
        **{
            key: tuple(row for table in tables for row in getattr(table, key))
            for key in ("results", "runs", "unsupported")
        }
    )


def leaderboard(evaluation: Evaluation, quantity: str) -> list[Result]:
    """The results of one quantity, the smallest mean error first; those without a single error come last."""
    results = [result for result in evaluation.results if result.quantity == quantity]
    return sorted(results, key=lambda result: math.inf if result.mape is None else result.mape)


def _read(paths: Sequence[Path]) -> list[_Case]:
    if not paths:
        raise InputError("runs: no file given; name at least one")
    cases = []
    for path in dict.fromkeys(paths):
        found = [_Case(runs_file=str(path), line=line, run=run) for line, run in read_runs(path)]
        if not found:
            raise InputError(f"{path}: empty; a runs file has one run per line")
        cases += found
    return cases


def _forecast_fold(
    predictor: Predictor, runs: Sequence[Run], fold: Fold, tick: Callable[[], None]
) -> Iterator[tuple[int, _Answer]]:
    """The answer for every test run of a fold, each distinct job forecast once."""
    failure = None
    if fold.train is not None:
        try:
            predictor = copy.deepcopy(predictor)
            if fold.families or fold.devices:
                predictor = predictor.without(fold.families, fold.devices)
            predictor = predictor.fit([runs[i] for i in fold.train])
        except ForetrainError as error:
            failure = f"cannot learn from {len(fold.train)} runs: {error}"
    known: dict[str, _Answer] = {}
    for i in fold.test:
        if failure is not None:
            answer: _Answer = failure
        elif predictor.quantities.isdisjoint(runs[i].measured):
            answer = (
                f"measured: {', '.join(runs[i].measured) or 'nothing'}; {predictor.name} gives none of it"
            )
        else:
            key = job_key(runs[i].job)
            if key not in known:
                known[key] = _forecast(predictor, runs[i].job)
            answer = known[key]
        tick()
        yield i, answer


def _forecast(predictor: Predictor, job: Job) -> _Answer:
    try:
        return predictor.predict(job).quantities
    except ForetrainError as error:
        return str(error)
    except Exception as error:
        _log.exception("a forecast failed on %s", job.workload.model.label)
        return f"internal error: {type(error).__name__}: {first_line(error)}"


def job_key(job: Job) -> str:
    """A text that two jobs share when they are the same: the canonical form and the folder that model paths start from."""
    return json.dumps([str(job.workload.base), job.to_dict()], sort_keys=True)


def _compare(
    predictor: str, cases: Sequence[_Case], answers: Mapping[int, _Answer], split: str | None
) -> Evaluation:
    rows: list[Comparison] = []
    missing: list[Unsupported] = []
    tested: Counter[tuple[str, str]] = Counter()
    for i, answer in answers.items():
        case = cases[i]
        asked = [name for name in QUANTITIES if name in case.run.measured]
        tested.update((case.runs_file, name) for name in asked)
        found, reasons = _compare_run(predictor, case, asked, answer)
        rows += found
        missing += [
            Unsupported(runs_file=case.runs_file, line=case.line, predictor=predictor, reason=reason)
            for reason in reasons
        ]
    keys = [
        (file, name)
        for file in dict.fromkeys(file for file, _ in tested)
        for name in QUANTITIES
        if (file, name) in tested
    ]
    results = tuple(_result(predictor, file, name, split, rows, tested[file, name]) for file, name in keys)
    return Evaluation(results=results, runs=tuple(rows), unsupported=tuple(missing))


def _compare_run(
    predictor: str, case: _Case, asked: Sequence[str], answer: _Answer
) -> tuple[list[Comparison], list[str]]:
    """The comparisons that can be made for one run, and the reasons for those that cannot."""
    if isinstance(answer, str):
        return [], [answer]
    rows, reasons = [], []
    for name in asked:
        measured, estimate = case.run.measured[name], answer.get(name)
        if not 0 < measured < math.inf:
            reasons.append(f"{name}: measured {measured:g}, so there is no relative error")
        elif estimate is None:
            reasons.append(f"{name}: {predictor} gives none for this job")
        elif not math.isfinite(estimate.median):
            reasons.append(f"{name}: {predictor} gives {estimate.median}")
        else:
            rows.append(Comparison(
                runs_file=case.runs_file, line=case.line, predictor=predictor, quantity=name, measured=measured,
                predicted=estimate.median, low=estimate.low, high=estimate.high, error=(estimate.median - measured) / measured,
            ))  # fmt: skip
    return rows, reasons


def _result(
    predictor: str, file: str, quantity: str, split: str | None, rows: Sequence[Comparison], tested: int
) -> Result:
    mine = [row for row in rows if row.quantity == quantity and row.runs_file == file]
    errors = np.array([row.error for row in mine])
    figures: dict[str, float | None] = dict.fromkeys(("mape", "median_ape", "p90_ape", "bias", "coverage"))
    if mine:
        figures = {
            "mape": float(np.abs(errors).mean()),
            "median_ape": float(np.median(np.abs(errors))),
            "p90_ape": float(np.quantile(np.abs(errors), 0.9)),
            "bias": float(np.median(errors)),
            "coverage": sum(row.low <= row.measured <= row.high for row in mine) / len(mine),
        }
    return Result(
        predictor=predictor,
        quantity=quantity,
        runs_file=file,
        split=split,
        n=len(mine),
        unsupported=tested - len(mine),
        **figures,
    )


def split_runs(runs: Sequence[Run], split: str, *, seed: int = 0, folds: int = 5) -> list[Fold]:
    """The folds of a split.

    ``random`` keeps runs of one job together, ``leave-model-out`` those of one architecture family: both fill ``folds``
    folds as evenly as they can. ``leave-device-out`` has one fold per device. ``interpolate:workers`` has one fold per inner number of workers, which
    is forecast from fewer and more; ``extrapolate:workers`` one fold, the largest third of the numbers (others: see ``DIMENSIONS``).
    ``interpolate`` alone goes along workers, or along the batch where all have as many. ``extrapolate`` alone has a single fold:
    learn up to the median world size (global batch, when all world sizes are equal), forecast what is above.
    """
    kind, _, dimension = split.partition(":")
    if kind not in SPLITS or (dimension and kind not in _ALONG):
        raise unknown(
            "split", split, [*SPLITS, *(f"{kind}:{name}" for kind in _ALONG for name in DIMENSIONS)]
        )
    if folds < 2:
        raise invalid("folds", folds, "2 or more")
    if split == "extrapolate":
        return [_extrapolation(runs)]
    if kind in _ALONG:
        return _along(runs, kind, dimension)
    what, labels_of = _LABELS[split]
    labels = [labels_of(run) for run in runs]
    by_label: dict[frozenset[str], list[int]] = {}
    for i, label in enumerate(labels):
        by_label.setdefault(label, []).append(i)
    groups = list(by_label.values())
    if len(groups) < 2:
        raise InputError(f"split: {split} needs runs of at least two {what}; all {len(runs)} are of one")
    tests = groups if split == "leave-device-out" else _even(groups, min(folds, len(groups)), seed)
    return [_fold(test, labels, split) for test in tests]


_ALONG: Mapping[str, Callable[[Sequence[float]], list[splits.Part]]] = {
    "interpolate": splits.interpolation,
    "extrapolate": splits.extrapolation,
}


def _along(runs: Sequence[Run], kind: str, dimension: str) -> list[Fold]:
    """Folds along a dimension; runs without a value of it are only learned from."""
    if dimension and dimension not in DIMENSIONS:
        raise unknown("split", f"{kind}:{dimension}", [f"{kind}:{name}" for name in DIMENSIONS])
    found = []
    for name in [dimension] if dimension else ["workers", "batch"]:
        values = {i: value for i, run in enumerate(runs) if (value := DIMENSIONS[name](run.job)) is not None}
        found = _ALONG[kind](list(values.values()))
        if found:
            break
    if not found:
        raise InputError(
            f"split: {kind} needs runs with {'three' if kind == 'interpolate' else 'two'} values of {dimension or 'workers'} or more"
        )
    places = list(values)
    tests = [tuple(places[i] for i in test) for _, test in found]
    return [Fold(train=tuple(i for i in range(len(runs)) if i not in set(test)), test=test) for test in tests]


def _thinned(fold: Fold, runs: Sequence[Run], most: int, seed: int) -> Fold:
    """At most so many runs of each model to learn from."""
    if most < 1:
        raise invalid("train_runs", most, "1 or more")
    by_model: dict[str, list[int]] = {}
    for i in fold.train or ():
        by_model.setdefault(runs[i].job.workload.model.key, []).append(i)
    drawn = [
        one for mine in by_model.values() for one in random.Random(seed).sample(mine, min(most, len(mine)))
    ]
    return fold if fold.train is None else dataclasses.replace(fold, train=tuple(sorted(drawn)))


def _fold(test: Sequence[int], labels: Sequence[frozenset[str]], split: str) -> Fold:
    """Learn from the runs that share no label with a test run: a mixed cluster has several devices."""
    seen = frozenset().union(*(labels[i] for i in test))
    return Fold(
        train=tuple(i for i, mine in enumerate(labels) if seen.isdisjoint(mine)),
        test=tuple(sorted(test)),
        families=seen if split == "leave-model-out" else frozenset(),
        devices=seen if split == "leave-device-out" else frozenset(),
    )


def _even(groups: list[list[int]], count: int, seed: int) -> list[list[int]]:
    """Groups dealt out, large ones first and equal ones in random order, each to the fold that has the fewest runs so far."""
    random.Random(seed).shuffle(groups)
    parts: list[list[int]] = [[] for _ in range(count)]
    for group in sorted(groups, key=len, reverse=True):
        min(parts, key=len).extend(group)
    return parts


_LABELS: dict[str, tuple[str, Callable[[Run], frozenset[str]]]] = {
    "random": ("distinct jobs", lambda run: frozenset({job_key(run.job)})),
    "leave-model-out": ("architecture families", lambda run: frozenset({family(run.job.workload.model)})),
    "leave-device-out": (
        "devices",
        lambda run: frozenset(group.device.name for group in run.job.cluster.groups),
    ),
}
"""What is held out: the labels of a run, which no other fold may share."""


def _extrapolation(runs: Sequence[Run]) -> Fold:
    scales = [run.job.cluster.world_size for run in runs]
    if len(set(scales)) < 2:
        scales = [run.job.workload.training.global_batch for run in runs]
    if len(set(scales)) < 2:
        raise InputError(
            "split: extrapolate needs runs of at least two world sizes or global batches; all are equal"
        )
    limit = statistics.median_low(scales)
    if limit == max(scales):
        limit = max(scale for scale in scales if scale < limit)
    train, test = (
        tuple(i for i, scale in enumerate(scales) if (scale > limit) == above) for above in (False, True)
    )
    return Fold(train=train, test=test)
