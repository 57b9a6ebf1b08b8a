"""Says how replicas share what they hold: among which ranks it is sharded, in how many bytes it travels, what
of ZeRO 3 stays gathered, and what its copies take."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterable

from foretrain.costs.collectives import Team
from foretrain.errors import InputError
from foretrain.graph import ITEM_BYTES, OpGraph, Weight
from foretrain.job import Job
from foretrain.plan import Plan
from foretrain.step.calls import COPY_SHARE
from foretrain.step.frameworks import Profile
from foretrain.step.layout import Layout, memory_rate
from foretrain.step.partition import Block, blocks

PRECISION_BYTES = {"fp32": 4, "bf16": 2, "fp16": 2, "fp8": 1}
_IN_SHARE, _IN_SHARE_CAST = 0.71, 0.41
"""Of the memory's rate, by FSDP2's kernel that puts gradients together (``chunk_cat``): as they are, and cast
on the way; from ``data/h200_fsdp.jsonl``, as what follows."""
_GATHER_HOST_S, _REDUCE_HOST_S = 1.1e-3, 1.0e-3
"""What the host needs for the hooks of a block with nine parameters: gathering it, and handing out its
gradients."""
_FLAT_HOST_S = 0.5e-3
"""The same of FSDP1 and Megatron, which loop over no parameters; assumed."""
_UPDATE_HOST_S = 60e-6
"""For each parameter that is a DTensor in clipping and the optimizer."""


# Who shares


def shards(plan: Plan, members: Team) -> Team:
    """Name the team that parameters are sharded over: of those that hold the same ones, neighbours."""
    return neighbours(members, members.size // copies_of(plan, members), "plan.replicate", plan.replicate)


def copies(plan: Plan, members: Team) -> Team:
    """Name the team that holds the same shard."""
    return _across(members, shards(plan, members))


def copies_of(plan: Plan, members: Team) -> int:
    """Count the copies of their parameters that the members hold together; one where nobody else holds
    them."""
    return plan.replicate if members.size > 1 else 1


@functools.lru_cache(maxsize=1024)
def neighbours(members: Team, size: int, field: str, value: int) -> Team:
    """The first ``size`` of a team's members, and as many after them, and so on: one node is filled before
    the next."""
    if size < 1 or members.size % size:
        raise InputError(f"{field}: {value} does not divide the {members.size} ranks that share parameters")
    nodes = next(n for n in range(1, size + 1) if size % n == 0 and members.per_node % (size // n) == 0)
    per_node = size // nodes
    return dataclasses.replace(
        members, per_node=per_node, nodes=nodes, sharing=members.sharing * members.per_node // per_node
    )


def _across(members: Team, inner: Team) -> Team:
    """Name the team of one member of each such part."""
    here = members.per_node // inner.per_node
    return dataclasses.replace(
        members,
        per_node=here,
        nodes=members.size // inner.size // here,
        sharing=members.sharing * inner.per_node,
        spacing=members.spacing * inner.nodes,
    )


# In how many bytes


_LEAST_MATRIX = 1 << 16
"""Elements: of fewer are the weights of norms."""


def wire_bytes(layout: Layout, elements: float, *, gradients: bool, trained: bool = True) -> float:
    """Bytes of so many gradients or parameters on the network; of those that are ``trained``, or of all."""
    return elements * item_bytes(
        layout.job, layout.graph, layout.profile, gradients=gradients, trained=trained
    )


def item_bytes(job: Job, graph: OpGraph, habits: Profile, *, gradients: bool, trained: bool = True) -> float:
    """Give the bytes that one of them travels in, on average."""
    training, given = job.workload.training, job.plan.reduce_precision
    precision = training.precision
    if given is None and habits.keeps_fp32_gradients:  # they travel as they are added up
        given = training.gradient_precision
    if gradients and given is not None:
        return float(PRECISION_BYTES[given])
    if gradients and habits.reduces_in_fp32 and precision != "fp16":
        return float(PRECISION_BYTES["fp32"])
    low = habits.casts_shards and job.plan.shard == "zero3" and precision.startswith("amp")
    if not gradients and job.plan.fp8_gather:
        return _item_bytes_in_fp8(graph)
    return held_item_bytes(graph, trained=trained, most=2 if low else 8)


@functools.lru_cache(maxsize=64)
def _item_bytes_in_fp8(graph: OpGraph) -> float:
    """Give the bytes of a parameter that travels in fp8: those of the layers' products, one byte; others as
    they are held."""
    elements = sum(weight.elements for weight in graph.weights)
    sent = sum(
        weight.elements * (1 if _in_fp8(graph, weight) else ITEM_BYTES[weight.dtype])
        for weight in graph.weights
    )
    return sent / elements if elements else 1.0


def _in_fp8(graph: OpGraph, weight: Weight) -> bool:
    """Whether a parameter is multiplied in fp8: a matrix of one of the repeated layers."""
    inside = graph.stack is not None and graph.stack.layer_of(weight.name) is not None
    return inside and weight.elements >= _LEAST_MATRIX and not weight.name.endswith("bias")


@functools.lru_cache(maxsize=64)
def held_item_bytes(graph: OpGraph, *, trained: bool, most: int = 8) -> float:
    """Give the bytes of a parameter as the rank holds it, on average; none is sent in more bytes than
    ``most``."""
    weights = [weight for weight in graph.weights if weight.trainable >= trained]
    elements = sum(weight.elements for weight in weights)
    held = sum(weight.elements * min(ITEM_BYTES[weight.dtype], most) for weight in weights)
    return held / elements if elements else 4.0


# ZeRO 3


def reshards(job: Job, habits: Profile) -> bool | int:
    """Whether layers let go of gathered parameters after the forward pass; a number where they keep their
    part of so many neighbours' share."""
    given = job.plan.reshard
    if given is None:
        return not (job.plan.pipeline > 1 and habits.keeps_in_pipeline)
    return given


def stays_gathered(layout: Layout, block: Block) -> bool:
    """Whether a block's parameters stay from its forward to its backward pass: what is outside of layers is
    the root's, which does not let go unless the plan says so; where it is cut up, the head alone stays."""
    is_root = not block.is_layer and (not layout.profile.splits_root or block is blocks(layout.graph)[-1])
    if is_root and layout.job.plan.reshard is not True:
        return True
    return reshards(layout.job, layout.profile) is False


def syncs_last(job: Job, habits: Profile) -> bool:
    """Whether parameters stay gathered after a backward pass and gradients are summed up on the rank until
    the last micro-batch: so it is in pipelines of torch, and where the framework says so."""
    return habits.syncs_last or (job.plan.pipeline > 1 and habits.keeps_in_pipeline)


def copies_out_s(layout: Layout, block: Block, *, again: bool = False) -> float:
    """Device time in which FSDP copies gathered parameters from one buffer to their own places, before a
    forward pass or ``again`` before a backward pass; flat parameters are views of the buffer."""
    if layout.profile.sharding != "parameters" or (again and stays_gathered(layout, block)):
        return 0.0
    if not (shared := _shared(layout, block, trained=False)):
        return 0.0
    moved = 2 * wire_bytes(layout, shared, gradients=False, trained=False)
    return (
        moved
        * (1.0 if again else _exchanges(layout))
        / (COPY_SHARE * memory_rate(layout))
        * layout.tuning.traffic
    )


def copies_in_s(layout: Layout, block: Block) -> float:
    """Device time in which it copies the gradients of a block into the buffer that is reduced."""
    if layout.profile.sharding == "buffers":
        return 0.0
    if not (trained := _shared(layout, block, trained=True)):
        return 0.0
    sent, made = (wire_bytes(layout, trained, gradients=gradients) for gradients in (True, False))
    share = _IN_SHARE if sent == made else _IN_SHARE_CAST
    rate = (COPY_SHARE if layout.profile.sharding == "flat" else share) * memory_rate(layout)
    return (sent + made) * _exchanges(layout) / rate * layout.tuning.traffic


def hooks_s(layout: Layout, block: Block, *, backward: bool) -> float:
    """Time the host around a pass of a block, to gather it and to hand out its gradients."""
    if not _shared(layout, block, trained=False):
        return 0.0
    each, speed = layout.profile.sharding == "parameters", layout.host_speed
    gather, reduce = (_GATHER_HOST_S, _REDUCE_HOST_S) if each else (_FLAT_HOST_S, _FLAT_HOST_S)
    if not backward:
        return gather * _exchanges(layout) / speed
    gathers = 0.0 if stays_gathered(layout, block) else 1.0
    reduces = _exchanges(layout) * bool(_shared(layout, block, trained=True))
    return (gather * gathers + reduce * reduces) / speed


def update_hooks_s(layout: Layout, weights: Iterable[Weight]) -> float:
    """Time the host in a step to clip and update parameters that are shards."""
    is_sharded = layout.job.plan.shard == "zero3" and layout.teams.data.size > 1
    if not is_sharded or not layout.job.trains or layout.profile.sharding != "parameters":
        return 0.0
    return _UPDATE_HOST_S * sum(weight.trainable for weight in weights) / layout.host_speed


def _exchanges(layout: Layout) -> float:
    """Count how often in a micro-batch parameters are gathered for the forward pass, and gradients handed
    out."""
    return 1.0 / layout.job.accumulation if syncs_last(layout.job, layout.profile) else 1.0


def _shared(layout: Layout, block: Block, *, trained: bool) -> float:
    """Parameters of a block that ZeRO 3 shards: all, or those that are trained."""
    if layout.job.plan.shard != "zero3":
        return 0.0
    teams = layout.teams
    return float(
        sum(
            weight.elements
            for weight in block.weights
            if weight.trainable >= trained and (teams.expert_data if weight.expert else teams.data).size > 1
        )
    )
