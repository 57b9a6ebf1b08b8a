"""Starts the command ``foretrain``, also as ``python -m foretrain``."""

import sys

from foretrain.interrupts import is_interrupt


def main() -> None:
    """The command line, which Ctrl-C ends in one line while it is still being imported, too."""
    try:
        from foretrain.cli import main as command
    except BaseException as error:
        if not is_interrupt(error):
            raise
        print("foretrain: interrupted", file=sys.stderr)
        sys.exit(130)
    command()


if __name__ == "__main__":
    main()
