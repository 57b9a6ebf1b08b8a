"""The command that prints what is known: ``catalog``."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from foretrain.cli.app import JsonFlag, registry, show
from foretrain.cli.job_options import CatalogOption
from foretrain.errors import unknown

if TYPE_CHECKING:
    from foretrain.catalog import Catalog


@registry.command()
def catalog(
    kind: Annotated[
        Literal["devices", "nodes", "hosts", "models", "prices"] | None, typer.Argument(show_default=False)
    ] = None,
    name: Annotated[
        str | None, typer.Argument(help="Everything about one of them.", show_default=False)
    ] = None,
    file: CatalogOption = None,
    as_json: JsonFlag = False,
) -> None:
    """What is known: devices, nodes, hosts, models and prices, each with its source."""
    from foretrain.catalog import Catalog
    from foretrain.report import tables

    known = Catalog.load(file)
    if kind is None:
        for each in ("devices", "nodes", "hosts", "models", "prices"):
            typer.echo(f"{len(_entries(each, None, known)):4d} {each:8s} foretrain catalog {each}")
        return
    entries = _entries(kind, name, known)
    if as_json:
        from foretrain.report import dump

        typer.echo(dump(entries if name is None else next(iter(entries.values()))))
    else:
        show(
            tables.details(next(iter(entries.values())))
            if name is not None
            else tables.listing(kind, entries, known)
        )


def _entries(kind: str, name: str | None, known: Catalog) -> dict[str, dict[str, Any]]:
    """Catalogue entries by name: all of a kind, or the one that is asked for."""
    from foretrain.model_names import find_preset, model_presets
    from foretrain.report.tables import as_dict

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
