"""Asks predictors, learned anew where a fold says so, for the forecasts of runs: here, in several processes,
or on a Ray cluster."""

from __future__ import annotations

import copy
import itertools
import json
import logging
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from foretrain.errors import ForetrainError, InputError, UnsupportedJob, first_line
from foretrain.evaluate.folds import Fold, job_key
from foretrain.fanout import Crew, Progress
from foretrain.forecast import Estimate
from foretrain.job import Job
from foretrain.predictors.base import Predictor
from foretrain.predictors.portable import Portable
from foretrain.run import Run

_log = logging.getLogger(__name__)

Counted = Callable[[int], None]
"""Hears how many runs have their answer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """The quantities of a forecast, or why there are none."""

    quantities: Mapping[str, Estimate] | None = None
    bound: str = ""
    """What bounds the step, in the predictor's words."""
    reason: str = ""
    failed: bool = False
    """The job was not refused: something went wrong."""
    bug: str = ""
    """The traceback, where what went wrong is nothing that the user can mend."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """A predictor that a fold's test runs are forecast with."""

    predictor: Predictor
    fold: Fold
    name: str | None = None
    """What ``predictors.get`` made it of, if it did."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Question:
    """A job for one of those asked, and the runs that wait for the answer."""

    to: int
    job: Job
    waiting: list[int] = field(default_factory=list)


_Forecasters = Sequence[Predictor | Portable | None]
"""Those asked, as they are here or as they go elsewhere; None where there is nothing to ask."""


def answer_all(
    asked: Sequence[Asked],
    runs: Sequence[Run],
    *,
    processes: int = 1,
    ray: str | None = None,
    progress: Progress,
    learning: Progress,
) -> list[dict[int, Answer]]:
    """The answers of each that is asked, by the position of the run; every distinct job is forecast once."""
    elsewhere = processes > 1 or ray is not None
    forecasters: list[Predictor | Portable | None] = []
    questions: list[_Question] = []
    answers: list[dict[int, Answer]] = []
    for one in asked:
        predictor = _learned(one, runs, elsewhere)
        refusals = {i: _refusal(predictor, runs[i]) for i in one.fold.test}
        answers.append({i: refusal for i, refusal in refusals.items() if refusal is not None})
        wanted = [i for i, refusal in refusals.items() if refusal is None]
        questions += _questions(len(forecasters), runs, wanted)
        needed = predictor if wanted and isinstance(predictor, Predictor) else None
        forecasters.append(_sent(one, needed) if needed is not None and elsewhere else needed)
        learning(len(forecasters), len(asked))
    refused = sum(map(len, answers))
    total = refused + sum(len(question.waiting) for question in questions)

    def counted(done: int) -> None:
        progress(refused + done, total)

    answered = (
        _ask_workers(questions, forecasters, counted, processes=processes, ray=ray)
        if elsewhere
        else _ask(questions, forecasters, counted)
    )
    for question, answer in zip(questions, answered, strict=True):
        if answer.bug:
            _log.error("a forecast failed on %s\n%s", question.job.workload.model.label, answer.bug)
        answers[question.to].update(dict.fromkeys(question.waiting, answer))
    return answers


# Learning


def _learned(asked: Asked, runs: Sequence[Run], elsewhere: bool) -> Predictor | Answer:
    """The predictor that has learned what the fold allows, or why it could not."""
    fold = asked.fold
    if fold.train is None:
        return asked.predictor
    predictor = copy.deepcopy(asked.predictor)
    before = dict(vars(predictor))
    try:
        if fold.families or fold.devices:
            predictor = predictor.without(fold.families, fold.devices)
        predictor = predictor.fit([runs[i] for i in fold.train])
    except Exception as error:
        answer = _failure(error)
        if answer.bug:
            _log.error("%s failed to learn\n%s", predictor.name, answer.bug)
        reason = f"cannot learn from {len(fold.train)} runs: {answer.reason}"
        return Answer(reason=reason, failed=bool(answer.bug))
    changed = any(before.get(key) is not now for key, now in vars(predictor).items())
    if elsewhere and changed and not predictor.learns:
        raise InputError(
            f"processes: {predictor.name} has learned but cannot be saved (its learns is False), "
            "so other processes cannot have it"
        )
    return predictor


def _sent(asked: Asked, learned: Predictor) -> Portable:
    """The predictor as it goes elsewhere."""
    if asked.name is not None and asked.fold.train is None:
        return Portable.of(asked.name)
    return Portable.of_learned(learned)


def _refusal(predictor: Predictor | Answer, run: Run) -> Answer | None:
    """Why there is nothing to ask about a run."""
    if isinstance(predictor, Answer):
        return predictor
    if not predictor.quantities.isdisjoint(run.measured):
        return None
    quantities = ", ".join(run.measured) or "nothing"
    return Answer(reason=f"measured: {quantities}; {predictor.name} gives none of it")


def _questions(to: int, runs: Sequence[Run], wanted: Sequence[int]) -> list[_Question]:
    by_job: dict[str, _Question] = {}
    for i in wanted:
        by_job.setdefault(job_key(runs[i].job), _Question(to=to, job=runs[i].job)).waiting.append(i)
    return list(by_job.values())


# Forecasting


def _ask(questions: Sequence[_Question], forecasters: _Forecasters, counted: Counted) -> list[Answer]:
    """Ask one question after the other, in this process."""
    answers, done = [], 0
    for question in questions:
        answers.append(_forecast(forecasters, question))
        done += len(question.waiting)
        counted(done)
    return answers


def _ask_workers(
    questions: Sequence[_Question],
    forecasters: _Forecasters,
    counted: Counted,
    *,
    processes: int,
    ray: str | None,
) -> list[Answer]:
    """Ask workers: all questions about a model go to one of them, which keeps the graphs that it has traced.

    A question that takes its worker down takes those about the same model with it; these are then asked one
    by one.
    """
    by_model: dict[str, list[_Question]] = {}
    for question in questions:
        by_model.setdefault(_model_key(question.job), []).append(question)
    groups = list(by_model.values())
    waiting = [sum(len(question.waiting) for question in group) for group in groups]
    done = list(itertools.accumulate(waiting, initial=0))
    answers: dict[int, Answer] = {}
    with Crew(_forecast_group, shared=forecasters, processes=processes, ray=ray) as crew:
        results = crew.run(groups, progress=lambda count, _: counted(done[count]), lost=lambda why: [])
        for group, result in zip(groups, results, strict=True):
            answers.update(zip(map(id, group), result, strict=False))
        left = [[question] for question in questions if id(question) not in answers]
        singly = crew.run(left, lost=lambda why: [Answer(reason=why, failed=True)])
        for (question,), (answer,) in zip(left, singly, strict=True):
            answers[id(question)] = answer
    return [answers[id(question)] for question in questions]


def _forecast_group(forecasters: _Forecasters, questions: Sequence[_Question]) -> list[Answer]:
    return [_forecast(forecasters, question) for question in questions]


def _forecast(forecasters: _Forecasters, question: _Question) -> Answer:
    forecaster = forecasters[question.to]
    assert forecaster is not None
    try:
        predictor = forecaster.predictor if isinstance(forecaster, Portable) else forecaster
        forecast = predictor.predict(question.job)
        return Answer(quantities=dict(forecast.quantities), bound=forecast.bound)
    except Exception as error:
        return _failure(error)


def _failure(error: Exception) -> Answer:
    if isinstance(error, ForetrainError):
        return Answer(reason=str(error), failed=not isinstance(error, UnsupportedJob))
    bug = "".join(traceback.format_exception(error))
    return Answer(reason=f"internal error: {type(error).__name__}: {first_line(error)}", failed=True, bug=bug)


def _model_key(job: Job) -> str:
    return json.dumps([str(job.workload.base), job.workload.model.key])
