"""Records a Run of any training loop and compares its forecast with what happens."""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import logging
import os
import signal
import sys
import threading
import time
import weakref
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self, final

from foretrain.callbacks.expectation import expected
from foretrain.callbacks.jobs import (
    JobLike,
    PartialJob,
    Tables,
    allocator_here,
    cuda,
    differences,
    whole_job,
    with_training,
)
from foretrain.callbacks.posting import Posting
from foretrain.callbacks.target import Target
from foretrain.callbacks.timing import ClockTimer, DeviceTimer, RunningMedian
from foretrain.errors import first_line, invalid
from foretrain.forecast import Estimate
from foretrain.job import Job
from foretrain.measure.tasks import host
from foretrain.predictors import DEFAULT
from foretrain.quantities import QUANTITIES
from foretrain.run import Run
from foretrain.units import format_seconds

log = logging.getLogger("foretrain.callbacks")

WARM_UP_STEPS = 3
Show = Callable[[str], None]


def to_stderr(line: str) -> None:
    print(f"foretrain: {line}", file=sys.stderr, flush=True)


@final
class Recorder:
    """Records one Run of a training and shows predicted against actual time left.

    ``runs`` is a ``.jsonl`` file or a database. ``job`` is a Job, a job file, a model's name or the tables of
    a job; what it leaves out is filled in from what ``begin`` is told. ``predictor`` is a name or a folder,
    or None for no forecast. ``show`` gets a line every ``every_s`` seconds. The first ``warm_up`` steps are
    not timed. On a GPU they are timed by the device's clock, and nothing waits for it. A run that is written
    is posted to ``server`` too ($FORETRAIN_SERVER where it is not given).

    >>> with Recorder("runs.jsonl", job="job.toml") as recorder:  # doctest: +SKIP
    ...     for batch in batches:
    ...         train(batch)
    ...         recorder.step()
    """

    def __init__(
        self,
        runs: str | os.PathLike[str],
        *,
        job: JobLike | None = None,
        predictor: str | Path | None = DEFAULT,
        show: Show = to_stderr,
        every_s: float = 30.0,
        warm_up: int = WARM_UP_STEPS,
        server: str | None = None,
        framework: str = "",
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        if warm_up < 0:
            raise invalid("warm_up", warm_up, "0 or more steps")
        self.target, self.framework = Target(runs), framework
        self._posting = Posting.to(server)
        self.job: Job | None = None
        """The job as it is recorded; known once the training has begun."""
        self.forecast: Mapping[str, Estimate] = {}
        self._partial, self._predictor = PartialJob.read(job), predictor
        self.warm_up, self._show, self._every_s, self._clock = warm_up, show, every_s, clock
        self._open, self._process = False, 0
        self._sigterm: Any = None

    @property
    def names_model(self) -> bool:
        """Whether the job that was given says which model is trained."""
        return self._partial.names_model

    # The hooks of a training loop

    def begin(
        self,
        observed: Tables | None = None,
        *,
        total_steps: int | None = None,
        done: int = 0,
        main: bool | None = None,
    ) -> None:
        """The training begins.

        ``observed`` is what the framework knows of the job, ``done`` the steps of an earlier part of it. What
        stands in the way of a record is an InputError now. A process that is not the ``main`` one (rank 0)
        records nothing.
        """
        self.end("another training began")
        if not (main if main is not None else os.environ.get("RANK", "0") == "0"):
            return
        self.job = whole_job(self._partial, observed or {})
        self.target.check()
        for note in differences(self.job, observed or {}):
            log.warning("%s; the run is recorded with the job as given", note)
        self._total = total_steps or self.job.workload.training.total_steps
        self._expect()
        self._steps, self._done_before = 0, done
        self._times, self._epochs = RunningMedian(), RunningMedian()
        self._extra: dict[str, float] = {}
        self._about: dict[str, Any] = {}
        self._started = datetime.datetime.now(datetime.UTC)
        self._gpu: Any = None
        self._timer: ClockTimer | DeviceTimer = ClockTimer(self._clock, self._times)
        self._find_gpu()
        self._open, self._process = True, os.getpid()
        self.start()
        self._watch_sigterm()

    def start(self) -> None:
        """The clock starts (anew): ``begin`` does so, and a framework that had more to set up since."""
        if not self._open:
            return
        self._step_began: Any = None
        self._stopped: float | None = None
        self._last_shown = self._began = self._clock()
        self._warm: tuple[int, float] | None = None
        self._epoch_began, self._epoch_steps = self._began, self._steps

    def stop(self) -> None:
        """The training is over, and ``end`` will be told later how it ended."""
        if self._open:
            self._stopped = self._clock()

    def step_begin(self) -> None:
        """A step begins: its batch is there."""
        if not self._open:
            return
        if self._gpu is None:
            self._find_gpu()
        self._step_began = self._timer.begin() if self._steps >= self.warm_up else None

    def step_end(self, *, samples: int | None = None) -> None:
        """A step has ended; one of fewer ``samples`` than the job's batch is counted and not timed."""
        if not self._open:
            return
        assert self.job is not None
        began, self._step_began = self._step_began, None
        whole = samples is None or samples >= self.job.workload.training.global_batch
        if began is not None and whole:
            self._timer.end(began)
        self._timer.read()
        self._count(1, self._clock())

    def step(self, *, samples: int | None = None) -> None:
        """A step has ended and the next one begins, for loops where nothing but the end of a step is seen."""
        self.step_end(samples=samples)
        self.step_begin()

    def steps(self, count: int, *, time_s: float | None = None) -> None:
        """Count so many steps that have ended; ``time_s`` is how long they took together, if that was
        measured."""
        if not self._open:
            return
        if time_s is not None and self._steps >= self.warm_up:
            self._times.add(time_s / count)
        self._count(count, self._clock())

    def epoch_begin(self) -> None:
        if self._open:
            self._epoch_began, self._epoch_steps = self._clock(), self._steps

    def epoch_end(self) -> None:
        """An epoch has ended; it is timed where the job says how many samples it has and it saw them all."""
        if not self._open:
            return
        assert self.job is not None
        training, now = self.job.workload.training, self._clock()
        steps = self._steps - self._epoch_steps
        if training.samples is not None and steps >= max(1, training.samples // training.global_batch):
            self._epochs.add(now - self._epoch_began)
        self._epoch_began, self._epoch_steps = now, self._steps

    def note(self, measured: Mapping[str, float] | None = None, **provenance: Any) -> None:
        """Figures that were measured elsewhere, and further provenance, for the run."""
        if self._open:
            self._extra |= {name: value for name, value in (measured or {}).items() if name in QUANTITIES}
            self._about |= provenance

    def end(self, interrupted: str | BaseException | None = None) -> Run | None:
        """The training has ended, or was ``interrupted`` by this.

        The run is written, once, by the process that began. The training is worth more than its record: what
        goes wrong here is a warning.
        """
        if not self._open or os.getpid() != self._process:
            return None
        self._open = False
        self._forget_sigterm()
        if isinstance(interrupted, BaseException):
            interrupted = f"{type(interrupted).__name__}: {first_line(interrupted)}"
        try:
            with contextlib.suppress(RuntimeError):  # of a device that has failed
                self._timer.read(wait=not interrupted)
            run = self._run(interrupted)
        except Exception as error:
            log.warning("nothing was recorded (%s: %s)", type(error).__name__, first_line(error))
            return None
        if not run.measured:
            log.warning("nothing was recorded: after %d steps none had been timed", self._steps)
            return None
        where = self.target.write(run)
        if self._posting is not None and self._posting.post(run, where):
            where = f"{where}, and on {self._posting.url}"
        self._tell(self._summary(run, where, interrupted))
        return run

    def end_with(self, owner: object) -> None:
        """End as interrupted when ``owner`` or the program ends, for frameworks that tell of no failure."""
        weakref.finalize(owner, self.end, "the training did not end")

    def __enter__(self) -> Self:
        self.begin()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.end(error)

    # Time

    def _find_gpu(self) -> None:
        """The device, once the training uses it."""
        assert self.job is not None
        self._gpu = None if self.job.cluster.groups[0].device.is_cpu else cuda()
        if self._gpu is not None:
            self._gpu.reset_peak_memory_stats()
            self._timer = DeviceTimer(self._gpu, self._times)
            training = self.job.workload.training
            settings = training.allocator or allocator_here()
            self.job = with_training(self.job, dataclasses.replace(training, allocator=settings))

    def _count(self, steps: int, now: float) -> None:
        self._steps += steps
        if self._warm is None and self._steps >= self.warm_up:
            self._warm = (self._steps, now)
        elif now - self._last_shown >= self._every_s:
            self._last_shown = now
            self._tell(self._progress())

    @property
    def _pace_s(self) -> float | None:
        """Seconds from step to step since warming up, evaluation and all: what the time left goes by."""
        if self._warm is None or self._steps <= self._warm[0]:
            return None
        return (self._clock() - self._warm[1]) / (self._steps - self._warm[0])

    # The forecast

    def _expect(self) -> None:
        self.forecast = {}
        if self._predictor is None or self.job is None:
            return
        try:
            self.forecast = expected(self.job, self._predictor)
            step = self.forecast["step_time_s"]
        except Exception as error:
            log.warning("no forecast (%s); the training is recorded without one", first_line(error))
            return
        line = f"forecast: {format_seconds(step.median)} a step, interval {_interval(step)}"
        if self._total:
            line += f"; {format_seconds(step.median * self._total)} for {self._total:,} steps"
        self._tell(line)

    # What people see

    def _progress(self) -> str:
        done, forecast = self._done_before + self._steps, self.forecast.get("step_time_s")
        step = self._times.median or self._pace_s
        line = f"step {done:,}" + (f" of {self._total:,}" if self._total else "")
        if step is not None:
            line += f": {format_seconds(step)} a step"
        if forecast is not None:
            line += f" (forecast {format_seconds(forecast.median)}, interval {_interval(forecast)})"
        if self._total and self._pace_s is not None:
            left = max(0, self._total - done)
            line += f"; {format_seconds(left * self._pace_s)} left"
            line += (
                f" (forecast said {format_seconds(left * forecast.median)})" if forecast is not None else ""
            )
        return line

    def _summary(self, run: Run, where: str | None, why: str | None) -> str:
        parts = [f"{'interrupted after ' if why else ''}{self._steps:,} steps"]
        for name, text in (("step_time_s", "a step"), ("total_time_s", "in all")):
            if name in run.measured:
                forecast = self.forecast.get(name)
                beside = f" (forecast {format_seconds(forecast.median)})" if forecast else ""
                parts.append(f"{format_seconds(run.measured[name])} {text}{beside}")
        return ", ".join(parts) + (f"; recorded in {where}" if where else "")

    def _tell(self, line: str) -> None:
        try:
            self._show(line)
        except Exception as error:
            log.warning("lines like this can no longer be shown (%s): %s", first_line(error), line)
            self._show = log.info

    # The run

    def _run(self, why: str | None) -> Run:
        assert self.job is not None
        spent, training = (self._stopped or self._clock()) - self._began, self.job.workload.training
        step = self._extra.get("step_time_s", self._times.median)
        measured: dict[str, float] = {}
        if step:
            measured |= {"step_time_s": step, "samples_per_s": training.global_batch / step}
            if training.sequence:
                measured["tokens_per_s"] = training.global_batch * training.sequence / step
        if self._epochs.median is not None:
            measured["epoch_time_s"] = self._epochs.median
        job = self.job
        if why is None and self._steps and training.total_steps in (None, self._steps):
            measured["total_time_s"] = spent
            if training.total_steps is None:
                job = with_training(job, dataclasses.replace(training, steps=self._steps))
        if self._gpu is not None and self._steps:
            measured["peak_memory_bytes"] = float(self._gpu.max_memory_allocated())
            measured["reserved_memory_bytes"] = float(self._gpu.max_memory_reserved())
        return Run(job=job, measured={**measured, **self._extra}, provenance=self._provenance(spent, why))

    def _provenance(self, spent_s: float, why: str | None) -> dict[str, Any]:
        assert self.job is not None
        torch, forecast = sys.modules.get("torch"), self.forecast.get("step_time_s")
        machine = host()
        about: dict[str, Any] = {
            "source": "foretrain callback",
            "label": self.job.workload.model.label,
            "framework": self.framework or None,
            "torch": None if torch is None else torch.__version__,
            "host": machine,
            "device": f"cpu, {machine}" if self._gpu is None else self._gpu.get_device_name(),
            "load_average": round(os.getloadavg()[0], 2) if hasattr(os, "getloadavg") else None,
            "host_cores": os.cpu_count() if hasattr(os, "getloadavg") else None,
            "started": self._started.isoformat(timespec="milliseconds"),
            "seconds": round(spent_s, 3),
            "steps": self._steps,
            "timed_steps": self._times.count,
        }
        if self._times.count:
            about |= {"step_time_min_s": self._times.low, "step_time_max_s": self._times.high}
        if forecast:
            about["forecast"] = {"predictor": str(self._predictor), "step_time_s": forecast.median}
        known = {name: value for name, value in about.items() if value is not None}
        return {**known, **self._about, **({"interrupted": why} if why else {})}

    # A polite request to end

    def _watch_sigterm(self) -> None:
        """Write the run before the process dies of SIGTERM, where the program leaves that to the system."""
        on_main = threading.current_thread() is threading.main_thread()
        if on_main and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
            self._sigterm = self._on_sigterm
            signal.signal(signal.SIGTERM, self._sigterm)

    def _forget_sigterm(self) -> None:
        on_main = threading.current_thread() is threading.main_thread()
        if self._sigterm is not None and on_main and signal.getsignal(signal.SIGTERM) == self._sigterm:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
        self._sigterm = None

    def _on_sigterm(self, *_: object) -> None:
        self.end("SIGTERM")
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGTERM)


def _interval(estimate: Estimate) -> str:
    return f"{format_seconds(estimate.low)} to {format_seconds(estimate.high)}"
