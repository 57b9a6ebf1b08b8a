"""Names diffusion models, with the figures of their networks; free of torch."""

from __future__ import annotations

import functools
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any


@functools.cache
def diffusion_models() -> Mapping[str, Mapping[str, Any]]:
    """Everything that ``models/diffusion.toml`` says of each model, by its name."""
    path = Path(__file__).parent / "models" / "diffusion.toml"
    models: dict[str, dict[str, Any]] = tomllib.loads(path.read_text(encoding="utf-8"))["models"]
    return models


def diffusion_model(name: str) -> str | None:
    """The name that a model has in the catalogue, by any of its names in any case.

    >>> diffusion_model("SDXL")
    'stabilityai/stable-diffusion-xl-base-1.0'
    """
    return _spellings().get(name.lower())


@functools.cache
def _spellings() -> dict[str, str]:
    return {
        spelling.lower(): name
        for name, model in diffusion_models().items()
        for spelling in (name, *model["aliases"])
    }
