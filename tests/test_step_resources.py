"""Resources of one device: loaders make the batches that are asked for, activity is cut into samples, and a
run has the twelve figures."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
import types
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from foretrain.errors import ForetrainError, InputError, UnsupportedJob
from foretrain.job import Job
from foretrain.measure import activity, watching
from foretrain.measure.gpu_series import LinkRates, joined_series, link_rates, slowed_by, whole_turns
from foretrain.measure.loading import KINDS, Batches, Feed, Loader, fed_input
from foretrain.measure.resources import Series
from foretrain.measure.step_resources import Session, Window, measure_resources
from foretrain.measure.watching import Watcher
from foretrain.predictors.driple.features import TWELVE, figures_of

MODEL = """
import torch

def net(batch):
    layers = [torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 10)]
    return torch.nn.Sequential(*layers), (torch.zeros(batch, 64),)
"""
QUICK = Window(seconds=0.05, warm_up_s=0.01)


@pytest.fixture
def job(tmp_path: Path) -> Job:
    (tmp_path / "models.py").write_text(MODEL)
    return Job.read(
        {
            "model": {"source": "python", "name": "models.py:net"},
            "training": {"global_batch": 8},
            "cluster": {"device": "cpu", "cores_per_device": 1},
        },
        base=tmp_path,
    )


def with_loader(job: Job, **training: Any) -> Job:
    return Job.read({**job.to_dict(), "training": {"global_batch": 8, **training}}, base=job.workload.base)


# Loaders


@pytest.mark.parametrize("kind", KINDS)
def test_a_loader_makes_batches_in_the_models_shape(kind: Any) -> None:
    like = torch.zeros(2, 3, 16, 24) if kind in ("decode", "crop", "noise") else torch.zeros(2, 32).long()
    rate = 1e6 if kind == "paced" else None
    made = Batches(Loader(kind=kind, rate=rate), like)[0]
    assert made["batch"].shape == like.shape
    assert made["batch"].is_floating_point() == like.is_floating_point()
    assert made["seconds"] > 0


def test_a_paced_loader_takes_its_time() -> None:
    begin = time.perf_counter()
    made = Batches(Loader(kind="paced", rate=40.0), torch.zeros(2, 4))[3]
    assert time.perf_counter() - begin >= 0.05
    assert float(made["seconds"]) >= 0.05 - 1e-6


def test_batches_come_from_worker_processes() -> None:
    with Feed(Loader(kind="slice", workers=2), torch.zeros(4, 8)) as feed:
        batches = [feed.next() for _ in range(3)]
    assert {tuple(batch.shape) for batch in batches} == {(4, 8)}
    assert feed.size_bytes == 4 * 8 * 4
    assert len(feed.made_in_s) == 3


def test_what_is_loaded_is_the_tokens_or_the_largest_input() -> None:
    key, _ = fed_input({"input_ids": torch.zeros(2, 8).long(), "mask": torch.zeros(2, 64)})
    assert key == "input_ids"
    assert fed_input((torch.zeros(2, 1), torch.zeros(2, 9)))[0] == 1


def test_loaders_that_do_not_exist_are_one_line() -> None:
    with pytest.raises(InputError, match="one of decode, crop"):
        Loader(kind="guess")  # type: ignore[arg-type]
    with pytest.raises(InputError, match='a rate for "paced"'):
        Loader(kind="paced")


# Activity


class Event:
    def __init__(self, name: str, start: int, end: int) -> None:
        self._name, self._start, self._end = name, start, end

    def name(self) -> str:
        return self._name

    def start_ns(self) -> int:
        return self._start

    def duration_ns(self) -> int:
        return self._end - self._start

    def device_type(self) -> str:
        return "DeviceType.CUDA"

    def is_user_annotation(self) -> bool:
        return False


@pytest.mark.parametrize("clock_off_s", [0.0, -1000.0])
def test_kernels_and_copies_are_told_apart_on_the_hosts_clock(
    monkeypatch: pytest.MonkeyPatch, clock_off_s: float
) -> None:
    ended = time.time()
    last = round((ended + clock_off_s) * 1e9)
    events = [
        Event("gemm", last - 30_000_000, last - 20_000_000),
        Event("gemm", last - 25_000_000, last - 10_000_000),
        Event("Memcpy HtoD (Pinned -> Device)", last - 60_000_000, last - 50_000_000),
        Event("Memset (Device)", last - 5_000_000, last),
    ]

    class Profile:
        profiler = types.SimpleNamespace(kineto_results=types.SimpleNamespace(events=lambda: events))

        def __init__(self, **_: Any) -> None: ...
        def __enter__(self) -> Profile:
            return self

        def __exit__(self, *_: object) -> None: ...

    monkeypatch.setattr(torch.profiler, "profile", Profile)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(time, "time", lambda: ended)
    returned, found = activity.profiled(lambda: "done")
    assert (returned, found.launched) == ("done", 3)
    np.testing.assert_allclose(
        found.kernels, [[ended - 0.03, ended - 0.01], [ended - 0.005, ended]], atol=1e-5
    )
    points = ended + np.array([-0.07, -0.05, -0.02, 0.0])
    np.testing.assert_allclose(activity.sampled(found.from_host, points), [0.5, 0, 0], atol=1e-3)
    np.testing.assert_allclose(activity.sampled(found.kernels, points), [0, 1 / 3, 0.75], atol=1e-3)


# Watching


def test_without_nvml_nothing_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watching, "gpu_count", lambda: 0)
    with Watcher() as watcher:
        assert watcher.between(0.0, 1e12, "use") == []


def test_samples_are_read_line_by_line(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """As the other process writes them, in pieces."""

    class Process:
        stdin = types.SimpleNamespace(close=lambda: None)

        def wait(self, timeout: float | None = None) -> None: ...
        def kill(self) -> None: ...

    monkeypatch.setattr(watching, "gpu_count", lambda: 1)
    monkeypatch.setattr(subprocess, "Popen", lambda *_, **__: Process())
    lines = [json.dumps({"kind": "use", "time_s": float(i), "utilization": 0.5}) + "\n" for i in range(3)]
    with Watcher() as watcher, watcher._file.open("a") as file:
        file.write(lines[0] + lines[1][:9])
        file.flush()
        assert len(watcher.between(0.0, 9.0, "use")) == 1
        file.write(lines[1][9:] + lines[2])
        file.flush()
        assert [one["time_s"] for one in watcher.between(0.5, 9.0, "use")] == [1.0, 2.0]
        watcher.forget(1.5)
        assert len(watcher.between(0.0, 9.0, "use")) == 1


def test_the_watching_process_ends_with_its_input(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    class Gpu:
        def __init__(self, index: int) -> None: ...
        def utilization(self) -> float:
            return 0.25

        def memory_busy(self) -> float:
            return 0.1

        def memory(self) -> tuple[int, int]:
            return 5, 10

        def power_w(self) -> float:
            return 90.0

        def pcie_bytes_per_s(self, *, sent: bool) -> float:
            time.sleep(0.001)
            return 2.0 if sent else 1.0

    def none(gpu: Any) -> None:
        raise InputError("no counters")

    enough = threading.Event()
    monkeypatch.setattr(watching, "Gpu", Gpu)
    monkeypatch.setattr(watching, "Counters", none)
    stdin = types.SimpleNamespace(buffer=types.SimpleNamespace(read=lambda: enough.wait(0.2)))
    monkeypatch.setattr(sys, "stdin", stdin)
    watching.main(str(tmp_path / "samples.jsonl"))
    lines = [json.loads(line) for line in (tmp_path / "samples.jsonl").read_text().splitlines()]
    assert {line["kind"] for line in lines} == {"use", "pcie"}
    pcie = next(line for line in lines if line["kind"] == "pcie")
    assert (pcie["received"], pcie["sent"]) == (1.0, 2.0)


# Runs


def test_a_run_has_the_twelve_figures_and_its_window(job: Job) -> None:
    run = measure_resources(job, device="cpu", watcher=Watcher(), window=QUICK)
    resources = run.provenance["resources"]
    assert set(resources["figures"]) == set(TWELVE)
    assert resources["period_s"] == QUICK.period_s
    assert run.measured["step_time_s"] > 0
    assert figures_of(run) is not None


def test_a_jobs_loader_is_carried_out_and_its_waiting_is_no_part_of_the_step(job: Job) -> None:
    paced = with_loader(job, loader_rate=100.0, loader_workers=2)
    run = measure_resources(paced, device="cpu", watcher=Watcher(), window=QUICK)
    assert run.job == paced
    assert "step_time_s" not in run.measured
    assert run.provenance["pace_s"] > 0.02


def test_one_model_is_watched_with_and_without_a_loader(job: Job) -> None:
    session = Session(job, "cpu", Watcher(), QUICK)
    alone, fed = session.measure(), session.measure(Loader(kind="slice"))
    assert alone.job.workload.training.loader_rate is None
    assert fed.job.workload.training.loader_workers == 1
    assert (fed.job.workload.training.loader_rate or 0) > 0
    assert fed.provenance["loader"] == "slice"


def test_several_devices_and_broken_models_are_refused_in_one_line(job: Job, tmp_path: Path) -> None:
    document = {**job.to_dict(), "plan": {}}
    document["cluster"] = {"device": "cpu", "cores_per_device": 1, "devices_per_node": 2}
    several = Job.read(document, base=tmp_path)
    with pytest.raises(UnsupportedJob, match="2 devices"):
        measure_resources(several, device="cpu", watcher=Watcher())
    (tmp_path / "models.py").write_text("def net(batch):\n    raise ValueError('broken')\n")
    with pytest.raises(ForetrainError, match="broken"):
        measure_resources(job, device="cpu", watcher=Watcher())


# Profiler and counters together


def series(device: list[float], received: list[float]) -> Series:
    count = len(device)
    return Series(
        ends_s=tuple(0.01 * (i + 1) for i in range(count)),
        device_utilization=tuple(device),
        memory_utilization=(0.5,) * count,
        network_rx=tuple(received),
        network_tx=(0.0,) * count,
    )


def test_gaps_that_the_profiler_made_are_taken_out_and_counters_fill_what_copies_leave() -> None:
    seen = series([0.4, 0.8, 0.0, 0.4], [1e9, 0.0, 0.0, 0.0])
    found = joined_series(seen, LinkRates(received=5e8, sent=5e7), slowed=1.5)
    assert found.device_utilization == pytest.approx((0.6, 1.0, 0.0, 0.6))
    assert found.mean("network_rx") == pytest.approx(5e8)
    assert found.mean("network_tx") == pytest.approx(5e7)
    assert found.network_rx[1] == found.network_rx[2] > 0
    assert joined_series(seen, None, slowed=1.0) == seen


def test_where_a_loader_sets_the_pace_the_profiler_slows_nothing() -> None:
    assert slowed_by(0.12, 0.1, None) == slowed_by(0.12, 0.1, 0.02) == pytest.approx(1.2)
    assert slowed_by(0.12, 0.1, 0.1) == 1.0
    assert slowed_by(9.0, 0.1, None) == 2.0


def test_link_rates_are_those_of_counters_or_else_of_readings() -> None:
    counters = {"pcie_received": [0.0, 4.0, 0.0, 6.0], "pcie_sent": [0.0, 1.0, 0.0, 3.0]}
    readings = {"received": [1.0, 3.0], "sent": [1.0, 1.0]}
    assert link_rates({"counters": counters, "pcie": readings}) == LinkRates(received=5.0, sent=2.0)
    assert link_rates({"pcie": readings}) == LinkRates(received=2.0, sent=1.0)
    assert link_rates({}) is None


def test_a_series_is_cut_to_whole_turns() -> None:
    whole = series([0.1] * 10, [0.0] * 10)
    cut = whole_turns(whole, 0.04)
    assert cut is not None
    assert cut.length_s == pytest.approx(0.08)
    assert whole_turns(whole, 0.2) is None
