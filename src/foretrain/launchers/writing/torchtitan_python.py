"""Writes a function in Python that configures torchtitan 0.3.0 and main."""

from __future__ import annotations

from typing import Any

from foretrain.job import Job
from foretrain.launchers.writing.expected import steps_of
from foretrain.launchers.writing.limits import cannot
from foretrain.launchers.writing.torchtitan_models import Flavor
from foretrain.launchers.writing.torchtitan_settings import degrees, formats, local_batch
from foretrain.launchers.writing.versions import stamp

CONVERTERS = {
    "rowwise": ("Float8LinearConverter", ', recipe_name="rowwise"'),
    "rowwise-gw-hp": ("Float8LinearConverter", ', recipe_name="rowwise_with_gw_hp"'),
    "mxfp8": ("MXFP8LinearConverter", ""),
    "nvfp4": ("NVFP4LinearConverter", ', fqns=["layers"]'),
}
"""Ways of fp8 and fp4 that it has, and what makes linear layers multiply so."""


def python_text(job: Job, flavor: Flavor) -> str:
    """A module with a function for each of the two ways in which versions count batches."""
    piped = job.plan.pipeline > 1
    spread = {**degrees(job), **_python_degrees(job)}
    common = _common_lines(job, flavor)
    lines = [
        f"# {stamp('torchtitan')}",
        '"""The plan as a configuration of torchtitan."""',
        "",
        "import os",
        "",
        *_imports(job, flavor),
        "",
        "",
        "def plan_in_tokens():",
        '    """For main since 2026-08-20."""',
        *common,
        *_call("training", "TrainingConfig", _batches_in_tokens(job)),
        *_call(
            "parallelism",
            "ParallelismConfig",
            {**spread, **({"num_pp_microbatches": job.accumulation} if piped else {})},
        ),
        "    return c",
        "",
        "",
        "def plan_in_samples():",
        '    """For 0.3.0."""',
        *common,
        *_call("training", "TrainingConfig", _batches_in_samples(job)),
        *_call(
            "parallelism",
            "ParallelismConfig",
            {**spread, **({"pipeline_parallel_microbatch_size": job.micro_batch} if piped else {})},
        ),
        "    return c",
        "",
        "",
        "def plan():",
        '    in_tokens = "num_tokens_per_train_step" in TrainingConfig.__dataclass_fields__',
        "    return plan_in_tokens() if in_tokens else plan_in_samples()",
    ]
    return "\n".join(lines) + "\n"


def _imports(job: Job, flavor: Flavor) -> list[str]:
    training, module = job.workload.training, f"torchtitan.models.{flavor.family}"
    checkpointing = _checkpointing(job)
    lines = ["from torchtitan.config import CompileConfig, ParallelismConfig, TrainingConfig"]
    if training.precision == "fp8":
        converter, _ = CONVERTERS[training.fp8_recipe]
        lines.insert(0, f"from torchtitan.components.quantization import {converter}")
    if checkpointing:
        lines.append(f"from torchtitan.distributed.activation_checkpoint import {checkpointing}")
    if _model_spec(job, flavor):
        lines.append(f"from {module} import model_registry")
    return [*lines, f"from {module}.config_registry import {flavor.config_function}"]


def _common_lines(job: Job, flavor: Flavor) -> list[str]:
    """Write the lines that both functions begin with."""
    own_spec, checkpointing, every = (
        _model_spec(job, flavor),
        _checkpointing(job),
        job.workload.training.checkpoint_every,
    )
    lines = [
        f"    c = {flavor.config_function}()",
        '    c.hf_assets_path = os.environ.get("HF_ASSETS_PATH", c.hf_assets_path)',
        *([f"    c.model_spec = {own_spec}"] if own_spec else []),
        f"    c.activation_checkpoint = {f'{checkpointing}.Config()' if checkpointing else None}",
        f"    c.compile = CompileConfig({_arguments(_compilation(job))})",
    ]
    if every is not None:
        lines += ["    c.checkpoint.enable = True", f"    c.checkpoint.interval = {every}"]
    return lines


def _checkpointing(job: Job) -> str | None:
    return {"none": None, "full": "FullAC"}.get(job.plan.recompute, "SelectiveAC")


def _batches_in_samples(job: Job) -> dict[str, Any]:
    training = job.workload.training
    return {
        "local_batch_size": local_batch(job),
        "global_batch_size": training.global_batch,
        "seq_len": training.sequence,
        **_run(job),
    }


def _batches_in_tokens(job: Job) -> dict[str, Any]:
    training = job.workload.training
    assert training.sequence is not None
    return {
        "num_tokens_per_microbatch_per_dp_rank": local_batch(job) * training.sequence,
        "num_tokens_per_train_step": training.global_batch * training.sequence,
        "max_context_length": training.sequence,
        **_run(job),
    }


def _run(job: Job) -> dict[str, Any]:
    """Set what a training is beside its batches."""
    return {"steps": steps_of(job), **formats(job), "enable_cpu_offload": job.plan.offload}


def _model_spec(job: Job, flavor: Flavor) -> str | None:
    """Write what replaces the model of the configuration: another flavor, other products or another
    dispatcher."""
    training, plan = job.workload.training, job.plan
    arguments = [f'"{flavor.name}"']
    if training.precision == "fp8":
        name, more = CONVERTERS[training.fp8_recipe]
        compiled = bool(training.compile)
        arguments.append(f"converters=[{name}.Config(model_compile_enabled={compiled}{more})]")
    if plan.dispatcher in ("deepep", "hybridep"):
        arguments.append(f'moe_comm_backend="{plan.dispatcher}"')
    if flavor.registered and len(arguments) == 1:
        return None
    return f"model_registry({', '.join(arguments)})"


def _python_degrees(job: Job) -> dict[str, Any]:
    plan = job.plan
    keys: dict[str, Any] = {}
    if plan.tensor > 1 and not plan.sequence_parallel:
        keys["enable_sequence_parallel"] = False
    if plan.registered_buffers:
        keys["enable_fsdp_symm_mem"] = True
    return keys


def _compilation(job: Job) -> dict[str, Any]:
    compiled = bool(job.workload.training.compile)
    keys: dict[str, Any] = {"enable": compiled, "components": ["model", "loss"]}
    if (job.plan.overlap or {}).get("tensor"):
        if not compiled:
            raise cannot("torchtitan", "plan.overlap.tensor", True, "it needs training.compile = true")
        keys["enable_async_tensor_parallel"] = True
    return keys


def _arguments(table: dict[str, Any]) -> str:
    return ", ".join(f"{name}={_literal(value)}" for name, value in table.items())


def _literal(value: Any) -> str:
    if isinstance(value, str):
        return f'"{value}"'
    return f"[{', '.join(map(_literal, value))}]" if isinstance(value, list) else repr(value)


def _call(attribute: str, kind: str, table: dict[str, Any]) -> list[str]:
    inner = [f"        {name}={_literal(value)}," for name, value in table.items()]
    return [f"    c.{attribute} = {kind}(", *inner, "    )"]
