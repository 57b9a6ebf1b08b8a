"""Reads and writes files so that errors are one line and a reader never sees half a file."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterable
from pathlib import Path

from foretrain.errors import InputError


def read_text(path: Path) -> str:
    """The text of a file, decompressed when its name ends in ``.zst``."""
    try:
        return _decompressed(path) if path.suffix == ".zst" else path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{path}: cannot be read ({getattr(error, 'strerror', None) or error})") from error


def _decompressed(path: Path) -> str:
    import zstandard

    try:
        with path.open("rb") as file:
            plain = zstandard.ZstdDecompressor().stream_reader(file, read_across_frames=True)
            return plain.read().decode("utf-8")
    except zstandard.ZstdError as error:
        raise InputError(f"{path}: not a zstd file ({error})") from error


def append_lines(path: Path, lines: Iterable[str]) -> None:
    """Add whole lines in one write, so that Ctrl-C leaves no half line (a kill may)."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("ab", buffering=0) as file:
            file.write("".join(f"{line}\n" for line in lines).encode())
    except OSError as error:
        raise InputError(f"{path}: cannot be written ({error.strerror})") from error


def write_atomically(path: Path, content: bytes | str) -> None:
    """Write beside the target, then move into place; folders are made as needed."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    except OSError as error:
        raise InputError(f"{path}: cannot be written ({error.strerror})") from error
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content.encode() if isinstance(content, str) else content)
        Path(temporary).chmod(0o644)
        Path(temporary).replace(path)
    except OSError as error:
        Path(temporary).unlink(missing_ok=True)
        raise InputError(f"{path}: cannot be written ({error.strerror})") from error
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise
