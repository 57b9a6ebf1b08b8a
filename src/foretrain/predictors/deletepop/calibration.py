"""Calibrates operator costs and the host to measured runs of one device; holds what calibrations are."""

from __future__ import annotations

import dataclasses
import math
import re
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from foretrain.costs.learned import GROUPS, describe_once, group_of
from foretrain.estimate import CERTAIN, Factors
from foretrain.graph import PHASES, Phase
from foretrain.job import Job
from foretrain.predictors.base import Benefit, nothing_to_learn
from foretrain.predictors.deletepop.residuals import Residuals
from foretrain.run import Run
from foretrain.step.layout import Layout
from foretrain.step.partition import Index
from foretrain.step.play import step_time_s
from foretrain.step.spans import Mask
from foretrain.step.tuning import Tuning

TIMES: dict[str, Phase | None] = {
    "step_time_s": None,
    "device_busy_s": None,
    "forward_time_s": "forward",
    "backward_time_s": "backward",
}
"""Measured quantities that calibration uses, and the phase that each is of."""

NO_RUNS = "none has a step, phase or busy time that can be learned from; calibration needs at least one"
_NOISE = 0.15
"""Spread of the logarithm of a single run around the best forecast, before the runs tell."""
_COMMON, _HOST = 0.6, 0.4
"""Spread of the logarithms that is expected of all device times together, and of the host."""
_GROUPS_APART = (0.0, 0.02, 0.15)
"""How far the factors of groups may lie from the common one: no calibration at all, nearly alike, or
apart."""
_LEAST_NOISE = 0.04
_SHARPNESS = 8.0
"""Of the smooth maximum of host and device time."""
_FOLDS = 5
_WORTH = 0.98
"""A freer calibration must bring the error on runs left out below this share of a plainer one's."""
_EIGHT_IN_TEN = math.log(5)
"""Means of an error within which eight in ten lie, in e-folds, by Laplace's distribution."""
_MOST_ERROR = 1.5
"""A mean error above this counts as this: one run a thousand times off says nothing of how far others are."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Calibration:
    """Holds what brings forecasts of one device, or of a device and framework, to measured runs; neutral by
    default."""

    groups: Mapping[str, float] = field(default_factory=dict)
    """Factors on the device times of groups of operators."""
    host_speed: float = 1.0
    tuning: Tuning = field(default_factory=Tuning)
    residuals: Residuals | None = None
    """What the factors leave over near the runs."""
    benefit: Benefit | None = None

    def after(self, earlier: Calibration) -> Calibration:
        """This one on top of an earlier one, with which its runs were forecast."""
        names = dict.fromkeys([*earlier.groups, *self.groups])
        groups = {name: earlier.groups.get(name, 1.0) * self.groups.get(name, 1.0) for name in names}
        return dataclasses.replace(self, groups=groups, host_speed=earlier.host_speed * self.host_speed)

    def origin(self, key: str) -> str:
        """Say how many runs of what it was found from, and what it was worth on runs left out."""
        worth = self.benefit
        if worth is None:
            return f"runs of {key}"
        runs = f"{worth.runs} run{'' if worth.runs == 1 else 's'} of {key}"
        if worth.error_after is None:
            return f"{runs}, too few to say what it is worth"
        return f"{runs}: mean error {worth.error_before:.0%} before, {worth.error_after:.0%} on runs left out"

    @property
    def borne_out(self) -> Factors:
        """An interval that holds eight in ten of the runs that were left out, if their errors lie as those of
        Laplace's distribution; nothing where none was left out."""
        worth = self.benefit
        if worth is None or worth.error_before is None or worth.error_after is None:
            return CERTAIN
        return CERTAIN.longer(_EIGHT_IN_TEN * min(worth.error_before, worth.error_after, _MOST_ERROR))

    def to_dict(self) -> dict[str, Any]:
        return {
            "groups": dict(self.groups),
            "host_speed": self.host_speed,
            "tuning": dataclasses.asdict(self.tuning),
            "residuals": None if self.residuals is None else self.residuals.to_dict(),
            "benefit": None if self.benefit is None else dataclasses.asdict(self.benefit),
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Calibration:
        residuals, benefit = data["residuals"], data["benefit"]
        return cls(
            groups=data["groups"],
            host_speed=data["host_speed"],
            tuning=Tuning(**data["tuning"]),
            residuals=None if residuals is None else Residuals.from_dict(residuals),
            benefit=None if benefit is None else Benefit(**benefit),
        )


def calibration_key(job: Job) -> str:
    """Jobs that share a calibration: those on one GPU by device, all others by their framework and devices,
    however much memory these have."""
    devices = {group.device.name for group in job.cluster.groups}
    if on_one_gpu(job):
        return "+".join(devices)
    return f"{'+'.join(sorted(map(without_memory, devices)))} {job.workload.training.framework}"


def without_memory(device: str) -> str:
    """``a100-sxm`` of ``a100-sxm-80gb``: boards that differ in their memory compute alike."""
    return re.sub(r"-\d+gb$", "", device)


def on_one_gpu(job: Job) -> bool:
    """Whether plain PyTorch runs on one GPU; a CPU that trains shares its calibration with many of them."""
    training = job.workload.training
    on_cpu = job.cluster.groups[0].device.is_cpu and training.mode == "train"
    return job.cluster.world_size == 1 and training.framework == "pytorch" and not on_cpu


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A run and its job laid out, without any tuning."""

    run: Run
    layout: Layout

    def tuned_s(self, tuning: Tuning) -> float:
        return step_time_s(self.layout.tuned(tuning))


@dataclass(frozen=True, slots=True)
class _Observations:
    """Measured times, a row each: the device seconds of each group, the gaps between kernels, the host
    seconds, and what was measured."""

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
        """Logarithms of forecast over measured; ``logs`` are of the common factor, of each group's own and of
        the host's speed."""
        device = self.groups @ np.exp(logs[0] + logs[1:-1]) + self.gaps_s
        host = self.host_s * np.exp(-logs[-1])
        largest = np.maximum(device, host)
        total = largest * ((device / largest) ** _SHARPNESS + (host / largest) ** _SHARPNESS) ** (
            1 / _SHARPNESS
        )
        return np.asarray(np.log(total / self.measured_s))


def calibrate_device(cases: Sequence[Case]) -> Calibration:
    """Calibrate by runs of one device: a factor for each group of operators, and the host's speed."""
    observed = [parts for case in cases if (parts := _observe(case))]
    if not observed:
        raise nothing_to_learn(NO_RUNS, ())
    joined = [_Observations.join(parts) for parts in observed]
    observations = [
        dataclasses.replace(together, weights=together.weights / len(parts))
        for together, parts in zip(joined, observed, strict=True)
    ]
    apart, before, after = _choose(observations)
    factors, speed = _solve(_Observations.join(observations), apart)
    benefit = Benefit(runs=len(observations), error_before=before, error_after=after)
    return Calibration(groups=factors, host_speed=speed, benefit=benefit)


def _observe(case: Case) -> list[_Observations]:
    layout, run = case.layout, case.run
    graph, device, precision = layout.graph, run.job.cluster.device, run.job.workload.training.precision
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
            busy = quantity == "device_busy_s"
            observations.append(_part(layout, belongs, chosen, measured, busy=busy, whole=phase is None))
    return observations


def _part(
    layout: Layout, belongs: Index, chosen: Mask, measured_s: float, *, busy: bool, whole: bool
) -> _Observations:
    calls, graph = layout.calls, layout.graph
    times = float(layout.job.accumulation)
    repeats = np.where(graph.phase_index == PHASES.index("optimizer"), 1.0, times) * chosen
    groups = np.bincount(belongs, weights=calls.device_s * repeats, minlength=len(GROUPS)).astype(np.float64)
    gaps_s = 0.0 if busy else float((calls.gaps_s * repeats).sum())
    host_s = 0.0 if busy else float((calls.host_s * repeats).sum()) + whole * layout.step_overhead_s
    return _Observations(
        groups[None], np.array([gaps_s]), np.array([host_s]), np.array([measured_s]), np.ones(1)
    )


def _solve(observations: _Observations, apart: float) -> tuple[dict[str, float], float]:
    """The likeliest factors given what is expected of them, and how much runs scatter; a few odd ones do not
    decide."""
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
        noise = max(
            _LEAST_NOISE, _DEVIATIONS_PER_MEDIAN * float(np.median(np.abs(observations.errors(logs))))
        )
    return {
        group: float(np.exp(logs[0] + own)) for group, own in zip(GROUPS, logs[1:-1], strict=True)
    }, float(np.exp(logs[-1]))


_DEVIATIONS_PER_MEDIAN = 1.4826
"""The standard deviation of normal errors over the median of their absolute values."""


def robust(errors: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Squares to the result are Huber's loss: linear beyond two standard deviations."""
    size = np.abs(errors)
    return np.sign(errors) * np.where(size <= 2, size, np.sqrt(np.maximum(4 * size - 4, 0)))


def _choose(cases: Sequence[_Observations]) -> tuple[float, float, float | None]:
    """Choose how freely to calibrate, by the mean absolute relative error on runs left out; returns that
    error before and after, too."""
    before = statistics.fmean(_relative(_Observations.join(cases), np.zeros(len(GROUPS) + 2)))
    if len(cases) < 3:
        return _GROUPS_APART[1], before, None
    best, least = _GROUPS_APART[0], before
    for apart in _GROUPS_APART[1:]:
        error = _left_out_error(cases, apart)
        if error < _WORTH * least:
            best, least = apart, error
    return best, before, least


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
