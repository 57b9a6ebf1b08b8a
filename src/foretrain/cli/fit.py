"""The command that learns: ``fit`` a predictor to runs or operator datasets and keep it in a folder."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from foretrain.cli import completion
from foretrain.cli.app import registry, say, say_left_out, show
from foretrain.cli.job_options import CatalogOption
from foretrain.cli.scale_out import hush_ray
from foretrain.cli.settings import WithSettings, apply
from foretrain.errors import InputError, first_line

if TYPE_CHECKING:
    from foretrain.costs.measured import MeasuredOperator
    from foretrain.predictors.base import OperatorPredictor, Predictor
    from foretrain.run import Run


@registry.command(cls=WithSettings)
def fit(
    ctx: typer.Context,
    name: Annotated[
        str,
        typer.Argument(
            metavar="NAME",
            help="The predictor, such as deletepop or file.py:Class.",
            show_default=False,
            autocompletion=completion.predictor_names,
        ),
    ],
    files: Annotated[
        list[Path],
        typer.Argument(
            metavar="FILE",
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
    catalog: CatalogOption = None,
) -> None:
    """Calibrate a predictor to measured runs, or learn its operator models from an operator dataset."""
    from foretrain import predictors
    from foretrain.files import check_target
    from foretrain.predictors.base import OperatorPredictor, source_of
    from foretrain.predictors.records import of_learned
    from foretrain.report.screen import progress
    from foretrain.run import runs_of_file

    datasets, runs = _sort(files)
    check_target(out, folder=True)
    if (device or published) and not datasets:
        raise InputError(
            f"{'--device' if device else '--published'}: is "
            "for operator datasets (.parquet), and none is given"
        )
    predictor = predictors.get(name)
    if start is not None:
        predictor = type(predictor).load(start)
    if not predictor.learns:
        raise InputError(f"{predictor.name}: has nothing to learn")
    if datasets and not isinstance(predictor, OperatorPredictor):
        raise InputError(
            f"{datasets[0]}: {predictor.name} learns from runs (.jsonl), not from operator datasets"
        )
    apply(ctx, predictor)
    hush_ray()
    all_runs = [run for path in runs for run in runs_of_file(path)]
    if isinstance(predictor, OperatorPredictor) and datasets:
        operators, sources = _operators(datasets, device, published)
        _relearn(predictor, operators, all_runs, [*sources, *map(source_of, runs)])
    else:
        with progress("learning") as predictor.progress:
            predictor.fit(_watched(all_runs))
    _tell_left_out(predictor, len(all_runs))
    predictor.records_ = of_learned(predictor, all_runs)
    predictor.save(out)
    say(f"{predictor.name} in {out}; use it with --predictor {predictors.name_of_saved(name, out)}")
    _tell(predictor)


def _tell(predictor: Predictor) -> None:
    from foretrain.report.screen import progress
    from foretrain.report.tables import figures_table

    with progress("checks") as advance:
        report = predictor.report(advance)
    for part in report:
        if isinstance(part, str):
            say(part)
        else:
            show(figures_table(part))


def _sort(files: Sequence[Path]) -> tuple[list[Path], list[Path]]:
    """Operator datasets and files of runs, all of which are there."""
    for path in files:
        if not path.is_file():
            raise InputError(f"{path}: {'is a folder, not a file' if path.is_dir() else 'no such file'}")
        if not path.name.endswith((".parquet", ".jsonl", ".jsonl.zst")):
            raise InputError(f"{path}: neither runs (.jsonl, .jsonl.zst) nor an operator dataset (.parquet)")
    datasets = [path for path in dict.fromkeys(files) if path.suffix == ".parquet"]
    return datasets, [path for path in dict.fromkeys(files) if path.suffix != ".parquet"]


def _relearn(
    predictor: OperatorPredictor,
    operators: Sequence[MeasuredOperator],
    runs: Sequence[Run],
    sources: Sequence[Mapping[str, Any]],
) -> None:
    counts = Counter(operator.device for operator in operators)
    say("operators: " + ", ".join(f"{count:,} of {one}" for one, count in counts.items()))
    predictor.relearn(operators, _watched(runs), sources=sources, tell=say)


def _watched(runs: Sequence[Run]) -> Iterator[Run]:
    """The runs one by one, with a bar of how many were taken."""
    from foretrain.report.screen import progress

    with progress("runs") as advance:
        for number, run in enumerate(runs):
            advance(number, len(runs))
            yield run


def _tell_left_out(predictor: Predictor, given: int) -> None:
    left_out = predictor.left_out_
    say_left_out(left_out)
    if given:
        say(f"learned from {given - len(left_out):,} of {given:,} runs")


def _operators(
    datasets: Sequence[Path], device: str | None, published: Path | None
) -> tuple[list[MeasuredOperator], list[dict[str, Any]]]:
    """Read all measured operators, and say where they come from."""
    from foretrain.costs.measured import load_measured
    from foretrain.measure.published import published_files, read_published
    from foretrain.predictors.base import source_of

    operators: list[MeasuredOperator] = []
    sources = []
    for path in datasets:
        measured = list(load_measured(path, _device(path, device)))
        if not measured:
            raise InputError(f"{path}: holds no operator")
        operators += measured
        sources.append(source_of(path, device=measured[0].device))
    own = {source["device"] for source in sources}
    if device is not None and _catalogue_name(device) not in own:
        raise InputError(f"--device: {device!r}, but the datasets say themselves: {', '.join(sorted(own))}")
    if published is not None:
        operators += read_published(published)
        sources += [{**source_of(path), "file": path.name} for path in sorted(published_files(published))]
    return operators, sources


def _device(path: Path, given: str | None) -> str | None:
    """The catalogue's name of the device that was asked for, where the dataset names none itself."""
    from foretrain.costs.measured import parquet_library

    if given is None:
        return None
    wanted = _catalogue_name(given)
    _, parquet = parquet_library()
    try:
        said = (parquet.read_schema(path).metadata or {}).get(b"catalog_device", b"").decode()
    except (OSError, ValueError) as error:
        raise InputError(f"{path}: cannot be read as Parquet ({first_line(error)})") from error
    return said or wanted


def _catalogue_name(device: str) -> str:
    from foretrain.catalog import Catalog

    return Catalog.load().device(device, "--device").name
