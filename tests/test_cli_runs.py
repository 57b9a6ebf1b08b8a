"""``foretrain runs`` as a user types it: what it prints and writes, how it fails, and what stays when it is
interrupted."""

from __future__ import annotations

import json
import re
import signal
from pathlib import Path
from typing import Any

import pytest
import zstandard
from typer.testing import CliRunner, Result

import foretrain
from commands import begin_python
from foretrain.cli import app
from foretrain.measure.store import Store, append_run, open_runs
from ray_clusters import wait_for


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the commands run, with a store of its own."""
    monkeypatch.delenv("FORETRAIN_STORE", raising=False)
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    monkeypatch.setenv("PYTHONPATH", str(Path(foretrain.__file__).parents[1]))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def document(
    i: int = 0, *, model: str = "resnet50", device: str = "h100-sxm-80gb", **measured: float
) -> dict[str, Any]:
    return {
        "job": {
            "model": {"source": "timm", "name": model},
            "training": {"global_batch": 64, "image": 224},
            "cluster": {"device": device, "devices_per_node": 8},
        },
        "measured": {"step_time_s": 0.25 + i, **measured},
        "provenance": {"source": "here", "label": f"run {i}", "note": "a note"},
    }


def write(name: str, *lines: dict[str, Any] | str) -> str:
    Path(name).write_text(
        "".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines)
    )
    return name


def run(*words: str) -> Result:
    return CliRunner().invoke(app, ["runs", *words])


def ok(*words: str) -> Result:
    result = run(*words)
    assert result.exit_code == 0, result.output
    return result


def fails(*words: str) -> str:
    result = run(*words)
    assert result.exit_code == 2, result.output
    assert result.stdout == ""
    assert result.stderr.count("\n") == 1
    return str(result.stderr)


def test_import_tells_new_from_known(folder: Path) -> None:
    write("a.jsonl", document(0), document(1), document(0))
    write("b.jsonl", document(1), document(2))
    where = f"{folder}/data/foretrain/runs.db"
    assert ok("import", "a.jsonl").stderr == f"foretrain: 2 new, 1 known, 0 failed in {where}\n"
    assert (
        ok("import", "a.jsonl", "b.jsonl", "b.jsonl").stderr
        == f"foretrain: 1 new, 4 known, 0 failed in {where}\n"
    )
    with Store.open(where) as store:
        assert store.count() == 3


def test_a_file_without_a_run_is_an_error_of_the_input() -> None:
    write("a.jsonl", "{", '{"job": 1}')
    assert run("import", "a.jsonl", "--store", "sqlite:///runs.db").exit_code == 2


def test_lines_that_are_no_runs_are_named_and_counted() -> None:
    write(
        "a.jsonl",
        document(0),
        "{",
        "",
        document(1, device="no such device"),
        '{"job": 1}',
        document(2, step_time=1.0),
        document(3),
    )
    with Path("a.jsonl").open("a") as file:
        file.write(json.dumps(document(4))[:50])
    result = run("import", "a.jsonl", "--store", "sqlite:///runs.db")
    assert result.exit_code == 1
    lines = result.stderr.splitlines()
    assert [line.split(": ")[1] for line in lines[:-1]] == [
        "a.jsonl:2",
        "a.jsonl:4",
        "a.jsonl:5",
        "a.jsonl:6",
        "a.jsonl:8",
    ]
    assert "half a line" in lines[4]
    assert lines[-1] == "foretrain: 2 new, 0 known, 5 failed in sqlite:///runs.db"


def test_strict_imports_all_or_nothing() -> None:
    write("a.jsonl", *(document(i) for i in range(300)), '{"job": 1}', document(300))
    result = run("import", "--strict", "a.jsonl", "--store", "runs.db")
    assert result.exit_code == 2
    assert "a.jsonl:301: run: a run is a table" in result.stderr
    assert result.stderr.count("\n") == 1
    with Store.open("runs.db") as store:
        assert store.count() == 0
    write("b.jsonl", *(document(i) for i in range(300)))
    assert "300 new" in ok("import", "--strict", "b.jsonl", "--store", "runs.db").stderr


def test_nothing_is_imported_when_a_file_cannot_be_read() -> None:
    write("a.jsonl", document())
    assert "none.jsonl: cannot be read" in fails("import", "a.jsonl", "none.jsonl", "--store", "runs.db")
    assert not Path("runs.db").exists()
    assert "'a.jsonl' is not a database" in fails("import", "a.jsonl", "--store", "a.jsonl")
    ok("import", "a.jsonl", "--store", "runs.db")
    assert "runs.db: it is a database; `foretrain runs export" in fails(
        "import", "runs.db", "--store", "other.db"
    )


HELD_UP = """
import pathlib, time
from foretrain.cli import app
from foretrain.measure.store import Store

insert, batches = Store._insert, []

def slow(*arguments):
    batches.append(arguments)
    if len(batches) == 3:
        pathlib.Path("held up").touch()
        time.sleep(3600)
    return insert(*arguments)

Store._insert = slow
app(["runs", "import", "many.jsonl", "--store", "runs.db"])
"""


def test_ctrl_c_keeps_what_is_in(folder: Path) -> None:
    write("many.jsonl", *(document(i) for i in range(4000)))
    with begin_python("-c", HELD_UP) as process:
        assert process.stderr is not None
        wait_for(folder / "held up")
        process.send_signal(signal.SIGINT)
        message = process.stderr.read()
    with Store.open("runs.db", create=False) as store:
        kept = store.count()
    assert process.returncode == 130
    matched = re.fullmatch(
        r"foretrain: interrupted: runs.db has at least the "
        r"first (\S+) of 4,000 lines; import again for the rest\n",
        message,
    )
    assert matched is not None, message
    assert int(matched[1].replace(",", "")) == kept == 400
    assert f"{4000 - kept:,} new, {kept:,} known" in ok("import", "many.jsonl", "--store", "runs.db").stderr


def test_list_filters_and_limits(folder: Path) -> None:
    write(
        "a.jsonl",
        document(0),
        document(1, model="vit_base"),
        document(2, device="a100-sxm-80gb", power_w=700.0),
        document(3),
    )
    ok("import", "a.jsonl")
    for words, expected in {
        (): [0, 1, 2, 3],
        ("--limit", "2"): [2, 3],
        ("--model", "RESNET*"): [0, 2, 3],
        ("--device", "h100"): [0, 1, 3],
        ("--device", "h100", "--model", "resnet50", "--limit", "1"): [3],
        ("--label", "run 1"): [1],
        ("--quantity", "power_w"): [2],
        ("--source", "nowhere"): [],
    }.items():
        for store in (), ("--store", "a.jsonl"):
            found = json.loads(ok("list", "--json", *words, *store).stdout)
            assert [entry["measured"]["step_time_s"] - 0.25 for entry in found] == expected, words
    assert found == []
    assert "2 of 4 runs in" in ok("list", "--limit", "2").stderr


def test_list_prints_a_table() -> None:
    write("a.jsonl", document(0), document(1, model="vit_base"))
    ok("import", "a.jsonl")
    lines = ok("list").stdout.splitlines()
    assert lines[1].split() == ["id", "model", "device", "batch", "precision", "step", "source", "label"]
    assert lines[3].split()[1:] == [
        "resnet50",
        "8",
        "x",
        "h100-sxm-80gb",
        "64",
        "fp32",
        "250",
        "ms",
        "here",
        "run",
        "0",
    ]
    about = json.loads(ok("list", "--json").stdout)[1]
    assert lines[4].split()[0] == about["id"][:12]
    assert {key: about[key] for key in ("model", "device", "devices", "global_batch", "precision", "source",
    "label")} == {
        "model": "vit_base", "device": "h100-sxm-80gb", "devices": 8, "global_batch": 64, "precision": "fp32",
        "source": "here", "label": "run 1",
    }  # fmt: skip
    ok("list", "--source", "nowhere")


@pytest.mark.parametrize("store", ["sqlite:///runs.db", "a.jsonl"])
def test_show_one_run(store: str) -> None:
    write("a.jsonl", document(0, peak_memory_bytes=2**31, kernels=12, power_w=700.0), document(1))
    ok("import", "a.jsonl", "--store", "runs.db")
    name = json.loads(ok("list", "--json", "--store", store).stdout)[0]["id"]
    text = ok("show", name[:10], "--store", store).stdout
    for part in (
        name,
        "resnet50",
        "global_batch 64",
        "250 ms",
        "2 GiB",
        "700 W",
        "a note",
        "devices_per_node 8",
    ):
        assert part in text
    assert json.loads(ok("show", name, "--store", store, "--json").stdout)["measured"]["kernels"] == 12
    assert "no run in" in fails("show", "0" * 20, "--store", store)
    assert "is not the start of an id" in fails("show", "run-1", "--store", store)


def test_export_gives_back_what_was_imported() -> None:
    write("a.jsonl", *(document(i) for i in range(5)), document(9, model="vit_base"))
    ok("import", "a.jsonl", "--store", "runs.db")
    assert (
        ok("export", "--store", "runs.db", "-o", "new/b.jsonl").stderr == "foretrain: 6 runs in new/b.jsonl\n"
    )
    assert [one.to_dict() for _, one in open_runs("new/b.jsonl")] == [
        one.to_dict() for _, one in open_runs("a.jsonl")
    ]
    assert "0 new, 6 known" in ok("import", "new/b.jsonl", "--store", "runs.db").stderr
    ok("export", "--store", "runs.db", "-o", "c.jsonl.zst", "--model", "vit*")
    assert zstandard.decompress(Path("c.jsonl.zst").read_bytes()).count(b"\n") == 1
    assert len(list(open_runs("c.jsonl.zst"))) == 1
    assert "0 new, 1 known" in ok("import", "c.jsonl.zst", "--store", "runs.db").stderr


def test_a_failed_export_leaves_the_old_file() -> None:
    write("a.jsonl", document())
    ok("import", "a.jsonl", "--store", "runs.db")
    write("out.jsonl", "old")
    with Store.open("runs.db") as store, store._transaction(writes=True) as connection:
        connection.exec_driver_sql("UPDATE foretrain_runs SET run = 'not JSON'")
    assert "runs.db: it holds a run that is not JSON" in fails(
        "export", "--store", "runs.db", "-o", "out.jsonl"
    )
    assert "none.db: there is no such file" in fails("export", "--store", "none.db", "-o", "out.jsonl")
    assert Path("out.jsonl").read_text() == "old\n"


def test_a_model_in_a_file_is_found_after_an_export() -> None:
    one = document()
    one["job"]["model"] = {"source": "python", "name": "net.py:make"}
    write("a.jsonl", one)
    ok("import", "a.jsonl")
    ok("export", "-o", "away/b.jsonl")
    ok("export", "-o", "c.jsonl")
    assert json.loads(Path("away/b.jsonl").read_text())["job"]["model"]["name"] == "../net.py:make"
    assert json.loads(Path("c.jsonl").read_text())["job"]["model"]["name"] == "net.py:make"
    assert "0 new, 2 known" in ok("import", "away/b.jsonl", "c.jsonl").stderr


def test_half_a_line_is_reported_by_list() -> None:
    append_run(Path("a.jsonl"), document())
    with Path("a.jsonl").open("a") as file:
        file.write('{"job"')
    result = ok("list", "--store", "a.jsonl", "--json")
    assert len(json.loads(result.stdout)) == 1
    assert "foretrain: a.jsonl:2: half a line" in result.stderr


@pytest.mark.parametrize(
    "command", [("list",), ("show", "a"), ("export", "-o", "x.jsonl"), ("import", "a.jsonl")]
)
def test_a_server_that_does_not_answer_is_one_line_without_the_password(
    command: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    write("a.jsonl", document())
    monkeypatch.setenv("FORETRAIN_STORE", "postgresql+psycopg://ann:s3cret@127.0.0.1:1/runs")
    result = run(*command)
    assert result.exit_code == 2
    assert "s3cret" not in result.output
    assert result.stderr.splitlines()[-1].startswith(
        "foretrain: postgresql+psycopg://ann:***@127.0.0.1:1/runs: connection failed"
    )


def test_other_mistakes_are_one_line(folder: Path) -> None:
    assert (
        f"{folder}/data/foretrain/runs.db: there is no such file; `foretrain runs import` makes it"
        in fails("list")
    )
    assert not (folder / "data").exists()
    assert "--quantity: 'speed' is not one of" in fails("list", "--quantity", "speed")
    write("text.db", "plain text that is long enough to be looked at by a database " * 20)
    assert "text.db: file is not a database" in fails("list", "--store", "text.db")
    assert run("list", "--limit", "0").exit_code == 2
