"""Writes the YAML of accelerate, and the files that launch transformers' Trainer with it."""

from __future__ import annotations

from typing import Any

from foretrain.job import Job
from foretrain.launchers.writing.deepspeed import write as write_deepspeed
from foretrain.launchers.writing.limits import OUR_PROGRAMS, TargetLimits, cannot, overlaps_as_usual
from foretrain.launchers.writing.target_files import TargetFiles
from foretrain.launchers.writing.trainer import (
    ABOUT,
    OPTIMIZERS,
    check_trainer,
    trainer_command,
    trainer_files,
)
from foretrain.launchers.writing.versions import stamp
from foretrain.launchers.writing.yaml_text import yaml_text

_FP8_BACKENDS = {"tensorwise": "AO", "delayed": "TE"}
_STRATEGIES = {"allgather": "allgather", "ring": "alltoall"}

LIMITS = TargetLimits(
    target="accelerate",
    says={
        **dict.fromkeys(
            (
                "training.sequence", "training.image", "training.classes", "training.attention",
                "training.compile", "training.adapter", "plan.tensor", "plan.context",
                "plan.context_exchange", "plan.replicate", "plan.offload",
            )
        ),
        "training.precision": ("fp32", "tf32", "bf16", "fp16", "amp-bf16", "amp-fp16", "fp8"),
        "training.fp8": tuple(_FP8_BACKENDS),
        "training.optimizer": tuple(OPTIMIZERS),
        "training.loss": ("plain", "fused"),
        "training.graphs": ("none",),
        "training.checkpoint_every": lambda every: isinstance(every, int),
        "plan.shard": ("none", "zero3"),
        "plan.reshard": (True, False),
        "plan.recompute": ("none", "full"),
        "plan.overlap": overlaps_as_usual,
    },
    notes=OUR_PROGRAMS,
    otherwise={
        "training.checkpoint_every": "it counts steps",
        "training.grad_scaler": "the Trainer scales losses of amp-fp16",
        "plan.shard": "it takes none or zero3; training.framework = deepspeed has zero1 and zero2",
        "plan.reshard": "it takes true or false",
        "plan.pipeline": "targets megatron and torchtitan have pipelines",
        "plan.expert": "targets torchtitan and megatron have it",
        "plan.overlap": "gradients and parameters travel beside computation, and nothing else does",
    },
)  # fmt: skip


def write(job: Job) -> TargetFiles:
    """The YAML of accelerate, the training program, and the command that starts it."""
    if job.workload.training.framework == "deepspeed":
        return _with_deepspeed(job)
    notes = [*LIMITS.check(job), *check_trainer(job, "accelerate")]
    _check(job)
    return TargetFiles(
        launcher="accelerate",
        command=trainer_command(job),
        files={**trainer_files(job), "accelerate.yaml": _yaml(accelerate_config(job))},
        about={"accelerate.yaml": "processes and how they share the model", **ABOUT},
        stamps=("accelerate", "transformers", "torch"),
        notes=tuple(notes),
    )


def _with_deepspeed(job: Job) -> TargetFiles:
    of_deepspeed = write_deepspeed(job)
    config = {
        **_processes(job, "DEEPSPEED"),
        "deepspeed_config": {
            "deepspeed_config_file": "ds_config.json",
            "zero3_init_flag": job.plan.shard == "zero3",
            "deepspeed_multinode_launcher": "standard",
        },
    }
    files = {name: text for name, text in of_deepspeed.files.items() if name != "hostfile"}
    about = {name: words for name, words in of_deepspeed.about.items() if name != "hostfile"}
    return TargetFiles(
        launcher="accelerate",
        command=trainer_command(job),
        files={**files, "accelerate.yaml": _yaml(config)},
        about={"accelerate.yaml": "processes, run by DeepSpeed", **about},
        stamps=("accelerate", "deepspeed", "transformers", "torch"),
        notes=of_deepspeed.notes,
    )


def _yaml(config: dict[str, Any]) -> str:
    return f"# {stamp('accelerate')}\n{yaml_text(config)}"


def _check(job: Job) -> None:
    plan, sharded = job.plan, job.plan.shard == "zero3"
    if sharded and job.cluster.device.is_cpu:
        raise cannot("accelerate", "plan.shard", plan.shard, "on CPUs it takes none; target fsdp2 shards")
    for name in ("tensor", "context"):
        degree = getattr(plan, name)
        if degree > 1 and not (sharded and (plan.data or 1) // plan.replicate > 1):
            raise cannot("accelerate", f"plan.{name}", degree, "replicas beside it share zero3 shards")
    if plan.context > 1 and plan.exchange_of_context("pytorch") not in _STRATEGIES:
        raise cannot(
            "accelerate", "plan.context_exchange", plan.context_exchange, "it takes allgather or ring"
        )
    if plan.offload and not sharded:
        raise cannot("accelerate", "plan.offload", True, "it needs plan.shard = zero3")


def accelerate_config(job: Job) -> dict[str, Any]:
    """The YAML that ``accelerate launch`` reads, for this job."""
    plan, training = job.plan, job.workload.training
    kind = "NO" if job.cluster.world_size == 1 else "MULTI_GPU"  # on CPUs too: MULTI_CPU is for mpirun
    config = _processes(job, "FSDP" if plan.shard == "zero3" else kind)
    if training.precision == "fp8":
        config["fp8_config"] = {"backend": _FP8_BACKENDS[training.fp8_recipe]}
    if plan.shard == "zero3":
        config["fsdp_config"] = {
            "fsdp_version": 2,
            "fsdp_reshard_after_forward": plan.reshard is not False,
            "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
            "fsdp_offload_params": plan.offload,
            "fsdp_activation_checkpointing": plan.recompute == "full",
            "fsdp_cpu_ram_efficient_loading": False,
            "fsdp_state_dict_type": "SHARDED_STATE_DICT",
        }
        if plan.replicate > 1 or max(plan.tensor, plan.context) > 1:
            config["parallelism_config"] = _degrees(job)
    return config


def _degrees(job: Job) -> dict[str, Any]:
    plan = job.plan
    assert plan.data is not None
    keys: dict[str, Any] = {
        "parallelism_config_dp_replicate_size": plan.replicate,
        "parallelism_config_dp_shard_size": plan.data // plan.replicate,
        "parallelism_config_tp_size": plan.tensor,
        "parallelism_config_cp_size": plan.context,
    }
    if plan.context > 1:
        strategy = _STRATEGIES[plan.exchange_of_context("pytorch")]
        keys["parallelism_config_cp_comm_strategy"] = strategy
    return keys


def _processes(job: Job, kind: str) -> dict[str, Any]:
    mixed = job.workload.training.precision
    by_deepspeed = kind == "DEEPSPEED"
    names = {"amp-bf16": "bf16", "amp-fp16": "fp16", "fp8": "fp8"}
    if by_deepspeed:
        names |= {"bf16": "bf16", "fp16": "fp16"}
    return {
        "compute_environment": "LOCAL_MACHINE",
        "distributed_type": kind,
        "mixed_precision": names.get(mixed, "no"),
        "num_machines": job.cluster.nodes,
        "num_processes": job.cluster.world_size,
        "machine_rank": 0,
        "main_training_function": "main",
        "rdzv_backend": "static",
        "same_network": True,
        "use_cpu": job.cluster.device.is_cpu,
    }


def environment(job: Job) -> dict[str, str]:
    """Set the variables that ``accelerate launch`` makes of the degrees, for processes that others start."""
    degrees = accelerate_config(job).get("parallelism_config") if job.plan.shard == "zero3" else None
    if not degrees or job.workload.training.framework == "deepspeed":
        return {}
    named = {name.upper(): str(value) for name, value in degrees.items()}
    return {"ACCELERATE_USE_PARALLELISM_CONFIG": "true", **named}
