"""Calibrates the parts of a step (computation, host, network, memory) to measured runs of one device and
framework."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from foretrain.predictors.base import Benefit
from foretrain.predictors.deletepop.calibration import Calibration, Case, robust
from foretrain.predictors.deletepop.residuals import Residuals, covariances
from foretrain.step.assembly import logged
from foretrain.step.play import play
from foretrain.step.tuning import Tuning

Vector = npt.NDArray[np.float64]

_FACTORS = {
    "products": 0.15,
    "attention": 0.2,
    "traffic": 0.15,
    "host": 0.3,
    "inside": 0.3,
    "outside": 0.6,
    "message_s": 0.8,
    "stalls": 0.3,
}
"""What a calibration may change by a factor, and the spread of the logarithm that is expected of it."""
_SECONDS = {"hop_s": 1e-4, "step_s": 0.02}
"""What it may add, and the spread that is expected of it: a value of 1."""
_CPU_SPREAD = 3.0
"""How much wider these are for CPUs, of which there are more kinds than of GPUs."""
_NOISE = 0.06
"""Spread of the logarithm of a single run around the best forecast."""
_FAR, _MOST_DOUBT = 2.0, 4.0
"""Standard deviations beyond which a run is doubted, each time by at most so much."""
_ROUNDS = 3
_DIFFERENCE = 0.2
_NOTICED = 1e-3
"""The change of a step's logarithm below which a factor is left alone."""
_LEAST, _WORSE = 5, 1.2
"""Runs from which on each is forecast from the others, to tell what the calibration is worth; and how much
worse these forecasts are than those before where it is dropped. It is drawn to no change as it is, and the
errors of a few runs tell little."""
_MEMORY_SPREAD = (0.3, 1.5)
"""What is expected of the logarithm of the factor on activations, and of the memory beside everything else,
in GiB."""
_MEMORY_NOISE = 0.08
_GIB = 2.0**30


def calibrate_parts(cases: Sequence[Case]) -> Calibration:
    """Find what brings forecasts to the runs; dropped where each run is forecast worse from the others."""
    timed = [case for case in cases if case.run.measured.get("step_time_s", 0) > 0]
    calibration, before, after = Calibration(), None, None
    if timed:
        fitted = _fit(timed)
        before = float(np.abs(np.expm1(-fitted.errors_before)).mean())
        calibration = fitted.calibration
        if len(timed) >= _LEAST:
            after = float(np.abs(np.expm1(-fitted.errors_left_out)).mean())
            if np.abs(fitted.errors_left_out).mean() > _WORSE * np.abs(fitted.errors_before).mean():
                calibration = Calibration()
    return dataclasses.replace(
        calibration,
        tuning=_with_memory(calibration.tuning, cases),
        benefit=None if before is None else Benefit(runs=len(cases), error_before=before, error_after=after),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Fitted:
    calibration: Calibration
    errors_before: Vector
    """Logarithms of measured over forecast without any calibration."""
    errors_left_out: Vector
    """The same of each run by a calibration from the others."""


def _fit(cases: Sequence[Case]) -> _Fitted:
    """Factors and what they leave over together: both are normal with what is expected of them, so that a
    step's logarithm, which is nearly linear in the logarithms of factors, has a solution in one stroke.

    It is repeated from the factors found. Runs that the others do not bear out are doubted: a few odd ones do
    not decide.
    """
    jobs = [case.run.job for case in cases]
    measured = np.log([case.run.measured["step_time_s"] for case in cases])
    plain = _log_times(cases, Tuning())
    wider = _CPU_SPREAD if jobs[0].cluster.groups[0].device.is_cpu else 1.0
    names, left_over = [*_FACTORS, *_SECONDS], covariances(jobs)
    values, logs = np.zeros(len(names)), plain
    for number in range(_ROUNDS):
        slopes = _slopes(cases, names, values, logs)
        if not number:
            matter = np.abs(slopes).max(axis=0) > _NOTICED
            names = [name for name, matters in zip(names, matter, strict=True) if matters]
            values, slopes = values[matter], slopes[:, matter]
        expected = wider * np.array([_FACTORS.get(name, 1.0) for name in names])
        covariance = (slopes * expected**2) @ slopes.T + left_over
        target = measured - logs + slopes @ values
        doubt = np.ones(len(cases))
        for _ in range(_ROUNDS):
            inverse = np.linalg.inv(covariance + np.diag((_NOISE * doubt) ** 2))
            weights = inverse @ target
            doubt = doubt * np.clip(np.abs(weights) / np.sqrt(np.diag(inverse)) / _FAR, 1.0, _MOST_DOUBT)
        least = np.where([name == "hop_s" for name in names], 0.0, -2 * expected)
        values = np.clip(expected**2 * (slopes.T @ weights), least, 2 * expected)
        logs = _log_times(cases, _tuning(names, values))
    return _Fitted(
        calibration=Calibration(
            tuning=_tuning(names, values), residuals=Residuals.of(jobs, measured - logs, _NOISE * doubt)
        ),
        errors_before=measured - plain,
        errors_left_out=weights / np.diag(inverse),
    )


def _log_times(cases: Sequence[Case], tuning: Tuning) -> Vector:
    return np.log([max(case.tuned_s(tuning), 1e-9) for case in cases])


def _slopes(cases: Sequence[Case], names: Sequence[str], values: Vector, logs: Vector) -> Vector:
    """Say how the logarithm of each step changes with each value."""
    columns = []
    for i in range(len(names)):
        moved = values.copy()
        moved[i] += _DIFFERENCE
        columns.append((_log_times(cases, _tuning(names, moved)) - logs) / _DIFFERENCE)
    return np.array(columns).T


def _tuning(names: Sequence[str], values: Vector) -> Tuning:
    """Make factors of values: each is the logarithm of a factor, or a number of times the spread of what may
    be added."""
    base = Tuning()
    changed = {
        name: value * _SECONDS[name] if name in _SECONDS else getattr(base, name) * float(np.exp(value))
        for name, value in zip(names, values.tolist(), strict=True)
    }
    return dataclasses.replace(base, **changed)


def _with_memory(tuning: Tuning, cases: Sequence[Case]) -> Tuning:
    """The factor on activations and the bytes beside them that bring the memory of the logged rank to the
    runs."""
    from scipy.optimize import least_squares

    rows = []
    for case in cases:
        allocated, reserved = (
            case.run.measured.get(name) for name in ("peak_memory_bytes", "reserved_memory_bytes")
        )
        rank = logged(play(case.layout))
        moving = rank.by_category["activations"] + rank.by_category["temporaries"]
        if allocated:
            rows.append((rank.allocated_bytes - moving, moving, allocated))
        elif reserved:
            rows.append((rank.allocated_bytes - moving, moving + rank.cached_bytes, reserved))
    if len(rows) < 2:
        return tuning
    fixed, moving, measured_bytes = np.array(rows).T

    def residuals(values: Vector) -> Vector:
        errors = np.log(
            np.maximum(fixed + moving * np.exp(values[0]) + values[1] * _GIB, 1.0) / measured_bytes
        )
        return np.concatenate([robust(errors / _MEMORY_NOISE), values / _MEMORY_SPREAD])

    factor, beside = least_squares(residuals, np.zeros(2)).x
    return dataclasses.replace(tuning, activations=float(np.exp(factor)), memory_bytes=float(beside) * _GIB)
