"""Reads the YAML of NeMo Automodel."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from foretrain.launchers import huggingface
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

READER = "automodel"

_DISTRIBUTED = {
    "strategy": Key(
        "own.strategy", one_of({"fsdp2": "zero3", "megatron_fsdp": "zero3", "ddp": "none"}), "plan.shard"
    ),
    "dp_size": Key("own.data", whole, "plan.data"),
    "dp_replicate_size": Key("plan.replicate", whole),
    "tp_size": Key("plan.tensor", whole),
    "cp_size": Key("plan.context", whole),
    "pp_size": Key("plan.pipeline", whole),
    "ep_size": Key("plan.expert", whole),
    "sequence_parallel": Key("plan.sequence_parallel", yes),
    "activation_checkpointing": Key("own.checkpointing", yes, "plan.recompute"),
    "pipeline.pp_schedule": Key("own.schedule", spelled("schedule"), "plan.schedule"),
    "pipeline.pp_microbatch_size": Key("own.pipeline_micro", whole, "plan.micro_batch"),
    "pipeline.layers_per_stage": Key("own.layers", whole, "plan.virtual_stages"),
    "moe.reshard_after_forward": Key("plan.reshard", yes),
    "offload_policy": Key("own.offload", text, "plan.offload"),
    "defer_fsdp_grad_sync": Key("own.defer", yes, "plan.overlap.gradients"),
}


def _dispatcher(value: Any) -> str | None:
    names = {"deepep": "deepep", "hybridep": "hybridep", "torch": "alltoall", "uccl_ep": "deepep"}
    return str(one_of(names)(value))


KEYS: Keys = {
    "step_scheduler.global_batch_size": Key("run.batch", whole),
    "step_scheduler.local_batch_size": Key("own.local", whole, "plan.micro_batch"),
    "step_scheduler.max_steps": Key("training.steps", whole),
    "step_scheduler.num_epochs": Key("own.epochs", share, "training.epochs"),
    "step_scheduler.ckpt_every_steps": Key("own.save_every", whole, "training.checkpoint_every"),
    "checkpoint.enabled": Key("own.saves", yes, "training.checkpoint_every"),
    "model.pretrained_model_name_or_path": Key("run.model", text),
    "model.config.pretrained_model_name_or_path": Key("run.model", text),
    "model.config": Key("run.model", text),
    "model.torch_dtype": Key("own.loaded", one_of({"auto": None, **DTYPES}), "training.precision"),
    "model.attn_implementation": Key("training.attention", one_of(huggingface.ATTENTION)),
    "model.backend.attn": Key(
        "training.attention", one_of({"te": "cudnn", "sdpa": "sdpa", "flex": "flash", "eager": "eager"})
    ),
    "model.backend.dispatcher": Key("plan.dispatcher", _dispatcher),
    "model.backend.enable_deepep": Key(
        "plan.dispatcher", lambda value: "deepep" if yes(value) else "alltoall"
    ),
    "model.backend.fake_balanced_gate": Key("plan.routing", When("round-robin")),
    "dataset.seq_len": Key("training.sequence", whole),
    "dataset.seq_length": Key("training.sequence", whole),
    "packed_sequence.packed_sequence_size": Key("own.packed", lambda value: whole(value) if value else None,
                                               "training.sequence"),
    "benchmark.seq_len": Key("training.sequence", whole),
    "peft.dim": Key("own.rank", whole, "training.adapter.rank"),
    "peft.target_modules": Key("own.targets", huggingface.targets, "training.adapter.targets"),
    "peft.dropout": Key("own.dropout", share, "training.adapter.dropout"),
    "peft.quantization_config": Key("own.four_bits", lambda value: bool(value), "training.adapter.kind"),
    "quantization.load_in_4bit": Key("own.four_bits", yes, "training.adapter.kind"),
    "optimizer._target_": Key("training.optimizer", spelled("optimizer")),
    "compile.enabled": Key("training.compile", yes),
    "compile.mode": Key("own.compile_mode", text, "training.compile"),
    "fp8.enabled": Key("own.fp8", yes, "training.precision"),
    "fp8.recipe_name": Key("own.fp8_recipe", spelled("fp8"), "training.fp8"),
    "fp8.enable_fsdp_float8_all_gather": Key("plan.fp8_gather", yes),
    "dist_env.nproc_per_node": Key("cluster.devices_per_node", whole),
    "slurm.nodes": Key("cluster.nodes", whole),
    "slurm.ntasks_per_node": Key("cluster.devices_per_node", whole),
    **{f"distributed.{name}": key for name, key in _DISTRIBUTED.items()},
}  # fmt: skip

IGNORED = (
    "recipe seed dist_env.* step_scheduler.* rng.* checkpoint.* dataset.* dataloader.* validation_* "
    "packed_sequence.* optimizer.* lr_scheduler.* wandb.* logger.* mlflow.* slurm.* benchmark.* "
    "peft._target_ peft.* loss_fn.* model._target_ model.trust_remote_code model.output_hidden_states "
    "model.backend.* model.config._target_ model.* distributed.moe.* distributed.pipeline.* "
    "distributed._target_ clip_grad_norm.* distributed.* fp8.* compile.* quantization.* freeze_config.* "
    "parallelizer.* tokenizer.* ci.* auto_resume* nproc_per_node autopipeline.* max_grad_norm"
)
UNMODELLED = "mtp.* distributed.moe.mp_policy* cut_cross_entropy*"


def read(reading: Reading, settings: Iterable[Setting]) -> None:
    """The keys of a recipe, put together with the defaults of Automodel."""
    kept = [one for one in settings if one.value is not None]
    take(reading, kept, KEYS, READER, ignored=IGNORED, unmodelled=UNMODELLED)
    own: dict[str, Any] = reading.tables.setdefault("own", {})
    reading.set("training.framework", "automodel")
    reading.default("training.optimizer", "adamw", "Automodel's own")
    reading.set("plan.shard", own.get("strategy", "zero3"))
    _training(reading, own, kept)
    if reading.get("plan.pipeline", 1) > 1:
        reading.set("plan.schedule", own.get("schedule", "1f1b"))
        if own.get("layers"):
            reading.set("run.layers_per_stage", own["layers"])
    local = own.get("local")
    if reading.get("plan.pipeline", 1) > 1 and own.get("pipeline_micro"):
        local = own["pipeline_micro"]
    if local is not None:
        setting = reading.whose("own.local")
        assert setting is not None or own.get("pipeline_micro")
        reading.set("run.micro", local)
        if setting is not None:
            reading.sources["run.micro"] = setting, READER
    if own.get("checkpointing"):
        reading.set("plan.recompute", "full")


def _training(reading: Reading, own: dict[str, Any], settings: Iterable[Setting]) -> None:
    precision = own.get("loaded", "bf16")
    if own.get("fp8"):
        precision = "fp8"
        reading.set("training.fp8", own.get("fp8_recipe", "tensorwise"))
    reading.default("training.precision", precision)
    if own.get("packed"):
        reading.set("training.sequence", own["packed"])
    if any(one.key.startswith("peft.") for one in settings):
        kind = "qlora" if own.get("four_bits") else "lora"
        named = {name: own[name] for name in ("rank", "targets", "dropout") if own.get(name)}
        reading.set("training.adapter", {"kind": kind, "precision": "bf16", **named})
    if own.get("saves") and own.get("save_every"):
        reading.set("training.checkpoint_every", own["save_every"])
    if own.get("compile_mode") and reading.get("training.compile"):
        reading.set("training.compile", own["compile_mode"])
