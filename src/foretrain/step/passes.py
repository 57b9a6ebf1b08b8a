"""Gathers the calls of a rank's passes with their times: forward, backward with what is computed again, and
the optimizer."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from foretrain.cluster import Cluster
from foretrain.dispatching import overlaps_exchange
from foretrain.graph import PHASES, OpGraph, Phase
from foretrain.graph.opset import communicates, is_product
from foretrain.plan import Plan
from foretrain.step.calls import COPY_SHARE
from foretrain.step.context import with_context
from foretrain.step.frameworks import Profile, TensorOverlap
from foretrain.step.layout import Layout, memory_rate
from foretrain.step.partition import Block, Index, Piece, Stage, blocks
from foretrain.step.recomputed_modules import attention_calls, calls_of
from foretrain.step.schedules import model_copies
from foretrain.step.sharding import (
    PRECISION_BYTES,
    copies_in_s,
    copies_out_s,
    hooks_s,
    shards,
    update_hooks_s,
)
from foretrain.step.spans import Column, Span, span
from foretrain.step.tensor_overlap import hidden_s

_HIDDEN_SHARE = 0.8
"""Of an exchange that runs beside computation of the same length."""
_CLIP_BYTES = 12.0
"""Per fp32 gradient: its norm reads it, scaling reads and writes it."""
_MADE_BYTES, _TRACED_BYTES = 2, 6
"""Of a low-precision gradient, and what the traced addition of two of them moves."""
_FUSED_BYTES = 4.0
"""Of 6 more that a product moves which adds its gradient up in fp32 itself, what its arithmetic does not hide
(``data/studies/h200_accumulation.jsonl``); sums in bf16 were not measured, and take as long."""
_HOST_LINK_SHARE = 0.625
"""Of the rate of PCIe and the like, what copies from and to pinned memory reach."""
_ON_C2C, _C2C_BYTES_PER_S = ("gh200", "gb200", "gb300"), 450e9
"""Devices on a board with their host, and the rate of each direction between them."""
_HOST_MEMORY_BYTES_PER_S = 60e9
"""Of a host that updates parameters, about a third of what eight channels of DDR4 give."""
_OFFLOAD_MOVED_BYTES, _OFFLOAD_UPDATE_BYTES = 6.0, 16.0
"""Per parameter: gradients down in fp32 and weights up in 16 bits; and what the update reads and writes on
the host."""


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Pass:
    """Calls that follow one another on a rank, and their times."""

    span: Span
    op: Index
    """Which op of the graph each call is."""
    host_s: Column
    busy_s: Column
    """The device's, without the gaps between kernels."""
    gaps_s: Column
    beside_s: float = 0.0
    """Device time at the end that belongs to no traced op."""

    @property
    def occupied_s(self) -> Column:
        return self.busy_s + self.gaps_s

    def __add__(self, other: Pass) -> Pass:
        """Put one pass after the other."""
        columns = {
            name: np.concatenate([getattr(self, name), getattr(other, name)])
            for name in ("op", "host_s", "busy_s", "gaps_s")
        }
        return Pass(span=self.span + other.span, beside_s=self.beside_s + other.beside_s, **columns)


def forward_pass(layout: Layout, block: Block) -> Pass:
    """The forward pass of a block, with what ZeRO 3 copies for it."""
    forward = _forward(layout, block)
    moved = _moved_to_host_s(layout, block, forward.span.device_s)
    host_s = hooks_s(layout, block, backward=False)
    return _with(forward, copies_out_s(layout, block) + moved, host_s=host_s)


def _forward(layout: Layout, block: Block) -> Pass:
    return _pass(layout, block.piece, "forward")


def backward_pass(layout: Layout, block: Block) -> Pass:
    """The backward pass of a block, behind what of its forward pass is computed again."""
    backward = _pass(layout, block.piece, "backward")
    again = recomputed(layout, block)
    if len(again):
        overlap = layout.profile.tensor_overlap if layout.job.plan.recompute == "full" else "none"
        whole = len(again) == len(block.piece.forward)
        backward = (_forward(layout, block) if whole else _timed(layout, again, overlap)) + backward
    if not layout.job.trains:
        return backward
    copied = copies_out_s(layout, block, again=True) + copies_in_s(layout, block)
    moved = _moved_to_host_s(layout, block, backward.span.device_s)
    host_s = hooks_s(layout, block, backward=True)
    return _with(backward, _accumulation_s(layout, block) + copied + moved, host_s=host_s)


Kind = tuple[int, int, bool]


def kind_of(layout: Layout, stage: Stage, block: Block) -> Kind:
    """Name what the passes of a block depend on: the group of its stage, its piece, and whether calls of it
    run again."""
    return stage.group, id(block.piece), runs_again(layout.job.plan, layout.graph, block)


def stage_kinds(layout: Layout) -> list[Hashable]:
    """Name, of each stage, what its work depends on: the kinds of its blocks."""
    return [
        tuple(tuple(kind_of(layout, stage, block) for block in chunk) for chunk in stage.chunks)
        for stage in layout.stages
    ]


def passes_by_kind(layout: Layout) -> dict[Kind, tuple[Pass, Pass]]:
    """Forward and backward pass of each kind of block, worked out once for a layout."""
    if not layout.passes:
        layout.passes.update(_passes_by_kind(layout))
    return layout.passes


def _passes_by_kind(layout: Layout) -> dict[Kind, tuple[Pass, Pass]]:
    kinds = {
        kind_of(layout, stage, block): (layout.at(stage), block)
        for stage in layout.stages
        for block in stage.blocks
    }
    return {kind: (forward_pass(*where), backward_pass(*where)) for kind, where in kinds.items()}


def _moved_to_host_s(layout: Layout, block: Block, beside_s: float) -> float:
    """Time what it takes longer than a pass to move what a layer keeps to or from the host meanwhile."""
    plan = layout.job.plan
    if not plan.offload_activations or not block.is_layer:
        return 0.0
    kept = block.piece.handed_on_bytes if plan.recompute == "full" else block.piece.kept_bytes
    return max(0.0, kept / host_link_bytes_per_s(layout.site) - beside_s)


def host_link_bytes_per_s(site: Cluster) -> float:
    """Between a host and its device: what of PCIe's rate is reached, or of NVLink-C2C's 450 GB/s."""
    devices = (group.device for group in site.groups)
    return _HOST_LINK_SHARE * min(
        _C2C_BYTES_PER_S if device.name.startswith(_ON_C2C) else device.pcie_bytes_per_s for device in devices
    )


def weight_gradients_s(layout: Layout, block: Block) -> float:
    """Device time of the part of a block's backward pass that makes gradients of weights, which nothing
    before the optimizer waits for."""
    calls = block.piece.backward[makes_weight_gradients(layout.graph)[block.piece.backward]]
    occupied = layout.calls.device_s[calls] + layout.calls.gaps_s[calls]
    return float(occupied.sum()) + _accumulation_s(layout, block)


@functools.lru_cache(maxsize=64)
def makes_weight_gradients(graph: OpGraph) -> npt.NDArray[np.bool_]:
    """Tell which calls of the backward pass write gradients of weights alone, or are products whose results
    go there."""
    gradients = {number for number, buffer in enumerate(graph.buffers) if buffer.category == "gradients"}
    backward = [(i, op) for i, op in enumerate(graph.ops) if op.phase == "backward"]
    added = {number for _, op in backward if not gradients.isdisjoint(op.writes) for number in op.reads}
    makes = np.zeros(len(graph.ops), dtype=np.bool_)
    for i, op in backward:
        written = set(op.writes)
        to_gradients = written <= gradients | added if is_product(op.operator.name) else written <= gradients
        makes[i] = bool(written) and to_gradients
    return makes


def recomputed(layout: Layout, block: Block) -> Index:
    """The calls of a block's forward pass that run again before its backward pass."""
    return run_again(layout.job.plan, layout.profile, layout.graph, block)


def run_again(plan: Plan, profile: Profile, graph: OpGraph, block: Block) -> Index:
    """List the calls of a block that run again, by what a plan says and how its framework recomputes."""
    calls = not_kept(plan, profile.selective_recompute, graph, block)
    stops = plan.recompute == "full" and profile.stops_recomputing and len(calls) > 0
    return _asked_for(graph, block.piece) if stops else calls


def not_kept(plan: Plan, selective: str, graph: OpGraph, block: Block) -> Index:
    """The calls of a block's forward pass whose results are not kept, by what a plan says and what its
    framework takes ``selective`` for."""
    if not runs_again(plan, graph, block):
        return block.piece.forward[:0]
    if plan.recompute == "full":
        return block.piece.forward
    if plan.recompute_modules:
        return calls_of(graph, block.piece, plan.recompute_modules)
    return _chosen(graph, block.piece, by_operators=plan.recompute == "operators" or selective == "half")


@functools.lru_cache(maxsize=1024)
def _asked_for(graph: OpGraph, piece: Piece) -> Index:
    """The calls of a forward pass up to the last one whose results its backward pass reads."""
    read = {buffer for i in piece.backward.tolist() for buffer in graph.ops[i].reads}
    asked = [not read.isdisjoint(graph.ops[i].writes) for i in piece.forward.tolist()]
    return piece.forward[: 1 + int(np.flatnonzero(asked)[-1])] if any(asked) else piece.forward


@functools.lru_cache(maxsize=1024)
def _chosen(graph: OpGraph, piece: Piece, *, by_operators: bool) -> Index:
    return (_without_half_of_products if by_operators else attention_calls)(graph, piece.forward)


def runs_again(plan: Plan, graph: OpGraph, block: Block) -> bool:
    """Whether a plan has calls of a block run again; of a graph that holds what is recomputed, none."""
    chosen = block.is_layer and (block.number or 0) % plan.recompute_every == 0
    return plan.recompute != "none" and chosen and len(block.piece.backward) > 0 and not graph.recomputes


def is_recomputed(graph: OpGraph, calls: Index) -> npt.NDArray[np.bool_]:
    """Tell which calls of a backward pass run for the second time: traced so, or of the forward pass."""
    again: npt.NDArray[np.bool_] = _seconds(graph)[calls]
    return again


@functools.lru_cache(maxsize=256)
def _seconds(graph: OpGraph) -> npt.NDArray[np.bool_]:
    """Tell which of all calls would run for the second time in a backward pass."""
    again: npt.NDArray[np.bool_] = graph.recomputed | (graph.phase_index == PHASES.index("forward"))
    return again


def optimizer_pass(layout: Layout, stage: Stage) -> Pass:
    """The traced optimizer, scaled to the parameters that the rank updates; and clipping."""
    plan, graph, calls = layout.job.plan, layout.graph, layout.calls
    index = np.flatnonzero(graph.phase_index == PHASES.index("optimizer"))
    share, updated = update_share(layout, stage)
    offloads = plan.offload and layout.job.trains
    if offloads:
        index = index[:0]
    host_s, busy_s = calls.host_s[index] * min(1.0, share), calls.device_s[index] * share
    gaps_s = calls.gaps_s[index] * share
    result = Pass(
        span=span(host_s, busy_s + gaps_s, waits=calls.waits[index]),
        op=index,
        host_s=host_s,
        busy_s=busy_s,
        gaps_s=gaps_s,
    )
    if offloads:
        moved = _OFFLOAD_MOVED_BYTES * updated / host_link_bytes_per_s(layout.site)
        update = _OFFLOAD_UPDATE_BYTES * updated / _HOST_MEMORY_BYTES_PER_S
        return _with(result, moved + update, host_s=update)
    clips = layout.profile.clips_gradients
    clipping_s = _CLIP_BYTES * updated / memory_rate(layout) if clips else 0.0
    return _with(result, clipping_s, host_s=update_hooks_s(layout, stage.weights))


def update_share(layout: Layout, stage: Stage) -> tuple[float, float]:
    """Parameters that a rank updates beside those that were traced, and their number."""
    graph, sharded = layout.graph, layout.job.plan.shard != "none"
    plan, teams = layout.job.plan, layout.teams
    dense, experts = (shards(plan, one).size if sharded else 1 for one in (teams.data, teams.expert_data))
    updated = sum(w.elements / (experts if w.expert else dense) for w in stage.weights if w.trainable)
    traced, _ = traced_parameters(graph)
    return (updated / traced if traced else 1.0), updated


def traced_blocks(graph: OpGraph) -> Sequence[Block]:
    everything = blocks(graph)
    if graph.stack is None:
        return everything
    return (everything[0], *everything[1 : 1 + graph.stack.traced], everything[-1])


@functools.lru_cache(maxsize=64)
def traced_parameters(graph: OpGraph) -> tuple[int, int]:
    """Count the trained elements and tensors of the blocks that were traced."""
    trained = [w.elements for block in traced_blocks(graph) for w in block.weights if w.trainable]
    return sum(trained), len(trained)


def _pass(layout: Layout, piece: Piece, phase: Phase) -> Pass:
    """The calls of a piece in a phase, worked out once for all plans that agree in what they depend on."""
    plan, overlap = layout.job.plan, layout.profile.tensor_overlap
    exchange = plan.exchange_of_context(layout.job.workload.training.framework) if plan.context > 1 else None
    beside = _beside_others(layout) if overlaps_exchange(plan) else None
    key = (piece, phase, overlap, exchange, beside, model_copies(plan), layout.tuning.traffic)
    known = layout.calls.passes
    if key not in known:
        calls = piece.forward if phase == "forward" else piece.backward
        known[key] = _timed(layout, calls, overlap, backward=phase == "backward")
    made: Pass = known[key]
    return made


def _timed(layout: Layout, calls: Index, overlap: TensorOverlap = "none", *, backward: bool = False) -> Pass:
    costs, plan = layout.calls, layout.job.plan
    host_s, busy_s, gaps_s = costs.host_s[calls], costs.device_s[calls], costs.gaps_s[calls]
    if overlap != "none":
        busy_s = busy_s - hidden_s(layout.graph, calls, busy_s + gaps_s, overlap, backward=backward)
    if overlaps_exchange(plan) and model_copies(plan) == 1:  # DualPipe is played in pairs
        busy_s = busy_s - hidden_exchange_s(layout, calls, busy_s)
    if plan.context > 1:
        busy_s = with_context(layout, calls, busy_s)
    communication_s = float(busy_s[costs.communicates[calls]].sum())
    together = span(host_s, busy_s + gaps_s, communication_s, costs.waits[calls])
    return Pass(span=together, op=calls, host_s=host_s, busy_s=busy_s, gaps_s=gaps_s)


def _with(calls: Pass, beside_s: float, host_s: float = 0.0) -> Pass:
    """Add time behind the calls that belongs to no traced op."""
    if not beside_s and not host_s:
        return calls
    together = calls.span + Span(host_s, beside_s, max(host_s, beside_s))
    return dataclasses.replace(calls, span=together, beside_s=calls.beside_s + beside_s)


def _accumulation_s(layout: Layout, block: Block) -> float:
    """Adding low-precision gradients to their sums, as far as the captured step does not: reading both and
    writing the sum, or, in the product that makes them, writing the sum in their place."""
    training = layout.job.workload.training
    if not layout.profile.keeps_fp32_gradients or training.precision not in ("bf16", "fp8"):
        return 0.0
    sums = 2 * PRECISION_BYTES[training.gradient_precision or "fp32"]
    each = float(sums + _MADE_BYTES - layout.graph.accumulates * _TRACED_BYTES)
    if layout.profile.fuses_accumulation:
        each = _FUSED_BYTES
    return block.trained * each / (COPY_SHARE * memory_rate(layout)) * layout.tuning.traffic


def _without_half_of_products(graph: OpGraph, calls: Index) -> Index:
    """List the calls without attention and every second matrix product, whose results are kept."""
    products = [i for i in calls.tolist() if is_product(graph.ops[i].operator.name)]
    kept = {*products[::2], *attention_calls(graph, calls).tolist()}
    return np.array([i for i in calls.tolist() if i not in kept], dtype=np.int64)


def hidden_exchange_s(layout: Layout, calls: Index, device_s: Column) -> Column:
    """Time the part of the exchange with experts that runs beside the computation of another micro-batch,
    whose backward pass alternates with this one's forward pass; not while a pipeline fills and drains."""
    operators = [layout.graph.ops[i].operator for i in calls.tolist()]
    exchanges = np.array(
        [communicates(one.name) and one.overload == "expert" for one in operators], dtype=bool
    )
    exchanged_s = float(device_s[exchanges].sum())
    if not exchanged_s:
        return np.zeros(len(calls))
    computed_s = float(device_s[~layout.calls.communicates[calls]].sum())
    share = _HIDDEN_SHARE * _beside_others(layout) * min(1.0, computed_s / exchanged_s)
    return np.where(exchanges, share * device_s, 0.0)


def _beside_others(layout: Layout) -> float:
    """Give the share of the micro-batches that have another one to run beside: not while a pipeline fills and
    drains."""
    return max(0.0, 1.0 - layout.job.plan.pipeline / layout.job.accumulation)
