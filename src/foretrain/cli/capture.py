"""The command that writes the operator graph of a step: ``capture``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from foretrain.cli.app import registry, say, show
from foretrain.cli.job_options import TARGET, Options, job_from, with_job_options
from foretrain.errors import invalid


@registry.command()
@with_job_options
def capture(
    *,
    target: Annotated[str, TARGET],
    out: Annotated[
        Path,
        typer.Option("--out", "-o", help="Where the graph goes, such as graph.json.zst.", show_default=False),
    ],
    options: Options,
) -> None:
    """Write the operator graph of one step, for machines without torch."""
    from foretrain.capture import capture_job
    from foretrain.files import check_target
    from foretrain.report.tables import graph_table

    if out.suffix != ".zst":
        raise invalid("--out", str(out), "a name that ends in .zst, by which predict knows a graph")
    check_target(out)
    graph = capture_job(job_from(target, options))
    graph.save(out)
    show(graph_table(graph))
    say(f"{out.stat().st_size:,} bytes in {out}")
