"""Tests the workers of a server: limits, refusals beyond what may wait, and ends that leave nothing behind."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from typing import Any

import pytest

from foretrain.errors import InputError
from foretrain.estimate import Estimate
from foretrain.serve.errands import Errands
from foretrain.serve.metrics import ServerMetrics
from foretrain.serve.pool import Busy, NeedsTorchWorker, TaskRefused, WorkerPool
from foretrain.serve.safety import Folders, is_path, names_loopback, shows_token

SHORT: dict[str, Any] = {
    "do": "schedule",
    "request": {"cluster": "1x8xv100", "generate": "jobs=2", "policies": ["fifo"]},
    "processes": 1,
}
LONG: dict[str, Any] = {**SHORT, "request": {**SHORT["request"], "generate": "jobs=200000", "seeds": 50}}


def pool(**changes: Any) -> WorkerPool:
    usual = {"torch": False, "waiting": 1, "seconds": 60.0, "memory_bytes": 4 * 2.0**30, "field": "job"}
    return WorkerPool(1, **{**usual, **changes})


def test_a_task_is_done_in_another_process_and_the_worker_kept() -> None:
    async def main() -> None:
        workers = pool()
        first, second = json.loads(await workers.run(SHORT)), json.loads(await workers.run(SHORT))
        assert first == second
        assert len(workers._workers) == 1
        await workers.close()

    asyncio.run(main())


def test_what_needs_torch_is_told_and_what_is_wrong_has_its_status() -> None:
    async def main() -> None:
        workers = pool()
        job = {"model": "resnet18", "options": {"image": 32, "batch": 2}}
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("FORETRAIN_CACHE", "/nowhere")
            with pytest.raises(NeedsTorchWorker):
                await workers.run({"do": "predict", "request": job, "where": "roofline"})
        wrong = {**SHORT, "request": {**SHORT["request"], "cluster": "many"}}
        with pytest.raises(TaskRefused, match="cluster: 'many' is not") as refused:
            await workers.run(wrong)
        assert refused.value.status == 400
        await workers.close()

    asyncio.run(main())


def test_beyond_what_may_wait_tasks_are_refused_and_limits_hold() -> None:
    async def main() -> None:
        workers = pool(seconds=4.0)
        begun = [asyncio.create_task(workers.run(LONG)) for _ in range(2)]
        await asyncio.sleep(0.1)
        with pytest.raises(Busy, match="2 requests run or wait already"):
            await workers.run(SHORT)
        with pytest.raises(TaskRefused, match="job: took longer than 4 s, and was ended"):
            await begun[0]
        begun[1].cancel()
        with pytest.raises(asyncio.CancelledError):
            await begun[1]
        assert workers.asked == 0
        assert workers._workers == []
        await workers.close()

    asyncio.run(main())


def test_the_process_that_serves_has_no_torch() -> None:
    code = "import sys, foretrain.serve.app; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_a_cancelled_errand_leaves_no_process() -> None:
    async def main() -> None:
        workers, errands = pool(), Errands(most=1, kept=1)
        errand = errands.begin("schedule", lambda hears: workers.run(LONG, hears))
        with pytest.raises(Busy):
            errands.begin("schedule", lambda hears: workers.run(LONG, hears))
        while errand.state == "waiting":
            await asyncio.sleep(0.01)
        [worker] = workers._workers
        await errands.cancel(errand)
        assert errand.state == "cancelled"
        with pytest.raises(ProcessLookupError):
            os.kill(worker.process.pid, 0)
        await workers.close()

    asyncio.run(main())


@pytest.mark.parametrize(
    "name",
    ["/etc/passwd", "~/x", "a/../b", "x.py:f", "C:\\x", "m.ONNX", "graph.json.zst", "file:x", "run.sh"],
)
def test_what_may_be_a_file_is_taken_for_one(name: str) -> None:
    assert is_path(name)
    with pytest.raises(InputError, match="models in files are not allowed"):
        Folders().checked_model(name)


def test_tokens_and_hosts_are_compared_whole() -> None:
    assert shows_token("Bearer secret", "secret")
    assert not any(shows_token(one, "secret") for one in (None, "", "secret", "Bearer secre", "Basic secret"))
    assert all(map(names_loopback, ("127.0.0.1:80", "localhost", "[::1]:9", "LOCALHOST:1")))
    assert not any(map(names_loopback, (None, "", "127.0.0.1.evil.example", "evil.example", "[bad")))


def test_forecasts_against_measured_runs_are_counted() -> None:
    metrics = ServerMetrics()
    forecast = Estimate(median=2.0, low=1.5, high=3.0)
    for measured in (2.0, 1.0):
        metrics.score("step_time_s", "deletepop", measured, forecast)
    assert metrics.errors.value("step_time_s", "deletepop") == 1.0
    assert metrics.covered.value("step_time_s", "deletepop") == 1.0
    lines = metrics.text().splitlines()
    labels = 'quantity="step_time_s",predictor="deletepop"'
    assert f'foretrain_forecast_ratio_bucket{{{labels},le="1.0"}} 1' in lines
    assert f"foretrain_forecast_ratio_count{{{labels}}} 2" in lines
