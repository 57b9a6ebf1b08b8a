"""Sets what a simulation costs beside the work: checkpoints, restarts and failures; and sharing of GPUs."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from foretrain.errors import InputError
from foretrain.scheduling.failures import FailureModel


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What else shapes a simulation.

    Costs in seconds: a checkpoint before a job is taken off, a restart before it works again.
    """

    checkpoint_s: float = 0.0
    restart_s: float = 0.0
    checkpoint_every_s: float = 1800.0
    """A job that fails loses what it did since its last checkpoint."""
    sharing: bool = False
    """Whether jobs that need a share of a GPU may have one to themselves (False) or share it (True)."""
    failures: FailureModel = field(default_factory=FailureModel)
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("checkpoint_s", "restart_s"):
            if not 0 <= getattr(self, name) < math.inf:
                raise InputError(f"settings.{name}: {getattr(self, name)!r} is not a time of at least 0")
        if not self.checkpoint_every_s > 0:
            every_s = self.checkpoint_every_s
            raise InputError(f"settings.checkpoint_every_s: {every_s!r} is not a time above 0")
