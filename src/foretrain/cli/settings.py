"""Turns the settings of a predictor into options of the command that fits it."""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any, get_type_hints

import typer
from typer.main import get_command

from foretrain.cli.app import lighten
from foretrain.cli.scale_out import ScaleOut
from foretrain.errors import ForetrainError, InputError

if TYPE_CHECKING:
    from foretrain.predictors.base import Predictor

_GIVEN = "foretrain.settings"


class WithSettings(ScaleOut):
    """A command whose first argument is a predictor: it has the options of that one's settings; without one,
    those of all."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        name = _named(args)
        kinds = _known() if name is None else [_class(name)]
        offered = {option.name: option for kind in kinds for option in _options(kind)}
        own = self.params
        self.params = [*own, *offered.values()]
        try:
            rest = super().parse_args(ctx, args)
        except typer.Exit:
            raise
        except Exception as error:
            if name is not None and (option := getattr(error, "option_name", None)):
                _refuse(option, name)
            raise
        finally:
            self.params = own
        values = {option: ctx.params.pop(option) for option in offered}
        ctx.meta[_GIVEN] = {option: value for option, value in values.items() if value is not None}
        return rest


def apply(ctx: typer.Context, predictor: Predictor) -> None:
    """Give a predictor the settings that were given on the command line, if any were."""
    given: Mapping[str, Any] = ctx.meta[_GIVEN]
    if not given:
        return
    assert predictor.settings is not None
    values = {}
    for field, facts in _fields(type(predictor)):
        name = facts["name"] or field.name
        if name in given:
            values[field.name] = facts["parse"](given[name], name) if facts["parse"] else given[name]
    predictor.configure(predictor.settings(**values))


def _named(words: Sequence[str]) -> str | None:
    """The first word that names a predictor."""
    from foretrain import predictors

    return next((word for word in words if predictors.is_name(word)), None)


def _class(name: str) -> type[Predictor]:
    from foretrain import predictors

    return predictors.class_of(name)


def _known() -> list[type[Predictor]]:
    """List all predictors that have a name and can be loaded."""
    from foretrain import predictors

    kinds = []
    for name in predictors.known():
        with contextlib.suppress(ForetrainError):
            kinds.append(predictors.class_of(name))
    return kinds


def _refuse(option: str, name: str) -> None:
    """Say whose option it is, where it is that of another predictor."""
    owners = [kind.name for kind in _known() if any(option in one.opts for one in _options(kind))]
    if owners:
        raise InputError(f"{option}: is an option of {', '.join(owners)}, not of {_class(name).name}")


def _fields(kind: type[Predictor]) -> list[tuple[dataclasses.Field[Any], Mapping[str, Any]]]:
    """The settings that are options, each with what ``option`` was told."""
    from foretrain.predictors.base import OPTION

    fields = () if kind.settings is None else dataclasses.fields(kind.settings)
    return [(field, field.metadata[OPTION]) for field in fields if OPTION in field.metadata]


def _options(kind: type[Predictor]) -> list[Any]:
    """Make the options of a predictor's settings as the command line knows them; None for those that are not
    given."""
    fields = _fields(kind)
    if not fields:
        return []
    hints = get_type_hints(kind.settings)
    parameters = []
    for field, facts in fields:
        name = facts["name"] or field.name
        declared = typer.Option(
            f"--{name.replace('_', '-')}", min=facts["least"], metavar=facts["metavar"],
            help=f"{kind.name}: {facts['help']}", show_default=False
        )  # fmt: skip
        hint = str if facts["parse"] else hints[field.name]
        parameters.append(
            inspect.Parameter(
                name,
                inspect.Parameter.KEYWORD_ONLY,
                default=None,
                annotation=Annotated[hint | None, declared],
            )
        )

    def nothing(**_: Any) -> None: ...

    vars(nothing)["__signature__"] = inspect.Signature(parameters)
    app = typer.Typer(add_completion=False)
    app.command()(nothing)
    options = list(get_command(app).params)
    lighten(options)
    return options
