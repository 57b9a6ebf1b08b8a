"""Answers what more GPUs would change: the same trace on the cluster as it is and with them."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from foretrain.cluster import Catalog
from foretrain.errors import InputError, invalid
from foretrain.scheduling.clusters import MOST_GPUS, in_racks, price_of, read_machines
from foretrain.scheduling.machines import Machine
from foretrain.scheduling.metrics import Metrics

_USUAL_NODE = 8
_COMPARED = (
    *("average_jct_s", "median_jct_s", "p95_jct_s", "average_queueing_s", "makespan_s", "utilization"),
    *("missed_deadlines", "cost"),
)


def bought(text: str, machines: Sequence[Machine], *, rack: int = 16) -> list[Machine]:
    """The nodes that are bought, so many to a rack, in racks that the cluster does not have yet."""
    free = max((machine.rack for machine in machines), default=-1) + 1
    return in_racks(nodes_in_words(text, machines), rack, first=free)


def nodes_in_words(text: str, machines: Sequence[Machine]) -> list[Machine]:
    """Nodes in words: ``8xh100`` (GPUs x device, in nodes as large as the cluster has of it, else of 8),
    or as in a cluster, ``2x8xh100``.

    >>> [machine.gpus for machine in nodes_in_words("12xv100", [Machine(device="v100", gpus=8)])]
    [8, 4]
    """
    match = re.fullmatch(r"(\d+)x([a-z][\w.-]*)", text.strip())
    if match is None:
        try:
            return read_machines(text)
        except InputError as error:
            raise InputError(str(error).replace("cluster:", "buy:", 1)) from error
    count, device = int(match[1]), match[2]
    if not 0 < count <= MOST_GPUS:
        raise invalid("buy", text, f"at least one GPU and at most {MOST_GPUS:,}")
    alike = [
        machine for machine in machines if machine.device == device or machine.device.startswith(device + "-")
    ]
    owned = [machine for machine in alike if not machine.spot]
    name = alike[0].device if alike else device
    partition = alike[0].partition if alike else machines[0].partition
    mtbf_s = alike[0].mtbf_s if alike else None
    if not alike:
        name = Catalog.load().device(device, "buy").name
    size = max((machine.gpus for machine in alike), default=_USUAL_NODE)
    nodes = [size] * (count // size) + ([count % size] if count % size else [])
    asked: list[Machine] = []
    for gpus in nodes:
        prices = [machine.price_per_hour for machine in owned if machine.gpus == gpus]
        price = next(iter(prices), None) if owned else price_of(name, gpus)
        asked.append(
            Machine(device=name, gpus=gpus, price_per_hour=price, partition=partition, mtbf_s=mtbf_s)
        )
    return asked


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """A policy before and after."""

    policy: str
    before: Metrics
    after: Metrics

    def to_dict(self) -> dict[str, Any]:
        return {
            "policy": self.policy,
            **{
                name: {"before": getattr(self.before, name), "after": getattr(self.after, name)}
                for name in _COMPARED
                if getattr(self.before, name) is not None and getattr(self.after, name) is not None
            },
        }

    def part(self, name: str) -> float:
        """By how much a figure changes, over what it was."""
        before = float(getattr(self.before, name))
        return float(getattr(self.after, name)) / before - 1 if before else 0.0
