"""Connects to the database of a store, and says in one line what went wrong."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from foretrain.errors import invalid
from foretrain.measure.store.entries import StoreError

if TYPE_CHECKING:
    import sqlalchemy as sa


def hide_password(where: str) -> str:
    """Write a URL as it may be shown.

    >>> hide_password("postgresql+psycopg://ann:secret@host/runs?sslpassword=secret&x=1")
    'postgresql+psycopg://ann:***@host/runs?sslpassword=***&x=1'
    """
    shown = re.sub(r"(://[^:/@?]*):.*@", r"\1:***@", where, flags=re.DOTALL)
    return re.sub(r"([?&]\w*passw\w*=)[^&]*", r"\1***", shown, flags=re.IGNORECASE)


def reason(error: Exception, url: sa.URL) -> str:
    """Say what went wrong, on one line."""
    text = " ".join(str(getattr(error, "orig", None) or error).split())
    secrets = [url.password, *(value for key, value in url.query.items() if "passw" in key.lower())]
    for secret in filter(None, secrets):
        text = text.replace(str(secret), "***")
    return text


def url_of(where: str | Path) -> sa.URL:
    """Read the URL of a database, or the path of an SQLite file."""
    try:
        import sqlalchemy as sa
    except ImportError as error:
        raise StoreError(
            "a store in a database needs SQLAlchemy, which is not installed; install foretrain[store]"
        ) from error
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


def check_file(url: sa.URL, name: str, create: bool) -> None:
    """Refuse a mistyped name, for which SQLite would make an empty file, and make the folder of a new one."""
    if url.drivername != "sqlite" or not url.database or url.database.startswith((":memory:", "file:")):
        return
    path = Path(url.database)
    if not create and not path.exists():
        raise StoreError(f"{name}: there is no such file; `foretrain runs import` makes it")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise StoreError(f"{name}: cannot be written ({error.strerror})") from error


def make_engine(url: sa.URL) -> sa.Engine:
    """Connect to a database, whose transactions begin as writers or readers ask for."""
    import sqlalchemy as sa

    sqlite = url.drivername == "sqlite"
    patience = {"timeout": 60} if sqlite else {"connect_timeout": 10}
    arguments = {key: value for key, value in patience.items() if key not in url.query}
    try:
        engine = sa.create_engine(url, connect_args=arguments)
    except ImportError as error:
        raise StoreError(
            "a store in PostgreSQL needs psycopg, which is not installed; install foretrain[store]"
        ) from error
    if sqlite:
        sa.event.listen(engine, "connect", _manual_transactions)
        sa.event.listen(engine, "begin", _begin)
    return engine


def _manual_transactions(connection: Any, _: object) -> None:
    connection.isolation_level = None
    connection.execute("PRAGMA foreign_keys = ON")


def _begin(connection: sa.Connection) -> None:
    """Let a writer take the lock at once: when it has to wait, it waits before it has read anything."""
    writes = connection.get_execution_options().get("foretrain_writes")
    connection.exec_driver_sql("BEGIN IMMEDIATE" if writes else "BEGIN")
