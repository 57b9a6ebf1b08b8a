"""The command that scores predictors on measured runs: ``evaluate``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from foretrain.cli.app import app, say, show
from foretrain.cli.job_options import PREDICTOR_HELP


@app.command()
def evaluate(
    runs: Annotated[list[Path], typer.Argument(metavar="RUNS.jsonl...", help="Files of measured runs.")],
    predictor: Annotated[
        list[str] | None,
        typer.Option(help=f"{PREDICTOR_HELP}; may be given several times."),
    ] = None,
    split: Annotated[
        str | None,
        typer.Option(
            help="random, leave-model-out, leave-device-out, interpolate or extrapolate (or interpolate:workers, extrapolate:samples, ...): learn on the other runs."
        ),
    ] = None,
    train_runs: Annotated[
        int | None, typer.Option(min=1, help="With --split: learn from at most so many runs of each model.")
    ] = None,
    json_out: Annotated[
        Path | None, typer.Option("--json", metavar="OUT", help="Write figures and runs as JSON.")
    ] = None,
) -> None:
    """Errors of predictors on measured runs."""
    from foretrain import predictors
    from foretrain.evaluate import evaluate as score
    from foretrain.report.screen import progress
    from foretrain.report.tables import evaluation_table

    with progress("forecasts") as advance:
        document = score(
            runs,
            predictors=predictor or [predictors.DEFAULT],
            split=split,
            train_runs=train_runs,
            progress=advance,
        ).to_dict()
    if json_out is not None:
        from foretrain.files import write_atomically
        from foretrain.report import dump

        write_atomically(json_out, dump(document))
        say(f"{len(document['results']):,} results, {len(document['runs']):,} comparisons in {json_out}")
    show(evaluation_table(document["results"]))
