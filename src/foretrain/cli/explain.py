"""The command that says why two jobs differ: ``explain``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from foretrain.cli import completion
from foretrain.cli.app import JsonFlag, registry, show
from foretrain.cli.job_options import Options, PredictorOption, one_job, with_job_options
from foretrain.errors import ForetrainError, InputError

if TYPE_CHECKING:
    from foretrain.forecast import Forecast
    from foretrain.predictors.base import Predictor


@registry.command()
@with_job_options
def explain(
    *,
    first: Annotated[
        str,
        typer.Argument(
            metavar="A",
            help="A job file or a model, as predict takes it.",
            show_default=False,
            autocompletion=completion.models,
        ),
    ],
    second: Annotated[
        str,
        typer.Argument(
            metavar="B",
            help="What to set beside it; options describe both.",
            show_default=False,
            autocompletion=completion.models,
        ),
    ],
    predictor: PredictorOption = None,
    as_json: JsonFlag = False,
    options: Options,
) -> None:
    """Why B takes more or less time and memory than A, by cause."""
    from foretrain import predictors
    from foretrain.report import dump
    from foretrain.report.explain import explain as compare

    chosen = predictors.get(predictor)
    explained = compare(*(forecast_of(target, options, chosen) for target in (first, second)))
    if as_json:
        typer.echo(dump(explained.to_dict()))
        return
    from foretrain.report.text import explanation

    show(explanation(explained))


def forecast_of(target: str, options: Options, predictor: Predictor) -> Forecast:
    """The forecast of a job file, a launch file or a model; what stands against it is told with its name."""
    from foretrain.predictors.plugins import told_in_one_line

    job = one_job(target, None, options)
    try:
        with told_in_one_line(type(predictor)):
            return predictor.predict(job)
    except ForetrainError as error:
        raise InputError(f"{target}: {error}") from error
