"""Forecasts by data-sheet rates and a host that issues operators, with nothing learned: the yardstick for the
rest."""

from __future__ import annotations

from collections.abc import Iterable
from typing import ClassVar, Self, final

from foretrain.costs.host import PLAIN_HOST, DispatchHost
from foretrain.costs.roofline import Roofline
from foretrain.forecast import Factors
from foretrain.job import Job, Run
from foretrain.predictors.whitebox import WhiteBoxPredictor
from foretrain.step.assembly import Spread
from foretrain.step.play import Step

SPREAD = Spread(
    time=Factors(0.6, 0.8, 2.5, 4.0),
    memory=Factors(0.9, 0.97, 1.08, 1.15),
    count=Factors(0.4, 0.6, 1.6, 2.5),
)
"""Wide: real kernels are slower than the roofline by any factor."""


@final
class RooflinePredictor(WhiteBoxPredictor):
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

    def spread_of(self, step: Step) -> Spread:
        return SPREAD
