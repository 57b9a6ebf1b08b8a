"""DeletePop: every operator of the captured step costed from an operator dataset, laid on host and device, summed up to the whole job."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, ClassVar, Self, final

from foretrain.costs.host import DispatchHost
from foretrain.costs.learned import LearnedCosts, load_costs, save_costs
from foretrain.costs.measured import OWN_OPERATORS, MeasuredOperator, load_measured
from foretrain.forecast import Forecast
from foretrain.job import Job, Run
from foretrain.predictors.base import Predictor
from foretrain.predictors.whitebox import QUANTITIES, Factors, Spread, forecast_one_device

SHIPPED = Path(__file__).parents[1] / "costs" / "fitted" / "operators.safetensors"
KERNEL_GAP_S = 1.3e-6
"""Between two kernels in a full queue, as the device-bound runs of ``data/h200_steps.jsonl`` have it."""

Operators = Callable[[], Iterable[MeasuredOperator]]


@final
class DeletePopPredictor(Predictor):
    """Computation and memory access by operator, start-up and iterations by job, after DeletePop (ICA3PP 2023).

    ``fit`` calibrates to runs: a handful is enough for a new device or other software. What the operator models
    themselves learn from is an operator dataset, ours or the user's own (``relearn``).
    """

    name: ClassVar[str] = "deletepop"
    quantities: ClassVar[frozenset[str]] = QUANTITIES

    def __init__(
        self, costs: LearnedCosts | None = None, host: DispatchHost | None = None, about: Mapping[str, Any] | None = None,
        operators: Operators | None = None,
    ) -> None:  # fmt: skip
        if costs is None or host is None:
            costs, host, about = _shipped()
        self.costs, self.host, self.about = costs, host, dict(about or {})
        self._operators: Operators = operators or (lambda: load_measured(OWN_OPERATORS))

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """The learned state is never changed in place, so a copy shares it."""
        return type(self)(self.costs, self.host, self.about, self._operators)

    def predict(self, job: Job) -> Forecast:
        spread = self._spread(job)
        return forecast_one_device(job, self.costs, self.host, spread, predictor=self.name, gap_s=KERNEL_GAP_S)

    def fit(self, runs: Iterable[Run]) -> Self:
        from foretrain.predictors.calibration import calibrate

        self.costs, self.host, report = calibrate(self.costs, self.host, list(runs), KERNEL_GAP_S)
        self.about = {**self.about, "calibrations": {**self.about.get("calibrations", {}), **report}}
        return self

    def without(self, families: frozenset[str] = frozenset(), devices: frozenset[str] = frozenset()) -> Self:
        from foretrain.costs.fitting import dispatch_costs, fit_costs

        kept = [one for one in self._operators() if one.known_without(families) and one.device not in devices]
        self.costs = fit_costs(kept)
        self.host = dataclasses.replace(self.host, names=dispatch_costs(kept) or self.host.names)
        return self

    def save(self, path: Path) -> None:
        save_costs(path, self.costs, self.host, self.about)

    @classmethod
    def load(cls, path: Path) -> Self:
        return cls(*load_costs(path))

    def _spread(self, job: Job) -> Spread:
        """How far measured runs of held-out architectures lay from the forecast, on a device that was measured and on others."""
        device = job.cluster.device
        known = self.costs.knows(device)
        kind = "known" if known else "calibrated" if device.name in self.costs.scales else "unknown"
        factors = self.about.get("intervals", {}).get(kind)
        time = Factors(*factors) if factors else Factors(0.5, 0.7, 1.4, 2.0)
        return Spread(time=time, memory=Factors(0.9, 0.97, 1.05, 1.12), count=Factors(0.6, 0.8, 1.25, 1.6))


@functools.lru_cache(maxsize=1)
def _shipped() -> tuple[LearnedCosts, DispatchHost, dict[str, Any]]:
    return load_costs(SHIPPED)
