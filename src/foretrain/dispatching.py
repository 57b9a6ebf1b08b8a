"""Says how tokens travel to their experts, and beside what: as the plan says, else as the framework does."""

from __future__ import annotations

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
    if job.workload.training.framework != "megatron" or plan.expert_capacity is not None:
        return "alltoall"
    if all(group.domain > group.devices_per_node for group in groups):
        return "hybridep"
    leaves_node = plan.expert * job.expert_tensor > job.cluster.devices_per_node
    runs = all(
        float(group.device.capability or 0) >= _HAS_DEEPEP and group.inter_node.kind in _RDMA
        for group in groups
    )
    return "deepep" if leaves_node and runs else "alltoall"


def overlaps_exchange(plan: Plan) -> bool:
    """Whether tokens travel while another micro-batch computes: where the plan says so
    (``--overlap-moe-expert-parallel-comm`` of Megatron), and in DualPipe, which was made for it."""
    told = (plan.overlap or {}).get("experts")
    return plan.schedule == "dualpipe" if told is None else told
