"""Adds up the time of a whole training: start-up, steps, waiting for data, evaluation, checkpoints and
restarts."""

from __future__ import annotations

import math
from dataclasses import dataclass

from foretrain.costs.startup import shipped
from foretrain.errors import InputError
from foretrain.estimate import Estimate, Factors
from foretrain.job import Job
from foretrain.units import format_bytes, format_count, format_seconds, parse_seconds

USUAL_STORAGE_BYTES_PER_S = 1e9
"""Of a node that writes a file to shared storage or an SSD of its own, where the job does not say."""
FORWARD_SHARE = 1 / 3
"""Of a step, where the forward pass is not known: the backward pass has twice its products."""
STORAGE_SPREAD = Factors(0.5, 0.7, 1.5, 3.0)
"""Around the rate that the job gives: files are laid out first, and others use the storage too (assumed)."""
USUAL_SPREAD = Factors(0.1, 0.25, 3.0, 6.0)
"""Around the rate that is assumed."""
_MOST_FAILURES = 50.0
"""Mean failures between two checkpoints beyond which a training never ends."""
_NORMAL_90, _NORMAL_975 = 1.2816, 1.9600


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSize:
    """Says what start-up and checkpoints depend on of a model."""

    operators: int
    """Distinct ones of the step's graph."""
    checkpoint_bytes: float
    """Parameters and optimizer state of the whole model."""
    calls: int | None = None
    """That launch kernels, in the forward and the backward pass; None where not every layer was traced."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DurationPart:
    """Holds a part of the time of a training, and where the figure comes from."""

    name: str
    time_s: Estimate
    source: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Duration:
    """The time of a whole training, from the start of its processes to their end, and its parts."""

    time_s: Estimate
    parts: tuple[DurationPart, ...]
    notes: tuple[str, ...] = ()

    @property
    def working_share(self) -> float:
        """Give the share of the time in which the devices work, on steps and evaluation; in the rest they are
        idle."""
        working_s = sum(part.time_s.median for part in self.parts if part.name in (STEPS, EVALUATION))
        return min(1.0, working_s / self.time_s.median) if self.time_s.median else 1.0


def duration(
    job: Job, step_time: Estimate, size: ModelSize | None = None, *, forward_s: float | None = None
) -> Duration | None:
    """The whole training of a job whose steps take this long; None where it does not say how long it is.

    ``forward_s`` is the forward pass of a step.
    """
    steps = job.workload.training.total_steps
    if steps is None:
        return None
    return of_steps(job, step_time * steps, size, forward_s=forward_s)


def of_steps(
    job: Job,
    steps_time: Estimate,
    size: ModelSize | None = None,
    *,
    forward_s: float | None = None,
    start: DurationPart | None = None,
) -> Duration:
    """Add up the whole training of a job whose steps take this long all together; ``start`` is the start-up,
    where it is known better."""
    steps = job.workload.training.total_steps
    assert steps is not None
    step_time, start = steps_time * (1 / steps), start or start_up(job, size)
    parts, notes = (
        [start, DurationPart(name=STEPS, time_s=steps_time, source=f"{steps:,} steps")],
        list[str](),
    )
    loop = steps_time
    for part in (_waiting(job, step_time, steps), _evaluation(job, step_time, steps, forward_s)):
        if part is not None:
            parts.append(part)
            loop = paced(job, step_time) * steps if part.name == DATA else loop + part.time_s
    checkpoints, note = _checkpoints(job, loop, steps, size)
    notes += note
    if checkpoints is not None:
        parts.append(checkpoints)
    restarts = _restarts(job, loop.median, start, checkpoints, size)
    if restarts is not None:
        parts.append(restarts)
        if checkpoints is None:
            notes.append("training.checkpoint_every is not given: a failure loses all steps before it")
    whole = loop
    for beside in (start, checkpoints, restarts):
        whole = whole if beside is None else whole.beside(beside.time_s)
    return Duration(time_s=whole, parts=tuple(parts), notes=tuple(notes))


# The parts

START, STEPS, DATA, EVALUATION, CHECKPOINTS, RESTARTS = (
    "start-up", "steps", "waiting for data", "evaluation", "checkpoints", "restarts",
)  # fmt: skip


def start_up(job: Job, size: ModelSize | None) -> DurationPart:
    """Time the start until steps run at their usual pace, beyond as many usual ones."""
    model, device = shipped(), job.cluster.groups[0].device.name
    compiled = bool(job.workload.training.compile)
    time_s = model.estimate(
        job.workload.model.source,
        None if size is None else size.operators,
        compiled=compiled,
        device=device,
        ranks=job.cluster.world_size,
        calls=None if size is None else size.calls,
    )
    phases = "imports, compiling" if compiled else "imports, first steps"
    return DurationPart(name=START, time_s=time_s, source=f"{phases}, as on {' and '.join(model.devices)}")


def paced(job: Job, step_time: Estimate) -> Estimate:
    """The time of a step that has to wait for its samples, where the job says how fast they come."""
    loading_s = batch_loading_s(job)
    return step_time if loading_s is None else step_time.at_least(loading_s)


def batch_loading_s(job: Job) -> float | None:
    """Seconds in which the loaders of all data-parallel ranks deliver a batch."""
    training, ranks = job.workload.training, (job.plan.data or 1)
    if training.loader_rate is None:
        return None
    return training.global_batch / (training.loader_rate * (training.loader_workers or 1) * ranks)


def _waiting(job: Job, step_time: Estimate, steps: int) -> DurationPart | None:
    loading_s = batch_loading_s(job)
    if loading_s is None:
        return None
    time_s = step_time.mapped(lambda step_s: steps * max(0.0, loading_s - step_s))
    source = f"loaders deliver a batch in {format_seconds(loading_s)}"
    return DurationPart(name=DATA, time_s=time_s, source=source)


def _evaluation(job: Job, step_time: Estimate, steps: int, forward_s: float | None) -> DurationPart | None:
    training = job.workload.training
    if training.evaluate_every is None or training.evaluate_samples is None:
        return None
    times = _times(job, training.evaluate_every, steps, paced(job, step_time).median)
    batches = math.ceil(training.evaluate_samples / training.global_batch)
    share = FORWARD_SHARE if forward_s is None else forward_s / step_time.median
    forward = step_time * share
    loading_s = batch_loading_s(job)
    batch = forward if loading_s is None else forward.at_least(loading_s)
    of = "a third of a step" if forward_s is None else "the forward pass"
    of = of if loading_s is None or loading_s <= forward.median else "waiting for data"
    source = f"{times:,} times {batches:,} batches of {format_seconds(batch.median)} ({of})"
    return DurationPart(name=EVALUATION, time_s=batch * (times * batches), source=source)


def _checkpoints(
    job: Job, loop: Estimate, steps: int, size: ModelSize | None
) -> tuple[DurationPart | None, tuple[str, ...]]:
    every = job.workload.training.checkpoint_every
    if every is None:
        return None, ()
    if size is None:
        raise InputError(
            f"training.checkpoint_every: the size of a checkpoint of {job.workload.model.label} is not known"
        )
    times = _times(job, every, steps, loop.median / steps)
    rate = job.cluster.storage_bandwidth
    once_s = _write_s(job, size)
    time_s = Estimate.around(times * once_s, USUAL_SPREAD if rate is None else STORAGE_SPREAD)
    source = f"{times:,} times {format_bytes(size.checkpoint_bytes)} in {format_seconds(once_s)}"
    usual = format_count(USUAL_STORAGE_BYTES_PER_S, "B/s")
    note = f"cluster.storage_bandwidth is not given: {usual} of each node that writes is assumed"
    return DurationPart(name=CHECKPOINTS, time_s=time_s, source=source), () if rate else (note,)


def _write_s(job: Job, size: ModelSize) -> float:
    """Steps stand still while a checkpoint is written: by the nodes that hold different parts of it."""
    rate = job.cluster.storage_bandwidth or USUAL_STORAGE_BYTES_PER_S
    return size.checkpoint_bytes / (rate * _writing_nodes(job))


def _writing_nodes(job: Job) -> int:
    """Count the nodes that write: all where state is sharded over replicas; else those of one replica, or the
    one of its first rank."""
    plan, cluster = job.plan, job.cluster
    if plan.shard != "none":
        return cluster.nodes
    per_node = max(group.devices_per_node for group in cluster.groups)
    different = plan.pipeline * max(plan.tensor, plan.expert * job.expert_tensor)
    return min(cluster.nodes, math.ceil(different / per_node))


def _restarts(
    job: Job, loop_s: float, start: DurationPart, checkpoints: DurationPart | None, size: ModelSize | None
) -> DurationPart | None:
    """Expected time that failures cost (Daly 2006, A higher order estimate of the optimum checkpoint
    interval): ``M e^(R/M) (e^((t + d)/M) - 1)`` for each ``t`` of work between checkpoints of ``d``."""
    cluster = job.cluster
    if cluster.node_mtbf is None:
        return None
    between_s = cluster.node_mtbf / cluster.nodes
    restart_s = cluster.restart_time
    if restart_s is None:
        restart_s = start.time_s.median + (_write_s(job, size) if checkpoints and size else 0.0)
    written_s = checkpoints.time_s.median if checkpoints else 0.0
    pieces = 1
    if checkpoints is not None and job.workload.training.checkpoint_every is not None:
        steps = job.workload.training.total_steps
        assert steps is not None
        pieces = max(1, _times(job, job.workload.training.checkpoint_every, steps, loop_s / steps))
    exposed = (loop_s + written_s) / pieces / between_s
    if exposed > _MOST_FAILURES or restart_s / between_s > _MOST_FAILURES:
        mtbf, piece = format_seconds(cluster.node_mtbf), format_seconds(exposed * between_s)
        raise InputError(
            f"cluster.node_mtbf: {mtbf} on {cluster.nodes:,} nodes is too short for {piece} between "
            "checkpoints: the training never ends"
        )
    expected_s = pieces * between_s * math.exp(restart_s / between_s) * math.expm1(exposed)
    lost_s = max(0.0, expected_s - loop_s - written_s)
    failures = expected_s / between_s
    off, off_95 = (quantile / math.sqrt(failures) for quantile in (_NORMAL_90, _NORMAL_975))
    spread = Factors(max(0.0, 1 - off_95), max(0.0, 1 - off), 1 + off, 1 + off_95)
    source = f"{failures:.3g} failures, a restart takes {format_seconds(restart_s)}"
    return DurationPart(name=RESTARTS, time_s=Estimate.around(lost_s, spread), source=source)


def _times(job: Job, every: int | str, steps: int, step_s: float) -> int:
    """Count how often something is done that is done every so many steps, every epoch, or after so much time;
    and at the end."""
    if every == "epoch":
        every = job.workload.training.steps_per_epoch or steps
    if isinstance(every, str):
        return math.ceil(steps * step_s / parse_seconds(every))
    return math.ceil(steps / every)
