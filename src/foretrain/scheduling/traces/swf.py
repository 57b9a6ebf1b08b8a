"""Reads the Standard Workload Format of the Parallel Workloads Archive: eighteen numbers a line."""

from __future__ import annotations

from collections.abc import Sequence

from foretrain.scheduling.jobs import MalformedLines, TraceJob

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
            values = [float(cell) for cell in line.split()]
        except ValueError:
            malformed.add(number, "a field is not a number")
            continue
        if len(values) != _FIELDS:
            malformed.add(number, "not eighteen fields")
            continue
        job, arrival_s, duration_s, held, asked, limit_s, user, queue = (values[place] for place in _PLACES)
        gpus = int(held if held > 0 else asked)
        if gpus < 1 or duration_s <= 0:
            malformed.add(number, "no processors or no run time")
            continue
        jobs.append(
            TraceJob(
                name=f"{job:.0f}",
                arrival_s=arrival_s,
                duration_s=duration_s,
                gpus=gpus,
                group=f"queue {queue:.0f}",
                user=f"user {user:.0f}" if user >= 0 else "",
                limit_s=limit_s if limit_s > 0 else None,
            )
        )
    return jobs
