"""Jobs that launch files are written for, and what of a job must survive the way through them."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from foretrain.api import make_job
from foretrain.dispatching import dispatcher
from foretrain.estimate import Estimate
from foretrain.job import Job
from foretrain.launchers.writing import Expected
from foretrain.workload import OWN_MODELS

EXPECTED = Expected(
    step_time_s=Estimate(1.0, 0.9, 1.2),
    total_time_s=Estimate(1e5, 9e4, 1.2e5, 8e4, 1.3e5),
    peak_memory_bytes=Estimate(6e10, 5.9e10, 6.2e10),
)

MEGATRON: dict[str, Any] = {
    "framework": "megatron",
    "precision": "bf16",
    "optimizer": "adam",
    "sequence": 4096,
}
TITAN = {
    "framework": "torchtitan",
    "precision": "amp-bf16",
    "optimizer": "adamw",
    "sequence": 8192,
    "steps": 100,
}
TORCH: dict[str, Any] = {"precision": "amp-bf16", "optimizer": "adamw-fused", "sequence": 2048}
DEEPSPEED = {
    "framework": "deepspeed", "precision": "bf16", "master_weights": True, "optimizer": "adamw", "sequence": 2048,
}  # fmt: skip
IMAGES = {"precision": "amp-bf16", "optimizer": "sgd", "image": 224}
H100: dict[str, Any] = {"node": "dgx-h100", "micro_batch": 1}

NET = "import torch\n\ndef net(batch):\n    return torch.nn.Linear(8, 8), (torch.zeros(batch, 8),)\n"
"""A model of the user's own."""

JOBS: dict[str, tuple[str, str | None, dict[str, Any]]] = {
    "megatron-dense": ("llama-3-8b", None, {**MEGATRON, **H100, "batch": 128, "tensor": 2, "sequence_parallel": True, "shard": "zero1"}),
    "megatron-every-degree": ("llama-3-70b", None, {**MEGATRON, **H100, "nodes": 16, "batch": 512, "tensor": 4, "pipeline": 4, "context": 2, "schedule": "interleaved", "virtual_stages": 5, "sequence_parallel": True, "shard": "zero1", "recompute": "selective", "steps": 500}),
    "megatron-ddp": ("llama-3-8b", None, {**MEGATRON, "node": "dgx-a100", "batch": 64, "micro_batch": 2, "recompute": "full"}),
    "megatron-hsdp": ("llama-3-8b", None, {**MEGATRON, **H100, "nodes": 2, "batch": 64, "shard": "zero3", "replicate": 2}),
    "megatron-zero2": ("llama-3-8b", None, {**MEGATRON, **H100, "batch": 64, "shard": "zero2"}),
    "megatron-mixtral": ("mixtral-8x7b", None, {**MEGATRON, **H100, "nodes": 4, "batch": 256, "tensor": 2, "pipeline": 2, "expert": 4, "expert_tensor": 2, "sequence_parallel": True, "shard": "zero1", "dispatcher": "alltoall"}),
    "megatron-qwen3-moe": ("qwen3-30b-a3b", None, {**MEGATRON, **H100, "nodes": 2, "batch": 64, "expert": 8, "shard": "zero1"}),
    "megatron-deepseek": ("deepseek-v3", None, {**MEGATRON, **H100, "nodes": 64, "batch": 2048, "pipeline": 8, "expert": 32, "shard": "zero1", "stages": [8, 8, 8, 8, 8, 8, 8, 5], "recompute": "selective", "recompute_modules": ["norms", "mla_up"], "mtp_layers": 1}),
    "megatron-fp8": ("llama-3-8b", None, {**MEGATRON, **H100, "batch": 128, "precision": "fp8", "fp8": "current", "shard": "zero1", "fp8_gather": True}),
    "megatron-gpt2": ("gpt2", None, {**MEGATRON, "node": "dgx-a100", "batch": 64, "micro_batch": 4, "sequence": 1024}),
    "megatron-rack": ("llama-3-8b", None, {**MEGATRON, "node": "gb200-nvl72", "nodes": 8, "micro_batch": 1, "batch": 64, "context": 4, "context_exchange": "allgather", "shard": "zero1"}),
    "megatron-every-switch": ("llama-3-8b", None, {**MEGATRON, **H100, "batch": 64, "evaluate_every": 100, "evaluate_samples": 640, "checkpoint_every": 500, "steps": 1000, "optimizer_state": "bf16", "shard": "zero1", "gradient_precision": "bf16", "loss": "fused", "graphs": "layers", "fused_accumulation": False, "attention": "cudnn"}),
    "megatron-waits": ("llama-3-8b", None, {**MEGATRON, **H100, "batch": 64, "pipeline": 4, "schedule": "interleaved", "virtual_stages": 2, "overlap": {"messages": False}, "offload": True, "shard": "zero1"}),
    "torchtitan-llama4": ("Llama-4-Scout-17B-16E", None, {**TITAN, **H100, "nodes": 4, "batch": 32, "shard": "zero3", "expert": 4}),
    "torchtitan-dispatcher": ("qwen3-30b-a3b", None, {**TITAN, **H100, "nodes": 2, "batch": 64, "expert": 16, "dispatcher": "deepep", "shard": "zero3"}),
    "torchtitan-chunks": ("llama-3-8b", None, {**TITAN, **H100, "nodes": 4, "batch": 64, "pipeline": 2, "schedule": "interleaved", "virtual_stages": 6, "shard": "zero3", "tensor": 2}),
    "torchtitan-fsdp": ("llama-3-8b", None, {**TITAN, "node": "dgx-h100", "nodes": 2, "batch": 64, "micro_batch": 2, "shard": "zero3", "compile": True, "recompute": "operators"}),
    "torchtitan-hsdp-tensor": ("llama-3-70b", None, {**TITAN, **H100, "nodes": 8, "batch": 64, "tensor": 8, "sequence_parallel": True, "shard": "zero3", "replicate": 2, "recompute": "full", "compile": True}),
    "torchtitan-pipeline": ("llama-3-405b", None, {**TITAN, **H100, "nodes": 16, "batch": 64, "tensor": 4, "pipeline": 8, "schedule": "interleaved", "sequence_parallel": True, "shard": "zero3"}),
    "torchtitan-experts": ("qwen3-30b-a3b", None, {**TITAN, **H100, "nodes": 2, "batch": 32, "shard": "zero3", "expert": 8, "context": 2}),
    "torchtitan-fp8": ("qwen3-8b", None, {**TITAN, **H100, "batch": 32, "shard": "zero3", "precision": "fp8", "fp8": "rowwise", "compile": True}),
    "torchtitan-toml-alone": ("llama-3-8b", None, {**TITAN, **H100, "batch": 32, "shard": "zero3", "recompute": "full", "recompute_every": 2}),
    "torchtitan-ddp": ("llama-3-8b", None, {**TITAN, **H100, "batch": 32, "precision": "bf16"}),
    "fsdp2-hsdp": ("llama-3-8b", None, {**TORCH, **H100, "nodes": 2, "batch": 64, "shard": "zero3", "replicate": 2, "recompute": "full"}),
    "fsdp2-ddp-gqa": ("qwen2.5-7b", None, {**TORCH, "node": "dgx-a100", "batch": 64, "micro_batch": 2}),
    "fsdp2-zero1": ("gpt2", None, {**TORCH, "device": "a100", "devices": 8, "batch": 64, "shard": "zero1", "sequence": 1024}),
    "fsdp2-tensor": ("llama-3-8b", None, {**TORCH, "node": "dgx-h100", "batch": 32, "micro_batch": 4, "tensor": 4, "shard": "zero3", "reshard": False}),
    "fsdp2-fp8": ("llama-3-8b", None, {**TORCH, **H100, "batch": 32, "shard": "zero3", "precision": "fp8", "fp8": "tensorwise", "fp8_gather": True, "compile": True}),
    "fsdp2-timm": ("timm:vit_base_patch16_224", None, {**IMAGES, "device": "a100", "devices": 8, "batch": 512, "optimizer": "adamw", "compile": True}),
    "fsdp2-torchvision": ("resnet50", None, {**IMAGES, "device": "v100", "devices": 4, "batch": 256, "precision": "amp-fp16", "channels_last": True}),
    "fsdp2-python": ("net.py:net", None, {"device": "t4", "batch": 64, "optimizer": "sgd"}),
    "accelerate-ddp": ("qwen3-8b", "accelerate", {**TORCH, **H100, "batch": 32, "recompute": "full"}),
    "accelerate-hsdp": ("llama-3-8b", "accelerate", {**TORCH, **H100, "nodes": 2, "batch": 64, "shard": "zero3", "replicate": 2, "recompute": "full"}),
    "accelerate-tensor-context": ("llama-3-8b", "accelerate", {**TORCH, **H100, "nodes": 2, "batch": 16, "shard": "zero3", "tensor": 2, "context": 2, "optimizer": "adamw"}),
    "accelerate-lora": ("llama-3-8b", "accelerate", {**TORCH, **H100, "batch": 32, "adapter": {"kind": "lora", "rank": 16, "base": "bf16"}, "recompute": "full"}),
    "accelerate-bf16-sgd": ("qwen3-8b", "accelerate", {**TORCH, **H100, "batch": 32, "precision": "bf16", "optimizer": "sgd-plain"}),
    "accelerate-one-device": ("bert-base-uncased", "accelerate", {**TORCH, "device": "a100", "batch": 32, "precision": "tf32", "sequence": 512, "optimizer": "sgd"}),
    "accelerate-deepspeed": ("llama-3-8b", "accelerate", {**DEEPSPEED, **H100, "nodes": 2, "batch": 64, "shard": "zero3", "offload": True}),
    "deepspeed-zero1": ("llama-3-8b", None, {**DEEPSPEED, **H100, "batch": 64, "shard": "zero1"}),
    "deepspeed-zero2": ("llama-3-8b", None, {**DEEPSPEED, **H100, "nodes": 2, "batch": 64, "shard": "zero2", "recompute": "full"}),
    "deepspeed-zero3": ("llama-3-70b", None, {**DEEPSPEED, **H100, "nodes": 2, "batch": 64, "shard": "zero3", "reshard": 8, "recompute": "full"}),
    "deepspeed-tensor": ("llama-3-8b", None, {**DEEPSPEED, **H100, "batch": 32, "shard": "zero1", "tensor": 4}),
    "deepspeed-experts": ("mixtral-8x7b", None, {**DEEPSPEED, **H100, "batch": 32, "shard": "zero2", "expert": 8}),
    "deepspeed-lora": ("llama-3-8b", None, {**DEEPSPEED, **H100, "batch": 32, "shard": "zero2", "master_weights": False, "adapter": "lora:16"}),
}  # fmt: skip
"""By name: the model, the target where it is not the usual one, and the options."""


def planned(name: str, folder: Path) -> tuple[Job, str | None]:
    """A job of the table, and its target; models of one's own lie in the folder."""
    model, target, options = JOBS[name]
    if model.startswith("net.py"):
        (folder / "net.py").write_text(NET)
        model = str(folder / model)
    return make_job(model, **options), target


_SIZES = ("hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "intermediate_size",
          "vocab_size", "num_local_experts", "n_routed_experts", "moe_intermediate_size")  # fmt: skip


def essence(job: Job) -> dict[str, Any]:
    """What a job trains, and how: with what its framework does where the job says nothing."""
    plan, training, config = job.plan, job.workload.training, job.workload.model.config or {}
    framework = training.framework
    kept = {
        name: getattr(plan, name)
        for name in ("data", "tensor", "pipeline", "context", "shard", "replicate", "recompute_every", "stages",
                     "recompute_modules", "sequence_parallel", "offload", "registered_buffers", "expert_capacity")
    }  # fmt: skip
    experts = any("expert" in name for name in config)
    piped = plan.pipeline > 1
    return {
        **kept,
        "framework": framework,
        "precision": training.precision,
        "fp8": training.fp8_recipe if training.precision == "fp8" else None,
        "fp8_gather": bool(plan.fp8_gather),
        "master_weights": training.master_weights and framework not in OWN_MODELS,
        "optimizer": training.optimizer.removesuffix("-fused")
        if framework == "deepspeed"
        else training.optimizer,
        "compile": training.compile,
        "attention": training.attention,
        "mtp_layers": training.mtp_layers,
        "adapter": training.adapter,
        "batch": training.global_batch,
        "micro_batch": job.micro_batch,
        "inputs": (training.sequence, training.image, training.classes),
        "expert": (plan.expert, job.expert_tensor, dispatcher(job)) if experts else None,
        "schedule": plan.schedule if piped else None,
        "virtual_stages": _chunks(job) if piped else None,
        "recompute": "operators"
        if framework == "torchtitan" and plan.recompute == "selective"
        else plan.recompute,
        "reshard": plan.reshard not in (None, True) and plan.reshard,
        "reduces_in": plan.reduce_precision if framework != "torchtitan" else "fp32",
        "exchange": plan.exchange_of_context(framework) if plan.context > 1 else None,
        "overlap": _overlap(job),
        "devices": (job.cluster.nodes, job.cluster.devices_per_node),
        "model": (job.workload.model.source, (job.workload.model.name or "").rpartition("/")[2]),
        "sizes": _sizes(config) if framework == "megatron" else config,
    }


def _chunks(job: Job) -> int | None:
    """Of each rank; torchtitan makes two where it is told nothing."""
    plan, usual = job.plan, job.workload.training.framework == "torchtitan"
    several = plan.schedule in ("interleaved", "zero-bubble")
    return plan.virtual_stages or (2 if usual and several else None)


def _sizes(config: Mapping[str, Any]) -> list[int] | None:
    """Of a configuration that tells them; Megatron's arguments always do."""
    return [config[name] for name in _SIZES if name in config] if "hidden_size" in config else None


def _overlap(job: Job) -> dict[str, bool]:
    """What runs beside computation, in Megatron and DeepSpeed, where files say it in so many words."""
    plan, given = job.plan, dict(job.plan.overlap or {})
    framework = job.workload.training.framework
    if framework == "megatron":
        usual = dict.fromkeys(("gradients", "parameters"), plan.shard != "none")
        usual["tensor"] = plan.tensor > 1 and plan.sequence_parallel
    else:
        usual = {"gradients": framework == "deepspeed" and plan.shard == "zero3"}
    return {name: value for name, value in {**usual, **given}.items() if value}


def with_steps(job: Job, steps: int) -> Job:
    training = dataclasses.replace(job.workload.training, steps=steps)
    return dataclasses.replace(job, workload=dataclasses.replace(job.workload, training=training))
