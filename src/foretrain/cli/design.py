"""The command that says what to measure next, within a budget: ``design``."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from foretrain.cli.app import JsonFlag, registry, say, say_left_out, show
from foretrain.cli.job_options import PREDICTOR_HELP, CatalogOption
from foretrain.errors import ForetrainError, InputError, invalid

if TYPE_CHECKING:
    from rich.console import RenderableType

    from foretrain.job import Job
    from foretrain.measure.campaign import Cell
    from foretrain.measure.candidates import Array, Candidates
    from foretrain.measure.design import Design, Gain
    from foretrain.measure.tables import CandidateTable, Rows
    from foretrain.predictors.base import Predictor


@dataclass(frozen=True, slots=True, kw_only=True)
class _Choices:
    """Holds what can be chosen from, and what is written of each that is."""

    candidates: Candidates
    rows: Rows
    known: Array | None = None
    """Features of what was measured before."""
    priced: bool = True


@registry.command()
def design(
    file: Annotated[
        str | None,
        typer.Argument(
            metavar="FILE",
            help="Candidates: a table (.csv, .jsonl, .parquet), operators, jobs or runs (.jsonl), or a "
            "campaign (.toml); with --cluster the job to scale, as a file or a model's name.",
            show_default=False,
        ),
    ] = None,
    *,
    cluster: Annotated[
        str | None,
        typer.Option(help="Numbers of workers, such as 1,2,4,8: choose among sizes of the job's cluster."),
    ] = None,
    scale: Annotated[
        str,
        typer.Option(help="Shares of the data, with --cluster: of the job's samples, or else of its batch."),
    ] = "0.125,0.25,0.5,1",
    whole_time: Annotated[
        str, typer.Option(help="Time of a run on all data and one machine, with --cluster and no job.")
    ] = "1h",
    predictor: Annotated[
        str | None,
        typer.Option(help=f"{PREDICTOR_HELP}: choose what it learns most from, among jobs and campaigns."),
    ] = None,
    measured: Annotated[
        list[Path] | None,
        typer.Option(help="What was measured before, and is not chosen again: runs, or measured operators."),
    ] = None,
    budget: Annotated[
        str | None, typer.Option(help="Time for all measurements together, such as 2h.")
    ] = None,
    count: Annotated[int | None, typer.Option(help="Number of measurements, instead of a budget.")] = None,
    method: Annotated[
        Literal["d-optimal", "half-d-optimal", "a-optimal", "random", "cheap-random", "grid"],
        typer.Option(help="How to choose.", show_default=True),
    ] = "d-optimal",
    features: Annotated[
        str | None, typer.Option(help="Columns to model, by name (else every column of numbers).")
    ] = None,
    cost_column: Annotated[
        str, typer.Option(help="Column with the seconds that a measurement takes.")
    ] = "cost_s",
    log: Annotated[bool, typer.Option("--log", help="Take logarithms of the features.")] = False,
    quadratic: Annotated[
        bool, typer.Option("--quadratic", help="Model squares and products of the features too.")
    ] = False,
    operators: Annotated[
        bool, typer.Option("--operators", help="The rows are operators: name, inputs, flops, bytes.")
    ] = False,
    seed: Annotated[int, typer.Option(help="For random choices and ties.")] = 0,
    out: Annotated[
        Path | None,
        typer.Option(
            "--out",
            "-o",
            help="Write what is chosen, in the order to measure it, for foretrain measure.",
        ),
    ] = None,
    catalog: CatalogOption = None,
    as_json: JsonFlag = False,
) -> None:
    """Choose what to measure next: the candidates that tell most for their cost."""
    from foretrain.files import check_target
    from foretrain.measure import design as choose
    from foretrain.units import parse_seconds

    if file is None and cluster is None:
        raise typer.BadParameter("give a file of candidates or --cluster")
    if (budget is None) == (count is None):
        raise typer.BadParameter("give --budget or --count (and only one of them)")
    budget_s = None if budget is None else parse_seconds(budget, "budget")
    if out is not None:
        check_target(out)
    before = measured or []
    if cluster is not None or _holds_jobs(str(file)):
        if features is not None or log or operators:
            raise typer.BadParameter("--features, --log and --operators are for tables, not for jobs")
        if file is None:
            choices = _sizes(cluster, scale, parse_seconds(whole_time, "whole-time"), predictor, before, out)
        else:
            home = Path() if out is None else out.parent
            choices = _jobs(file, cluster, scale, predictor, before, quadratic, home, method)
    else:
        choices = _rows(
            Path(str(file)), budget is not None, predictor, before, operators, features, cost_column, log,
            quadratic,
        )  # fmt: skip
    if budget is not None and not choices.priced:
        raise InputError("--budget: no forecast says how long the jobs take; use --count")
    limits: dict[str, Any] = {"budget_s": budget_s, "count": count, "known": choices.known}
    chosen = choose.design(method, choices.candidates, **limits, seed=seed)
    gain = choose.gain(chosen, choices.candidates, **limits)
    chosen_rows = [choices.rows[place] for place in chosen.chosen]
    if out is not None:
        _write(out, chosen_rows)
    if as_json:
        from foretrain.report import dump

        typer.echo(dump(_document(chosen, choices, gain, chosen_rows)))
    else:
        show(*_report(chosen, choices, gain))


# Candidates: jobs


def _holds_jobs(file: str) -> bool:
    """Whether a file is a campaign, or has jobs or runs on its lines."""
    from foretrain.measure.kinds import first_kind

    return file.endswith(".toml") or (
        file.endswith((".jsonl", ".jsonl.zst")) and first_kind(Path(file)) in ("jobs", "runs")
    )


def _jobs(
    file: str,
    cluster: str | None,
    scale: str,
    name: str | None,
    before: Sequence[Path],
    quadratic: bool,
    home: Path,
    method: str,
) -> _Choices:
    from foretrain import predictors
    from foretrain.measure.job_candidates import job_candidates, line_of
    from foretrain.measure.kinds import expect
    from foretrain.report.screen import progress
    from foretrain.run import read_runs

    predictor = predictors.get(name or predictors.DEFAULT)
    if not predictor.learns:
        raise InputError(f"--predictor: {predictor.name} has nothing to learn")
    for path in before:
        expect(path, "runs", command="design --measured, for jobs,")
    runs = [run for path in before for _, run in read_runs(path)]
    cells, labels, row = (_listed(file), None, None) if cluster is None else _scaled(file, cluster, scale)
    with progress("candidates") as advance:
        proposed = job_candidates(
            cells, predictor, measured=[run.job for run in runs], row=row if name is None else None,
            step_s=_Expected(predictor), labels=labels, quadratic=quadratic, progress=advance,
        )  # fmt: skip
    say_left_out(proposed.left_out, 3)
    priced = proposed.unpriced is None
    if not priced:
        say(f"how long the measurements take is not known ({proposed.unpriced})")
    about = {"method": method, "predictor": predictor.name}
    lines = [
        line_of(cell, home, **about, **({"expected_s": round(float(cost), 1)} if priced else {}))
        for cell, cost in zip(proposed.cells, proposed.candidates.cost_s, strict=True)
    ]
    return _Choices(candidates=proposed.candidates, rows=lines, known=proposed.known, priced=priced)


def _listed(file: str) -> list[Cell]:
    """The cells of a campaign's grid, or of a file of jobs."""
    from foretrain.api import make_job
    from foretrain.measure.campaign import cells, read_campaign, read_cells

    path = Path(file)
    if path.suffix == ".toml":
        return cells(read_campaign(path, {}), make_job, base=path.parent)
    return read_cells(path, home=Path())


def _scaled(
    file: str, cluster: str, scale: str
) -> tuple[list[Cell], Rows, Callable[[Job], Mapping[str, float]]]:
    """A job on every number of workers with every share of its data, and Ernest's terms of such a job."""
    from foretrain.cli.job_options import job_from
    from foretrain.measure.candidates import ernest_row
    from foretrain.measure.job_candidates import cells_of_jobs, scaled
    from foretrain.measure.tables import READERS

    if Path(file).suffix in READERS:
        raise InputError(f"{file}: with --cluster the file is the job to scale (.toml, or a model's name)")
    job = job_from(file, {})
    points = [(count, share) for count in _counts(cluster) for share in _numbers("scale", scale)]
    if wrong := [share for _, share in points if not 0 < share <= 1]:
        raise invalid("--scale", f"{wrong[0]:g}", "above 0 and at most 1")
    whole = job.workload.training

    def row(candidate: Job) -> Mapping[str, float]:
        training = candidate.workload.training
        share = training.global_batch / whole.global_batch
        if whole.samples is not None and training.samples is not None:
            share = training.samples / whole.samples
        return ernest_row(candidate.cluster.world_size, share)

    wanted = cells_of_jobs([scaled(job, count, share) for count, share in points])
    name = job.workload.model.label
    sizes = [cell.job.workload.training for cell in wanted]
    labels = [
        {"model": name, "workers": count, "scale": share, "batch": one.global_batch, "samples": one.samples}
        for (count, share), one in zip(points, sizes, strict=True)
    ]
    return wanted, [{key: value for key, value in one.items() if value is not None} for one in labels], row


class _Expected:
    """The time of a step by the predictor, where it knows the job, else by the usual one."""

    def __init__(self, predictor: Predictor) -> None:
        from foretrain import predictors

        self._usual = functools.cache(lambda: predictors.get(predictors.DEFAULT))
        self._predictor = predictor

    def __call__(self, job: Job) -> float:
        with contextlib.suppress(ForetrainError):
            if (step := self._predictor.predict(job).quantities.get("step_time_s")) is not None:
                return step.median
        return self._usual().predict(job)["step_time_s"].median


def _sizes(
    cluster: str | None, scale: str, whole_s: float, predictor: str | None, before: Sequence[Path],
    out: Path | None,
) -> _Choices:  # fmt: skip
    """Cluster sizes of no job in particular: to look at, not to measure."""
    from foretrain.measure.candidates import cluster_candidates, ernest_cost

    for option, given in (("--predictor", predictor), ("--measured", before), ("--out", out)):
        if given:
            raise InputError(f"{option}: needs the job to scale: design JOB.toml --cluster {cluster}")
    candidates = cluster_candidates(
        _counts(str(cluster)),
        _numbers("scale", scale),
        lambda count, share: ernest_cost(count, share, whole_s=whole_s),
    )
    return _Choices(candidates=candidates, rows=[dict(label) for label in candidates.labels])


def _counts(text: str) -> list[int]:
    counts = _numbers("cluster", text)
    if not all(value.is_integer() and value >= 1 for value in counts):
        raise invalid("--cluster", text, "a list of whole numbers of machines")
    return list(map(int, counts))


# Candidates: rows of tables


def _rows(
    path: Path, budgeted: bool, predictor: str | None, before: Sequence[Path], operators: bool,
    features: str | None, cost_column: str, log: bool, quadratic: bool,
) -> _Choices:  # fmt: skip
    from foretrain.measure.tables import CandidateTable, replay_s

    table = CandidateTable.read(path)
    priced = table.has(cost_column)
    if operators:
        costs = table.column(cost_column) if priced else list(map(replay_s, table.rows))
        return _operator_choices(table, costs, predictor, before, quadratic)
    costs = table.costs(cost_column, needed=budgeted)
    for option, given in (("--predictor", predictor), ("--measured", before)):
        if given:
            raise InputError(f"{option}: is for jobs, campaigns and --operators, not for the table {path}")
    candidates = table.candidates(
        costs, cost_column=cost_column, features=features, log=log, quadratic=quadratic
    )
    return _Choices(candidates=candidates, rows=table.rows, priced=priced)


def _operator_choices(
    table: CandidateTable, costs: Sequence[float], name: str | None, before: Sequence[Path], quadratic: bool
) -> _Choices:
    """The operators that were not measured before; they are written as ``measure ops`` reads them."""
    from foretrain import predictors
    from foretrain.measure.instances import NEEDED
    from foretrain.measure.kinds import expect
    from foretrain.measure.tables import CandidateTable, operator_key, operator_of, operators
    from foretrain.predictors.base import OperatorPredictor

    if name is not None and not issubclass(predictors.class_of(name), OperatorPredictor):
        raise InputError(f"--predictor: {name} learns from runs, not from operators")
    for file in before:
        if file.suffix != ".parquet":
            expect(file, "measured operators", command="design --measured, for operators,")
    old = [row for file in before for row in map(operator_of, CandidateTable.read(file).rows)]
    seen = {operator_key(row) for row in old}
    own = zip(map(operator_of, table.rows), costs, strict=True)
    new = [(row, cost) for row, cost in own if operator_key(row) not in seen]
    if not new:
        raise InputError(f"{table.path}: all of its operators were measured before")
    lines = [row for row, _ in new]
    every_cost = [*(cost for _, cost in new), *[1.0] * len(old)]
    every = operators(table.path, [*lines, *old], every_cost, quadratic=quadratic)
    if lacking := [field for field in NEEDED if any(field not in row for row in lines)]:
        lacks = f"{table.path}: the operators lack {', '.join(lacking)}"
        say(f"{lacks}, so foretrain measure ops cannot replay them")
    return _Choices(
        candidates=every.take(range(len(lines))),
        rows=[{**row, "source": "foretrain design"} for row in lines],
        known=every.features[len(lines) :] if old else None,
    )


def _numbers(field: str, text: str) -> list[float]:
    try:
        numbers = [float(part) for part in text.split(",")]
    except ValueError:
        numbers = [math.nan]
    if not all(map(math.isfinite, numbers)):
        raise invalid(f"--{field}", text, "a list of numbers such as 1,2,4")
    return numbers


def _write(path: Path, rows: Rows) -> None:
    from foretrain.files import write_atomically
    from foretrain.report import dump

    write_atomically(path, "".join(dump(row, indent=None) + "\n" for row in rows))
    say(f"{len(rows):,} rows in {path}")


# Results


def _document(chosen: Design, choices: _Choices, gain: Gain, rows: Rows) -> dict[str, Any]:
    return {
        "method": chosen.method,
        "candidates": len(choices.candidates.cost_s),
        "features": list(choices.candidates.names),
        "count": len(chosen.chosen),
        "cost_s": chosen.cost_s if choices.priced else None,
        "log_det": chosen.log_det,
        "trace_inverse": chosen.trace_inverse,
        "determined": chosen.determined,
        "gain": dataclasses.asdict(gain),
        "chosen": [int(row) for row in chosen.chosen],
        "rows": rows,
    }


def _report(chosen: Design, choices: _Choices, gain: Gain, first: int = 10) -> list[RenderableType]:
    from foretrain.report.tables import table
    from foretrain.units import format_seconds

    candidates, priced = choices.candidates, choices.priced
    rows = [candidates.labels[place] for place in chosen.chosen]
    costs = [format_seconds(cost) for cost in candidates.cost_s[chosen.chosen]]
    names = list(dict.fromkeys(name for row in rows for name in row if name != "cost_s"))[:8]
    headings = [*names, *(["takes"] if priced else [])]
    cells = [
        [*(_cell(row.get(name, "")) for name in names), *([cost] if priced else [])]
        for row, cost in zip(rows[:first], costs, strict=False)
    ]
    more = [f"... and {len(rows) - first:,} more (--out writes them all)"] if len(rows) > first else []
    cost = f", {format_seconds(chosen.cost_s)} in all" if priced else ""
    known = f"{chosen.determined} of " if chosen.determined < len(candidates.names) else ""
    return [
        table(headings, cells, right=headings),
        *more,
        f"chosen    {len(rows):,} of {len(candidates.cost_s):,} "
        f"candidates{cost} ({chosen.method}, determines {known}{len(candidates.names)} coefficients)",
        *_gain(chosen, gain),
    ]


def _gain(chosen: Design, gain: Gain) -> list[str]:
    """Ratios mean something only where both designs determine the whole model."""
    if gain.random_determined < chosen.determined:
        return [
            f"gain      {chosen.determined} coefficients determined, "
            f"by a random choice of the same budget {gain.random_determined:.3g} "
            f"({gain.seeds} seeds)"
        ]
    return [
        f"gain      {gain.d_efficiency:.3g}x the information "
        f"of a random choice of the same budget (D-efficiency; {gain.seeds} seeds)",
        f"          {gain.a_efficiency:.3g}x lower variance of the coefficients (A-efficiency)",
    ]


def _cell(value: Any) -> str:
    text = f"{value:g}" if isinstance(value, float) else str(value)
    return text if len(text) <= 32 else text[:31] + "…"
