"""Keeps measured runs in files of JSON lines, for hand work, or in a database behind a URL, for teams."""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Iterator
from pathlib import Path

from foretrain.cluster import Catalog
from foretrain.files import data_folder
from foretrain.measure.store.connecting import hide_password
from foretrain.measure.store.database import Added, SavedPredictor, Store
from foretrain.measure.store.entries import (
    EVERYTHING,
    Entry,
    Filter,
    HalfLine,
    NoSuchRun,
    Report,
    Runs,
    StoreError,
    content_hash,
    log,
)
from foretrain.measure.store.lines import RunsFile, append_run, parse_run, raw_lines
from foretrain.run import Run

__all__ = [
    "Added",
    "Entry",
    "Filter",
    "HalfLine",
    "NoSuchRun",
    "Runs",
    "RunsFile",
    "SavedPredictor",
    "Store",
    "StoreError",
    "append_run",
    "content_hash",
    "default_store",
    "hide_password",
    "is_database",
    "open_runs",
    "open_store",
    "parse_run",
    "raw_lines",
]


def default_store() -> str:
    """Name the store: ``$FORETRAIN_STORE``, or a file in the user's data folder."""
    return os.environ.get("FORETRAIN_STORE") or str(data_folder() / "runs.db")


def is_database(where: str | Path) -> bool:
    """Whether this is a URL or an SQLite file rather than a file of JSON lines."""
    if "://" in str(where) or Path(where).suffix in (".db", ".sqlite", ".sqlite3"):
        return True
    with contextlib.suppress(OSError), Path(where).open("rb") as file:
        return stat.S_ISREG(os.fstat(file.fileno()).st_mode) and file.read(16) == b"SQLite format 3\0"
    return False


def open_store(where: str | Path, *, report: Report = log.warning) -> Runs:
    """The kept runs of a file or behind a URL, for reading."""
    return Store.open(where, create=False) if is_database(where) else RunsFile(Path(where), report=report)


def open_runs(
    where: str | Path,
    *,
    select: Filter = EVERYTHING,
    catalog: Catalog | None = None,
    report: Report = log.warning,
) -> Iterator[tuple[int | str, Run]]:
    """The runs of a ``.jsonl`` file with their line numbers, or those behind a URL with their ids."""
    with open_store(where, report=report) as store:
        yield from store.runs(select, catalog=catalog)
