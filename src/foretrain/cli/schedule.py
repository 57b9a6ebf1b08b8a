"""The command that simulates a cluster under scheduling policies: ``schedule``."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from foretrain.cli import completion
from foretrain.cli.app import JsonFlag, registry, say, show
from foretrain.cli.job_options import CatalogOption
from foretrain.cli.scale_out import RayOption, ScaleOut, hush_ray, one_thread
from foretrain.cli.schedule_checks import refuse_what_changes_nothing
from foretrain.errors import InputError, invalid, unknown

if TYPE_CHECKING:
    from rich.console import RenderableType

    from foretrain.scheduling.failures import FailureModel
    from foretrain.scheduling.jobs import Trace
    from foretrain.scheduling.metrics import Metrics
    from foretrain.scheduling.queue_now import QueueNow
    from foretrain.scheduling.study import Outcome, Scenario
    from foretrain.scheduling.summary import Key

_WIDE = (
    ("average JCT", "median", "p95", "p99", "queueing"),
    ("makespan", "utilisation", "fairness", "preemptions", "lost GPU h", "cost", "energy"),
    ("killed", "late"),
)
_NARROW = (
    ("average JCT", "median", "p95"),
    ("p99", "queueing", "makespan"),
    ("utilisation", "fairness", "preemptions", "lost GPU h", "cost"),
    ("energy", "killed", "late"),
)
"""The figures of each table: as many as fit beside the policy, or beside the policy and the quality of its
estimates."""

_TOLD = ("failures of a job, per GPU", "failures of a node", "outages", "spot nodes")
"""Settings below the tables: what makes them another answer; a page has them all."""


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
        str | None, typer.Option(help="Format of the trace, where its look does not tell.")
    ] = None,
    first: Annotated[int | None, typer.Option(help="Only the jobs that arrive first.")] = None,
    placement: Annotated[str, typer.Option(help="packed, spread, random or topology.")] = "packed",
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
        str | None, typer.Option(help="Mean GPU time between failures of jobs, such as 1000h.")
    ] = None,
    node_mtbf: Annotated[str | None, typer.Option(help="Mean time between failures of a node.")] = None,
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
    from foretrain.cli.schedule_world import with_devices_of
    from foretrain.cli.schedule_worth import COMPARED_WORKLOADS, beliefs_of, worth_tables
    from foretrain.files import check_target
    from foretrain.report.screen import progress
    from foretrain.scheduling.admission import check_failures, runnable
    from foretrain.scheduling.programmes import has_ecos
    from foretrain.scheduling.queue_now import queue_now
    from foretrain.scheduling.speeds import MOST_RISK
    from foretrain.scheduling.study import run_all
    from foretrain.scheduling.when import DRAWS, with_job

    if processes is not None and processes < 1:
        raise invalid("processes", processes, "a whole number of at least 1")
    if log is not None and log.suffix not in (".csv", ".parquet"):
        raise unknown("--log", str(log), (".csv", ".parquet"), "a file that ends in one of")
    for target in (html, log, perfetto):
        if target is not None:
            check_target(target)
    now = None if when is None or trace is None else queue_now(Path(trace), format)
    jobs = _jobs(trace, generate, format, first, now)
    if now is not None:
        told = f"{now.running:,} running, {now.waiting:,} waiting, {now.history:,} ended that tell how long"
        say(f"{jobs.name}: the queue as it stands: {told}")
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
        jobs, policy.split(","), cluster=cluster, rack=nodes_to_rack,
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
            "failures": _failures(job_mtbf, node_mtbf, repair or "1h", outages),
        },
    )  # fmt: skip
    kinds = {(machine.device, machine.partition) for machine in scenarios[0].machines}
    refuse_what_changes_nothing({**given, "cluster of several kinds of devices": len(kinds) > 1})
    jobs, asked = (jobs, None) if when is None else with_job(jobs, when)
    for group in sorted(scenarios[0].settings.rules.groups - {job.group for job in jobs.jobs}):
        say(f"{jobs.name}: no job is of group {group!r}, which the rules name")
    jobs = runnable(with_devices_of(jobs, scenarios[0].machines), *scenarios, needed=asked)
    check_failures(jobs, scenarios[0])
    if not has_ecos() and any(
        scenario.in_rounds and scenario.policy not in ("fifo", "gavel_fifo") for scenario in scenarios
    ):
        say(
            "shares of time by our own solver, which may serve "
            "jobs that are alike in another order than Gavel; install foretrain[gavel] for its solver"
        )
    for line in (*jobs.malformed.lines(), *jobs.refused.lines()):
        say(f"{jobs.name}: {line}")
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
        show(*_report(jobs, outcomes, cluster, by_group=by_group))
        if compare_predictors:
            show(*worth_tables(outcomes))
    _write(outcomes, jobs, html, log, perfetto)


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


def _scenarios(
    jobs: Trace, policies: Sequence[str], *, cluster: str, rack: int, placement: str, rounds: str | None,
    beliefs: Sequence[dict[str, Any]], seeds: int,
    source: dict[str, Any], settings: dict[str, Any], world: dict[str, Any],
) -> list[Scenario]:  # fmt: skip
    from foretrain.cli.schedule_world import pairs_of, spot_of, uses_of, written_by_kind
    from foretrain.scheduling.clusters import read_machines, sections_of
    from foretrain.scheduling.rules import Rules, read_rules
    from foretrain.scheduling.sharing.use import WAYS
    from foretrain.scheduling.simulator import Settings
    from foretrain.scheduling.speeds import ThroughputTable
    from foretrain.scheduling.study import Scenario, SpeedSource

    if seeds < 1:
        raise invalid("seeds", seeds, "a whole number of at least 1")
    rounds_s = None if rounds is None else _seconds("rounds", rounds)
    if rounds_s is not None and not rounds_s > 0:
        raise invalid("--rounds", rounds, "a time above 0")
    table = source.get("throughputs")
    devices = ThroughputTable.load(table).devices if table else ()
    machines = read_machines(cluster, rack=rack, devices=devices)
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
    from foretrain.scheduling.round_policies import ROUND_POLICIES

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


def _failures(job_mtbf: str | None, node_mtbf: str | None, repair: str, outages: Path | None) -> FailureModel:
    from foretrain.scheduling.failures import FailureModel, read_outages

    return FailureModel(
        job_mtbf_gpu_s=math.inf if job_mtbf is None else _seconds("job-mtbf", job_mtbf),
        node_mtbf_s=math.inf if node_mtbf is None else _seconds("node-mtbf", node_mtbf),
        repair_s=_seconds("repair", repair),
        outages=() if outages is None else tuple(read_outages(outages)),
    )


# Results


def _report(
    jobs: Trace, outcomes: Sequence[Outcome], cluster: str, *, by_group: bool
) -> list[RenderableType]:
    from foretrain.report.tables import table
    from foretrain.scheduling.clusters import hardware_of
    from foretrain.scheduling.page import figures
    from foretrain.scheduling.page_parts import settings_of
    from foretrain.scheduling.study import EXACT
    from foretrain.scheduling.summary import mean_outcomes
    from foretrain.units import counted

    means = mean_outcomes(outcomes)
    several = len({quality for _, quality in means}) > 1
    parts: list[RenderableType] = []
    for chosen in _NARROW if several else _WIDE:
        rows, heads = [], []
        known = {name for found in means.values() for name in figures(found)}
        shown = [name for name in chosen if name in known]
        if not shown:
            continue
        for (policy, quality), found in means.items():
            cells = {name: figures(found).get(name, "0") for name in shown}
            extra = {"estimates": quality.text} if several else {}
            if several and "average JCT" in chosen:
                extra["vs exact"] = _against(means, policy, found)
            heads = ["policy", *extra, *cells]
            rows.append([policy, *extra.values(), *cells.values()])
        parts.append(table(heads, rows, right=heads[1:]))
    parts += _prices(outcomes, means)
    if by_group:
        parts.append(_groups(outcomes))
    first = outcomes[0].scenario
    seeds = len({outcome.scenario.seed for outcome in outcomes})
    mean = f", means of {seeds} workloads, the first as given, the others redrawn" if seeds > 1 else ""
    parts.append(
        f"{jobs.name} ({jobs.format}): {counted(len(jobs.jobs), 'job')} "
        f"on {hardware_of(cluster, first.machines)}{mean}"
    )
    told = {name: value for name, value in settings_of(first).items() if name in _TOLD}
    if not several and first.quality != EXACT:
        told = {"estimates": first.quality.text, **told}
    parts += [f"{name}: {value}" for name, value in told.items()]
    if any("@" in machine.device for machine in first.machines):
        parts.append("energy: not told of slices, of which the catalogue has no power")
    return parts


def _against(means: dict[Key, Metrics], policy: str, found: Metrics) -> str:
    from foretrain.scheduling.summary import cost_of_errors

    cost = cost_of_errors(means, policy, found)
    return "" if cost is None else f"{cost:+.1%}"


def _prices(outcomes: Sequence[Outcome], means: dict[Key, Metrics]) -> list[str]:
    """The cost of errors in words, for policies that look at estimates."""
    from foretrain.scheduling.summary import cost_of_errors

    lines = {}
    for scenario in (outcome.scenario for outcome in outcomes):
        found = means[scenario.policy, scenario.quality]
        cost = cost_of_errors(means, scenario.policy, found)
        if cost is not None and abs(cost) > 1e-12:
            whose = f" ({scenario.residuals_of})" if scenario.residuals_of else ""
            what = f"{scenario.quality.off} MAPE" if scenario.beliefs == "drawn" else scenario.beliefs
            verb, size = ("costs you", cost) if cost >= 0 else ("gains you", -cost)
            lines[scenario.policy, scenario.quality] = (
                f"{scenario.policy}: {what}{whose} {verb} {size:.1%} of average JCT"
            )
    return list(lines.values())


def _groups(outcomes: Sequence[Outcome]) -> RenderableType:
    from foretrain.report.tables import table
    from foretrain.scheduling.page import figures

    rows = []
    for outcome in outcomes:
        if outcome.scenario.seed == 0:
            for group, found in outcome.groups.items():
                cells = figures(found)
                rows.append(
                    [
                        outcome.scenario.policy,
                        group,
                        f"{found.jobs:,}",
                        cells["average JCT"],
                        cells["p95"],
                        cells["queueing"],
                        cells["utilisation"],
                    ]
                )
    heads = ["policy", "group", "jobs", "average JCT", "p95", "queueing", "utilisation"]
    return table(heads, rows, right=heads[2:])


def _write(
    outcomes: Sequence[Outcome], jobs: Trace, html: Path | None, log: Path | None, perfetto: Path | None
) -> None:
    from foretrain.scheduling.logs import write_log, write_perfetto
    from foretrain.scheduling.page import write_page

    results = [outcome.result for outcome in outcomes if outcome.result is not None]
    if html is not None:
        title = f"{jobs.name}: {', '.join(result.policy for result in results)}"
        write_page(results, title, html, outcomes)
        say(f"page in {html}")
    for path, write in ((log, write_log), (perfetto, write_perfetto)):
        for result in results if path is not None else ():
            assert path is not None
            file = (
                path
                if len(results) == 1
                else path.with_name(f"{path.stem}-{Path(result.policy).name.replace(':', '-')}{path.suffix}")
            )
            say(f"{write(result, file):,} rows in {file}")
