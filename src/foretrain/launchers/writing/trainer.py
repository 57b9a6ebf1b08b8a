"""Writes the arguments of transformers' Trainer, and the program that trains with them."""

from __future__ import annotations

import json
from typing import Any

from foretrain.job import Job
from foretrain.launchers.writing.expected import steps_of
from foretrain.launchers.writing.fsdp2 import check_model, job_file
from foretrain.launchers.writing.limits import cannot
from foretrain.launchers.writing.target_files import program_text
from foretrain.launchers.writing.versions import VERSIONS, stamp

LEARNING_RATE = 1e-4
OPTIMIZERS: dict[str, dict[str, str]] = {
    "adamw": {"optim": "adamw_torch"},
    "adamw-fused": {"optim": "adamw_torch_fused"},
    "adamw-8bit": {"optim": "adamw_bnb_8bit"},
    "adafactor": {"optim": "adafactor"},
    "adagrad": {"optim": "adagrad"},
    "rmsprop": {"optim": "rmsprop"},
    "sgd": {"optim": "sgd", "optim_args": "momentum=0.9"},
    "sgd-plain": {"optim": "sgd"},
}
"""What the Trainer calls optimizers."""
ABOUT = {
    "train.py": "trains with transformers' Trainer; your data goes into your_dataset, your weights come with "
    "--checkpoint FOLDER (without them both are random)",
    "training_arguments.json": f"what TrainingArguments of {VERSIONS['transformers']} is made of; gradients "
    "are clipped where the forecast has it so (max_grad_norm)",
    "models.py": "builds the model and its inputs from the job",
    "step_times.py": "times steps and prints them",
}


def trainer_command(job: Job) -> str:
    return f"train.py training_arguments.json --model {job_file(job)}"


def check_trainer(job: Job, target: str) -> list[str]:
    """Refuse models that the Trainer's program does not build; what the user should know."""
    check_model(job, target, ("transformers",))
    training, notes = job.workload.training, []
    adapter = training.adapter
    if adapter is not None:
        if adapter.precision not in (None, "fp32"):
            raise cannot(target, "training.adapter.precision", adapter.precision, "peft keeps fp32")
        if adapter.kind == "qlora":
            notes.append("training.adapter.kind = qlora: weights are quantised as they are loaded; give "
                         "launch.sh --checkpoint FOLDER")  # fmt: skip
    framework = training.framework
    if job.plan.tensor > 1 and framework != "deepspeed":
        notes.append("plan.tensor: transformers cuts layers as it loads weights; give launch.sh "
                     "--checkpoint FOLDER")  # fmt: skip
    return notes


def trainer_files(job: Job) -> dict[str, str]:
    """The program that trains with the Trainer, and what it reads."""
    stamped = stamp("transformers", "torch")
    return {
        "train.py": program_text("trainer", stamped),
        "models.py": program_text("models", stamped),
        "step_times.py": program_text("step_times", stamped),
        "training_arguments.json": json.dumps(training_arguments(job), indent=2) + "\n",
    }


def training_arguments(job: Job) -> dict[str, Any]:
    """Arguments of TrainingArguments, for this job."""
    plan, training = job.plan, job.workload.training
    by_deepspeed = training.framework == "deepspeed"
    arguments: dict[str, Any] = {
        "output_dir": "output",
        "per_device_train_batch_size": job.micro_batch,
        "gradient_accumulation_steps": job.accumulation,
        "max_steps": steps_of(job),
        "learning_rate": LEARNING_RATE,
        "max_grad_norm": 1.0 if by_deepspeed else 0.0,
        "logging_steps": 10,
        "report_to": "none",
        "remove_unused_columns": False,
        **_formats(job, by_deepspeed=by_deepspeed),
        **_saving(job),
    }
    if by_deepspeed:
        arguments["deepspeed"] = "ds_config.json"
    else:
        arguments |= OPTIMIZERS[training.optimizer]
        if training.compile:
            arguments["torch_compile"] = True
            if isinstance(training.compile, str):
                arguments["torch_compile_mode"] = training.compile
    fsdp = plan.shard == "zero3" and not by_deepspeed
    if fsdp:
        arguments["fsdp"] = True
        arguments["fsdp_config"] = {
            "version": 2,
            "reshard_after_forward": plan.reshard is not False,
            "cpu_offload": plan.offload,
            "activation_checkpointing": plan.recompute == "full",
            "auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
        }
    elif plan.recompute == "full":
        arguments["gradient_checkpointing"] = True
        arguments["gradient_checkpointing_kwargs"] = {"use_reentrant": False}
    if plan.shard == "none" and not by_deepspeed:
        arguments["ddp_find_unused_parameters"] = False
    if training.loss == "fused":
        arguments["use_liger_kernel"] = True
    if job.cluster.device.is_cpu:
        arguments["use_cpu"] = True
    return arguments


def _formats(job: Job, *, by_deepspeed: bool) -> dict[str, Any]:
    precision = job.workload.training.precision
    half = precision if by_deepspeed else precision.removeprefix("amp-")
    mixed = precision.startswith("amp-") or by_deepspeed
    if precision == "tf32":
        return {"tf32": True}
    return {"bf16": mixed and half == "bf16", "fp16": mixed and half == "fp16"}


def _saving(job: Job) -> dict[str, Any]:
    every = job.workload.training.checkpoint_every
    if every is None:
        return {"save_strategy": "no"}
    return {"save_strategy": "steps", "save_steps": every}
