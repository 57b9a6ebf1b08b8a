"""Says what Driple learns of runs and captured steps: resource figures and a graph of groups of operators."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from foretrain.cluster import Link
from foretrain.duration import batch_loading_s
from foretrain.errors import ForetrainError, UnsupportedJob
from foretrain.graph import CATEGORIES, PHASES, Operator, OpGraph
from foretrain.job import Job
from foretrain.predictors.predictddl.families import family_of
from foretrain.run import Run

Array = npt.NDArray[np.float64]

# Targets

RESOURCES = ("device_utilization", "memory_utilization", "network_rx", "network_tx")
TWELVE = tuple(f"{name}_{figure}" for name in RESOURCES for figure in ("idle_s", "active_s", "peak"))
"""Driple's figures, by the names that ``provenance.resources.figures`` has."""
MEANS = ("device_utilization", "memory_utilization", "network_rx_bytes_per_s", "network_tx_bytes_per_s")
"""Averages over the window, which are quantities of a forecast: share of the time with a kernel on the device
(of a CPU's cores at work), share of the device's memory that is held, bytes of one rank."""
TARGETS = (*TWELVE, *MEANS, "memory_busy")
"""With the share of time in which memory is read or written, which GPUs tell."""
LEAST_BYTES_PER_S = 1e5
"""Of network traffic: less counts as this much, so that none at all has a logarithm."""
_LEAST_SHARE = 1e-4

SPANS = np.array([name.endswith("_s") and name in TWELVE for name in TARGETS])
NETWORK = np.array([name.startswith("network") for name in TARGETS]) & ~SPANS
MEMORY = np.array([name.startswith("memory") for name in TARGETS]) & ~SPANS


def figures_of(run: Run) -> Array | None:
    """Read the figures that ``TARGETS`` names off a run: idle and active spans as shares of the window, the
    rest as measured; not a number where it was not.

    The window is three steps or half a second, whichever is longer: how long a span is in seconds says as
    much of the protocol as of the job.
    """
    resources = run.provenance.get("resources") or {}
    known: Mapping[str, float] = resources.get("figures") or {}
    ends = (resources.get("series") or {}).get("ends_s") or ()
    figures = np.array(
        [known.get(name, run.measured.get(name, math.nan)) for name in TARGETS], dtype=np.float64
    )
    if known and not ends:
        return None
    if known:
        figures[SPANS] = np.minimum(figures[SPANS] / max(ends), 1.0)
    else:
        figures[np.isin(TARGETS, TWELVE)] = math.nan
    if known and "network_shared_by" not in resources:
        figures[NETWORK_FIGURES] = math.nan  # of an interface, for who knows how many ranks
    return figures if np.isfinite(figures).any() else None


def scaled(figures: Array) -> Array:
    """Shares as they are; bytes per second and shares of memory, which spread over decades, as logarithms."""
    result = figures.copy()
    result[..., NETWORK] = np.log(np.maximum(figures[..., NETWORK], LEAST_BYTES_PER_S))
    result[..., MEMORY] = np.log(np.maximum(figures[..., MEMORY], _LEAST_SHARE))
    return result


def unscaled(values: Array) -> Array:
    """Undo ``scaled``, within what is possible."""
    result = np.clip(values, 0.0, 1.0)
    network = np.exp(np.minimum(values[..., NETWORK], 30.0))
    result[..., NETWORK] = np.where(network > LEAST_BYTES_PER_S * (1 + 1e-9), network, 0.0)
    result[..., MEMORY] = np.exp(np.minimum(values[..., MEMORY], 0.0))
    return result


NETWORK_FIGURES = np.array([name.startswith("network") for name in TARGETS])
CERTAIN_ALONE = NETWORK_FIGURES | np.array([name.startswith("device") and name in TWELVE for name in TARGETS])
"""What a schedule knows for certain of a job in which nothing is exchanged."""


def without_network(figures: Array) -> Array:
    """The figures of jobs in which nothing goes over the network: idle throughout."""
    result = figures.copy()
    result[..., NETWORK_FIGURES] = [
        float(name.endswith("idle_s"))
        for name, is_of_network in zip(TARGETS, NETWORK_FIGURES, strict=True)
        if is_of_network
    ]
    return result


# Settings


def setting_of(job: Job) -> str:
    """The setting that a reference model is trained for: device, workers, how they synchronise, and the
    link between nodes."""
    plan, cluster = job.plan, job.cluster
    sync = "ps" if plan.servers else "allreduce"
    link = f" {cluster.inter_node.bandwidth_bytes_per_s * 8e-9:.3g}Gbit" if job.over_network else ""
    return f"{cluster.device.name} {sync} {cluster.world_size}{link}"


def exchanges(job: Job) -> bool:
    """Whether anything goes over the network at all."""
    return job.cluster.world_size > 1 or bool(job.plan.servers)


def on_cpu(job: Job) -> bool:
    """Whether it is CPUs that compute."""
    return all(group.device.is_cpu for group in job.cluster.groups)


def over_host_link(job: Job) -> bool:
    """Whether the network's figures are those of a GPU's link to its host, as nothing else is exchanged."""
    return not exchanges(job) and not on_cpu(job)


def certain(job: Job) -> npt.NDArray[np.bool_]:
    """The figures that the schedule knows for certain: those of an idle network, and the spans of CPU cores
    that wait for nobody."""
    silent = not exchanges(job) and not over_host_link(job)
    alone = silent and job.workload.training.loader_rate is None
    return CERTAIN_ALONE if alone else NETWORK_FIGURES & silent


SETTING_COLUMNS = (
    *("log workers", "several workers", "parameter servers", "parameter servers x log workers"),
    *("several nodes", "GPU", "log cores", "log FLOP/s", "log memory bandwidth", "log link bandwidth"),
    *("log batch per worker", "log compute time", "log memory time"),
    *("log exchange time", "log exchange over compute", "log parameters x servers", "log window"),
    *("data loader", "log loading over compute", "log loader workers"),
)
_LEAST_S = 1e-6
"""Of the times in these columns: shorter ones count as this long, so that none at all has a logarithm."""
_SHORT_STEP_S = 0.17
"""Three steps of less than this are shorter than the half second that is watched at the least."""
_LEAST_LOADING = math.exp(-3.0)
"""Of the time of the step: a batch that is there sooner, or at once, counts as this long to load."""


def setting_columns(job: Job, graph: OpGraph) -> Array:
    """Compute the figures that ``SETTING_COLUMNS`` names: the setting, and how the work of the step compares
    with what the setting can do."""
    cluster, device, servers = job.cluster, job.cluster.device, float(bool(job.plan.servers))
    workers, precision = cluster.world_size, job.workload.training.precision.removeprefix("amp-")
    rate, bandwidth = device.peak_flops(precision), device.memory_bytes_per_s
    link, parameters = _link(job).bandwidth_bytes_per_s, max(graph.parameters, 1)
    compute_s, memory_s = graph.total("flops") / rate, graph.total("bytes") / bandwidth
    exchanged = 4.0 * parameters * (2.0 * workers if servers else 2.0 * (workers - 1) / workers)
    busy_s, exchange_s = max(compute_s + memory_s, _LEAST_S), max(exchanged / link, _LEAST_S)
    log_workers = math.log(workers)
    sizes = (max(device.cores or 1, 1), rate, bandwidth, link, job.micro_batch)
    times_s = (max(compute_s, _LEAST_S), max(memory_s, _LEAST_S), exchange_s)
    loading = (batch_loading_s(job) or 0.0) / (busy_s + exchange_s)
    return np.array(
        [
            *(log_workers, float(workers > 1), servers, servers * log_workers),
            *(float(job.over_network), float(not device.is_cpu)),
            *(math.log(size) for size in (*sizes, *times_s, exchange_s / busy_s)),
            servers * math.log(parameters),
            max(0.0, math.log(_SHORT_STEP_S / (busy_s + exchange_s))),
            float(job.workload.training.loader_rate is not None),
            math.log(max(loading, _LEAST_LOADING)),
            math.log(job.workload.training.loader_workers or 1),
        ]
    )


def _link(job: Job) -> Link:
    return job.cluster.inter_node if job.over_network else job.cluster.intra_node


# Steps as graphs of groups

GROUPS = 100


@dataclass(frozen=True, eq=False, kw_only=True)
class Groups:
    """A step as a network sees it."""

    nodes: npt.NDArray[np.float32]
    """A row per group of operators."""
    edges: npt.NDArray[np.int64]
    """Two rows: from, to."""
    whole: npt.NDArray[np.float32]
    """Of the whole step, as ``WHOLE_COLUMNS`` names it; empty in the reference."""
    share: npt.NDArray[np.float32]
    """How much of the step's traffic each group has."""


def reference_groups(graph: OpGraph, *, groups: int = GROUPS, seed: int = 42) -> Groups:
    """Driple's: launched operators, the largest connected component, groups by asynchronous fluid
    communities, three sums for each."""
    networkx = _networkx()
    kept = [i for i, op in enumerate(graph.ops) if op.operator.launches]
    names = [op.operator.name for op in graph.ops]
    counts = {name: sum(names[i] == name for i in kept) for name in {names[i] for i in kept}}
    flow = networkx.Graph((a, b) for a, b in _launched_edges(graph))
    if not len(flow):
        raise UnsupportedJob("driple: a step whose operators do not depend on one another")
    flow = flow.subgraph(max(networkx.connected_components(flow), key=len))
    communities = networkx.algorithms.community.asyn_fluidc(flow, min(groups, len(flow)), seed=seed)
    members = [sorted(group) for group in communities]
    group_of = {i: number for number, group in enumerate(members) for i in group}
    rows = [
        [
            sum(_output_bytes(graph.ops[i].operator) for i in group),
            len(group),
            sum(counts[names[i]] / len(kept) for i in group),
        ]
        for group in members
    ]
    nodes = np.array(rows, dtype=np.float32)
    pairs = {(group_of[a], group_of[b]) for a, b in flow.edges if group_of[a] != group_of[b]}
    both = sorted(pairs | {(b, a) for a, b in pairs})
    share = (nodes[:, 0] / max(float(nodes[:, 0].sum()), 1.0)).astype(np.float32)
    return Groups(nodes=nodes, edges=_two_rows(both), whole=np.zeros(0, dtype=np.float32), share=share)


KINDS = ("convolution", "depthwise", "product", "normalisation", "pooling", "optimizer", "other")
NODE_COLUMNS = (
    *("log FLOPs", "log bytes", "log parameters", "log activations", "log operators", "log FLOPs per byte"),
    *("share of FLOPs", "share of bytes", *PHASES, *KINDS),
)
WHOLE_COLUMNS = (
    *(f"log FLOPs {phase}" for phase in PHASES[:2]),
    *(f"log bytes {phase}" for phase in PHASES),
    *(f"log {name}" for name in CATEGORIES),
    *("log parameters", "log operators", "log samples", "log kernels per GFLOP", "log bytes over parameters"),
    *(f"share of {kind}" for kind in KINDS),
)


def directed_groups(graph: OpGraph, *, groups: int = GROUPS) -> Groups:
    """The improved graph: a node per layer and phase, edges with the flow of data, sizes as logarithms."""
    node = _node_of_op([op.layer for op in graph.ops], graph.phase_index.tolist(), groups)
    count = int(node.max(initial=-1)) + 1
    kinds = _kind_index(graph)
    launched = graph.column("launches")

    def by_node(column: Array) -> Array:
        return np.bincount(node, weights=column, minlength=count).astype(np.float64)

    flops, size = by_node(graph.column("flops")), by_node(graph.column("bytes") * launched)
    outputs = np.array([_output_bytes(one) for one in graph.operators])[graph.operator_index]
    weights = np.array([_weight_elements(one) for one in graph.operators])[graph.operator_index]
    phases = np.zeros((count, len(PHASES)))
    phases[node, graph.phase_index] = 1.0
    mixture = np.zeros((count, len(KINDS)))
    np.add.at(mixture, (node, kinds), graph.column("bytes") * launched)
    share = size / max(float(size.sum()), 1.0)
    logs = [np.log1p(column) / 10 for column in (flops, size, by_node(weights), by_node(outputs * launched))]
    intensity = np.log1p(flops) / 10 - np.log1p(size) / 10
    mixture /= np.maximum(mixture.sum(axis=1, keepdims=True), 1.0)
    flops_share = flops / max(float(flops.sum()), 1.0)
    nodes = np.column_stack(
        [*logs, np.log1p(by_node(launched)), intensity, flops_share, share, phases, mixture]
    )
    pairs = {(int(node[a]), int(node[b])) for b in range(len(graph.ops)) for a in graph.producers(b)}
    return Groups(
        nodes=nodes.astype(np.float32),
        edges=_two_rows(sorted((a, b) for a, b in pairs if a != b)),
        whole=whole_columns(graph).astype(np.float32),
        share=share.astype(np.float32),
    )


def whole_columns(graph: OpGraph) -> Array:
    """Compute the figures that ``WHOLE_COLUMNS`` names."""
    launched = graph.column("launches")
    size = graph.column("bytes") * launched
    held = {
        name: sum(buffer.size_bytes for buffer in graph.buffers if buffer.category == name)
        for name in CATEGORIES
    }
    kinds = _kind_index(graph)
    parameters, flops = max(graph.parameters, 1), max(graph.total("flops"), 1.0)
    figures = [
        *(graph.total("flops", phase) for phase in PHASES[:2]),
        *(float(size[graph.phase_index == i].sum()) for i in range(len(PHASES))),
        *(*held.values(), parameters, launched.sum(), graph.samples),
    ]
    ratios = [math.log(max(launched.sum(), 1) / (flops / 1e9)), math.log(max(size.sum(), 1.0) / parameters)]
    mixture = np.bincount(kinds, weights=size, minlength=len(KINDS)) / max(float(size.sum()), 1.0)
    return np.array([*np.log1p(figures), *ratios, *mixture])


_COARSER = {
    "depthwise convolution": "depthwise",
    "grouped convolution": "convolution",
    "pointwise convolution": "convolution",
}


def kind_of(operator: Operator) -> str:
    """The kind of an operator, one of ``KINDS``: PredictDDL's family, with fewer kinds of convolutions."""
    family = family_of(operator)
    return _COARSER.get(family, family)


def _kind_index(graph: OpGraph) -> npt.NDArray[np.int64]:
    """Say, for each op, the position of its kind in ``KINDS``."""
    positions = [KINDS.index(kind_of(operator)) for operator in graph.operators]
    return np.array(positions, dtype=np.int64)[graph.operator_index]


def graph_key(job: Job) -> str:
    """A text that jobs share when one rank's step of them is the same graph."""
    model, training = job.workload.model, job.workload.training
    model_facts = (
        model.source,
        model.name,
        dict(model.args),
        model.task,
        model.config,
        str(job.workload.base),
    )
    sizes = (training.image, training.sequence)
    how = (training.classes, training.mode, training.precision, training.optimizer, training.channels_last)
    batch = (job.micro_batch, job.accumulation > 1)
    layers = (training.adapter, training.fp8_recipe, training.scales_loss, bool(training.compile))
    again = (job.plan.recompute, job.plan.recompute_every, dict(model.libraries))
    return json.dumps([[*model_facts, *sizes], [*how, *batch, *layers, *again]], sort_keys=True, default=str)


def _launched_edges(graph: OpGraph) -> Iterable[tuple[int, int]]:
    """Between launched operators; views and allocations hand on what they were given."""
    source: dict[int, frozenset[int]] = {}
    for i, op in enumerate(graph.ops):
        reads = frozenset[int]().union(*(source[one] for one in graph.producers(i)))
        if op.operator.launches:
            yield from ((a, i) for a in reads)
            source[i] = frozenset({i})
        else:
            source[i] = reads


def _node_of_op(layers: Sequence[str], phases: Sequence[int], most: int) -> npt.NDArray[np.int64]:
    """Numbers of nodes in order of first use, at the deepest level of nesting that has few enough of them;
    else neighbours are joined."""
    deepest = max((layer.count(".") + 1 for layer in set(layers)), default=1)
    for depth in range(deepest, 0, -1):
        numbers: dict[tuple[str, int], int] = {}
        cut = {layer: ".".join(layer.split(".")[:depth]) for layer in set(layers)}
        nodes = [
            numbers.setdefault((cut[layer], phase), len(numbers))
            for layer, phase in zip(layers, phases, strict=True)
        ]
        if len(numbers) <= most:
            return np.array(nodes, dtype=np.int64)
        if depth == 1:
            return np.array(nodes, dtype=np.int64) * most // len(numbers)
    return np.zeros(0, dtype=np.int64)


def _output_bytes(operator: Operator) -> float:
    return float(sum(spec.size_bytes for spec in operator.outputs))


def _weight_elements(operator: Operator) -> float:
    """Count the elements of the operator's weight, where it has one."""
    weight = operator.tensor("weight") or operator.tensor("mat2")
    return float(weight.numel) if weight is not None else 0.0


def _two_rows(pairs: Sequence[tuple[int, int]]) -> npt.NDArray[np.int64]:
    return np.ascontiguousarray(np.array(pairs, dtype=np.int64).reshape(-1, 2).T)


def _networkx() -> Any:
    try:
        import networkx
    except ModuleNotFoundError as error:
        raise ForetrainError(
            "networkx is not installed; driple's reference mode needs foretrain[learn]"
        ) from error
    return networkx
