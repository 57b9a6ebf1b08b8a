"""Trains a model in step with the other processes of a campaign's cell and reports times and resources.

Workers have the ranks from 0, parameter servers the ranks after them. All control messages go over gloo.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import dataclasses
import datetime
import itertools
import json
import os
import platform
import resource
import signal
import statistics
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from foretrain.errors import ForetrainError, InputError
from foretrain.files import write_atomically
from foretrain.measure.links import enter
from foretrain.measure.participants import Participant, participant_of
from foretrain.measure.resources import CpuMeter, GpuMeter, Meter, Sampler, Series, find_interface
from foretrain.measure.tasks import Protocol, Report, WorkerTask, summarize


def pin(local_rank: int, cores: int) -> list[int]:
    """Tie this process to its share of the cores that it may use; where there are too few, shares overlap."""
    available = sorted(os.sched_getaffinity(0))
    pinned = sorted({available[(local_rank * cores + i) % len(available)] for i in range(cores)})
    os.sched_setaffinity(0, pinned)
    os.environ["OMP_NUM_THREADS"] = str(cores)
    return pinned


def process_age_s() -> float | None:
    """Seconds since this process was started; None where the system does not tell."""
    try:
        fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
        began_s = float(fields[19]) / os.sysconf("SC_CLK_TCK")
        return time.clock_gettime(time.CLOCK_BOOTTIME) - began_s
    except (OSError, AttributeError, IndexError, ValueError):
        return None


def measure(
    task: WorkerTask, rank: int, local_rank: int, cores: Sequence[int], *, fresh: bool = False
) -> dict[str, Any]:
    """Take part in a cell whose process group exists; every process returns the whole result.

    ``fresh`` says that this process was started for the cell.
    """
    import torch
    import torch.distributed as dist

    torch.set_num_threads(task.cores)
    torch.manual_seed(rank)
    job = task.read_job()
    device = "cpu" if job.cluster.device.is_cpu else _gpu(local_rank)
    part = participant_of(task, job, rank, device)
    report = _measure_steps(task, part, device, cores, _meter(device, local_rank, len(cores)), fresh=fresh)
    reports: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(reports, dataclasses.asdict(report))
    return summarize(task, [Report(**{**data, "series": Series(**data["series"])}) for data in reports])


def _gpu(local_rank: int) -> str:
    import torch

    if local_rank >= (gpus := torch.cuda.device_count()):
        raise InputError(f"workers: worker {local_rank} of this machine has no GPU; torch finds {gpus}")
    torch.cuda.set_device(local_rank)
    return f"cuda:{local_rank}"


def _meter(device: str, local_rank: int, cores: int) -> Meter:
    return CpuMeter(cores) if device == "cpu" else GpuMeter(local_rank)


# Timing


def _measure_steps(
    task: WorkerTask, part: Participant, device: str, cores: Sequence[int], meter: Meter, *, fresh: bool
) -> Report:
    """Warm up, time the steps under the sampler, then the steps without synchronising, then the epoch."""
    protocol = task.protocol
    clock = _synchronising_clock(device)
    warm_up = _timed(part.step, protocol.warmup, clock)
    age_s = process_age_s() if fresh else None
    steps = _steps_to_time(protocol, part, warm_up[-1], clock)
    interface = find_interface(task.interface)
    with Sampler(meter, interface=interface, period_s=protocol.period_s) as sampler:
        times = _timed(part.step, steps, clock)
    alone: list[float] = []
    if task.processes > 1:
        few = max(protocol.min_steps, min(steps, 30))
        alone = _timed(part.step_alone, few, clock)
    epoch = _epoch(task, part, _slowest(sum(times) / len(times)), clock)
    return Report(
        role=part.role,
        step_times_s=times,
        without_sync_s=alone if part.can_be_alone else [],
        epoch_time_s=epoch,
        series=sampler.series,
        cores=cores,
        peak_rss_bytes=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        peak_memory_bytes=_peak(device),
        memory_limit_bytes=meter.limit_bytes,
        parameters=part.parameters,
        interface=interface,
        machine=platform.node(),
        versions=_versions(device),
        startup_time_s=None if age_s is None else max(0.0, age_s - len(warm_up) * statistics.median(times)),
    )


def _steps_to_time(protocol: Protocol, part: Participant, warm_s: float, clock: Callable[[], float]) -> int:
    """Count the steps that fill the time, by the last one of the warm-up; short steps are looked at again, as
    they settle late."""
    step_s = _slowest(warm_s)
    if step_s * protocol.min_steps < protocol.seconds:
        step_s = _slowest(statistics.median(_timed(part.step, protocol.min_steps, clock)))
    return protocol.steps(step_s)


def _epoch(task: WorkerTask, part: Participant, step_s: float, clock: Callable[[], float]) -> float | None:
    """Seconds of a whole epoch, where the job gives the samples and it is short enough."""
    steps = task.read_job().workload.training.steps_per_epoch
    if steps is None or steps * step_s > task.protocol.epoch_limit_s:
        return None
    return sum(_timed(part.step, steps, clock))


def _timed(step: Callable[[], None], steps: int, clock: Callable[[], float]) -> list[float]:
    import torch.distributed as dist

    dist.barrier()
    times = [clock()]
    for _ in range(steps):
        step()
        times.append(clock())
    return [after - before for before, after in itertools.pairwise(times)]


def _slowest(time_s: float) -> float:
    """The largest of all processes, so that all of them decide alike."""
    import torch
    import torch.distributed as dist

    shared = torch.tensor([time_s], dtype=torch.float64)
    dist.all_reduce(shared, op=dist.ReduceOp.MAX)
    return float(shared.item())


def _synchronising_clock(device: str) -> Callable[[], float]:
    import torch

    def clock() -> float:
        if device != "cpu":
            torch.cuda.synchronize()
        return time.perf_counter()

    return clock


def _peak(device: str) -> int | None:
    import torch

    return None if device == "cpu" else int(torch.cuda.max_memory_allocated())


def _versions(device: str) -> dict[str, str]:
    import torch

    return {"torch": torch.__version__, **({} if device == "cpu" else {"gpu": torch.cuda.get_device_name()})}


# As a program: python -m foretrain.measure.worker --task TASK.json --out RESULT.json
#                   [--rank R --rendezvous FILE --namespace NAME]


@contextlib.contextmanager
def _process_group(task: WorkerTask, rank: int, rendezvous: str | None) -> Iterator[None]:
    """Met in a file by processes that were started one by one, else as the environment says (torchrun)."""
    import torch.distributed as dist

    backend = "gloo" if task.read_job().cluster.device.is_cpu else "cpu:gloo,cuda:nccl"
    where: dict[str, Any] = {}
    if rendezvous is not None:
        where = {"init_method": f"file://{rendezvous}", "rank": rank, "world_size": task.processes}
    dist.init_process_group(backend, timeout=datetime.timedelta(seconds=task.timeout_s), **where)
    try:
        yield
    finally:
        dist.destroy_process_group()


def die_with_parent() -> None:
    """Linux ends this process when the one that started it ends, however that happens."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)


def explain(error: BaseException) -> str:
    """Put an error into one line."""
    text = " ".join(str(error).split())
    return text if isinstance(error, ForetrainError) else f"{type(error).__name__}: {text[:300]}"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--task", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--rank", type=int, default=int(os.environ.get("RANK", "0")))
    parser.add_argument("--rendezvous")
    parser.add_argument("--namespace")
    options = parser.parse_args(arguments)
    die_with_parent()
    fresh = "torch" not in sys.modules
    task = WorkerTask.from_json(options.task.read_text())
    local_rank = int(os.environ.get("LOCAL_RANK", options.rank))
    try:
        if options.namespace is not None:
            enter(options.namespace)
        cores = pin(local_rank, task.cores)
        with _process_group(task, options.rank, options.rendezvous):
            result = measure(task, options.rank, local_rank, cores, fresh=fresh)
            if options.rank == 0:
                write_atomically(options.out, json.dumps(result))
    except Exception as error:
        traceback.print_exc()
        failure = {"rank": options.rank, "time": time.time(), "error": explain(error)}
        write_atomically(options.out.with_name(f"error-{options.rank}.json"), json.dumps(failure))
        sys.stderr.flush()
        os._exit(1)
    return 0


if __name__ == "__main__":
    status = main()
    sys.stdout.flush()
    sys.stderr.flush()
    # threads of gloo and of the sampler may still run, and abort a process that takes itself down
    os._exit(status)
