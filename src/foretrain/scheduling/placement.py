"""Chooses the nodes that a gang of GPUs is taken from; each way is a class, looked up by name."""

from __future__ import annotations

import heapq
import random
from abc import ABC, abstractmethod
from collections import Counter
from typing import ClassVar

from foretrain.errors import unknown
from foretrain.scheduling.machines import Machines, Pool, bits

Counts = list[tuple[int, int]]
"""Pairs of a node and how many of its GPUs."""


class Placement(ABC):
    """Chooses GPUs for a gang that fits into a pool."""

    name: ClassVar[str]

    def __init__(self, seed: int = 0) -> None:
        self.seed = seed

    @abstractmethod
    def choose(self, machines: Machines, pool: Pool, gpus: int) -> Counts:
        """GPUs per node; together ``gpus``, which the pool has free."""


class Packed(Placement):
    """As few nodes as possible; one node with the fewest free GPUs that suffice."""

    name = "packed"

    def choose(self, machines: Machines, pool: Pool, gpus: int) -> Counts:
        for nodes in pool.by_free[gpus:]:
            if nodes:
                return [((nodes & -nodes).bit_length() - 1, gpus)]
        return pack(pool, gpus)


class SpreadOut(Placement):
    """As many nodes as possible, the emptiest ones first."""

    name = "spread"

    def choose(self, machines: Machines, pool: Pool, gpus: int) -> Counts:
        emptiest: list[tuple[int, int]] = []
        for free in range(len(pool.by_free) - 1, 0, -1):
            emptiest += [(-free, node) for node in bits(pool.by_free[free])]
            if len(emptiest) >= gpus:
                break
        heapq.heapify(emptiest)
        counts: dict[int, int] = {}
        for _ in range(gpus):
            free, node = emptiest[0]
            counts[node] = counts.get(node, 0) + 1
            heapq.heapreplace(emptiest, (free + 1, node))
        return sorted(counts.items())


class Random(Placement):
    """Free GPUs drawn at random, each as likely as any other."""

    name = "random"

    def __init__(self, seed: int = 0) -> None:
        super().__init__(seed)
        self._draw = random.Random(seed)

    def choose(self, machines: Machines, pool: Pool, gpus: int) -> Counts:
        places = [
            node
            for free in range(1, len(pool.by_free))
            for node in bits(pool.by_free[free])
            for _ in range(free)
        ]
        return sorted(Counter(self._draw.sample(places, gpus)).items())


class TopologyAware(Placement):
    """One node, else one rack with the fewest free GPUs that suffice, else the racks with most."""

    name = "topology"

    def choose(self, machines: Machines, pool: Pool, gpus: int) -> Counts:
        if any(pool.by_free[gpus:]):
            return pack(pool, gpus)
        fitting = [(free, rack) for rack, free in pool.rack_free.items() if free >= gpus]
        if fitting:
            return pack(pool, gpus, pool.rack_nodes[min(fitting)[1]])
        counts: Counts = []
        for rack, free in sorted(pool.rack_free.items(), key=lambda entry: (-entry[1], entry[0])):
            part = min(free, gpus)
            if part:
                counts += pack(pool, part, pool.rack_nodes[rack])
                gpus -= part
        return counts


def pack(pool: Pool, gpus: int, among: int = -1) -> Counts:
    """The fullest node that suffices; else the emptiest nodes, and the fullest that suffices for the rest."""
    counts: Counts = []
    by_free, most = pool.by_free, len(pool.by_free) - 1
    left = list(by_free) if among == -1 else [nodes & among for nodes in by_free]
    while True:
        for free in range(gpus, most + 1):
            if nodes := left[free]:
                counts.append((_first(nodes), gpus))
                return counts
        for free in range(min(most, gpus - 1), 0, -1):
            if nodes := left[free]:
                break
        counts.append((_first(nodes), free))
        left[free] = nodes & (nodes - 1)
        gpus -= free


def _first(nodes: int) -> int:
    return (nodes & -nodes).bit_length() - 1


PLACEMENTS: dict[str, type[Placement]] = {
    each.name: each for each in (Packed, SpreadOut, Random, TopologyAware)
}


def placement(name: str, seed: int = 0) -> Placement:
    """A way to place by its name."""
    if name not in PLACEMENTS:
        raise unknown("placement", name, PLACEMENTS)
    return PLACEMENTS[name](seed)
