"""Runs in; factors on the device times of a few groups of operators, and the host's speed, that bring the forecasts to the runs out."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from foretrain.capture import capture_job
from foretrain.costs.host import DispatchHost
from foretrain.costs.learned import GROUPS, LearnedCosts, describe_once, group_of
from foretrain.errors import InputError
from foretrain.graph import PHASES, Phase
from foretrain.job import Run
from foretrain.predictors.whitebox import build_timeline
from foretrain.step.timeline import Timeline

TIMES: dict[str, Phase | None] = {
    "step_time_s": None,
    "device_busy_s": None,
    "forward_time_s": "forward",
    "backward_time_s": "backward",
}
"""Measured quantities that calibration uses, and the phase that each is of."""

NO_RUNS = "runs: none has a step, phase or busy time that can be learned from; calibration needs at least one"
_NOISE = 0.15
"""Spread of the logarithm of a single run around the best forecast, before the runs tell."""
_COMMON, _HOST = 0.6, 0.4
"""Spread of the logarithms that is expected of all device times together, and of the host."""
_GROUPS_APART = (0.0, 0.02, 0.15)
"""How far the factors of groups may lie from the common one: no calibration at all, nearly alike, or apart."""
_LEAST_NOISE = 0.04
_SHARPNESS = 8.0
"""Of the smooth maximum of host and device time."""
_FOLDS = 5
_WORTH = 0.98
"""A freer calibration must bring the error on runs left out below this share of a plainer one's."""


@dataclass(frozen=True, slots=True)
class _Observations:
    """Measured times, a row each: the device seconds of each group, the gaps between kernels, the host seconds, and what was measured."""

    groups: npt.NDArray[np.float64]
    gaps_s: npt.NDArray[np.float64]
    host_s: npt.NDArray[np.float64]
    measured_s: npt.NDArray[np.float64]
    weights: npt.NDArray[np.float64]
    """The times of one run count together as one."""

    @classmethod
    def join(cls, parts: Sequence[_Observations]) -> _Observations:
        return cls(
            *(
                np.concatenate([getattr(part, field.name) for part in parts])
                for field in dataclasses.fields(cls)
            )
        )

    def errors(self, logs: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
        """Logarithms of forecast over measured; ``logs`` are of the common factor, of each group's own and of the host's speed."""
        device = self.groups @ np.exp(logs[0] + logs[1:-1]) + self.gaps_s
        host = self.host_s * np.exp(-logs[-1])
        largest = np.maximum(device, host)
        total = largest * ((device / largest) ** _SHARPNESS + (host / largest) ** _SHARPNESS) ** (
            1 / _SHARPNESS
        )
        return np.asarray(np.log(total / self.measured_s))


def calibrate(
    costs: LearnedCosts, host: DispatchHost, runs: Sequence[Run], gap_s: float
) -> tuple[dict[str, float], float, dict[str, Any]]:
    """From runs of one device: a factor for each group, the host's speed, and a report of the error before, and after on runs left out."""
    cases = []
    for run in runs:
        found = _observe(costs, host, run, gap_s)
        if found:
            together = _Observations.join(found)
            cases.append(dataclasses.replace(together, weights=together.weights / len(found)))
    if not cases:
        raise InputError(NO_RUNS)
    apart, errors = _choose(cases)
    factors, speed = _solve(_Observations.join(cases), apart)
    return factors, speed, {"runs": len(cases), **errors}


def _observe(costs: LearnedCosts, host: DispatchHost, run: Run, gap_s: float) -> list[_Observations]:
    graph = capture_job(run.job)
    timeline = build_timeline(run.job, graph, costs, host, gap_s=gap_s)
    device, precision = run.job.cluster.device, run.job.workload.training.precision
    groups = [
        GROUPS.index(group_of(describe_once(operator, device, precision))) if operator.launches else 0
        for operator in graph.operators
    ]
    belongs = np.array(groups)[graph.operator_index]
    observations = []
    for quantity, phase in TIMES.items():
        measured = run.measured.get(quantity)
        chosen = (
            np.ones(len(graph.ops), dtype=np.bool_)
            if phase is None
            else graph.phase_index == PHASES.index(phase)
        )
        if measured is not None and measured > 0 and chosen.any():
            observations.append(
                _part(
                    timeline, belongs, chosen, measured, busy=quantity == "device_busy_s", whole=phase is None
                )
            )
    return observations


def _part(
    timeline: Timeline,
    belongs: npt.NDArray[np.int64],
    chosen: npt.NDArray[np.bool_],
    measured_s: float,
    *,
    busy: bool,
    whole: bool,
) -> _Observations:
    repeats = (
        np.where(timeline.graph.phase_index == PHASES.index("optimizer"), 1.0, float(timeline.accumulation))
        * chosen
    )
    groups = np.bincount(belongs, weights=timeline.device_s * repeats, minlength=len(GROUPS)).astype(
        np.float64
    )
    gaps_s = 0.0 if busy else float((timeline.kernels_per_call * repeats).sum()) * timeline.gap_s
    host_s = 0.0 if busy else float((timeline.host_s * repeats).sum()) + whole * timeline.step_overhead_s
    return _Observations(
        groups[None], np.array([gaps_s]), np.array([host_s]), np.array([measured_s]), np.ones(1)
    )


def _solve(observations: _Observations, apart: float) -> tuple[dict[str, float], float]:
    """The likeliest factors given what is expected of them, and how much runs scatter; a few odd ones do not decide."""
    if not apart:
        return dict.fromkeys(GROUPS, 1.0), 1.0
    from scipy.optimize import least_squares

    expected = np.array([_COMMON, *[apart] * len(GROUPS), _HOST])
    logs, noise = np.zeros(len(expected)), _NOISE
    for _ in range(2):

        def residuals(logs: npt.NDArray[np.float64], noise: float = noise) -> npt.NDArray[np.float64]:
            return np.concatenate(
                [robust(observations.errors(logs) / noise) * np.sqrt(observations.weights), logs / expected]
            )

        logs = least_squares(residuals, logs).x
        noise = max(_LEAST_NOISE, 1.4826 * float(np.median(np.abs(observations.errors(logs)))))
    return {
        group: float(np.exp(logs[0] + own)) for group, own in zip(GROUPS, logs[1:-1], strict=True)
    }, float(np.exp(logs[-1]))


def robust(errors: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Squares to the result are Huber's loss: linear beyond two standard deviations."""
    size = np.abs(errors)
    return np.sign(errors) * np.where(size <= 2, size, np.sqrt(np.maximum(4 * size - 4, 0)))


def _choose(cases: Sequence[_Observations]) -> tuple[float, dict[str, float]]:
    """How freely to calibrate, by the mean absolute relative error on runs left out in turn; and that error before and after."""
    before = statistics.fmean(_relative(_Observations.join(cases), np.zeros(len(GROUPS) + 2)))
    if len(cases) < 3:
        return _GROUPS_APART[1], {"error_before": before}
    best, least = _GROUPS_APART[0], before
    for apart in _GROUPS_APART[1:]:
        error = _left_out_error(cases, apart)
        if error < _WORTH * least:
            best, least = apart, error
    return best, {"error_before": before, "error_after": least}


def _left_out_error(cases: Sequence[_Observations], apart: float) -> float:
    errors: list[float] = []
    for fold in range(min(_FOLDS, len(cases))):
        factors, speed = _solve(
            _Observations.join([case for i, case in enumerate(cases) if i % _FOLDS != fold]), apart
        )
        logs = np.array([0.0, *(np.log(factors[group]) for group in GROUPS), np.log(speed)])
        errors += _relative(_Observations.join(cases[fold::_FOLDS]), logs)
    return statistics.fmean(errors)


def _relative(observations: _Observations, logs: npt.NDArray[np.float64]) -> list[float]:
    return [float(error) for error in np.abs(np.expm1(observations.errors(logs)))]
