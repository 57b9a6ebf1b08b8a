"""Assembles the forecast of a step: quantities with intervals, what bounds it, and what was assumed."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import numpy as np

from foretrain.duration import batch_loading_s, duration, start_up
from foretrain.forecast import IDLE_POWER, Estimate, Factors, Forecast, RankMemory, fullest_of, whole_training
from foretrain.graph import PHASES, OpGraph
from foretrain.graph.opset import SCALED, is_product, waits
from foretrain.job import Job
from foretrain.step.balance import group_words
from foretrain.step.exchange import server_bytes
from foretrain.step.frameworks import logged_stage
from foretrain.step.layout import memory_rate
from foretrain.step.partition import dealing_words
from foretrain.step.play import Step
from foretrain.step.power import at_peak_s
from foretrain.step.routing import uneven_share, widened
from foretrain.step.stage_memory import memory_by_group
from foretrain.step.state import model_size
from foretrain.units import format_bytes, format_dollars
from foretrain.workload import TORCHAO, Training

MEMORY_QUANTITIES = frozenset({"peak_memory_bytes", "reserved_memory_bytes"})
QUANTITIES = MEMORY_QUANTITIES | {
    "step_time_s", "forward_time_s", "backward_time_s", "optimizer_time_s", "device_busy_s", "host_issue_s",
    "kernels",
    "samples_per_s", "tokens_per_s", "epoch_time_s", "total_time_s", "startup_time_s", "device_utilization",
    "memory_busy", "power_w",
    "network_tx_bytes_per_s", "network_rx_bytes_per_s",
}  # fmt: skip

_PER_SECOND = ("network_tx_bytes_per_s", "network_rx_bytes_per_s")
"""What falls as the step takes longer."""
_MEASURE = "measure yours: foretrain measure host"
"""Where a host is known by its name alone."""
HOST_BOUND = 0.8
"""Share of the step that the device does not wait for kernels, below which the host bounds it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Spread:
    """Says how far measured runs lie from the median, per kind of quantity."""

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
        factors = self.quantities.get(quantity, kind)
        if quantity in _PER_SECOND and quantity not in self.quantities:
            factors = factors.inverse()
        estimate = Estimate.around(median, factors)
        is_share = quantity in ("device_utilization", "memory_busy")
        return estimate.at_most(max(median, 1.0)) if is_share else estimate


def assemble(step: Step, spread: Spread, *, predictor: str, notes: tuple[str, ...] = ()) -> Forecast:
    """The forecast of the job whose step this is."""
    if share := uneven_share(step):
        spread = dataclasses.replace(spread, time=widened(spread.time, share))
    job, step_time = step.layout.job, spread.around("step_time_s", step.time_s)
    size, forward_s = model_size(job, step.layout.graph), step.phases_s["forward"]
    whole = duration(job, step_time, size, forward_s=forward_s)
    quantities = whole_training(job, step_time, size, forward_s=forward_s)
    quantities["startup_time_s"] = start_up(job, size).time_s
    quantities.update({name: spread.around(name, value) for name, value in _medians(step).items()})
    least = quantities["peak_memory_bytes"].low  # what is reserved holds what is allocated
    quantities["reserved_memory_bytes"] = quantities["reserved_memory_bytes"].mapped(
        lambda size: max(size, least)
    )
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
    elapsed_s = max(step.time_s, batch_loading_s(job) or 0.0)
    utilization = min(1.0, step.device_busy_s / elapsed_s) if elapsed_s else 0.0
    rate = memory_rate(step.of_busiest)
    medians = {
        **{f"{phase}_time_s": step.phases_s[phase] for phase in phases},
        "device_busy_s": step.device_busy_s,
        "host_issue_s": step.host_issue_s,
        "kernels": step.kernels,
        "device_utilization": utilization,
        "memory_busy": min(1.0, step.bytes_moved / (elapsed_s * rate)) if elapsed_s else 0.0,
        "peak_memory_bytes": rank.allocated_bytes,
        "reserved_memory_bytes": rank.reserved_bytes,
    }
    if job.cluster.world_size > 1 or job.plan.servers:
        rate = step.sent_bytes / elapsed_s
        medians |= {"network_tx_bytes_per_s": rate, "network_rx_bytes_per_s": rate}
    powers = [group.device.tdp_w for group in job.cluster.groups]
    if all(powers):
        highest = max(power for power in powers if power)
        medians["power_w"] = highest * (IDLE_POWER + (1 - IDLE_POWER) * utilization)
    return medians


def is_host_bound(step: Step) -> bool:
    """Whether the device waits for kernels in much of the step: a faster device would not help."""
    return _waiting_for_kernels(step) > (1.0 - HOST_BOUND) * step.time_s


def _waiting_for_kernels(step: Step) -> float:
    causes = step.causes_s
    return causes["waiting for the host"] + causes["gaps between kernels"]


def _bound(step: Step) -> str:
    """Say in words what bounds the step: the host where the device waits for it, else what takes most of the
    step."""
    shares = {name: seconds / (step.time_s or 1.0) for name, seconds in step.causes_s.items()}
    if is_host_bound(step):
        busy, waits = step.device_busy_s / step.time_s, _waiting_for_kernels(step) / step.time_s
        words = f"the host: the device is busy {busy:.0%} of the step and waits for kernels in {waits:.0%}"
        host = step.layout.job.cluster.issuer
        return words if host is not None and host.measured else f"{words}; {_MEASURE}"
    name = max(shares, key=lambda one: shares[one])
    if name != "computation":
        return f"{name} ({shares[name]:.0%} of the step)"
    share = _arithmetic_share(step)
    kind, part = ("arithmetic", share) if share >= 0.5 else ("memory traffic", 1 - share)
    return f"the device's {kind} ({part:.0%} of its computation)"


def _arithmetic_share(step: Step) -> float:
    """Give the share of the busiest rank's computing time that goes to operators whose arithmetic takes
    longer than their traffic."""
    layout = step.of_busiest
    device = layout.site.groups[0].device
    precision, graph = layout.job.workload.training.precision, layout.graph
    bounded = at_peak_s(graph, device, precision) > graph.column("bytes") / device.memory_bytes_per_s
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
        whose = ", as the model's own code compiles" if graph.info.get("compile") else ""
        mode = "true" if training.compile is True else repr(training.compile)
        yield f"compile = {mode}{whose}: kernels and what is saved follow the rules of torch 2.11's compiler"
        cuts = sum(waits(op.operator.name) for op in graph.ops if op.phase == "forward")
        if cuts:
            yield f"the compiler cuts the model where its code reads a value ({cuts} times in a forward pass)"
        if str(training.compile).startswith("max-autotune"):
            yield "products are costed as the libraries' own, which max-autotune may beat"
    if training.hides_pools:
        yield "what passes allocate lies in the pools of CUDA graphs: reserved, not in the memory at peak"
    elif (graphs := training.cuda_graphs) != "none":
        graphed = "layers" if graphs == "layers" else "passes"
        yield f"{graphed} are launched as CUDA graphs; their memory counts at the peak, as while captured"
    if training.precision == "fp8":
        yield _fp8_words(training, graph)
    if training.precision == "amp-fp16" and training.mode == "train" and not training.scales_loss:
        yield "no gradient scaler"
    wanted = training.precision.removeprefix("amp-")
    for device in dict.fromkeys(group.device for group in job.cluster.groups):
        if (rate := device.costed_as(wanted)) != wanted:
            lacks = f"{device.name} has no {wanted} rate in the catalogue"
            yield f"{lacks}: products are costed at its {rate} rate"
    if training.total_steps is None:
        if job.trains:
            yield "no epochs or steps given: no total time and cost"
    elif job.price_per_hour is None:
        whose = "this cluster" if job.cluster.price_per_hour is None else "the servers' nodes"
        yield f"no price known for {whose}: no cost"
    yield from graph.info.get("assumptions", ())
    if graph.info.get("versions"):
        versions = graph.info["versions"].items()
        yield "traced with " + ", ".join(f"{name} {version}" for name, version in versions)
    yield from _plan_assumptions(job, step)


def _fp8_words(training: Training, graph: OpGraph) -> str:
    """Whose casts a step in fp8 has, and what of its products stays in bf16."""
    recipe = training.fp8_recipe
    whose = "torchao's" if recipe in TORCHAO else "Transformer Engine's"
    products = [op.operator for op in graph.ops if is_product(op.operator.name)]
    in_fp8 = sum(one.flops for one in products if one.name == SCALED)
    share = in_fp8 / (sum(one.flops for one in products) or 1)
    grouped = any(one.name == "_grouped_mm" for one in products)
    experts = "; experts are costed at the fp8 rate, without casts" if grouped else ""
    eager = recipe in TORCHAO and not training.compile and bool(in_fp8)
    slow = "; without compile each cast is several kernels, and bf16 may be faster" if eager else ""
    return f"fp8 by {whose} {recipe} scaling in {share:.0%} of the products' work{experts}{slow}"


def _habit(job: Job) -> str:
    """Why experts are cut as they are where the plan leaves it open."""
    framework, plan = job.workload.training.framework, job.plan
    if job.expert_tensor > 1:
        return f"{framework} has it"
    needed = plan.pipeline * plan.expert * plan.tensor
    if plan.expert_width(framework, needed) > 1:
        return f"cutting it over the tensor team needs a multiple of {needed} devices"
    return f"{framework} has it"


def _servers(step: Step) -> str:
    """Say where parameter servers run, what they hold and who pays."""
    job, size = step.layout.job, server_bytes(step.layout)
    own = job.cluster.servers
    if own is not None:
        where = f"on {own.nodes} nodes of their own"
        paid = "" if own.price is None else f", paid at {format_dollars(own.price)}/h each"
        room, sharing = own.memory, math.ceil(job.plan.servers / own.nodes)
    else:
        where = "on the workers' nodes (cluster.servers gives them their own)"
        paid = ", each paid as a worker" if job.servers_take_cores else ", which are paid already"
        nodes = [group.node for group in job.cluster.groups]
        rooms = [node.memory_bytes for node in nodes if node is not None and node.memory_bytes]
        room, sharing = min(rooms, default=None), math.ceil(job.plan.servers / job.cluster.nodes)
    full = (
        f"; {sharing} on a node are more than its {format_bytes(room)}"
        if room and size * sharing > room
        else ""
    )
    held = f"each holds {format_bytes(size)} of host memory{full}"
    return f"plan.servers: {job.plan.servers} {where}{paid}; {held}"


def _plan_assumptions(job: Job, step: Step) -> Iterator[str]:
    plan, groups = job.plan, job.cluster.groups
    if plan.schedule == "interleaved" and plan.virtual_stages is None and plan.pipeline > 1:
        chunks = len(step.layout.stages[0].chunks)
        yield f"plan.virtual_stages is not given: {chunks} chunks per rank are assumed"
    if step.layout.dealt is not None:
        yield step.layout.dealt.because
    elif words := dealing_words(job, step.layout.graph, step.layout.profile):
        yield words
    if job.cluster.world_size > 1 and plan.micro_batch is None and job.micro_batch > 1:
        yield f"plan.micro_batch is not given: all {job.micro_batch} samples of a rank are handled at once"
    sockets = any(group.inter_node.kind == "ethernet" and not group.device.is_cpu for group in groups)
    if job.cluster.nodes > 1 and sockets:
        yield (
            "cluster.inter_node: ethernet is used through TCP sockets, below its rate;"
            " give kind = 'roce' where it has RDMA"
        )
    if plan.expert > 1 and plan.tensor > 1 and plan.expert_tensor is None:
        cut = "whole" if job.expert_tensor == 1 else f"cut over {job.expert_tensor} ranks"
        yield f"plan.expert_tensor is not given: every expert is {cut}, as {_habit(job)}"
    if plan.servers:
        yield _servers(step)
    mixed = len({group.device for group in groups}) > 1
    if step.layout.by_group:
        if step.layout.dealt is None:
            how = "as plan.stages says" if plan.stages else 'alike (plan.balance = "speed" looks at devices)'
            yield f"layers are dealt out {how}: {group_words(step.layout)}; the others wait for the slowest"
    elif mixed and job.balance == "even":
        yield "every device gets the same share of the batch: the others wait for the slowest"
    elif mixed:
        parts = zip(groups, step.layout.shares, memory_by_group(step.layout), strict=True)
        held = [
            f"{group.device.name} gets {share:.2f} of an even part and peaks at "
            f"{format_bytes(fullest_of(ranks).allocated_bytes)} of {format_bytes(group.device.memory_bytes)}"
            for group, share, ranks in parts
        ]
        yield f"the batch is split in proportion to the devices' speed: {', '.join(held)}"
