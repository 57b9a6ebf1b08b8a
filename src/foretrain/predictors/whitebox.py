"""The white-box flow: graph of the job, cost of its operators, timeline, memory, forecast. Cost models plug in here."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import numpy as np

from foretrain.capture import capture_job
from foretrain.cluster import Device
from foretrain.costs.base import CostModel, HostModel
from foretrain.costs.host import DispatchHost, cpu_speed
from foretrain.costs.roofline import arithmetic
from foretrain.costs.workspace import library_workspaces, operator_workspace
from foretrain.errors import UnsupportedJob
from foretrain.forecast import Estimate, Forecast, whole_training
from foretrain.graph import PHASES, OpGraph
from foretrain.graph.fusion import COMPILED, fuse
from foretrain.job import Job
from foretrain.predictors.conformal import Factors
from foretrain.step.allocator import MemoryProfile, profile_memory
from foretrain.step.timeline import Timeline

TIME_QUANTITIES = frozenset({
    "step_time_s", "forward_time_s", "backward_time_s", "optimizer_time_s", "device_busy_s", "host_issue_s",
    "samples_per_s", "tokens_per_s", "epoch_time_s", "total_time_s", "device_utilization", "memory_utilization", "power_w",
})  # fmt: skip
MEMORY_QUANTITIES = frozenset({"peak_memory_bytes", "reserved_memory_bytes"})
NETWORK_QUANTITIES = frozenset({"network_tx_bytes_per_s", "network_rx_bytes_per_s"})
QUANTITIES = TIME_QUANTITIES | MEMORY_QUANTITIES | NETWORK_QUANTITIES | {"kernels"}

IDLE_POWER = 0.15
"""Share of the TDP that an idle accelerator draws."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Spread:
    """How far measured runs lie from the median, per kind of quantity."""

    time: Factors
    memory: Factors
    count: Factors
    quantities: Mapping[str, Factors] = field(default_factory=dict)
    """Where a quantity's own spread is known."""
    """Of kernels and of power, which do not follow the time."""

    def around(self, quantity: str, median: float) -> Estimate:
        kind = (
            self.memory
            if quantity in MEMORY_QUANTITIES
            else self.count
            if quantity in ("kernels", "power_w")
            else self.time
        )
        factors = self.quantities.get(quantity, kind)
        bounds = [median * factor for factor in factors]
        if quantity in ("device_utilization", "memory_utilization"):
            bounds = [min(bound, max(median, 1.0)) for bound in bounds]
        return Estimate(median, bounds[1], bounds[2], bounds[0], bounds[3])


def build_timeline(
    job: Job, graph: OpGraph, costs: CostModel, host: HostModel, *, gap_s: float = 0.0
) -> Timeline:
    """Cost each distinct operator once and lay the step out."""
    device = job.cluster.device
    device_s = costs.device_time_s(graph.operators, device, job.workload.training.precision)
    pairs, which = np.unique(graph.operator_index * len(PHASES) + graph.phase_index, return_inverse=True)
    issued = [divmod(pair, len(PHASES)) for pair in pairs.tolist()]
    issue_s = host.issue_time_s(
        [graph.operators[operator] for operator, _ in issued], [PHASES[phase] for _, phase in issued]
    )
    kernels = costs.kernels(graph.operators, device, job.workload.training.precision)
    return Timeline(
        graph=graph,
        host_s=issue_s[which],
        device_s=device_s[graph.operator_index],
        kernels_per_call=kernels[graph.operator_index],
        accumulation=job.accumulation,
        step_overhead_s=host.step_overhead_s,
        gap_s=gap_s,
    )


def forecast_one_device(
    job: Job,
    costs: CostModel,
    host: HostModel,
    spread: Spread | Callable[[Timeline], Spread],
    *,
    predictor: str,
    gap_s: float = 0.0,
) -> Forecast:
    """The forecast of a job that runs on one device; the spread may depend on what bounds the step."""
    if needs_ranks(job):
        raise UnsupportedJob(f"cluster: {job.cluster.world_size} devices, framework {job.workload.training.framework}, recompute {job.plan.recompute}: {predictor} forecasts plain PyTorch on one device")  # fmt: skip
    graph = capture_job(job)
    if job.workload.training.compile:
        graph = fuse(graph, COMPILED)
    device = job.cluster.device
    timeline = build_timeline(job, graph, costs, host, gap_s=gap_s)
    if callable(spread):
        spread = spread(timeline)
    memory = _memory(graph, device, job.workload.training.mode)
    medians = _medians(timeline, memory, device)
    quantities = whole_training(job, spread.around("step_time_s", timeline.step_time_s))
    quantities.update({name: spread.around(name, value) for name, value in medians.items()})
    if job.workload.training.mode == "infer":
        for absent in ("backward_time_s", "optimizer_time_s"):
            quantities.pop(absent)
    price = job.cluster.price_per_hour
    hours = quantities["total_time_s"] * (1 / 3600) if "total_time_s" in quantities else None
    return Forecast(
        job=job,
        predictor=predictor,
        quantities=quantities,
        cost=hours * price if hours is not None and price is not None else None,
        energy_j=quantities["total_time_s"] * quantities["power_w"].median
        if hours is not None and "power_w" in quantities
        else None,
        price_per_hour=price,
        memory_by_category={str(name): size for name, size in memory.by_category.items()},
        memory_capacity_bytes=device.memory_bytes,
        bound=_bound(timeline, device, job.workload.training.precision),
        assumptions=assumptions(job, graph, price),
        timeline=timeline,
        memory=memory,
    )


def host_beside(job: Job, host: DispatchHost) -> DispatchHost:
    """The host with the speed of the slowest CPU among the job's nodes; as it is where the job names no node."""
    speeds = [
        cpu_speed(group.node.cpu, group.device.year) for group in job.cluster.groups if group.node is not None
    ]
    return dataclasses.replace(host, speed=host.speed * min(speeds)) if speeds else host


def needs_ranks(job: Job) -> bool:
    """Whether the job is more than plain PyTorch, or inference, on one device."""
    if job.cluster.world_size == 1 and job.workload.training.mode == "infer":
        return False
    return (
        job.cluster.world_size > 1
        or job.plan.recompute != "none"
        or job.plan.offload
        or job.workload.training.framework != "pytorch"
    )


@functools.lru_cache(maxsize=256)
def _memory(graph: OpGraph, device: Device, mode: str) -> MemoryProfile:
    return profile_memory(
        graph, functools.partial(operator_workspace, device=device), library_workspaces(device, mode)
    )


def _medians(timeline: Timeline, memory: MemoryProfile, device: Device) -> Mapping[str, float]:
    utilization = min(1.0, timeline.device_busy_s / timeline.step_time_s) if timeline.step_time_s else 0.0
    power = (
        {}
        if device.tdp_w is None
        else {"power_w": device.tdp_w * (IDLE_POWER + (1 - IDLE_POWER) * utilization)}
    )
    return {
        **power,
        "forward_time_s": timeline.phase_time_s("forward"),
        "backward_time_s": timeline.phase_time_s("backward"),
        "optimizer_time_s": timeline.phase_time_s("optimizer"),
        "device_busy_s": timeline.device_busy_s,
        "host_issue_s": timeline.host_issue_s,
        "kernels": timeline.kernels,
        "device_utilization": utilization,
        "peak_memory_bytes": float(memory.allocated_bytes),
        "reserved_memory_bytes": float(memory.reserved_bytes),
        "memory_utilization": min(
            1.0, timeline.bytes_moved / (timeline.step_time_s * device.memory_bytes_per_s)
        )
        if timeline.step_time_s
        else 0.0,
    }


def _bound(timeline: Timeline, device: Device, precision: str) -> str:
    """In words: the host, or the device's arithmetic or memory, whichever takes most of the step."""
    share = timeline.device_busy_s / timeline.step_time_s if timeline.step_time_s else 0.0
    if share < 0.8:
        return f"the host: the device is busy {share:.0%} of the step and waits for kernels to be issued"
    graph = timeline.graph
    rate = np.array([device.peak_flops(arithmetic(operator, precision)) for operator in graph.operators])
    computing = (graph.column("flops") / rate[graph.operator_index]) > graph.column(
        "bytes"
    ) / device.memory_bytes_per_s
    arithmetic_share = float(timeline.device_s[computing].sum() / timeline.device_s.sum())
    kind, part = (
        ("arithmetic", arithmetic_share)
        if arithmetic_share >= 0.5
        else ("memory traffic", 1 - arithmetic_share)
    )
    return f"the device's {kind} ({part:.0%} of its busy time)"


def assumptions(job: Job, graph: OpGraph, price: float | None) -> tuple[str, ...]:
    training = job.workload.training
    notes = list(job.cluster.assumptions)
    if training.compile:
        notes.append(
            "compile = true: element-wise runs are costed as single kernels; what the compiler does beyond that is not"
        )
    if training.precision == "fp8":
        notes.append("fp8 is traced as bf16; matrix products are costed at the fp8 rate")
    if training.precision == "amp-fp16":
        notes.append("no gradient scaler")
    if training.total_steps is None:
        notes.append("no epochs or steps given: no total time and cost")
    elif price is None:
        notes.append("no price known for this cluster: no cost")
    notes.extend(graph.info.get("assumptions", ()))
    if graph.info.get("versions"):
        notes.append(
            "traced with "
            + ", ".join(f"{name} {version}" for name, version in graph.info["versions"].items())
        )
    return tuple(notes)
