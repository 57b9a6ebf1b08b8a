"""Sets what a simulation costs beside the work: checkpoints, restarts, failures, sharing, rules."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from foretrain.errors import InputError
from foretrain.scheduling.failures import FailureModel
from foretrain.scheduling.rules import Rules
from foretrain.scheduling.sharing.interference import Interference
from foretrain.scheduling.sharing.mates import LEAST_SPEED


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
    pairs: Interference | None = None
    """Two jobs of one GPU each may share it, at the cost that this tells; None for never."""
    least_speed: float = LEAST_SPEED
    """Of a job alone, that each of a pair must keep."""
    rules: Rules = field(default_factory=Rules)
    migrate: bool = False
    """Whether running jobs move to faster devices that are free while none waits."""
    mixed_gangs: bool = False
    """Whether a job may run on GPUs of several kinds at once, where no kind alone has enough free."""
    failures: FailureModel = field(default_factory=FailureModel)
    seed: int = 0

    @property
    def options(self) -> list[str]:
        """Those in use that not every policy can honour."""
        in_use = {
            "sharing": self.sharing,
            "pairs": self.pairs is not None,
            "quotas": self.rules.has_quotas,
            "cohorts": any(queue.cohort for queue in self.rules.queues.values()),
            "shares": self.rules.has_shares,
            "reservations": bool(self.rules.reservations),
            "preempt": self.rules.preempt,
            "migrate": self.migrate,
            "mixed_gangs": self.mixed_gangs,
        }
        return [name for name, used in in_use.items() if used]

    def __post_init__(self) -> None:
        for name in ("checkpoint_s", "restart_s"):
            if not 0 <= getattr(self, name) < math.inf:
                raise InputError(f"settings.{name}: {getattr(self, name)!r} is not a time of at least 0")
        if not 0 < self.least_speed <= 1:
            raise InputError(f"settings.least_speed: {self.least_speed!r} is not above 0 and at most 1")
        if not self.checkpoint_every_s > 0:
            every_s = self.checkpoint_every_s
            raise InputError(f"settings.checkpoint_every_s: {every_s!r} is not a time above 0")
