"""Graphs are traced once: what is in the cache is used, and what would give another graph is traced anew."""

from __future__ import annotations

import importlib
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from commands import ok
from foretrain import predict
from foretrain.api import make_job
from foretrain.capture import cache_folder, capture_job, capture_rank
from foretrain.capture.sources.models import load_model
from foretrain.errors import CaptureError, InputError
from foretrain.graph import OpGraph
from foretrain.graph.batches import BatchFamily
from foretrain.graph.storage import to_json
from foretrain.job import Job

CAPTURE = importlib.import_module("foretrain.capture")  # foretrain.capture the attribute is the function
CACHE = importlib.import_module("foretrain.capture.cache")
RECORDING = importlib.import_module("foretrain.capture.recording")
READS = importlib.import_module("foretrain.capture.reads")
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
        graph: OpGraph = trace(job, batch)
        return graph

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


# What a model reads beside its file

READER = """
import json
import os
from pathlib import Path
import torch

def make(batch):
    file = Path(__file__).parent / "settings" / "net.json"
    width = json.loads(file.read_text())["width"] if file.parent.exists() else 8
    outputs = int(os.environ.get("NET_OUTPUTS", "3"))
    return torch.nn.Linear(width, outputs), (torch.zeros(batch, width),)
"""


def test_a_file_that_the_model_reads_is_part_of_the_key(base: Path, traces: list[Job]) -> None:
    (base / "net.py").write_text(READER)
    (base / "settings").mkdir()
    for width in (4, 6, 4):
        (base / "settings" / "net.json").write_text(f'{{"width": {width}}}')
        assert capture_job(a_job(base)).parameters == width * 3 + 3
    assert len(traces) == 2


def test_a_file_that_was_missed_is_looked_for_again(base: Path) -> None:
    read = 'Path(__file__ + ".txt").read_text()'
    (base / "net.py").write_text(
        f"from pathlib import Path\nimport torch\ndef make(batch):\n    try: width = int({read})\n    except OSError: width = 8\n"
        "    return torch.nn.Linear(width, 3), (torch.zeros(batch, width),)\n"
    )
    assert capture_job(a_job(base)).parameters == 27
    (base / "net.py.txt").write_text("4")
    assert capture_job(a_job(base)).parameters == 15


def test_a_file_that_the_model_writes_itself_does_not_outdate_it(base: Path, traces: list[Job]) -> None:
    (base / "net.py").write_text(
        f"{MODEL}\nimport tempfile\nfrom pathlib import Path\nwith tempfile.NamedTemporaryFile('w', suffix='.txt') as file:\n"
        "    print('x', file=file, flush=True)\n    Path(file.name).read_text()\n"
    )
    for _ in range(2):
        capture_job(a_job(base))
    assert len(traces) == 1


def test_an_environment_variable_that_the_model_asks_for_is_part_of_the_key(
    base: Path, traces: list[Job], monkeypatch: pytest.MonkeyPatch
) -> None:
    (base / "net.py").write_text(READER)
    capture_job(a_job(base))
    for outputs in (5, 7, 5):
        monkeypatch.setenv("NET_OUTPUTS", str(outputs))
        monkeypatch.setenv("ANOTHER", str(len(traces)))
        assert capture_job(a_job(base)).parameters == 8 * outputs + outputs
    assert len(traces) == 3
    assert type(os.environ).__name__ == "_Environ"


@pytest.mark.parametrize("loaded", [False, True])
def test_a_package_outside_the_folder_is_part_of_the_key(
    base: Path, monkeypatch: pytest.MonkeyPatch, loaded: bool
) -> None:
    """Whether it is first imported for the model, or was loaded before."""
    package = base / "elsewhere" / f"outside_{loaded}"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("from .part import make\n")
    (package / "part.py").write_text(MODEL)
    monkeypatch.syspath_prepend(package.parent)
    (base / "nets").mkdir()
    (base / "nets" / "net.py").write_text(f"import outside_{loaded} as outside\nmake = outside.make\n")
    if loaded:
        importlib.import_module(package.name)
    job = a_job(base / "nets")
    try:
        for text, parameters in ((MODEL, 27), (MODEL.replace("3)", "15)"), 135)):
            (package / "part.py").write_text(text)  # of another size, so that no bytecode passes for it
            assert capture_job(job).parameters == parameters
    finally:
        for name in [name for name in sys.modules if name.startswith(package.name)]:
            del sys.modules[name]


OUTSIDE = """
import functools
import json
import os
from pathlib import Path

CFG = json.loads((Path(__file__).parent / "cfg.json").read_text())
OUTPUTS = int(os.environ.get("NET_OUTPUTS", "3"))

@functools.cache
def width(): return int((Path(__file__).parent / "width.txt").read_text())
"""
OUTSIDE_NET = """
import torch
import settings_outside
import settings_user

def make(batch):
    layers = [torch.nn.Linear(settings_outside.width(), 8), *(torch.nn.Linear(8, 8) for _ in range(settings_user.LAYERS))]
    return torch.nn.Sequential(*layers, torch.nn.Linear(8, settings_outside.OUTPUTS)), torch.zeros(batch, settings_outside.width())
"""


@pytest.fixture
def outside(base: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Modules beside no model that read files and a variable, once, and one that takes a name from them."""
    folder = base / "outside"
    folder.mkdir()
    (folder / "settings_outside.py").write_text(OUTSIDE)
    (folder / "settings_user.py").write_text("from settings_outside import CFG\nLAYERS = CFG['layers']\n")
    (folder / "cfg.json").write_text('{"layers": 1}')
    (folder / "width.txt").write_text("8")
    (base / "nets").mkdir()
    (base / "nets" / "net.py").write_text(OUTSIDE_NET)
    monkeypatch.syspath_prepend(folder)
    yield folder
    forget_outside()


def forget_outside() -> None:
    """As a new process would find them."""
    for name in ("settings_outside", "settings_user"):
        sys.modules.pop(name, None)
    for known in (RECORDING._read_by, RECORDING._files_before, RECORDING._variables_before):
        known.clear()


def change_outside(what: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> int:
    """The parameters of the model that follows."""
    if what == "file":
        (folder / "cfg.json").write_text('{"layers": 2}')
    elif what == "file read once":
        (folder / "width.txt").write_text("4")
    else:
        monkeypatch.setenv("NET_OUTPUTS", "5")
    return {"file": 72 + 2 * 72 + 27, "file read once": 40 + 72 + 27, "variable": 72 + 72 + 45}[what]


@pytest.mark.parametrize("what", ["file", "file read once", "variable"])
def test_what_a_module_outside_the_folder_read_is_part_of_every_key_of_a_process(
    base: Path, outside: Path, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    jobs = [a_job(base / "nets", precision=precision) for precision in ("fp32", "bf16")]
    assert [capture_job(job).parameters for job in jobs] == 2 * [72 + 72 + 27]
    expected = change_outside(what, outside, monkeypatch)
    forget_outside()
    assert [capture_job(job).parameters for job in jobs] == 2 * [expected]


@pytest.mark.parametrize("what", ["file", "file read once", "variable"])
def test_a_module_outside_the_folder_is_imported_anew_when_what_it_read_changes(
    base: Path, outside: Path, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    job = a_job(base / "nets")
    assert capture_job(job).parameters == 72 + 72 + 27
    loaded = sys.modules["settings_outside"]
    capture_job(job, refresh=True)
    assert sys.modules["settings_outside"] is loaded
    expected = change_outside(what, outside, monkeypatch)
    assert capture_job(job).parameters == expected


def test_a_model_that_is_run_before_it_is_traced_tells_what_its_modules_read(
    base: Path, outside: Path
) -> None:
    job = a_job(base / "nets")
    load_model(job.workload, 4, "cpu")
    capture_job(job)
    (names,) = (base / "cache").glob("*.reads.json")
    assert {"../outside/cfg.json", "../outside/settings_outside.py"} <= READS.Reads.load(names).files


@pytest.mark.parametrize(
    "copy",
    ["dict(os.environ)", "{**os.environ}", "os.environ.copy()", "list(os.environ.items())",
     "[os.environ[name] for name in sorted(os.environ)]"],
)  # fmt: skip
def test_going_over_the_whole_environment_asks_for_no_variable(
    base: Path, monkeypatch: pytest.MonkeyPatch, copy: str
) -> None:
    monkeypatch.setenv("NET_OUTPUTS", "3")
    (base / "net.py").write_text(READER.replace("def make", f"all_of_them = {copy}\n\ndef make"))
    capture_job(a_job(base))
    (names,) = (base / "cache").glob("*.reads.json")
    assert READS.Reads.load(names).variables == {"NET_OUTPUTS"}


def test_another_version_of_a_package_that_the_file_imports_traces_again(
    base: Path, traces: list[Job], monkeypatch: pytest.MonkeyPatch
) -> None:
    (base / "net.py").write_text(f"import zstandard\n{MODEL}")
    for version in ("1", "2", "2"):
        monkeypatch.setattr(READS, "version", lambda _, version=version: version)
        capture_job(a_job(base))
    assert len(traces) == 2


def test_what_timm_asks_of_the_environment_is_part_of_the_key(monkeypatch: pytest.MonkeyPatch) -> None:
    job = Job.read(
        {
            "model": {"source": "timm", "name": "vit_tiny_patch16_224"},
            "training": {"global_batch": 4},
            "cluster": {"device": "t4"},
        }
    )
    monkeypatch.delenv("TIMM_FUSED_ATTN", raising=False)
    fused = CACHE._Place(job, None, CACHE._known_reads(Path(), job)).path
    monkeypatch.setenv("TIMM_FUSED_ATTN", "0")
    assert CACHE._Place(job, None, CACHE._known_reads(Path(), job)).path != fused


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


def test_a_command_with_refresh_traces_again_and_once(base: Path, traces: list[Job]) -> None:
    target = str(base / "net.py:make")
    for words, traced in ((), 1), ((), 1), (("--refresh",), 1), ((), 1):
        CACHE._refreshed.clear()
        before = len(traces)
        ok("predict", target, "--predictor", "roofline", *words)
        ok("predict", target, "--predictor", "roofline", *words)
        assert len(traces) - before == (traced if words or not before else 0)


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
        older.setattr("foretrain.graph.storage.FORMAT", "foretrain-graph/0")
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


def test_a_cache_that_cannot_be_written_costs_time_and_not_the_graph(
    base: Path, traces: list[Job], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("FORETRAIN_CACHE", str(base / "net.py"))
    for _ in range(2):
        assert capture_job(a_job(base)).parameters == 27
    assert len(traces) == 1
    (message,) = caplog.messages
    assert re.search(r"^cache .*net\.py: cannot be written \(File exists\)", message)


def test_a_module_is_forecast_with_a_cache_that_cannot_be_written(
    base: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FORETRAIN_CACHE", str(base / "net.py"))
    forecast = predict(torch.nn.Linear(8, 3), torch.zeros(4, 8), predictor="roofline")
    assert forecast.job.micro_batch == 4


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
        graph: OpGraph = trace(job, batch)
        return graph

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
