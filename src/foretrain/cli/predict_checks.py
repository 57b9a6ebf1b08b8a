"""Refuses options of ``predict`` that change nothing in the forecast of the job that was given."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from foretrain.errors import InputError

if TYPE_CHECKING:
    from foretrain.job import Job

Options = Mapping[str, Any]

_NEEDS_LENGTH = "of a whole training; give --steps, or --samples and --epochs"
_IDLE: Mapping[str, tuple[Callable[[Job], bool], str]] = {
    "schedule": (lambda job: job.plan.pipeline == 1, "orders the stages of a pipeline; give --pipeline"),
    "sequence_parallel": (lambda job: job.plan.tensor == 1, "splits norms beside --tensor; give it"),
    "optimizer": (lambda job: not job.trains, "inference has no optimizer"),
    "evaluate_every": (lambda job: job.workload.training.total_steps is None, _NEEDS_LENGTH),
    "checkpoint_every": (lambda job: job.workload.training.total_steps is None, _NEEDS_LENGTH),
    "node_mtbf": (lambda job: job.workload.training.total_steps is None, _NEEDS_LENGTH),
    "storage_bandwidth": (
        lambda job: job.workload.training.checkpoint_every is None,
        "checkpoints are written with it; give --checkpoint-every",
    ),
    "restart_time": (lambda job: job.cluster.node_mtbf is None, "failures cost it; give --node-mtbf"),
}
"""When an option changes nothing in the forecast of a job, and why."""


_OF_PLANS = ("schedule", "sequence_parallel")
"""What other plans than the job's own take over from it."""


def refuse_idle_options(job: Job, options: Options, *, other_plans: bool = False) -> None:
    """An error for the first option that changes nothing, in other plans of the job neither where these are
    forecast too; the same keys in a file stay legal, as files are of whole trainings and are shared."""
    for name, (is_idle, why) in _IDLE.items():
        if other_plans and name in _OF_PLANS:
            continue
        if options.get(name) not in (None, False) and is_idle(job):
            raise InputError(f"{_flag(name)}: changes nothing here: {why}")


def refuse_without(name: str, value: object, needed: str, *, there: bool) -> None:
    """An error for an option that only counts beside another."""
    if value is not None and not there:
        raise InputError(f"{_flag(name)}: changes nothing without {needed}")


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"
