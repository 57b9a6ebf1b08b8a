"""Counts what a rank holds for its parameters: bytes of each in weights, gradients and optimizer state, and
how many of them it has."""

from __future__ import annotations

import functools
from dataclasses import dataclass

from foretrain.graph import ITEM_BYTES, PHASES, OpGraph, Weight
from foretrain.job import Job
from foretrain.step.frameworks import Profile, as_framework_runs_it
from foretrain.step.partition import Stage, blocks
from foretrain.step.schedules import model_copies
from foretrain.step.sharding import PRECISION_BYTES, syncs_last

FP32 = PRECISION_BYTES["fp32"]
SHARDS_STATE = ("zero1", "zero2", "zero3")
SHARDS_GRADIENTS = ("zero2", "zero3")


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """Bytes per parameter, before sharding."""

    shard: float
    """Of a parameter as a rank keeps its shard of it; of ZeRO 3 these are the weights that are updated."""
    gradient: float
    """Held all the time; 0 where gradients come and go with the step."""
    fleeting_gradient: float
    """Held from the backward pass of a block to the end of that pass, and through the update."""
    state: float
    """Of the optimizer, fp32 weights among it that are not the shards themselves."""
    update: float
    """Temporaries of the update."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Held:
    """Parameters of a stage: all of them, and among how many ranks they are sharded."""

    dense: float
    experts: float
    replicas: int
    expert_replicas: int

    def share(self, *, sharded: bool) -> float:
        if not sharded:
            return self.dense + self.experts
        return self.dense / self.replicas + self.experts / self.expert_replicas

    def own(self, weight: Weight, *, sharded: bool) -> float:
        """Elements of a parameter that a rank has."""
        ranks = self.expert_replicas if weight.expert else self.replicas
        return weight.elements / (ranks if sharded else 1)


def held(job: Job, stage: Stage, tied: int, *, trained: bool = False) -> Held:
    """Count what a rank has of the parameters of its stage, or of those that are trained."""
    plan = job.plan
    together = (plan.data or 1) * plan.context * model_copies(plan)
    weights = [weight for weight in stage.weights if weight.trainable >= trained]
    return Held(
        dense=float(sum(weight.elements for weight in weights if not weight.expert) + tied),
        experts=float(sum(weight.elements for weight in weights if weight.expert)),
        replicas=max(1, together // plan.replicate),
        expert_replicas=max(1, job.expert_replicas * model_copies(plan) // plan.replicate),
    )


@functools.lru_cache(maxsize=64)
def weight_bytes(graph: OpGraph, *, trained: bool = False) -> int:
    """Give the bytes of a parameter, or of one that is trained."""
    return max((ITEM_BYTES[w.dtype] for w in graph.weights if w.trainable >= trained), default=FP32)


@functools.lru_cache(maxsize=64)
def trains_all(graph: OpGraph) -> bool:
    """Whether no parameter is frozen."""
    return all(weight.trainable for weight in graph.weights)


@functools.lru_cache(maxsize=64)
def tied_elements(graph: OpGraph) -> int:
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
    return sum(graph.buffers[buffer].size_bytes for buffer in shared) // weight_bytes(graph)


def shard_bytes(job: Job, graph: OpGraph, sizes: Sizes, weight: Weight) -> float:
    """Give the bytes of an element of a parameter as a rank keeps its shard: what is not trained stays as it
    was loaded, in 4 bits or in the adapter's ``base``."""
    if weight.trainable:
        return sizes.shard
    adapter, own = job.workload.training.adapter, float(ITEM_BYTES[weight.dtype])
    as_loaded = weight.dtype == "uint8" or (adapter is not None and adapter.base is not None)
    if as_loaded or job.plan.shard != "zero3" or not job.trains:
        return own
    return own * max(1.0, sizes.shard / weight_bytes(graph))


def gradient_bytes(graph: OpGraph, job: Job, stage: Stage) -> float:
    """Count the bytes of the gradients of all that a rank trains, as its parameters are kept."""
    trained = held(job, stage, 0, trained=True)
    return weight_bytes(graph, trained=True) * trained.share(sharded=job.plan.shard in SHARDS_GRADIENTS)


def state_sizes(job: Job, graph: OpGraph, profile: Profile) -> Sizes:
    """Bytes for each parameter that is trained: its shard, its gradient, and the state of its optimizer."""
    own = weight_bytes(graph, trained=True)
    if not job.trains:
        return Sizes(shard=own, gradient=0.0, fleeting_gradient=0.0, state=0.0, update=0.0)
    master = as_framework_runs_it(job).workload.training.master_weights
    traced = _traced_elements(graph)
    state = _traced_bytes(graph) / max(1, traced) - FP32 * master
    if (kept_in := job.workload.training.optimizer_state) is not None:
        state *= PRECISION_BYTES[kept_in] / (FP32 if master else own)
    given = job.workload.training.gradient_precision
    if profile.keeps_fp32_gradients:
        persistent = own if job.workload.training.precision == "fp16" else FP32
        return Sizes(
            shard=own,
            gradient=PRECISION_BYTES[given] if given else persistent,
            fleeting_gradient=own if profile.uses_ddp_beside else 0.0,
            state=state + FP32 * master,
            update=0.0,
        )
    # fp32 shards, which are cast as they are gathered, unless the optimizer has them on the host
    is_shard = master and job.plan.shard == "zero3" and not job.plan.offload
    summed = FP32 if is_shard else own
    whole = job.plan.shard == "zero3" and syncs_last(job, profile)  # shards of gradients come with the last
    persists = (job.accumulation > 1 and not whole) or profile.bucket_bytes == 0
    return Sizes(
        shard=FP32 if is_shard else own,
        gradient=summed if persists else 0.0,
        fleeting_gradient=0.0 if persists else summed,
        state=state + FP32 * (master and not is_shard),
        update=_update_bytes(graph, cast=master) / max(1, traced),
    )


@functools.lru_cache(maxsize=64)
def _traced_bytes(graph: OpGraph) -> int:
    return sum(buffer.size_bytes for buffer in graph.buffers if buffer.category == "optimizer_state")


@functools.lru_cache(maxsize=64)
def _traced_elements(graph: OpGraph) -> int:
    """Count the elements of parameters whose update was traced."""
    return sum(
        weight.elements for weight in graph.weights if weight.trainable and _is_traced(graph, weight.name)
    )


@functools.lru_cache(maxsize=64)
def _update_bytes(graph: OpGraph, *, cast: bool) -> float:
    """Most temporaries of the traced update at once; where gradients are ``cast`` for it, those are not among
    them that a framework has in fp32 already."""
    first = int((graph.phase_index < PHASES.index("optimizer")).sum())
    changes = [0] * (len(graph.ops) - first + 1)
    casts = {
        buffer for op in graph.ops[first:] if cast and "copy" in op.operator.name for buffer in op.writes
    }
    for number, buffer in enumerate(graph.buffers):
        if buffer.born >= first and buffer.category == "temporaries" and number not in casts:
            changes[buffer.born - first] += buffer.size_bytes
            changes[min(buffer.dies + 1, len(graph.ops)) - first] -= buffer.size_bytes
    live = most = 0
    for change in changes:
        live += change
        most = max(most, live)
    return float(most)


def _is_traced(graph: OpGraph, name: str) -> bool:
    layer = None if graph.stack is None else graph.stack.layer_of(name)
    return layer is None or graph.stack is None or layer < graph.stack.traced


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardedRank:
    """A rank of a stage, and the parameters that it holds and trains there."""

    job: Job
    graph: OpGraph
    stage: Stage
    profile: Profile
    sizes: Sizes
    owned: Held
    trained: Held
    tied: int
    """Elements of the last stage that are tied to the first one's."""

    @classmethod
    def of(cls, job: Job, graph: OpGraph, stage: Stage, stages: int, profile: Profile) -> ShardedRank:
        tied = tied_elements(graph) if stages > 1 and stage.index == stages - 1 else 0
        owned = held(job, stage, tied)
        return cls(
            job=job,
            graph=graph,
            stage=stage,
            profile=profile,
            sizes=state_sizes(job, graph, profile),
            owned=owned,
            trained=owned if trains_all(graph) else held(job, stage, 0, trained=True),
            tied=tied,
        )
