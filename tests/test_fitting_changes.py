"""What makes a job fit that does not: the smallest change first, each asked of the predictor itself."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import golden
from foretrain import predictors
from foretrain.forecast import Forecast
from foretrain.graph import Buffer, Op, Operator, OpGraph, TensorSpec
from foretrain.job import Job
from foretrain.predictors import fitting_changes
from foretrain.predictors.fitting_changes import MOST_FORECASTS, SAFE_CHANCE, Remedy, with_remedies


class Asked:
    """A predictor that notes what it is asked for."""

    def __init__(self) -> None:
        self.jobs: list[Job] = []

    def predict(self, job: Job) -> Forecast:
        self.jobs.append(job)
        return predictors.get("roofline").predict(job)


def job(cluster: dict[str, Any] | None = None, plan: dict[str, Any] | None = None, **training: Any) -> Job:
    settings = {"global_batch": 64, "sequence": 1024, "precision": "bf16", "optimizer": "adamw", **training}
    sections = {"model": golden.LLAMA, "training": settings, "plan": plan or {}}
    return Job.read({**sections, "cluster": cluster or golden.H100})


def squeezed(forecast: Forecast, share: float) -> Job:
    """The job on devices with so much of the memory that it needs."""
    assert forecast.fullest is not None
    return on_device(forecast.job, share * forecast.fullest.median)


def on_device(wanted: Job, memory_bytes: float) -> Job:
    """The job on devices with so much memory."""
    groups = [
        dataclasses.replace(group, device=dataclasses.replace(group.device, memory_bytes=memory_bytes))
        for group in wanted.cluster.groups
    ]
    return dataclasses.replace(wanted, cluster=dataclasses.replace(wanted.cluster, groups=tuple(groups)))


def found(wanted: Job, share: float) -> tuple[tuple[Remedy, ...], Asked]:
    """What is found where the devices have a share of the memory that the job needs."""
    asked = Asked()
    small = squeezed(asked.predict(wanted), share)
    first = asked.predict(small)
    asked.jobs.clear()
    remedies = with_remedies(first, asked).remedies  # type: ignore[arg-type]
    assert remedies is not None
    assert len(asked.jobs) <= MOST_FORECASTS
    for one in remedies:
        assert one.chance <= SAFE_CHANCE
        assert one.memory.median < one.capacity_bytes
    return remedies, asked


def test_nothing_is_asked_where_a_job_fits() -> None:
    asked = Asked()
    forecast = asked.predict(job(global_batch=4))
    assert with_remedies(forecast, asked) is forecast  # type: ignore[arg-type]
    assert len(asked.jobs) == 1


def fragmented(folder: Path, room_bytes: float) -> Job:
    """A step whose tensors are 125 MiB at most, in segments of 210 MiB: one small one stays in the first."""
    spec = TensorSpec((8, 8), "float32")
    add = Operator("add", "Tensor", (spec, spec), (spec,), {"self": "%0", "other": "%1"}, 64, 512, 256, True)
    ops = tuple(Op(add, "forward", "", (), ()) for _ in range(4))
    lives = ((100, 0, 0), (15, 1, 3), (110, 2, 2))
    buffers = tuple(Buffer(size << 20, "activations", born, dies) for size, born, dies in lives)
    path = folder / "step.json.zst"
    OpGraph(ops=ops, buffers=buffers, samples=1).save(path)
    training = {"global_batch": 1, "precision": "fp32"}
    wanted = Job.read(
        {"model": {"source": "graph", "name": str(path)}, "training": training, "cluster": {"device": "a100"}}
    )
    return on_device(wanted, room_bytes)


def test_what_only_lies_in_pieces_gets_segments_that_expand(tmp_path: Path) -> None:
    asked = Asked()
    forecast = asked.predict(fragmented(tmp_path, 180 << 20))
    assert forecast.memory_short_of == "fragmentation"
    remedies = with_remedies(forecast, asked).remedies  # type: ignore[arg-type]
    assert remedies
    assert remedies[0].change == "allocator expandable_segments:True"
    assert remedies[0].fields == {"training.allocator": "expandable_segments:True"}
    assert remedies[0].slower == pytest.approx(0.0)
    assert remedies[0].memory.median < 150 << 20
    small = asked.predict(fragmented(tmp_path, 100 << 20))
    assert small.memory_short_of == "tensors"
    others = with_remedies(small, asked).remedies  # type: ignore[arg-type]
    assert others is not None
    assert not any("allocator" in one.change for one in others)


def test_the_largest_micro_batch_that_fits_comes_first() -> None:
    remedies, asked = found(job(), 0.6)
    assert remedies[0].change == "micro_batch 32"
    assert remedies[0].fields == {"plan.micro_batch": 32}
    assert remedies[0].slower is not None
    assert asked.jobs[0].micro_batch == 32
    assert asked.jobs[0].workload.training.global_batch == 64


def test_recomputation_is_told_with_the_time_that_it_takes() -> None:
    remedies, _ = found(job(plan={"micro_batch": 1}), 0.95)
    whole, _ = found(job(), 0.6)
    slower = {one.change: one.slower for one in (*remedies, *whole) if one.change.startswith("recompute")}
    assert slower
    assert all(value is not None and 0 < value < 0.6 for value in slower.values())


def test_of_layers_that_are_recomputed_in_part_all_are() -> None:
    plan = {"micro_batch": 1, "recompute": "full", "recompute_every": 4}
    remedies, _ = found(job(plan=plan), 0.95)
    assert {"plan.recompute_every": 1} in [one.fields for one in remedies]


def test_layers_that_recompute_some_modules_recompute_all() -> None:
    plan = {"micro_batch": 1, "recompute": "selective", "recompute_modules": ["norms"]}
    remedies, _ = found(job(plan=plan), 0.9)
    fields = next(one.fields for one in remedies if one.change == "recompute full")
    assert fields == {"plan.recompute": "full", "plan.recompute_modules": ()}


def test_a_change_that_the_plan_forbids_is_left_out() -> None:
    plan = {"shard": "zero3", "replicate": 4, "micro_batch": 1, "recompute": "full"}
    remedies, _ = found(job({"node": "dgx-h100"}, plan), 0.5)
    assert not any(one.change.startswith("tensor 4") for one in remedies)


def test_replicas_shard_what_they_hold_twice() -> None:
    remedies, asked = found(job({"node": "dgx-h100"}, {"micro_batch": 1, "recompute": "full"}), 0.6)
    assert remedies[0].change.startswith("shard zero")
    assert remedies[0].memory.median < remedies[0].capacity_bytes
    assert all(one.plan.micro_batch == 1 for one in asked.jobs)


def test_half_precision_is_offered_to_fp32() -> None:
    remedies, _ = found(job(precision="fp32", plan={"micro_batch": 1, "recompute": "full"}), 0.9)
    changes = [one.change for one in remedies]
    assert not any("micro_batch" in change or "recompute" in change for change in changes)
    assert changes


def test_several_changes_together_where_none_alone_does(monkeypatch: pytest.MonkeyPatch) -> None:
    others = [change for change in fitting_changes._SINGLE if change is not fitting_changes._larger_device]
    monkeypatch.setattr(fitting_changes, "_SINGLE", tuple(others))
    remedies, asked = found(job({"node": "dgx-h100"}, global_batch=64), 0.05)
    assert len(remedies) == 1
    assert remedies[0].change.startswith("micro_batch 1, recompute full")
    assert remedies[0].fields["plan.micro_batch"] == 1
    assert len(asked.jobs) >= 2


def test_other_devices_and_more_of_them_are_offered_with_their_price() -> None:
    wanted = job(global_batch=128)
    large = predictors.get("roofline").predict(wanted)
    assert large.fits is False
    remedies = with_remedies(large, predictors.get("roofline")).remedies
    assert remedies
    machines = [one for one in remedies if any(name.startswith("cluster.") for name in one.fields)]
    assert machines
    for one in machines:
        assert one.slower is not None
        assert one.slower < 0


def test_inference_gets_a_smaller_batch() -> None:
    remedies, asked = found(job(mode="infer"), 0.6)
    assert remedies[0].change == "batch 32"
    assert remedies[0].fields == {"training.global_batch": 32}
    assert all(one.plan.recompute == "none" and one.plan.shard == "none" for one in asked.jobs)


def test_a_change_that_the_predictor_refuses_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    from foretrain.errors import UnsupportedJob

    real = Asked.predict

    def refusing(self: Asked, given: Job) -> Forecast:
        if given.micro_batch < 64:
            self.jobs.append(given)
            raise UnsupportedJob("plan.micro_batch: no")
        return real(self, given)

    monkeypatch.setattr(Asked, "predict", refusing)
    remedies, _ = found(job(), 0.6)
    assert not any("micro_batch" in one.change for one in remedies)


def test_a_black_box_without_memory_is_not_asked() -> None:
    time_only = Forecast(job=job(), predictor="ernest", quantities={})
    assert with_remedies(time_only, Asked()) is time_only  # type: ignore[arg-type]


@pytest.mark.parametrize("change", fitting_changes._SINGLE, ids=lambda change: str(change.__name__))
def test_every_change_is_a_job_that_can_be_read_again(change: Callable[..., Any]) -> None:
    predictor = predictors.get("roofline")
    first = predictor.predict(squeezed(predictor.predict(job({"node": "dgx-h100"}, precision="fp32")), 0.5))
    search = fitting_changes._Search(first, predictor)
    search.may_fit = lambda **_: True  # type: ignore[method-assign]
    start = fitting_changes.JobChange(job=first.job, words="", fields={})
    for one in list(change(search, start)):
        assert one.words
        assert one.fields
        sections = one.job.to_dict()
        assert Job.read(sections).to_dict() == sections
