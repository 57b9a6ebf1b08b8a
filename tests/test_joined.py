"""Tests the joined predictor: who speaks for which job, that nothing it is scored on is learned from, and
foretrain learn."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import pytest

import commands
from foretrain import predictors
from foretrain.errors import InputError, UnsupportedJob
from foretrain.estimate import Estimate
from foretrain.job import Job
from foretrain.predictors import usual
from foretrain.predictors.checks import check_predictor
from foretrain.predictors.deletepop import DeletePopPredictor
from foretrain.predictors.joined import choosing, relations
from foretrain.predictors.joined.choosing import (
    WEIGHTINGS,
    Array,
    LeftOut,
    Weighting,
    chosen_weightings,
    errors_of,
)
from foretrain.predictors.joined.members import SHIPPED, everyone, read_names
from foretrain.predictors.joined.predictor import JoinedPredictor, Joining
from foretrain.predictors.joined.relations import Known, Relation
from foretrain.predictors.likeness import Key
from foretrain.predictors.seen import step_of
from foretrain.run import Run
from scaled_runs import job, run

MODEL = """
import torch

def net(batch):
    return torch.nn.Linear(64, 10), (torch.zeros(batch, 16, 64),)

other = net
"""
QUICK = Joining(predictors=("ernest",), folds=3)
RUNS = [
    run(job(workers, batch, name=f"model.py:{name}"))
    for name in ("net", "other")
    for workers in (1, 2, 4, 8)
    for batch in (8, 16, 32)
]


@pytest.fixture(scope="module")
def learned() -> JoinedPredictor:
    return JoinedPredictor(joining=QUICK).fit(RUNS)


# How jobs stand to runs


@pytest.mark.parametrize(
    ("asked", "relation"),
    [
        (job(4, 16), "inside"),
        (job(3, 16), "inside"),
        (job(16, 16), "beyond"),
        (job(4, 16, precision="bf16"), "beyond"),
        (job(4, 16, name="model.py:third"), "new model"),
        (job(4, 16, samples=10**9), "inside"),
    ],
)
def test_a_job_stands_to_the_runs_by_model_and_scale(asked: Job, relation: Relation) -> None:
    assert Known.of([one.job for one in RUNS]).relation(asked) == relation


def test_what_is_known_comes_back_from_its_document() -> None:
    known = Known.of([one.job for one in RUNS])
    assert Known.from_dict(json.loads(json.dumps(known.to_dict()))) == known


def on_gpu(one: Job) -> Job:
    cluster = {"device": "t4", "devices_per_node": one.cluster.world_size}
    return Job.read({**one.to_dict(), "cluster": cluster})


def test_what_no_run_has_of_a_job_is_named() -> None:
    jobs = [job(workers, 8, optimizer="sgd") for workers in (1, 2, 4)]
    known = Known.of([*jobs, job(2, 8, name="model.py:other", optimizer="adam")])
    assert known.news(job(2, 8, optimizer="adam")) == known.notes(job(2, 8)) == []
    assert known.notes(job(2, 8, optimizer="adam")) == [
        "training.optimizer: adam, which no run of this model has (sgd)"
    ]
    assert known.news(job(2, 8, precision="bf16")) == ["training.precision: bf16, which no run has (fp32)"]
    assert known.notes(job(16, 8)) == ["beyond the runs in workers: 16, they have 1 to 4"]
    beside = [*jobs, on_gpu(job(2, 8, precision="bf16", optimizer="adam"))]
    assert Known.of(beside).news(job(2, 8, precision="bf16")) == [
        "training.precision: bf16, which no run has (fp32)"
    ]
    assert Known.of(beside).news(on_gpu(job(2, 8, precision="bf16", optimizer="adam"))) == []
    told = ("everyone", "by_device", "by_model")
    earlier = {name: part for name, part in known.to_dict().items() if name not in told}
    assert Known.from_dict(earlier).notes(job(16, 8, precision="bf16")) == []


def test_runs_are_left_out_as_jobs_as_models_and_along_each_number() -> None:
    parts = relations.parts(RUNS, 3)
    tried = set()
    for part in parts:
        assert not set(part.train) & set(part.test)
        known = Known.of([RUNS[i].job for i in part.train])
        tried |= {known.relation(RUNS[i].job) for i in part.test}
    assert tried == {"inside", "beyond", "new model"}


def test_runs_of_one_job_are_left_out_together() -> None:
    parts = relations.parts([*RUNS, *RUNS], 3)
    for part in parts[:3]:
        assert {i % len(RUNS) for i in part.test} == {i for i in part.test if i < len(RUNS)}


def test_runs_that_differ_by_their_data_alone_are_left_out_together() -> None:
    training = RUNS[0].job.workload.training
    more = dataclasses.replace(training, samples=2 * (training.samples or 1000))
    workload = dataclasses.replace(RUNS[0].job.workload, training=more)
    job = dataclasses.replace(RUNS[0].job, workload=workload)
    assert job != RUNS[0].job
    assert step_of(job) == step_of(RUNS[0].job)
    runs = [*RUNS, dataclasses.replace(RUNS[0], job=job)]
    for part in relations.parts(runs, 3)[:3]:
        assert (0 in part.test) == (len(RUNS) in part.test)


def test_the_same_runs_are_left_out_once() -> None:
    """Where each worker has a node of its own, the largest third of either is the same."""

    def spread(one: Run) -> Run:
        cluster = one.job.to_dict()["cluster"]
        nodes = {**cluster, "nodes": cluster["devices_per_node"], "devices_per_node": 1}
        return run(Job.read({**one.job.to_dict(), "cluster": nodes}))

    parts = relations.parts([spread(one) for one in RUNS], 3)
    assert len(set(parts)) == len(parts) == len(relations.parts(RUNS, 3))


# Choosing


def left_out(misses: list[list[float]], members: tuple[str, ...] = ("a", "b")) -> LeftOut:
    rows = len(misses)
    inside: Relation = "inside"
    return LeftOut(
        members=members,
        keys=tuple(Key.of(RUNS[i % len(RUNS)].job) for i in range(rows)),
        relations=(inside,) * rows,
        devices=("cpu",) * rows,
        parts=tuple(i % 4 for i in range(rows)),
        positions=tuple(range(rows)),
        steps=tuple(range(rows)),
        misses=np.array(misses),
    )


def test_the_best_one_speaks_where_the_others_add_nothing() -> None:
    tried = left_out([[0.01 * (-1) ** i, 0.5] for i in range(24)])
    ways, misses = chosen_weightings(tried)
    assert ways["inside"] == "best"
    assert errors_of(misses).max() < 0.011


def test_who_is_steady_is_preferred_to_who_does_as_well_but_for_one_part() -> None:
    tried = left_out([[0.1, 0.3 if i % 4 == 0 else 0.0] for i in range(24)])
    steady, other = errors_of(tried.misses).mean(axis=0)
    assert other < steady
    everything = np.ones(24, dtype=bool)
    best = tried.mix("best", everything, np.zeros(24), tried.members)
    assert best is not None
    assert best.weights == {"a": 1.0}


def test_two_that_err_in_opposite_ways_are_averaged() -> None:
    generator = np.random.default_rng(0)
    noise = generator.normal(0, 0.01, 24)
    tried = left_out([[0.2 + noise[i], -0.2 + noise[i]] for i in range(24)])
    ways, misses = chosen_weightings(tried)
    assert ways["inside"] != "best"
    assert errors_of(misses).mean() < 0.05


def test_a_run_has_no_part_in_what_is_chosen_for_it() -> None:
    """Whatever one run measured, its own miss is told by weights of the others."""
    misses = [[0.1 + 0.001 * i, -0.1] for i in range(24)]
    before = left_out(misses).missed("near")
    misses[5] = [7.0, -0.1]
    after = left_out(misses)
    mix = after.mix("near", np.arange(24) % 4 != 1, after.distances(after.keys[5]), ("a", "b"))
    assert mix is not None
    assert after.missed("near")[5] == pytest.approx(
        mix.weights.get("a", 0) * 7.0 - mix.weights.get("b", 0) * 0.1
    )
    assert before[5] != after.missed("near")[5]


def test_a_repeat_has_no_part_in_what_is_chosen_for_a_run() -> None:
    """A repeat is as near as can be, but a job that is asked has none."""
    misses = [[0.1 + 0.001 * i, -0.1] for i in range(24)]
    misses[6] = [7.0, -0.1]
    steps = tuple(5 if i == 6 else i for i in range(24))
    alone, repeated = left_out(misses), dataclasses.replace(left_out(misses), steps=steps)
    assert repeated.missed("near")[5] != alone.missed("near")[5]
    misses[6] = [0.2, -0.1]
    assert dataclasses.replace(left_out(misses), steps=steps).missed("near")[5] == repeated.missed("near")[5]


@pytest.mark.parametrize(("others", "way"), [(0.22, "best"), (0.15, "weighted")])
def test_several_speak_only_where_that_helps_in_part_after_part(others: float, way: str) -> None:
    """A gain in one part of four is chance, however large."""
    parts = np.arange(24) % 4
    by_weighting: dict[Weighting, Array] = {one: np.full(24, 0.2) for one in WEIGHTINGS}
    by_weighting["weighted"] = np.where(parts == 0, 0.0, others)
    assert choosing._best_weighting(by_weighting, np.ones(24, dtype=bool), parts) == way


def test_what_was_left_out_comes_back_from_its_document() -> None:
    tried = left_out([[0.1, -0.1]] * 8)
    document = json.loads(json.dumps(tried.to_dict()))
    assert LeftOut.from_dict(document).steps == tried.steps
    del document["steps"]
    assert LeftOut.from_dict(document).steps == tried.positions


def test_one_that_refuses_has_no_weight() -> None:
    tried = left_out([[math.nan, 0.3] for _ in range(12)])
    mix = tried.mix("weighted", np.ones(12, dtype=bool), np.zeros(12), ("a", "b"))
    assert mix is not None
    assert mix.weights == {"b": 1.0}
    assert tried.mix("best", np.zeros(12, dtype=bool), np.zeros(12), ("a", "b")) is None


# The predictor


def test_it_keeps_what_the_interface_promises() -> None:
    check_predictor(JoinedPredictor(joining=QUICK), job(2, 8), RUNS)


def test_a_forecast_says_who_speaks_and_how_well(learned: JoinedPredictor) -> None:
    forecast = learned.predict(job(4, 16))
    assert forecast.predictor == "joined"
    assert "left-out run" in forecast.assumptions[0]
    assert "at a scale between theirs: mean error" in forecast.assumptions[0]
    assert forecast["step_time_s"].median == pytest.approx(0.02 + 0.16 + 0.03 * math.log(4), rel=0.15)


def test_a_setting_that_no_run_has_is_left_to_the_usual_predictor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "model.py").write_text(MODEL)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("FORETRAIN_CACHE", str(tmp_path / "cache"))
    learned = JoinedPredictor(joining=Joining(predictors=("deletepop", "ernest"), folds=2)).fit(RUNS[::2])
    forecast = learned.predict(job(4, 16, precision="bf16"))
    assert forecast.assumptions[0].startswith("by deletepop; ")
    assert forecast.assumptions[0].endswith(": no left-out run tells how well")
    assert forecast.assumptions[1] == "training.precision: bf16, which no run has (fp32)"


def test_a_mean_is_no_surer_than_those_who_speak() -> None:
    learned = JoinedPredictor(joining=Joining(predictors=("ernest", "cherrypick"), folds=2)).fit(RUNS)
    assert learned.tried_ is not None
    mix = choosing.Mix(weights={"ernest": 0.5, "cherrypick": 0.5}, shifts={})
    everything = np.ones(len(learned.tried_), dtype=bool)

    def told(asked: Job) -> Estimate:
        assert learned.members_ is not None
        own = {name: learned.members_.by_name[name].predict(asked) for name in mix.weights}
        return learned._several(asked, mix, own, "beyond", everything)["step_time_s"]

    near, far = told(job(8, 16)), told(job(512, 16))
    assert math.log(far.high / far.median) > 5 * math.log(near.high / near.median)
    assert "beyond the runs in workers: 512, they have 1 to 8" in learned.predict(job(512, 16)).assumptions


def test_left_out_runs_on_other_devices_are_told_as_such() -> None:
    elsewhere = [Run(job=on_gpu(one.job), measured=one.measured) for one in RUNS]
    learned = JoinedPredictor(joining=QUICK).fit([*RUNS[::12], *elsewhere])
    devices = [learned.predict(asked).assumptions[0] for asked in (on_gpu(job(4, 16)), job(1, 8))]
    assert devices[0].endswith(" like that")
    assert devices[1].endswith(" like that, on t4")


def test_where_no_left_out_run_tells_how_well_that_is_said() -> None:
    """Of two configurations each is forecast by the other, and nobody else is left to choose by."""
    repeats = [run(job(), step_time_s=0.2 + 0.002 * i) for i in range(9)]
    learned = JoinedPredictor(joining=QUICK).fit([*repeats, run(job(2))])
    for asked in (job(), job(2), job(4)):
        forecast = learned.predict(asked)
        assert forecast.assumptions[0].startswith("by ernest; a model of the runs, ")
        assert forecast.assumptions[0].endswith(": no left-out run tells how well")


def test_of_repeats_alone_none_is_left_out() -> None:
    repeats = [run(job(), step_time_s=0.2 + 0.002 * i) for i in range(9)]
    (told,) = JoinedPredictor(joining=QUICK).fit(repeats).report()
    assert "or repeats alone: none was left out" in str(told)


def test_what_it_was_off_on_left_out_runs_is_its_evidence(learned: JoinedPredictor) -> None:
    forecast = learned.predict(job(4, 16))
    evidence = learned.knows(forecast)
    assert evidence is not None
    assert not evidence.learned_from
    assert evidence.nearest[0].left_out


def test_a_run_has_no_part_in_the_interval_that_is_told_to_hold_it() -> None:
    """Those that were left out together err alike: their own misses would make an interval that holds
    them."""
    learned = JoinedPredictor(joining=QUICK)
    learned.tried_ = left_out([[1.0 if i % 4 == 0 else 0.01 * (-1) ** i] for i in range(32)], ("a",))
    learned.missed_ = learned.tried_.missed("best")
    learned.held_ = {"a": 0.5}
    spread = learned._spread(np.ones(32, dtype=bool))
    assert spread.low <= math.exp(-1.0) <= spread.high
    assert learned._inside(0, np.array([1.0])) == 0.0
    assert learned._inside(1, np.array([0.0])) == 1.0
    learned.held_ = {"a": 0.9}  # it keeps its own, which held the run or did not
    assert [learned._inside(0, np.array([held])) for held in (1.0, 0.0)] == [1.0, 0.0]


def test_a_model_without_runs_is_refused_by_those_who_need_them(learned: JoinedPredictor) -> None:
    with pytest.raises(UnsupportedJob, match="every predictor refuses this job"):
        learned.predict(job(4, 16, name="model.py:third"))


def test_what_was_learned_keeps_its_settings_when_read_again(
    learned: JoinedPredictor, tmp_path: Path
) -> None:
    learned.save(tmp_path)
    assert predictors.get(tmp_path).joining == QUICK  # type: ignore[attr-defined]
    document = json.loads((tmp_path / "predictor.json").read_text())
    del document["joining"]
    (tmp_path / "predictor.json").write_text(json.dumps(document))
    older = predictors.get(tmp_path)
    assert older.joining == Joining()  # type: ignore[attr-defined]
    assert older.predict(job(4, 16)).quantities == learned.predict(job(4, 16)).quantities


def test_the_usual_one_as_it_comes_is_there_again_where_it_could_not_learn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(self: DeletePopPredictor, runs: Iterable[Run]) -> DeletePopPredictor:
        raise InputError("runs: nothing to learn from")

    monkeypatch.setattr(DeletePopPredictor, "fit", refuse)
    learned = JoinedPredictor(joining=Joining(predictors=("deletepop", "ernest"), folds=2)).fit(RUNS)
    assert learned.members_ is not None
    assert list(learned.members_.by_name) == [SHIPPED, "ernest"]
    learned.save(tmp_path)
    again = predictors.get(tmp_path)
    assert isinstance(again, JoinedPredictor)
    assert again.members_ is not None
    assert list(again.members_.by_name) == [SHIPPED, "ernest"]


def test_the_report_sets_the_joined_beside_the_best_one(learned: JoinedPredictor) -> None:
    (table,) = learned.report()
    assert not isinstance(table, str)
    assert {row[1] for row in table.rows} >= {"inside", "beyond"}
    assert {row[3] for row in table.rows if row[4] is not None} == {"ernest"}


def test_a_fit_tells_how_far_it_has_come_until_resources_are_learned() -> None:
    heard: list[tuple[int, int]] = []
    learning = JoinedPredictor(joining=dataclasses.replace(QUICK, predictors=("ernest", "driple")))
    learning.progress = lambda done, total: heard.append((done, total))
    learning.fit(RUNS)
    assert [done for done, _ in heard] == list(range(1, heard[-1][1] + 1))


def test_runs_without_step_times_are_left_out() -> None:
    bare = Run(job=RUNS[0].job, measured={"epoch_time_s": 1.0})
    assert len(JoinedPredictor(joining=QUICK).fit([*RUNS, bare]).left_out_) == 1
    with pytest.raises(InputError, match="runs: none has a step_time_s"):
        JoinedPredictor(joining=QUICK).fit([bare])


def test_the_usual_one_as_it_comes_is_joined_where_it_is_among_them() -> None:
    assert everyone(("ernest",)) == ("ernest",)
    assert everyone(("deletepop", "ernest")) == (SHIPPED, "deletepop", "ernest")
    with pytest.raises(InputError, match="predictors: 'roofline' is not one of"):
        read_names("ernest,roofline", "predictors")


def test_names_without_one_that_forecasts_steps_are_refused() -> None:
    assert read_names("ernest, driple", "predictors") == ("ernest", "driple")
    assert read_names("ernest,flops,ernest", "predictors") == ("ernest", "flops")  # nobody speaks twice
    with pytest.raises(InputError, match="predictors: 'driple' names none that forecasts steps"):
        read_names("driple", "predictors")


# The command


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "share"))
    monkeypatch.delenv(usual.VARIABLE, raising=False)
    (tmp_path / "model.py").write_text("def net(batch): raise RuntimeError('not needed')\nother = net\n")
    lines = [json.dumps(one.to_dict()) + "\n" for one in RUNS]
    (tmp_path / "runs.jsonl").write_text("".join(lines))
    (tmp_path / "job.json").write_text(json.dumps(job(4, 16).to_dict()))
    return tmp_path


FEW = ("--predictors", "ernest", "--folds", "2")


def test_predict_uses_what_was_learned_until_it_is_switched_off(home: Path) -> None:
    shown = commands.run("learn", str(home / "runs.jsonl"), "--name", "mine", *FEW)
    assert shown.exit_code == 0, shown.output
    assert "mine is what predict uses from now on" in shown.stderr
    assert "learned from 24 of 24 runs" in shown.stderr
    told = commands.run("predict", str(home / "job.json"))
    assert told.exit_code == 0, told.output
    assert "the usual predictor here" in told.stderr
    assert json.loads(commands.ok("predict", str(home / "job.json"), "--json"))["predictor"] == "joined"
    assert "mine is no longer used" in commands.run("learn", "--off").stderr
    assert usual.usual() == predictors.DEFAULT


def test_a_variable_passes_what_was_learned_by(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (usual.folder() / "mine").mkdir(parents=True)
    (usual.folder() / "mine" / "predictor.json").write_text("{}")
    usual.use("mine")
    assert usual.usual() == str(usual.folder() / "mine")
    monkeypatch.setenv(usual.VARIABLE, "roofline")
    assert usual.usual() == "roofline"


def test_runs_of_a_store_and_a_folder_for_it(home: Path) -> None:
    store = f"sqlite:///{home / 'kept.db'}"
    commands.ok("runs", "import", str(home / "runs.jsonl"), "--store", store)
    commands.ok("learn", "--store", store, "--out", str(home / "fitted"), "--cluster", "cpu", *FEW)
    loaded = predictors.get(home / "fitted")
    assert loaded.predict(job(4, 16))["step_time_s"].median > 0
    assert usual.learned() is None


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (("--name", "Mine"), "name: 'Mine'"),
        (("--out", "x", "--cluster", "nothing"), "cluster: 'nothing'"),
        (("--out", "x", "--cluster", "t4"), "runs: there are none to learn from on t4"),
        (("--out", "x", "--predictors", "roofline"), "predictors: 'roofline' is not one of"),
    ],
)
def test_mistakes_are_told_in_one_line(home: Path, words: tuple[str, ...], line: str) -> None:
    assert line in commands.fails("learn", str(home / "runs.jsonl"), *words)


def test_a_cluster_file_that_is_no_text_is_named_once(home: Path) -> None:
    (home / "odd.toml").write_bytes(b"\xea\x00\xff")
    said = commands.fails(
        "learn", str(home / "runs.jsonl"), "--out", "x", "--cluster", str(home / "odd.toml")
    )
    assert said.count("odd.toml") == 1


def test_learning_needs_runs_and_a_place() -> None:
    assert commands.run("learn", "--name", "mine").exit_code == 2
    assert commands.run("learn", "runs.jsonl").exit_code == 2
