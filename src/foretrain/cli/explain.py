"""The command that says why two jobs differ: ``explain``."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from foretrain.cli.app import JsonFlag, registry, show
from foretrain.cli.job_options import CatalogOption, PredictorOption
from foretrain.errors import ForetrainError, InputError

if TYPE_CHECKING:
    from foretrain.catalog import Catalog
    from foretrain.forecast import Forecast
    from foretrain.predictors.base import Predictor


@registry.command()
def explain(
    first: Annotated[
        Path, typer.Argument(metavar="A.toml", help="A job file (TOML or JSON).", show_default=False)
    ],
    second: Annotated[
        Path, typer.Argument(metavar="B.toml", help="The job file to set beside it.", show_default=False)
    ],
    predictor: PredictorOption = None,
    as_json: JsonFlag = False,
    catalog: CatalogOption = None,
) -> None:
    """Why B takes more or less time and memory than A, by cause."""
    from foretrain import predictors
    from foretrain.catalog import Catalog
    from foretrain.report import dump
    from foretrain.report.explain import explain as compare

    known = Catalog.load(catalog)
    chosen = predictors.get(predictor)
    explained = compare(forecast_of_file(first, known, chosen), forecast_of_file(second, known, chosen))
    if as_json:
        typer.echo(dump(explained.to_dict()))
        return
    from foretrain.report.text import explanation

    show(explanation(explained))


def forecast_of_file(path: Path, catalog: Catalog, predictor: Predictor) -> Forecast:
    """The forecast of a job file or a launch file; what stands against it is told with the file's name."""
    from foretrain.job import Job
    from foretrain.launchers import SUFFIXES, read_launch
    from foretrain.predictors.plugins import told_in_one_line

    if path.suffix not in (".toml", ".json", *SUFFIXES):
        raise InputError(f"{path}: not a job file (.toml or .json)")
    launched = path.suffix in SUFFIXES
    job = read_launch(path, catalog=catalog).job if launched else Job.load(path, catalog=catalog)
    try:
        with told_in_one_line(type(predictor)):
            return predictor.predict(job)
    except ForetrainError as error:
        raise InputError(f"{path}: {error}") from error
