"""Learns what a calibration's factors leave over from a few runs: a Gaussian process over plans, sizes and
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

_SPREAD = 0.15
"""Standard deviation of what is left over, as a logarithm."""
_LENGTH = 2.0
"""The distance over which it is alike: doublings of a number."""
_APART = 2.0
"""How far two different names lie apart."""
_WEIGHTS = {"data": 0.5, "accumulation": 0.5}
"""Doublings that count for less: a step repeats its work as often as it accumulates, and replicas are
alike."""


@dataclass(frozen=True, eq=False)
class Residuals:
    """Factors on step times near runs that were seen; 1 far from all of them."""

    numbers: Matrix
    names: tuple[tuple[str, ...], ...]
    weights: Matrix

    @classmethod
    def of(cls, jobs: Sequence[Job], logs: Matrix, noise: Matrix) -> Self:
        """Learn from the logarithms of measured over forecast, and the standard deviation of each."""
        covariance = covariances(jobs) + np.diag(noise**2)
        return cls(
            np.array([_numbers(job) for job in jobs]),
            tuple(_names(job) for job in jobs),
            np.asarray(np.linalg.solve(covariance, logs), dtype=np.float64),
        )

    def factor(self, job: Job) -> float:
        near = _kernel(np.array([_numbers(job)]), (_names(job),), self.numbers, self.names)
        return math.exp(float((near @ self.weights).item()))

    def to_dict(self) -> dict[str, Any]:
        names = [list(names) for names in self.names]
        return {"numbers": self.numbers.tolist(), "names": names, "weights": self.weights.tolist()}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Self:
        names = tuple(tuple(one) for one in data["names"])
        return cls(np.array(data["numbers"]), names, np.array(data["weights"]))


def covariances(jobs: Sequence[Job]) -> Matrix:
    """Say how what is left over of the jobs' steps varies together, as logarithms."""
    numbers, names = np.array([_numbers(job) for job in jobs]), [_names(job) for job in jobs]
    return _kernel(numbers, names, numbers, names)


def _numbers(job: Job) -> list[float]:
    plan, training = job.plan, job.workload.training
    size = training.sequence or (training.image_shape[-1] if training.image_shape else 1)
    values = {
        "data": plan.data or 1,
        "tensor": plan.tensor,
        "pipeline": plan.pipeline,
        "context": plan.context,
        "expert": plan.expert,
        "micro_batch": job.micro_batch,
        "accumulation": job.accumulation,
        "nodes": job.cluster.nodes,
        "size": size,
        "cores": max(1, job.cluster.groups[0].device.cores),
    }
    return [_WEIGHTS.get(name, 1.0) * math.log2(value) for name, value in values.items()]


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
    left: Matrix, left_names: Sequence[Sequence[str]], right: Matrix, right_names: Sequence[Sequence[str]]
) -> Matrix:
    distance = ((left[:, None, :] - right[None, :, :]) ** 2).sum(axis=-1)
    differing = np.array(
        [
            [sum(a != b for a, b in zip(one, other, strict=True)) for other in right_names]
            for one in left_names
        ]
    )
    return np.asarray(_SPREAD**2 * np.exp(-(distance + _APART**2 * differing) / (2 * _LENGTH**2)))
