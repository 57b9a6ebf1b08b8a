"""Runs a benchmark so that a file or folder that is not there, or is not what it should be, is one line."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path

from foretrain.errors import ForetrainError


def existing(text: str) -> Path:
    """The type of an argument that names a file or folder to read."""
    path = Path(text)
    if not path.exists():
        raise argparse.ArgumentTypeError(f"{text!r} is not there; name a file or folder that is")
    return path


def run(main: Callable[[], None]) -> None:
    """End with one line and exit code 2 where what was given cannot be read."""
    try:
        main()
    except (ForetrainError, OSError) as error:
        sys.exit(_told(" ".join(str(error).splitlines())))


def _told(message: str) -> int:
    print(f"{Path(sys.argv[0]).name}: error: {message}", file=sys.stderr)
    return 2
