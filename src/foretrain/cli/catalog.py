"""The command that prints what is known: ``catalog``."""

from __future__ import annotations

from typing import Annotated, Literal

import typer

from foretrain.cli.app import JsonFlag, registry, show
from foretrain.cli.job_options import CatalogOption


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
    from foretrain.catalog_entries import KINDS, entries
    from foretrain.report import tables

    known = Catalog.load(file)
    if kind is None:
        for each in KINDS:
            typer.echo(f"{len(entries(each, None, known)):4d} {each:8s} foretrain catalog {each}")
        return
    found = entries(kind, name, known)
    if as_json:
        from foretrain.report import dump

        typer.echo(dump(found if name is None else next(iter(found.values()))))
    else:
        show(
            tables.details(next(iter(found.values())))
            if name is not None
            else tables.listing(kind, found, known)
        )
