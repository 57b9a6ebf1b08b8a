"""Databases of tests: each has its own, in SQLite and in a PostgreSQL server that they start."""

from __future__ import annotations

import os
import pwd
import shutil
import socket
import subprocess
import tempfile
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest
import sqlalchemy as sa

from commands import PATIENCE_S

PASSWORD = "s3cret:w@rd"


def _programs() -> Path | None:
    folders = [Path(found).resolve().parent for found in [shutil.which("pg_ctl")] if found]
    folders += sorted(Path("/usr/lib/postgresql").glob("*/bin"), reverse=True)
    return next(
        (folder for folder in folders if (folder / "initdb").exists() and (folder / "pg_ctl").exists()), None
    )


@pytest.fixture(scope="session")
def postgres_server() -> Iterator[sa.URL]:
    """A PostgreSQL server of our own, which asks for a password; root may not run one, so nobody does."""
    programs = _programs()
    if programs is None:
        pytest.skip("PostgreSQL is not installed: no initdb and pg_ctl")
    user = pwd.getpwnam("nobody").pw_uid if os.getuid() == 0 else os.getuid()
    with tempfile.TemporaryDirectory(prefix="pg", dir="/tmp") as name, socket.socket() as free:
        folder = Path(name)
        (folder / "password").write_text(PASSWORD)
        os.chown(folder, user, -1)
        os.chown(folder / "password", user, -1)
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
        free.close()

        def call(program: str, *words: str) -> None:
            log = folder / "output"
            with log.open("ab") as output:
                done = subprocess.run(
                    [programs / program, "-D", folder / "data", *words],
                    user=user,
                    cwd=folder,
                    stdout=output,
                    stderr=output,
                    timeout=PATIENCE_S,
                )
            assert done.returncode == 0, log.read_text()

        call(
            "initdb",
            "-U",
            "ann",
            "-A",
            "scram-sha-256",
            f"--pwfile={folder}/password",
            "--no-sync",
            "--wal-segsize=1",
            "-E",
            "UTF8",
            "--locale=C",
        )
        call(
            "pg_ctl",
            "start",
            "-w",
            "-l",
            f"{folder}/log",
            "-o",
            f"-F -p {port} -k {folder} -c listen_addresses=127.0.0.1",
        )
        try:
            yield sa.URL.create("postgresql+psycopg", "ann", PASSWORD, "127.0.0.1", port, "postgres")
        finally:
            call("pg_ctl", "stop", "-m", "immediate")


@pytest.fixture
def postgres(postgres_server: sa.URL) -> str:
    """A schema of its own for a test."""
    name = f"runs_{uuid.uuid4().hex}"
    engine = sa.create_engine(postgres_server)
    with engine.begin() as connection:
        connection.exec_driver_sql(f"CREATE SCHEMA {name}")
    engine.dispose()
    return postgres_server.set(query={"options": f"-csearch_path={name}"}).render_as_string(
        hide_password=False
    )


@pytest.fixture(params=["sqlite", "postgresql"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return (
        f"sqlite:///{tmp_path}/runs.db"
        if request.param == "sqlite"
        else str(request.getfixturevalue("postgres"))
    )
