"""The command that holds forecasts against published tables: ``validate``."""

from __future__ import annotations

import dataclasses
import importlib.util
from pathlib import Path
from typing import Annotated

import typer

from foretrain.cli import completion
from foretrain.cli.app import registry, say, show
from foretrain.cli.evaluate import tell_reasons
from foretrain.cli.job_options import PREDICTOR_HELP
from foretrain.cli.scale_out import ProcessesOption, hush_ray, one_thread
from foretrain.errors import missing


@registry.command()
def validate(
    tables: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="TABLE",
            help="Names of tables; all, where none is given.",
            autocompletion=completion.published_tables,
        ),
    ] = None,
    predictor: Annotated[
        str | None, typer.Option(help=PREDICTOR_HELP, autocompletion=completion.predictor_names)
    ] = None,
    processes: ProcessesOption = 1,
    json_out: Annotated[
        Path | None, typer.Option("--json", metavar="OUT", help="Write every row as JSON.")
    ] = None,
) -> None:
    """Forecasts beside tables that others have published, with their sources."""
    hush_ray()
    one_thread()
    from foretrain import predictors
    from foretrain.files import check_target, write_atomically
    from foretrain.report import dump
    from foretrain.report.screen import progress
    from foretrain.report.tables import evaluation_tables, validation_table
    from foretrain.validation import validate as hold

    if json_out is not None:
        check_target(json_out)
    with progress("forecasts") as advance:
        rows, scored = hold(
            tables or (), predictor=predictor or predictors.DEFAULT, processes=processes, progress=advance
        )
    if not rows and importlib.util.find_spec("torch") is None:
        raise missing("torch", "validate")
    for source in dict.fromkeys(row.source for row in rows):
        own = [row for row in rows if row.source == source]
        say(source)
        for caveat in dict.fromkeys(caveat for row in own for caveat in row.caveats):
            say(f"  {caveat}")
        show(validation_table(own))
    document = scored.to_dict()
    short = [{**one, "runs_file": Path(one["runs_file"]).stem} for one in document["results"]]
    show(evaluation_tables(short))
    if json_out is not None:
        write_atomically(
            json_out, dump({"results": short, "rows": [dataclasses.asdict(row) for row in rows]})
        )
    tell_reasons(document)
