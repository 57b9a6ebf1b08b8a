"""Looks up entries of the catalogue as JSON values."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from foretrain.catalog import Catalog
from foretrain.errors import unknown
from foretrain.model_names import find_preset, model_presets
from foretrain.report.tables import as_dict


def entries(kind: str, name: str | None, known: Catalog) -> dict[str, dict[str, Any]]:
    """Catalogue entries by name: all of a kind, or the one that is asked for."""
    if kind in ("devices", "nodes", "hosts"):
        finders: dict[str, Callable[[str, str], Any]] = {
            "devices": known.device,
            "nodes": known.node,
            "hosts": known.host,
        }
        find = finders[kind]
        found = [find(one, kind) for one in (known.names(kind) if name is None else [name])]  # type: ignore[arg-type]
        return {entry.name: as_dict(entry) for entry in found}
    if kind == "models" and name is not None and (preset := find_preset(name)) is not None:
        return {name: preset}
    table = (
        model_presets()
        if kind == "models"
        else {one: as_dict(price) for one in known.names("prices") if (price := known.price(one))}
    )
    if name is None:
        return dict(table)
    if name not in table:
        raise unknown(kind, name, table)
    return {name: {"name": name, **table[name]}}
