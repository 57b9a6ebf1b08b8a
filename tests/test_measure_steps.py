"""Real steps on the CPU: what is measured is a run, and a job that cannot run does not stop the others."""

from __future__ import annotations

import dataclasses
import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from foretrain.catalog.hosts import PARTS, REFERENCE, HostProfile
from foretrain.errors import InputError, UnsupportedJob
from foretrain.job import Job
from foretrain.measure import steps
from foretrain.measure.host import measure_host
from foretrain.measure.steps import measure_jobs, measure_step, process_start
from foretrain.plan import Plan
from foretrain.run import read_runs

MODELS = """
import torch

def small(batch):
    net = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 4))
    return net, (torch.randn(batch, 8),)

def broken(batch):
    return torch.nn.Linear(8, 4), (torch.randn(batch, 9),)
"""


def a_job(folder: Path, function: str = "small", **changes: object) -> Job:
    (folder / "models.py").write_text(MODELS)
    training = {"global_batch": 4, "optimizer": "adamw", **changes}
    cluster = {"device": "cpu", "cores_per_device": 1}
    return Job.read(
        {
            "model": {"source": "python", "name": f"models.py:{function}"},
            "training": training,
            "cluster": cluster,
        },
        base=folder,
    )


def test_a_step_is_measured_as_a_run(tmp_path: Path) -> None:
    run = measure_step(a_job(tmp_path), device="cpu", seconds=0.02)
    assert 0 < run.measured["step_time_s"] < 5
    assert run.measured["samples_per_s"] == pytest.approx(4 / run.measured["step_time_s"])
    low, high = run.provenance["step_time_min_s"], run.provenance["step_time_max_s"]
    assert low <= run.measured["step_time_s"] <= high
    assert run.provenance["torch"] == torch.__version__


@pytest.mark.parametrize(
    "changes", [{"mode": "infer"}, {"precision": "bf16"}, {"precision": "amp-bf16"}, {"optimizer": "sgd"}]
)
def test_modes_and_precisions_run(tmp_path: Path, changes: dict[str, Any]) -> None:
    assert measure_step(a_job(tmp_path, **changes), device="cpu", seconds=0.01).measured["step_time_s"] > 0


@pytest.mark.parametrize(
    ("plan", "blocks_again", "products_again"),
    [
        (Plan(recompute="full"), 4, 4),
        (Plan(recompute="full", recompute_every=2), 2, 2),
        (Plan(recompute="operators"), 4, 4),
    ],
)
def test_layers_are_recomputed_as_the_plan_says(plan: Plan, blocks_again: int, products_again: int) -> None:
    from collections import Counter, OrderedDict

    from torch.utils._python_dispatch import TorchDispatchMode

    from foretrain.capture.recomputing import recompute_layers

    seen: Counter[str] = Counter()

    class Counting(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            seen[func.__name__] += 1
            return func(*args, **(kwargs or {}))

    def block() -> torch.nn.Module:
        wide, narrow = torch.nn.Linear(8, 16, bias=False), torch.nn.Linear(16, 8, bias=False)
        return torch.nn.Sequential(wide, torch.nn.Tanh(), narrow, torch.nn.Tanh())

    blocks = torch.nn.Sequential(OrderedDict((f"block_{i}", block()) for i in range(4)))
    body = torch.nn.Sequential(blocks)
    assert recompute_layers(body, plan) == f"a checkpoint around each of {blocks_again} blocks of 0"
    with Counting():  # type: ignore[no-untyped-call]
        loss = body(torch.ones(2, 8, requires_grad=True)).sum()
        seen.clear()
        loss.backward()
    kept = blocks_again if plan.recompute == "operators" else 0  # of two products, the first
    assert seen["tanh.default"] == 2 * blocks_again
    assert seen["mm.default"] - 16 == 2 * blocks_again - kept == 2 * products_again - kept


def test_a_start_is_measured_where_the_library_of_the_model_is_new(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(steps, "_libraries_in_use", set())
    start = {"import_s": 4.0, "context_s": 0.5}
    first, second = (measure_step(a_job(tmp_path), device="cpu", seconds=0.01, start=start) for _ in range(2))
    assert first.measured["startup_time_s"] >= 4.5 + first.provenance["build_s"] > 4.5
    assert {name: first.provenance[name] for name in start} == start
    assert first.measured["startup_time_s"] < 4.5 + first.provenance["build_s"] + sum(
        first.provenance["first_steps_s"]
    )
    assert 3 <= len(second.provenance["first_steps_s"]) <= 6
    assert "startup_time_s" not in second.measured
    unknown = measure_step(a_job(tmp_path), device="cpu", seconds=0.01)
    assert "startup_time_s" not in unknown.measured


def test_a_process_takes_time_to_start() -> None:
    assert process_start("cpu").keys() == {"import_s", "context_s"}
    assert process_start("cpu")["import_s"] > process_start("cpu")["context_s"] > 0


def test_jobs_are_measured_once_and_failures_are_kept(tmp_path: Path) -> None:
    out = tmp_path / "runs.jsonl"
    jobs = [a_job(tmp_path), a_job(tmp_path, "broken"), a_job(tmp_path, global_batch=8)]
    first = measure_jobs(jobs, out, device="cpu", seconds=0.01)
    again = measure_jobs(jobs, out, device="cpu", seconds=0.01)
    retried = measure_jobs(jobs, out, device="cpu", seconds=0.01, retry_failed=True)
    assert (first.measured, first.failed) == (2, 1)
    assert (again.measured, again.failed, again.known, again.failed_before) == (0, 0, 2, 1)
    assert (retried.measured, retried.failed, retried.known, retried.failed_before) == (0, 1, 2, 0)
    assert len(list(read_runs(out))) == 2
    assert "broken" in (tmp_path / "runs.failures.jsonl").read_text()


def test_files_of_models_are_named_from_where_the_runs_are(tmp_path: Path) -> None:
    out = tmp_path / "new" / "runs.jsonl"
    assert measure_jobs([a_job(tmp_path)], out, device="cpu", seconds=0.01).measured == 1
    [(_, run)] = read_runs(out)
    assert run.job.workload.model.name == "../models.py:small"
    assert measure_jobs([run.job], out, device="cpu", seconds=0.01).known == 1


def test_a_file_of_jobs_is_not_added_to(tmp_path: Path) -> None:
    out = tmp_path / "jobs.jsonl"
    out.write_text(json.dumps(a_job(tmp_path).to_dict()) + "\n")
    with pytest.raises(InputError, match=r"jobs\.jsonl:1: run: a run is a table"):
        measure_jobs([a_job(tmp_path)], out, device="cpu", seconds=0.01)


def test_when_the_time_is_up_the_rest_is_left(tmp_path: Path) -> None:
    assert measure_jobs([a_job(tmp_path)], tmp_path / "runs.jsonl", device="cpu", budget_s=-1.0).left == 1


def test_several_devices_are_for_campaigns(tmp_path: Path) -> None:
    job = a_job(tmp_path)
    two = Job.read(
        {
            **job.to_dict(),
            "cluster": {"device": "cpu", "cores_per_device": 1, "devices_per_node": 2},
            "plan": {},
        },
        base=tmp_path,
    )
    with pytest.raises(UnsupportedJob, match="measure campaign"):
        measure_step(two, device="cpu")


@pytest.mark.parametrize(("asked", "mode"), [(True, None), ("reduce-overhead", "reduce-overhead")])
def test_steps_of_a_compiled_model_go_through_the_compiler(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, asked: object, mode: str | None
) -> None:
    modes: list[object] = []
    calls: list[object] = []

    def compile(module: torch.nn.Module, *, mode: str | None) -> torch.nn.Module:
        modes.append(mode)
        module.register_forward_pre_hook(lambda *_: calls.append(mode))
        return torch.nn.Sequential(module)

    monkeypatch.setattr("torch.compile", compile)
    sections = a_job(tmp_path).to_dict()
    job = Job.read({**sections, "training": {**sections["training"], "compile": asked}}, base=tmp_path)
    run = measure_step(job, device="cpu", seconds=0.01)
    assert modes == [mode]
    assert len(calls) > 3
    assert run.job.workload.training.compile == asked


@pytest.mark.parametrize(
    ("section", "options", "said"),
    [
        ("plan", {"servers": 2}, "plan.servers: 2 cannot be measured here"),
        (
            "plan",
            {"recompute": "full"},
            "plan.recompute: 'full' cannot be measured here; models.py:small has neither a switch for it nor a list of 4 blocks or more that holds half of its weights",
        ),
        (
            "plan",
            {"recompute": "selective"},
            "plan.recompute: 'selective' cannot be measured here; full and operators can",
        ),
        ("training", {"loader_rate": 9.0}, "training.loader_rate: 9.0 cannot be measured here"),
        (
            "training",
            {"evaluate_every": 5, "evaluate_samples": 4},
            "training.evaluate_every: 5 cannot be measured here",
        ),
        ("training", {"checkpoint_every": "1h"}, "training.checkpoint_every: '1h' cannot be measured here"),
    ],
)
def test_a_run_claims_nothing_that_was_not_carried_out(
    tmp_path: Path, section: str, options: dict[str, object], said: str
) -> None:
    sections = a_job(tmp_path).to_dict()
    job = Job.read({**sections, section: {**sections[section], **options}}, base=tmp_path)
    with pytest.raises(UnsupportedJob) as refused:
        measure_step(job, device="cpu", seconds=0.01)
    assert str(refused.value) == said


def test_a_missing_gpu_is_one_line(tmp_path: Path) -> None:
    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    with pytest.raises(InputError, match="torch finds no GPU"):
        measure_step(a_job(tmp_path))


@pytest.mark.parametrize(
    ("wanted", "here", "said"),
    [
        ("expandable_segments:True", None, "'expandable_segments:True' needs PYTORCH_CUDA_ALLOC_CONF=exp"),
        (None, "max_split_size_mb:64", "in the environment, not 'max_split_size_mb:64'"),
        ("expandable_segments:True", "expandable_segments:true,", None),
    ],
)
def test_the_allocator_is_set_as_the_job_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wanted: str | None, here: str | None, said: str | None
) -> None:
    monkeypatch.setattr(steps, "check_available", lambda device: None)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: "NVIDIA H100 80GB HBM3")
    monkeypatch.delenv("PYTORCH_ALLOC_CONF", raising=False)
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", here or "")
    document = a_job(tmp_path, **({} if wanted is None else {"allocator": wanted})).to_dict()
    job = Job.read({**document, "cluster": {"device": "h100"}}, base=tmp_path)
    if said is None:
        steps.check_machine(job, "cuda")
        return
    with pytest.raises(UnsupportedJob, match=said):
        steps.check_machine(job, "cuda")


# The host


def test_the_profile_of_a_host_needs_no_gpu(tmp_path: Path) -> None:
    before = os.sched_getaffinity(0)
    profile = measure_host(0.0)
    assert set(profile.seconds) == {"cpu"} | ({"cuda"} if torch.cuda.is_available() else set())
    assert all(seconds > 0 for of in profile.seconds.values() for seconds in of.values())
    assert all(low <= 1.0 <= high for of in profile.spread.values() for low, high in of.values())
    profile.save(tmp_path / "host.json")
    kept = HostProfile.load(tmp_path / "host.json")
    assert kept.to_dict() == profile.to_dict()
    host = kept.beside(dataclasses.replace(kept, speeds=dict.fromkeys(PARTS, 0.5)))
    assert [host.speed_of(part) for part in PARTS] == pytest.approx([0.5] * 3)
    assert set(HostProfile.load(REFERENCE).seconds["cpu"]) <= set(profile.seconds["cpu"])
    assert os.sched_getaffinity(0) == before
    assert 1 <= len(profile.core_s) <= len(before)


def test_the_gpu_that_is_here_is_named_as_the_catalogue_does(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda number: "NVIDIA A100-SXM4-80GB")
    assert steps.device_here("cuda") == {"device": "a100-sxm-80gb"}
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda number: "NVIDIA H200")
    with pytest.raises(InputError, match=r"'NVIDIA H200' can be h200-.* or h200-.*; name it in a job file"):
        steps.device_here("cuda")
