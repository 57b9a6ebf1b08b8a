"""Forecasts by data-sheet rates and a host that issues operators, with nothing learned: the yardstick for the
rest."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import ClassVar, Self, final

from foretrain.costs.host import PLAIN_HOST, DispatchHost
from foretrain.costs.roofline import Roofline
from foretrain.forecast import Factors, RankMemory
from foretrain.job import Job
from foretrain.predictors.whitebox import RatingPredictor
from foretrain.run import Run
from foretrain.step.assembly import Spread
from foretrain.step.play import Step

ON_GPUS = Spread(
    time=Factors(0.8, 1.0, 2.6, 4.0),
    memory=Factors(0.9, 0.97, 1.08, 1.15),
    count=Factors(0.4, 0.6, 1.6, 2.5),
    quantities={"device_busy_s": Factors(0.9, 1.0, 4.6, 7.0), "kernels": Factors(0.9, 1.0, 1.8, 2.2)},
)
ON_CPUS = dataclasses.replace(ON_GPUS, time=Factors(0.8, 1.0, 6.5, 13.0), quantities={})
"""Wide and to one side: real kernels are slower than the roofline by any factor, on CPU cores by more.
Rounded from what the runs in ``data/`` show."""


@final
class RooflinePredictor(RatingPredictor):
    """Williams, Waterman, Patterson 2009, applied operator by operator to the captured step."""

    name: ClassVar[str] = "roofline"

    def __init__(self, *, costs: Roofline | None = None, host: DispatchHost = PLAIN_HOST) -> None:
        self.costs, self.host = costs or Roofline(), host

    def fit(self, runs: Iterable[Run]) -> Self:
        return self

    def costs_for(self, job: Job) -> Roofline:
        return self.costs

    def host_for(self, job: Job) -> DispatchHost:
        return self.host

    def time_factor(self, job: Job) -> float:
        return 1.0

    def memory_factors(self, job: Job, rank: RankMemory) -> Factors:
        return ON_GPUS.memory

    def spread_of(self, step: Step) -> Spread:
        return ON_CPUS if step.layout.job.cluster.groups[0].device.is_cpu else ON_GPUS
