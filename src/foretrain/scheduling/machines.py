"""Keeps the free and held GPUs of a cluster, none of which is ever handed out twice."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from foretrain.cluster import Catalog
from foretrain.errors import ForetrainError, InputError

FULL = 1000
"""Shares of a GPU are counted in thousandths."""
MIXED = -1
"""In place of a pool: GPUs of several."""


class DoubleAllocation(ForetrainError):
    """GPUs were asked for that are not free."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """A node as the simulator sees it."""

    device: str
    gpus: int
    rack: int = 0
    price_per_hour: float | None = None
    partition: str = ""
    """The part of the cluster that it belongs to, by its name."""
    mtbf_s: float | None = None
    """Mean time between its failures; None for that of all nodes, which the failure model says."""
    spot: bool = False
    """Whether it may be taken back."""


def memory_of(machines: Sequence[Machine]) -> dict[str, float]:
    """Bytes of one GPU of every kind that the catalogue knows."""
    catalog, found = Catalog.load(), {}
    for device in {machine.device for machine in machines}:
        with contextlib.suppress(InputError):
            found[device] = float(catalog.device(device).memory_bytes)
    return found


def device_named(name: str, devices: Sequence[str]) -> str | None:
    """The one of a cluster's devices that a name means; None where there is none, or several.

    >>> device_named("a100", ["a100-sxm-80gb", "v100"])
    'a100-sxm-80gb'
    >>> device_named("nvidia-h100-80gb-hbm3", ["h100", "v100"])
    'h100'
    """
    if name in devices:
        return name
    alike = [each for each in devices if each.startswith(f"{name}-") or name.endswith(f"-{each}")]
    if not alike and (meant := _as_sold(name)) is not None:
        alike = [each for each in devices if _as_sold(each) == meant]
    return alike[0] if len(alike) == 1 else None


def _as_sold(name: str) -> str | None:
    """The catalogue's name of a device, or slice of one, that a driver calls so; None for what it has not."""
    whole, _, piece = re.sub("-shared$", "", name.lower()).replace("-mig-", "@").partition("@")
    try:
        device = Catalog.load().device(whole).name
    except InputError:
        return None
    return f"{device}@{piece}" if piece else device


class Allocation(NamedTuple):
    """GPUs that a job holds: of each node a set of GPU numbers, as bits; ``share`` in thousandths of each."""

    pool: int
    parts: tuple[tuple[int, int], ...]
    gpus: int
    share: int = FULL

    @property
    def shape(self) -> tuple[int, ...]:
        """GPUs per node, most first."""
        if len(self.parts) == 1:
            return (self.parts[0][1].bit_count(),)
        return tuple(sorted((mask.bit_count() for _, mask in self.parts), reverse=True))

    def places(self) -> Iterator[tuple[int, int]]:
        """Every (node, GPU) of it."""
        for node, mask in self.parts:
            yield from ((node, gpu) for gpu in bits(mask))


def packed(gpus: int, per_node: int) -> tuple[int, ...]:
    """The shape of so many GPUs on as few nodes as possible.

    >>> packed(10, 4)
    (4, 4, 2)
    """
    full, rest = divmod(gpus, per_node)
    return (per_node,) * full + ((rest,) if rest else ())


def bits(mask: int) -> Iterator[int]:
    """The numbers of the set bits, lowest first.

    >>> list(bits(0b1011))
    [0, 1, 3]
    """
    while mask:
        low = mask & -mask
        yield low.bit_length() - 1
        mask ^= low


class Pool:
    """All nodes of a partition with one kind of device; a gang spans two pools only where that is asked for.

    ``by_free[n]`` is the set of nodes, as bits, with n free GPUs, so that placements find a node without a
    search.
    """

    def __init__(self, number: int, device: str, nodes: Sequence[int], machines: Sequence[Machine]) -> None:
        self.number = number
        self.device = device
        self.partition = machines[nodes[0]].partition
        self.nodes = tuple(nodes)
        self.size = sum(machines[node].gpus for node in nodes)
        self.free = 0
        self.by_free = [0] * (max(machines[node].gpus for node in nodes) + 1)
        self.rack_free: dict[int, int] = {machines[node].rack: 0 for node in nodes}
        self.rack_nodes: dict[int, int] = dict.fromkeys(self.rack_free, 0)
        for node in nodes:
            self.rack_nodes[machines[node].rack] |= 1 << node

    def takes(self, device: str | None, partition: str) -> bool:
        """Whether jobs that ask for a device and a partition may run here."""
        return device in (None, self.device) and (partition == self.partition or not self.partition)


class Machines:
    """Free and held GPUs of every node."""

    def __init__(self, machines: Sequence[Machine]) -> None:
        self.machines = tuple(machines)
        nodes: dict[tuple[str, str], list[int]] = {}
        for node, machine in enumerate(machines):
            nodes.setdefault((machine.device, machine.partition), []).append(node)
        places = {key: number for number, key in enumerate(nodes)}
        self.pools = [Pool(places[key], key[0], of, machines) for key, of in nodes.items()]
        self._pool_at = [self.pools[places[machine.device, machine.partition]] for machine in machines]
        self._bit = [1 << node for node in range(len(machines))]
        self._rack = [machine.rack for machine in machines]
        self._full = [(1 << machine.gpus) - 1 for machine in machines]
        self._free = [0] * len(machines)
        self._down = [True] * len(machines)
        self._shared: dict[tuple[int, int], int] = {}
        self._picked: dict[tuple[int, int], Allocation] = {}
        """Whole GPUs of one node, by node and GPUs: most allocations are one of these, again and again."""
        self.size = sum(machine.gpus for machine in machines)
        for node in range(len(machines)):
            self.bring_up(node)

    @property
    def free(self) -> int:
        return sum(pool.free for pool in self.pools)

    @property
    def up(self) -> int:
        """GPUs of nodes that work."""
        return sum(machine.gpus for node, machine in enumerate(self.machines) if not self._down[node])

    def gpus_by_device(self, allocation: Allocation) -> dict[str, int]:
        """How many GPUs of each kind are held."""
        found: dict[str, int] = {}
        for node, mask in allocation.parts:
            device = self.machines[node].device
            found[device] = found.get(device, 0) + mask.bit_count()
        return found

    def pool_of(self, node: int) -> Pool:
        return self._pool_at[node]

    def is_up(self, node: int) -> bool:
        return not self._down[node]

    # Whole GPUs

    def pick(self, pool: int, counts: Sequence[tuple[int, int]]) -> Allocation:
        """So many GPUs of each node, the lowest numbers first; they are not taken yet."""
        if len(counts) == 1:
            node, count = counts[0]
            part = (node, _lowest(self._free[node], count))
            known = self._picked.get(part)
            if known is None:
                known = self._picked[part] = Allocation(pool, (part,), count)
            return known
        parts = tuple((node, _lowest(self._free[node], count)) for node, count in counts)
        return Allocation(pool, parts, sum(count for _, count in counts))

    def take(self, allocation: Allocation) -> None:
        """Hold GPUs; an error names the first one that is not free."""
        if allocation.share < FULL:
            return self._take_share(allocation)
        parts = allocation.parts
        if len(parts) == 1:
            node, mask = parts[0]
            free = self._free[node]
            if free & mask == mask:
                return self._set_free(node, free ^ mask)
        for node, mask in parts:
            held = mask & ~self._free[node]
            if held:
                raise DoubleAllocation(f"GPU {next(bits(held))} of node {node} is not free")
        for node, mask in parts:
            self._set_free(node, self._free[node] ^ mask)
        return None

    def has(self, allocation: Allocation) -> bool:
        """Whether GPUs could be held now."""
        if allocation.share < FULL:
            ((node, mask),) = allocation.parts
            left = self._shared.get((node, next(bits(mask))))
            if left is not None:
                return left >= allocation.share
        return not any(mask & ~self._free[node] for node, mask in allocation.parts)

    def give_back(self, allocation: Allocation) -> None:
        """Free GPUs again; those of a node that is down stay away until it is up."""
        if allocation.share < FULL:
            return self._give_share(allocation)
        for node, mask in allocation.parts:
            if not self._down[node]:
                self._set_free(node, self._free[node] | mask)
        return None

    def _set_free(self, node: int, mask: int) -> None:
        pool, free = self._pool_at[node], self._free
        before, after = free[node].bit_count(), mask.bit_count()
        bit, by_free, more = self._bit[node], pool.by_free, after - before
        by_free[before] ^= bit
        by_free[after] ^= bit
        pool.free += more
        pool.rack_free[self._rack[node]] += more
        free[node] = mask

    # Nodes that fail and come back; whoever held their GPUs gives them back before, or while they are down

    def take_down(self, node: int) -> None:
        self._set_free(node, 0)
        self.pool_of(node).by_free[0] &= ~self._bit[node]
        self._down[node] = True
        for place in [place for place in self._shared if place[0] == node]:
            del self._shared[place]

    def bring_up(self, node: int) -> None:
        self._down[node] = False
        self.pool_of(node).by_free[0] |= self._bit[node]
        self._set_free(node, self._full[node])

    # Shares of a GPU

    def sharable(self, pool: int, share: int) -> tuple[int, int] | None:
        """The GPU in use whose rest fits a share most closely; None when a free one is needed."""
        fitting = [
            (rest, place)
            for place, rest in self._shared.items()
            if rest >= share and self._pool_at[place[0]].number == pool
        ]
        return min(fitting)[1] if fitting else None

    def _take_share(self, allocation: Allocation) -> None:
        ((node, mask),) = allocation.parts
        place = (node, next(bits(mask)))
        if place not in self._shared:
            self.take(Allocation(allocation.pool, allocation.parts, 1))
            self._shared[place] = FULL
        if self._shared[place] < allocation.share:
            left = f"{self._shared[place]} thousandths left, not {allocation.share}"
            raise DoubleAllocation(f"GPU {place[1]} of node {node} has {left}")
        self._shared[place] -= allocation.share

    def _give_share(self, allocation: Allocation) -> None:
        ((node, mask),) = allocation.parts
        place = (node, next(bits(mask)))
        if place in self._shared:
            self._shared[place] += allocation.share
            if self._shared[place] == FULL:
                del self._shared[place]
                self.give_back(Allocation(allocation.pool, allocation.parts, 1))


def _lowest(mask: int, count: int) -> int:
    """The lowest ``count`` set bits."""
    if mask.bit_count() == count:
        return mask
    rest = mask
    for _ in range(count):
        rest &= rest - 1
    return mask ^ rest
