"""Says how tokens travel to their experts: as the plan says, else as the framework does."""

from __future__ import annotations

from foretrain.job import Job
from foretrain.plan import Dispatcher


def dispatcher(job: Job) -> Dispatcher:
    """The plan's dispatcher, or the framework's.

    Megatron-Bridge's recipes take HybridEP inside of NVLink domains that span nodes (GB200, GB300); elsewhere
    all-to-all, which is also what torchtitan does.
    """
    if job.plan.dispatcher is not None:
        return job.plan.dispatcher
    spans_nodes = all(group.domain > group.devices_per_node for group in job.cluster.groups)
    return "hybridep" if spans_nodes and job.workload.training.framework == "megatron" else "alltoall"
