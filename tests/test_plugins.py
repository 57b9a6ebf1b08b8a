"""Predictors that do not come with foretrain: one file of the user's own, or an installed package, works
wherever a name does."""

from __future__ import annotations

import json
import pickle
from collections.abc import Iterator
from pathlib import Path

import pytest

import foretrain
from commands import fails, ok, run
from foretrain import predictors
from foretrain.errors import InputError
from foretrain.evaluate import evaluate
from foretrain.job import Job
from foretrain.predictors import plugins
from foretrain.predictors.base import Predictor
from foretrain.predictors.checks import check_predictor
from foretrain.predictors.portable import Portable
from plugin import PLUGIN

JOB = {
    "model": {"source": "timm", "name": "resnet18"},
    "training": {"global_batch": 32, "samples": 3200, "epochs": 1},
    "cluster": {"device": "t4"},
}


@pytest.fixture
def plugin(tmp_path: Path) -> str:
    (tmp_path / "mine.py").write_text(PLUGIN)
    return f"{tmp_path / 'mine.py'}:PerSample"


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    """Two milliseconds for each sample, on two models."""
    path = tmp_path / "runs.jsonl"
    lines = [
        {
            "job": {**JOB, "model": {"source": "timm", "name": name}, "training": {"global_batch": batch}},
            "measured": {"step_time_s": 0.002 * batch},
        }
        for name in ("resnet18", "regnetx_002")
        for batch in (8, 16, 32)
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


@pytest.fixture
def job_file(tmp_path: Path) -> Path:
    path = tmp_path / "job.json"
    path.write_text(json.dumps(JOB))
    return path


def test_the_predictor_of_the_documentation_passes_the_checks(plugin: str) -> None:
    check_predictor(predictors.get(plugin), Job.read(JOB))


def test_a_plugin_is_learned_saved_and_used(plugin: str, runs: Path, job_file: Path, tmp_path: Path) -> None:
    out = tmp_path / "fitted"
    result = run("fit", plugin, str(runs), "--out", str(out))
    assert result.exit_code == 0, result.output
    assert f"use it with --predictor {plugin}@{out}" in result.stderr
    forecast = json.loads(ok("predict", str(job_file), "--predictor", f"{plugin}@{out}", "--json"))
    assert forecast["predictor"] == "per-sample"
    assert forecast["quantities"]["step_time_s"]["median"] == pytest.approx(0.064)
    told = fails("explain", str(job_file), str(job_file), "--predictor", f"{plugin}@{out}")
    assert "'per-sample' does not look inside the step" in told
    api = foretrain.predict("timm:resnet18", device="t4", batch=32, predictor=f"{plugin}@{out}")
    assert api["step_time_s"].median == pytest.approx(0.064)


def test_a_folder_never_says_which_file_to_run(plugin: str, runs: Path, tmp_path: Path) -> None:
    out = tmp_path / "fitted"
    ok("fit", plugin, str(runs), "--out", str(out))
    assert str(tmp_path / "mine.py") not in (out / "predictor.json").read_text()
    with pytest.raises(InputError, match=r"a saved 'per-sample', which neither comes with .* file.py:Class@"):
        predictors.get(out)


def test_a_plugin_is_scored_with_and_without_a_split(plugin: str, runs: Path, tmp_path: Path) -> None:
    ok("fit", plugin, str(runs), "--out", str(tmp_path / "fitted"))
    ok("evaluate", str(runs), "--predictor", f"{plugin}@{tmp_path / 'fitted'}", "--predictor", "ernest")
    (result,) = evaluate([runs], predictors=[plugin], split="leave-model-out").results
    assert (result.predictor, result.n) == (plugin, 6)
    assert result.mape == pytest.approx(0.0)


@pytest.mark.parametrize("processes", ["1", "2"])
def test_a_plugin_forecasts_many_jobs(plugin: str, runs: Path, tmp_path: Path, processes: str) -> None:
    ok("fit", plugin, str(runs), "--out", str(tmp_path / "fitted"))
    name, out = f"{plugin}@{tmp_path / 'fitted'}", tmp_path / "forecasts.jsonl"
    ok("predict", "--jobs", str(runs), "--out", str(out), "--predictor", name, "--processes", processes)
    medians = [
        json.loads(line)["forecast"]["quantities"]["step_time_s"]["median"]
        for line in out.read_text().splitlines()
    ]
    assert medians == pytest.approx([0.016, 0.032, 0.064] * 2)


def test_a_plugin_advises_and_schedules(plugin: str, tmp_path: Path) -> None:
    path = tmp_path / "trainings.jsonl"
    lines = [
        {
            "job": {**JOB, "training": {"global_batch": 32 * devices, "samples": 3200, "epochs": 1},
                    "cluster": {"device": "t4", "devices_per_node": devices}},
            "measured": {"step_time_s": 0.064},
        }
        for devices in (1, 2)
    ]  # fmt: skip
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    told = json.loads(ok("advise", str(path), "--deadline", "1h", "--predictor", plugin, "--json"))
    assert len(told["options"]) > 0
    ok("fit", plugin, str(path), "--out", str(tmp_path / "fitted"))
    templates = tmp_path / "templates"
    templates.mkdir()
    (templates / "small.toml").write_text(
        '[model]\nsource = "timm"\nname = "resnet18"\n[training]\nglobal_batch = 32\n[cluster]\n'
        'device = "t4"\n'
    )
    trace = tmp_path / "trace.csv"
    trace.write_text("job_id,submit_time,gpu_num,duration,kind\n1,0,1,100,small\n2,1,1,100,small\n")
    words = [
        "--predictor",
        f"{plugin}@{tmp_path / 'fitted'}",
        "--templates",
        str(templates),
        "--processes",
        "1",
    ]
    shown = ok("schedule", str(trace), "--cluster", "1x2xt4", "--policy", "fifo", *words)
    assert "2 jobs on 2 GPUs" in shown


def test_a_plugin_travels_with_its_source(plugin: str, runs: Path, tmp_path: Path) -> None:
    """As to a machine that has neither the file nor the folder."""
    ok("fit", plugin, str(runs), "--out", str(tmp_path / "fitted"))
    sent = pickle.loads(pickle.dumps(Portable.of(f"{plugin}@{tmp_path / 'fitted'}")))
    here = sent.predictor.predict(Job.read(JOB)).quantities
    (tmp_path / "mine.py").unlink()
    (tmp_path / "fitted" / "predictor.json").unlink()
    elsewhere = Portable(name=sent.name, source=sent.source, files=(*sent.files, ("note", b"")))
    assert elsewhere.predictor.predict(Job.read(JOB)).quantities == here


def test_a_predictor_at_hand_travels_if_its_class_can_be_found(plugin: str, runs: Path) -> None:
    class Local(Predictor):
        name, quantities = "local", frozenset({"step_time_s"})
        fit = predict = None  # type: ignore[assignment]

    with pytest.raises(InputError, match=r"^predictor local: other processes cannot find Local"):
        Portable.of_learned(Local())


# Mistakes

HEAD = "from foretrain.predictors.base import Predictor\n"


@pytest.mark.parametrize(
    ("content", "name", "message"),
    [
        (None, "Mine", "there is no file"),
        ("x = 1", "Mine", "has no Mine"),
        (PLUGIN, "Mine", r"has no Mine (it has PerSample)"),
        ("Mine = 3", "Mine", "is not a class derived from foretrain.predictors.base.Predictor"),
        ("class Mine: pass", "Mine", "is not a class derived from foretrain.predictors.base.Predictor"),
        (HEAD + "class Mine(Predictor): pass", "Mine", "lacks fit, predict"),
        (HEAD + "class Mine(Predictor): fit = predict = 0", "Mine", "lacks the class variable name"),
        (PLUGIN + "\n    def __init__(self, rate): pass", "PerSample", "its constructor needs rate"),
        (PLUGIN.replace('"per-sample"', '"ernest"'), "PerSample", "the name 'ernest' is taken"),
        ("import nonsense", "Mine", "cannot be loaded (ModuleNotFoundError: No module named 'nonsense')"),
        ("def (", "Mine", "cannot be loaded (SyntaxError"),
        ("raise SystemExit(3)", "Mine", "cannot be loaded (SystemExit: 3)"),
    ],
)
def test_each_mistake_is_one_line(
    content: str | None, name: str, message: str, tmp_path: Path, job_file: Path
) -> None:
    if content is not None:
        (tmp_path / "mine.py").write_text(content)
    line = fails("predict", str(job_file), "--predictor", f"{tmp_path / 'mine.py'}:{name}")
    assert line.startswith(f"foretrain: predictor {tmp_path / 'mine.py'}:{name}: ")
    assert message in line


def test_a_folder_that_is_none_is_told(plugin: str, job_file: Path, tmp_path: Path) -> None:
    line = fails("predict", str(job_file), "--predictor", f"{plugin}@{tmp_path / 'none'}")
    assert (
        line == f"foretrain: predictor: the folder {tmp_path / 'none'} "
        "has no predictor.json; foretrain fit makes one\n"
    )


# Installed


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A package that offers the predictor, as pip would leave it."""
    site = tmp_path / "site"
    about = site / "others-1.0.dist-info"
    about.mkdir(parents=True)
    (site / "others.py").write_text(PLUGIN)
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: others\nVersion: 1.0\n")
    (about / "entry_points.txt").write_text(
        "[foretrain.predictors]\nper-sample = others:PerSample\nother = others:PerSample\n"
        "gone = others:Gone\n"
    )
    monkeypatch.syspath_prepend(site)
    plugins.installed.cache_clear()
    yield site
    plugins.installed.cache_clear()


def test_an_installed_predictor_goes_by_its_name_and_its_folder(
    package: Path, runs: Path, job_file: Path
) -> None:
    out = package / "fitted"
    result = run("fit", "per-sample", str(runs), "--out", str(out))
    assert f"use it with --predictor {out}\n" in result.stderr
    for name in (str(out), f"per-sample@{out}"):
        forecast = json.loads(ok("predict", str(job_file), "--predictor", name, "--json"))
        assert forecast["quantities"]["step_time_s"]["median"] == pytest.approx(0.064)
    assert Portable.of(str(out)).name == "per-sample"


def test_what_a_package_gets_wrong_is_one_line(package: Path) -> None:
    with pytest.raises(
        InputError, match=r"^predictor other \(others:PerSample\): it calls itself 'per-sample'"
    ):
        predictors.get("other")
    with pytest.raises(
        InputError, match=r"^predictor gone \(others:Gone\): cannot be loaded \(AttributeError"
    ):
        predictors.get("gone")
