"""Reads what Slurm accounted for: the text of ``sacct --parsable2``, whichever fields it was asked for."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from foretrain.errors import InputError
from foretrain.scheduling.jobs import MalformedLines, TraceJob
from foretrain.scheduling.traces.rows import NoJob, Row, Unfinished, read_rows, time_of

NEEDED = ("JobID", "Submit", "State")
"""Beside them one of AllocTRES, ReqTRES and AllocGRES, and Start and End, or Elapsed or ElapsedRaw."""
_STEP = re.compile(r"\.(batch|extern|interactive|\d+)$")
_TASKS = r"(\d+)(?:-(\d+)(?::([1-9]\d*))?)?"
"""Of an array: one, those from one to another, or every so many of these."""
_ARRAY = re.compile(rf"(?P<job>\d+)_\[(?P<tasks>{_TASKS}(?:,{_TASKS})*)(?:%\d+)?\]")
_MOST_TASKS = 4_000_001
"""The largest MaxArraySize of Slurm."""
_AGAIN = ("REQUEUED", "PREEMPTED", "NODE_FAIL")
_NOT_YET = ("PENDING", "RUNNING", "SUSPENDED", "RESIZING", "CONFIGURING", "COMPLETING")
_NONE = ("", "Unknown", "None", "N/A")
_LENGTH_UNKNOWN_S = 1.0


def is_sacct(line: str) -> bool:
    return set(NEEDED) <= set(line.strip().split("|"))


def read_sacct(lines: Sequence[str], malformed: MalformedLines) -> list[TraceJob]:
    """Jobs that ran and ended. Steps are part of their job; of a job that was queued again (``--duplicates``)
    the last try counts, from the first submission on."""
    tries: dict[str, list[tuple[int, dict[str, str] | None]]] = {}
    for number, row in _rows(lines):
        if row is None:
            tries[f"line {number}"] = [(number, None)]
        elif not _STEP.search(row["JobID"]):
            tries.setdefault(row["JobID"], []).append((number, row))
    return read_rows(_last_tries(tries, malformed), _job, malformed)


def unfinished_sacct(lines: Sequence[str]) -> list[Unfinished]:
    """Jobs that run or wait as the log ends; every task of a waiting array is one."""
    jobs: list[Unfinished] = []
    last: dict[str, dict[str, str]] = {}
    for _, row in _rows(lines):
        if row is not None and not _STEP.search(row["JobID"]):
            last[row["JobID"]] = row
    for row in last.values():
        state = row["State"].split()[0] if row["State"].strip() else ""
        try:
            gpus, device = _gpus(row)
            if state not in _NOT_YET or not gpus:
                continue
            ran_s = None if state == "PENDING" else max(_duration_s(row), 0.0)
            tasks = array_tasks(row["JobID"])
            names = [row["JobID"]] if tasks is None else tasks
            jobs += [Unfinished(_with(row, name, gpus, device, _LENGTH_UNKNOWN_S), ran_s) for name in names]
        except (NoJob, InputError):
            continue
    return jobs


def array_tasks(name: str) -> list[str] | None:
    """The tasks of an array that waits; None for a job that is none.

    >>> array_tasks("7_[1-3,5-9:2,12%2]")
    ['7_1', '7_2', '7_3', '7_5', '7_7', '7_9', '7_12']
    """
    match = _ARRAY.fullmatch(name)
    if match is None:
        return None
    ranges = [
        range(int(first), int(end or first) + 1, int(step or 1))
        for first, end, step in re.findall(_TASKS, match["tasks"])
    ]
    if any(each.stop > _MOST_TASKS for each in ranges):
        raise NoJob("an array of more tasks than Slurm has")
    return [f"{match['job']}_{task}" for each in ranges for task in each]


def _rows(lines: Sequence[str]) -> Iterator[tuple[int, dict[str, str] | None]]:
    numbered = [(number, line) for number, line in enumerate(lines, start=1) if line.strip()]
    heading = numbered[0][1].rstrip("|\r\n").split("|") if numbered else []
    missing = [name for name in NEEDED if name not in heading]
    if missing:
        raise InputError(f"not the text of sacct --parsable2 with {', '.join(NEEDED)} (has no {missing[0]})")
    for number, line in numbered[1:]:
        cells = line.rstrip("\r\n").split("|")
        if len(cells) == len(heading) + 1 and not cells[-1]:
            cells.pop()  # --parsable ends lines with a bar, --parsable2 does not
        yield number, dict(zip(heading, cells, strict=True)) if len(cells) == len(heading) else None


def _last_tries(
    tries: dict[str, list[tuple[int, dict[str, str] | None]]], malformed: MalformedLines
) -> Iterator[tuple[int, Row | None]]:
    for several in tries.values():
        number, last = several[-1]
        for earlier, _ in several[:-1]:
            malformed.add(earlier, "an earlier try of a job that was queued again")
        first = several[0][1]
        yield number, {**last, "Submit": first["Submit"]} if last and first else last


def _job(row: Row, number: int) -> TraceJob:
    state = row["State"].split()[0] if row["State"].strip() else ""
    if state in _NOT_YET:
        raise NoJob(f"{state.lower()}: how long it takes is not known yet")
    if state in _AGAIN:
        raise NoJob("a try that was queued again, without the next one")
    duration_s = _duration_s(row)
    gpus, device = _gpus(row)
    if not gpus:
        raise NoJob("a job without GPUs")
    if duration_s <= 0:
        raise NoJob("a job that never ran")
    return _with(row, row["JobID"], gpus, device, duration_s)


def _with(row: Row, name: str, gpus: int, device: str | None, duration_s: float) -> TraceJob:
    return TraceJob(
        name=name,
        arrival_s=time_of(row, "Submit"),
        duration_s=duration_s,
        gpus=gpus,
        device=device,
        group=row.get("Account", ""),
        user=row.get("User", ""),
        kind=row.get("JobName", ""),
        partition=row.get("Partition", "").split(",")[0],
        limit_s=_limit_s(row),
    )


def _duration_s(row: Row) -> float:
    for name in ("ElapsedRaw", "Elapsed"):
        if row.get(name, "") not in _NONE:
            text = row[name]
            return float(text) if text.isdigit() else clock_s(text, name)
    if row.get("Start", "") in _NONE or row.get("End", "") in _NONE:
        return 0.0
    return time_of(row, "End") - time_of(row, "Start")


def _limit_s(row: Row) -> float | None:
    raw = row.get("TimelimitRaw", "")
    if raw.isdigit():
        return 60.0 * float(raw) or None
    text = row.get("Timelimit", "")
    if text in (*_NONE, "UNLIMITED", "Partition_Limit"):
        return None
    return clock_s(text, "Timelimit") or None


def _gpus(row: Row) -> tuple[int, str | None]:
    """How many, and of which type where the accounting says so (``gres/gpu:a100=4``)."""
    for name in ("AllocTRES", "ReqTRES", "AllocGRES", "ReqGRES"):
        counts = {
            (match["kind"] or "").lower(): int(match["count"])
            for match in re.finditer(
                r"gpu(?::(?P<kind>[^=:,]*[^=:,\d][^=:,]*))?[=:](?P<count>\d+)", row.get(name, "")
            )
        }
        if counts:
            kinds = [kind for kind in counts if kind]
            count = counts.get("", sum(counts.values()))
            return count, kinds[0] if len(kinds) == 1 else None
    return 0, None


def clock_s(text: str, name: str) -> float:
    """Seconds of Slurm's ``days-hours:minutes:seconds``.

    >>> clock_s("1-02:00:00", "Elapsed"), clock_s("05:30", "Elapsed"), clock_s("00:10.250", "Elapsed")
    (93600.0, 330.0, 10.25)
    """
    match = re.fullmatch(r"(?:(\d+)-)?(?:(\d+):)?(\d+):(\d+(?:\.\d+)?)", text)
    if match is None:
        raise NoJob(f"{name} is not a time")
    days, hours, minutes, seconds = (float(part or 0) for part in match.groups())
    return ((days * 24 + hours) * 60 + minutes) * 60 + seconds
