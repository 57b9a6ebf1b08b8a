"""Runs of one training at several scales, whose times follow a simple rule, and the Ray models in a hurry."""

from __future__ import annotations

import math
from typing import Any

from foretrain.job import Job
from foretrain.predictors.ray_models import RayModelsPredictor
from foretrain.predictors.ray_models.search import Budget
from foretrain.predictors.ray_models.techniques import Recipe
from foretrain.run import Run


def job(
    workers: int = 1,
    batch: int = 8,
    cores: int = 1,
    *,
    name: str = "model.py:net",
    plan: dict[str, Any] | None = None,
    **training: Any,
) -> Job:
    section = {"global_batch": batch * workers, "sequence": 16, **training}
    cluster = {"device": "cpu", "devices_per_node": workers, "cores_per_device": cores}
    return Job.read(
        {
            "model": {"source": "python", "name": name},
            "training": section,
            "cluster": cluster,
            "plan": plan or {},
        }
    )


def step_s(one: Job) -> float:
    """A training that computes by the batch over the cores, and exchanges by the logarithm of the workers."""
    workers, cores = one.cluster.world_size, one.cluster.device.cores or 1
    batch = one.workload.training.global_batch / workers
    computing_s = float(0.01 * batch / cores**0.9)
    return (0.02 + computing_s + 0.03 * math.log(workers)) * (1.5 if one.plan.servers else 1.0)


def run(one: Job, **measured: float) -> Run:
    return Run(job=one, measured=measured or {"step_time_s": step_s(one)})


def grid(
    workers: tuple[int, ...] = (1, 2, 4, 8),
    batches: tuple[int, ...] = (8, 16, 32),
    cores: tuple[int, ...] = (1,),
) -> list[Run]:
    return [run(job(count, batch, each)) for count in workers for batch in batches for each in cores]


QUICK = Budget(
    starters=(
        Recipe(mean="law"),
        Recipe(technique="gaussian process"),
        Recipe(mean="nnls"),
        Recipe(technique="ridge"),
    )
)
LEAST = Budget(starters=(Recipe(mean="nnls"), Recipe(technique="ridge")))
"""For what does not depend on how well runs are forecast."""


def blind(budget: Budget = QUICK) -> RayModelsPredictor:
    """Without our own forecast: these jobs name a model that does not exist."""
    return RayModelsPredictor(physics=None, budget=budget)
