"""What every measurement tells while it runs and when it ends."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

Progress = Callable[[int, int], None]
"""Told how many are done, of how many."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """What a measurement did: measured and failed now, known from before, and left when the time was up."""

    measured: int
    failed: int
    known: int
    left: int

    def __str__(self) -> str:
        return f"{self.measured:,} measured, {self.failed:,} failed, {self.known:,} known before, {self.left:,} left"
