"""Reads recipes of Megatron-Bridge (0.6 and earlier) and what is set over them: fields in Python, ``a.b=c``
on a command line, and the options of its launchers."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

from foretrain.launchers import megatron
from foretrain.launchers.settings import Key, Keys, Reading, Setting, one_of, take, text, whole
from foretrain.model_names import find_preset

READER = "megatron-bridge"

_SECTIONS = (
    "model",
    "train",
    "ddp",
    "optimizer",
    "comm_overlap",
    "dataset",
    "checkpoint",
    "dist",
    "tokenizer",
)
_MIXED = {
    "bf16": ("bf16", None),
    "bf16_mixed": ("bf16", None),
    "fp16_mixed": ("fp16", None),
    "fp8": ("fp8", None),
    **dict.fromkeys(("bf16_with_fp8_delayed_scaling_mixed", "fp8_ds", "fp8ds"), ("fp8", "delayed")),
    **dict.fromkeys(("bf16_with_fp8_current_scaling_mixed", "fp8_cs", "fp8cs"), ("fp8", "current")),
    **dict.fromkeys(("bf16_with_fp8_subchannel_scaling_mixed", "fp8_sc", "fp8sc"), ("fp8", "blockwise")),
    **dict.fromkeys(("bf16_with_mxfp8_mixed", "fp8_mx", "fp8mx"), ("fp8", "mxfp8")),
    **dict.fromkeys(("bf16_with_nvfp4_mixed", "nvfp4"), ("fp8", "nvfp4")),
}
"""Precisions by the names of ``cfg.mixed_precision``, of launchers and of recipes."""

KEYS: Keys = {
    "mixed_precision": Key("own.mixed", one_of(_MIXED), "training.precision"),
    "dataset.sequence_length": Key("training.sequence", whole),
    "dataset.seq_length": Key("training.sequence", whole),
    "recipe": Key("own.recipe", text, "model"),
    "hf_path": Key("run.model", text),
    **{f"{section}.{name}": key for section in _SECTIONS for name, key in megatron.KEYS.items()},
}

LAUNCHER: Keys = {
    "recipe": Key("own.recipe", text, "model"),
    "nodes": Key("cluster.nodes", whole),
    "gpus_per_node": Key("cluster.devices_per_node", whole),
    "m": Key("own.family", text, "model"),
    "mr": Key("own.recipe", text, "model"),
    "ng": Key("run.devices", whole),
    "num_gpus": Key("run.devices", whole),
    "g": Key("run.device", text),
    "gpu": Key("run.device", text),
    "c": Key("own.mixed", one_of(_MIXED), "training.precision"),
    "compute_dtype": Key("own.mixed", one_of(_MIXED), "training.precision"),
    "tp": Key("plan.tensor", whole),
    "pp": Key("plan.pipeline", whole),
    "cp": Key("plan.context", whole),
    "vp": Key("plan.virtual_stages", whole),
    "ep": Key("plan.expert", whole),
    "et": Key("plan.expert_tensor", whole),
    "mb": Key("run.micro", whole),
    "gb": Key("run.batch", whole),
    "gn": Key("cluster.devices_per_node", whole),
    "hf_path": Key("run.model", text),
}
"""Of ``scripts/training/train.sh`` and ``scripts/performance/setup_experiment.py``."""

IGNORED = (
    "account partition container_image container_mounts mode dataset time_limit a p i t d dryrun log_dir "
    "l hf_token task env_vars* rng.* scheduler.* logger.* tokenizer.* checkpoint.* profiling.* "
    "validation.* dist.* dataset.* optimizer.* train.* peft.* step_func domain peft_scheme"
)
_UNMODELLED = " ".join(f"*.{name}" for name in megatron.UNMODELLED.split())
_IGNORED = " ".join(f"model.{name} ddp.{name}" for name in megatron.IGNORED.split())

_RECIPE = re.compile(
    r"(?P<model>.+?)_(?P<task>pretrain|sft|peft|lora|finetune)(?:_(?P<gpus>\d+)gpu)?(?:_(?P<gpu>[a-z]+\d+[a-z0-9]*))?"
    r"(?:_(?P<dtype>bf16|fp8\w*?|nvfp4))?(?:_\w+?)?(?:_config)?"
)


def read(reading: Reading, settings: Iterable[Setting], *, launcher: Iterable[Setting] = ()) -> None:
    """Read what is set over a recipe, and what its launcher is told."""
    take(
        reading,
        launcher,
        LAUNCHER,
        READER,
        ignored=IGNORED,
        name=lambda key: key.lstrip("-").replace("-", "_"),
    )
    take(
        reading,
        (one for one in settings if one.value is not None),
        KEYS,
        READER,
        ignored=f"{IGNORED} {_IGNORED} comm_overlap",
        unmodelled=_UNMODELLED,
        name=lambda key: key.lstrip("+"),
    )
    own: dict[str, Any] = reading.tables.setdefault("own", {})
    if own.get("mixed"):
        precision, recipe = own["mixed"]
        reading.set("training.precision", precision)
        if recipe:
            reading.set("training.fp8", recipe)
    _recipe(reading, own)
    reading.default("training.precision", "bf16", "Megatron-Bridge's own")
    if own.get("distributed_optimizer") is None and not own.get("fsdp"):
        own["distributed_optimizer"] = True
        reading.assumed.append("plan.shard = zero1: Megatron-Bridge's own")
    megatron.finish(reading)


def _recipe(reading: Reading, own: dict[str, Any]) -> None:
    """Read what the name of a recipe tells; what else it sets is not known here."""
    name = str(own.get("recipe") or "").rpartition(".")[2]
    if not name:
        return
    matched = _RECIPE.fullmatch(name)
    parts = {"model": name} if matched is None else matched.groupdict()
    if reading.get("run.model") is None and (model := preset_of(str(parts["model"]))) is not None:
        reading.set("run.model", model)
    if parts.get("gpus") and reading.get("run.devices") is None and reading.get("cluster.nodes") is None:
        reading.set("run.devices", int(str(parts["gpus"])))
    if parts.get("gpu") and reading.get("run.device") is None:
        reading.set("run.device", parts["gpu"])
    if parts.get("dtype") in _MIXED and reading.get("training.precision") is None:
        precision, recipe = _MIXED[str(parts["dtype"])]
        reading.set("training.precision", precision)
        if recipe:
            reading.set("training.fp8", recipe)
    reading.assumed.append(f"what the recipe {name} sets by itself is not known: only what is set over it")


def preset_of(name: str) -> str | None:
    """The preset that a recipe's model is.

    >>> preset_of("llama3_70b"), preset_of("llama31_405b"), preset_of("qwen3_30b_a3b")
    ('meta-llama/Meta-Llama-3-70B', 'meta-llama/Llama-3.1-405B', 'Qwen/Qwen3-30B-A3B')
    """
    dotted = re.sub(r"^(llama|qwen)(\d)(\d)(?=_)", r"\1\2.\3", name)
    preset = find_preset(dotted.replace("_", "-"))
    return None if preset is None else str(preset["name"])
