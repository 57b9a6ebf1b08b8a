"""Tunes the parameters of a policy by Optuna, on the first part of a trace, and scores them on the rest."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from foretrain.errors import ForetrainError, InputError, invalid
from foretrain.scheduling import policies
from foretrain.scheduling.jobs import Trace, in_order
from foretrain.scheduling.spreading import Spreader
from foretrain.scheduling.study import Scenario, run_scenario

_WIDTH = 8.0
"""Numbers are tried from an eighth of their default to eight times it."""
_AT_ONCE = 8
"""Trials that are asked for before the results of any are told, whatever the number of processes, so that it
does not change what is found."""

Number = float | int | bool
Value = Number | tuple[float, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """What a search found, and what it is worth on jobs that it has not seen."""

    policy: str
    parameters: Mapping[str, Value]
    trials: int
    tuned_s: float
    """Average completion time on the first part of the trace, with the best parameters."""
    default_s: float
    """The same with the policy's own."""
    unseen_s: float
    unseen_default_s: float

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)


def space(policy: str) -> dict[str, Value]:
    """The parameters of a policy that can be tuned, with their defaults: numbers and sequences of them."""
    signature = inspect.signature(type(policies.get(policy)).__init__)
    defaults = {name: parameter.default for name, parameter in signature.parameters.items() if name != "self"}
    return {name: value for name, value in defaults.items() if _tunable(value)}


def _tunable(value: object) -> bool:
    if isinstance(value, tuple):
        return len(value) > 0 and all(_tunable(each) and not isinstance(each, bool) for each in value)
    return isinstance(value, bool) or (isinstance(value, (int, float)) and value != 0)


def search(
    trace: Trace,
    scenarios: Sequence[Scenario],
    *,
    trials: int,
    processes: int | None = None,
    ray: str | None = None,
    done: Callable[[int], None] = lambda _: None,
) -> list[Found]:
    """For each scenario, the parameters of its policy with the least average completion time on the first
    half of a trace."""
    if trials < 1:
        raise invalid("search", trials, "a whole number of at least 1")
    for scenario in scenarios:
        _check_tunable(scenario)
    if len(trace.jobs) < 4:
        raise InputError(f"search: {trace.name} has {len(trace.jobs)} jobs, and at least 4 are needed")
    half = len(trace.jobs) // 2
    halves = [
        dataclasses.replace(trace, jobs=in_order(part)) for part in (trace.jobs[:half], trace.jobs[half:])
    ]
    with Spreader(_score, halves, processes=processes, ray=ray) as spread:
        return [
            _tuned(scenario, trials, spread, _counting(done, place * trials))
            for place, scenario in enumerate(scenarios)
        ]


def _counting(done: Callable[[int], None], before: int) -> Callable[[int], None]:
    return lambda count: done(before + count)


def _check_tunable(scenario: Scenario) -> None:
    if scenario.in_rounds:
        raise InputError(f"search: policy {scenario.policy} has no parameters that can be tuned")
    if not space(scenario.policy):
        tunable = [name for name in policies.names() if space(name)]
        raise InputError(
            f"search: policy {scenario.policy} has no parameters; those of {', '.join(tunable)} can be tuned"
        )


def _tuned(
    scenario: Scenario,
    trials: int,
    spread: Spreader[tuple[int, Scenario], float],
    done: Callable[[int], None],
) -> Found:
    try:
        import optuna
    except ImportError as error:
        raise ForetrainError("search: optuna is not installed; install foretrain[learn]") from error
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    defaults = space(scenario.policy)

    def scores(parameters: list[dict[str, Value]], half: int) -> list[float]:
        return spread.run([(half, dataclasses.replace(scenario, parameters=each)) for each in parameters])

    study = optuna.create_study(sampler=optuna.samplers.TPESampler(seed=scenario.seed))
    study.enqueue_trial(_numbers(defaults))
    finished = 0
    while finished < trials:
        asked = [study.ask() for _ in range(min(_AT_ONCE, trials - finished))]
        tried = [_suggested(trial, defaults) for trial in asked]
        for trial, score in zip(asked, scores(tried, 0), strict=True):
            study.tell(trial, score)
        finished += len(asked)
        done(finished)
    best = _parameters(study.best_params, defaults)
    unseen_s, unseen_default_s = scores([best, {}], 1)
    return Found(
        policy=scenario.policy,
        parameters=best,
        trials=trials,
        tuned_s=float(study.best_value),
        default_s=float(study.trials[0].value or 0.0),
        unseen_s=unseen_s,
        unseen_default_s=unseen_default_s,
    )


def _suggested(trial: Any, defaults: Mapping[str, Value]) -> dict[str, Value]:
    values: dict[str, Number] = {}
    for name, value in _numbers(defaults).items():
        if isinstance(value, bool):
            values[name] = trial.suggest_categorical(name, [False, True])
        elif isinstance(value, int):
            values[name] = trial.suggest_int(
                name, max(1, round(value / _WIDTH)), round(value * _WIDTH), log=True
            )
        else:
            low, high = sorted((value / _WIDTH, value * _WIDTH))
            values[name] = trial.suggest_float(name, low, high, log=value > 0)
    return _parameters(values, defaults)


def _numbers(parameters: Mapping[str, Value]) -> dict[str, Number]:
    """Every number by itself; those of a sequence by their places.

    >>> _numbers({"limits": (1.0, 2.0), "depth": 3})
    {'limits.0': 1.0, 'limits.1': 2.0, 'depth': 3}
    """
    numbers: dict[str, Number] = {}
    for name, value in parameters.items():
        if isinstance(value, tuple):
            numbers |= {f"{name}.{place}": each for place, each in enumerate(value)}
        else:
            numbers[name] = value
    return numbers


def _parameters(numbers: Mapping[str, Number], defaults: Mapping[str, Value]) -> dict[str, Value]:
    """The other way round. A sequence whose default rises does so whatever is tried.

    >>> _parameters({"limits.0": 5.0, "limits.1": 4.0}, {"limits": (1.0, 2.0)})
    {'limits': (4.0, 5.0)}
    """
    values_of: dict[str, Value] = {}
    for name, default in defaults.items():
        if isinstance(default, tuple):
            values = [numbers[f"{name}.{place}"] for place in range(len(default))]
            values_of[name] = tuple(sorted(values) if list(default) == sorted(default) else values)
        else:
            values_of[name] = numbers[name]
    return values_of


def _score(halves: Sequence[Trace], item: tuple[int, Scenario]) -> float:
    half, scenario = item
    return run_scenario(halves[half], scenario).metrics.average_jct_s
