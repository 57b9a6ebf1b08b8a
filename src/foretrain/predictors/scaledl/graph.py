"""Turns a played step into the graph that the network sees: layers of all stages, and the collectives between
them."""

from __future__ import annotations

import functools
import math
from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from foretrain.graph import PHASES, OpGraph, Phase
from foretrain.job import Job
from foretrain.predictors.deletepop.spread import kinds_of
from foretrain.step.layout import Layout
from foretrain.step.messages import KINDS, message_bytes
from foretrain.step.partition import Stage
from foretrain.step.passes import Pass, kind_of, optimizer_pass, passes_by_kind
from foretrain.step.play import Step
from foretrain.step.playback import Work

NODES_AT_MOST = 192
"""A step with more layers than this has its innermost layers joined to those that hold them, as far as they
are nested."""

TEAMS = ("tensor", "context", "expert", "replicas", "stages")
"""Whom the collectives of a step are among."""
SIZES = ("flops", "bytes", "kernels", "launches", "sent", "stages_alike")
NODE_COLUMNS = (
    "device_time", "host_time", *SIZES, "device_share", "host_share", "exposed", "outside", *PHASES, *TEAMS,
)  # fmt: skip
"""Times and sizes as logarithms; ``exposed`` is the share of a collective's time that the device waits."""
CAUSES = (
    "computation", "exposed communication", "gaps between kernels", "pipeline bubble", "waiting for the host",
    "waiting for the slowest rank",
)  # fmt: skip
FRAMEWORKS = ("pytorch", "megatron", "nanotron", "llm-foundry", "adaptdl", "torchtitan")
"""Those that have a column of their own; others have none set."""
LINKS = ("efa", "ethernet")
"""Links between nodes that behave in their own way; InfiniBand and the like have none set."""
PLAN_COLUMNS = (
    "devices", "nodes", "tensor", "pipeline", "data", "context", "expert", "micro_batches", "micro_batch",
    "shard", "recompute", "infer", "full_precision", "fp8", *FRAMEWORKS, *LINKS,
)  # fmt: skip
"""What the job says: numbers as logarithms to base 2."""
TIME_COLUMNS = (
    "device_time", "host_time", "host_over_device", "kernel_time", "replicas_over_step", "stages_over_step",
    *CAUSES, "attention", "convolutions", "other_kernels",
)  # fmt: skip
"""What the engine says: times as logarithms, parts as shares."""
RUN_COLUMNS = (*TIME_COLUMNS, *PLAN_COLUMNS)
DESIGN_COLUMNS = (
    "device_time", "host_over_device", "kernel_time", "devices", "exposed communication", "pipeline bubble",
)  # fmt: skip
"""Those of a run that say most of what the engine may miss: in these, their squares and their products, a
design spreads the runs that networks learn from."""
_SHARDS = ("none", "zero1", "zero2", "zero3")
_RECOMPUTED = {"none": 0.0, "selective": 0.5, "operators": 0.5}
_LEAST_S = 1e-9

Column = npt.NDArray[np.float64]


@dataclass(frozen=True, eq=False, kw_only=True)
class LayerGraph:
    """A step as the network sees it: one node per layer and phase of each kind of stage and per collective,
    an edge wherever the data of one flow into another."""

    nodes: npt.NDArray[np.float32]
    """A row per node, as ``NODE_COLUMNS`` names it."""
    edges: npt.NDArray[np.int64]
    """Two rows: from, to."""
    share: npt.NDArray[np.float32]
    """How much each node counts when the nodes are summed up: its part of the device's time."""
    run: npt.NDArray[np.float32]
    """As ``RUN_COLUMNS`` names it."""
    base_s: float
    """The step time that is corrected: the engine's."""
    additive_s: float
    """All computation and all communication of the busiest rank, one after the other."""
    busy_s: float
    """The time that the engine has the device busy."""


def layer_graph(step: Step) -> LayerGraph:
    """Operator costs summed up by layer and phase, collectives by their team, and the flow of data."""
    layout = step.layout
    nodes = _Nodes()
    stages = _stage_kinds(layout)
    passes = passes_by_kind(layout)
    depth = _depth(layout.graph, max(8, NODES_AT_MOST // len(stages)))
    for number, (stage, alike) in enumerate(stages):
        _add_stage(nodes, step, stage, alike, passes, depth, number)
    _add_messages(nodes, step, [stage.index for stage, _ in stages])
    return nodes.graph(step, next(i for i, (_, alike) in enumerate(stages) if step.busiest in alike))


def _stage_kinds(layout: Layout) -> list[tuple[Stage, list[int]]]:
    """A stage of each kind, and the places of those alike."""
    kinds: dict[Hashable, tuple[Stage, list[int]]] = {}
    for place, stage in enumerate(layout.stages):
        kind = tuple(kind_of(layout, stage, block) for block in stage.blocks)
        kinds.setdefault(kind, (stage, []))[1].append(place)
    return list(kinds.values())


class _Nodes:
    """Nodes as they are found, and the edges between them."""

    def __init__(self) -> None:
        self.columns: list[Column] = []
        """Of each stage, rows as ``_Part`` has them."""
        self.count = 0
        self.edges: list[npt.NDArray[np.int64]] = []
        self.stage_of: list[int] = []
        self.ends: dict[tuple[int, Phase], tuple[int, int]] = {}
        """Of each kind of stage and pass, its first and its last node."""

    def add(self, rows: Column, stage: int) -> int:
        """The number of the first of these nodes."""
        first = self.count
        self.columns.append(rows)
        self.count += len(rows)
        self.stage_of += [stage] * len(rows)
        return first

    def join(self, sources: Sequence[int] | npt.NDArray[np.int64], targets: Sequence[int]) -> None:
        """Edges from each source to each target."""
        if len(sources) and len(targets):
            pairs = np.array([(a, b) for a in sources for b in targets if a != b], dtype=np.int64)
            self.edges.append(pairs.reshape(-1, 2))

    def graph(self, step: Step, busiest: int) -> LayerGraph:
        rows = np.concatenate(self.columns)
        of_busiest = np.array(self.stage_of) == busiest
        device_s, host_s, alike = rows[:, 0], rows[:, 1], rows[:, 7]
        weight = device_s * rows[:, 8] * alike
        share = weight / max(float(weight.sum()), 1e-12)
        host = host_s * alike
        host_share = host / max(float(host.sum()), 1e-12)
        units = np.array([1e6, 1e6, 1e-6, 1e-3, 1.0, 1.0, 1e-3, 1.0])
        nodes = np.column_stack([np.log1p(rows[:, :8] * units), share, host_share, rows[:, 8:]])
        edges = np.concatenate([*self.edges, np.zeros((0, 2), np.int64)])
        edges = np.unique(edges, axis=0)
        additive_s = float(device_s[of_busiest].sum())
        teams = rows[:, 10 + len(PHASES) :]
        outside = [float((device_s * teams[:, TEAMS.index(name)])[of_busiest].sum()) for name in TEAMS[-2:]]
        return LayerGraph(
            nodes=nodes.astype(np.float32),
            edges=np.ascontiguousarray(edges.T),
            share=share.astype(np.float32),
            run=np.array(_run_columns(step, *outside), dtype=np.float32),
            base_s=max(step.time_s, _LEAST_S),
            additive_s=max(additive_s, _LEAST_S),
            busy_s=max(step.device_busy_s, _LEAST_S),
        )


def _rows(count: int, alike: int) -> Column:
    """Empty nodes: device and host seconds, FLOPs, bytes, kernels, launches, bytes sent, stages alike, the
    share that is exposed, whether a collective leaves the node, phases, teams."""
    rows = np.zeros((count, 10 + len(PHASES) + len(TEAMS)))
    rows[:, 7], rows[:, 8] = alike, 1.0
    return rows


_DEVICE, _HOST, _FLOPS, _BYTES, _KERNELS, _LAUNCHES, _SENT, _ALIKE, _EXPOSED, _OUTSIDE = range(10)
_PHASE, _TEAM = 10, 10 + len(PHASES)


def _add_stage(
    nodes: _Nodes,
    step: Step,
    stage: Stage,
    alike: Sequence[int],
    passes: dict[tuple[int, int, bool], tuple[Pass, Pass]],
    depth: int,
    key: int,
) -> None:
    """Add the layers of a kind of stage by phase, the collectives of its teams, and what its replicas
    exchange."""
    layout = step.layout.at(stage)
    work, place = step.works[alike[0]], stage.index
    parts = _parts_of_stage(step, stage, passes)
    groups, names = _groups(layout.graph, depth)
    ops = np.concatenate([calls.op for _, calls, _ in parts]) if parts else np.zeros(0, np.int64)
    phase = np.concatenate([np.full(len(calls.op), number) for number, calls, _ in parts])
    weight = np.concatenate([np.full(len(calls.op), factor) for _, calls, factor in parts])
    busy = np.concatenate([calls.busy_s for _, calls, _ in parts])
    host = np.concatenate([calls.host_s for _, calls, _ in parts])
    moving, calls, graph = layout.calls.communicates, layout.calls, layout.graph
    label = phase * (len(names) + len(TEAMS)) + np.where(
        moving[ops], len(names) + _teams(graph)[ops], groups[ops]
    )
    used, node = np.unique(label, return_inverse=True)
    rows = _rows(len(used), len(alike))

    def by_node(values: Column) -> Column:
        return np.bincount(node, values * weight, minlength=len(used)).astype(np.float64)

    full = np.where(moving[ops], calls.device_s[ops], busy)
    rows[:, _DEVICE], rows[:, _HOST] = by_node(full), by_node(host)
    for column, name in ((_FLOPS, "flops"), (_BYTES, "bytes"), (_LAUNCHES, "launches")):
        rows[:, column] = by_node(graph.column(name)[ops])
    rows[:, _KERNELS] = by_node(calls.kernels[ops])
    if moving.any():
        rows[:, _SENT] = by_node(_sent(graph)[ops])
        exposed = by_node(busy) / np.maximum(rows[:, _DEVICE], 1e-12)
        own = used % (len(names) + len(TEAMS)) - len(names)
        rows[:, _EXPOSED] = np.where(own >= 0, np.clip(exposed, 0.0, 1.0), 1.0)
        rows[own >= 0, _TEAM + own[own >= 0]] = 1.0
        rows[:, _OUTSIDE] = by_node(calls.outside[ops].astype(np.float64)) > 0
    which = used // (len(names) + len(TEAMS))
    rows[np.arange(len(used)), _PHASE + which] = 1.0
    for number, own_pass, factor in parts:
        if own_pass.beside_s and (which == number).any():
            rows[np.flatnonzero(which == number)[-1], _DEVICE] += own_pass.beside_s * factor
    first = nodes.add(rows, key)
    _add_flow(nodes, graph, ops, label, used, phase, first)
    order = {number: first + np.flatnonzero(which == number) for number in range(3)}
    for number, name in enumerate(PHASES[:2]):
        if len(order[number]):
            chosen = phase == number
            begin, end = node[chosen][0], node[chosen][-1]
            nodes.ends[place, name] = first + int(begin), first + int(end)
    times = layout.job.accumulation // stage.copies
    _add_replicas(nodes, step, stage, work, times, len(alike), order, key)


def _parts_of_stage(
    step: Step, stage: Stage, passes: dict[tuple[int, int, bool], tuple[Pass, Pass]]
) -> list[tuple[int, Pass, float]]:
    """List the passes of a stage that hold something, each with the number of its phase and how often it runs
    in a step."""
    layout = step.layout.at(stage)
    times = layout.job.accumulation // stage.copies
    counts = Counter(kind_of(step.layout, stage, block) for block in stage.blocks)
    parts = [
        (number, own_pass, float(times * count))
        for kind, count in counts.items()
        for number, own_pass in enumerate(passes[kind])
        if len(own_pass.op) or own_pass.beside_s
    ]
    update = optimizer_pass(layout, stage)
    if layout.job.trains and (len(update.op) or update.beside_s):
        parts.append((2, update, 1.0))
    return parts


def _add_flow(
    nodes: _Nodes,
    graph: OpGraph,
    ops: npt.NDArray[np.int64],
    label: npt.NDArray[np.int64],
    used: npt.NDArray[np.int64],
    phase: npt.NDArray[np.int64],
    first: int,
) -> None:
    """Edges between the nodes of a stage; what is computed again counts where it runs."""
    node_of = np.full(len(graph.ops), -1, dtype=np.int64)
    own = phase == np.minimum(graph.phase_index[ops], 2)
    node_of[ops[own]] = np.searchsorted(used, label[own])
    source, target = _flow(graph)
    a, b = node_of[source], node_of[target]
    kept = (a >= 0) & (b >= 0) & (a != b)
    if kept.any():
        pairs = np.unique(a[kept] * len(used) + b[kept])
        nodes.edges.append(first + np.column_stack([pairs // len(used), pairs % len(used)]))


def _add_replicas(
    nodes: _Nodes, step: Step, stage: Stage, work: Work, times: int, alike: int,
    order: dict[int, npt.NDArray[np.int64]], key: int,
) -> None:  # fmt: skip
    """Add what a rank exchanges with its replicas in each phase, and how much of it the device waits for."""
    fetched = 1 if work.syncs_last else times
    forward = sum(work.gathers_s) * fetched
    backward = (
        sum(work.again_s) * times
        + (sum(work.reduces_s) + sum(work.copies_s)) * fetched
        + sum(seconds for _, seconds in work.buckets)
        + work.after_backward_s
    )
    after = work.after_optimizer_s
    whole = forward + backward + after
    if not whole:
        return
    layout = step.layout.at(stage)
    inside = work.passes.communication_s * times
    exposed = min(1.0, max(0.0, step.time.exposed_s - inside) / whole)
    for number, seconds in enumerate((forward, backward, after)):
        if not seconds:
            continue
        rows = _rows(1, alike)
        rows[0, _DEVICE], rows[0, _EXPOSED] = seconds, exposed
        rows[0, _SENT] = step.sent["replicas"] * seconds / whole
        rows[0, _OUTSIDE] = layout.teams.data.nodes > 1
        rows[0, _PHASE + number] = rows[0, _TEAM + TEAMS.index("replicas")] = 1.0
        node = nodes.add(rows, key)
        if number == 1:
            nodes.join(order[1], [node])
            nodes.join([node], order[2].tolist())
        elif number == 0:
            nodes.join([node], order[0].tolist())
        else:
            nodes.join(order[2], [node])


def _add_messages(nodes: _Nodes, step: Step, kinds: Sequence[int]) -> None:
    """Between stages of a pipeline: what each pass hands on, once for every pair of kinds that meet."""
    layout = step.layout
    if len(layout.stages) == 1:
        return
    times, trains = layout.job.accumulation, layout.job.trains
    stages, leaves = layout.teams.stages, layout.teams.stages.nodes > 1
    size = step.sent["stages"] / (2.0 if trains else 1.0)
    seconds = float(layout.network.time_s("send", size / times, stages)) * layout.tuning.team(stages)
    seconds = (seconds + layout.tuning.message_s) * times
    order = [place for place in kinds if (place, "forward") in nodes.ends]
    for number, name in enumerate(PHASES[: 2 if trains else 1]):
        for before, after in zip(order, [*order[1:], order[-1]], strict=True):
            if before == after and len(layout.stages) == len(order):
                continue
            ends = [nodes.ends.get((place, name)) for place in (before, after)]
            if ends[0] is None or ends[1] is None:
                continue
            rows = _rows(1, 1)
            rows[0, _DEVICE], rows[0, _SENT], rows[0, _OUTSIDE] = seconds, size, leaves
            rows[0, _EXPOSED] = 0.5
            rows[0, _PHASE + number] = rows[0, _TEAM + TEAMS.index("stages")] = 1.0
            node = nodes.add(rows, kinds.index(before))
            sender, reader = (ends[0], ends[1]) if name == "forward" else (ends[1], ends[0])
            nodes.join([sender[1]], [node])
            nodes.join([node], [reader[0]])


# What a graph has whatever the plan


@functools.lru_cache(maxsize=64)
def _depth(graph: OpGraph, most: int) -> int:
    """The deepest level of nesting that has few enough layers, by phase."""
    pairs = {(op.layer, op.phase) for op in graph.ops}
    deepest = max((layer.count(".") + 1 for layer, _ in pairs), default=1)
    for depth in range(deepest, 1, -1):
        if len({(_cut(layer, depth), phase) for layer, phase in pairs}) <= most:
            return depth
    return 1


def _cut(layer: str, depth: int) -> str:
    return ".".join(layer.split(".")[:depth])


@functools.lru_cache(maxsize=64)
def _groups(graph: OpGraph, depth: int) -> tuple[npt.NDArray[np.int64], tuple[str, ...]]:
    """Number, by op, its layer in order of first use; and give the names."""
    numbers: dict[str, int] = {}
    cut = {layer: _cut(layer, depth) for layer in {op.layer for op in graph.ops}}
    group_of = [numbers.setdefault(cut[op.layer], len(numbers)) for op in graph.ops]
    return np.array(group_of, dtype=np.int64), tuple(numbers)


@functools.lru_cache(maxsize=64)
def _flow(graph: OpGraph) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Pairs of ops, the second of which reads what the first one wrote."""
    pairs = [(source, i) for i in range(len(graph.ops)) for source in graph.producers(i)]
    edges = np.array(pairs, dtype=np.int64).reshape(-1, 2)
    return edges[:, 0].copy(), edges[:, 1].copy()


@functools.lru_cache(maxsize=64)
def _teams(graph: OpGraph) -> npt.NDArray[np.int64]:
    """Number, by op, the team that its collective is among; 0 for computation."""
    numbers = [TEAMS.index("expert" if (one := operator.overload).startswith("expert") else one)
               if operator.name in KINDS else 0 for operator in graph.operators]  # fmt: skip
    return np.array(numbers, dtype=np.int64)[graph.operator_index]


@functools.lru_cache(maxsize=64)
def _sent(graph: OpGraph) -> Column:
    """Count, by op, the bytes of its collective; 0 for computation."""
    sizes = [message_bytes(one) if one.name in KINDS else 0.0 for one in graph.operators]
    return np.array(sizes)[graph.operator_index]


# The run as a whole


def design_figures(graph: LayerGraph) -> dict[str, float]:
    """Compute the figures of a run that ``DESIGN_COLUMNS`` names."""
    return {name: float(graph.run[RUN_COLUMNS.index(name)]) for name in DESIGN_COLUMNS}


def _run_columns(step: Step, replicas_s: float, stages_s: float) -> list[float]:
    job, time_s = step.layout.job, max(step.time_s, _LEAST_S)
    device_s, host_s = max(step.device_busy_s, _LEAST_S), max(step.host_issue_s, _LEAST_S)
    causes = step.causes_s
    times = {
        "device_time": math.log(device_s),
        "host_time": math.log(host_s),
        "host_over_device": math.log(host_s / device_s),
        "kernel_time": math.log(device_s / max(step.kernels, 1.0)),
        "replicas_over_step": math.log1p(replicas_s / time_s),
        "stages_over_step": math.log1p(stages_s / time_s),
        **{cause: causes[cause] / time_s for cause in CAUSES},
        **dict(zip(TIME_COLUMNS[-3:], kinds_of(step), strict=True)),
    }
    return [*(times[name] for name in TIME_COLUMNS), *plan_columns(job)]


def plan_columns(job: Job) -> list[float]:
    """Compute the figures that ``PLAN_COLUMNS`` names."""
    plan, training, cluster = job.plan, job.workload.training, job.cluster
    numbers = (
        cluster.world_size, cluster.nodes, plan.tensor, plan.pipeline, plan.data or 1, plan.context,
        plan.expert, job.accumulation, job.micro_batch,
    )  # fmt: skip
    links = {group.inter_node.kind for group in cluster.groups} if cluster.nodes > 1 else set()
    return [
        *(math.log2(max(1, number)) for number in numbers),
        float(_SHARDS.index(plan.shard)) if plan.shard in _SHARDS else 0.0,
        _RECOMPUTED.get(plan.recompute, 1.0),
        float(training.mode == "infer"),
        float(training.precision in ("fp32", "tf32")),
        float(training.precision == "fp8"),
        *(float(training.framework == name) for name in FRAMEWORKS),
        *(float(name in links) for name in LINKS),
    ]
