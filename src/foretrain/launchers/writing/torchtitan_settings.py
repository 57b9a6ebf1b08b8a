"""Says what the configurations of both versions of torchtitan have in common: degrees, formats, batches."""

from __future__ import annotations

import math
from typing import Any

from foretrain.job import Job
from foretrain.launchers.writing.limits import cannot
from foretrain.launchers.writing.model_config import sizes

SCHEDULES = {
    "gpipe": "GPipe", "1f1b": "1F1B", "interleaved": "Interleaved1F1B",
    "zero-bubble": "InterleavedZeroBubble", "zbv": "ZBVZeroBubble",
}  # fmt: skip
_SEVERAL = ("interleaved", "zero-bubble")
"""Schedules of several chunks on a rank; torchtitan makes it two."""
_ENDS = 2
"""What embedding and output count as, in layers, when chunks are made."""


def degrees(job: Job) -> dict[str, Any]:
    """Set the degrees of sharding, tensor, pipeline and context parallelism."""
    plan = job.plan
    assert plan.data is not None
    sharded = plan.data // plan.replicate
    reshard = "default" if plan.reshard is None else "always" if plan.reshard else "never"
    keys: dict[str, Any] = {
        "data_parallel_replicate_degree": plan.replicate if plan.shard == "zero3" else plan.data,
        "data_parallel_shard_degree": (sharded if sharded > 1 else -1) if plan.shard == "zero3" else 1,
        "fsdp_reshard_after_forward": reshard,
        "tensor_parallel_degree": plan.tensor,
        "context_parallel_degree": plan.context,
        "pipeline_parallel_degree": plan.pipeline,
        "expert_parallel_degree": plan.expert,
    }
    if plan.pipeline > 1:
        keys["pipeline_parallel_schedule"] = SCHEDULES[plan.schedule]
        if (layers := _layers_per_stage(job)) is not None:
            keys["pipeline_parallel_layers_per_stage"] = layers
    return keys


def _layers_per_stage(job: Job) -> int | None:
    """Count the layers of a stage that make so many chunks, of which embedding and output count as one each;
    None where torchtitan makes them so by itself."""
    plan = job.plan
    if plan.schedule not in _SEVERAL or plan.virtual_stages in (None, 2):
        return None
    layers = int(sizes(job.workload.model, ("num_hidden_layers",))["num_hidden_layers"]) + _ENDS
    chunks = plan.pipeline * (plan.virtual_stages or 1)
    each = math.ceil(layers / chunks)
    if math.ceil(layers / each) != chunks:
        possible = f"{layers - _ENDS} layers and the ends cannot be {chunks} chunks of {each}"
        raise cannot("torchtitan", "plan.virtual_stages", plan.virtual_stages, possible)
    return each


def formats(job: Job) -> dict[str, str]:
    precision = job.workload.training.precision
    return {
        "dtype": "bfloat16" if precision == "bf16" else "float32",
        "mixed_precision_param": "float32" if precision == "fp32" else "bfloat16",
        "mixed_precision_reduce": "float32",
    }


def local_batch(job: Job) -> int:
    """Samples of a rank at once, which a pipeline takes apart."""
    return job.micro_batch * (job.accumulation if job.plan.pipeline > 1 else 1)
