"""Refuses jobs that the cluster can never run, and failures so frequent that nothing ends."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from foretrain.errors import InputError
from foretrain.scheduling import policies
from foretrain.scheduling.jobs import Refused, Trace, TraceJob
from foretrain.scheduling.machines import Machine, packed
from foretrain.scheduling.rules import Rules
from foretrain.scheduling.speeds import Speeds, UnknownLength
from foretrain.units import counted, format_seconds

if TYPE_CHECKING:
    from foretrain.scheduling.study import Scenario

_MOST_FAILURES = 1000
"""Of one job between two of its checkpoints: with more of them a simulation hardly ends."""


def runnable(trace: Trace, *scenarios: Scenario, needed: str | None = None) -> Trace:
    """The jobs that the cluster can run under all policies; the others are refused and counted by reason. The
    job of the name ``needed`` may not be among them."""
    distinct = list({(each.policy, each.in_rounds): each for each in scenarios}.values())
    speeds = distinct[0].speeds.make()
    reasons: dict[tuple[object, ...], str | None] = {}
    kept: list[TraceJob] = []
    counts, first = dict(trace.refused.counts), dict(trace.refused.first)
    for job in trace.jobs:
        sizes = (job.gpus, job.fewest, job.most)
        lengths = (job.duration_s is None, job.steps is None)
        key = (job.device, job.kind, sizes, lengths, job.partition, job.group, job.memory_bytes)
        if key not in reasons:
            reasons[key] = next(filter(None, (_why_refused(job, each, speeds) for each in distinct)), None)
        reason = reasons[key]
        if reason is None:
            kept.append(job)
        elif job.name == needed:
            raise InputError(f"when: the cluster can never run job {job.name!r}: {reason}")
        else:
            counts[reason] = counts.get(reason, 0) + 1
            first.setdefault(reason, job.name)
    if len(kept) == len(trace.jobs):
        return trace
    refused = Refused(counts=counts, first=first)
    if not kept:
        raise InputError(f"{trace.name}: the cluster can run none of its jobs ({'; '.join(refused.lines())})")
    return dataclasses.replace(trace, jobs=kept, refused=refused)


def _why_refused(job: TraceJob, scenario: Scenario, speeds: Speeds) -> str | None:
    mixed = scenario.settings.mixed_gangs
    policy = None if scenario.in_rounds else policies.get(scenario.policy)
    resizes, lends = policy is not None and policy.resizes, policy is not None and "cohorts" in policy.honours
    reason = _why_not(job, scenario.machines, speeds, resizes=resizes, mixed=mixed)
    return reason or _why_never_allowed(job, scenario.settings.rules, lends=lends)


def _why_not(
    job: TraceJob, machines: Sequence[Machine], speeds: Speeds, *, resizes: bool, mixed: bool
) -> str | None:
    """Why a cluster can never run a job; None where it can."""
    pools: dict[tuple[str, str], list[int]] = {}
    partitions = {machine.partition for machine in machines}
    if job.partition not in partitions and "" not in partitions:
        asked = job.partition or "no partition"
        return f"asks for {asked}, and the cluster has {', '.join(sorted(partitions))}"
    for machine in machines:
        if machine.partition in ("", job.partition) and job.device in (None, machine.device):
            pools.setdefault((machine.device, machine.partition), []).append(machine.gpus)
    if not pools:
        return f"asks for {job.device}, which the cluster has not"

    def runs(pool: tuple[str, str], gpus: int) -> bool:
        return speeds.rate(job, pool[0], packed(gpus, max(pools[pool]))) > 0

    if not (mixed and sum(sum(nodes) for pool, nodes in pools.items() if runs(pool, job.gpus)) >= job.gpus):
        sizes = {pool: sum(nodes) for pool, nodes in pools.items()}
        fewest, most = (job.fewest, job.most) if resizes else (job.gpus, job.gpus)
        large = [pool for pool, size in sizes.items() if size >= fewest]
        if not large:
            most = max(sizes.values())
            return f"needs more than the {counted(most, 'GPU')} of one kind that the cluster has"
        if not any(
            runs(pool, job.gpus)
            and any(runs(pool, gpus) for gpus in range(fewest, min(most, sizes[pool]) + 1))
            for pool in large
        ):
            return speeds.why_not(job, dict.fromkeys(device for device, _ in large))
    try:
        speeds.work(job)
    except UnknownLength as error:
        return error.why
    return None


def _why_never_allowed(job: TraceJob, rules: Rules, *, lends: bool) -> str | None:
    """Why the rules of a cluster never let a job run; None where they do."""
    queue = rules.queue(job.group)
    if queue.gpus is None:
        return None
    most = queue.gpus
    if lends and queue.cohort:
        together = sum(each.gpus or 0 for each in rules.queues.values() if each.cohort == queue.cohort)
        most = together if queue.borrow is None else min(together, queue.gpus + queue.borrow)
    return None if job.gpus <= most else f"needs more than the {most:,} GPUs of {job.group or 'its group'}"


def check_failures(trace: Trace, scenario: Scenario) -> None:
    """Refuse failures so frequent that jobs hardly ever reach their next checkpoint, wherever they run."""
    model, settings = scenario.settings.failures, scenario.settings
    in_node = max(machine.gpus for machine in scenario.machines)
    node_mtbf_s = max(model.mtbf_of(machine) for machine in scenario.machines)
    devices = {machine.device for machine in scenario.machines}
    job_mtbf_s = max(model.job_mtbf_of.get(device, model.job_mtbf_gpu_s) for device in devices)
    for job in trace.jobs:
        nodes = math.ceil(job.gpus / in_node)
        stretch_s = settings.restart_s + min(settings.checkpoint_every_s, job.duration_s or math.inf)
        rates = {"job_mtbf": job.gpus / job_mtbf_s, "node_mtbf": nodes / node_mtbf_s}
        if sum(rates.values()) > 0 and sum(rates.values()) * stretch_s > math.log(_MOST_FAILURES):
            name = max(rates, key=lambda which: rates[which])
            given_s = job_mtbf_s if name == "job_mtbf" else node_mtbf_s
            raise InputError(
                f"{name}: {format_seconds(given_s)} is too short: in the {format_seconds(stretch_s)} between "
                f"two checkpoints job {job.name!r} on {counted(job.gpus, 'GPU')} fails "
                f"more than {_MOST_FAILURES:,} times; give a longer one, or a shorter "
                "checkpoint_every or restart"
            )
