"""Tells a job what only the provenance of its run says: how the program that was measured had been set."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from foretrain.workload import Attention

if TYPE_CHECKING:
    from foretrain.job import Job

_BACKENDS: dict[str, Attention] = {"unfused": "eager", "local": "eager", "flash": "flash", "fused": "flash"}
"""What Megatron calls its ways to compute attention."""
_PERFORMANCE_RECIPES = frozenset({"NVIDIA-NeMo/NeMo", "NVIDIA-NeMo/Megatron-Bridge"})
"""Sources of figures whose recipes add up and reduce gradients in bf16 (``grad_reduce_in_fp32 = False``, in
NeMo 24 ``grad_sync_dtype: bf16``) and hold the weights of fp8 products in fp8, but for mxfp8."""


def as_measured(job: Job, provenance: Mapping[str, Any]) -> Job:
    """The job as its program ran it, where the job itself does not say."""
    training, plan = job.workload.training, job.plan
    if training.framework != "megatron" or not job.trains:
        return job
    args = provenance.get("args")
    told = args if isinstance(args, Mapping) else {}
    vendor = provenance.get("source") in _PERFORMANCE_RECIPES
    if training.attention is None and (attention := _attention(told, provenance.get("environment"))):
        training = dataclasses.replace(training, attention=attention)
    low = training.precision in ("bf16", "fp8")
    if training.gradient_precision is None and low and (vendor or _reduces_in_bf16(told)):
        training = dataclasses.replace(training, gradient_precision="bf16")
    if training.precision == "fp8" and plan.fp8_gather is None:
        held = told.get("fp8_params", vendor and provenance.get("precision_recipe") != "FP8-MX")
        plan = dataclasses.replace(plan, fp8_gather=True) if held else plan
    return dataclasses.replace(job, workload=dataclasses.replace(job.workload, training=training), plan=plan)


def _attention(args: Mapping[str, Any], environment: object) -> Attention | None:
    """Megatron's layers without Transformer Engine write attention out, and so do those of its older
    containers that have to be deterministic: flash attention was not, backward."""
    if "attention-backend" in args:
        return _BACKENDS.get(str(args["attention-backend"]))
    old = environment == "lts" and args.get("deterministic-mode") is True
    return "eager" if old or args.get("transformer-impl") == "local" else None


def _reduces_in_bf16(args: Mapping[str, Any]) -> bool:
    return args.get("grad_sync_dtype") == "bf16" or args.get("grad_reduce_in_fp32") is False
