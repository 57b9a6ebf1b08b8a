"""Records every training of Ray's ``TorchTrainer``; the job names the model, Ray knows the workers.

    run_config = RunConfig(callbacks=[ForetrainCallback("runs.jsonl", job="job.toml", steps_per_report=100)])

Workers time the stretch from one ``ray.train.report`` to the next, without the time that a report itself
waits: Ray collects reports every two seconds and holds up a worker that reports more often. The controller
reads the workers' times before they are shut down.
"""

from __future__ import annotations

import contextlib
import os
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from foretrain.callbacks.jobs import JobLike, cluster_here, cuda
from foretrain.callbacks.recorder import Recorder, log
from foretrain.callbacks.timing import RunningMedian
from foretrain.errors import InputError, first_line, invalid, libraries_named

with libraries_named("ForetrainCallback", "ray"):
    import ray
    from ray.train.v2._internal.execution import callback as hooks

_ANSWER_S = 30.0


class ForetrainCallback(
    hooks.ReportCallback,  # type: ignore[misc]
    hooks.WorkerGroupCallback,  # type: ignore[misc]
    hooks.ControllerCallback,  # type: ignore[misc]
    hooks.TrainContextCallback,  # type: ignore[misc]
):
    """Records every ``fit`` into ``runs``, a path on the machine of the driver or a database.

    A report stands for ``steps_per_report`` steps. Where workers report the seconds of a step themselves,
    ``time_key`` names the metric. ``job`` says the model, the batch and the size of the input; the cluster
    comes from Ray where the job leaves it out. Further options are those of ``Recorder``. Ray hands callbacks
    other than its ``UserCallback`` to the controller as they are: only those see the end.
    """

    def __init__(
        self,
        runs: str | os.PathLike[str],
        job: JobLike,
        *,
        steps_per_report: int = 1,
        time_key: str | None = None,
        **options: Any,
    ) -> None:
        if steps_per_report < 1:
            raise invalid("steps_per_report", steps_per_report, "1 or more")
        self.recorder = Recorder(runs, job=job, framework=f"ray {ray.__version__}", **options)
        if not self.recorder.names_model:
            raise InputError("job: it does not say which model is trained; give job.model")
        self.recorder.target.check()
        self._steps_per_report, self._time_key, self._restarts = steps_per_report, time_key, 0

    # In the workers

    @contextlib.contextmanager
    def on_report(self) -> Iterator[None]:
        _stretches.end(self._steps_per_report, self.recorder.warm_up)
        yield
        _stretches.begin()

    # In the controller

    def after_worker_group_start(self, worker_group: Any) -> None:
        if self.recorder.job is not None:
            self._restarts += 1
            return
        workers = worker_group.get_workers()
        nodes = len({worker.metadata.node_id for worker in workers})
        cluster = worker_group.execute_single(0, _cluster, len(workers), nodes, dict(workers[0].resources))
        self.recorder.begin({"cluster": cluster}, main=True)

    def after_worker_group_training_start(self, worker_group: Any) -> None:
        if not self._restarts:
            self.recorder.start()

    def after_report(self, training_report: Any, metrics: Sequence[Mapping[str, Any]]) -> None:
        values = [worker.get(self._time_key or "") for worker in metrics]
        times_s = [value for value in values if isinstance(value, int | float)]
        time_s = statistics.median(times_s) * self._steps_per_report if times_s else None
        self.recorder.steps(self._steps_per_report, time_s=time_s)

    def before_worker_group_shutdown(self, worker_group: Any) -> None:
        """Workers may be gone by now; what they had measured is gone with them."""
        self.recorder.stop()
        try:
            facts = ray.get(worker_group.execute_async(_facts), timeout=_ANSWER_S)
        except Exception as error:
            log.warning("the workers' step times are not known (%s)", first_line(error))
            return
        self._note(facts)

    def after_controller_finish(self, result: Any) -> None:
        """End with what went wrong in a worker, which that worker's own error tells."""
        failures = getattr(result.error, "worker_failures", None)
        self.recorder.end(next(iter(failures.values())) if failures else result.error)

    def before_controller_abort(self) -> None:
        self.recorder.end("aborted")

    def _note(self, facts: Sequence[Mapping[str, float]]) -> None:
        """The median of all workers, as they wait for one another and each shows the step of the job."""
        times = [worker["step_time_s"] for worker in facts if "step_time_s" in worker]
        figures = ("peak_memory_bytes", "reserved_memory_bytes")
        measured = {name: max(worker[name] for worker in facts) for name in figures if name in facts[0]}
        if times and not self._time_key:
            measured["step_time_s"] = statistics.median(times)
        restarts = {"restarts": self._restarts} if self._restarts else {}
        timed_reports = min(worker["timed_reports"] for worker in facts)
        self.recorder.note(measured, worker_step_times_s=times, timed_reports=timed_reports, **restarts)


class _Stretches:
    """The times of one worker between its reports, but for the first, which hold the start and warming up."""

    def __init__(self) -> None:
        self.times, self._reports, self._began = RunningMedian(), 0, 0.0

    def end(self, steps: int, warm_up: int) -> None:
        if self._reports and self._reports * steps >= warm_up:
            self.times.add((_now() - self._began) / steps)
        self._reports += 1

    def begin(self) -> None:
        self._began = _now()


_stretches = _Stretches()


def _now() -> float:
    """The time when the device has done what it was asked to."""
    if (gpu := cuda()) is not None:
        gpu.synchronize()
    return time.perf_counter()


def _facts() -> dict[str, float]:
    """Gather the facts of one worker: seconds a step, the stretches behind that, and memory."""
    facts: dict[str, float] = {"timed_reports": _stretches.times.count}
    if (step := _stretches.times.median) is not None:
        facts["step_time_s"] = step
    if (gpu := cuda()) is not None:
        facts["peak_memory_bytes"] = float(gpu.max_memory_allocated())
        facts["reserved_memory_bytes"] = float(gpu.max_memory_reserved())
    return facts


def _cluster(workers: int, nodes: int, resources: Mapping[str, float]) -> dict[str, Any]:
    """The cluster section as a worker sees it."""
    cluster = cluster_here(workers, nodes, on_gpu=bool(resources.get("GPU")))
    if cluster["device"] == "cpu":
        cluster["cores_per_device"] = max(1, int(resources.get("CPU", 1)))
    return cluster
