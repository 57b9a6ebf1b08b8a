"""Looks up sizes of a transformers model in a job's configuration, or else in the library's defaults."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from foretrain.errors import libraries_named
from foretrain.workload import Model

_ALSO = {
    "hidden_size": ("n_embd", "d_model"),
    "num_hidden_layers": ("n_layer", "num_layers"),
    "num_attention_heads": ("n_head",),
    "intermediate_size": ("n_inner",),
    "max_position_embeddings": ("n_positions",),
    "num_experts": ("num_local_experts", "n_routed_experts"),
}
"""Other names of sizes."""


def given(model: Model, name: str, default: Any = None) -> Any:
    """Look up what the job's own configuration says."""
    config = model.config or {}
    return next((config[one] for one in (name, *_ALSO.get(name, ())) if one in config), default)


def sizes(model: Model, names: Iterable[str]) -> dict[str, Any]:
    """Look each of these up, in the job or in the library, which is imported where the job leaves one out."""
    wanted, missing = list(names), object()
    given_sizes = {name: given(model, name, missing) for name in wanted}
    if all(value is not missing for value in given_sizes.values()):
        return given_sizes
    with libraries_named("launch files"):
        import transformers

        from foretrain.capture.sources.zoo import quiet_zoo_import

        quiet_zoo_import()
        own = {name: value for name, value in (model.config or {}).items() if name != "model_type"}
        config = transformers.AutoConfig.for_model(str(model.model_type), **own)
    return {
        name: getattr(config, name, None) if value is missing else value
        for name, value in given_sizes.items()
    }


def has_experts(model: Model) -> bool:
    return any("expert" in name for name in model.config or {})


def rotary(model: Model) -> dict[str, Any]:
    """Say how positions are rotated: ``rope_theta`` and what scales it, wherever the configuration has
    them."""
    config = model.config or {}
    scaled = {**(config.get("rope_parameters") or {}), **(config.get("rope_scaling") or {})}
    kind = scaled.pop("rope_type", scaled.pop("type", "default"))
    return {"rope_theta": scaled.pop("rope_theta", config.get("rope_theta")), "rope_type": kind, **scaled}
