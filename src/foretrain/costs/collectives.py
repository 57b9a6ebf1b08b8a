"""Costs collectives by the latency and bandwidth of the links that their members use.

A call runs as one of a few algorithms, and the library takes the fastest. Each algorithm puts a load on the
links inside a node and on the node's network; both work as one pipeline, so the slower one counts:

    time   = start + hops x latency + fill(wire)
    wire   = max(inside / rate inside a node, outside / rate of the team's share of the node's network)
    fill   = wire + 2 sqrt(chunk x wire)

The last line is the time of a pipeline that cuts a message into the best number of chunks, each of which
costs ``chunk`` on its own (Hockney's model, pipelined). Constants are few and shared by all sizes and teams;
docs/collectives.md tells how well they hold.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import get_args, overload

import numpy as np
import numpy.typing as npt

from foretrain.cluster import Cluster, Group
from foretrain.costs.algorithms import Algorithm, Kind, Load, algorithms, by_rail, traffic
from foretrain.costs.base import Column
from foretrain.costs.topology import Team, TeamPlacement, adapters, nodes_under_a_leaf, place_team, team
from foretrain.costs.transports import (
    SERVER,
    TRANSPORTS,
    Library,
    ParameterServer,
    Transport,
    since_hopper,
    transport_name,
)
from foretrain.errors import invalid, unknown

__all__ = ["Collectives", "Kind", "Library", "Team", "TeamPlacement", "TeamRates", "team"]

Sizes = npt.NDArray[np.number]

_NEIGHBOURS = {"nvlink-mesh": 4, "infinity-fabric": 7}
"""Most peers that a device without a switch divides its links among: DGX-1's cube mesh, MI300's full mesh."""
_PCIE_LATENCY_S = 5e-6
"""Of messages from one bridged pair to another."""
_SOCKET_SHARE = 0.4
"""Of a fast adapter's rate, sent and received together, that sockets reach when their limit is below it:
they use several threads."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TeamRates:
    """Holds the rates that each member of a team has by data sheet, for messages to all others alike."""

    inside_bytes_per_s: float
    """Over NVLink or PCIe, to members that it joins."""
    outside_bytes_per_s: float
    """Its part of the adapters of its node, as far as the network above them carries it."""


class Collectives:
    """Costs of one cluster's network.

    In a mixed cluster a team counts as one of the slowest group's: the others wait for it.

    >>> network = Collectives(Cluster.read({"node": "dgx-h100", "nodes": 4}))
    >>> f"{network.time_s('all_reduce', 1e9, team(32, 1, 8)) * 1e3:.1f} ms"
    '5.3 ms'
    """

    def __init__(
        self,
        cluster: Cluster,
        *,
        library: Library | None = None,
        transports: Mapping[str, Transport] = TRANSPORTS,
        server: ParameterServer = SERVER,
    ) -> None:
        self.library: Library = library or (
            "gloo" if any(group.device.is_cpu for group in cluster.groups) else "nccl"
        )
        if self.library not in get_args(Library):
            raise unknown("library", self.library, get_args(Library))
        self._server = server
        self._routes = [_Route(group, self.library, transports) for group in cluster.groups]

    @overload
    def time_s(self, kind: Kind, size_bytes: float, team: Team) -> float: ...
    @overload
    def time_s(self, kind: Kind, size_bytes: Sizes, team: Team) -> Column: ...
    def time_s(self, kind: Kind, size_bytes: float | Sizes, team: Team) -> float | Column:
        """Seconds of one call, from the last member's start to the last member's end.

        The size is that of the tensor (all_reduce), the gathered output (all_gather), the whole input
        (reduce_scatter), what each member holds (all_to_all) or the message (broadcast, send).
        """
        sizes = _sizes(size_bytes)
        if team.size == 1:
            times = np.zeros_like(sizes)
        else:
            known = algorithms(self.library, kind)
            times = np.max([route.time_s(known, sizes, team) for route in self._routes], axis=0)
        return times if times.ndim else float(times)

    @overload
    def parameter_server_s(
        self, size_bytes: float, *, workers: int, servers: int = 1, nodes: int = 1, server_nodes: int = 0
    ) -> float: ...
    @overload
    def parameter_server_s(
        self, size_bytes: Sizes, *, workers: int, servers: int = 1, nodes: int = 1, server_nodes: int = 0
    ) -> Column: ...
    def parameter_server_s(
        self,
        size_bytes: float | Sizes,
        *,
        workers: int,
        servers: int = 1,
        nodes: int = 1,
        server_nodes: int = 0,
    ) -> float | Column:
        """Seconds of one synchronous exchange: all workers push gradients, the servers add and update, all
        workers pull weights.

        ``size_bytes`` is the whole model's; servers hold equal parts of it. Workers and servers are processes
        that are spread evenly over ``nodes``; on one node they talk through its memory. Servers with nodes of
        their own, ``server_nodes``, are reached over the network. Everything goes through host memory,
        whatever the library.
        """
        for name, value in {"workers": workers, "servers": servers, "nodes": nodes}.items():
            if value < 1:
                raise invalid(name, value, "a whole number of at least 1")
        sizes = _sizes(size_bytes)
        process = max(workers / servers, 1.0) / self._server.process_bytes_per_s
        on_a_node = math.ceil(servers / (server_nodes or nodes))
        node = max(on_a_node * workers / servers, math.ceil(workers / nodes))
        nodes += server_nodes
        network = 0.0 if nodes == 1 else node / min(route.host_network_bytes_per_s for route in self._routes)
        work = self._server.update_s_per_byte / servers + self._server.pack_s_per_byte
        hops = 2 * max(workers / servers, servers) * max(route.host_hop_s(nodes) for route in self._routes)
        times = hops + sizes * (2 * max(process, network) + work)
        return times if times.ndim else float(times)

    def traffic_bytes(self, kind: Kind, size_bytes: float, team: Team) -> float:
        """Bytes that one member sends over its links in one call, on average over the members; of a send,
        what the sender sends.

        In-switch reduction, which sends less, is counted as a ring.
        """
        algorithms(self.library, kind)
        return traffic(kind, team.size) * size_bytes if team.size > 1 else 0.0

    def placement(self, team: Team) -> TeamPlacement:
        """Place a team: which members share a node and an NVLink domain; of several groups, where fewest
        do."""
        return min((route.placement(team) for route in self._routes), key=lambda place: place.per_domain)

    def rates(self, team: Team) -> TeamRates:
        """Give the rates at which members of a team exchange messages with all others, in the slowest
        group."""
        all_rates = [route.rates(team) for route in self._routes]
        return min(all_rates, key=lambda rates: (rates.outside_bytes_per_s, rates.inside_bytes_per_s))


def _sizes(size_bytes: float | Sizes) -> Column:
    sizes = np.asarray(size_bytes, dtype=np.float64)
    if not np.all((sizes >= 0) & np.isfinite(sizes)):
        raise invalid("size_bytes", size_bytes, "numbers of at least 0")
    return sizes


@dataclass(frozen=True, slots=True)
class _Lane:
    """A link under a transport, for one team."""

    rate: float
    """Data-sheet bytes per second of the team: of each member inside a node, of a node's members outside."""
    most: float
    """What the host can move of it, sent and received together."""
    latency_s: float
    transport: Transport
    own: bool = False
    """Whether members copy their own part while it works."""
    narrows: tuple[float, float] = (1.0, 1.0)
    """By what its rate is divided further up: of messages to a neighbour, and to all alike."""

    def time_s(self, sizes: Column, share: float, load: Load) -> Column:
        """Time a pipeline that moves ``share`` of each size over this lane."""
        transport = self.transport
        rate = self.rate * transport.share(load.way) / self.narrows[load.to_all]
        rate = min(rate, self.most if load.one_way else self.most / 2)
        wire = sizes * (share + (transport.own * load.own if self.own else 0.0)) / rate
        chunk_s = 0.0 if load.one_way else transport.chunk_s
        times: Column = wire + 2 * np.sqrt(chunk_s * wire)
        return times


class _Route:
    """The links of one group of nodes."""

    def __init__(self, group: Group, library: Library, transports: Mapping[str, Transport]) -> None:
        self._group, self._library, self._transports = group, library, dict(transports)
        self._ways: dict[
            tuple[tuple[Algorithm, ...], Team], tuple[_Lane | None, _Lane | None, list[Load]]
        ] = {}

    def time_s(self, known: tuple[Algorithm, ...], sizes: Column, team: Team) -> Column:
        """Time calls by the fastest algorithm that this team can use."""
        if (known, team) not in self._ways:
            self._ways[known, team] = self._usable(known, team)
        inside, outside, loads = self._ways[known, team]
        times: Column = np.min([_call_s(load, sizes, inside, outside) for load in loads], axis=0)
        return times

    def _usable(
        self, known: tuple[Algorithm, ...], team: Team
    ) -> tuple[_Lane | None, _Lane | None, list[Load]]:
        """The lanes inside and between nodes, and what algorithms put on them; an NVLink domain counts as a
        node."""
        placed = self.placement(team)
        inside = self._inside(placed.per_domain) if placed.per_domain > 1 else None
        outside = self._outside(team, placed) if placed.domains > 1 else None
        loads = [algorithm(placed.per_domain, placed.domains) for algorithm in known]
        if self._group.inter_node.rails:
            loads = [by_rail(load, placed.per_node, placed.domains) for load in loads]
        return inside, outside, [load for load in loads if self._can(load, placed)]

    def placement(self, team: Team) -> TeamPlacement:
        return place_team(team, self._group)

    def rates(self, team: Team) -> TeamRates:
        placed = self.placement(team)
        inside, outside = self._inside(max(2, placed.per_domain)), self._outside(team, placed)
        return TeamRates(
            inside_bytes_per_s=inside.rate,
            outside_bytes_per_s=outside.rate / outside.narrows[True] / placed.per_domain,
        )

    @property
    def host_network_bytes_per_s(self) -> float:
        """Give the rate of a node's network through host memory."""
        return self._group.inter_node.bandwidth_bytes_per_s * self._transports["gloo"].pair

    def host_hop_s(self, nodes: int) -> float:
        link = self._group.inter_node if nodes > 1 else self._group.intra_node
        return link.latency_s + self._transports["gloo"].hop_s

    def _inside(self, members: int) -> _Lane:
        group = self._group
        link, device = group.intra_node, group.device
        kind, rate, latency_s = link.kind, link.bandwidth_bytes_per_s, link.latency_s
        if kind == "nvlink-pair" and members > 2:
            kind, rate, latency_s = "pcie", device.pcie_bytes_per_s, max(latency_s, _PCIE_LATENCY_S)
        if kind in _NEIGHBOURS:
            peers = min(_NEIGHBOURS[kind], (group.node.devices if group.node else group.devices_per_node) - 1)
            rate *= min(1.0, (members - 1) / max(1, peers))
        transport = self._transports[transport_name(self._library, kind, device)]
        return _Lane(rate, transport.most_bytes_per_s, latency_s, transport, own=True)

    def _outside(self, team: Team, placed: TeamPlacement) -> _Lane:
        """The adapters of all nodes of a domain work together."""
        link = self._group.inter_node
        used = placed.nodes_per_domain * adapters(team, self._group)
        transport = self._transports[transport_name(self._library, link.kind, self._group.device)]
        rate = link.bandwidth_bytes_per_s / link.nics
        return _Lane(
            used * rate,
            used * max(transport.most_bytes_per_s, _SOCKET_SHARE * rate),
            link.latency_s,
            transport,
            narrows=self._narrows(team, placed),
        )

    def _narrows(self, team: Team, placed: TeamPlacement) -> tuple[float, float]:
        """Above its leaf switches a network may be narrower. Of a ring one node of each leaf sends up, of
        messages to all those for nodes elsewhere do."""
        near = nodes_under_a_leaf(team, self._group)
        if near >= team.nodes:
            return 1.0, 1.0
        apart = max(1.0, near / placed.nodes_per_domain)
        up = 1 / apart, (placed.domains - apart) / max(1, placed.domains - 1)
        ring, to_all = (max(1.0, self._group.inter_node.oversubscription * share) for share in up)
        return ring, to_all

    def _can(self, load: Load, placed: TeamPlacement) -> bool:
        """Whether switches add up: NVSwitch from its third generation on, that of Hopper; those of the
        network where the job says so."""
        if load.reduces == "in the network" and (not self._group.inter_node.sharp or placed.domains == 1):
            return False
        switched = since_hopper(self._group.device) and self._group.intra_node.kind == "nvswitch"
        return load.way != "switch" or (switched and placed.per_domain > 2)


def _call_s(load: Load, sizes: Column, inside: _Lane | None, outside: _Lane | None) -> Column:
    """Time calls: both lanes work at the same time, hops add up, and the slower start counts."""
    parts = [(inside, load.inside, load.hops_inside), (outside, load.outside, load.hops_outside)]
    used = [(lane, share, hops) for lane, share, hops in parts if lane is not None and hops]
    start = max(lane.transport.start_s for lane, _, _ in used)
    latency = sum(hops * (lane.latency_s + lane.transport.hop_s) for lane, _, hops in used)
    times: Column = (
        start + latency + np.max([lane.time_s(sizes, share, load) for lane, share, _ in used], axis=0)
    )
    return times
