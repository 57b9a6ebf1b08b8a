"""Runs of image models on CPU workers whose times are those of Ernest's law."""

from __future__ import annotations

from typing import Any

import numpy as np

from foretrain.job import Job
from foretrain.predictors.ernest import terms
from foretrain.run import Run


def job(
    name: str = "resnet18",
    workers: int = 1,
    batch: int = 16,
    plan: dict[str, Any] | None = None,
    **training: Any,
) -> Job:
    section = {"global_batch": batch * workers, "image": 32, "classes": 10, **training}
    cluster = {"device": "cpu", "devices_per_node": workers, "cores_per_device": 1}
    return Job.read(
        {
            "model": {"source": "torchvision", "name": name},
            "training": section,
            "cluster": cluster,
            "plan": plan or {},
        }
    )


def law_s(one: Job, coefficients: tuple[float, ...]) -> float:
    return float(np.dot(terms(one), coefficients))


def runs(coefficients: tuple[float, ...], name: str = "resnet18") -> list[Run]:
    jobs = [job(name, workers, batch) for workers in (1, 2, 4, 8) for batch in (8, 16)]
    return [Run(job=one, measured={"step_time_s": law_s(one, coefficients)}) for one in jobs]
