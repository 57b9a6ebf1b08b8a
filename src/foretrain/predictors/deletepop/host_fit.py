"""Fits the host model's few constants to times of steps, and of their phases where the host bounds them."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from foretrain.catalog.hosts import Host
from foretrain.costs.host import DispatchHost
from foretrain.costs.learned import LearnedCosts
from foretrain.errors import InputError
from foretrain.graph import Op
from foretrain.run import Run
from foretrain.step.assembly import HOST_BOUND
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
_QUANTITIES = ("step_time_s", "host_issue_s", "forward_time_s", "backward_time_s", "optimizer_time_s")
"""All but the first where the host bounds the step: else it runs ahead, and the device alone tells the phases
apart."""
_ALONE = "optimizer_alone_s"
"""An optimizer's step that begins on an idle device, where a run tells it: its kernels are hidden behind the
host."""
_MACHINES = 0.5
"""The same of how much slower a machine is than another."""
_SHARPNESS = 8.0
_NOISE = 0.15
_LEAST = 40


def fit_host(host: DispatchHost, costs: LearnedCosts, runs: Sequence[Run], gap_s: float) -> DispatchHost:
    """The constants under which host or device, whichever is slower, explains the measured times best.

    Where provenances name other machines, each is as much slower as its runs show; the constants are those of
    the machine with most runs.
    """
    check_enough(runs)
    return solve(host, [row for run in runs for row in rows_of(host, costs, run, gap_s)])


def solve(host: DispatchHost, rows: Sequence[HostTime]) -> DispatchHost:
    """The host with the constants that explain measured times best."""
    from scipy.optimize import least_squares

    counts = np.array([row.counts for row in rows])
    device, measured = (np.array([getattr(row, name) for row in rows]) for name in ("device_s", "measured_s"))
    machines = [name for name, _ in Counter(row.machine for row in rows).most_common()]
    machine = np.array([machines.index(row.machine) for row in rows])

    def residuals(logs: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
        slower = np.exp(np.concatenate([[0.0], logs[len(_PARTS) :]]))[machine]
        issue = counts @ (_START * np.exp(logs[: len(_PARTS)])) * slower
        largest = np.maximum(np.maximum(issue, device), 1e-9)
        total = largest * ((issue / largest) ** _SHARPNESS + (device / largest) ** _SHARPNESS) ** (
            1 / _SHARPNESS
        )
        spread = np.concatenate([_SPREAD, np.full(len(machines) - 1, _MACHINES)])
        return np.concatenate([np.log(total / measured) / _NOISE, logs / spread])

    solution = least_squares(residuals, np.zeros(len(_PARTS) + len(machines) - 1), loss="soft_l1").x
    constants = {
        name: float(f"{value:.4g}")
        for name, value in zip(_PARTS, _START * np.exp(solution[: len(_PARTS)]), strict=True)
    }
    return dataclasses.replace(host, **constants)  # type: ignore[arg-type]


def check_enough(runs: Sequence[Run]) -> None:
    """Refuse too few measured times to learn from, in one line."""
    times = sum(quantity in run.measured for run in runs if _usable(run) for quantity in _QUANTITIES)
    if times < _LEAST:
        raise InputError(
            f"runs: {times} measured times on one device with "
            f"busy time; the host model needs {_LEAST} or more"
        )


def _usable(run: Run) -> bool:
    return run.job.cluster.world_size == 1 and "device_busy_s" in run.measured and run.job.accumulation == 1


@dataclass(frozen=True, slots=True, kw_only=True)
class HostTime:
    """A measured time: how often each constant counts in it, and what the device needs."""

    counts: npt.NDArray[np.float64]
    device_s: float
    measured_s: float
    machine: str


def rows_of(host: DispatchHost, costs: LearnedCosts, run: Run, gap_s: float) -> list[HostTime]:
    """The measured times of a run that tell something of the host."""
    if not _usable(run):
        return []
    graph = step_graph(run.job)
    device_s = costs.device_time_s(
        graph.operators, run.job.cluster.device, run.job.workload.training.precision
    )[graph.operator_index]
    phases = np.array([op.phase for op in graph.ops])
    issuer = run.job.cluster.issuer or Host()
    speeds = np.array([issuer.speed_of(op.phase) for op in graph.ops])
    counts = np.array([_counts(host, op) for op in graph.ops]) / speeds[:, None]
    scale = run.measured["device_busy_s"] / max(float(device_s.sum()), 1e-9)
    kernels = costs.kernels(graph.operators, run.job.cluster.device, run.job.workload.training.precision)[
        graph.operator_index
    ]
    machine, rows = str(run.provenance.get("machine", "")), []
    for quantity, measured_s in _times(run):
        whole = quantity in ("step_time_s", "host_issue_s")
        chosen = np.ones(len(phases), dtype=np.bool_) if whole else phases == quantity.partition("_")[0]
        total = counts[chosen].sum(axis=0)
        total[-1] = float(whole) / issuer.speed
        busy = float(device_s[chosen].sum()) * scale + gap_s * float(kernels[chosen].sum())
        waits = 0.0 if quantity in ("host_issue_s", _ALONE) else busy
        rows.append(HostTime(counts=total, device_s=waits, measured_s=measured_s, machine=machine))
    return rows


def _times(run: Run) -> Iterator[tuple[str, float]]:
    """The measured times of a run that the host has a part in."""
    host_bound = run.measured["device_busy_s"] < HOST_BOUND * run.measured.get("step_time_s", 0.0)
    for quantity in _QUANTITIES if host_bound else _QUANTITIES[:1]:
        if quantity in run.measured:
            yield quantity, run.measured[quantity]
    apart = run.provenance.get("phases_apart_s")
    if isinstance(apart, Mapping) and "optimizer_time_s" in apart:
        yield _ALONE, float(apart["optimizer_time_s"])


def _counts(host: DispatchHost, op: Op) -> list[float]:
    """Count how often each constant counts in one call; the last, per step, is set by the caller."""
    if op.phase == "optimizer":
        return [0, 0, 0, 0, 0, 1, len(op.operator.inputs), 0]
    if not op.operator.launches:
        return [0, 0, float(op.phase == "forward"), 0, 0, 0, 0, 0]
    dispatch = host.dispatch_s(op.operator)
    return [dispatch, 1, 0, 0, 0, 0, 0, 0] if op.phase == "forward" else [0, 0, 0, dispatch, 1, 0, 0, 0]
