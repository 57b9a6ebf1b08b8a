"""Turns lines of trace files into rows, cells into numbers, and says of every line that is no job why."""

from __future__ import annotations

import csv
import gzip
import math
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import NamedTuple

from foretrain.errors import InputError, first_line
from foretrain.files import read_text
from foretrain.scheduling.jobs import MalformedLines, TraceJob

Row = Mapping[str, str]


class Unfinished(NamedTuple):
    """A job whose length is not known yet (its own counts for nothing), and for how long it has run; None for
    one that waits."""

    job: TraceJob
    ran_s: float | None


class NoJob(Exception):
    """A line that is no job, and why."""


def lines_of(path: Path) -> list[str]:
    """The lines of a file, decompressed when its name ends in ``.gz`` or ``.zst``."""
    if path.suffix != ".gz":
        return read_text(path).splitlines()
    try:
        return gzip.decompress(path.read_bytes()).decode("utf-8-sig").splitlines()
    except (OSError, EOFError, UnicodeDecodeError, zlib.error) as error:
        raise InputError(f"{path}: cannot be read ({getattr(error, 'strerror', None) or error})") from error


def dictionaries(
    lines: Sequence[str], heading: Sequence[str] | None = None
) -> Iterator[tuple[int, dict[str, str] | None]]:
    """Rows of a CSV file with the numbers of their lines; None for one with too few or too many cells. Blanks
    after a comma, and around the names of columns, count for nothing."""
    reader = csv.reader(lines, skipinitialspace=True)
    names = list(heading) if heading is not None else [name.strip() for name in next(reader, [])]
    for cells in reader:
        if cells:
            yield reader.line_num, dict(zip(names, cells, strict=True)) if len(cells) == len(names) else None


def read_rows(
    rows: Iterator[tuple[int, Row | None]], job_of: Callable[[Row, int], TraceJob], malformed: MalformedLines
) -> list[TraceJob]:
    """A job from each row; what is none is counted."""
    jobs = []
    for number, row in rows:
        if row is None:
            malformed.add(number, "another number of cells than the heading")
            continue
        try:
            jobs.append(job_of(row, number))
        except NoJob as error:
            malformed.add(number, str(error))
        except InputError as error:
            malformed.add(number, first_line(error).partition(":")[0] + " is not valid")
    return jobs


def number_of(row: Row, name: str, *, default: float | None = None) -> float:
    """A finite number from a cell."""
    text = row.get(name, "")
    if text.strip() == "" and default is not None:
        return default
    try:
        value = float(text)
    except ValueError:
        raise NoJob(f"{name} is not a number") from None
    if not math.isfinite(value):
        raise NoJob(f"{name} is not a number")
    return value


def positive(row: Row, name: str) -> float:
    value = number_of(row, name)
    if value <= 0:
        raise NoJob(f"{name} is not above zero")
    return value


def count_of(row: Row, name: str) -> int:
    """A whole number of at least one."""
    value = number_of(row, name)
    if value < 1 or value != int(value):
        raise NoJob(f"{name} is not a whole number of at least 1")
    return int(value)


def time_of(row: Row, name: str) -> float:
    """Seconds, from a number or from a date and time (taken as UTC)."""
    text = row.get(name, "").strip()
    try:
        return float(text)
    except ValueError:
        pass
    try:
        return datetime.fromisoformat(text).replace(tzinfo=UTC).timestamp()
    except ValueError:
        raise NoJob(f"{name} is not a time") from None
