"""Reads the Standard Workload Format of the Parallel Workloads Archive: eighteen numbers a line."""

from __future__ import annotations

import math
from collections.abc import Sequence

from foretrain.errors import InputError, first_line
from foretrain.scheduling.jobs import MalformedLines, TraceJob
from foretrain.scheduling.traces.rows import NoJob

_FIELDS = 18
_PLACES = (0, 1, 3, 4, 7, 8, 11, 14)
"""Of the job's number, submit time, run time, allocated and requested processors, requested time, user and
queue."""


def is_swf(line: str) -> bool:
    return line.startswith(";") or (len(line.split()) == _FIELDS and "," not in line)


def read_swf(lines: Sequence[str], malformed: MalformedLines) -> list[TraceJob]:
    """Processors are taken as GPUs, the queue is the group and the requested time the limit."""
    jobs = []
    for number, line in enumerate(lines, start=1):
        if not line.strip() or line.startswith(";"):
            continue
        try:
            jobs.append(_job(line))
        except NoJob as error:
            malformed.add(number, str(error))
        except InputError as error:
            malformed.add(number, first_line(error).partition(":")[0] + " is not valid")
    return jobs


def _job(line: str) -> TraceJob:
    try:
        values = [float(cell) for cell in line.split()]
    except ValueError:
        raise NoJob("a field is not a number") from None
    if len(values) != _FIELDS:
        raise NoJob("not eighteen fields")
    used = [values[place] for place in _PLACES]
    if not all(map(math.isfinite, used)):
        raise NoJob("a field is not a number")
    job, arrival_s, duration_s, held, asked, limit_s, user, queue = used
    gpus = held if held > 0 else asked
    if gpus < 1 or duration_s <= 0:
        raise NoJob("no processors or no run time")
    if not gpus.is_integer():
        raise NoJob("no whole number of processors")
    return TraceJob(
        name=f"{job:.0f}",
        arrival_s=arrival_s,
        duration_s=duration_s,
        gpus=int(gpus),
        group=f"queue {queue:.0f}",
        user=f"user {user:.0f}" if user >= 0 else "",
        limit_s=limit_s if limit_s > 0 else None,
    )
