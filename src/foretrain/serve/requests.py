"""Describes what may be asked of a server, as dataclasses that check themselves."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from foretrain.errors import ForetrainError, InputError, invalid, unknown
from foretrain.predictors import DEFAULT, known
from foretrain.quantities import QUANTITIES
from foretrain.schema import read

_NAME = re.compile(r"[a-z][a-z0-9_.-]{0,63}")
_MOST_RUNS = 1000
"""On a page."""
_MOST_SEEDS = 100
_MOST_CASES = 32


_UNREADABLE = (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError)
"""What reading nonsense can raise before anything refuses it in words."""


@contextlib.contextmanager
def reading(field: str) -> Iterator[None]:
    """Whatever goes wrong in reading a request is the request's."""
    try:
        yield
    except ForetrainError:
        raise
    except _UNREADABLE as error:
        raise InputError(f"{field}: cannot be read ({type(error).__name__})") from error


def _check_target(model: str | None, job: Mapping[str, Any] | None, config: Mapping[str, Any] | None) -> None:
    if sum(one is not None for one in (model, job, config)) != 1:
        raise InputError(
            "model: give the name of a model, the tables of a job in job, or a Hugging Face config.json in "
            "config (and only one)"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class PredictRequest:
    """Asks for one forecast: of a model by its name, or of the tables of a job, with fields over it."""

    model: str | None = None
    job: Mapping[str, Any] | None = None
    """The same tables as in a job file; without cluster, the one that the server runs on."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Fields of a job by name: device, devices, batch, precision, ..."""
    predictor: str = DEFAULT
    config: Mapping[str, Any] | None = None
    """The contents of a Hugging Face config.json."""

    def __post_init__(self) -> None:
        _check_target(self.model, self.job, self.config)


@dataclass(frozen=True, slots=True, kw_only=True)
class ExplainRequest:
    """Two forecasts and why they differ; each is asked for as in ``PredictRequest``, without predictor."""

    a: Mapping[str, Any]
    b: Mapping[str, Any]
    names: tuple[str, ...] = ("A", "B")
    """What sentences call the two."""
    predictor: str = DEFAULT

    def __post_init__(self) -> None:
        if len(self.names) != 2 or not all(0 < len(name) <= 80 for name in self.names):
            raise invalid("names", list(self.names), "two names of 1 to 80 characters")

    @property
    def both(self) -> tuple[PredictRequest, PredictRequest]:
        return self._one("a"), self._one("b")

    def _one(self, name: str) -> PredictRequest:
        try:
            return read(PredictRequest, {**getattr(self, name), "predictor": self.predictor}, "")
        except InputError as error:
            raise InputError(f"{name}.{error}") from error


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanRequest:
    """A search for the best plans of a job, as ``foretrain.plan`` takes it."""

    model: str | None = None
    job: Mapping[str, Any] | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    predictor: str = DEFAULT
    kinds: tuple[str, ...] = ()
    """Devices or nodes of the catalogue to choose from."""
    max_devices: int | None = None
    counts: tuple[int, ...] = ()
    deadline: str | float | None = None
    """Seconds, or a text such as 24h."""
    budget: float | None = None
    objective: Literal["time", "cost", "energy"] | None = None
    framework: str | None = None
    fits: float = 0.9
    risk: float = 0.1
    top: int = 5
    seconds: float | None = None
    """After which the search ends with the best so far."""
    exhaustive: bool = False
    config: Mapping[str, Any] | None = None
    """The contents of a Hugging Face config.json."""

    def __post_init__(self) -> None:
        _check_target(self.model, self.job, self.config)
        for name in ("top", "max_devices"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise invalid(name, value, "1 or more")


@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduleRequest:
    """Simulations of a cluster under scheduling policies."""

    cluster: str
    """As 64x8xv100 (nodes x GPUs x device), or v100=4,p100=4."""
    policies: tuple[str, ...] = ("fifo", "backfill", "srtf", "tiresias")
    generate: str | None = None
    """Jobs to make: jobs=500,gap=30s,median=20min,spread=1.2."""
    trace: str | None = None
    """The text of a trace, in a format that ``foretrain schedule`` reads."""
    format: str | None = None
    first: int | None = None
    """Only the jobs that arrive first."""
    placement: str = "packed"
    rack: int = 16
    rounds: str | None = None
    """Length of a round: Gavel's round-based mode."""
    errors: tuple[float, ...] = (0.0,)
    """Of the estimates that policies see, mean absolute, 0.1 is 10 %."""
    seeds: int = 1

    def __post_init__(self) -> None:
        from foretrain.scheduling import policies
        from foretrain.scheduling.rounds.policies import ROUND_POLICIES

        if (self.generate is None) == (self.trace is None):
            raise InputError("trace: give the text of a trace, or generate (and only one of them)")
        if not self.policies:
            raise InputError("policies: empty; name at least one")
        names = dict.fromkeys((*policies.names(), *ROUND_POLICIES))
        for policy in self.policies:
            if policy not in names:
                raise unknown("policies", policy, names)
        for error in self.errors:
            if not 0 <= error < 10:
                raise invalid("errors", error, "a fraction such as 0.1")
        if not self.errors or len(self.errors) * len(self.policies) > _MOST_CASES:
            raise InputError(f"errors: give one or more, and at most {_MOST_CASES} with each policy")
        for name, most in (("seeds", _MOST_SEEDS), ("rack", 2**31), ("first", 2**31)):
            value = getattr(self, name)
            if value is not None and not 1 <= value <= most:
                raise invalid(name, value, f"a whole number from 1 to {most}")


@dataclass(frozen=True, slots=True, kw_only=True)
class RunsQuery:
    """Asks for runs, by page; columns compare without regard to case, * is anything."""

    source: str | None = None
    label: str | None = None
    model: str | None = None
    device: str | None = None
    quantity: str | None = None
    """Only runs that measured this."""
    after: int = 0
    """What the page before gave as next."""
    limit: int = 100

    def __post_init__(self) -> None:
        check_filter(self)
        if not 0 <= self.after < 2**62:
            raise invalid("after", self.after, "what the page before gave as next")
        if not 1 <= self.limit <= _MOST_RUNS:
            raise invalid("limit", self.limit, f"a whole number from 1 to {_MOST_RUNS}")


@dataclass(frozen=True, slots=True, kw_only=True)
class LearnRequest:
    """A predictor to calibrate to the runs that are kept, and the name that it goes by then."""

    name: str
    predictor: str = DEFAULT
    """The method to start from."""
    source: str | None = None
    label: str | None = None
    model: str | None = None
    device: str | None = None
    quantity: str | None = None

    def __post_init__(self) -> None:
        check_filter(self)
        if not _NAME.fullmatch(self.name):
            raise invalid("name", self.name, "a name of small letters, digits, _, . and -, a letter first")
        if self.name in known():
            raise InputError(f"name: {self.name!r} is taken by a predictor that comes with foretrain")
        if self.predictor not in known():
            raise unknown("predictor", self.predictor, known())


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaderboardRequest:
    """Predictors to compare on the runs that are kept."""

    predictors: tuple[str, ...] = ()
    """By their names; without any, the usual one, the roofline, and those that learned here."""
    quantity: str = "step_time_s"
    source: str | None = None
    label: str | None = None
    model: str | None = None
    device: str | None = None

    def __post_init__(self) -> None:
        check_filter(self)
        if len(self.predictors) > _MOST_CASES:
            raise InputError(f"predictors: {len(self.predictors)}; at most {_MOST_CASES} are compared")


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelsQuery:
    """Asks for models, by a part of their names."""

    like: str = ""
    limit: int = 50

    def __post_init__(self) -> None:
        if not 1 <= self.limit <= _MOST_RUNS:
            raise invalid("limit", self.limit, f"a whole number from 1 to {_MOST_RUNS}")


def check_filter(where: RunsQuery | LearnRequest | LeaderboardRequest) -> None:
    """Refuse what no run can be found by."""
    if where.quantity is not None and where.quantity not in QUANTITIES:
        raise unknown("quantity", where.quantity, QUANTITIES)
    for name in ("source", "label", "model", "device"):
        if "\0" in (getattr(where, name) or ""):
            raise InputError(f"{name}: a NUL character is in no run")
