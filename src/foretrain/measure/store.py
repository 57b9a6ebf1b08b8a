"""Measured runs in, to files of JSON lines for hand work or to a database behind a URL for teams; the same runs out."""

from __future__ import annotations

import abc
import collections
import contextlib
import datetime
import errno
import fcntl
import functools
import hashlib
import io
import json
import logging
import os
import re
import stat
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Self, final

from foretrain.cluster import Catalog
from foretrain.errors import ForetrainError, InputError, invalid
from foretrain.job import Run

if TYPE_CHECKING:
    import sqlalchemy as sa

LAYOUT = 1
"""The version of the tables; a store with newer ones is not touched."""

FORMAT = 1
"""The version of the run format that is written; runs in a newer one are not guessed at."""

IDENTITY = ("source", "label", "path", "file", "section", "line", "host", "started")
"""What of the provenance tells runs apart whose job and figures are the same; notes, licences and versions do not."""

_FILE_SOURCES = ("python", "onnx", "graph")
_COLUMNS = ("source", "label", "model", "device")
_LONGEST = 200
_PAGE = 500
_WRITER_LOCK = 0x666F7265
_log = logging.getLogger(__name__)
Report = Callable[[str], None]


class StoreError(ForetrainError):
    """A store that cannot be reached, read or written."""


class HalfLine(InputError):
    """The end of a runs file that a program left when it was killed."""


# Runs as they are kept


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """A run as it is kept: the plain JSON document, the columns that it is found by, and an id made from its content."""

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
        document = json.loads(_plain_json(run.to_dict()))
        devices = dict.fromkeys(group.device.name for group in run.job.cluster.groups)
        return cls(
            id=content_hash(run),
            source=str(run.provenance.get("source", ""))[:_LONGEST],
            label=str(run.provenance.get("label", ""))[:_LONGEST],
            model=run.job.workload.model.label[:_LONGEST],
            device=", ".join(devices),
            document=document,
            base=str(run.job.workload.base.absolute()) if run.job.workload.model.source in _FILE_SOURCES else "",
        )

    @property
    def short_id(self) -> str:
        return self.id[:12]

    def run(self, catalog: Catalog | None = None) -> Run:
        if self.format > FORMAT:
            raise StoreError(f"run {self.short_id}: it is in format {self.format} and this foretrain reads {FORMAT}; update foretrain")
        try:
            return Run.read(self.document, catalog=catalog, base=Path(self.base))
        except InputError as error:
            raise InputError(f"run {self.short_id}: {error}") from error

    def seen_from(self, folder: Path) -> dict[str, Any]:
        """The document for a file in ``folder``: a model whose path started elsewhere gets its whole path."""
        document = dict(self.document)
        if self.base and Path(self.base) != folder.absolute():
            model = document["job"]["model"]
            document["job"] = {**document["job"], "model": {**model, "name": str(Path(self.base) / model["name"])}}
        return document


def content_hash(run: Run) -> str:
    """Equal for two runs with the same canonical job, figures and identifying provenance, wherever the model's file lies."""
    job = run.to_dict()["job"]
    if job["model"]["source"] in _FILE_SOURCES:
        job["model"] = {**job["model"], "name": job["model"]["name"].rpartition("/")[2]}
    provenance = {key: run.provenance[key] for key in IDENTITY if key in run.provenance}
    content = _same_numbers(json.loads(_plain_json([job, dict(run.measured), provenance])))
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
    """One form for each number, because a database may give 1.0 back as 1 and 1e+20 as a whole number."""
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
    """Which runs: a column is compared without regard to case, ``*`` stands for anything; ``quantity`` must have been measured."""

    source: str | None = None
    label: str | None = None
    model: str | None = None
    device: str | None = None
    """In a mixed cluster, one of its devices."""
    quantity: str | None = None

    def matches(self, entry: Entry) -> bool:
        asked = {name: pattern for name in _COLUMNS if (pattern := getattr(self, name)) is not None}
        fits = all(any(_fits(part, asked[name]) for part in _parts(name, getattr(entry, name))) for name in asked)
        return fits and (self.quantity is None or self.quantity in entry.document["measured"])


EVERYTHING = Filter()


def _parts(name: str, value: str) -> list[str]:
    return value.split(", ") if name == "device" else [value]


def _fits(value: str, pattern: str) -> bool:
    return re.fullmatch(".*".join(map(re.escape, pattern.split("*"))), value, re.IGNORECASE | re.DOTALL) is not None


class Runs(abc.ABC):
    """Kept runs, in the order in which they came."""

    name: str
    """What the user calls it, without a password."""

    @abc.abstractmethod
    def entries(self, where: Filter = EVERYTHING, *, last: int | None = None) -> Iterator[Entry]:
        """The runs as they are kept, read as they are asked for; with ``last``, only so many of the newest."""

    @abc.abstractmethod
    def runs(self, where: Filter = EVERYTHING, *, catalog: Catalog | None = None) -> Iterator[tuple[int | str, Run]]:
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

    def _only(self, found: Iterable[Entry], prefix: str) -> Entry:
        entries = list({entry.id: entry for entry in found}.values())
        if not entries:
            raise InputError(f"id: no run in {self.name} has an id that starts with {prefix!r}")
        if len(entries) > 1:
            raise InputError(f"id: several runs in {self.name} have an id that starts with {prefix!r}; give more of it")
        return entries[0]


def _checked_prefix(prefix: str) -> str:
    if not re.fullmatch("[0-9a-fA-F]{1,64}", prefix):
        raise invalid("id", prefix, "the start of an id (digits and the letters a to f), as `foretrain runs list` prints it")
    return prefix.lower()


# Files of JSON lines


def append_run(path: Path, run: Mapping[str, Any], *, report: Report = _log.warning) -> None:
    """Add one line and see it onto the disk: whole or not at all, whoever else appends and whatever interrupts it.

    Half a line that a killed program left is moved to ``<name>.partial`` first, and ``report`` is told.
    """
    if path.suffix == ".zst":
        raise InputError(f"{path}: compressed files are read, not added to; name a .jsonl file")
    try:
        line = json.dumps(run, allow_nan=False).encode() + b"\n"
    except (TypeError, ValueError) as error:
        raise InputError(f"{path}: the run cannot be written as JSON ({error})") from error
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX)
            _mend_end(handle, path, report)
            _write_whole(handle, line)
            if os.fstat(handle).st_size == len(line):
                _sync_folder(path.parent)
        finally:
            os.close(handle)
    except OSError as error:
        raise InputError(f"{path}: cannot be written ({error.strerror})") from error


def _write_whole(handle: int, data: bytes) -> None:
    """One write, which a signal does not cut; what a full disk cuts is taken back."""
    size = os.fstat(handle).st_size
    try:
        if os.write(handle, data) != len(data):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        os.fsync(handle)
    except OSError:
        with contextlib.suppress(OSError):
            os.ftruncate(handle, size)
        raise


def _sync_folder(folder: Path) -> None:
    """See the name of a new file onto the disk."""
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _mend_end(handle: int, path: Path, report: Report) -> None:
    """See that the file ends with a line break: a whole last line gets one, half a line goes to the ``.partial`` file."""
    end = _after_last_break(handle)
    if not end:
        return
    if _is_object(end):
        _write_whole(handle, b"\n")
        return
    aside = path.with_name(f"{path.name}.partial")
    other = os.open(aside, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        _write_whole(other, end + b"\n")
    finally:
        os.close(other)
    os.ftruncate(handle, os.fstat(handle).st_size - len(end))
    report(f"{path}: half a line ({len(end):,} bytes), left by an interrupted program, was put aside in {aside}")


def _after_last_break(handle: int) -> bytes:
    position, end = os.fstat(handle).st_size, b""
    while position and b"\n" not in end:
        step = min(position, 65536)
        position -= step
        end = os.pread(handle, step, position) + end
    return end.rpartition(b"\n")[2]


def _is_object(line: bytes) -> bool:
    try:
        return isinstance(json.loads(line), dict)
    except (ValueError, RecursionError):
        return False


def raw_lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """The lines of a ``.jsonl`` or ``.jsonl.zst`` file with their numbers, blank ones skipped."""
    import zstandard

    try:
        with path.open("rb") as file:
            lines = zstandard.ZstdDecompressor().stream_reader(file, read_across_frames=True) if path.suffix == ".zst" else None
            source = _until_now(file) if lines is None else io.BufferedReader(lines)
            for number, line in enumerate(source, start=1):
                if line.strip():
                    yield number, line
    except (OSError, zstandard.ZstdError) as error:
        raise InputError(f"{path}: cannot be read ({getattr(error, 'strerror', None) or error})") from error


def _until_now(file: io.BufferedReader) -> Iterator[bytes]:
    """The lines that are there when no one is writing, so that a line in the making is not taken for half a line."""
    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        yield from file
        return
    with contextlib.suppress(OSError):
        fcntl.flock(file, fcntl.LOCK_SH)
    left = os.fstat(file.fileno()).st_size
    with contextlib.suppress(OSError):
        fcntl.flock(file, fcntl.LOCK_UN)
    while left > 0 and (line := file.readline()[:left]):
        left -= len(line)
        yield line


def parse_run(line: bytes, *, base: Path, catalog: Catalog | None = None) -> Run:
    """The run on a line of a file that lies in ``base``."""
    try:
        data = json.loads(line.decode())
    except (ValueError, RecursionError) as error:
        if not line.endswith(b"\n"):
            raise HalfLine(f"half a line ({len(line):,} bytes), left by an interrupted program") from error
        raise InputError(f"not JSON ({error})") from error
    return Run.read(data, catalog=catalog, base=base)


@final
class RunsFile(Runs):
    """The runs of a ``.jsonl`` file. It is only read: half a line at its end is reported and left where it is."""

    def __init__(self, path: Path, *, report: Report = _log.warning) -> None:
        self.path, self.name, self._report = path, str(path), report

    def runs(self, where: Filter = EVERYTHING, *, catalog: Catalog | None = None) -> Iterator[tuple[int | str, Run]]:
        catalog = catalog or Catalog.load()
        for number, line in raw_lines(self.path):
            try:
                run = parse_run(line, base=self.path.parent, catalog=catalog)
                fits = where == EVERYTHING or where.matches(Entry.of(run))
            except HalfLine as error:
                self._report(f"{self.path}:{number}: {error}; it is not among the runs")
            except InputError as error:
                raise InputError(f"{self.path}:{number}: {error}") from error
            else:
                if fits:
                    yield number, run

    def entries(self, where: Filter = EVERYTHING, *, last: int | None = None) -> Iterator[Entry]:
        found = (Entry.of(run) for _, run in self.runs(where))
        return found if last is None else iter(collections.deque(found, maxlen=last))

    def count(self, where: Filter = EVERYTHING) -> int:
        return sum(1 for _ in self.runs(where))

    def get(self, prefix: str) -> Entry:
        wanted = _checked_prefix(prefix)
        return self._only((entry for entry in self.entries() if entry.id.startswith(wanted)), prefix)


# Databases


@dataclass(frozen=True, slots=True, kw_only=True)
class Added:
    """How many runs were new, and how many the store had already."""

    new: int
    known: int


class _Tables(NamedTuple):
    version: sa.Table
    runs: sa.Table
    measured: sa.Table


@functools.cache
def _tables() -> _Tables:
    import sqlalchemy as sa
    from sqlalchemy.dialects.postgresql import JSONB

    schema = sa.MetaData()
    version = sa.Table("foretrain_store", schema, sa.Column("layout", sa.Integer, primary_key=True, autoincrement=False))
    runs = sa.Table(
        "foretrain_runs",
        schema,
        sa.Column("id", sa.BigInteger().with_variant(sa.Integer, "sqlite"), primary_key=True),
        sa.Column("hash", sa.String(64), nullable=False, unique=True),
        *(sa.Column(name, sa.Text, nullable=False, index=True) for name in _COLUMNS),
        sa.Column("created", sa.DateTime(timezone=True), nullable=False),
        sa.Column("format", sa.Integer, nullable=False),
        sa.Column("base", sa.Text, nullable=False),
        sa.Column("run", sa.JSON().with_variant(JSONB, "postgresql"), nullable=False),
    )
    measured = sa.Table(
        "foretrain_measured",
        schema,
        sa.Column("run_id", sa.ForeignKey(runs.c.id, ondelete="CASCADE"), primary_key=True),
        sa.Column("quantity", sa.Text, primary_key=True, index=True),
        sa.Column("value", sa.Double, nullable=False),
    )
    return _Tables(version, runs, measured)


@final
class Store(Runs):
    """Runs in an SQLite or PostgreSQL database. Every call is a transaction of its own, so none sees or leaves half of one."""

    def __init__(self, engine: sa.Engine, name: str) -> None:
        self._engine, self.name = engine, name

    @classmethod
    def open(cls, where: str | Path, *, create: bool = True) -> Store:
        """The store behind a URL or in an SQLite file; its tables are made on first use, or missed without ``create``."""
        name = hide_password(str(where))
        url = _url(where)
        _find_file(url, name, create)
        store = cls(_engine(url), name)
        try:
            store._check_layout(create)
        except BaseException:
            store.close()
            raise
        return store

    def close(self) -> None:
        self._engine.dispose()

    def _check_layout(self, create: bool) -> None:
        import sqlalchemy as sa

        layout = self._layout()
        if layout is None:
            if not create:
                raise StoreError(f"{self.name}: it holds no runs yet; `foretrain runs import` makes it a store")
            with self._transaction(writes=True) as connection:
                table = _tables().version
                table.metadata.create_all(connection)
                if connection.scalar(sa.select(table.c.layout)) is None:
                    connection.execute(table.insert().values(layout=LAYOUT))
            layout = self._layout() or LAYOUT
        if layout > LAYOUT:
            raise StoreError(f"{self.name}: the store has layout {layout} and this foretrain knows {LAYOUT}; update foretrain")

    def _layout(self) -> int | None:
        import sqlalchemy as sa

        table = _tables().version
        with self._transaction() as connection:
            known = sa.inspect(connection).has_table(table.name)
            return connection.scalar(sa.select(sa.func.max(table.c.layout))) if known else None

    @contextlib.contextmanager
    def _transaction(self, *, writes: bool = False) -> Iterator[sa.Connection]:
        """A connection in a transaction. Writers take turns: they never block each other half way, and ids grow as runs come in."""
        import sqlalchemy as sa

        try:
            with self._engine.connect() as connection, connection.execution_options(foretrain_writes=writes).begin():
                if writes and self._engine.dialect.name == "postgresql":
                    connection.execute(sa.select(sa.func.pg_advisory_xact_lock(_WRITER_LOCK)))
                yield connection
        except sa.exc.SQLAlchemyError as error:
            raise StoreError(f"{self.name}: {_reason(error, self._engine.url)}") from error
        except json.JSONDecodeError as error:
            raise StoreError(f"{self.name}: it holds a run that is not JSON ({error})") from error

    def add(self, runs: Iterable[Run | Entry]) -> Added:
        """Keep runs: all of them or, when anything goes wrong, none. Those that are there already are left as they are."""
        entries = [run if isinstance(run, Entry) else Entry.of(run) for run in runs]
        if not entries:
            return Added(new=0, known=0)
        with self._transaction(writes=True) as connection:
            new = self._insert(connection, entries)
        return Added(new=new, known=len(entries) - new)

    def _insert(self, connection: sa.Connection, entries: list[Entry]) -> int:
        from sqlalchemy.dialects import postgresql, sqlite

        runs, now = _tables().runs, datetime.datetime.now(datetime.UTC)
        insert = postgresql.insert(runs) if connection.dialect.name == "postgresql" else sqlite.insert(runs)
        insert_new = insert.on_conflict_do_nothing(index_elements=[runs.c.hash]).returning(runs.c.id, runs.c.hash)
        added = connection.execute(insert_new, [_row(entry, now) for entry in entries]).all()
        measured = {entry.id: entry.document["measured"] for entry in entries}
        figures = [
            {"run_id": number, "quantity": quantity, "value": value}
            for number, content in added
            for quantity, value in measured[content].items()
        ]
        if figures:
            connection.execute(_tables().measured.insert(), figures)
        return len(added)

    def runs(self, where: Filter = EVERYTHING, *, catalog: Catalog | None = None) -> Iterator[tuple[int | str, Run]]:
        catalog = catalog or Catalog.load()
        for entry in self.entries(where):
            yield entry.short_id, entry.run(catalog)

    def entries(self, where: Filter = EVERYTHING, *, last: int | None = None) -> Iterator[Entry]:
        """Page by page, up to the newest run there is at the start, so that no transaction stays open meanwhile."""
        import sqlalchemy as sa

        runs, conditions = _tables().runs, _conditions(where)
        newest_first = sa.select(runs.c.id).where(*conditions).order_by(runs.c.id.desc()).limit(1)
        with self._transaction() as connection:
            end = connection.scalar(newest_first) or 0
            first = 0 if last is None else connection.scalar(newest_first.offset(last - 1)) or 0
        after = first - 1
        while after < end:
            page = sa.select(runs).where(*conditions, runs.c.id > after, runs.c.id <= end).order_by(runs.c.id).limit(_PAGE)
            with self._transaction() as connection:
                rows = connection.execute(page).all()
            yield from map(_entry, rows)
            after = rows[-1].id if len(rows) == _PAGE else end

    def count(self, where: Filter = EVERYTHING) -> int:
        import sqlalchemy as sa

        with self._transaction() as connection:
            return connection.scalar(sa.select(sa.func.count()).select_from(_tables().runs).where(*_conditions(where))) or 0

    def get(self, prefix: str) -> Entry:
        import sqlalchemy as sa

        runs = _tables().runs
        with self._transaction() as connection:
            rows = connection.execute(sa.select(runs).where(runs.c.hash.startswith(_checked_prefix(prefix))).limit(2)).all()
        return self._only(map(_entry, rows), prefix)


def _row(entry: Entry, now: datetime.datetime) -> dict[str, Any]:
    same = {name: getattr(entry, name) for name in (*_COLUMNS, "base", "format")}
    return {**same, "hash": entry.id, "created": now, "run": entry.document}


def _entry(row: sa.Row[Any]) -> Entry:
    same = {name: getattr(row, name) for name in (*_COLUMNS, "base", "format")}
    created = row.created if row.created.tzinfo else row.created.replace(tzinfo=datetime.UTC)
    return Entry(id=row.hash, created=created, document=row.run, **same)


def _conditions(where: Filter) -> list[sa.ColumnElement[bool]]:
    import sqlalchemy as sa

    runs, measured = _tables().runs, _tables().measured
    conditions: list[sa.ColumnElement[bool]] = []
    for name in _COLUMNS:
        pattern = getattr(where, name)
        if pattern is not None:
            mark = ", " if name == "device" else ""
            text = "%".join(re.sub(r"([\\%_])", r"\\\1", part) for part in pattern.split("*"))
            text = f"%{mark}{text}{mark}%" if mark else text
            conditions.append(sa.func.lower(mark + runs.c[name] + mark).like(sa.func.lower(text), escape="\\"))
    if where.quantity is not None:
        conditions.append(runs.c.id.in_(sa.select(measured.c.run_id).where(measured.c.quantity == where.quantity)))
    return conditions


# Where a store is


def default_store() -> str:
    """``$FORETRAIN_STORE``, or a file in the user's data folder."""
    folder = Path(os.environ.get("XDG_DATA_HOME") or Path.home() / ".local" / "share")
    return os.environ.get("FORETRAIN_STORE") or str(folder / "foretrain" / "runs.db")


def is_database(where: str | Path) -> bool:
    """Whether this is a URL or an SQLite file rather than a file of JSON lines."""
    if "://" in str(where) or Path(where).suffix in (".db", ".sqlite", ".sqlite3"):
        return True
    with contextlib.suppress(OSError), Path(where).open("rb") as file:
        return stat.S_ISREG(os.fstat(file.fileno()).st_mode) and file.read(16) == b"SQLite format 3\0"
    return False


def open_store(where: str | Path, *, report: Report = _log.warning) -> Runs:
    """The kept runs of a file or behind a URL, for reading."""
    return Store.open(where, create=False) if is_database(where) else RunsFile(Path(where), report=report)


def open_runs(
    where: str | Path, *, select: Filter = EVERYTHING, catalog: Catalog | None = None, report: Report = _log.warning
) -> Iterator[tuple[int | str, Run]]:
    """The runs of a ``.jsonl`` file with their line numbers, or those behind a URL with their ids."""
    with open_store(where, report=report) as store:
        yield from store.runs(select, catalog=catalog)


def hide_password(where: str) -> str:
    """The URL as it may be shown.

    >>> hide_password("postgresql+psycopg://ann:secret@host/runs?sslpassword=secret&x=1")
    'postgresql+psycopg://ann:***@host/runs?sslpassword=***&x=1'
    """
    shown = re.sub(r"(://[^:/@?]*):.*@", r"\1:***@", where, flags=re.DOTALL)
    return re.sub(r"([?&]\w*passw\w*=)[^&]*", r"\1***", shown, flags=re.IGNORECASE)


def _reason(error: Exception, url: sa.URL) -> str:
    """What went wrong, on one line."""
    text = " ".join(str(getattr(error, "orig", None) or error).split())
    secrets = [url.password, *(value for key, value in url.query.items() if "passw" in key.lower())]
    return functools.reduce(lambda shown, secret: shown.replace(str(secret), "***") if secret else shown, secrets, text)


def _url(where: str | Path) -> sa.URL:
    try:
        import sqlalchemy as sa
    except ImportError as error:
        raise StoreError("a store in a database needs SQLAlchemy: pip install 'foretrain[store]'") from error
    if "://" not in str(where):
        return sa.URL.create("sqlite", database=str(where))
    example = "a URL such as sqlite:///runs.db or postgresql+psycopg://user@host/name"
    try:
        url = sa.make_url(str(where))
    except (sa.exc.ArgumentError, ValueError) as error:
        raise invalid("store", hide_password(str(where)), example) from error
    if url.drivername in ("postgresql", "postgres"):
        url = url.set(drivername="postgresql+psycopg")
    if url.drivername not in ("sqlite", "postgresql+psycopg"):
        raise invalid("store", hide_password(str(where)), example)
    return url


def _find_file(url: sa.URL, name: str, create: bool) -> None:
    """SQLite would make an empty file for a mistyped name, and none in a folder that is not there."""
    if url.drivername != "sqlite" or not url.database or url.database == ":memory:" or url.database.startswith("file:"):
        return
    path = Path(url.database)
    if not create and not path.exists():
        raise StoreError(f"{name}: there is no such file; `foretrain runs import` makes it")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise StoreError(f"{name}: cannot be written ({error.strerror})") from error


def _engine(url: sa.URL) -> sa.Engine:
    import sqlalchemy as sa

    sqlite = url.drivername == "sqlite"
    patience = {"timeout": 60} if sqlite else {"connect_timeout": 10}
    try:
        engine = sa.create_engine(url, connect_args={key: value for key, value in patience.items() if key not in url.query})
    except ImportError as error:
        raise StoreError("a store in PostgreSQL needs psycopg: pip install 'foretrain[store]'") from error
    if sqlite:
        sa.event.listen(engine, "connect", _manual_transactions)
        sa.event.listen(engine, "begin", _begin)
    return engine


def _manual_transactions(connection: Any, _: object) -> None:
    connection.isolation_level = None
    connection.execute("PRAGMA foreign_keys = ON")


def _begin(connection: sa.Connection) -> None:
    """A writer takes the lock at once: when it has to wait, it waits before it has read anything."""
    connection.exec_driver_sql("BEGIN IMMEDIATE" if connection.get_execution_options().get("foretrain_writes") else "BEGIN")
