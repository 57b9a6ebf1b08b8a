"""Lists the clusters that a job may be planned for: kinds of devices or nodes, each in several numbers."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from foretrain.catalog import Catalog
from foretrain.cluster import Cluster
from foretrain.errors import ForetrainError, InputError, first_line, invalid
from foretrain.job import Job
from foretrain.options import USUAL_IN_NODE

_KEPT = ("storage_bandwidth", "node_mtbf", "restart_time", "host", "power_limit", "price")
"""Of the job's own cluster, what holds for others of the same device too."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """Says which clusters are looked at; the job's own where nothing is said."""

    kinds: tuple[str, ...] = ()
    """Devices or nodes of the catalogue."""
    most: int | None = None
    """Devices at most."""
    counts: tuple[int, ...] = ()
    """Numbers of devices, in the place of powers of two up to the most."""

    def __post_init__(self) -> None:
        for name, values in (("max_devices", (self.most,)), ("counts", self.counts)):
            for value in values:
                if value is not None and value < 1:
                    raise invalid(name, value, "a whole number of at least 1")

        if self.most is not None and self.counts:
            raise InputError(f"counts: {list(self.counts)} beside max_devices {self.most}; give one of them")

    @property
    def is_own(self) -> bool:
        return not (self.kinds or self.most or self.counts)


def clusters_of(job: Job, wanted: Wanted, catalog: Catalog) -> list[Cluster]:
    """The clusters, those of a kind from the smallest to the largest."""
    if wanted.is_own:
        return [job.cluster]
    if len(job.cluster.groups) > 1:
        raise InputError(
            "devices: the job's cluster has groups of several kinds, which are planned as they are"
        )
    clusters: list[Cluster] = []
    why: dict[int, str] = {}
    for section, in_node in _kinds(job, wanted.kinds, catalog):
        for count in _counts(job, wanted, in_node):
            if count > in_node and count % in_node:
                why[count] = f"{count} devices do not fill nodes of {in_node}"
                continue
            nodes = {"devices_per_node": min(count, in_node), "nodes": max(1, count // in_node)}
            try:
                clusters.append(Cluster.read({**section, **nodes}, catalog, base=job.workload.base))
            except ForetrainError as error:
                if wanted.counts:
                    raise
                why[count] = first_line(error)
    if not clusters:
        field, reasons = "counts" if wanted.counts else "max_devices", "; ".join(why.values())
        raise InputError(f"{field}: no cluster is left ({reasons or 'none was asked for'})")
    return list(dict.fromkeys(clusters))


def in_other_order(cluster: Cluster, catalog: Catalog) -> Cluster | None:
    """Turn the groups round, the last one first, as stages of a pipeline may lie on them; None where that is
    the same."""
    section = cluster.to_dict()
    if len(cluster.distinct_groups) == 1:
        return None
    turned = Cluster.read({**section, "groups": section["groups"][::-1]}, catalog)
    return None if turned.groups == cluster.groups else turned


def _kinds(job: Job, kinds: Sequence[str], catalog: Catalog) -> list[tuple[dict[str, Any], int]]:
    """The section of a cluster of each kind, without its size, and how many devices its nodes have."""
    own = job.cluster.to_dict()
    kept = {name: own[name] for name in _KEPT if name in own}
    if not kinds:
        rest = {name: value for name, value in own.items() if name not in ("devices_per_node", "nodes")}
        several = job.cluster.nodes > 1
        node = job.cluster.node
        return [
            (rest, node.devices if node else own["devices_per_node"] if several else _usual(job, catalog))
        ]
    sized_kinds = []
    for kind in kinds:
        if _is_node(kind, catalog):
            node = catalog.node(kind, "devices")
            sized_kinds.append(({"node": node.name, **_without_price(kept)}, node.devices))
            continue
        device = catalog.device(kind, "devices")
        if device.name == job.cluster.device.name:
            sized_kinds += _kinds(job, (), catalog)
            continue
        racks = catalog.racks_with(device)
        in_node = racks[0].devices if racks else USUAL_IN_NODE
        sized_kinds.append(({"device": device.name, **_without_price(kept)}, in_node))
    return sized_kinds


def _without_price(kept: dict[str, Any]) -> dict[str, Any]:
    """A price is of the job's own device, and so is its limit of power."""
    return {name: value for name, value in kept.items() if name not in ("price", "power_limit")}


def _is_node(name: str, catalog: Catalog) -> bool:
    try:
        catalog.node(name, "devices")
    except InputError:
        return False
    return True


def _usual(job: Job, catalog: Catalog) -> int:
    racks = catalog.racks_with(job.cluster.device)
    return racks[0].devices if racks else USUAL_IN_NODE


def _counts(job: Job, wanted: Wanted, in_node: int) -> list[int]:
    """List the numbers of devices: as they are given; else powers of two, the nodes of a kind, and the job's
    own number."""
    if wanted.counts:
        return sorted(dict.fromkeys(wanted.counts))
    own = job.cluster.world_size
    most = wanted.most or own
    powers = [2**i for i in range(most.bit_length()) if 2**i <= most]
    nodes = [in_node * 2**i for i in range(most.bit_length()) if in_node * 2**i <= most]
    return sorted({*powers, *nodes, *([own] if own <= most else [])})
