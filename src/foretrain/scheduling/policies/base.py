"""Defines what a policy is: it hears what happens and starts, preempts and resizes jobs of the simulation."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection
from typing import ClassVar

from foretrain.scheduling.simulator import Active, Simulation


class Policy(ABC):
    """Which job runs when. A policy sees estimates of durations, never the truth."""

    name: ClassVar[str]
    resizes: ClassVar[bool] = False
    """Whether elastic jobs get fewer GPUs than they ask for; else one that asks for more than the cluster has
    is refused."""
    honours: ClassVar[Collection[str]] = ()
    """Which rules it heeds, of quotas, cohorts, shares, reservations and preempt; the others are refused."""
    interval_s: float | None = None
    """How often ``round`` is called; None for never."""

    def begin(self, cluster: Simulation) -> None:  # noqa: B027 (a policy need not care)
        """Once, before anything happens."""

    def waits(self, cluster: Simulation, job: Active) -> None:  # noqa: B027 (a policy need not care)
        """A job arrived, was preempted or failed."""

    def finished(self, cluster: Simulation, job: Active) -> None:  # noqa: B027 (a policy need not care)
        """A job is done."""

    def moved(self, cluster: Simulation, job: Active) -> None:  # noqa: B027 (a policy need not care)
        """A running job was moved to faster devices, which is asked for by the settings."""

    def timer(self, cluster: Simulation, job: Active) -> None:  # noqa: B027 (a policy need not care)
        """A time set by ``cluster.wake`` has come."""

    def round(self, cluster: Simulation) -> None:  # noqa: B027 (a policy need not care)
        """An interval has passed; ``decide`` follows."""

    @abstractmethod
    def decide(self, cluster: Simulation) -> None:
        """After everything that happens at a moment."""
