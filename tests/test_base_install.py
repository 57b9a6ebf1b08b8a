"""The base install: a command that needs more says in one line which extra brings it."""

from __future__ import annotations

import importlib.metadata
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from packaging.specifiers import SpecifierSet

from foretrain.capture import capture
from foretrain.errors import CaptureError
from made_up import one_product

EXTRAS = (
    "accelerate anyio datasets ecos fastapi hypothesis lightgbm lightning mcp networkx onnx optuna pandas plotly psycopg "
    "pyarrow pytorch_lightning ray scipy sklearn sqlalchemy timm torch torch_geometric torchvision transformers "
    "uvicorn"
).split()
"""What the five libraries of the base install do not bring."""

CONSTRAINTS = Path(__file__).parents[1] / "constraints.txt"

COMMANDS = {
    "predict resnet18": "torch is not installed; install foretrain[capture,zoo]",
    "predict net.py:build": "torch is not installed; install foretrain[capture,zoo]",
    "predict job.json --predictor driple": "driple: torch is not installed; install foretrain[learn]",
    "predict job.json --predictor saved_driple": "driple: torch is not installed; install foretrain[learn]",
    "predict --jobs jobs.jsonl --ray local": "needs Ray, which is not installed; install foretrain[ray]",
    "plan net.py:build --devices h100 --max-devices 2 --batch 4": "torch is not installed; install foretrain[capture,zoo]",
    "fit flops traced_runs.jsonl -o out": "torch is not installed; install foretrain[capture,zoo] or give a captured graph; 1 more left out",
    "capture net.py:build -o graph2.json.zst": "torch is not installed; install foretrain[capture,zoo]",
    "evaluate runs.jsonl --ray local": "needs Ray, which is not installed; install foretrain[ray]",
    "fit ernest runs.jsonl -o out": "ernest: scipy is not installed; install foretrain[learn]",
    "fit cherrypick runs.jsonl -o out": "cherrypick: sklearn is not installed; install foretrain[learn]",
    "fit ray_models runs.jsonl -o out": "ray_models: scipy is not installed; install foretrain[learn]",
    "fit scaledl runs.jsonl -o out": "scaledl: torch is not installed; install foretrain[learn]",
    "fit deletepop runs.jsonl -o out": "deletepop: scipy is not installed; install foretrain[learn]",
    "fit deletepop operators.parquet -o out": "pyarrow is not installed; install foretrain[learn]",
    "advise runs.jsonl --deadline 1h --epochs 2": "ray_models: scipy is not installed; install foretrain[learn]",
    "advise runs.jsonl --deadline 1h --epochs 2 --predictor ernest": "ernest: scipy is not installed; install foretrain[learn]",
    "design operators.parquet --count 1": "pyarrow is not installed; install foretrain[learn]",
    "mcp": "mcp: anyio is not installed; install foretrain[mcp]",
    "measure ops job.json -o ops.jsonl --device cpu": "measure ops: torch is not installed; install foretrain[capture]",
    "measure steps job.json -o steps.jsonl": "measure steps: torch is not installed; install foretrain[capture]",
    "measure campaign --models resnet18 --batch 2 -o cells.jsonl": "measure campaign: torch is not installed; install foretrain[capture]",
    "measure campaign --models resnet18 --batch 2 -o cells.jsonl --on torchrun": "measure campaign: torch is not installed; install foretrain[capture]",
    "measure campaign --models resnet18 --batch 2 -o cells.jsonl --on ray": "needs Ray, which is not installed; install foretrain[ray]",
    "measure pack ops.jsonl -o ops.parquet --device cpu": "pyarrow is not installed; install foretrain[learn]",
    "runs list --store runs.db": "needs SQLAlchemy, which is not installed; install foretrain[store]",
    "runs import runs.jsonl --store runs.db": "needs SQLAlchemy, which is not installed; install foretrain[store]",
    "runs export --store runs.db -o out.jsonl": "needs SQLAlchemy, which is not installed; install foretrain[store]",
    "runs show abc --store runs.db": "needs SQLAlchemy, which is not installed; install foretrain[store]",
    "schedule trace.csv --cluster 2x4xv100 --html page.html": "plotly is not installed; install foretrain[report]",
    "schedule trace.csv --cluster 2x4xv100 --log log.parquet": "pyarrow is not installed; install foretrain[learn]",
    "schedule trace.csv --cluster 2x4xv100 --ray local": "needs Ray, which is not installed; install foretrain[ray]",
    "validate recomputation_2022": "validate: torch is not installed; install foretrain[capture]",
    "serve --db runs.db": "serve: uvicorn is not installed; install foretrain[serve]",
    "import foretrain.callbacks.huggingface": "ForetrainCallback: transformers is not installed; install foretrain[huggingface]",
    "from foretrain.callbacks.lightning import ForetrainCallback": "ForetrainCallback: lightning is not installed; install foretrain[lightning]",
    "import foretrain.callbacks.ray_train": "ForetrainCallback: ray is not installed; install foretrain[ray]",
    "import foretrain; foretrain.capture(None, ())": "capture: torch is not installed; install foretrain[capture]",
}
"""Commands (or Python) and what the one line says."""

WORK = (
    "predict job.json",
    "predict job.json --compare",
    "predict job.json --evidence",
    "predict job.json --html page.html --html-seconds 1",
    "predict job.json --predictor roofline --json",
    "predict job.json --trace trace.json --resources",
    "predict gpu.json --predictor scaledl",
    "predict gpu.json --predictor saved_scaledl",
    "predict --jobs jobs.jsonl --out forecasts.jsonl",
    "evaluate runs.jsonl",
    "evaluate gpu_runs.jsonl --predictor scaledl",
    "explain job.json job.json",
    "check job.json --fits 0.5 --base job.json --markdown",
    "catalog devices",
    "design --cluster 1,2,4 --count 2",
    "design jobs.jsonl --count 1 --predictor ernest",
    "measure ops job.json -o list.jsonl --collect-only",
    "runs list --store runs.jsonl",
    "schedule trace.csv --cluster 2x4xv100 --policy fifo,srtf,tiresias --log log.csv",
    "fit --help",
    "advise --help",
)

_RUNNER = """
import io, json, shlex, sys
from importlib.machinery import PathFinder

blocked = set(json.loads(sys.argv[1]))

class Base(PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        if name.partition(".")[0] in blocked:
            return None
        return PathFinder.find_spec(name, path, target)

sys.meta_path[:] = [Base if finder is PathFinder else finder for finder in sys.meta_path]

from typer.testing import CliRunner
from foretrain.cli import app
from foretrain.errors import ForetrainError

def answer(command):
    if command.startswith(("import ", "from ")):
        try:
            exec(command, {})
        except ForetrainError as error:
            return 2, f"{error}\\n", ""
        return 0, "", ""
    result = CliRunner().invoke(app, shlex.split(command))
    odd = "" if result.exception is None or isinstance(result.exception, SystemExit) else repr(result.exception)
    return result.exit_code, result.stderr, odd

answers = {command: answer(command) for command in json.loads(sys.argv[2])}
answers["loaded"] = sorted(blocked & {name.partition(".")[0] for name in sys.modules})
print(json.dumps(answers))
"""


def write_files(folder: Path) -> None:
    """What the commands take, made without any extra."""
    from foretrain import predictors

    one_product().save(folder / "graph.json.zst")
    job: dict[str, Any] = {
        "model": {"source": "graph", "name": "graph.json.zst"},
        "training": {"global_batch": 4, "samples": 64},
        "cluster": {"device": "cpu", "cores_per_device": 1},
    }
    measured = {"step_time_s": 0.1, "epoch_time_s": 1.6, "forward_time_s": 0.05}
    (folder / "job.json").write_text(json.dumps(job))
    (folder / "jobs.jsonl").write_text(json.dumps(job) + "\n")
    (folder / "runs.jsonl").write_text(5 * (json.dumps({"job": job, "measured": measured}) + "\n"))
    gpu = {**job, "cluster": {"device": "h100"}}
    (folder / "gpu.json").write_text(json.dumps(gpu))
    (folder / "gpu_runs.jsonl").write_text(json.dumps({"job": gpu, "measured": measured}) + "\n")
    traced = {**gpu, "model": {"source": "python", "name": "net.py:build"}}
    (folder / "traced_runs.jsonl").write_text(2 * (json.dumps({"job": traced, "measured": measured}) + "\n"))
    (folder / "net.py").write_text("def build(batch): ...\n")
    (folder / "operators.parquet").write_bytes(b"PAR1")
    (folder / "trace.csv").write_text("name,arrival_s,gpus,duration_s\na,0,1,100\nb,10,2,200\n")
    measured_operator = {
        "key": "k", "name": "mm", "overload": "default", "phase": "forward", "precision": "", "inputs": [],
        "args": {}, "flops": 1, "bytes": 1, "uses": 1, "cold_s": 1e-6, "warm_s": 1e-6, "host_s": 1e-6,
        "kernels": 1, "kernel_names": [],
    }  # fmt: skip
    (folder / "ops.jsonl").write_text(json.dumps(measured_operator) + "\n")
    for name in ("driple", "scaledl"):
        shipped = predictors.class_of(name).shipped  # type: ignore[attr-defined]
        (folder / f"saved_{name}").symlink_to(shipped)


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What a process without the extras answers to every command."""
    folder = tmp_path_factory.mktemp("base")
    write_files(folder)
    command = [sys.executable, "-c", _RUNNER, json.dumps(EXTRAS), json.dumps([*COMMANDS, *WORK])]
    env = {**os.environ, "FORETRAIN_CACHE": str(folder / "cache")}  # in another one a model may be traced
    done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


@pytest.mark.parametrize("command", COMMANDS)
def test_what_the_base_install_lacks_is_one_line(command: str, answers: dict[str, Any]) -> None:
    code, said, odd = answers[command]
    assert not odd
    assert code in (1, 2)
    assert COMMANDS[command] in said
    assert said.count("\n") == 1


@pytest.mark.parametrize("command", WORK)
def test_what_the_base_install_does(command: str, answers: dict[str, Any]) -> None:
    code, said, odd = answers[command]
    assert not odd
    assert code == 0, said


def test_no_extra_was_loaded(answers: dict[str, Any]) -> None:
    assert answers["loaded"] == []


def test_a_torch_that_is_too_old_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("torch", reason="torch is not installed")
    monkeypatch.setattr("importlib.metadata.version", lambda name: "2.4.1+cu121")
    with pytest.raises(
        CaptureError, match=r"^capture: torch 2\.4\.1\+cu121 is too old; it needs torch 2\.6 or newer$"
    ):
        capture(None, ())  # type: ignore[arg-type]


def test_pinned_versions_run_on_the_oldest_python_that_is_promised() -> None:
    """``make demo`` on Debian 12 has Python 3.11.2."""
    pins = dict(line.split("==") for line in CONSTRAINTS.read_text().splitlines() if not line.startswith("#"))
    for name, version in pins.items():
        try:
            installed = importlib.metadata.distribution(name)
        except importlib.metadata.PackageNotFoundError:
            continue
        if installed.version == version:
            needed = installed.metadata["Requires-Python"] or ""
            assert SpecifierSet(needed).contains("3.11.0"), f"{name}=={version} needs Python {needed}"
