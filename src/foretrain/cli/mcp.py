"""The command that answers agents: ``mcp``."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from foretrain.cli.app import registry, say
from foretrain.errors import libraries_named


@registry.command()
def mcp(
    allow: Annotated[
        Path | None,
        typer.Option(
            metavar="FOLDER",
            help="Agents may name job files and models of this folder; models in Python files are run.",
        ),
    ] = None,
    seconds: Annotated[float, typer.Option(help="That one answer may take; then it is ended.")] = 120.0,
) -> None:
    """Answer agents: a server of the Model Context Protocol on stdin and stdout."""
    from foretrain.agents.terms import Terms

    terms = Terms(folder=allow, seconds=seconds)
    with libraries_named("mcp"):
        from foretrain.agents.server import serve
    if sys.stdin.isatty():
        say("an MCP server, for clients that start it; Ctrl-C ends it")
    serve(terms)
