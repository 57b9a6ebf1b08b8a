"""The command line as tests call it."""

from __future__ import annotations

from typer.testing import CliRunner, Result

from foretrain.cli import app


def run(*words: str) -> Result:
    return CliRunner().invoke(app, words)


def ok(*words: str) -> str:
    result = run(*words)
    assert result.exit_code == 0, result.output
    return str(result.stdout)


def fails(*words: str) -> str:
    """The one line that a mistake is answered with."""
    result = run(*words)
    assert result.exit_code == 2, result.output
    assert result.stdout == ""
    assert result.stderr.startswith("foretrain: ")
    assert result.stderr.count("\n") == 1
    return str(result.stderr)
