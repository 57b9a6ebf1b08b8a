"""Tests the Ray performance models: what they learn, how they choose, and how sure they are."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from threadpoolctl import threadpool_info

from foretrain import predictors
from foretrain.duration import start_up
from foretrain.errors import InputError, UnsupportedJob
from foretrain.forecast import Forecast
from foretrain.job import Job
from foretrain.predictors.checks import check_predictor
from foretrain.predictors.ray_models import RayModelsPredictor
from foretrain.predictors.ray_models import search as searching
from foretrain.predictors.ray_models.columns import Array, Encoding, ScaleTable
from foretrain.predictors.ray_models.law import Law, Sum
from foretrain.predictors.ray_models.predictor import data_of
from foretrain.predictors.ray_models.scaling import ScaleModel, check, ernest_times_s
from foretrain.predictors.ray_models.search import BATCH, STARTERS, Budget, _dealt, search, try_recipes
from foretrain.predictors.ray_models.techniques import (
    TECHNIQUES,
    Recipe,
    learn,
    means_of,
    ridge,
    single_threaded,
)
from foretrain.run import Run
from scaled_runs import LEAST, QUICK, blind, grid, job, run, step_s


@pytest.fixture(scope="module")
def learned() -> RayModelsPredictor:
    return blind(Budget()).fit(grid())


def table_of(runs: list[Run]) -> tuple[ScaleTable, Array]:
    _, tables = blind().tables(runs)
    return tables["step"]


def test_it_passes_the_conformance_checks() -> None:
    check_predictor(blind(LEAST), job(samples=64_000, epochs=2))


def test_it_is_known_by_name() -> None:
    assert isinstance(predictors.get("ray_models"), RayModelsPredictor)


@pytest.mark.parametrize(
    ("asked", "within"), [(job(4, 24), 0.05), (job(8, 12), 0.05), (job(16, 16), 0.15), (job(2, 64), 0.15)]
)
def test_scales_inside_and_beyond_are_forecast(
    learned: RayModelsPredictor, asked: Job, within: float
) -> None:
    assert learned.predict(asked)["step_time_s"].median == pytest.approx(step_s(asked), rel=within)


def test_a_forecast_beyond_the_runs_says_so_and_is_no_surer(learned: RayModelsPredictor) -> None:
    inside, beyond = learned.predict(job(4, 24)), learned.predict(job(32, 24))
    assert not any("beyond" in note for note in inside.assumptions)
    assert "beyond the runs in workers: 32, they have 1 to 8" in beyond.assumptions
    ratios = [forecast["step_time_s"].high / forecast["step_time_s"].median for forecast in (inside, beyond)]
    assert ratios[1] >= ratios[0]


def width(forecast: Forecast, quantity: str = "step_time_s") -> float:
    return forecast[quantity].high / forecast[quantity].low


@pytest.mark.parametrize(
    ("near", "far", "farther", "note"),
    [
        (job(8, 24), job(64, 24), job(512, 24), "beyond the runs in workers: 64, they have 1 to 8"),
        (
            job(8, 32),
            job(8, 256),
            job(8, 2048),
            "beyond the runs in batch of a worker: 256, they have 8 to 32",
        ),
        (job(4, 8), job(4, 8, 4), job(4, 8, 32), "beyond the runs in cores: 4, they have 1"),
    ],
)
def test_intervals_grow_with_the_distance_from_the_runs(
    learned: RayModelsPredictor, near: Job, far: Job, farther: Job, note: str
) -> None:
    forecasts = [learned.predict(one) for one in (near, far, farther)]
    assert width(forecasts[0]) < width(forecasts[1]) < width(forecasts[2])
    assert note in forecasts[1].assumptions


def epoch(one: Job) -> Run:
    """An epoch has a start of three seconds."""
    steps = one.workload.training.steps_per_epoch or 1
    return run(one, step_time_s=step_s(one), epoch_time_s=3.0 + step_s(one) * steps)


def test_more_data_than_was_seen_is_named_and_less_sure() -> None:
    sizes = (256, 512, 1024, 2048)
    learned = blind(LEAST).fit(epoch(job(workers, samples=size)) for workers in (1, 2, 4) for size in sizes)
    seen, far = (learned.predict(job(2, samples=size)) for size in (2048, 24 * 2048))
    assert "beyond the runs in samples: 49.2 k, they have 256 to 2.05 k" in far.assumptions
    assert width(far) > width(seen)
    assert width(far, "epoch_time_s") > width(seen, "epoch_time_s")


def test_epochs_of_one_length_grow_in_proportion_to_their_steps() -> None:
    learned = blind().fit(epoch(job(workers, samples=1024 * workers)) for workers in (1, 2, 4))
    seen, far = (learned.predict(job(2, samples=size)) for size in (2048, 24 * 2048))
    assert far["epoch_time_s"].median == pytest.approx(24 * seen["epoch_time_s"].median)
    assert width(far, "epoch_time_s") > width(seen, "epoch_time_s")


def over_nodes(one: Job, nodes: int, bandwidth: str = "10 Mb/s") -> Job:
    """The same workers, a few on each node."""
    section = one.cluster.to_dict()
    section |= {"nodes": nodes, "devices_per_node": one.cluster.world_size // nodes}
    section |= {"inter_node": {"kind": "ethernet", "bandwidth": bandwidth}}
    return Job.read({**one.to_dict(), "cluster": section}, base=one.workload.base)


def test_a_link_that_no_run_goes_over_is_refused(learned: RayModelsPredictor) -> None:
    with pytest.raises(
        UnsupportedJob, match=r"^cluster.inter_node: 'ethernet 1.25e\+06 B/s'; no run of this model"
    ):
        learned.predict(over_nodes(job(4, 16), 4))
    alone = blind().fit([run(job(1, batch)) for batch in (8, 16, 32)])
    with pytest.raises(UnsupportedJob, match=r"^cluster.intra_node: "):
        alone.predict(job(4, 16))


def test_settings_in_which_runs_differ_are_told_apart() -> None:
    served = [run(job(workers, batch, plan={"servers": 1})) for workers in (1, 2, 4, 8) for batch in (8, 32)]
    learned = blind().fit([*grid(), *served])
    plain, slow = learned.predict(job(4, 16)), learned.predict(job(4, 16, plan={"servers": 1}))
    assert slow["step_time_s"].median / plain["step_time_s"].median == pytest.approx(1.5, rel=0.15)


def test_a_setting_that_no_run_has_is_refused(learned: RayModelsPredictor) -> None:
    with pytest.raises(
        UnsupportedJob, match=r"^training.precision: 'bf16'; the runs of this model have 'fp32'$"
    ):
        learned.predict(job(precision="bf16"))


def test_a_model_without_runs_is_refused(learned: RayModelsPredictor) -> None:
    with pytest.raises(
        UnsupportedJob, match=r"^model: no run of 'model.py:other'; ray_models has learned model.py:net$"
    ):
        learned.predict(job(name="model.py:other"))


def test_models_with_too_few_runs_are_named() -> None:
    learned = blind(LEAST).fit([*grid(batches=(8,)), run(job(name="model.py:rare"))])
    assert learned.left_out_ == ("model.py:rare: only 1 run of it; 3 are needed",)
    with pytest.raises(InputError, match="no model has 3 runs"):
        blind().fit([run(job())])


def test_repeats_of_one_configuration_tell_how_far_they_are_apart() -> None:
    repeats = [run(job(), step_time_s=0.2 + 0.002 * i) for i in range(9)]
    learned = blind(LEAST).fit(repeats)
    again, elsewhere = (learned.predict(one)["step_time_s"] for one in (job(), job(batch=16)))
    assert again.median == pytest.approx(0.208, rel=0.01)
    assert 0.19 < again.low < 0.204 < 0.212 < again.high < 0.225
    assert elsewhere.high > 1.5 * elsewhere.median
    assert learned.checks() == {}


def test_epochs_have_a_start_that_steps_do_not_show() -> None:
    runs = []
    for workers in (1, 2, 4):
        for samples in (256, 512, 1024, 2048):
            one = job(workers, 8, samples=samples)
            assert one.workload.training.steps_per_epoch
            runs.append(
                run(
                    one,
                    step_time_s=step_s(one),
                    epoch_time_s=3.0 + step_s(one) * one.workload.training.steps_per_epoch,
                )
            )
    asked = job(2, 8, samples=4096)
    steps = asked.workload.training.steps_per_epoch
    assert steps
    told = blind().fit(runs).predict(asked)
    assert told["epoch_time_s"].median == pytest.approx(3.0 + step_s(asked) * steps, rel=0.1)
    assert told["step_time_s"].median == pytest.approx(step_s(asked), rel=0.05)


def test_whole_trainings_alone_are_enough() -> None:
    runs = [
        run(one, total_time_s=step_s(one) * 100)
        for one in (job(workers, steps=100) for workers in (1, 2, 4, 8))
    ]
    asked = job(3, steps=100)
    assert blind().fit(runs).predict(asked)["total_time_s"].median == pytest.approx(
        step_s(asked) * 100, rel=0.1
    )


START_S = 20.0


def trainings(**training: Any) -> RayModelsPredictor:
    """Runs of whole trainings, each with a start of its own and of nothing but steps beside it."""
    runs = []
    for workers in (1, 2, 4):
        for samples in (2560, 5120, 10240):
            for epochs in (1, 3):
                one = job(workers, 8, samples=samples, epochs=epochs, **training)
                steps = one.workload.training.total_steps
                assert steps
                runs.append(run(one, step_time_s=step_s(one), total_time_s=START_S + step_s(one) * steps))
    return blind().fit(runs)


@pytest.fixture(scope="module")
def totals() -> RayModelsPredictor:
    return trainings()


@pytest.mark.parametrize(
    "asked", [{"samples": 5120, "epochs": 2}, {"samples": 5120, "epochs": 3}, {"steps": 960}]
)
def test_a_training_has_one_start(totals: RayModelsPredictor, asked: dict[str, Any]) -> None:
    one = job(2, 8, **asked)
    steps, epoch_steps = one.workload.training.total_steps, one.workload.training.steps_per_epoch
    assert steps
    forecast = totals.predict(one)
    assert forecast["total_time_s"].median == pytest.approx(START_S + step_s(one) * steps, rel=0.02)
    assert forecast.duration is not None
    parts = {part.name: part.time_s.median for part in forecast.duration.parts}
    assert parts["start-up"] + parts["steps"] == pytest.approx(forecast["total_time_s"].median)
    if epoch_steps:
        assert forecast["epoch_time_s"].median == pytest.approx(parts["steps"] * epoch_steps / steps)


def test_trainings_of_one_length_have_one_start_too() -> None:
    runs = [
        run(one, total_time_s=START_S + step_s(one) * 1000)
        for one in (job(workers, steps=1000) for workers in (1, 2, 4, 8))
    ]
    asked = job(2, steps=10_000)
    learned = blind().fit(runs)
    seen_s, far_s = (learned.predict(one)["total_time_s"].median for one in (job(2, steps=1000), asked))
    start_s = start_up(asked, None).time_s.median
    assert far_s == pytest.approx(start_s + 10 * (seen_s - start_s))


@pytest.mark.parametrize("asked", [{"samples": 5120, "epochs": 3}, {"steps": 960}])
def test_a_training_evaluates_and_waits_whatever_says_how_long_it_is(
    totals: RayModelsPredictor, asked: dict[str, Any]
) -> None:
    beside: dict[str, Any] = {"evaluate_every": 10, "evaluate_samples": 1000}
    plain, more = (totals.predict(job(2, 8, **asked, **training)) for training in ({}, beside))
    assert more.duration is not None
    parts = {part.name: part.time_s.median for part in more.duration.parts}
    assert parts["evaluation"] > 0
    longer_s = more["total_time_s"].median - plain["total_time_s"].median
    assert longer_s == pytest.approx(parts["evaluation"])


def test_what_runs_evaluated_is_not_added_twice(totals: RayModelsPredictor) -> None:
    beside: dict[str, Any] = {"evaluate_every": 50, "evaluate_samples": 1000}
    evaluated = []
    for workers in (1, 2, 4):
        for samples in (2560, 5120, 10240):
            one = job(workers, 8, samples=samples, epochs=1, **beside)
            told = totals.predict(one)["total_time_s"].median
            evaluated.append(run(one, step_time_s=step_s(one), total_time_s=told))
    again = blind().fit(evaluated).predict(evaluated[4].job)["total_time_s"].median
    assert again == pytest.approx(evaluated[4].measured["total_time_s"], rel=0.05)


def test_an_epoch_waits_for_its_data(totals: RayModelsPredictor) -> None:
    asked = job(2, 8, samples=5120, epochs=1, loader_rate=1)
    epochs = blind().fit(epoch(job(2, 8, samples=samples)) for samples in (2560, 5120, 10240))
    for learned in (totals, epochs):
        assert learned.predict(asked)["epoch_time_s"].median == pytest.approx(5120 / 2)


def test_the_interval_that_is_scored_is_that_of_the_forecast() -> None:
    known = [epoch(job(workers, 8, samples=size)) for workers in (1, 2, 4) for size in (256, 512, 1024)]
    learned = blind(LEAST).fit(known)
    (workload,) = learned.workloads_.values()
    for workers, samples in ((2, 512), (8, 4096)):
        asked = job(workers, 8, samples=samples)
        steps = asked.workload.training.steps_per_epoch
        assert steps
        row = workload.encoding.table([asked], [float(steps)])
        time_s, spread = workload.models["epoch"].tell(row, data_of(workload.models))
        told = learned.predict(asked)["epoch_time_s"]
        assert (told.median, told.low, told.high) == pytest.approx(
            (time_s, time_s * spread.low, time_s * spread.high)
        )


def test_what_was_learned_is_the_same_when_read_again(learned: RayModelsPredictor, tmp_path: Path) -> None:
    learned.save(tmp_path)
    again = predictors.get(tmp_path)
    for asked in (job(4, 24), job(16, 16)):
        assert again.predict(asked).quantities == learned.predict(asked).quantities


def test_scoring_forgets_what_was_learned() -> None:
    with pytest.raises(UnsupportedJob, match="fit it first"):
        blind(LEAST).fit(grid()).without(frozenset({"net"})).predict(job())


# Our own forecast as the mean

MODEL = """
import torch
def net(batch):
    layers = torch.nn.Linear(16, 64), torch.nn.ReLU(), torch.nn.Linear(64, 8)
    return torch.nn.Sequential(*layers), (torch.zeros(batch, 16),), lambda out: out.sum()
"""


def test_the_forecast_of_the_job_is_corrected_where_runs_are_few(tmp_path: Path) -> None:
    (tmp_path / "model.py").write_text(MODEL)
    physics = predictors.get()

    def known(workers: int, batch: int) -> Job:
        training = {"global_batch": batch * workers}
        cluster = {"device": "cpu", "devices_per_node": workers, "cores_per_device": 1}
        return Job.read(
            {"model": {"source": "python", "name": "model.py:net"}, "training": training, "cluster": cluster},
            base=tmp_path,
        )

    def truth_s(one: Job) -> float:
        return 1.7 * physics.predict(one)["step_time_s"].median

    runs = [run(one, step_time_s=truth_s(one)) for one in (known(1, 256), known(2, 1024), known(4, 256))]
    learned = RayModelsPredictor().fit(runs)
    assert all(workload.physics for workload in learned.workloads_.values())
    asked = known(4, 4096)
    assert learned.predict(asked)["step_time_s"].median == pytest.approx(truth_s(asked), rel=0.5)


def over_link(nodes: int, gigabits: float, kind: str = "ethernet") -> Job:
    link = {"kind": kind, "bandwidth": gigabits * 125e6}
    cluster = {"device": "cpu", "cores_per_device": 1, "devices_per_node": 1, "nodes": nodes}
    return Job.read(
        {
            "model": {"source": "python", "name": "model.py:net"},
            "training": {"global_batch": 8 * nodes, "sequence": 16},
            "cluster": {**cluster, "inter_node": link} if nodes > 1 else cluster,
            "plan": {},
        }
    )


def linked_s(one: Job) -> float:
    nodes = one.cluster.nodes
    rate = one.cluster.inter_node.bandwidth_bytes_per_s
    return 0.05 + (0.01 + 5e6 * (1 - 1 / nodes) / rate if nodes > 1 else 0.0)


def test_a_rate_between_those_of_the_runs_is_told_from_them() -> None:
    jobs = [over_link(nodes, rate) for nodes in (2, 3, 4) for rate in (0.5, 1, 4, 10)]
    jobs += [over_link(1, 1)]
    fitted = blind(Budget(starters=(Recipe(mean="law"), Recipe(mean="nnls")))).fit(
        [run(one, step_time_s=linked_s(one)) for one in jobs]
    )
    asked = over_link(3, 2)
    median_s = fitted.predict(asked)["step_time_s"].median
    assert median_s == pytest.approx(linked_s(asked), rel=0.1)
    slower = fitted.predict(over_link(3, 0.25))
    assert slower["step_time_s"].median > median_s
    note = "beyond the runs in the rate between nodes: 250 Mb/s, they have 500 Mb/s to 10 Gb/s"
    assert note in slower.assumptions
    assert not any("rate between" in one for one in fitted.predict(asked).assumptions)
    with pytest.raises(UnsupportedJob, match=r"cluster.inter_node: .*infiniband"):
        fitted.predict(over_link(3, 2, "infiniband"))


def test_links_come_back_from_a_folder(tmp_path: Path) -> None:
    jobs = [over_link(nodes, rate) for nodes in (2, 3, 4) for rate in (1, 10)]
    fitted = blind(LEAST).fit([run(one, step_time_s=linked_s(one)) for one in jobs])
    fitted.save(tmp_path)
    asked = over_link(3, 4)
    assert predictors.get(tmp_path).predict(asked).quantities == fitted.predict(asked).quantities


def test_the_forecast_tells_of_links_that_no_run_goes_over(tmp_path: Path) -> None:
    (tmp_path / "model.py").write_text(MODEL)
    physics = predictors.get()

    def known(workers: int) -> Job:
        training = {"global_batch": 64 * workers}
        cluster = {"device": "cpu", "devices_per_node": workers, "cores_per_device": 1}
        return Job.read(
            {"model": {"source": "python", "name": "model.py:net"}, "training": training, "cluster": cluster},
            base=tmp_path,
        )

    jobs = [known(workers) for workers in (1, 2, 4)]
    learned = RayModelsPredictor(budget=QUICK).fit(
        [run(one, step_time_s=2 * physics.predict(one)["step_time_s"].median) for one in jobs]
    )
    near, far = learned.predict(jobs[2]), learned.predict(over_nodes(jobs[2], 4, "100 kb/s"))
    truth_s = 2 * physics.predict(far.job)["step_time_s"].median
    assert far["step_time_s"].median == pytest.approx(truth_s, rel=0.2)
    assert far["step_time_s"].median > near["step_time_s"].median
    assert width(far) > width(near)
    assert any(
        note.startswith("cluster.inter_node: ethernet 1.25e+04 B/s, which no run") for note in far.assumptions
    )


# Parts


def test_every_technique_that_is_named_is_tried() -> None:
    assert {recipe.technique for recipe in STARTERS} == {"none", *TECHNIQUES}


@pytest.mark.parametrize(
    "recipe", [recipe for recipe in STARTERS if recipe.mean != "forecast"], ids=lambda recipe: recipe.label
)
def test_recipes_learn_the_runs_and_stay_finite_far_away(recipe: Recipe) -> None:
    table, times_s = table_of(grid(cores=(1, 2)))
    tell = learn(recipe, table, times_s, means_of(table, times_s, [recipe.mean])[recipe.mean])
    assert np.abs(np.exp(tell(table)) / times_s - 1).mean() < 0.25
    alone = np.concatenate([tell(table.take(np.array([i]))) for i in range(len(table))])
    assert alone == pytest.approx(tell(table))  # a row says the same whatever stands beside it
    far, _ = table_of(grid(workers=(128, 256, 512), batches=(4096,)))
    assert np.isfinite(tell(far)).all()


@settings(max_examples=10, deadline=None)
@given(st.floats(1e-3, 10), st.floats(0, 1), st.integers(0, 100))
def test_the_law_follows_times_of_any_size(scale: float, exchange: float, seed: int) -> None:
    table, _ = table_of(grid())
    noise = np.random.default_rng(seed).normal(0, 0.02, len(table))
    times_s = scale * (0.1 + table.work / table.work.max() + exchange * np.log(table.workers)) * np.exp(noise)
    assert np.abs(np.exp(Law.fit(table, times_s).log_times(table)) / times_s - 1).mean() < 0.12


def test_more_work_never_takes_less_time_by_the_laws() -> None:
    table, times_s = table_of(grid())
    more, _ = table_of([run(job(4, batch)) for batch in (8, 16, 32, 64, 128)])
    for law in (Law.fit(table, times_s), Sum.fit(table, times_s, select=True)):
        assert (np.diff(law.log_times(more)) >= 0).all()


def test_a_recipe_is_never_chosen_by_the_runs_that_it_is_scored_on() -> None:
    """Times of the runs that are left out do not change what is said of them."""
    table, times_s = table_of(grid())
    train, test = np.arange(8), np.arange(8, 12)
    log_times = ScaleModel.fit(table.take(train), times_s[train], LEAST).log_times(table.take(test))
    changed = times_s.copy()
    changed[test] *= 100
    again = ScaleModel.fit(table.take(train), changed[train], LEAST).log_times(table.take(test))
    assert (log_times == again).all()


def test_checks_say_both_how_well_it_interpolates_and_extrapolates() -> None:
    table, times_s = table_of(grid())
    found = {(one.dimension, one.kind): one for one in check(table, times_s, LEAST)}
    assert set(found) == {
        (dimension, kind) for dimension in ("workers", "work") for kind in ("interpolation", "extrapolation")
    }
    assert all(one.error < 0.2 for one in found.values())


def test_ernest_has_a_law_for_each_setting() -> None:
    served = [run(job(workers, batch, plan={"servers": 1})) for workers in (1, 2, 4, 8) for batch in (8, 32)]
    table, times_s = table_of([*grid(), *served])
    assert np.abs(ernest_times_s(table, times_s, table) / times_s - 1).max() < 0.1


def test_a_fit_tells_how_far_it_has_come() -> None:
    runs = [run(job(n, name=name)) for name in ("a.py:net", "b.py:net") for n in range(1, 7)]
    heard: list[tuple[int, int]] = []
    predictor = RayModelsPredictor(physics=None, budget=LEAST, progress=lambda *count: heard.append(count))
    predictor.fit(runs)
    assert heard == sorted(heard)
    assert heard[0] == (0, 4)
    assert heard[-1] == (4, 4)


def test_recipes_are_counted_one_by_one_but_for_those_that_share_what_is_learned() -> None:
    batches = _dealt(STARTERS)
    assert sorted(map(repr, (one for batch in batches for one in batch))) == sorted(map(repr, STARTERS))
    for batch in batches:
        assert len(batch) == 1 or {one.mean for one in batch} == {"law"}


def test_recipes_are_learned_in_one_thread() -> None:
    """Of linear algebra, whose matrices are of some runs alone."""
    from threadpoolctl import threadpool_info

    heard: list[int] = []

    def spying(rows: Array, targets: Array, settings: Any) -> Any:
        heard.extend(pool["num_threads"] for pool in threadpool_info() if pool["user_api"] == "blas")
        return ridge(rows, targets, settings)

    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(TECHNIQUES, "ridge", spying)
        blind(Budget(starters=(Recipe(technique="ridge"),))).fit(grid())
    assert set(heard) == {1}


@pytest.fixture
def quick_recipes(monkeypatch: pytest.MonkeyPatch) -> None:
    """The search proposes nothing that takes long to learn."""
    monkeypatch.setattr(searching, "TECHNIQUES", {"ridge": ridge})
    monkeypatch.setattr(searching, "MEANS", ("none", "nnls"))


@pytest.mark.usefixtures("quick_recipes")
def test_the_search_goes_on_where_it_was_interrupted(tmp_path: Path) -> None:
    table, times_s = table_of(grid(workers=(1, 2, 4), batches=(8, 32)))
    heard: list[int] = []
    for trials in (BATCH, BATCH + 2):
        budget = dataclasses.replace(LEAST, trials=trials, study=tmp_path / "study.log")
        search(table, times_s, budget, lambda done, total: heard.append(done))
    first = len(LEAST.starters)
    assert [done - first for done in heard if done > first] == [BATCH, BATCH + 2]


@pytest.mark.usefixtures("quick_recipes")
@pytest.mark.parametrize("proposed", [BATCH, BATCH + 3, 2 * BATCH + 1])
def test_an_interruption_changes_nothing_in_what_a_search_finds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, proposed: int
) -> None:
    table, times_s = table_of(grid(workers=(1, 2, 4), batches=(8, 32)))
    budget = dataclasses.replace(LEAST, trials=3 * BATCH)
    resumed = dataclasses.replace(budget, study=tmp_path / "study.log")
    propose, calls = searching.propose, iter(range(proposed))

    def some(*words: Any) -> Recipe:
        if next(calls, None) is None:
            raise KeyboardInterrupt
        return propose(*words)

    with monkeypatch.context() as patched:
        patched.setattr(searching, "propose", some)
        with pytest.raises(KeyboardInterrupt):
            search(table, times_s, resumed)
    one, two = search(table, times_s, budget), search(table, times_s, resumed)
    assert [trial.to_dict() for trial in one] == [trial.to_dict() for trial in two]


@pytest.mark.usefixtures("quick_recipes")
def test_the_search_finds_the_same_in_one_process_and_in_two() -> None:
    table, times_s = table_of(grid(workers=(1, 2, 4), batches=(8, 32)))
    one, two = (
        search(table, times_s, dataclasses.replace(LEAST, trials=4, processes=count)) for count in (1, 2)
    )
    assert [trial.recipe for trial in one] == [trial.recipe for trial in two]
    assert [trial.inside_error for trial in one] == [trial.inside_error for trial in two]


@pytest.mark.parametrize("technique", TECHNIQUES)
def test_what_is_proposed_of_a_technique_can_be_learned(technique: str) -> None:
    import optuna

    study = optuna.create_study(sampler=optuna.samplers.RandomSampler(seed=0))
    study.enqueue_trial({"technique": technique, "mean": "none"})
    recipe = searching.propose(study.ask())
    assert recipe.technique == technique
    table, times_s = table_of(grid(batches=(8,)))
    tell = learn(recipe, table, times_s, means_of(table, times_s, ["none"])["none"])
    assert np.isfinite(tell(table)).all()


def test_a_recipe_with_our_forecast_is_left_out_where_there_is_none() -> None:
    table, times_s = table_of(grid(batches=(8,)))
    assert all(trial.recipe.mean != "forecast" for trial in try_recipes((table, times_s), STARTERS))


def test_an_encoding_survives_json() -> None:
    encoding = Encoding.of([one.job for one in grid()], graphs=False)
    assert Encoding.from_dict(encoding.to_dict()) == encoding


def test_linear_algebra_has_its_threads_back_when_the_last_has_left() -> None:
    def threads() -> set[int]:
        return {one["num_threads"] for one in threadpool_info() if one["user_api"] == "blas"}

    before = threads()
    first, second = single_threaded(), single_threaded()
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert threads() <= {1}
    second.__exit__(None, None, None)
    assert threads() == before
