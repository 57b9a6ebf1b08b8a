"""Reads the machines of a cluster from a TOML file, a list of nodes, or text such as ``64x8xv100``."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

from foretrain.cluster import Catalog, Cluster
from foretrain.errors import InputError, invalid
from foretrain.files import read_tables
from foretrain.scheduling.machines import Machine
from foretrain.scheduling.sharing.mig import cut
from foretrain.scheduling.traces.rows import dictionaries, lines_of
from foretrain.units import counted, parse_seconds

_ALLOWED = (
    'a TOML file with [cluster], a CSV file of nodes (gpu, model), "64x8xv100" (nodes x GPUs x device) '
    'or "v100=4,p100=4" (GPUs by device), joined by commas; "debug:2x8xv100" is a partition, '
    '"2x8xh100@3g.40gb+4g.40gb" are slices'
)

MOST_GPUS = 10_000_000
"""That a part of a cluster in words may have: more do not go into memory."""


def read_machines(text: str, *, rack: int = 16, devices: Collection[str] = ()) -> list[Machine]:
    """The nodes of a cluster; ``rack`` of them stand together.

    Devices in text are of the catalogue, or ``devices``, which a table of throughputs names; those of a list
    of nodes are whatever its publisher calls them.

    >>> [machine.gpus for machine in read_machines("2x8xv100,k80=2")]
    [8, 8, 1, 1]
    """
    path = Path(text)
    if path.suffix in (".toml", ".json"):
        return of_cluster(_cluster_of(path), rack=rack)
    if path.suffix in (".csv", ".gz"):
        return in_racks(_from_list(path), rack)
    machines: list[Machine] = []
    for part in text.split(","):
        machines += _from_words(part.strip(), text, devices)
    return in_racks(machines, rack)


def _from_words(part: str, text: str, devices: Collection[str]) -> list[Machine]:
    partition, colon, counted = part.rpartition(":")
    if colon and not re.fullmatch(r"[\w.-]+", partition):
        raise invalid("cluster", text, _ALLOWED)
    match = re.fullmatch(r"(\d+)x(\d+)x([\w.-]+)(?:@([\w.+]+))?", counted)
    slices = match[4] if match else None
    if match:
        nodes, gpus, device = int(match[1]), int(match[2]), match[3]
    else:
        match = re.fullmatch(r"([\w.-]+)=(\d+)", counted)
        if match is None:
            raise invalid("cluster", text, _ALLOWED)
        nodes, gpus, device = int(match[2]), 1, match[1]
    if not nodes or not gpus:
        raise invalid("cluster", text, "at least one node with at least one GPU")
    if nodes * gpus > MOST_GPUS:
        raise invalid("cluster", text, f"at most {MOST_GPUS:,} GPUs")
    if device not in devices:
        Catalog.load().device(device, "cluster")
    price = price_of(device, gpus)
    if slices is not None:
        named = Catalog.load().device(device, "cluster").name
        machine = Machine(device=named, gpus=gpus, price_per_hour=price, partition=partition)
        return cut(machine, slices.split("+")) * nodes
    return [Machine(device=device, gpus=gpus, price_per_hour=price, partition=partition)] * nodes


def hardware_of(text: str, machines: Sequence[Machine]) -> str:
    """What a cluster is made of, in words: a GPU that is cut counts once, and so does its node.

    >>> hardware_of("1x8xh100@3g.40gb+4g.40gb", read_machines("1x8xh100@3g.40gb+4g.40gb"))
    '16 slices of 8 GPUs of 1 node'
    """
    nodes, whole, slices, cut_up = len(machines), sum(machine.gpus for machine in machines), 0, 0
    for part in text.split(","):
        match = re.search(r"(\d+)x(\d+)x[\w.-]+@([\w.+]+)$", part.strip())
        if match is not None:
            names, gpus = match[3].split("+"), int(match[1]) * int(match[2])
            nodes -= int(match[1]) * (len({*names}) - 1)
            slices, cut_up = slices + gpus * len(names), cut_up + gpus
    whole -= slices
    parts = [f"{counted(slices, 'slice')} of {counted(cut_up, 'GPU')}"] if slices else []
    parts += [counted(whole, "whole GPU" if slices else "GPU")] if whole else []
    return f"{' and '.join(parts)} of {counted(nodes, 'node')}"


def price_of(device: str, gpus: int) -> float | None:
    """Dollars per hour of a node by the catalogue; None for a device or a price that it does not know."""
    try:
        return Cluster.read({"device": device, "devices_per_node": gpus}).price_per_hour
    except InputError:
        return None


def _from_list(path: Path) -> list[Machine]:
    """A CSV file with a line for each node, as Alibaba's: ``gpu``, how many, and ``model``, of which kind;
    ``partition`` and ``mtbf``, the mean time between its failures, where there are such columns."""
    machines = []
    for number, row in dictionaries(lines_of(path)):
        try:
            gpus, device = int((row or {})["gpu"]), (row or {})["model"].lower()
            partition, mtbf = (row or {}).get("partition", ""), (row or {}).get("mtbf", "").strip()
        except (KeyError, ValueError) as error:
            raise InputError(
                f"{path}: line {number}: not a node; needed are gpu (a number) and model"
            ) from error
        if gpus > 0:
            machine = Machine(device=device, gpus=gpus, price_per_hour=price_of(device, gpus))
            mtbf_s = _mtbf(mtbf, f"{path}: line {number}: mtbf")
            machines.append(dataclasses.replace(machine, partition=partition, mtbf_s=mtbf_s))
    if not machines:
        raise InputError(f"{path}: lists no nodes with GPUs")
    return machines


def _mtbf(text: str, where: str) -> float | None:
    """Seconds, from a number of them or a time such as "30d"; None where nothing is said."""
    if not text:
        return None
    try:
        seconds = float(text)
    except ValueError:
        seconds = parse_seconds(text, where)
    if not 0 < seconds < math.inf:
        raise invalid(where, text, "a time above zero")
    return seconds


def sections_of(text: str) -> dict[str, dict[str, Any]]:
    """What a job file would say of the nodes of each kind of device, but their number: nodes by name, links.

    Empty for a cluster in words.
    """
    path = Path(text)
    if path.suffix not in (".toml", ".json"):
        return {}
    section = _cluster_of(path).to_dict()
    return {
        group["device"]: {key: value for key, value in group.items() if key not in ("nodes", "price")}
        for group in section.get("groups", [section])
    }


def _cluster_of(path: Path) -> Cluster:
    document = read_tables(path)
    try:
        if not isinstance(document, dict):
            raise invalid("cluster", document, "a table of keys and values")
        return Cluster.read(document.get("cluster", document), Catalog.load())
    except InputError as error:
        raise InputError(f"{path}: {error}") from error


def of_cluster(cluster: Cluster, *, rack: int = 16) -> list[Machine]:
    """The nodes of a job file's cluster; its price is divided over the GPUs."""
    each = None if cluster.price_per_hour is None else cluster.price_per_hour / cluster.world_size
    machines = [
        Machine(
            device=group.device.name,
            gpus=group.devices_per_node,
            price_per_hour=None if each is None else each * group.devices_per_node,
            mtbf_s=cluster.node_mtbf,
        )
        for group in cluster.groups
        for _ in range(group.nodes)
    ]
    return in_racks(machines, rack)


def in_racks(machines: Sequence[Machine], rack: int, *, first: int = 0) -> list[Machine]:
    """The same nodes, so many to a rack; racks are counted from the first on."""
    if rack < 1:
        raise invalid("rack", rack, "a whole number of at least 1")
    return [
        dataclasses.replace(machine, rack=first + place // rack) for place, machine in enumerate(machines)
    ]
