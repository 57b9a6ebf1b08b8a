"""The commands that make data: ``measure ops``, ``pack``, ``steps``, ``host`` and ``campaign``."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from foretrain.cli import completion
from foretrain.cli.app import JsonFlag, registry, say, show, told_if_interrupted
from foretrain.cli.job_options import CatalogOption
from foretrain.cli.lists import sides, whole_numbers, words
from foretrain.cli.scale_out import RayOption, ScaleOut
from foretrain.errors import InputError, invalid
from foretrain.units import parse_seconds

if TYPE_CHECKING:
    from foretrain.job import Job
    from foretrain.measure.instances import Instance
    from foretrain.measure.kinds import Kind
    from foretrain.measure.summary import Summary
    from foretrain.run import Run

measure = typer.Typer(
    help="Make data: measure operators, steps and whole campaigns.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
)
registry.add_typer(measure, name="measure")

OutOption = Annotated[
    Path,
    typer.Option(
        "--out", "-o", help="The file of results; what it holds is not measured again.", show_default=False
    ),
]
BudgetOption = Annotated[str | None, typer.Option(help="Stop after this time, such as 10m.")]
RetryOption = Annotated[bool, typer.Option("--retry-failed", help="Try again what failed in an earlier run.")]


def budget_s(budget: str | None) -> float | None:
    return None if budget is None else parse_seconds(budget, "budget")


def kept_in(out: Path) -> AbstractContextManager[None]:
    """Say where measurements are kept that Ctrl-C or SIGTERM ends."""
    return told_if_interrupted(lambda: f"what was measured is in {out}; the same command goes on from there")


def conclude(summary: Summary, out: Path) -> None:
    """Say what was done, and where it is."""
    from foretrain.measure.resume import failures_file, last_failure

    say(f"{summary}; in {out}")
    if summary.failed or summary.failed_before:
        say(f"failures in {failures_file(out)}, the last: {last_failure(out)}")
    if summary.failed and not summary.measured:
        raise typer.Exit(1)


# One device

Targets = Annotated[
    list[str],
    typer.Argument(
        metavar="TARGET",
        help="Files of runs or jobs (.jsonl), job files, captured graphs, or models by name.",
    ),
]
DeviceOption = Annotated[Literal["cuda", "cpu"], typer.Option(help="The local device to measure on.")]


@measure.command()
def ops(
    targets: Targets,
    *,
    out: OutOption,
    device: DeviceOption = "cuda",
    collect_only: Annotated[
        bool,
        typer.Option("--collect-only", help="Write the list of operators, to replay on another machine."),
    ] = False,
    retry_failed: RetryOption = False,
    budget: BudgetOption = None,
    catalog: CatalogOption = None,
) -> None:
    """Replay the distinct operators of models and record their time on the device and on the host."""
    from foretrain.measure.instances import save_instances
    from foretrain.report.screen import progress

    instances = _instances(targets)
    if collect_only:
        save_instances(out, instances)
        say(f"{len(instances):,} operators in {out}")
        return
    from foretrain.capture import needs_torch

    needs_torch("measure ops")
    from foretrain.measure.ops import measure_operators

    limit_s = budget_s(budget)
    with kept_in(out), progress("operators") as advance:
        done = measure_operators(
            instances, out, device=device, retry_failed=retry_failed, budget_s=limit_s, progress=advance
        )
    conclude(done, out)


@measure.command()
def pack(
    files: Annotated[
        list[Path],
        typer.Argument(
            metavar="FILE", help="What measure ops wrote (.jsonl, .jsonl.gz).", show_default=False
        ),
    ],
    *,
    out: OutOption,
    device: Annotated[
        str | None,
        typer.Option(
            help="The catalogue's name of their device, where the files leave that open; it must fit them.",
            show_default=False,
        ),
    ] = None,
    catalog: CatalogOption = None,
) -> None:
    """Put measured operators into one Parquet dataset, which ``foretrain fit deletepop`` learns from."""
    from foretrain.catalog import Catalog
    from foretrain.files import check_target
    from foretrain.measure.dataset import device_of
    from foretrain.measure.dataset import pack as write

    for path in files:
        if not path.is_file():
            raise InputError(f"{path}: {'is a folder, not a file' if path.is_dir() else 'no such file'}")
    check_target(out)
    name, said = device_of(files, device, Catalog.load(catalog))
    facts = {"catalog_device": name, **({} if said is None else {"device": said})}
    count = write(files, out, facts)
    if said is None:
        say(f"the files do not say what they were measured on; taken as {name}")
    say(f"{count:,} operators of {name} in {out}")


@measure.command()
def steps(
    targets: Targets,
    *,
    out: OutOption,
    device: DeviceOption = "cuda",
    seconds: Annotated[float, typer.Option(help="Time each job's steps for about so long.")] = 0.5,
    resources: Annotated[
        bool,
        typer.Option(
            "--resources",
            help="How busy device, memory and the link to the host are, every 10 ms, instead of phases and "
            "kernels; a job's loader is carried out.",
        ),
    ] = False,
    retry_failed: RetryOption = False,
    budget: BudgetOption = None,
    catalog: CatalogOption = None,
) -> None:
    """Run real training steps of jobs on one device and write them as runs; a job that fails does not stop
    the rest."""
    from foretrain.capture import needs_torch
    from foretrain.report.screen import progress

    needs_torch("measure steps")
    from foretrain.measure.steps import device_here, measure_jobs

    if not 0 < seconds < math.inf:
        raise invalid("--seconds", seconds, "a time above 0")
    jobs, limit_s = list(_jobs(targets, "measure steps", lambda: device_here(device))), budget_s(budget)
    with kept_in(out), _watching(resources, device, seconds) as measuring, progress("jobs") as advance:
        done = measure_jobs(
            jobs,
            out,
            device=device,
            seconds=seconds,
            retry_failed=retry_failed,
            budget_s=limit_s,
            progress=advance,
            measure=measuring,
        )
    conclude(done, out)


@contextmanager
def _watching(resources: bool, device: str, seconds: float) -> Iterator[Callable[[Job], Run] | None]:
    """Make what measures the resources of a job; None where only steps are asked for."""
    if not resources:
        yield None
        return
    from foretrain.measure.step_resources import Window, measure_resources
    from foretrain.measure.watching import Watcher

    window = Window(seconds=seconds)
    with Watcher() if device == "cuda" else nullcontext(Watcher()) as watcher:
        yield lambda job: measure_resources(job, device=device, watcher=watcher, window=window)


@measure.command()
def host(
    *,
    out: Annotated[
        Path | None,
        typer.Option("--out", "-o", help="The profile, which --host takes (.json).", show_default=False),
    ] = None,
    seconds: Annotated[float, typer.Option(help="Time the benchmarks for about so long.")] = 12.0,
    as_json: JsonFlag = False,
) -> None:
    """Measure how fast this machine issues operators, with a GPU or without: what bounds short steps."""
    from foretrain.capture import needs_torch
    from foretrain.files import check_target

    needs_torch("measure host")
    from foretrain.catalog.hosts import PARTS
    from foretrain.costs.host import MEASURED_HOST
    from foretrain.measure.host import measure_host
    from foretrain.report import dump, tables

    if not 0 < seconds < math.inf:
        raise invalid("--seconds", seconds, "a time above 0")
    if out is not None:
        check_target(out)
    say(f"timing how fast operators are issued, for about {seconds:.0f} s")  # a bar would take time itself
    profile = measure_host(seconds)
    if out is not None:
        profile.save(out)
        say(f"the profile is in {out}: give it as --host, or as host in the [cluster] of a job")
    if as_json:
        typer.echo(dump(profile.to_dict()))
        return
    show(tables.host_profile(profile))
    measured_host = profile.host()
    speeds = ", ".join(f"{part} {measured_host.speed_of(part):.2f}" for part in PARTS)
    say(f"{speeds} of the speed of {MEASURED_HOST}, which forecasts take where nothing is known")
    if fast := profile.fast_cores:
        slower = max(profile.core_s.values()) / min(profile.core_s.values())
        say(f"cores differ {slower:.1f} times: taskset -c {','.join(fast)} keeps a training on the fastest")


def _instances(targets: list[str]) -> list[Instance]:
    """Gather the operators of lists, which ``--collect-only`` and ``design`` write, in their order; then
    those of jobs, the most valuable first."""
    from foretrain.measure.instances import by_value, collect, load_instances
    from foretrain.measure.kinds import first_kind
    from foretrain.step.graph import step_graph

    files = [Path(target) for target in targets if target.endswith((".jsonl", ".jsonl.zst"))]
    lists = [path for path in files if first_kind(path) in ("operators", "measured operators")]
    jobs = _jobs([target for target in targets if Path(target) not in lists], "measure ops")
    of_jobs = collect((step_graph(job), job.workload.training.precision) for job in jobs)
    return [*(instance for path in lists for instance in load_instances(path)), *by_value(of_jobs)]


def _jobs(targets: list[str], command: str, here: Callable[[], dict[str, Any]] = dict) -> Iterator[Job]:
    """The jobs of all targets, a model by its name on the device that is ``here``."""
    from foretrain.cli.job_options import job_from
    from foretrain.job import read_jobs
    from foretrain.measure.kinds import expect

    plain: tuple[Kind, ...] = ("jobs", "runs")
    kinds: tuple[Kind, ...] = ("operators", *plain) if command == "measure ops" else plain
    for target in targets:
        if target.endswith((".jsonl", ".jsonl.zst", ".csv", ".parquet")):
            expect(Path(target), *kinds, command=command)
            jobs = [job for _, job in read_jobs(Path(target))]
            single = [job for job in jobs if job.cluster.world_size == 1]
            if len(single) < len(jobs):
                say(
                    f"{target}: {len(jobs) - len(single):,} of {len(jobs):,} "
                    "jobs are for several devices and left out"
                )
            yield from single
        else:
            job = job_from(target, {})
            names_none = any(taken.startswith("device ") for taken in job.assumed)
            yield job_from(target, here()) if names_none else job


# Campaigns


@measure.command(cls=ScaleOut)
def campaign(
    file: Annotated[
        Path | None,
        typer.Argument(
            metavar="CAMPAIGN.toml|JOBS.jsonl",
            help="The grid, whose keys options replace; or jobs in their order, as of foretrain design.",
            show_default=False,
        ),
    ] = None,
    *,
    out: OutOption,
    on: Annotated[
        str,
        typer.Option(
            help="local, torchrun or ray.", autocompletion=completion.names_in("measure.backends", "BACKENDS")
        ),
    ] = "local",
    models: Annotated[str | None, typer.Option(help="Models by name, as a,b,c.")] = None,
    workers: Annotated[str | None, typer.Option(help="Numbers of workers, as 1,2,4.")] = None,
    cores: Annotated[str | None, typer.Option(help="Cores per worker, as 1,2.")] = None,
    batch: Annotated[str | None, typer.Option(help="Samples per step over all workers, as 32,64.")] = None,
    batch_per_worker: Annotated[
        str | None, typer.Option(help="Samples per step of each worker, in place of --batch.")
    ] = None,
    samples: Annotated[
        str | None, typer.Option(help="Sizes of the dataset, as 1000,50000: times the epoch.")
    ] = None,
    sync: Annotated[str | None, typer.Option(help="allreduce, ps (parameter server), or both.")] = None,
    servers: Annotated[str | None, typer.Option(help="Parameter servers, as 1,2.")] = None,
    links: Annotated[
        str | None, typer.Option(help="Rates of the workers' links, as 1Gbit,10Gbit (local, root).")
    ] = None,
    image: Annotated[str | None, typer.Option(help="Image side, or channels,height,width.")] = None,
    sequence: Annotated[int | None, typer.Option(help="Tokens per sample.")] = None,
    classes: Annotated[int | None, typer.Option(help="Classes of a classifier.")] = None,
    precision: Annotated[str | None, typer.Option(help="fp32, amp-bf16, bf16, ...")] = None,
    optimizer: Annotated[str | None, typer.Option(help="sgd, adamw, ...")] = None,
    device: Annotated[str | None, typer.Option(help="cpu, or the catalogue's name of the GPUs here.")] = None,
    address: Annotated[
        str | None,
        typer.Option(help="The Ray cluster: auto, or ray://host:port. Without it a local one is started."),
    ] = None,
    ray: RayOption = None,
    interface: Annotated[
        str | None, typer.Option(help="Network interface to sample: lo, eth0, auto.")
    ] = None,
    seconds: Annotated[float, typer.Option(help="Time the steps of a cell for about so long.")] = 2.0,
    epoch_limit: Annotated[
        str, typer.Option(help="Time a whole epoch up to this long; extrapolate longer ones.")
    ] = "20s",
    period: Annotated[str, typer.Option(help="Between two samples of the resources.")] = "50ms",
    threshold: Annotated[
        float, typer.Option(help="Share of its maximum above which a resource counts as active.")
    ] = 0.1,
    timeout: Annotated[str, typer.Option(help="Give a cell up after this time.")] = "10m",
    retry_failed: RetryOption = False,
    budget: BudgetOption = None,
    catalog: CatalogOption = None,
) -> None:
    """Train a grid of jobs in parallel and record step times, epoch times and the resources of every
    worker."""
    from foretrain.api import make_job
    from foretrain.measure.backends import backend
    from foretrain.measure.campaign import cells, read_campaign, read_cells, read_grid, run_campaign
    from foretrain.measure.tasks import Protocol
    from foretrain.report.screen import progress

    options = _options(
        lists={"models": models, "sync": sync, "links": links},
        numbers={"workers": workers, "cores": cores, "batch": batch, "batch_per_worker": batch_per_worker,
        "samples": samples, "servers": servers},
        single={"sequence": sequence, "classes": classes, "precision": precision, "optimizer": optimizer,
        "device": device},
        image=image,
    )  # fmt: skip
    if not (timeout_s := parse_seconds(timeout, "timeout")) > 0:
        raise invalid("timeout", timeout, "a time above 0")
    on, address = _where(on, address, ray)
    if file is not None and file.suffix != ".toml":
        if options:
            raise InputError(f"--{next(iter(options)).replace('_', '-')}: is for a grid; {file} has jobs")
        wanted = read_cells(file, home=out.parent, limited=on == "local")
    else:
        grids = [read_grid(options)] if file is None else read_campaign(file, options)
        wanted = cells(grids, make_job, base=Path() if file is None else file.parent, home=out.parent)
    protocol = Protocol(
        seconds=seconds,
        epoch_limit_s=parse_seconds(epoch_limit, "epoch-limit"),
        period_s=parse_seconds(period, "period"),
        threshold=threshold,
    )
    most = max(cell.cores * (cell.job.cluster.world_size + cell.job.plan.servers) for cell in wanted)
    chosen = backend(on, address=address, cpus=most)
    with kept_in(out), progress("cells") as advance:
        summary = run_campaign(
            wanted, out, chosen, protocol=protocol, interface=interface or ("auto" if address else "lo"),
            progress=advance, say=say,
            timeout_s=timeout_s, retry_failed=retry_failed,
            budget_s=budget_s(budget),
        )  # fmt: skip
    conclude(summary, out)
    if summary.failed:
        raise typer.Exit(1)


def _where(on: str, address: str | None, ray: str | None) -> tuple[str, str | None]:
    """The backend and the address of its cluster; ``--ray`` says both at once."""
    from foretrain.fanout.cluster import LOCAL, found_at

    if ray is None:
        return on, address
    if on not in ("local", "ray") or address is not None:
        raise typer.BadParameter("--ray stands for --on ray and its --address; give one or the other")
    where = found_at(ray)
    return "ray", None if where == LOCAL else where


def _options(
    *,
    lists: Mapping[str, str | None],
    numbers: Mapping[str, str | None],
    single: Mapping[str, Any],
    image: str | None,
) -> dict[str, Any]:
    """Collect the keys of a campaign file that were given as options."""
    return {
        **{name: list(words(name, text)) for name, text in lists.items() if text is not None},
        **{name: list(whole_numbers(name, text)) for name, text in numbers.items() if text is not None},
        **{name: value for name, value in single.items() if value is not None},
        **({} if image is None else {"image": sides("image", image)}),
    }
