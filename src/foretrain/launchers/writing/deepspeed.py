"""Writes the JSON of DeepSpeed, and the files that launch transformers' Trainer with it."""

from __future__ import annotations

import json
from typing import Any

from foretrain.job import Job
from foretrain.launchers.writing.limits import OUR_PROGRAMS, TargetLimits, cannot
from foretrain.launchers.writing.model_config import given, has_experts
from foretrain.launchers.writing.target_files import TargetFiles
from foretrain.launchers.writing.trainer import (
    ABOUT,
    LEARNING_RATE,
    check_trainer,
    trainer_command,
    trainer_files,
)
from foretrain.launchers.writing.versions import VERSIONS

_STAGES = {"none": 0, "zero1": 1, "zero2": 2, "zero3": 3}
_OPTIMIZERS = {"adamw": "AdamW", "adamw-fused": "AdamW", "adam": "Adam", "adam-fused": "Adam", "lamb": "Lamb"}
_TENSOR_PRESETS = {
    "llama": "llama", "mistral": "llama", "qwen2": "qwen2", "qwen3": "qwen2", "mixtral": "mixtral",
    "deepseek_v2": "deepseek_v2", "phi3": "phi3", "bloom": "bloom",
}  # fmt: skip
_EXPERT_PRESETS = ("mixtral", "qwen3_moe", "deepseek_v2", "deepseek_v3")

LIMITS = TargetLimits(
    target="deepspeed",
    says={
        **dict.fromkeys(
            (
                "training.sequence", "training.image", "training.classes", "training.attention",
                "training.master_weights", "training.adapter", "plan.shard", "plan.tensor",
                "plan.reduce_precision", "plan.offload", "plan.expert",
            )
        ),
        "training.precision": ("fp32", "tf32", "bf16", "fp16", "amp-bf16", "amp-fp16"),
        "training.optimizer": tuple(_OPTIMIZERS),
        "training.optimizer_state": ("bf16", "fp32"),
        "training.compile": (True, False),
        "training.loss": ("plain", "fused"),
        "training.graphs": ("none",),
        "training.checkpoint_every": lambda every: isinstance(every, int),
        "plan.recompute": ("none", "full"),
        "plan.reshard": lambda kept: isinstance(kept, int),
        "plan.expert_tensor": (1,),
        "plan.overlap": lambda overlap: set(overlap) <= {"gradients", "tensor"},
    },
    notes=OUR_PROGRAMS,
    otherwise={
        "training.checkpoint_every": "it counts steps",
        "plan.replicate": "it has no copies of shards; plan.reshard = 8 keeps parameters within 8 neighbours",
        "plan.pipeline": "pipelines of DeepSpeed are code; megatron and torchtitan have keys for them",
        "plan.context": "targets accelerate (with FSDP2), torchtitan and megatron have it",
        "plan.reshard": "it takes a number of neighbours",
    },
)  # fmt: skip


def write(job: Job) -> TargetFiles:
    """The JSON of DeepSpeed, the training program, and the command that starts it."""
    notes = [*LIMITS.check(job), *check_trainer(job, "deepspeed")]
    files = {**trainer_files(job), "ds_config.json": json.dumps(deepspeed_config(job), indent=2) + "\n"}
    about = {"ds_config.json": f"ZeRO, formats and batches, for {VERSIONS['deepspeed']}", **ABOUT}
    if job.cluster.nodes > 1:
        hosts = (f"node-{rank} slots={job.cluster.devices_per_node}" for rank in range(job.cluster.nodes))
        files["hostfile"] = "\n".join(hosts) + "\n"
        about["hostfile"] = "how many nodes there are; the names in it are not used"
    return TargetFiles(
        launcher="deepspeed",
        command=trainer_command(job),
        files=files,
        about=about,
        stamps=("deepspeed", "transformers", "torch"),
        notes=tuple(notes),
    )


def deepspeed_config(job: Job) -> dict[str, Any]:
    """The JSON that DeepSpeed reads, for this job."""
    plan, training = job.plan, job.workload.training
    _check(job)
    config: dict[str, Any] = {
        "train_batch_size": training.global_batch,
        "train_micro_batch_size_per_gpu": job.micro_batch,
        "gradient_accumulation_steps": job.accumulation,
        "gradient_clipping": 1.0,
        **_formats(job),
        "zero_optimization": _zero(job),
        "optimizer": {"type": _OPTIMIZERS[training.optimizer], "params": {"lr": LEARNING_RATE}},
        "steps_per_print": 100,
        "wall_clock_breakdown": False,
    }
    if plan.tensor > 1:
        config["tensor_parallel"] = {
            "autotp_size": plan.tensor,
            "preset_model": _TENSOR_PRESETS[str(job.workload.model.model_type)],
            "tp_overlap_comm": bool((plan.overlap or {}).get("tensor", False)),
        }
    if plan.expert > 1:
        kind = str(job.workload.model.model_type)
        config["expert_parallel"] = {"enabled": True, "autoep_size": plan.expert, "preset_model": kind}
    if plan.reduce_precision is not None:
        config["communication_data_type"] = plan.reduce_precision
    if training.compile:
        config["compile"] = {"deepcompile": True}
    return config


def _formats(job: Job) -> dict[str, Any]:
    training = job.workload.training
    half = training.precision
    if half in ("amp-bf16", "amp-fp16"):
        dtype = {"amp-bf16": "bfloat16", "amp-fp16": "float16"}[half]
        return {"torch_autocast": {"enabled": True, "dtype": dtype}}
    if half not in ("bf16", "fp16"):
        return {}
    keys: dict[str, Any] = {"enabled": True}
    if not training.master_weights and training.adapter is None:
        if half == "fp16":
            raise cannot("deepspeed", "training.master_weights", False, "it keeps fp32 weights beside fp16")
        keys["bf16_master_weights_and_grads"] = True
        if training.optimizer_state != "fp32":
            keys["bf16_optimizer_states"] = True
    elif training.optimizer_state == "bf16":
        raise cannot("deepspeed", "training.optimizer_state", "bf16", "it needs master_weights = false")
    return {half: keys}


def _zero(job: Job) -> dict[str, Any]:
    plan = job.plan
    overlaps = (plan.overlap or {}).get("gradients", plan.shard == "zero3")
    keys: dict[str, Any] = {
        "stage": _STAGES[plan.shard],
        "overlap_comm": overlaps,
        "contiguous_gradients": True,
        "reduce_scatter": True,
    }
    if plan.shard == "zero3":
        keys["stage3_gather_16bit_weights_on_model_save"] = True
    if plan.reshard:
        keys["zero_hpz_partition_size"] = int(plan.reshard)
    if plan.offload:
        keys["offload_optimizer"] = {"device": "cpu", "pin_memory": True}
    return keys


def _check(job: Job) -> None:
    plan, model = job.plan, job.workload.model
    kind = str(model.model_type)
    if isinstance(plan.reshard, bool):
        raise cannot("deepspeed", "plan.reshard", plan.reshard, "it takes a number of neighbours")
    if plan.tensor > 1 and kind not in _TENSOR_PRESETS:
        raise cannot("deepspeed", "plan.tensor", plan.tensor, f"it cuts {', '.join(_TENSOR_PRESETS)}")
    heads = given(model, "num_key_value_heads")
    if plan.tensor > 1 and heads is not None and heads % plan.tensor:
        raise cannot("deepspeed", "plan.tensor", plan.tensor, f"it divides num_key_value_heads = {heads}")
    if plan.expert > 1 and (kind not in _EXPERT_PRESETS or not has_experts(model)):
        raise cannot("deepspeed", "plan.expert", plan.expert, f"it spreads {', '.join(_EXPERT_PRESETS)}")
    if plan.expert > 1 and plan.shard == "zero3":
        raise cannot("deepspeed", "plan.expert", plan.expert, "experts are spread with zero1 and zero2")
    if plan.offload and plan.shard == "none":
        raise cannot("deepspeed", "plan.offload", True, "it needs plan.shard")
