"""Costs the host of a compiled model: the compiler's own code launches its kernels, autograd hands gradients
over, the optimizer runs as ever.

The figures are fitted to the host-bound ones of 28 compiled trainings on an H200 (``data/h200_modern.jsonl``,
``h200_startup.jsonl``, ``h200_compiled.jsonl``); with the architecture families left out in turn their steps
are forecast with 15 % error.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from foretrain.costs.base import Column, HostModel
from foretrain.costs.generated import is_generated
from foretrain.graph import Operator

_GENERATED_S = 20e-6
"""To launch a kernel that the compiler wrote."""
_LIBRARY_S = 12.5e-6
"""To call a library's."""
_PASSES_S = {"train": 4.5e-3, "infer": 1.5e-3}
"""Guards, and what stands around the compiled passes."""
_PARAMETER_S = 49e-6
"""To hand over a parameter and its gradient."""
_GRAPH_PASSES_S, _GRAPH_PARAMETER_S = 1.5e-3, 45e-6
"""The same where passes are replayed as CUDA graphs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CompiledHost:
    """The host of a step whose forward and backward pass are compiled."""

    plain: HostModel
    """For what is not: the optimizer."""
    parameters: int
    """That have gradients."""
    mode: str = "train"
    micro_batches: int = 1
    """Whose passes a step makes."""
    graphs: bool = False
    """Passes are replayed as CUDA graphs."""
    hook_time_s: float = 0.0
    """Checkpoints are compiled too."""
    unrecorded: float = 1.0
    """Autograd records nothing of compiled code."""

    @property
    def speed(self) -> float:
        return self.plain.speed

    def issue_time_s(self, operators: Sequence[Operator], phases: Sequence[str]) -> Column:
        times = np.array(self.plain.issue_time_s(operators, phases))
        for i, (operator, phase) in enumerate(zip(operators, phases, strict=True)):
            if phase != "optimizer":
                times[i] = self._one(operator) / self.speed
        return times

    def _one(self, operator: Operator) -> float:
        if self.graphs or not operator.launches:
            return 0.0
        return _GENERATED_S * int(operator.args["kernels"]) if is_generated(operator) else _LIBRARY_S

    @property
    def step_overhead_s(self) -> float:
        passes_s = _GRAPH_PASSES_S if self.graphs else _PASSES_S[self.mode]
        parameter_s = _GRAPH_PARAMETER_S if self.graphs else _PARAMETER_S
        return (passes_s * self.micro_batches + parameter_s * self.parameters) / self.speed
