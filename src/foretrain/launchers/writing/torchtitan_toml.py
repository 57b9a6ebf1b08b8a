"""Writes the TOML that configures torchtitan v0.2.2."""

from __future__ import annotations

from typing import Any

from foretrain.job import Job
from foretrain.job_files import toml_tables
from foretrain.launchers.writing.expected import steps_of
from foretrain.launchers.writing.torchtitan_models import Flavor
from foretrain.launchers.writing.torchtitan_settings import degrees, formats, local_batch
from foretrain.launchers.writing.versions import stamp

_BACKENDS = {"alltoall": "standard", "deepep": "deepep", "hybridep": "hybridep"}
TOML_RECIPES = {"tensorwise": "tensorwise", "rowwise": "rowwise", "rowwise-gw-hp": "rowwise_with_gw_hp"}


def toml_text(job: Job, flavor: Flavor) -> str:
    """The plan as TOML."""
    plan, training = job.plan, job.workload.training
    tables: dict[str, dict[str, Any]] = {
        "model": {
            "name": flavor.family,
            "flavor": flavor.name,
            "hf_assets_path": f"./assets/hf/{_assets(job)}",
        },
        "training": {
            "local_batch_size": local_batch(job),
            "global_batch_size": training.global_batch,
            "seq_len": training.sequence,
            "steps": steps_of(job),
            "dataset": "c4",
            **formats(job),
            "enable_cpu_offload": plan.offload,
        },
        "parallelism": degrees(job),
        "activation_checkpoint": _toml_checkpointing(job),
        "compile": {"enable": bool(training.compile), "components": ["model", "loss"]},
        "optimizer": {"name": "AdamW", "implementation": "fused"},
    }
    parallelism = tables["parallelism"]
    if plan.pipeline > 1:
        parallelism["pipeline_parallel_microbatch_size"] = job.micro_batch
    if plan.expert > 1:
        parallelism["expert_tensor_parallel_degree"] = job.expert_tensor
        parallelism["expert_parallel_comm_backend"] = _BACKENDS[plan.dispatcher or "alltoall"]
    if plan.context > 1:
        ring = plan.exchange_of_context("torchtitan") == "ring"
        parallelism["context_parallel_rotate_method"] = "alltoall" if ring else "allgather"
    if (plan.overlap or {}).get("tensor"):
        parallelism["enable_async_tensor_parallel"] = True
    if training.precision == "fp8" and training.fp8_recipe == "mxfp8":
        tables["model"]["converters"] = ["quantize.linear.mx"]
    elif training.precision == "fp8":
        tables["model"]["converters"] = ["quantize.linear.float8"]
        tables["quantize.linear.float8"] = {
            "recipe_name": TOML_RECIPES[training.fp8_recipe],
            "enable_fsdp_float8_all_gather": bool(plan.fp8_gather),
        }
    if training.checkpoint_every is not None:
        tables["checkpoint"] = {"enable": True, "interval": training.checkpoint_every}
    return f"# {stamp('torchtitan-toml')}\n{toml_tables(tables)}"


def _assets(job: Job) -> str:
    """Name the folder where torchtitan's downloads put a tokenizer: by the name of the model."""
    return (job.workload.model.title or job.workload.model.label).rpartition("/")[2]


def _toml_checkpointing(job: Job) -> dict[str, Any]:
    plan = job.plan
    if plan.recompute == "full" and plan.recompute_every > 1:
        return {"mode": "selective", "selective_ac_option": str(plan.recompute_every)}
    if plan.recompute in ("none", "full"):
        return {"mode": plan.recompute}
    return {"mode": "selective", "selective_ac_option": "op"}
