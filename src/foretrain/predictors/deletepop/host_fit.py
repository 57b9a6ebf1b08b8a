"""Fits the host model's few constants to phase times, where the host bounds the step."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from foretrain.costs.host import DispatchHost
from foretrain.costs.learned import LearnedCosts
from foretrain.errors import InputError
from foretrain.graph import Op
from foretrain.job import Run
from foretrain.step.graph import step_graph

_PARTS = (
    "forward_factor",
    "forward_s",
    "view_s",
    "backward_factor",
    "backward_s",
    "optimizer_s",
    "optimizer_tensor_s",
    "step_overhead_s",
)
_START = np.array([1.0, 10e-6, 5e-6, 0.7, 5e-6, 50e-6, 2e-6, 500e-6])
_SPREAD = np.array([0.4, 1.0, 1.0, 0.4, 1.0, 1.0, 1.0, 1.0])
"""Of the logarithm of each constant around its start."""
_QUANTITIES = ("step_time_s", "forward_time_s", "backward_time_s", "optimizer_time_s")
_SHARPNESS = 8.0
_NOISE = 0.15
_LEAST = 40


def fit_host(host: DispatchHost, costs: LearnedCosts, runs: Sequence[Run], gap_s: float) -> DispatchHost:
    """The constants under which host or device, whichever is slower, explains the measured times best."""
    from scipy.optimize import least_squares

    check_enough(runs)
    rows = [row for run in runs for row in _rows(host, costs, run, gap_s)]
    counts = np.array([row[0] for row in rows])
    device, measured = (np.array([row[i] for row in rows]) for i in (1, 2))

    def residuals(logs: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
        issue = counts @ (_START * np.exp(logs))
        largest = np.maximum(np.maximum(issue, device), 1e-9)
        total = largest * ((issue / largest) ** _SHARPNESS + (device / largest) ** _SHARPNESS) ** (
            1 / _SHARPNESS
        )
        return np.concatenate([np.log(total / measured) / _NOISE, logs / _SPREAD])

    found = least_squares(residuals, np.zeros(len(_PARTS)), loss="soft_l1").x
    constants = {
        name: float(f"{value:.4g}") for name, value in zip(_PARTS, _START * np.exp(found), strict=True)
    }
    return dataclasses.replace(host, **constants)  # type: ignore[arg-type]


def check_enough(runs: Sequence[Run]) -> None:
    """One line where there are too few measured times to learn from."""
    times = sum(quantity in run.measured for run in runs if _usable(run) for quantity in _QUANTITIES)
    if times < _LEAST:
        raise InputError(
            f"runs: {times} measured times on one device with "
            f"busy time; the host model needs {_LEAST} or more"
        )


def _usable(run: Run) -> bool:
    return run.job.cluster.world_size == 1 and "device_busy_s" in run.measured and run.job.accumulation == 1


def _rows(
    host: DispatchHost, costs: LearnedCosts, run: Run, gap_s: float
) -> list[tuple[npt.NDArray[np.float64], float, float]]:
    """For each measured time: how often each constant counts in it, the device's share, and the time."""
    if not _usable(run):
        return []
    graph = step_graph(run.job)
    device_s = costs.device_time_s(
        graph.operators, run.job.cluster.device, run.job.workload.training.precision
    )[graph.operator_index]
    counts = np.array([_counts(host, op) for op in graph.ops])
    phases = np.array([op.phase for op in graph.ops])
    scale = run.measured["device_busy_s"] / max(float(device_s.sum()), 1e-9)
    kernels = costs.kernels(graph.operators, run.job.cluster.device, run.job.workload.training.precision)[
        graph.operator_index
    ]
    found = []
    for quantity in _QUANTITIES:
        if quantity in run.measured:
            chosen = (
                np.ones(len(phases), dtype=np.bool_)
                if quantity == "step_time_s"
                else phases == quantity.split("_")[0]
            )
            total = counts[chosen].sum(axis=0)
            total[-1] = float(quantity == "step_time_s")
            busy = float(device_s[chosen].sum()) * scale + gap_s * float(kernels[chosen].sum())
            found.append((total, busy, run.measured[quantity]))
    return found


def _counts(host: DispatchHost, op: Op) -> list[float]:
    """How often each constant counts in one call; the last, per step, is set by the caller."""
    if op.phase == "optimizer":
        return [0, 0, 0, 0, 0, 1, len(op.operator.inputs), 0]
    if not op.operator.launches:
        return [0, 0, float(op.phase == "forward"), 0, 0, 0, 0, 0]
    dispatch = host.dispatch_s(op.operator)
    return [dispatch, 1, 0, 0, 0, 0, 0, 0] if op.phase == "forward" else [0, 0, 0, dispatch, 1, 0, 0, 0]
