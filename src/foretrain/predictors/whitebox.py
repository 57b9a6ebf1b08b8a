"""Forecasts a job by looking inside its step; a white-box predictor adds its costs, its host and how sure it
is."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Iterator, Mapping
from typing import ClassVar

from foretrain.catalog.hosts import PARTS
from foretrain.cluster import Cluster
from foretrain.costs.base import CostModel
from foretrain.costs.host import MEASURED_HOST, DispatchHost
from foretrain.estimate import WIDTH_80
from foretrain.forecast import (
    Estimate,
    Factors,
    Forecast,
    RankMemory,
    usable_memory,
)
from foretrain.job import Job
from foretrain.predictors.base import Predictor
from foretrain.recent import Recent
from foretrain.step.assembly import QUANTITIES, Spread, assemble
from foretrain.step.balance import balanced
from foretrain.step.graph import as_compiled, step_graph
from foretrain.step.layout import Layout, lay_out
from foretrain.step.play import Step, play, step_time_s
from foretrain.step.stage_memory import quick_memory
from foretrain.step.tuning import Tuning

_STEPS = Recent[Step](most=1_000_000)
"""Those that were played last, by their calls."""


def _size(step: Step) -> float:
    return float(len(step.layout.graph.ops)) * max(1, len(step.layout.by_group))


class WhiteBoxPredictor(Predictor):
    """``Job -> step graph -> layout -> play -> Step -> assemble -> Forecast``, the same for every plan."""

    quantities: ClassVar[frozenset[str]] = QUANTITIES
    gap_s: ClassVar[float] = 0.0
    """Between two kernels in a full queue."""

    @abstractmethod
    def costs_for(self, job: Job) -> CostModel:
        """Give the model of what operators cost."""

    @abstractmethod
    def host_for(self, job: Job) -> DispatchHost:
        """The host that issues them, before the job's own node is looked at."""

    @abstractmethod
    def spread_of(self, step: Step) -> Spread:
        """Say how far measured runs lie from such forecasts."""

    def tuning_for(self, job: Job) -> Tuning:
        """Factors on the parts of a step that a calibration has found."""
        return Tuning()

    def correction(self, step: Step) -> tuple[float, tuple[str, ...]]:
        """A factor on the time of the step, and what to say of it."""
        return 1.0, ()

    def corrected(self, step: Step, factor: float) -> Step:
        """The step with its time by a factor."""
        return step.scaled(factor)

    def predict(self, job: Job) -> Forecast:
        step = self.step(job)
        factor, notes = self.correction(step)
        step = step if factor == 1.0 else self.corrected(step, factor)
        notes = (*notes, *_host_notes(job))
        return assemble(step, self.spread_of(step), predictor=self.name, notes=notes)

    def step(self, job: Job) -> Step:
        """The step of a job, before any correction; played once for all lengths of its training."""
        job = as_compiled(job)
        tuning, short = self.tuning_for(job), job.of_step
        key = (short, step_graph(job), self.costs_for(job), self.host_for(job), tuning, self.gap_s)
        step = _STEPS.get(key, lambda: play(self.layout(short).tuned(tuning)), _size)
        return step if step.layout.job is job else step.of_job(job)

    def layout(self, job: Job) -> Layout:
        """The job laid out and costed, on the hosts that its nodes have, without any tuning."""
        cluster, host = job.cluster, self.host_for(job)
        groups = cluster.distinct_groups
        hosts = [host_beside(cluster.alone(group), host) for group in groups] if len(groups) > 1 else ()
        layout = lay_out(job, self.costs_for(job), host_beside(cluster, host), hosts=hosts, gap_s=self.gap_s)
        return balanced(layout)


class RatingPredictor(WhiteBoxPredictor):
    """A white box that can tell a plan's time and memory without all that a forecast has, for searches."""

    @abstractmethod
    def time_factor(self, job: Job) -> float:
        """Give the factor on the time of a step beside its tuning."""

    @abstractmethod
    def memory_factors(self, job: Job, rank: RankMemory) -> Factors:
        """Say how far what is reserved on a rank lies from its forecast."""

    def errors_by_part(self, step: Step) -> Mapping[str, float]:
        """Give the standard deviations of the logarithm of a step's time by what they come from: parts of one
        name err alike, whatever the plan."""
        factors = self.spread_of(step).time
        return {"all": math.log(factors.high / factors.low) / WIDTH_80}

    def tuned_layout(self, job: Job) -> Layout:
        """Lay out what a step is played from."""
        return self.layout(job).tuned(self.tuning_for(job))

    def quick_time_s(self, layout: Layout) -> float:
        """The median of ``predict``, of a layout that is tuned."""
        return step_time_s(layout) * self.time_factor(layout.job)

    def quick_chance(self, layout: Layout) -> float:
        """Give the chance of running out of memory, with the allocator estimated."""
        job, rank = layout.job, quick_memory(layout)
        needed = Estimate.around(rank.needed_bytes, self.memory_factors(job, rank))
        capacity = rank.capacity_bytes or min(group.device.memory_bytes for group in job.cluster.groups)
        return needed.chance_above(usable_memory(job, capacity))


def _host_notes(job: Job) -> Iterator[str]:
    """Say what is known of the host."""
    cluster = job.cluster
    if all(group.device.is_cpu for group in cluster.groups):
        return
    host = cluster.issuer
    if host is not None and host.measured:
        speeds = ", ".join(f"{phase} {host.speed_of(phase):.2f}" for phase in PARTS)
        yield f"cluster.host: {host.cpu}, measured {host.measured}: {speeds} of the speed of {MEASURED_HOST}"
    elif cluster.host is None and any(group.node is None for group in cluster.groups):
        taken = "a host as fast as" if host is None else f"{host.cpu}, at {host.speed:.2f} of the speed of"
        yield f"cluster.node is not given: {taken} {MEASURED_HOST} is assumed"


def host_beside(cluster: Cluster, host: DispatchHost) -> DispatchHost:
    """The host as fast as the cluster's own; as it is where nothing tells."""
    return host if cluster.issuer is None else host.on(cluster.issuer)
