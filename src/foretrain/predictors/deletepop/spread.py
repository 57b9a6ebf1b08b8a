"""Says how far measured steps lie from forecasts, by what a step is made of: each part of it is known as well
as its like was measured."""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal, Self

import numpy as np
import numpy.typing as npt

from foretrain.cluster import Device
from foretrain.costs.learned import LearnedCosts
from foretrain.forecast import Factors, RankMemory
from foretrain.graph import PHASES, OpGraph
from foretrain.graph.opset import PRODUCTS, traits
from foretrain.job import Job
from foretrain.predictors.conformal import SHIPPED
from foretrain.step.partition import Index
from foretrain.step.play import Step

Tier = Literal["measured", "scored", "vendor", "never"]
"""What was measured of a device: its own operators; runs of its generation, forecast without them; other
generations of its vendor; nothing."""

COMPUTING: Mapping[Tier, str] = {
    "measured": "computing, operators measured here",
    "scored": "computing, generation measured elsewhere",
    "vendor": "computing, other generations of the vendor measured",
    "never": "computing, vendor never measured",
}
LOOKED_UP = "computing, operators looked up"
ON_CPU = "computing on CPU cores"
BY_ROOFLINE = "computing, by the roofline alone"
HOST, HOST_MEASURED, HOST_OF_RANKS = "host", "host, measured", "host of a framework's ranks"
INSIDE, RDMA, EFA, SOCKETS = "network inside a node", "network, RDMA", "network, EFA", "network, sockets"
PIPELINE, CHANNELS_LAST, ESTIMATED = "pipeline and stragglers", "channels last", "ways of training estimated"
ATTENTION, CONVOLUTIONS, OTHERS = "attention", "convolutions", "other kernels"
EXPERTS = "experts"
ON_TOP = (CHANNELS_LAST, ESTIMATED, ATTENTION, CONVOLUTIONS, OTHERS, EXPERTS)
"""What comes on top of computing, as products are known best, or of all of a step with experts."""
PARTS = (
    LOOKED_UP,
    *COMPUTING.values(),
    ON_CPU,
    BY_ROOFLINE,
    HOST,
    HOST_MEASURED,
    HOST_OF_RANKS,
    INSIDE,
    RDMA,
    EFA,
    SOCKETS,
    PIPELINE,
    *ON_TOP,
)
"""What the time of a step is divided into, and what comes on top."""
STATES, ACTIVATIONS, BUFFERS, CACHED = "states", "activations", "buffers", "cached"
MEMORY_PARTS = (STATES, ACTIVATIONS, BUFFERS, CACHED)
"""What the memory of a rank is divided into: parameters, gradients and the optimizer's state, which follow
from the plan; what is saved for the backward pass; what comes and goes; and what the allocator holds
beside it."""
_CATEGORIES = {
    **dict.fromkeys(("weights", "gradients", "optimizer_state", "inputs"), STATES),
    "activations": ACTIVATIONS,
}
_IDLE_ANYWAY, _IDLE_OF_BOUND = 0.05, 0.1
"""Shares of the step that the device waits for kernels: up to the one the device still sets the pace, beyond
both together the host does, of all that is not communication (``data/h200_repeat_steps.jsonl``)."""
_FULL_PRECISION = ("fp32", "tf32")


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredGenerations:
    """The generations of devices whose runs were forecast before any of them was learned from."""

    generations: Mapping[str, str]
    """``vendor architecture`` to the formats that were measured: all, or fp32."""

    @classmethod
    def of(cls, devices: Iterable[Device]) -> Self:
        return cls(generations={_generation(device): "all" for device in devices})

    def tier(self, device: Device, precision: str) -> Tier:
        """Say what is known of a device whose own operators were not measured."""
        formats = self.generations.get(_generation(device))
        if formats == "all" or (formats is not None and precision in _FULL_PRECISION):
            return "scored"
        vendors = {name.split()[0] for name, of in self.generations.items() if of == "all"}
        return "vendor" if device.vendor in vendors else "never"


def _generation(device: Device) -> str:
    return f"{device.vendor} {device.architecture}"


@functools.lru_cache(maxsize=1)
def shipped_evidence() -> MeasuredGenerations:
    return MeasuredGenerations(generations=json.loads(SHIPPED.read_text())["scored"])


@functools.lru_cache(maxsize=1)
def shipped_widths() -> Mapping[str, Factors]:
    """Read, of each part, the logarithms of the bounds that a step of nothing else would have."""
    return {part: Factors(*bounds) for part, bounds in json.loads(SHIPPED.read_text())["parts"].items()}


@functools.lru_cache(maxsize=1)
def shipped_memory_widths() -> Mapping[str, Factors]:
    """Read the same bounds of the parts of a rank's memory."""
    return {part: Factors(*bounds) for part, bounds in json.loads(SHIPPED.read_text())["memory"].items()}


def memory_shares(rank: RankMemory, *, reserved: bool) -> dict[str, float]:
    """The parts of a rank's memory as shares of what is allocated, or of what is reserved."""
    size_of = dict.fromkeys(MEMORY_PARTS, 0.0)
    for category, size in rank.by_category.items():
        size_of[_CATEGORIES.get(category, BUFFERS)] += size
    size_of[CACHED] = rank.cached_bytes if reserved else 0.0
    whole = sum(size_of.values()) or 1.0
    return {part: size / whole for part, size in size_of.items()}


def shares(step: Step, costs: LearnedCosts, tier: Tier, unmeasured: float = 0.0) -> dict[str, float]:
    """The parts of a step as shares of its time; ``unmeasured`` is the share of computing by the roofline."""
    job, time, whole = step.layout.job, step.time, step.time_s or 1.0
    exposed = min(1.0, time.exposed_s / whole)
    pipeline = min(1.0 - exposed, (time.bubble_s + time.straggler_s) / whole)
    group = job.cluster.groups[0]
    share_of = dict.fromkeys(PARTS, 0.0)
    if group.device.is_cpu:
        share_of[ON_CPU] = 1.0 - exposed - pipeline
    else:
        own = 1.0 - exposed - pipeline
        computing = min(own, max(0.0, step.device_busy_s / whole - exposed))
        bound = min(1.0, max(0.0, own - computing - _IDLE_ANYWAY) / _IDLE_OF_BOUND)
        host = HOST if job.runs_alone and job.workload.training.framework == "pytorch" else HOST_OF_RANKS
        if job.cluster.issuer and job.cluster.issuer.measured:
            host = HOST_MEASURED
        share_of[host], computing = own * bound, own * (1.0 - bound)
        for part, share in computing_parts(step, costs, tier, unmeasured).items():
            share_of[part] = computing * share
    share_of[_network(job)] += exposed
    share_of[PIPELINE] = pipeline
    share_of[EXPERTS] = float(_has_experts(step.layout.graph))
    return share_of


def computing_parts(step: Step, costs: LearnedCosts, tier: Tier, unmeasured: float = 0.0) -> dict[str, float]:
    """Divide the time that a GPU computes by how its operators are known, and what comes on top."""
    job = step.layout.job
    looked_up = _looked_up(step, costs) if tier == "measured" else 0.0
    by_roofline = min(max(unmeasured, 0.0), 1.0 - looked_up)
    return {
        LOOKED_UP: looked_up,
        BY_ROOFLINE: by_roofline,
        COMPUTING[tier]: 1.0 - looked_up - by_roofline,
        CHANNELS_LAST: float(job.workload.training.channels_last),
        ESTIMATED: float(_is_estimated(job)),
        **_by_kind(step),
    }


_KINDS: Mapping[str, str | None] = {
    **dict.fromkeys(PRODUCTS, None),
    "convolution": CONVOLUTIONS,
    **dict.fromkeys(("channel norm", "pooling", "resampling"), CONVOLUTIONS),
    **dict.fromkeys(("attention", "batched product", "softmax"), ATTENTION),
}
"""What kinds of operators count as; products as nothing on top, those that are not named as others."""


def _by_kind(step: Step) -> dict[str, float]:
    """Give the shares of the time of passes that are not products'; the optimizer's is not looked at."""
    layout = step.of_busiest
    parts = _parts_of(layout.graph)
    own = ~layout.calls.communicates & (layout.graph.phase_index != PHASES.index("optimizer"))
    seconds = np.bincount(parts[own], layout.calls.device_s[own], minlength=len(_BY_KIND) + 1)
    whole = float(seconds.sum()) or 1.0
    return {part: float(seconds[i]) / whole for i, part in enumerate(_BY_KIND)}


_BY_KIND = (ATTENTION, CONVOLUTIONS, OTHERS)


def kinds_of(step: Step) -> tuple[float, ...]:
    """Give the shares of attention, of convolutions and of other kernels than products in the time of
    passes."""
    shares = _by_kind(step)
    return tuple(shares[part] for part in _BY_KIND)


@functools.lru_cache(maxsize=64)
def _parts_of(graph: OpGraph) -> Index:
    """Say of each call which of ``_BY_KIND`` it counts as; one more for products."""
    parts = [_KINDS.get(traits(operator.name).kind, OTHERS) for operator in graph.operators]
    codes = np.array([len(_BY_KIND) if part is None else _BY_KIND.index(part) for part in parts])
    return np.asarray(codes[graph.operator_index])


@functools.lru_cache(maxsize=64)
def _has_experts(graph: OpGraph) -> bool:
    return any(weight.expert for weight in graph.weights) or any(
        traits(operator.name).kind == "grouped product" for operator in graph.operators
    )


def _is_estimated(job: Job) -> bool:
    """Whether operators are costed by what they would be: fused by a compiler, or in number formats whose
    kernels were not measured, or which the device has not."""
    training = job.workload.training
    wanted = training.precision.removeprefix("amp-")
    lacks = any(group.device.costed_as(wanted) != wanted for group in job.cluster.groups)
    return bool(training.compile) or wanted == "fp8" or lacks


def _network(job: Job) -> str:
    groups = job.cluster.groups
    if job.over_network:
        kinds = {group.inter_node.kind for group in groups}
        return SOCKETS if "ethernet" in kinds else EFA if "efa" in kinds else RDMA
    return SOCKETS if groups[0].device.is_cpu else INSIDE


def _looked_up(step: Step, costs: LearnedCosts) -> float:
    """The share of the device time in operators that were measured as they are."""
    layout = step.of_busiest
    graph, precision = layout.graph, layout.job.workload.training.precision
    known = _known_calls(costs, graph, layout.site.groups[0].device, precision)
    seconds = np.where(layout.calls.communicates, 0.0, layout.calls.device_s)
    return float(seconds[known].sum() / (seconds.sum() or 1.0))


@functools.lru_cache(maxsize=256)
def _known_calls(
    costs: LearnedCosts, graph: OpGraph, device: Device, precision: str
) -> npt.NDArray[np.bool_]:
    known: npt.NDArray[np.bool_] = costs.looked_up(graph.operators, device, precision)[graph.operator_index]
    return known


def bounds(parts: Mapping[str, float], widths: Mapping[str, Factors]) -> Factors:
    """The bounds of a step as multiples of its forecast: the parts' own, each by its share of the time."""
    logs = (sum(share * widths[part][i] for part, share in parts.items()) for i in range(4))
    return Factors(*(math.exp(log) for log in logs))


def memory_bounds(rank: RankMemory) -> dict[str, Factors]:
    """The bounds of what a rank has allocated and reserved, as multiples of its forecast."""
    widths = shipped_memory_widths()
    return {
        "peak_memory_bytes": bounds(memory_shares(rank, reserved=False), widths),
        "reserved_memory_bytes": bounds(memory_shares(rank, reserved=True), widths),
    }
