"""Holds the command line: a file per command, named by it.

Errors that the user can mend are one line on stderr, with exit code 2.
"""

import errno
import gc
import os
import sys
from pathlib import Path

from foretrain.cli.app import app, say

__all__ = ["app", "main"]

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
"""Of a disk that takes no more."""


def main() -> None:
    """The ``foretrain`` command."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:  # closed by the shell: >&-
            setattr(sys, name, Path(os.devnull).open("w", encoding="utf-8"))  # noqa: SIM115
        elif hasattr(stream, "reconfigure"):  # what a title holds may be no letter of the terminal's
            stream.reconfigure(errors="backslashreplace")
    try:
        app(prog_name="foretrain")
    except OSError as error:
        if error.errno not in _FULL:
            raise
        say(f"{error.filename or 'stdout'}: cannot be written ({error.strerror})")
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # what is left in the buffer has nowhere to go
        sys.exit(2)
    finally:
        gc.freeze()  # without a last search for cycles among half a million objects the program ends at once
