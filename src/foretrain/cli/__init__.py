"""The command line: a file per command, named by it. Errors that the user can mend are one line on stderr, with exit code 2."""

from foretrain.cli import (
    advise,
    capture,
    catalog,
    design,
    evaluate,
    explain,
    fit,
    measure,
    predict,
    runs,
    schedule,
)
from foretrain.cli.app import app

__all__ = [
    "advise", "app", "capture", "catalog", "design", "evaluate", "explain", "fit", "main", "measure", "predict", "runs", "schedule",
]  # fmt: skip


def main() -> None:
    """The ``foretrain`` command."""
    app(prog_name="foretrain")
