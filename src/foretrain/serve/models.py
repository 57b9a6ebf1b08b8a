"""Lists the models that a server knows by name."""

from __future__ import annotations

import functools
from typing import Any

from foretrain.library_names import all_names
from foretrain.model_names import model_presets
from foretrain.serve.requests import ModelsQuery


def matching_models(query: ModelsQuery) -> dict[str, Any]:
    """List the names with a part, presets first, those that start with it before others."""
    part = query.like.lower()
    matches = [
        (not name.lower().startswith(part), number, name, kind)
        for number, (kind, names) in enumerate(_names_of_models().items())
        for name in names
        if part in name.lower()
    ]
    matches.sort()
    chosen = matches[: query.limit]
    return {"models": [{"name": name, "kind": kind} for *_, name, kind in chosen], "total": len(matches)}


@functools.cache
def _names_of_models() -> dict[str, tuple[str, ...]]:
    """List the names of models by what they are: presets by their kind, then what libraries have."""
    kinds: dict[str, list[str]] = {}
    for name, preset in model_presets().items():
        kinds.setdefault(preset["kind"], []).append(name)
    seen = {name for names in kinds.values() for name in names}
    for library in ("torchvision", "timm"):
        kinds[library] = sorted(all_names(library) - seen)
        seen |= all_names(library)
    return {kind: tuple(names) for kind, names in kinds.items()}
