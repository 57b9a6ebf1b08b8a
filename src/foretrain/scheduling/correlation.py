"""Measures how alike errors are within groups: of the variance, the share that a user or a model explains."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from foretrain.errors import InputError, invalid
from foretrain.scheduling.jobs import TraceJob

_MOST = 0.95
"""Of the variance, that users and models together may explain: no two jobs are the same."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shares:
    """Of the variance of errors' logarithms, what is common to the jobs of a user, and of a model."""

    user: float = 0.0
    model: float = 0.0
    measured: bool = False
    """Whether that of a model is to be measured where residuals tell it."""

    def __post_init__(self) -> None:
        for name in ("user", "model"):
            if not 0 <= getattr(self, name) <= 1:
                raise invalid(f"correlation.{name}", getattr(self, name), "a share from 0 to 1")
        if self.user + self.model > 1:
            both = f"user {self.user} and model {self.model}"
            raise InputError(f"correlation: {both} are more than the whole")

    @property
    def alone(self) -> float:
        return 1.0 - self.user - self.model

    @classmethod
    def read(cls, text: str) -> Shares:
        """From ``user=0.2,model=0.5``, or a part of it."""
        values = {}
        for part in filter(None, text.split(",")):
            name, _, value = (piece.strip() for piece in part.partition("="))
            try:
                values[{"user": "user", "model": "model"}[name]] = float(value)
            except (KeyError, ValueError) as error:
                raise invalid("correlation", part, "user=SHARE or model=SHARE, joined by commas") from error
        return cls(user=values.get("user", 0.0), model=values.get("model", 0.0))


def share_within(rows: Sequence[tuple[str, float]]) -> float:
    """The intraclass correlation of values by group, from the two mean squares; 0 where groups do not tell.

    >>> share_within([("a", 1.0), ("a", 1.1), ("b", 3.0), ("b", 3.1)]) > 0.9
    True
    >>> share_within([("a", 1.0), ("a", 3.0), ("b", 1.0), ("b", 3.0)])
    0.0
    """
    groups: dict[str, list[float]] = {}
    for name, value in rows:
        groups.setdefault(name, []).append(value)
    count, kinds = len(rows), len(groups)
    if kinds < 2 or count <= kinds:
        return 0.0
    mean = sum(value for _, value in rows) / count
    means = {name: sum(values) / len(values) for name, values in groups.items()}
    between = sum(len(values) * (means[name] - mean) ** 2 for name, values in groups.items()) / (kinds - 1)
    within = sum((value - means[name]) ** 2 for name, value in rows) / (count - kinds)
    size = (count - sum(len(values) ** 2 for values in groups.values()) / count) / (kinds - 1)
    total = between + (size - 1) * within
    return min(max((between - within) / total, 0.0), _MOST) if total > 0 else 0.0


def user_share(jobs: Sequence[TraceJob]) -> float:
    """How alike the run times asked for are within users, beside those that jobs took; 0 without any."""
    rows = [
        (job.user, math.log(job.limit_s / job.duration_s))
        for job in jobs
        if job.limit_s is not None and job.duration_s is not None and job.user
    ]
    return share_within(rows)
