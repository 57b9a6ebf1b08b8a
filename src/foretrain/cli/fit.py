"""The command that learns: ``fit`` a predictor to runs or operator datasets and keep it in a folder."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from foretrain.cli.app import app, say, show
from foretrain.cli.scale_out import ProcessesOption, RayOption, ScaleOut, hush_ray
from foretrain.errors import InputError, first_line

if TYPE_CHECKING:
    from foretrain.costs.measured import MeasuredOperator
    from foretrain.job import Run
    from foretrain.predictors.base import Predictor

_TOLD = 5
"""Runs that are left out are named up to this number."""


@app.command(cls=ScaleOut)
def fit(
    name: Annotated[
        str,
        typer.Argument(
            metavar="NAME", help="The predictor, such as deletepop or file.py:Class.", show_default=False
        ),
    ],
    files: Annotated[
        list[Path],
        typer.Argument(
            metavar="FILES...",
            help="Runs (.jsonl, .jsonl.zst) or operator datasets (.parquet).",
            show_default=False,
        ),
    ],
    *,
    out: Annotated[
        Path,
        typer.Option(
            "--out", "-o", metavar="DIR", help="The folder that --predictor then takes.", show_default=False
        ),
    ],
    device: Annotated[
        str | None, typer.Option(help="The device of operator datasets that do not say it.")
    ] = None,
    published: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Public operator sets to learn from as well.")
    ] = None,
    start: Annotated[
        Path | None, typer.Option("--from", metavar="DIR", help="An earlier fit to start from.")
    ] = None,
    trials: Annotated[int, typer.Option(min=0, help="ray_models: recipes to try beyond the usual ones.")] = 0,
    budget: Annotated[
        str | None, typer.Option(help="ray_models: how long to try them, such as 2min.")
    ] = None,
    study: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="ray_models: where the search is kept, to go on from after an interruption."
        ),
    ] = None,
    processes: ProcessesOption = 1,
    ray: RayOption = None,
) -> None:
    """Calibrate a predictor to measured runs, or learn its operator models from an operator dataset."""
    from foretrain import predictors

    datasets, runs = _sort(files)
    if (device or published) and not datasets:
        raise InputError(
            f"{'--device' if device else '--published'}: is for operator datasets (.parquet), and none is given"
        )
    predictor = predictors.get(name)
    if start is not None:
        predictor = type(predictor).load(start)
    if not predictor.learns:
        raise InputError(f"{predictor.name}: has nothing to learn")
    if trials or budget or study or processes > 1 or ray is not None:
        _give_budget(predictor, trials, budget, study, processes, ray)
    if datasets:
        _relearn(predictor, datasets, runs, device, published)
    else:
        _calibrate(predictor, runs)
    predictor.save(out)
    say(f"{predictor.name} in {out}; use it with --predictor {predictors.name_of_saved(name, out)}")
    _tell_checks(predictor)


def _give_budget(
    predictor: Predictor, trials: int, budget: str | None, study: Path | None, processes: int, ray: str | None
) -> None:
    """How long and where a search may take."""
    from foretrain.predictors.ray_models import RayModelsPredictor
    from foretrain.predictors.ray_models.search import Budget
    from foretrain.units import parse_seconds

    if not isinstance(predictor, RayModelsPredictor):
        raise InputError(
            f"--trials, --budget, --study, --processes and --ray are for ray_models, not for {predictor.name}"
        )
    seconds = parse_seconds(budget, "budget") if budget else math.inf
    if ray is not None:
        hush_ray()
    predictor.budget = Budget(trials=trials, seconds=seconds, processes=processes, ray=ray, study=study)


def _tell_checks(predictor: Predictor) -> None:
    """Of performance models: which recipes won, and how well they do on runs that neither taught nor chose them."""
    from foretrain.predictors.ray_models import RayModelsPredictor
    from foretrain.report.screen import progress
    from foretrain.report.tables import check_table

    if not isinstance(predictor, RayModelsPredictor):
        return
    for workload in list(predictor.workloads_.values())[:_TOLD]:
        for kind, model in workload.models.items():
            for where, choice in (("inside", model.inside), ("beyond", model.beyond)):
                say(
                    f"{workload.label}, {kind}, {where} the runs: {' + '.join(recipe.label for recipe in choice.recipes)}"
                )
    if len(predictor.workloads_) > _TOLD:
        say(
            f"{len(predictor.workloads_):,} models; foretrain evaluate --split interpolate:workers says how well they do"
        )
        return
    with progress("checks") as advance:
        checks = predictor.checks(advance)
    if checks:
        show(check_table(checks))


def _sort(files: Sequence[Path]) -> tuple[list[Path], list[Path]]:
    """Operator datasets and files of runs, all of which are there."""
    for path in files:
        if not path.is_file():
            raise InputError(f"{path}: no such file")
        if not path.name.endswith((".parquet", ".jsonl", ".jsonl.zst")):
            raise InputError(f"{path}: neither runs (.jsonl, .jsonl.zst) nor an operator dataset (.parquet)")
    datasets = [path for path in dict.fromkeys(files) if path.suffix == ".parquet"]
    return datasets, [path for path in dict.fromkeys(files) if path.suffix != ".parquet"]


def _calibrate(predictor: Predictor, files: Sequence[Path]) -> None:
    from foretrain.report.tables import benefit_table

    runs = _read(files)
    predictor.fit(_watched(runs))
    _tell_left_out(predictor, len(runs))
    if predictor.benefits_:
        show(benefit_table(predictor.benefits_))
    for device, benefit in predictor.benefits_.items():
        if benefit.error_after is not None and benefit.error_after >= benefit.error_before:
            say(f"{device}: no better than before; more runs, or runs of other models, may help")


def _relearn(
    predictor: Predictor,
    datasets: Sequence[Path],
    files: Sequence[Path],
    device: str | None,
    published: Path | None,
) -> None:
    from foretrain.predictors.base import OperatorPredictor, source_of

    if not isinstance(predictor, OperatorPredictor):
        raise InputError(
            f"{datasets[0]}: {predictor.name} learns from runs (.jsonl), not from operator datasets"
        )
    runs = _read(files)
    operators, sources = _operators(datasets, device, published)
    counts = {
        one: sum(operator.device == one for operator in operators)
        for one in dict.fromkeys(operator.device for operator in operators)
    }
    say("operators: " + ", ".join(f"{count:,} of {one}" for one, count in counts.items()))
    sources += [source_of(path) for path in files]
    predictor.relearn(operators, _watched(runs), sources=sources, tell=say)
    _tell_left_out(predictor, len(runs))


def _read(files: Sequence[Path]) -> list[Run]:
    from foretrain.job import read_runs

    return [run for path in files for _, run in read_runs(path)]


def _watched(runs: Sequence[Run]) -> Iterator[Run]:
    """The runs one by one, with a bar of how many were taken."""
    from foretrain.report.screen import progress

    with progress("runs") as advance:
        for number, run in enumerate(runs):
            advance(number, len(runs))
            yield run


def _tell_left_out(predictor: Predictor, given: int) -> None:
    left_out = predictor.left_out_
    for line in left_out[:_TOLD]:
        say(f"left out: {line}")
    if len(left_out) > _TOLD:
        say(f"left out: {len(left_out) - _TOLD:,} more")
    if given:
        say(f"learned from {given - len(left_out):,} of {given:,} runs")


def _operators(
    datasets: Sequence[Path], device: str | None, published: Path | None
) -> tuple[list[MeasuredOperator], list[dict[str, Any]]]:
    """All measured operators, and where they come from."""
    from foretrain.costs.measured import load_measured
    from foretrain.measure.published import read_published
    from foretrain.predictors.base import source_of

    operators: list[MeasuredOperator] = []
    sources = []
    for path in datasets:
        found = list(load_measured(path, _device(path, device)))
        if not found:
            raise InputError(f"{path}: holds no operator")
        operators += found
        sources.append(source_of(path, device=found[0].device))
    if published is not None:
        operators += read_published(published)
        sources += [{**source_of(path), "file": path.name} for path in sorted(published.glob("*.csv.gz"))]
    return operators, sources


def _device(path: Path, given: str | None) -> str | None:
    """The catalogue's name of the device that was asked for, where the dataset names none itself."""
    from foretrain.catalog import Catalog
    from foretrain.costs.measured import parquet_library

    if given is None:
        return None
    wanted = Catalog.load().device(given, "--device").name
    _, parquet = parquet_library()
    try:
        said = (parquet.read_schema(path).metadata or {}).get(b"catalog_device", b"").decode()
    except (OSError, ValueError) as error:
        raise InputError(f"{path}: cannot be read as Parquet ({first_line(error)})") from error
    return said or wanted
