"""Reads Gavel's traces: tab-separated lines of ten fields, or seven in the old form, without a heading."""

from __future__ import annotations

from collections.abc import Sequence

from foretrain.errors import InputError
from foretrain.scheduling.jobs import MalformedLines, TraceJob

_PRESENT = {"steps": 5, "gpus": 6, "weight": 7, "arrival_s": 9}
_OLD = {"steps": 4, "arrival_s": 5, "gpus": 6}


def is_gavel(line: str) -> bool:
    return len(line.split("\t")) in (7, 10)


def read_gavel(lines: Sequence[str], malformed: MalformedLines) -> list[TraceJob]:
    """Jobs with a number of steps; a table of throughputs says how long those take."""
    jobs = []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        cells = line.split("\t")
        if len(cells) not in (7, 10):
            malformed.add(number, "neither seven nor ten fields")
            continue
        fields = _PRESENT if len(cells) == 10 else _OLD
        try:
            values = {name: float(cells[place]) for name, place in fields.items()}
            if not values["gpus"].is_integer():
                raise ValueError("a part of a device")
            jobs.append(
                TraceJob(
                    name=f"gavel-{number}",
                    kind=cells[0],
                    steps=values["steps"],
                    gpus=int(values["gpus"]),
                    arrival_s=values["arrival_s"],
                    weight=values.get("weight", 1.0),
                )
            )
        except (ValueError, InputError):
            malformed.add(number, "steps, devices, weight or arrival is not a valid number")
    return jobs
