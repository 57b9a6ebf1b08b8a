"""What every measurement tells while it runs and when it ends."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

Progress = Callable[[int, int], None]
"""Told how many are done, of how many."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """What a measurement did: measured and failed now, known from before, left when the time was up, and not tried again."""

    measured: int
    failed: int
    known: int
    left: int
    failed_before: int = 0

    def __str__(self) -> str:
        said = f"{self.measured:,} measured, {self.failed:,} failed, {self.known:,} known before, {self.left:,} left"
        return (
            f"{said}, {self.failed_before:,} failed before (--retry-failed tries them again)"
            if self.failed_before
            else said
        )
