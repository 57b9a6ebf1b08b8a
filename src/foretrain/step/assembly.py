"""Assembles the forecast of a step: quantities with intervals, what bounds it, and what was assumed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import numpy as np

from foretrain.costs.roofline import arithmetic
from foretrain.duration import duration, start_up
from foretrain.forecast import Estimate, Factors, Forecast, RankMemory, fullest_of, whole_training
from foretrain.graph import PHASES
from foretrain.job import Job
from foretrain.step.frameworks import logged_stage
from foretrain.step.partition import virtual_stages
from foretrain.step.play import Step
from foretrain.step.state import model_size

MEMORY_QUANTITIES = frozenset({"peak_memory_bytes", "reserved_memory_bytes"})
QUANTITIES = MEMORY_QUANTITIES | {
    "step_time_s", "forward_time_s", "backward_time_s", "optimizer_time_s", "device_busy_s", "host_issue_s",
    "kernels",
    "samples_per_s", "tokens_per_s", "epoch_time_s", "total_time_s", "startup_time_s", "device_utilization",
    "memory_utilization", "power_w",
    "network_tx_bytes_per_s", "network_rx_bytes_per_s",
}  # fmt: skip

IDLE_POWER = 0.15
"""Share of the TDP that an idle accelerator draws."""
HOST_BOUND = 0.8
"""Share of the step that the device works, below which the host bounds a step that waits for it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Spread:
    """How far measured runs lie from the median, per kind of quantity."""

    time: Factors
    memory: Factors
    count: Factors
    """Of kernels and of power, which do not follow the time."""
    quantities: Mapping[str, Factors] = field(default_factory=dict)
    """Where a quantity's own spread is known."""

    def around(self, quantity: str, median: float) -> Estimate:
        kind = self.time
        if quantity in MEMORY_QUANTITIES:
            kind = self.memory
        elif quantity in ("kernels", "power_w"):
            kind = self.count
        bounds = [median * factor for factor in self.quantities.get(quantity, kind)]
        if quantity in ("device_utilization", "memory_utilization"):
            bounds = [min(bound, max(median, 1.0)) for bound in bounds]
        return Estimate(median, bounds[1], bounds[2], bounds[0], bounds[3])


def assemble(step: Step, spread: Spread, *, predictor: str, notes: tuple[str, ...] = ()) -> Forecast:
    """The forecast of the job whose step this is."""
    job, step_time = step.layout.job, spread.around("step_time_s", step.time_s)
    size, forward_s = model_size(job, step.layout.graph), step.phases_s["forward"]
    whole = duration(job, step_time, size, forward_s=forward_s)
    quantities = whole_training(job, step_time, size, forward_s=forward_s)
    quantities["startup_time_s"] = start_up(job, size).time_s
    quantities.update({name: spread.around(name, value) for name, value in _medians(step).items()})
    return Forecast(
        job=job,
        predictor=predictor,
        quantities=quantities,
        bound=_bound(step),
        assumptions=(*_assumptions(step), *(whole.notes if whole else ()), *notes),
        ranks=step.memory,
        duration=whole,
        step=step,
    )


def logged(step: Step) -> RankMemory:
    """The rank whose memory the framework would report."""
    stage = logged_stage(step.layout.job)
    return fullest_of(step.memory) if stage < 0 else step.memory[stage]


def _medians(step: Step) -> dict[str, float]:
    job, rank = step.layout.job, logged(step)
    phases = ("forward",) if job.workload.training.mode == "infer" else tuple(step.phases_s)
    utilization = min(1.0, step.device_busy_s / step.time_s) if step.time_s else 0.0
    memory_rate = min(group.device.memory_bytes_per_s for group in job.cluster.groups)
    medians = {
        **{f"{phase}_time_s": step.phases_s[phase] for phase in phases},
        "device_busy_s": step.device_busy_s,
        "host_issue_s": step.host_issue_s,
        "kernels": step.kernels,
        "device_utilization": utilization,
        "memory_utilization": min(1.0, step.bytes_moved / (step.time_s * memory_rate))
        if step.time_s
        else 0.0,
        "peak_memory_bytes": rank.allocated_bytes,
        "reserved_memory_bytes": rank.reserved_bytes,
    }
    if job.cluster.world_size > 1:
        rate = step.sent_bytes / step.time_s
        medians |= {"network_tx_bytes_per_s": rate, "network_rx_bytes_per_s": rate}
    powers = [group.device.tdp_w for group in job.cluster.groups]
    if all(powers):
        highest = max(power for power in powers if power)
        medians["power_w"] = highest * (IDLE_POWER + (1 - IDLE_POWER) * utilization)
    return medians


def is_host_bound(step: Step) -> bool:
    """Whether the device waits for the host in much of the step: a faster device would not help."""
    time, on_cpu = step.time, step.layout.job.cluster.groups[0].device.is_cpu
    elsewhere = time.bubble_s + time.straggler_s + (time.exposed_s if on_cpu else 0.0)
    return step.device_busy_s < HOST_BOUND * step.time_s - elsewhere


def _bound(step: Step) -> str:
    """In words: the host where the device waits for it, else what takes most of the step."""
    if is_host_bound(step):
        share = step.device_busy_s / step.time_s
        return f"the host: the device is busy {share:.0%} of the step and waits for kernels to be issued"
    parts = {"exposed communication": step.time.exposed_s, "the pipeline's bubble": step.time.bubble_s}
    name, seconds = max(parts.items(), key=lambda item: item[1])
    if seconds > step.time.computing_s:
        return f"{name} ({seconds / step.time_s:.0%} of the step)"
    share = _arithmetic_share(step)
    kind, part = ("arithmetic", share) if share >= 0.5 else ("memory traffic", 1 - share)
    return f"the device's {kind} ({part:.0%} of its busy time)"


def _arithmetic_share(step: Step) -> float:
    """Of the computing time of the busiest rank, in operators whose arithmetic takes longer than their
    traffic."""
    layout, device = step.layout, step.layout.job.cluster.groups[0].device
    precision, graph = layout.job.workload.training.precision, layout.graph
    rate = np.array([device.peak_flops(arithmetic(operator, precision)) for operator in graph.operators])
    computing_s = graph.column("flops") / rate[graph.operator_index]
    bounded = computing_s > graph.column("bytes") / device.memory_bytes_per_s
    calls = np.concatenate(
        [layout.stages[step.busiest].calls, np.flatnonzero(graph.phase_index == PHASES.index("optimizer"))]
    )
    seconds = (layout.calls.device_s * ~layout.calls.communicates)[calls]
    return float(seconds[bounded[calls]].sum() / (seconds.sum() or 1.0))


def _assumptions(step: Step) -> Iterator[str]:
    job, graph = step.layout.job, step.layout.graph
    training = job.workload.training
    yield from job.cluster.assumptions
    if training.compile:
        yield (
            "compile = true: element-wise runs are costed as single kernels;"
            " what the compiler does beyond that is not"
        )
    if training.precision == "fp8":
        yield "fp8 is traced as bf16; matrix products are costed at the fp8 rate"
    if training.precision == "amp-fp16":
        yield "no gradient scaler"
    if training.total_steps is None:
        yield "no epochs or steps given: no total time and cost"
    elif job.cluster.price_per_hour is None:
        yield "no price known for this cluster: no cost"
    yield from graph.info.get("assumptions", ())
    if graph.info.get("versions"):
        versions = graph.info["versions"].items()
        yield "traced with " + ", ".join(f"{name} {version}" for name, version in versions)
    yield from _plan_assumptions(job, step)


def _plan_assumptions(job: Job, step: Step) -> Iterator[str]:
    plan, groups = job.plan, job.cluster.groups
    if plan.schedule == "interleaved" and plan.virtual_stages is None and plan.pipeline > 1:
        layers = sum(block.is_layer for stage in step.layout.stages for block in stage.blocks)
        yield f"plan.virtual_stages is not given: {virtual_stages(plan, layers)} chunks per rank are assumed"
    if job.cluster.world_size > 1 and plan.micro_batch is None and job.micro_batch > 1:
        yield f"plan.micro_batch is not given: all {job.micro_batch} samples of a rank are handled at once"
    sockets = any(group.inter_node.kind == "ethernet" and not group.device.is_cpu for group in groups)
    if job.cluster.nodes > 1 and sockets:
        yield (
            "cluster.inter_node: ethernet is used through TCP sockets, below its rate;"
            " give kind = 'roce' where it has RDMA"
        )
    if plan.expert > 1:
        yield "tokens are spread evenly over the experts"
    if len({group.device.name for group in groups}) > 1 and plan.balance == "even":
        yield "every device gets the same share of the batch: the others wait for the slowest"
    elif len({group.device.name for group in groups}) > 1:
        yield "the batch is split in proportion to the devices' speed"
