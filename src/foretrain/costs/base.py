"""Says what a model of operator costs must answer: a column of seconds for distinct operators."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from foretrain.cluster import Device
from foretrain.graph import Operator, TensorSpec

Column = npt.NDArray[np.float64]


class Call(Protocol):
    """Says of an operator what its costs depend on: one of a graph, or one that was measured alone."""

    @property
    def name(self) -> str: ...
    @property
    def inputs(self) -> tuple[TensorSpec, ...]: ...
    @property
    def args(self) -> Mapping[str, Any]: ...
    @property
    def flops(self) -> int: ...
    @property
    def bytes(self) -> int: ...


class CostModel(Protocol):
    """Seconds that the device is busy with one call of each operator; 0 for operators that launch nothing."""

    def device_time_s(self, operators: Sequence[Operator], device: Device, precision: str) -> Column: ...

    def kernels(self, operators: Sequence[Operator], device: Device, precision: str) -> Column:
        """Count the kernels, copies and fills that one call of each operator puts on the device."""
        ...


class HostModel(Protocol):
    """Seconds that the host needs to issue one call of each operator, given the phase each is issued in."""

    def issue_time_s(self, operators: Sequence[Operator], phases: Sequence[str]) -> Column: ...

    @property
    def speed(self) -> float:
        """Give the speed of the host, as a multiple of that of the one that figures come from."""
        ...

    @property
    def hook_time_s(self) -> float:
        """Time a Python function that a checkpoint has autograd call."""
        ...

    @property
    def step_overhead_s(self) -> float:
        """Host time per step that belongs to no operator."""
        ...

    @property
    def unrecorded(self) -> float:
        """Share of its time that a forward pass takes where autograd does not record it."""
        ...
