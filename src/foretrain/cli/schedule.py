"""The command that simulates a cluster under scheduling policies: ``schedule``."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from foretrain.cli import completion
from foretrain.cli.app import JsonFlag, registry, say, show
from foretrain.cli.job_options import CatalogOption
from foretrain.cli.scale_out import RayOption, ScaleOut, hush_ray, one_thread
from foretrain.cli.schedule_checks import refuse_what_changes_nothing
from foretrain.errors import InputError, invalid, missing, unknown

if TYPE_CHECKING:
    from foretrain.scheduling.answers.queue_now import QueueNow
    from foretrain.scheduling.failures import FailureModel
    from foretrain.scheduling.jobs import Trace
    from foretrain.scheduling.machines import Machine
    from foretrain.scheduling.study import Scenario


@registry.command(cls=ScaleOut)
def schedule(
    trace: Annotated[
        str | None, typer.Argument(metavar="TRACE", show_default=False, help="A file of jobs.")
    ] = None,
    *,
    cluster: Annotated[
        str, typer.Option(help='A TOML file with [cluster], or "64x8xv100", or "v100=4,p100=4,k80=4".')
    ],
    policy: Annotated[
        str,
        typer.Option(
            help="Policies by name or as file.py:Class, joined by commas.",
            autocompletion=completion.many(completion.policies),
        ),
    ] = "fifo,backfill,srtf,tiresias",
    generate: Annotated[
        str | None, typer.Option(help='Make jobs instead: "jobs=500,gap=30s,median=20min,spread=1.2".')
    ] = None,
    format: Annotated[
        str | None,
        typer.Option(
            help="Format of the trace, where its look does not tell.",
            autocompletion=completion.names_in("scheduling.traces", "FORMATS"),
        ),
    ] = None,
    first: Annotated[int | None, typer.Option(help="Only the jobs that arrive first.")] = None,
    placement: Annotated[
        str,
        typer.Option(
            help="packed, spread, random or topology.",
            autocompletion=completion.names_in("scheduling.placement", "PLACEMENTS"),
        ),
    ] = "packed",
    rack: Annotated[int | None, typer.Option(help="Nodes to a rack, for topology (16).")] = None,
    throughputs: Annotated[
        Path | None, typer.Option(help="Table of steps per second by device and job type (Gavel's JSON).")
    ] = None,
    predictor: Annotated[
        str | None,
        typer.Option(help="Speeds from a predictor (its name, file.py:Class or folder); needs --templates."),
    ] = None,
    templates: Annotated[
        Path | None, typer.Option(help="Folder with a job file <kind>.toml for each job type.")
    ] = None,
    slowdown_per_node: Annotated[
        float | None,
        typer.Option(help="By how much each further node slows a job, where speeds are the trace's (0)."),
    ] = None,
    rounds: Annotated[
        str | None,
        typer.Option(help="Length of a round in Gavel's policies (360 s), and fifo in rounds, as Gavel's."),
    ] = None,
    errors: Annotated[
        str | None,
        typer.Option(
            help="Errors of the estimates that policies see, such as 0,0.1,0.5 (mean absolute, 0.1 is 10 %)."
        ),
    ] = None,
    residuals: Annotated[
        Path | None,
        typer.Option(help="Errors as predictors made them, too: the file of foretrain evaluate --json."),
    ] = None,
    estimates: Annotated[
        str | None,
        typer.Option(help="Estimates to go by, too: requested (by users), history, or requested,history."),
    ] = None,
    truth: Annotated[
        str | None,
        typer.Option(help="Speeds are forecasts; what happens is off them as this predictor's residuals."),
    ] = None,
    correlation: Annotated[
        str | None,
        typer.Option(help='How alike errors are: "user=0.2,model=0.5" of the variance (else as measured).'),
    ] = None,
    compare_predictors: Annotated[
        bool,
        typer.Option("--compare-predictors", help="What better forecasts are worth; needs --residuals."),
    ] = False,
    checkpoint: Annotated[str, typer.Option(help="Time to save a job before it is taken off.")] = "0s",
    restart: Annotated[str, typer.Option(help="Time to start a job again.")] = "0s",
    checkpoint_every: Annotated[
        str | None, typer.Option(help="What a failure costs at most (30 min).")
    ] = None,
    job_mtbf: Annotated[
        str | None,
        typer.Option(help="Mean GPU time between failures of jobs, such as 1000h, or 1000h,k80=200h."),
    ] = None,
    node_mtbf: Annotated[
        str | None,
        typer.Option(help="Mean time between failures of a node: 30d, or 30d,k80=5d (the cluster file's)."),
    ] = None,
    repair: Annotated[str | None, typer.Option(help="Mean time to repair a node (1 h).")] = None,
    outages: Annotated[
        Path | None, typer.Option(help="Known failures of nodes: CSV with time_s, node, repair_s.")
    ] = None,
    migrate: Annotated[
        bool, typer.Option("--migrate", help="Running jobs move to faster devices while none waits.")
    ] = False,
    mixed_gangs: Annotated[
        bool, typer.Option("--mixed-gangs", help="Jobs may run on several kinds of devices at once.")
    ] = False,
    memory_risk: Annotated[
        float | None,
        typer.Option(help="Chance of running out of memory that is taken, with --predictor (0.05)."),
    ] = None,
    sharing: Annotated[
        bool, typer.Option("--sharing", help="Jobs that need a part of a GPU share it.")
    ] = False,
    pairs: Annotated[
        str | None,
        typer.Option(
            help="Two jobs of one GPU may share it: turns, mps, or a file of measured pairs (Gavel's JSON)."
        ),
    ] = None,
    uses: Annotated[
        str | None,
        typer.Option(
            help="How kinds of jobs use a GPU: CSV with kind, busy, kernel_s, memory_bytes, or driple."
        ),
    ] = None,
    rules: Annotated[
        Path | None,
        typer.Option(help="TOML with queues (quotas, cohorts, shares), reservations, preempt and kill."),
    ] = None,
    spot: Annotated[
        str | None, typer.Option(help='The last nodes are spot: "nodes=4,mean=6h,away=30min,price=0.35".')
    ] = None,
    checkpoint_write: Annotated[
        str | None,
        typer.Option(help="What each checkpoint costs that jobs write as they go: a time, or forecast (0)."),
    ] = None,
    when: Annotated[
        str | None,
        typer.Option(help="When would this job start and end? A name, or gpus=8,time=3h."),
    ] = None,
    draws: Annotated[
        int | None, typer.Option(help="Draws of how long jobs really take, for --when (40).")
    ] = None,
    buy: Annotated[str | None, typer.Option(help="What would more GPUs change? Such as 8xh100.")] = None,
    search: Annotated[
        int | None, typer.Option(help="Tune the policies' parameters by so many trials each.")
    ] = None,
    seeds: Annotated[
        int | None, typer.Option(help="So many workloads, redrawn but the first; means of all (1).")
    ] = None,
    processes: Annotated[
        int | None, typer.Option(help="Simulations at once (all cores if not given).")
    ] = None,
    ray: RayOption = None,
    by_group: Annotated[
        bool, typer.Option("--by-group", help="Figures of each virtual cluster too.")
    ] = False,
    html: Annotated[
        Path | None, typer.Option(help="Write a page: utilisation, Gantt view, distributions.")
    ] = None,
    log: Annotated[
        Path | None,
        typer.Option(help="Write every stretch of GPUs held, .csv or .parquet (a file per policy)."),
    ] = None,
    perfetto: Annotated[
        Path | None, typer.Option("--trace", help="Write a trace for Perfetto (a file per policy).")
    ] = None,
    catalog: CatalogOption = None,
    as_json: JsonFlag = False,
) -> None:
    """Simulate a cluster under scheduling policies, with predictions in the loop."""
    given = {**locals(), "trace": perfetto}
    given |= {"placement topology": placement == "topology", "cluster with slices": "@" in cluster}
    hush_ray()
    one_thread()
    from foretrain.cli.schedule_answers import answer_buy, answer_search, answer_when
    from foretrain.cli.schedule_report import report, write
    from foretrain.cli.schedule_worth import COMPARED_WORKLOADS, beliefs_of, worth_tables
    from foretrain.report.screen import progress
    from foretrain.scheduling.answers.queue_now import queue_now
    from foretrain.scheduling.answers.when import DRAWS, with_job
    from foretrain.scheduling.speeds import MOST_RISK
    from foretrain.scheduling.study import run_all

    if processes is not None and processes < 1:
        raise invalid("processes", processes, "a whole number of at least 1")
    _check_targets(html, log, perfetto)
    now = None if when is None or trace is None else queue_now(Path(trace), format)
    jobs = _jobs(trace, generate, format, first, now)
    if now is not None:
        counts = f"{now.running:,} running, {now.waiting:,} waiting, {now.history:,} ended that tell how long"
        say(f"{jobs.name}: the queue as it stands: {counts}")
        if errors is None and residuals is None and now.error:
            errors = f"{min(now.error, 9.0):.3f}"
    if seeds is None:
        seeds = COMPARED_WORKLOADS if compare_predictors else 1
    beliefs = beliefs_of(
        jobs, errors="0" if errors is None else errors, residuals=residuals, estimates=estimates, truth=truth,
        correlation=correlation, compare=compare_predictors,
    )  # fmt: skip
    by_forecast = checkpoint_write == "forecast"
    write_s = 0.0 if by_forecast else _seconds("checkpoint-write", checkpoint_write or "0")
    every_s = _seconds("checkpoint-every", checkpoint_every or "30min")
    nodes_to_rack = 16 if rack is None else rack
    scenarios = _scenarios(
        policy.split(","), cluster=cluster, rack=nodes_to_rack,
        placement=placement, rounds=rounds, beliefs=beliefs, seeds=seeds,
        source={"throughputs": throughputs, "predictor": predictor, "templates": templates,
        "slowdown_per_node": slowdown_per_node or 0.0,
        "memory_risk": MOST_RISK if memory_risk is None else memory_risk,
        "checkpoint_write_s": write_s, "checkpoint_every_s": every_s},
        world={"pairs": pairs, "uses": uses, "rules": rules, "spot": spot, "written": by_forecast},
        settings={
            "checkpoint_s": _seconds("checkpoint", checkpoint), "restart_s": _seconds("restart", restart),
            "sharing": sharing, "migrate": migrate, "mixed_gangs": mixed_gangs,
            "checkpoint_every_s": every_s,
        },
        failures=(job_mtbf, node_mtbf, repair or "1h", outages),
    )  # fmt: skip
    kinds = {(machine.device, machine.partition) for machine in scenarios[0].machines}
    given["cluster of several kinds of devices"] = len(kinds) > 1
    given["cluster with node_mtbf"] = any(machine.mtbf_s is not None for machine in scenarios[0].machines)
    refuse_what_changes_nothing(given)
    jobs, asked = (jobs, None) if when is None else with_job(jobs, when)
    jobs = _runnable(jobs, scenarios, asked)
    how: dict[str, Any] = {"processes": processes, "ray": ray, "as_json": as_json}
    if asked is not None:
        how_many = DRAWS if draws is None else draws
        answer_when(jobs, scenarios, asked, how_many, errors_told=errors is not None, **how)
    if buy is not None:
        answer_buy(jobs, scenarios, buy, nodes_to_rack, **how)
    if search is not None:
        answer_search(jobs, scenarios, search, **how)
    if (when, buy, search) != (None, None, None):
        return
    wanted = html is not None or log is not None or perfetto is not None
    first_quality = scenarios[0].quality
    with progress("simulations") as advance:
        outcomes = run_all(
            jobs,
            scenarios,
            keep=lambda each: wanted and each.seed == 0 and each.quality == first_quality,
            processes=processes,
            ray=ray,
            done=lambda count: advance(count, len(scenarios)),
        )
    if as_json:
        from foretrain.report import dump
        from foretrain.scheduling.summary import document

        typer.echo(dump(document(jobs, outcomes)))
    else:
        show(*report(jobs, outcomes, cluster, by_group=by_group))
        if compare_predictors:
            show(*worth_tables(outcomes))
    write(outcomes, jobs, html, log, perfetto)


def _check_targets(html: Path | None, log: Path | None, perfetto: Path | None) -> None:
    """Refuse files that cannot be written, before anything is simulated."""
    from foretrain.files import check_target

    if log is not None and log.suffix not in (".csv", ".parquet"):
        raise unknown("--log", str(log), (".csv", ".parquet"), "a file that ends in one of")
    for target in (html, log, perfetto):
        if target is not None:
            check_target(target)
    for library, target in (("plotly", html), ("pyarrow", log if log and log.suffix == ".parquet" else None)):
        if target is not None and find_spec(library) is None:
            raise missing(library, str(target))


# What to simulate


def _jobs(
    trace: str | None, generate: str | None, format: str | None, first: int | None, now: QueueNow | None
) -> Trace:
    """Of a file, made up, or of the queue as it stands."""
    from foretrain.scheduling.traces import read_trace
    from foretrain.scheduling.workload import TraceGenerator

    if (trace is None) == (generate is None):
        raise typer.BadParameter("give a TRACE or --generate (and only one of them)")
    if now is not None:
        jobs = now.trace
    else:
        jobs = read_trace(Path(trace), format) if trace else TraceGenerator.read(str(generate)).trace()
    if first is not None and first < 1:
        raise invalid("first", first, "a whole number of at least 1")
    return jobs if first is None else jobs.first(first)


def _runnable(jobs: Trace, scenarios: Sequence[Scenario], asked: str | None) -> Trace:
    """The jobs that the cluster can run; says which it cannot, and which lines of the trace are none."""
    from foretrain.cli.schedule_world import with_devices_of
    from foretrain.scheduling.admission import check_failures, runnable

    first = scenarios[0]
    for group in sorted(first.settings.rules.groups - {job.group for job in jobs.jobs}):
        say(f"{jobs.name}: no job is of group {group!r}, which the rules name")
    jobs = runnable(with_devices_of(jobs, first.machines), *scenarios, needed=asked)
    check_failures(jobs, first)
    for line in (*jobs.malformed.lines(), *jobs.refused.lines()):
        say(f"{jobs.name}: {line}")
    return jobs


def _scenarios(
    policies: Sequence[str], *, cluster: str, rack: int, placement: str, rounds: str | None,
    beliefs: Sequence[dict[str, Any]], seeds: int,
    source: dict[str, Any], settings: dict[str, Any], world: dict[str, Any],
    failures: tuple[str | None, str | None, str, Path | None],
) -> list[Scenario]:  # fmt: skip
    from foretrain.cli.schedule_world import pairs_of, spot_of, uses_of, written_by_kind
    from foretrain.scheduling.clusters import read_machines, sections_of
    from foretrain.scheduling.rounds.simulation import LEAST_ROUND_S
    from foretrain.scheduling.rules import Rules, read_rules
    from foretrain.scheduling.sharing.use import WAYS
    from foretrain.scheduling.simulator import Settings
    from foretrain.scheduling.speeds import ThroughputTable
    from foretrain.scheduling.study import Scenario, SpeedSource

    if seeds < 1:
        raise invalid("seeds", seeds, "a whole number of at least 1")
    rounds_s = None if rounds is None else _seconds("rounds", rounds)
    if rounds_s is not None and not LEAST_ROUND_S <= rounds_s < math.inf:
        raise invalid("--rounds", rounds, f"a time of at least {LEAST_ROUND_S:g} s")
    table = source.get("throughputs")
    devices = ThroughputTable.load(table).devices if table else ()
    machines = read_machines(cluster, rack=rack, devices=devices)
    machines, model = _failing(machines, *failures)
    speeds = SpeedSource(**source, sections=sections_of(cluster))
    if world["pairs"] in WAYS or world["uses"] is not None or any("@" in each.device for each in machines):
        speeds = dataclasses.replace(speeds, uses=uses_of(world["uses"], speeds, machines))
    if world["written"]:
        speeds = dataclasses.replace(speeds, checkpoint_writes_s=written_by_kind(speeds, machines))
    shared: dict[str, Any] = {
        "machines": machines,
        "spot": spot_of(world["spot"]),
        "placement": placement,
        "speeds": speeds,
        "settings": Settings(
            **settings,
            failures=model,
            pairs=pairs_of(world["pairs"], speeds.uses),
            rules=Rules() if world["rules"] is None else read_rules(world["rules"]),
        ),
        "rounds_s": rounds_s,
    }
    names = [name.strip() for name in policies]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise InputError(f"--policy: {twice!r} is named twice; name each policy once")
    combinations = itertools.product(names, beliefs, range(seeds))
    scenarios = [
        Scenario(policy=policy, seed=seed, redraw=True, **quality, **shared)
        for policy, quality, seed in combinations
    ]
    for scenario in scenarios:
        _check(scenario)
    return scenarios


def _check(scenario: Scenario) -> None:
    """Names that are wrong are told before anything runs."""
    from foretrain.scheduling import policies
    from foretrain.scheduling.placement import placement
    from foretrain.scheduling.rounds.policies import ROUND_POLICIES

    if not (
        scenario.policy in ROUND_POLICIES or scenario.policy in policies.names() or ".py:" in scenario.policy
    ):
        known = dict.fromkeys((*policies.names(), *ROUND_POLICIES))
        raise unknown("policy", scenario.policy, known, "a class as file.py:Class or one of", most=len(known))
    if scenario.policy not in ROUND_POLICIES:
        policies.get(scenario.policy)
    placement(scenario.placement)
    scenario.check()


def _seconds(name: str, text: str) -> float:
    from foretrain.units import parse_seconds

    return 0.0 if text == "0" else parse_seconds(text, f"--{name}")


def _failing(
    machines: list[Machine], job_mtbf: str | None, node_mtbf: str | None, repair: str, outages: Path | None
) -> tuple[list[Machine], FailureModel]:
    """The nodes with how often they fail, and what else fails."""
    from foretrain.cli.schedule_world import failing_as, mtbf_of
    from foretrain.scheduling.failures import FailureModel, read_outages

    of_jobs, jobs_on = mtbf_of("--job-mtbf", job_mtbf, machines)
    of_nodes, nodes_of = mtbf_of("--node-mtbf", node_mtbf, machines)
    return failing_as(machines, of_nodes, nodes_of), FailureModel(
        job_mtbf_gpu_s=math.inf if of_jobs is None else of_jobs,
        job_mtbf_of=jobs_on,
        node_mtbf_s=math.inf if of_nodes is None else of_nodes,
        repair_s=_seconds("repair", repair),
        outages=() if outages is None else tuple(read_outages(outages)),
    )
