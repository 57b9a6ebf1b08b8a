"""Reads the [cluster] section of a job: devices, nodes, and the links between them by the catalogue."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from foretrain import schema
from foretrain.catalog import Catalog, Device, LinkSpec, Node, check_numbers, read_link
from foretrain.catalog.hosts import Host, HostProfile, read_host
from foretrain.errors import InputError, UnsupportedJob, invalid
from foretrain.links import Link, check_switch, domain_of, fill_link, usual_network
from foretrain.schema import quantity
from foretrain.units import (
    LEAST_BARE_RATE,
    format_count,
    parse_bytes,
    parse_price,
    parse_rate,
    parse_seconds,
)

__all__ = ["Catalog", "Cluster", "ClusterSpec", "Device", "Group", "GroupSpec", "Link", "LinkSpec", "Node"]

_BY_GROUP = ("device", "node", "nodes", "cores_per_device")
_OF_MACHINES = ("storage_bandwidth", "node_mtbf", "restart_time", "power_limit")


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupSpec:
    """Nodes that are alike, as the job file describes them."""

    device: str | None = None
    devices_per_node: int | None = None
    nodes: int | None = None
    node: str | None = None
    cores_per_device: int | None = None
    domain: int | None = None
    """Devices of the job that one NVLink domain joins."""
    intra_node: LinkSpec | None = dataclasses.field(default=None, metadata={"parse": read_link})
    inter_node: LinkSpec | None = dataclasses.field(default=None, metadata={"parse": read_link})


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerNodes:
    """Nodes that hold parameter servers and nothing else; without them servers run on the workers' nodes."""

    nodes: int
    cores: int | None = None
    memory: float | None = quantity(parse_bytes, default=None)
    price: float | None = quantity(parse_price, default=None)
    """Of one node, per hour; by default that of its cores."""

    def __post_init__(self) -> None:
        check_numbers("cluster.servers", nodes=self.nodes, cores=self.cores, memory=self.memory)
        check_numbers("cluster.servers", zero=True, price=self.price)


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterSpec(GroupSpec):
    """The [cluster] section: one group of nodes, or ``groups`` for a mixed cluster."""

    groups: tuple[GroupSpec, ...] = ()
    servers: ServerNodes | None = None
    price: float | None = quantity(parse_price, default=None)
    storage_bandwidth: float | None = quantity(parse_rate, default=None)
    node_mtbf: float | None = quantity(parse_seconds, default=None)
    restart_time: float | None = quantity(parse_seconds, default=None)
    power_limit: float | None = None
    host: str | Host | None = dataclasses.field(default=None, metadata={"parse": read_host})
    machines: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """Nodes that are alike, with everything filled in."""

    device: Device
    devices_per_node: int
    nodes: int
    node: Node | None
    intra_node: Link
    inter_node: Link
    domain: int
    """Devices that the intra-node link joins: those of a node, or of all nodes that NVLink spans."""
    issuer: Host | None = None
    """The CPU of its nodes, which issues operators to GPUs; None where nothing tells."""

    @property
    def world_size(self) -> int:
        return self.nodes * self.devices_per_node

    def is_like(self, other: Group) -> bool:
        """Whether they differ in their number of nodes at most."""
        return self == dataclasses.replace(other, nodes=self.nodes)


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """Where a job runs: one group of nodes, or several for a mixed cluster."""

    groups: tuple[Group, ...]
    price_per_device_hour: float | None = None
    """The job's own price, when it gives one."""
    price_per_hour: float | None = None
    """Dollars per hour of the whole cluster, by the job's own price or the catalogue; None when unknown."""
    price_source: str = ""
    """What one device or node of it costs, with whose price it is and when it held; empty when unknown."""
    servers: ServerNodes | None = None
    storage_bandwidth: float | None = None
    """Bytes per second that one node writes checkpoints with."""
    node_mtbf: float | None = None
    """Mean seconds between failures of a node; None where nothing fails."""
    restart_time: float | None = None
    """Seconds from a failure until steps run again; None for as long as a start takes."""
    power_limit: float | None = None
    """Watts that each device may draw; None for what its data sheet says."""
    assumptions: tuple[str, ...] = ()
    specs: tuple[GroupSpec, ...]
    host: str | None = None
    """The machine in words, as campaigns record it ("AMD EPYC, 2 cores"); None when it is not told."""
    issuer: Host | None = None
    """What issues operators to GPUs: by ``host``, else the slowest of the nodes' CPUs; None where neither
    tells."""
    machines: int | None = None
    """Machines that the nodes are, where several nodes are one; None: each is a machine of its own."""

    @classmethod
    def read(
        cls, section: Mapping[str, Any], catalog: Catalog | None = None, *, base: Path = Path()
    ) -> Cluster:
        """Read the job file's section, which lies in ``base``; errors name the field, the value and what is
        allowed.

        >>> Cluster.read({"node": "dgx-h100", "nodes": 2}).world_size
        16
        """
        catalog = catalog or Catalog.load()
        cluster_spec = schema.read(ClusterSpec, section, "cluster")
        check_numbers("cluster", zero=True, price=cluster_spec.price, restart_time=cluster_spec.restart_time)
        check_numbers(
            "cluster",
            **{
                name: getattr(cluster_spec, name)
                for name in ("storage_bandwidth", "node_mtbf", "power_limit")
            },
        )
        specs = _group_specs(cluster_spec)
        groups = tuple(_group(where, spec, catalog) for where, spec in specs.items())
        several = sum(group.nodes for group in groups) > 1
        paths = list(specs) if len(groups) > 1 else ["cluster"]
        resolved = list(zip(paths, specs.values(), groups, strict=True))
        cluster = cls(
            groups=groups,
            price_per_device_hour=cluster_spec.price,
            servers=_with_price(cluster_spec.servers, catalog),
            **{name: getattr(cluster_spec, name) for name in _OF_MACHINES},
            assumptions=tuple(note for entry in resolved for note in _notes(*entry, several)),
            specs=tuple(_canonical(spec, group) for _, spec, group in resolved),
            **_host(cluster_spec.host, groups, catalog, base),
            machines=cluster_spec.machines,
        )
        if cluster.machines is not None and not 1 <= cluster.machines <= cluster.nodes:
            raise invalid("cluster.machines", cluster.machines, f"from 1 to the nodes, {cluster.nodes}")
        price, source = catalog.price_per_hour(cluster), catalog.price_source(cluster)
        return dataclasses.replace(cluster, price_per_hour=price, price_source=source)

    def to_dict(self) -> dict[str, Any]:
        """The section in canonical form, for JSON: reading it again gives the same cluster."""
        groups = [_without_empty(dataclasses.asdict(spec)) for spec in self.specs]
        section: dict[str, Any] = groups[0] if len(groups) == 1 else {"groups": groups}
        if self.servers is not None:
            section["servers"] = _without_empty(dataclasses.asdict(self.servers))
        beside = {name: getattr(self, name) for name in (*_OF_MACHINES, "host", "machines")}
        if self.issuer is not None and self.issuer.measured:
            beside["host"] = self.issuer.to_dict()
        beside["price"] = self.price_per_device_hour
        return {**section, **_without_empty(beside)}

    def measured_on(self, provenance: Mapping[str, Any], catalog: Catalog | None = None) -> Cluster:
        """The cluster with the machine that a run was measured on, where only its provenance tells it; of the
        hosts of GPUs where their words name one of the catalogue."""
        host, machines = provenance.get("host"), provenance.get("machines")
        if self.host is not None or not isinstance(host, str):
            return self
        if not self.groups[0].device.is_cpu:
            issuer = (catalog or Catalog.load()).host_in(host)
            return self if issuer is None else dataclasses.replace(self, host=issuer.name, issuer=issuer)
        shared = isinstance(machines, int) and 1 <= machines < self.nodes
        return dataclasses.replace(self, host=host, machines=machines if shared else self.machines)

    @property
    def world_size(self) -> int:
        return sum(group.world_size for group in self.groups)

    @property
    def nodes(self) -> int:
        return sum(group.nodes for group in self.groups)

    @property
    def distinct_groups(self) -> tuple[Group, ...]:
        """The groups, each once of those that are alike but for their number of nodes."""
        distinct: list[Group] = []
        for group in self.groups:
            if not any(group.is_like(other) for other in distinct):
                distinct.append(group)
        return tuple(distinct)

    def alone(self, group: Group) -> Cluster:
        """Take one of the groups by itself, with the host of its own nodes unless the cluster's is told."""
        return dataclasses.replace(
            self, groups=(group,), issuer=group.issuer if self.host is None else self.issuer
        )

    def busy_cores(self, device: Device) -> int:
        """Cores that CPU workers want on a machine with such a device."""
        if self.machines is None:
            return (
                max(group.devices_per_node for group in self.groups if group.device == device) * device.cores
            )
        wanted = sum(group.world_size * group.device.cores for group in self.groups if group.device.is_cpu)
        return -(-wanted // self.machines)

    def workers_per_core(self, device: Device) -> float:
        """CPU workers that share each core of a machine; 1 where there are cores for all of them, or where
        ``host`` does not tell how many there are."""
        cores = host_cores(self.host) if device.is_cpu else None
        return 1.0 if cores is None else max(1.0, self.busy_cores(device) / cores)

    @property
    def device(self) -> Device:
        return self._group_with_same("device").device

    @property
    def devices_per_node(self) -> int:
        return self._group_with_same("devices_per_node").devices_per_node

    @property
    def node(self) -> Node | None:
        return self._group_with_same("node").node

    @property
    def intra_node(self) -> Link:
        return self._group_with_same("intra_node").intra_node

    @property
    def inter_node(self) -> Link:
        return self._group_with_same("inter_node").inter_node

    def _group_with_same(self, name: str) -> Group:
        if any(getattr(group, name) != getattr(self.groups[0], name) for group in self.groups):
            differ = f"the groups differ in {name}, and a single one is needed here"
            raise UnsupportedJob(f"cluster.groups: {differ}")
        return self.groups[0]


def host_cores(host: str | None) -> int | None:
    """The cores of a machine, where the words for it tell them.

    >>> host_cores("AMD EPYC, 2 cores"), host_cores("16-core Xeon"), host_cores("laptop")
    (2, 16, None)
    """
    match = re.search(r"(\d+)[ -]cores?\b", host or "")
    return int(match.group(1)) or None if match else None


def _host(given: str | Host | None, groups: Sequence[Group], catalog: Catalog, base: Path) -> dict[str, Any]:
    """The machine in words, and the host that it is: a profile, what a job kept of one, or a name; else that
    of the nodes. Where no GPU waits for it any words will do."""
    if isinstance(given, str) and (path := base / given).is_file():
        given = HostProfile.load(path).host()
    if isinstance(given, Host):
        return {"host": f"{given.cpu}, {given.cores} cores", "issuer": given}
    if given is not None and given.endswith(".json"):
        raise InputError(f"cluster.host: {given!r}: no such file; foretrain measure host -o FILE writes one")
    if all(group.device.is_cpu for group in groups):
        return {"host": given}
    if given is not None:
        return {"host": given, "issuer": catalog.host(given)}
    hosts = [group.issuer for group in groups if group.issuer is not None]
    return {"issuer": min(hosts, key=lambda host: host.speed, default=None)}


def _with_price(servers: ServerNodes | None, catalog: Catalog) -> ServerNodes | None:
    """Server nodes at the catalogue's price of their cores, where the job gives none."""
    if servers is None or servers.price is not None or servers.cores is None:
        return servers
    core = catalog.price("cpu")
    return servers if core is None else dataclasses.replace(servers, price=core.per_hour * servers.cores)


def _group_specs(cluster_spec: ClusterSpec) -> dict[str, GroupSpec]:
    """The groups by the path of their fields; what stands beside ``groups`` holds where a group has none."""
    if not cluster_spec.groups:
        return {"cluster": cluster_spec}
    for name in _BY_GROUP:
        if getattr(cluster_spec, name) is not None:
            raise InputError(f"cluster.{name}: not allowed beside groups; give it in each group")
    return {f"cluster.groups[{i}]": _fill(group, cluster_spec) for i, group in enumerate(cluster_spec.groups)}


def _fill(group: GroupSpec, cluster_spec: ClusterSpec) -> GroupSpec:
    shared = ("devices_per_node", "domain", "intra_node", "inter_node")
    return dataclasses.replace(
        group, **{name: getattr(cluster_spec, name) for name in shared if getattr(group, name) is None}
    )


_MOST_DEVICES = 10**7
"""Of a group: ten times and more beyond any."""


def _group(where: str, spec: GroupSpec, catalog: Catalog) -> Group:
    node = None if spec.node is None else catalog.node(spec.node, f"{where}.node")
    device = _device(where, spec, node, catalog)
    per_node = _devices_per_node(f"{where}.devices_per_node", spec.devices_per_node, node)
    if node is None and spec.intra_node is None:
        check_switch(f"{where}.devices_per_node", device, per_node, catalog)
    intra, inter = (
        (node.intra_node, node.inter_node) if node else (LinkSpec(), usual_network(device, per_node))
    )
    nodes = _count(f"{where}.nodes", spec.nodes)
    if nodes * per_node > _MOST_DEVICES:
        raise invalid(f"{where}.nodes", nodes, f"at most {_MOST_DEVICES:,} devices in all")
    inside = fill_link(f"{where}.intra_node", "node", spec.intra_node, intra, device, catalog)
    return Group(
        device=device,
        devices_per_node=per_node,
        nodes=nodes,
        node=node,
        intra_node=inside,
        inter_node=fill_link(f"{where}.inter_node", "network", spec.inter_node, inter, device, catalog),
        domain=domain_of(
            f"{where}.domain", spec.domain, node or _rack(spec, device, catalog), inside, per_node, nodes
        ),
        issuer=None if device.is_cpu else _issuer(node, device, catalog),
    )


def _issuer(node: Node | None, device: Device, catalog: Catalog) -> Host | None:
    """The CPU of a node; where none is named, what is usual beside devices that are sold in nodes."""
    if node is None and not catalog.comes_in_nodes(device):
        return None
    return catalog.host_of(node.cpu if node is not None else None, device.year)


def _rack(spec: GroupSpec, device: Device, catalog: Catalog) -> Node | None:
    """The node of a device that is sold in nodes which NVLink joins, and in no others; where a job says
    nothing else of several nodes."""
    per_node = spec.devices_per_node or 1
    if (spec.nodes or 1) == 1 or spec.intra_node is not None or device.link != "nvswitch":
        return None
    racks = catalog.racks_with(device)
    return racks[0] if racks and all(node.devices == per_node for node in racks) else None


def _device(where: str, spec: GroupSpec, node: Node | None, catalog: Catalog) -> Device:
    name = node.device if node and spec.device is None else spec.device
    if name is None:
        raise InputError(f"{where}.device: missing; name a device or a node of the catalogue")
    device = catalog.device(name, f"{where}.device")
    if node and device.name not in (node.device, *node.variants):
        fitting = " or ".join((node.device, *node.variants))
        raise invalid(f"{where}.device", device.name, f"what node {node.name!r} has: {fitting}")
    return _with_cores(f"{where}.cores_per_device", device, spec.cores_per_device)


def _with_cores(where: str, device: Device, cores: int | None) -> Device:
    if device.is_cpu and cores is None:
        raise InputError(f"{where}: missing; device {device.name!r} needs a whole number of at least 1")
    if cores is not None and not device.is_cpu:
        raise InputError(f"{where}: {cores} is not allowed, because {device.name!r} is not a CPU device")
    return dataclasses.replace(device, cores=_count(where, cores)) if cores is not None else device


def _devices_per_node(where: str, count: int | None, node: Node | None) -> int:
    if node is None or count is None:
        return node.devices if node else _count(where, count)
    if count > node.devices:
        raise invalid(where, count, f"at most {node.devices}, what node {node.name!r} has")
    return _count(where, count)


def _count(where: str, count: int | None) -> int:
    if count is not None and count < 1:
        raise invalid(where, count, "a whole number of at least 1")
    return count or 1


def _notes(where: str, spec: GroupSpec, group: Group, several_nodes: bool) -> list[str]:
    notes = []
    intra, inter = group.intra_node, group.inter_node
    if group.devices_per_node > 1 and group.node is None and spec.intra_node is None:
        rate = format_count(intra.bandwidth_bytes_per_s, "B/s")
        notes.append(
            f"{where}.intra_node is not given: {intra.kind} at {rate} per device and direction is assumed"
        )
    if group.devices_per_node > 1 and intra.kind == "pcie" and not group.device.peer_access:
        notes.append(f"{group.device.name} has no peer access over PCIe: messages pass host memory")
    if spec.domain is None and group.domain > group.devices_per_node:
        racks = group.domain < group.world_size
        each = f"each {group.domain}" if racks else f"all {group.domain}"
        if group.node is None or (racks and group.domain != group.node.domain):
            notes.append(f"{where}.domain is not given: NVLink is taken to join {each} devices")
    own = group.device.link_rate(intra.kind)
    if own is not None and intra.bandwidth_bytes_per_s > 1.01 * own:
        rate, limit = format_count(intra.bandwidth_bytes_per_s, "B/s"), format_count(own, "B/s")
        notes.append(
            f"{where}.intra_node: {rate} is read as per direction, where the device's own link has {limit}"
        )
    if several_nodes and group.node is None and (spec.inter_node is None or spec.inter_node.kind is None):
        rate = format_count(inter.bandwidth_bytes_per_s * 8, "b/s")
        what = "" if spec.inter_node is None else " kind"
        notes.append(f"{where}.inter_node{what} is not given: {rate} {inter.kind} per node is assumed")
    return notes


def _canonical(spec: GroupSpec, group: Group) -> GroupSpec:
    """The catalogue's names and explicit counts; links only as far as the job gave them."""
    return GroupSpec(
        device=group.device.name,
        devices_per_node=group.devices_per_node,
        nodes=group.nodes,
        node=group.node.name if group.node else None,
        cores_per_device=spec.cores_per_device,
        domain=spec.domain,
        intra_node=_with_kind(spec.intra_node, group.intra_node),
        inter_node=_with_kind(spec.inter_node, group.inter_node),
    )


def _with_kind(spec: LinkSpec | None, link: Link) -> LinkSpec | None:
    return dataclasses.replace(spec, kind=link.kind) if spec and spec.kind else spec


def _without_empty(table: dict[str, Any]) -> dict[str, Any]:
    filled = {key: value for key, value in table.items() if value is not None}
    for rate in filled.keys() & {"bandwidth", "storage_bandwidth"}:
        if 0 < filled[rate] < LEAST_BARE_RATE:
            filled[rate] = f"{filled[rate]!r} B/s"
    return {key: _without_empty(value) if isinstance(value, dict) else value for key, value in filled.items()}
