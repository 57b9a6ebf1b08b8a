"""The command that prints what is known: ``catalog``."""

from __future__ import annotations

from typing import Annotated

import typer

from foretrain.cli import completion
from foretrain.cli.app import JsonFlag, registry, show
from foretrain.cli.job_options import CatalogOption


@registry.command()
def catalog(
    kind: Annotated[
        str | None,
        typer.Argument(
            metavar="KIND|NAME",
            help="devices, nodes, hosts, models or prices; or a name alone, such as h100.",
            show_default=False,
            autocompletion=completion.kinds_and_names,
        ),
    ] = None,
    name: Annotated[
        str | None,
        typer.Argument(
            metavar="NAME",
            help="Everything about one of them.",
            show_default=False,
            autocompletion=completion.names_of_kind,
        ),
    ] = None,
    file: CatalogOption = None,
    as_json: JsonFlag = False,
) -> None:
    """What is known: devices, nodes, hosts, models and prices, each with its source."""
    from foretrain.catalog import Catalog
    from foretrain.catalog_entries import KINDS, entries, kind_of
    from foretrain.errors import unknown
    from foretrain.report import tables

    known = Catalog.load(file)
    if kind is None:
        for each in KINDS:
            typer.echo(f"{len(entries(each, None, known)):4d} {each:8s} foretrain catalog {each}")
        return
    if kind not in KINDS:
        if name is not None:
            raise unknown("catalog", kind, KINDS)
        kind, name = kind_of(kind, known), kind
    listed = entries(kind, name, known)
    if as_json:
        from foretrain.report import dump

        typer.echo(dump(listed if name is None else next(iter(listed.values()))))
    else:
        show(
            tables.details(next(iter(listed.values())))
            if name is not None
            else tables.listing(kind, listed, known)
        )
