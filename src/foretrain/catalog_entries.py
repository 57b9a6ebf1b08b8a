"""Lists what the catalogue knows, as JSON values: devices, nodes, hosts, models and prices by name."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, Literal, get_args

from foretrain.catalog import Catalog
from foretrain.errors import InputError, unknown
from foretrain.model_names import find_preset, model_presets

Kind = Literal["devices", "nodes", "hosts", "models", "prices"]
KINDS: tuple[Kind, ...] = get_args(Kind)


def entries(kind: str, name: str | None, known: Catalog) -> dict[str, dict[str, Any]]:
    """Catalogue entries by name: all of a kind, or the one that is asked for."""
    if kind in ("devices", "nodes", "hosts"):
        finders: dict[str, Callable[[str, str], Any]] = {
            "devices": known.device,
            "nodes": known.node,
            "hosts": known.host,
        }
        find = finders[kind]
        listed = [find(one, kind) for one in (known.names(kind) if name is None else [name])]  # type: ignore[arg-type]
        return {entry.name: as_table(entry) for entry in listed}
    if kind == "models" and name is not None and (preset := find_preset(name)) is not None:
        return {name: preset}
    table = (
        model_presets()
        if kind == "models"
        else {one: as_table(price) for one in known.names("prices") if (price := known.price(one))}
    )
    if name is None:
        return dict(table)
    if name not in table:
        what = "a preset (names of timm and torchvision go to predict as they are);"
        raise unknown(kind, name, table, what if kind == "models" else "one of")
    return {name: {"name": name, **table[name]}}


def kind_of(name: str, known: Catalog) -> Kind:
    """The kind that has an entry of this name; the first, where several have one."""
    for kind in KINDS:
        with contextlib.suppress(InputError):
            entries(kind, name, known)
            return kind
    machines = [*(entries("devices", None, known).values()), *(entries("nodes", None, known).values())]
    names = {one for entry in machines for one in (entry["name"], *entry.get("aliases", ()))}
    raise unknown(
        "catalog", name, names | set(KINDS) | set(model_presets()), f"one of {', '.join(KINDS)} or of"
    )


def as_table(entry: Any) -> dict[str, Any]:
    """The fields of a catalogue entry, those without a value left out."""
    return _without_empty(dataclasses.asdict(entry))


def _without_empty(entry: Mapping[str, Any]) -> dict[str, Any]:
    cleaned = {
        key: _without_empty(value) if isinstance(value, Mapping) else value for key, value in entry.items()
    }
    return {key: value for key, value in cleaned.items() if value not in (None, "", (), {})}
