"""The commands that print tables: ``evaluate`` predictors on runs, and the ``catalog``."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from foretrain.cli.app import JsonFlag, app, say, show
from foretrain.errors import unknown

if TYPE_CHECKING:
    from foretrain.catalog import Catalog


@app.command()
def evaluate(
    runs: Annotated[list[Path], typer.Argument(metavar="RUNS.jsonl...", help="Files of measured runs.")],
    predictor: Annotated[
        list[str] | None, typer.Option(help="Predictor by name, or a folder that fit made; may be given several times.")
    ] = None,
    split: Annotated[
        str | None,
        typer.Option(
            help="random, leave-model-out, leave-device-out, interpolate or extrapolate (or interpolate:workers, extrapolate:samples, ...): learn on the other runs."
        ),
    ] = None,
    train_runs: Annotated[int | None, typer.Option(min=1, help="With --split: learn from at most so many runs of each model.")] = None,
    json_out: Annotated[Path | None, typer.Option("--json", metavar="OUT", help="Write figures and runs as JSON.")] = None,
) -> None:
    """Errors of predictors on measured runs."""
    from foretrain import predictors
    from foretrain.evaluate import evaluate as score
    from foretrain.report.screen import progress
    from foretrain.report.tables import evaluation_table

    with progress("forecasts") as advance:
        document = score(runs, predictors=predictor or [predictors.DEFAULT], split=split, train_runs=train_runs, progress=advance).to_dict()
    if json_out is not None:
        from foretrain.files import write_atomically
        from foretrain.report import dump

        write_atomically(json_out, dump(document))
        say(f"{len(document['results']):,} results, {len(document['runs']):,} comparisons in {json_out}")
    show(evaluation_table(document["results"]))


@app.command()
def catalog(
    kind: Annotated[Literal["devices", "nodes", "models", "prices"] | None, typer.Argument(show_default=False)] = None,
    name: Annotated[str | None, typer.Argument(help="Everything about one of them.", show_default=False)] = None,
    file: Annotated[Path | None, typer.Option("--catalog", help="Your own devices, nodes and prices (TOML).")] = None,
    as_json: JsonFlag = False,
) -> None:
    """What is known: devices, nodes, models and prices, each with its source."""
    from foretrain.catalog import Catalog
    from foretrain.report import tables

    known = Catalog.load(file)
    if kind is None:
        for each in ("devices", "nodes", "models", "prices"):
            typer.echo(f"{len(_entries(each, None, known)):4d} {each:8s} foretrain catalog {each}")
        return
    entries = _entries(kind, name, known)
    if as_json:
        from foretrain.report import dump

        typer.echo(dump(entries if name is None else next(iter(entries.values()))))
    else:
        show(tables.details(next(iter(entries.values()))) if name is not None else tables.listing(kind, entries, known))


def _entries(kind: str, name: str | None, known: Catalog) -> dict[str, dict[str, Any]]:
    """Catalogue entries by name: all of a kind, or the one that is asked for."""
    from foretrain.api import model_presets
    from foretrain.report.tables import as_dict

    if kind in ("devices", "nodes"):
        find: Callable[[str, str], Any] = known.device if kind == "devices" else known.node
        found = [find(one, kind) for one in (known.names(kind) if name is None else [name])]  # type: ignore[arg-type]
        return {entry.name: as_dict(entry) for entry in found}
    table = model_presets() if kind == "models" else {one: as_dict(price) for one in known.names("prices") if (price := known.price(one))}
    if name is None:
        return dict(table)
    if name not in table:
        raise unknown(kind, name, table)
    return {name: {"name": name, **table[name]}}
