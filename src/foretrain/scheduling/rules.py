"""Reads the rules of a cluster that people share: quotas, cohorts, shares, classes of jobs, reservations."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from foretrain.errors import InputError, invalid, unknown
from foretrain.files import read_tables
from foretrain.units import parse_seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class Queue:
    """What a group of jobs may have: Slurm's account or QOS, Kueue's ClusterQueue."""

    gpus: int | None = None
    """Its own GPUs; None for no limit."""
    cohort: str = ""
    """Queues of one cohort lend each other what they do not use (Kueue)."""
    borrow: int | None = None
    """GPUs beyond its own that it may have from its cohort; None for as many as there are."""
    shares: float = 1.0
    """Of the fair share."""

    def __post_init__(self) -> None:
        for name in ("gpus", "borrow"):
            value = getattr(self, name)
            if value is not None and not (_is_whole(value) and value >= 0):
                raise invalid(name, value, "a whole number of at least 0")
        if not isinstance(self.cohort, str):
            raise invalid("cohort", self.cohort, "a text")
        if self.borrow is not None and not self.cohort:
            raise InputError(f"borrow: {self.borrow} needs a cohort to borrow from, and the queue has none")
        if not (_is_number(self.shares) and 0 < self.shares < math.inf):
            raise invalid("shares", self.shares, "a number greater than zero")


@dataclass(frozen=True, slots=True, kw_only=True)
class Reservation:
    """GPUs that are kept for a group from one time to another; for nobody (maintenance) without a group."""

    start_s: float
    end_s: float
    gpus: int
    group: str = ""
    device: str | None = None
    """Of which kind of device; None for all of them together."""
    partition: str = ""
    """Of which part of the cluster; empty for all of them together."""

    def __post_init__(self) -> None:
        if not 0 <= self.start_s < self.end_s < math.inf:
            raise invalid("start, end", (self.start_s, self.end_s), "times from 0 on, in this order")
        if not (_is_whole(self.gpus) and self.gpus >= 1):
            raise invalid("gpus", self.gpus, "a whole number of at least 1")
        for name in ("group", "partition", *(["device"] if self.device is not None else [])):
            if not isinstance(getattr(self, name), str):
                raise invalid(name, getattr(self, name), "a text")


def _is_whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


@dataclass(frozen=True, slots=True, kw_only=True)
class Rules:
    """What those who run a cluster set."""

    queues: Mapping[str, Queue] = field(default_factory=dict)
    reservations: Sequence[Reservation] = ()
    preempt: bool = False
    """Whether jobs of a higher priority take the GPUs of jobs of a lower one."""
    kill: bool = False
    """Whether jobs end at the limit that they asked for."""

    def queue(self, group: str) -> Queue:
        return self.queues.get(group, _OPEN)

    @property
    def groups(self) -> set[str]:
        """Those that queues and reservations name."""
        return {*self.queues, *(each.group for each in self.reservations if each.group)}

    @property
    def has_quotas(self) -> bool:
        return any(queue.gpus is not None for queue in self.queues.values())

    @property
    def has_shares(self) -> bool:
        return any(queue.shares != 1.0 for queue in self.queues.values())


_OPEN = Queue()
_KEYS = {
    "queue": ("gpus", "cohort", "borrow", "shares"),
    "reservation": ("start", "end", "gpus", "group", "device", "partition"),
}


def read_rules(path: Path) -> Rules:
    """From a TOML file: ``preempt``, ``kill``, ``[queue.NAME]`` and ``[[reservation]]``."""
    document = read_tables(path)
    try:
        return _rules(document)
    except InputError as error:
        raise InputError(f"{path}: {error}") from error


def _rules(document: Mapping[str, Any]) -> Rules:
    known = ("preempt", "kill", "queue", "reservation")
    for key in document:
        if key not in known:
            raise unknown("key", key, known)
    for key in ("preempt", "kill"):
        if not isinstance(document.get(key, False), bool):
            raise invalid(key, document[key], "true or false")
    queues = document.get("queue", {})
    reservations = document.get("reservation", [])
    if not isinstance(queues, dict) or not all(isinstance(each, dict) for each in queues.values()):
        raise InputError("queue: not tables such as [queue.research] with gpus = 16")
    if not isinstance(reservations, list) or not all(isinstance(each, dict) for each in reservations):
        raise InputError("reservation: not tables such as [[reservation]] with start, end and gpus")
    return Rules(
        queues={name: _queue(f"queue.{name}", each) for name, each in queues.items()},
        reservations=tuple(
            _reservation("reservation" if len(reservations) == 1 else f"reservation[{number}]", each)
            for number, each in enumerate(reservations)
        ),
        preempt=document.get("preempt", False),
        kill=document.get("kill", False),
    )


def _checked(where: str, table: Mapping[str, Any], kind: str) -> dict[str, Any]:
    for key in table:
        if key not in _KEYS[kind]:
            raise unknown(f"{where}: key", key, _KEYS[kind])
    return dict(table)


def _queue(where: str, table: Mapping[str, Any]) -> Queue:
    checked = _checked(where, table, "queue")
    with _within(where):
        return Queue(**checked)


def _reservation(where: str, table: Mapping[str, Any]) -> Reservation:
    checked = _checked(where, table, "reservation")
    missing = next((key for key in ("start", "end", "gpus") if key not in checked), None)
    if missing is not None:
        raise InputError(f"{where}: has no {missing}; one has start, end and gpus")
    start, end = checked.pop("start"), checked.pop("end")
    start_s, end_s = _seconds(f"{where}.start", start), _seconds(f"{where}.end", end)
    if not 0 <= start_s < math.inf:
        raise invalid(f"{where}.start", start, "a time of at least 0")
    if not start_s < end_s < math.inf:
        raise invalid(f"{where}.end", end, f"a time after its start, {start!r}")
    with _within(where):
        return Reservation(start_s=start_s, end_s=end_s, **checked)


@contextlib.contextmanager
def _within(where: str) -> Iterator[None]:
    """Errors of a field with the table that it stands in before it."""
    try:
        yield
    except InputError as error:
        raise InputError(f"{where}.{error}") from error


def _seconds(where: str, value: Any) -> float:
    """From the first arrival on: seconds, or text such as "36h"."""
    if _is_number(value):
        return float(value)
    return parse_seconds(str(value), where)
