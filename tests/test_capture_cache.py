"""Graphs are traced once: what is in the cache is used, and what would give another graph is traced anew."""

from __future__ import annotations

import importlib
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from foretrain.api import make_job
from foretrain.capture import cache_folder, capture_job, capture_rank
from foretrain.errors import CaptureError, InputError
from foretrain.graph import OpGraph
from foretrain.graph.batches import BatchFamily
from foretrain.graph.ir import to_json
from foretrain.job import Job

CAPTURE = importlib.import_module("foretrain.capture")  # foretrain.capture the attribute is the function
KEYS = importlib.import_module("foretrain.capture.keys")
MODEL = """
import torch

def make(batch, width=8):
    return torch.nn.Linear(width, 3), (torch.zeros(batch, width),)
"""


@pytest.fixture
def base(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("FORETRAIN_CACHE", str(tmp_path / "cache"))
    (tmp_path / "net.py").write_text(MODEL)
    return tmp_path


@pytest.fixture
def traces(monkeypatch: pytest.MonkeyPatch) -> list[Job]:
    """The jobs that were traced so far; not the third batch size that checks two."""
    jobs: list[Job] = []
    trace = CAPTURE._trace

    def counted(job: Job, batch: int) -> OpGraph:
        if batch == job.micro_batch:
            jobs.append(job)
        return trace(job, batch)

    monkeypatch.setattr(CAPTURE, "_trace", counted)
    return jobs


def a_job(
    base: Path, *, args: dict[str, Any] | None = None, micro_batch: int | None = None, **training: Any
) -> Job:
    model = {"source": "python", "name": "net.py:make", **({"args": args} if args else {})}
    plan = {} if micro_batch is None else {"micro_batch": micro_batch}
    return Job.read(
        {
            "model": model,
            "training": {"global_batch": 4, **training},
            "cluster": {"device": "t4"},
            "plan": plan,
        },
        base=base,
    )


def files(base: Path) -> list[Path]:
    return sorted((base / "cache").glob("*.json.zst"))


def test_the_second_capture_does_not_trace(
    base: Path, traces: list[Job], monkeypatch: pytest.MonkeyPatch
) -> None:
    first = capture_job(a_job(base))
    monkeypatch.setattr(CAPTURE, "_trace", lambda *_: pytest.fail("traced again"))
    assert to_json(capture_job(a_job(base))) == to_json(first)
    assert capture_job(a_job(base)) is capture_job(a_job(base))


def test_a_cached_graph_is_read_without_torch(base: Path) -> None:
    capture_job(a_job(base))
    script = f"""
import sys
from pathlib import Path
sys.modules["torch"] = None
from foretrain.capture import capture_job
from foretrain.job import Job
job = Job.read({{"model": {{"source": "python", "name": "net.py:make"}}, "training": {{"global_batch": 4}},
                "cluster": {{"device": "t4"}}}}, base=Path({str(base)!r}))
print(capture_job(job).parameters)
"""
    assert (
        subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout
        == "27\n"
    )


def test_without_torch_and_without_a_cached_graph_the_error_says_what_to_install(
    base: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(CAPTURE.importlib.util, "find_spec", lambda _: None)
    with pytest.raises(
        CaptureError, match=r"not in the cache and torch is not installed; install foretrain\[capture,zoo\]"
    ):
        capture_job(a_job(base))


@pytest.mark.parametrize(
    "change",
    [
        {"global_batch": 8},
        {"precision": "amp-bf16"},
        {"precision": "bf16"},
        {"precision": "bf16", "master_weights": True},
        {"mode": "infer"},
        {"optimizer": "adam"},
        {"channels_last": True},
        {"args": {"width": 16}},
        {"micro_batch": 2},
    ],
    ids=str,
)
def test_what_shapes_the_graph_is_part_of_its_key(
    base: Path, traces: list[Job], change: dict[str, Any]
) -> None:
    for job in (a_job(base), a_job(base, **change), a_job(base, **change)):
        capture_job(job)
    assert len(traces) == len(files(base)) == 2


@pytest.mark.parametrize(
    "change", [{"precision": "tf32"}, {"samples": 100, "epochs": 2}, {"steps": 10}], ids=str
)
def test_what_does_not_shape_the_graph_is_not(base: Path, traces: list[Job], change: dict[str, Any]) -> None:
    for job in (a_job(base), a_job(base, **change)):
        capture_job(job)
    assert len(traces) == len(files(base)) == 1


def test_inference_does_not_ask_for_the_optimizer(base: Path, traces: list[Job]) -> None:
    for optimizer in ("sgd", "adam"):
        capture_job(a_job(base, mode="infer", optimizer=optimizer))
    assert len(traces) == 1


def test_one_of_several_micro_batches_accumulates(base: Path) -> None:
    whole, part = capture_job(a_job(base)), capture_job(a_job(base, global_batch=8, micro_batch=4))
    assert (whole.samples, whole.accumulates) == (4, False)
    assert (part.samples, part.accumulates) == (4, True)
    assert not capture_job(a_job(base, global_batch=8, micro_batch=4, mode="infer")).accumulates


def test_a_changed_file_is_traced_anew(base: Path, traces: list[Job]) -> None:
    assert capture_job(a_job(base)).parameters == 27
    (base / "net.py").write_text(MODEL.replace("3)", "5)"))
    assert capture_job(a_job(base)).parameters == 45
    (base / "net.py").write_text(MODEL)
    assert capture_job(a_job(base)).parameters == 27
    assert len(traces) == 2


def test_a_changed_neighbour_that_the_file_imports_is_traced_anew(base: Path) -> None:
    (base / "net.py").write_text(
        "import a_part_of_the_net\ndef make(batch): return a_part_of_the_net.make(batch)\n"
    )
    (base / "a_part_of_the_net.py").write_text(MODEL)
    assert capture_job(a_job(base)).parameters == 27
    (base / "a_part_of_the_net.py").write_text(MODEL.replace("3)", "5)"))
    assert capture_job(a_job(base)).parameters == 45


@pytest.mark.parametrize(
    "part", ["a_package/__init__.py", "a_package/inner/deep.py", "another_package/part.py"]
)
def test_a_changed_package_beside_the_file_is_traced_anew(base: Path, part: str) -> None:
    """Whether the file imports it, it is a module inside, or another package imports it."""
    module = part.removesuffix("/__init__.py").removesuffix(".py").replace("/", ".")
    (base / part).parent.mkdir(parents=True, exist_ok=True)
    (base / "a_package").mkdir(exist_ok=True)
    (base / "a_package" / "first.py").write_text(f"import {module} as part\n")
    (base / "net.py").write_text(
        "def make(batch):\n    from a_package import first\n    return first.part.make(batch)\n"
    )
    (base / part).write_text(MODEL)
    assert capture_job(a_job(base)).parameters == 27
    (base / part).write_text(MODEL.replace("3)", "5)"))
    assert capture_job(a_job(base)).parameters == 45


def test_a_package_that_is_not_imported_is_not_looked_at(base: Path, traces: list[Job]) -> None:
    (base / "a_stranger").mkdir()
    for content in ("x = 1", "x = 2"):
        (base / "a_stranger" / "part.py").write_text(content)
        capture_job(a_job(base))
    assert len(traces) == 1


def test_a_missing_file_is_an_error_even_when_its_graph_is_cached(base: Path) -> None:
    capture_job(a_job(base))
    (base / "net.py").unlink()
    with pytest.raises(
        InputError, match=r"^model\.name: '.*net\.py' cannot be read \(No such file or directory\)$"
    ):
        capture_job(a_job(base))


def test_refresh_traces_again(base: Path, traces: list[Job]) -> None:
    capture_job(a_job(base))
    capture_job(a_job(base), refresh=True)
    assert len(traces) == 2


def test_another_version_of_a_library_traces_again(
    base: Path, traces: list[Job], monkeypatch: pytest.MonkeyPatch
) -> None:
    capture_job(a_job(base))
    monkeypatch.setattr(KEYS, "_version", lambda _: "99.0")
    assert capture_job(a_job(base)).info["versions"] == {"torch": "99.0"}
    capture_job(a_job(base))
    assert len(traces) == 2


def test_a_library_that_is_not_installed_does_not_outdate_a_graph(
    base: Path, traces: list[Job], monkeypatch: pytest.MonkeyPatch
) -> None:
    capture_job(a_job(base))
    monkeypatch.setattr(KEYS, "_version", lambda _: None)
    capture_job(a_job(base))
    assert len(traces) == 1


@pytest.mark.parametrize("content", [b"", b"not a graph"])
def test_a_damaged_file_in_the_cache_is_traced_again(base: Path, traces: list[Job], content: bytes) -> None:
    capture_job(a_job(base))
    files(base)[0].write_bytes(content)
    assert capture_job(a_job(base)).parameters == 27
    assert len(traces) == 2


def test_a_file_of_another_format_in_the_cache_is_traced_again(
    base: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as older:
        older.setattr("foretrain.graph.ir.FORMAT", "foretrain-graph/0")
        capture_job(a_job(base))
    assert capture_job(a_job(base)).parameters == 27


def test_the_cache_is_where_the_environment_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORETRAIN_CACHE", str(tmp_path / "here"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cache_folder() == tmp_path / "here"
    monkeypatch.delenv("FORETRAIN_CACHE")
    assert cache_folder() == tmp_path / "xdg" / "foretrain" / "graphs"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache_folder() == tmp_path / ".cache" / "foretrain" / "graphs"


def test_a_cache_folder_that_is_a_file_is_named(base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORETRAIN_CACHE", str(base / "net.py"))
    with pytest.raises(InputError, match=r"net\.py"):
        capture_job(a_job(base))


# Other batch sizes


def at(base: Path, *batches: int, **more: Any) -> list[OpGraph]:
    return [capture_job(a_job(base, global_batch=batch, **more)) for batch in batches]


def test_from_the_third_batch_size_on_nothing_is_traced(base: Path, traces: list[Job]) -> None:
    derived = at(base, 4, 8, 5, 64)[2:]
    assert len(traces) == 2
    assert [graph.digest() for graph in derived] == [
        CAPTURE._trace(a_job(base), batch).digest() for batch in (5, 64)
    ]
    assert capture_job(a_job(base, global_batch=5)) is derived[0]


def test_another_batch_size_is_derived_without_torch(base: Path) -> None:
    at(base, 4, 8)
    script = f"""
import sys
from pathlib import Path
sys.modules["torch"] = None
from foretrain.capture import capture_job
from foretrain.job import Job
job = Job.read({{"model": {{"source": "python", "name": "net.py:make"}}, "training": {{"global_batch": 6}},
                "cluster": {{"device": "t4"}}}}, base=Path({str(base)!r}))
print(capture_job(job).samples)
"""
    shown = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout
    assert shown == "6\n"


def test_a_batch_of_one_sample_is_traced_and_tells_nothing_of_others(base: Path, traces: list[Job]) -> None:
    at(base, 1, 4, 8, 16)
    assert len(traces) == 3
    at(base, 1)
    assert len(traces) == 3


def test_what_does_not_grow_in_lines_is_traced_each_time_and_tried_once(
    base: Path, traces: list[Job], monkeypatch: pytest.MonkeyPatch
) -> None:
    (base / "net.py").write_text(MODEL.replace("3)", "batch)"))
    tries: list[int] = []
    make = BatchFamily.of

    def counted(first: OpGraph, second: OpGraph) -> BatchFamily:
        tries.append(second.samples)
        return make(first, second)

    monkeypatch.setattr(BatchFamily, "of", counted)
    assert [graph.parameters for graph in at(base, 4, 8, 16, 32)] == [36, 72, 144, 288]
    assert (len(traces), tries) == (4, [8])


def test_a_file_whose_batches_do_not_grow_in_lines_is_found_out_by_a_third(
    base: Path, traces: list[Job]
) -> None:
    """Batches of 4, 8 and 16 look alike; one of 6 is filled up."""
    filled = MODEL.replace("torch.zeros(batch,", "torch.zeros(-(-batch // 4) * 4,")
    (base / "net.py").write_text(filled)
    graphs = at(base, 4, 8, 6, 16)
    assert [graph.buffers[2].size_bytes for graph in graphs] == [4 * rows * 8 for rows in (4, 8, 8, 16)]
    assert len(traces) == 4


def test_kinds_of_training_have_families_of_their_own(base: Path, traces: list[Job]) -> None:
    at(base, 4, 8)
    at(base, 16, mode="infer")
    at(base, 32, micro_batch=16)
    assert len(traces) == 4
    at(base, 16)
    assert len(traces) == 4


def test_tf32_shares_the_family_of_fp32(base: Path, traces: list[Job]) -> None:
    at(base, 4)
    at(base, 8, precision="tf32")
    assert at(base, 16, precision="tf32")[0].info["precision"] == "tf32"
    assert at(base, 16)[0].info["precision"] == "fp32"
    assert len(traces) == 2


def test_a_rank_knows_its_micro_batch_too(base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trace, traced = CAPTURE._trace_rank, list[int]()

    def counted(job: Job, batch: int) -> OpGraph:
        traced.append(batch)
        return trace(job, batch)

    monkeypatch.setattr(CAPTURE, "_trace_rank", counted)
    graphs = [capture_rank(a_job(base, global_batch=16, micro_batch=size)) for size in (2, 4, 8)]
    assert [graph.samples for graph in graphs] == [2, 4, 8]
    assert traced == [2, 4, 3]
    assert graphs[2].digest() == trace(a_job(base, global_batch=16, micro_batch=8), 8).digest()


@pytest.mark.parametrize("pattern", ["*.batches.zst", "*.first.json"])
def test_a_damaged_family_is_made_again(base: Path, traces: list[Job], pattern: str) -> None:
    at(base, 4, 8)
    for file in (base / "cache").glob(pattern):
        file.write_bytes(b"damaged")
    traced = 3 if "batches" in pattern else 2
    assert [graph.samples for graph in at(base, 16, 32, 64)] == [16, 32, 64]
    assert len(traces) == traced


def test_a_first_graph_that_is_gone_is_not_missed(base: Path, traces: list[Job]) -> None:
    at(base, 4)
    for file in files(base):
        file.unlink()
    at(base, 8, 16, 32)
    assert len(traces) == 3


def test_another_version_of_a_library_outdates_a_family(
    base: Path, traces: list[Job], monkeypatch: pytest.MonkeyPatch
) -> None:
    at(base, 4, 8)
    monkeypatch.setattr(KEYS, "_version", lambda _: "99.0")
    at(base, 16, 32, 64)
    assert len(traces) == 4


def test_refresh_forgets_the_family(base: Path, traces: list[Job]) -> None:
    at(base, 4, 8)
    capture_job(a_job(base, global_batch=16), refresh=True)
    assert len(traces) == 3
    at(base, 32, 64)
    assert len(traces) == 4


# A graph in hand


def graph_job(base: Path, name: str, **training: Any) -> Job:
    data = {
        "model": {"source": "graph", "name": name},
        "training": {"global_batch": 4, **training},
        "cluster": {"device": "t4"},
    }
    return Job.read(data, base=base)


def test_a_given_graph_is_used_as_it_is(base: Path, traces: list[Job]) -> None:
    capture_job(a_job(base)).save(base / "given.json.zst")
    assert capture_job(graph_job(base, "given.json.zst")).parameters == 27
    assert len(traces) == 1


@pytest.mark.parametrize(
    ("training", "message"),
    [
        (
            {"global_batch": 8},
            r"^training\.global_batch: the graph given\.json\.zst "
            r"holds 4 samples per micro-batch, the job asks for 8; give the batch of all devices, here 4$",
        ),
        (
            {"precision": "bf16"},
            r"^training\.precision: the graph given\.json\.zst "
            r"was captured with 'fp32', the job asks for 'bf16'$",
        ),
        ({"optimizer": "adam"}, r"^training\.optimizer: .* 'sgd', the job asks for 'adam'$"),
        ({"mode": "infer"}, r"^training\.mode: .* 'train', the job asks for 'infer'$"),
    ],
)
def test_a_given_graph_of_another_job_is_refused(base: Path, training: dict[str, Any], message: str) -> None:
    capture_job(a_job(base)).save(base / "given.json.zst")
    with pytest.raises(InputError, match=message):
        capture_job(graph_job(base, "given.json.zst", **training))


def test_a_given_graph_on_several_devices_asks_for_the_batch_of_all_of_them(base: Path) -> None:
    capture_job(a_job(base)).save(base / "given.json.zst")
    alone = graph_job(base, "given.json.zst").to_dict()
    several = {**alone, "cluster": {"device": "t4", "devices_per_node": 2}, "plan": {"data": 2}}
    with pytest.raises(
        InputError, match=r"holds 4 .* asks for 2 of 4 over 2; give the batch of all devices, here 8$"
    ):
        capture_rank(Job.read(several, base=base))
    several["training"] = {**several["training"], "global_batch": 8}
    assert capture_rank(Job.read(several, base=base)).samples == 4
    assert make_job(str(base / "given.json.zst"), device="t4", devices=2).workload.training.global_batch == 8


def test_a_given_graph_that_is_not_there_is_named(base: Path) -> None:
    with pytest.raises(
        InputError, match=r"^model\.name: '.*given\.json\.zst' cannot be read \(No such file or directory\)$"
    ):
        capture_job(graph_job(base, "given.json.zst"))
