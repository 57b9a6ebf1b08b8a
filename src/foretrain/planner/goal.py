"""Says what a plan is wanted for: what to make small, and what it must keep within."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, get_args

from foretrain.errors import InputError, invalid, unknown

Objective = Literal["time", "cost", "energy"]
OBJECTIVES: tuple[Objective, ...] = get_args(Objective)


@dataclass(frozen=True, slots=True, kw_only=True)
class Goal:
    """The objective and its limits."""

    objective: Objective = "time"
    deadline_s: float | None = None
    """By when the whole training must have ended."""
    budget: float | None = None
    """Dollars that it may cost."""
    fits: float = 0.9
    """The least probability that memory is enough."""
    risk: float = 0.1
    """The probability with which the deadline and the budget may be missed."""

    def __post_init__(self) -> None:
        if self.objective not in OBJECTIVES:
            raise unknown("objective", self.objective, OBJECTIVES)
        for name in ("deadline_s", "budget"):
            value = getattr(self, name)
            if value is not None and not 0 < value < math.inf:
                raise invalid(name.removesuffix("_s"), value, "a finite number above zero")
        for name in ("fits", "risk"):
            if not 0 < getattr(self, name) < 1:
                raise invalid(name, getattr(self, name), "a probability between 0 and 1")

    @property
    def is_limited(self) -> bool:
        return self.deadline_s is not None or self.budget is not None

    def check_length(self, *, has_length: bool) -> None:
        """Refuse limits on a training whose length is not known."""
        if self.is_limited and not has_length:
            limit = "deadline" if self.deadline_s is not None else "budget"
            raise InputError(f"{limit}: of a whole training; give its steps, or its samples and epochs")
