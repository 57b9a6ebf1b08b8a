"""Reads off a model what its plans must divide: layers, heads, experts, tokens."""

from __future__ import annotations

import contextlib
import functools
import json
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from foretrain.capture import cache_folder
from foretrain.files import parse_json, write_atomically
from foretrain.workload import Workload

_LAYERS = ("num_hidden_layers", "n_layer", "num_layers", "n_layers")
_HEADS = ("num_attention_heads", "n_head", "num_heads", "n_heads")
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
_OF_TEXT = ("text_config", "llm_config", "language_config")
"""Where models of several kinds of input keep what their language model is."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """Numbers of a model that degrees must divide; None where its job does not tell."""

    layers: int | None = None
    heads: int | None = None
    experts: int | None = None
    sequence: int | None = None

    @classmethod
    def of(cls, workload: Workload) -> Facts:
        config: Mapping[str, Any] = workload.model.config or {}
        config = next((config[name] for name in _OF_TEXT if isinstance(config.get(name), Mapping)), config)
        kind = workload.model.model_type
        usual = {} if kind is None or _first(config, _LAYERS) else _defaults(kind)
        return cls(
            layers=_first(config, _LAYERS) or _first(usual, _LAYERS),
            heads=_first(config, _HEADS) or _first(usual, _HEADS),
            experts=_first(config, _EXPERTS) or _first(usual, _EXPERTS),
            sequence=workload.training.sequence,
        )


def layer_names(workload: Workload) -> list[str]:
    """List the names by which the configuration of a model, or that of its type, calls the number of its
    layers."""
    config, kind = workload.model.config or {}, workload.model.model_type
    own = [name for name in _LAYERS if name in config]
    return own or [name for name in _LAYERS if kind is not None and name in _defaults(kind)][:1]


@functools.lru_cache(maxsize=64)
def _defaults(kind: str) -> Mapping[str, Any]:
    """Read what transformers takes for a type where its configuration does not say; empty where it is not
    installed or does not know the type. Kept on disk, as importing the library takes seconds."""
    try:
        path = cache_folder() / "facts" / f"{kind}-{version('transformers')}.json"
    except PackageNotFoundError:
        return {}
    with contextlib.suppress(OSError, ValueError):
        return dict(parse_json(path.read_text()))
    from transformers import CONFIG_MAPPING

    whole = CONFIG_MAPPING[kind]().to_dict() if kind in CONFIG_MAPPING else {}
    defaults = {
        name: whole[name] for name in (*_LAYERS, *_HEADS, *_EXPERTS) if isinstance(whole.get(name), int)
    }
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, json.dumps(defaults))
    return defaults


def _first(config: Mapping[str, Any], names: tuple[str, ...]) -> int | None:
    values = (config[name] for name in names if isinstance(config.get(name), int))
    return next((value for value in values if value > 0), None)
