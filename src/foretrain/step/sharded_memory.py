"""Estimates what a rank of a sharded job holds: its share of parameters and state, activations by its place
in the pipeline."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from foretrain.allocator_settings import AllocatorSettings
from foretrain.costs.roofline import SCALED
from foretrain.costs.workspace import library_workspace
from foretrain.forecast import PeakMoment, RankMemory
from foretrain.graph import ITEM_BYTES, OpGraph
from foretrain.graph.opset import traits
from foretrain.job import Job
from foretrain.plan import Plan
from foretrain.step.frameworks import Profile
from foretrain.step.partition import Block, Stage, blocks
from foretrain.step.passes import runs_again
from foretrain.step.schedules import in_flight

_FP32 = 4
_SHARDS_STATE = ("zero1", "zero2", "zero3")
_SHARDS_GRADIENTS = ("zero2", "zero3")
_HALF_KEPT = 0.5
"""Of a block's activations, where element-wise results and every second product are computed again."""
_SPLIT_LOSS = 0.02
"""Of the activations, lost in blocks that the allocator has split."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Sizes:
    """Bytes per parameter of a rank's gradients and optimizer state, before sharding."""

    gradient: float
    """Held all the time; 0 where gradients come and go with the step."""
    fleeting_gradient: float
    """Held from the backward pass of a block to the end of that pass."""
    state: float


@dataclass(frozen=True, slots=True, kw_only=True)
class _Held:
    """Parameters of a stage: all of them, and how many of them a rank has of what is sharded."""

    dense: float
    experts: float
    replicas: int
    expert_replicas: int

    def share(self, *, sharded: bool) -> float:
        if not sharded:
            return self.dense + self.experts
        return self.dense / self.replicas + self.experts / self.expert_replicas


def sharded_memory(
    job: Job,
    graph: OpGraph,
    stage: Stage,
    stages: int,
    profile: Profile,
    *,
    stalled: bool = False,
) -> RankMemory:
    """The peak of a rank of ``stage``: at the turn from forward to backward, or later as gradients replace
    activations.

    ``stalled`` says that the host is held up at the messages of the pipeline for longer than the device works
    in between.
    """
    plan = job.plan
    own = _weight_bytes(graph)
    tied = _tied_elements(graph) if stages > 1 and stage.index == stages - 1 else 0
    held = _held(job, stage, tied)
    whole = all(weight.trainable for weight in graph.weights)
    trained = held if whole else _held(job, stage, 0, trained=True)
    sizes = _sizes(job, graph, profile)
    if plan.shard in _SHARDS_GRADIENTS:
        sizes = replace(sizes, fleeting_gradient=sizes.fleeting_gradient / held.replicas)
    kept, working, fleeting = _passes(job, graph, stage, sizes, profile)
    weights = float(sum(block.weight_bytes for block in stage.blocks)) + tied * own
    sharded = plan.shard == "zero3"
    categories = {
        "weights": weights * held.share(sharded=sharded) / max(1.0, held.share(sharded=False)),
        "gradients": sizes.gradient * trained.share(sharded=job.plan.shard in _SHARDS_GRADIENTS) + fleeting,
        "optimizer_state": 0.0
        if plan.offload or plan.servers
        else sizes.state * trained.share(sharded=plan.shard in _SHARDS_STATE),
        "activations": kept,
        "temporaries": working,
        "buffers": _gathered_bytes(job, stage, profile, held)
        + (_bucket_bytes(plan, profile, trained, _weight_bytes(graph, trained=True)) if job.trains else 0.0)
        + _cast_weights_bytes(graph, stage),
        "workspaces": (2.0 if job.trains else 1.0)
        * max(library_workspace(group.device) for group in job.cluster.groups),
    }
    return RankMemory(
        stage=stage.index,
        by_category=categories,
        cached_bytes=_cached_bytes(job, graph, stage, profile, kept, stalled=stalled),
        peak=PeakMoment(phase="backward" if job.trains and (working or fleeting) else "forward"),
    )


# Parameters


def _weight_bytes(graph: OpGraph, *, trained: bool = False) -> int:
    """Of a parameter, or of one that is trained."""
    return max((ITEM_BYTES[w.dtype] for w in graph.weights if w.trainable >= trained), default=_FP32)


def _held(job: Job, stage: Stage, tied: int, *, trained: bool = False) -> _Held:
    replicas = (job.plan.data or 1) * job.plan.context
    weights = [weight for weight in stage.weights if weight.trainable >= trained]
    return _Held(
        dense=float(sum(weight.elements for weight in weights if not weight.expert) + tied),
        experts=float(sum(weight.elements for weight in weights if weight.expert)),
        replicas=replicas,
        expert_replicas=job.expert_replicas,
    )


def gradient_bytes(graph: OpGraph, job: Job, stage: Stage) -> float:
    """Of all that a rank trains, as its parameters are kept."""
    trained = _held(job, stage, 0, trained=True)
    return _weight_bytes(graph, trained=True) * trained.share(sharded=job.plan.shard in _SHARDS_GRADIENTS)


def _cast_weights_bytes(graph: OpGraph, stage: Stage) -> float:
    """Of weights in fp8 that stay for all micro-batches of a step, as they lie and transposed."""
    return float(
        sum(
            graph.buffers[buffer].size_bytes
            for block in stage.blocks
            for i in (*block.piece.forward.tolist(), *block.piece.backward.tolist())
            if graph.ops[i].operator.name == SCALED
            for buffer in graph.ops[i].reads
            if graph.buffers[buffer].category == "weights"
        )
    )


def _tied_elements(graph: OpGraph) -> int:
    """Elements of parameters that the first and the last block share: a pipeline holds them at both of its
    ends."""
    everything = blocks(graph)
    first, last = (
        {
            buffer
            for i in block.piece.forward.tolist()
            for buffer in graph.ops[i].reads
            if graph.buffers[buffer].category == "weights"
        }
        for block in (everything[0], everything[-1])
    )
    shared: set[int] = first & last
    return sum(graph.buffers[buffer].size_bytes for buffer in shared) // _weight_bytes(graph)


def _sizes(job: Job, graph: OpGraph, profile: Profile) -> _Sizes:
    if not job.trains:
        return _Sizes(gradient=0.0, fleeting_gradient=0.0, state=0.0)
    traced = sum(
        weight.elements for weight in graph.weights if _is_traced(graph, weight.name) and weight.trainable
    )
    state = sum(buffer.size_bytes for buffer in graph.buffers if buffer.category == "optimizer_state") / max(
        1, traced
    )
    own = _weight_bytes(graph, trained=True)
    if profile.keeps_fp32_gradients:
        persistent = own if job.workload.training.precision == "fp16" else _FP32
        return _Sizes(
            gradient=persistent, fleeting_gradient=own if profile.uses_ddp_beside else 0.0, state=state
        )
    if job.accumulation > 1 or profile.bucket_bytes == 0:
        return _Sizes(gradient=own, fleeting_gradient=0.0, state=state)
    return _Sizes(gradient=0.0, fleeting_gradient=own, state=state)


def _is_traced(graph: OpGraph, name: str) -> bool:
    layer = None if graph.stack is None else graph.stack.layer_of(name)
    return layer is None or graph.stack is None or layer < graph.stack.traced


def _gathered_bytes(job: Job, stage: Stage, profile: Profile, held: _Held) -> float:
    """ZeRO 3 has the whole parameters of two blocks at once: of one that runs, and of the next."""
    if job.plan.shard != "zero3" or held.replicas == 1:
        return 0.0
    low = profile.casts_shards and job.workload.training.precision.startswith("amp")
    return 2.0 * max(
        ((block.dense + block.experts) * 2 if low else block.weight_bytes for block in stage.blocks),
        default=0,
    )


def _bucket_bytes(plan: Plan, profile: Profile, held: _Held, own: int) -> float:
    """torch's DistributedDataParallel copies gradients to buckets of its own."""
    uses_ddp = profile.uses_ddp_beside or not profile.keeps_fp32_gradients
    wrapped = uses_ddp and plan.shard in ("none", "zero1") and held.replicas > 1 and not plan.servers
    return held.dense * own if wrapped else 0.0


# Activations


def _passes(
    job: Job, graph: OpGraph, stage: Stage, sizes: _Sizes, profile: Profile
) -> tuple[float, float, float]:
    """Activations, temporaries and fleeting gradients at the moment when they are most together; in inference
    one block at a time, and what is kept of every micro-batch."""
    plan = job.plan
    if not job.trains:
        kept = sum(block.piece.kept_bytes for block in stage.blocks) * job.accumulation
        return float(kept), float(max(block.piece.working_bytes for block in stage.blocks)), 0.0
    counts = in_flight(plan, stage.index, len(stage.chunks), job.accumulation)
    everything = sum(
        count * sum(kept_bytes(graph, block, plan, profile) for block in chunk)
        for count, chunk in zip(counts, stage.chunks, strict=True)
    )
    best = (everything, 0.0, 0.0)
    for count, chunk in zip(counts, stage.chunks, strict=True):
        if count:
            best = max(best, *_backward(graph, chunk, everything, plan, sizes, profile), key=sum)
    return best


def _backward(
    graph: OpGraph, chunk: Sequence[Block], left: float, plan: Plan, sizes: _Sizes, profile: Profile
) -> list[tuple[float, float, float]]:
    """What is held at each block as one micro-batch goes backward through a chunk."""
    moments, gradients = [], 0.0
    for block in reversed(chunk):
        moments.append((left, _working(graph, block, plan, profile), gradients))
        left -= kept_bytes(graph, block, plan, profile)
        trained = sum(weight.elements for weight in block.weights if weight.trainable)
        gradients += sizes.fleeting_gradient * trained
    return [*moments, (left, 0.0, gradients)]


def _recomputed(graph: OpGraph, block: Block, plan: Plan) -> bool:
    return plan.recompute == "full" and runs_again(plan, graph, block)


def kept_bytes(graph: OpGraph, block: Block, plan: Plan, profile: Profile) -> float:
    """What a block keeps of a micro-batch from its forward to its backward pass."""
    if _recomputed(graph, block, plan):
        return float(block.piece.handed_on_bytes)
    by_operators = plan.recompute == "operators" or (
        plan.recompute == "selective" and profile.selective_recompute == "half"
    )
    halved = by_operators and runs_again(plan, graph, block)
    return block.piece.kept_bytes * (_HALF_KEPT if halved else 1.0)


def _working(graph: OpGraph, block: Block, plan: Plan, profile: Profile) -> float:
    """Temporaries of a block; a loss of the framework's own holds as many copies of the logits as it is known
    to."""
    if _recomputed(graph, block, plan):
        return float(block.piece.working_bytes + block.piece.kept_bytes)
    logits = _logits_bytes(graph, block) if profile.loss_copies is not None else 0
    return (
        (profile.loss_copies - 1) * logits
        if logits and profile.loss_copies is not None
        else float(block.piece.working_bytes)
    )


def _logits_bytes(graph: OpGraph, block: Block) -> int:
    """Size of the logits in fp32, where a block ends in a product whose result becomes fp32; else 0."""
    products = [
        graph.ops[i].operator
        for i in block.piece.forward.tolist()
        if traits(graph.ops[i].operator.name).kind == "product"
    ]
    if block.is_layer or not products:
        return 0
    size = products[-1].outputs[0].numel * _FP32
    born = {buffer for i in block.piece.forward.tolist() for buffer in graph.ops[i].writes}
    return size if any(graph.buffers[buffer].size_bytes == size for buffer in born) else 0


# The allocator


def _cached_bytes(
    job: Job, graph: OpGraph, stage: Stage, profile: Profile, kept: float, *, stalled: bool
) -> float:
    """Beside tensors: split blocks, blocks whose collectives have not run yet, and segments for what fits in
    no block of activations. Segments that expand have neither the first nor the last."""
    expands = AllocatorSettings.read(job.workload.training.allocator or "").expandable_segments
    if not job.trains:
        return 0.0 if expands else _SPLIT_LOSS * kept
    logits = max((_logits_bytes(graph, block) for block in stage.blocks), default=0)
    largest = max((weight.elements * ITEM_BYTES[weight.dtype] for weight in stage.weights), default=0)
    scratch = profile.parameter_copies * largest if largest > logits else 0.0
    ahead = _passes_ahead(job, stage, stalled=stalled) if profile.gathers_on_own_stream else 0.0
    fetched = sum(_fetched_bytes(graph, block) for block in stage.blocks)
    return ahead * fetched + (0.0 if expands else _SPLIT_LOSS * kept + scratch)


def _passes_ahead(job: Job, stage: Stage, *, stalled: bool) -> float:
    """Forward passes that the host has issued and the device has not run: all in flight, or what fills the
    pipeline before it stalls.

    torch does not reuse the blocks of a collective on another stream before the device has passed it.
    """
    counts = in_flight(job.plan, stage.index, len(stage.chunks), job.accumulation)
    passes = sum(counts) / len(counts)
    return max(0.0, passes - 2.0) if stalled else passes


def _fetched_bytes(graph: OpGraph, block: Block) -> int:
    """What tensor parallelism gathers in a forward pass and lets go."""
    gathers = (
        graph.ops[i] for i in block.piece.forward.tolist() if graph.ops[i].operator.name == "all_gather"
    )
    written = (graph.buffers[buffer] for op in gathers for buffer in op.writes)
    return sum(buffer.size_bytes for buffer in written if buffer.category == "temporaries")
