"""Says how tokens travel to their experts, and beside what: as the plan says, else as the framework does."""

from __future__ import annotations

import math

from foretrain.job import Job
from foretrain.plan import Dispatcher, Plan

_HAS_DEEPEP = 9.0
"""Compute capability from which on DeepEP's kernels between nodes run."""
_RDMA = ("infiniband", "roce")


def dispatcher(job: Job) -> Dispatcher:
    """The plan's dispatcher, or the framework's.

    Megatron-Bridge's recipes take HybridEP in NVLink domains that span nodes (GB200, GB300) and DeepEP where
    the experts of Hopper's and Blackwell's nodes lie on several; inside of a node all-to-all, as for experts
    with a capacity, which the others do not know. torchtitan takes all-to-all unless told otherwise.
    """
    plan, groups = job.plan, job.cluster.groups
    if plan.dispatcher is not None:
        return plan.dispatcher
    own = job.workload.training.framework == "megatron" and plan.expert_capacity is None
    if not own or plan.expert == 1:
        return "alltoall"
    if all(group.domain > group.devices_per_node for group in groups):
        return "hybridep"
    leaves_node = plan.expert * job.expert_tensor > min(group.devices_per_node for group in groups)
    runs = all(
        float(group.device.capability or 0) >= _HAS_DEEPEP and group.inter_node.kind in _RDMA
        for group in groups
    )
    return "deepep" if leaves_node and runs else "alltoall"


def overlaps_exchange(plan: Plan) -> bool:
    """Whether tokens travel while another micro-batch computes: where the plan says so
    (``--overlap-moe-expert-parallel-comm`` of Megatron), and in DualPipe, which was made for it."""
    planned = (plan.overlap or {}).get("experts")
    return plan.schedule == "dualpipe" and plan.pipeline > 1 if planned is None else planned


def spreads_by_chance(plan: Plan) -> bool:
    """Whether experts have uneven numbers of rows: tokens choose any of them alike, and none is padded."""
    return plan.routing != "round-robin" and plan.expert_capacity is None


def distinct(choices: float, places: int) -> float:
    """Count, of so many places, those that the choices of a token fall on, each place as likely for each
    choice.

    >>> round(distinct(8, 8), 2)
    5.25
    """
    missed: float = (1.0 - 1.0 / places) ** choices
    return places * (1.0 - missed)


def choices_of(copies: float, places: int) -> float:
    """Count the choices that fall on so many distinct places: ``distinct`` the other way round."""
    share = min(copies / places, 1.0 - 1e-9)
    return math.log1p(-share) / math.log1p(-1.0 / places) if places > 1 else 1.0
