"""Small jobs that plans are made for in tests: language models of a few layers, traced in a moment."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, ClassVar, Self

from foretrain.estimate import Estimate
from foretrain.forecast import Forecast
from foretrain.job import Job
from foretrain.planner.abilities import TARGETS
from foretrain.planner.clusters import Wanted
from foretrain.planner.goal import Goal
from foretrain.planner.outcome import Plans
from foretrain.planner.planning import Effort, make_plans, prepared, space_on
from foretrain.planner.space import Space
from foretrain.predictors import get
from foretrain.predictors.base import Predictor
from foretrain.run import Run

LLAMA = {
    "model_type": "llama", "hidden_size": 1024, "intermediate_size": 2816, "num_hidden_layers": 8,
    "num_attention_heads": 8, "num_key_value_heads": 2, "vocab_size": 32000,
}  # fmt: skip
MIXTRAL = {
    "model_type": "mixtral", "hidden_size": 512, "intermediate_size": 1024, "num_hidden_layers": 4,
    "num_attention_heads": 8, "num_key_value_heads": 4, "num_local_experts": 8, "vocab_size": 32000,
}  # fmt: skip


def job(config: dict[str, Any] = LLAMA, *, devices: int = 8, device: str = "h100", **training: Any) -> Job:
    """A language model on so many devices in nodes of eight."""
    nodes = {"devices_per_node": min(devices, 8), "nodes": max(1, devices // 8)}
    return Job.read(
        {
            "model": {"source": "transformers", "task": "causal-lm", "config": config},
            "training": {
                "global_batch": 16,
                "sequence": 1024,
                "precision": "bf16",
                "optimizer": "adamw",
                **training,
            },
            "cluster": {"device": device, **nodes},
        }
    )


def mixed(
    *groups: tuple[str, int, int],
    config: dict[str, Any] = LLAMA,
    plan: dict[str, Any] | None = None,
    **training: Any,
) -> Job:
    """A language model on groups of devices: each a device, how many a node has, and nodes."""
    found = [{"device": name, "devices_per_node": each, "nodes": nodes} for name, each, nodes in groups]
    return Job.read(
        {**job(config, devices=1, **training).to_dict(), "cluster": {"groups": found}, "plan": plan or {}}
    )


def space(target: str = "megatron", **options: Any) -> Space:
    made, _ = prepared(job(**options), TARGETS[target])
    return space_on(made.cluster, made, TARGETS[target], {})


def planned(made: Job, target: str = "megatron", **options: Any) -> Plans:
    """Plans by the roofline, which has nothing to load."""
    goal = options.pop("goal", Goal())
    wanted = options.pop("wanted", Wanted())
    effort = options.pop("effort", Effort(cached=False))
    return make_plans(
        made, get("roofline"), goal=goal, wanted=wanted, target=target, effort=effort, **options
    )


_STATES_BYTES = 4e9
"""Of a rank, more than what any of these models keeps."""


class ByTheBook(Predictor):
    """Forecasts by a formula, which traces nothing: every pass of a micro-batch waits for the host for some
    time, and devices hold so many samples at once."""

    name: ClassVar[str] = "by the book"
    quantities: ClassVar[frozenset[str]] = frozenset({"step_time_s", "peak_memory_bytes"})

    def __init__(self, *, host_s: float, sample_s: float, room: float) -> None:
        self.host_s, self.sample_s, self.room = host_s, sample_s, room

    def fit(self, runs: Iterable[Run]) -> Self:
        return self

    def predict(self, job: Job) -> Forecast:
        plan = job.plan
        per_device = job.micro_batch / plan.tensor
        gathering = 1.5 if plan.shard == "zero3" else 1.0
        recomputing = 1.3 if plan.recompute == "full" else 1.0
        pass_s = max(self.host_s * gathering, self.sample_s * per_device) * recomputing
        time_s = job.accumulation * (pass_s + 0.1 * self.host_s * (plan.tensor - 1))
        held = _STATES_BYTES + per_device / self.room / recomputing * job.cluster.device.memory_bytes
        return Forecast(
            job=job,
            predictor=self.name,
            quantities={
                "step_time_s": Estimate(time_s, 0.9 * time_s, 1.1 * time_s),
                "peak_memory_bytes": Estimate(held, 0.95 * held, 1.05 * held),
            },
        )
