"""Runs many simulations at once, over policies, seeds and qualities of estimates, in parallel processes."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from foretrain import predictors
from foretrain.errors import InputError, invalid, unknown
from foretrain.job import Job
from foretrain.predictors.base import Predictor
from foretrain.scheduling import policies
from foretrain.scheduling.capabilities import refuse_what_is_not_honoured
from foretrain.scheduling.checkpointing import CheckpointedSpeeds
from foretrain.scheduling.correlation import Shares
from foretrain.scheduling.estimates import (
    Estimates,
    Exact,
    History,
    Inverse,
    LogNormal,
    Requested,
    ResidualEstimates,
)
from foretrain.scheduling.failures import FailureModel
from foretrain.scheduling.fitting import FittingSpeeds, checked_risk
from foretrain.scheduling.jobs import Trace
from foretrain.scheduling.machines import Machine, Machines
from foretrain.scheduling.metrics import Metrics, metrics, metrics_by_group
from foretrain.scheduling.placement import placement
from foretrain.scheduling.policies.outlook import kept_in_pools
from foretrain.scheduling.result import Result
from foretrain.scheduling.rounds.policies import ROUND_POLICIES, round_policy
from foretrain.scheduling.rounds.simulation import ROUND_S, Rounds
from foretrain.scheduling.sharing.mig import SlicedSpeeds
from foretrain.scheduling.sharing.use import Use
from foretrain.scheduling.simulator import Settings, Simulation
from foretrain.scheduling.speeds import MOST_RISK, PredictedSpeeds, Speeds, ThroughputTable, TraceSpeeds
from foretrain.scheduling.spot import Spot
from foretrain.scheduling.spreading import Spreader
from foretrain.scheduling.workload import redrawn


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeedSource:
    """Where speeds come from: a table of throughputs, a predictor with templates, or (neither) the trace."""

    throughputs: Path | None = None
    predictor: str | None = None
    templates: Path | None = None
    """A folder with a job file for each job type: ``<kind>.toml``."""
    sections: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """What a job file says of the nodes and links of each kind of device; where it is silent, the templates
    hold."""
    slowdown_per_node: float = 0.0
    memory_risk: float = MOST_RISK
    """Chance of running out of memory at which a job is not put on a device."""
    uses: Mapping[str, Use] = field(default_factory=dict)
    """How each kind of job uses a device, for slices of it."""
    checkpoint_write_s: float = 0.0
    """What a checkpoint costs a job that writes them as it goes; 0 for none."""
    checkpoint_writes_s: Mapping[str, float] = field(default_factory=dict)
    """The same by kind of job, in its place."""
    checkpoint_every_s: float = 1800.0

    def __post_init__(self) -> None:
        if (self.predictor is None) != (self.templates is None):
            needs = "a folder with a job file for each job type (and templates need a predictor)"
            raise InputError(f"predictor: needs templates, {needs}")
        checked_risk(self.memory_risk)
        if not 0 <= self.slowdown_per_node < math.inf:
            raise invalid("slowdown_per_node", self.slowdown_per_node, "a number of at least 0")

    def make(self) -> Speeds:
        speeds: Speeds = SlicedSpeeds(FittingSpeeds(self._whole()), self.uses)
        if self.writes_checkpoints:
            write_s, by_kind = self.checkpoint_write_s, self.checkpoint_writes_s
            speeds = CheckpointedSpeeds(speeds, self.checkpoint_every_s, write_s, by_kind)
        return speeds

    @property
    def writes_checkpoints(self) -> bool:
        return bool(self.checkpoint_write_s or self.checkpoint_writes_s)

    def _whole(self) -> Speeds:
        table: Speeds = TraceSpeeds(slowdown_per_node=self.slowdown_per_node)
        if self.throughputs:
            table = ThroughputTable.load(self.throughputs)
        if self.predictor is None or self.templates is None:
            return table
        predictor, templates = self.predicted()
        return PredictedSpeeds(
            predictor, templates, otherwise=table, sections=self.sections, memory_risk=self.memory_risk
        )

    def predicted(self) -> tuple[Predictor, dict[str, Job]]:
        """The predictor and the templates."""
        assert self.templates is not None
        assert self.predictor is not None
        files = sorted(self.templates.glob("*.toml"))
        if not files:
            raise InputError(f"templates: {self.templates} holds no job files (*.toml)")
        return predictors.get(self.predictor), {file.stem: _template(file) for file in files}


def _template(file: Path) -> Job:
    try:
        return Job.load(file)
    except InputError as error:
        raise error if str(error).startswith(str(file)) else InputError(f"{file}: {error}") from error


class Quality(NamedTuple):
    """How good estimates are, by which simulations are told apart."""

    beliefs: str = "drawn"
    residuals_of: str | None = None
    error: float = 0.0

    @property
    def off(self) -> str:
        """The error in words: as it was given, or rounded where it was measured."""
        percent = 100 * self.error
        if self.residuals_of is None:
            return f"{percent:.6g}%"
        return f"{percent:.0f}%" if percent >= 1 else f"{percent:.1g}%"

    @property
    def text(self) -> str:
        """For people."""
        if self.beliefs != "drawn":
            return self.beliefs
        if self.residuals_of is not None:
            return f"{self.residuals_of} ({self.off} off)"
        return f"{self.off} off" if self.error else "exact"


EXACT = Quality()


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
    """Estimates that are off as a predictor was on measured runs, by the file of its evaluation."""
    residuals_of: str | None = None
    """The predictor."""
    settings: Settings = field(default_factory=Settings)
    rounds_s: float | None = None
    """Length of a round in the round-based mode; None for the event-driven one."""
    beliefs: str = "drawn"
    """What policies go by: drawn (with the error or the residuals), requested or history."""
    truth_of: str | None = None
    """Where given, speeds are forecasts, and what happens is off them as this predictor was."""
    shares: Shares | None = None
    """How alike errors are within users and models; None for as measured."""
    redraw: bool = False
    """Whether seeds other than 0 draw another workload like the trace."""
    seed: int = 0
    parameters: Mapping[str, float | int | bool | tuple[float, ...]] = field(default_factory=dict)
    """Of the policy, in place of its own."""
    spot: Spot | None = None

    def __post_init__(self) -> None:
        if self.spot is not None:
            object.__setattr__(self, "machines", self.spot.machines(self.machines))

    @property
    def in_rounds(self) -> bool:
        """Gavel's policies always, first in, first out where the length of a round is given, others never."""
        return self.policy in ROUND_POLICIES or (self.policy == "fifo" and self.rounds_s is not None)

    @property
    def options(self) -> list[str]:
        """The options in use that not every policy can honour."""
        settings, failures = self.settings, self.settings.failures
        in_use = {
            "sharing": settings.sharing,
            "placement": self.placement != "packed",
            "slowdown_per_node": self.speeds.slowdown_per_node > 0,
            "checkpoint": settings.checkpoint_s > 0,
            "restart": settings.restart_s > 0,
            "job_mtbf": failures.jobs_fail,
            "node_mtbf": failures.nodes_fail(self.machines),
            "outages": bool(failures.outages),
            "residuals": self.residuals_of is not None,
            "errors": self.error > 0,
            "estimates": self.beliefs != "drawn",
            "truth": self.truth_of is not None,
            "rounds": self.rounds_s is not None,
            "spot": self.spot is not None,
            "checkpoint_write": self.speeds.writes_checkpoints,
        }
        in_use["limits"] = settings.rules.kill
        in_use["partitions"] = any(machine.partition for machine in self.machines)
        used_options = [name for name, used in in_use.items() if used]
        return [*used_options, *(name for name in settings.options if name not in used_options)]

    def check(self) -> None:
        """Refuse what the policy cannot honour."""
        name = "gavel_fifo" if self.in_rounds and self.policy == "fifo" else self.policy
        honours = policies.get(name).honours if ".py:" in name else ()
        refuse_what_is_not_honoured(name, self.options, honours)
        if self.settings.rules.reservations:
            kept_in_pools(self.settings.rules.reservations, Machines(self.machines).pools)
        if self.in_rounds and ROUND_POLICIES[name].packs and self.settings.pairs is None:
            raise InputError(f"pairs: policy {name} needs them: what two jobs on a GPU cost each other")

    @property
    def quality(self) -> Quality:
        """How good the estimates are."""
        return Quality(self.beliefs, self.residuals_of, self.error)

    @property
    def estimates_are(self) -> str:
        """The same for people."""
        return self.quality.text

    def estimates(self) -> Estimates:
        if self.beliefs != "drawn":
            return BELIEFS[self.beliefs]()
        if self.residuals is not None and self.residuals_of is not None:
            if self.residuals_of == self.truth_of:
                return Inverse(self._truth())
            return ResidualEstimates.load(self.residuals, self.seed, self.shares)[self.residuals_of]
        return LogNormal(self.error, self.seed, self.shares) if self.error else Exact()

    def _truth(self) -> Estimates:
        """What happens, over what is forecast."""
        assert self.residuals is not None
        assert self.truth_of is not None
        found = ResidualEstimates.load(self.residuals, self.seed + _TRUTH_SEED, self.shares)
        if self.truth_of not in found:
            raise unknown("truth", self.truth_of, found, "a predictor of the residuals:")
        return Inverse(found[self.truth_of])

    def run(self, trace: Trace, tell: Callable[[int], None] = lambda _: None) -> Result:
        self.check()
        if self.in_rounds:
            policy, round_s = round_policy(self.policy, self.seed), self.rounds_s or ROUND_S
            speeds = self.speeds.make()
            pairs, seed = self.settings.pairs, self.seed
            return Rounds(
                trace.jobs, self.machines, policy, speeds, round_s=round_s, seed=seed, pairs=pairs
            ).run()
        return Simulation(
            trace.jobs,
            self.machines,
            policies.get(self.policy, self.parameters),
            placement=placement(self.placement, self.seed),
            speeds=self.speeds.make(),
            estimates=self.estimates(),
            truth=None if self.truth_of is None else self._truth(),
            settings=dataclasses.replace(self.settings, seed=self.seed, failures=self._failures()),
            tell=tell,
        ).run()

    def _failures(self) -> FailureModel:
        """Those of the settings, and spot nodes that are taken back."""
        return dataclasses.replace(self.settings.failures, spot=self.spot)


_TRUTH_SEED = 1_000_003
"""Added to the seed, so that what happens is drawn apart from what is believed."""
BELIEFS: dict[str, type[Estimates]] = {"requested": Requested, "history": History}


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What a scenario gave; the whole result only where it was asked for."""

    scenario: Scenario
    metrics: Metrics
    groups: dict[str, Metrics]
    result: Result | None = None


def run_scenario(
    trace: Trace, scenario: Scenario, *, keep: bool = False, tell: Callable[[int], None] = lambda _: None
) -> Outcome:
    """One simulation in this process."""
    result = scenario.run(redrawn(trace, scenario.seed) if scenario.redraw else trace, tell)
    outcome = Outcome(scenario=scenario, metrics=metrics(result), groups=metrics_by_group(result))
    return dataclasses.replace(outcome, result=result) if keep else outcome


def run_all(
    trace: Trace,
    scenarios: Sequence[Scenario],
    *,
    keep: Callable[[Scenario], bool] = lambda _: False,
    processes: int | None = None,
    ray: str | None = None,
    done: Callable[[int], None] = lambda _: None,
) -> list[Outcome]:
    """All simulations in order, by parallel processes or a Ray cluster; ``done`` hears how many ended."""
    items = [(scenario, keep(scenario)) for scenario in scenarios]
    with Spreader(_run_one, trace, processes=processes, ray=ray) as spread:
        return spread.run(items, done)


def _run_one(trace: Trace, item: tuple[Scenario, bool]) -> Outcome:
    scenario, keep = item
    return run_scenario(trace, scenario, keep=keep)


def mean_metrics(several: Sequence[Metrics]) -> Metrics:
    """The mean of each figure over seeds."""
    names = [each.name for each in dataclasses.fields(Metrics)]
    values = {name: [getattr(each, name) for each in several] for name in names}
    means = {name: None if None in column else sum(column) / len(column) for name, column in values.items()}
    whole = {
        name: round(sum(values[name]) / len(several))
        for name in ("jobs", "preemptions", "failures", "killed")
    }
    return Metrics(**{**means, **whole})
