"""Refuses forecasts that cannot be right: faster than the device's arithmetic, smaller than the parameters,
beyond the links."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from foretrain.cluster import Device
from foretrain.costs.roofline import arithmetic
from foretrain.errors import UnsupportedJob
from foretrain.forecast import Estimate, Forecast
from foretrain.graph import ITEM_BYTES, Operator, OpGraph, Weight
from foretrain.graph.opset import traits
from foretrain.job import Job
from foretrain.step.counting import model_flops
from foretrain.step.frameworks import profile
from foretrain.step.graph import possible_step_graph
from foretrain.step.partition import Stage, blocks, stages
from foretrain.step.state import bytes_per_parameter
from foretrain.units import format_bytes, format_count, format_seconds

ABOVE_DATA_SHEET = 1.2
"""GPUs may clock above the boost rate that their data sheet's peak is of (GeForce cards by up to 15 %)."""
FASTEST_CORE_FLOPS = 400e9
"""FP32 of a CPU core, in FLOP/s: two 512-bit multiply-adds at 5.7 GHz (Zen 5 has them). The catalogue knows
CPUs by their kind alone, so that its own rate is no limit."""
MATRIX_UNITS = 16
"""Products of 16 bits and less beside those of FP32, on a CPU core that has units for them (AMX: 1,024
multiply-adds a cycle where vectors have 32, at a lower clock)."""
CAUSAL_SHARE = 0.5
"""Of the products of attention, where blocks above the diagonal of a causal mask are skipped."""
WINOGRAD_SHARE = 0.25
"""Of the multiplications of a convolution, where 3x3 filters are applied as F(4x4, 3x3) (Lavin and Gray
2016)."""
_ROUNDING = 1e-6
UNCHECKED = "not checked against the arithmetic and the parameters of a step: the model cannot be traced"

_MEMORY = ("peak_memory_bytes", "reserved_memory_bytes")
_SHARES = ("device_utilization", "memory_utilization", "memory_busy")
_RATES = ("network_tx_bytes_per_s", "network_rx_bytes_per_s")


@dataclass(frozen=True, slots=True, kw_only=True)
class Limit:
    """Says where a quantity cannot lie below (``least``) or above, and why."""

    quantity: str
    value: float
    least: bool
    why: str


def possible(forecast: Forecast) -> Forecast:
    """The forecast with the FLOPs of its step, its intervals cut where nothing can lie; ``UnsupportedJob``
    where a median lies there."""
    kept, notes = dict(forecast.quantities), forecast.assumptions
    graph = possible_step_graph(forecast.job) if forecast.step is None else forecast.step.layout.graph
    dealt = None if forecast.step is None else forecast.step.layout.stages
    for limit in limits(forecast.job, graph, dealt):
        if (estimate := kept.get(limit.quantity)) is not None:
            kept[limit.quantity] = _within(estimate, limit, forecast.predictor)
    if graph is None and UNCHECKED not in notes:
        notes = (*notes, UNCHECKED)
    flops = None if graph is None else model_flops(forecast.job, graph)
    return dataclasses.replace(forecast, quantities=kept, assumptions=notes, flops=flops)


def limits(job: Job, graph: OpGraph | None, dealt: Sequence[Stage] | None = None) -> Iterator[Limit]:
    """List what no run of the job can be beyond, by its step's graph where there is one, and by the stages of
    its pipeline as they were ``dealt`` out where that is known."""
    if graph is not None:
        yield from _time_limits(job, shortest_step_s(job, graph))
        size = least_memory_bytes(job, graph, dealt)
        why = f"what a rank keeps of parameters, gradients and optimizer state is {format_bytes(size)}"
        yield from (Limit(quantity=name, value=size, least=True, why=why) for name in _MEMORY)
    for name in _SHARES:
        yield Limit(quantity=name, value=1.0, least=False, why="it is a share")
    powers_w = [group.device.tdp_w for group in job.cluster.groups if group.device.tdp_w]
    if len(powers_w) == len(job.cluster.groups):
        why = f"a device takes at most {max(powers_w):g} W"
        yield Limit(quantity="power_w", value=max(powers_w), least=False, why=why)
    if job.cluster.world_size > 1 or job.plan.servers:
        rate = link_bytes_per_s(job)
        why = f"the links of a rank carry {format_count(rate, 'B/s')}"
        yield from (Limit(quantity=name, value=rate, least=False, why=why) for name in _RATES)


def _time_limits(job: Job, shortest_s: float) -> Iterator[Limit]:
    training = job.workload.training
    names = " and ".join(dict.fromkeys(group.device.name for group in job.cluster.groups))
    why = f"the arithmetic of a step takes {format_seconds(shortest_s)} at the peak rate of {names}"
    steps = {"step_time_s": 1, "epoch_time_s": training.steps_per_epoch, "total_time_s": training.total_steps}
    for name, count in steps.items():
        if count is not None:
            yield Limit(quantity=name, value=count * shortest_s, least=True, why=why)
    if shortest_s:
        rate = training.global_batch / shortest_s
        yield Limit(quantity="samples_per_s", value=rate, least=False, why=why)
        if training.sequence:
            yield Limit(quantity="tokens_per_s", value=rate * training.sequence, least=False, why=why)


def _within(estimate: Estimate, limit: Limit, predictor: str) -> Estimate:
    """The estimate cut at the limit."""
    slack = limit.value * (1 - _ROUNDING if limit.least else 1 + _ROUNDING)
    if (estimate.median < slack) if limit.least else (estimate.median > slack):
        raise UnsupportedJob(
            f"{limit.quantity}: {predictor} forecasts {estimate.median:.4g}, which cannot be: {limit.why}"
        )
    if limit.least:
        return estimate.at_least(min(limit.value, estimate.median))
    return estimate.at_most(max(limit.value, estimate.median))


# Time


def shortest_step_s(job: Job, graph: OpGraph) -> float:
    """The arithmetic of a rank's step at the peak rate of the fastest device; a stage of a pipeline has its
    share."""
    devices = tuple(dict.fromkeys(group.device for group in job.cluster.groups))
    precision = job.workload.training.precision
    once_s = min(_arithmetic_s(graph, device, precision) for device in devices)
    return once_s * job.accumulation / job.plan.pipeline


@functools.lru_cache(maxsize=256)
def _arithmetic_s(graph: OpGraph, device: Device, precision: str) -> float:
    """Time the arithmetic of the forward and the backward pass of all layers."""
    seconds = np.array([_least_s(operator, device, precision) for operator in graph.operators])
    of_calls = seconds[graph.operator_index] if len(seconds) else seconds
    pieces = [block.piece for block in blocks(graph)]
    return float(sum(of_calls[piece.forward].sum() + of_calls[piece.backward].sum() for piece in pieces))


def _least_s(operator: Operator, device: Device, precision: str) -> float:
    if not operator.flops:
        return 0.0
    if device.is_cpu:
        rate = device.cores * FASTEST_CORE_FLOPS
        rate *= 1 if arithmetic(operator, precision) in ("fp32", "tf32", "fp64") else MATRIX_UNITS
    else:
        rate = device.peak_flops(arithmetic(operator, precision)) * ABOVE_DATA_SHEET
    return operator.flops * _share_computed(operator) / rate


def _share_computed(operator: Operator) -> float:
    """Give the share of the FLOPs that an operator's formula counts that the fewest-FLOP algorithm has."""
    kind = traits(operator.name).kind
    if kind == "attention":
        return CAUSAL_SHARE
    weight = operator.tensor("weight")
    if kind == "convolution" and weight is not None and max(weight.shape[2:], default=1) > 1:
        return WINOGRAD_SHARE
    return 1.0


# Memory


def least_memory_bytes(job: Job, graph: OpGraph, dealt: Sequence[Stage] | None = None) -> float:
    """Parameters of the rank that has fewest, with the gradients and optimizer state that the plan keeps
    beside each."""
    plan = job.plan
    replicas = (plan.data or 1) * plan.context
    of_expert = job.expert_replicas
    gradient, state = bytes_per_parameter(graph)
    if plan.offload:
        gradient = state = 0.0
    if plan.servers:  # which keep it
        state = 0.0

    def held(weight: Weight, sharded: bool) -> float:
        return weight.elements / ((of_expert if weight.expert else replicas) if sharded else 1)

    def of_rank(weights: tuple[Weight, ...]) -> float:
        own = sum(held(w, plan.shard == "zero3") * ITEM_BYTES[w.dtype] for w in weights)
        trained = [w for w in weights if w.trainable]
        gradients = sum(held(w, plan.shard in ("zero2", "zero3")) for w in trained) * gradient
        return own + gradients + sum(held(w, plan.shard != "none") for w in trained) * state

    if plan.pipeline == 1:
        return of_rank(graph.weights)
    return min(of_rank(stage.weights) for stage in dealt or stages(job, graph, profile(job)))


# Network


def link_bytes_per_s(job: Job) -> float:
    """Give the rate that the links of a device carry in one direction: those inside its node, and those of
    its node where there are others, of parameter servers too. Loopback is memory."""
    rates = []
    for group in job.cluster.groups:
        inside, memory = group.intra_node, group.device.memory_bytes_per_s
        rate = memory if inside.kind == "loopback" else inside.bandwidth_bytes_per_s
        rate = rate if group.domain > 1 or job.plan.servers else 0.0
        rates.append(rate + (group.inter_node.bandwidth_bytes_per_s if job.over_network else 0.0))
    return max(rates, default=math.inf)
