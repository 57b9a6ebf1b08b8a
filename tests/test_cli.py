"""The command line as a user types it: what it prints, the files it writes, how it fails and with which exit
code."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

import foretrain
from commands import PATIENCE_S, fails, ok, run, tiny_job
from foretrain import predictors
from foretrain.cli import helping
from foretrain.cli.app import COMMANDS
from foretrain.errors import InputError
from foretrain.run import Run
from made_up import MODEL

JOB = """
[model]
source = "python"
name = "tiny.py:net"
[training]
global_batch = 8
image = 8
samples = 800
epochs = 2
[cluster]
device = "a100"
"""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a model and a job, which is also where the commands run."""
    (tmp_path / "tiny.py").write_text(MODEL)
    (tmp_path / "job.toml").write_text(JOB)
    monkeypatch.setenv("PYTHONPATH", str(Path(foretrain.__file__).parents[1]))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def process(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "foretrain.cli", *words],
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )


def forecast(*words: str) -> Any:
    return json.loads(ok("predict", *words, "--json"))


def write_lines(path: str, records: Sequence[object]) -> None:
    Path(path).write_text(
        "".join(f"{record if isinstance(record, str) else json.dumps(record)}\n" for record in records)
    )


# One forecast


def test_predict_prints_a_summary() -> None:
    shown = ok("predict", "job.toml")
    for words in (
        "tiny.py:net",
        "a100-sxm",
        "time per step",
        "samples/s",
        "memory at peak",
        "fits",
        "whole training",
        "80 % interval",
    ):
        assert words in shown
    assert "\x1b" not in shown


def test_predict_a_model_by_name_with_options() -> None:
    document = forecast(
        "tiny.py:net", "--device", "h100", "--batch", "4", "--image", "3,8,8", "--optimizer", "adamw"
    )
    assert document["job"]["training"]["global_batch"] == 4
    assert document["job"]["training"]["optimizer"] == "adamw"
    assert document["job"]["cluster"]["device"] == "h100-sxm-80gb"
    assert document["quantities"]["step_time_s"]["median"] > 0


def test_options_override_the_job_file() -> None:
    document = forecast(
        "job.toml",
        "--device",
        "v100",
        "--batch",
        "16",
        "--micro-batch",
        "8",
        "--steps",
        "7",
        "--mode",
        "train",
    )
    training = document["job"]["training"]
    assert (training["global_batch"], training["steps"], document["job"]["plan"]["micro_batch"]) == (16, 7, 8)
    assert "epochs" not in training
    assert document["job"]["cluster"]["device"].startswith("v100")


def test_what_happens_beside_the_steps_is_given_by_options() -> None:
    words = (
        "--loader-rate 50 --loader-workers 2 --evaluate-every 7 --evaluate-samples 16 --checkpoint-every epoch "
        "--node-mtbf 50d --restart-time 5min --storage-bandwidth 2GB/s --price $2/h --title mine --servers 1"
    )
    document = forecast("job.toml", *words.split())
    training, cluster = document["job"]["training"], document["job"]["cluster"]
    assert (training["loader_rate"], training["loader_workers"]) == (50, 2)
    assert (training["evaluate_every"], training["checkpoint_every"]) == (7, "epoch")
    assert (cluster["node_mtbf"], cluster["restart_time"], cluster["price"]) == (50 * 86400, 300, 2)
    assert (cluster["storage_bandwidth"], document["job"]["plan"]["servers"]) == (2e9, 1)
    assert document["job"]["model"]["title"] == "mine"
    assert {"evaluation", "checkpoints"} <= set(document["total_time_parts"])
    assert ok("predict", "job.toml", "--title", "mine").startswith("mine, training, batch 8")


def test_a_json_job_is_the_same_as_toml(folder: Path) -> None:
    (folder / "job.json").write_text(
        json.dumps(tiny_job(training={"global_batch": 8, "image": 8, "samples": 800, "epochs": 2}))
    )
    assert forecast("job.json") == forecast("job.toml")


def test_a_node_replaces_the_device_of_the_file() -> None:
    cluster = forecast("job.toml", "--node", "dgx-h100")["job"]["cluster"]
    assert (cluster["device"], cluster["devices_per_node"]) == ("h100-sxm-80gb", 8)


@pytest.mark.parametrize(("what", "row"), [("phase", "backward"), ("operator", "addmm"), ("layer", "1")])
def test_breakdown(what: str, row: str) -> None:
    shown = ok("predict", "job.toml", "--breakdown", what)
    assert f"by {what}" in shown
    assert row in shown
    assert forecast("job.toml", "--breakdown", what)["breakdown_s"][what][row] > 0


def test_trace_and_page_are_written(folder: Path) -> None:
    ok("predict", "job.toml", "--trace", "trace.json", "--html", "report.html", "--html-seconds", "0.2")
    events = json.loads((folder / "trace.json").read_text())["traceEvents"]
    assert {"addmm", "memory", "thread_name"} <= {event["name"] for event in events}
    assert "://cdn" not in (folder / "report.html").read_text()


def test_options_of_other_plans_count_on_the_page_that_has_them() -> None:
    schedule = ("predict", "job.toml", "--schedule", "gpipe")
    assert "--schedule: changes nothing here" in fails(*schedule)
    ok(*schedule, "--html", "report.html", "--html-seconds", "0.2")
    ok(*schedule, "--suggest")


def test_a_forecast_is_shown_though_its_trace_cannot_be_written(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> int:
        raise InputError("trace.json: cannot be written (No space left on device)")

    monkeypatch.setattr("foretrain.report.write_trace", full)
    result = run("predict", "job.toml", "--trace", "trace.json")
    assert result.exit_code == 2
    assert "time per step" in result.stdout
    assert result.stderr == "foretrain: trace.json: cannot be written (No space left on device)\n"


def test_many_devices_say_where_a_step_goes(folder: Path) -> None:
    shown = ok(
        "predict",
        "job.toml",
        "--devices",
        "4",
        "--trace",
        "trace.json",
        "--html",
        "report.html",
        "--html-seconds",
        "0",
    )
    for words in (
        "on 4 x a100",
        "computation",
        "exposed communication",
        "waiting for the host",
        "memory of each rank",
        "network per rank",
    ):
        assert words in shown
    events = json.loads((folder / "trace.json").read_text())["traceEvents"]
    assert {event["cat"] for event in events if event["ph"] == "X"} == {
        "forward",
        "backward",
        "optimizer",
        "network",
    }
    assert "What the time of a step goes to" in (folder / "report.html").read_text()
    document = forecast("job.toml", "--devices", "4")
    assert sum(document["step_breakdown_s"].values()) == pytest.approx(
        document["quantities"]["step_time_s"]["median"]
    )
    assert len(document["memory_by_stage_bytes"]) == 1


def test_many_devices_are_broken_down_by_operator_and_layer() -> None:
    assert "_foreach_add_" in ok("predict", "job.toml", "--devices", "4", "--breakdown", "operator")
    assert "(optimizer)" in ok("predict", "job.toml", "--devices", "4", "--breakdown", "layer")


def test_user_catalogue(folder: Path) -> None:
    (folder / "mine.toml").write_text(
        '[devices.mine]\nfp32 = 1e13\nmemory_bytes = "4 GiB"\nmemory_bytes_per_s = "100 GB/s"\n'
    )
    assert (
        forecast("job.toml", "--device", "mine", "--catalog", "mine.toml")["memory_capacity_bytes"]
        == 4 * 2**30
    )
    assert "100 GB/s" in ok("catalog", "devices", "mine", "--catalog", "mine.toml")


# Mistakes


@pytest.mark.parametrize(
    ("words", "parts"),
    [
        (["job.toml", "--device", "h101"], ["cluster.device", "'h101'", "did you mean h100"]),
        (["tiny.py:net", "--device", "h101"], ["cluster.device", "'h101'", "did you mean h100"]),
        (["job.toml", "--precision", "fp31"], ["training.precision", "'fp31'", "fp16", "fp32"]),
        (
            ["job.toml", "--image", "big"],
            ["training.image", "'big'", "a side length or channels,height,width"],
        ),
        (["job.toml", "--devices", "3"], ["training.global_batch", "8", "plan.data = 3"]),
        (["job.toml", "--devices", "12"], ["devices: 12 does not fill nodes of 8", "such as 2 of 6 each"]),
        (["job.toml", "--devices", "8", "--nodes", "3"], ["devices", "8", "nodes = 3"]),
        (["job.toml", "--micro-batch", "3"], ["plan.micro_batch", "3", "global batch 8"]),
        (["job.toml", "--predictor", "oracle"], ["predictor", "'oracle'", "roofline"]),
        (["nowhere.toml"], ["nowhere.toml", "cannot be read", "No such file"]),
        (["nowhere.py:net"], ["model.name", "nowhere.py", "cannot be read"]),
        (["jobs.jsonl"], ["jobs.jsonl", "--jobs"]),
        (["job.toml", "--catalog", "nowhere.toml"], ["nowhere.toml", "cannot be read"]),
        (["job.toml", "--trace", "job.toml/trace.json"], ["job.toml/trace.json", "cannot be written"]),
        (["job.toml", "--html", "job.toml/report.html"], ["job.toml/report.html", "cannot be written"]),
    ],
)
def test_mistakes_are_one_line_that_names_field_value_and_what_is_allowed(
    words: list[str], parts: list[str]
) -> None:
    message = fails("predict", *words)
    for part in parts:
        assert part in message


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("[model\n", ["bad.toml", "line 1"]),
        (JOB + "colour = 'red'\n", ["bad.toml", "cluster.colour", "device"]),
        (JOB + "[plans]\n", ["bad.toml", "plans", "plan"]),
        (
            JOB.replace("global_batch = 8", "global_batch = 'many'"),
            ["bad.toml", "training.global_batch", "'many'", "a whole number"],
        ),
        (JOB + "[plan]\ntensor = 2\n", ["bad.toml", "plan", "tensor 2", "1 devices"]),
        ("model = 3\n", ["bad.toml", "missing"]),
    ],
)
def test_mistakes_in_a_job_file(folder: Path, text: str, parts: list[str]) -> None:
    (folder / "bad.toml").write_text(text)
    message = (
        fails("predict", "bad.toml", "--batch", "8") if "many" not in text else fails("predict", "bad.toml")
    )
    for part in parts:
        assert part in message


@pytest.mark.parametrize(
    "words",
    [
        ["predict"],
        ["predict", "job.toml", "--jobs", "x"],
        ["predict", "x", "--out", "y"],
        ["predict", "x", "--colour"],
        ["fly"],
    ],
)
def test_usage_errors_are_one_line_with_exit_code_2(words: list[str]) -> None:
    assert "(see foretrain " in fails(*words)


def test_no_words_at_all_get_the_help() -> None:
    for words in ([], ["measure"], ["runs"]):
        result = run(*words)
        assert result.exit_code == 2
        assert "Usage:" in result.output


def test_bugs_keep_their_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(name: str) -> None:
        raise RuntimeError("a bug")

    monkeypatch.setattr(predictors, "get", broken)
    assert isinstance(run("predict", "job.toml").exception, RuntimeError)


def test_a_mistake_in_a_real_process_has_no_traceback() -> None:
    done = process("predict", "job.toml", "--device", "h101")
    assert (done.returncode, done.stdout) == (2, "")
    assert "Traceback" not in done.stderr
    assert done.stderr.startswith("foretrain: job.toml: cluster.device: 'h101'")


def test_version() -> None:
    assert process("--version").stdout == f"foretrain {foretrain.__version__}\n"


# Many jobs


def test_many_jobs_go_on_after_a_bad_one(folder: Path) -> None:
    write_lines(
        "jobs.jsonl",
        [tiny_job(), tiny_job(cluster={"device": "h101"}), "{", "", {"job": tiny_job(), "measured": {}}],
    )
    result = run("predict", "--jobs", "jobs.jsonl", "--out", "out.jsonl")
    assert result.exit_code == 1
    assert "4 jobs, 2 failed" in result.stderr
    answers = [json.loads(line) for line in (folder / "out.jsonl").read_text().splitlines()]
    assert [answer["line"] for answer in answers] == [1, 2, 3, 5]
    assert ["forecast" in answer for answer in answers] == [True, False, False, True]
    assert "'h101'" in answers[1]["error"]
    assert "not JSON" in answers[2]["error"]
    assert answers[0]["forecast"] == answers[3]["forecast"]


def test_many_jobs_to_the_screen_with_an_option_over_all() -> None:
    write_lines("jobs.jsonl", [tiny_job(), tiny_job()])
    lines = ok("predict", "--jobs", "jobs.jsonl", "--device", "t4").splitlines()
    assert [json.loads(line)["forecast"]["job"]["cluster"]["device"] for line in lines] == ["t4", "t4"]


def test_many_jobs_survive_a_bug(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(self: object, job: object) -> None:
        raise RuntimeError("a bug")

    monkeypatch.setattr("foretrain.predictors.roofline.RooflinePredictor.predict", broken)
    write_lines("jobs.jsonl", [tiny_job()])
    result = run("predict", "--jobs", "jobs.jsonl", "--predictor", "roofline")
    assert result.exit_code == 1
    assert json.loads(result.stdout)["error"] == "internal error: RuntimeError: a bug"


def test_the_file_of_jobs_is_not_overwritten() -> None:
    write_lines("jobs.jsonl", [tiny_job()])
    assert "is the file of jobs itself" in fails("predict", "--jobs", "jobs.jsonl", "--out", "jobs.jsonl")
    assert "cannot be written" in fails("predict", "--jobs", "jobs.jsonl", "--out", "nowhere/out.jsonl")


# Speed


def test_a_cached_graph_needs_no_more_than_the_base_install() -> None:
    ok("predict", "job.toml")
    script = (
        "import sys; from foretrain.cli import app; app(['predict', "
        "'job.toml', '--breakdown', 'layer'], standalone_mode=False);"
        "heavy = ('torch', 'plotly', 'timm', 'transformers', "
        "'lightgbm', 'scipy', 'sklearn', 'pyarrow', 'pandas');"
        "print([name for name in heavy if name in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=PATIENCE_S, check=True
    )
    assert "time per step" in done.stdout
    assert done.stdout.splitlines()[-1] == "[]"


def test_a_closed_pipe_is_silent() -> None:
    read, write = os.pipe()
    os.close(read)
    done = subprocess.run(
        [sys.executable, "-m", "foretrain.cli", "catalog", "devices"],
        stdout=write,
        stderr=subprocess.PIPE,
        text=True,
        timeout=PATIENCE_S,
    )
    os.close(write)
    assert done.stderr == ""


@pytest.mark.parametrize("words", [("--help",), ("catalog", "devices"), ("catalog", "devices", "--json")])
def test_a_full_disk_behind_stdout_is_one_line(words: tuple[str, ...]) -> None:
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "foretrain.cli", *words],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            timeout=PATIENCE_S,
        )
    assert done.returncode == 2
    assert done.stderr == "foretrain: stdout: cannot be written (No space left on device)\n"


def test_a_full_disk_behind_stderr_leaves_the_exit_code_as_it_is() -> None:
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "foretrain.cli", "predict", "nothing.toml"],
            stdout=subprocess.PIPE,
            stderr=full,
            timeout=PATIENCE_S,
        )
    assert (done.returncode, done.stdout) == (2, b"")


def test_letters_that_a_terminal_does_not_have_are_spelled_out() -> None:
    ok("predict", "job.toml", "--title", "模型", "--write-job", "titled.json")
    done = subprocess.run(
        [sys.executable, "-m", "foretrain", "predict", "titled.json"],
        capture_output=True,
        env={**os.environ, "PYTHONIOENCODING": "ascii"},
        timeout=PATIENCE_S,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(rb"\u6a21\u578b")


def test_ctrl_c_while_the_command_line_is_imported_is_one_line() -> None:
    interrupt = (
        "import sys, types\n"
        "class Interrupted(types.ModuleType):\n"
        "    def __getattr__(self, name): raise KeyboardInterrupt\n"
        "sys.modules['typer'] = Interrupted('typer')\n"
        "from foretrain.__main__ import main\n"
        "main()\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", interrupt], capture_output=True, text=True, timeout=PATIENCE_S
    )
    assert (done.returncode, done.stderr) == (130, "foretrain: interrupted\n")


def test_a_closed_stdout_is_silent() -> None:
    close = f"exec {sys.executable} -m foretrain.cli catalog devices >&-"
    done = subprocess.run(["sh", "-c", close], stderr=subprocess.PIPE, text=True, timeout=PATIENCE_S)
    assert (done.returncode, done.stderr) == (0, "")


# The other commands


def test_evaluate_prints_and_writes_the_errors(folder: Path) -> None:
    measured = forecast("job.toml", "--predictor", "roofline")["quantities"]["step_time_s"]["median"]
    runs = [{"job": tiny_job(), "measured": {"step_time_s": measured * factor}} for factor in (0.8, 1.0)]
    assert Run.read(runs[0]).measured
    write_lines("runs.jsonl", runs)
    shown = ok("evaluate", "runs.jsonl", "--predictor", "roofline", "--json", "errors.json")
    assert "step_time_s" in shown
    assert "12.5%" in shown
    document = json.loads((folder / "errors.json").read_text())
    assert document["results"][0]["mape"] == pytest.approx(0.125)
    assert len(document["runs"]) == 2


def test_evaluate_refuses_what_it_cannot_read() -> None:
    assert "nowhere.jsonl" in fails("evaluate", "nowhere.jsonl")
    write_lines("runs.jsonl", [{"job": tiny_job(), "measured": {"step_time_s": 1.0}}])
    assert "'oracle'" in fails("evaluate", "runs.jsonl", "--predictor", "oracle")
    assert "leave-model-out" in fails("evaluate", "runs.jsonl", "--split", "sometimes")


def test_capture_writes_a_graph_that_predict_reads(folder: Path) -> None:
    shown = ok("capture", "job.toml", "-o", "graph.json.zst")
    for words in ("ops", "distinct operators", "FLOPs forward", "parameters"):
        assert words in shown
    given = forecast("graph.json.zst", "--device", "a100", "--batch", "8")["quantities"]
    assert given["step_time_s"] == forecast("job.toml")["quantities"]["step_time_s"]
    assert "cannot be written" in fails("capture", "job.toml", "-o", "job.toml/graph.json.zst")
    said = fails("capture", "job.toml", "-o", "graph.json")
    assert "--out: 'graph.json' is not a name that ends in .zst" in said


@pytest.mark.parametrize(
    ("kind", "name", "known"),
    [
        ("devices", "h100", "h100-sxm-80gb"),
        ("nodes", "dgx-h100", "h100-sxm-80gb"),
        ("prices", "p5.48xlarge", "us-east-1"),
        ("models", "gpt2", "transformers"),
    ],
)
def test_catalog(kind: str, name: str, known: str) -> None:
    assert known in ok("catalog", kind)
    assert known in ok("catalog", kind, name)
    assert known in json.dumps(json.loads(ok("catalog", kind, "--json")))
    assert json.loads(ok("catalog", kind, name, "--json"))["name"]
    if kind != "prices":  # whose names are those of devices and nodes
        assert ok("catalog", name) == ok("catalog", kind, name)
    said = fails("catalog", kind, "nothing")
    assert "'nothing'" in said
    assert ("names of timm and torchvision go to predict" in said) == (kind == "models")


# Start-up


def loaded(code: str) -> set[str]:
    """The modules that a fresh process has imported in the end."""
    shown = subprocess.run(
        [sys.executable, "-c", f"{code}\nimport sys; print(*sys.modules)"],
        capture_output=True,
        text=True,
        check=True,
    )
    return set(shown.stdout.splitlines()[-1].split())


def test_importing_the_package_costs_nothing() -> None:
    assert loaded("import foretrain").isdisjoint({"numpy", "torch", "typer", "rich", "foretrain.job"})


def test_names_of_the_package_are_there_when_they_are_used() -> None:
    assert all(getattr(foretrain, name) is not None for name in foretrain.__all__)
    assert set(foretrain.__all__) <= set(dir(foretrain))
    assert foretrain.capture is importlib.import_module("foretrain.capture").capture
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        foretrain.nonsense  # noqa: B018


def test_help_lists_every_command_with_its_own_line_and_imports_none() -> None:
    files = {path.stem for path in (Path(foretrain.__file__).parent / "cli").glob("*.py")}
    shared = {
        "__init__",
        "__main__",
        "app",
        "completion",
        "helping",
        "job_options",
        "lists",
        "scale_out",
        "settings",
    }
    parts = {
        "predict_checks",
        "schedule_answers",
        "schedule_checks",
        "schedule_report",
        "schedule_world",
        "schedule_worth",
        "searching",
    }
    assert set(COMMANDS) == files - shared - parts
    shown = " ".join(ok("--help").split())
    for name, line in COMMANDS.items():
        assert f"{name} {line}" in shown
        assert line in " ".join(ok(name, "--help").split())
    modules = loaded("from foretrain.cli import app\napp(['--help'], standalone_mode=False)")
    assert modules.isdisjoint({"numpy", *(f"foretrain.cli.{name}" for name in COMMANDS)})


def test_a_name_that_no_kind_of_the_catalogue_has_is_told_with_the_nearest() -> None:
    assert "'h1000' is not one of devices, nodes, hosts, models, prices" in (
        said := fails("catalog", "h1000")
    )
    assert "did you mean h100" in said


def test_help_has_every_command_in_one_group_and_its_options_in_sections() -> None:
    assert sorted(name for names in helping.COMMAND_GROUPS.values() for name in names) == sorted(COMMANDS)
    words = ok("predict", "--help")
    places = [
        words.index(part) for part in ("Arguments:", "Options:", "The training:", "--batch", "Examples:")
    ]
    assert places == sorted(places)
    assert words.count("--catalog") == 1


def test_groups_of_commands_tell_what_each_does_to_the_end() -> None:
    assert "a job that fails does not stop the rest." in " ".join(ok("measure", "--help").split())


def test_a_wrong_command_is_told_with_the_one_that_was_meant() -> None:
    result = run("predct")
    assert result.exit_code == 2
    assert "Did you mean 'predict'?" in result.output


def test_a_forecast_imports_no_other_command_and_no_library_that_it_does_not_need(folder: Path) -> None:
    words = ["predict", "job.toml", "--batch", "8", "--loader-rate", "1e6"]
    ok(*words)
    modules = loaded(f"from foretrain.cli import app\napp({words}, standalone_mode=False)")
    assert "foretrain.cli.predict" in modules
    unused = {
        "torch",
        "scipy",
        "plotly",
        "pyarrow",
        "sqlalchemy",
        "pydantic",
        "foretrain.cli.fit",
        "foretrain.launchers.session",
        "foretrain.measure",
    }
    assert modules.isdisjoint(unused)


# Errors of a user's own code

BROKEN = """
import torch

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = torch.nn.Linear(192, 4), torch.nn.Linear(5, 2)

    def forward(self, x):
        return self.second(self.first(x.flatten(1)))

def net(batch):
    return Net()

def helper():
    return {}["missing"]

def unbuilt(batch):
    return helper()
"""


@pytest.mark.parametrize(
    ("function", "said"),
    [
        ("net", "module second: RuntimeError: "),
        ("unbuilt", "model broken.py:unbuilt: KeyError: 'missing' (at broken.py:16 in helper)"),
    ],
)
def test_an_error_of_the_users_code_names_its_file_and_line(folder: Path, function: str, said: str) -> None:
    (folder / "broken.py").write_text(BROKEN)
    line = fails("predict", f"broken.py:{function}", "--image", "8")
    assert said in line
    assert "(at broken.py:" in line
    assert "Traceback" not in line


@pytest.mark.parametrize("words", [("--debug", "predict"), ("predict", "--debug")])
def test_debug_shows_the_traceback_of_the_users_code(
    folder: Path, words: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder / "broken.py").write_text(BROKEN)
    result = run(*words, "broken.py:unbuilt", "--image", "8")
    assert result.exit_code == 2
    assert "Traceback (most recent call last)" in result.stderr
    assert 'return {}["missing"]' in result.stderr
    assert result.stderr.splitlines()[-1].startswith("foretrain: model broken.py:unbuilt: KeyError")
    monkeypatch.setenv("FORETRAIN_DEBUG", "1")
    assert "Traceback" in run("predict", "broken.py:unbuilt", "--image", "8").stderr


# Completion


@pytest.mark.parametrize(
    ("words", "completed"),
    [
        ("foretrain predict --device h100-s", {"h100-sxm-80gb"}),
        ("foretrain predict --node dgx-h", {"dgx-h100", "dgx-h200"}),
        ("foretrain predict resnet50 --precision amp", {"amp-bf16", "amp-fp16"}),
        ("foretrain predict resnet50 --optimizer adamw", {"adamw", "adamw-fused"}),
        ("foretrain predict resnet50 --predictor delete", {"deletepop"}),
        ("foretrain predict resnet50 --shard z", {"zero1", "zero2", "zero3"}),
        ("foretrain predict llama-3.2", {"llama-3.2-1b", "llama-3.2-3b"}),
        ("foretrain predict Llama-3.2", {"Llama-3.2-1b", "Llama-3.2-3b"}),
        ("foretrain predict resnet5", {"resnet50", "resnet50d"}),
        ("foretrain predict resnet50 --mode in", {"infer"}),
        ("foretrain plan resnet50 --framework mega", {"megatron"}),
        ("foretrain fit dri", {"driple"}),
        ("foretrain learn runs.jsonl --cluster h100-s", {"h100-sxm-80gb"}),
        ("foretrain schedule --placement pa", {"packed"}),
        ("foretrain schedule --format ga", {"gavel"}),
        ("foretrain measure campaign --on to", {"torchrun"}),
        ("foretrain plan resnet50 --devices t4,h100-s", {"t4,h100-sxm-80gb"}),
        ("foretrain schedule --policy fifo,tir", {"fifo,tiresias"}),
        ("foretrain evaluate runs.jsonl --split leave", {"leave-model-out", "leave-device-out"}),
        ("foretrain validate meg", {"megatron_2021"}),
        ("foretrain catalog dev", {"devices"}),
        ("foretrain catalog h100-s", {"h100-sxm-80gb"}),
        ("foretrain catalog nodes dgx-h", {"dgx-h100", "dgx-h200"}),
    ],
)
def test_the_shell_completes_values(
    words: str, completed: set[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("_FORETRAIN_COMPLETE", "complete_bash")
    monkeypatch.setenv("COMP_WORDS", words)
    monkeypatch.setenv("COMP_CWORD", str(len(words.split()) - 1))
    with pytest.raises(SystemExit):
        foretrain.cli.main()
    assert completed <= set(capsys.readouterr().out.split())


def test_completion_imports_neither_torch_nor_numpy() -> None:
    names = ("devices", "nodes", "models", "optimizers")
    calls = "; ".join(f"completion.{name}('')" for name in names)
    modules = loaded(f"from foretrain.cli import completion; {calls}; completion.setting('Precision')('')")
    assert modules.isdisjoint({"torch", "numpy", "rich.console"})


def test_completion_can_be_installed() -> None:
    assert "--install-completion" in ok("--help")
    assert run("--show-completion", "bash").exit_code in (0, 1)  # 1: the shell is not known here
