"""Says how tokens travel to their experts, and beside what: as the plan says, else as the framework does."""

from __future__ import annotations

from foretrain.job import Job
from foretrain.plan import Dispatcher, Plan


def dispatcher(job: Job) -> Dispatcher:
    """The plan's dispatcher, or the framework's.

    Megatron-Bridge's recipes take HybridEP inside of NVLink domains that span nodes (GB200, GB300); elsewhere
    all-to-all, which is also what torchtitan does.
    """
    if job.plan.dispatcher is not None:
        return job.plan.dispatcher
    spans_nodes = all(group.domain > group.devices_per_node for group in job.cluster.groups)
    return "hybridep" if spans_nodes and job.workload.training.framework == "megatron" else "alltoall"


def overlaps_exchange(plan: Plan) -> bool:
    """Whether tokens travel while another micro-batch computes: where the plan says so
    (``--overlap-moe-expert-parallel-comm`` of Megatron), and in DualPipe, which was made for it."""
    told = (plan.overlap or {}).get("experts")
    return plan.schedule == "dualpipe" if told is None else told
