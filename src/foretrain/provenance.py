"""Tells a job what only the provenance of its run says: how the program that was measured had been set."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from foretrain.workload import Attention, Fp8

if TYPE_CHECKING:
    from foretrain.job import Job

_BACKENDS: dict[str, Attention] = {"unfused": "eager", "local": "eager", "flash": "flash", "fused": "flash"}
"""What Megatron calls its ways to compute attention."""
_RECIPES: dict[str, Fp8] = {"FP8-CS": "current", "FP8-MX": "mxfp8", "FP8-SC": "blockwise", "NVFP4": "nvfp4"}
"""What Megatron-Bridge calls its ways of fp8 and fp4."""
_WITHOUT_SCALER = frozenset({"huggingface/pytorch-image-models"})
"""Sources of runs whose programs train in amp-fp16 without a gradient scaler: timm's ``benchmark.py``."""
_FORCES_NEIGHBOURS = frozenset({"NVIDIA-NeMo/Automodel"})
"""Sources of runs whose benchmarks have tokens choose neighbouring experts (``fake_balanced_gate``)."""
_EXAMPLES = "NVIDIA/DeepLearningExamples"
_MASKED = {128: 20, 512: 80}
"""By the length of a sample, the tokens that NVIDIA's BERT masks in pre-training
(``max_predictions_per_seq``), and answers for alone (``sequence_output_is_dense``, the default of its
``run_pretraining.py``)."""
_PREDICTS_FURTHER = re.compile(r"w/ MTP|include one multi-token-prediction layer")
"""How NVIDIA's figures say that a model has a layer of multi-token prediction."""
_PERFORMANCE_RECIPES = frozenset({"NVIDIA-NeMo/NeMo", "NVIDIA-NeMo/Megatron-Bridge"})
"""Sources of figures whose recipes add up and reduce gradients in bf16 (``grad_reduce_in_fp32 = False``, in
NeMo 24 ``grad_sync_dtype: bf16``) and hold the weights of fp8 products in fp8, but for mxfp8."""


def as_measured(job: Job, provenance: Mapping[str, Any]) -> Job:
    """The job as its program ran it, where the job itself does not say."""
    args = provenance.get("args")
    arguments = args if isinstance(args, Mapping) else {}
    vendor = provenance.get("source") in _PERFORMANCE_RECIPES
    training, plan = job.workload.training, job.plan
    of_training = dict(_of_training(job, provenance, arguments, vendor=vendor))
    unsaid = {name: value for name, value in of_training.items() if getattr(training, name) in (None, 0)}
    placed = dict(_of_plan(job, provenance, arguments, vendor=vendor))
    unplaced = {name: value for name, value in placed.items() if getattr(plan, name) is None}
    if not unsaid and not unplaced:
        return job
    work = dataclasses.replace(job.workload, training=dataclasses.replace(training, **unsaid))
    return dataclasses.replace(job, workload=work, plan=dataclasses.replace(plan, **unplaced))


def _of_training(
    job: Job, provenance: Mapping[str, Any], args: Mapping[str, Any], *, vendor: bool
) -> Iterator[tuple[str, Any]]:
    """Fields of the training, and what they were."""
    training = job.workload.training
    recipe = _RECIPES.get(str(provenance.get("precision_recipe")))
    if training.precision == "fp8" and recipe is not None:
        yield "fp8", recipe
    if training.precision == "amp-fp16" and provenance.get("source") in _WITHOUT_SCALER:
        yield "grad_scaler", False
    if "_te_" in str(provenance.get("recipe")):
        yield "attention", "cudnn"
    if provenance.get("source") == _EXAMPLES:
        yield from _of_examples(job)
    if training.framework != "megatron" or not job.trains:
        return
    if _PREDICTS_FURTHER.search(f"{provenance.get('label')} {provenance.get('note')}"):
        yield "mtp_layers", 1
    if args.get("no-gradient-accumulation-fusion") is True:
        yield "fused_accumulation", False
    if attention := _attention(args, provenance.get("environment")):
        yield "attention", attention
    if training.precision in ("bf16", "fp8") and (vendor or _reduces_in_bf16(args)):
        yield "gradient_precision", "bf16"


def _of_examples(job: Job) -> Iterator[tuple[str, Any]]:
    """Say how NVIDIA's BERT is trained: its attention is written out, which the compiler of TorchScript fuses
    in pre-training alone."""
    model, masked = job.workload.model, _MASKED.get(job.workload.training.sequence or 0)
    if model.model_type == "bert" and model.task == "question-answering":
        yield "attention", "eager"
    if model.model_type == "bert" and model.task == "masked-lm" and masked:
        yield "predicted_tokens", masked


def _of_plan(
    job: Job, provenance: Mapping[str, Any], args: Mapping[str, Any], *, vendor: bool
) -> Iterator[tuple[str, Any]]:
    """Fields of the plan, and what they were."""
    training = job.workload.training
    if job.plan.expert > 1 and "deepep" in str(provenance.get("recipe")):
        yield "dispatcher", "deepep"
    if job.plan.expert > 1 and provenance.get("source") in _FORCES_NEIGHBOURS:
        yield "routing", "round-robin"
    in_fp8 = training.framework == "megatron" and training.precision == "fp8" and job.trains
    held_in_fp8 = args.get("fp8_params", vendor and provenance.get("precision_recipe") != "FP8-MX")
    if in_fp8 and held_in_fp8:
        yield "fp8_gather", True


def _attention(args: Mapping[str, Any], environment: object) -> Attention | None:
    """Megatron's layers without Transformer Engine write attention out, and so do those of its older
    containers that have to be deterministic: flash attention was not, backward."""
    if "attention-backend" in args:
        return _BACKENDS.get(str(args["attention-backend"]))
    old = environment == "lts" and args.get("deterministic-mode") is True
    return "eager" if old or args.get("transformer-impl") == "local" else None


def _reduces_in_bf16(args: Mapping[str, Any]) -> bool:
    return args.get("grad_sync_dtype") == "bf16" or args.get("grad_reduce_in_fp32") is False
