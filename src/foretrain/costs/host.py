"""Costs the host thread that issues operators: Python, autograd and the dispatcher, per call."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from foretrain.catalog.hosts import PARTS, Host
from foretrain.costs.base import Column
from foretrain.costs.recurrences import issue_s
from foretrain.graph import Operator
from foretrain.graph.opset import traits

UNRECORDED = 0.75
"""By the passes without gradients of ``data/h200_random_steps.jsonl`` beside its trainings; the networks of
``measure host`` have 0.73 to 0.87."""
HOOK_S = 4.2e-6
"""Of packing or unpacking a tensor in Python, as checkpoints do (``capture/tracing/checkpoints.py``)."""

_NOT_LEARNED = ("hook_s", "unrecorded", "speeds")


@dataclass(frozen=True, slots=True, kw_only=True)
class DispatchHost:
    """The measured dispatch cost of each operator, and what Python, autograd and the optimizer add."""

    names: Mapping[str, float] = field(default_factory=dict, hash=False)
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
    hook_s: float = HOOK_S
    unrecorded: float = UNRECORDED
    """Share of its time that a forward pass takes where autograd does not record it."""
    speed: float = 1.0
    """How much faster the host is than the one these figures come from."""
    speeds: Mapping[str, float] = field(default_factory=dict, hash=False)
    """The same of single phases, on top."""

    def to_dict(self) -> dict[str, Any]:
        """Write what was learned, without what is the same for all."""
        kept = [one.name for one in dataclasses.fields(self) if one.name not in _NOT_LEARNED]
        return {name: getattr(self, name) for name in kept}

    def on(self, host: Host) -> DispatchHost:
        """Move these figures to another host."""
        speeds = {phase: host.speed_of(phase) / host.speed for phase in PARTS}
        return dataclasses.replace(
            self,
            speed=self.speed * host.speed,
            speeds={phase: speed for phase, speed in speeds.items() if speed != 1.0},
            step_overhead_s=self.step_overhead_s / host.speed,
        )

    def dispatch_s(self, operator: Operator) -> float:
        """Seconds to dispatch one call outside of a model: of recurrences by their kernels, of others as they
        were measured by name."""
        if traits(operator.name).kind == "recurrence":
            return issue_s(operator)
        return self.names.get(operator.name, self.other_s)

    def issue_time_s(self, operators: Sequence[Operator], phases: Sequence[str]) -> Column:
        calls = zip(operators, phases, strict=True)
        speeds = np.array([self.speed * self.speeds.get(phase, 1.0) for phase in phases])
        seconds: Column = np.array([self._one(operator, phase) for operator, phase in calls]) / speeds
        return seconds

    @property
    def hook_time_s(self) -> float:
        return self.hook_s / self.speed

    def _one(self, operator: Operator, phase: str) -> float:
        if phase == "optimizer":
            return self.optimizer_s + self.optimizer_tensor_s * len(operator.inputs)
        if not operator.launches:
            return self.view_s if phase == "forward" else 0.0
        dispatch = self.dispatch_s(operator)
        if phase == "forward":
            return self.forward_factor * dispatch + self.forward_s
        return self.backward_factor * dispatch + self.backward_s


MEASURED_HOST = "a Xeon (Emerald Rapids)"
"""What dispatch costs were measured on."""


PLAIN_HOST = DispatchHost(
    forward_factor=0.0,
    forward_s=30e-6,
    backward_factor=0.0,
    backward_s=30e-6,
    optimizer_s=63e-6,
    optimizer_tensor_s=1.1e-6,
)
"""One time per kind of call, fitted to phase times of the host-bound runs of ``data/h200_steps.jsonl``
(16-core Xeon); of optimizers to steps of theirs that began on an idle device."""
