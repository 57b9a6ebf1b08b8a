"""Fills in the links of nodes: between their devices, between nodes, and how many nodes one NVLink domain
joins."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeVar

from foretrain.catalog import Catalog, Device, LinkSpec, Node
from foretrain.errors import InputError, invalid

T = TypeVar("T")

_SCOPES = {"node": "a link inside a node", "network": "a network between nodes"}
_FABRIC = ("rails", "leaf_nodes", "oversubscription", "sharp")
"""What only a network between nodes has."""

_HDR_BYTES_PER_S, _NDR_BYTES_PER_S = 25e9, 50e9
"""Of adapters at 200 and 400 Gb/s, as of DGX A100 and H100 (InfiniBand) and MI300X platforms (RoCE)."""
_NDR_SINCE = 2022
"""The year of devices from which on 400 Gb/s is assumed."""

_ON_A_BOARD = 8
"""Devices that an NVSwitch board joins, where the catalogue has no larger node of the device."""
_MOST_IN_A_DOMAIN = 576
"""Devices that NVLink switches can join (fifth generation)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """A link as its ends see it, per direction: devices inside a node, whole nodes between nodes."""

    kind: str
    bandwidth_bytes_per_s: float
    latency_s: float
    nics: int = 1
    rails: bool = False
    """Adapters of a network are joined by their place in the node alone: messages to another place go to the
    device beside it first."""
    leaf_nodes: int = 1
    """Nodes under one leaf switch (of each rail, where there are rails): messages between them go no
    higher."""
    oversubscription: float = 1.0
    """Rate into leaf switches over that out of them upwards."""
    sharp: bool = False
    """Switches of the network add up (InfiniBand's SHARP)."""


def usual_network(device: Device, per_node: int) -> LinkSpec:
    """An InfiniBand adapter for each device that is sold on NVSwitch boards, RoCE for those on AMD's since;
    else nothing in particular."""
    old = device.year is not None and device.year < _NDR_SINCE
    if device.link == "infinity-fabric" and not old:
        return LinkSpec(kind="roce", bandwidth=per_node * _NDR_BYTES_PER_S, nics=per_node)
    if device.link != "nvswitch" or device.link_optional:
        return LinkSpec()
    rate = _HDR_BYTES_PER_S if old else _NDR_BYTES_PER_S
    return LinkSpec(kind="infiniband", bandwidth=per_node * rate, nics=per_node)


def check_switch(where: str, device: Device, count: int, catalog: Catalog) -> None:
    """No more devices behind one NVSwitch than any node has."""
    if count > _ON_A_BOARD and device.link == "nvswitch" and not device.link_optional:
        known = [node.domain or node.devices for node in catalog.nodes_with(device)]
        most = max([_ON_A_BOARD, *known])
        if count > most:
            allowed = f"at most {most}, what NVSwitch joins in a node; give nodes, or intra_node of your own"
            raise invalid(where, count, allowed)


def fill_link(
    where: str,
    scope: Literal["node", "network"],
    of_job: LinkSpec | None,
    of_node: LinkSpec,
    device: Device,
    catalog: Catalog,
) -> Link:
    """Fill a link in by what the job gives, else what the node has, else what is usual for the device and the
    kind of link."""
    of_job = of_job or LinkSpec()
    usual = "ethernet" if scope == "network" else "pcie" if device.link_optional else device.link
    kind = catalog.link_kind(of_job.kind or of_node.kind or usual, f"{where}.kind")
    if kind.scope != scope:
        raise invalid(f"{where}.kind", kind.name, _SCOPES[scope])
    if (of_node.kind or usual) != kind.name:
        of_node = LinkSpec()
    for name in _FABRIC if scope == "node" else ():
        if getattr(of_job, name) is not None:
            raise InputError(f"{where}.{name}: only a network between nodes has it; give it in inter_node")
    own = device.link_rate(kind.name) if scope == "node" else None
    bandwidth = of_job.bandwidth or of_node.bandwidth or own or kind.bandwidth
    if bandwidth is None:
        raise InputError(
            f"{where}.bandwidth: missing; {device.name} has no {kind.name} of its own that would give it"
        )
    link = Link(
        kind=kind.name,
        bandwidth_bytes_per_s=bandwidth,
        latency_s=_first(of_job.latency, of_node.latency, kind.latency),
        nics=of_job.nics or of_node.nics or 1,
        rails=_first(of_job.rails, of_node.rails, False),
        leaf_nodes=of_job.leaf_nodes or of_node.leaf_nodes or 1,
        oversubscription=of_job.oversubscription or of_node.oversubscription or 1.0,
        sharp=_first(of_job.sharp, of_node.sharp, False),
    )
    if link.sharp and link.kind != "infiniband":
        raise InputError(f"{where}.sharp: switches that add up need kind = 'infiniband', not {link.kind!r}")
    if link.oversubscription < 1:
        raise invalid(f"{where}.oversubscription", link.oversubscription, "1 (none) or more")
    return link


def _first(of_job: T | None, of_node: T | None, usual: T) -> T:
    """Take what is said first."""
    return next(value for value in (of_job, of_node, usual) if value is not None)


def domain_of(where: str, given: int | None, node: Node | None, link: Link, per_node: int, nodes: int) -> int:
    """Devices of a job that NVLink joins: as it says, or by the node.

    Of more nodes than a domain has, schedulers hand out equal blocks: 32 trays of NVL72 are two domains of
    16, not one of 18 and one of 14.
    """
    if given is not None:
        known = None if node is None else (node.domain or node.devices) // node.devices * per_node
        most = _MOST_IN_A_DOMAIN if known is None else known
        if link.kind != "nvswitch" and given > per_node:
            raise InputError(f"{where}: {given} devices of several nodes need intra_node of kind 'nvswitch'")
        if given < per_node or given % per_node or given > most:
            allowed = f"a multiple of the {per_node} devices of a node, up to {most}"
            raise invalid(where, given, allowed)
        return min(given, per_node * nodes)
    trays = node.domain // node.devices if node and node.domain else 1
    if nodes > trays > 1:
        even = (count for count in range(trays, trays // 2, -1) if nodes % count == 0)
        trays = next(even, trays)
    return per_node * min(trays, nodes)
