"""Describes measured runs as they are kept: by a hash of their content, and the interface of every store."""

from __future__ import annotations

import abc
import datetime
import hashlib
import json
import logging
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from foretrain.cluster import Catalog
from foretrain.errors import ForetrainError, InputError, invalid
from foretrain.job import path_seen_from
from foretrain.run import Run, sampled_figures
from foretrain.workload import FILE_SOURCES

FORMAT = 1
"""The version of the run format that is written; runs in a newer one are not guessed at."""

IDENTITY = ("source", "label", "path", "file", "section", "line", "host", "started")
"""What of the provenance tells runs apart whose job and figures are the same; notes, licences and versions do
not."""

COLUMNS = ("source", "label", "model", "device")
_LONGEST = 200
log = logging.getLogger(__name__)
Report = Callable[[str], None]


class StoreError(ForetrainError):
    """A store that cannot be reached, read or written."""


class HalfLine(InputError):
    """The end of a runs file that a program left when it was killed."""


class NoSuchRun(InputError):
    """An id that no run of a store has."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """A run as it is kept: the plain JSON document, the columns to find it by, and an id of its content."""

    id: str
    source: str
    label: str
    model: str
    device: str
    document: Mapping[str, Any]
    base: str
    """The folder that a relative path of the model starts from."""
    created: datetime.datetime | None = None
    format: int = FORMAT

    @classmethod
    def of(cls, run: Run) -> Entry:
        document, workload = json.loads(_plain_json(run.to_dict())), run.job.workload
        devices = dict.fromkeys(group.device.name for group in run.job.cluster.groups)
        return cls(
            id=content_hash(run),
            source=str(run.provenance.get("source", ""))[:_LONGEST],
            label=str(run.provenance.get("label", ""))[:_LONGEST],
            model=workload.model.label[:_LONGEST],
            device=", ".join(devices),
            document=document,
            base=str(workload.base.absolute()) if workload.model.source in FILE_SOURCES else "",
        )

    @property
    def short_id(self) -> str:
        return self.id[:12]

    def run(self, catalog: Catalog | None = None) -> Run:
        if self.format > FORMAT:
            versions = f"it is in format {self.format} and this foretrain reads {FORMAT}"
            raise StoreError(f"run {self.short_id}: {versions}; update foretrain")
        try:
            return Run.read(self.document, catalog=catalog, base=Path(self.base))
        except InputError as error:
            raise InputError(f"run {self.short_id}: {error}") from error

    def seen_from(self, folder: Path) -> dict[str, Any]:
        """The document for a file in ``folder``: the path of its model starts there."""
        document = dict(self.document)
        if self.base:
            model = document["job"]["model"]
            name = path_seen_from(model["name"], Path(self.base), folder)
            document["job"] = {**document["job"], "model": {**model, "name": name}}
        return document


def content_hash(run: Run) -> str:
    """Equal for runs of the same job, figures and identifying provenance, wherever the model's file lies."""
    job = run.to_dict()["job"]
    if job["model"]["source"] in FILE_SOURCES:
        job["model"] = {**job["model"], "name": job["model"]["name"].rpartition("/")[2]}
    provenance = {key: run.provenance[key] for key in IDENTITY if key in run.provenance}
    sampled = sampled_figures(run.provenance)
    measured = {name: value for name, value in run.measured.items() if sampled.get(name) != value}
    content = _same_numbers(json.loads(_plain_json([job, measured, provenance])))
    return hashlib.sha256(json.dumps(content, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def _plain_json(document: object) -> str:
    """Strict JSON that every database takes: no NaN or infinity, no NUL characters, no broken Unicode."""
    try:
        text = json.dumps(document, allow_nan=False, ensure_ascii=False)
        text.encode()
    except (TypeError, ValueError, RecursionError) as error:
        raise InputError(f"run: it cannot be kept as JSON ({error})") from error
    if re.search(r"(?<!\\)(?:\\\\)*\\u0000", text):
        raise InputError("run: it cannot be kept, because a text in it has a NUL character")
    return text


def _same_numbers(value: Any) -> Any:
    """Give each number one form, because a database may give 1.0 back as 1 and 1e+20 as a whole number."""
    if isinstance(value, dict):
        return {key: _same_numbers(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_same_numbers(item) for item in value]
    if isinstance(value, float) and value.is_integer() and abs(value) <= 2**53:
        return int(value)
    if isinstance(value, int) and 2**53 < abs(value) < 10**308:
        return float(value)
    return value


@dataclass(frozen=True, slots=True, kw_only=True)
class Filter:
    """Says which runs: columns compare without regard to case, ``*`` is anything; ``quantity`` is
    measured."""

    source: str | None = None
    label: str | None = None
    model: str | None = None
    device: str | None = None
    """In a mixed cluster, one of its devices."""
    quantity: str | None = None

    def matches(self, entry: Entry) -> bool:
        patterns = {name: pattern for name in COLUMNS if (pattern := getattr(self, name)) is not None}
        fits = all(
            any(_fits(part, pattern) for part in _parts(name, getattr(entry, name)))
            for name, pattern in patterns.items()
        )
        return fits and (self.quantity is None or self.quantity in entry.document["measured"])


EVERYTHING = Filter()


def _parts(name: str, value: str) -> list[str]:
    return value.split(", ") if name == "device" else [value]


def _fits(value: str, pattern: str) -> bool:
    expression = ".*".join(map(re.escape, pattern.split("*")))
    return re.fullmatch(expression, value, re.IGNORECASE | re.DOTALL) is not None


class Runs(abc.ABC):
    """Kept runs, in the order in which they came."""

    name: str
    """What the user calls it, without a password."""

    @abc.abstractmethod
    def entries(self, where: Filter = EVERYTHING, *, last: int | None = None) -> Iterator[Entry]:
        """The runs as they are kept, read as they are needed; with ``last``, only so many of the newest."""

    @abc.abstractmethod
    def runs(
        self, where: Filter = EVERYTHING, *, catalog: Catalog | None = None
    ) -> Iterator[tuple[int | str, Run]]:
        """The runs, each with its line number or its id."""

    @abc.abstractmethod
    def count(self, where: Filter = EVERYTHING) -> int: ...

    @abc.abstractmethod
    def get(self, prefix: str) -> Entry:
        """The one run whose id starts with ``prefix``."""

    def close(self) -> None:  # noqa: B027
        """Let go of connections."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _only(self, matching: Iterable[Entry], prefix: str) -> Entry:
        entries = list({entry.id: entry for entry in matching}.values())
        if not entries:
            raise NoSuchRun(f"id: no run in {self.name} has an id that starts with {prefix!r}")
        if len(entries) > 1:
            several = f"several runs in {self.name} have an id that starts with {prefix!r}"
            raise InputError(f"id: {several}; give more of it")
        return entries[0]


def checked_prefix(prefix: str) -> str:
    if not re.fullmatch("[0-9a-fA-F]{1,64}", prefix):
        allowed = "the start of an id (digits and the letters a to f), as `foretrain runs list` prints it"
        raise invalid("id", prefix, allowed)
    return prefix.lower()
