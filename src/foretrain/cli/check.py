"""The command that judges: ``check`` holds a job against limits, for continuous integration."""

from __future__ import annotations

from typing import Annotated

import typer

from foretrain.cli.app import JsonFlag, registry
from foretrain.cli.job_options import (
    Options,
    PredictorOption,
    Target,
    is_job_file,
    one_job,
    with_job_options,
)
from foretrain.errors import InputError


@registry.command()
@with_job_options
def check(
    *,
    target: Target = None,
    launch_files: Annotated[
        list[str] | None,
        typer.Option("--from", metavar="FILE", help="What launches the training, as in predict."),
    ] = None,
    max_time: Annotated[
        str | None, typer.Option(help="That the whole training may take, such as 24h.")
    ] = None,
    max_cost: Annotated[
        str | None, typer.Option(help="Dollars that the whole training may cost, such as 500.")
    ] = None,
    max_memory: Annotated[
        str | None,
        typer.Option(help="That the allocator may hold (reserved) on the fullest device, such as 70GiB."),
    ] = None,
    fits: Annotated[
        float | None,
        typer.Option(help="The least probability that memory is enough, from 0 to 1. [default: 0.9]"),
    ] = None,
    risk: Annotated[
        float, typer.Option(help="How likely the other limits may be missed, from 0 to 1.")
    ] = 0.1,
    base: Annotated[
        str | None,
        typer.Option(metavar="BASE.toml", help="A job file to compare with; options do not change it."),
    ] = None,
    predictor: PredictorOption = None,
    markdown: Annotated[
        bool, typer.Option("--markdown", help="A comment for a pull request.", show_default=False)
    ] = False,
    as_json: JsonFlag = False,
    options: Options,
) -> None:
    """Hold a job against limits of time, cost and memory: exit code 0 where all hold, 1 where not."""
    from foretrain import predictors
    from foretrain.cli.explain import forecast_of
    from foretrain.planner.checking import JobLimits, check_job
    from foretrain.report import dump
    from foretrain.report.check import NAMES, check_lines, check_markdown
    from foretrain.report.explain import explain
    from foretrain.units import parse_dollars, parse_memory, parse_seconds

    if base is not None and not is_job_file(base):
        raise InputError(f"{base}: not a job file (.toml or .json)")
    if markdown and as_json:
        raise typer.BadParameter("give --markdown or --json, not both")
    limits = JobLimits(
        max_time_s=None if max_time is None else parse_seconds(max_time, "max-time"),
        max_cost=None if max_cost is None else parse_dollars(max_cost, "max-cost"),
        max_memory_bytes=None if max_memory is None else parse_memory(max_memory, "max-memory"),
        fits=fits,
        risk=risk,
    )
    job = one_job(target, launch_files, options)
    chosen = predictors.get(predictor)
    checked = check_job(job, chosen, limits)
    explained = None
    if base is not None:
        own: Options = {name: options[name] for name in ("catalog", "refresh") if name in options}
        explained = explain(forecast_of(base, own, chosen), checked.forecast, names=NAMES)
    if as_json:
        against = {} if explained is None else {"against_base": explained.to_dict()}
        typer.echo(dump(checked.to_dict() | {"forecast": checked.forecast.to_dict()} | against))
    elif markdown:
        typer.echo(check_markdown(checked, explained))
    else:
        typer.echo("\n".join(check_lines(checked, explained)))
    if not checked.holds:
        raise typer.Exit(1)
