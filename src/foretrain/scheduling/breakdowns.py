"""Makes nodes fail and come back, at random and as outages say, whoever holds their GPUs."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from foretrain.errors import InputError
from foretrain.scheduling.failures import Failures, Outage
from foretrain.scheduling.kernel import Events, Kind
from foretrain.scheduling.machines import Machines


class Strike(NamedTuple):
    """A failure of a node to come."""

    node: int
    repair_s: float | None
    """How long the node is away; None where that is drawn as it happens."""
    next_ones: Iterator[Outage] | None = None
    """Of a spot node that is taken back: the times after this one."""


class Breakdowns:
    """The failures of nodes to come.

    Every node has at most one random failure ahead of it, whatever outages befall it meanwhile. A node that
    is struck while it is away comes back when the longer of the two is over.
    """

    def __init__(
        self, outages: Sequence[Outage], failures: Failures, machines: Machines, events: Events
    ) -> None:
        self._failures, self._machines, self._events = failures, machines, events
        self.taken_back: list[Outage] = []
        """The times at which spot nodes were away so far."""
        nodes = len(machines.machines)
        self._ahead = [False] * nodes
        self._back_s = [-math.inf] * nodes
        for outage in outages:
            if outage.node >= nodes:
                raise InputError(f"failures: node {outage.node} is not one of the cluster's {nodes}")
            self._push(outage.time_s, Strike(outage.node, outage.repair_s))
        for node in range(nodes):
            self._draw(node, 0.0)
        for node, machine in enumerate(machines.machines):
            if machine.spot:
                self._push_next(failures.of_spot(node))

    def _push(self, time_s: float, strike: Strike) -> None:
        self._events.push(time_s, Kind.NODE_FAILURE, strike)

    def _push_next(self, outages: Iterator[Outage]) -> None:
        """The next time that a spot node is taken back."""
        outage = next(outages, None)
        if outage is not None:
            self._push(outage.time_s, Strike(outage.node, outage.repair_s, outages))

    def _draw(self, node: int, now_s: float) -> None:
        until = self._failures.of_node(node, self._machines.machines[node])
        if until < math.inf:
            self._ahead[node] = True
            self._push(now_s + until, Strike(node, None))

    def strikes(self, strike: Strike, now_s: float) -> bool:
        """Whether a failure whose time has come takes a node down, and not one that is down already."""
        node, repair_s, next_ones = strike
        if repair_s is None:
            self._ahead[node] = False
            repair_s = self._failures.repair_of(node)
        elif next_ones is not None:
            self.taken_back.append(Outage(time_s=now_s, node=node, repair_s=repair_s))
            self._push_next(next_ones)
        if now_s + repair_s > self._back_s[node]:
            self._back_s[node] = now_s + repair_s
            self._events.push(now_s + repair_s, Kind.REPAIR, node)
        return self._machines.is_up(node)

    def repaired(self, node: int, now_s: float) -> bool:
        """Whether a node whose repair is over is up again, and not struck once more meanwhile."""
        if now_s < self._back_s[node]:
            return False
        self._machines.bring_up(node)
        if not self._ahead[node]:
            self._draw(node, now_s)
        return True
