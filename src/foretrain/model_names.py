"""Finds the model that a name on the command line means: presets, libraries, files."""

from __future__ import annotations

import functools
import tomllib
from pathlib import Path
from typing import Any


@functools.cache
def _known_models() -> dict[str, Any]:
    with (Path(__file__).parent / "catalog" / "models.toml").open("rb") as file:
        return tomllib.load(file)


def model_presets() -> dict[str, dict[str, Any]]:
    """The models known by a short name, as sections of a job plus defaults."""
    presets: dict[str, dict[str, Any]] = _known_models()["presets"]
    return presets


def find_preset(name: str) -> dict[str, Any] | None:
    """The preset that a name means."""
    return model_presets().get(name)


def model_section(model: str, source: str | None) -> tuple[dict[str, Any], dict[str, Any]]:
    """The [model] section for a name, and the defaults that come with it."""
    prefix, _, rest = model.partition(":")
    if source is None and prefix in ("timm", "torchvision", "onnx", "graph") and rest:
        source, model = prefix, rest
    if source is None and model in model_presets():
        preset = dict(model_presets()[model])
        defaults: dict[str, Any] = {
            name: preset.pop(name) for name in ("sequence", "image", "optimizer") if name in preset
        }
        preset.pop("about", None)
        return preset, {"optimizer": "adamw", **defaults}
    if source == "transformers":
        return {"source": source, "config": {"model_type": model}}, {"optimizer": "adamw"}
    return {"source": source or _guess_source(model), "name": model}, {}


def _guess_source(model: str) -> str:
    if model.endswith((".json.zst", ".zst")):
        return "graph"
    if model.endswith(".onnx"):
        return "onnx"
    if ".py:" in model or model.endswith(".py"):
        return "python"
    return "torchvision" if model in _known_models()["torchvision"] else "timm"
