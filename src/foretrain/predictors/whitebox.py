"""Forecasts a job by looking inside its step; a white-box predictor adds its costs, its host and how sure it
is."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator
from typing import ClassVar

from foretrain.catalog.hosts import PARTS
from foretrain.costs.base import CostModel
from foretrain.costs.host import MEASURED_HOST, DispatchHost
from foretrain.forecast import Forecast
from foretrain.job import Job
from foretrain.predictors.base import Predictor
from foretrain.step.assembly import QUANTITIES, Spread, assemble
from foretrain.step.layout import Layout, Tuning, lay_out
from foretrain.step.play import Step, play


class WhiteBoxPredictor(Predictor):
    """``Job -> step graph -> layout -> play -> Step -> assemble -> Forecast``, the same for every plan."""

    quantities: ClassVar[frozenset[str]] = QUANTITIES
    gap_s: ClassVar[float] = 0.0
    """Between two kernels in a full queue."""

    @abstractmethod
    def costs_for(self, job: Job) -> CostModel:
        """What operators cost."""

    @abstractmethod
    def host_for(self, job: Job) -> DispatchHost:
        """The host that issues them, before the job's own node is looked at."""

    @abstractmethod
    def spread_of(self, step: Step) -> Spread:
        """How far measured runs lie from such forecasts."""

    def tuning_for(self, job: Job) -> Tuning:
        """Factors on the parts of a step that a calibration has found."""
        return Tuning()

    def correction(self, step: Step) -> tuple[float, tuple[str, ...]]:
        """A factor on the time of the step, and what to say of it."""
        return 1.0, ()

    def predict(self, job: Job) -> Forecast:
        step = self.step(job)
        factor, notes = self.correction(step)
        step = step if factor == 1.0 else step.scaled(factor)
        notes = (*notes, *_host_notes(job))
        return assemble(step, self.spread_of(step), predictor=self.name, notes=notes)

    def step(self, job: Job) -> Step:
        """The step of a job, before any correction."""
        return play(self.layout(job).tuned(self.tuning_for(job)))

    def layout(self, job: Job) -> Layout:
        """The job laid out and costed, on the hosts that its nodes have, without any tuning."""
        return lay_out(job, self.costs_for(job), host_beside(job, self.host_for(job)), gap_s=self.gap_s)


def _host_notes(job: Job) -> Iterator[str]:
    """What is known of the host."""
    cluster = job.cluster
    if all(group.device.is_cpu for group in cluster.groups):
        return
    host = cluster.issuer
    if host is not None and host.measured:
        speeds = ", ".join(f"{phase} {host.speed_of(phase):.2f}" for phase in PARTS)
        yield f"cluster.host: {host.cpu}, measured {host.measured}: {speeds} of the speed of {MEASURED_HOST}"
    elif host is None and any(group.node is None for group in cluster.groups):
        yield f"cluster.node is not given: a host as fast as {MEASURED_HOST} is assumed"


def host_beside(job: Job, host: DispatchHost) -> DispatchHost:
    """The host as fast as the job's own; as it is where nothing tells."""
    issuer = job.cluster.issuer
    return host if issuer is None else host.on(issuer)
