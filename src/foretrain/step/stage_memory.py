"""Says what the ranks of each stage hold at their peak: on each group of devices, with CUDA graphs, and as a
calibration found it."""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable

from foretrain.forecast import RankMemory, fullest_of
from foretrain.step.held_states import gradient_bytes
from foretrain.step.layout import Layout
from foretrain.step.memory import rank_memory
from foretrain.step.partition import Stage
from foretrain.step.passes import stage_kinds
from foretrain.step.pipeline import stall_s
from foretrain.step.schedules import in_flight


def memory_by_group(layout: Layout) -> tuple[tuple[RankMemory, ...], ...]:
    """Say what a rank of each stage holds on each group of devices; once where all groups hold the same, or
    each stage lies on one of them."""
    return _by_shares(layout, tuple(stage_memory(layout, stage) for stage in layout.stages))


def _by_shares(layout: Layout, ranks: tuple[RankMemory, ...]) -> tuple[tuple[RankMemory, ...], ...]:
    if not layout.shares:
        return (ranks,)
    groups = zip(layout.job.cluster.groups, layout.shares, strict=True)
    return tuple(
        tuple(
            dataclasses.replace(_with_activations(rank, share), capacity_bytes=group.device.memory_bytes)
            for rank in ranks
        )
        for group, share in groups
    )


def _with_activations(rank: RankMemory, factor: float) -> RankMemory:
    """The rank with a micro-batch of another size."""
    changed = {name: rank.by_category[name] * factor for name in ("activations", "temporaries")}
    by_category = {**rank.by_category, **changed}
    return dataclasses.replace(rank, by_category=by_category, cached_bytes=rank.cached_bytes * factor)


def _in_graph_pools(rank: RankMemory, layout: Layout, stage: Stage) -> RankMemory:
    """Put what CUDA graphs allocate into pools of their own: reserved, but not among what torch counts as
    allocated when they are replayed. Gradients come out of them."""
    gradients = gradient_bytes(layout.graph, layout.job, stage) if layout.job.trains else 0.0
    if layout.job.runs_alone:
        gradients = sum(b.size_bytes for b in layout.graph.buffers if b.category == "gradients")
    inside = dict.fromkeys(("activations", "temporaries", "workspaces", "rounding"), 0.0)
    by_category = {**rank.by_category, **inside, "gradients": float(gradients)}
    pooled = dataclasses.replace(rank, by_category=by_category, cached_bytes=0.0)
    return dataclasses.replace(pooled, cached_bytes=max(0.0, rank.reserved_bytes - pooled.allocated_bytes))


def quick_memory(layout: Layout) -> RankMemory:
    """The fullest rank with its allocator estimated: of stages alike, the one with most in flight; on the
    group that it fills most."""
    most: dict[Hashable, Stage] = {}
    for kind, stage in zip(stage_kinds(layout), layout.stages, strict=True):
        if kind not in most or _in_flight(layout, stage) > _in_flight(layout, most[kind]):
            most[kind] = stage
    ranks = tuple(stage_memory(layout, stage, replays=False) for stage in most.values())
    return max((fullest_of(one) for one in _by_shares(layout, ranks)), key=lambda rank: rank.fullness)


def _in_flight(layout: Layout, stage: Stage) -> int:
    return sum(in_flight(layout.job.plan, stage.index, len(stage.chunks), layout.job.accumulation))


def stage_memory(layout: Layout, stage: Stage, *, replays: bool = True) -> RankMemory:
    """Say what a rank of a stage holds at its peak, beside what its device has where stages lie on groups
    that differ."""
    if layout.by_group:
        own = layout.at(stage)
        capacity = own.site.device.memory_bytes
        return dataclasses.replace(stage_memory(own, stage, replays=replays), capacity_bytes=capacity)
    layers = sum(block.is_layer for block in stage.blocks)
    stalled = stall_s(layout) * layers > float(layout.calls.device_s[stage.calls].sum())
    memory = rank_memory(layout, stage, stalled=stalled, replays=replays)
    if layout.job.workload.training.hides_pools:
        memory = _in_graph_pools(memory, layout, stage)
    factor, beside = layout.tuning.activations, layout.tuning.memory_bytes
    if factor == 1.0 and not beside:
        return memory
    memory = _with_activations(memory, factor)
    workspaces = max(0.0, memory.by_category["workspaces"] + beside)
    return dataclasses.replace(memory, by_category={**memory.by_category, "workspaces": workspaces})
