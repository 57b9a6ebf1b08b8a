"""The command that forecasts one job or many: ``predict``."""

from __future__ import annotations

import contextlib
import sys
import time
import traceback
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from foretrain.cli.app import JsonFlag, registry, say, show
from foretrain.cli.job_options import (
    PAGE_SECONDS,
    HtmlSeconds,
    Options,
    PredictorOption,
    Target,
    job_from,
    launch_from,
    overriding,
    target_and_launch_files,
    with_job_options,
)
from foretrain.cli.predict_checks import refuse_idle_options, refuse_without
from foretrain.cli.scale_out import ProcessesOption, RayOption, ScaleOut, hush_ray, one_thread
from foretrain.errors import ForetrainError, InputError
from foretrain.interrupts import exit_code

if TYPE_CHECKING:
    from foretrain.catalog import Catalog
    from foretrain.forecast import Forecast
    from foretrain.job import Job
    from foretrain.launchers import Launch
    from foretrain.planner.suggest import Suggestion
    from foretrain.predictors.base import Predictor
    from foretrain.predictors.driple.resources import Resources
    from foretrain.predictors.portable import Portable

_ALL = "all"
"""The name that stands for every predictor."""


@registry.command(cls=ScaleOut)
@with_job_options
def predict(
    *,
    target: Target = None,
    launch_files: Annotated[
        list[str] | None,
        typer.Option(
            "--from",
            metavar="FILE",
            help="What launches the training: run.sh, ds_config.json, accelerate.yaml, config.toml, "
            "config.py, ...; several together; MODEL and options complete it.",
        ),
    ] = None,
    write_job: Annotated[
        Path | None, typer.Option(help="Write the job that was forecast: job.toml or job.json.")
    ] = None,
    jobs: Annotated[Path | None, typer.Option(help="Many jobs, one JSON object a line.")] = None,
    out: Annotated[
        Path | None,
        typer.Option("--out", "-o", help="Where the forecasts of --jobs go (else to the screen)."),
    ] = None,
    processes: ProcessesOption = 1,
    ray: RayOption = None,
    predictor: PredictorOption = None,
    server: Annotated[
        str | None,
        typer.Option(metavar="URL", help="Ask a server of foretrain, such as http://127.0.0.1:8760."),
    ] = None,
    as_json: JsonFlag = False,
    breakdown: Annotated[
        Literal["layer", "operator", "phase"] | None, typer.Option(help="Where the time goes.")
    ] = None,
    depth: Annotated[
        int | None, typer.Option(min=1, help="Names that a layer is cut to in --breakdown layer.")
    ] = None,
    trace: Annotated[
        Path | None, typer.Option(help="Write the step as a Chrome trace, for Perfetto.")
    ] = None,
    html: Annotated[
        Path | None,
        typer.Option(help="Write a page that explores the forecast in a browser."),
    ] = None,
    html_seconds: HtmlSeconds = None,
    resources: Annotated[
        bool, typer.Option("--resources", help="How busy device, memory and network will be.")
    ] = False,
    compare: Annotated[
        bool,
        typer.Option(
            "--compare",
            help="What every predictor gives, and which of them knows such jobs (--predictor all).",
        ),
    ] = False,
    suggest: Annotated[
        bool, typer.Option("--suggest", help="The changes of the job that would help most.")
    ] = False,
    evidence: Annotated[
        bool, typer.Option("--evidence", help="The nearest measured runs, with predicted and measured.")
    ] = False,
    assumptions: Annotated[
        bool, typer.Option("--assumptions", help="Every assumption, not only those that matter most.")
    ] = False,
    options: Options,
) -> None:
    """Forecast time, memory and cost of a job file or a model; options override the file."""
    from foretrain import predictors
    from foretrain.files import check_target
    from foretrain.predictors.answering import answer
    from foretrain.predictors.plugins import told_in_one_line

    target, launch_files = target_and_launch_files(target, launch_files)
    if launch_files and jobs is not None:
        raise typer.BadParameter("--from is for one job, not for --jobs")
    if not launch_files and (target is None) == (jobs is None):
        raise typer.BadParameter("give a job file, a model, --from or --jobs (and only one of them)")
    compare = compare or predictor == _ALL
    of_one = trace or html or breakdown or resources or suggest or evidence
    if jobs is not None and (of_one or compare):
        raise typer.BadParameter(
            "--trace, --html, --breakdown, --resources, --suggest, --compare and --evidence are for one "
            "job, not for --jobs"
        )
    if compare and (of_one or predictor not in (None, _ALL)):
        raise typer.BadParameter(
            "--compare asks every predictor: only --json and the job's own options go with it"
        )
    if jobs is None and out is not None:
        raise typer.BadParameter(
            "--out is for --jobs; --json prints one forecast, --trace and --html write files"
        )
    if jobs is None and (ray is not None or processes > 1):
        raise typer.BadParameter("--processes and --ray are for --jobs")
    if jobs is not None and write_job is not None:
        raise typer.BadParameter("--write-job is for one job, not for --jobs")
    if server is not None and (jobs is not None or of_one or compare):
        raise typer.BadParameter(
            "--server gives one forecast: only --json and the job's own options go with it"
        )
    refuse_without("depth", depth, "--breakdown layer", there=breakdown == "layer" and not as_json)
    refuse_without("html_seconds", html_seconds, "--html", there=html is not None)
    for written in (trace, html, out, write_job):
        if written is not None:
            check_target(written)
    name = _usual(as_json) if predictor is None and server is None and not compare else predictor
    name = predictors.DEFAULT if name is None else name
    if jobs is not None:
        _predict_many(jobs, out, options, name, processes, ray)
        return
    launch = launch_from(launch_files, target, options) if launch_files else None
    job = job_from(str(target), options) if launch is None else launch.job
    if write_job is None:
        refuse_idle_options(job, options, other_plans=html is not None or suggest)
    else:
        from foretrain.job_files import write_job_file

        write_job_file(job, write_job)
        say(f"job in {write_job}")
    if launch is not None and not as_json:
        from foretrain.report.launch import launch_tables

        show(*launch_tables(launch))
    if server is not None:
        _ask_server(server, job, predictor, as_json=as_json, all_notes=assumptions)
        return
    if compare:
        _compare(job, as_json)
        return
    chosen = predictors.get(name)
    with told_in_one_line(type(chosen)):
        forecast = answer(chosen, job)
        ideas = _suggestions(forecast, chosen) if suggest else None
    use = _resources(forecast) if resources else None
    if as_json:
        _print_json(forecast, breakdown, use, evidence, launch, ideas)
    else:
        _show(forecast, breakdown, depth, use, ideas, evidence=evidence, all_notes=assumptions)
    if trace is not None:
        _write_trace(forecast, trace)
    if html is not None:
        seconds = PAGE_SECONDS if html_seconds is None else html_seconds
        _write_page(forecast, chosen, html, use, seconds, options)


def _usual(quiet: bool) -> str:
    """Name the predictor that forecasts where none is named; say so where it is something learned."""
    from foretrain.predictors import DEFAULT, usual

    name = usual.usual()
    if name != DEFAULT and not quiet:
        say(f"by {name}, the usual predictor here (--predictor {DEFAULT} passes it by)")
    return name


def _suggestions(forecast: Forecast, predictor: Predictor) -> list[Suggestion]:
    from foretrain.planner.suggest import suggestions

    return suggestions(forecast, predictor)


def _ask_server(server: str, job: Job, predictor: str | None, *, as_json: bool, all_notes: bool) -> None:
    from foretrain.client import Client
    from foretrain.report import dump
    from foretrain.report.served import served_summary

    forecast = Client(server).predict(job, predictor=predictor)
    if as_json:
        typer.echo(dump(forecast.document))
    else:
        show(*served_summary(forecast, all_notes=all_notes))


def _compare(job: Job, as_json: bool) -> None:
    from foretrain.predictors.side_by_side import side_by_side
    from foretrain.report import dump
    from foretrain.report.evidence import side_by_side_table

    compared = side_by_side(job)
    if as_json:
        typer.echo(dump(compared.to_dict()))
    else:
        show(side_by_side_table(compared))


def _resources(forecast: Forecast) -> Resources:
    from foretrain.predictors.driple.resources import resources

    return resources(forecast)


def _show(
    forecast: Forecast,
    breakdown: Literal["layer", "operator", "phase"] | None,
    depth: int | None,
    use: Resources | None,
    ideas: list[Suggestion] | None,
    *,
    evidence: bool,
    all_notes: bool,
) -> None:
    from foretrain.report.text import breakdown_table, summary

    tables = [breakdown_table(forecast, breakdown, depth=depth)] if breakdown else []
    show(summary(forecast, all_notes=all_notes), *tables)
    if use is not None:
        from foretrain.report.resources import resource_table

        show(resource_table(use))
    if ideas is not None:
        from foretrain.report.plans import suggestion_lines

        show(*suggestion_lines(ideas))
    if evidence:
        from foretrain.report.evidence import evidence_table

        show(evidence_table(forecast.evidence))


def _print_json(
    forecast: Forecast,
    breakdown: Literal["layer", "operator", "phase"] | None,
    use: Resources | None,
    evidence: bool,
    launch: Launch | None,
    ideas: list[Suggestion] | None,
) -> None:
    from foretrain.report import to_json

    extra: dict[str, Any] = {} if launch is None else {"launch": launch.to_dict()}
    if ideas is not None:
        extra["suggestions"] = [idea.to_dict() for idea in ideas]
    if use is not None:
        from foretrain.report.resources import document

        extra["resources"] = document(use)
    if evidence and forecast.evidence is not None:
        extra["evidence"] = forecast.evidence.to_dict(most=None)
    typer.echo(to_json(forecast, breakdown, extra))


def _write_trace(forecast: Forecast, path: Path) -> None:
    from foretrain.report import write_trace

    say(f"{write_trace(forecast, path):,} events in {path}")


def _write_page(
    forecast: Forecast,
    predictor: Predictor,
    path: Path,
    use: Resources | None,
    seconds: float,
    options: Options,
) -> None:
    from foretrain.catalog import Catalog
    from foretrain.predictors.plugins import told_in_one_line
    from foretrain.report.resources import panels
    from foretrain.web import forecast_table, write_page

    extra = {} if use is None else {"resources": panels(use)}
    with told_in_one_line(type(predictor)):
        catalog = Catalog.load(options.get("catalog"))
        table = forecast_table(forecast, predictor, seconds=seconds, catalog=catalog, extra=extra)
    size = write_page(forecast.job.workload.model.label, table.to_dict(path.parent), path)
    say(f"page of {table.points:,} forecasts in {path} ({size / 1e6:.1f} MB)")


# Many jobs


@dataclass(frozen=True, slots=True, kw_only=True)
class _Asked:
    """Holds what the jobs of a file have in common."""

    portable: Portable
    catalog: Catalog
    base: Path
    options: Options


def _predict_many(
    path: Path, out: Path | None, options: Options, predictor: str, processes: int, ray: str | None
) -> None:
    """Write one line out per job in, in order, each as soon as it is known; a job that fails does not stop
    the rest."""
    hush_ray()
    one_thread()
    from foretrain.catalog import Catalog
    from foretrain.fanout import fan_out
    from foretrain.fanout.cluster import connected
    from foretrain.files import text_lines
    from foretrain.predictors.portable import Portable
    from foretrain.report.lines import JsonLines
    from foretrain.report.screen import progress

    if out is not None and out.exists() and out.samefile(path):
        raise InputError(f"--out: {str(out)!r} is the file of jobs itself")
    lines = list(text_lines(path))
    if not lines:
        raise InputError(f"{path}: empty; a file of jobs has one job per line")
    asked = _Asked(
        portable=Portable.of(predictor),
        catalog=Catalog.load(options.get("catalog")),
        base=path.parent,
        options=options,
    )
    start = time.monotonic()
    where = "" if out is None else f", in {out}"
    failed = 0
    with contextlib.nullcontext() if ray is None else connected(ray), JsonLines(out) as results:
        try:
            with progress("jobs") as advance:
                texts = [line for _, line in lines]
                answers = fan_out(
                    _answer, texts, shared=asked, processes=processes, ray=ray, progress=advance, lost=_lost
                )
                for (number, _), (answer, bug) in zip(lines, answers, strict=True):
                    sys.stderr.write(bug)
                    failed += "error" in answer
                    results.write({"line": number, **answer})
        except KeyboardInterrupt:
            say(f"interrupted: {results.count:,} of {len(lines):,} jobs done{where}")
            raise typer.Exit(exit_code()) from None
    say(f"{len(lines):,} jobs, {failed:,} failed, {time.monotonic() - start:.1f} s{where}")
    if failed:
        raise typer.Exit(1)


def _answer(asked: _Asked, line: str) -> tuple[dict[str, Any], str]:
    """The forecast of one job, or why there is none; a bug comes with its traceback and does not cost the
    other jobs."""
    from foretrain.job import parse_job
    from foretrain.predictors.evidence import with_evidence

    predictor = asked.portable.predictor
    try:
        job = parse_job(line, catalog=asked.catalog, base=asked.base, edit=overriding(asked.options))
        return {"forecast": with_evidence(predictor.predict(job), predictor).to_dict()}, ""
    except ForetrainError as error:
        return {"error": str(error)}, ""
    except Exception as error:
        return {"error": f"internal error: {type(error).__name__}: {error}"}, traceback.format_exc()


def _lost(why: str) -> tuple[dict[str, Any], str]:
    """The answer to a job that took its worker down with it."""
    return {"error": why}, ""
