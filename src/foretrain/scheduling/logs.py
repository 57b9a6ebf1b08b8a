"""Writes every stretch in which a job held GPUs as CSV or Parquet, and as a trace for Perfetto."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from foretrain.errors import ForetrainError, unknown
from foretrain.files import write_atomically
from foretrain.scheduling.result import Result

COLUMNS = ("policy", "job", "group", "start_s", "end_s", "reason", "device", "gpus", "places")


def log_rows(result: Result) -> Iterator[tuple[str, str, str, float, float, str, str, int, str]]:
    """One row per stretch: ``places`` lists the GPUs as node:gpu."""
    for segment in result.segments:
        job, parts = result.jobs[segment.job], segment.allocation.parts
        places = " ".join(f"{node}:{gpu}" for node, gpu in segment.allocation.places())
        times = (segment.start_s, segment.end_s)
        device = "+".join(dict.fromkeys(result.machines[node].device for node, _ in parts))
        gpus = segment.allocation.gpus
        yield result.policy, job.name, job.group, *times, segment.reason, device, gpus, places


def write_log(result: Result, path: Path) -> int:
    """As CSV or Parquet, by the name of the file; returns the number of rows."""
    rows = list(log_rows(result))
    if path.suffix == ".csv":
        text = io.StringIO()
        writer = csv.writer(text, lineterminator="\n")
        writer.writerow(COLUMNS)
        writer.writerows([repr(cell) if isinstance(cell, float) else cell for cell in row] for row in rows)
        write_atomically(path, text.getvalue())
    elif path.suffix == ".parquet":
        _write_parquet(rows, path)
    else:
        raise unknown("log", path.suffix or path.name, (".csv", ".parquet"), "a file of")
    return len(rows)


def _write_parquet(rows: list[Any], path: Path) -> None:
    try:
        import pyarrow
        from pyarrow import parquet
    except ImportError as error:
        raise ForetrainError("parquet: pyarrow is not installed; install foretrain[learn]") from error
    columns = {name: [row[place] for row in rows] for place, name in enumerate(COLUMNS)}
    sink = pyarrow.BufferOutputStream()
    parquet.write_table(pyarrow.table(columns), sink)
    write_atomically(path, sink.getvalue().to_pybytes())


def write_perfetto(result: Result, path: Path) -> int:
    """A track per GPU, a process per node, in the Chrome trace format; returns the number of events."""
    events: list[dict[str, Any]] = [
        {"ph": "M", "name": "process_name", "pid": node, "args": {"name": f"node {node} ({machine.device})"}}
        for node, machine in enumerate(result.machines)
    ]
    for segment in result.segments:
        job = result.jobs[segment.job]
        about = {"group": job.group, "gpus": segment.allocation.gpus, "ended": segment.reason}
        span = {"ts": segment.start_s * 1e6, "dur": (segment.end_s - segment.start_s) * 1e6, "args": about}
        event = {"ph": "X", "name": job.name, "cat": segment.reason, **span}
        events += [{**event, "pid": node, "tid": gpu} for node, gpu in segment.allocation.places()]
    write_atomically(path, json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}, allow_nan=False))
    return len(events)
