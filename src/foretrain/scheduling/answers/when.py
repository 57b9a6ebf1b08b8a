"""Answers when a job would start and end, with intervals, by playing the queue with drawn errors.

What the trace says of a job's length is taken as what is expected of it; how long it really takes is drawn,
in every draw anew for all jobs, as far off as estimates are known to be. Policies see what is expected.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from foretrain.errors import InputError, invalid, unknown
from foretrain.scheduling.jobs import Trace, TraceJob, in_order
from foretrain.scheduling.spreading import Spreader
from foretrain.scheduling.study import Scenario
from foretrain.units import parse_seconds

DRAWS = 40
USUAL_ERROR = 0.3
"""Mean absolute error of estimates, where nothing is said about them."""
_LEVELS = (10.0, 50.0, 90.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Times:
    """Seconds: the median, and an interval that holds four of five draws."""

    low_s: float
    median_s: float
    high_s: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Times:
        low, median, high = (float(value) for value in np.percentile(values, _LEVELS))
        return cls(low_s=low, median_s=median, high_s=high)


@dataclass(frozen=True, slots=True, kw_only=True)
class Eta:
    """When a job starts and ends under a policy, from its arrival on."""

    policy: str
    estimates: str
    """How far off those are of which lengths are drawn."""
    job: TraceJob
    waits: Times
    ends: Times
    draws: int

    def to_dict(self) -> dict[str, Any]:
        return {
            "policy": self.policy,
            "estimates": self.estimates,
            "job": self.job.name,
            "gpus": self.job.gpus,
            "arrival_s": self.job.arrival_s,
            "starts_after": dataclasses.asdict(self.waits),
            "ends_after": dataclasses.asdict(self.ends),
            "draws": self.draws,
        }


_FIELDS = {"gpus": "gpus", "time": "duration_s", "at": "arrival_s", "limit": "limit_s"}
_TEXTS = ("group", "user", "kind", "partition", "device")


def job_in_words(text: str, jobs: Sequence[TraceJob]) -> TraceJob:
    """A job of one's own: ``gpus=8,time=3h``, and ``at`` (from the first arrival on, else with the last),
    ``limit``, ``group``, ``user``, ``kind``, ``partition``, ``device``, ``priority``."""
    values: dict[str, Any] = {}
    known = (*_FIELDS, *_TEXTS, "priority")
    for part in text.split(","):
        key, equals, value = (piece.strip() for piece in part.partition("="))
        if not equals or key not in known:
            raise invalid(
                "when", part, f"a job's name, or parts such as gpus=8,time=3h with {', '.join(known)}"
            )
        try:
            if key in ("time", "at", "limit"):
                values[_FIELDS[key]] = 0.0 if value == "0" else parse_seconds(value, f"when: {key}")
            else:
                values[key] = value if key in _TEXTS else int(value) if key == "gpus" else float(value)
        except ValueError as error:
            raise invalid(f"when: {key}", value, "a number") from error
    if "duration_s" not in values:
        raise InputError("when: a job of your own needs a time, such as time=3h")
    last_s = max(job.arrival_s for job in jobs)
    return TraceJob(name="yours", **{"gpus": 1, "arrival_s": last_s, **values})


def with_job(trace: Trace, which: str) -> tuple[Trace, str]:
    """The trace with the job that is asked about, by its name or in words, and its name."""
    names = {job.name for job in trace.jobs}
    if which in names:
        return trace, which
    if "=" not in which:
        raise unknown("when: job", which, [job.name for job in trace.jobs])
    asked_job = job_in_words(which, trace.jobs)
    while asked_job.name in names:
        asked_job = dataclasses.replace(asked_job, name=f"{asked_job.name}'")
    return dataclasses.replace(
        trace, jobs=in_order([*trace.jobs, asked_job], from_zero=False)
    ), asked_job.name


def etas(
    trace: Trace,
    scenarios: Sequence[Scenario],
    name: str,
    *,
    draws: int = DRAWS,
    processes: int | None = None,
    ray: str | None = None,
    done: Callable[[int], None] = lambda _: None,
) -> list[Eta]:
    """Of one job of the trace, under each scenario's policy."""
    if draws < 2:
        raise invalid("draws", draws, "a whole number of at least 2")
    number, job = next((place, each) for place, each in enumerate(trace.jobs) if each.name == name)
    items = [
        (dataclasses.replace(scenario, seed=seed), number) for scenario in scenarios for seed in range(draws)
    ]
    with Spreader(_draw, trace, processes=processes, ray=ray) as spread:
        drawn = spread.run(items, done)
    answers = []
    for place, scenario in enumerate(scenarios):
        own_draws = drawn[place * draws : (place + 1) * draws]
        answers.append(
            Eta(
                policy=scenario.policy,
                estimates=scenario.estimates_are,
                job=job,
                waits=Times.of([start - job.arrival_s for start, _ in own_draws]),
                ends=Times.of([end - job.arrival_s for _, end in own_draws]),
                draws=draws,
            )
        )
    return answers


def _draw(trace: Trace, item: tuple[Scenario, int]) -> tuple[float, float]:
    """Start and end of a job in one draw."""
    scenario, number = item
    result = scenario.run(with_drawn_lengths(trace, scenario))
    return float(result.start_s[number]), float(result.finish_s[number])


def with_drawn_lengths(trace: Trace, scenario: Scenario) -> Trace:
    """The trace with the lengths that jobs really have, so that its own are the estimates of them."""
    estimates = scenario.estimates()

    def really(number: int, job: TraceJob) -> TraceJob:
        factor = estimates.factor(job, number)
        return dataclasses.replace(
            job,
            duration_s=None if job.duration_s is None else job.duration_s / factor,
            steps=None if job.steps is None else job.steps / factor,
        )

    return dataclasses.replace(trace, jobs=[really(number, job) for number, job in enumerate(trace.jobs)])
