"""Tests the recorder: what it measures and shows, and that a run is written whatever happens."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import foretrain.callbacks.recorder as recording
from foretrain.api import make_job
from foretrain.callbacks import Recorder
from foretrain.callbacks.expectation import expected
from foretrain.callbacks.jobs import PartialJob, device_name, optimizer_name, whole_job
from foretrain.callbacks.timing import RunningMedian
from foretrain.errors import ForetrainError, InputError
from foretrain.evaluate import evaluate
from foretrain.forecast import Estimate
from foretrain.measure.store import open_runs
from foretrain.measure.tasks import host
from foretrain.run import Run, read_runs

MODEL = """
import torch

def net(batch):
    from torch.nn import Flatten, Linear, ReLU, Sequential

    return Sequential(Flatten(), Linear(192, 16), ReLU(), Linear(16, 10))
"""
JOB = """
[model]
source = "python"
name = "net.py:net"

[training]
global_batch = 16
image = 8
classes = 10
samples = 160
epochs = 2

[cluster]
device = "cpu"
cores_per_device = 1
"""


class Clock:
    """Time that passes when it is told to."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def job_file(tmp_path: Path) -> Path:
    (tmp_path / "net.py").write_text(MODEL)
    (tmp_path / "job.toml").write_text(JOB)
    return tmp_path / "job.toml"


class Warnings:
    """What was warned of so far."""

    def __init__(self, log: pytest.LogCaptureFixture) -> None:
        self._log = log

    def __getitem__(self, position: int) -> str:
        return self._log.messages[position]

    def __len__(self) -> int:
        return len(self._log.messages)


@pytest.fixture
def warnings(caplog: pytest.LogCaptureFixture) -> Iterator[Warnings]:
    with caplog.at_level(logging.WARNING, logger="foretrain.callbacks"):
        yield Warnings(caplog)


def recorder(job: Any, clock: Clock, runs: Path | str | None = None, **options: Any) -> Recorder:
    where = runs or Path(job).parent / "runs.jsonl"
    return Recorder(where, job=job, clock=clock, **{"predictor": None, "show": lambda line: None, **options})


def take(recorder: Recorder, clock: Clock, *times_s: float, wait_s: float = 0.0) -> None:
    for time_s in times_s:
        clock.now += wait_s
        recorder.step_begin()
        clock.now += time_s
        recorder.step_end()


def only_run(path: Path) -> Run:
    [(_, run)] = read_runs(path)
    return run


def test_a_training_becomes_a_run_with_the_median_of_its_steps(job_file: Path, clock: Clock) -> None:
    own = recorder(job_file, clock)
    own.begin()
    for _ in range(2):
        own.epoch_begin()
        take(own, clock, 0.9, 0.5, 0.4, *[0.1] * 7, wait_s=0.05)
        own.epoch_end()
        clock.now += 3.0
    own.end()
    run = only_run(job_file.parent / "runs.jsonl")
    assert run.measured["step_time_s"] == pytest.approx(0.1)
    assert run.measured["samples_per_s"] == pytest.approx(160)
    assert run.measured["epoch_time_s"] == pytest.approx(3.0)
    assert run.measured["total_time_s"] == pytest.approx(12.0)
    assert run.provenance["source"] == "foretrain callback"
    assert {"host", "device", "started", "load_average", "host_cores"} <= set(run.provenance)
    assert (run.provenance["steps"], run.provenance["timed_steps"]) == (20, 17)
    assert "interrupted" not in run.provenance


def test_the_machine_is_told_in_the_words_of_campaigns_and_without_its_name(
    job_file: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("platform.node", lambda: "a-host-name")
    own = recorder(job_file, clock)
    own.begin()
    take(own, clock, *[0.1] * 5)
    own.end()
    written = job_file.parent / "runs.jsonl"
    run = only_run(written)
    assert run.provenance["host"] == host()
    assert run.provenance["device"] == f"cpu, {host()}"
    assert run.job.cluster.host == host()
    assert "a-host-name" not in written.read_text()


def test_steps_seen_by_their_ends_alone(job_file: Path, clock: Clock) -> None:
    with recorder(job_file, clock) as own:
        for _ in range(20):
            clock.now += 0.2
            own.step()
    assert only_run(job_file.parent / "runs.jsonl").measured["step_time_s"] == pytest.approx(0.2)


def test_a_short_batch_counts_but_is_not_timed(job_file: Path, clock: Clock) -> None:
    own = recorder(job_file, clock)
    own.begin()
    for samples, time_s in ((16, 9.0), (16, 9.0), (16, 9.0), (16, 0.2), (3, 0.01), (5, 0.01)):
        own.step_begin()
        clock.now += time_s
        own.step_end(samples=samples)
    run = own.end()
    assert run is not None
    assert run.measured["step_time_s"] == pytest.approx(0.2)
    assert run.provenance["steps"] == 6


def test_a_training_of_another_length_than_the_job_says_has_no_total_time(
    job_file: Path, clock: Clock
) -> None:
    own = recorder(job_file, clock)
    own.begin()
    take(own, clock, *[0.1] * 12)
    run = own.end()
    assert run is not None
    assert "step_time_s" in run.measured
    assert "total_time_s" not in run.measured


def test_a_job_without_a_length_gets_that_of_the_training(tmp_path: Path, clock: Clock) -> None:
    own = recorder(
        make_job("resnet18", device="cpu", cores_per_device=1, batch=4), clock, tmp_path / "runs.jsonl"
    )
    own.begin()
    take(own, clock, *[0.1] * 12)
    own.end()
    run = only_run(tmp_path / "runs.jsonl")
    assert run.job.workload.training.steps == 12
    assert run.measured["total_time_s"] == pytest.approx(1.2)


@pytest.mark.parametrize("error", [KeyboardInterrupt(), RuntimeError("out of memory"), SystemExit(1)])
def test_a_training_that_fails_is_recorded_as_far_as_it_went(
    job_file: Path, clock: Clock, error: BaseException
) -> None:
    def train() -> None:
        with recorder(job_file, clock) as own:
            take(own, clock, *[0.1] * 6)
            raise error

    with pytest.raises(type(error)):
        train()
    run = only_run(job_file.parent / "runs.jsonl")
    assert run.measured["step_time_s"] == pytest.approx(0.1)
    assert "total_time_s" not in run.measured
    assert run.provenance["interrupted"].startswith(type(error).__name__)


def test_a_run_is_written_once_and_one_per_training(job_file: Path, clock: Clock) -> None:
    own = recorder(job_file, clock)
    own.begin()
    take(own, clock, *[0.1] * 6)
    own.begin()
    take(own, clock, *[0.2] * 20)
    assert own.end() is not None
    assert own.end() is None
    first, second = (run for _, run in read_runs(job_file.parent / "runs.jsonl"))
    assert first.provenance["interrupted"] == "another training began"
    assert second.measured["step_time_s"] == pytest.approx(0.2)


def test_hooks_without_a_training_do_nothing(job_file: Path, clock: Clock) -> None:
    own = recorder(job_file, clock)
    own.step_begin()
    own.step_end()
    own.epoch_begin()
    own.epoch_end()
    own.note({"power_w": 1.0})
    assert own.end() is None
    assert not (job_file.parent / "runs.jsonl").exists()


def test_only_the_main_process_records(job_file: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "1")
    with recorder(job_file, clock) as own:
        take(own, clock, *[0.1] * 20)
    assert not (job_file.parent / "runs.jsonl").exists()


def test_a_forked_worker_does_not_write(job_file: Path, clock: Clock) -> None:
    own = recorder(job_file, clock)
    own.begin()
    take(own, clock, *[0.1] * 20)
    own._process = os.getpid() + 1
    assert own.end() is None
    assert not (job_file.parent / "runs.jsonl").exists()


def test_nothing_measured_is_nothing_written(job_file: Path, clock: Clock, warnings: Warnings) -> None:
    own = recorder(job_file, clock)
    own.begin()
    own.end("stopped at once")
    assert not (job_file.parent / "runs.jsonl").exists()
    assert "nothing was recorded" in warnings[0]


def test_runs_go_to_a_database_too(job_file: Path, clock: Clock) -> None:
    store = f"sqlite:///{job_file.parent / 'store.db'}"
    own = recorder(job_file, clock, store)
    own.begin()
    take(own, clock, *[0.1] * 20)
    own.end()
    [(_, run)] = open_runs(store)
    assert run.measured["step_time_s"] == pytest.approx(0.1)


def test_a_models_path_starts_at_the_runs_file(job_file: Path, clock: Clock) -> None:
    runs = job_file.parent / "kept" / "here" / "runs.jsonl"
    own = recorder(job_file, clock, runs)
    own.begin()
    take(own, clock, *[0.1] * 20)
    own.end()
    assert only_run(runs).job.workload.model.name == "../../net.py:net"


@pytest.mark.parametrize("name", ["file/runs.jsonl", "folder", "runs.jsonl.zst"])
def test_a_target_that_cannot_be_written_is_told_before_the_training(
    job_file: Path, clock: Clock, name: str
) -> None:
    (job_file.parent / "file").write_text("")
    (job_file.parent / "folder").mkdir()
    with pytest.raises(InputError, match=name.split("/")[0]):
        recorder(job_file, clock, job_file.parent / name).begin()


def test_checking_a_target_leaves_no_file(job_file: Path, clock: Clock) -> None:
    before = set(job_file.parent.iterdir())
    recorder(job_file, clock).begin()
    assert set(job_file.parent.iterdir()) == before


def test_a_run_that_cannot_be_added_is_put_aside(
    job_file: Path, clock: Clock, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, warnings: Warnings
) -> None:
    aside = tmp_path / "aside"
    aside.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(aside))
    own = recorder(job_file, clock)
    own.begin()
    take(own, clock, *[0.1] * 20)
    (job_file.parent / "runs.jsonl").mkdir()
    own.end()
    [kept] = aside.iterdir()
    assert only_run(kept).measured["step_time_s"] == pytest.approx(0.1)
    assert str(kept) in warnings[0]


class Gpu:
    """A device that works on what the host asks of it, which takes 0.01 s to ask, one after the other."""

    def __init__(self, clock: Clock) -> None:
        self.clock, self.busy_until, self.waits = clock, 0.0, 0

    def Event(self, *, enable_timing: bool) -> Mark:  # noqa: N802
        assert enable_timing
        return Mark(self)

    def launch(self, busy_s: float = 0.1) -> None:
        self.clock.now += 0.01
        self.busy_until = max(self.busy_until, self.clock.now) + busy_s

    def reset_peak_memory_stats(self) -> None: ...

    def max_memory_allocated(self) -> int:
        return 3 * 2**30

    def max_memory_reserved(self) -> int:
        return 4 * 2**30

    def get_device_name(self) -> str:
        return "NVIDIA H100 80GB HBM3"


class Mark:
    """An event of a Gpu."""

    def __init__(self, gpu: Gpu) -> None:
        self.gpu, self.at = gpu, 0.0

    def record(self) -> None:
        self.at = max(self.gpu.busy_until, self.gpu.clock.now)

    def query(self) -> bool:
        return self.at <= self.gpu.clock.now

    def synchronize(self) -> None:
        self.gpu.waits += 1
        self.gpu.clock.now = max(self.gpu.clock.now, self.at)

    def elapsed_time(self, later: Mark) -> float:
        return 1e3 * (later.at - self.at)


@pytest.mark.parametrize(
    ("busy_s", "data_s", "step_s"),
    [
        (0.1, 0.0, 0.1),  # the device is behind: what the host does is hidden
        (0.1, 0.05, 0.1),  # so is the wait for data
        (0.001, 0.0, 0.01),  # the device waits for the host
        (0.001, 0.05, 0.011),  # and for data, which is no part of a step
    ],
)
def test_on_a_gpu_steps_are_timed_by_its_clock_and_nothing_waits(
    tmp_path: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch, busy_s: float, data_s: float, step_s: float
) -> None:
    gpu = Gpu(clock)
    monkeypatch.setattr(recording, "cuda", lambda: gpu)
    own = recorder(make_job("resnet18", device="h100", batch=8), clock, tmp_path / "runs.jsonl")
    own.begin()
    for _ in range(43):
        clock.now += data_s
        own.step_begin()
        gpu.launch(busy_s)
        own.step_end()
    assert gpu.waits == 0
    run = own.end()
    assert run is not None
    assert run.measured["step_time_s"] == pytest.approx(step_s)
    assert run.provenance["timed_steps"] == 40
    assert run.measured["peak_memory_bytes"] == 3 * 2**30
    assert run.measured["reserved_memory_bytes"] == 4 * 2**30
    assert run.provenance["device"] == "NVIDIA H100 80GB HBM3"


@pytest.mark.parametrize(
    ("setting", "recorded"),
    [("expandable_segments:True", "expandable_segments:True"), ("backend:cudaMallocAsync", None), ("", None)],
)
def test_on_a_gpu_the_settings_of_the_allocator_are_recorded(
    tmp_path: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch, setting: str, recorded: str | None
) -> None:
    monkeypatch.setattr(recording, "cuda", lambda: Gpu(clock))
    monkeypatch.delenv("PYTORCH_ALLOC_CONF", raising=False)
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", setting)
    own = recorder(make_job("resnet18", device="h100", batch=8), clock, tmp_path / "runs.jsonl")
    own.begin()
    take(own, clock, *[0.1] * 5)
    run = own.end()
    assert run is not None
    assert run.job.workload.training.allocator == recorded


# The forecast


def test_predicted_and_actual_time_left_stand_side_by_side(
    job_file: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        recording, "expected", lambda job, predictor: {"step_time_s": Estimate(0.25, 0.2, 0.4)}
    )
    lines: list[str] = []
    own = recorder(job_file, clock, predictor="deletepop", show=lines.append, every_s=1.0)
    own.begin()
    take(own, clock, 0.1, 0.1, 0.1, *[0.3] * 7)
    assert lines == [
        "forecast: 250 ms a step, interval 200 ms to 400 ms; 5 s for 20 steps",
        "step 6 of 20: 300 ms a step (forecast 250 ms, interval "
        "200 ms to 400 ms); 4.2 s left (forecast said 3.5 s)",
        "step 10 of 20: 300 ms a step (forecast 250 ms, interval "
        "200 ms to 400 ms); 3 s left (forecast said 2.5 s)",
    ]
    take(own, clock, *[0.3] * 10)
    own.end()
    assert lines[-1].startswith("20 steps, 300 ms a step (forecast 250 ms), 5.4 s in all; recorded in ")


def test_a_forecast_that_fails_is_a_warning_and_the_run_is_recorded(
    job_file: Path, clock: Clock, warnings: Warnings
) -> None:
    own = recorder(job_file, clock, predictor="crystal-ball")
    own.begin()
    take(own, clock, *[0.1] * 20)
    own.end()
    assert len(warnings) == 1
    assert warnings[0].startswith("no forecast (")
    assert "crystal-ball" in warnings[0]
    assert only_run(job_file.parent / "runs.jsonl").measured["step_time_s"] == pytest.approx(0.1)


def test_a_screen_that_fails_does_not_stop_the_training(
    job_file: Path, clock: Clock, warnings: Warnings
) -> None:
    def show(line: str) -> None:
        raise OSError("the terminal is gone")

    own = recorder(job_file, clock, show=show, every_s=0.1)
    own.begin()
    take(own, clock, *[0.1] * 20)
    assert own.end() is not None
    assert len(warnings) == 1
    assert "the terminal is gone" in warnings[0]


def test_the_forecast_is_that_of_predict_and_runs_are_scored(job_file: Path, clock: Clock) -> None:
    own = recorder(job_file, clock, predictor="roofline")
    own.begin()
    take(own, clock, *[0.1] * 20)
    own.end()
    path = job_file.parent / "runs.jsonl"
    run = only_run(path)
    scored = {row.quantity: row for row in evaluate([path], predictors=["roofline"]).runs}
    assert scored["step_time_s"].predicted == pytest.approx(own.forecast["step_time_s"].median)
    assert scored["total_time_s"].measured == pytest.approx(2.0)
    assert run.provenance["forecast"] == {
        "predictor": "roofline",
        "step_time_s": own.forecast["step_time_s"].median,
    }


def test_a_forecast_that_takes_too_long_is_given_up() -> None:
    with pytest.raises(ForetrainError, match="no answer within 0 s"):
        expected(make_job("resnet18", device="h100"), "roofline", patience_s=0.01)


# The end of a process

SCRIPT = """
import os, signal, sys
from foretrain.callbacks import Recorder

class Owner: ...

owner, recorder = Owner(), Recorder(sys.argv[1], job=sys.argv[2], predictor=None)
recorder.end_with(owner)
recorder.begin()
for _ in range(8):
    recorder.step_begin()
    recorder.step_end()
if sys.argv[3] == "term":
    os.kill(os.getpid(), signal.SIGTERM)
raise RuntimeError("half way")
"""


@pytest.mark.parametrize(
    ("how", "code", "said"), [("term", -15, "SIGTERM"), ("fail", 1, "the training did not end")]
)
def test_a_process_that_ends_leaves_its_run(job_file: Path, how: str, code: int, said: str) -> None:
    runs = job_file.parent / "runs.jsonl"
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(runs), str(job_file), how],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == code, done.stderr
    run = only_run(runs)
    assert run.provenance["interrupted"] == said
    assert run.provenance["steps"] == 8


# Times


@given(st.lists(st.floats(0.001, 10.0), min_size=1, max_size=300))
def test_times_are_bounded_and_their_median_is_one_of_them(values: list[float]) -> None:
    times = RunningMedian(room=16)
    for value in values:
        times.add(value)
    assert len(times._kept) <= 16
    assert times.count == len(values)
    assert times.low == min(values) <= (times.median or 0) <= max(values) == times.high


def test_the_median_of_many_times_is_near_that_of_all() -> None:
    times = RunningMedian(room=64)
    for i in range(10_000):
        times.add(float(i))
    assert times.median == pytest.approx(5_000, rel=0.1)


# What is found


@pytest.mark.parametrize(
    ("driver", "memory_gib", "name"),
    [
        ("NVIDIA H200", 139.8, "h200-sxm-141gb"),
        ("NVIDIA H100 80GB HBM3", 79.1, "h100-sxm-80gb"),
        ("NVIDIA H100 PCIe", 79.1, "h100-pcie-80gb"),
        ("NVIDIA H100 NVL", 93.1, "h100-nvl-94gb"),
        ("NVIDIA A100-SXM4-40GB", 39.4, "a100-sxm-40gb"),
        ("NVIDIA A100-PCIE-40GB", 39.4, "a100-pcie-40gb"),
        ("NVIDIA A100 80GB PCIe", 79.1, "a100-pcie-80gb"),
        ("Tesla V100-SXM2-16GB", 15.8, "v100-sxm-16gb"),
        ("Tesla V100-SXM2-32GB", 31.7, "v100-sxm-32gb"),
        ("Tesla P100-PCIE-16GB", 15.9, "p100-pcie-16gb"),
        ("Tesla T4", 14.6, "t4"),
        ("NVIDIA A10G", 22.3, "a10g"),
        ("NVIDIA L4", 22.0, "l4"),
        ("NVIDIA L40S", 44.4, "l40s"),
        ("NVIDIA GeForce RTX 3090", 23.7, "rtx-3090"),
        ("NVIDIA GeForce RTX 3090 Ti", 23.7, "rtx-3090-ti"),
        ("NVIDIA GeForce RTX 2080 Ti", 10.8, "rtx-2080-ti"),
        ("NVIDIA RTX A6000", 47.5, "rtx-a6000"),
        ("Quadro RTX 6000", 23.6, "rtx-6000"),
        ("NVIDIA RTX 6000 Ada Generation", 47.4, "rtx-6000-ada"),
        ("NVIDIA RTX PRO 6000 Blackwell Server Edition", 94.9, "rtx-pro-6000"),
        ("NVIDIA GeForce RTX 3080 Laptop GPU", 15.7, "rtx-3080-mobile"),
        ("AMD Instinct MI300X", 191.7, "mi300x"),
        ("NVIDIA B200", 178.4, "b200"),
        ("NVIDIA GH200 480GB", 94.5, "gh200-96gb"),
    ],
)
def test_what_the_driver_says_is_found_in_the_catalogue(driver: str, memory_gib: float, name: str) -> None:
    assert device_name(driver, memory_gib * 2**30) == name


def test_a_gpu_that_is_not_in_the_catalogue_is_one_line() -> None:
    with pytest.raises(
        InputError,
        match=r"cluster\.device: the GPU 'NVIDIA A100 MIG 1g\.5gb' with 5 GiB is not in the catalogue",
    ):
        device_name("NVIDIA A100 MIG 1g.5gb", 4.75 * 2**30)


def test_optimizers_by_the_names_of_jobs() -> None:
    torch = pytest.importorskip("torch")
    weights = [torch.nn.Parameter(torch.zeros(2))]

    class Wrapper:
        optimizer = torch.optim.AdamW(weights, fused=True)

    assert optimizer_name(Wrapper()) == "adamw-fused"
    assert optimizer_name(torch.optim.Adam(weights)) == "adam"
    assert optimizer_name(torch.optim.SGD(weights)) == "sgd-plain"
    assert optimizer_name(torch.optim.SGD(weights, momentum=0.9)) == "sgd"


FOUND: dict[str, Any] = {
    "training": {"global_batch": 64, "optimizer": "adamw", "samples": 640, "epochs": 3.0},
    "cluster": {"device": "cpu", "cores_per_device": 2, "devices_per_node": 2},
    "plan": {"micro_batch": 16},
}


def test_what_a_job_leaves_out_is_filled_in() -> None:
    job = whole_job(PartialJob.read("resnet18"), FOUND)
    assert job.workload.model.label == "resnet18"
    assert job.workload.training.global_batch == 64
    assert job.workload.training.total_steps == 30
    assert (job.plan.data, job.micro_batch, job.accumulation) == (2, 16, 2)


def test_what_a_job_says_stands() -> None:
    tables: dict[str, dict[str, Any]] = {
        "model": {"source": "timm", "name": "resnet18"},
        "training": {"optimizer": "sgd", "steps": 7},
        "cluster": {"device": "h100"},
    }
    job = whole_job(PartialJob.read(tables), FOUND)
    assert job.workload.training.optimizer == "sgd"
    assert (job.workload.training.steps, job.workload.training.epochs, job.workload.training.samples) == (
        7,
        None,
        640,
    )
    assert job.cluster.device.name == "h100-sxm-80gb"
    assert job.cluster.world_size == 1


def test_a_whole_job_is_taken_as_it_is_but_for_its_length() -> None:
    given = make_job("resnet18", device="h100", batch=8)
    job = whole_job(PartialJob.read(given), FOUND)
    assert job.cluster == given.cluster
    assert job.workload.training.optimizer == given.workload.training.optimizer
    assert job.workload.training.samples == 640


def test_a_job_that_contradicts_the_training_is_told(
    tmp_path: Path, clock: Clock, warnings: Warnings
) -> None:
    recorder(
        make_job("resnet18", device="cpu", cores_per_device=2, batch=8), clock, tmp_path / "runs.jsonl"
    ).begin(FOUND)
    assert warnings[0].startswith("training.global_batch: the job says 8, the training uses 64")
    assert warnings[1].startswith("cluster: the job has 1 devices, the training uses 2")


@pytest.mark.parametrize(
    ("job", "message"),
    [
        (None, "job: missing; say which model is trained"),
        ({"model": {"source": "timm", "name": "resnet18"}}, "job: no cluster in it and none found"),
        ({"model": "resnet18"}, "job.model: 'resnet18' is not a table"),
        ("nowhere.toml", "nowhere.toml: cannot be read"),
        ({"modle": {}}, "modle"),
    ],
)
def test_a_job_that_cannot_be_completed_is_one_line(
    tmp_path: Path, clock: Clock, job: Any, message: str
) -> None:
    found = (
        {"training": {"global_batch": 4}}
        if not (isinstance(job, dict) and "modle" in job)
        else {**FOUND, "model": {"source": "timm", "name": "a"}}
    )
    with pytest.raises(InputError, match=message):
        recorder(job, clock, tmp_path / "runs.jsonl").begin(found)
