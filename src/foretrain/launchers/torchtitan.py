"""Reads the configuration of torchtitan: TOML of v0.2.2 and earlier, functions in Python since 2026-02-23.

Sizes of batches are in samples up to 2026-08-20 and in tokens since.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from foretrain.errors import InputError
from foretrain.launchers.settings import (
    Key,
    Keys,
    Reading,
    Setting,
    When,
    count,
    dtype,
    one_of,
    spelled,
    take,
    text,
    whole,
    yes,
)

READER = "torchtitan"

PRESETS = {
    "llama3": {
        "8b": "Meta-Llama-3-8B", "70b": "Meta-Llama-3-70B", "405b": "llama-3-405b", "1b": "Llama-3.2-1B",
        "3b": "Llama-3.2-3B",
    },
    "llama4": {"17bx16e": "Llama-4-Scout-17B-16E", "17bx128e": "Llama-4-Maverick-17B-128E"},
    "deepseek_v3": {"16b": "DeepSeek-V2-Lite", "236b": "DeepSeek-V2", "671b": "DeepSeek-V3"},
    "qwen3": {
        "0.6b": "Qwen3-0.6B", "1.7b": "Qwen3-1.7B", "4b": "Qwen3-4B", "8b": "Qwen3-8B", "14b": "Qwen3-14B",
        "32b": "Qwen3-32B", "30b-a3b": "Qwen3-30B-A3B", "235b-a22b": "Qwen3-235B-A22B",
    },
    "gpt_oss": {"20b": "gpt-oss-20b", "120b": "gpt-oss-120b"},
}  # fmt: skip
"""The models of ``torchtitan/models`` by name and flavor, as presets are called."""
DEBUG_CONFIG = {"model_type": "llama", "hidden_size": 256, "num_hidden_layers": 6, "num_attention_heads": 16,
          "intermediate_size": 768, "vocab_size": 2048}  # fmt: skip
"""``llama3 debugmodel`` (v0.2.2)."""


def _mode(value: Any) -> str | None:
    """Read the mode of activation checkpoints, as TOML and as Python name them."""
    plain = str(value).lower().removesuffix(".config").removesuffix("ac").removesuffix("()")
    names = {"none": "none", "selective": "selective", "full": "full", "memory_budget": "budget",
             "memorybudget": "budget"}  # fmt: skip
    if plain not in names:
        raise ValueError(f"one of {', '.join(names)}")
    return names[plain]


_BACKENDS = {"standard": "alltoall", "deepep": "deepep", "hybridep": "hybridep"}

KEYS: Keys = {
    "model.name": Key("own.name", text, "model"),
    "model.flavor": Key("own.flavor", text, "model"),
    "model.hf_assets_path": Key("own.assets", text, "model"),
    "model.converters": Key("own.converters", shown="training.precision"),
    "training.local_batch_size": Key("own.local", whole, "plan.micro_batch"),
    "training.batch_size": Key("own.local", whole, "plan.micro_batch"),
    "training.global_batch_size": Key("run.batch", whole),
    "training.num_tokens_per_microbatch_per_dp_rank": Key("run.micro_tokens", whole),
    "training.num_tokens_per_train_step": Key("run.batch_tokens", whole),
    "training.seq_len": Key("training.sequence", whole),
    "training.max_context_length": Key("training.sequence", whole),
    "training.steps": Key("training.steps", whole),
    "training.dtype": Key("own.dtype", dtype, "training.precision"),
    "training.mixed_precision_param": Key("own.param", dtype, "training.precision"),
    "training.mixed_precision_reduce": Key("plan.reduce_precision", dtype),
    "training.enable_cpu_offload": Key("plan.offload", yes),
    "training.compile": Key("training.compile", yes),
    "parallelism.data_parallel_replicate_degree": Key("plan.replicate", whole),
    "parallelism.data_parallel_shard_degree": Key("run.shard_degree", whole),
    "parallelism.fsdp_reshard_after_forward": Key(
        "plan.reshard", one_of({"default": None, "always": True, "never": False})
    ),
    "parallelism.tensor_parallel_degree": Key("plan.tensor", whole),
    "parallelism.enable_sequence_parallel": Key("plan.sequence_parallel", yes),
    "parallelism.enable_async_tensor_parallel": Key("plan.overlap.tensor", yes),
    "compile.enable_async_tensor_parallel": Key("plan.overlap.tensor", yes),
    "parallelism.pipeline_parallel_degree": Key("plan.pipeline", whole),
    "parallelism.pipeline_parallel_schedule": Key("own.schedule", spelled("schedule"), "plan.schedule"),
    "parallelism.pipeline_parallel_layers_per_stage": Key("own.layers", whole, "plan.virtual_stages"),
    "parallelism.pipeline_parallel_microbatch_size": Key("own.pipeline_micro", whole, "plan.micro_batch"),
    "parallelism.num_pp_microbatches": Key("own.pipeline_count", whole, "plan.micro_batch"),
    "parallelism.context_parallel_degree": Key("plan.context", whole),
    "parallelism.context_parallel_rotate_method": Key(
        "plan.context_exchange", one_of({"allgather": "allgather", "alltoall": "ring"})
    ),
    "parallelism.expert_parallel_degree": Key("plan.expert", whole),
    "parallelism.expert_tensor_parallel_degree": Key("plan.expert_tensor", whole),
    "parallelism.expert_parallel_comm_backend": Key("plan.dispatcher", one_of(_BACKENDS)),
    "activation_checkpoint.mode": Key("own.checkpoints", _mode, "plan.recompute"),
    "activation_checkpoint": Key("own.checkpoints", _mode, "plan.recompute"),
    "activation_checkpoint.selective_ac_option": Key("own.option", text, "plan.recompute_every"),
    "debug.moe_force_load_balance": Key("plan.routing", When("round-robin")),
    "parallelism.enable_fsdp_symm_mem": Key("plan.registered_buffers", yes),
    "compile.enable": Key("training.compile", yes),
    "optimizer.name": Key("training.optimizer", spelled("optimizer")),
    "optimizer.implementation": Key("own.implementation", text, "training.optimizer"),
    "quantize.linear.float8.recipe_name": Key("own.recipe", spelled("fp8"), "training.fp8"),
    "float8.recipe_name": Key("own.recipe", spelled("fp8"), "training.fp8"),
    "quantize.linear.float8.enable_fsdp_float8_all_gather": Key("plan.fp8_gather", yes),
    "float8.enable_fsdp_float8_all_gather": Key("plan.fp8_gather", yes),
    "checkpoint.enable": Key("own.saves", yes, "training.checkpoint_every"),
    "checkpoint.enable_checkpoint": Key("own.saves", yes, "training.checkpoint_every"),
    "checkpoint.interval": Key("own.save_interval", count, "training.checkpoint_every"),
}

IGNORED = (
    "job.* profiling.* metrics.* comm.* fault_tolerance.* lr_scheduler.* optimizer.* validation.* debug.* "
    "checkpoint.* training.dataset* training.max_norm training.seed training.deterministic training.gc_* "
    "training.debug* model.print_after_conversion model.tokenizer_path model.norm_type compile.components "
    "compile.backend activation_checkpoint.* experimental.* dataloader.* tokenizer.* "
    "quantize.linear.float8.model_compile_enabled quantize.linear.float8.fqns "
    "quantize.linear.float8.filter_fqns quantize.linear.float8.precompute* quantize.linear.float8.emulate "
    "quantize.grouped_mm.* quantize.linear.mx.* float8.* mx.* parallelism.context_parallel_load_balancer "
    "parallelism.spmd_backend hf_assets_path dump_folder module config loss* job"
)
UNMODELLED = (
    "parallelism.disable_loss_parallel "
    "parallelism.pipeline_parallel_split_points parallelism.module_fqns_per_model_part "
    "parallelism.pipeline_parallel_first_stage_less_layers "
    "parallelism.pipeline_parallel_last_stage_less_layers parallelism.enable_compiled_autograd "
    "parallelism.pipeline_parallel_expert_parallel_overlap activation_checkpoint.memory_budget "
    "model_converters* model_spec* parallelism.pipeline_parallel_schedule_csv"
)


def read(reading: Reading, settings: Iterable[Setting]) -> None:
    take(reading, settings, KEYS, READER, ignored=IGNORED, unmodelled=UNMODELLED)
    finish(reading)


def finish(reading: Reading) -> None:
    """Put together what takes several keys, with the defaults of torchtitan."""
    own = reading.tables.setdefault("own", {})
    reading.set("training.framework", "torchtitan")
    reading.default("training.optimizer", "adamw", "torchtitan's own")
    reading.default("training.sequence", 2048, "torchtitan's own")
    _model(reading, own)
    _precision(reading, own)
    _checkpoints(reading, own)
    replicate, shard = reading.get("plan.replicate", 1), reading.get("run.shard_degree")
    reading.set("plan.shard", "none" if shard == 1 else "zero3")
    if shard == 1 and replicate > 1:
        reading.tables["plan"].pop("replicate")
        reading.set("run.shard_degree", replicate)
    if reading.get("plan.tensor", 1) > 1:
        reading.default("plan.sequence_parallel", True)
    _pipeline(reading, own)
    if own.get("saves") and own.get("save_interval"):
        reading.set("training.checkpoint_every", own["save_interval"])


def _model(reading: Reading, own: dict[str, Any]) -> None:
    name, flavor = own.get("name"), str(own.get("flavor", "")).lower()
    if name is None:
        return
    name = str(name).lower()
    if (name, flavor) == ("llama3", "debugmodel"):
        reading.set("model", {"source": "transformers", "task": "causal-lm", "config": dict(DEBUG_CONFIG)})
        return
    flavors = PRESETS.get(name, {})
    if flavor in flavors:
        reading.set("run.model", flavors[flavor])
        return
    where = reading.where("own.flavor", "own.name")
    known = ", ".join(f"{one} {size}" for one, sizes in PRESETS.items() for size in sizes)
    raise InputError(f"{where}model.flavor: {name} {flavor or '(none)'} is not one of {known}")


def _precision(reading: Reading, own: dict[str, Any]) -> None:
    """Parameters are cast as they are fetched, or under autocast where nothing is sharded."""
    param, kept = own.get("param", "bf16"), own.get("dtype", "fp32")
    precision = "fp32" if param == "fp32" else f"amp-{param}" if kept == "fp32" else kept
    converters = str(own.get("converters", "")).lower()
    if "float8" in converters or "mx" in converters or "nvfp4" in converters:
        precision = "fp8"
        recipe = next((one for one in ("nvfp4", "mx") if one in converters), own.get("recipe", "tensorwise"))
        reading.set("training.fp8", {"mx": "mxfp8"}.get(recipe, recipe))
    reading.default("training.precision", precision)
    if own.get("implementation") in ("foreach", "for-loop"):
        reading.assumed.append("training.optimizer: the fused kernel, whatever optimizer.implementation says")


def _checkpoints(reading: Reading, own: dict[str, Any]) -> None:
    mode, option = own.get("checkpoints", "selective"), own.get("option", "op")
    if reading.whose("own.checkpoints") is None:
        reading.assumed.append("plan.recompute = operators: torchtitan's own")
    if mode == "selective" and str(option).isdigit():
        reading.set("plan.recompute", "full")
        reading.set("plan.recompute_every", int(option))
    elif mode == "budget":
        reading.set("plan.recompute", "operators")
        reading.assumed.append("plan.recompute = operators: a memory budget is not modelled")
    else:
        reading.set("plan.recompute", {"selective": "operators"}.get(mode, mode))


def _pipeline(reading: Reading, own: dict[str, Any]) -> None:
    """Micro-batches of a pipeline are parts of the local batch."""
    local, pipeline = own.get("local"), reading.get("plan.pipeline", 1)
    tokens, sequence = reading.get("run.micro_tokens"), reading.get("training.sequence")
    if local is None and tokens is None:
        reading.assumed.append("training.local_batch_size = 8: torchtitan's own")
        local = 8
    if local is None and own.get("pipeline_count"):
        local = max(1, tokens // sequence)
    if pipeline > 1:
        reading.set("plan.schedule", own.get("schedule", "1f1b"))
        if local is not None:
            parts = own.get("pipeline_count", 1 if tokens else local)
            reading.set("run.micro", own.get("pipeline_micro") or max(1, local // parts))
            reading.set("run.local", local)
            reading.tables["run"].pop("micro_tokens", None)
        if own.get("layers"):
            reading.set("run.layers_per_stage", own["layers"])
            reading.set("run.layers_of_ends", 2)  # first_ and last_stage_less_layers are 1 each
    elif local is not None:
        setting = reading.whose("own.local")
        if setting is not None:
            reading.put("run.micro", local, setting, READER)
        else:
            reading.set("run.micro", local)
