"""Reads the YAML of axolotl."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from foretrain.launchers import accelerate, huggingface
from foretrain.launchers.settings import (
    DTYPES,
    Key,
    Keys,
    Reading,
    Setting,
    When,
    one_of,
    share,
    spelled,
    take,
    text,
    whole,
    yes,
)

READER = "axolotl"

_FSDP = {
    "offload_params": Key("plan.offload", yes),
    "reshard_after_forward": Key("own.reshard", yes, "plan.reshard"),
    "activation_checkpointing": Key("own.fsdp_checkpointing", yes, "plan.recompute"),
    "sharding_strategy": accelerate.KEYS["fsdp_sharding_strategy"],
}

KEYS: Keys = {
    "base_model": Key("run.model", text),
    "base_model_config": Key("own.config", text, "model"),
    "sequence_len": Key("training.sequence", whole),
    "micro_batch_size": Key("run.micro", whole),
    "batch_size": Key("run.batch", whole),
    "gradient_accumulation_steps": Key("run.accumulation", whole),
    "max_steps": Key("training.steps", whole),
    "num_epochs": Key("own.epochs", share, "training.epochs"),
    "bf16": Key("own.bf16", lambda value: True if str(value).lower() in ("auto", "full") else yes(value),
                "training.precision"),
    "fp16": Key("own.fp16", yes, "training.precision"),
    "bfloat16": Key("own.pure", yes, "training.precision"),
    "tf32": Key("own.tf32", yes, "training.precision"),
    "torch_dtype": Key("own.loaded", one_of({"auto": None, **DTYPES}), "training.precision"),
    "optimizer": Key("training.optimizer", spelled("optimizer")),
    "gradient_checkpointing": Key(
        "own.checkpointing", lambda value: True if str(value) in ("unsloth", "offload") else yes(value),
        "plan.recompute",
    ),
    "activation_offloading": Key("plan.offload_activations", yes),
    "attn_implementation": Key("training.attention", one_of(huggingface.ATTENTION)),
    "flash_attention": Key("training.attention", When("flash")),
    "sdp_attention": Key("training.attention", When("sdpa")),
    "eager_attention": Key("training.attention", When("eager")),
    "torch_compile": Key("own.compile", yes, "training.compile"),
    "torch_compile_mode": Key("own.compile_mode", text, "training.compile"),
    "liger_fused_linear_cross_entropy": Key("training.loss", When("fused")),
    "cut_cross_entropy": Key("training.loss", When("fused")),
    "adapter": Key("own.adapter", one_of({"lora": "lora", "qlora": "qlora", "none": None, "": None}),
                   "training.adapter"),
    "load_in_4bit": Key("own.four_bits", yes, "training.adapter.kind"),
    "lora_r": Key("own.rank", whole, "training.adapter.rank"),
    "lora_dropout": Key("own.dropout", share, "training.adapter.dropout"),
    "lora_target_linear": Key("own.targets", When("all-linear"), "training.adapter.targets"),
    "lora_target_modules": Key("own.targets", huggingface.targets, "training.adapter.targets"),
    "dp_shard_size": Key("run.shard_degree", whole),
    "dp_replicate_size": Key("plan.replicate", whole),
    "tensor_parallel_size": Key("plan.tensor", whole),
    "context_parallel_size": Key("plan.context", whole),
    "sequence_parallel_degree": Key("plan.context", whole),
    "expert_parallel_size": Key("plan.expert", whole),
    "fsdp_version": Key("own.fsdp_version", whole, "plan.shard"),
    "fsdp": Key("own.fsdp_words", text, "plan.shard"),
    "save_steps": Key("own.save_steps", share, "training.checkpoint_every"),
    "save_strategy": Key("own.save_strategy", text, "training.checkpoint_every"),
    **{f"fsdp_config.{name}": key for name, key in _FSDP.items()},
    **{f"fsdp_config.fsdp_{name}": key for name, key in _FSDP.items()},
}  # fmt: skip

IGNORED = (
    "datasets* dataset_* test_datasets val_set_size output_dir sample_packing pad_to_sequence_len eval_* "
    "evals_per_epoch saves_per_epoch save_* logging_steps wandb_* mlflow_* comet_* hub_* learning_rate "
    "lr_* cosine_* warmup_* weight_decay adam_* max_grad_norm seed special_tokens* tokens tokenizer_* "
    "model_type trust_remote_code is_llama_derived_model train_on_inputs group_by_length chat_template "
    "resume_from_checkpoint auto_resume_from_checkpoints xformers_attention s2_attention flash_attn_* "
    "early_stopping_patience debug local_rank gradient_checkpointing_kwargs* lora_alpha "
    "lora_modules_to_save lora_fan_in_fan_out lora_model_dir strict load_in_8bit plugins liger_* "
    "deepspeed fsdp_config.* roles* adapter_* lora_mlp_kernel lora_qkv_kernel lora_o_kernel shuffle_* "
    "dataloader_* optim_args revision_of_model loss_watchdog_* base_model_ignore_patterns "
    "unfrozen_parameters bnb_config_kwargs* peft_* use_tensorboard ddp_* sequence_len_overflow_handling "
    "excess_length_strategy torch_compile_backend bf16_full_eval overrides_* eval_sample_packing "
    "remove_unused_columns skip_prepare_dataset use_wandb experimental_skip_move_to_device"
)
UNMODELLED = (
    "peft_use_dora unsloth_* relora_* lisa_* gptq* noisy_embedding_alpha ring_attn_func heads_k_stride"
)


def read(reading: Reading, settings: Iterable[Setting]) -> None:
    """The keys of a configuration, put together with the defaults of axolotl."""
    kept = [one for one in settings if one.value not in (None, "")]
    take(reading, kept, KEYS, READER, ignored=IGNORED, unmodelled=UNMODELLED)
    own: dict[str, Any] = reading.tables.setdefault("own", {})
    reading.default("training.optimizer", "adamw-fused", "axolotl's own")
    sharded = any(one.key.startswith("fsdp") for one in kept)
    if sharded:
        own.setdefault("kind", "fsdp")
    if own.get("bf16") and not sharded and reading.get("training.framework") != "deepspeed":
        own.setdefault("loaded", "bf16")  # weights are loaded in what they are trained in
    huggingface.finish(reading)
