"""Many simulations at once: policies, seeds and qualities of estimates in; their figures side by side out, from parallel processes."""

from __future__ import annotations

import dataclasses
import multiprocessing
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass, field
from pathlib import Path

from foretrain import predictors
from foretrain.errors import ForetrainError, InputError
from foretrain.job import Job
from foretrain.scheduling import policies
from foretrain.scheduling.estimates import Estimates, Exact, LogNormal, Residuals
from foretrain.scheduling.jobs import Malformed, Trace
from foretrain.scheduling.machines import Machine
from foretrain.scheduling.metrics import Metrics, metrics, metrics_by_group
from foretrain.scheduling.placement import placement
from foretrain.scheduling.result import Result
from foretrain.scheduling.round_policies import ROUND_POLICIES, round_policy
from foretrain.scheduling.rounds import Rounds
from foretrain.scheduling.simulator import Settings, Simulation
from foretrain.scheduling.speeds import PredictedSpeeds, Speeds, ThroughputTable, TraceSpeeds


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeedSource:
    """Where speeds come from: a table of throughputs, a predictor with templates by job type, or (neither) the trace."""

    throughputs: Path | None = None
    predictor: str | None = None
    templates: Path | None = None
    """A folder with a job file for each job type: ``<kind>.toml``."""
    slowdown_per_node: float = 0.0

    def __post_init__(self) -> None:
        if (self.predictor is None) != (self.templates is None):
            raise InputError("predictor: needs templates, a folder with a job file for each job type (and templates need a predictor)")

    def make(self) -> Speeds:
        table = ThroughputTable.load(self.throughputs) if self.throughputs else TraceSpeeds(slowdown_per_node=self.slowdown_per_node)
        if self.predictor is None or self.templates is None:
            return table
        files = sorted(self.templates.glob("*.toml"))
        if not files:
            raise InputError(f"templates: {self.templates} holds no job files (*.toml)")
        return PredictedSpeeds(predictors.get(self.predictor), {file.stem: Job.load(file) for file in files}, otherwise=table)


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """One simulation, but for its trace."""

    policy: str
    machines: Sequence[Machine]
    placement: str = "packed"
    speeds: SpeedSource = field(default_factory=SpeedSource)
    error: float = 0.0
    """Mean absolute percentage error of the estimates that policies see, as a fraction."""
    residuals: Path | None = None
    settings: Settings = field(default_factory=Settings)
    rounds_s: float | None = None
    """Length of a round in the round-based mode; None for the event-driven one."""
    seed: int = 0

    @property
    def in_rounds(self) -> bool:
        """Gavel's policies always, the others never; first in, first out as asked."""
        return self.policy in ROUND_POLICIES and (self.rounds_s is not None or self.policy not in policies.names())

    def estimates(self) -> Estimates:
        if self.residuals is not None:
            return Residuals.load(self.residuals, self.seed)
        return LogNormal(self.error, self.seed) if self.error else Exact()

    def run(self, trace: Trace, tell: Callable[[int], None] = lambda _: None) -> Result:
        if self.in_rounds:
            policy, speeds = round_policy(self.policy, self.seed), self.speeds.make()
            return Rounds(trace.jobs, self.machines, policy, speeds, round_s=self.rounds_s or 360.0, seed=self.seed).run()
        return Simulation(
            trace.jobs,
            self.machines,
            policies.get(self.policy),
            placement=placement(self.placement, self.seed),
            speeds=self.speeds.make(),
            estimates=self.estimates(),
            settings=dataclasses.replace(self.settings, seed=self.seed),
            tell=tell,
        ).run()


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What a scenario gave; the whole result only where it was asked for."""

    scenario: Scenario
    metrics: Metrics
    groups: dict[str, Metrics]
    result: Result | None = None


def runnable(trace: Trace, scenario: Scenario) -> Trace:
    """The jobs whose speed the table of throughputs tells; the others are counted as malformed."""
    path = scenario.speeds.throughputs
    if path is None or scenario.speeds.predictor is not None:
        return trace
    table, devices = ThroughputTable.load(path), {machine.device for machine in scenario.machines}
    known = [job for job in trace.jobs if table.knows(job, devices)]
    if not known:
        raise InputError(f"{path}: has no throughput of any job of {trace.name}")
    lost, reason = len(trace.jobs) - len(known), f"no throughput of that job type on that many GPUs in {path.name}"
    if not lost:
        return trace
    first = next(number for number, job in enumerate(trace.jobs, start=1) if not table.knows(job, devices))
    counts, firsts = {**trace.malformed.counts, reason: lost}, {**trace.malformed.first, reason: first}
    return dataclasses.replace(trace, jobs=known, malformed=Malformed(counts=counts, first=firsts))


_trace: Trace | None = None


def _remember(trace: Trace) -> None:
    """In each worker process, once."""
    global _trace
    _trace = trace


def _run_one(scenario: Scenario, keep: bool) -> Outcome:
    assert _trace is not None
    return run_scenario(_trace, scenario, keep=keep)


def run_scenario(trace: Trace, scenario: Scenario, *, keep: bool = False, tell: Callable[[int], None] = lambda _: None) -> Outcome:
    """One simulation in this process."""
    result = scenario.run(trace, tell)
    return Outcome(scenario=scenario, metrics=metrics(result), groups=metrics_by_group(result), result=result if keep else None)


def run_all(
    trace: Trace,
    scenarios: Sequence[Scenario],
    *,
    keep: Callable[[Scenario], bool] = lambda _: False,
    processes: int | None = None,
    ray: bool = False,
    done: Callable[[int], None] = lambda _: None,
) -> list[Outcome]:
    """All simulations, in the order given; ``done`` hears how many have ended."""
    outcomes: dict[int, Outcome] = {}
    run = _on_ray if ray else _here if min(processes or os.cpu_count() or 1, len(scenarios)) == 1 else _in_processes
    for place, outcome in run(trace, scenarios, keep, processes):
        outcomes[place] = outcome
        done(len(outcomes))
    return [outcomes[place] for place in range(len(scenarios))]


_Keep = Callable[[Scenario], bool]


def _here(trace: Trace, scenarios: Sequence[Scenario], keep: _Keep, processes: int | None) -> Iterator[tuple[int, Outcome]]:
    for place, scenario in enumerate(scenarios):
        yield place, run_scenario(trace, scenario, keep=keep(scenario))


def _in_processes(trace: Trace, scenarios: Sequence[Scenario], keep: _Keep, processes: int | None) -> Iterator[tuple[int, Outcome]]:
    workers = min(processes or os.cpu_count() or 1, len(scenarios))
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(workers, mp_context=context, initializer=_remember, initargs=(trace,)) as pool:
        places = {pool.submit(_run_one, scenario, keep(scenario)): place for place, scenario in enumerate(scenarios)}
        for future in as_completed(places):
            yield places[future], future.result()


def _on_ray(trace: Trace, scenarios: Sequence[Scenario], keep: _Keep, processes: int | None) -> Iterator[tuple[int, Outcome]]:
    try:
        import ray
    except ImportError as error:
        raise ForetrainError("ray: not installed; install foretrain[ray]") from error
    if not ray.is_initialized():
        ray.init(log_to_driver=False)
    shared, task = ray.put(trace), ray.remote(run_scenario)
    places = {task.remote(shared, scenario, keep=keep(scenario)): place for place, scenario in enumerate(scenarios)}
    waiting = list(places)
    while waiting:
        (ready,), waiting = ray.wait(waiting)
        yield places[ready], ray.get(ready)


def mean_metrics(several: Sequence[Metrics]) -> Metrics:
    """The mean of each figure over seeds."""
    names = [each.name for each in dataclasses.fields(Metrics)]
    values = {name: [getattr(each, name) for each in several] for name in names}
    means = {name: None if None in column else sum(column) / len(column) for name, column in values.items()}
    whole = {name: round(sum(values[name]) / len(several)) for name in ("jobs", "preemptions", "failures")}
    return Metrics(**{**means, **whole})
