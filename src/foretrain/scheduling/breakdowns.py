"""Makes nodes fail and come back, at random and as outages say, whoever holds their GPUs."""

from __future__ import annotations

import math
from collections.abc import Sequence

from foretrain.errors import InputError
from foretrain.scheduling.failures import Failures, Outage
from foretrain.scheduling.kernel import Events, Kind
from foretrain.scheduling.machines import Machines


class Breakdowns:
    """The failures of nodes to come.

    Every node has at most one random failure ahead of it, whatever outages befall it meanwhile.
    """

    def __init__(
        self, outages: Sequence[Outage], failures: Failures, machines: Machines, events: Events
    ) -> None:
        self._failures, self._machines, self._events = failures, machines, events
        nodes = len(machines.machines)
        self._ahead = [False] * nodes
        for outage in outages:
            if outage.node >= nodes:
                raise InputError(f"failures: node {outage.node} is not one of the cluster's {nodes}")
            events.push(outage.time_s, Kind.NODE_FAILURE, (outage.node, outage.repair_s))
        if not math.isinf(failures.model.node_mtbf_s):
            for node in range(nodes):
                self._draw(node, 0.0)

    def _draw(self, node: int, now_s: float) -> None:
        until = self._failures.of_node(node)
        if until < math.inf:
            self._ahead[node] = True
            self._events.push(now_s + until, Kind.NODE_FAILURE, (node, None))

    def strikes(self, node: int, repair_s: float | None) -> bool:
        """Whether a failure whose time has come takes a node down: one that is down already stays so."""
        if repair_s is None:
            self._ahead[node] = False
        return self._machines.is_up(node)

    def takes_down(self, node: int, repair_s: float | None, now_s: float) -> None:
        """The node is away until it is repaired."""
        self._machines.take_down(node)
        repair_s = self._failures.repair_of(node) if repair_s is None else repair_s
        self._events.push(now_s + repair_s, Kind.REPAIR, node)

    def repaired(self, node: int, now_s: float) -> None:
        self._machines.bring_up(node)
        if not self._ahead[node]:
            self._draw(node, now_s)
