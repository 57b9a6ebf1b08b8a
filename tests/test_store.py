"""Tests the store: what goes in comes out, once, whatever is interrupted; no message shows a password."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import math
import multiprocessing
import os
import resource
import signal
import socket
import sqlite3
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
import zstandard
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from commands import PATIENCE_S, begin_python
from foretrain.cluster import Catalog
from foretrain.errors import InputError
from foretrain.measure.store import (
    Added,
    Entry,
    Filter,
    RunsFile,
    Store,
    StoreError,
    append_run,
    content_hash,
    database,
    default_store,
    hide_password,
    is_database,
    layout,
    open_runs,
    open_store,
)
from foretrain.quantities import QUANTITIES
from foretrain.run import Run

CATALOG = Catalog()
spawn = multiprocessing.get_context("spawn")


def document(i: int = 0, **changes: Any) -> dict[str, Any]:
    """The run number ``i`` as a file would hold it."""
    job = {
        "model": {"source": "timm", "name": "resnet50"},
        "training": {"global_batch": 64, "image": 224},
        "cluster": {"device": "h100-sxm-80gb"},
    }
    return {
        "job": {**job, **changes},
        "measured": {"step_time_s": 0.1 + i},
        "provenance": {"source": "here", "label": "a label"},
    }


def run(i: int = 0, **changes: Any) -> Run:
    return Run.read(document(i, **changes), catalog=CATALOG)


WORDS = st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), min_size=1, max_size=12)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.floats(-1e6, 1e6) | WORDS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(WORDS, inner, max_size=3),
    max_leaves=6,
)
TABLES = st.dictionaries(WORDS, VALUES, max_size=3)


@st.composite
def runs(draw: st.DrawFn) -> Run:
    devices = draw(st.sampled_from([1, 2, 8]))
    job = {
        "model": {
            "source": draw(st.sampled_from(["timm", "torchvision"])),
            "name": draw(WORDS),
            "args": draw(TABLES),
        },
        "training": {
            "global_batch": devices * draw(st.integers(1, 64)),
            "precision": draw(st.sampled_from(["fp32", "amp-bf16"])),
        },
        "cluster": {
            "device": draw(st.sampled_from(["h100-sxm-80gb", "v100-sxm-32gb"])),
            "devices_per_node": devices,
        },
    }
    figures = st.dictionaries(
        st.sampled_from(sorted(QUANTITIES)), st.floats(5e-324, allow_infinity=False), max_size=3
    )
    provenance = st.fixed_dictionaries(
        {}, optional={"source": WORDS, "label": VALUES, "note": VALUES, "host": WORDS}
    )
    return Run.read({"job": job, "measured": draw(figures), "provenance": draw(provenance)}, catalog=CATALOG)


@pytest.fixture
def store(url: str) -> Iterator[Store]:
    with Store.open(url) as opened:
        yield opened


def test_runs_come_back_in_the_order_in_which_they_came(store: Store) -> None:
    given_runs = [run(i) for i in range(20)]
    assert store.add(given_runs[:12]) == Added(new=12, known=0)
    assert store.add(given_runs[12:]) == Added(new=8, known=0)
    assert [found for _, found in store.runs()] == given_runs
    assert store.count() == 20


def test_what_is_there_already_is_left_as_it_is(store: Store) -> None:
    store.add([run(0)])
    assert store.add([run(1), run(0), run(1), run(2)]) == Added(new=2, known=2)
    assert [found for _, found in store.runs()] == [run(0), run(1), run(2)]
    assert store.add([]) == Added(new=0, known=0)


def test_any_run_survives(url: str) -> None:
    with Store.open(url) as store:

        @settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
        @given(st.lists(runs(), max_size=4))
        def survives(given_runs: list[Run]) -> None:
            store.add(given_runs)
            for one in given_runs:
                back = store.get(content_hash(one)).run(CATALOG)
                assert back.job == one.job
                assert dict(back.measured) == dict(one.measured)
                assert content_hash(back) == content_hash(one)
            assert store.add(given_runs).new == 0

        survives()


def test_a_failure_half_way_leaves_nothing(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    store.add([run(0)])
    broken = dataclasses.replace(Entry.of(run(2)), document={"measured": {"step_time_s": None}})
    for wrong in (broken, Run(job=run(2).job, measured={"step_time_s": math.nan})):
        with pytest.raises((StoreError, InputError)):
            store.add([run(1), wrong])
    monkeypatch.setattr(Store, "_insert", _interrupted(Store._insert))
    with pytest.raises(KeyboardInterrupt):
        store.add([run(1)])
    monkeypatch.undo()
    assert store.count() == 1
    assert store.add([run(1)]) == Added(new=1, known=0)


def _interrupted(insert: Callable[..., list[str]]) -> Callable[..., list[str]]:
    @functools.wraps(insert)
    def inner(*args: Any) -> list[str]:
        insert(*args)
        raise KeyboardInterrupt

    return inner


def test_filters_agree_between_a_file_and_a_database(store: Store, tmp_path: Path) -> None:
    mixed = {"groups": [{"device": "a100-sxm-80gb"}, {"device": "v100-sxm-32gb"}]}
    given_runs = [
        run(0),
        run(1, model={"source": "timm", "name": "ResNet_18"}),
        run(2, cluster=mixed),
        run(3, model={"source": "timm", "name": "a%b"}),
    ]
    given_runs.append(
        dataclasses.replace(
            run(4), measured={"power_w": 300.0}, provenance={"source": "There", "label": "50 %"}
        )
    )
    store.add(given_runs)
    for one in given_runs:
        append_run(tmp_path / "runs.jsonl", one.to_dict())
    file = RunsFile(tmp_path / "runs.jsonl")
    for where, expected in {
        Filter(): 5,
        Filter(model="resnet*"): 4,
        Filter(model="resnet_18"): 1,
        Filter(model="resnet_50"): 0,
        Filter(model="%"): 0,
        Filter(model="a%b"): 1,
        Filter(model="*"): 5,
        Filter(device="v100-sxm-32gb"): 1,
        Filter(device="a100*"): 1,
        Filter(device="100"): 0,
        Filter(device="*100*", source="here"): 4,
        Filter(source="there"): 1,
        Filter(label="50 %"): 1,
        Filter(quantity="power_w"): 1,
        Filter(quantity="step_time_s", model="resnet50"): 2,
        Filter(source="'; DROP TABLE foretrain_runs; --"): 0,
    }.items():
        found = [entry.id for entry in store.entries(where)]
        assert found == [entry.id for entry in file.entries(where)], where
        assert len(found) == expected == store.count(where) == file.count(where), where
        assert (
            [entry.id for entry in store.entries(where, last=2)]
            == found[-2:]
            == [entry.id for entry in file.entries(where, last=2)]
        )


def test_reading_is_lazy_and_does_not_keep_writers_out(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(database, "_PAGE", 3)
    store.add(run(i) for i in range(10))
    seen = 0
    for _, found in store.runs():
        store.add([dataclasses.replace(found, provenance={"source": "copy"})])
        seen += 1
    assert (seen, store.count()) == (10, 20)


def test_a_run_is_found_by_the_start_of_its_id(store: Store) -> None:
    store.add(run(i) for i in range(40))
    ids = [entry.id for entry in store.entries()]
    assert store.get(ids[7][:12]).run(CATALOG) == run(7)
    assert store.get(ids[7].upper()).id == ids[7]
    shared = next(one[0] for one in ids if sum(other[0] == one[0] for other in ids) > 1)
    for wrong, why in {
        "": "is not the start of an id",
        "50%": "is not the start of an id",
        "f" * 64: "no run",
        shared: "several runs",
    }.items():
        with pytest.raises(InputError, match=why):
            store.get(wrong)


def test_newer_layouts_and_formats_are_not_guessed_at(url: str) -> None:
    with Store.open(url) as store:
        store.add([dataclasses.replace(Entry.of(run()), format=9)])
        with pytest.raises(
            StoreError, match=r"run \w{12}: it is in format 9 and this foretrain reads 1; update foretrain"
        ):
            list(store.runs())
        with store._transaction(writes=True) as connection:
            connection.exec_driver_sql("UPDATE foretrain_store SET layout = 7")
    with pytest.raises(
        StoreError,
        match=f"the store has layout 7 and this foretrain knows {layout.LAYOUT}; update foretrain",
    ):
        Store.open(url)


def _add_runs(url: str, start: int, count: int, barrier: Any) -> None:
    barrier.wait()
    with Store.open(url) as store:
        for i in range(start, start + count, 5):
            store.add(
                reversed([run(k) for k in range(i, i + 5)]) if start else [run(k) for k in range(i, i + 5)]
            )


def test_two_processes_write_at_once(url: str) -> None:
    """They start on nothing, so both make the tables; half of their runs are the same, in opposite order."""
    _together(_add_runs, [(url, 0, 40), (url, 20, 40)])
    with Store.open(url) as store:
        assert store.count() == 60
        assert len({entry.id for entry in store.entries()}) == 60


def _together(work: Callable[..., None], calls: list[tuple[Any, ...]]) -> None:
    barrier = spawn.Barrier(len(calls))
    workers = [spawn.Process(target=work, args=(*call, barrier)) for call in calls]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(PATIENCE_S)
        assert worker.exitcode == 0


def test_a_killed_writer_leaves_the_store_whole(url: str) -> None:
    code = (
        "import os, signal, sys\n"
        "sys.path.insert(0, sys.argv[1])\n"
        "from test_store import Store, run\n"
        "store = Store.open(sys.argv[2])\n"
        "store.add([run(0)])\n"
        "insert = Store._insert\n"
        "Store._insert = lambda *args: (insert(*args), os.kill(os.getpid(), signal.SIGKILL))\n"
        "store.add(run(i) for i in range(1, 50))\n"
    )
    done = subprocess.run([sys.executable, "-c", code, str(Path(__file__).parent), url], timeout=PATIENCE_S)
    assert done.returncode == -signal.SIGKILL
    with Store.open(url) as store:
        assert [found for _, found in store.runs()] == [run(0)]
        assert store.add([run(1)]) == Added(new=1, known=0)


def test_tables_of_others_are_left_alone(url: str) -> None:
    engine = sa.create_engine(url)
    with engine.begin() as connection:
        connection.exec_driver_sql("CREATE TABLE runs (x INTEGER)")
    engine.dispose()
    with pytest.raises(StoreError, match="holds no runs yet"):
        Store.open(url, create=False)
    with Store.open(url) as store:
        assert store.add([run()]).new == 1
    with Store.open(url, create=False) as store:
        assert store.count() == 1


# Identity


def test_identity_is_what_was_run_and_what_came_out() -> None:
    same = content_hash(run())
    plain = document(
        training={"global_batch": 64, "image": 224, "optimizer": "sgd", "mode": "train"},
        cluster={"device": "h100", "nodes": 1},
    )
    plain["provenance"] |= {"note": "seen again", "commit": "abc"}
    assert content_hash(Run.read(plain, catalog=CATALOG)) == same
    assert content_hash(run(1)) != same
    assert content_hash(run(training={"global_batch": 32, "image": 224})) != same
    for key in ("source", "host", "started"):
        other = document()
        other["provenance"][key] = "elsewhere"
        assert content_hash(Run.read(other, catalog=CATALOG)) != same


def test_numbers_have_one_identity() -> None:
    hashes = [
        content_hash(run(model={"source": "timm", "name": "net", "args": {"x": x, "y": y}}))
        for x, y in ((1, 10**20), (1.0, 1e20))
    ]
    assert hashes[0] == hashes[1]


def test_a_model_in_a_file_is_found_from_the_database(store: Store, tmp_path: Path) -> None:
    one = Run.read(
        document(model={"source": "python", "name": "nets/a.py:net"}), catalog=CATALOG, base=tmp_path
    )
    store.add([one])
    entry = next(store.entries())
    assert entry.run(CATALOG) == one
    assert entry.seen_from(tmp_path)["job"]["model"]["name"] == "nets/a.py:net"
    away = entry.seen_from(tmp_path / "elsewhere")
    assert away["job"]["model"]["name"] == "../nets/a.py:net"
    assert store.add([Run.read(away, catalog=CATALOG, base=tmp_path / "elsewhere")]) == Added(new=0, known=1)


def test_what_no_database_takes_is_refused_by_all(store: Store) -> None:
    for value in (math.nan, math.inf, "a\0b", "\ud800"):
        with pytest.raises(InputError, match="run: it cannot be kept"):
            store.add([dataclasses.replace(run(), provenance={"note": [value]})])
    assert store.add([dataclasses.replace(run(), provenance={"note": "\\u0000"})]).new == 1


# Errors


def _fails(where: str | Path, **options: Any) -> str:
    with pytest.raises((StoreError, InputError)) as caught:
        Store.open(where, **options)
    message = str(caught.value)
    assert "\n" not in message
    assert "s3cret" not in message
    return message


def test_a_mistake_is_one_line_without_the_password(tmp_path: Path) -> None:
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{closed.getsockname()[1]}"
        message = _fails(f"postgresql+psycopg://ann:s3cret@{address}/runs")
        assert message.startswith(f"postgresql+psycopg://ann:***@{address}/runs: ")
        assert "refused" in message
        assert "refused" in _fails(f"postgres://ann@{address}/runs?password=s3cret")
    assert "is not a URL such as" in _fails("postgresql://ann:s3cret@host:port/runs")
    assert "is not a URL such as" in _fails("mysql://ann:s3cret@host/runs")
    assert "is not a URL such as" in _fails("://")
    (tmp_path / "text.db").write_text("plain text, and more of it than a header has, on and on " * 20)
    assert _fails(tmp_path / "text.db") == f"{tmp_path}/text.db: file is not a database"
    assert "unable to open" in _fails(f"sqlite:///{tmp_path}")
    assert "cannot be written (Not a directory)" in _fails(tmp_path / "text.db" / "x" / "runs.db")
    assert "there is no such file" in _fails(tmp_path / "none.db", create=False)
    assert not (tmp_path / "none.db").exists()


def test_a_wrong_password_is_not_shown(postgres_server: sa.URL) -> None:
    message = _fails(postgres_server.set(password="s3cret wrong").render_as_string(hide_password=False))
    assert "password authentication failed" in message
    assert ":***@127.0.0.1" in message
    assert 'database "nowhere" does not exist' in _fails(
        postgres_server.set(database="nowhere").render_as_string(hide_password=False)
    )


def test_a_lost_server_is_one_line(postgres: str) -> None:
    with Store.open(postgres) as store:
        with (
            pytest.raises(StoreError, match=r"ann:\*\*\*@.*terminat") as caught,
            store._transaction() as connection,
        ):
            connection.exec_driver_sql("SELECT pg_terminate_backend(pg_backend_pid())")
        assert "\n" not in str(caught.value)


def test_no_permission_to_write_still_reads(postgres: str) -> None:
    with Store.open(postgres) as store:
        store.add([run()])
        with store._transaction(writes=True) as connection:
            connection.exec_driver_sql("CREATE ROLE reader LOGIN PASSWORD 's3cret'")
            schema = connection.exec_driver_sql("SELECT current_schema()").scalar_one()
            connection.exec_driver_sql(f"GRANT USAGE ON SCHEMA {schema} TO reader")
            connection.exec_driver_sql(f"GRANT SELECT ON ALL TABLES IN SCHEMA {schema} TO reader")
    with Store.open(
        sa.make_url(postgres).set(username="reader", password="s3cret").render_as_string(hide_password=False)
    ) as store:
        assert store.count() == 1
        with pytest.raises(StoreError, match="permission denied"):
            store.add([run(1)])


def test_a_full_disk_leaves_what_was_there(tmp_path: Path) -> None:
    with Store.open(tmp_path / "runs.db") as store:
        store.add([run()])
        sa.event.listen(
            store._engine,
            "begin",
            lambda connection: connection.exec_driver_sql("PRAGMA max_page_count = 20"),
        )
        with pytest.raises(StoreError, match=r"runs\.db: database or disk is full"):
            store.add(run(i) for i in range(1000))
        assert store.count() == 1


def test_a_writer_that_holds_on_is_waited_for_and_named(tmp_path: Path) -> None:
    where = f"sqlite:///{tmp_path}/runs.db?timeout=0.1"
    with Store.open(where) as store, contextlib.closing(sqlite3.connect(tmp_path / "runs.db")) as other:
        other.execute("BEGIN IMMEDIATE")
        assert store.count() == 0
        with pytest.raises(StoreError, match="database is locked"):
            store.add([run()])
        other.rollback()
        assert store.add([run()]).new == 1


@pytest.mark.parametrize("package", ["sqlalchemy", "psycopg"])
def test_a_missing_package_is_named(package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    assert "install foretrain[store]" in _fails("postgresql://ann:s3cret@127.0.0.1:1/runs")


def test_files_need_no_database_package() -> None:
    code = (
        "import sys; import foretrain.measure.store, foretrain.cli; "
        "print('sqlalchemy' in sys.modules, 'torch' in sys.modules)"
    )
    assert subprocess.check_output([sys.executable, "-c", code], text=True).split() == ["False", "False"]


# Files of JSON lines


@settings(max_examples=25, deadline=None)
@given(st.lists(runs(), min_size=1, max_size=4))
def test_lines_come_back(given_runs: list[Run]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "new" / "runs.jsonl"
        for one in given_runs:
            append_run(path, one.to_dict())
        found = list(open_runs(path, catalog=CATALOG))
    assert [number for number, _ in found] == list(range(1, len(given_runs) + 1))
    assert [back.to_dict() for _, back in found] == [one.to_dict() for one in given_runs]


def _append_lines(path: Path, start: int, count: int, barrier: Any) -> None:
    barrier.wait()
    for i in range(start, start + count):
        append_run(path, {**document(i), "provenance": {"note": "x" * 20_000}})
        list(open_runs(path, catalog=CATALOG)) if i % 20 == 0 else None


def test_two_processes_append_at_once(tmp_path: Path) -> None:
    path = tmp_path / "runs.jsonl"
    path.write_text('{"job": {"mod')
    _together(_append_lines, [(path, 0, 50), (path, 50, 50)])
    times = [found.measured["step_time_s"] for _, found in open_runs(path, catalog=CATALOG)]
    assert sorted(times) == [0.1 + i for i in range(100)]
    assert times != sorted(times)
    assert (tmp_path / "runs.jsonl.partial").read_text() == '{"job": {"mod\n'


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_an_interrupted_writer_loses_no_earlier_line(tmp_path: Path, number: signal.Signals) -> None:
    path = tmp_path / "runs.jsonl"
    code = (
        "import sys, itertools\n"
        "from pathlib import Path\n"
        "from foretrain.measure.store import append_run\n"
        "for i in itertools.count():\n"
        "    append_run(Path(sys.argv[1]), {'i': i, 'note': 'x' * 100_000})\n"
    )
    with begin_python("-c", code, str(path)) as writer:
        while not path.exists() or path.stat().st_size < 1_000_000:
            assert writer.poll() is None
            time.sleep(0.001)
        while (
            writer.poll() is None
        ):  # Python may drop an interrupt that comes while it cleans up after a file
            writer.send_signal(number)
            time.sleep(0.02)
    if (
        number is signal.SIGKILL
    ):  # the kernel may end a write in the middle; the next writer puts that half aside
        append_run(path, {"i": -1}, report=lambda text: None)
    *lines, rest = path.read_bytes().split(b"\n")
    found = [json.loads(line)["i"] for line in lines]
    assert rest == b""
    assert (
        found == list(range(len(lines))) if number is signal.SIGINT else found == [*range(len(lines) - 1), -1]
    )


def test_half_a_line_is_put_aside_and_reported(tmp_path: Path) -> None:
    path, reports = tmp_path / "runs.jsonl", list[str]()
    line = json.dumps(document(1))
    for i, half in enumerate((line[:30], line[:-1], "x" * 200_000)):
        append_run(path, document(i), report=reports.append)
        with path.open("a") as file:
            file.write(half)
    assert [number for number, _ in open_runs(path, catalog=CATALOG, report=reports.append)] == [1, 2, 3]
    assert (
        reports[-1]
        == f"{path}:4: half a line (200,000 bytes), left by an interrupted program; it is not among the runs"
    )
    append_run(path, document(9), report=reports.append)
    assert [found.measured["step_time_s"] for _, found in open_runs(path, catalog=CATALOG)] == [
        0.1,
        1.1,
        2.1,
        9.1,
    ]
    assert (tmp_path / "runs.jsonl.partial").read_text() == f"{line[:30]}\n{line[:-1]}\n{'x' * 200_000}\n"
    assert (
        reports[0]
        == f"{path}: half a line (30 bytes), left by an interrupted program, was put aside in {path}.partial"
    )
    assert len(reports) == 4


def test_a_whole_last_line_without_a_break_is_kept(tmp_path: Path) -> None:
    path = tmp_path / "runs.jsonl"
    path.write_text(json.dumps(document(0)))
    assert len(list(open_runs(path))) == 1
    append_run(path, document(1))
    assert len(list(open_runs(path))) == 2
    assert not (tmp_path / "runs.jsonl.partial").exists()


def test_half_a_line_is_logged_when_nobody_listens(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "runs.jsonl").write_text('{"job"')
    append_run(tmp_path / "runs.jsonl", document())
    assert "was put aside" in caplog.text


def test_a_full_disk_takes_the_line_back(tmp_path: Path) -> None:
    path = tmp_path / "runs.jsonl"
    append_run(path, document())
    before = path.read_bytes()
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (len(before) + 50, limits[1]))
    try:
        with pytest.raises(InputError, match=r"runs\.jsonl: cannot be written \(No space left on device\)"):
            append_run(path, document(1))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, handler)
    assert path.read_bytes() == before


def test_lines_that_cannot_be_written_are_refused(tmp_path: Path) -> None:
    for path, wrong, why in (
        (tmp_path / "runs.jsonl", {"x": math.nan}, "cannot be written as JSON"),
        (tmp_path / "runs.jsonl", {"x": object()}, "cannot be written as JSON"),
        (tmp_path, {}, "cannot be written"),
        (tmp_path / "runs.jsonl.zst", {}, "compressed files are read, not added to"),
    ):
        with pytest.raises(InputError, match=why):
            append_run(path, wrong)
    assert list(tmp_path.iterdir()) == []


def test_a_wrong_line_is_named(tmp_path: Path) -> None:
    path = tmp_path / "runs.jsonl"
    for text, why in {
        "{]\n": "not JSON",
        "[1]\n": "a run is a table",
        "\xff\n": "not JSON",
        '{"job": 1, "measured": {}}': "job",
    }.items():
        path.write_bytes(b"\n" + json.dumps(document()).encode() + b"\n" + text.encode("latin-1"))
        with pytest.raises(InputError, match=rf"runs\.jsonl:3: .*{why}"):
            list(open_runs(path))


def test_compressed_files_are_read(tmp_path: Path) -> None:
    path = tmp_path / "runs.jsonl.zst"
    lines = [json.dumps(document(i)).encode() + b"\n" for i in range(3)]
    path.write_bytes(zstandard.compress(lines[0] + lines[1]) + zstandard.compress(lines[2]))
    assert [number for number, _ in open_runs(path)] == [1, 2, 3]
    path.write_bytes(b"plain")
    with pytest.raises(InputError, match="not a zstd file"):
        list(open_runs(path))


def test_a_pipe_is_read_to_its_end(tmp_path: Path) -> None:
    reading, writing = os.pipe()
    os.write(writing, json.dumps(document()).encode() + b"\n")
    os.close(writing)
    assert len(list(open_runs(f"/dev/fd/{reading}"))) == 1
    os.close(reading)


# Where a store is


def test_files_and_databases_are_told_apart(tmp_path: Path) -> None:
    with Store.open(f"sqlite:///{tmp_path}/odd.name") as store:
        store.add([run()])
    append_run(tmp_path / "runs.jsonl", document())
    assert not is_database(tmp_path / "runs.jsonl")
    for where, key in (
        (tmp_path / "runs.jsonl", 1),
        (tmp_path / "odd.name", content_hash(run())[:12]),
        (f"sqlite:///{tmp_path}/odd.name", None),
    ):
        ((found, one),) = open_runs(where)
        assert one.to_dict() == run().to_dict()
        assert key is None or found == key
    with open_store(tmp_path / "runs.jsonl") as file:
        assert file.get(content_hash(run())[:6]).id == content_hash(run())
    assert is_database("postgresql://host/runs")
    assert is_database("not-yet.db")
    assert not is_database(tmp_path)


def test_the_usual_place(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("FORETRAIN_STORE", raising=False)
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    assert default_store() == f"{tmp_path}/foretrain/runs.db"
    monkeypatch.delenv("XDG_DATA_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert default_store() == f"{tmp_path}/.local/share/foretrain/runs.db"
    monkeypatch.setenv("FORETRAIN_STORE", "postgresql://host/runs")
    assert default_store() == "postgresql://host/runs"


@pytest.mark.parametrize(
    ("given_url", "shown"),
    [
        ("postgresql://ann:p:w@x/y@host/db", "postgresql://ann:***@host/db"),
        ("postgresql://:pw@host", "postgresql://:***@host"),
        ("postgresql://ann@host:5432/db", "postgresql://ann@host:5432/db"),
        ("sqlite:////a:b@c/runs.db", "sqlite:////a:b@c/runs.db"),
    ],
)
def test_a_url_is_shown_without_its_password(given_url: str, shown: str) -> None:
    assert hide_password(given_url) == shown
