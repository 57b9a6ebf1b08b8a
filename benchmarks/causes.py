"""Says why the forecast of a run is off, from what was measured beside the step and what the forecast is made
of.

Each rule names a cause and the figures that speak for it. A cause that the run itself shows (idle and busy
time measured, the same job measured elsewhere) is evidence; one that only follows from the forecast's own
shares is marked as such: it is where to look first, no more.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from foretrain.units import format_bytes, format_seconds

HALF = 0.5
"""What is explained counts as the cause where it takes at least this part of the error, in logarithms."""
OTHER_GRAPH = 0.15
"""Kernels that differ by more than this were not issued by the graph that was costed."""
ISSUING = 0.8
"""A host that spends this share of the step on issuing kernels is at work all the time."""
LARGE_SHARE = 0.25
"""Of a forecast step: what is neither computation nor waiting for the host, above which it is suspected."""
FIXED_BYTES = 64 * 2**20
"""Differences of memory below this are those of workspaces and the allocator's blocks, not of tensors."""
IDLE = ("waiting for the host", "gaps between kernels")


@dataclass(frozen=True, kw_only=True)
class Case:
    """A run and its forecast, as far as they are needed to say what went wrong."""

    measured: Mapping[str, float]
    predicted: Mapping[str, float]
    causes_s: Mapping[str, float] = field(default_factory=dict)
    """Of the forecast step, adding up to it."""
    operators_s: Mapping[str, float] = field(default_factory=dict)
    """Of the forecast busy time, largest first."""
    memory_bytes: Mapping[str, float] = field(default_factory=dict)
    """Of the forecast peak, by category."""
    spread_s: tuple[float, float] | None = None
    """The fastest and the slowest group of steps of the run."""
    elsewhere_s: Mapping[str, float] = field(default_factory=dict)
    """Step times of the same job in other runs, by where they are."""
    devices: int = 1
    cpu: bool = False


@dataclass(frozen=True, kw_only=True)
class Cause:
    kind: str
    why: str
    by_forecast: bool = False
    """Nothing measured tells: it follows from the shares of the forecast."""


def step_cause(case: Case) -> Cause:
    """Why a step time is off."""
    told_s, true_s = case.predicted["step_time_s"], case.measured["step_time_s"]
    distance = abs(math.log(told_s / true_s))
    if case.elsewhere_s:
        near = min(case.elsewhere_s, key=lambda one: abs(math.log(told_s / case.elsewhere_s[one])))
        if abs(math.log(told_s / case.elsewhere_s[near])) <= HALF * distance:
            took = format_seconds(case.elsewhere_s[near])
            return Cause(kind="machine", why=f"the same job took {took} in {near}")
    if case.spread_s is not None and case.spread_s[0] <= told_s <= case.spread_s[1]:
        ends = " to ".join(map(format_seconds, case.spread_s))
        return Cause(kind="unsteady", why=f"groups of steps of this run took {ends}")
    both = case.measured.keys() & case.predicted.keys()
    if case.devices == 1 and not case.cpu and "device_busy_s" in both:
        return _one_gpu(case)
    return _by_shares(case)


def _one_gpu(case: Case) -> Cause:
    """Busy and idle time were measured, so that the error is split exactly."""
    forecast, true = case.predicted, case.measured
    told_idle_s, true_idle_s = (each["step_time_s"] - each["device_busy_s"] for each in (forecast, true))
    if abs(true_idle_s - told_idle_s) < abs(true["device_busy_s"] - forecast["device_busy_s"]):
        busy = f"busy {_pair(forecast['device_busy_s'], true['device_busy_s'])}"
        return Cause(kind="operators", why=f"{busy}; of the forecast {_largest(case.operators_s)}")
    idle = f"idle {_pair(told_idle_s, true_idle_s)}"
    kernels = [each.get("kernels", 0.0) for each in (forecast, true)]
    if all(kernels) and abs(kernels[0] / kernels[1] - 1) > OTHER_GRAPH:
        count = f"{kernels[0]:,.0f} kernels for {kernels[1]:,.0f}"
        return Cause(kind="host, other kernels", why=f"{idle}; {count}")
    issuing_s = true.get("host_issue_s")
    if issuing_s is not None and issuing_s < ISSUING * true["step_time_s"]:
        why = f"{idle}; the host issues for {format_seconds(issuing_s)} and then waits"
        return Cause(kind="host, waiting", why=why)
    each_s = [
        one["step_time_s"] / count for one, count in zip((forecast, true), kernels, strict=True) if count
    ]
    pace = f"; {_pair(*each_s)} for a kernel" if len(each_s) == 2 else ""
    return Cause(kind="host, pace", why=f"{idle}{pace}")


def _by_shares(case: Case) -> Cause:
    """Nothing tells where the time went: the largest part of the forecast that could be wrong by so much."""
    off_s = abs(case.predicted["step_time_s"] - case.measured["step_time_s"])
    whole_s = sum(case.causes_s.values()) or 1.0
    waits = {name: value for name, value in case.causes_s.items() if name != "computation" and value > 0}
    shares = ", ".join(f"{value / whole_s:.0%} {name}" for name, value in case.causes_s.items() if value)
    name = max(waits, key=lambda one: waits[one], default="")
    if name and (waits[name] >= off_s or waits[name] >= LARGE_SHARE * whole_s):
        kind = "host, pace" if name in IDLE else name
        return Cause(kind=kind, why=f"forecast: {shares}", by_forecast=True)
    why = f"forecast: {shares}; {_largest(case.operators_s)}"
    return Cause(kind="operators", why=why, by_forecast=True)


def memory_cause(case: Case, quantity: str) -> Cause:
    """Why a memory figure is off."""
    told, true = case.predicted[quantity], case.measured[quantity]
    off, parts = abs(told - true), case.memory_bytes
    peak = "peak_memory_bytes"
    if off < FIXED_BYTES:
        why = f"{format_bytes(off)} apart: workspaces and blocks of the allocator"
        return Cause(kind="fixed parts", why=why, by_forecast=True)
    if quantity != peak and {peak} <= case.measured.keys() & case.predicted.keys():
        tensors = abs(case.predicted[peak] - case.measured[peak])
        if tensors < HALF * off:
            why = f"tensors are {format_bytes(tensors)} apart, the rest is cached"
            return Cause(kind="allocator", why=why)
    able = {name: size for name, size in parts.items() if size >= off} or parts
    largest = sorted(able.items(), key=lambda item: -item[1])[:3]
    names = ", ".join(f"{name} {format_bytes(size)}" for name, size in largest)
    kind = largest[0][0] if largest else "not known"
    return Cause(kind=kind, why=f"{format_bytes(off)} apart; forecast: {names}", by_forecast=True)


def _pair(told_s: float, true_s: float) -> str:
    return f"{format_seconds(max(told_s, 0.0))} forecast, {format_seconds(max(true_s, 0.0))} measured"


def _largest(parts_s: Mapping[str, float], count: int = 2) -> str:
    whole_s = sum(parts_s.values()) or 1.0
    return ", ".join(f"{value / whole_s:.0%} {name}" for name, value in list(parts_s.items())[:count])


def counted(causes: Sequence[Cause]) -> dict[str, int]:
    """How often each kind occurs, the most frequent first."""
    return dict(Counter(cause.kind for cause in causes).most_common())


def case_of(document: Mapping[str, Any]) -> Case:
    """What ``dataclasses.asdict`` made of one."""
    spread = document["spread_s"]
    return Case(**{**document, "spread_s": None if spread is None else (spread[0], spread[1])})
