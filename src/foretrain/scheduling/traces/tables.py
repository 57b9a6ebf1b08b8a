"""Reads the jobs of traces that are CSV files with a heading, one function per format."""

from __future__ import annotations

from collections.abc import Callable

from foretrain.scheduling.jobs import TraceJob
from foretrain.scheduling.traces.rows import NoJob, Row, count_of, number_of, positive, time_of


def philly(row: Row, number: int) -> TraceJob:
    """Microsoft's Philly trace as processed for Sia: timestamp, duration, num_gpus, gpu_time, cluster."""
    return TraceJob(
        name=f"philly-{number - 1}",
        arrival_s=time_of(row, "timestamp"),
        duration_s=positive(row, "duration"),
        gpus=count_of(row, "num_gpus"),
        group=row["cluster"],
    )


def helios(row: Row, number: int) -> TraceJob:
    """SenseTime's Helios traces, with times of submission, start and end, and a virtual cluster each."""
    if number_of(row, "gpu_num") == 0:
        raise NoJob("a job without GPUs")
    return TraceJob(
        name=row["job_id"],
        arrival_s=time_of(row, "submit_time"),
        duration_s=positive(row, "duration"),
        gpus=count_of(row, "gpu_num"),
        group=row.get("vc", ""),
    )


def alibaba_2023(row: Row, number: int) -> TraceJob:
    """Alibaba's openb pods of 2023: shares of GPUs in thousandths, from creation to deletion."""
    if number_of(row, "num_gpu") == 0:
        raise NoJob("a pod without GPUs")
    gpus = count_of(row, "num_gpu")
    arrival_s, duration_s = _until_deleted(row)
    share = number_of(row, "gpu_milli") / 1000
    return TraceJob(
        name=row["name"],
        arrival_s=arrival_s,
        duration_s=duration_s,
        gpus=gpus,
        share=share if gpus == 1 else 1.0,
        group=row.get("qos", ""),
    )


def _until_deleted(row: Row) -> tuple[float, float]:
    """Arrival and duration of what Alibaba schedules after its creation and deletes."""
    arrival_s = number_of(row, "creation_time")
    duration_s = number_of(row, "deletion_time") - number_of(row, "scheduled_time", default=arrival_s)
    if duration_s <= 0:
        raise NoJob("deletion_time is not after scheduled_time")
    return arrival_s, duration_s


def alibaba_2025(row: Row, number: int) -> TraceJob:
    """Alibaba's disaggregated recommendation models of 2025: instances, grouped by application."""
    if number_of(row, "gpu_request") == 0:
        raise NoJob("an instance without GPUs")
    if not (row["creation_time"].strip() and row["deletion_time"].strip()):
        raise NoJob("created before or deleted after the trace")
    arrival_s, duration_s = _until_deleted(row)
    return TraceJob(
        name=row["instance_sn"],
        arrival_s=arrival_s,
        duration_s=duration_s,
        gpus=count_of(row, "gpu_request"),
        group=row["app_name"],
        kind=row["role"],
    )


ALIBABA_2020 = (
    *("job_name", "task_name", "inst_num", "status", "start_time", "end_time"),
    *("plan_cpu", "plan_mem", "plan_gpu", "gpu_type"),
)
"""The columns of Alibaba's pai_task_table, which has no heading."""


def alibaba_2020(row: Row, number: int) -> TraceJob:
    """A task of Alibaba's PAI trace of 2020: instances that each plan a percentage of a GPU."""
    percent = number_of(row, "plan_gpu", default=0.0)
    if percent == 0:
        raise NoJob("a task without GPUs")
    start = number_of(row, "start_time")
    duration = number_of(row, "end_time") - start
    if duration <= 0:
        raise NoJob("end_time is not after start_time")
    instances = count_of(row, "inst_num")
    whole = max(1, round(instances * percent / 100))
    return TraceJob(
        name=f"{row['job_name']}/{row['task_name']}",
        arrival_s=start,
        duration_s=duration,
        gpus=whole,
        share=min(1.0, percent / 100) if instances == 1 else 1.0,
        group=row.get("gpu_type", ""),
        kind=row["task_name"],
    )


def pollux(row: Row, number: int) -> TraceJob:
    """Workloads of the Pollux simulator, with a column of durations or of numbers of steps."""
    sized = {
        key: positive(row, column)
        for key, column in (("duration_s", "duration"), ("steps", "steps"))
        if row.get(column, "").strip()
    }
    if not sized:
        why = "Pollux leaves them to its applications; add a column duration or steps"
        raise NoJob(f"neither a duration nor a number of steps ({why})")
    gpus = count_of(row, "num_replicas")
    return TraceJob(
        name=row["name"],
        arrival_s=number_of(row, "time"),
        gpus=gpus,
        kind=row["application"],
        least_gpus=1,
        most_gpus=4 * gpus,
        duration_s=sized.get("duration_s"),
        steps=sized.get("steps"),
    )


def tiresias(row: Row, number: int) -> TraceJob:
    """Workloads of the Tiresias simulator, each with a duration and a model's name."""
    return TraceJob(
        name=row["job_id"],
        arrival_s=number_of(row, "submit_time"),
        duration_s=positive(row, "duration"),
        gpus=count_of(row, "num_gpu"),
        kind=row["model_name"],
    )


FORETRAIN = (
    *("name", "arrival_s", "duration_s", "steps", "gpus", "group", "kind", "device", "share"),
    *("least_gpus", "most_gpus", "weight", "user", "partition", "priority", "limit_s", "deadline_s"),
    "memory_bytes",
)
"""The columns of the project's own format; name, arrival_s, gpus and a duration or steps are needed."""


def foretrain(row: Row, number: int) -> TraceJob:
    """The project's own format."""

    def has(name: str) -> bool:
        return bool(row.get(name, "").strip())

    if not has("duration_s") and not has("steps"):
        raise NoJob("neither duration_s nor steps")
    return TraceJob(
        name=row["name"],
        arrival_s=number_of(row, "arrival_s"),
        duration_s=positive(row, "duration_s") if has("duration_s") else None,
        steps=positive(row, "steps") if has("steps") else None,
        gpus=count_of(row, "gpus"),
        group=row.get("group", ""),
        kind=row.get("kind", ""),
        device=row["device"] if has("device") else None,
        share=number_of(row, "share", default=1.0),
        least_gpus=count_of(row, "least_gpus") if has("least_gpus") else None,
        most_gpus=count_of(row, "most_gpus") if has("most_gpus") else None,
        weight=number_of(row, "weight", default=1.0),
        user=row.get("user", ""),
        partition=row.get("partition", ""),
        priority=number_of(row, "priority", default=0.0),
        limit_s=positive(row, "limit_s") if has("limit_s") else None,
        deadline_s=positive(row, "deadline_s") if has("deadline_s") else None,
        memory_bytes=positive(row, "memory_bytes") if has("memory_bytes") else None,
    )


HEADINGS: dict[str, tuple[frozenset[str], Callable[[Row, int], TraceJob]]] = {
    "own": (frozenset({"name", "arrival_s", "gpus"}), foretrain),
    "philly": (frozenset({"timestamp", "duration", "num_gpus", "cluster"}), philly),
    "helios": (frozenset({"job_id", "gpu_num", "submit_time", "duration"}), helios),
    "alibaba-2023": (
        frozenset({"name", "num_gpu", "gpu_milli", "creation_time", "deletion_time"}),
        alibaba_2023,
    ),
    "alibaba-2025": (
        frozenset({"instance_sn", "gpu_request", "creation_time", "scheduled_time", "deletion_time"}),
        alibaba_2025,
    ),
    "pollux": (frozenset({"time", "name", "application", "num_replicas"}), pollux),
    "tiresias": (frozenset({"job_id", "num_gpu", "submit_time", "model_name", "duration"}), tiresias),
}
"""The columns by which a format is known, and its reader."""

NO_JOBS: dict[str, frozenset[str]] = {
    "a list of nodes; --cluster takes it": frozenset({"sn", "gpu", "model"}),
    "mini-batch times of the workers of one job": frozenset({"worker", "batch_time_norm"}),
    "figures of a simulator": frozenset({"policy", "average_jct_s"}),
    "a table of columns without names": frozenset({"", "0", "1"}),
}
"""Files that lie beside traces and are none, by columns."""
