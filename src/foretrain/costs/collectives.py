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

import dataclasses
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal, get_args, overload

import numpy as np
import numpy.typing as npt

from foretrain.cluster import Cluster, Device, Group
from foretrain.costs.base import Column
from foretrain.errors import invalid, unknown

Kind = Literal["all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "send"]
Library = Literal["nccl", "gloo"]
Way = Literal["ring", "pair", "switch"]
"""How members use their links: all at once (ring, tree, all-to-all), one pair, or a switch that reduces."""
Sizes = npt.NDArray[np.number]

_MESSAGES_AT_ONCE = 8
"""Peers that a member of an NCCL all-to-all serves at a time."""
_SWITCH_HOPS = 10
"""What setting up the switch takes, in hops of NVLink: NCCL's tuning counts 25 us."""
_NEIGHBOURS = {"nvlink-mesh": 4, "infinity-fabric": 7}
"""Most peers that a device without a switch divides its links among: DGX-1's cube mesh, MI300's full mesh."""


# Who takes part


@dataclass(frozen=True, slots=True, kw_only=True)
class Team:
    """The members of one communicator, as they lie on the nodes."""

    per_node: int
    """Members on each node that it touches."""
    nodes: int
    """Nodes that it spans."""
    sharing: int = 1
    """Teams alike on the same nodes that communicate at the same time and share the nodes' network."""
    spacing: int = 1
    """From each node that it touches to the next; it tells which nodes lie in one NVLink domain."""

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            if getattr(self, field.name) < 1:
                raise invalid(f"team.{field.name}", getattr(self, field.name), "a whole number of at least 1")

    @property
    def size(self) -> int:
        return self.per_node * self.nodes


def team(degree: int, stride: int, devices_per_node: int) -> Team:
    """The team of ``degree`` ranks that lie ``stride`` apart, ranks being numbered through the nodes one
    after another.

    Where the ranks do not fill their nodes evenly, it is spread over the next number of nodes that divides
    them.

    >>> team(degree=16, stride=8, devices_per_node=8)
    Team(per_node=1, nodes=16, sharing=8, spacing=1)
    """
    for name, value in {"degree": degree, "stride": stride, "devices_per_node": devices_per_node}.items():
        if value < 1:
            raise invalid(f"team.{name}", value, "a whole number of at least 1")
    most = max(1, devices_per_node // stride)
    nodes = -(-degree // most)
    while degree % nodes:
        nodes += 1
    per_node = degree // nodes
    sharing = min(stride, max(1, devices_per_node // per_node))
    return Team(per_node=per_node, nodes=nodes, sharing=sharing, spacing=max(1, stride // devices_per_node))


# What a library makes of a link


@dataclass(frozen=True, slots=True, kw_only=True)
class Transport:
    """What a library reaches on a kind of link, as shares of its data-sheet rate, and the time it adds."""

    ring: float
    """Share of the rate that a ring or a tree sustains on long messages."""
    pair: float
    """Share that a message from one member to another sustains."""
    chunk_s: float
    """Time that each chunk of a pipelined message costs on its own."""
    start_s: float
    """Time of a call beside its hops: the kernel, and the proxy thread of a network."""
    hop_s: float = 0.0
    """Time that the library's own threads add to each hop."""
    switch: float | None = None
    """Share that reduction inside the switch sustains, where the device has it."""
    most_bytes_per_s: float = math.inf
    """What the host can move for one adapter, sent and received together: the limit of sockets."""
    source: str

    def share(self, way: Way) -> float:
        if way == "pair":
            return self.pair
        return self.switch if way == "switch" and self.switch else self.ring


TRANSPORTS: Mapping[str, Transport] = MappingProxyType(
    {
        "nvlink3": Transport(
            ring=0.79,
            pair=0.93,
            chunk_s=11e-6,
            start_s=12e-6,
            source="vidur (DGX A100, A100 pairs), estimate-train-time (Perlmutter, inside a node), "
            "Galvatron: all-reduce, send",
        ),
        "nvlink4": Transport(
            ring=0.79,
            pair=0.80,
            chunk_s=2.1e-6,
            start_s=5.3e-6,
            switch=0.64,
            source="vidur (DGX H100, H100 NVL pairs): all-reduce, send, up to 64 MiB; ring as nvlink3",
        ),
        "pcie": Transport(
            ring=0.80,
            pair=0.80,
            chunk_s=1.3e-6,
            start_s=20e-6,
            source="vidur (all-reduce of 4 A100 PCIe and of 4 H100 NVL); pair as ring",
        ),
        "rdma": Transport(
            ring=0.94,
            pair=0.72,
            chunk_s=0.0,
            start_s=12e-6,
            source="estimate-train-time (Vista), vidur (send between DGX H100): 400 Gb/s InfiniBand each",
        ),
        "efa": Transport(
            ring=0.45,
            pair=0.45,
            chunk_s=0.0,
            start_s=12e-6,
            hop_s=100e-6,
            source="nanotron's public runs on p5.48xlarge: what gradients and tensor parallelism between "
            "nodes add to a step",
        ),
        "sockets": Transport(
            ring=0.9,
            pair=0.9,
            chunk_s=0.0,
            start_s=0.0,
            most_bytes_per_s=2.5e9,
            source="estimate-train-time (Perlmutter between nodes), vidur (send between nodes of A100 pairs "
            "and of A40); ring, pair assumed",
        ),
        "gloo": Transport(
            ring=0.95,
            pair=0.95,
            chunk_s=0.0,
            start_s=0.0,
            hop_s=0.58e-3,
            most_bytes_per_s=1.9e9,
            source="data/cpu16_ddp, cpu16_campaign, links_campaign: what synchronising adds to a DDP step; "
            "ring, pair assumed",
        ),
    }
)
_NCCL_ON = {
    **dict.fromkeys(("nvswitch", "nvlink-mesh", "nvlink-pair", "infinity-fabric"), "nvlink3"),
    "pcie": "pcie",
    **dict.fromkeys(("infiniband", "roce", "slingshot"), "rdma"),
    "efa": "efa",
    **dict.fromkeys(("ethernet", "loopback"), "sockets"),
}


def transport_name(library: Library, link_kind: str, device: Device) -> str:
    """The transport that a library uses on a link; a kind of the user's own counts as a network with RDMA."""
    name = "gloo" if library == "gloo" else _NCCL_ON.get(link_kind, "rdma")
    return "nvlink4" if name == "nvlink3" and _since_hopper(device) else name


def _since_hopper(device: Device) -> bool:
    return device.vendor == "nvidia" and float(device.capability or 0) >= 9


@dataclass(frozen=True, slots=True, kw_only=True)
class ParameterServer:
    """What the processes of a parameter server reach on a CPU core each."""

    process_bytes_per_s: float
    """Sent or received by one process."""
    update_s_per_byte: float
    """Adding up and the optimizer, on a server, of each byte that it holds."""
    pack_s_per_byte: float
    """Packing gradients and unpacking weights on a worker."""
    source: str


SERVER = ParameterServer(
    process_bytes_per_s=4.0e9,
    update_s_per_byte=0.64e-9,
    pack_s_per_byte=0.5e-9,
    source="data/cpu16_campaign, cells with one server; the split of update and pack follows the resource "
    "series of one cell",
)


# Algorithms: what they put on the links


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """What an algorithm moves, as multiples of the call's size, and the messages that follow one another."""

    inside: float
    """Sent by each member over the links inside a node."""
    outside: float
    """Sent by the team's members on a node, together, over the network."""
    hops_inside: float
    hops_outside: float
    way: Way = "ring"
    one_way: bool = False
    """Whether each end only sends or only receives: no pipeline of members."""


Algorithm = Callable[[int, int], Load]
"""Given the members on each node and the number of nodes."""


def _around(times: int) -> Algorithm:
    """A ring gone round once (all-gather, reduce-scatter) or twice (all-reduce); it leaves each node once."""

    def load(per_node: int, nodes: int) -> Load:
        size = per_node * nodes
        share = times * (size - 1) / size
        return Load(
            inside=share, outside=share, hops_inside=times * (size - nodes), hops_outside=times * (nodes - 1)
        )

    return load


def _tree(per_node: int, nodes: int) -> Load:
    """Two binary trees, each for half of the data, up and down (Sanders et al. 2009)."""
    return Load(
        inside=2.0, outside=2.0, hops_inside=2 * math.log2(per_node), hops_outside=2 * math.log2(nodes)
    )


def _in_switch(per_node: int, nodes: int) -> Load:
    """NVLS: the switch adds up what members send once and hands all of them the sum; trees between nodes."""
    return dataclasses.replace(_tree(per_node, nodes), inside=1.0, hops_inside=_SWITCH_HOPS, way="switch")


def _chain(per_node: int, nodes: int) -> Load:
    """A ring that passes the whole message on."""
    return Load(inside=1.0, outside=1.0, hops_inside=per_node * nodes - nodes, hops_outside=nodes - 1)


def _binomial(per_node: int, nodes: int) -> Load:
    """Whole messages to twice as many members each round."""
    inside, outside = math.ceil(math.log2(per_node)), math.ceil(math.log2(nodes))
    return Load(inside=inside, outside=outside, hops_inside=inside, hops_outside=outside)


def _pairwise(per_node: int, nodes: int) -> Load:
    """A message from each member to every other."""
    size = per_node * nodes
    return Load(
        inside=(per_node - 1) / size,
        outside=per_node * (size - per_node) / size,
        hops_inside=math.ceil((per_node - 1) / _MESSAGES_AT_ONCE),
        hops_outside=math.ceil((size - per_node) / _MESSAGES_AT_ONCE),
    )


def _message(per_node: int, nodes: int) -> Load:
    """One message, from one member to another."""
    near, far = float(nodes == 1), float(nodes > 1)
    return Load(inside=near, outside=far, hops_inside=near, hops_outside=far, way="pair", one_way=True)


_COMMON: dict[Kind, tuple[Algorithm, ...]] = {
    "all_gather": (_around(1),),
    "reduce_scatter": (_around(1),),
    "all_to_all": (_pairwise,),
    "send": (_message,),
}
_ALGORITHMS: dict[Library, dict[Kind, tuple[Algorithm, ...]]] = {
    "nccl": {**_COMMON, "all_reduce": (_around(2), _tree, _in_switch), "broadcast": (_chain,)},
    "gloo": {**_COMMON, "all_reduce": (_around(2),), "broadcast": (_binomial,)},
}


_SOCKET_SHARE = 0.4
"""Of a fast adapter's rate, sent and received together, that sockets reach when their limit is below it:
they use several threads."""


# Costs


class Collectives:
    """Costs of one cluster's network.

    In a mixed cluster a team counts as one of the slowest group's: the others wait for it.

    >>> network = Collectives(Cluster.read({"node": "dgx-h100", "nodes": 4}))
    >>> f"{network.time_s('all_reduce', 1e9, team(32, 1, 8)) * 1e3:.1f} ms"
    '5.4 ms'
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
            algorithms = _algorithms(self.library, kind)
            times = np.max([route.time_s(algorithms, sizes, team) for route in self._routes], axis=0)
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
        _algorithms(self.library, kind)
        return _TRAFFIC[kind](team.size) * size_bytes if team.size > 1 else 0.0


def _sizes(size_bytes: float | Sizes) -> Column:
    sizes = np.asarray(size_bytes, dtype=np.float64)
    if not np.all((sizes >= 0) & np.isfinite(sizes)):
        raise invalid("size_bytes", size_bytes, "numbers of at least 0")
    return sizes


def _algorithms(library: Library, kind: Kind) -> tuple[Algorithm, ...]:
    if kind not in get_args(Kind):
        raise unknown("kind", kind, get_args(Kind))
    return _ALGORITHMS[library][kind]


@dataclass(frozen=True, slots=True)
class _Lane:
    """A link under a transport, for one team."""

    rate: float
    """Data-sheet bytes per second of the team: of each member inside a node, of a node's members outside."""
    most: float
    """What the host can move of it, sent and received together."""
    latency_s: float
    transport: Transport

    def time_s(self, sizes: Column, share: float, load: Load) -> Column:
        """Of a pipeline that moves ``share`` of each size over this lane."""
        rate = min(self.rate * self.transport.share(load.way), self.most if load.one_way else self.most / 2)
        wire = sizes * share / rate
        chunk_s = 0.0 if load.one_way else self.transport.chunk_s
        times: Column = wire + 2 * np.sqrt(chunk_s * wire)
        return times


class _Route:
    """The links of one group of nodes."""

    def __init__(self, group: Group, library: Library, transports: Mapping[str, Transport]) -> None:
        self._group, self._library, self._transports = group, library, dict(transports)

    def time_s(self, algorithms: tuple[Algorithm, ...], sizes: Column, team: Team) -> Column:
        """Of the fastest algorithm that this team can use."""
        inside, outside, per_node, nodes = self._lanes(team)
        loads = [algorithm(per_node, nodes) for algorithm in algorithms]
        usable = [load for load in loads if load.way != "switch" or self._reduces_in_switch(per_node)]
        times: Column = np.min([_call_s(load, sizes, inside, outside) for load in usable], axis=0)
        return times

    @property
    def host_network_bytes_per_s(self) -> float:
        """Of a node's network through host memory."""
        return self._group.inter_node.bandwidth_bytes_per_s * self._transports["gloo"].pair

    def host_hop_s(self, nodes: int) -> float:
        link = self._group.inter_node if nodes > 1 else self._group.intra_node
        return link.latency_s + self._transports["gloo"].hop_s

    def _lanes(self, team: Team) -> tuple[_Lane | None, _Lane | None, int, int]:
        """The lanes inside and between nodes, members per node, nodes; an NVLink domain counts as a node."""
        joined = self._nodes_joined(team)
        per_node, nodes = team.per_node * joined, team.nodes // joined
        inside = self._inside(per_node) if per_node > 1 else None
        outside = self._outside(team, joined) if nodes > 1 else None
        return inside, outside, per_node, nodes

    def _nodes_joined(self, team: Team) -> int:
        """Nodes of the team in one NVLink domain; a divisor of its nodes, so that domains are alike."""
        trays = self._group.domain // self._group.devices_per_node
        most = min(team.nodes, -(-trays // team.spacing))
        return next(count for count in range(most, 0, -1) if team.nodes % count == 0)

    def _inside(self, members: int) -> _Lane:
        link, device = self._group.intra_node, self._group.device
        kind, rate = link.kind, link.bandwidth_bytes_per_s
        if kind == "nvlink-pair" and members > 2:
            kind, rate = "pcie", device.pcie_bytes_per_s
        if kind in _NEIGHBOURS:
            peers = min(_NEIGHBOURS[kind], self._devices_in_node - 1)
            rate *= min(1.0, (members - 1) / max(1, peers))
        transport = self._transports[transport_name(self._library, kind, device)]
        return _Lane(rate, transport.most_bytes_per_s, link.latency_s, transport)

    def _outside(self, team: Team, joined: int) -> _Lane:
        """Members use the adapters next to them, at least one, and share them with the teams alike."""
        link = self._group.inter_node
        active = team.per_node * team.sharing / self._devices_in_node
        adapters = joined * min(link.nics, max(1.0, link.nics * active)) / team.sharing
        transport = self._transports[transport_name(self._library, link.kind, self._group.device)]
        rate = link.bandwidth_bytes_per_s / link.nics
        return _Lane(
            adapters * rate,
            adapters * max(transport.most_bytes_per_s, _SOCKET_SHARE * rate),
            link.latency_s,
            transport,
        )

    @property
    def _devices_in_node(self) -> int:
        return self._group.node.devices if self._group.node else self._group.devices_per_node

    def _reduces_in_switch(self, members: int) -> bool:
        """NVSwitch adds up from its third generation on, that of Hopper."""
        return _since_hopper(self._group.device) and self._group.intra_node.kind == "nvswitch" and members > 2


def _call_s(load: Load, sizes: Column, inside: _Lane | None, outside: _Lane | None) -> Column:
    """Both lanes work at the same time; hops add up, and the slower start counts."""
    parts = [(inside, load.inside, load.hops_inside), (outside, load.outside, load.hops_outside)]
    used = [(lane, share, hops) for lane, share, hops in parts if lane is not None and hops]
    start = max(lane.transport.start_s for lane, _, _ in used)
    latency = sum(hops * (lane.latency_s + lane.transport.hop_s) for lane, _, hops in used)
    times: Column = (
        start + latency + np.max([lane.time_s(sizes, share, load) for lane, share, _ in used], axis=0)
    )
    return times


_TRAFFIC: dict[Kind, Callable[[int], float]] = {
    "all_reduce": lambda size: 2 * (size - 1) / size,
    "all_gather": lambda size: (size - 1) / size,
    "reduce_scatter": lambda size: (size - 1) / size,
    "all_to_all": lambda size: (size - 1) / size,
    "broadcast": lambda size: (size - 1) / size,
    "send": lambda size: 1.0,
}
