"""The roofline as a predictor: data-sheet rates, a host that issues operators, nothing learned. The yardstick for the rest."""

from __future__ import annotations

from collections.abc import Iterable
from typing import ClassVar, Self, final

from foretrain.costs.host import PLAIN_HOST, DispatchHost
from foretrain.costs.roofline import Roofline
from foretrain.forecast import Forecast
from foretrain.job import Job, Run
from foretrain.predictors.base import Predictor
from foretrain.predictors.conformal import Factors
from foretrain.predictors.many_devices import forecast_ranks
from foretrain.predictors.whitebox import QUANTITIES, Spread, forecast_one_device, needs_ranks


@final
class RooflinePredictor(Predictor):
    """Williams, Waterman, Patterson 2009, applied operator by operator to the captured step."""

    name: ClassVar[str] = "roofline"
    quantities: ClassVar[frozenset[str]] = QUANTITIES

    def __init__(self, *, costs: Roofline | None = None, host: DispatchHost = PLAIN_HOST) -> None:
        self.costs = costs or Roofline()
        self.host = host
        self.spread = Spread(
            time=Factors(0.6, 0.8, 2.5, 4.0),
            memory=Factors(0.9, 0.97, 1.08, 1.15),
            count=Factors(0.4, 0.6, 1.6, 2.5),
        )

    def fit(self, runs: Iterable[Run]) -> Self:
        return self

    def predict(self, job: Job) -> Forecast:
        if needs_ranks(job):
            return forecast_ranks(job, self.costs, self.host, lambda _: self.spread, predictor=self.name)
        return forecast_one_device(job, self.costs, self.host, self.spread, predictor=self.name)
