"""Describes a job by figures that its time may depend on, for predictors that name none of their own."""

from __future__ import annotations

import math

from foretrain.capture import capture_job
from foretrain.job import Job


def job_figures(job: Job) -> dict[str, float]:
    """Logarithms of scale and of the work of a step, and a 1 for each setting, by name."""
    cluster, training, plan = job.cluster, job.workload.training, job.plan
    graph = capture_job(job)
    sizes = {
        "workers": cluster.world_size,
        "nodes": cluster.nodes,
        "nodes of servers": cluster.servers.nodes if cluster.servers else 1,
        "cores": (cluster.device.cores or 1) if cluster.device.is_cpu else 1,
        "link": cluster.inter_node.bandwidth_bytes_per_s if job.over_network else 1,
        "batch per worker": training.global_batch / cluster.world_size,
        "FLOPs": float(graph.column("flops").sum()) * job.accumulation,
        "bytes": float(graph.column("bytes").sum()) * job.accumulation,
        "calls": float(graph.column("launches").sum()) * job.accumulation,
        "parameters": graph.parameters,
    }
    settings = {
        "device": cluster.device.name,
        "precision": training.precision,
        "optimizer": training.optimizer,
        "mode": training.mode,
        "servers": bool(plan.servers),
        "servers apart": cluster.servers is not None,
        "shard": plan.shard,
        "degrees": (plan.tensor, plan.pipeline, plan.context, plan.expert),
    }
    return {
        **{f"log {name}": math.log(max(size, 1)) for name, size in sizes.items()},
        **{f"{name} = {value}": 1.0 for name, value in settings.items()},
    }
