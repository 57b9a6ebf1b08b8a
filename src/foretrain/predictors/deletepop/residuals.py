"""What a calibration's factors leave over, learned from a few runs: a Gaussian process over plans, sizes and
models."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from foretrain.job import Job

Matrix = npt.NDArray[np.float64]

_SPREADS = (0.1, 0.2, 0.4, 0.8)
"""Standard deviations of the residuals' logarithm that are tried."""
_LENGTHS = (1.0, 2.0, 4.0, 8.0)
"""Distances over which residuals are alike: doublings of a number; two different names lie two apart."""
_NOISES = (0.04, 0.1, 0.2)
_FAR = 3.0
"""Standard deviations beyond which a residual counts as no larger."""
_APART = 2.0
_LEAST = 8
"""Runs below which nothing is learned."""


@dataclass(frozen=True, eq=False)
class Residuals:
    """Factors on step times near runs that were seen; 1 far from all of them."""

    numbers: Matrix
    names: tuple[tuple[str, ...], ...]
    weights: Matrix
    spread: float
    length: float

    @classmethod
    def learn(cls, jobs: Sequence[Job], logs: Sequence[float]) -> Self | None:
        """From the logarithms of measured over forecast; None where runs left out are not forecast better
        with it."""
        if len(jobs) < _LEAST:
            return None
        numbers, names = np.array([_numbers(job) for job in jobs]), tuple(_names(job) for job in jobs)
        target = _without_outliers(np.asarray(logs, dtype=np.float64))
        best, least = None, float(np.mean(np.abs(np.expm1(-target))))
        for spread in _SPREADS:
            for length in _LENGTHS:
                for noise in _NOISES:
                    inverse = np.linalg.inv(
                        _kernel(numbers, names, numbers, names, spread, length)
                        + noise**2 * np.eye(len(target))
                    )
                    left_out = (
                        inverse @ target / np.diag(inverse)
                    )  # what each run's own residual is beside the forecast from the others
                    error = float(np.mean(np.abs(np.expm1(-left_out))))
                    if error < 0.98 * least:
                        best, least = cls(numbers, names, inverse @ target, spread, length), error
        return best

    def factor(self, job: Job) -> float:
        near = _kernel(
            np.array([_numbers(job)]), (_names(job),), self.numbers, self.names, self.spread, self.length
        )
        return math.exp(float((near @ self.weights).item()))

    def to_dict(self) -> dict[str, Any]:
        return {
            "numbers": self.numbers.tolist(), "names": [list(names) for names in self.names],
            "weights": self.weights.tolist(),
            "spread": self.spread, "length": self.length,
        }  # fmt: skip

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Self:
        names = tuple(tuple(one) for one in data["names"])
        return cls(
            np.array(data["numbers"]), names, np.array(data["weights"]), data["spread"], data["length"]
        )


def _without_outliers(logs: Matrix) -> Matrix:
    """Residuals that lie far from most are drawn in, so that one odd run does not decide for its
    neighbours."""
    middle = np.median(logs)
    reach = _FAR * 1.4826 * float(np.median(np.abs(logs - middle)))
    return np.asarray(np.clip(logs, middle - reach, middle + reach))


def _numbers(job: Job) -> list[float]:
    plan, training = job.plan, job.workload.training
    size = training.sequence or (training.image_shape[-1] if training.image_shape else 1)
    values = (
        plan.data or 1,
        plan.tensor,
        plan.pipeline,
        plan.context,
        plan.expert,
        job.micro_batch,
        job.accumulation,
        job.cluster.nodes,
        size,
    )
    return [math.log2(value) for value in values] + [
        math.log2(max(1, group.device.cores)) for group in job.cluster.groups[:1]
    ]


def _names(job: Job) -> tuple[str, ...]:
    model = job.workload.model
    return (
        f"{model.source} {model.name} {sorted((model.config or {}).items(), key=str)}",
        job.plan.shard,
        job.plan.recompute,
        job.plan.schedule,
        str(job.plan.sequence_parallel),
        job.workload.training.precision,
    )


def _kernel(
    left: Matrix,
    left_names: Sequence[Sequence[str]],
    right: Matrix,
    right_names: Sequence[Sequence[str]],
    spread: float,
    length: float,
) -> Matrix:
    distance = ((left[:, None, :] - right[None, :, :]) ** 2).sum(axis=-1)
    differing = np.array(
        [
            [sum(a != b for a, b in zip(one, other, strict=True)) for other in right_names]
            for one in left_names
        ]
    )
    return np.asarray(spread**2 * np.exp(-(distance + _APART**2 * differing) / (2 * length**2)))
