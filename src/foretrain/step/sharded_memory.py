"""Says what a rank of a sharded job holds at its peak: its share of parameters and state, what passes keep
and need at each block by its place in the pipeline, and what the allocator holds beside it."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from foretrain.allocator_settings import AllocatorSettings
from foretrain.cluster import Cluster
from foretrain.costs.workspace import library_workspace
from foretrain.forecast import PeakMoment, RankMemory
from foretrain.graph import ITEM_BYTES, OpGraph, Phase
from foretrain.graph.ir import PACKED
from foretrain.graph.opset import SCALED
from foretrain.job import UNSAID_RECOMPUTATION, Job
from foretrain.step.block_memory import BlockMemory, block_memory, logits_bytes
from foretrain.step.frameworks import Profile
from foretrain.step.held_states import (
    SHARDS_GRADIENTS,
    SHARDS_STATE,
    Held,
    ShardedRank,
    shard_bytes,
    tied_elements,
    weight_bytes,
)
from foretrain.step.partition import Block, Piece, Stage
from foretrain.step.passes import runs_again
from foretrain.step.rank_replay import replayed_bytes
from foretrain.step.schedules import in_flight
from foretrain.step.shard_buffers import ShardBuffers, Whole
from foretrain.step.sharding import item_bytes
from foretrain.workload import TORCHAO

_SPLIT_LOSS = 0.02
"""Of the activations, lost in blocks that the allocator has split."""
_NOTHING = Whole(0.0, 0.0)
_LAYERS_ON_THE_WAY = 2
"""Layers whose activations are on the device while they are moved to the host or back."""
_ROOMY = 0.7
"""Share of a device's memory up to which nobody asks what could be saved."""
_NODES_AHEAD = 2
"""Nodes of a tensor team up to which a host that waits at messages is ahead of its device."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Moment:
    """Says what a rank holds beside what it holds all the time."""

    phase: Phase
    kept: float
    working: float = 0.0
    gradients: float = 0.0
    whole: Whole = _NOTHING
    """Parameters and gradients that ZeRO 3 has whole for a while."""

    @property
    def here(self) -> float:
        """Count the bytes on the stream of the computation."""
        return self.kept + self.working + self.whole.here

    @property
    def total(self) -> float:
        return self.here + self.gradients + self.whole.aside


def sharded_memory(
    job: Job,
    graph: OpGraph,
    stage: Stage,
    stages: int,
    profile: Profile,
    *,
    site: Cluster | None = None,
    ends: tuple[int, int] | None = None,
    stalled: bool = False,
    replays: bool = True,
) -> RankMemory:
    """The peak of a rank of ``stage``: at a block of a micro-batch's passes when most are in flight, or in
    the update.

    ``site`` is the group that the stage lies on and ``ends`` are the first and the last stage there, where
    others lie on groups that differ. ``stalled`` says that the host is held up at the messages of the
    pipeline for longer than the device works in between. Without ``replays`` what the allocator holds is
    estimated where it would be replayed, which takes a tenth of the time.
    """
    rank, site = ShardedRank.of(job, graph, stage, stages, profile), site or job.cluster
    devices = [group.device for group in site.groups]
    moments = tuple(_moments(rank))
    most = max(moments, key=lambda moment: moment.total)
    categories = _by_category(rank, most)
    categories["workspaces"] = (2.0 if job.trains else 1.0) * max(
        library_workspace(device) for device in devices
    )
    ahead = _passes_ahead(job, site, stage, stalled=stalled) if profile.gathers_on_own_stream else 0.0
    cached, returnable = _cached_bytes(rank, moments, most, ahead=ahead)
    if replays and job.trains and stage.index in (ends or (0, stages - 1)):  # one of these is the fullest
        (flying, *_) = in_flight(job.plan, stage.index, len(stage.chunks), job.accumulation)
        replayed = replayed_bytes(rank, _shard_buffers(rank, stage.chunks[0]), flying)
        if replayed is not None:
            split, held_now = cached - returnable, sum(categories.values())
            cached = max(split, replayed + categories["workspaces"] - held_now)
            returnable = cached - split
    capacity = min(device.memory_bytes for device in devices)
    room = capacity - sum(categories.values())
    returned = min(returnable, max(0.0, cached - room))
    return RankMemory(
        stage=stage.index,
        by_category=categories,
        cached_bytes=cached - returned,
        returnable_bytes=returnable - returned,
        open_bytes=_open_bytes(rank, most) if job.trains and room < (1.0 - _ROOMY) * capacity else 0.0,
        peak=PeakMoment(phase=most.phase),
    )


def _by_category(rank: ShardedRank, most: _Moment) -> dict[str, float]:
    """Tensors of a rank at the moment when it holds most."""
    job, graph, sizes, trained = rank.job, rank.graph, rank.sizes, rank.trained
    plan = job.plan
    cast = _cast_weights_bytes(graph, rank.stage) if plan.shard != "zero3" else 0.0
    in_fp8 = _in_fp8_alone(job, graph, rank.stage) if plan.fp8_gather else 0.0
    buckets = _bucket_bytes(rank) if job.trains else 0.0
    state = sizes.state * trained.share(sharded=plan.shard in SHARDS_STATE)
    return {
        "weights": _weights_bytes(rank) - in_fp8,
        "gradients": sizes.gradient * trained.share(sharded=plan.shard in SHARDS_GRADIENTS) + most.gradients,
        "optimizer_state": 0.0 if plan.offload or plan.servers else state,
        "activations": most.kept,
        "temporaries": most.working,
        "buffers": most.whole.here + most.whole.aside + buckets + cast,
    }


def _weights_bytes(rank: ShardedRank) -> float:
    """Count the bytes of a rank's parameters as it keeps them: a shard of ZeRO 3 may be wider than what is
    computed with."""
    job, graph, sizes, owned = rank.job, rank.graph, rank.sizes, rank.owned
    own, sharded = weight_bytes(graph), job.plan.shard == "zero3"
    if job.workload.training.adapter is not None:
        weights = sum(one.elements * shard_bytes(job, graph, sizes, one) for one in rank.stage.weights)
    else:
        weights = float(sum(block.weight_bytes for block in rank.stage.blocks)) + rank.tied * own
        weights *= max(1.0, sizes.shard / own if sharded and job.trains else 1.0)
    return weights * owned.share(sharded=sharded) / max(1.0, owned.share(sharded=False))


def _open_bytes(rank: ShardedRank, most: _Moment) -> float:
    """Less that a rank would hold with what the job leaves open and Megatron's public recipes set: gradients
    in bf16, weights in fp8 alone, recomputation."""
    job, training, plan = rank.job, rank.job.workload.training, rank.job.plan
    if training.framework != "megatron":
        return 0.0
    less = 0.0
    if training.gradient_precision is None and training.precision in ("bf16", "fp8"):
        less += rank.sizes.gradient / 2 * rank.trained.share(sharded=plan.shard in SHARDS_GRADIENTS)
    if plan.fp8_gather is None:
        less += _in_fp8_alone(job, rank.graph, rank.stage)
    if UNSAID_RECOMPUTATION in job.assumed:
        again = replace(rank, job=replace(job, plan=replace(plan, recompute="full")))
        less += max(0.0, most.total - max(moment.total for moment in _moments(again)))
    return less


def _cast_weights_bytes(graph: OpGraph, stage: Stage) -> float:
    """Count the bytes of weights in fp8 that stay for all micro-batches of a step, as they lie and, before
    Blackwell, transposed."""
    return float(sum(_cast_bytes(graph, block.piece) for block in stage.blocks))


@functools.lru_cache(maxsize=256)
def _cast_bytes(graph: OpGraph, piece: Piece) -> int:
    read = {
        buffer
        for i in (*piece.forward.tolist(), *piece.backward.tolist())
        if graph.ops[i].operator.name == SCALED
        for buffer in graph.ops[i].reads
    }
    return sum(graph.buffers[one].size_bytes for one in read if graph.buffers[one].category == "weights")


def _in_fp8_alone(job: Job, graph: OpGraph, stage: Stage) -> float:
    """Count the bytes in bf16 of weights that products of Transformer Engine multiply in fp8."""
    if job.workload.training.fp8_recipe in TORCHAO or job.plan.shard == "zero3":
        return 0.0
    return float(weight_bytes(graph) * sum(_scaled_elements(graph, block.piece) for block in stage.blocks))


@functools.lru_cache(maxsize=256)
def _scaled_elements(graph: OpGraph, piece: Piece) -> int:
    """Count the weights of a piece that are multiplied in fp8, or in fp4 as two in a byte."""
    operators = (graph.ops[i].operator for i in piece.forward.tolist())
    weights = (operator.inputs[1] for operator in operators if operator.name == SCALED)
    return sum(weight.numel * (2 if weight.dtype == PACKED else 1) for weight in weights)


def _bucket_bytes(rank: ShardedRank) -> float:
    """torch's DistributedDataParallel copies gradients to buckets of its own."""
    plan, profile, trained = rank.job.plan, rank.profile, rank.trained
    uses_ddp = profile.uses_ddp_beside or not profile.keeps_fp32_gradients
    wrapped = uses_ddp and plan.shard in ("none", "zero1") and trained.replicas > 1 and not plan.servers
    return trained.dense * weight_bytes(rank.graph, trained=True) if wrapped else 0.0


# Passes


def _moments(rank: ShardedRank) -> Iterator[_Moment]:
    """Say what is held at each block as a micro-batch goes forward and backward when most are in flight, and
    in the update; in inference one block at a time, and what is kept of every micro-batch."""
    job, graph, stage, sizes, trained = rank.job, rank.graph, rank.stage, rank.sizes, rank.trained

    def kind(block: Block) -> tuple[int, bool]:
        return id(block.piece), runs_again(job.plan, graph, block)

    alike = {kind(block): block for block in stage.blocks}
    memories = {one: block_memory(job, graph, block, rank.profile) for one, block in alike.items()}
    chunks = [[memories[kind(block)] for block in chunk] for chunk in stage.chunks]
    if not job.trains:
        kept = sum(one.kept for chunk in chunks for one in chunk) * job.accumulation
        yield _Moment(phase="forward", kept=kept)
        for one in (one for chunk in chunks for one in chunk):
            yield _Moment(phase="forward", kept=kept, working=one.forward - one.kept)
        return
    counts = in_flight(job.plan, stage.index, len(stage.chunks), job.accumulation)
    everything = sum(
        count * sum(one.kept for one in chunk) for count, chunk in zip(counts, chunks, strict=True)
    )
    if job.plan.offload_activations:  # what is on its way to the host and back
        everything += _LAYERS_ON_THE_WAY * max(
            (block.piece.kept_bytes for block in stage.blocks if block.is_layer), default=0
        )
    buffers = [_shard_buffers(rank, blocks) for blocks in stage.chunks]
    staying = [shards.staying if shards else 0.0 for shards in buffers]
    for number, (count, blocks, chunk) in enumerate(zip(counts, stage.chunks, chunks, strict=True)):
        if count and blocks:
            beside = sum(staying) - staying[number]
            yield from _chunk_moments(rank, blocks, chunk, everything, buffers[number], beside=beside)
    share = trained.share(sharded=job.plan.shard in SHARDS_GRADIENTS)
    updated = trained.share(sharded=job.plan.shard in SHARDS_STATE)
    update = 0.0 if job.plan.offload or job.plan.servers else sizes.update * updated
    yield _Moment(phase="optimizer", kept=0.0, working=update, gradients=sizes.fleeting_gradient * share)


def _chunk_moments(
    rank: ShardedRank,
    blocks: Sequence[Block],
    memories: Sequence[BlockMemory],
    everything: float,
    shards: ShardBuffers | None,
    *,
    beside: float,
) -> Iterator[_Moment]:
    """Take one micro-batch forward through a chunk, as the last of those in flight, and backward; ``beside``
    are bytes that other chunks of the rank have whole all the time."""

    def now(whole: Whole) -> Whole:
        return Whole(whole.here + beside, whole.aside)

    left = everything - sum(one.kept for one in memories)
    for i, one in enumerate(memories):
        whole = now(shards.forward(i)) if shards else _NOTHING
        left += one.kept
        yield _Moment(phase="forward", kept=left, working=one.forward - one.kept, whole=whole)
    sizes, sharded, gradients = rank.sizes, rank.job.plan.shard in SHARDS_GRADIENTS, 0.0
    for i in range(len(blocks) - 1, -1, -1):
        one, block = memories[i], blocks[i]
        whole = now(shards.backward(i)) if shards else _NOTHING
        most = one.with_gradients if shards or sizes.fleeting_gradient else one.backward
        yield _Moment(
            phase="backward",
            kept=left,
            working=most - one.kept,
            gradients=gradients,
            whole=whole,
        )
        left -= one.kept
        gradients += sizes.fleeting_gradient * _trained_share(block, rank.trained, sharded=sharded)
        whole = now(shards.after(i)) if shards else _NOTHING
        yield _Moment(phase="backward", kept=left, gradients=gradients, whole=whole)


def _trained_share(block: Block, trained: Held, *, sharded: bool) -> float:
    """Parameters of a block whose gradients a rank has, as they are sharded."""
    if not sharded:
        return float(block.trained)
    dense = (block.trained - block.trained_experts) / trained.replicas
    return dense + block.trained_experts / trained.expert_replicas


def _shard_buffers(rank: ShardedRank, blocks: Sequence[Block]) -> ShardBuffers | None:
    job, graph, profile = rank.job, rank.graph, rank.profile
    if job.plan.shard != "zero3":
        return None
    reduce, tied = item_bytes(job, graph, profile, gradients=True), tied_elements(graph) > 0
    return ShardBuffers.of(job, blocks, profile, rank.trained, reduce=reduce, tied=tied)


# The allocator


def _cached_bytes(
    rank: ShardedRank, moments: Sequence[_Moment], most: _Moment, *, ahead: float
) -> tuple[float, float]:
    """Count the bytes reserved beside tensors, and those of them that torch could return to a device that is
    full: memory of each stream that others do not use, split blocks, blocks whose collectives have not run
    yet, and segments for what fits in no block of activations. Segments that expand have neither split blocks
    nor the last. So many forward passes are issued ``ahead``."""
    job, graph, stage = rank.job, rank.graph, rank.stage
    expands = AllocatorSettings.read(job.workload.training.allocator or "").expandable_segments
    kept = max(moment.kept for moment in moments)
    split = 0.0 if expands else _SPLIT_LOSS * kept
    if not job.trains:
        return split, 0.0
    streams = most.total
    if job.plan.shard == "zero3":
        parts = [(one.here, one.gradients, one.whole.aside) for one in moments]
        streams = sum(max(column) for column in zip(*parts, strict=True))
    logits = max((logits_bytes(graph, block) for block in stage.blocks), default=0)
    largest = max((weight.elements * ITEM_BYTES[weight.dtype] for weight in stage.weights), default=0)
    scratch = rank.profile.parameter_copies * largest if largest > logits and not expands else 0.0
    fetched = ahead and ahead * sum(_fetched_bytes(graph, block.piece) for block in stage.blocks)
    returnable = streams - most.total + fetched + scratch
    return split + returnable, returnable


def _passes_ahead(job: Job, site: Cluster, stage: Stage, *, stalled: bool) -> float:
    """Forward passes that the host has issued and the device has not run: all in flight, or what fills the
    pipeline before it stalls.

    torch does not reuse the blocks of a collective on another stream before the device has passed it. Where
    a tensor team spans more than two nodes, no pass is ahead in any of nanotron's public runs of pipelines.
    """
    counts = in_flight(job.plan, stage.index, len(stage.chunks), job.accumulation)
    passes = sum(counts) / len(counts)
    if job.plan.pipeline > 1 and job.plan.tensor > _NODES_AHEAD * site.devices_per_node:
        return 0.0
    return max(0.0, passes - 2.0) if stalled else passes


@functools.lru_cache(maxsize=256)
def _fetched_bytes(graph: OpGraph, piece: Piece) -> int:
    """Count the bytes that tensor parallelism gathers in a forward pass and lets go."""
    gathers = (graph.ops[i] for i in piece.forward.tolist() if graph.ops[i].operator.name == "all_gather")
    written = (graph.buffers[buffer] for op in gathers for buffer in op.writes)
    return sum(buffer.size_bytes for buffer in written if buffer.category == "temporaries")
