"""Names the single changes of a job that help most: each is forecast, and those that are faster and fit are
told with their gain."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from foretrain.errors import ForetrainError
from foretrain.forecast import Forecast
from foretrain.job import Job
from foretrain.planner.abilities import Ability, ability_of
from foretrain.predictors.base import Predictor
from foretrain.predictors.fitting_changes import SAFE_CHANCE, JobChange, changed
from foretrain.progress import tell

MOST = 3
_LEAST_GAIN = 0.01
_COMPILES = ("pytorch", "torchtitan", "automodel", "fms-fsdp", "llm-foundry", "deepspeed")
"""Frameworks whose models torch.compile takes."""
_OTHER_NUMBERS = ("training.precision", "training.optimizer")
"""Fields whose change trains otherwise."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Suggestion:
    """A change and what it brings."""

    change: str
    fields: Mapping[str, Any]
    faster: float
    """Samples per second, as a share more: 0.12 is 12 % more."""
    forecast: Forecast

    @property
    def changes_numbers(self) -> bool:
        return any(name in _OTHER_NUMBERS for name in self.fields)

    def to_dict(self) -> dict[str, Any]:
        return {
            "change": self.change,
            "fields": dict(self.fields),
            "gain": self.faster,
            "changes_numbers": self.changes_numbers,
            "step_time_s": self.forecast["step_time_s"].to_dict(),
            "out_of_memory_chance": self.forecast.out_of_memory_chance,
        }


def suggestions(forecast: Forecast, predictor: Predictor) -> list[Suggestion]:
    """The changes that help most, the best first; a job that may run out of memory may go on to."""
    job = forecast.job
    rate = forecast.quantities.get("samples_per_s")
    if rate is None:
        return []
    faster = []
    allowed = max(SAFE_CHANCE, forecast.out_of_memory_chance or 0.0)
    for change in _changes(job):
        tell(f"trying {change.words}")
        try:
            other = predictor.predict(change.job)
        except ForetrainError:
            continue
        gain = other["samples_per_s"].median / rate.median - 1.0
        if gain >= _LEAST_GAIN and (other.out_of_memory_chance or 0.0) <= allowed:
            faster.append(Suggestion(change=change.words, fields=change.fields, faster=gain, forecast=other))
    faster.sort(key=lambda one: (one.changes_numbers, -one.faster))
    return sorted(faster[: 2 * MOST], key=lambda one: -one.faster)[:MOST]


def _changes(job: Job) -> Iterator[JobChange]:
    """Jobs that differ from this one in one thing; what cannot be made is left out."""
    start = JobChange(job=job, words="", fields={})
    ability = ability_of(None, job.workload.training.framework)
    for words, section, fields in _ideas(job, ability):
        try:
            yield changed(start, words, **{section: fields})
        except ForetrainError:
            continue


def _ideas(job: Job, ability: Ability) -> Iterator[tuple[str, str, dict[str, Any]]]:
    yield from _of_numbers(job)
    yield from _of_kernels(job)
    if job.trains:
        yield from _of_passes(job, ability)
    if job.cluster.world_size > 1:
        yield from _of_replicas(job, ability)
        yield from _of_degrees(job, ability)


def _of_numbers(job: Job) -> Iterator[tuple[str, str, dict[str, Any]]]:
    precision, devices = job.workload.training.precision, [group.device for group in job.cluster.groups]
    if any(device.is_cpu for device in devices):
        return
    if precision == "fp32" and all(device.tf32 for device in devices):
        yield "precision tf32", "training", {"precision": "tf32"}
    if precision in ("fp32", "tf32") and all(device.bf16 for device in devices):
        yield "precision amp-bf16", "training", {"precision": "amp-bf16"}
    if precision in ("bf16", "amp-bf16") and all(device.fp8 for device in devices):
        yield "precision fp8", "training", {"precision": "fp8"}


def _of_kernels(job: Job) -> Iterator[tuple[str, str, dict[str, Any]]]:
    training, model = job.workload.training, job.workload.model
    if not training.compile and training.framework in _COMPILES:
        yield "compile", "training", {"compile": True}
    if training.optimizer in ("adam", "adamw") and job.trains:
        yield "a fused optimizer", "training", {"optimizer": f"{training.optimizer}-fused"}
    if (
        not training.channels_last
        and model.source in ("timm", "torchvision")
        and training.precision != "fp32"
    ):
        yield "channels_last", "training", {"channels_last": True}
    if (model.config or {}).get("attn_implementation") == "eager" or training.attention == "eager":
        yield "attention flash", "training", {"attention": "flash"}


def _of_passes(job: Job, ability: Ability) -> Iterator[tuple[str, str, dict[str, Any]]]:
    plan, micro = job.plan, job.micro_batch
    of_rank = job.workload.training.global_batch // (plan.data or 1)
    for size in (micro * 2, micro * 4, of_rank, *([micro // 2] if micro % 2 == 0 else [])):
        if size != micro and size <= of_rank and of_rank % size == 0:
            yield f"micro_batch {size}", "plan", {"micro_batch": size}
    if plan.recompute != "none":
        yield "recompute none", "plan", {"recompute": "none", "recompute_every": 1, "recompute_modules": ()}
        for other in ability.recomputes:
            if other not in ("none", "full", plan.recompute):
                fields = {"recompute": other, "recompute_every": 1, "recompute_modules": ()}
                yield f"recompute {other}", "plan", fields
    if plan.offload:
        yield "no offload", "plan", {"offload": False}
    if plan.offload_activations:
        yield "activations on the device", "plan", {"offload_activations": False}


def _of_replicas(job: Job, ability: Ability) -> Iterator[tuple[str, str, dict[str, Any]]]:
    plan, ranks, nodes = job.plan, (job.plan.data or 1) * job.plan.context, job.cluster.nodes
    if ranks == 1 or plan.servers or not job.trains:
        return
    for shard in ("none", *ability.shards):
        if shard != plan.shard:
            yield f"shard {shard}", "plan", {"shard": shard, "replicate": 1, "reshard": None}
    if plan.shard == "zero3":
        if plan.reshard is not False:
            yield "parameters kept gathered (reshard false)", "plan", {"reshard": False}
        if nodes > 1 and plan.replicate == 1 and (plan.data or 1) % nodes == 0:
            yield f"sharded inside nodes alone (replicate {nodes})", "plan", {"replicate": nodes}
    overlap = dict(plan.overlap or {})
    for name in ("gradients", "parameters"):
        if overlap.get(name) is False:
            yield f"overlap of {name}", "plan", {"overlap": {**overlap, name: True}}


def _of_degrees(job: Job, ability: Ability) -> Iterator[tuple[str, str, dict[str, Any]]]:
    plan, data = job.plan, job.plan.data or 1
    for name in ("tensor", "pipeline", "context"):
        if name not in ability.degrees:
            continue
        own = getattr(plan, name)
        for degree in (own // 2, own * 2):
            if degree < 1 or (data * own) % degree or degree == own:
                continue
            fields: dict[str, Any] = {name: degree, "data": data * own // degree}
            if name == "tensor":
                fields["sequence_parallel"] = degree > 1 and ability.cuts_sequences
            yield f"{name} {degree} (data {fields['data']})", "plan", fields
    if plan.tensor > 1 and ability.cuts_sequences and not plan.sequence_parallel:
        yield "sequence_parallel", "plan", {"sequence_parallel": True}
    if plan.pipeline > 1 and job.trains:
        for schedule in ability.schedules:
            if schedule != plan.schedule:
                yield f"schedule {schedule}", "plan", {"schedule": schedule, "virtual_stages": None}
