"""The command that books machines: ``advise`` turns runs and a deadline into the cheapest configuration that
meets it."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from foretrain.cli.app import JsonFlag, registry, say, show
from foretrain.cli.job_options import PREDICTOR_HELP, CatalogOption
from foretrain.cli.lists import whole_numbers, words
from foretrain.errors import InputError, invalid

if TYPE_CHECKING:
    from foretrain.advice import Advice
    from foretrain.job import Job
    from foretrain.predictors.base import Predictor
    from foretrain.run import Run


@registry.command()
def advise(
    runs: Annotated[
        list[Path],
        typer.Argument(metavar="RUNS.jsonl", help="Measured runs of the training.", show_default=False),
    ],
    *,
    deadline: Annotated[str, typer.Option(help="By when it must end, such as 6h.", show_default=False)],
    risk: Annotated[float, typer.Option(help="How likely it may end later, from 0 to 1.")] = 0.1,
    model: Annotated[str | None, typer.Option(help="Which model, where the runs are of several.")] = None,
    samples: Annotated[str | None, typer.Option(help="Samples per epoch, as 50000 or 50000,100000.")] = None,
    epochs: Annotated[float | None, typer.Option(help="Epochs of the whole training.")] = None,
    workers: Annotated[
        str | None,
        typer.Option(
            help="Workers to choose from, as 1,2,4. [default: those of the runs, and twice the most]"
        ),
    ] = None,
    cores: Annotated[
        str | None, typer.Option(help="Cores per worker to choose from, for CPU workers.")
    ] = None,
    instances: Annotated[
        str | None,
        typer.Option(help="Machines to choose from, as g4dn.xlarge,g4dn.12xlarge (foretrain catalog nodes)."),
    ] = None,
    batch: Annotated[
        int | None,
        typer.Option(min=1, help="Samples per step over all workers. [default: each worker's stays]"),
    ] = None,
    predictor: Annotated[
        str,
        typer.Option(help=f"{PREDICTOR_HELP}; a new one learns from the runs."),
    ] = "ray_models",
    top: Annotated[int, typer.Option(min=1, help="Configurations to show.")] = 10,
    search: Annotated[
        bool, typer.Option("--search", help="What to measure next, until no run promises much less.")
    ] = False,
    measured: Annotated[
        bool,
        typer.Option("--measure", help="With --search: measure it here, add it to the first file, go on."),
    ] = False,
    improvement: Annotated[
        float, typer.Option(help="With --search: the share of the best cost that a run must promise.")
    ] = 0.1,
    following: Annotated[
        Path | None,
        typer.Option("--next", metavar="FILE", help="With --search: write the job to measure next."),
    ] = None,
    job: Annotated[
        Path | None,
        typer.Option(help="With --search: the job to start from, while there are no runs of its training."),
    ] = None,
    catalog: CatalogOption = None,
    as_json: JsonFlag = False,
) -> None:
    """The cheapest configuration (data, workers, machines) that meets a deadline, with the probability of
    missing it."""
    from foretrain import advice
    from foretrain.catalog import Catalog
    from foretrain.cli.searching import Searching, runs_of
    from foretrain.job import Job
    from foretrain.report.screen import progress
    from foretrain.run import runs_of_file
    from foretrain.units import parse_seconds

    limit_s, known = parse_seconds(deadline, "deadline"), Catalog.load(catalog)
    advice.check_wanted(limit_s, risk)
    if epochs is not None and not 0 < epochs < math.inf:
        raise invalid("epochs", epochs, "a number greater than zero")
    if not search and (measured or following or job):
        raise typer.BadParameter("--measure, --next and --job are for --search")
    if following is not None and following.suffix != ".jsonl":
        raise invalid("--next", str(following), "a .jsonl file, which foretrain measure campaign takes")
    known_runs = runs_of(runs) if search else [run for path in runs for run in runs_of_file(path)]
    if job is None:
        base = advice.template(known_runs, model)
    else:
        base, known_runs = _start(Job.load(job, catalog=known).seen_from(runs[0].parent), known_runs, model)
    wishes = advice.Wishes(
        samples=_counts("samples", samples), epochs=epochs, workers=_counts("workers", workers),
        cores=_counts("cores", cores),
        instances=words("instances", instances), batch=batch,
    )  # fmt: skip
    jobs, refused = advice.candidates(base, known_runs, wishes, known)
    if search:
        searching = Searching(
            files=runs, deadline_s=limit_s, improvement=improvement,
            data=advice.data_taken(base, known_runs, wishes),
        )  # fmt: skip
        searching.run(jobs, measured=measured, following=following, as_json=as_json)
        return
    forecaster = _learned(
        predictor, [run for run in known_runs if run.job.workload.model == base.workload.model]
    )
    with progress("configurations") as advance:
        advised = advice.advise(
            forecaster, jobs, limit_s, risk=risk, refused=refused, progress=advance,
            data=advice.data_taken(base, known_runs, wishes),
        )  # fmt: skip
    if as_json:
        from foretrain.report import dump

        typer.echo(dump(advice.to_dict(advised)))
    else:
        _show(advised, top)
    if advised.best is None:
        raise typer.Exit(1)


def _start(job: Job, runs: list[Run], model: str | None) -> tuple[Job, list[Run]]:
    """The job that a search scales, and the runs of its training: as most of them have it, or as it is while
    there are none."""
    from foretrain import advice
    from foretrain.predictors.seen import workload_key
    from foretrain.run import Run

    label = job.workload.model.label
    if model not in (None, label):
        raise invalid("--model", str(model), f"the model of --job, {label}")
    alike = [run for run in runs if workload_key(run.job) == workload_key(job)]
    return (advice.template(alike), alike) if alike else (job, [Run(job=job, measured={})])


def _show(advised: Advice, top: int) -> None:
    from foretrain.advice import notes
    from foretrain.report.tables import advice_table

    say(f"data: {advised.data}")
    for configuration, why in list(advised.refused.items())[:5]:
        say(f"not forecast: {configuration}: {why}")
    if len(advised.refused) > 5:
        say(f"not forecast: {len(advised.refused) - 5} more")
    if advised.options:
        show(advice_table(advised, top))
        for line in notes(advised.options[:top]):
            say(line)
    if advised.best is None:
        say("no configuration meets the deadline with that risk")


def _learned(name: str, runs: list[Run]) -> Predictor:
    from foretrain import predictors
    from foretrain.report.screen import progress

    chosen = predictors.get(name)
    if predictors.folder_of(name) is not None or not chosen.learns:
        return chosen
    with progress("learning") as chosen.progress:
        learned = chosen.fit(runs)
    for line in learned.left_out_[:3]:
        say(f"left out: {line}")
    return learned


def _counts(name: str, text: str | None) -> tuple[int, ...]:
    values = whole_numbers(name, text)
    if any(value < 1 for value in values):
        raise InputError(f"{name}: {text!r} has a number below 1")
    return values
