"""Costs the calls of a rank: what each takes on host and device."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from foretrain.cluster import Cluster, Device
from foretrain.costs.base import CostModel, HostModel
from foretrain.costs.cpu import crowding
from foretrain.costs.grouped import casts_s, issue_s, moved_bytes, uneven_factors
from foretrain.dispatching import dispatcher, spreads_by_chance
from foretrain.graph import PHASES, Operator, OpGraph
from foretrain.graph.opset import (
    communicates,
    is_attention,
    is_product,
    moves_rows,
    permutes,
    traits,
    waits,
)
from foretrain.graph.runs import FUSED
from foretrain.job import Job
from foretrain.plan import Choice, Dispatcher
from foretrain.step.frameworks import Profile, attention_factor, profile
from foretrain.step.launches import launched
from foretrain.step.messages import collective_s, network_of, on_efa
from foretrain.step.partition import blocks
from foretrain.step.spans import Column, Mask
from foretrain.step.teams import Teams
from foretrain.step.tuning import Tuning
from foretrain.workload import Training

COLLECTIVE_HOST_S = 25e-6
"""What the host needs to issue a collective, from Python to NCCL's kernel."""
READ_COUNTS = "moe.read_counts"
"""Where the host reads how many rows each expert has, which shapes all that follows in the layer."""
COPY_SHARE = 0.85
"""Of the memory's rate, by long copies."""
_SAVED = ("activations", "weights", "inputs")
"""What of the forward pass a backward operator reads."""
_KERNEL_S = 3e-6
"""Of a kernel that copies next to nothing."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Calls:
    """Host and device seconds of every op of the graph; collectives apart, as they are costed by their
    team."""

    host_s: Column
    device_s: Column
    """With a kernel of the op, or its collective, on the device."""
    kernels: Column
    gap_s: float
    """Between two kernels that follow at once; the device is not busy in it."""
    communicates: Mask
    multiplies: Mask
    """Which ops are matrix products, convolutions or attention."""
    attends: Mask
    """Which of these are attention."""
    outside: Mask
    """Which collectives leave the node."""
    waits: Mask
    """At which ops the host reads a result, and so waits for the device: of masks, mostly, which a framework
    with an attention of its own does not look at."""
    passes: dict[Hashable, Any] = field(default_factory=dict, repr=False)
    """What was worked out of these calls (``step/passes.py``), for other plans that share them."""

    @functools.cached_property
    def gaps_s(self) -> Column:
        return self.gap_s * self.kernels * ~self.communicates

    def tuned(self, tuning: Tuning) -> Calls:
        own = np.where(
            self.attends, tuning.attention, np.where(self.multiplies, tuning.products, tuning.traffic)
        )
        factor = np.where(self.communicates, np.where(self.outside, tuning.outside, tuning.inside), own)
        return dataclasses.replace(
            self, host_s=self.host_s * tuning.host, device_s=self.device_s * factor, passes={}
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Rank:
    """Says what the costs of a rank's calls depend on: plans that cut layers alike share them."""

    graph: OpGraph
    costs: CostModel
    host: HostModel
    where: Hashable
    """What of the place counts: its device where nothing is sent inside of layers; else ``site`` and the
    teams in it."""
    training: Training
    profile: Profile
    way: Dispatcher
    routing: Choice
    by_chance: bool
    """Whether experts have uneven numbers of rows."""
    balance: str
    saves_by_hooks: bool
    """Whether checkpoints hand what is saved to Python."""
    accumulation: int
    """Micro-batches, where the first of them runs other calls than the others; else 1."""
    gap_s: float
    job: Job = field(compare=False)
    site: Cluster = field(compare=False)
    """Where the rank is: the group that its stage lies on, or the whole cluster."""

    @classmethod
    def of(
        cls,
        job: Job,
        graph: OpGraph,
        costs: CostModel,
        host: HostModel,
        teams: Teams,
        site: Cluster,
        gap_s: float,
    ) -> Rank:
        plan, habits = job.plan, profile(job)
        whole = plan.recompute not in ("none", "selective") or habits.selective_recompute == "half"
        differs = graph.accumulates and not habits.keeps_fp32_gradients
        return cls(
            graph=graph,
            costs=costs,
            host=host,
            where=_place(graph, site, teams),
            training=job.workload.training.of_step,
            profile=habits,
            way=dispatcher(job),
            routing=plan.routing or "random",
            by_chance=spreads_by_chance(plan),
            balance=job.balance,
            saves_by_hooks=plan.recompute != "none"
            and whole
            and habits.checkpoint_hooks
            and not graph.recomputes,
            accumulation=job.accumulation if differs else 1,
            gap_s=gap_s,
            job=job,
            site=site,
        )


def _place(graph: OpGraph, site: Cluster, teams: Teams) -> Hashable:
    devices = {group.device for group in site.groups}
    device = site.groups[0].device
    inside = (teams.tensor, teams.context, teams.expert, teams.expert_tensor)
    if len(devices) > 1 or device.is_cpu or any(team.size > 1 for team in inside) or _sends(graph):
        return (site, *inside)
    return device


@functools.lru_cache(maxsize=256)
def _sends(graph: OpGraph) -> bool:
    return any(communicates(operator.name) for operator in graph.operators)


@functools.lru_cache(maxsize=256)
def cost_calls(rank: Rank) -> Calls:
    """Cost each distinct operator once, on the device that the others wait for."""
    job, graph, habits = rank.job, rank.graph, rank.profile
    operators, which, teams = graph.operators, graph.operator_index, Teams.of(job, rank.site)
    device, share = slowest_device(job, rank.site, graph, rank.costs)
    moving = np.array([communicates(operator.name) for operator in operators], dtype=np.bool_)
    device_s, kernels = _on_device(rank, teams, moving, device, share)
    # of CPUs, the thread that issues an operator also runs it
    host_s = np.zeros(len(which)) if device.is_cpu else _on_host(rank, teams, moving)
    own_share = _share_of_micro_batches(graph, rank.accumulation)

    def mask(values: Iterable[bool]) -> Mask:
        return np.fromiter(values, dtype=np.bool_, count=len(operators))[which]

    return Calls(
        host_s=host_s * own_share,
        device_s=device_s[which] * own_share,
        kernels=kernels[which] * own_share,
        gap_s=rank.gap_s,
        communicates=moving[which],
        multiplies=mask(operator.flops > 0 and operator.name != FUSED for operator in operators),
        attends=mask(_attends(operator) for operator in operators),
        outside=mask(
            communicates(operator.name) and teams.named(operator.overload).nodes > 1 for operator in operators
        ),
        waits=mask(
            not habits.issues_ahead
            or (waits(operator.name) and (operator.name == READ_COUNTS or not habits.flash_attention))
            for operator in operators
        ),
    )


def _on_device(rank: Rank, teams: Teams, moving: Mask, device: Device, share: float) -> tuple[Column, Column]:
    """Seconds on the device, and kernels, of each distinct operator; of those that are ``moving`` data
    between ranks, seconds on the network."""
    operators, training, habits = rank.graph.operators, rank.training, rank.profile
    own = [operator for operator, moves in zip(operators, moving, strict=True) if not moves]
    device_s, kernels = np.zeros(len(operators)), np.ones(len(operators))
    device_s[~moving] = share * rank.costs.device_time_s(own, device, training.precision)
    kernels[~moving] = rank.costs.kernels(own, device, training.precision)
    if rank.by_chance:
        device_s *= uneven_factors(operators)
    if training.precision == "fp8":
        device_s += casts_s(operators, device, training.fp8_recipe)
    _copy_only(operators, device, device_s, all_indexing=habits.fuses_permutation)
    device_s *= _as_the_framework_has_it(operators, device, habits)
    least_s = habits.tensor_message_s if on_efa(rank.site) else 0.0
    for i in np.flatnonzero(moving).tolist():
        device_s[i] = collective_s(
            operators[i], network_of(rank.site), teams, least_s, rank.way, rank.routing
        )
    if device.is_cpu:
        workers = rank.site.workers_per_core(device)
        device_s[~moving] *= workers * crowding(rank.site.busy_cores(device) / workers)
    return device_s, kernels


def _on_host(rank: Rank, teams: Teams, moving: Mask) -> Column:
    """Seconds in which the host of a GPU issues each call of the graph."""
    graph, host, training, habits = rank.graph, rank.host, rank.training, rank.profile
    which = graph.operator_index
    host_s = _issue_s(graph, host) * habits.host
    if training.mode == "infer":
        host_s *= host.unrecorded
    if rank.saves_by_hooks:
        host_s += host.hook_time_s * habits.host * _OF_SAVED * _hooks(graph)
    if habits.products_by_expert:
        recipe = training.fp8_recipe if training.precision == "fp8" else None
        host_s += issue_s(graph.operators, recipe, by_chance=rank.by_chance)[which]
    if teams.tensor.size > 1:
        host_s += _of_cut_layers(graph, habits) / host.speed
    host_s[moving[which]] = COLLECTIVE_HOST_S
    return host_s if training.compile else launched(host_s, graph, training.cuda_graphs)


def _attends(operator: Operator) -> bool:
    """Whether an operator is attention, or one of the kernels that it is written out in."""
    if is_attention(operator.name) or traits(operator.name).kind == "batched product":
        return True
    parts = operator.args.get("ops", ()) if operator.name == FUSED else (operator.name,)
    return bool(_SOFTMAX.intersection(parts)) and len(operator.outputs[0].shape) > _ROWS


_SOFTMAX = frozenset({"_softmax", "_softmax_backward_data"})
_ROWS = 2
"""Dimensions of logits; scores have more."""


def _of_cut_layers(graph: OpGraph, habits: Profile) -> Column:
    """Host seconds beside each product of layers that tensor parallelism cuts."""
    multiplies = np.array([is_product(operator.name) for operator in graph.operators], dtype=np.bool_)
    forward, backward = habits.cut_product_s
    by_phase = np.array([{"forward": forward, "backward": backward}.get(phase, 0.0) for phase in PHASES])
    return by_phase[graph.phase_index] * multiplies[graph.operator_index]


def _share_of_micro_batches(graph: OpGraph, accumulation: int) -> Column:
    """Give the share of a step's micro-batches that run each op: the first one hands its gradients over, the
    others add to them, unless gradients are sums in fp32 that stay from step to step (``accumulation`` of
    1)."""
    shares = np.ones(len(graph.ops))
    if accumulation > 1:
        shares[graph.adds_to_gradients] = 1.0 - 1.0 / accumulation
    return shares


def _issue_s(graph: OpGraph, host: HostModel) -> Column:
    """Host seconds of every op, by its operator and phase, with the hooks of checkpoints; what is computed
    again runs as it did in the forward pass."""
    phase = np.where(graph.recomputed, PHASES.index("forward"), graph.phase_index)
    pairs, which = np.unique(graph.operator_index * len(PHASES) + phase, return_inverse=True)
    issued = [divmod(pair, len(PHASES)) for pair in pairs.tolist()]
    operators = [graph.operators[operator] for operator, _ in issued]
    calls = host.issue_time_s(operators, [PHASES[phase] for _, phase in issued])[which]
    called = np.array([op.hooks for op in graph.ops], dtype=np.float64)
    return calls + called * host.hook_time_s


_OF_SAVED = 2.1
"""Calls of hooks for a tensor that is saved or read, with a share of what a checkpoint costs by itself
(0.3 ms: states of random numbers, contexts), as a layer saves some thirty tensors."""


def _hooks(graph: OpGraph) -> Column:
    """Count the tensors that each call inside of a layer hands to the hooks of a checkpoint as they are saved
    for the backward pass, which is once more where it is computed again; or takes from them."""
    layers = [block.piece for block in blocks(graph) if block.is_layer]
    first = int(np.argmax(graph.phase_index == PHASES.index("backward")))
    makers: dict[int, int] = {}
    for piece in layers:
        for i in piece.forward.tolist():
            makers.update(dict.fromkeys(graph.ops[i].writes, i))
    hooks = np.zeros(len(graph.ops))
    for i in {call for piece in layers for call in piece.backward.tolist()}:
        for buffer in graph.ops[i].reads:
            if graph.buffers[buffer].category in _SAVED and graph.buffers[buffer].born < first:
                hooks[i] += 1
                if buffer in makers:
                    hooks[makers[buffer]] += 1
    return hooks


def _copy_only(
    operators: Sequence[Operator], device: Device, device_s: Column, *, all_indexing: bool
) -> None:
    """Kernels that move rows of tokens, and with ``all_indexing`` all that index, at the speed of a copy."""
    copied_s = _KERNEL_S + moved_bytes(operators) / (COPY_SHARE * device.memory_bytes_per_s)
    for i, operator in enumerate(operators):
        if moves_rows(operator.name):
            device_s[i] = copied_s[i]
        elif all_indexing and permutes(operator.name):
            device_s[i] = min(device_s[i], copied_s[i])


def _as_the_framework_has_it(operators: Sequence[Operator], device: Device, habits: Profile) -> Column:
    """Factors on device times: the framework's attention, and what a window spares it."""
    attention = attention_factor(habits, float(device.capability or 0))
    factors = np.ones(len(operators))
    for i, operator in enumerate(operators):
        if operator.flops:
            factors[i] = attention * _window_share(operator) if is_attention(operator.name) else 1.0
    return factors


_WINDOW_TILE = 128
"""Keys that an attention kernel works on at once: a window begins and ends somewhere in such a tile."""


def _window_share(operator: Operator) -> float:
    """Give the share of the keys that causal attention meets on average that lie in its window."""
    window = operator.args.get("window")
    if window is None:
        return 1.0
    keys = operator.inputs[2 if traits(operator.name).backward else 1].shape[-2]
    return float(min(1.0, 2 * (int(window) + _WINDOW_TILE) / keys))


def slowest_device(job: Job, site: Cluster, graph: OpGraph, costs: CostModel) -> tuple[Device, float]:
    """The device that the others wait for, and the share of its even work that it has where the batch is
    split by speed."""
    times, shares = speeds(job, site, graph, costs)
    slowest = max(range(len(times)), key=lambda i: times[i])
    return site.groups[slowest].device, 1.0 if job.balance == "even" else shares[slowest]


def speeds(job: Job, site: Cluster, graph: OpGraph, costs: CostModel) -> tuple[list[float], list[float]]:
    """Give, of each group, the time that an even part of the batch takes, and the part that makes all take as
    long."""
    groups = site.groups
    if len({group.device for group in groups}) == 1:
        return [1.0] * len(groups), [1.0] * len(groups)
    calls = np.bincount(graph.operator_index, minlength=len(graph.operators))
    computing = [i for i, operator in enumerate(graph.operators) if not communicates(operator.name)]
    own, precision = [graph.operators[i] for i in computing], job.workload.training.precision
    times = [float(calls[computing] @ costs.device_time_s(own, group.device, precision)) for group in groups]
    together = sum(group.world_size / time for group, time in zip(groups, times, strict=True))
    return times, [site.world_size / (together * time) for time in times]
