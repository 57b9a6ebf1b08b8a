"""Lays a job out on its ranks: the graph of one, stages and teams, and what each call costs on host, device
and network."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from foretrain.cluster import Cluster, Device
from foretrain.costs.base import CostModel, HostModel
from foretrain.costs.collectives import Collectives, Kind, Team
from foretrain.costs.compiled_host import CompiledHost
from foretrain.costs.cpu import crowding
from foretrain.costs.dispatch import KERNELS, Direction, exchange_s
from foretrain.costs.grouped import casts_s, issue_s, moved_bytes, uneven_factors
from foretrain.dispatching import choices_of, dispatcher, distinct, spreads_by_chance
from foretrain.graph import PHASES, Operator, OpGraph, TensorSpec
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
from foretrain.recent import Fresh
from foretrain.step.dealing import Dealt
from foretrain.step.frameworks import Profile, attention_factor, profile
from foretrain.step.graph import as_compiled, step_graph
from foretrain.step.launches import launched
from foretrain.step.partition import Stage, Teams, blocks, stages
from foretrain.step.recomputed_modules import check_modules
from foretrain.step.spans import Column, Mask
from foretrain.workload import Training

COLLECTIVE_HOST_S = 25e-6
"""What the host needs to issue a collective, from Python to NCCL's kernel."""
READ_COUNTS = "moe.read_counts"
"""Where the host reads how many rows each expert has, which shapes all that follows in the layer."""
COPY_SHARE = 0.85
"""Of the memory's rate, by long copies."""
KINDS: dict[str, Kind] = {
    "all_reduce": "all_reduce",
    "all_gather": "all_gather",
    "reduce_scatter": "reduce_scatter",
    "all_to_all": "all_to_all",
    "send_recv": "send",
}
"""What the collectives of a graph are to the network."""
_MESSAGE_HOST_S = 60e-6
_SLOWDOWN = 0.22
"""Hidden communication takes this share of its time from the matrix products beside it: NCCL's kernels hold
16 to 24 of some 130 processors, and products that are laid out for all of them run 1.25 to 1.34 times as long
beside as many blocks that copy (``data/studies/h200_contention.jsonl``)."""
_OF_PROCESSORS = 0.25
"""Processors that collectives take of registered buffers, over those of others: 6 or fewer instead of 16 to
24 (NVIDIA on NCCL 2.27)."""
_SAVED = ("activations", "weights", "inputs")
"""What of the forward pass a backward operator reads."""
_KERNEL_S = 3e-6
"""Of a kernel that copies next to nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tuning:
    """Factors on the parts of a step on many devices, neutral by default; a calibration finds them for a
    device and framework."""

    products: float = 1.0
    """On the time of matrix products and convolutions."""
    attention: float = 1.0
    traffic: float = 1.0
    """On the time of all other kernels."""
    host: float = 1.0
    """On the time of the host."""
    inside: float = 1.0
    """On the time of communication inside a node."""
    outside: float = 1.0
    """On that between nodes."""
    hop_s: float = 0.0
    """What each step of a ring of replicas on several nodes takes beside its transfer."""
    message_s: float = _MESSAGE_HOST_S
    """What each message of a pipeline costs beside its transfer."""
    stalls: float = 1.0
    """On the framework's own stalls in a pipeline."""
    step_s: float = 0.0
    """Time per step that belongs to no operator."""
    slowdown: float = _SLOWDOWN
    """What hidden communication takes from products, as a share of its time."""
    activations: float = 1.0
    """On the memory of activations and temporaries."""
    memory_bytes: float = 0.0
    """Memory of each rank that nothing else accounts for."""

    def team(self, members: Team) -> float:
        return self.outside if members.nodes > 1 else self.inside


@dataclass(frozen=True, kw_only=True, eq=False)
class Layout:
    """A job on its ranks, costed: what its step is played from."""

    job: Job
    graph: OpGraph
    profile: Profile
    stages: tuple[Stage, ...]
    teams: Teams
    calls: Calls
    network: Collectives
    step_overhead_s: float
    """Host time per step that belongs to no operator."""
    host_speed: float = 1.0
    """How much faster the host is than the one that figures come from."""
    tuning: Tuning = field(default_factory=Tuning)
    shares: tuple[float, ...] = ()
    """Of an even part of the batch, what a device of each group gets where it is split by speed."""
    part: Cluster | None = None
    """The group that its ranks are of, where stages lie on groups that differ; None for all of the
    cluster."""
    by_group: tuple[Layout, ...] = ()
    """Of a pipeline over groups that differ: the same as the ranks of each group see it."""
    dealt: Dealt | None = None
    """How layers were dealt out by the speed of such stages."""
    passes: Fresh = field(default_factory=Fresh, init=False, repr=False)
    """What ``step/passes.py`` has worked out of it."""

    @property
    def site(self) -> Cluster:
        """Where its ranks are."""
        return self.part or self.job.cluster

    def at(self, stage: Stage) -> Layout:
        """The layout as the ranks of a stage see it: calls, teams, network and host of their group."""
        return self.by_group[stage.group] if self.by_group else self

    def dealt_out(self, stages: tuple[Stage, ...], dealt: Dealt) -> Layout:
        """The same with other layers on its stages."""
        views = tuple(dataclasses.replace(view, stages=stages) for view in self.by_group)
        return dataclasses.replace(self, stages=stages, by_group=views, dealt=dealt)

    def of_job(self, job: Job) -> Layout:
        """The same of a job that differs in its length alone."""
        views = tuple(view.of_job(job) for view in self.by_group)
        other = dataclasses.replace(self, job=job, by_group=views)
        other.passes.update(self.passes)
        return other

    @property
    def slowdown(self) -> float:
        """Of hidden communication's time, what it takes from the computation beside it."""
        return self.tuning.slowdown * (_OF_PROCESSORS if self.job.plan.registered_buffers else 1.0)

    def tuned(self, tuning: Tuning) -> Layout:
        """The same with other factors; to be called on a layout without any."""
        if tuning == Tuning():
            return self
        overhead_s = self.step_overhead_s * tuning.host + tuning.step_s
        return dataclasses.replace(
            self,
            calls=self.calls.tuned(tuning),
            step_overhead_s=overhead_s,
            tuning=tuning,
            by_group=tuple(view.tuned(tuning) for view in self.by_group),
        )


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


def lay_out(
    job: Job, costs: CostModel, host: HostModel, *, hosts: Sequence[HostModel] = (), gap_s: float = 0.0
) -> Layout:
    """Capture, partition and cost a job; what it cannot be split into is an error that names the numbers.

    ``hosts`` are those of the cluster's distinct groups where they differ. Layers are dealt out as the plan
    or its framework says; ``step/balance.py`` deals them out by speed.
    """
    job = as_compiled(job)
    graph = step_graph(job)
    check_modules(job.plan, graph)
    dealt, groups = stages(job, graph, profile(job)), job.cluster.distinct_groups
    if len(groups) == 1 or job.plan.pipeline == 1:
        return _on(job, graph, dealt, costs, host, None, gap_s)
    views = tuple(
        _on(job, graph, dealt, costs, own, job.cluster.alone(group), gap_s)
        for group, own in zip(groups, hosts or [host] * len(groups), strict=True)
    )
    slowest = max(views, key=lambda view: float(view.calls.device_s.sum()))
    overhead_s = max(view.step_overhead_s for view in views)
    return dataclasses.replace(slowest, part=None, by_group=views, step_overhead_s=overhead_s)


def _on(
    job: Job,
    graph: OpGraph,
    dealt: tuple[Stage, ...],
    costs: CostModel,
    host: HostModel,
    part: Cluster | None,
    gap_s: float,
) -> Layout:
    """The layout as ranks on a part of the cluster see it, or all of its ranks."""
    habits, site = profile(job), part or job.cluster
    host = _compiled_host(job, graph, host) if job.workload.training.compile else host
    teams = Teams.of(job, site)
    rank = _Rank.of(job, graph, costs, host, teams, site, gap_s)
    splits = part is None and job.balance == "speed"
    return Layout(
        job=job,
        graph=graph,
        profile=habits,
        stages=dealt,
        teams=teams,
        calls=_cost_calls(rank),
        network=_network(site),
        step_overhead_s=host.step_overhead_s + habits.step_s,
        host_speed=host.speed / habits.host,
        shares=tuple(_speeds(job, site, graph, costs)[1]) if splits else (),
        part=part,
    )


def _compiled_host(job: Job, graph: OpGraph, host: HostModel) -> HostModel:
    training = job.workload.training
    stacked = graph.stack and training.mode == "train"
    trained = sum(weight.trainable for weight in graph.weights) if stacked else 0
    return CompiledHost(
        plain=host,
        parameters=trained or sum(buffer.category == "gradients" for buffer in graph.buffers),
        mode=training.mode,
        micro_batches=job.accumulation,
        graphs=training.cuda_graphs != "none",
    )


_network = functools.lru_cache(maxsize=64)(Collectives)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Rank:
    """What the calls of a rank cost depends on: plans that cut layers alike share them."""

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
    ) -> _Rank:
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
def _cost_calls(rank: _Rank) -> Calls:
    """Cost each distinct operator once, on the device that the others wait for."""
    job, graph, costs, host, habits = rank.job, rank.graph, rank.costs, rank.host, rank.profile
    operators, training, teams = graph.operators, rank.training, Teams.of(job, rank.site)
    precision = training.precision
    device, share = slowest_device(job, rank.site, graph, costs)
    own = [operator for operator in operators if not communicates(operator.name)]
    moving = np.array([communicates(operator.name) for operator in operators], dtype=np.bool_)
    device_s, kernels = np.zeros(len(operators)), np.ones(len(operators))
    device_s[~moving] = share * costs.device_time_s(own, device, precision)
    kernels[~moving] = costs.kernels(own, device, precision)
    if rank.by_chance:
        device_s *= uneven_factors(operators)
    if precision == "fp8":
        device_s += casts_s(operators, device, training.fp8_recipe)
    _copy_only(operators, device, device_s, all_indexing=habits.fuses_permutation)
    device_s *= _as_the_framework_has_it(operators, device, habits)
    least_s = habits.tensor_message_s if on_efa(rank.site) else 0.0
    for i in np.flatnonzero(moving).tolist():
        device_s[i] = collective_s(operators[i], _network(rank.site), teams, least_s, rank.way, rank.routing)
    host_s = _issue_s(graph, host) * habits.host
    if training.mode == "infer":
        host_s *= host.unrecorded
    if rank.saves_by_hooks:
        host_s += host.hook_time_s * habits.host * _OF_SAVED * _hooks(graph)
    which = graph.operator_index
    if habits.products_by_expert:
        recipe = training.fp8_recipe if precision == "fp8" else None
        host_s += issue_s(operators, recipe, by_chance=rank.by_chance)[which]
    if teams.tensor.size > 1:
        host_s += _of_cut_layers(graph, habits) / host.speed
    host_s[moving[which]] = COLLECTIVE_HOST_S
    if not training.compile:
        host_s = launched(host_s, graph, training.cuda_graphs)
    if device.is_cpu:  # the thread that issues an operator also runs it
        beside = max(group.devices_per_node for group in rank.site.groups if group.device == device)
        device_s[~moving] *= crowding(beside * device.cores)
        host_s = np.zeros(len(host_s))

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
    """Of a step's micro-batches, those that run each op: the first one hands its gradients over, the others
    add to them, unless gradients are sums in fp32 that stay from step to step (``accumulation`` of 1)."""
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
    """How many tensors each call inside of a layer hands to the hooks of a checkpoint as they are saved for
    the backward pass, which is once more where it is computed again; or takes from them."""
    layers = [block.piece for block in blocks(graph) if block.is_layer]
    first = int(np.argmax(graph.phase_index == PHASES.index("backward")))
    makers: dict[int, int] = {}
    for piece in layers:
        for i in piece.forward.tolist():
            makers.update(dict.fromkeys(graph.ops[i].writes, i))
    found = np.zeros(len(graph.ops))
    for i in {call for piece in layers for call in piece.backward.tolist()}:
        for buffer in graph.ops[i].reads:
            if graph.buffers[buffer].category in _SAVED and graph.buffers[buffer].born < first:
                found[i] += 1
                if buffer in makers:
                    found[makers[buffer]] += 1
    return found


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
    """Of the keys that causal attention meets on average, those that lie in its window."""
    window = operator.args.get("window")
    if window is None:
        return 1.0
    keys = operator.inputs[2 if traits(operator.name).backward else 1].shape[-2]
    return float(min(1.0, 2 * (int(window) + _WINDOW_TILE) / keys))


def slowest_device(job: Job, site: Cluster, graph: OpGraph, costs: CostModel) -> tuple[Device, float]:
    """The device that the others wait for, and the share of its even work that it has where the batch is
    split by speed."""
    times, shares = _speeds(job, site, graph, costs)
    slowest = max(range(len(times)), key=lambda i: times[i])
    return site.groups[slowest].device, 1.0 if job.balance == "even" else shares[slowest]


def _speeds(job: Job, site: Cluster, graph: OpGraph, costs: CostModel) -> tuple[list[float], list[float]]:
    """Of each group, the time that an even part of the batch takes, and the part that makes all take as
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


def memory_rate(layout: Layout) -> float:
    return min(group.device.memory_bytes_per_s for group in layout.site.groups)


def on_efa(site: Cluster) -> bool:
    """Whether nodes are joined by EFA, where the stalls of frameworks that are known were seen."""
    return any(group.inter_node.kind == "efa" for group in site.groups)


def collective_s(
    operator: Operator,
    network: Collectives,
    teams: Teams,
    tensor_message_s: float = 0.0,
    way: Dispatcher = "alltoall",
    routing: Choice = "random",
) -> float:
    """One call of a collective that the graph holds."""
    members = teams.named(operator.overload)
    if way in KERNELS and operator.name == "all_to_all" and operator.overload == "expert":
        return _token_exchange_s(operator, network, members, way, routing)
    least = tensor_message_s * members.size if operator.overload == "tensor" and members.nodes > 1 else 0.0
    return max(least, network.time_s(KINDS[operator.name], message_bytes(operator), members))


_LEAST_WIDTH = 256
"""Of what counts as a token: narrower rows are weights that travel along."""


def _token_exchange_s(
    operator: Operator, network: Collectives, members: Team, way: Dispatcher, routing: Choice
) -> float:
    """Of tokens to their experts, where more rows come out than go in, or back. DeepEP gives a row for each
    rank that a token goes to, HybridEP for each expert."""
    given, taken = operator.inputs[0], operator.outputs[0]
    if len(given.shape) < 2 or given.shape[-1] < _LEAST_WIDTH:
        return 0.0
    placed, rates = network.placement(members), network.rates(members)
    tokens, rows = sorted((given.numel // given.shape[-1], taken.numel // taken.shape[-1]))
    copies = rows / tokens if way == "deepep" else distinct(rows / tokens, placed.size)
    if routing == "round-robin":
        reached = 1 + (copies - 1) / placed.per_domain
    else:
        reached = distinct(choices_of(copies, placed.size), placed.domains)
    times = [
        exchange_s(
            way,
            direction,
            tokens=tokens,
            copies=copies,
            reached=min(reached, placed.domains),
            width_bytes=given.size_bytes / given.numel * given.shape[-1],
            near=placed.per_domain,
            domains=placed.domains,
            inside_bytes_per_s=rates.inside_bytes_per_s,
            outside_bytes_per_s=rates.outside_bytes_per_s,
        )
        for direction in _directions(given, taken)
    ]
    return sum(times) / len(times)


def _directions(given: TensorSpec, taken: TensorSpec) -> tuple[Direction, ...]:
    """Which way tokens go; either, half of the time, where each goes to one rank alone."""
    if given.numel == taken.numel:
        return ("dispatch", "combine")
    return ("dispatch",) if taken.numel > given.numel else ("combine",)


def message_bytes(operator: Operator) -> float:
    """The size of a collective as ``Collectives`` counts it; of an all-to-all, the larger of what goes out
    and comes in."""
    inputs, outputs = (
        sum(spec.size_bytes for spec in specs) for specs in (operator.inputs, operator.outputs)
    )
    if operator.name == "all_to_all":
        return float(max(inputs, outputs))
    return float(outputs if operator.name == "all_gather" else inputs)
