"""Reads and writes files so that errors are one line and a reader never sees half a file."""

from __future__ import annotations

import errno
import json
import os
import tempfile
import tomllib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from foretrain.errors import InputError


def read_text(path: Path) -> str:
    """The text of a file, decompressed when its name ends in ``.zst``."""
    try:
        content = decompressed(path) if path.suffix == ".zst" else path.read_bytes()
        return content.decode("utf-8-sig").replace("\r\n", "\n").replace("\r", "\n")
    except UnicodeDecodeError as error:
        raise InputError(f"{path}: cannot be read (it is no text in UTF-8)") from error
    except OSError as error:
        raise InputError(f"{path}: cannot be read ({error.strerror or error})") from error


def decompressed(path: Path) -> bytes:
    """Decompress all frames of a zstd file."""
    import zstandard

    rest, plain = path.read_bytes(), []
    try:
        while rest:
            frame = zstandard.ZstdDecompressor().decompressobj()
            plain.append(frame.decompress(rest))
            if not frame.eof:
                raise InputError(f"{path}: not a whole zstd file (it ends within a frame)")
            rest = frame.unused_data
    except zstandard.ZstdError as error:
        raise InputError(f"{path}: not a zstd file ({error})") from error
    return b"".join(plain)


def parse_json(text: str | bytes) -> Any:
    """The value of a JSON text; whatever is wrong with it is a ``ValueError``."""
    try:
        return json.loads(text)
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error


def parse_toml(text: str) -> dict[str, Any]:
    """The tables of a TOML text; whatever is wrong with it is a ``ValueError``."""
    try:
        return tomllib.loads(text)
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error


def read_tables(path: Path) -> Any:
    """Read a ``.json`` file, or any other file as TOML."""
    text = read_text(path)
    kind, parse = ("JSON", parse_json) if path.suffix == ".json" else ("TOML", parse_toml)
    try:
        return parse(text)
    except ValueError as error:
        raise InputError(f"{path}: not {kind} ({error})") from error


def text_lines(path: Path) -> Iterator[tuple[int, str]]:
    """The lines of a file with their numbers; blank ones are skipped."""
    for number, line in enumerate(read_text(path).split("\n"), start=1):
        if line.strip():
            yield number, line


def read_lines(path: Path) -> Iterator[tuple[int, Any]]:
    """The JSON values of a ``.jsonl`` file with their line numbers; blank lines are skipped."""
    for number, line in text_lines(path):
        try:
            yield number, parse_json(line)
        except ValueError as error:
            raise InputError(f"{path}:{number}: not JSON ({error})") from error


def data_folder() -> Path:
    """Name the folder for what foretrain keeps of a user."""
    return Path(os.environ.get("XDG_DATA_HOME") or Path.home() / ".local" / "share") / "foretrain"


def check_target(path: Path, *, folder: bool = False) -> None:
    """Refuse, before the work for it begins, a file (or a folder) that could not be written."""
    if path.is_dir() and not folder:
        raise InputError(f"{path}: cannot be written (Is a directory)")
    above = path if folder else path.parent
    while not above.exists() and above != above.parent:
        above = above.parent
    if not above.is_dir():
        raise InputError(f"{path}: cannot be written ({above} is not a directory)")
    if not os.access(above, os.W_OK):
        raise InputError(f"{path}: cannot be written (nothing may be written to {above})")


def make_folder(path: Path) -> None:
    """Make a folder with all above it, where they are not there."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"{path}: cannot be written ({error.strerror})") from error


def append_lines(path: Path, lines: Iterable[str]) -> None:
    """Add whole lines in one write, so that Ctrl-C leaves no half line (a kill may), nor does a full disk."""
    content = "".join(f"{line}\n" for line in lines).encode()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("ab", buffering=0) as file:
            before = file.tell()
            if file.write(content) != len(content):
                file.truncate(before)
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    except OSError as error:
        raise InputError(f"{path}: cannot be written ({error.strerror})") from error


def write_atomically(path: Path, content: bytes | str) -> None:
    """Write beside the target, then move into place; folders are made as needed. Into a device, a pipe or
    what a link leads to is written directly: moved over, they would be gone."""
    content = content.encode() if isinstance(content, str) else content
    try:
        if path.is_symlink() or (path.exists() and not path.is_file()):
            path.write_bytes(content)
            return
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    except OSError as error:
        raise InputError(f"{path}: cannot be written ({error.strerror})") from error
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content)
        Path(temporary).chmod(0o644)
        Path(temporary).replace(path)
    except OSError as error:
        Path(temporary).unlink(missing_ok=True)
        raise InputError(f"{path}: cannot be written ({error.strerror})") from error
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise
