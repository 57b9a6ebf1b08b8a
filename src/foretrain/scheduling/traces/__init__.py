"""Reads traces of any known format and counts the lines that are no jobs, with the reason of each."""

from __future__ import annotations

import csv
import io
from collections.abc import Callable, Sequence
from pathlib import Path

from foretrain.errors import InputError, unknown
from foretrain.files import write_atomically
from foretrain.scheduling.jobs import MalformedLines, Trace, TraceJob, in_order
from foretrain.scheduling.traces import tables
from foretrain.scheduling.traces.gavel import is_gavel, read_gavel
from foretrain.scheduling.traces.kubernetes import is_kubernetes, read_kubernetes
from foretrain.scheduling.traces.rows import dictionaries, lines_of, read_rows
from foretrain.scheduling.traces.slurm import is_sacct, read_sacct
from foretrain.scheduling.traces.swf import is_swf, read_swf

__all__ = ["FORMATS", "read_trace", "write_trace"]


def _with_heading(name: str) -> Callable[[Sequence[str], MalformedLines], list[TraceJob]]:
    def read(lines: Sequence[str], malformed: MalformedLines) -> list[TraceJob]:
        try:
            return read_rows(dictionaries(lines), tables.HEADINGS[name][1], malformed)
        except KeyError as error:
            raise InputError(f"has no column {error.args[0]}, which the format {name} needs") from error

    return read


def _alibaba_2020(lines: Sequence[str], malformed: MalformedLines) -> list[TraceJob]:
    heading = None if lines and lines[0].startswith("job_name") else tables.ALIBABA_2020
    return read_rows(dictionaries(lines, heading), tables.alibaba_2020, malformed)


FORMATS: dict[str, Callable[[Sequence[str], MalformedLines], list[TraceJob]]] = {
    **{name: _with_heading(name) for name in tables.HEADINGS},
    "alibaba-2020": _alibaba_2020,
    "gavel": read_gavel,
    "swf": read_swf,
    "sacct": read_sacct,
    "kubernetes": read_kubernetes,
}


def read_trace(path: Path, format: str | None = None) -> Trace:
    """The jobs of a file in order of arrival, the first at 0; the format, unless given, is recognised."""
    if format is not None and format not in FORMATS:
        raise unknown("format", format, FORMATS)
    lines = lines_of(path)
    name = format or format_of(path, lines)
    malformed = MalformedLines()
    try:
        found = FORMATS[name](lines, malformed)
    except (InputError, csv.Error) as error:
        raise InputError(f"{path}: {error}") from error
    jobs = _without_namesakes(found, malformed)
    if not jobs:
        reasons = "; ".join(malformed.result().lines())
        raise InputError(f"{path}: holds no jobs in the format {name}" + (f" ({reasons})" if reasons else ""))
    ordered = in_order(jobs, from_zero=name != "gavel")
    return Trace(name=path.name, format=name, jobs=ordered, malformed=malformed.result())


def _without_namesakes(jobs: Sequence[TraceJob], malformed: MalformedLines) -> list[TraceJob]:
    """Each name once: the first job that has it."""
    by_name: dict[str, TraceJob] = {}
    for number, job in enumerate(jobs, start=1):
        if by_name.setdefault(job.name, job) is not job:
            malformed.add(number, "the name of an earlier job (counted in jobs, not lines)")
    return list(by_name.values())


def format_of(path: Path, lines: Sequence[str]) -> str:
    """By the look of its lines."""
    first = next((line for line in lines if line.strip()), None)
    if first is None:
        raise InputError(f"{path}: empty")
    columns = {cell.strip() for cell in first.split(",")}
    for name, (needed, _) in tables.HEADINGS.items():
        if needed <= columns:
            return name
    if is_gavel(first):
        return "gavel"
    if is_swf(first):
        return "swf"
    if is_sacct(first):
        return "sacct"
    if first.startswith("job_name,") or len(first.split(",")) == len(tables.ALIBABA_2020):
        return "alibaba-2020"
    if is_kubernetes("\n".join(lines[:2000])):
        return "kubernetes"
    if first.startswith(("{", "[")):
        raise InputError(
            f"{path}: holds JSON, which is no format of traces; a table of throughputs goes to --throughputs"
        )
    for what, needed in tables.NO_JOBS.items():
        if needed <= columns:
            raise InputError(f"{path}: {what}, not a trace of jobs")
    raise InputError(f"{path}: not a trace of a known format ({', '.join(FORMATS)}); name it with --format")


def write_trace(path: Path, jobs: Sequence[TraceJob]) -> None:
    """In the project's own format."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(tables.FORETRAIN)
    for job in jobs:
        writer.writerow([_cell(getattr(job, name)) for name in tables.FORETRAIN])
    write_atomically(path, text.getvalue())


def _cell(value: object) -> object:
    return "" if value is None else repr(value) if isinstance(value, float) else value
