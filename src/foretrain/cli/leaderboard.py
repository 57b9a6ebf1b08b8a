"""The command that scores every predictor on every file of runs: ``leaderboard``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from foretrain.cli import completion
from foretrain.cli.app import registry, say, show
from foretrain.cli.job_options import PREDICTOR_HELP
from foretrain.cli.scale_out import ProcessesOption, hush_ray, one_thread


@registry.command()
def leaderboard(
    runs: Annotated[list[Path], typer.Argument(metavar="RUNS.jsonl", help="Files of measured runs.")],
    predictor: Annotated[
        list[str] | None,
        typer.Option(
            help=f"{PREDICTOR_HELP}; may be given several times. All, where none is given.",
            autocompletion=completion.predictor_names,
        ),
    ] = None,
    most: Annotated[
        int | None,
        typer.Option(min=1, help="Of each file at most so many runs, evenly from the first to the last."),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            "--out", "-o", metavar="DIR", help="Write board.md, .html, .json and pictures into this folder."
        ),
    ] = None,
    work: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            help="Keep what is scored in this folder, so that a board that was stopped goes on.",
        ),
    ] = None,
    processes: ProcessesOption = 1,
) -> None:
    """Every predictor on every file of runs, with every split that applies."""
    hush_ray()
    one_thread()
    from foretrain.files import check_target
    from foretrain.leaderboard import BoardTask, board
    from foretrain.report.tables import evaluation_tables

    if out is not None:
        check_target(out, folder=True)
    if work is not None:
        check_target(work, folder=True)

    def starting(task: BoardTask, done: int, total: int) -> None:
        say(f"{done + 1} of {total}: {task}")

    scored = board(runs, names=predictor or (), most=most, work=work, processes=processes, starting=starting)
    for line in scored.missing:
        say(f"not scored: {line}")
    if out is not None:
        from foretrain.files import write_atomically
        from foretrain.report import dump
        from foretrain.report.board import markdown
        from foretrain.web.board import write_board

        out.mkdir(parents=True, exist_ok=True)
        write_atomically(out / "board.md", markdown(scored))
        write_atomically(out / "board.json", dump(scored.to_dict()))
        write_board(scored, out)
        say(f"{len(scored.results):,} scores of {len(scored.points):,} forecasts in {out}")
    if not scored.results:
        say("nothing could be scored")
        raise typer.Exit(1)
    rows = [one for one in scored.to_dict()["results"] if one["quantity"] == "step_time_s"]
    show(evaluation_tables(rows))
    for file in dict.fromkeys(row["runs_file"] for row in rows if row["failed"]):
        say(f"some runs went wrong; foretrain evaluate {file} says why")
