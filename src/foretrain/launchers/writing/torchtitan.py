"""Writes the configuration of torchtitan: Python for 0.3.0 and main, TOML for v0.2.2."""

from __future__ import annotations

from foretrain.errors import InputError
from foretrain.job import Job
from foretrain.launchers.writing.limits import TargetLimits, cannot
from foretrain.launchers.writing.target_files import TargetFiles
from foretrain.launchers.writing.torchtitan_models import Flavor, flavor_of
from foretrain.launchers.writing.torchtitan_python import CONVERTERS, python_text
from foretrain.launchers.writing.torchtitan_settings import SCHEDULES
from foretrain.launchers.writing.torchtitan_toml import TOML_RECIPES, toml_text

LIMITS = TargetLimits(
    target="torchtitan",
    says={
        "training.sequence": None,
        "training.precision": ("amp-bf16", "bf16", "fp32", "fp8"),
        "training.fp8": (*CONVERTERS, "tensorwise"),
        "training.master_weights": lambda kept: not kept,
        "training.optimizer": ("adamw", "adamw-fused"),
        "training.compile": (True, False),
        "training.checkpoint_every": lambda every: isinstance(every, int),
        **{
            f"plan.{name}": None
            for name in (
                "tensor", "pipeline", "context", "expert", "expert_tensor", "sequence_parallel",
                "virtual_stages", "offload", "replicate", "recompute_every", "context_exchange",
                "dispatcher", "registered_buffers", "fp8_gather",
            )
        },
        "plan.shard": ("none", "zero3"),
        "plan.reshard": (True, False),
        "plan.schedule": tuple(SCHEDULES),
        "plan.recompute": ("none", "selective", "operators", "full"),
        "plan.reduce_precision": ("fp32",),
        "plan.overlap": lambda overlap: set(overlap) <= {"tensor"},
    },
    notes={
        "training.evaluate_every": "torchtitan's validator is configured in its own words",
        "training.evaluate_samples": "torchtitan's validator is configured in its own words",
    },
    otherwise={
        "training.checkpoint_every": "it counts steps",
        "plan.overlap": "it has a switch for tensor alone",
        "plan.stages": "it deals out layers itself; plan.virtual_stages says in how many chunks",
        "training.adapter": "target accelerate trains adapters",
        "training.master_weights": "amp-bf16 keeps fp32 weights",
    },
)  # fmt: skip


def write(job: Job) -> TargetFiles:
    """The configurations for both ways in which versions are configured, and the command for either."""
    notes = LIMITS.check(job)
    if job.workload.training.sequence is None:
        raise InputError("training.sequence: missing; torchtitan needs a length")
    flavor = flavor_of(job.workload.model)
    in_python, in_toml = _no_python(job, flavor), _no_toml(job, flavor)
    if in_python is not None and in_toml is not None:
        raise in_python
    files, about = {}, {}
    if in_python is None:
        files["torchtitan_plan.py"] = python_text(job, flavor)
        about["torchtitan_plan.py"] = (
            "configures torchtitan 0.3.0, whose batches are in samples, and main since 2026-08-20, which has "
            "them in tokens"
        )
    else:
        notes.append(f"no torchtitan_plan.py: {in_python}")
    if in_toml is None:
        files["torchtitan.toml"] = toml_text(job, flavor)
        about["torchtitan.toml"] = "the same for torchtitan v0.2.2: TORCHTITAN=v0.2.2 bash launch.sh"
    else:
        notes.append(f"no torchtitan.toml: {in_toml}")
    usual = "main" if in_python is None else "v0.2.2"
    setup = [
        "# YOUR DATA: c4 unless the configuration names another; HF_ASSETS_PATH has the tokenizer.",
        'export PYTHONPATH="$PWD:${PYTHONPATH:-}"',
        "CONFIG=(--module torchtitan_plan --config plan)",
        f'if [ "${{TORCHTITAN:-{usual}}}" = v0.2.2 ]; then',
        "  CONFIG=(--job.config_file torchtitan.toml)",
        '  if [ -n "${HF_ASSETS_PATH:-}" ]; then',
        '    CONFIG+=(--model.hf_assets_path "$HF_ASSETS_PATH")',
        "  fi",
        "fi",
        "",
    ]
    return TargetFiles(
        launcher="torchrun",
        command='-m torchtitan.train "${CONFIG[@]}"',
        files=files,
        about=about,
        stamps=("torchtitan", "torchtitan-toml"),
        setup=tuple(setup),
        notes=tuple(notes),
    )


# What either version lacks


def _no_python(job: Job, flavor: Flavor) -> InputError | None:
    plan, training = job.plan, job.workload.training
    if flavor.config_function is None:
        return InputError(f"model: {flavor.family} is in torchtitan v0.2.2 alone")
    if plan.expert > 1 and job.expert_tensor > 1:
        return cannot("torchtitan", "plan.expert_tensor", job.expert_tensor, "main has experts whole")
    if plan.recompute_every > 1:
        return cannot(
            "torchtitan", "plan.recompute_every", plan.recompute_every, "main recomputes all layers"
        )
    if plan.context > 1 and plan.exchange_of_context("torchtitan") != "allgather":
        return cannot("torchtitan", "plan.context_exchange", plan.context_exchange, "main gathers keys")
    if training.precision == "fp8" and (training.fp8_recipe not in CONVERTERS or plan.fp8_gather):
        return cannot("torchtitan", "training.fp8", training.fp8_recipe, f"main has {', '.join(CONVERTERS)}")
    return None


def _no_toml(job: Job, flavor: Flavor) -> InputError | None:
    plan, training = job.plan, job.workload.training
    if not flavor.in_toml:
        return InputError(f"model: {flavor.family} {flavor.name} came after torchtitan v0.2.2")
    if plan.tensor > 1 and not plan.sequence_parallel:
        return cannot("torchtitan", "plan.sequence_parallel", False, "v0.2.2 has it with plan.tensor")
    if plan.dispatcher == "hybridep":
        return cannot("torchtitan", "plan.dispatcher", "hybridep", "v0.2.2 has alltoall and deepep")
    if training.precision == "fp8" and training.fp8_recipe not in (*TOML_RECIPES, "mxfp8"):
        return cannot("torchtitan", "training.fp8", training.fp8_recipe, "v0.2.2 has torchao's and mxfp8")
    if plan.registered_buffers:
        return cannot("torchtitan", "plan.registered_buffers", True, "v0.2.2 has no symmetric memory")
    return None
