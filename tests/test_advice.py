"""Advice: the cheapest configuration that meets a deadline."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import commands
from foretrain import advice
from foretrain.errors import InputError, UnsupportedJob
from foretrain.job import Job
from foretrain.predictors.ray_models import RayModelsPredictor
from foretrain.run import Run
from scaled_runs import LEAST, blind, job, run, step_s


def runs(**training: Any) -> list[Run]:
    return [
        run(job(workers, batch, samples=64_000, **training)) for workers in (1, 2, 4, 8) for batch in (8, 16)
    ]


@pytest.fixture(scope="module")
def learned() -> RayModelsPredictor:
    return blind(LEAST).fit(runs())


def total_s(one: Job) -> float:
    steps = one.workload.training.total_steps
    assert steps is not None
    return step_s(one) * steps + 30.0  # with a start-up


def test_the_cheapest_in_time_comes_first(learned: RayModelsPredictor) -> None:
    base = advice.template(runs())
    jobs, refused = advice.candidates(base, runs(), advice.Wishes())
    assert not refused
    assert sorted(one.cluster.world_size for one in jobs) == [1, 2, 4, 8, 16]
    advised = advice.advise(learned, jobs, deadline_s=2.0 * min(map(total_s, jobs)))
    in_time = [option for option in advised.options if option.late <= advised.risk]
    assert advised.best is advised.options[0]
    assert [option.cost.median for option in in_time if option.cost] == sorted(
        option.cost.median for option in in_time if option.cost
    )
    assert all(option.late > advised.risk for option in advised.options[len(in_time) :])


def test_a_longer_deadline_is_never_dearer(learned: RayModelsPredictor) -> None:
    jobs, _ = advice.candidates(advice.template(runs()), runs(), advice.Wishes())
    bests = [advice.advise(learned, jobs, deadline_s=hours * 600.0).best for hours in (1, 2, 4, 8, 16)]
    costs = [best.cost.median for best in bests if best is not None and best.cost is not None]
    assert costs == sorted(costs, reverse=True)


def test_nothing_in_time_is_said(learned: RayModelsPredictor) -> None:
    jobs, _ = advice.candidates(advice.template(runs()), runs(), advice.Wishes())
    told = advice.advise(learned, jobs, deadline_s=1.0)
    assert told.best is None
    assert [option.late for option in told.options] == sorted(option.late for option in told.options)


def test_wishes_decide_on_workers_data_and_batch() -> None:
    wishes = advice.Wishes(samples=(1000, 2000), epochs=3, workers=(2, 4), batch=64)
    jobs, _ = advice.candidates(advice.template(runs()), runs(), wishes)
    found = {
        (one.cluster.world_size, one.workload.training.samples, one.workload.training.global_batch)
        for one in jobs
    }
    assert found == {(workers, samples, 64) for workers in (2, 4) for samples in (1000, 2000)}
    assert {one.workload.training.epochs for one in jobs} == {3}


def test_a_batch_that_does_not_divide_is_refused_with_its_reason() -> None:
    jobs, refused = advice.candidates(
        advice.template(runs()), runs(), advice.Wishes(workers=(2, 3), batch=64)
    )
    assert [one.cluster.world_size for one in jobs] == [2]
    assert refused == {"3 workers on cpu": "training.global_batch: 64 does not divide over plan.data = 3"}


def test_instances_are_filled_or_used_in_part() -> None:
    gpu = Job.read(
        {
            "model": {"source": "python", "name": "model.py:net"},
            "training": {"global_batch": 8, "samples": 1000},
            "cluster": {"device": "t4", "node": "g4dn.12xlarge", "devices_per_node": 4, "nodes": 1},
        }
    )
    known = [Run(job=gpu, measured={"step_time_s": 1.0})]
    wishes = advice.Wishes(workers=(1, 4, 6, 8), instances=("g4dn.xlarge", "g4dn.12xlarge"))
    jobs, _ = advice.candidates(gpu, known, wishes)
    found = {
        (one.cluster.world_size, one.cluster.nodes, one.cluster.groups[0].node.name)
        for one in jobs
        if one.cluster.groups[0].node
    }
    small = {(count, count, "g4dn.xlarge") for count in (1, 4, 6, 8)}
    assert found == small | {(1, 1, "g4dn.12xlarge"), (4, 1, "g4dn.12xlarge"), (8, 2, "g4dn.12xlarge")}


def test_instances_are_not_ignored_for_cpu_runs() -> None:
    wishes = advice.Wishes(workers=(1, 2, 4), instances=("g4dn.xlarge",))
    with pytest.raises(InputError) as refused:
        advice.candidates(advice.template(runs()), runs(), wishes)
    reason = "cluster.device: 'cpu' is not what node 'g4dn.xlarge' has: t4"
    assert str(refused.value) == f"instances: no configuration is left: {reason}"


def test_nodes_and_links_stay_those_of_the_runs() -> None:
    link = {"kind": "ethernet", "bandwidth": "1 Gb/s"}
    spread = {"device": "cpu", "cores_per_device": 1, "devices_per_node": 1, "nodes": 2, "inter_node": link}
    one = Job.read({**job(2, samples=1000).to_dict(), "cluster": spread})
    jobs, _ = advice.candidates(one, [run(one)], advice.Wishes())
    assert [(each.cluster.nodes, each.cluster.inter_node.bandwidth_bytes_per_s) for each in jobs] == [
        (2, 1.25e8),
        (4, 1.25e8),
    ]


def on_t4(workers: int, nodes: int = 1, **cluster: Any) -> Run:
    section = {"device": "t4", "devices_per_node": workers // nodes, "nodes": nodes, **cluster}
    return run(Job.read({**job(workers, samples=1000).to_dict(), "cluster": section}))


def shapes(*known: Run, **wishes: Any) -> list[tuple[int, int]]:
    """Workers and nodes of the candidates."""
    jobs, refused = advice.candidates(advice.template(known), known, advice.Wishes(**wishes))
    assert not refused
    return [(one.cluster.world_size, one.cluster.nodes) for one in jobs]


def test_devices_that_the_runs_have_in_one_node_stay_in_one() -> None:
    known = [on_t4(1), on_t4(2), on_t4(4)]
    assert shapes(*known) == [(1, 1), (2, 1), (4, 1), (8, 1)]
    assert shapes(*reversed(known)) == shapes(*known)


def test_nodes_are_filled_as_the_fullest_of_the_runs() -> None:
    known = [on_t4(1), on_t4(4), on_t4(4, nodes=2), on_t4(8, nodes=2)]
    held = [(1, 1), (4, 1), (4, 2), (8, 2)]
    assert shapes(*known) == [*held, (16, 4)]
    assert shapes(*reversed(known)) == [*held, (16, 4)]
    assert shapes(*known, workers=(3, 6, 7)) == [(3, 1), (6, 3), (7, 7)]
    assert shapes(on_t4(2, nodes=2), on_t4(4, nodes=4)) == [(2, 2), (4, 4), (8, 8)]


def test_machines_that_the_runs_fill_in_part_are_offered_so() -> None:
    known = [on_t4(2, nodes=2, node="g4dn.12xlarge"), on_t4(4, node="g4dn.12xlarge")]
    assert shapes(*known) == [(2, 1), (2, 2), (4, 1), (8, 2)]


def test_the_largest_data_of_the_runs_is_taken_and_told() -> None:
    sizes = [run(job(workers, samples=samples)) for workers in (1, 2) for samples in (128, 4096, 512)]
    base, wishes = advice.template(sizes), advice.Wishes(epochs=2)
    assert {one.workload.training.samples for one in advice.candidates(base, sizes, wishes)[0]} == {4096}
    told = advice.data_taken(base, sizes, wishes)
    assert told.startswith("4,096 samples an epoch, the most of the runs, which have 128 to 4,096")
    assert told.endswith("; 2 epochs")


def test_what_is_far_from_the_runs_may_well_be_late(learned: RayModelsPredictor) -> None:
    """A deadline a third beyond the median: nearly sure near the runs, and not sure far from them."""
    near, far = (
        advice.advise(learned, [one], 4 / 3 * learned.predict(one)["total_time_s"].median).options[0].late
        for one in (job(4, 16, samples=64_000, epochs=1), job(4, 16, samples=24 * 64_000, epochs=1))
    )
    assert far > 2 * near


def test_several_models_need_a_choice() -> None:
    several = [*runs(), run(job(name="model.py:other"))]
    with pytest.raises(
        InputError, match=r"^model: the runs are of 2 models; choose one of model.py:net, model.py:other$"
    ):
        advice.template(several)
    assert advice.template(several, "model.py:other").workload.model.label == "model.py:other"


def test_runs_that_do_not_say_the_size_of_the_data_need_it() -> None:
    small = [run(job(workers)) for workers in (1, 2, 4)]
    with pytest.raises(InputError, match=r"^samples: missing"):
        advice.candidates(advice.template(small), small, advice.Wishes())


def test_what_cannot_be_forecast_is_told(learned: RayModelsPredictor) -> None:
    class Refuses(RayModelsPredictor.__mro__[1]):  # type: ignore[misc, name-defined]
        name, quantities = "refuses", frozenset({"total_time_s"})

        def fit(self, runs: Any) -> Any:
            return self

        def predict(self, job: Job) -> Any:
            raise UnsupportedJob("not this one")

    jobs, _ = advice.candidates(advice.template(runs()), runs(), advice.Wishes(workers=(1,)))
    assert list(advice.advise(Refuses(), jobs, 1.0).refused.values()) == ["not this one"]


def test_the_command_prints_the_configurations(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("foretrain.predictors.ray_models.predictor.Budget", lambda: LEAST)
    path = tmp_path / "runs.jsonl"
    path.write_text("".join(json.dumps(one.to_dict()) + "\n" for one in runs()))
    (tmp_path / "model.py").write_text("def net(batch): raise RuntimeError('not needed')")
    shown = commands.run("advise", str(path), "--deadline", "2h", "--epochs", "1")
    assert shown.exit_code == 0
    assert "cpu, 1 core each" in shown.stdout
    assert "data: 64,000 samples an epoch, as in the runs (--samples takes others); 1 epoch" in shown.stderr
    assert "16 workers on cpu, 1 core each: beyond the runs in workers: 16, they have 1 to 8" in shown.stderr
    told = json.loads(commands.run("advise", str(path), "--deadline", "2h", "--json").stdout)
    assert told["options"][0]["in_time"]
    late = commands.run("advise", str(path), "--deadline", "1ms")
    assert late.exit_code == 1
    assert "no configuration meets the deadline" in late.stderr
    other = commands.run("advise", str(path), "--deadline", "2h", "--instances", "g4dn.12xlarge")
    assert other.exit_code == 2
    assert "instances: no configuration is left" in other.stderr
    assert "learn" not in other.stderr
    bad = commands.run("advise", str(path), "--deadline", "soon")
    assert bad.exit_code == 2
    assert "deadline: 'soon'" in bad.stderr
