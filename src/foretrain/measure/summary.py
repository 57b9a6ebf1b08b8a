"""Sums up what a measurement did."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

Progress = Callable[[int, int], None]
"""Told how many are done, of how many."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """Says what a measurement did: measured, failed, known from before, left when time was up, not tried
    again."""

    measured: int
    failed: int
    known: int
    left: int
    failed_before: int = 0

    def __str__(self) -> str:
        counts = {"measured": self.measured, "failed": self.failed, "known before": self.known}
        text = ", ".join(f"{count:,} {name}" for name, count in {**counts, "left": self.left}.items())
        again = f", {self.failed_before:,} failed before (--retry-failed tries them again)"
        return text + (again if self.failed_before else "")
