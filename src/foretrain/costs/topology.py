"""Places the members of a communicator on nodes, NVLink domains and the network between them."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from foretrain.cluster import Group
from foretrain.errors import invalid


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


@dataclass(frozen=True, slots=True, kw_only=True)
class TeamPlacement:
    """Says where the members of a team lie: on nodes, which lie in NVLink domains, which the network
    joins."""

    per_node: int
    """Members on each node that it touches."""
    per_domain: int
    """Members that NVLink joins: those of a node, or of all nodes of a domain."""
    domains: int
    """Domains that it spans; of 1, nothing goes over the network."""

    @property
    def size(self) -> int:
        return self.per_domain * self.domains

    @property
    def nodes_per_domain(self) -> int:
        return self.per_domain // self.per_node


def place_team(members: Team, group: Group) -> TeamPlacement:
    """A team on the nodes of a group. Nodes in one domain are a divisor of the team's, so that domains are
    alike.

    >>> from foretrain.cluster import Cluster
    >>> racks = Cluster.read({"node": "gb200-nvl72", "nodes": 32}).groups[0]
    >>> place_team(team(degree=32, stride=4, devices_per_node=4), racks)
    TeamPlacement(per_node=1, per_domain=16, domains=2)
    """
    trays = group.domain // group.devices_per_node
    most = min(members.nodes, -(-trays // members.spacing))
    joined = next(count for count in range(most, 0, -1) if members.nodes % count == 0)
    return TeamPlacement(
        per_node=members.per_node, per_domain=members.per_node * joined, domains=members.nodes // joined
    )


def adapters(members: Team, group: Group) -> float:
    """Network adapters that the members on a node have to themselves: those next to them, at least one,
    shared with the teams alike."""
    nics = group.inter_node.nics
    active = members.per_node * members.sharing / _devices_in_node(group)
    return min(nics, max(1.0, nics * active)) / members.sharing


def nodes_under_a_leaf(members: Team, group: Group) -> int:
    """Of the nodes that a team touches, those whose messages to one another stay under a leaf switch."""
    return min(members.nodes, max(1, group.inter_node.leaf_nodes // members.spacing))


def _devices_in_node(group: Group) -> int:
    return group.node.devices if group.node else group.devices_per_node
