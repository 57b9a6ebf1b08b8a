"""Keeps runs, and predictors that learned from them, in SQLite or PostgreSQL, one transaction per call;
duplicates are recognised by their content."""

from __future__ import annotations

import contextlib
import datetime
import hashlib
import json
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, final

from foretrain.cluster import Catalog
from foretrain.measure.store.connecting import check_file, hide_password, make_engine, reason, url_of
from foretrain.measure.store.entries import (
    COLUMNS,
    EVERYTHING,
    Entry,
    Filter,
    Runs,
    StoreError,
    checked_prefix,
)
from foretrain.measure.store.layout import LAYOUT, MIGRATIONS, store_tables
from foretrain.run import Run

if TYPE_CHECKING:
    import sqlalchemy as sa

_PAGE = 500
_WRITER_LOCK = 0x666F7265


@dataclass(frozen=True, slots=True, kw_only=True)
class Added:
    """Says how many runs were new, and how many the store had already."""

    new: int
    known: int
    ids: frozenset[str] = field(default=frozenset(), compare=False)
    """Of the new ones."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedPredictor:
    """A predictor that learned from runs of the store, under a name of its own."""

    name: str
    predictor: str
    """The method."""
    created: datetime.datetime
    about: Mapping[str, Any]
    """What it learned from."""
    version: str
    """A hash of its files."""


@final
class Store(Runs):
    """Runs in an SQLite or PostgreSQL database.

    Every call is a transaction of its own, so none sees or leaves half of one.
    """

    def __init__(self, engine: sa.Engine, name: str) -> None:
        self._engine, self.name = engine, name

    @classmethod
    def open(cls, where: str | Path, *, create: bool = True) -> Store:
        """The store behind a URL or in an SQLite file; ``create`` makes its tables on first use."""
        name = hide_password(str(where))
        url = url_of(where)
        check_file(url, name, create)
        store = cls(make_engine(url), name)
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
                raise StoreError(
                    f"{self.name}: it holds no runs yet; `foretrain runs import` makes it a store"
                )
            with self._transaction(writes=True) as connection:
                table = store_tables().version
                table.metadata.create_all(connection)
                if connection.scalar(sa.select(table.c.layout)) is None:
                    connection.execute(table.insert().values(layout=LAYOUT))
            layout = self._layout() or LAYOUT
        if layout < LAYOUT and create:
            layout = self._migrate()
        if layout > LAYOUT:
            versions = f"the store has layout {layout} and this foretrain knows {LAYOUT}"
            raise StoreError(f"{self.name}: {versions}; update foretrain")

    def _migrate(self) -> int:
        """Bring the tables up to date, all steps or none; another process may have done it meanwhile."""
        import sqlalchemy as sa

        table = store_tables().version
        with self._transaction(writes=True) as connection:
            layout: int = connection.scalar(sa.select(sa.func.max(table.c.layout))) or 1
            for step in range(layout + 1, LAYOUT + 1):
                MIGRATIONS[step](connection)
                connection.execute(table.update().values(layout=step))
        return max(layout, LAYOUT)

    def _layout(self) -> int | None:
        import sqlalchemy as sa

        table = store_tables().version
        with self._transaction() as connection:
            known = sa.inspect(connection).has_table(table.name)
            return connection.scalar(sa.select(sa.func.max(table.c.layout))) if known else None

    @contextlib.contextmanager
    def _transaction(self, *, writes: bool = False) -> Iterator[sa.Connection]:
        """A connection in a transaction.

        Writers take turns: they never block each other half way, and ids grow as runs come in.
        """
        import sqlalchemy as sa

        try:
            with (
                self._engine.connect() as connection,
                connection.execution_options(foretrain_writes=writes).begin(),
            ):
                if writes and self._engine.dialect.name == "postgresql":
                    connection.execute(sa.select(sa.func.pg_advisory_xact_lock(_WRITER_LOCK)))
                yield connection
        except sa.exc.SQLAlchemyError as error:
            raise StoreError(f"{self.name}: {reason(error, self._engine.url)}") from error
        except json.JSONDecodeError as error:
            raise StoreError(f"{self.name}: it holds a run that is not JSON ({error})") from error

    def add(self, runs: Iterable[Run | Entry]) -> Added:
        """Keep runs: all of them or, when anything goes wrong, none.

        Those that are there already are left as they are.
        """
        entries = [run if isinstance(run, Entry) else Entry.of(run) for run in runs]
        if not entries:
            return Added(new=0, known=0)
        with self._transaction(writes=True) as connection:
            new = self._insert(connection, entries)
        return Added(new=len(new), known=len(entries) - len(new), ids=frozenset(new))

    def _insert(self, connection: sa.Connection, entries: list[Entry]) -> list[str]:
        """Returns the ids of those that were not there."""
        from sqlalchemy.dialects import postgresql, sqlite

        runs, now = store_tables().runs, datetime.datetime.now(datetime.UTC)
        insert = postgresql.insert(runs) if connection.dialect.name == "postgresql" else sqlite.insert(runs)
        once = insert.on_conflict_do_nothing(index_elements=[runs.c.hash])
        insert_new = once.returning(runs.c.id, runs.c.hash)
        added = connection.execute(insert_new, [_row(entry, now) for entry in entries]).all()
        measured = {entry.id: entry.document["measured"] for entry in entries}
        figures = [
            {"run_id": number, "quantity": quantity, "value": value}
            for number, content in added
            for quantity, value in measured[content].items()
        ]
        if figures:
            connection.execute(store_tables().measured.insert(), figures)
        return [content for _, content in added]

    def runs(
        self, where: Filter = EVERYTHING, *, catalog: Catalog | None = None
    ) -> Iterator[tuple[int | str, Run]]:
        catalog = catalog or Catalog.load()
        for entry in self.entries(where):
            yield entry.short_id, entry.run(catalog)

    def entries(self, where: Filter = EVERYTHING, *, last: int | None = None) -> Iterator[Entry]:
        """Page by page, up to the newest run at the start, so that no transaction stays open meanwhile."""
        import sqlalchemy as sa

        runs, conditions = store_tables().runs, _conditions(where)
        newest_first = sa.select(runs.c.id).where(*conditions).order_by(runs.c.id.desc()).limit(1)
        with self._transaction() as connection:
            end = connection.scalar(newest_first) or 0
            first = 0 if last is None else connection.scalar(newest_first.offset(last - 1)) or 0
        after = first - 1
        while after < end:
            later = sa.select(runs).where(*conditions, runs.c.id > after, runs.c.id <= end)
            page = later.order_by(runs.c.id).limit(_PAGE)
            with self._transaction() as connection:
                rows = connection.execute(page).all()
            yield from map(_entry, rows)
            after = rows[-1].id if len(rows) == _PAGE else end

    def page(
        self, where: Filter = EVERYTHING, *, after: int = 0, limit: int = _PAGE
    ) -> tuple[list[Entry], int | None]:
        """The next runs in the order in which they came, and where the page after them starts; None where
        there is none."""
        import sqlalchemy as sa

        runs = store_tables().runs
        later = sa.select(runs).where(*_conditions(where), runs.c.id > after)
        with self._transaction() as connection:
            rows = connection.execute(later.order_by(runs.c.id).limit(limit + 1)).all()
        shown = rows[:limit]
        return [_entry(row) for row in shown], shown[-1].id if len(rows) > limit else None

    def count(self, where: Filter = EVERYTHING) -> int:
        import sqlalchemy as sa

        counted = sa.select(sa.func.count()).select_from(store_tables().runs).where(*_conditions(where))
        with self._transaction() as connection:
            return connection.scalar(counted) or 0

    def get(self, prefix: str) -> Entry:
        import sqlalchemy as sa

        runs = store_tables().runs
        matching = sa.select(runs).where(runs.c.hash.startswith(checked_prefix(prefix))).limit(2)
        with self._transaction() as connection:
            rows = connection.execute(matching).all()
        return self._only(map(_entry, rows), prefix)

    def keep_predictor(
        self, name: str, predictor: str, files: Mapping[str, bytes], about: Mapping[str, Any]
    ) -> SavedPredictor:
        """Keep the files of a saved predictor under a name, in the place of one that has it already."""
        tables, version = store_tables(), _hash_of_files(files)
        saved = SavedPredictor(
            name=name,
            predictor=predictor,
            created=datetime.datetime.now(datetime.UTC),
            about=about,
            version=version,
        )
        row = {field: getattr(saved, field) for field in ("name", "predictor", "created", "about", "version")}
        rows = [{"name": name, "path": path, "content": content} for path, content in files.items()]
        with self._transaction(writes=True) as connection:
            connection.execute(tables.predictors.delete().where(tables.predictors.c.name == name))
            connection.execute(tables.predictors.insert(), [row])
            connection.execute(tables.predictor_files.insert(), rows)
        return saved

    def predictors(self) -> list[SavedPredictor]:
        import sqlalchemy as sa

        table = store_tables().predictors
        with self._transaction() as connection:
            rows = connection.execute(sa.select(table).order_by(table.c.name)).all()
        return [_saved(row) for row in rows]

    def predictor_files(self, name: str) -> dict[str, bytes]:
        """Read the files of a kept predictor's folder, by path."""
        import sqlalchemy as sa

        table = store_tables().predictor_files
        with self._transaction() as connection:
            rows = connection.execute(sa.select(table).where(table.c.name == name)).all()
        return {row.path: bytes(row.content) for row in rows}


def _row(entry: Entry, now: datetime.datetime) -> dict[str, Any]:
    same = {name: getattr(entry, name) for name in (*COLUMNS, "base", "format")}
    return {**same, "hash": entry.id, "created": now, "run": entry.document}


def _entry(row: sa.Row[Any]) -> Entry:
    same = {name: getattr(row, name) for name in (*COLUMNS, "base", "format")}
    return Entry(id=row.hash, created=_aware(row.created), document=row.run, **same)


def _saved(row: sa.Row[Any]) -> SavedPredictor:
    same = {name: getattr(row, name) for name in ("name", "predictor", "about", "version")}
    return SavedPredictor(created=_aware(row.created), **same)


def _aware(moment: datetime.datetime) -> datetime.datetime:
    """SQLite keeps no time zone; all is kept in UTC."""
    return moment if moment.tzinfo else moment.replace(tzinfo=datetime.UTC)


def _hash_of_files(files: Mapping[str, bytes]) -> str:
    content = hashlib.sha256()
    for path in sorted(files):
        content.update(f"{path}\n{len(files[path])}\n".encode() + files[path])
    return content.hexdigest()


def _conditions(where: Filter) -> list[sa.ColumnElement[bool]]:
    import sqlalchemy as sa

    runs, measured = store_tables().runs, store_tables().measured
    conditions: list[sa.ColumnElement[bool]] = []
    for name in COLUMNS:
        pattern = getattr(where, name)
        if pattern is not None:
            mark = ", " if name == "device" else ""
            text = "%".join(re.sub(r"([\\%_])", r"\\\1", part) for part in pattern.split("*"))
            text = f"%{mark}{text}{mark}%" if mark else text
            column = sa.func.lower(mark + runs.c[name] + mark)
            conditions.append(column.like(sa.func.lower(text), escape="\\"))
    if where.quantity is not None:
        measuring = sa.select(measured.c.run_id).where(measured.c.quantity == where.quantity)
        conditions.append(runs.c.id.in_(measuring))
    return conditions
