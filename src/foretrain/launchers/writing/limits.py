"""Refuses what a launcher has no key for, and says what only the forecast knows of."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from foretrain.errors import InputError, invalid
from foretrain.job import Job
from foretrain.plan import Plan
from foretrain.workload import Training

Allowed = tuple[Any, ...] | Callable[[Any], bool] | None
"""Values of a field that a launcher can say, or what tells them; None: any."""

_EVERYWHERE: dict[str, Allowed] = {
    "training.global_batch": None, "training.mode": ("train",), "training.framework": None,
    "training.samples": None, "training.epochs": None, "training.steps": None, "training.allocator": None,
    "plan.data": None, "plan.micro_batch": None, "plan.balance": ("even",),
}  # fmt: skip
"""What every launcher can say."""

_ASSUMED = {
    "training.framework_version": "the files are for the version in their first line",
    "training.loader_rate": "how fast data comes is up to your loader",
    "training.loader_workers": "the loader is yours",
    "plan.expert_imbalance": "which experts tokens choose is up to the data",
    "plan.routing": "which experts tokens choose is up to the data; launchers force it in benchmarks alone",
}
"""What the forecast assumed and no training is told."""


OUR_PROGRAMS = {
    "training.evaluate_every": "train.py evaluates nothing",
    "training.evaluate_samples": "train.py evaluates nothing",
    "plan.schedule": "there is no pipeline",
}
"""What targets whose train.py is ours leave to the user."""


def overlaps_as_usual(overlap: Mapping[str, bool]) -> bool:
    """Whether gradients and parameters travel beside computation, and nothing else does."""
    return all(on == (name in ("gradients", "parameters")) for name, on in overlap.items())


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetLimits:
    """Says what a target can say of a job: a field that differs from its default and is in no table is
    refused."""

    target: str
    says: Mapping[str, Allowed]
    notes: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """Fields that it leaves to the user, and in which words."""
    otherwise: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """What is possible where a value of a field is not."""

    def check(self, job: Job) -> list[str]:
        """Refuse what the target cannot say; what it leaves out and the user should know."""
        left_out = []
        says = {**_EVERYWHERE, **self.says}
        for field, value in _fields(job):
            allowed = says.get(field)  # a default, such as sgd, may be no word of the target either
            if value is None or allowed is None:
                continue
            if not (allowed(value) if callable(allowed) else value in allowed):
                raise self.refused(field, value, allowed)
        for field, value in changed_fields(job):
            if field in says:
                continue
            if (why := {**_ASSUMED, **self.notes}.get(field)) is not None:
                left_out.append(f"{field} = {shown(value)}: {why}")
            else:
                raise self.refused(field, value, None)
        return left_out

    def refused(self, field: str, value: Any, allowed: Allowed) -> InputError:
        possible = self.otherwise.get(field)
        if possible is None and isinstance(allowed, tuple):
            possible = "it takes " + " or ".join(shown(one) for one in allowed if one is not None)
        return cannot(self.target, field, value, possible or "leave it out")


def cannot(target: str, field: str, value: Any, possible: str) -> InputError:
    """The standard message: ``plan.shard: 'zero2' is not something that fsdp2 can do; ...``."""
    return invalid(field, value, f"something that target {target} can launch; {possible}")


def _fields(job: Job) -> Iterator[tuple[str, Any]]:
    """Fields of the training and the plan, by their paths."""
    for section, noun in (("training", job.workload.training), ("plan", job.plan)):
        for item in dataclasses.fields(noun):
            yield f"{section}.{item.name}", getattr(noun, item.name)


def changed_fields(job: Job) -> list[tuple[str, Any]]:
    """List the fields that differ from their defaults."""
    usual = {
        f"{section}.{item.name}": item.default
        for section, noun in (("training", Training), ("plan", Plan))
        for item in dataclasses.fields(noun)
    }
    return [(field, value) for field, value in _fields(job) if value != usual[field]]


def shown(value: Any) -> str:
    """Write a value as a job file has it.

    >>> shown(True), shown((3, 4)), shown("none")
    ('true', '[3, 4]', 'none')
    """
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, tuple | list):
        return f"[{', '.join(shown(one) for one in value)}]"
    if isinstance(value, Mapping):
        return "{ " + ", ".join(f"{name} = {shown(one)}" for name, one in value.items()) + " }"
    return str(value)


def check_common(job: Job) -> None:
    """Refuse what no launch files can say."""
    if len(job.cluster.groups) > 1:
        kinds = ", ".join(f"{group.nodes} x {group.device.name}" for group in job.cluster.groups)
        raise InputError(f"cluster.groups: {kinds}: launch files are for nodes that are alike")
    if not job.trains:
        raise InputError("training.mode: 'infer' is not a training, and launch files start trainings")
    if job.plan.servers:
        raise InputError(
            f"plan.servers: {job.plan.servers} cannot be launched; no target has parameter servers"
        )
