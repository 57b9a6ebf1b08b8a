"""The command that learns: ``fit`` a predictor to runs or operator datasets and keep it in a folder."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from foretrain.cli.app import app, say, show
from foretrain.errors import InputError, first_line

if TYPE_CHECKING:
    from foretrain.costs.measured import MeasuredOperator
    from foretrain.job import Run
    from foretrain.predictors.base import Predictor

_TOLD = 5
"""Runs that are left out are named up to this number."""


@app.command()
def fit(
    name: Annotated[str, typer.Argument(metavar="NAME", help="The predictor, such as deletepop.", show_default=False)],
    files: Annotated[
        list[Path],
        typer.Argument(metavar="FILES...", help="Runs (.jsonl, .jsonl.zst) or operator datasets (.parquet).", show_default=False),
    ],
    *,
    out: Annotated[Path, typer.Option("--out", "-o", metavar="DIR", help="The folder that --predictor then takes.", show_default=False)],
    device: Annotated[str | None, typer.Option(help="The device of operator datasets that do not say it.")] = None,
    published: Annotated[Path | None, typer.Option(metavar="DIR", help="Public operator sets to learn from as well.")] = None,
    start: Annotated[Path | None, typer.Option("--from", metavar="DIR", help="An earlier fit to start from.")] = None,
) -> None:
    """Calibrate a predictor to measured runs, or learn its operator models from an operator dataset."""
    from foretrain import predictors

    datasets, runs = _sort(files)
    if (device or published) and not datasets:
        raise InputError(f"{'--device' if device else '--published'}: is for operator datasets (.parquet), and none is given")
    predictor = predictors.get(name)
    if start is not None:
        predictor = type(predictor).load(start)
    if not predictor.learns:
        raise InputError(f"{predictor.name}: has nothing to learn")
    if datasets:
        _relearn(predictor, datasets, runs, device, published)
    else:
        _calibrate(predictor, runs)
    predictor.save(out)
    say(f"{predictor.name} in {out}; use it with --predictor {out}")


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


def _relearn(predictor: Predictor, datasets: Sequence[Path], files: Sequence[Path], device: str | None, published: Path | None) -> None:
    from foretrain.predictors.base import OperatorPredictor, source_of

    if not isinstance(predictor, OperatorPredictor):
        raise InputError(f"{datasets[0]}: {predictor.name} learns from runs (.jsonl), not from operator datasets")
    runs = _read(files)
    operators, sources = _operators(datasets, device, published)
    counts = {
        one: sum(operator.device == one for operator in operators) for one in dict.fromkeys(operator.device for operator in operators)
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


def _operators(datasets: Sequence[Path], device: str | None, published: Path | None) -> tuple[list[MeasuredOperator], list[dict[str, Any]]]:
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
