"""Draws when spot nodes are taken back, as outages of the simulation, and what nodes then cost."""

from __future__ import annotations

import dataclasses
import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from foretrain.errors import invalid
from foretrain.scheduling.failures import Outage
from foretrain.scheduling.machines import Machine


@dataclass(frozen=True, slots=True, kw_only=True)
class Spot:
    """Nodes that cost less and go away: the last so many of the cluster. They are paid for while they are
    there."""

    nodes: int
    mean_s: float
    """Mean time until a node is taken back."""
    away_s: float = 3600.0
    """Mean time until there is another in its place."""
    price: float = 0.35
    """Over the price of a node that stays."""

    def __post_init__(self) -> None:
        if self.nodes < 1:
            raise invalid("spot.nodes", self.nodes, "a whole number of at least 1")
        for name in ("mean_s", "away_s"):
            if not 0 < getattr(self, name) < math.inf:
                raise invalid(f"spot.{name}", getattr(self, name), "a time above 0")
        if not 0 < self.price <= 1:
            raise invalid("spot.price", self.price, "a part of the usual price, above 0 and at most 1")

    def machines(self, machines: Sequence[Machine]) -> list[Machine]:
        """The cluster with its spot nodes marked, at their prices; as it is where some are marked already."""
        if any(machine.spot for machine in machines):
            return list(machines)
        if self.nodes > len(machines):
            raise invalid("spot.nodes", self.nodes, f"at most the cluster's {len(machines)}")
        kept = len(machines) - self.nodes
        return [*machines[:kept], *(self._marked(machine) for machine in machines[kept:])]

    def _marked(self, machine: Machine) -> Machine:
        price = machine.price_per_hour
        return dataclasses.replace(
            machine, spot=True, price_per_hour=None if price is None else price * self.price
        )

    def outages(self, node: int, seed: int) -> Iterator[Outage]:
        """When a node is away, at exponential times and without end; each has its own random numbers."""
        draw, time_s = random.Random(f"{seed}/spot/{node}"), 0.0
        while True:
            time_s += draw.expovariate(1 / self.mean_s)
            away_s = max(draw.expovariate(1 / self.away_s), 1.0)
            yield Outage(time_s=time_s, node=node, repair_s=away_s)
            time_s += away_s
