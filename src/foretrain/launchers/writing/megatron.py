"""Writes the arguments of Megatron-LM's pretrain_gpt.py for a job."""

from __future__ import annotations

import math
from typing import Any

from foretrain.dispatching import dispatcher
from foretrain.errors import InputError
from foretrain.job import Job
from foretrain.launchers.writing.expected import steps_of
from foretrain.launchers.writing.limits import TargetLimits, cannot
from foretrain.launchers.writing.megatron_model import model_arguments
from foretrain.launchers.writing.model_config import has_experts, sizes
from foretrain.launchers.writing.target_files import TargetFiles
from foretrain.launchers.writing.versions import stamp

_RECIPES = {"delayed": "delayed", "current": "tensorwise", "blockwise": "blockwise", "mxfp8": "mxfp8"}
_OPTIMIZERS = {
    "adam": "adam", "adamw": "adam", "adam-fused": "adam", "adamw-fused": "adam", "sgd": "sgd",
    "muon": "muon",
}  # fmt: skip
_MODULES = {
    "attention": "core_attn", "norms": "layernorm", "mlp": "mlp", "experts": "moe",
    "expert_activation": "moe_act", "shared_experts": "shared_experts", "mla_up": "mla_up_proj",
}  # fmt: skip
_EXCHANGES = {"ring": "p2p", "alltoall": "a2a", "allgather": "allgather"}
_FSDP = {"zero2": "optim_grads", "zero3": "optim_grads_params"}

LIMITS = TargetLimits(
    target="megatron",
    says={
        "training.sequence": None,
        "training.precision": ("bf16", "fp16", "fp32", "fp8"),
        "training.fp8": (*_RECIPES, "nvfp4"),
        "training.master_weights": None,
        "training.optimizer": tuple(_OPTIMIZERS),
        "training.attention": ("flash", "cudnn", "eager"),
        "training.loss": ("plain", "fused"),
        "training.optimizer_state": None,
        "training.gradient_precision": None,
        "training.fused_accumulation": None,
        "training.mtp_layers": None,
        "training.graphs": None,
        "training.evaluate_every": lambda every: isinstance(every, int),
        "training.evaluate_samples": None,
        "training.checkpoint_every": lambda every: isinstance(every, int),
        **{
            f"plan.{name}": None
            for name in (
                "tensor", "pipeline", "context", "expert", "expert_tensor", "shard", "sequence_parallel",
                "virtual_stages", "offload", "replicate", "recompute_every", "recompute_modules", "stages",
                "context_exchange", "dispatcher", "expert_capacity", "fp8_gather", "registered_buffers",
                "overlap", "reduce_precision",
            )
        },
        "plan.schedule": ("1f1b", "interleaved"),
        "plan.recompute": ("none", "selective", "full"),
    },
    otherwise={
        "training.evaluate_every": "it counts steps",
        "training.checkpoint_every": "it counts steps",
        "training.adapter": "target accelerate trains adapters",
        "plan.recompute": "it takes none, selective or full",
        "training.precision": "it takes bf16, fp16, fp8 or fp32",
        "plan.tensor_plan": "it cuts layers in its own way",
    },
)  # fmt: skip


def write(job: Job) -> TargetFiles:
    """The arguments of pretrain_gpt.py, and the command that starts it."""
    notes = LIMITS.check(job)
    words, vocabulary, left_out = model_arguments(job)
    _check(job)
    arrays = {
        "MODEL": words,
        "PARALLEL": [*_degrees(job), *_replicas(job), *_experts(job), *_recomputation(job)],
        "TRAINING": [*_training(job), *_precision(job), *_length(job)],
    }
    training = job.workload.training
    if training.optimizer in ("adamw", "adamw-fused"):
        notes.append("training.optimizer = adamw: Megatron calls it adam")
    if job.plan.recompute_every > 1:
        what = "as many layers of each chunk are recomputed as in the plan, its first ones"
        notes.append(f"plan.recompute_every = {job.plan.recompute_every}: {what}")
    return TargetFiles(
        launcher="torchrun",
        command='"${MEGATRON_PATH:?is the folder of Megatron-LM}/pretrain_gpt.py" '
        '"${MODEL[@]}" "${PARALLEL[@]}" "${TRAINING[@]}" "${DATA[@]}"',
        files={"megatron_args.sh": _script(arrays, vocabulary)},
        about={
            "megatron_args.sh": "the arguments of pretrain_gpt.py: the model, how it is spread, how it is "
            "trained, and its data, which is made up unless DATA_PATH and TOKENIZER are set"
        },
        stamps=("megatron",),
        setup=("source ./megatron_args.sh", ""),
        environment=_environment(job),
        notes=(*notes, *left_out),
    )


def _script(arrays: dict[str, list[str]], vocabulary: list[str]) -> str:
    lines = ["# shellcheck shell=bash disable=SC2034", f"# {stamp('megatron')}"]
    for name, words in arrays.items():
        lines += [f"{name}=(", *(f"  {line}" for line in _one_each(words)), ")"]
    mock = ["--mock-data", "--tokenizer-type", "NullTokenizer", *vocabulary]
    lines += [
        "# YOUR DATA: DATA_PATH is what preprocess_data.py made, TOKENIZER a name or folder of transformers.",
        'if [ -n "${DATA_PATH:-}" ]; then',
        '  DATA=(--data-path "$DATA_PATH" --tokenizer-type HuggingFaceTokenizer',
        '    --tokenizer-model "$TOKENIZER")',
        "else",
        f"  DATA=({' '.join(mock)})",
        "fi",
    ]
    return "\n".join(lines) + "\n"


def _one_each(words: list[str]) -> list[str]:
    """An argument with its values on each line."""
    lines: list[str] = []
    for word in words:
        quoted = f'"{word}"' if set(word) & set("()[]|*,") else word
        if word.startswith("--"):
            lines.append(quoted)
        else:
            lines[-1] += f" {quoted}"
    return lines


def _check(job: Job) -> None:
    """Refuse what Megatron asserts against."""
    plan, training = job.plan, job.workload.training
    layers = int(sizes(job.workload.model, ("num_hidden_layers",))["num_hidden_layers"])
    chunks = plan.pipeline * (plan.virtual_stages or 1)
    if plan.schedule == "interleaved" and plan.pipeline > 1:
        if plan.virtual_stages is None and plan.stages is None:
            raise InputError("plan.virtual_stages: missing; Megatron is told how many chunks each rank has")
        if job.accumulation % plan.pipeline:
            what = f"{job.accumulation} micro-batches; interleaved ones are a multiple of plan.pipeline"
            raise cannot("megatron", "plan.pipeline", plan.pipeline, f"a step has {what}")
    if plan.stages is None and layers % chunks and (layers + 2) % chunks:
        raise cannot(
            "megatron", "plan.pipeline", plan.pipeline, f"{layers} layers do not divide; give plan.stages"
        )
    if plan.expert > 1 and plan.tensor > 1 and not plan.sequence_parallel:
        raise cannot("megatron", "plan.sequence_parallel", False, "experts beside tensor parallelism need it")
    if training.sequence and plan.context > 1 and training.sequence % (2 * plan.context):
        raise cannot("megatron", "plan.context", plan.context, "twice it divides training.sequence")
    reduce, held = plan.reduce_precision, training.gradient_precision or "fp32"
    if reduce is not None and reduce != held and training.precision != "fp32":
        raise cannot(
            "megatron", "plan.reduce_precision", reduce, f"gradients travel as they are kept: {held}"
        )
    if training.optimizer_state not in (None, "fp32") and plan.shard == "none":
        raise cannot(
            "megatron", "training.optimizer_state", training.optimizer_state, "it needs plan.shard = zero1"
        )


def _degrees(job: Job) -> list[str]:
    plan = job.plan
    words: list[Any] = ["--tensor-model-parallel-size", plan.tensor]
    words += ["--pipeline-model-parallel-size", plan.pipeline, "--context-parallel-size", plan.context]
    if plan.sequence_parallel:
        words.append("--sequence-parallel")
    if plan.context > 1:
        words += ["--cp-comm-type", _EXCHANGES[plan.exchange_of_context("megatron")]]
    overlap = plan.overlap or {}
    if plan.tensor > 1 and plan.sequence_parallel and overlap.get("tensor", True):
        words.append("--tp-comm-overlap")
    if plan.pipeline > 1:
        words += _stages(job)
    return [str(word) for word in words]


def _stages(job: Job) -> list[Any]:
    plan, overlap = job.plan, job.plan.overlap or {}
    layers = int(sizes(job.workload.model, ("num_hidden_layers",))["num_hidden_layers"])
    chunks = plan.pipeline * (plan.virtual_stages or 1)
    words: list[Any] = []
    if plan.stages is not None:
        further = "m" * job.workload.training.mtp_layers
        parts = ["t" * count for count in plan.stages]
        parts[0], parts[-1] = f"E{parts[0]}", f"{parts[-1]}{further}L"
        words = ["--pipeline-model-parallel-layout", "|".join(parts)]
    else:
        if plan.virtual_stages is not None and plan.virtual_stages > 1:
            words = ["--num-virtual-stages-per-pipeline-rank", plan.virtual_stages]
        if layers % chunks:
            words += ["--account-for-embedding-in-pipeline-split", "--account-for-loss-in-pipeline-split"]
    interleaved = plan.schedule == "interleaved"
    if overlap.get("messages", interleaved) != interleaved:
        if not interleaved or plan.pipeline < 3:
            possible = "messages travel beside computation in interleaved schedules alone"
            raise cannot("megatron", "plan.overlap.messages", overlap["messages"], possible)
        words.append("--no-overlap-p2p-communication")
    return words


def _replicas(job: Job) -> list[str]:
    plan, overlap = job.plan, job.plan.overlap or {}
    sharded = plan.shard != "none"
    words: list[Any] = []
    if plan.shard == "zero1":
        words.append("--use-distributed-optimizer")
    elif sharded:
        words += ["--use-megatron-fsdp", "--data-parallel-sharding-strategy", _FSDP[plan.shard]]
        words += ["--ckpt-format", "fsdp_dtensor"]
    if plan.replicate > 1:
        words += ["--num-distributed-optimizer-instances", plan.replicate]
    reduces = overlap.get("gradients", sharded)
    gathers = overlap.get("parameters", sharded and reduces)
    if gathers and not (sharded and reduces):
        raise cannot(
            "megatron", "plan.overlap.parameters", True, "it needs plan.shard and plan.overlap.gradients"
        )
    words += ["--overlap-grad-reduce"] * reduces + ["--overlap-param-gather"] * gathers
    if plan.offload:
        words += ["--optimizer-cpu-offload", "--use-precision-aware-optimizer"]
        words.append("--overlap-cpu-optimizer-d2h-h2d")
    if plan.registered_buffers:
        words.append("--use-nccl-ub")
    if plan.fp8_gather:
        words.append("--fp8-param-gather")
    return [str(word) for word in words]


def _experts(job: Job) -> list[str]:
    plan = job.plan
    if not has_experts(job.workload.model):
        return []
    words: list[Any] = ["--expert-model-parallel-size", plan.expert]
    words += ["--expert-tensor-parallel-size", job.expert_tensor]
    kind = dispatcher(job)
    if plan.expert > 1 or plan.tensor > 1:
        if kind in ("deepep", "hybridep"):
            words += ["--moe-token-dispatcher-type", "flex", "--moe-flex-dispatcher-backend", kind]
        else:
            words += ["--moe-token-dispatcher-type", kind]
    words.append("--moe-permute-fusion")
    if plan.expert_capacity is not None:
        words += ["--moe-expert-capacity-factor", plan.expert_capacity]
    if (plan.overlap or {}).get("experts"):
        words.append("--overlap-moe-expert-parallel-comm")
    return [str(word) for word in words]


def _recomputation(job: Job) -> list[str]:
    plan = job.plan
    if plan.recompute == "none":
        return []
    if plan.recompute == "selective":
        words = ["--recompute-granularity", "selective"]
        named = [_MODULES[name] for name in plan.recompute_modules]
        return [*words, "--recompute-modules", *named] if named else words
    if plan.recompute_every == 1:
        return [
            "--recompute-granularity",
            "full",
            "--recompute-method",
            "uniform",
            "--recompute-num-layers",
            "1",
        ]
    layers = int(sizes(job.workload.model, ("num_hidden_layers",))["num_hidden_layers"])
    of_chunk = layers // (plan.pipeline * (plan.virtual_stages or 1))
    again = math.ceil(of_chunk / plan.recompute_every)
    if round(of_chunk / again) != plan.recompute_every:
        possible = f"a chunk has {of_chunk} layers"
        raise cannot("megatron", "plan.recompute_every", plan.recompute_every, possible)
    words = ["--recompute-granularity", "full", "--recompute-method", "block"]
    return [*words, "--recompute-num-layers", str(again)]


def _training(job: Job) -> list[str]:
    training = job.workload.training
    words: list[Any] = ["--micro-batch-size", job.micro_batch, "--global-batch-size", training.global_batch]
    words += ["--optimizer", _OPTIMIZERS[training.optimizer], "--lr", "1e-4", "--clip-grad", "1.0"]
    if training.optimizer_state not in (None, "fp32"):
        state = training.optimizer_state
        words += ["--use-precision-aware-optimizer", "--exp-avg-dtype", state, "--exp-avg-sq-dtype", state]
    if training.fused_accumulation is False:
        words.append("--no-gradient-accumulation-fusion")
    if training.attention is not None:
        names = {"flash": "flash", "cudnn": "fused", "eager": "unfused"}
        words += ["--attention-backend", names[training.attention]]
    if training.loss == "fused":
        words.append("--cross-entropy-loss-fusion")
    graphs = {"layers": "local", "step": "full_iteration"}
    if training.graphs in graphs:
        words += ["--cuda-graph-impl", graphs[training.graphs]]
    return [*(str(word) for word in words), "--transformer-impl", "transformer_engine"]


def _precision(job: Job) -> list[str]:
    training = job.workload.training
    words: list[str] = []
    if training.precision in ("bf16", "fp8"):
        words.append("--bf16")
    elif training.precision == "fp16":
        words.append("--fp16")
    if training.precision == "fp8":
        recipe = training.fp8_recipe
        if recipe == "nvfp4":
            words += ["--fp4-format", "e2m1", "--fp4-recipe", "nvfp4"]
        else:
            words += ["--fp8-format", "hybrid", "--fp8-recipe", _RECIPES[recipe]]
    if training.gradient_precision == "bf16":
        words.append("--grad-reduce-in-bf16")
    return words


def _length(job: Job) -> list[str]:
    training = job.workload.training
    words: list[Any] = ["--train-iters", steps_of(job), "--log-interval", 10, "--log-throughput"]
    if training.evaluate_every is not None and training.evaluate_samples is not None:
        words += ["--eval-interval", training.evaluate_every]
        words += ["--eval-iters", max(1, math.ceil(training.evaluate_samples / training.global_batch))]
    else:
        words += ["--eval-iters", 0]
    if training.checkpoint_every is not None:
        words += ["--save", "checkpoints", "--save-interval", training.checkpoint_every]
    return [str(word) for word in words]


def _environment(job: Job) -> dict[str, str]:
    """Set how many queues feed the device: one keeps collectives of tensor and context parallelism in their
    order before Blackwell; FSDP and exchanges of experts beside computation need several."""
    plan, capability = job.plan, float(job.cluster.device.capability or 0)
    if (plan.overlap or {}).get("experts"):
        return {"CUDA_DEVICE_MAX_CONNECTIONS": "32"}
    if plan.shard in _FSDP:
        return {"CUDA_DEVICE_MAX_CONNECTIONS": "8"}
    if max(plan.tensor, plan.context) > 1 and capability < 10:
        return {"CUDA_DEVICE_MAX_CONNECTIONS": "1"}
    return {}
