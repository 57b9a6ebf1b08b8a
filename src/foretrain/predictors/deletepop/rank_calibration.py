"""Calibrates the parts of a step (computation, host, network, memory) to measured runs of one device and
framework."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from foretrain.predictors.base import Benefit
from foretrain.predictors.deletepop.calibration import Calibration, Case, robust
from foretrain.predictors.deletepop.residuals import Residuals
from foretrain.step.assembly import logged
from foretrain.step.layout import Tuning
from foretrain.step.play import play

Vector = npt.NDArray[np.float64]

_FACTORS = {
    "products": 0.25,
    "attention": 0.25,
    "traffic": 0.25,
    "host": 0.4,
    "inside": 0.4,
    "outside": 0.6,
    "message_s": 1.2,
    "stalls": 0.3,
}
"""What a calibration may change by a factor, and the spread of the logarithm that is expected of it."""
_CPU_SPREAD = 3.0
"""How much wider these are for CPUs, of which there are more kinds than of GPUs."""
_STEP_S = 0.02
"""The spread that is expected of the time per step that belongs to no operator, in seconds."""
_NOISE = 0.08
_LEAST_NOISE = 0.03
_EVALUATIONS = 8
_FOLDS = 3
_DIFFERENCE = 0.02
_NOTICED = 1e-3
"""The change of a step's logarithm below which a factor is left alone."""
_MEMORY_SPREAD = (0.3, 1.5)
"""What is expected of the logarithm of the factor on activations, and of the memory beside everything else,
in GiB."""
_GIB = 2.0**30


def calibrate_parts(cases: Sequence[Case]) -> Calibration:
    """What brings forecasts to the runs; its benefit is told by runs left out (each third by the others')."""
    timed = [case for case in cases if case.run.measured.get("step_time_s", 0) > 0]
    calibration, before, after = Calibration(), None, None
    if timed:
        before = _error(timed, calibration)
        calibration = _learn(timed, rounds=2)
        if len(timed) >= 2 * _FOLDS:
            parts = [timed[i::_FOLDS] for i in range(_FOLDS)]
            crossed = [(part, _learn([case for case in timed if case not in part])) for part in parts]
            after = statistics.fmean(_error(part, by_others) for part, by_others in crossed)
            log_errors = [_log_error(part, by_others) for part, by_others in crossed]
            if statistics.fmean(log_errors) > _log_error(timed, Calibration()):
                calibration = Calibration()
    return dataclasses.replace(
        calibration,
        tuning=_with_memory(calibration.tuning, cases),
        benefit=None if before is None else Benefit(runs=len(cases), error_before=before, error_after=after),
    )


def _learn(cases: Sequence[Case], rounds: int = 1) -> Calibration:
    tuning = _solve(cases, rounds)
    logs = [float(np.log(case.run.measured["step_time_s"] / case.tuned_s(tuning))) for case in cases]
    return Calibration(tuning=tuning, residuals=Residuals.learn([case.run.job for case in cases], logs))


def _error(cases: Sequence[Case], calibration: Calibration) -> float:
    """Mean absolute relative error of the step time."""
    return statistics.fmean(
        abs(case.step_s(calibration) / case.run.measured["step_time_s"] - 1) for case in cases
    )


def _log_error(cases: Sequence[Case], calibration: Calibration) -> float:
    """Mean absolute logarithm of forecast over measured, which counts too much and too little alike."""
    return statistics.fmean(
        abs(float(np.log(case.step_s(calibration) / case.run.measured["step_time_s"]))) for case in cases
    )


def _tuning(names: Sequence[str], values: Vector) -> Tuning:
    """Each value is a logarithm of a factor, or a number of ``_STEP_S`` for the time per step."""
    base = Tuning()
    changed = {
        name: float(value) * _STEP_S if name == "step_s" else getattr(base, name) * float(np.exp(value))
        for name, value in zip(names, values, strict=True)
    }
    return dataclasses.replace(base, **changed)


def _that_matter(cases: Sequence[Case]) -> list[str]:
    """What of a calibration changes any of the steps."""
    plain = np.array([case.tuned_s(Tuning()) for case in cases])
    names = [*_FACTORS, "step_s"]
    changed = {
        name: np.array([case.tuned_s(_tuning([name], np.array([0.3]))) for case in cases]) for name in names
    }
    return [name for name in names if np.abs(np.log(changed[name] / plain)).max() > _NOTICED]


def _solve(cases: Sequence[Case], rounds: int = 1) -> Tuning:
    """Least squares on the logarithms, with what is expected of the factors; a few odd runs do not decide."""
    from scipy.optimize import least_squares

    measured = np.log([case.run.measured["step_time_s"] for case in cases])
    names = _that_matter(cases)
    wider = _CPU_SPREAD if cases[0].run.job.cluster.groups[0].device.is_cpu else 1.0
    expected = np.array([wider * _FACTORS.get(name, 1.0) for name in names])
    values, noise = np.zeros(len(names)), _NOISE
    for _ in range(rounds):

        def residuals(values: Vector, noise: float = noise) -> Vector:
            tuning = _tuning(names, values)
            errors = np.log([max(case.tuned_s(tuning), 1e-9) for case in cases]) - measured
            return np.concatenate([robust(errors / noise), values / expected])

        values = least_squares(residuals, values, diff_step=_DIFFERENCE, max_nfev=_EVALUATIONS).x
        errors = residuals(values, 1.0)[: len(cases)]
        noise = max(_LEAST_NOISE, 1.4826 * float(np.median(np.abs(errors))))
    return _tuning(names, values)


def _with_memory(tuning: Tuning, cases: Sequence[Case]) -> Tuning:
    """The factor on activations and the bytes beside them that bring the memory of the logged rank to the
    runs."""
    from scipy.optimize import least_squares

    rows = []
    for case in cases:
        allocated, reserved = (
            case.run.measured.get(name) for name in ("peak_memory_bytes", "reserved_memory_bytes")
        )
        found = logged(play(case.layout))
        moving = found.by_category["activations"] + found.by_category["temporaries"]
        if allocated:
            rows.append((found.allocated_bytes - moving, moving, allocated))
        elif reserved:
            rows.append((found.allocated_bytes - moving, moving + found.cached_bytes, reserved))
    if len(rows) < 2:
        return tuning
    fixed, moving, measured_bytes = np.array(rows).T

    def residuals(values: Vector) -> Vector:
        errors = np.log(
            np.maximum(fixed + moving * np.exp(values[0]) + values[1] * _GIB, 1.0) / measured_bytes
        )
        return np.concatenate([robust(errors / _NOISE), values / _MEMORY_SPREAD])

    factor, beside = least_squares(residuals, np.zeros(2)).x
    return dataclasses.replace(tuning, activations=float(np.exp(factor)), memory_bytes=float(beside) * _GIB)
