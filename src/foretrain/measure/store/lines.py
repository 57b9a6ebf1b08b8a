"""Keeps runs as lines of JSON, appended whole by several writers at once and readable after a killed one."""

from __future__ import annotations

import collections
import contextlib
import errno
import fcntl
import io
import json
import os
import stat
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, final

from foretrain.cluster import Catalog
from foretrain.errors import InputError
from foretrain.files import decompressed
from foretrain.measure.store.entries import (
    EVERYTHING,
    Entry,
    Filter,
    HalfLine,
    Report,
    Runs,
    checked_prefix,
    log,
)
from foretrain.run import Run


def append_run(path: Path, run: Mapping[str, Any], *, report: Report = log.warning) -> None:
    """Add one line and see it onto the disk, whole or not at all, whoever else appends or interrupts it.

    Half a line that a killed program left is moved to ``<name>.partial`` first, and ``report`` is told.
    """
    if path.suffix == ".zst":
        raise InputError(f"{path}: compressed files are read, not added to; name a .jsonl file")
    try:
        line = json.dumps(run, allow_nan=False).encode() + b"\n"
    except (TypeError, ValueError) as error:
        raise InputError(f"{path}: the run cannot be written as JSON ({error})") from error
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX)
            _mend_end(handle, path, report)
            _write_whole(handle, line)
            if os.fstat(handle).st_size == len(line):
                _sync_folder(path.parent)
        finally:
            os.close(handle)
    except OSError as error:
        raise InputError(f"{path}: cannot be written ({error.strerror})") from error


def _write_whole(handle: int, data: bytes) -> None:
    """Write at once, which no signal but a kill cuts; what a full disk cuts is taken back."""
    size = os.fstat(handle).st_size
    try:
        if os.write(handle, data) != len(data):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        os.fsync(handle)
    except OSError:
        with contextlib.suppress(OSError):
            os.ftruncate(handle, size)
        raise


def _sync_folder(folder: Path) -> None:
    """See the name of a new file onto the disk."""
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _mend_end(handle: int, path: Path, report: Report) -> None:
    """See that the file ends with a line break: a whole last line gets one, half a line is put aside."""
    end = _after_last_break(handle)
    if not end:
        return
    if _is_object(end):
        _write_whole(handle, b"\n")
        return
    aside = path.with_name(f"{path.name}.partial")
    other = os.open(aside, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        _write_whole(other, end + b"\n")
    finally:
        os.close(other)
    os.ftruncate(handle, os.fstat(handle).st_size - len(end))
    report(
        f"{path}: half a line ({len(end):,} bytes), left by an interrupted program, was put aside in {aside}"
    )


def _after_last_break(handle: int) -> bytes:
    position, end = os.fstat(handle).st_size, b""
    while position and b"\n" not in end:
        step = min(position, 65536)
        position -= step
        end = os.pread(handle, step, position) + end
    return end.rpartition(b"\n")[2]


def _is_object(line: bytes) -> bool:
    try:
        return isinstance(json.loads(line), dict)
    except (ValueError, RecursionError):
        return False


def raw_lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """The lines of a ``.jsonl`` or ``.jsonl.zst`` file with their numbers, blank ones skipped."""
    try:
        with path.open("rb") as file:
            lines: Iterable[bytes] = (
                io.BytesIO(decompressed(path)) if path.suffix == ".zst" else _until_now(file)
            )
            for number, line in enumerate(lines, start=1):
                if line.strip():
                    yield number, line
    except OSError as error:
        raise InputError(f"{path}: cannot be read ({error.strerror})") from error


def _until_now(file: io.BufferedReader) -> Iterator[bytes]:
    """The lines that are there when no one is writing, so that none is taken while half written."""
    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        yield from file
        return
    with contextlib.suppress(OSError):
        fcntl.flock(file, fcntl.LOCK_SH)
    left = os.fstat(file.fileno()).st_size
    with contextlib.suppress(OSError):
        fcntl.flock(file, fcntl.LOCK_UN)
    while left > 0 and (line := file.readline()[:left]):
        left -= len(line)
        yield line


def parse_run(line: bytes, *, base: Path, catalog: Catalog | None = None) -> Run:
    """The run on a line of a file that lies in ``base``."""
    try:
        data = json.loads(line.decode())
    except (ValueError, RecursionError) as error:
        if not line.endswith(b"\n"):
            raise HalfLine(f"half a line ({len(line):,} bytes), left by an interrupted program") from error
        raise InputError(f"not JSON ({error})") from error
    return Run.read(data, catalog=catalog, base=base)


@final
class RunsFile(Runs):
    """The runs of a ``.jsonl`` file.

    It is only read: half a line at its end is reported and left where it is.
    """

    def __init__(self, path: Path, *, report: Report = log.warning) -> None:
        self.path, self.name, self._report = path, str(path), report

    def runs(
        self, where: Filter = EVERYTHING, *, catalog: Catalog | None = None
    ) -> Iterator[tuple[int | str, Run]]:
        catalog = catalog or Catalog.load()
        for number, line in raw_lines(self.path):
            try:
                run = parse_run(line, base=self.path.parent, catalog=catalog)
                fits = where == EVERYTHING or where.matches(Entry.of(run))
            except HalfLine as error:
                self._report(f"{self.path}:{number}: {error}; it is not among the runs")
            except InputError as error:
                raise InputError(f"{self.path}:{number}: {error}") from error
            else:
                if fits:
                    yield number, run

    def entries(self, where: Filter = EVERYTHING, *, last: int | None = None) -> Iterator[Entry]:
        entries = (Entry.of(run) for _, run in self.runs(where))
        return entries if last is None else iter(collections.deque(entries, maxlen=last))

    def count(self, where: Filter = EVERYTHING) -> int:
        return sum(1 for _ in self.runs(where))

    def get(self, prefix: str) -> Entry:
        wanted = checked_prefix(prefix)
        return self._only((entry for entry in self.entries() if entry.id.startswith(wanted)), prefix)
