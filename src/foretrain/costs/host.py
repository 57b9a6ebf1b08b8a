"""Costs the host thread that issues operators: Python, autograd and the dispatcher, per call."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from foretrain.costs.base import Column
from foretrain.costs.recurrences import issue_s
from foretrain.graph import Operator
from foretrain.graph.opset import traits


@dataclass(frozen=True, slots=True, kw_only=True)
class DispatchHost:
    """The measured dispatch cost of each operator, and what Python, autograd and the optimizer add."""

    names: Mapping[str, float] = field(default_factory=dict)
    """Seconds to dispatch an operator outside of a model; of multi-tensor operators per tensor."""
    other_s: float = 20e-6
    """The same for operators that were never measured."""
    forward_factor: float = 1.0
    forward_s: float = 10e-6
    view_s: float = 4e-6
    backward_factor: float = 1.0
    backward_s: float = 5e-6
    optimizer_s: float = 50e-6
    optimizer_tensor_s: float = 1e-6
    step_overhead_s: float = 300e-6
    speed: float = 1.0
    """How much faster the host is than the one these figures come from."""

    def issue_time_s(self, operators: Sequence[Operator], phases: Sequence[str]) -> Column:
        calls = zip(operators, phases, strict=True)
        return np.array([self._one(operator, phase) for operator, phase in calls]) / self.speed

    def _one(self, operator: Operator, phase: str) -> float:
        if phase == "optimizer":
            return self.optimizer_s + self.optimizer_tensor_s * len(operator.inputs)
        if not operator.launches:
            return self.view_s if phase == "forward" else 0.0
        recurrent = traits(operator.name).kind == "recurrence"
        dispatch = issue_s(operator) if recurrent else self.names.get(operator.name, self.other_s)
        if phase == "forward":
            return self.forward_factor * dispatch + self.forward_s
        return self.backward_factor * dispatch + self.backward_s


MEASURED_HOST = "a Xeon (Emerald Rapids)"
"""What dispatch costs were measured on."""
_SPEEDS = {
    "E5-26": 0.62, "Xeon Platinum 8168": 0.68, "8259": 0.7, "8175": 0.68, "8275": 0.72, "Cascade": 0.7,
    "Skylake": 0.68, "EPYC 7742": 0.68, "EPYC 7R32": 0.68, "EPYC 7V12": 0.68, "Rome": 0.68, "EPYC 7763": 0.8,
    "EPYC 7R13": 0.8, "EPYC 7V13": 0.8, "Milan": 0.8, "Emerald": 1.0, "74F3": 0.9, "7A53": 0.8, "8462": 0.95,
    "8480": 0.95, "8481": 0.95, "8488": 0.95, "Sapphire": 0.95, "Genoa": 1.0, "EPYC 9": 1.0, "85": 1.0,
    "Grace": 0.85,
}  # fmt: skip
"""Single-thread speed of hosts, by the first of these that their name contains, beside the Xeon (Emerald
Rapids) that dispatch costs were measured on: rounded ratios of public single-thread benchmarks, by
generation."""
_SPEED_BY_YEAR = ((2017, 0.62), (2019, 0.68), (2021, 0.72), (2023, 0.9))
"""Of hosts that are usual beside devices of up to that year."""


def cpu_speed(cpu: str | None, device_year: int | None = None) -> float:
    """How fast a node's CPU issues kernels, from its name, else from what is usual beside the device."""
    if cpu is not None:
        return next((speed for part, speed in _SPEEDS.items() if part in cpu), 1.0)
    if device_year is None:
        return 1.0
    return next((speed for year, speed in _SPEED_BY_YEAR if device_year <= year), 1.0)


PLAIN_HOST = DispatchHost(
    forward_factor=0.0,
    forward_s=30e-6,
    backward_factor=0.0,
    backward_s=30e-6,
    optimizer_s=12e-6,
    optimizer_tensor_s=0.14e-6,
)
"""One time per kind of call, fitted to phase times of the host-bound runs of ``data/h200_steps.jsonl``
(16-core Xeon)."""
