"""The command that scores predictors on measured runs: ``evaluate``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from foretrain.cli import completion
from foretrain.cli.app import registry, say, show
from foretrain.cli.job_options import PREDICTOR_HELP, CatalogOption
from foretrain.cli.scale_out import ProcessesOption, RayOption, ScaleOut, hush_ray, one_thread

_MOST_SHOWN = 5
"""Reasons of each kind are entry up to this number."""


@registry.command(cls=ScaleOut)
def evaluate(
    runs: Annotated[list[Path], typer.Argument(metavar="RUNS.jsonl", help="Files of measured runs.")],
    predictor: Annotated[
        list[str] | None,
        typer.Option(
            help=f"{PREDICTOR_HELP}; may be given several times.", autocompletion=completion.predictor_names
        ),
    ] = None,
    split: Annotated[
        str | None,
        typer.Option(
            help="random, leave-model-out, leave-device-out, interpolate "
            "or extrapolate (or interpolate:workers, extrapolate:samples, ...): learn on the other runs.",
            autocompletion=completion.splits,
        ),
    ] = None,
    train_runs: Annotated[
        int | None, typer.Option(min=1, help="With --split: learn from at most so many runs of each model.")
    ] = None,
    most: Annotated[
        int | None,
        typer.Option(min=1, help="Of each file at most so many runs, evenly from the first to the last."),
    ] = None,
    host: Annotated[
        str | None,
        typer.Option(
            help="The host that runs on GPUs were measured on: a file of measure host, or a name.",
            autocompletion=completion.hosts,
        ),
    ] = None,
    processes: ProcessesOption = 1,
    ray: RayOption = None,
    catalog: CatalogOption = None,
    json_out: Annotated[
        Path | None, typer.Option("--json", metavar="OUT", help="Write figures and runs as JSON.")
    ] = None,
) -> None:
    """Errors of predictors on measured runs."""
    if train_runs is not None and split is None:
        raise typer.BadParameter("--train-runs is for --split, which says what is learned from")
    hush_ray()
    one_thread()
    from foretrain import predictors
    from foretrain.evaluate import evaluate as score
    from foretrain.files import check_target
    from foretrain.report.screen import progress, width
    from foretrain.report.tables import evaluation_tables

    if json_out is not None:
        check_target(json_out)
    with progress("fits") as learning, progress("forecasts") as advance:
        document = score(
            runs,
            predictors=predictor or [predictors.DEFAULT],
            split=split,
            train_runs=train_runs,
            most=most,
            host=host,
            processes=processes,
            ray=ray,
            progress=advance,
            learning=learning,
        ).to_dict()
    if json_out is not None:
        from foretrain.files import write_atomically
        from foretrain.report import dump

        write_atomically(json_out, dump(document))
        say(f"{len(document['results']):,} results, {len(document['runs']):,} comparisons in {json_out}")
    show(evaluation_tables([*document["results"], *document["by_bound"]], wide=width() >= _WIDE))
    tell_reasons(document)
    for name in dict.fromkeys(row["predictor"] for row in document["reasons"] if split is None):
        if _UNLEARNED in "".join(row["reason"] for row in document["reasons"] if row["predictor"] == name):
            say(f"{name} learns from runs alone: --split random has it learn from the others of each file")


_UNLEARNED = "has learned from no runs yet"
"""What predictors say that come with nothing learned."""
_WIDE = 120
"""Characters of a line that hold all figures; ``--json`` has them anyway."""


def tell_reasons(document: Mapping[str, Any]) -> None:
    """Why runs have no forecast; where none has and some failed, that is the end of the command."""
    for kind in ("failed", "unsupported"):
        _tell(kind, [reason for reason in document["reasons"] if reason["kind"] == kind])
    if document["failures"] and not document["runs"]:
        raise typer.Exit(1)


def _tell(kind: str, reasons: Sequence[Mapping[str, Any]]) -> None:
    """Print each reason with its first run, and how many more there are like it."""
    for entry in reasons[:_MOST_SHOWN]:
        reason = " ".join(entry["reason"].splitlines())
        whose = f"{entry['predictor']}: " if entry["predictor"] else ""
        whose = "" if reason.startswith(whose) else whose  # most name themselves
        more = f" ({entry['count'] - 1:,} more like it)" if entry["count"] > 1 else ""
        say(f"{kind}: {entry['runs_file']}:{entry['line']}: {whose}{reason}{more}")
    if len(reasons) > _MOST_SHOWN:
        left = sum(reason["count"] for reason in reasons[_MOST_SHOWN:])
        others = len(reasons) - _MOST_SHOWN
        say(f"{kind}: {left:,} more for {others:,} other reasons; --json OUT lists them all")
