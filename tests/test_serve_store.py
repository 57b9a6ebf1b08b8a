"""Tests what a server keeps: an acknowledged run outlives a kill, on SQLite and PostgreSQL, and older stores
are brought up to date."""

from __future__ import annotations

import itertools
import threading
import time
from pathlib import Path

import pytest
import sqlalchemy as sa

from foretrain.measure.store import Store, StoreError
from foretrain.measure.store.layout import LAYOUT
from foretrain.run import Run
from servers import run_of, start, write_until_it_dies

ROUNDS = 3


def test_acknowledged_runs_outlive_kills(url: str) -> None:
    numbers, acknowledged = itertools.count(), list[int]()
    for _ in range(ROUNDS):
        server = start(url, "--processes", "1")
        writers = [
            threading.Thread(target=write_until_it_dies, args=(server, numbers, acknowledged))
            for _ in range(2)
        ]
        before = len(acknowledged)
        for writer in writers:
            writer.start()
        end_s = time.monotonic() + 60
        while len(acknowledged) < before + 10 and time.monotonic() < end_s:
            time.sleep(0.01)
        server.kill()
        for writer in writers:
            writer.join()
        assert server.process.stderr is not None
        server.process.stderr.close()
    with Store.open(url) as store:
        kept = {entry.document["provenance"]["line"] for entry in store.entries()}
    assert len(acknowledged) >= 10 * ROUNDS
    assert set(acknowledged) <= kept


def as_of_layout_1(where: str) -> None:
    """Make a store what an earlier foretrain left."""
    engine = sa.create_engine(where if "://" in where else f"sqlite:///{where}")
    with engine.begin() as connection:
        connection.exec_driver_sql("DROP TABLE foretrain_predictor_files")
        connection.exec_driver_sql("DROP TABLE foretrain_predictors")
        connection.exec_driver_sql("UPDATE foretrain_store SET layout = 1")
    engine.dispose()


def test_an_older_store_is_brought_up_to_date_and_loses_nothing(url: str) -> None:
    with Store.open(url) as store:
        store.add([Run.read(run_of(1))])
    as_of_layout_1(url)
    with Store.open(url, create=False) as store:
        assert store.count() == 1
        with pytest.raises(StoreError):
            store.predictors()
    with Store.open(url) as store:
        assert store._layout() == LAYOUT
        assert store.count() == 1
        assert store.predictors() == []
        store.add([Run.read(run_of(2))])


def test_a_predictor_is_kept_whole_and_replaced_by_its_name(url: str) -> None:
    with Store.open(url) as store:
        first = store.keep_predictor("ours", "ernest", {"a.json": b"{}", "b/c": b"\0\xff"}, {"runs": 3})
        assert store.predictor_files("ours") == {"a.json": b"{}", "b/c": b"\0\xff"}
        second = store.keep_predictor("ours", "ernest", {"a.json": b"[]"}, {"runs": 4})
        assert store.predictor_files("ours") == {"a.json": b"[]"}
        assert first.version != second.version
        [kept] = store.predictors()
        assert (kept.version, kept.about) == (second.version, {"runs": 4})


def test_pages_end_where_there_is_no_more(tmp_path: Path) -> None:
    with Store.open(tmp_path / "runs.db") as store:
        assert store.page() == ([], None)
        store.add([Run.read(run_of(i)) for i in range(4)])
        first, after = store.page(limit=2)
        assert after is not None
        second, end = store.page(limit=2, after=after)
        assert [entry.document["provenance"]["line"] for entry in [*first, *second]] == [0, 1, 2, 3]
        assert end is None
