"""Writes README.md: what each file of a folder is, the forecast, and what the files cannot say."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from foretrain.estimate import Estimate
from foretrain.job import Job
from foretrain.launchers.writing.expected import STEPS_WHERE_NONE_ARE_GIVEN, Expected
from foretrain.launchers.writing.launch_script import EXPANDABLE, allocator_of
from foretrain.launchers.writing.limits import changed_fields, shown
from foretrain.launchers.writing.versions import stamp
from foretrain.units import format_bytes, format_seconds


def readme(
    job: Job,
    expected: Expected,
    *,
    target: str,
    stamps: Sequence[str],
    about: Mapping[str, str],
    notes: Sequence[str],
) -> str:
    """The text of README.md."""
    cluster = job.cluster
    where = f"{cluster.nodes} x {cluster.devices_per_node} {cluster.device.name}"
    lines = [
        f"# {job.workload.model.label} on {where}, target {target}",
        "",
        stamp(*stamps),
        "",
        "## Files",
        "",
        *(f"- `{name}`: {words}." for name, words in about.items()),
        "",
        "## The plan",
        "",
        *(f"- `{field}` = {shown(value)}" for field, value in changed_fields(job)),
        "",
        "## The forecast",
        "",
        *_forecast(job, expected),
        "",
        "## What the files do not say",
        "",
        *(f"- {note}" for note in (*notes, *_assumed(job))),
    ]
    return "\n".join(lines) + "\n"


def _forecast(job: Job, expected: Expected) -> list[str]:
    figures = (
        ("a step", expected.step_time_s, format_seconds),
        ("all of it", expected.total_time_s, format_seconds),
        ("peak memory of a device", expected.peak_memory_bytes, format_bytes),
        ("reserved memory of a device", expected.reserved_memory_bytes, format_bytes),
    )
    lines = [
        f"- {name}: {show(one.median)}, 80 % interval {show(one.low)} to {show(one.high)}"
        for name, one, show in figures
        if isinstance(one, Estimate)
    ]
    return [*lines, f"- time limit of schedulers: {format_seconds(expected.limit_s(job))}"]


def _assumed(job: Job) -> list[str]:
    """List what launch files add or take because the job says nothing."""
    training, lines = job.workload.training, list[str]()
    if training.allocator is None and allocator_of(job) is not None:
        lines.append(f"training.allocator: the job says nothing; launch.sh sets {EXPANDABLE}")
    if training.total_steps is None:
        lines.append(f"training.steps: the job says nothing; {STEPS_WHERE_NONE_ARE_GIVEN} are run")
    if job.workload.model.libraries:
        lines.append(f"model.libraries = {shown(job.workload.model.libraries)}: install these versions")
    lines.append("learning rates, schedules, data and weights: none of the job's; change them in the files")
    return lines
