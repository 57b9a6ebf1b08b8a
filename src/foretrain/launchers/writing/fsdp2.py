"""Writes a training program of plain PyTorch: DDP, ZeRO 1, FSDP2 or HSDP, with tensor parallelism."""

from __future__ import annotations

import fnmatch

from foretrain.errors import InputError
from foretrain.job import Job
from foretrain.launchers.writing.limits import OUR_PROGRAMS, TargetLimits, cannot, overlaps_as_usual
from foretrain.launchers.writing.model_config import given, has_experts
from foretrain.launchers.writing.target_files import TargetFiles, program_text
from foretrain.launchers.writing.versions import stamp
from foretrain.workload import TORCHAO

_OPTIMIZERS = (
    "sgd", "sgd-plain", "adam", "adamw", "adam-fused", "adamw-fused", "adagrad", "rmsprop", "nadam", "radam",
    "adamax", "adadelta", "asgd", "rprop", "adafactor",
)  # fmt: skip
_SOURCES = ("transformers", "timm", "torchvision", "python")
TASKS = (
    "causal-lm", "masked-lm", "seq2seq-lm", "sequence-classification", "token-classification",
    "question-answering", "image-classification",
)  # fmt: skip
"""Tasks of transformers that the programs make inputs for."""
_NO_CLASSIFIERS = (
    "*rcnn*", "retinanet*", "ssd*", "fcos*", "fcn_*", "deeplab*", "lraspp*", "raft*", "r3d*", "mc3*",
    "r2plus1d*", "mvit_v*", "s3d", "swin3d*",
)  # fmt: skip
"""Models of torchvision that look for objects, label pixels or see clips."""

LIMITS = TargetLimits(
    target="fsdp2",
    says={
        **dict.fromkeys(
            (
                "training.sequence", "training.image", "training.classes", "training.precision",
                "training.master_weights", "training.grad_scaler", "training.channels_last",
                "training.compile", "training.attention", "plan.tensor", "plan.tensor_plan",
                "plan.replicate", "plan.reshard", "plan.reduce_precision", "plan.offload",
                "plan.recompute_every", "plan.fp8_gather",
            )
        ),
        "training.fp8": TORCHAO,
        "training.optimizer": _OPTIMIZERS,
        "training.loss": ("plain",),
        "training.graphs": ("none",),
        "training.checkpoint_every": lambda every: isinstance(every, int) or every == "epoch",
        "plan.shard": ("none", "zero1", "zero3"),
        "plan.recompute": ("none", "operators", "full"),
        "plan.overlap": overlaps_as_usual,
    },
    notes=OUR_PROGRAMS,
    otherwise={
        "training.adapter": "target accelerate trains adapters",
        "training.checkpoint_every": "it counts steps or epochs",
        "training.optimizer": f"it has torch's: {', '.join(_OPTIMIZERS)}",
        "training.mtp_layers": "target megatron has them",
        "plan.shard": "it takes none, zero1 or zero3 (reshard = false keeps parameters between the passes); "
        "DeepSpeed has zero2",
        "plan.recompute": "it takes none, operators or full",
        "plan.pipeline": "targets megatron and torchtitan have pipelines",
        "plan.context": "targets accelerate, torchtitan and megatron have it",
        "plan.expert": "targets torchtitan and megatron have it",
        "plan.sequence_parallel": "targets megatron and torchtitan have it",
        "plan.overlap": "gradients and parameters travel beside computation, and nothing else does",
    },
)  # fmt: skip


def write(job: Job) -> TargetFiles:
    """The training program, and the command that starts it."""
    notes = LIMITS.check(job)
    check_model(job, "fsdp2", _SOURCES)
    _check(job)
    stamped = stamp("torch")
    files = {
        "train.py": program_text("fsdp2", stamped),
        "models.py": program_text("models", stamped),
        "spreading.py": program_text("spreading", stamped),
        "step_times.py": program_text("step_times", stamped),
    }
    about = {
        "train.py": "the training loop; your data goes into your_batches, your weights into your_weights "
        "(without them both are random); --max-norm clips gradients, which the forecast does not",
        "models.py": "builds the model, its inputs and its loss from the job",
        "spreading.py": "spreads the model as the plan says",
        "step_times.py": "times steps and prints them",
    }
    if job.plan.shard == "zero3" and job.accumulation > 1:
        usual = "gradients are handed out in each micro-batch, as in the forecast"
        notes.append(f"plan.micro_batch: {usual}; --keep-whole-gradients does it once, with more memory")
    if job.workload.training.master_weights:
        notes.append("training.master_weights = true: shards are in fp32 and are cast as they are gathered")
    return TargetFiles(
        launcher="torchrun",
        command=f"train.py --job {job_file(job)}",
        files=files,
        about=about,
        stamps=("torch",),
        notes=tuple(notes),
    )


def job_file(job: Job) -> str:
    """The name of the job's file: TOML, or JSON where the model's configuration has values that are
    nothing."""
    return "job.json" if _has_nothing(job.to_dict()) else "job.toml"


def _has_nothing(value: object) -> bool:
    if isinstance(value, dict):
        return any(_has_nothing(one) for one in value.values())
    if isinstance(value, list | tuple):
        return any(_has_nothing(one) for one in value)
    return value is None


def check_model(job: Job, target: str, sources: tuple[str, ...]) -> None:
    """Refuse models that the programs cannot build or make inputs for."""
    model, training = job.workload.model, job.workload.training
    if model.source not in sources:
        raise cannot(target, "model.source", model.source, f"it builds models of {', '.join(sources)}")
    if model.task is not None and model.task not in TASKS:
        raise cannot(target, "model.task", model.task, f"its inputs are made for {', '.join(TASKS)}")
    if model.source == "transformers" and model.config is None:
        raise InputError(f"model.name: {model.name!r} alone; launch files need model.config")
    if model.source == "transformers" and training.sequence is None and training.image is None:
        raise InputError("training.sequence: missing; random inputs need a length")
    if model.source == "torchvision" and any(
        fnmatch.fnmatchcase(str(model.name), one) for one in _NO_CLASSIFIERS
    ):
        raise cannot(target, "model.name", model.name, "of torchvision it trains classifiers of images")
    if model.source == "python" and ":" not in str(model.name):
        raise cannot(target, "model.name", model.name, "it takes file.py:function")


def _check(job: Job) -> None:
    plan, training, model = job.plan, job.workload.training, job.workload.model
    sharded = plan.shard == "zero3"
    if plan.tensor > 1:
        if plan.data != 1 and not sharded:
            raise cannot("fsdp2", "plan.shard", plan.shard, "beside plan.tensor replicas share zero3 shards")
        if has_experts(model):
            raise cannot("fsdp2", "plan.tensor", plan.tensor, "experts are not cut; megatron does it")
        if model.source != "transformers" and plan.tensor_plan is None:
            raise InputError(f"plan.tensor_plan: missing; {model.source} models do not say how they are cut")
        for name in ("num_attention_heads", "num_key_value_heads"):
            heads = given(model, name)
            if heads is not None and heads % plan.tensor:
                raise cannot("fsdp2", "plan.tensor", plan.tensor, f"it divides model.config.{name} = {heads}")
    if plan.offload and not sharded:
        raise cannot("fsdp2", "plan.offload", True, "it needs plan.shard = zero3")
    if training.master_weights and not sharded:
        raise cannot("fsdp2", "training.master_weights", True, "it needs plan.shard = zero3, or amp-bf16")
    if training.channels_last and sharded:
        raise cannot("fsdp2", "training.channels_last", True, "FSDP2 takes contiguous parameters alone")
    if plan.reduce_precision == "bf16" and not sharded and job.cluster.device.is_cpu:
        raise cannot("fsdp2", "plan.reduce_precision", "bf16", "DDP casts gradients for NCCL alone")
    if plan.reduce_precision == "fp32" and not sharded and training.precision in ("bf16", "fp16", "fp8"):
        possible = f"DDP sends gradients of {training.precision} weights as they are"
        raise cannot("fsdp2", "plan.reduce_precision", "fp32", possible)
