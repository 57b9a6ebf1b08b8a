"""Command lines in; jobs, and calls of the library, out. Errors that the user can mend are one line on stderr, with exit code 2."""

from foretrain.cli import advise, design, explain, fit, forecasts, measure, operators, runs, schedule, tables
from foretrain.cli.app import app

__all__ = ["advise", "app", "design", "explain", "fit", "forecasts", "main", "measure", "operators", "runs", "schedule", "tables"]


def main() -> None:
    """The ``foretrain`` command."""
    app(prog_name="foretrain")
