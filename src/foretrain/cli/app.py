"""The ``foretrain`` application that commands join, with one way to report what went wrong and to talk to people."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperGroup

from foretrain.errors import ForetrainError

if TYPE_CHECKING:
    from rich.console import RenderableType

JsonFlag = Annotated[bool, typer.Option("--json", help="JSON, in SI units.")]


class _Commands(TyperGroup):
    """All commands, with one way to report what went wrong."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except ForetrainError as error:
            say(" ".join(str(error).splitlines()))
            raise typer.Exit(2) from error
        except KeyboardInterrupt as error:
            say("interrupted")
            raise typer.Exit(130) from error


app = typer.Typer(
    cls=_Commands,
    help="Know how long a training run takes, how much memory it needs and what it costs, before you run it.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import PackageNotFoundError, version

        try:
            typer.echo(f"foretrain {version('foretrain')}")
        except PackageNotFoundError:
            typer.echo("foretrain (from source, not installed)")
        raise typer.Exit


@app.callback()
def _foretrain(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    pass


def say(message: str) -> None:
    """A line for people, beside the results."""
    typer.echo(f"foretrain: {message}", err=True)


def show(*parts: RenderableType) -> None:
    from foretrain.report import screen

    screen.show(*parts)
