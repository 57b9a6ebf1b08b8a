"""Reads the arguments of transformers' Trainer (5.x), of TRL's scripts and of LLaMA-Factory, on a command
line, in JSON or in YAML."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from foretrain.launchers import accelerate, deepspeed
from foretrain.launchers.settings import (
    DTYPES,
    Key,
    Keys,
    Reading,
    Setting,
    When,
    count,
    dashed,
    one_of,
    share,
    spelled,
    take,
    text,
    whole,
    yes,
)

READER = "transformers"

ATTENTION = {
    "eager": "eager", "sdpa": "sdpa", "flash_attention_2": "flash", "flash_attention_3": "flash",
    "fa2": "flash", "fa3": "flash",
    "disabled": "eager", "auto": None, "flex_attention": "flash", "flash": "flash",
    "kernels-community/flash-attn": "flash", "xformers": "flash",
}  # fmt: skip
"""What computes attention, as transformers, LLaMA-Factory and axolotl call it."""


def targets(value: Any) -> Any:
    """The layers that have adapters: names in a list or with commas between them, or all of them."""
    if value in (None, "all", "all-linear", "*_proj", ["all"], ["all-linear"]):
        return "all-linear"
    names = value if isinstance(value, list) else str(value).split(",")
    return [str(name).strip() for name in names]


def _fsdp(value: Any) -> Any:
    """``fsdp``: true, or in earlier versions words such as ``full_shard auto_wrap``."""
    words = str(value[0] if isinstance(value, list) and value else value).lower().split()
    if not words or words[0] in ("false", "none", "[]", ""):
        return None
    return " ".join(words)


def _optimizer(value: Any) -> Any:
    """Name the optimizer as jobs do; the Trainer's SGD has no momentum unless ``optim_args`` give it one."""
    name = spelled("optimizer")(value)
    return "sgd-plain" if name == "sgd" else name


KEYS: Keys = {
    "model_name_or_path": Key("run.model", text),
    "model_name": Key("run.model", text),
    "per_device_train_batch_size": Key("run.micro", whole),
    "gradient_accumulation_steps": Key("run.accumulation", whole),
    "max_steps": Key("training.steps", whole),
    "num_train_epochs": Key("own.epochs", share, "training.epochs"),
    "max_samples": Key("own.samples", count, "training.samples"),
    "max_train_samples": Key("own.samples", count, "training.samples"),
    "bf16": Key("own.bf16", yes, "training.precision"),
    "fp16": Key("own.fp16", yes, "training.precision"),
    "tf32": Key("own.tf32", yes, "training.precision"),
    "pure_bf16": Key("own.pure", yes, "training.precision"),
    "torch_dtype": Key("own.loaded", one_of({"auto": None, **DTYPES}), "training.precision"),
    "dtype": Key("own.loaded", one_of({"auto": None, **DTYPES}), "training.precision"),
    "optim": Key("training.optimizer", _optimizer),
    "optim_args": Key("own.optimizer_arguments", text, "training.optimizer"),
    "gradient_checkpointing": Key("own.checkpointing", yes, "plan.recompute"),
    "disable_gradient_checkpointing": Key("own.no_checkpointing", yes, "plan.recompute"),
    "torch_compile": Key("own.compile", yes, "training.compile"),
    "torch_compile_mode": Key("own.compile_mode", text, "training.compile"),
    "use_liger_kernel": Key("training.loss", When("fused")),
    "enable_liger_kernel": Key("training.loss", When("fused")),
    "attn_implementation": Key("training.attention", one_of(ATTENTION)),
    "flash_attn": Key("training.attention", one_of(ATTENTION)),
    "max_seq_length": Key("training.sequence", whole),
    "max_length": Key("training.sequence", whole),
    "model_max_length": Key("training.sequence", whole),
    "block_size": Key("training.sequence", whole),
    "max_seq_len": Key("training.sequence", whole),
    "zero_stage": Key("plan.shard", one_of(deepspeed.STAGES)),
    "offload": Key("plan.offload", yes),
    "cutoff_len": Key("training.sequence", whole),
    "max_source_length": Key("training.sequence", whole),
    "save_strategy": Key("own.save_strategy", text, "training.checkpoint_every"),
    "save_steps": Key("own.save_steps", share, "training.checkpoint_every"),
    "use_peft": Key("own.peft", yes, "training.adapter"),
    "finetuning_type": Key("own.finetuning", text, "training.adapter"),
    "lora_r": Key("own.rank", whole, "training.adapter.rank"),
    "lora_rank": Key("own.rank", whole, "training.adapter.rank"),
    "lora_target": Key("own.targets", targets, "training.adapter.targets"),
    "lora_target_modules": Key("own.targets", targets, "training.adapter.targets"),
    "lora_dropout": Key("own.dropout", share, "training.adapter.dropout"),
    "load_in_4bit": Key("own.four_bits", yes, "training.adapter.kind"),
    "quantization_bit": Key("own.four_bits", one_of({"4": True}), "training.adapter.kind"),
    "fsdp": Key("own.fsdp_words", _fsdp, "plan.shard"),
    "fsdp_config.reshard_after_forward": Key("own.reshard", yes, "plan.reshard"),
    "fsdp_config.cpu_offload": Key("plan.offload", yes),
    "fsdp_config.offload_params": Key("plan.offload", yes),
    "fsdp_config.activation_checkpointing": Key("own.fsdp_checkpointing", yes, "plan.recompute"),
    "fsdp_config.version": Key("own.fsdp_version", whole, "plan.shard"),
}

IGNORED = (
    "output_dir logging_* report_to run_name seed data_seed learning_rate lr_* warmup_* weight_decay "
    "adam_* max_grad_norm do_train do_eval do_predict eval_* evaluation_strategy "
    "per_device_eval_batch_size per_gpu_* dataset* data_* train_file validation_file test_file val_size "
    "validation_split_percentage overwrite_* save_* load_best_model_at_end metric_for_best_model "
    "greater_is_better push_to_hub hub_* resume_from_checkpoint ddp_* dataloader_* remove_unused_columns "
    "ignore_data_skip group_by_length preprocessing_* streaming tokenizer_name use_fast trust_remote_code "
    "cache_dir token use_auth_token config_name stage template plot_loss lora_alpha lora_bias packing "
    "neat_packing deepspeed gradient_checkpointing_kwargs* use_cpu optim_target_modules "
    "label_smoothing_factor include_* disable_tqdm local_rank local-rank rope_scaling quantization_method "
    "bnb_* double_quantization new_special_tokens mask_history train_on_prompt train_sampling_strategy "
    "fsdp_config fsdp_config.* fsdp_transformer_layer_cls_to_wrap accelerator_config* "
    "torch_compile_backend tf32_* neftune_* full_determinism auto_find_batch_size low_cpu_mem_usage "
    "additional_target lora_task_type lora_modules_to_save modules_to_save log_level* "
    "adapter_name_or_path export_* ref_model* pref_* dpo_* temperature top_* bf16_full_eval "
    "fp16_full_eval torch_empty_cache_steps dataloader* completion_only_loss assistant_only_loss "
    "eos_token pad_token task_type"
)
UNMODELLED = (
    "use_unsloth use_galore* galore_* use_badam* badam_* freeze_* use_dora use_rslora pissa_* loraplus_* "
    "sequence_parallel_* use_adam_mini upcast_* shift_attn mixture_of_depths parallelism_config*"
)

_FSDP1 = {
    "full_shard": "zero3", "shard_grad_op": "zero2", "no_shard": "none", "hybrid_shard": "hybrid",
    "hybrid_shard_zero2": "hybrid2", "true": "zero3",
}  # fmt: skip


def read(reading: Reading, settings: Iterable[Setting]) -> None:
    """The arguments of a Trainer or of LLaMA-Factory."""
    kept = [one for one in settings if one.value is not None]
    take(reading, kept, KEYS, READER, ignored=IGNORED, unmodelled=UNMODELLED, name=dashed)
    own = reading.tables.setdefault("own", {})
    if (own.get("fsdp_words") or "").split()[:1]:
        words = own["fsdp_words"].split()
        strategy = next((_FSDP1[word] for word in words if word in _FSDP1), "zero3")
        own["strategy" if strategy != "zero3" else "fsdp2"] = strategy
        own["kind"] = "fsdp"
        if "offload" in words:
            reading.set("plan.offload", True)
    if reading.whose("plan.shard") is not None and reading.sources["plan.shard"][1] == READER:
        reading.set("training.framework", "deepspeed")  # scripts of DeepSpeed's examples
    finish(reading)


def finish(reading: Reading) -> None:
    """Put together what takes several arguments; a file of accelerate or DeepSpeed has its say before."""
    own = reading.tables.setdefault("own", {})
    reading.default("training.framework", "pytorch")
    reading.default("training.optimizer", "adamw-fused", "the Trainer's own")
    if reading.get("run.micro") is None and reading.get("run.batch") is None:
        reading.set("run.micro", 8)
        reading.assumed.append("per_device_train_batch_size = 8: the Trainer's own")
    if reading.get("training.framework") == "pytorch" and own.get("kind") == "fsdp":
        accelerate.finish(reading)
    _precision(reading, own)
    if "momentum" in str(own.get("optimizer_arguments")) and reading.get("training.optimizer") == "sgd-plain":
        reading.set("training.optimizer", "sgd")
    if own.get("checkpointing") and not own.get("no_checkpointing"):
        reading.set("plan.recompute", "full")
    if own.get("compile") or own.get("compile_mode"):
        reading.set("training.compile", own.get("compile_mode") or True)
    _adapter(reading, own)
    if own.get("samples"):
        reading.set("training.samples", own["samples"])
    if own.get("save_strategy", "steps") == "steps" and (own.get("save_steps") or 0) >= 1:
        reading.set("training.checkpoint_every", int(own["save_steps"]))


def _precision(reading: Reading, own: dict[str, Any]) -> None:
    """Autocast over weights as they are loaded; DeepSpeed keeps an fp32 copy instead."""
    half = "bf16" if own.get("bf16") or own.get("pure") else "fp16" if own.get("fp16") else None
    if reading.get("training.framework") == "deepspeed":
        half = half or {"bf16": "bf16", "fp16": "fp16"}.get(str(own.get("loaded")))
        if half is not None and reading.get("training.precision") is None:
            reading.set("training.precision", half)
            reading.set("training.master_weights", True)
        return
    sharded = reading.get("plan.shard", "none") != "none"
    if half and (own.get("pure") or (own.get("loaded") == half and not sharded)):
        reading.default("training.precision", half)
    elif half:
        reading.default("training.precision", f"amp-{half}")
    elif own.get("loaded") in ("bf16", "fp16"):
        reading.default("training.precision", own["loaded"])
    elif own.get("tf32"):
        reading.default("training.precision", "tf32")


def _adapter(reading: Reading, own: dict[str, Any]) -> None:
    if reading.get("training.adapter") is not None:
        reading.tables["training"].pop("master_weights", None)
        return
    lora = own.get("peft") or own.get("finetuning") == "lora" or own.get("adapter") in ("lora", "qlora")
    if not lora:
        if own.get("finetuning") == "freeze":
            reading.assumed.append("training: all weights, though finetuning_type freezes some")
        return
    adapter = {"kind": "qlora" if own.get("four_bits") or own.get("adapter") == "qlora" else "lora"}
    for name in ("rank", "targets", "dropout"):
        if own.get(name):
            adapter[name] = own[name]
    reading.tables["training"].pop("master_weights", None)  # adapters are kept in fp32
    precision = str(reading.get("training.precision", "fp32"))
    if precision.startswith("amp-"):
        adapter["base"] = precision.removeprefix("amp-")
    reading.set("training.adapter", adapter)
