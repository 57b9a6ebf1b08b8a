"""The command line: a file per command, named by it.

Errors that the user can mend are one line on stderr, with exit code 2.
"""

from foretrain.cli.app import app

__all__ = ["app", "main"]


def main() -> None:
    """The ``foretrain`` command."""
    app(prog_name="foretrain")
