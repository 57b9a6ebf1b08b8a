"""Generates traces from a few figures and a seed."""

from __future__ import annotations

import dataclasses
import itertools
import math
import random
from collections.abc import Callable
from dataclasses import dataclass

from foretrain.errors import InputError, invalid
from foretrain.scheduling.jobs import Trace, TraceJob
from foretrain.units import parse_seconds

_WIDEST = 10
"""Sigma beyond which durations are no numbers any more."""
MOST_JOBS = 10_000_000
"""A million take a gigabyte of memory."""
_SIZES: dict[int, float] = {1: 0.72, 2: 0.08, 4: 0.1, 8: 0.1}
"""GPUs of a job and how often: roughly what public traces show."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceGenerator:
    """Poisson arrivals, log-normal durations, GPUs in powers of two."""

    jobs: int = 1000
    gap_s: float = 60.0
    """Mean time between arrivals."""
    median_s: float = 1800.0
    spread: float = 1.5
    """Sigma of the logarithm of durations."""
    groups: int = 4
    elastic: float = 0.0
    """Share of jobs that may shrink to one GPU and grow to twice what they ask for."""
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("jobs", "gap_s", "median_s", "groups"):
            if not getattr(self, name) > 0:
                raise invalid(f"generate.{name}", getattr(self, name), "above zero")
        if self.jobs > MOST_JOBS:
            raise invalid("generate.jobs", self.jobs, f"at most {MOST_JOBS:,}")
        if not 0 <= self.elastic <= 1:
            raise invalid("generate.elastic", self.elastic, "a share from 0 to 1")
        if not 0 <= self.spread <= _WIDEST:
            raise invalid("generate.spread", self.spread, f"a number from 0 to {_WIDEST}")

    @classmethod
    def read(cls, text: str) -> TraceGenerator:
        """From ``jobs=500,gap=30s,median=20min,spread=1.2,groups=3,elastic=0.5,seed=1``, or a part of it.

        >>> TraceGenerator.read("jobs=5,gap=30s").gap_s
        30.0
        """
        fields: dict[str, Callable[[str], float]] = {
            "jobs": int,
            "gap": lambda text: parse_seconds(text, "generate.gap"),
            "median": lambda text: parse_seconds(text, "generate.median"),
            "spread": float,
            "groups": int,
            "elastic": float,
            "seed": int,
        }
        values: dict[str, float] = {}
        for part in filter(None, text.split(",")):
            name, _, value = part.partition("=")
            if name not in fields:
                raise invalid("generate", part, f"one of {', '.join(fields)} = a value")
            field = name + "_s" if name in ("gap", "median") else name
            if field in values:
                raise InputError(f"generate.{name}: {value!r} is a second value; give one")
            try:
                values[field] = fields[name](value)
            except ValueError as error:
                raise invalid(f"generate.{name}", value, "a number") from error
        return cls(**values)  # type: ignore[arg-type]

    def trace(self) -> Trace:
        """The jobs; the same seed gives the same ones."""
        draw = random.Random(self.seed)
        sizes, weights = list(_SIZES), list(itertools.accumulate(_SIZES.values()))
        jobs, now_s = [], 0.0
        for number in range(self.jobs):
            gpus = draw.choices(sizes, cum_weights=weights)[0]
            elastic = draw.random() < self.elastic
            jobs.append(
                TraceJob(
                    name=f"job-{number + 1}",
                    arrival_s=now_s,
                    gpus=gpus,
                    duration_s=draw.lognormvariate(math.log(self.median_s), self.spread),
                    group=f"group-{draw.randrange(self.groups) + 1}",
                    least_gpus=1 if elastic else None,
                    most_gpus=2 * gpus if elastic else None,
                )
            )
            now_s += draw.expovariate(1 / self.gap_s)
        return Trace(name=f"generated, seed {self.seed}", format="generated", jobs=jobs)


def redrawn(trace: Trace, seed: int) -> Trace:
    """Another workload like the trace: blocks of jobs that came one after another, drawn with replacement.

    Blocks are as many as each has jobs, so that bursts stay together and days do not. Seed 0 is the trace.
    """
    count = len(trace.jobs)
    if seed == 0 or count < 4:
        return trace
    size = max(2, round(math.sqrt(count)))
    starts = list(range(0, count, size))
    jobs: list[TraceJob] = []
    draw, now_s = random.Random(f"redrawn/{seed}"), trace.jobs[0].arrival_s
    for block in draw.choices(starts, k=len(starts)):
        chosen = trace.jobs[block : block + size]
        after = trace.jobs[block + size] if block + size < count else None
        gap_s = (trace.jobs[-1].arrival_s - trace.jobs[0].arrival_s) / (count - 1)
        span_s = (
            after.arrival_s - chosen[0].arrival_s
            if after
            else chosen[-1].arrival_s - chosen[0].arrival_s + gap_s
        )
        for job in chosen:
            arrival_s = now_s + job.arrival_s - chosen[0].arrival_s
            jobs.append(dataclasses.replace(job, name=f"{job.name}~{len(jobs)}", arrival_s=arrival_s))
        now_s += span_s
    return dataclasses.replace(trace, jobs=jobs)
