"""Tells whose files, programs and names they are."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from foretrain.launchers import torchtitan
from foretrain.launchers.commands import StartedProgram
from foretrain.launchers.python_config import Config
from foretrain.launchers.settings import Setting, dashed

MARKS: tuple[tuple[str, frozenset[str]], ...] = (
    ("skypilot", frozenset({"resources", "run"})),
    ("trainjob", frozenset({"apiVersion", "kind"})),
    ("accelerate", frozenset({"distributed_type"})),
    ("accelerate", frozenset({"compute_environment"})),
    ("automodel", frozenset({"step_scheduler"})),
    ("automodel", frozenset({"distributed", "model"})),
    ("axolotl", frozenset({"base_model"})),
    ("deepspeed", frozenset({"zero_optimization"})),
    ("deepspeed", frozenset({"train_micro_batch_size_per_gpu"})),
    ("deepspeed", frozenset({"train_batch_size"})),
    ("torchtitan", frozenset({"parallelism"})),
    ("torchtitan", frozenset({"training", "model"})),
    ("transformers", frozenset({"model_name_or_path"})),
    ("transformers", frozenset({"per_device_train_batch_size"})),
    ("transformers", frozenset({"output_dir"})),
)
"""Keys at the top of a file that tell whose it is."""


def reader_of(program: StartedProgram) -> str:
    """Whose arguments a program has."""
    names = {dashed(one.key) for one in program.arguments}
    if program.reads == "job":
        return "foretrain"
    if "automodel" in program.name:
        return "automodel"
    script = Path(program.name).name
    if program.launcher in ("automodel", "axolotl", "torchtitan") or program.name in ("automodel", "axolotl"):
        return program.launcher if program.launcher != "accelerate" else program.name
    if program.launcher == "bridge" or "recipe" in names:
        return "megatron-bridge"
    if any(word.key.lstrip("+").split(".")[0] in ("model", "train", "ddp") for word in program.words):
        return "megatron-bridge"
    if "torchtitan" in program.name or "job.config_file" in names or {"module", "config"} <= names:
        return "torchtitan"
    if script.startswith("pretrain_") or names & {
        "tensor_model_parallel_size",
        "micro_batch_size",
        "num_layers",
    }:
        return "megatron"
    return "transformers"


def last_of_each(settings: Sequence[Setting]) -> list[Setting]:
    """Keep the last of the settings with the same key, as command lines override files."""
    last = {dashed(one.key): one for one in settings}
    return list(last.values())


def bare(setting: Setting) -> Setting:
    """Take the dashes of an option away."""
    return Setting(setting.key.lstrip("-"), setting.value, setting.where)


def renamed(setting: Setting) -> Setting:
    """Keys of a Python configuration, and of options, as TOML has them."""
    key = re.sub(r"^model_converters\.converters$|^model_converters$", "model.converters", setting.key)
    key = _OF_MODEL_SPEC.get(key, key.replace("model_spec.converters.", "quantize.linear.float8."))
    head, dot, rest = key.partition(".")
    return Setting(f"{head.replace('-', '_')}{dot}{rest.replace('-', '_')}", setting.value, setting.where)


_OF_MODEL_SPEC = {
    "model_spec.converters": "model.converters",
    "model_spec.flavor": "model.flavor",
    "model_spec.moe_comm_backend": "parallelism.expert_parallel_comm_backend",
}
"""Arguments of ``model_registry`` as TOML has them."""


def registered(name: str, where: str) -> list[Setting]:
    """The model of a configuration of torchtitan's registry: ``llama3_8b``, ``llama3_70b_float8``."""
    plain_name = name.lower().replace("-", "_")
    for model, flavors in torchtitan.PRESETS.items():
        for flavor in (*flavors, "debugmodel"):
            wanted = f"{model}_{flavor.replace('-', '_').replace('.', '_')}"
            if plain_name == wanted or plain_name.startswith(f"{wanted}_"):
                return [Setting("model.name", model, where), Setting("model.flavor", flavor, where)]
    return [Setting("config", name, where)]


def torchtitan_model(config: Config, path: Path) -> list[Setting]:
    return registered(config.made_by.rpartition(".")[2], path.name)


def bridge_model(config: Config, path: Path) -> list[Setting]:
    """The recipe, or the model of a hub that a bridge is made from."""
    if "from_hf_pretrained" in config.made_by:
        name = next((one for one in config.arguments if isinstance(one, str)), "")
        return [Setting("hf_path", name, path.name)]
    return [Setting("recipe", config.made_by, path.name)]
