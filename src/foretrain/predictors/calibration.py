"""Runs in; factors on the device times of a few groups of operators, and the host's speed, that bring the forecasts to the runs out."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from foretrain.capture import capture_job
from foretrain.costs.features import family_of
from foretrain.costs.host import DispatchHost
from foretrain.costs.learned import LearnedCosts, group_of
from foretrain.errors import ForetrainError, InputError
from foretrain.graph import PHASES, Phase
from foretrain.job import Run
from foretrain.predictors.whitebox import build_timeline
from foretrain.timeline import Timeline

GROUPS = ("products", "convolutions", "depthwise", "norms", "traffic")
TIMES: dict[str, Phase | None] = {"step_time_s": None, "device_busy_s": None, "forward_time_s": "forward", "backward_time_s": "backward"}
"""Measured quantities that calibration uses, and the phase that each is of."""

_NOISE = 0.08
"""Spread of the logarithm of a single run around the best forecast."""
_COMMON, _GROUP, _HOST = 0.6, 0.15, 0.4
"""Spread of the logarithms that is expected of all device times together, of a group around that, and of the host."""
_SHARPNESS = 8.0
"""Of the smooth maximum of host and device time."""
_FOLDS = 5


@dataclass(frozen=True, slots=True)
class _Observation:
    """One measured time: the device seconds of each group, the gaps between kernels, the host seconds, and what was measured."""

    groups: npt.NDArray[np.float64]
    gaps_s: float
    host_s: float
    measured_s: float


def calibrate(
    costs: LearnedCosts, host: DispatchHost, runs: Sequence[Run], gap_s: float
) -> tuple[LearnedCosts, DispatchHost, dict[str, Any]]:
    """Per device; the report tells, for each, the error before, and after when the scored runs were not learned from."""
    by_device: dict[str, list[list[_Observation]]] = {}
    for run in runs:
        if run.job.cluster.world_size == 1 and not run.job.cluster.device.is_cpu:
            try:
                found = _observe(costs, host, run, gap_s)
            except ForetrainError:
                continue
            if found:
                by_device.setdefault(run.job.cluster.device.name, []).append(found)
    if not by_device:
        raise InputError("runs: none is of one GPU and has a step, phase or busy time; calibration needs at least one")
    report, speeds = {}, []
    for device, cases in by_device.items():
        factors, speed = _solve([one for case in cases for one in case])
        report[device] = {"runs": len(cases), **_benefit(cases)}
        costs = costs.scaled(device, factors)
        speeds.append(speed)
    return costs, dataclasses.replace(host, speed=host.speed * statistics.geometric_mean(speeds)), report


def _observe(costs: LearnedCosts, host: DispatchHost, run: Run, gap_s: float) -> list[_Observation]:
    graph = capture_job(run.job)
    timeline = build_timeline(run.job, graph, costs, host, gap_s=gap_s)
    belongs = np.array([GROUPS.index(group_of(family_of(operator))) for operator in graph.operators])[graph.operator_index]
    observations = []
    for quantity, phase in TIMES.items():
        measured = run.measured.get(quantity)
        if measured is not None and measured > 0:
            chosen = np.ones(len(graph.ops), dtype=np.bool_) if phase is None else graph.phase_index == PHASES.index(phase)
            observations.append(_part(timeline, belongs, chosen, measured, busy=quantity == "device_busy_s", whole=phase is None))
    return observations


def _part(
    timeline: Timeline, belongs: npt.NDArray[np.int64], chosen: npt.NDArray[np.bool_], measured_s: float, *, busy: bool, whole: bool
) -> _Observation:
    repeats = np.where(timeline.graph.phase_index == PHASES.index("optimizer"), 1.0, float(timeline.accumulation)) * chosen
    groups = np.bincount(belongs, weights=timeline.device_s * repeats, minlength=len(GROUPS)).astype(np.float64)
    if busy:
        return _Observation(groups, 0.0, 0.0, measured_s)
    gaps = float((timeline.kernels_per_call * repeats).sum()) * timeline.gap_s
    return _Observation(groups, gaps, float((timeline.host_s * repeats).sum()) + whole * timeline.step_overhead_s, measured_s)


def _forecast(one: _Observation, logs: npt.NDArray[np.float64]) -> float:
    """``logs``: of the common factor, of each group's own and of the host's speed."""
    device = float((one.groups * np.exp(logs[0] + logs[1:-1])).sum()) + one.gaps_s
    host = one.host_s * float(np.exp(-logs[-1]))
    largest = max(device, host)
    return float(largest * ((device / largest) ** _SHARPNESS + (host / largest) ** _SHARPNESS) ** (1 / _SHARPNESS))


def _solve(observations: Sequence[_Observation]) -> tuple[dict[str, float], float]:
    """The likeliest factors given what is expected of them; a few odd runs do not decide."""
    from scipy.optimize import least_squares

    expected = np.array([_COMMON, *[_GROUP] * len(GROUPS), _HOST])

    def residuals(logs: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
        errors = [np.log(_forecast(one, logs) / one.measured_s) / _NOISE for one in observations]
        return np.concatenate([_robust(np.array(errors)), logs / expected])

    logs = least_squares(residuals, np.zeros(len(expected))).x
    return {group: float(np.exp(logs[0] + own)) for group, own in zip(GROUPS, logs[1:-1], strict=True)}, float(np.exp(logs[-1]))


def _robust(errors: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Squares to the result are Huber's loss: linear beyond two standard deviations."""
    size = np.abs(errors)
    return np.sign(errors) * np.where(size <= 2, size, np.sqrt(np.maximum(4 * size - 4, 0)))


def _benefit(cases: Sequence[Sequence[_Observation]]) -> Mapping[str, float]:
    """Mean absolute relative error before and after, the latter on runs left out in turn."""
    before = [abs(_forecast(one, np.zeros(len(GROUPS) + 2)) / one.measured_s - 1) for case in cases for one in case]
    if len(cases) < 3:
        return {"error_before": statistics.fmean(before)}
    after = []
    for fold in range(min(_FOLDS, len(cases))):
        factors, speed = _solve([one for i, case in enumerate(cases) if i % _FOLDS != fold for one in case])
        logs = np.array([0.0, *(np.log(factors[group]) for group in GROUPS), np.log(speed)])
        after += [abs(_forecast(one, logs) / one.measured_s - 1) for case in cases[fold::_FOLDS] for one in case]
    return {"error_before": statistics.fmean(before), "error_after": statistics.fmean(after)}
