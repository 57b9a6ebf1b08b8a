"""The place where operator costs plug in: distinct operators go in, one column of device seconds comes out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt

from foretrain.cluster import Device
from foretrain.graph import Operator

Column = npt.NDArray[np.float64]


class CostModel(Protocol):
    """Seconds that the device is busy with one call of each operator; 0 for operators that launch nothing."""

    def device_time_s(self, operators: Sequence[Operator], device: Device, precision: str) -> Column: ...

    def kernels(self, operators: Sequence[Operator], device: Device, precision: str) -> Column:
        """How many kernels, copies and fills one call of each operator puts on the device."""
        ...


class HostModel(Protocol):
    """Seconds that the host needs to issue one call of each operator, given the phase each is issued in."""

    def issue_time_s(self, operators: Sequence[Operator], phases: Sequence[str]) -> Column: ...

    @property
    def step_overhead_s(self) -> float:
        """Host time per step that belongs to no operator."""
        ...
