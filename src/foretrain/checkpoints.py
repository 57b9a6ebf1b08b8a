"""Reads the model of a checkpoint folder, or of a config.json, as the [model] section of a job."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from foretrain.errors import InputError
from foretrain.files import parse_json, read_text

_FILE = "config.json"
_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".gguf", ".h5", ".msgpack", ".npz")

_LONGEST = 4096
"""Tokens of a sample where nothing is said, for models that could take more."""
_USUAL_TOKENS = {"causal-lm": 2048}
"""Where the configuration says nothing of positions either, by task; else 512."""
_TEN_SECONDS = 160_000
"""Samples of speech at 16 kHz."""

_POSITIONS = ("max_position_embeddings", "n_positions", "max_seq_len", "max_sequence_length", "seq_length")
_BOOKKEEPING = frozenset("architectures transformers_version id2label label2id _name_or_path".split())
"""Keys that say where a checkpoint comes from, or what its classes are called."""

_NATIVE_TYPES = {"kimi_k2": "deepseek_v3", "Yi": "llama"}
"""Types that checkpoints with code of their own name, and what the library calls the same architecture."""
_REPLACED = {"hidden_act": "hidden_activation"}
"""Keys that some files keep beside the one which is read in their place."""

_TASKS = {
    "pre-training": "pretraining",
    "lm-head": "causal-lm",
    "with-lm-head": "causal-lm",
    "mt": "seq2seq-lm",
}
"""Where a task has another name than the end of the class has."""
_OF_TEXT = frozenset(
    "causal-lm masked-lm seq2seq-lm sequence-classification token-classification question-answering "
    "multiple-choice next-sentence-prediction image-text-to-text".split()
)
_OF_ANYTHING = frozenset(("pretraining", "base", None))
"""Tasks that tell nothing of the inputs."""


def is_file(path: Path) -> bool:
    """Whether there is such a file; a name that no file can have is none."""
    try:
        return path.is_file()
    except OSError:
        return False


def is_checkpoint(path: Path) -> bool:
    """Whether a folder has a config.json, or a ``.json`` file is one rather than a job."""
    if is_file(path / _FILE):
        return True
    if path.suffix != ".json" or not is_file(path):
        return False
    try:
        held = parse_json(read_text(path))
    except (InputError, ValueError):
        return False
    return isinstance(held, Mapping) and not {"model", "training", "cluster"} & set(held)


def checkpoint_section(path: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """The [model] section of a checkpoint, and fields of [training] that follow from it.

    A configuration of transformers, or one that timm wrote.
    """
    path = path / _FILE if is_file(path / _FILE) else path
    try:
        held = parse_json(read_text(path))
    except ValueError as error:
        raise InputError(f"{path}: not JSON ({error})") from error
    return config_section(held, str(path))


def config_section(held: object, where: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Read the [model] section from the contents of a config.json, which errors call ``where``."""
    if not isinstance(held, Mapping):
        raise InputError(f"{where}: a configuration is a table of keys and values")
    if isinstance(name := held.get("architecture"), str) and "model_type" not in held:
        classes = held.get("num_classes")
        args = {"num_classes": classes} if isinstance(classes, int) else {}
        return {"source": "timm", "name": name, "args": args}, {}
    if not isinstance(held.get("model_type"), str):
        raise InputError(f"{where}: {_what_instead(held)}")
    return _of_transformers(held)


def _what_instead(held: Mapping[str, Any]) -> str:
    """Why a file has no model that can be built from it."""
    if "_class_name" in held:
        return f"a configuration of diffusers ({held['_class_name']}); give file.py:function that builds it"
    if "peft_type" in held:
        return f"an adapter; give its base model, {held.get('base_model_name_or_path')}"
    return "model_type is missing, which a configuration of transformers has (jobs have model, training, ...)"


def _of_transformers(held: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    config = {
        name: value
        for name, value in held.items()
        if name not in _BOOKKEEPING and _REPLACED.get(name) not in held
    }
    config["model_type"] = _NATIVE_TYPES.get(held["model_type"], held["model_type"])
    task = _task(held)
    labels = held.get("id2label")
    if (
        isinstance(labels, Mapping)
        and "num_labels" not in config
        and task
        and task.endswith("-classification")
    ):
        config["num_labels"] = len(labels)
    section = {"source": "transformers", "config": config} | ({"task": task} if task else {})
    sequence = _sequence(held, task)
    return section, {"optimizer": "adamw"} | ({"sequence": sequence} if sequence else {})


def _task(held: Mapping[str, Any]) -> str | None:
    """Name the task of a checkpoint's class; None where no class is named.

    >>> [_task({"architectures": [name]}) for name in ("LlamaForCausalLM", "GPT2LMHeadModel", "BertModel")]
    ['causal-lm', 'causal-lm', 'base']
    """
    classes = held.get("architectures")
    if not isinstance(classes, list) or not classes or not isinstance(classes[0], str):
        return None
    end = re.search(r"(?:For|(?=LMHead|WithLMHead|MTModel))([A-Z]\w*?)(?:Model)?$", classes[0])
    if end is None:
        return "base"
    name = re.sub(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", "-", end[1]).lower()
    if name == "conditional-generation":
        if "num_mel_bins" in held:
            return "speech-seq2seq"
        return "image-text-to-text" if "vision_config" in held else "seq2seq-lm"
    if name == "sequence-classification" and "conv_dim" in held:
        return "audio-classification"
    return _TASKS.get(name, name)


def _sequence(held: Mapping[str, Any], task: str | None) -> int | None:
    """Tokens of a sample: as many as there are positions for, up to a usual length; None for images."""
    text = held.get("text_config") if isinstance(held.get("text_config"), Mapping) else held
    assert isinstance(text, Mapping)
    if "conv_dim" in held:
        return _TEN_SECONDS
    reads_text = (
        task in _OF_ANYTHING and "vocab_size" in text and not {"image_size", "num_mel_bins"} & set(text)
    )
    if task not in _OF_TEXT and not reads_text:
        return None
    stated = (text[name] for name in _POSITIONS if isinstance(text.get(name), int))
    positions = next(stated, _USUAL_TOKENS.get(task or "", 512))
    reserved = 2 if positions > 2 and (positions - 2) & (positions - 3) == 0 else 0
    return int(min(positions - reserved, _LONGEST))


def explain_path(path: Path) -> str | None:
    """Why an existing file or folder is no model, with what would do; None where it may be one."""
    if path.suffix in _WEIGHTS and is_file(path):
        return f"a file of weights alone; give a folder with its {_FILE}, or file.py:function that builds it"
    try:
        is_folder = path.is_dir()
    except OSError:
        return None
    if is_folder:
        adapter = path / "adapter_config.json"
        if is_file(adapter):
            try:
                held = parse_json(read_text(adapter))
            except (InputError, ValueError):
                held = {}
            base = held.get("base_model_name_or_path") if isinstance(held, Mapping) else None
            return f"an adapter of {base or 'another model'}, without a {_FILE} of its own; name that model"
        if (path / "model_index.json").is_file():
            return "a pipeline of diffusers; give file.py:function that builds its model"
        return f"a folder without a {_FILE}"
    return None
