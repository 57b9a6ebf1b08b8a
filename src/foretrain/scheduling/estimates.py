"""Tells policies what to believe of a job's length: the truth, or what predictors, users and history say.

What happens and what is believed are two things: a belief is a factor on the true work.
"""

from __future__ import annotations

import heapq
import math
import random
from abc import ABC, abstractmethod
from collections import defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import NormalDist
from typing import NamedTuple

from foretrain.errors import InputError, invalid
from foretrain.files import parse_json, read_text
from foretrain.scheduling.correlation import Shares, share_within
from foretrain.scheduling.jobs import TraceJob

_TIMES = ("step_time_s", "total_time_s")
_NORMAL = NormalDist()
_LEVELS = (0.1, 0.9)
"""Quantiles of the interval of a belief."""
_LAST = 2
"""Jobs of the same user that history goes by (Tsafrir, Etsion and Feitelson 2007)."""
_NOTHING_KNOWN_S = 3600.0
"""Believed of a job of which history knows nothing and for which nothing was asked."""


class Belief(NamedTuple):
    """Factors on the true work: the median, and an interval that should hold it four times of five."""

    median: float
    low: float
    high: float


class Estimates(ABC):
    """A factor on the true work of each job, which is all that a policy gets to see."""

    def begin(self, jobs: Sequence[TraceJob], time_s: Callable[[TraceJob], float]) -> None:  # noqa: B027
        """All jobs, before any is asked for, and the time that each truly takes on the GPUs it asks for."""

    @abstractmethod
    def factor(self, job: TraceJob, number: int) -> float:
        """Estimated over true work; the same for the same job whenever it is asked for."""

    def belief(self, job: TraceJob, number: int) -> Belief:
        """The same with an interval."""
        factor = self.factor(job, number)
        return Belief(factor, factor, factor)


class Exact(Estimates):
    """The truth."""

    def factor(self, job: TraceJob, number: int) -> float:
        return 1.0


class _Drawn(Estimates):
    """Draws of a standard normal number for each job, alike within users and models as far as said."""

    def __init__(self, seed: int, shares: Shares) -> None:
        self._seed, self._shares = seed, shares
        self._common: dict[str, float] = {}

    def normal(self, job: TraceJob, number: int) -> float:
        own = random.Random(f"{self._seed}/{number}").gauss(0.0, 1.0)
        if not self._shares.user and not self._shares.model:
            return own
        of_user = self._of(f"user/{job.user or job.group}")
        of_model = self._of(f"model/{job.kind or job.group}")
        by_user, by_model, alone = self._shares.user, self._shares.model, self._shares.alone
        return math.sqrt(by_user) * of_user + math.sqrt(by_model) * of_model + math.sqrt(alone) * own

    def _of(self, name: str) -> float:
        if name not in self._common:
            self._common[name] = random.Random(f"{self._seed}/{name}").gauss(0.0, 1.0)
        return self._common[name]


class LogNormal(_Drawn):
    """Errors as a predictor makes them: factors with median 1 and a given mean absolute percentage error."""

    def __init__(self, mape: float, seed: int = 0, shares: Shares | None = None) -> None:
        super().__init__(seed, shares or Shares())
        if not 0 <= mape < 10:
            raise invalid("error", mape, "a fraction between 0 and 10, such as 0.1 for 10 %")
        self._sigma = spread_of(mape)

    def factor(self, job: TraceJob, number: int) -> float:
        return math.exp(self._sigma * self.normal(job, number))

    def belief(self, job: TraceJob, number: int) -> Belief:
        factor = self.factor(job, number)
        low, high = (math.exp(self._sigma * _NORMAL.inv_cdf(level)) for level in _LEVELS)
        return Belief(factor, factor * low, factor * high)


class ResidualEstimates(_Drawn):
    """Factors drawn from what a predictor was off by on measured runs: predicted over measured."""

    def __init__(self, ratios: Sequence[float], seed: int = 0, shares: Shares | None = None) -> None:
        super().__init__(seed, shares or Shares())
        bad = [ratio for ratio in ratios if not 0 < ratio < math.inf]
        if bad or not ratios:
            allowed = "a list of positive ratios of predicted to measured time"
            raise invalid("residuals", bad[0] if bad else list(ratios), allowed)
        self._ratios = tuple(ratios)
        self._sorted = sorted(ratios)

    @property
    def mape(self) -> float:
        """Mean absolute percentage error, as a fraction."""
        return sum(abs(ratio - 1) for ratio in self._ratios) / len(self._ratios)

    @classmethod
    def load(cls, path: Path, seed: int = 0, shares: Shares | None = None) -> dict[str, ResidualEstimates]:
        """By predictor, of the step times (else total times) that ``foretrain evaluate --json`` writes.

        Unless shares are given, errors of runs of one file are as alike as they were measured to be.
        """
        try:
            runs = parse_json(read_text(path))["runs"]
            ratios: dict[str, dict[str, list[tuple[str, float]]]] = {}
            for run in runs:
                if run["quantity"] in _TIMES:
                    ratio = float(run["predicted"]) / float(run["measured"])
                    of_predictor = ratios.setdefault(str(run["predictor"]), {})
                    of_predictor.setdefault(run["quantity"], []).append(
                        (str(run.get("runs_file", "")), ratio)
                    )
        except (KeyError, TypeError, ValueError, ZeroDivisionError) as error:
            raise InputError(
                f"{path}: not a result of foretrain evaluate --json ({type(error).__name__}: {error})"
            ) from error
        if not ratios:
            raise InputError(f"{path}: holds no predicted {' or '.join(_TIMES)}")
        residuals = {}
        for name, of_time in ratios.items():
            rows = next(of_time[time] for time in _TIMES if time in of_time)
            alike = shares or Shares(measured=True)
            if alike.measured:
                logs = [(where, math.log(ratio)) for where, ratio in rows if ratio > 0]
                alike = Shares(user=alike.user, model=min(share_within(logs), 1.0 - alike.user))
            residuals[name] = cls([ratio for _, ratio in rows], seed, alike)
        return residuals

    def factor(self, job: TraceJob, number: int) -> float:
        if not self._shares.user and not self._shares.model:
            return random.Random(f"{self._seed}/{number}").choice(self._ratios)
        place = int(_NORMAL.cdf(self.normal(job, number)) * len(self._sorted))
        return self._sorted[min(place, len(self._sorted) - 1)]

    def belief(self, job: TraceJob, number: int) -> Belief:
        """What is true was predicted over such a ratio, so the interval is that of their inverses."""
        factor, count = self.factor(job, number), len(self._sorted)
        low, high = (self._sorted[min(int((1 - level) * count), count - 1)] for level in _LEVELS)
        return Belief(factor, factor / low, factor / high)


class Inverse(Estimates):
    """What truly happens where a forecast is given: the forecast over a drawn ratio; and the other way."""

    def __init__(self, of: Estimates) -> None:
        self._of = of

    def factor(self, job: TraceJob, number: int) -> float:
        return 1.0 / self._of.factor(job, number)


class Requested(Estimates):
    """The run time that users asked for; jobs without one are believed to take as long as the median asks."""

    def __init__(self) -> None:
        self._time_s: Callable[[TraceJob], float] = lambda job: job.duration_s or 1.0
        self._otherwise_s = _NOTHING_KNOWN_S

    def begin(self, jobs: Sequence[TraceJob], time_s: Callable[[TraceJob], float]) -> None:
        self._time_s = time_s
        asked = sorted(job.limit_s for job in jobs if job.limit_s is not None)
        if not asked:
            raise InputError("estimates: requested needs jobs with a limit_s, and this trace has none")
        self._otherwise_s = asked[len(asked) // 2]

    def factor(self, job: TraceJob, number: int) -> float:
        return (job.limit_s or self._otherwise_s) / self._time_s(job)


class History(Estimates):
    """The mean of the last two jobs of the same user and model that were over, undisturbed, by its arrival.

    Where there are none, of the same user; then of the same model; then of anybody, on as many GPUs.
    """

    def __init__(self) -> None:
        self._believed_s: dict[str, float] = {}
        self._time_s: Callable[[TraceJob], float] = lambda job: job.duration_s or 1.0

    def begin(self, jobs: Sequence[TraceJob], time_s: Callable[[TraceJob], float]) -> None:
        self._time_s = time_s
        last: Mapping[tuple[str, ...], deque[float]] = defaultdict(lambda: deque(maxlen=_LAST))
        ends: list[tuple[float, str, TraceJob]] = []
        for job in sorted(jobs, key=lambda job: job.arrival_s):
            while ends and ends[0][0] <= job.arrival_s:
                ended = heapq.heappop(ends)[2]
                for key in _alike(ended):
                    last[key].append(time_s(ended))
            known = next((last[key] for key in _alike(job) if key in last), None)
            believed_s = sum(known) / len(known) if known else job.limit_s or _NOTHING_KNOWN_S
            self._believed_s[job.name] = min(believed_s, job.limit_s or math.inf)
            heapq.heappush(ends, (job.arrival_s + time_s(job), job.name, job))

    def factor(self, job: TraceJob, number: int) -> float:
        return self._believed_s[job.name] / self._time_s(job)


def _alike(job: TraceJob) -> list[tuple[str, ...]]:
    """The company in which history looks for a job's like, closest first."""
    who, what = job.user or job.group, job.kind
    return [
        ("both", who, what, str(job.gpus)),
        ("user", who),
        ("model", what, str(job.gpus)),
        ("any", str(job.gpus)),
    ]


def spread_of(mape: float) -> float:
    """The sigma of a log-normal factor with median 1 whose mean absolute error is ``mape``.

    >>> round(spread_of(0.1), 4)
    0.1247
    """
    low, high = 0.0, 5.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if _mape_of(middle) < mape else (low, middle)
    return (low + high) / 2


def _mape_of(sigma: float) -> float:
    """E|exp(sigma Z) - 1|."""
    normal = 0.5 * (1 + math.erf(sigma / math.sqrt(2)))
    return math.exp(sigma * sigma / 2) * (2 * normal - 1)
