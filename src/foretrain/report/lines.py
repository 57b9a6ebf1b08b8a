"""Writes records as JSON lines to a file or the screen, each whole or not at all, as soon as it is known."""

from __future__ import annotations

import contextlib
import errno
import io
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

from foretrain.errors import InputError
from foretrain.report import dump


class JsonLines:
    """A file (or the screen, without a path) that grows by one line at a time; ``count`` lines are in it."""

    def __init__(self, path: Path | None) -> None:
        self.path = path
        self.count = 0
        self._size = 0
        self._file: io.FileIO | None = None

    def __enter__(self) -> Self:
        if self.path is not None:
            try:
                self._file = self.path.open("wb", buffering=0)
            except OSError as error:
                raise InputError(f"{self.path}: cannot be written ({error.strerror})") from error
        return self

    def __exit__(self, *_: object) -> None:
        if self._file is not None:
            self._file.close()

    def write(self, record: Mapping[str, Any]) -> None:
        """Add one line."""
        line = dump(record, indent=None) + "\n"
        if self._file is None:
            sys.stdout.write(line)
            sys.stdout.flush()
        else:
            self._append(self._file, line.encode())
        self.count += 1

    def _append(self, file: io.FileIO, line: bytes) -> None:
        """Write at once and unbuffered, which Ctrl-C does not cut; what a full disk cuts is taken back."""
        try:
            if file.write(line) != len(line):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            self._size += len(line)
        except OSError as error:
            with contextlib.suppress(OSError):
                file.truncate(self._size)
            raise InputError(f"{self.path}: cannot be written ({error.strerror})") from error
