"""The time of whole trainings: each part by itself, what they add up to, and how sure that is."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from foretrain.costs.startup import Started, StartUp, shipped
from foretrain.duration import STORAGE_SPREAD, Duration, DurationPart, ModelSize, duration, of_steps
from foretrain.errors import InputError
from foretrain.estimate import Estimate
from foretrain.forecast import Forecast, whole_training
from foretrain.graph import Buffer, Op, OpGraph, Weight
from foretrain.job import Job
from foretrain.step.state import model_size
from made_up import call, product, spec

STEP = Estimate(0.1, 0.08, 0.15, 0.07, 0.2)
SIZE = ModelSize(operators=100, checkpoint_bytes=8e9)


def job(cluster: dict[str, Any] | None = None, plan: dict[str, Any] | None = None, **training: Any) -> Job:
    return Job.read({
        "model": {"source": "timm", "name": "resnet18"},
        "training": {"global_batch": 64, "steps": 10_000, **training},
        "cluster": {"device": "h200-sxm-141gb", **(cluster or {})},
        "plan": plan or {},
    })  # fmt: skip


def whole(asked: Job, step: Estimate = STEP, size: ModelSize | None = SIZE, **more: Any) -> Duration:
    found = duration(asked, step, size, **more)
    assert found is not None
    return found


def part(asked: Job, name: str, **more: Any) -> DurationPart:
    (found,) = [one for one in whole(asked, **more).parts if one.name == name]
    return found


def test_a_plain_training_is_its_start_and_its_steps() -> None:
    found = whole(job())
    start, steps = found.parts
    assert (start.name, steps.name) == ("start-up", "steps")
    assert steps.time_s == STEP * 10_000
    assert found.time_s.median == pytest.approx(start.time_s.median + 1000)
    assert start.time_s.median == pytest.approx(shipped().median_s("timm", 100, compiled=False))
    assert duration(Job.read({**job().to_dict(), "training": {"global_batch": 64}}), STEP) is None


def test_what_is_unknown_of_the_start_widens_the_total_and_not_the_step() -> None:
    compiled = job(steps=10, compile=True)
    quantities = whole_training(compiled, STEP, SIZE)
    assert quantities["step_time_s"] == STEP
    total, start = quantities["total_time_s"], part(compiled, "start-up").time_s
    assert total.median == pytest.approx(start.median + 1)
    assert total.high - total.median == pytest.approx(math.hypot(start.high - start.median, 0.5))
    unknown = whole_training(compiled, STEP)["total_time_s"]
    assert unknown.high - unknown.low > 1.5 * (total.high - total.low)


@given(
    st.integers(1, 10**6), st.integers(1, 10**5), st.sampled_from([100, "epoch", "30 min"]),
    st.floats(1, 1e5), st.floats(1e6, 1e9),
)  # fmt: skip
def test_parts_add_up_to_the_total(
    steps: int, samples: int, every: int | str, loader_rate: float, mtbf_s: float
) -> None:
    asked = job(
        cluster={"node_mtbf": mtbf_s, "storage_bandwidth": "2 GB/s"},
        steps=steps, samples=samples, evaluate_every=every, evaluate_samples=samples,
        checkpoint_every=every, loader_rate=loader_rate,
    )  # fmt: skip
    try:
        found = whole(asked)
    except InputError as refusal:
        assert "never ends" in str(refusal)  # noqa: PT017
        return
    assert found.time_s.median == pytest.approx(sum(one.time_s.median for one in found.parts))
    assert found.time_s.low <= found.time_s.median <= found.time_s.high


def test_data_is_waited_for_where_loading_is_the_bound() -> None:
    fast, slow = job(loader_rate=100, loader_workers=8), job(loader_rate=100, loader_workers=4, samples=640)
    assert part(fast, "waiting for data").time_s.median == 0
    waiting = part(slow, "waiting for data").time_s
    assert waiting.median == pytest.approx(10_000 * (64 / 400 - 0.1))
    assert whole(slow).time_s.median == pytest.approx(part(slow, "start-up").time_s.median + 1600)
    assert whole_training(slow, STEP)["epoch_time_s"].median == pytest.approx(1.6)
    assert whole_training(slow, STEP)["step_time_s"] == STEP
    both = job(cluster={"devices_per_node": 2}, loader_rate=100, loader_workers=4)
    assert part(both, "waiting for data").time_s.median == 0


def test_an_evaluation_is_so_many_forward_passes() -> None:
    asked = job(evaluate_every=1000, evaluate_samples=650)
    assert part(asked, "evaluation").time_s.median == pytest.approx(10 * 11 * 0.1 / 3)
    assert part(asked, "evaluation", forward_s=0.02).time_s.median == pytest.approx(10 * 11 * 0.02)
    every_epoch = job(evaluate_every="epoch", evaluate_samples=64, samples=64 * 400)
    assert part(every_epoch, "evaluation", forward_s=0.02).time_s.median == pytest.approx(25 * 0.02)


def test_an_evaluation_by_the_clock_counts_steps_that_wait_for_data() -> None:
    slow = job(loader_rate=0.64, steps=100, evaluate_every="10 min", evaluate_samples=64)
    found = part(slow, "evaluation", forward_s=0.02)
    assert found.source == "17 times 1 batches of 1 min 40 s (waiting for data)"


def test_devices_that_wait_draw_idle_power() -> None:
    asked = job(loader_rate=6.4, steps=1000)
    found = whole(asked)
    quantities = {**whole_training(asked, STEP, SIZE), "power_w": Estimate(600, 600, 600)}
    forecast = Forecast(job=asked, predictor="x", quantities=quantities, duration=found)
    idle_w = 0.15 * (asked.cluster.device.tdp_w or 0.0)
    assert forecast.energy_j is not None
    waits_s = found.time_s.median - 100
    assert forecast.energy_j.median == pytest.approx(100 * 600 + waits_s * idle_w)


def test_a_checkpoint_takes_its_size_over_the_rate_of_the_storage() -> None:
    asked = job(cluster={"storage_bandwidth": "2 GB/s"}, checkpoint_every=1000)
    written = part(asked, "checkpoints").time_s
    assert written.median == pytest.approx(10 * 4)
    assert written == Estimate.around(40.0, STORAGE_SPREAD)
    assert part(job(checkpoint_every="5 min"), "checkpoints").time_s.median == pytest.approx(4 * 8)
    assert "storage_bandwidth is not given: 1 GB/s" in whole(job(checkpoint_every=1000)).notes[0]
    with pytest.raises(InputError, match="the size of a checkpoint of resnet18 is not known"):
        whole(asked, size=None)


@pytest.mark.parametrize(
    ("plan", "nodes"),
    [({}, 1), ({"shard": "zero3"}, 4), ({"tensor": 8, "pipeline": 2}, 2), ({"expert": 32}, 4)],
)
def test_nodes_that_hold_different_parts_write_them_at_once(plan: dict[str, Any], nodes: int) -> None:
    cluster = {"devices_per_node": 8, "nodes": 4, "storage_bandwidth": "1 GB/s"}
    asked = job(cluster, plan, checkpoint_every=10_000)
    assert part(asked, "checkpoints").time_s.median == pytest.approx(8 / nodes)


def test_failures_cost_a_restart_and_half_of_what_lies_between_checkpoints() -> None:
    cluster = {"node_mtbf": 1e6, "restart_time": 60, "storage_bandwidth": "8 GB/s"}
    asked = job(cluster, steps=1_000_000, checkpoint_every=1000)
    lost = part(asked, "restarts").time_s
    failures = 101_000 / 1e6
    assert lost.median == pytest.approx(failures * (60 + 101 / 2), rel=0.01)
    assert lost.low == 0
    many = part(job({**cluster, "nodes": 50}, {"data": 50}, global_batch=50, steps=1_000_000, checkpoint_every=1000),
                "restarts").time_s  # fmt: skip
    assert many.median == pytest.approx(50 * lost.median, rel=0.02)
    without = part(job(cluster, steps=1_000_000), "restarts").time_s
    assert without.median > 10 * lost.median


def test_failures_without_checkpoints_say_that_all_steps_are_lost() -> None:
    said = "training.checkpoint_every is not given: a failure loses all steps before it"
    assert said in whole(job({"node_mtbf": 1e6})).notes
    assert said not in whole(job({"node_mtbf": 1e6}, checkpoint_every=100)).notes
    assert said not in whole(job()).notes


def test_sharding_on_one_device_is_said_to_save_nothing() -> None:
    def assumed(asked: Job) -> str:
        return "; ".join(Forecast(job=asked, predictor="x", quantities={}).all_assumptions)

    assert "plan.shard: zero3 saves nothing on one device" in assumed(job(plan={"shard": "zero3"}))
    assert "plan.shard" not in assumed(job())
    assert "plan.shard" not in assumed(job({"devices_per_node": 2}, {"shard": "zero3"}, global_batch=2))


def test_a_restart_takes_a_start_and_reading_the_checkpoint_where_no_time_is_given() -> None:
    asked = job({"node_mtbf": "1d", "storage_bandwidth": "2 GB/s"}, checkpoint_every=100)
    start = part(asked, "start-up").time_s.median
    assert f"a restart takes {start + 4:.3g} s" in part(asked, "restarts").source


def test_a_training_that_never_ends_is_refused() -> None:
    with pytest.raises(InputError, match=r"cluster.node_mtbf: 10 s on 1 nodes is too short .* never ends"):
        whole(job({"node_mtbf": 10}))


def test_all_steps_together_may_be_known_by_themselves() -> None:
    found = of_steps(job(), Estimate(1200, 1100, 1300))
    assert found.parts[1].time_s == Estimate(1200, 1100, 1300)


@pytest.mark.parametrize(
    ("training", "message"),
    [
        ({"evaluate_every": 5}, "training.evaluate_samples: missing; training.evaluate_every needs it"),
        ({"evaluate_samples": 5}, "training.evaluate_every: missing; training.evaluate_samples needs it"),
        ({"loader_workers": 2}, "training.loader_rate: missing"),
        ({"loader_rate": 0}, "training.loader_rate: 0.0 is not a number greater than zero"),
        ({"checkpoint_every": 0}, "training.checkpoint_every: 0 is not steps above zero"),
        ({"checkpoint_every": "often"}, "training.checkpoint_every: 'often' is not a time"),
        ({"checkpoint_every": "epoch"}, 'training.samples: missing; training.checkpoint_every = "epoch"'),
        ({"checkpoint_every": 5, "mode": "infer"}, "training.checkpoint_every: 5 needs mode"),
    ],
)
def test_what_cannot_be_meant_is_refused(training: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        job(**training)


def test_a_job_with_all_of_it_survives_a_round_trip() -> None:
    asked = job(
        {"node_mtbf": "20d", "storage_bandwidth": "2 GB/s", "restart_time": "5 min"},
        checkpoint_every="30 min", evaluate_every=100, evaluate_samples=50, loader_rate=400, loader_workers=8,
    )  # fmt: skip
    assert Job.read(asked.to_dict()) == asked


# Checkpoints


def test_a_checkpoint_holds_parameters_and_optimizer_state_of_the_whole_model() -> None:
    multiply, update = product(8, 8, 8), call("_foreach_add_", spec(8, 8))
    ops = tuple(
        Op(update if phase == "optimizer" else multiply, phase, "layer", (), ())
        for phase in ("forward", "backward", "optimizer")
    )
    buffers = (
        Buffer(256, "weights", -1, 3), Buffer(512, "optimizer_state", -1, 3), Buffer(256, "gradients", 1, 3),
    )  # fmt: skip
    weights = (Weight("layer.weight", 64, "float32"), Weight("layer.frozen", 10, "bfloat16", trainable=False))
    graph = OpGraph(ops=ops, buffers=buffers, samples=8, weights=weights)
    assert model_size(job(), graph) == ModelSize(operators=2, checkpoint_bytes=64 * (4 + 8) + 10 * 2, calls=2)
    split = job({"devices_per_node": 4}, {"tensor": 4})
    assert model_size(split, graph).checkpoint_bytes == 4 * (64 * (4 + 8) + 10 * 2)


# Start-up


def starts(count: int = 12) -> list[Started]:
    """Models that compile for 20 s and 100 ms more for each operator, one in three of another library."""
    return [
        Started(
            library="transformers" if number % 3 == 0 else "timm", operators=50 + 30 * number,
            compiled=compiled, process_s=5.0, build_s=10.0 if number % 3 == 0 else 6.0,
            first_steps_s=20 + 0.1 * (50 + 30 * number) if compiled else 1.5,
        )
        for number in range(count)
        for compiled in (False, True)
    ]  # fmt: skip


def test_a_start_up_is_learned_from_measured_ones(tmp_path: Any) -> None:
    found = StartUp.fit(starts(), ["h200-sxm-141gb"])
    assert found.median_s("timm", 500, compiled=False) == pytest.approx(5 + 6 + 1.5)
    assert found.median_s("transformers", 500, compiled=True) == pytest.approx(5 + 10 + 20 + 50)
    assert found.median_s("torchvision", 500, compiled=False) == found.median_s("timm", 500, compiled=False)
    assert found.median_s("python", 500, compiled=False) == pytest.approx(5 + 1.5)
    assert max(found.spread) == pytest.approx(1)
    found.save(tmp_path / "startup.json")
    assert StartUp.load(tmp_path / "startup.json") == found
    with pytest.raises(InputError, match="at least 3 of each"):
        StartUp.fit(starts(2))


def test_a_deeper_model_of_the_same_operators_compiles_for_longer() -> None:
    starts = [
        Started(
            library="timm", operators=operators, compiled=compiled, process_s=5.0, build_s=6.0, calls=calls,
            first_steps_s=10 + 0.1 * operators + 0.02 * calls if compiled else 1.5,
        )
        for operators, calls in ((100, 300), (100, 900), (200, 500), (400, 2000))
        for compiled in (False, True)
    ]  # fmt: skip
    found = StartUp.fit(starts)
    assert found.median_s("timm", 150, compiled=True, calls=1000) == pytest.approx(11 + 10 + 15 + 20)
    assert found.median_s("timm", 150, compiled=False, calls=1000) == pytest.approx(12.5)
    assert shipped().compile_s_per_call > 0


def test_a_start_that_was_not_measured_has_a_wider_interval() -> None:
    model = shipped()

    def width(**changes: Any) -> float:
        how = {"library": "timm", "operators": 200, "compiled": True, "device": "h200-sxm-141gb", **changes}
        estimate = model.estimate(how.pop("library"), how.pop("operators"), **how)
        return math.log(estimate.high / estimate.low)

    known = width()
    for change in ({"library": "python"}, {"operators": None}, {"device": "t4"}, {"ranks": 8}):
        assert width(**change) > 1.5 * known
    assert model.estimate("timm", 100, compiled=True, device="t4", ranks=1000).median > 90


def test_a_start_is_read_from_the_provenance_of_a_run() -> None:
    figures = {"import_s": 4.0, "context_s": 0.5, "build_s": 6.0, "first_steps_s": [30.0, 0.3, 0.2]}
    how: dict[str, Any] = {"library": "timm", "operators": 9, "compiled": True, "step_s": 0.2}
    start = Started.of(figures, **how)
    assert (start.process_s, start.build_s, start.first_steps_s) == pytest.approx((4.5, 6.0, 29.9))
    assert Started.of({"first_steps_s": [30.0]}, **how).process_s is None
