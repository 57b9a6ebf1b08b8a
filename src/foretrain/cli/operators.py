"""The commands that measure on one device: ``measure ops`` replays operators, ``measure steps`` runs real training steps."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from foretrain.cli.app import say
from foretrain.cli.measure import BudgetOption, OutOption, RetryOption, budget_s, conclude, measure
from foretrain.errors import InputError

if TYPE_CHECKING:
    from foretrain.job import Job
    from foretrain.measure.operators import Instance

Targets = Annotated[
    list[str], typer.Argument(metavar="TARGET...", help="Files of runs or jobs (.jsonl), job files, captured graphs, or models by name.")
]
DeviceOption = Annotated[Literal["cuda", "cpu"], typer.Option(help="The local device to measure on.")]


@measure.command()
def ops(
    targets: Targets,
    *,
    out: OutOption,
    device: DeviceOption = "cuda",
    collect_only: Annotated[
        bool, typer.Option("--collect-only", help="Write the list of operators, to replay on another machine.")
    ] = False,
    retry_failed: RetryOption = False,
    budget: BudgetOption = None,
) -> None:
    """Replay the distinct operators of models and record their time on the device and on the host."""
    from foretrain.measure.operators import by_value, save_instances
    from foretrain.report.screen import progress

    instances = by_value(_instances(targets))
    if collect_only:
        save_instances(out, instances)
        say(f"{len(instances):,} operators in {out}")
        return
    from foretrain.measure.ops import measure_operators

    limit_s = budget_s(budget)
    with progress("operators") as advance:
        done = measure_operators(instances, out, device=device, retry_failed=retry_failed, budget_s=limit_s, progress=advance)
    conclude(done, out)


@measure.command()
def pack(
    files: Annotated[list[Path], typer.Argument(metavar="FILE...", help="What measure ops wrote (.jsonl, .jsonl.gz).", show_default=False)],
    *,
    out: OutOption,
    device: Annotated[str, typer.Option(help="The catalogue's name of the device they were measured on.", show_default=False)],
) -> None:
    """Put measured operators into one Parquet dataset, which ``foretrain fit deletepop`` learns from."""
    from foretrain.catalog import Catalog
    from foretrain.measure.dataset import pack as write

    for path in files:
        if not path.is_file():
            raise InputError(f"{path}: no such file")
    name = Catalog.load().device(device, "--device").name
    say(f"{write(files, out, {'catalog_device': name}):,} operators of {name} in {out}")


@measure.command()
def steps(
    targets: Targets,
    *,
    out: OutOption,
    device: DeviceOption = "cuda",
    seconds: Annotated[float, typer.Option(help="Time each job's steps for about so long.")] = 0.5,
    retry_failed: RetryOption = False,
    budget: BudgetOption = None,
) -> None:
    """Run real training steps of jobs on one device and write them as runs; a job that fails does not stop the rest."""
    from foretrain.measure.steps import measure_jobs
    from foretrain.report.screen import progress

    jobs, limit_s = list(_jobs(targets)), budget_s(budget)
    with progress("jobs") as advance:
        done = measure_jobs(jobs, out, device=device, seconds=seconds, retry_failed=retry_failed, budget_s=limit_s, progress=advance)
    conclude(done, out)


def _instances(targets: list[str]) -> list[Instance]:
    from foretrain.capture import capture_job
    from foretrain.measure.operators import collect, load_instances

    lists = [Path(target) for target in targets if _is_list(Path(target))]
    jobs = _jobs([target for target in targets if Path(target) not in lists])
    found = collect((capture_job(job), job.workload.training.precision) for job in jobs)
    return [*found, *(instance for path in lists for instance in load_instances(path))]


def _is_list(path: Path) -> bool:
    """A file that ``--collect-only`` wrote: its lines are operators, not jobs."""
    if path.suffix != ".jsonl" or not path.is_file():
        return False
    with path.open(encoding="utf-8") as file:
        return '"overload"' in file.readline()


def _jobs(targets: list[str]) -> Iterator[Job]:
    from foretrain.cli.jobs import job_from
    from foretrain.job import read_jobs

    for target in targets:
        if target.endswith((".jsonl", ".jsonl.zst")):
            jobs = [job for _, job in read_jobs(Path(target))]
            single = [job for job in jobs if job.cluster.world_size == 1]
            if len(single) < len(jobs):
                say(f"{target}: {len(jobs) - len(single):,} of {len(jobs):,} jobs are for several devices and left out")
            yield from single
        else:
            yield job_from(target, {})
