"""``foretrain fit`` as a user types it: calibrate to runs, learn from operators, keep it in a folder and
forecast with it."""

from __future__ import annotations

import csv
import dataclasses
import gzip
import io
import json
from pathlib import Path
from typing import Any

import pytest

from commands import fails, ok, run
from foretrain import predictors
from foretrain.costs import fitting
from foretrain.costs.learned import load_costs
from foretrain.errors import InputError
from foretrain.job import Job
from foretrain.predictors.base import EVIDENCE, FILE
from foretrain.predictors.checks import check_saved
from foretrain.predictors.deletepop.predictor import OPERATORS, DeletePopPredictor
from foretrain.predictors.ray_models import RayModelsPredictor
from foretrain.predictors.ray_models.search import Budget
from foretrain.run import Run
from made_up import H200, MODELS, dataset, job, made_up, measure

A100 = "a100-sxm-80gb"
PHASES = ("step_time_s", "forward_time_s", "backward_time_s", "optimizer_time_s", "device_busy_s")


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the commands run: a model, runs of it that take 1.5 times what is forecast, and an operator
    dataset."""
    for growth in (fitting._FOR_ALL, fitting._FOR_ONE):
        monkeypatch.setitem(growth, "trees", 20)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "models.py").write_text(MODELS)
    write_runs(
        tmp_path / "runs.jsonl",
        [measure(job(tmp_path, batch=batch), 1.5) for batch in (1024, 2048, 4096, 8192)],
    )
    return tmp_path


def write_runs(path: Path, runs: list[Run]) -> None:
    path.write_text("".join(json.dumps(one.to_dict()) + "\n" for one in runs))


def operators(folder: Path, device: str = H200.name) -> str:
    return dataset(folder / "ops.parquet", made_up(), device).name


def phase_runs(folder: Path) -> str:
    """Twelve short steps with all phases: the least that the host model learns from."""
    short = [
        job(folder, model, batch, 16, H200.name)
        for model in ("mlp", "convolutions")
        for batch in (2, 4, 8, 16, 32, 64)
    ]
    write_runs(folder / "phases.jsonl", [measure(one, 1.0, times=PHASES) for one in short])
    return "phases.jsonl"


def content(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def step_time_s(folder: Path, *words: str) -> float:
    """What ``foretrain predict`` says of a job that is in none of the runs."""
    toml = folder / "job.json"
    toml.write_text(json.dumps(job(folder, batch=3000).to_dict()))
    return float(
        json.loads(ok("predict", "job.json", "--json", *words))["quantities"]["step_time_s"]["median"]
    )


# Calibration


def test_a_few_runs_calibrate_and_the_folder_forecasts(folder: Path) -> None:
    done = run("fit", "deletepop", "runs.jsonl", "--out", "mine")
    assert done.exit_code == 0, done.output
    line = next(line for line in done.stdout.splitlines() if A100 in line).split()
    assert line[:2] == [A100, "4"]
    before, after = (float(word.rstrip("%")) for word in line[2:])
    assert before == pytest.approx(100 / 3, abs=3)
    assert after < 10
    assert "learned from 4 of 4 runs" in done.stderr
    assert "deletepop in mine; use it with --predictor mine" in done.stderr
    assert content(folder / "mine").keys() == {FILE, OPERATORS, EVIDENCE}
    assert step_time_s(folder, "--predictor", "mine") / step_time_s(folder) == pytest.approx(1.5, rel=0.05)


def test_evaluate_takes_the_folder(folder: Path) -> None:
    ok("fit", "deletepop", "runs.jsonl", "--out", "mine")
    ok("evaluate", "runs.jsonl", "--predictor", "mine", "--json", "figures.json")
    results = json.loads((folder / "figures.json").read_text())["results"]
    assert next(one["mape"] for one in results if one["quantity"] == "step_time_s") < 0.05
    assert {row["predictor"] for row in json.loads((folder / "figures.json").read_text())["results"]} == {
        "mine"
    }


def test_a_fit_starts_from_an_earlier_one(folder: Path) -> None:
    ok("fit", "deletepop", "runs.jsonl", "--out", "first")
    first = predictors.get(folder / "first")
    assert isinstance(first, DeletePopPredictor)
    write_runs(
        folder / "slower.jsonl",
        [measure(job(folder, batch=batch), 1.2, first) for batch in (1024, 2048, 8192)],
    )
    ok("fit", "deletepop", "slower.jsonl", "--from", "first", "--out", "second")
    assert step_time_s(folder, "--predictor", "second") / step_time_s(folder) == pytest.approx(1.8, rel=0.07)


def test_the_same_runs_give_the_same_bytes(folder: Path) -> None:
    for out in ("a", "b"):
        ok("fit", "deletepop", "runs.jsonl", "--out", out)
    assert content(folder / "a") == content(folder / "b")


def test_runs_that_are_left_out_are_told(folder: Path) -> None:
    runs = [
        measure(job(folder, batch=2048), 1.5),
        *(Run(job=job(folder, batch=2**i), measured={"power_w": 300.0}) for i in range(7)),
    ]
    write_runs(folder / "mixed.jsonl", runs)
    said = run("fit", "deletepop", "mixed.jsonl", "--out", "mine").stderr
    assert "mlp: no step_time_s or" in said
    assert "left out: 2 more" in said
    assert "learned from 1 of 8 runs" in said


def test_it_is_said_when_calibration_does_not_help(folder: Path) -> None:
    write_runs(
        folder / "right.jsonl",
        [
            measure(job(folder, batch=batch), factor)
            for batch, factor in ((2048, 0.8), (4096, 1.0), (8192, 1.25))
        ],
    )
    assert f"{A100}: no better than before" in run("fit", "deletepop", "right.jsonl", "--out", "mine").stderr


# Operator datasets


def test_operators_are_learned_with_their_host(folder: Path) -> None:
    done = run("fit", "deletepop", operators(folder), phase_runs(folder), "--out", "mine")
    assert done.exit_code == 0, done.output
    assert "operators: 241 of h200-sxm-141gb" in done.stderr
    assert "product: 80 operators" in done.stderr
    assert "learned from 12 of 12 runs" in done.stderr
    costs, host, about = load_costs(folder / "mine" / OPERATORS)
    assert costs.scales == {}, "runs beside operators fit the host alone"
    assert host.names == {"gelu": 12e-6, "mm": 12e-6, "native_layer_norm": 12e-6, "relu": 12e-6}
    assert host != dataclasses.replace(DeletePopPredictor().host, names=host.names)
    assert [(one["file"], one.get("device")) for one in about["sources"]] == [
        ("ops.parquet", H200.name),
        ("phases.jsonl", None),
    ]


def test_operators_alone_leave_the_constants_of_the_host(folder: Path) -> None:
    ok("fit", "deletepop", operators(folder), "--out", "mine")
    _, host, _ = load_costs(folder / "mine" / OPERATORS)
    assert host == dataclasses.replace(DeletePopPredictor().host, names=host.names)


def test_the_same_operators_and_runs_give_the_same_bytes(folder: Path) -> None:
    """As the shipped state is made: also when the second fit starts where the first one ended."""
    words = ("fit", "deletepop", operators(folder), phase_runs(folder), "--published", published(folder))
    ok(*words, "--out", "a")
    ok(*words, "--out", "b")
    ok(*words, "--from", "a", "--out", "c")
    assert content(folder / "a") == content(folder / "b") == content(folder / "c")


def published(folder: Path) -> str:
    """A few rows of NeuSight, as it publishes them."""
    text = io.StringIO()
    writer = csv.DictWriter(text, ("op", "device", "B", "M", "N", "K", "H", "latency_s"), restval="")
    writer.writeheader()
    for size in range(256, 4096, 128):
        writer.writerow(
            {
                "op": "bmm",
                "device": "t4",
                "B": 4,
                "M": size,
                "N": size,
                "K": size,
                "latency_s": 8 * size**3 * 4 / 4e12,
            }
        )
    (folder / "public").mkdir(exist_ok=True)
    (folder / "public" / "neusight_fp32.csv.gz").write_bytes(gzip.compress(text.getvalue().encode(), mtime=0))
    (folder / "public" / "others.csv.gz").write_bytes(gzip.compress(b"what,nobody,reads\n", mtime=0))
    return "public"


def test_published_operators_are_learned_as_well(folder: Path) -> None:
    done = run("fit", "deletepop", operators(folder), "--published", published(folder), "--out", "mine")
    assert "241 of h200-sxm-141gb, 30 of t4" in done.stderr
    assert "product: 110 operators" in done.stderr
    sources = load_costs(folder / "mine" / OPERATORS)[2]["sources"]
    assert [source["file"] for source in sources[1:]] == ["neusight_fp32.csv.gz"]


def test_the_device_of_a_dataset_that_does_not_say_it(folder: Path) -> None:
    unnamed = operators(folder, "")
    assert "give --device" in fails("fit", "deletepop", unnamed, "--out", "mine")
    assert "241 of t4" in run("fit", "deletepop", unnamed, "--device", "t4", "--out", "mine").stderr
    said = fails("fit", "deletepop", operators(folder), "--device", "t4", "--out", "mine")
    assert "--device: 't4', but the datasets say themselves: h200-sxm-141gb" in said


def test_a_loaded_predictor_forgets_parts_of_its_own_dataset(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ok("fit", "deletepop", operators(folder), "--out", "mine")

    def forget() -> None:
        predictors.get("mine").without(families=frozenset({"resnet"}))

    with pytest.raises(InputError, match="operators: none is left without resnet"):
        forget()
    elsewhere = folder / "elsewhere" / "ops.parquet"
    elsewhere.parent.mkdir()
    (folder / "ops.parquet").rename(elsewhere)
    with pytest.raises(
        InputError, match=r"ops\.parquet: gone or changed .*; set FORETRAIN_DATA to the folder"
    ):
        forget()
    monkeypatch.setenv("FORETRAIN_DATA", str(elsewhere.parent))
    with pytest.raises(InputError, match="operators: none is left without resnet"):
        forget()


def test_what_was_learned_without_a_family_is_learned_once(folder: Path) -> None:
    ok("fit", "deletepop", operators(folder), "--out", "mine")
    once, again, other = (
        predictors.get("mine").without(families=frozenset({name})) for name in ("vgg", "vgg", "bert")
    )
    assert isinstance(once, DeletePopPredictor)
    assert isinstance(again, DeletePopPredictor)
    assert isinstance(other, DeletePopPredictor)
    assert once.costs is again.costs
    assert once.costs is not other.costs


def test_the_shipped_predictor_names_the_dataset_that_it_learned_from(folder: Path) -> None:
    with pytest.raises(InputError, match=r"^data/ops_h200\.parquet: gone or changed"):
        predictors.get("deletepop").without(families=frozenset({"resnet"}))


# Mistakes


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (("deletepopp", "runs.jsonl"), "predictor: 'deletepopp' is not one of "),
        (("roofline", "runs.jsonl"), "roofline: has nothing to learn"),
        (("deletepop", "none.jsonl"), "none.jsonl: no such file"),
        (("deletepop", "runs.jsonl", "none.parquet"), "none.parquet: no such file"),
        (
            ("deletepop", "models.py"),
            "models.py: neither runs (.jsonl, .jsonl.zst) nor an operator dataset (.parquet)",
        ),
        (("deletepop", "runs.jsonl", "--device", "t4"), "--device: is for operator datasets"),
        (("deletepop", "runs.jsonl", "--published", "."), "--published: is for operator datasets"),
        (("deletepop", "runs.jsonl", "--from", "none"), "none/predictor.json: cannot be read"),
        (("deletepop", "empty.jsonl"), "empty.jsonl: empty; a runs file has one run per line"),
        (("deletepop", "junk.parquet", "--device", "t4"), "junk.parquet: cannot be read as Parquet"),
        (("deletepop", "junk.parquet"), "junk.parquet: cannot be read as Parquet"),
        (("deletepop", "junk.parquet", "--device", "t5"), "--device: 't5' is not"),
        (("deletepop", "junk.jsonl"), "junk.jsonl:1: "),
    ],
)
def test_a_mistake_is_answered_in_one_line(folder: Path, words: tuple[str, ...], sentence: str) -> None:
    (folder / "empty.jsonl").write_text("")
    (folder / "junk.jsonl").write_text("{}\n")
    (folder / "junk.parquet").write_text("junk")
    assert sentence in fails("fit", *words, "--out", "mine")
    assert not (folder / "mine").exists()


def test_too_few_runs_for_the_host_are_refused(folder: Path) -> None:
    result = run("fit", "deletepop", operators(folder), "runs.jsonl", "--out", "mine")
    assert result.exit_code == 2
    assert "the host model needs 40 or more" in result.stderr
    assert not (folder / "mine").exists()


def test_runs_that_say_nothing_of_the_host_are_refused_before_anything_is_learned(folder: Path) -> None:
    write_runs(folder / "bare.jsonl", [measure(job(folder), 1.0, times=("step_time_s",))])
    result = run("fit", "deletepop", operators(folder), "bare.jsonl", "--out", "mine")
    assert result.exit_code == 2
    assert "the host model can learn from none of them" in result.stderr
    assert "product" not in result.stderr


# Folders


def saved(folder: Path, **changes: Any) -> Path:
    DeletePopPredictor().save(folder / "mine")
    document = json.loads((folder / "mine" / FILE).read_text())
    (folder / "mine" / FILE).write_text(json.dumps(document | changes))
    return folder / "mine"


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        (
            {"format": "foretrain-predictor/9"},
            "format 'foretrain-predictor/9' is not 'foretrain-predictor/1'; fit the predictor again",
        ),
        ({"predictor": 3}, "fit the predictor again"),
        ({"predictor": "oracle"}, "a saved 'oracle', which neither comes with foretrain nor is installed"),
        ({"predictor": "roofline"}, "roofline: has nothing to learn, so nothing was saved"),
    ],
)
def test_a_folder_of_another_kind_is_refused(folder: Path, changes: dict[str, Any], sentence: str) -> None:
    with pytest.raises(InputError) as caught:
        predictors.get(saved(folder, **changes))
    assert sentence in str(caught.value)


def test_a_folder_without_the_models_is_refused(folder: Path) -> None:
    (saved(folder) / OPERATORS).unlink()
    assert "operators.safetensors: cannot be read" in fails("predict", "resnet18", "--predictor", "mine")


def test_other_folders_and_damaged_ones_are_refused(folder: Path) -> None:
    assert "has no predictor.json; foretrain fit makes one" in fails(
        "predict", "resnet18", "--predictor", str(folder)
    )
    (saved(folder) / FILE).write_text("{")
    assert "predictor.json: not JSON" in fails("predict", "resnet18", "--predictor", "mine")


def test_a_name_comes_before_a_folder_of_that_name(folder: Path) -> None:
    (folder / "roofline").mkdir()
    assert predictors.get("roofline").name == "roofline"


def test_what_learns_nothing_is_not_saved(folder: Path) -> None:
    with pytest.raises(InputError, match="roofline: has nothing to learn"):
        predictors.get("roofline").save(folder / "mine")


def test_the_checks_catch_a_predictor_that_forgets(folder: Path) -> None:
    wanted: Job = job(folder, batch=64, width=64)
    check_saved(DeletePopPredictor(), wanted)
    forgetful = DeletePopPredictor()
    forgetful.__dict__["_write"] = lambda where: DeletePopPredictor()._write(where)
    forgetful.host = dataclasses.replace(forgetful.host, speed=3.0)
    with pytest.raises(
        AssertionError, match=r"deletepop: after save and load the forecast differs in .*step_time_s"
    ):
        check_saved(forgetful, wanted)


# Options


def test_fit_offers_the_settings_of_the_predictor() -> None:
    assert "--trials" in ok("fit", "ray_models", "--help")
    assert "--trials" not in ok("fit", "deletepop", "--help")
    assert "ray_models: Recipes to try" in " ".join(ok("fit", "--help").split())


@pytest.mark.parametrize(
    "words", [["--trials", "3"], ["--budget", "2min"], ["--study", "x"], ["--processes", "2"], ["--ray"]]
)
def test_an_option_of_another_predictor_is_refused_with_its_owner(folder: Path, words: list[str]) -> None:
    runs = folder / "runs.jsonl"
    runs.touch()
    line = fails("fit", "ernest", str(runs), "--out", str(folder / "x"), *words)
    assert line == f"foretrain: {words[0]}: is an option of ray_models, not of ernest\n"


def test_settings_reach_the_predictor(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given = []
    monkeypatch.setattr(RayModelsPredictor, "configure", lambda self, settings: given.append(settings))
    runs = folder / "runs.jsonl"
    runs.touch()
    words = ["--trials", "3", "--budget", "2min", "--study", "x", "--processes", "2", "--ray"]
    for order in ([*words, "ray_models"], ["ray_models", *words]):
        run("fit", *order, str(runs), "--out", str(folder / "x"))
        assert given.pop() == Budget(trials=3, seconds=120.0, study=Path("x"), processes=2, ray="any")
