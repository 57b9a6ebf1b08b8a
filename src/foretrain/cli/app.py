"""The ``foretrain`` application that commands join, with one way to report what went wrong and to talk to
people."""

from __future__ import annotations

import contextlib
import functools
import importlib
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperGroup
from typer.main import get_command

from foretrain import __version__
from foretrain.cli import helping
from foretrain.errors import ForetrainError, InputError, libraries_named
from foretrain.interrupts import ended_as_interrupted, exit_code, is_interrupt
from foretrain.progress import tell

if TYPE_CHECKING:
    from rich.console import RenderableType

DEBUG = "--debug"
"""The option that has errors shown with their tracebacks."""
JsonFlag = Annotated[bool, typer.Option("--json", help="JSON, in SI units.")]


COMMANDS = {
    "advise": "The cheapest configuration (data, workers, machines) "
    "that meets a deadline, with the probability of missing it.",
    "capture": "Write the operator graph of one step, for machines without torch.",
    "catalog": "What is known: devices, nodes, hosts, models and prices, each with its source.",
    "check": "Hold a job against limits of time, cost and memory: exit code 0 where all hold, 1 where not.",
    "design": "Choose what to measure next: the candidates that tell most for their cost.",
    "embed": "Make the embeddings of architectures that predictddl learns from.",
    "evaluate": "Errors of predictors on measured runs.",
    "explain": "Why B takes more or less time and memory than A, by cause.",
    "fit": "Calibrate a predictor to measured runs, or learn its operator models from an operator dataset.",
    "leaderboard": "Every predictor on every file of runs, with every split that applies.",
    "learn": "Fit every predictor that can learn from these runs, score each on runs left out, "
    "and keep the best for each kind of job.",
    "mcp": "Answer agents: a server of the Model Context Protocol on stdin and stdout.",
    "measure": "Make data: measure operators, steps and whole campaigns.",
    "plan": "Find the best plans: which devices, how many, and how the model is spread over them.",
    "predict": "Forecast time, memory and cost of a job file or a model; options override the file.",
    "runs": "Measured runs: look at them, and move them between files and databases.",
    "schedule": "Simulate a cluster under scheduling policies, with predictions in the loop.",
    "serve": "Answer over HTTP: a page, forecasts, plans, simulations, and a store of runs.",
    "validate": "Forecasts beside tables that others have published, with their sources.",
}
"""What each command does, as its own help says. The module of the same name defines it and is imported when
it is asked for."""

registry = typer.Typer()
"""The commands whose modules are imported."""


class _Commands(TyperGroup):
    """Lists all commands, each loaded when it is asked for, and reports what went wrong in one way."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        names: Any = dict.fromkeys(COMMANDS)
        self.commands.update(names)  # for the one that was meant, where there is none of a name

    def list_commands(self, ctx: Any) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        if cmd_name not in COMMANDS:
            return None
        command = _loaded(cmd_name)
        _lighten(command, ctx)
        helping.lay_out(command)
        return command

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        _lighten(self, ctx)
        with _usage_in_one_line(ctx):
            return super().parse_args(ctx, _with_debug_first(args))

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        width = max(map(len, COMMANDS))
        for title, names in helping.COMMAND_GROUPS.items():
            with formatter.section(title):
                formatter.write_dl([(name.ljust(width), COMMANDS[name]) for name in names])
        helping.write_examples("", formatter)

    def invoke(self, ctx: Any) -> Any:
        with ended_as_interrupted():
            try:
                with (
                    _usage_in_one_line(ctx),
                    libraries_named(str(ctx.invoked_subcommand or "")),
                    _with_progress(),
                ):
                    return super().invoke(ctx)
            except typer.Exit:
                raise
            except (KeyboardInterrupt, Exception) as error:
                if is_interrupt(error):
                    say("interrupted")
                    raise typer.Exit(exit_code()) from error
                if not isinstance(error, ForetrainError):
                    raise
                if ctx.find_root().params.get("debug"):
                    import traceback

                    traceback.print_exc()
                say(" ".join(str(error).splitlines()))
                raise typer.Exit(2) from error


@contextlib.contextmanager
def _with_progress() -> Iterator[None]:
    """Show what a command is doing, where a person looks on."""
    if not sys.stderr.isatty():
        yield
        return
    from foretrain.report.screen import doing

    with doing():
        yield


def _with_debug_first(words: list[str]) -> list[str]:
    """``--debug`` may stand anywhere on the line, also behind the command."""
    end = words.index("--") if "--" in words else len(words)
    rest = [word for i, word in enumerate(words) if word != DEBUG or i > end]
    return rest if len(rest) == len(words) else [DEBUG, *rest]


app = typer.Typer(
    cls=_Commands,
    help="Know how long a training run takes, how much memory it needs and what it costs, before you run it.",
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": helping.WIDTH},
)


@functools.cache
def _loaded(name: str) -> Any:
    """A command, or a group of them, as the parser knows it."""
    module = importlib.import_module(f"foretrain.cli.{name}")
    for group in registry.registered_groups:
        if group.name == name and group.typer_instance is not None:
            return get_command(group.typer_instance)
    alone = typer.Typer(rich_markup_mode=None, add_completion=False, pretty_exceptions_enable=False)
    alone.registered_commands = [
        command
        for command in registry.registered_commands
        if getattr(command.callback, "__module__", "") == module.__name__
    ]
    return get_command(alone)


def _lighten(command: Any, ctx: Any) -> None:
    lighten(command.get_params(ctx))
    for subcommand in getattr(command, "commands", {}).values():
        if subcommand is not None:  # those of the application itself are loaded when they are asked for
            _lighten(subcommand, ctx)


def lighten(parameters: Iterable[Any]) -> None:
    """Convert the values of options by ``_LightConversion``."""
    for parameter in parameters:
        convert = getattr(parameter, "get_runtime_param", None)
        if convert is not None and not isinstance(convert, functools.partial):
            parameter.get_runtime_param = functools.partial(_LightConversion, convert)


class _LightConversion:
    """Converts the values of an option without pydantic, whose import takes a sixth of a forecast: defaults,
    texts and numbers without bounds. Everything else, also what is no number, is left to Typer."""

    def __init__(self, convert: Callable[[], Any]) -> None:
        self._convert = convert

    def coerce(self, value: Any, param: Any, ctx: Any) -> Any:
        if value is None:
            return () if param.multiple or param.nargs == -1 else None
        if value is param.default:
            return value
        kind = param.type_descriptor
        if isinstance(value, str) and kind.annotation in (str, int, float) and not kind.is_ranged:
            with contextlib.suppress(ValueError):
                return kind.annotation(value)
        try:
            return self._convert().coerce(value, param=param, ctx=ctx)
        except _UsageError as error:
            raise InputError(_wrong_value(param, value, str(error.message))) from error


def _wrong_value(param: Any, value: Any, message: str) -> str:
    """Put the option's name and the value before what the parser says of it."""
    name = max(param.opts, key=len) if str(param.opts[0]).startswith("-") else param.name
    message = message.removeprefix("Value error, ").partition(", unable")[0].rstrip(".")
    if message.startswith("Input should be "):
        message = f"{value!r} is not {message.removeprefix('Input should be ')}"
    return f"{name}: {message}"


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"foretrain {__version__}")
        raise typer.Exit


@app.callback()
def _foretrain(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
    debug: Annotated[
        bool,
        typer.Option(
            DEBUG,
            envvar="FORETRAIN_DEBUG",
            help="Errors with their full traceback, that of your own code included (with any command).",
        ),
    ] = False,
) -> None:
    pass


_UsageError: Any = typer.BadParameter.__base__


@contextlib.contextmanager
def _usage_in_one_line(ctx: Any) -> Iterator[None]:
    """Print what is wrong with the words of a command as other mistakes are; no words at all get the help."""
    try:
        yield
    except _UsageError as error:
        if type(error).__name__ == "NoArgsIsHelpError":
            raise
        command = (error.ctx or ctx).command_path.partition(" ")[2]
        words = command or str(ctx.invoked_subcommand or "")
        message = " ".join(error.format_message().split()).removesuffix(".").removeprefix("Invalid value: ")
        say(f"{message} (see foretrain {words + ' ' if words else ''}--help)")
        raise typer.Exit(2) from error


def say(message: str) -> None:
    """Print a line for people on stderr, beside the results."""
    tell("")
    with contextlib.suppress(OSError):  # of a stderr that nobody reads, or on a full disk
        typer.echo(f"foretrain: {message}", err=True)


def say_left_out(reasons: Sequence[str], first: int = 5) -> None:
    """Print the first reasons why something is left out, and how many more there are."""
    for reason in reasons[:first]:
        say(f"left out: {reason}")
    if len(reasons) > first:
        say(f"left out: {len(reasons) - first:,} more")


@contextlib.contextmanager
def told_if_interrupted(kept: Callable[[], str]) -> Iterator[None]:
    """Say what is kept where Ctrl-C or SIGTERM ends the block, and end the program."""
    try:
        yield
    except KeyboardInterrupt:
        say(f"interrupted: {kept()}")
        raise typer.Exit(exit_code()) from None


def show(*parts: RenderableType) -> None:
    from foretrain.report import screen

    screen.show(*parts)
