"""The Standard Workload Format of the Parallel Workloads Archive: eighteen numbers a line, comments after a semicolon."""

from __future__ import annotations

from collections.abc import Sequence

from foretrain.scheduling.jobs import MalformedLines, TraceJob

_FIELDS = 18


def is_swf(line: str) -> bool:
    return line.startswith(";") or (len(line.split()) == _FIELDS and "," not in line)


def read_swf(lines: Sequence[str], malformed: MalformedLines) -> list[TraceJob]:
    """Processors are taken as GPUs; the queue is the group."""
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
        gpus = int(values[4] if values[4] > 0 else values[7])
        if gpus < 1 or values[3] <= 0:
            malformed.add(number, "no processors or no run time")
            continue
        jobs.append(
            TraceJob(
                name=f"{values[0]:.0f}",
                arrival_s=values[1],
                duration_s=values[3],
                gpus=gpus,
                group=f"queue {values[14]:.0f}",
            )
        )
    return jobs
